"""FP8 weights and quantized activations: the nearest codes by their definition."""

import pytest
import torch

from minillm.quantization import Activations, Fp8
from minillm.quantization.activations import to_codes

CPU = torch.device("cpu")


def every_code():
    """All finite values of e4m3, from the definition: 4 bits of exponent (bias 7), 3 of mantissa, no infinities."""
    values = {0.0}
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):  # NaN
                value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
                values |= {value, -value}
    return torch.tensor(sorted(values), dtype=torch.float64)


def test_e4m3_codes_are_the_nearest_values_and_clip_at_448():
    x = torch.cat([torch.randn(500, dtype=torch.float64) * 100, torch.tensor([448.0, 460.0, -1e9, 0.0, 1e-4])])
    found, codes = to_codes(x.float(), "fp8").double(), every_code()
    nearest = (x.float().double()[:, None].clamp(-448, 448) - codes).abs().amin(1)
    torch.testing.assert_close((found - x.float().double().clamp(-448, 448)).abs(), nearest, rtol=0, atol=0)


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_the_largest_weight_of_a_row_or_module_becomes_448(scales):
    matrix = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))
    weight = Fp8(scales).empty(6, 16, False, dtype=torch.float32, device=CPU)
    for rows in (range(2), range(2, 6)):  # two modules
        weight.load("weight", rows, iter(matrix[rows.start : rows.stop].split(1)))
    largest = weight.codes.float().abs()
    if scales == "channel":
        assert largest.amax(1).tolist() == [448.0] * 6
    else:
        assert largest[:2].amax() == largest[2:].amax() == 448 and weight.scales.unique().numel() == 2
    assert ((weight.dequantize() - matrix).abs() <= matrix.abs() / 16 + weight.scales[:, None] * 2**-10).all()


def test_rows_equal_those_of_the_dequantized_matrix():
    weight = Fp8().empty(9, 32, False, dtype=torch.bfloat16, device=CPU)
    weight.load("weight", range(9), iter([torch.randn(9, 32)]))
    rows = torch.tensor([8, 0, 0, 3])
    assert weight[rows].equal(weight.dequantize()[rows]) and weight[rows].dtype == torch.bfloat16


def test_random_weights_have_the_spread_of_dense_ones():
    weight = Fp8().empty(256, 400, False, dtype=torch.float32, device=CPU)
    weight.randomize(torch.Generator().manual_seed(0))
    assert weight.dequantize().std().item() == pytest.approx(400**-0.5, rel=0.02)


@pytest.mark.parametrize(("kind", "largest"), [("int8", 127.5), ("fp8", 448.0)])
def test_each_token_is_quantized_by_its_own_largest_value(kind, largest):
    x = torch.randn(5, 32) * torch.tensor([[1e-3], [1.0], [50.0], [1.0], [0.0]])
    found = Activations(kind).quantize(x)
    wanted = x.abs().amax(1, keepdim=True) / largest
    torch.testing.assert_close(found.scales[:4], wanted[:4])
    assert found.scales[4] == 1 and found.dequantize(x.dtype)[4].eq(0).all()
    step = found.scales / 2 if kind == "int8" else x.abs() / 16 + found.scales * 2**-10
    assert ((found.dequantize(x.dtype) - x).abs() <= step * 1.001).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_static_scale_is_used_for_all_tokens_and_clips_what_is_larger(kind):
    x = torch.tensor([[0.5, -1.0], [3.0, -100.0]])
    found = Activations(kind, static=True).quantize(x, torch.tensor([0.01]))
    highest, lowest = (1.27, -1.28) if kind == "int8" else (4.48, -4.48)
    assert found.scales.flatten().tolist() == pytest.approx([0.01, 0.01])
    wanted = [highest if kind == "int8" else 3.0, lowest]
    torch.testing.assert_close(found.dequantize(x.dtype)[1], torch.tensor(wanted), rtol=0.07, atol=0)
