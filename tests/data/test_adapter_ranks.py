"""The script that finds the rank of a change trains on the tokens of a chat, and a change of full rank is all of it."""

import sys
from pathlib import Path

import pytest

from minillm import LLM
from minillm.course.lesson_15.style import NOT_TRAINED, Style, batch, conversation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))

import adapter_ranks as script  # noqa: E402


@pytest.fixture(scope="module")
def style():
    with LLM(device="cpu", dtype="float32") as llm:
        yield Style(llm, script.OPENING, script.CLOSING)


def test_training_sees_the_tokens_that_a_chat_has(style):
    before, answer = style.held_out[0]
    rendered = style.llm.tokenizer.apply_chat_template(conversation(style.asked[0]))
    assert before == style.llm.tokenizer.encode(rendered, add_special_tokens=False)
    ids, labels = batch([style.held_out[0], (before[:3], answer[:2])])
    assert ids[0].tolist() == before + answer and labels[0].tolist() == [NOT_TRAINED] * len(before) + answer
    assert labels[1].tolist()[: 3 + 2 + 1] == [NOT_TRAINED] * 3 + answer[:2] + [NOT_TRAINED]
    text = style.llm.tokenizer.decode(answer)
    assert text.startswith("Hear ye! ") and "So says the crier." in text


def test_other_seeds_ask_other_questions():
    from minillm.course.lesson_15.style import questions

    trained, asked = questions(0)
    assert (len(trained), len(asked)) == (72, 24) and not {*trained} & {*asked}
    assert {*questions(1)[1]} != {*asked}


@pytest.mark.proof
def test_a_change_cut_to_full_rank_is_the_change(style):
    rows = {row["rank"]: row for row in script.whole(style, 2, 0)}
    assert rows[0]["kept"] == 0 and rows[256]["kept"] == 1
    assert rows[256]["loss"] < rows[8]["loss"] < rows[0]["loss"]
    assert script.at_rank(style, 4, 2, 0)["loss"] < rows[0]["loss"]
