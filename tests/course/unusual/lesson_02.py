"""Right but unusual solutions of lesson 02."""

import math
from fractions import Fraction

import torch
import torch.nn.functional as F

from tests.course.unusual import right


@right("attention")
def by_torchs_own(q, k, v, *, scale):
    group = q.shape[1] // k.shape[1]
    q, k, v = (each.transpose(0, 1) for each in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1)


@right("attention")
def only_the_past_is_computed(q, k, v, *, scale):
    out = torch.full_like(q, torch.nan)
    for i, head in torch.cartesian_prod(torch.arange(len(q)), torch.arange(q.shape[1])).tolist():
        keys, values = (part[: i + 1, head * k.shape[1] // q.shape[1]] for part in (k, v))
        out[i, head] = (keys @ q[i, head] * scale).softmax(0) @ values
    return out


@right("append")
def token_by_token(cache, k, v):
    if len(k) > len(cache.k) - cache.length:
        raise ValueError("full")
    for key, value in zip(k, v, strict=True):
        cache.k[cache.length].copy_(key)
        cache.v[cache.length].copy_(value)
        cache.length += 1


@right("append")
def by_numbers_of_slots(cache, k, v):
    slots = torch.arange(cache.length, cache.length + len(k))
    if len(slots) and slots[-1] >= cache.v.shape[0]:
        raise ValueError
    cache.k.index_copy_(0, slots, k)
    cache.v.index_copy_(0, slots, v)
    cache.length = cache.length + slots.numel()


@right("cached_attention")
def masked_by_position(q, k, v, length, *, scale):
    """The whole capacity takes part: values are cleared and scores hidden where no query may look."""
    group, slots = q.shape[1] // k.shape[1], torch.arange(len(k))
    v = v.where((slots < length)[:, None, None], 0)
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (-1, group)), k) * scale
    hidden = slots > torch.arange(length - len(q), length)[:, None]
    weights = scores.where(~hidden, -torch.inf).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2).to(q.dtype)


@right("requests_that_fit")
def in_fractions(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    numbers = 2 * config.num_kv_heads * config.head_dim * config.num_layers * context
    free = Fraction(gpu_bytes) * Fraction(str(utilization)) / Fraction(bytes_each) - Fraction(parameters)
    return max(math.floor(free / numbers), 0)


@right("requests_that_fit")
def one_after_the_other(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    left, fitting = utilization * gpu_bytes - parameters * bytes_each, 0
    each = 2 * context * config.num_layers * config.head_dim * config.num_kv_heads * bytes_each
    while left >= each:
        left, fitting = left - each, fitting + 1
    return fitting
