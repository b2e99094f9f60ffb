"""Lesson 15's set-ups: adapters that are written and merged, parts of a matrix, planted keys, a style's answers."""

import pytest
import torch

from minillm.adapters.peft import read_adapter
from minillm.course.lesson_15 import adapting
from minillm.course.lesson_15.style import ANSWER, Style, conversation
from minillm.request import RequestOptions

MODULES = ("model.layers.0.self_attn.k_proj", "model.layers.5.mlp.down_proj")
SHAPES = {MODULES[0]: (64, 256), MODULES[1]: (256, 768)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    factors = {
        name: (torch.randn(2, inputs, generator=generator), torch.randn(out, 2, generator=generator) / 2)
        for name, (out, inputs) in SHAPES.items()
    }
    return adapting.save(factors, tmp_path_factory.mktemp("adapters") / "two"), factors


@pytest.fixture(scope="module")
def llm(written):
    with adapting.engine({"two": written[0]}) as llm:
        yield llm


def test_factors_are_written_and_read_unscaled(llm, written):
    directory, factors = written
    found = read_adapter(directory, llm.model_config)
    assert found.rank == 2 and {*found.parts} == {*MODULES}
    for name, (down, up) in factors.items():
        read_down, read_up = found.parts[name].read()
        assert torch.equal(read_down, down) and torch.equal(read_up, up)
    assert torch.equal(adapting.product(directory, MODULES[0], llm), factors[MODULES[0]][1] @ factors[MODULES[0]][0])


def test_a_merged_engine_answers_as_the_adapter_does(llm, written):
    question = "What does the quirrel eat?"
    unmerged, plain = adapting.answer(llm, question, "two")[0], adapting.answer(llm, question)[0]
    with adapting.engine() as copy:
        assert adapting.answer(copy, question)[0] == plain
        adapting.merge(copy, written[0])
        copy.engine.scheduler.pool.forget()
        assert adapting.answer(copy, question)[0] == unmerged != plain


def test_loading_under_a_name_that_is_in_use_replaces_its_adapter(llm, written, tmp_path):
    question, nothing = (
        "What does the quirrel eat?",
        adapting.save({MODULES[0]: (torch.zeros(1, 256), torch.zeros(64, 1))}, tmp_path / "nothing"),
    )
    adapting.load(llm, "again", written[0])
    assert adapting.answer(llm, question, "again")[0] == adapting.answer(llm, question, "two")[0]
    adapting.load(llm, "again", nothing)
    assert adapting.answer(llm, question, "again")[0] == adapting.answer(llm, question)[0]


def test_products_are_added_to_weights_within_their_block_only():
    layers = {name: torch.nn.Linear(3, 2, bias=False) for name in "ab"}
    before = {name: each.weight.detach().clone() for name, each in layers.items()}
    with pytest.raises(ZeroDivisionError), adapting.added(layers, {name: torch.ones(2, 3) for name in layers}):
        assert all(torch.equal(each.weight, before[name] + 1) for name, each in layers.items())
        raise ZeroDivisionError
    assert all(torch.equal(each.weight, before[name]) for name, each in layers.items())
    with pytest.raises(KeyError), adapting.added(layers, {"a": torch.ones(2, 3)}):
        pass
    assert all(torch.equal(each.weight, before[name]) for name, each in layers.items())


def test_a_planted_key_ends_with_its_block(llm):
    options = RequestOptions(cache_salt="ann", adapter="two")
    own = options.cache_key(3)
    with pytest.raises(ZeroDivisionError), adapting.cache_key(lambda salt, name, load: (salt, name, load, "planted")):
        assert options.cache_key(3) == ("ann", "two", 3, "planted")
        raise ZeroDivisionError
    assert options.cache_key(3) == own


def test_answers_are_counted_by_how_they_begin_and_end(llm):
    class Told(Style):
        def __post_init__(self):
            self.asked = []

        def answers(self, adapter):
            return ["Ho! Yes. Bye.", "Ho! No.", "Yes. Bye.", "Ho!"]

    assert Told(llm, "Ho!", "Bye.").count(None) == (3, 1)


def test_a_question_is_answered_as_a_chat_is(llm):
    (done,) = llm.chat([conversation("Who are you?")], ANSWER)
    assert adapting.answer(llm, "Who are you?")[0] == done.text.strip()


def test_all_squares_are_kept_by_the_change_itself():
    change = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert adapting.kept([change, change], [change, change]) == 1
    assert adapting.kept([change], [torch.zeros_like(change)]) == 0
    down, up = adapting.low_rank(change, 1)
    squares = torch.linalg.svdvals(change).square()
    assert adapting.kept([change], [up @ down]) == pytest.approx(float(squares[0] / squares.sum()), abs=1e-5)
