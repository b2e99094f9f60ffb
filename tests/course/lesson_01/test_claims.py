"""What lesson 01 says about tokens is what its cells print."""

import re

import pytest

from minillm import Tokenizer
from minillm.folders import DATA
from tests.course.lesson import solved

lesson = solved("01")


def test_the_tokens_of_the_question_and_the_answer():
    lesson.says(
        "six tokens for the question, and in front of them the token 2, `<bos>`",
        "The model answers with five tokens and then token 5, `<end_of_turn>`",
    )
    question, answer = (
        re.search(pattern, lesson.printed)[1].split(", ") for pattern in (r"eat\? \[(.*)\]\n", r"\n[\w .]+ \[(.*)\]\n")
    )
    assert len(question) == 7 and question[0] == "2"
    assert len(answer) == 6 and answer[-1] == "5"


def test_english_is_cheap_and_chinese_takes_three_times_as_many_tokens():
    lesson.says("The English sentence needs 9 tokens for 40 characters.", "27 tokens for the same sentence in Chinese.")
    english = "The quirrel sleeps under the old bridge."
    tokens = Tokenizer.from_pretrained(DATA / "tiny-gemma").encode(english, add_special_tokens=False)
    assert (len(tokens), len(english)) == (9, 40)
    assert lesson.number(r"^the Chinese sentence: .* measured (\d+) tokens$") == 27 == 3 * len(tokens)


def test_splitting_at_spaces_only_hides_the_answers_letter():
    lesson.says("only one training question in four ended in one of them", "with a third fewer tokens")
    tokens, own = lesson.numbers(r"^spaces only +([\d,]+) tokens; .* (\d+)% of the questions$")
    theirs, all_of_them = lesson.numbers(r"^tiny-gemma's +([\d,]+) tokens; .* (\d+)% of the questions$")
    assert own == pytest.approx(25, abs=2) and all_of_them == 100
    assert tokens / theirs == pytest.approx(2 / 3, abs=0.01)


def test_the_table_of_256000_tokens_is_a_fifth_of_what_gemma_reads():
    lesson.says("32,000 rows hardly matter", "the table for its own 256,000 tokens is a fifth of what every step reads")
    small, large = (lesson.number(rf"^Gemma 2B +with +{size} tokens: +([\d.]+)%") for size in ("4,096", "256,000"))
    assert large == pytest.approx(20, abs=1.5)
    rows = small / (100 - small) / 4096  # of the layers, per row
    assert 32_000 * rows < 0.04
