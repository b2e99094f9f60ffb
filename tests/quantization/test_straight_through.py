"""Fake quantization: the values are those of the format, and the gradient passes."""

import pytest
import torch

from minillm.quantization import Int4
from minillm.quantization.methods.straight_through import fake_quantize


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_with_4_bits_the_values_are_those_that_int4_stores(scale_dtype):
    matrix = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    matrix[1, :16] = 0
    weight = Int4(16, scale_dtype=scale_dtype).empty(6, 64, False, dtype=torch.float32, device=torch.device("cpu"))
    weight.load("weight", range(6), [matrix])
    assert fake_quantize(matrix, 4, 16, scale_dtype).equal(weight.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_every_value_is_the_nearest_of_its_groups_levels(bits):
    matrix = torch.randn(5, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grouped, found = matrix.view(5, 3, 16), fake_quantize(matrix, bits, 16).view(5, 3, 16)
    levels = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    scales = grouped.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    nearest = (grouped[..., None] - levels * scales[..., None]).abs().amin(-1)
    torch.testing.assert_close((found - grouped).abs(), nearest, rtol=0, atol=1e-12)


def test_the_gradient_of_the_rounded_weight_reaches_the_weight_unchanged():
    weight = torch.randn(3, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    factors = torch.arange(96.0).view(3, 32)
    (fake_quantize(weight, 3, 16) * factors).sum().backward()
    assert weight.grad.equal(factors)
