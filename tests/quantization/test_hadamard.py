"""Hadamard matrices against their definition, and the split product against the whole matrix."""

import math

import pytest
import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

from minillm.quantization.methods import hadamard

# The sizes of heads, hidden states and MLPs of the supported families -> the order of their blocks.
SIZES = {
    64: 64,
    128: 128,
    256: 256,
    768: 768,
    896: 896,  # Qwen 2 0.5B: 28 * 32, by Paley's second construction (13)
    1536: 1536,  # Qwen 2 1.5B
    2048: 2048,
    3584: 3584,  # Qwen 2 7B
    4864: 4864,  # Qwen 2 0.5B's MLP: 76 * 64 (37)
    8960: 8960,  # Qwen 2 1.5B's MLP: 140 * 64, by Paley's first construction (139)
    11008: 256,  # Llama 2 7B's MLP: 172 has a matrix, but not by Paley's constructions
    14336: 14336,  # Llama 3 8B's MLP: 28 * 512
    18944: 18944,  # Qwen 2 7B's MLP: 148 * 128 (73)
    24576: 24576,
    92: 4,
    12: 12,
    6: 2,
    7: 1,
}


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_split_into_the_largest_blocks_that_have_a_matrix(size):
    assert hadamard.largest_order(size) == SIZES[size]


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 24, 28, 36, 48, 76, 140, 148, 256, 896])
def test_entries_are_signs_and_rows_are_orthogonal(order):
    found = hadamard.matrix(order)
    assert found.abs().eq(1).all()
    assert (found @ found.t()).equal(order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [1, 4, 64, 2048])
def test_powers_of_2_are_those_of_compressed_tensors(order):
    assert hadamard.matrix(order).equal(deterministic_hadamard_matrix(order, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 7, 6, 64, 80, 92, 256, 768, 896, 1536])
def test_the_split_product_is_that_of_the_whole_matrix(size):
    x = torch.randn(3, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    order = hadamard.largest_order(size)
    whole = torch.block_diag(*[hadamard.matrix(order)] * (size // order)) / math.sqrt(order)
    torch.testing.assert_close(hadamard.transform(x), x @ whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(hadamard.transform(x, inverse=True), x @ whole.t(), rtol=0, atol=1e-12)
    torch.testing.assert_close(hadamard.transform(hadamard.transform(x), inverse=True), x, rtol=0, atol=1e-12)


def test_large_sizes_keep_their_length_and_spread_an_outlier():
    x = torch.zeros(1, 16384, dtype=torch.float64)
    x[0, 77] = 128.0
    assert hadamard.transform(x).abs().sub(1).abs().max() < 1e-12
    y = torch.randn(2, 14336, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard.transform(y).norm(dim=-1), y.norm(dim=-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("size", [768, 2048, 14336])
def test_half_precision_rounds_no_entry_of_the_matrix(size, dtype, bound):
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = hadamard.transform(x.double())
    found = hadamard.transform(x)
    assert found.dtype == dtype
    assert (found.double() - wanted).norm() < bound * wanted.norm()
    ratio = (found.double() * wanted).sum() / wanted.square().sum()
    assert ratio == pytest.approx(1.0, abs=bound / 40)  # a rounded scale would show in all numbers alike
