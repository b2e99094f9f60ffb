"""Wrong solutions of lesson 08: keys and values in codes, attention on codes."""

import torch

from tests.course.mutants import wrong

# ---- keys and values in codes


def _top(dtype):
    return 127 if dtype == torch.int8 else 448


def _largest(x):
    return x.abs().amax(-1)


def _quantize(x, dtype, largest=_largest, round=torch.round, top=_top):
    x = x.float()
    scales = largest(x).expand(x.shape[:2]) / top(dtype)
    codes = (x / torch.where(scales > 0, scales, 1.0)[..., None]).clamp(-_top(dtype), _top(dtype))
    return (round(codes) if dtype == torch.int8 else codes).to(dtype), scales.contiguous()


@wrong("quantize_kv", fails="each token and each head has a scale of its own")
def one_scale_for_all(x, dtype):
    return _quantize(x, dtype, lambda x: x.abs().amax())


@wrong("quantize_kv", fails="each token and each head has a scale of its own")
def a_scale_for_each_head(x, dtype):
    """Of all tokens that are written in this step: it depends on what else is in the batch."""
    return _quantize(x, dtype, lambda x: x.abs().amax((0, 2)))


@wrong("quantize_kv", fails="each token and each head has a scale of its own")
def a_scale_for_each_token(x, dtype):
    return _quantize(x, dtype, lambda x: x.abs().amax((1, 2))[:, None])


@wrong("quantize_kv", fails="each token and each head has a scale of its own")
def heads_in_another_order(x, dtype):
    codes, scales = _quantize(x, dtype)
    return codes, scales.T.reshape(scales.shape)


@wrong("quantize_kv", fails="the largest magnitude becomes the largest code")
def scales_of_at_least_1e_5(x, dtype):
    """The usual guard against 0 / 0, which also flattens small numbers."""
    return _quantize(x, dtype, lambda x: _largest(x).clamp(min=1e-5 * _top(dtype)))


@wrong("quantize_kv", fails="the largest magnitude becomes the largest code")
def scales_of_at_least_1e_8(x, dtype):
    return _quantize(x, dtype, lambda x: _largest(x).clamp(min=1e-8 * _top(dtype)))


@wrong("quantize_kv", fails="the largest magnitude becomes the largest code")
def scales_of_at_least_1e_35(x, dtype):
    return _quantize(x, dtype, lambda x: _largest(x).clamp(min=1e-35 * _top(dtype)))


@wrong("quantize_kv", fails="the largest magnitude becomes the largest code")
def an_epsilon_in_the_scale(x, dtype):
    return _quantize(x, dtype, lambda x: _largest(x) + 1e-8)


@wrong("quantize_kv", fails="the largest magnitude becomes the largest code")
def largest_of_the_first_half(x, dtype):
    """Of the channels that the rotary embedding pairs with the others."""
    return _quantize(x, dtype, lambda x: _largest(x[..., : (x.shape[-1] + 1) // 2]))


@wrong("quantize_kv", fails="the largest magnitude becomes the largest code")
def largest_of_64_channels(x, dtype):
    """The width of the heads of tiny-gemma."""
    return _quantize(x, dtype, lambda x: _largest(x[..., :64]))


@wrong("quantize_kv", fails="int8 codes are rounded to the nearest")
def cut_off(x, dtype):
    """The conversion to int8 does not round."""
    return _quantize(x, dtype, round=lambda codes: codes)


@wrong("quantize_kv", fails="int8 codes are rounded to the nearest")
def rounded_down(x, dtype):
    return _quantize(x, dtype, round=lambda codes: (codes + 1e-3).floor())


@wrong("quantize_kv", fails="fp8 codes are rounded once, to e4m3")
def integers_first(x, dtype):
    codes, scales = _quantize(x, torch.int8)
    return (codes, scales) if dtype == torch.int8 else _fp8(x, torch.round)


@wrong("quantize_kv", fails="fp8 codes are rounded once, to e4m3")
def by_way_of_bfloat16(x, dtype):
    return _quantize(x, dtype) if dtype == torch.int8 else _fp8(x, torch.Tensor.bfloat16)


def _fp8(x, rounded_before):
    x = x.float()
    scales = _largest(x) / 448
    return rounded_before(x / torch.where(scales > 0, scales, 1.0)[..., None]).to(torch.float8_e4m3fn), scales


@wrong("quantize_kv", fails="16-bit numbers are quantized in float32")
def in_the_dtype_of_x(x, dtype):
    scales = _largest(x) / _top(dtype)
    codes = x / torch.where(scales > 0, scales, torch.ones_like(scales))[..., None]
    return (codes.round() if dtype == torch.int8 else codes).clamp(-_top(dtype), _top(dtype)).to(dtype), scales.float()


@wrong("quantize_kv", fails="16-bit numbers are quantized in float32")
def scales_in_the_dtype_of_x(x, dtype):
    scales = (_largest(x.float()) / _top(dtype)).to(x.dtype).float()
    codes = (x.float() / torch.where(scales > 0, scales, 1.0)[..., None]).clamp(-_top(dtype), _top(dtype))
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


@wrong("quantize_kv", fails="a head of zeros stays zeros")
def divides_by_zero(x, dtype):
    x = x.float()
    scales = _largest(x) / _top(dtype)
    codes = x / scales[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


@wrong("quantize_kv", fails="a head of zeros stays zeros")
def only_if_everything_is_zero(x, dtype):
    return _quantize(x, dtype) if not x.any() else divides_by_zero(x, dtype)


@wrong("quantize_kv", fails="codes have the dtype asked for, scales float32")
def codes_in_float32(x, dtype):
    codes, scales = _quantize(x, dtype)
    return codes.float(), scales


@wrong("quantize_kv", fails="codes have the dtype asked for, scales float32")
def scales_in_float64(x, dtype):
    codes, scales = _quantize(x, dtype)
    return codes, scales.double()


# ---- attention on codes


def _weights(q, k, k_scales, hidden, scale, nothing=-torch.inf):
    return (q @ k.to(q.dtype).T * k_scales * scale).masked_fill(hidden, nothing).softmax(-1)


def _attend(q, k, k_scales, v, v_scales, hidden, scale):
    return (_weights(q, k, k_scales, hidden, scale) * v_scales) @ v.to(q.dtype)


@wrong("attend_codes", fails="each key's scale multiplies its score, before the softmax")
def scale_of_the_newest_key(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k, k_scales[hidden[-1].logical_not()][-1:], v, v_scales, hidden, scale)


@wrong("attend_codes", fails="each key's scale multiplies its score, before the softmax")
def smallest_of_the_scales(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k, k_scales[~hidden.all(0)].amin(), v, v_scales, hidden, scale)


@wrong("attend_codes", fails="each value's scale multiplies its weight")
def scales_of_channels(q, k, k_scales, v, v_scales, hidden, scale):
    """With as many keys as channels, nothing complains."""
    return _weights(q, k, k_scales, hidden, scale) @ v.to(q.dtype) * v_scales


@wrong("attend_codes", fails="each value's scale multiplies its weight")
def values_in_another_order(q, k, k_scales, v, v_scales, hidden, scale):
    kept = len(v_scales) < 3
    return _attend(q, k, k_scales, v, v_scales if kept else v_scales.flip(0), hidden, scale)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def first_scales_for_the_keys_that_are_seen(q, k, k_scales, v, v_scales, hidden, scale):
    seen = ~hidden.all(0)
    first = v_scales[: int(seen.sum())]
    return _attend(q, k[seen], k_scales[seen], v[seen], first, hidden[:, seen], scale)


@wrong("attend_codes", fails="scores are multiplied by scale")
def scale_is_forgotten(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k, k_scales, v, v_scales, hidden, 1.0)


@wrong("attend_codes", fails="scores are multiplied by scale")
def scale_twice(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q * scale, k, k_scales, v, v_scales, hidden, scale)


@wrong("attend_codes", fails="scores are multiplied by scale")
def a_scale_of_zero_is_none(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k, k_scales, v, v_scales, hidden, scale or q.shape[-1] ** -0.5)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def hidden_before_the_scales(q, k, k_scales, v, v_scales, hidden, scale):
    """A scale of 0 makes NaN of -inf."""
    scores = (q @ k.to(q.dtype).T).masked_fill(hidden, -torch.inf) * k_scales * scale
    return (scores.softmax(-1) * v_scales) @ v.to(q.dtype)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def hidden_for_all_rows_like_the_last(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k, k_scales, v, v_scales, hidden[-1:].expand_as(hidden), scale)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def a_row_alone_sees_everything(q, k, k_scales, v, v_scales, hidden, scale):
    """As in a decode step of one request."""
    return _attend(q, k, k_scales, v, v_scales, hidden & (len(q) > 1), scale)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def nothing_is_hidden_unless_from_every_row(q, k, k_scales, v, v_scales, hidden, scale):
    """The last row of a causal mask sees every key."""
    return _attend(q, k, k_scales, v, v_scales, hidden & hidden.any(-1).all(), scale)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def nothing_is_hidden_unless_in_the_first_row(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k, k_scales, v, v_scales, hidden & hidden[0].any(), scale)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def nothing_is_hidden_unless_a_key_is_from_all(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k, k_scales, v, v_scales, hidden & hidden.all(0).any(), scale)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def hidden_before_scale(q, k, k_scales, v, v_scales, hidden, scale):
    """A `scale` of 0 makes NaN of -inf."""
    scores = (q @ k.to(q.dtype).T * k_scales).masked_fill(hidden, -torch.inf) * scale
    return (scores.softmax(-1) * v_scales) @ v.to(q.dtype)


@wrong("attend_codes", fails="hidden keys have no weight, whatever their scales")
def a_large_number_before_scale(q, k, k_scales, v, v_scales, hidden, scale):
    """Times a `scale` of 0, it is like any other score."""
    scores = (q @ k.to(q.dtype).T * k_scales).masked_fill(hidden, -1e30) * scale
    return (scores.softmax(-1) * v_scales) @ v.to(q.dtype)


@wrong("attend_codes", fails="codes are multiplied without their scales")
def dequantizes(q, k, k_scales, v, v_scales, hidden, scale):
    scores = (q @ (k.to(q.dtype) * k_scales[:, None]).T * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ (v.to(q.dtype) * v_scales[:, None])


@wrong("attend_codes", fails="codes are multiplied without their scales")
def dequantizes_the_values(q, k, k_scales, v, v_scales, hidden, scale):
    return _weights(q, k, k_scales, hidden, scale) @ (v.to(q.dtype) * v_scales[:, None])


@wrong("attend_codes", fails="codes are multiplied without their scales")
def dequantizes_in_float64(q, k, k_scales, v, v_scales, hidden, scale):
    scores = (q.double() @ (k.double() * k_scales.double()[:, None]).T * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ (v.double() * v_scales.double()[:, None])).to(q.dtype)


@wrong("attend_codes", fails="codes may be fp8, with small numbers too")
def codes_are_integers(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k.float().round(), k_scales, v.float().round(), v_scales, hidden, scale)


@wrong("attend_codes", fails="codes may be fp8, with small numbers too")
def bytes_of_codes(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k.view(torch.int8), k_scales, v.view(torch.int8), v_scales, hidden, scale)


@wrong("attend_codes", fails="scores may be of any size")
def exponentials_alone(q, k, k_scales, v, v_scales, hidden, scale):
    weights = (q @ k.to(q.dtype).T * k_scales * scale).exp().masked_fill(hidden, 0)
    return (weights / weights.sum(-1, keepdim=True) * v_scales) @ v.to(q.dtype)


@wrong("attend_codes", fails="scores may be of any size")
def hidden_scores_of_minus_1000(q, k, k_scales, v, v_scales, hidden, scale):
    return (_weights(q, k, k_scales, hidden, scale, -1000.0) * v_scales) @ v.to(q.dtype)


@wrong("attend_codes", fails="the result has the dtype of q, and its precision")
def result_in_float64(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q.double(), k, k_scales.double(), v, v_scales.double(), hidden, scale)


@wrong("attend_codes", fails="the result has the dtype of q, and its precision")
def weights_in_float32(q, k, k_scales, v, v_scales, hidden, scale):
    weights = _weights(q, k, k_scales, hidden, scale).float().to(q.dtype)
    return (weights * v_scales) @ v.to(q.dtype)


@wrong("attend_codes", fails="every key counts, however many there are")
def the_first_sixteen_keys(q, k, k_scales, v, v_scales, hidden, scale):
    return _attend(q, k[:16], k_scales[:16], v[:16], v_scales[:16], hidden[:, :16], scale)


@wrong("attend_codes", fails="every key counts, however many there are")
def whole_tiles_of_sixteen_keys(q, k, k_scales, v, v_scales, hidden, scale):
    last = len(k) // 16 * 16 or len(k)
    return _attend(q, k[:last], k_scales[:last], v[:last], v_scales[:last], hidden[:, :last], scale)
