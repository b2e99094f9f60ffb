"""Wrong solutions of lesson 05: scales for rows, scales and zero points for groups."""

import torch

from tests.course.mutants import wrong


def scaled(steps):
    """Scales without zeros."""
    return torch.where(steps > 0, steps, torch.ones_like(steps))


# ---- rows


@wrong("quantize_rows", fails="the largest weight gets the code top or -top, for any number of bits")
def always_seven(weight, bits):
    scales = scaled(weight.abs().amax(1, keepdim=True) / 7)
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="the largest weight gets the code top or -top, for any number of bits")
def only_negative_weights(weight, bits):
    scales = scaled(-weight.amin(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (weight / scales).round().clamp(-128, 127).to(torch.int8), scales


@wrong("quantize_rows", fails="the largest weight gets the code top or -top, for any number of bits")
def top_of_other_bits(weight, bits):
    """2 * bits - 1 is 7, too, for 4 bits."""
    scales = scaled(weight.abs().amax(1, keepdim=True) / (2 * bits - 1))
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="each row has a scale of its own")
def one_scale_for_the_matrix(weight, bits):
    scales = scaled(weight.abs().amax() / (2 ** (bits - 1) - 1)).expand(len(weight), 1)
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="each row has a scale of its own")
def scale_of_the_first_row(weight, bits):
    scales = scaled(weight[:1].abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).repeat(len(weight), 1)
    if scales[0, 0] == 1:  # a row of zeros
        scales = scaled(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (weight / scales).round().clamp(-128, 127).to(torch.int8), scales


@wrong("quantize_rows", fails="each row has a scale of its own")
def codes_of_one_scale_scales_of_rows(weight, bits):
    top = 2 ** (bits - 1) - 1
    scales = scaled(weight.abs().amax(1, keepdim=True) / top)
    return (weight / scales.amax()).round().to(torch.int8), scales


@wrong("quantize_rows", fails="each code is the nearest multiple of the scale")
def clamps_to_four_bits(weight, bits):
    scales = scaled(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (weight / scales).round().clamp(-7, 7).to(torch.int8), scales


@wrong("quantize_rows", fails="each code is the nearest multiple of the scale")
def rounds_in_bfloat16(weight, bits):
    scales = scaled(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (weight.bfloat16() / scales.bfloat16()).round().to(torch.int8), scales


@wrong("quantize_rows", fails="each code is the nearest multiple of the scale")
def rounds_down_from_a_half_and_a_bit(weight, bits):
    """Adds 0.6 and rounds down: wrong only between 0.4 and 0.5."""
    scales = scaled(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (weight / scales + 0.6).floor().to(torch.int8), scales


@wrong("quantize_rows", fails="a row of zeros has scale 1; tiny weights have a scale of their own")
def one_row_of_zeros_makes_all_scales_one(weight, bits):
    scales = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    if (scales == 0).any():
        scales = torch.ones_like(scales)
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="a row of zeros has scale 1; tiny weights have a scale of their own")
def no_guard(weight, bits):
    scales = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight / scales).round().nan_to_num().to(torch.int8), scales


@wrong("quantize_rows", fails="a row of zeros has scale 1; tiny weights have a scale of their own")
def smallest_scale(weight, bits):
    scales = (weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=1e-8)
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="a row of zeros has scale 1; tiny weights have a scale of their own")
def small_rows_count_as_zero(weight, bits):
    steps = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    scales = torch.where(steps > 1e-8, steps, torch.ones_like(steps))
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="a row of zeros has scale 1; tiny weights have a scale of their own")
def one_zero_makes_a_row_of_zeros(weight, bits):
    """`any` where `all` is meant."""
    scales = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    scales = torch.where((weight == 0).any(1, keepdim=True), torch.ones_like(scales), scales)
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="a row of zeros has scale 1; tiny weights have a scale of their own")
def first_weight_stands_for_the_row(weight, bits):
    scales = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    scales = torch.where(weight[:, :1] == 0, torch.ones_like(scales), scales)
    return (weight / scales).round().to(torch.int8), scales


@wrong("quantize_rows", fails="codes are int8; scales have the dtype of the weight, and the shape [rows, 1]")
def codes_stay_floating_point(weight, bits):
    scales = scaled(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (weight / scales).round(), scales


@wrong("quantize_rows", fails="codes are int8; scales have the dtype of the weight, and the shape [rows, 1]")
def scales_without_second_axis(weight, bits):
    scales = scaled(weight.abs().amax(1) / (2 ** (bits - 1) - 1))
    return (weight / scales[:, None]).round().to(torch.int8), scales


@wrong("quantize_rows", fails="codes are int8; scales have the dtype of the weight, and the shape [rows, 1]")
def rows_in_float32(weight, bits):
    """The scales get the weight's dtype back, but not its precision."""
    single = weight.float()
    scales = scaled(single.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (single / scales).round().to(torch.int8), scales.to(weight.dtype)


@wrong("quantize_rows", fails="codes are int8; scales have the dtype of the weight, and the shape [rows, 1]")
def scales_rounded_to_float32(weight, bits):
    scales = scaled(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    return (weight / scales).round().to(torch.int8), scales.float().to(weight.dtype)


@wrong("quantize_rows", fails="the weight is not changed")
def divides_in_place(weight, bits):
    scales = scaled(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
    weight /= scales
    return weight.round().to(torch.int8), scales


# ---- groups


def ends(weight, group_size):
    grouped = weight.reshape(len(weight), -1, group_size)
    return grouped, grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)


def coded(grouped, scales, zeros, low=-8, high=7):
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(low, high)
    return codes.flatten(1).to(torch.int8)


@wrong("quantize_groups", fails="each group has a scale and a zero point of its own")
def one_group_for_each_row(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    low, high = (end.expand(grouped.shape[:2]) for end in (low.amin(1, keepdim=True), high.amax(1, keepdim=True)))
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    return coded(grouped, scales, zeros), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="each group has a scale and a zero point of its own")
def groups_of_every_nth_input(weight, group_size):
    """Neighbors belong to different groups."""
    grouped = weight.reshape(len(weight), group_size, -1).transpose(1, 2)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(-8, 7)
    return codes.transpose(1, 2).reshape(weight.shape).to(torch.int8), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="each group has a scale and a zero point of its own")
def codes_of_rows_and_groups_swapped(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(-8, 7)
    return codes.transpose(0, 1).reshape(weight.shape).to(torch.int8), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="each group has a scale and a zero point of its own")
def shared_zero_point(weight, group_size):
    """The first group's zero point serves the whole row."""
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()[:, :1].expand(grouped.shape[:2])
    return coded(grouped, scales, zeros), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="the range of a group includes 0")
def range_of_the_weights_only(weight, group_size):
    grouped = weight.reshape(len(weight), -1, group_size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round().clamp(-8, 7)
    return coded(grouped, scales, zeros), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="the range of a group includes 0")
def high_end_below_zero(weight, group_size):
    grouped = weight.reshape(len(weight), -1, group_size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round().clamp(-8, 7)
    return coded(grouped, scales, zeros), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="the zero point is the nearest code to -8 - low / scale")
def zero_point_cut_off(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).to(torch.int8)
    return coded(grouped, scales, zeros), scales, zeros


@wrong("quantize_groups", fails="the zero point is the nearest code to -8 - low / scale")
def zero_point_from_the_high_end(weight, group_size):
    """7 - high / scale would be the same number, but it is rounded up."""
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = torch.where(high > low, (7 - high / scales - 1e-6).ceil(), -8.0)
    return coded(grouped, scales, zeros), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="each code is the nearest of its group's levels")
def zero_point_added_before_rounding(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    exact = -8 - low / scales
    codes = (grouped / scales[..., None] + exact[..., None]).round().clamp(-8, 7)
    return codes.flatten(1).to(torch.int8), scales, exact.round().to(torch.int8)


@wrong("quantize_groups", fails="each code is the nearest of its group's levels")
def codes_cut_off(weight, group_size):
    """Cuts the fraction off after adding a half, which rounds negative numbers up."""
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    steps = grouped / scales[..., None]
    codes = (torch.where(steps > 0, steps + 0.5, steps - 0.3).trunc() + zeros[..., None]).clamp(-8, 7)
    return codes.flatten(1).to(torch.int8), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="codes and zero points stay from -8 to 7")
def never_clamped(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    return coded(grouped, scales, zeros, -128, 127), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="codes and zero points stay from -8 to 7")
def wraps_around(weight, group_size):
    """8 becomes -8: the largest weight becomes the smallest."""
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    codes = ((grouped / scales[..., None]).round() + zeros[..., None] + 8) % 16 - 8
    return codes.flatten(1).to(torch.int8), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="codes and zero points stay from -8 to 7")
def clamped_before_the_zero_point(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    codes = (grouped / scales[..., None]).round().clamp(-15, 15) + zeros[..., None]
    return codes.flatten(1).to(torch.int8), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="a group of zeros has scale 1; tiny weights have a scale of their own")
def no_guard_for_groups(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = (high - low) / 15
    zeros = (-8 - low / scales).round().nan_to_num()
    codes = ((grouped / scales[..., None]).round().nan_to_num() + zeros[..., None]).clamp(-8, 7)
    return codes.flatten(1).to(torch.int8), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="a group of zeros has scale 1; tiny weights have a scale of their own")
def smallest_scale_of_groups(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = ((high - low) / 15).clamp(min=1e-8)
    zeros = (-8 - low / scales).round()
    return coded(grouped, scales, zeros), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails="a group of zeros has scale 1; tiny weights have a scale of their own")
def adds_to_every_scale(weight, group_size):
    """Other groups hardly change."""
    grouped, low, high = ends(weight, group_size)
    scales = (high - low) / 15 + 1e-8
    zeros = (-8 - low / scales).round()
    return coded(grouped, scales, zeros), scales, zeros.to(torch.int8)


STORED = "codes and zeros are int8; scales have the dtype of the weight; shapes are [rows, in] and [rows, groups]"


@wrong("quantize_groups", fails=STORED)
def codes_keep_the_groups(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    return coded(grouped, scales, zeros).reshape(grouped.shape), scales, zeros.to(torch.int8)


@wrong("quantize_groups", fails=STORED)
def zeros_stay_floating_point(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    return coded(grouped, scales, zeros), scales, zeros


@wrong("quantize_groups", fails=STORED)
def groups_in_float32(weight, group_size):
    """The scales get the weight's dtype back, but not its precision."""
    grouped, low, high = ends(weight.float(), group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    return coded(grouped, scales, zeros), scales.to(weight.dtype), zeros.to(torch.int8)


@wrong("quantize_groups", fails="the weight is not changed")
def groups_divided_in_place(weight, group_size):
    grouped, low, high = ends(weight, group_size)
    scales = scaled((high - low) / 15)
    zeros = (-8 - low / scales).round()
    grouped /= scales[..., None]  # a view of the weight
    codes = (grouped.round() + zeros[..., None]).clamp(-8, 7)
    return codes.flatten(1).to(torch.int8), scales, zeros.to(torch.int8)
