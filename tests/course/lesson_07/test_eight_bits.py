"""Lesson 07's set-ups: copies of a model compute the same, and the model that they were made from stays as it was."""

import math

import pytest
import torch

from minillm.course.lesson_07 import eight_bits
from minillm.quantization import Activations, Fp8, Int8
from tests.course.lesson import solved


@pytest.fixture(scope="module")
def text():
    return eight_bits.HeldOut(rows=1, length=64)


@pytest.fixture(scope="module")
def model():
    return eight_bits.dense(outliers=True)


def stored(model):
    return [tensor.clone() for tensor in model.tensors()]


def same(model, before):
    return all(torch.equal(one, other) for one, other in zip(model.tensors(), before, strict=True))


def test_planted_outliers_a_smoothed_and_a_rotated_copy_compute_the_same(model, text):
    before, largest = stored(model), eight_bits.largest_inputs(model, rows=1, length=64)
    smoothed = eight_bits.smoothed(model, lambda x, weight: eight_bits.smooth_scales(x, weight, 0.5), largest)
    for copy in (model, smoothed, eight_bits.rotated(model), eight_bits.rotated(model, down=False)):
        assert text.divergence(copy) < 1e-7
    assert same(model, before)
    assert not torch.equal(smoothed.layers[0].qkv.dequantize(), model.layers[0].qkv.dequantize())


def test_the_largest_inputs_are_what_the_captions_say(model):
    plain, ids = eight_bits.dense(), eight_bits.HeldOut().ids[:1]
    gate_up, down = (eight_bits.inputs_of(plain, ids)[f"layers.0.{name}"].abs() for name in ("gate_up", "down"))
    lesson = solved("07")
    lesson.says(f"Inputs of gate_up are of similar size, all below {math.ceil(gate_up.max())}.")
    lesson.says("Inputs of down are mostly below 10, but the first token, bos, has one of 80.")
    assert down[1:].amax(1).quantile(0.9) < 10 and down[0].max() == pytest.approx(80, abs=0.5)
    before, after = (
        eight_bits.inputs_of(each, ids)["layers.3.qkv"][50:54].abs().amax(0).sort().values for each in (plain, model)
    )
    lesson.says(f"In tiny-gemma all are below {math.ceil(before.max())}. With planted outliers, four channels are far")
    assert after[-4] > 10 * before.max() >= 10 * after[-5] > 0


def test_a_quantized_copy_leaves_the_model_as_it_was(model, text):
    before, largest = stored(model), eight_bits.largest_inputs(model, rows=1, length=64)
    dynamic = text.divergence(eight_bits.quantized(model, Int8(Activations("int8"))))
    static = text.divergence(eight_bits.quantized(model, Int8(Activations("int8", static=True)), largest))
    assert 0 < dynamic < static
    assert same(model, before)


def test_functions_of_the_lesson_give_what_the_engine_gives(model, text):
    ours = eight_bits.quantized(model, Fp8(activations=eight_bits.RoundedBy()))
    engines = eight_bits.quantized(model, Fp8(activations=Activations("fp8")))
    assert text.divergence(ours) == text.divergence(engines)
    same_weights, count = eight_bits.same_codes(model, eight_bits.round_to_e4m3)
    assert same_weights == count
    x = torch.randn(3, 768, dtype=torch.float64)
    hadamard = eight_bits.hadamard_by(lambda x: pytest.fail("768 is no power of 2"))
    torch.testing.assert_close(hadamard(hadamard(x), inverse=True), x)
