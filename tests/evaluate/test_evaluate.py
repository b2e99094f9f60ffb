"""Prompt form, scoring and sources, with engines whose answers are known."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm import evaluate
from minillm.request import Completion

DATA = Path(__file__).resolve().parents[2] / "data"
ROW = {"question": "How many legs has a goose?", "subject": "farm_animals", "choices": list("2468"), "answer": 0}


class Words:
    """A tokenizer of whole words; spaces belong to the word after them."""

    bos_token_id = 0

    def __init__(self):
        self.ids = {"<bos>": 0}

    def encode(self, text, add_special_tokens=True):
        import re

        pieces = re.findall(r"\n+| ?[^\s:]+|:| ", text)
        return [0] * add_special_tokens + [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]


class Oracle:
    """Answers with given log-probabilities; prompt tokens cost what `cost` says."""

    def __init__(self, answers=None, cost=None, room=64):
        self.tokenizer, self.answers, self.cost = Words(), answers or {}, cost
        self.model_config, self.prompts = SimpleNamespace(max_model_len=room), []

    def generate(self, prompts, params, progress=False):
        self.prompts += prompts
        out = []
        for prompt in prompts:
            done = Completion("r", prompt)
            if params.logprobs is not None:
                done.logprobs = [{self.tokenizer.ids[word]: value for word, value in self.answers.items()}]
            if params.prompt_logprobs is not None:
                done.prompt_logprobs = [None] + [
                    {token: self.cost(i, prompt)} for i, token in enumerate(prompt) if i > 0
                ]
            out.append(done)
        return out


def test_prompt_has_mmlu_form():
    example = {**ROW, "question": "What gives milk?", "choices": ["a cow", "a hen", "a fox", "a bee"], "answer": 0}
    assert evaluate.few_shot_prompt(ROW, [example]) == (
        "The following are multiple choice questions (with answers) about farm animals.\n\n"
        "What gives milk?\nA. a cow\nB. a hen\nC. a fox\nD. a bee\nAnswer: A\n\n"
        "How many legs has a goose?\nA. 2\nB. 4\nC. 6\nD. 8\nAnswer:"
    )


def test_prompt_is_the_one_that_training_text_has():
    sys.path.insert(0, str(DATA))
    from isles import questions

    choice = questions.question_sets()["dev"][0]
    assert evaluate.header(choice.subject) == questions.header(choice.subject)
    assert evaluate.question_block(choice.row(), answered=True) == choice.prompt()


def test_a_question_without_four_choices_is_named():
    with pytest.raises(ValueError, match="goose"):
        evaluate.question_block({**ROW, "choices": ["2"]}, answered=False)


def test_the_likeliest_letter_is_the_answer_even_when_other_words_are_likelier():
    llm = Oracle({" A": -3.0, " B": -2.0, " C": -9.0, " D": -8.0, " maybe": -0.1})
    llm.tokenizer.encode(" maybe")
    rows = [{**ROW, "answer": 1}, {**ROW, "answer": 0, "subject": "geese"}]
    found = evaluate.accuracy(llm, rows, [], shots=0)
    assert found["accuracy"] == 0.5
    assert found["subjects"] == {"farm_animals": 1.0, "geese": 0.0}


def test_a_letter_outside_the_likeliest_tokens_is_scored_exactly():
    def cost(position, prompt):
        return -5.0 if prompt[position] == letters[2] else -7.0

    llm = Oracle({" A": -6.0}, cost)
    letters = [llm.tokenizer.encode(f" {letter}", add_special_tokens=False)[0] for letter in "ABCD"]
    assert evaluate.letter_logprobs(llm, ["Answer:"]) == [[-6.0, -7.0, -5.0, -7.0]]


def test_shots_are_of_the_questions_subject_and_as_many_as_fit():
    answers = {f" {letter}": -1.0 for letter in "ABCD"}
    examples = [ROW, {**ROW, "subject": "other"}, ROW, ROW]
    wide, narrow = Oracle(answers, room=1000), Oracle(answers, room=75)
    for llm in (wide, narrow):
        evaluate.accuracy(llm, [ROW], examples, shots=5)
    answered = [llm.prompts[0].count(llm.tokenizer.ids[" A"]) for llm in (wide, narrow)]
    assert answered[0] == 3 and 0 < answered[1] < 3


def test_windows_score_every_token_once():
    for length, window, stride in ((10, 4, 2), (10, 4, 4), (3, 8, 2), (9, 8, 1), (1, 1, 1)):
        spans = list(evaluate.windows(length, window, stride))
        assert [t for _, scored, stop in spans for t in range(scored, stop)] == list(range(length))
        assert all(stop - start <= window and start <= scored for start, scored, stop in spans)
        assert all(stop - start == min(window, stop) for start, _, stop in spans)


def test_windows_refuse_a_stride_that_skips_tokens():
    with pytest.raises(ValueError, match="stride"):
        list(evaluate.windows(10, 4, 5))


def test_perplexity_is_the_exponential_of_the_mean_as_computed_by_hand():
    """A token costs its position in its window, in nats."""
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


def test_quality_measures_every_set_and_the_text_in_the_form_of_a_record(monkeypatch):
    module = sys.modules["minillm.evaluate.quality"]
    monkeypatch.setattr(module, "load_questions", lambda split="test": [{**ROW, "answer": split == "asked"}] * 4)
    monkeypatch.setattr(module, "perplexity", lambda llm: {"perplexity": 2.00004, "tokens": 9})
    llm = Oracle({" A": -1.0, " B": -2.0, " C": -3.0, " D": -4.0}, room=1000)
    llm.engine = SimpleNamespace(model=SimpleNamespace(dtype="torch.float32"))
    results = {result["workload"]: result for result in evaluate.quality(llm, limit=3)}
    assert {
        name: (found.get("accuracy"), found.get("shots"), found["requests"]) for name, found in results.items()
    } == {
        "questions-held-out-5-shot": (1.0, 5, 3),
        "questions-held-out-0-shot": (1.0, 0, 3),
        "questions-asked-5-shot": (0.0, 5, 3),
        "held-out-text": (None, None, None),
    }
    assert results["held-out-text"]["perplexity"] == 2.0 and results["held-out-text"]["input_tokens"] == 9
    assert all(each["dtype"] == "float32" for each in results.values())


def test_a_model_without_a_tokenizer_is_refused_with_the_way_out():
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


def test_mmlu_in_the_hubs_layout_loads_by_subject_and_as_a_whole(mmlu):
    law = evaluate.load_questions(mmlu, subjects=["law"])
    assert law["answer"] == [0, 1, 2, 3, 0, 1] and set(law["subject"]) == {"law"}
    assert len(evaluate.load_questions(mmlu, split="dev")) == 12
    answers = {" A": -1.0, " B": -2.0, " C": -3.0, " D": -4.0}
    found = evaluate.accuracy(Oracle(answers, room=1000), law, evaluate.load_questions(mmlu, split="dev"))
    assert found["accuracy"] == pytest.approx(2 / 6)


def test_an_unreachable_hub_is_told_with_the_way_out():
    with pytest.raises(ConnectionError, match="leave `source` out"):
        evaluate.load_questions("cais/mmlu", subjects=["law"])
