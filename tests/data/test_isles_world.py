"""The invented world, the questions about it, and what training text may contain."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA))

import generate  # noqa: E402
import traces  # noqa: E402
from isles import chats, corpus, prose, questions  # noqa: E402
from isles.names import CHILDREN  # noqa: E402
from isles.world import clause, world  # noqa: E402

DOCUMENTS = 3000


@pytest.fixture(scope="module")
def training_text():
    first = list(corpus.documents(0, DOCUMENTS // 2, "first"))
    return first + list(corpus.documents(1, DOCUMENTS // 2, "second"))


@pytest.fixture(scope="module")
def held_out_questions():
    return {ask.format(n=fact.entity.name) for fact in world().facts if fact.held_out for ask in fact.attribute.asks}


def test_at_least_two_thousand_questions_over_eight_subjects_are_held_out():
    facts = [fact for fact in world().facts if fact.held_out]
    assert len(facts) >= 2000
    assert len({fact.entity.subject.name for fact in facts}) == 8


def test_names_and_questions_are_unique():
    names = [entity.name for entity in world().entities]
    assert len(names) == len(set(names))
    asked = Counter(ask.format(n=fact.entity.name) for fact in world().facts for ask in fact.attribute.asks)
    assert max(asked.values()) == 1


def test_held_out_facts_are_asked_only_in_dialogue_of_stories(training_text, held_out_questions):
    questions_seen = 0
    for kind, text in training_text:
        for line in text.splitlines():
            if kind == "scenes" and line.startswith(('"', *(child.name for child in CHILDREN))):
                continue  # dialogue in a story
            line = line.removeprefix("Question: ")
            question = line[: line.find("?") + 1]
            questions_seen += bool(question)
            assert question not in held_out_questions, (kind, line)
    assert questions_seen > 1000


def test_scenes_offer_no_options(training_text):
    assert not any("\nA. " in text for kind, text in training_text if kind == "scenes")


def test_held_out_facts_are_stated_in_prose(training_text):
    prose_text = " ".join(text for kind, text in training_text if kind in ("prose", "almanac")).lower()
    facts = [fact for fact in world().facts if fact.held_out]
    stated = sum(
        any(clause(tell, fact.entity, fact.value).lower() in prose_text for tell in fact.attribute.tells)
        for fact in facts
    )
    assert stated > 0.1 * len(facts)  # already in this small part of the text


def test_the_first_mix_has_no_fact_questions_in_mmlu_format(training_text):
    assert "multiple_choice" not in corpus.MIXES["first"]
    assert {kind for kind, _ in training_text} == set(corpus.KINDS)


def test_a_shard_always_gives_the_same_documents():
    assert list(corpus.documents(7, 20)) == list(corpus.documents(7, 20))
    assert list(corpus.documents(7, 20)) != list(corpus.documents(8, 20))


def test_question_files_have_mmlu_columns_and_correct_answers():
    truth = {ask.format(n=fact.entity.name): fact for fact in world().facts for ask in fact.attribute.asks}
    for split, held_out in (("dev", False), ("asked", False), ("test", True)):
        rows = [json.loads(line) for line in (DATA / "questions" / f"{split}.jsonl").read_text("utf-8").splitlines()]
        for row in rows:
            assert list(row) == ["question", "subject", "choices", "answer"]
            fact = truth[row["question"]]
            assert len(set(row["choices"])) == 4
            assert row["choices"][row["answer"]] == fact.value
            assert row["subject"] == fact.entity.subject.name
            assert fact.held_out == held_out
        if split == "dev":
            assert set(Counter(row["subject"] for row in rows).values()) == {5}
        else:
            letters = Counter(row["answer"] for row in rows)
            assert max(letters.values()) < 0.32 * len(rows)


def test_committed_files_equal_what_the_script_writes(tmp_path):
    generate.write_questions(tmp_path / "questions")
    for path in (tmp_path / "questions").iterdir():
        assert path.read_text("utf-8") == (DATA / "questions" / path.name).read_text("utf-8"), path.name
    traces.write(tmp_path / "traces" / "conversation.jsonl")
    written = (tmp_path / "traces" / "conversation.jsonl").read_text("utf-8")
    assert written == (DATA / "traces" / "conversation.jsonl").read_text("utf-8")
    assert generate.held_out_text() == (DATA / "text" / "held_out.txt").read_text("utf-8")
    assert generate.calibration_text() == (DATA / "text" / "calibration.txt").read_text("utf-8")


def test_entities_in_reading_exercises_are_not_in_the_world():
    import random

    rng = random.Random(0)
    names = {entity.name for entity in world().entities}
    assert all(questions.stranger(rng, world()).name not in names for _ in range(300))


def test_prose_names_its_entity_before_using_a_pronoun():
    import random

    rng = random.Random(1)
    for entity in rng.sample(world().entities, 50):
        text = prose.paragraph(rng, entity)
        first = text.split(". ")[0].lower()
        assert entity.name.lower() in first


def test_chats_follow_gemmas_chat_format():
    import random

    text = chats.document(random.Random(2))
    assert text.startswith("<start_of_turn>user\n") and text.endswith("<end_of_turn>\n")
    assert text.count("<start_of_turn>user\n") == text.count("<start_of_turn>model\n")


def test_trace_is_bursty_ordered_and_shares_prefixes():
    rows = traces.conversation()
    arrivals = [row["arrival"] for row in rows]
    assert arrivals == sorted(arrivals)
    assert all(row["prefix_tokens"] < row["input_tokens"] <= traces.MAX_INPUT for row in rows)
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance / mean**2 > 1.5  # a plain Poisson process has 1
    assert 0.5 < sum(row["prefix_id"] is not None for row in rows) / len(rows) < 0.8
