"""Texts are scored and read as the tokenizer encodes them: after <bos> where it adds one, and only there."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from minillm import LLM, Tokenizer, evaluate
from minillm.calibration.quantize import calibration_rows
from minillm.evaluate.compare import Comparison
from tests import models

TEXT = "The river runs past the mill, and the mill grinds the corn of the whole valley."
BOS = 1


def transformers_perplexity(directory, ids):
    ids = torch.tensor([ids])
    with torch.inference_mode():
        return math.exp(models.reference(directory, dtype=torch.float32)(ids, labels=ids).loss)


def test_perplexity_is_that_of_transformers_on_the_encoded_text(bos_directory):
    directory, adds = bos_directory
    ids = AutoTokenizer.from_pretrained(directory).encode(TEXT)
    assert (ids[0] == BOS) == adds
    with LLM(directory, dtype="float32", device="cpu") as llm:
        found = evaluate.perplexity(llm, TEXT)
    assert found["perplexity"] == pytest.approx(transformers_perplexity(directory, ids), rel=1e-4)
    assert (found["tokens"], found["prefix"]) == (len(ids) - 1, [BOS] * adds)


def test_another_prefix_is_put_before_each_window_and_recorded(named_bos):
    ids = AutoTokenizer.from_pretrained(named_bos).encode(TEXT)
    with LLM(named_bos, dtype="float32", device="cpu") as llm:
        found = evaluate.perplexity(llm, TEXT, prefix=[BOS])
        windows = evaluate.perplexity(llm, ids[:78], window=39, stride=39, prefix=[BOS])
    assert found["perplexity"] == pytest.approx(transformers_perplexity(named_bos, [BOS, *ids]), rel=1e-4)
    assert found["prefix"] == [BOS]
    parts = [transformers_perplexity(named_bos, [BOS, *ids[i : i + 39]]) for i in (0, 39)]
    assert windows["perplexity"] == pytest.approx(math.sqrt(math.prod(parts)), rel=1e-4)


def test_a_comparisons_windows_begin_as_the_encoded_text(bos_directory, monkeypatch):
    directory, adds = bos_directory
    module = sys.modules["minillm.evaluate.compare"]
    answers = SimpleNamespace(correct=[True], shots=0, input_tokens=0, accuracy=1.0)
    monkeypatch.setattr(module, "load_text", lambda: TEXT * 10)
    monkeypatch.setattr(module, "answers", lambda *_, **__: answers)
    with LLM(directory, dtype="float32", device="cpu") as llm:
        rows = Comparison(llm, directory, evaluate.tasks.held_out("isles")).reference.rows
    ids = AutoTokenizer.from_pretrained(directory).encode(TEXT * 10, add_special_tokens=False)
    assert len(rows) > 1 and all((row[0, 0] == BOS) == adds for row in rows)
    assert torch.cat([row[0, adds:] for row in rows]).tolist() == ids


def test_a_stream_begins_as_the_encoded_text(bos_directory, monkeypatch):
    directory, adds = bos_directory
    asked = []
    monkeypatch.setattr(sys.modules["minillm.evaluate.streaming"], "load_text", lambda: TEXT)
    monkeypatch.setattr(LLM, "generate", lambda _, prompts, params: asked.extend(prompts) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(evaluate.streaming(directory, max_model_len=32, attention_window=16, device="cpu"))
    ids = AutoTokenizer.from_pretrained(directory).encode(TEXT * 2)
    assert asked[0] == ids[32 - 16 : 33] and (ids[0] == BOS) == adds


def test_calibration_rows_begin_as_the_encoded_text(bos_directory):
    directory, adds = bos_directory
    rows = calibration_rows(Tokenizer.from_pretrained(directory), TEXT, 5, 20, seed=0)
    assert rows.shape == (5, 20) and (rows.eq(BOS).sum(1) == adds).all()
    theirs = AutoTokenizer.from_pretrained(directory)
    assert all(theirs.decode(row[adds:]) in TEXT and (row[0] == BOS) == adds for row in rows)


QUESTION = {"question": "What gives milk?", "subject": "farm", "choices": ["cow", "hen", "fox", "bee"], "answer": 0}


def test_letters_of_several_tokens_are_scored_as_transformers_scores_them(bos_directory):
    """Each letter is two tokens here, of which the first, the space's, is the same for all."""
    directory, _ = bos_directory
    theirs, model = AutoTokenizer.from_pretrained(directory), models.reference(directory, dtype=torch.float32)
    expected = []
    for letter in "ABCD":
        ids = torch.tensor([theirs.encode(f"Answer: {letter}")])
        with torch.inference_mode():
            scores = model(ids).logits[0].log_softmax(-1)
        expected.append(sum(scores[at - 1, ids[0, at]].item() for at in (-2, -1)))
    with LLM(directory, dtype="float32", device="cpu") as llm:
        found = evaluate.letter_logprobs(llm, ["Answer:", "Answer:"])
        assert found[0] == pytest.approx(expected, rel=1e-4) and found[1] == pytest.approx(found[0])


def test_the_examples_leave_room_for_letters_of_several_tokens(named_bos):
    shown = evaluate.few_shot_prompt(QUESTION, [QUESTION] * 2)
    with LLM(named_bos, dtype="float32", device="cpu") as llm:
        tokens = len(llm.tokenizer.encode(shown))
    for room, shots in ((tokens + 3, 2), (tokens + 2, 1)):  # two tokens of a letter, and one more
        with LLM(named_bos, dtype="float32", device="cpu", max_model_len=room) as llm:
            found = evaluate.accuracy(llm, [QUESTION], [QUESTION] * 2, shots=2)
        expected = evaluate.few_shot_prompt(QUESTION, [QUESTION] * shots)
        assert found["input_tokens"] == len(llm.tokenizer.encode(expected))
