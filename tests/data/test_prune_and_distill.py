"""Pruning leaves out what does nothing, and keeps the rest as it is; distillation comes closer to the whole model."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from minillm.model import load_model
from minillm.runner.draft_model import HEAD_FILE, head_tokens
from tests import models

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))

import prune_and_distill as script  # noqa: E402

WHOLE = {"layers": 3, "hidden": 48, "intermediate": 80, "heads": 4}
ROWS = [torch.arange(24).view(2, 12) * 7 % 96]


def logits(model):
    with torch.no_grad():
        return model(ROWS[0]).logits


@pytest.fixture(params=["llama3-grouped", "gemma-grouped", "llama-biases"])
def model(request):
    """One whose second layer, and half of whose neurons and query heads, do nothing."""
    made = models.make(request.param).eval()
    with torch.no_grad():
        for index, layer in enumerate(made.model.layers):
            layer.mlp.up_proj.weight[1::2] = 0
            columns = layer.self_attn.o_proj.weight.view(48, 4, -1)
            columns[:, [1, 2]] = 0  # of the heads 0 and 1, which share keys, and of 2 and 3
            if layer.mlp.up_proj.bias is not None:
                layer.mlp.up_proj.bias[1::2] = 0
            if index == 1:
                for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    matrix.weight.zero_()
                    if matrix.bias is not None:
                        matrix.bias.zero_()
    return made


def test_what_does_nothing_is_found_and_left_out(model):
    scores = script.importance(model, ROWS)
    assert {kind: list(each.shape) for kind, each in scores.items()} == {
        "hidden": [48], "layers": [3], "heads": [3, 4], "neurons": [3, 80],
    }  # fmt: skip
    assert scores["layers"].argmin() == 1 and (scores["neurons"][:, 1::2] == 0).all()
    scores["heads"][:, [1, 2]] = 0  # what a head puts out is seen before the projection that ignores it
    small = script.pruned(model, scores, layers=2, hidden=48, intermediate=40, heads=2)
    torch.testing.assert_close(logits(small), logits(model), rtol=1e-4, atol=1e-4)
    assert sum(each.numel() for each in small.parameters()) < 0.75 * sum(each.numel() for each in model.parameters())


def test_a_model_of_which_nothing_is_left_out_stays_the_same(model):
    same = script.pruned(model, script.importance(model, ROWS), **WHOLE)
    torch.testing.assert_close(logits(same), logits(model), rtol=0, atol=0)


def test_the_largest_channels_stay(model):
    scores = script.importance(model, ROWS)
    scores["hidden"] = torch.arange(48.0)
    small = script.pruned(model, scores, **WHOLE | {"hidden": 16})
    assert torch.equal(small.model.embed_tokens.weight, model.model.embed_tokens.weight[:, 32:])
    given = model.model.layers[2].mlp.down_proj.weight[32:]
    assert torch.equal(small.model.layers[2].mlp.down_proj.weight, given)
    assert torch.isfinite(logits(small)).all()


def test_distillation_comes_closer_to_the_whole_model():
    whole = models.make("llama3-grouped").eval()
    small = script.pruned(whole, script.importance(whole, ROWS), **WHOLE | {"layers": 1, "hidden": 24})
    log = script.distill(whole, small, itertools.repeat(ROWS[0]), 30, 1e-2)
    assert [each["step"] for each in log] == [25, 30] and log[-1]["kl"] < 0.3
    again = script.pruned(whole, script.importance(whole, ROWS), **WHOLE | {"layers": 1, "hidden": 24})
    script.distill(whole, again, itertools.repeat(ROWS[0]), 30, 1e-2)
    assert torch.equal(logits(again), logits(small))


def test_the_saved_draft_is_one_that_the_engine_takes(tmp_path):
    small = models.make("gemma-grouped")
    (tmp_path / "tokenizer.json").write_text("{}")
    place = script.save(small, tmp_path, tmp_path / "draft", [3, 1])
    assert json.loads((place / HEAD_FILE).read_text()) == [3, 1] and head_tokens(place, None, 96) == [1, 3]
    assert (place / "tokenizer.json").exists()
    assert load_model(place, dtype="float32").num_parameters == sum(each.numel() for each in small.parameters())


def test_the_text_is_the_same_each_time_and_is_not_read_by_others():
    options = script.parse(["--rows", "2", "--length", "32"])
    first, again = next(script.text(options)), next(script.text(options))
    assert first.shape == (2, 32) and torch.equal(first, again) and first[0, 0] == 2
    assert script.SHARD not in ("distillation", "train", "held out")


def test_a_model_writes_the_text_that_it_teaches():
    options = script.parse(["--own-text", "100", "--rows", "2", "--length", "24", "--device", "cpu"])
    documents = script.written(options.model, options.own_text, options.length, options.device)
    assert [len(each) for each in documents] == [24] * 5
    assert (
        documents[0][:3]
        == documents[2][:3]
        == script.Tokenizer.from_pretrained(options.model).encode("<start_of_turn>user")
    ), "a chat, before its first message"
    assert len({tuple(each) for each in documents}) == 5, "each has a seed of its own"
    batches = script.text(options)
    assert torch.cat([next(batches) for _ in range(3)]).tolist() == [*documents, documents[0]]
