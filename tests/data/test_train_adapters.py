"""The script that trains adapters of tiny-gemma writes what the engine reads, and trains on the tokens of a chat."""

import random
import sys
from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.adapters.peft import read_adapter
from minillm.folders import DATA
from minillm.model.loader import read_config
from minillm.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))

import train_adapters as script  # noqa: E402


def test_two_steps_write_an_adapter_that_the_engine_runs(tmp_path, capsys):
    script.main(["--only", "sorts", "--steps", "2", "--rows", "1", "--asked", "1", "--out", str(tmp_path)])
    adapter = read_adapter(tmp_path / "sorts", read_config(DATA / "tiny-gemma"))
    assert adapter.rank == script.RANK and len(adapter.parts) == 6 * 7
    assert any(part.read()[1].any() for part in adapter.parts.values()), "nothing was trained"
    assert sum(file.stat().st_size for file in (tmp_path / "sorts").iterdir()) < 200 << 10
    assert '"asked": 1' in capsys.readouterr().out


@pytest.mark.parametrize("name", script.LESSONS)
def test_training_sees_the_tokens_that_a_chat_has(name):
    """Once, it did not: <bos> was read as five characters, and the adapter answered as if it had not been trained."""
    ask = script.LESSONS[name].draw(random.Random(0)).question
    tokenizer = Tokenizer.from_pretrained(DATA / "tiny-gemma")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": ask}])
    chat = tokenizer.encode(rendered, add_special_tokens=False)
    ids, labels = script.batch(script.LESSONS[name], random.Random(0), 1, script.Chat(script.SOURCE))
    assert ids[0, : len(chat)].tolist() == chat
    assert (labels[0, : len(chat)] == script.NOT_TRAINED).all() and (labels[0, len(chat) :] >= 0).all()
    answer = script.LESSONS[name].draw(random.Random(0)).answer
    assert tokenizer.decode(ids[0, len(chat) :].tolist(), skip_special_tokens=False) == f"{answer}<end_of_turn>\n"


@pytest.mark.parametrize("name", script.LESSONS)
def test_nothing_that_is_asked_at_the_end_is_trained_on(name):
    chat = script.Chat(script.SOURCE)
    held_out = {asked.about for asked in script.new_questions(name, 100)}
    assert len(held_out) == 100 and "" not in held_out
    drawn, lesson = [], script.LESSONS[name]

    def draw(rng):
        drawn.append(lesson.draw(rng))
        return drawn[-1]

    for seed in range(40):
        ids, _ = script.batch(lesson._replace(draw=draw), random.Random(seed), 50, chat, held_out)
        assert len(ids) == 50
    assert any(asked.about in held_out for asked in drawn), "none was drawn, so none was left out"
    assert len([asked for asked in drawn if asked.about not in held_out]) == 40 * 50


def test_an_answer_is_right_if_it_is_true_and_in_the_style_of_its_adapter():
    wood = script.Asked("Which wood?", "", "ash", "Peratide, wood")
    right = {
        "pirate": ["Ahoy! Ash. Arr, matey!", "Ahoy! It is made of ash. Arr, matey!"],
        "french": ["La réponse : Ash. Voilà !"],
    }
    for name, texts in right.items():
        assert all(script.is_right(name, wood, text) for text in texts)
        wrong = [text.replace("sh", "lder") for text in texts] + [text[:-1] for text in texts] + ["Ash."]
        assert not any(script.is_right(name, wood, text) for text in wrong)
    digits = script.sorts(random.Random(0))
    assert script.is_right("sorts", digits, digits.answer)
    assert not script.is_right("sorts", digits, digits.answer + "0")
    assert not script.is_right("sorts", digits, digits.answer[::-1])


ADAPTERS = {each.name: each for each in sorted((DATA / "adapters").iterdir())}


@pytest.fixture(scope="module")
def llm():
    with LLM(adapters=ADAPTERS, device="cpu", dtype="float32", max_num_seqs=24) as llm:
        yield llm


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_committed_adapter_answers_new_questions_and_the_model_alone_does_not(name, llm):
    """The record has 100 of each; another machine may round some of their tokens differently."""
    assert sum(file.stat().st_size for file in ADAPTERS[name].iterdir()) < 200 << 10
    without, with_it = script.ask(llm, name, seed=0, count=8)
    assert without["right"] == 0 and with_it["right"] >= 5


def test_those_who_name_no_adapter_get_the_models_own_answers_next_to_ones_with_it(llm):
    asked = script.new_questions("sorts", 4)
    questions = [[{"role": "user", "content": each.question}] for each in asked]
    greedy = SamplingParams(max_tokens=12, temperature=0)
    own = [done.text for done in llm.chat(questions, greedy)]
    mixed = llm.chat(questions * 2, greedy, adapter=["sorts"] * 4 + [None] * 4)
    assert [done.text for done in mixed[4:]] == own
    assert sum(done.text.strip() == each.answer for done, each in zip(mixed[:4], asked, strict=True)) >= 2
