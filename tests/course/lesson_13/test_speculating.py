"""Lesson 13's set-ups: a model with a cache to roll back, and what it and the engine do with drafts."""

import pytest

from minillm import LLM
from minillm.course.lesson_13 import speculating
from minillm.course.lesson_13.speculating import TargetModel


@pytest.fixture(scope="module")
def llm():
    with LLM(**speculating.SMALL) as made:
        yield made


def test_a_target_computes_the_engines_logits_in_any_pieces_and_after_a_rollback(llm):
    ids = llm.tokenizer.encode("Once upon a time there was")
    wanted = llm.generate(ids, speculating.greedy(3))[0].token_ids
    target = TargetModel(llm.engine.model, 32)
    target.run(ids[:4])
    target.run([5, 6, 7])
    target.length = 4
    assert target.run([*ids[4:], *wanted]).argmax(-1).tolist()[-4:-1] == list(wanted)
    assert target.length == len(ids) + 3


def test_a_cache_that_is_full_refuses_more(llm):
    with pytest.raises(AssertionError, match="9 tokens do not fit a cache of 8"):
        TargetModel(llm.engine.model, 8).run(list(range(9)))


@pytest.mark.parametrize("drafter", [speculating.lookup, speculating.nonsense])
def test_drafts_change_no_token_and_each_step_is_counted(drafter):
    plain = speculating.run(speculating.GUESTS, tokens=24)
    ran = speculating.run(speculating.GUESTS, speculating.drafting(drafter), tokens=24)
    assert ran.answer == plain.answer and ran.calls > 0 and plain.calls == 0
    assert plain.sizes == plain.gained == [1] * 23
    assert sum(ran.gained) == 23 and sum(ran.sizes) - len(ran.sizes) == ran.drafted
    assert sum(ran.gained) - len(ran.gained) == ran.right == (0 if drafter is speculating.nonsense else ran.right)
    assert (ran.h200_ms < plain.h200_ms) == (ran.right > 0)


def test_steps_between_those_of_the_record_take_as_long_as_the_next_larger_one():
    ms = speculating.recorded_ms()
    assert speculating.step_ms([1, 2, 4, 5, 8, 9, 17, 64]).tolist() == [ms[n] for n in (1, 4, 4, 8, 8, 16, 64, 64)]


def test_a_measured_step_is_as_much_longer_as_the_speed_up_leaves_of_the_steps_that_are_saved():
    """That is so for each run on its own, and the record counts the last one's drafts and steps."""
    rows = speculating.by_coin("host", 1)
    assert [(each.drafts, each.right) for each in rows] == [(7, 0.7), (7, 0.8)]
    for each, found in zip(rows, ((256 / 84, 0.2135, 0.3568), (256 / 61, 0.1557, 0.3568)), strict=True):
        fewer, with_drafts, without = found
        assert each.speedup == pytest.approx(without / with_drafts, abs=1e-3) and len(each.earlier) == 1
        assert each.longer == pytest.approx(fewer * with_drafts / without, abs=1e-3)
    assert len(speculating.by_coin("GPU", 8, drafts=3)) == 2 and not speculating.by_coin("GPU", 64)


def test_the_cheat_errs_at_every_fifth_position():
    cheat = speculating.Erring([10, 11, 12, 13, 14, 15, 16, 17], every=5)
    assert cheat([10, 11, 12], 4) == [13, 14, 16, 16] and cheat([0] * 6, 9) == [16, 17]
