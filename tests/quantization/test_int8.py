"""Int8 weights: codes and scales by their definition, loaded in pieces, dequantized whole or by row."""

import pytest
import torch

from minillm.quantization import Int8, fp8
from minillm.quantization.int8 import quantize


def weight_of(matrix, bias=None, dtype=torch.float32, pieces=1):
    out, inputs = matrix.shape
    weight = Int8().empty(out, inputs, bias is not None, dtype=dtype, device=torch.device("cpu"))
    weight.load("weight", range(out), iter(matrix.tensor_split(pieces)))
    if bias is not None:
        weight.load("bias", range(out), iter([bias]))
    return weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_code_is_the_nearest_of_its_rows_255_levels_to_the_weight(dtype):
    matrix = torch.randn(7, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    found = quantize(matrix.double())
    codes, scales = found.codes, found.scales.flatten()
    assert codes.dtype == torch.int8 and codes.abs().amax(1).tolist() == [127] * 7
    levels = torch.arange(-127, 128) * scales[:, None, None]
    nearest = (matrix.double()[..., None] - levels).abs().amin(-1)
    torch.testing.assert_close((matrix.double() - codes * scales[:, None]).abs(), nearest, rtol=0, atol=1e-15)


def test_a_row_of_zeros_stays_zero():
    weight = weight_of(torch.zeros(3, 8))
    assert weight.dequantize().eq(0).all() and weight.scales.isfinite().all()


def test_weights_too_small_for_a_scale_become_zero():
    for found in (quantize(torch.full((1, 4), 1e-44)), fp8.quantize(torch.full((1, 4), 1e-43))):
        assert found.scales.item() == 1 and found.codes.float().eq(0).all()


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_loading_in_pieces_equals_loading_the_whole_tensor(pieces):
    matrix = torch.randn(7, 16)
    whole, cut = weight_of(matrix), weight_of(matrix, pieces=pieces)
    assert all(one.equal(other) for one, other in zip(whole.stored(), cut.stored(), strict=True))


def test_a_part_fills_only_its_own_rows():
    first, second = torch.randn(3, 8), torch.randn(5, 8)
    weight = Int8().empty(8, 8, False, dtype=torch.float32, device=torch.device("cpu"))
    weight.load("weight", range(3, 8), iter([second]))
    weight.load("weight", range(3), iter([first]))
    assert weight.dequantize().equal(torch.cat([weight_of(first).dequantize(), weight_of(second).dequantize()]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_equal_those_of_the_dequantized_matrix_in_the_activations_dtype(dtype):
    weight = weight_of(torch.randn(9, 12), torch.randn(9), dtype)
    rows = torch.tensor([8, 0, 0, 3])
    assert weight[rows].equal(weight.dequantize()[rows])
    assert weight.dtype == weight[rows].dtype == weight.bias.dtype == dtype


def test_it_takes_one_byte_per_parameter_and_four_per_row():
    weight = weight_of(torch.randn(16, 100))
    assert sum(tensor.nbytes for tensor in weight.stored()) == 16 * 100 + 16 * 4


def test_random_weights_have_the_spread_of_dense_ones():
    weight = Int8().empty(256, 400, False, dtype=torch.float32, device=torch.device("cpu"))
    weight.randomize(torch.Generator().manual_seed(0))
    assert weight.dequantize().std().item() == pytest.approx(400**-0.5, rel=0.02)
