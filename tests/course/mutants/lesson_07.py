"""Wrong solutions of lesson 07: products of eight-bit numbers, and SmoothQuant's scales."""

import torch

from tests.course.mutants import wrong

# ---- products of eight-bit numbers


def _token_scales(x, axis=-1):
    largest = x.abs().amax(axis, keepdim=True)
    return torch.where(largest > 0, largest / 127.5, torch.ones_like(largest))


def _codes(x, scales):
    return (x / scales).round().clamp(-128, 127)


def _multiply(x_codes, codes, token_scales, scales, dtype, wide=torch.float64):
    return (x_codes.to(wide) @ codes.to(wide).T * token_scales * scales).to(dtype)


def _product(x, codes, scales, input_scale=None, dynamic=_token_scales, rounded=_codes):
    token_scales = dynamic(x) if input_scale is None else input_scale
    return _multiply(rounded(x, token_scales), codes, token_scales, scales, x.dtype)


@wrong("int8_linear", fails="each token has its own scale")
def one_scale_for_the_batch(x, codes, scales, input_scale=None):
    return _product(x, codes, scales, input_scale, dynamic=lambda x: _token_scales(x.reshape(1, -1)))


@wrong("int8_linear", fails="each token has its own scale")
def scale_of_the_newest_token(x, codes, scales, input_scale=None):
    return _product(x, codes, scales, input_scale, dynamic=lambda x: _token_scales(x[-1:]))


@wrong("int8_linear", fails="each token has its own scale")
def one_scale_from_nine_tokens_on(x, codes, scales, input_scale=None):
    dynamic = _token_scales if len(x) <= 8 else lambda x: _token_scales(x.reshape(1, -1))
    return _product(x, codes, scales, input_scale, dynamic)


@wrong("int8_linear", fails="the largest magnitude is 127.5 codes")
def largest_of_the_first_64_inputs(x, codes, scales, input_scale=None):
    return _product(x, codes, scales, input_scale, dynamic=lambda x: _token_scales(x[:, :64]))


@wrong("int8_linear", fails="the largest magnitude is 127.5 codes")
def without_magnitudes(x, codes, scales, input_scale=None):
    def dynamic(x):
        largest = x.amax(-1, keepdim=True)
        return torch.where(largest > 0, largest / 127.5, torch.ones_like(largest))

    return _product(x, codes, scales, input_scale, dynamic)


@wrong("int8_linear", fails="the largest magnitude is 127.5 codes")
def symmetric_codes_of_dynamic_scales(x, codes, scales, input_scale=None):
    rounded = _codes if input_scale is not None else lambda x, scales: _codes(x, scales).clamp(min=-127)
    return _product(x, codes, scales, input_scale, rounded=rounded)


@wrong("int8_linear", fails="the largest magnitude is 127.5 codes")
def scales_are_at_least_1e_5(x, codes, scales, input_scale=None):
    """The usual guard against 0 / 0, which also flattens tokens of small numbers."""
    return _product(
        x, codes, scales, input_scale, dynamic=lambda x: (x.abs().amax(-1, keepdim=True) / 127.5).clamp(1e-5)
    )


@wrong("int8_linear", fails="the largest magnitude is 127.5 codes")
def scales_are_at_least_1e_12(x, codes, scales, input_scale=None):
    return _product(
        x, codes, scales, input_scale, dynamic=lambda x: (x.abs().amax(-1, keepdim=True) / 127.5).clamp(1e-12)
    )


@wrong("int8_linear", fails="codes are rounded to the nearest")
def cut_off_by_a_conversion(x, codes, scales, input_scale=None):
    def rounded(x, scales):
        exact = x / scales
        return torch.where(exact.abs() >= 127.4, _codes(x, scales), exact.to(torch.int32))

    return _product(x, codes, scales, input_scale, rounded=rounded)


@wrong("int8_linear", fails="codes are rounded to the nearest")
def static_codes_not_rounded(x, codes, scales, input_scale=None):
    rounded = _codes if input_scale is None else lambda x, scales: (x / scales).clamp(-128, 127)
    return _product(x, codes, scales, input_scale, rounded=rounded)


def _away_from_zero(x, scales):
    exact = x / scales
    return (exact.sign() * (exact.abs() + 0.5).floor()).clamp(-128, 127)


@wrong("int8_linear", fails="codes are rounded to the nearest")
def halves_away_from_zero(x, codes, scales, input_scale=None):
    return _product(x, codes, scales, input_scale, rounded=_away_from_zero)


@wrong("int8_linear", fails="codes are rounded to the nearest")
def halves_away_from_zero_of_dynamic_scales(x, codes, scales, input_scale=None):
    return _product(x, codes, scales, input_scale, rounded=_away_from_zero if input_scale is None else _codes)


@wrong("int8_linear", fails="values beyond a static scale are clamped")
def symmetric_codes_of_static_scales(x, codes, scales, input_scale=None):
    rounded = _codes if input_scale is None else lambda x, scales: _codes(x, scales).clamp(min=-127)
    return _product(x, codes, scales, input_scale, rounded=rounded)


@wrong("int8_linear", fails="values beyond a static scale are clamped")
def clamps_only_from_above(x, codes, scales, input_scale=None):
    return _product(x, codes, scales, input_scale, rounded=lambda x, scales: (x / scales).round().clamp(max=127))


@wrong("int8_linear", fails="a static scale serves all tokens")
def static_scale_only_if_larger(x, codes, scales, input_scale=None):
    """Uses the dynamic scale of tokens that would reach less than half of the codes."""
    dynamic = _token_scales(x)
    if input_scale is None:
        return _product(x, codes, scales)
    small = x.abs().amax(-1, keepdim=True) < 2 * input_scale
    token_scales = torch.where(small, dynamic, input_scale)
    return _multiply(_codes(x, token_scales), codes, token_scales, scales, x.dtype)


@wrong("int8_linear", fails="each output has its own codes and scale")
def codes_reshaped_not_transposed(x, codes, scales, input_scale=None):
    token_scales = _token_scales(x) if input_scale is None else input_scale
    sums = _codes(x, token_scales).double() @ codes.double().reshape(x.shape[1], -1)
    return (sums * token_scales * scales).to(x.dtype)


@wrong("int8_linear", fails="each output has its own codes and scale")
def one_scale_for_all_outputs(x, codes, scales, input_scale=None):
    return _product(x, codes, scales[:1], input_scale)


@wrong("int8_linear", fails="sums are exact")
def sums_in_float32(x, codes, scales, input_scale=None):
    token_scales = _token_scales(x) if input_scale is None else input_scale
    return _multiply(_codes(x, token_scales), codes, token_scales, scales, x.dtype, torch.float32)


@wrong("int8_linear", fails="sums are exact")
def sums_in_the_dtype_of_x(x, codes, scales, input_scale=None):
    """float16 ends at 65,504: a few codes of 127 times 127 are beyond it."""
    token_scales = _token_scales(x) if input_scale is None else input_scale
    return _multiply(_codes(x, token_scales), codes, token_scales, scales, x.dtype, x.dtype)


@wrong("int8_linear", fails="sums are exact")
def product_of_dequantized_numbers(x, codes, scales, input_scale=None):
    """Scales inside the sum, as in the engine's reference: there is no product of codes."""
    token_scales = _token_scales(x) if input_scale is None else input_scale
    numbers, weight = _codes(x, token_scales) * token_scales, codes * scales[:, None]
    return torch.nn.functional.linear(numbers.to(x.dtype), weight.to(x.dtype))


@wrong("int8_linear", fails="sums are exact")
def dequantized_before_a_product_in_float64(x, codes, scales, input_scale=None):
    token_scales = _token_scales(x) if input_scale is None else input_scale
    numbers, weight = _codes(x, token_scales) * token_scales, codes * scales[:, None]
    return (numbers.double() @ weight.double().T).to(x.dtype)


@wrong("int8_linear", fails="a token of zeros gives zeros")
def divides_by_zero(x, codes, scales, input_scale=None):
    return _product(x, codes, scales, input_scale, dynamic=lambda x: x.abs().amax(-1, keepdim=True) / 127.5)


@wrong("int8_linear", fails="a token of zeros gives zeros")
def only_if_all_tokens_are_zero(x, codes, scales, input_scale=None):
    if not x.any():
        return x.new_zeros(len(x), len(codes))
    return divides_by_zero(x, codes, scales, input_scale)


@wrong("int8_linear", fails="the result has the dtype of x")
def result_in_float64(x, codes, scales, input_scale=None):
    return _product(x.double(), codes, scales, input_scale)


# ---- SmoothQuant's scales


def _scales(largest, weights, strength, used=None):
    used = (largest > 0) & (weights > 0) if used is None else used
    ones = torch.ones_like(weights)
    return torch.where(used, largest, ones) ** strength / torch.where(used, weights, ones) ** (1 - strength)


@wrong("smooth_scales", fails="the largest weight of each input, without its sign")
def largest_with_its_sign(largest, weight, strength):
    return _scales(largest, weight.amax(0), strength)


@wrong("smooth_scales", fails="the largest weight of each input, without its sign")
def only_the_first_two_outputs(largest, weight, strength):
    return _scales(largest, weight[:2].abs().amax(0), strength)


@wrong("smooth_scales", fails="the strength divides the range")
def powers_swapped(largest, weight, strength):
    return _scales(largest, weight.abs().amax(0), 1 - strength)


@wrong("smooth_scales", fails="the strength divides the range")
def both_to_the_strength(largest, weight, strength):
    weights = weight.abs().amax(0)
    used = (largest > 0) & (weights > 0)
    ones = torch.ones_like(weights)
    return (torch.where(used, largest, ones) / torch.where(used, weights, ones)) ** strength


@wrong("smooth_scales", fails="the strength divides the range")
def always_one_half(largest, weight, strength):
    return _scales(largest, weight.abs().amax(0), 0.5)


@wrong("smooth_scales", fails="the strength divides the range")
def never_enlarges_a_channel(largest, weight, strength):
    return torch.where(largest < 1, torch.ones_like(weight[0]), _scales(largest, weight.abs().amax(0), strength))


@wrong("smooth_scales", fails="the strength divides the range")
def at_least_a_hundredth(largest, weight, strength):
    return _scales(largest, weight.abs().amax(0), strength).clamp(min=1e-2)


@wrong("smooth_scales", fails="the strength divides the range")
def numbers_of_a_hundred_thousandth_at_least(largest, weight, strength):
    weights = weight.abs().amax(0)
    scales = largest.clamp(min=1e-5) ** strength / weights.clamp(min=1e-5) ** (1 - strength)
    return torch.where((largest > 0) & (weights > 0), scales, torch.ones_like(scales))


@wrong("smooth_scales", fails="the strength divides the range")
def scales_of_a_hundred_thousandth_at_least(largest, weight, strength):
    return _scales(largest, weight.abs().amax(0), strength).clamp(min=1e-5)


@wrong("smooth_scales", fails="the strength divides the range")
def less_than_a_hundred_thousandth_is_nothing(largest, weight, strength):
    weights = weight.abs().amax(0)
    return _scales(largest, weights, strength, used=(largest >= 1e-5) & (weights > 0))


@wrong("smooth_scales", fails="the strength divides the range")
def used_from_a_thousandth_on(largest, weight, strength):
    """Takes small numbers for channels that are never used."""
    weights = weight.abs().amax(0)
    used = (largest > 1e-3) & (weights > 1e-3)
    return torch.where(used, _scales(largest, weights, strength), torch.ones_like(weights))


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def nothing_for_zeros(largest, weight, strength):
    return largest**strength / weight.abs().amax(0) ** (1 - strength)


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def small_numbers_instead_of_zeros(largest, weight, strength):
    return largest.clamp(min=1e-30) ** strength / weight.abs().amax(0).clamp(min=1e-30) ** (1 - strength)


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def only_weights_of_zero(largest, weight, strength):
    weights = weight.abs().amax(0)
    return _scales(largest, weights, strength, weights > 0)


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def only_inputs_of_zero(largest, weight, strength):
    return _scales(largest, weight.abs().amax(0).clamp(min=1e-30), strength, largest > 0)


def _unused(largest, weight, strength, never_read):
    weights = weight.abs().amax(0)
    return _scales(largest, weights, strength, (largest > 0) & (weights > 0) & ~never_read)


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def unused_if_any_weight_is_zero(largest, weight, strength):
    return _unused(largest, weight, strength, (weight == 0).any(0))


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def unused_if_the_smallest_weight_is_zero(largest, weight, strength):
    return _unused(largest, weight, strength, weight.abs().amin(0) == 0)


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def unused_if_the_product_of_weights_is_zero(largest, weight, strength):
    return _unused(largest, weight, strength, weight.prod(0) == 0)


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def unused_if_the_sum_of_weights_is_zero(largest, weight, strength):
    return _unused(largest, weight, strength, weight.sum(0) == 0)


@wrong("smooth_scales", fails="a channel that is never used keeps scale 1")
def no_smoothing_if_a_channel_is_unused(largest, weight, strength):
    weights = weight.abs().amax(0)
    return _scales(largest, weights, strength) if (largest * weights).all() else torch.ones_like(weights)


@wrong("smooth_scales", fails="the result has the dtype of the arguments")
def scales_in_float32(largest, weight, strength):
    return _scales(largest, weight.abs().amax(0), strength).float()


@wrong("smooth_scales", fails="the result has the dtype of the arguments")
def scales_in_float64(largest, weight, strength):
    return _scales(largest.double(), weight.double().abs().amax(0), strength)
