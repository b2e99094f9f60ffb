"""Attention over some of a row's keys, and how the results for all of its keys follow from several such parts.

Softmax attention over all keys is an average of the parts' results, each weighted by its share of the softmax's sum.
So a part returns its result and the logarithm of its sum of exponentials (Dao et al. 2023, "Flash-Decoding").
"""

import torch
from torch import Tensor

from minillm.kv_cache.split_pages import SplitCache

from .compositions import Compositions
from .reference import rotary_embedding
from .signatures import AttentionOptions, Rows

FUSED = ("partial_attention", "merged")  # the functions here that a device may compute in kernels


def partial_attention(
    run: Compositions, q: Tensor, cache: SplitCache, rows: Rows, options: AttentionOptions, decode: bool
) -> tuple[Tensor, Tensor]:
    """Attention of packed queries to the keys that `cache` holds: q [tokens, heads, d] -> like q, [tokens, heads].

    Lengths and positions are those of whole rows. decode: whether each row has `rows.max_queries` queries. The results
    are in float32 (float64 for float64), first the softmax's averages, then the logarithms of its sums; a query that
    sees no key here gets zeros, and minus infinity.
    """
    if (fused := run.fused.get("partial_attention")) is not None:
        result = fused(q, cache, rows, options, decode)
        if result is not None:
            return result
    if decode:
        by_row = q.unflatten(0, (-1, rows.max_queries))
        out, log_sums = _attend(by_row, cache, rows.block_table, rows.lengths, options)
        return out.flatten(0, 1), log_sums.flatten(0, 1)
    starts = rows.query_start.tolist()
    parts = [
        _attend(q[None, start:end], cache, rows.block_table[row, None], rows.lengths[row, None], options)
        for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False))
    ]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, 1)[0], torch.cat(sums, 1)[0]


def _attend(
    q: Tensor, cache: SplitCache, table: Tensor, lengths: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """As `ops.reference.decode_attention`: q [rows, queries, heads, d] -> like q, [rows, queries, heads]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = q.shape[1]
    k, v = (part.to(dtype) for part in cache.read(table))  # [rows, keys, kv_heads, d]
    key_at = torch.arange(k.shape[1], device=q.device) * cache.share.of + cache.share.first
    if options.rotary is not None:
        k, _ = rotary_embedding(k, k[:0], options.rotary[key_at])
    query_at = (lengths - queries)[:, None] + torch.arange(queries, device=q.device)
    distance = query_at[..., None] - key_at  # [rows, queries, keys]
    seen = (distance >= 0) & (distance < options.window) if options.window else distance >= 0
    grouped = q.unflatten(2, (k.shape[2], -1)).to(dtype)
    scores = torch.einsum("rqhgd,rkhd->rqhgk", grouped, k) * options.scale
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
    log_sums = scores.logsumexp(-1)
    weights = torch.exp(scores - log_sums.masked_fill(log_sums == -torch.inf, 0)[..., None])
    v = v.masked_fill(~seen.any(1)[..., None, None], 0)  # 0 * NaN is NaN
    out = torch.einsum("rqhgk,rkhd->rqhgd", weights, v)
    return out.flatten(2, 3), log_sums.flatten(2, 3)


def merged(run: Compositions, outs: Tensor, log_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention over all keys from that over each part of them, added in the order of parts.

    outs [parts, ..., d], log_sums [parts, ...] -> [..., d] in `dtype`. Where no part has a key, the result is zeros.
    """
    if (fused := run.fused.get("merged")) is not None:
        result = fused(outs, log_sums, dtype)
        if result is not None:
            return result
    largest = log_sums.amax(0)
    weights = torch.exp(log_sums - largest.masked_fill(largest == -torch.inf, 0))
    total, weight = torch.zeros_like(outs[0]), torch.zeros_like(largest)
    for part, own in zip(outs, weights, strict=True):
        total += part * own[..., None]
        weight += own
    return (total / weight.masked_fill(weight == 0, 1)[..., None]).to(dtype)
