"""Int4 weights: the nearest of sixteen levels in each group, packed two to a byte."""

import pytest
import torch

from minillm.errors import ConfigError
from minillm.quantization import Codes, Int4
from minillm.quantization.int4 import pack, round_to_int4, scales_of, unpack

CPU = torch.device("cpu")


def weight_of(matrix, **parameters):
    format = Int4(**parameters)
    weight = format.empty(*matrix.shape, False, dtype=matrix.dtype, device=CPU)
    weight.load("weight", range(len(matrix)), iter(matrix.tensor_split(2)))
    return weight


def test_packing_keeps_every_code_and_puts_the_first_into_the_low_half():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 1)
    packed = pack(codes)
    assert packed.shape == (3, 8) and packed[0].tolist() == [16 * (low + 1) + low for low in range(0, 16, 2)]
    assert unpack(packed).equal(codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [4, 16])
def test_each_code_is_the_nearest_level_of_its_group(size, symmetric):
    matrix = torch.randn(5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.3
    weight = weight_of(matrix, group_size=size, symmetric=symmetric)
    codes = weight.read(range(5))
    zeros = torch.zeros(5, 32 // size) if codes.zeros is None else codes.zeros.double()
    levels = (torch.arange(-8, 8) - zeros[..., None]) * codes.scales[..., None]  # [rows, groups, 16]
    distance = (matrix.view(5, -1, size)[..., None] - levels[:, :, None]).abs().amin(-1)
    torch.testing.assert_close((weight.dequantize() - matrix).abs(), distance.view(5, 32), rtol=0, atol=1e-12)


def test_symmetric_scales_put_the_largest_weight_seven_and_a_half_steps_from_zero():
    grouped = torch.tensor([[[1.0, -3.0, 2.0, 0.5]], [[0.0, 0.0, 0.0, 0.0]]])
    scales, zeros = scales_of(grouped, Int4(group_size=4))
    assert scales.flatten().tolist() == pytest.approx([0.4, 1.0]) and zeros is None


def test_with_zero_points_the_levels_span_the_group_and_zero():
    grouped = torch.tensor([[[2.0, 5.0, 3.0, 4.0], [-5.0, -2.0, -1.0, -4.0], [-1.0, 2.0, 0.0, 1.0]]])
    scales, zeros = scales_of(grouped, Int4(group_size=4, symmetric=False))
    assert scales.flatten().tolist() == pytest.approx([5 / 15, 5 / 15, 3 / 15])
    assert zeros.flatten().tolist() == [-8, 7, -3]
    codes = round_to_int4(grouped, scales, zeros)
    assert Codes(codes.view(1, -1), scales, zeros).dequantize().view(3, 4)[2, 2] == 0  # a weight of 0 stays 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_for_the_scales_as_they_are_stored(dtype):
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight = weight_of(matrix, group_size=16)
    scales = weight.scales.double()
    assert weight.scales.dtype == dtype
    steps = (matrix.double().view(64, 4, 16) / scales[..., None]).clamp(-8, 7)
    found = weight.read(range(64)).codes.double().view(64, 4, 16)
    assert (found - steps).abs().max() <= 0.5 + 1e-5


def test_weights_too_small_for_the_dtype_of_scales_become_zero():
    grouped = torch.full((1, 1, 4), 1e-8)
    for symmetric in (True, False):
        scales, zeros = scales_of(grouped, Int4(4, symmetric, scale_dtype=torch.float16))
        codes = round_to_int4(grouped, scales, zeros)
        assert Codes(codes.view(1, 4), scales, zeros).dequantize().eq(0).all()


def test_it_takes_half_a_byte_per_parameter_and_a_scale_per_group():
    weight = weight_of(torch.randn(16, 128).bfloat16(), group_size=32)
    assert sum(tensor.nbytes for tensor in weight.stored()) == 16 * 128 // 2 + 16 * 4 * 2


def test_rows_equal_those_of_the_dequantized_matrix():
    weight = weight_of(torch.randn(9, 32), group_size=8, symmetric=False)
    rows = torch.tensor([8, 0, 0, 3])
    assert weight[rows].equal(weight.dequantize()[rows])


def test_columns_in_another_order_multiply_their_own_inputs():
    order = torch.tensor([2, 0, 3, 1])
    weight = Int4(group_size=2, act_order=True).empty(1, 4, False, dtype=torch.float32, device=CPU)
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)
    weight.fill(range(1), Codes(codes, torch.tensor([[1.0, 10.0]]), order=order))
    assert weight.dequantize().tolist() == [[2.0, 40.0, 1.0, 30.0]]


def test_projections_with_one_input_must_agree_on_the_order_of_their_inputs():
    weight = Int4(group_size=2, act_order=True).empty(2, 4, False, dtype=torch.float32, device=CPU)
    codes, scales = torch.zeros(1, 4, dtype=torch.int8), torch.ones(1, 2)
    weight.fill(range(1), Codes(codes, scales, order=torch.tensor([3, 2, 1, 0])))
    with pytest.raises(ConfigError, match="different orders"):
        weight.fill(range(1, 2), Codes(codes, scales, order=torch.tensor([0, 1, 2, 3])))


@pytest.mark.parametrize("trivial", [0, 1])
def test_the_module_that_is_filled_first_sets_the_order_wherever_its_rows_are(trivial):
    weight = Int4(group_size=2, act_order=True).empty(2, 4, False, dtype=torch.float32, device=CPU)
    codes, scales = torch.tensor([[1, 2, 3, 4]], dtype=torch.int8), torch.ones(1, 2)
    order = torch.tensor([3, 2, 1, 0])
    weight.fill(range(1, 2), Codes(codes, scales, order=order))
    weight.fill(range(1), Codes(codes, scales, order=order))
    assert weight.dequantize().tolist() == [[4.0, 3.0, 2.0, 1.0]] * 2
    both = [Codes(codes, scales, order=order), Codes(codes, scales)]
    fresh = Int4(group_size=2, act_order=True).empty(2, 4, False, dtype=torch.float32, device=CPU)
    fresh.fill(range(1, 2), both[trivial])
    with pytest.raises(ConfigError, match="different orders"):
        fresh.fill(range(1), both[1 - trivial])


@pytest.mark.parametrize("name", ["symmetric", "act_order"])
def test_flags_must_be_booleans(name):
    with pytest.raises(ConfigError, match=f"{name} must be True or False, not 'no'"):
        Int4(**{name: "no"})


@pytest.mark.parametrize("size", [0, 3, -2, 2.5, None, "64"])
def test_an_impossible_group_size_is_refused(size):
    with pytest.raises(ConfigError, match="group_size must be an even whole number"):
        Int4(group_size=size)


def test_a_group_size_that_does_not_divide_names_sizes_that_do():
    with pytest.raises(
        ConfigError, match="group_size=128 does not divide.* 96 inputs.* 32, 16.*`minillm quantize --group"
    ):
        Int4().empty(8, 96, False, dtype=torch.float32, device=CPU)


def test_random_weights_have_the_spread_of_dense_ones():
    for symmetric in (True, False):
        weight = Int4(group_size=40, symmetric=symmetric).empty(256, 400, False, dtype=torch.float32, device=CPU)
        weight.randomize(torch.Generator().manual_seed(0))
        assert weight.dequantize().std().item() == pytest.approx(400**-0.5, rel=0.1)
