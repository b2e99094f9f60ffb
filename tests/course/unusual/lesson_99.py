"""Right but unusual solutions of lesson 99."""

import heapq
import math
from fractions import Fraction
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F

from tests.course.unusual import right


@right("timings")
def with_arrays(due, arrivals):
    when, tokens = zip(*arrivals, strict=True)
    times = np.repeat(when, tokens)
    return times[0] - due, np.diff(times).tolist(), times[-1] - due


@right("pooled_percentile")
def by_numpy_with_an_exact_rank(gaps_of_each, p):
    gaps = np.concatenate([np.array(each, float) for each in gaps_of_each])
    rank = math.ceil(Fraction(str(p)) * gaps.size / 100)
    return np.partition(gaps, rank - 1)[rank - 1]


@right("pooled_percentile")
def the_smallest_that_enough_are_not_above(gaps_of_each, p):
    gaps = list(chain(*gaps_of_each))
    return heapq.nsmallest(-int(-p * len(gaps) // 100), gaps)[-1]


@right("poisson_arrivals")
def by_torch(rate, uniform):
    return (torch.tensor(uniform, dtype=torch.float64).neg().log1p().neg().cumsum(0) / rate).tolist()


@right("batched_attention")
def row_by_row(q, k, v, lengths, scale):
    out = torch.empty_like(q)
    for row, length in enumerate(lengths):
        keys, values = (part[row, :length].transpose(0, 1).unsqueeze(1) for part in (k, v))
        grouped = q[row].unflatten(0, (k.shape[2], -1))
        out[row] = (grouped.unsqueeze(2) * keys * scale).sum(-1).softmax(-1).unsqueeze(-2).matmul(values).flatten(0, 2)
    return out


@right("batched_attention")
def by_torchs_own(q, k, v, lengths, scale):
    group = q.shape[1] // k.shape[2]
    seen = torch.arange(k.shape[1], device=q.device) < lengths[:, None]
    k, v = (part.where(seen[..., None, None], 0).repeat_interleave(group, 2).transpose(1, 2) for part in (k, v))
    out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, attn_mask=seen[:, None, None], scale=scale)
    return out.squeeze(2)


@right("batched_attention")
def one_axis_of_rows_and_heads(q, k, v, lengths, scale):
    (rows, heads, d), (keys, kv_heads) = q.shape, k.shape[1:3]
    seen = torch.arange(keys, device=q.device) < lengths.repeat_interleave(heads)[:, None]
    k, v = (part.repeat_interleave(heads // kv_heads, 2).transpose(1, 2).reshape(-1, keys, d) for part in (k, v))
    scores = (k @ q.reshape(-1, d, 1)).squeeze(2) * scale
    weights = scores.where(seen, -torch.inf).softmax(-1)
    return (weights.unsqueeze(1) @ v.where(seen.unsqueeze(2), 0)).view(rows, heads, d)
