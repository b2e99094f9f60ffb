"""Prompt format, scoring and data sources, tested with engines whose answers are known."""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm import evaluate
from minillm.request import Completion

DATA = Path(__file__).resolve().parents[2] / "data"
FACTS = SimpleNamespace(dtype="float32", kv_cache_dtype="fp8")
ROW = {"question": "How many legs has a goose?", "subject": "farm_animals", "choices": list("2468"), "answer": 0}


class Words:
    """A whole-word tokenizer; a space belongs to the word after it."""

    bos_token_id, prefix = 0, (0,)

    def __init__(self):
        self.ids = {"<bos>": 0}

    def encode(self, text, add_special_tokens=True):
        import re

        pieces = re.findall(r"\n+| ?[^\s:]+|:| ", text)
        return [0] * add_special_tokens + [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    def decode(self, ids):
        words = list(self.ids)
        return "".join(words[id] for id in ids if id)


class Oracle:
    """Answers with given log-probabilities; `cost` gives those of prompt tokens. The context has `room` tokens."""

    def __init__(self, answers=None, cost=None, room=64):
        self.tokenizer, self.answers, self.cost = Words(), answers or {}, cost
        self.engine, self.prompts = SimpleNamespace(max_model_len=room), []

    def generate(self, prompts, params, progress=False):
        self.prompts += prompts
        out = []
        for prompt in prompts:
            assert len(prompt) + params.max_tokens <= self.engine.max_model_len, "the prompt exceeds the context"
            done = Completion("r", prompt)
            if params.logprobs is not None:
                done.logprobs = [{self.tokenizer.ids[word]: value for word, value in self.answers.items()}]
            if params.prompt_logprobs is not None:
                done.prompt_logprobs = [None] + [
                    {token: self.cost(i, prompt)} for i, token in enumerate(prompt) if i > 0
                ]
            out.append(done)
        return out


A_TO_D = {" A": -1.0, " B": -2.0, " C": -3.0, " D": -4.0}  # A is the likeliest, whatever is asked


def blocks(llm: Oracle) -> list[list[str]]:
    """For each prompt, the answered examples and the question, without the header."""
    return [llm.tokenizer.decode(prompt).split("\n\n")[1:] for prompt in llm.prompts]


def test_the_prompt_has_mmlus_format():
    example = {**ROW, "question": "What gives milk?", "choices": ["a cow", "a hen", "a fox", "a bee"], "answer": 0}
    assert evaluate.few_shot_prompt(ROW, [example]) == (
        "The following are multiple choice questions (with answers) about farm animals.\n\n"
        "What gives milk?\nA. a cow\nB. a hen\nC. a fox\nD. a bee\nAnswer: A\n\n"
        "How many legs has a goose?\nA. 2\nB. 4\nC. 6\nD. 8\nAnswer:"
    )


def test_the_prompt_equals_the_one_in_the_training_text():
    sys.path.insert(0, str(DATA))
    from isles import questions

    choice = questions.question_sets()["dev"][0]
    assert evaluate.header(choice.subject) == questions.header(choice.subject)
    assert evaluate.question_block(choice.row(), answered=True) == choice.prompt()


def test_a_question_without_four_choices_is_reported():
    with pytest.raises(ValueError, match="goose"):
        evaluate.question_block({**ROW, "choices": ["2"]}, answered=False)


def test_the_likeliest_letter_is_the_answer_even_if_other_tokens_are_likelier():
    llm = Oracle({" A": -3.0, " B": -2.0, " C": -9.0, " D": -8.0, " maybe": -0.1})
    llm.tokenizer.encode(" maybe")
    rows = [{**ROW, "answer": 1}, {**ROW, "answer": 0, "subject": "geese"}]
    found = evaluate.accuracy(llm, rows, [], shots=0)
    assert found["accuracy"] == 0.5
    assert found["subjects"] == {"farm_animals": 1.0, "geese": 0.0}


def test_each_of_the_four_letters_may_be_the_answer():
    for answer, letter in enumerate(A_TO_D):
        found = evaluate.accuracy(Oracle(A_TO_D | {letter: -0.5}), [{**ROW, "answer": answer}], [])
        assert found["accuracy"] == 1.0, letter


def test_a_letter_outside_the_likeliest_tokens_is_scored_exactly():
    def cost(position, prompt):
        return -5.0 if prompt[position] == letters[2] else -7.0

    llm = Oracle({" A": -6.0}, cost)
    letters = [llm.tokenizer.encode(f" {letter}", add_special_tokens=False)[0] for letter in "ABCD"]
    assert evaluate.letter_logprobs(llm, ["Answer:"]) == [[-6.0, -7.0, -5.0, -7.0]]


def test_examples_come_from_the_questions_subject():
    kinds = {"a": "farm_animals", "b": "geese", "c": "farm_animals"}
    examples = [{**ROW, "question": question, "subject": kind} for question, kind in kinds.items()]
    llm = Oracle(A_TO_D, room=1000)
    evaluate.accuracy(llm, [ROW], [*examples, ROW], shots=5)
    assert [block.split("\n")[0] for block in blocks(llm)[0]] == ["a", "c", ROW["question"], ROW["question"]]


@pytest.mark.parametrize("likely", [A_TO_D, {" A": -1.0}], ids=["all letters likely", "rare letters"])
def test_the_number_of_examples_leaves_room_for_a_letter_and_a_token_after_it(likely):
    """A letter outside the likeliest tokens is scored as one more prompt token."""
    tokens = [len(Words().encode(evaluate.few_shot_prompt(ROW, [ROW] * shots))) for shots in range(4)]
    for room in range(tokens[0] + 2, tokens[3] + 3):
        llm = Oracle(likely, lambda position, prompt: -9.0, room=room)
        evaluate.accuracy(llm, [ROW], [ROW] * 3)
        assert len(llm.prompts[0]) == max(count for count in tokens if count + 2 <= room), f"with room for {room}"


def questions(split: str) -> list[dict]:
    return list(evaluate.load_questions(split=split))


def assert_examples_are_of_the_dev_split(prompts: list[list[str]], split: str, shots: int) -> None:
    shown = {evaluate.question_block(row, answered=True) for row in questions("dev")}
    asked = {evaluate.question_block(row, answered=False) for row in questions(split)}
    assert prompts
    for *examples, question in prompts:
        assert len(examples) == shots and set(examples) <= shown and question in asked


def test_splits_share_no_question():
    dev, asked, test = ({row["question"] for row in questions(split)} for split in ("dev", "asked", "test"))
    assert not (dev & asked or dev & test or asked & test)


def test_examples_come_from_the_dev_split_and_user_questions_have_none():
    llm, own = Oracle(A_TO_D, room=10_000), Oracle(A_TO_D, room=10_000)
    evaluate.accuracy(llm, limit=40)
    assert_examples_are_of_the_dev_split(blocks(llm), "test", shots=5)
    evaluate.accuracy(own, questions("test")[:3])
    assert_examples_are_of_the_dev_split(blocks(own), "test", shots=0)


def test_accuracy_is_over_all_questions_not_a_mean_of_subjects():
    rows = [ROW, ROW, ROW, {**ROW, "subject": "geese", "answer": 3}]
    found = evaluate.accuracy(Oracle(A_TO_D), rows, [])
    assert found["accuracy"] == 0.75 and found["subjects"] == {"farm_animals": 1.0, "geese": 0.0}


@pytest.mark.parametrize("limit", [1, 7, 20, 59, 60, 61])
def test_a_limit_takes_questions_spread_evenly_over_all(limit):
    rows = [{**ROW, "question": f"number {i}"} for i in range(60)]
    llm = Oracle(A_TO_D)
    assert evaluate.accuracy(llm, rows, [], limit=limit)["questions"] == min(limit, 60)
    places = [int(question.split()[1]) for (question,) in blocks(llm)]
    gaps = {after - before for before, after in zip(places, [*places[1:], 60 + places[0]], strict=True)}
    assert gaps <= {60 // len(places), -(-60 // len(places))}


def test_a_limit_samples_every_subject_of_the_embedded_questions_equally():
    llm = Oracle(A_TO_D, room=10_000)
    evaluate.accuracy(llm, shots=0, limit=80)
    subjects = Counter(llm.tokenizer.decode(prompt).split("\n")[0] for prompt in llm.prompts)
    assert len(subjects) == 8 and set(subjects.values()) == {10}


def test_windows_score_every_token_once():
    for length, window, stride in ((10, 4, 2), (10, 4, 4), (3, 8, 2), (9, 8, 1), (1, 1, 1)):
        spans = list(evaluate.windows(length, window, stride))
        assert [t for _, scored, stop in spans for t in range(scored, stop)] == list(range(length))
        assert all(stop - start <= window and start <= scored for start, scored, stop in spans)
        assert all(stop - start == min(window, stop) for start, _, stop in spans)


def test_a_stride_that_skips_tokens_is_rejected():
    with pytest.raises(ValueError, match="stride"):
        list(evaluate.windows(10, 4, 5))


def test_perplexity_equals_a_hand_computed_value():
    """Each token's loss is its position in its window, in nats."""
    llm = Oracle(cost=lambda position, prompt: -float(position))
    found = evaluate.perplexity(llm, [11, 12, 13, 14, 15], window=4, stride=2)
    # First window: <bos> and four tokens, at 1, 2, 3, 4.  Second: tokens 1 to 4 after <bos>, of which the last is new.
    assert llm.prompts == [[0, 11, 12, 13, 14], [0, 12, 13, 14, 15]]
    assert found["nats_per_token"] == pytest.approx((1 + 2 + 3 + 4 + 4) / 5)
    assert found["perplexity"] == pytest.approx(math.exp(14 / 5))
    assert found["tokens"] == 5


def test_bits_per_byte_divide_by_the_texts_bytes():
    llm = Oracle(cost=lambda position, prompt: -math.log(2))
    found = evaluate.perplexity(llm, "grüne Gänse")
    assert found["bits_per_byte"] == pytest.approx(2 / len("grüne Gänse".encode()))


def test_quality_measures_every_question_set_and_the_text_as_record_rows(monkeypatch):
    module = sys.modules["minillm.evaluate.quality"]
    monkeypatch.setattr(module, "perplexity", lambda llm: {"perplexity": 2.00004, "tokens": 9})
    llm = Oracle(A_TO_D, room=10_000)
    llm.engine.facts = FACTS
    splits = {
        "questions-held-out-5-shot": ("test", 5),
        "questions-held-out-0-shot": ("test", 0),
        "questions-asked-5-shot": ("asked", 5),
        "held-out-text": None,
    }
    measured = []
    for result in evaluate.quality(llm, limit=24):
        measured.append(result["workload"])
        assert result["dtype"] == "float32" and result["kv_cache_dtype"] == "fp8"
        if (wanted := splits[result["workload"]]) is None:
            assert result["perplexity"] == 2.0 and result["input_tokens"] == 9 and result["requests"] is None
            continue
        split, shots = wanted
        assert (result["requests"], result["shots"]) == (24, shots)
        assert_examples_are_of_the_dev_split(blocks(llm), split, shots)
        rows = questions(split)
        first = sum(rows[i * len(rows) // 24]["answer"] == 0 for i in range(24))
        assert result["accuracy"] == round(first / 24, 4), "the share of questions whose answer is A"
        llm.prompts.clear()
    assert measured == list(splits)


def test_a_model_without_a_tokenizer_is_rejected_with_a_remedy():
    with pytest.raises(ValueError, match="tokenizer.json"):
        next(evaluate.quality(SimpleNamespace(tokenizer=None)))


def test_embedded_questions_load_through_datasets():
    test = evaluate.load_questions()
    assert test.column_names == ["question", "subject", "choices", "answer"]
    assert len(test) >= 2000 and len(set(test["subject"])) >= 6
    stars = evaluate.load_questions(split="dev", subjects=["stars"])
    assert len(stars) == 5 and set(stars["subject"]) == {"stars"}
    with pytest.raises(ValueError, match="asked"):
        evaluate.load_questions(split="validation")
    with pytest.raises(ValueError, match="law.*geography"):
        evaluate.load_questions(subjects=["law"])


def test_embedded_text_and_trace_load_through_datasets():
    assert evaluate.load_text() == (DATA / "text" / "held_out.txt").read_text("utf-8")
    trace = evaluate.load_trace()
    assert len(trace) >= 300
    first = json.loads((DATA / "traces" / "conversation.jsonl").read_text("utf-8").splitlines()[0])
    assert trace[0] == first


@pytest.fixture
def mmlu(tmp_path):
    """A folder in the layout of `cais/mmlu`: parquet by subject and split, answers as class labels, a dataset card."""
    import datasets

    features = datasets.Features(
        question=datasets.Value("string"),
        subject=datasets.Value("string"),
        choices=datasets.Sequence(datasets.Value("string")),
        answer=datasets.ClassLabel(names=list("ABCD")),
    )
    card = ["---", "configs:"]
    rows = {subject: [{**ROW, "subject": subject, "answer": i % 4} for i in range(6)] for subject in ("law", "art")}
    rows["all"] = rows["law"] + rows["art"]
    for name, members in rows.items():
        card += [f"- config_name: {name}", "  data_files:"]
        (tmp_path / name).mkdir()
        for split in ("dev", "validation", "test"):
            path = tmp_path / name / f"{split}-00000-of-00001.parquet"
            datasets.Dataset.from_list(members, features=features).to_parquet(path)
            card += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (tmp_path / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")
    return tmp_path


def test_mmlu_in_the_hubs_layout_loads_by_subject_and_in_full(mmlu):
    law = evaluate.load_questions(mmlu, subjects=["law"])
    assert law["answer"] == [0, 1, 2, 3, 0, 1] and set(law["subject"]) == {"law"}
    assert len(evaluate.load_questions(mmlu, split="dev")) == 12
    found = evaluate.accuracy(Oracle(A_TO_D, room=1000), law, evaluate.load_questions(mmlu, split="dev"))
    assert found["accuracy"] == pytest.approx(2 / 6)


def test_an_unreachable_hub_is_reported_with_a_remedy():
    with pytest.raises(ConnectionError, match="leave `source` out"):
        evaluate.load_questions("cais/mmlu", subjects=["law"])


def test_the_task_mmlu_asks_its_test_questions_with_five_examples_of_their_subject(mmlu, monkeypatch):
    tasks = sys.modules["minillm.evaluate.tasks"]
    monkeypatch.setattr(tasks, "MMLU", str(mmlu))
    llm = Oracle(A_TO_D, room=10_000)
    llm.engine.facts = FACTS
    whole, law, folder = evaluate.quality(llm, measured=evaluate.workloads(["mmlu", "mmlu_law", str(mmlu)]))
    assert [each["workload"] for each in (whole, law)] == ["mmlu-5-shot", "mmlu_law-5-shot"]
    assert [each["questions"] for each in (whole, law, folder)] == [12, 6, 12]
    assert whole["accuracy"] == round(4 / 12, 4) and law["subjects"] == {"law": round(2 / 6, 4)}
    for *examples, _ in blocks(llm):
        assert len(examples) == 5
    (alone,) = [tasks.held_out("mmlu_art")]
    assert (alone.name, alone.shots, set(alone.questions["subject"])) == ("mmlu_art-5-shot", 5, {"art"})


def test_a_task_is_asked_where_it_was_asked_for_and_only_there():
    names = [each.name for each in evaluate.workloads(["text", "isles"])]
    assert names == [
        "held-out-text",
        "questions-held-out-5-shot",
        "questions-held-out-0-shot",
        "questions-asked-5-shot",
    ]


def test_mmlu_is_here_once_datasets_has_it(tmp_path, monkeypatch):
    """As `datasets` names its folders: load_dataset("owner/name", "part") -> owner___name/part."""
    from datasets import config

    tasks = sys.modules["minillm.evaluate.tasks"]
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "cais___mmlu").mkdir()
    assert not tasks.mmlu_is_here()
    (tmp_path / "cais___mmlu" / "all").mkdir()
    assert tasks.mmlu_is_here()


def test_without_a_network_the_task_mmlu_names_its_embedded_twin():
    with pytest.raises(ConnectionError, match="The embedded twin of MMLU needs no network: --tasks isles"):
        evaluate.workloads(["mmlu"])


def test_unknown_tasks_and_subjects_are_refused_with_the_known_ones(mmlu, monkeypatch):
    monkeypatch.setattr(sys.modules["minillm.evaluate.tasks"], "MMLU", str(mmlu))
    for task, message in (("hellaswag", "no task 'hellaswag'; tasks are isles, text, mmlu"), ("mmlu_alchemy", "law")):
        with pytest.raises(ValueError, match=message):
            evaluate.workloads([task])
