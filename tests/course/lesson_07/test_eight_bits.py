"""Lesson 07's set-ups: copies of a model compute the same, and the model that they were made from stays as it was."""

import math

import pytest
import torch

from minillm.course.lesson_07 import eight_bits
from minillm.course.shared import held_out
from minillm.model.loader import EMBEDDED
from minillm.quantization import Activations, Fp8, Int8
from minillm.quantization.methods import hadamard as matrices
from minillm.tokenizer import Tokenizer
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
    plain, ids = eight_bits.dense(), held_out.held_out_text(1)
    shown = ("layers.0.gate_up", "layers.0.down", "layers.5.down")
    inputs = eight_bits.inputs_of(plain, ids)
    gate_up, down, last = (inputs[name].abs().amax(1) for name in shown)
    lesson = solved("07")
    lesson.says(
        "each token's largest is between 1.5 and 3.",
        "the first token, bos, has an input of 80; all others stay below 10.",
        "half of the tokens stay below 25, but four reach 180 to 193, bos among them, and the largest in the "
        "calibration text is 383.",
        "in the calibration text, the word `asked` reaches 383",
    )
    assert gate_up.min() == pytest.approx(1.5, abs=0.01) and gate_up.max() == pytest.approx(3, abs=0.05)
    assert down[0] == pytest.approx(80, abs=0.5) and 9 < down[1:].max() < 10
    large = last > 180
    assert last.median() < 25 and large.sum() == 4 and large[0] and 192 < last.max() < 193
    calibration = held_out.calibration_text(8)
    reached = eight_bits.inputs_of(plain, calibration)["layers.5.down"].abs().amax(1)
    assert reached.max() == pytest.approx(383, abs=0.5)
    tokenizer = Tokenizer.from_pretrained(EMBEDDED)
    assert tokenizer.decode([calibration.flatten()[reached.argmax()].item()]) == " asked"
    before, after = (
        eight_bits.inputs_of(each, ids)["layers.3.qkv"][50:54].abs().amax(0).sort().values for each in (plain, model)
    )
    lesson.says(
        f"In tiny-gemma all are below {math.ceil(before.max())}. With planted outliers, four channels are far "
        "above that in most tokens"
    )
    assert after[-4] > 10 * before.max() >= 10 * after[-5] > 0


def test_a_quantized_copy_leaves_the_model_as_it_was(model, text):
    before, largest = stored(model), eight_bits.largest_inputs(model, rows=1, length=64)
    dynamic = text.divergence(eight_bits.quantized(model, Int8(Activations("int8"))))
    static = text.divergence(eight_bits.quantized(model, Int8(Activations("int8", static=True)), largest))
    assert 0 < dynamic < static
    assert same(model, before)


def test_one_product_of_each_layer_comes_from_another_model(model):
    other = eight_bits.dense()
    found = eight_bits.with_part(model, other, "down")
    for layer, own, theirs in zip(found.layers, model.layers, other.layers, strict=True):
        assert (layer.down, layer.qkv, layer.gate_up) == (theirs.down, own.qkv, own.gate_up)
        assert own.down is not theirs.down


def test_functions_of_the_lesson_give_what_the_engine_gives(model, text):
    ours = eight_bits.quantized(model, Fp8(activations=eight_bits.RoundedBy()))
    engines = eight_bits.quantized(model, Fp8(activations=Activations("fp8")))
    assert text.divergence(ours) == text.divergence(engines)
    same_weights, count = eight_bits.same_codes(model, eight_bits.round_to_e4m3)
    assert same_weights == count


@pytest.mark.parametrize(("size", "power"), [(1, 1), (256, 256), (768, 64), (40, 2), (1376, 1), (7, 1)])
def test_a_function_for_powers_of_2_transforms_as_the_engine_does(size, power):
    given = []

    def function(x):
        given.append(x.shape[-1])
        return matrices.transform(x)

    x = torch.randn(2, 3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hadamard = eight_bits.hadamard_by(function)
    for inverse in (False, True):
        torch.testing.assert_close(hadamard(x, inverse=inverse), matrices.transform(x, inverse))
    assert given == [power, power]
