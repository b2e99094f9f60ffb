"""Distillation trains the weights that are rounded, saves what it trained, and wins back half of what rounding lost."""

import sys
from pathlib import Path

import pytest
import torch

from minillm.bench import records
from minillm.evaluate import load_text
from minillm.model import load_model
from minillm.quantization import Int4
from tests.quantization.checkpoints import logits_of

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA))

import distill_tiny_gemma as script  # noqa: E402

FEW = ["--steps", "3", "--rows", "2", "--length", "24"]


@pytest.fixture(scope="module")
def trained():
    """Weights after three steps, what they were, and the log."""
    ids = script.text(script.parse(FEW))
    source = script.GemmaForCausalLM.from_pretrained(script.SOURCE, dtype=torch.float32)
    before = {name: module.weight.detach() for name, module in script.projections(source).items()}
    weights, log = script.distill(4, ids, 1e-3)
    return before, weights, log


def test_training_changes_every_projection_and_nothing_else(trained):
    before, weights, log = trained
    assert len(weights) == 6 * 7 and weights.keys() == before.keys()
    assert not [name for name, weight in weights.items() if weight.equal(before[name])]
    assert [each["step"] for each in log] == [3] and log[0]["kl"] > 0


def test_the_same_call_trains_the_same_weights(trained):
    again, _ = script.distill(4, script.text(script.parse(FEW)), 1e-3)
    assert all(again[name].equal(weight) for name, weight in trained[1].items())


def test_the_saved_model_is_the_one_that_was_trained_and_the_engine_runs_it(trained, tmp_path):
    weights = trained[1]
    model = load_model(script.save_int4(weights, tmp_path / "out"), dtype="float32")
    twin = load_model(script.save_simulated(weights, tmp_path / "twin", bits=4), dtype="float32")
    assert {layer.down.format for layer in model.layers} == {Int4(128)}
    torch.testing.assert_close(logits_of(model), logits_of(twin), rtol=0, atol=1e-4)
    untrained = load_model(dtype="float32")
    assert model.embedding.dequantize().equal(untrained.embedding.dequantize())
    assert all(own.equal(norm) for own, norm in zip(model.norms(), untrained.norms(), strict=True))


def test_the_loss_falls_on_the_text_it_sees():
    ids = script.text(script.parse(["--steps", "1", "--rows", "2", "--length", "64"])).repeat(20, 1, 1)
    _, log = script.distill(3, ids, script.RATES[3])
    assert log[-1]["kl"] < 0.7 * log[0]["kl"]


def test_no_sentence_of_the_evaluation_is_trained_on():
    """Not the texts, that is: facts and templates are the same."""
    shard = script.corpus.documents(f"{script.SHARD}/0")
    held_out = load_text()
    documents = [next(shard)[1].strip() for _ in range(400)]
    assert not [document for document in documents if len(document) > 200 and document in held_out]
    assert script.text(script.parse([*FEW, "--seed", "1"])).ne(script.text(script.parse(FEW))).any()


def test_in_the_record_each_model_wins_back_half_of_the_perplexity_that_rounding_lost():
    content = records.read("cpu/distillation")
    rows = {row["quantization"]: row for row in content["results"]}
    assert list(rows) == ["float32", "int4", "int4, trained", "int3", "int3, trained"]
    floor = rows["float32"]["perplexity"]
    for name in ("int4", "int3"):
        before, after = rows[name], rows[f"{name}, trained"]
        won = (before["perplexity"] - after["perplexity"]) / (before["perplexity"] - floor)
        assert after["won_back"] == pytest.approx(won, abs=1e-3) and won >= 0.5
        assert after["kl"] < 0.75 * before["kl"] and after["training_tokens"] == after["steps"] * 8 * 256
    assert [row["simulated"] for row in rows.values()] == [False, False, False, True, True]
    assert {row["requests"] for row in rows.values()} == {2160}
