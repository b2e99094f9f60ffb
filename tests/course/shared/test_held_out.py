"""How far a model's predictions are from another's, by definition; and lesson 05's, on a model that changes."""

import math

import pytest
import torch

from minillm import LLM
from minillm.calibration.folding import NORMS
from minillm.calibration.forward import hidden_states
from minillm.course.lesson_05 import weight_formats
from minillm.course.lesson_07 import eight_bits
from minillm.course.shared import held_out
from minillm.quantization import Int4


def test_predictions_have_their_definitions():
    """Of two models, over more rows than one forward pass has."""
    ids = held_out.held_out_text(held_out.STEP_ROWS + 1, length=8)
    before = eight_bits.dense()
    after = eight_bits.quantized(before, Int4(group_size=128))
    text = held_out.HeldOut(before, ids)
    found, own = text.predictions(after), text.predictions()
    assert own.same_top.all() and not own.divergence.any()
    nats = []
    for row, each in enumerate(ids):
        with torch.inference_mode():
            p, q = (model.logits(hidden_states(model, each[None])).double().softmax(-1) for model in (before, after))
        kl = (p * (p.log() - q.log())).sum(-1)
        torch.testing.assert_close(found.divergence[row], kl, rtol=1e-3, atol=1e-6)
        assert found.same_top[row].tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
        nats += [-math.log(q[at, token]) for at, token in enumerate(each[1:].tolist())]
    assert 0 < found.same_top.sum() < found.same_top.numel() and found.divergence.max() > 0.01
    assert found.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)


def test_means_and_ratios_have_their_standard_errors():
    base = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    assert held_out.mean(base) == pytest.approx((3.0, (14 / 3) ** 0.5 / 2))
    assert held_out.ratio(2 * base, base) == pytest.approx((2.0, 0.0))
    rows = base + torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert held_out.ratio(rows, base) == pytest.approx((1.0, (4 / 3) ** 0.5 / 2 / 3))


def test_held_out_text_is_not_calibration_text():
    rows = [held_out.calibration_text(4, 64), held_out.calibration_text(4, 64, seed=1), held_out.held_out_text(4, 64)]
    assert all(ids.shape == (4, 64) and (ids[:, 0] == 2).all() for ids in rows)
    assert len({tuple(row) for ids in rows for row in ids.tolist()}) == 12


def test_weights_with_planted_outliers_compute_the_same_until_they_are_rounded():
    """And they are gone afterwards."""
    with LLM(device="cpu", dtype="float64", enable_prefix_caching=False, num_blocks=64) as llm:
        quality, model = weight_formats.Quality(llm, rows=2, length=32), llm.engine.model
        before = [tensor.clone() for tensor in model.tensors()]
        plain = [getattr(layer, name).dequantize().clone() for layer in model.layers for name in NORMS]
        found = [quality.measure()]
        with weight_formats.weights(llm, {"layers.*": Int4(group_size=128)}):
            rounded = quality.measure()
        with weight_formats.planted_outliers(llm, columns=4, times=10):
            planted = [getattr(layer, name).dequantize().clone() for layer in model.layers for name in NORMS]
            found.append(quality.measure())
            with weight_formats.weights(llm, {"layers.*": Int4(group_size=128)}):
                assert quality.measure().divergence > 2 * rounded.divergence > 0
        assert all(one.equal(other) for one, other in zip(before, model.tensors(), strict=True))
    for each in found:
        assert each.divergence < 1e-6 and each.agreement == 1
        assert each.perplexity == pytest.approx(found[0].perplexity, rel=1e-6)
    for one, other in zip(plain, planted, strict=True):
        larger = other.abs().sum(0) / one.abs().sum(0)
        assert (larger > 9.9).sum() == 4 and (larger > 1.1).sum() == 4
