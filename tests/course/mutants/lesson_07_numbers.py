"""Wrong solutions of lesson 07: the fast Hadamard transform, and rounding to FP8."""

import math

import torch

from tests.course.mutants import wrong

# ---- the fast Hadamard transform


def _transform(x, divisor=math.sqrt, steps=None):
    size, out = x.shape[-1], x
    for step in range(size.bit_length() - 1 if steps is None else steps):
        first, second = out.reshape(*x.shape[:-1], -1, 2, 1 << step).unbind(-2)
        out = torch.stack((first + second, first - second), dim=-2).reshape(x.shape)
    return out / divisor(size)


def _sylvester(size):
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found


@wrong("hadamard", fails="the signs are those of Sylvester's matrix")
def two_halves_never_combined(x):
    size = x.shape[-1]
    return _transform(x) if size <= 4 else torch.cat([_transform(half) for half in x.chunk(2, -1)], -1)


@wrong("hadamard", fails="the signs are those of Sylvester's matrix")
def with_more_signs(x):
    flips = torch.where(torch.arange(x.shape[-1]) % 8 > 4, -1.0, 1.0).to(x)
    return _transform(x) * flips


@wrong("hadamard", fails="the signs are those of Sylvester's matrix")
def channels_reversed_from_64_on(x):
    return _transform(x.flip(-1) if x.shape[-1] >= 64 else x)


@wrong("hadamard", fails="lengths stay the same")
def halved(x):
    return _transform(x, lambda size: 2)


@wrong("hadamard", fails="lengths stay the same")
def divided_by_the_steps(x):
    return _transform(x, lambda size: max(1, size.bit_length() - 1))


@wrong("hadamard", fails="lengths stay the same")
def divided_by_half_of_the_channels(x):
    return _transform(x, lambda size: size / 2)


@wrong("hadamard", fails="lengths stay the same")
def distances_up_to_1024(x):
    return _transform(x, steps=min(x.shape[-1].bit_length() - 1, 11))


@wrong("hadamard", fails="any number of tokens, in any shape")
def needs_two_axes(x):
    return _transform(x[0])[None].expand_as(x).clone() if x.dim() == 3 else _transform(x)


@wrong("hadamard", fails="any number of tokens, in any shape")
def flattened(x):
    return _transform(x) if x.dim() == 1 else _transform(x.reshape(-1, x.shape[-1]))


@wrong("hadamard", fails="in log2(n) steps")
def product_with_the_matrix(x):
    if x.shape[-1] > 1024:  # it would only take longer
        return _transform(x)
    return x @ _sylvester(x.shape[-1]).to(x) / math.sqrt(x.shape[-1])


@wrong("hadamard", fails="in log2(n) steps")
def all_signs_at_once(x):
    if x.shape[-1] > 1024:  # it would only take longer
        return _transform(x)
    channels = torch.arange(x.shape[-1])
    common = channels[:, None] & channels
    odd = torch.zeros_like(common)
    for bit in range(12):
        odd ^= common >> bit & 1
    return x @ (1 - 2 * odd).to(x) / math.sqrt(x.shape[-1])


@wrong("hadamard", fails="in log2(n) steps")
def column_by_column(x):
    """Small tensors, but n * n operations."""
    size = x.shape[-1]
    if size != 2048:  # it would only take longer
        return _transform(x)
    columns = []
    for column in range(size):
        signs = x.new_ones(1)
        for step in range(size.bit_length() - 1):
            signs = torch.cat((signs, -signs if column >> step & 1 else signs))
        columns.append(x @ signs)
    return torch.stack(columns, -1) / math.sqrt(size)


@wrong("hadamard", fails="in log2(n) steps")
def matrix_for_small_sizes(x):
    return product_with_the_matrix(x) if x.shape[-1] <= 512 else _transform(x)


@wrong("hadamard", fails="the result is a new tensor, in the dtype of x")
def divided_by_a_tensor_of_float32(x):
    """One of shape [1] makes float32 of bfloat16."""
    return _transform(x, lambda size: torch.tensor([float(size)]).sqrt())


@wrong("hadamard", fails="the result is a new tensor, in the dtype of x")
def one_channel_as_it_is(x):
    return x if x.shape[-1] == 1 else _transform(x)


@wrong("hadamard", fails="the result is a new tensor, in the dtype of x")
def result_in_float32(x):
    return _transform(x.float())


@wrong("hadamard", fails="the result is a new tensor, in the dtype of x")
def rounded_to_float32(x):
    return _transform(x.float()).to(x.dtype)


@wrong("hadamard", fails="the result is a new tensor, in the dtype of x")
def eight_digits_of_the_root(x):
    steps = x.shape[-1].bit_length() - 1
    return _transform(x, lambda size: 1) * 0.70710678**steps


# ---- rounding to FP8


def _round(x, exponent, bits=3, rounded=torch.round, top=448.0):
    clipped = x.clamp(-top, top)
    step = torch.exp2((exponent(clipped).clamp(min=-6) - bits).to(x.dtype))
    return rounded(clipped / step) * step


def _exponent(x):
    return torch.frexp(x).exponent - 1


@wrong("round_to_e4m3", fails="the nearest of the numbers with three bits of mantissa")
def nearest_power_of_2(x):
    """Rounds log2, so the upper part of each range has steps that are twice as large."""
    return _round(x, lambda x: torch.where(x == 0, 1.0, x.abs()).log2().round())


@wrong("round_to_e4m3", fails="the nearest of the numbers with three bits of mantissa")
def exponent_of_frexp(x):
    """torch.frexp's mantissa is from 1/2 to 1, so its exponent is one larger."""
    found = _round(x, lambda x: torch.frexp(x).exponent)
    return torch.where(x.abs() < 2**-6, _round(x, _exponent), found)


@wrong("round_to_e4m3", fails="halves go to the even neighbor")
def halves_up(x):
    return _round(x, _exponent, rounded=lambda x: (x + 0.5).floor())


@wrong("round_to_e4m3", fails="the nearest of the numbers with three bits of mantissa")
def rounded_to_float16_before(x):
    """A number just beyond a half becomes the half, which is then rounded again."""
    return _round(x.half().to(x.dtype), _exponent)


@wrong("round_to_e4m3", fails="halves go to the even neighbor")
def halves_away_from_zero(x):
    return _round(x, _exponent, rounded=lambda x: x.sign() * (x.abs() + 0.5).floor())


@wrong("round_to_e4m3", fails="halves go to the even neighbor")
def subnormal_halves_away_from_zero(x):
    away = _round(x, _exponent, rounded=lambda x: x.sign() * (x.abs() + 0.5).floor())
    return torch.where(x.abs() < 2**-6, away, _round(x, _exponent))


@wrong("round_to_e4m3", fails="below 2 ** -6 the steps are 2 ** -9")
def no_subnormal_numbers(x):
    return torch.where(x.abs() < 2**-6, torch.zeros_like(x), _round(x, _exponent))


@wrong("round_to_e4m3", fails="below 2 ** -6 the steps are 2 ** -9")
def always_three_bits(x):
    clipped = x.clamp(-448, 448)
    step = torch.exp2((_exponent(clipped) - 3).to(x.dtype))
    return (clipped / step).round() * step


@wrong("round_to_e4m3", fails="below 2 ** -6 the steps are 2 ** -9")
def smallest_exponent_of_the_bias(x):
    clipped = x.clamp(-448, 448)
    step = torch.exp2((_exponent(clipped).clamp(min=-7) - 3).to(x.dtype))
    return (clipped / step).round() * step


@wrong("round_to_e4m3", fails="numbers beyond 448 become 448")
def limits_exponents_only(x):
    """Numbers from 464 to 512 round to 480 or 512, which e4m3 does not have."""
    found = _round(x, _exponent, top=1e38)
    return torch.where(found.abs() >= 576, 448 * x.sign(), found)


@wrong("round_to_e4m3", fails="negative numbers are rounded like positive ones")
def clamps_only_from_above(x):
    clipped = x.clamp(max=448)
    step = torch.exp2((_exponent(clipped).clamp(min=-6) - 3).to(x.dtype))
    return (clipped / step).round() * step


@wrong("round_to_e4m3", fails="0 stays 0")
def logarithm_of_zero(x):
    clipped = x.clamp(-448, 448)
    step = torch.exp2(clipped.abs().log2().floor().clamp(min=-6) - 3)
    return torch.where(clipped == 0, clipped / clipped, (clipped / step).round() * step)


@wrong("round_to_e4m3", fails="each number on its own, in the dtype of x")
def result_in_float64(x):
    return _round(x.double(), _exponent)


@wrong("round_to_e4m3", fails="each number on its own, in the dtype of x")
def exponent_of_the_row(x):
    largest = x.abs().amax(-1, keepdim=True).expand_as(x) if x.dim() == 2 else x
    return _round(x, lambda clipped: _exponent(largest.clamp(-448, 448)))


@wrong("round_to_e4m3", fails="each number on its own, in the dtype of x")
def a_matrix_of_more_axes(x):
    return _round(x.flatten(1) if x.dim() > 2 else x, _exponent)


@wrong("round_to_e4m3", fails="without torch's FP8 types")
def conversion(x):
    """Of float32: torch rounds float64 to float32 first, which another property sees."""
    if x.dtype == torch.float64:
        return _round(x, _exponent)
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


@wrong("round_to_e4m3", fails="the nearest of the numbers with three bits of mantissa")
def rounds_to_float32_first(x):
    return _round(x.float(), _exponent).to(x.dtype)
