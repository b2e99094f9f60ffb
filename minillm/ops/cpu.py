"""Faster implementations in plain torch for CPUs.  Lessons 02, 04, 08 and 09.

A decode step of a small model is a few hundred torch calls of some microseconds each. With one row, fewer calls are
faster; with many rows, fewer bytes. Functions here support float32 and float64; for all other cases they call the
reference.
"""

import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache, indexable, widened
from minillm.kv_cache.split_pages import SplitCache
from minillm.quantization import DenseWeight, Int8Weight
from minillm.quantization.methods.hadamard import transform as hadamard  # noqa: F401  in two small products

from . import reference
from .by_weight import ByWeight
from .signatures import AttentionOptions, Rows, Truncation

# Splitting a ragged batch costs about as much as gathering this many keys.
SPLIT_KEYS = 4096
# Up to this many elements, the allocator reuses memory for a gather.
SMALL_GATHER = 1 << 14
# Rows that are ranked at a time: with Gemma's vocabulary each takes some 20 MB.
RANKED_AT_ONCE = 64


embedding = ByWeight(reference.embedding)
linear = ByWeight(reference.linear)


@embedding.register(DenseWeight)
def _(ids: Tensor, weight: DenseWeight, scale: float) -> Tensor:
    """As the reference; also fast for a matrix stored transposed, as a tied head may be."""
    table = weight.weight
    if table.is_contiguous():
        rows = table.index_select(0, ids)
    else:
        rows = table.t().index_select(1, ids).t().contiguous()
    return rows if scale == 1 else rows.mul_(scale)


@linear.register(Int8Weight)
def _(x: Tensor, weight: Int8Weight) -> Tensor:
    """As the reference, but applies the scales, one per output, to the product, which is smaller than the matrix."""
    if weight.activations is not None:
        return reference.linear(x, weight)
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype  # a sum of codes can exceed float16's range
    out = F.linear(x.to(wide), weight.codes.to(wide)).mul_(weight.scales.to(wide)).to(x.dtype)
    return out if weight.bias is None else out.add_(weight.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, with fewer calls."""
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(_scalar(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * inverse).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the reference."""
    total = x + residual
    return rms_norm(total, weight, eps), total


@lru_cache(maxsize=16)
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def rotary_embedding(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, with the second product and the sum in one call."""
    return _rotated(q, cos_sin), _rotated(k, cos_sin)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.unsqueeze(1).unbind(2)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """As the reference, with `index_copy_`, which neither sorts nor broadcasts its index."""
    if cache.k.dtype != k.dtype or isinstance(cache, SplitCache):
        return reference.write_kv(k, v, cache, slots)
    shape = (-1, *k.shape[1:])
    cache.k.view(shape).index_copy_(0, slots, k)
    cache.v.view(shape).index_copy_(0, slots, v)


def decode_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """As the reference: gather the rows' blocks, then compute one product for all query heads of a KV head.

    Rows of equal length need no mask. Ragged rows are padded to the longest one; very uneven batches are split into
    buckets first, because a padded key costs as much as a real one.
    """
    if not _takes(q, cache):
        return reference.decode_attention(q, cache, rows, options)
    _, queries, heads, _ = q.shape
    block_size, kv_heads = cache.k.shape[1:3]
    known = tuple(rows.lengths.tolist())
    shortest, longest = min(known), max(known)
    if queries == 1 and options.soft_cap is None and 0 < shortest == longest:
        return _equal_rows(q, cache, rows.block_table, longest, options)
    out = torch.empty_like(q)
    for part in _buckets(known, queries, heads // kv_heads, block_size, options.window):
        chosen = part.rows
        table = rows.block_table if chosen is None else rows.block_table.index_select(0, chosen)
        bucket = q if chosen is None else q.index_select(0, chosen)
        result = _padded_rows(bucket, cache, table[:, : part.blocks].flatten(), part.hidden, options)
        if chosen is None:
            out = result
        else:
            out.index_copy_(0, chosen, result)
    if not math.isfinite(out.sum()):
        # A hidden slot holds NaN (0 * NaN is NaN), or a row sees no key. Both are rare: compute the batch again.
        return reference.decode_attention(q, cache, rows, options)
    return out


def _takes(q: Tensor, cache: LayerCache) -> bool:
    return q.dtype in (torch.float32, torch.float64) and (cache.k_scale is not None or cache.k.dtype == q.dtype)


_scratch = threading.local()


def _gather(cache: LayerCache, blocks: Tensor, rows: int, rotary: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """K and V of `rows` rows of equally many blocks: [rows, keys, kv_heads, d], valid until this thread's next call.

    Dequantized to `dtype`; an unquantized cache has that dtype.
    """
    k, v = (part.view(rows, -1, *part.shape[2:]) for part in _copies(cache, blocks, dtype))
    return [k if rotary is None else _rotated(k, rotary[: k.shape[1]]), v]


def _copies(cache: LayerCache, blocks: Tensor, dtype: torch.dtype) -> list[Tensor]:
    parts = ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    shape = (len(blocks), *cache.k.shape[1:])
    size = math.prod(shape)
    if size <= SMALL_GATHER:
        return [_copy(*part, blocks, torch.empty(shape, dtype=dtype)) for part in parts]
    # Reuse one buffer: page faults of newly allocated megabytes in every layer cost more than the copies.
    kept = getattr(_scratch, "kept", None)
    if kept is None or kept.shape[1] < size or kept.dtype != dtype:
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            kept = _scratch.kept = torch.empty(2, size, dtype=dtype)
    return [_copy(*part, blocks, buffer[:size].view(shape)) for part, buffer in zip(parts, kept, strict=True)]


def _copy(held: Tensor, scales: Tensor | None, blocks: Tensor, out: Tensor) -> Tensor:
    if scales is None:
        return torch.index_select(held, 0, blocks, out=out)
    codes = indexable(held).index_select(0, blocks).view(held.dtype)
    codes = codes if codes.dtype == torch.int8 else widened(codes)  # int8 is converted as it is multiplied
    return torch.mul(codes, scales.index_select(0, blocks)[..., None], out=out)


def _equal_rows(q: Tensor, cache: LayerCache, table: Tensor, length: int, options: AttentionOptions) -> Tensor:
    rows, _, heads, head_dim = q.shape
    block_size, kv_heads = cache.k.shape[1:3]
    first = max(0, length - options.window) if options.window else 0
    blocks = table[:, : -(-length // block_size)].reshape(-1)
    gathered = _gather(cache, blocks, rows, options.rotary, q.dtype)
    k, v = (part.transpose(1, 2).narrow(2, first, length - first) for part in gathered)
    # The query heads that share a KV head become its queries, so K and V are not repeated.
    packed = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    return F.scaled_dot_product_attention(packed, k, v, scale=options.scale).reshape(q.shape)


def _padded_rows(q: Tensor, cache: LayerCache, blocks: Tensor, hidden: Tensor, options: AttentionOptions) -> Tensor:
    rows, queries, heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    k, v = _gather(cache, blocks, rows, options.rotary, q.dtype)
    grouped = (q * options.scale).unflatten(2, (kv_heads, -1))
    out = torch.empty_like(grouped)
    for head in range(kv_heads):
        scores = torch.bmm(grouped[:, :, head].reshape(rows, -1, head_dim), k[:, :, head].transpose(1, 2))
        if cap := options.soft_cap:
            scores.div_(cap).tanh_().mul_(cap)
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        out[:, :, head] = torch.bmm(weights, v[:, :, head]).view(rows, queries, -1, head_dim)
    return out.flatten(2, 3)


@dataclass(frozen=True)
class _Bucket:
    """Rows of a ragged batch that are padded to one length."""

    rows: Tensor | None  # indices of the rows; None: all
    blocks: int  # of the longest row
    hidden: Tensor  # [rows, 1 or queries * heads of a group, keys] bool: keys that a query must not see


@lru_cache(maxsize=4)
def _buckets(lengths: tuple[int, ...], queries: int, group: int, block_size: int, window: int | None) -> list[_Bucket]:
    """Cached, because all layers of a step have the same lengths.

    With the longest rows first, split where that saves the most padding, as long as it saves more than a split costs.
    """
    known = np.array(lengths)
    order = np.argsort(-known, kind="stable")
    pieces = []
    while len(order):
        rest = np.arange(len(order), 0, -1)
        saved = (known[order[0]] - known[order]) * rest
        at = int(saved.argmax())
        at = at if saved[at] > SPLIT_KEYS else len(order)
        pieces.append(np.sort(order[:at]))
        order = order[at:]
    buckets = []
    for rows in pieces:
        blocks = max(1, -(-int(known[rows].max()) // block_size))
        query_at = torch.from_numpy(known[rows] - queries)[:, None] + torch.arange(queries)
        hidden = ~reference.visible(query_at, blocks * block_size, window)
        hidden = hidden.repeat_interleave(group, 1) if queries > 1 else hidden
        buckets.append(_Bucket(None if len(pieces) == 1 else torch.from_numpy(rows), blocks, hidden))
    return buckets


def prefill_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """As the reference, row by row with torch's fused attention, which stores no matrix of scores."""
    window = options.window
    if _takes(q, cache) and not options.soft_cap:
        out = torch.empty_like(q)
        block_size, kv_heads, head_dim = cache.k.shape[1:]
        starts = rows.query_start.tolist()
        for row, length in enumerate(rows.lengths.tolist()):
            begin, end = starts[row : row + 2]
            if begin == end:
                continue
            blocks = rows.block_table[row, : -(-length // block_size)]
            gathered = _gather(cache, blocks, 1, options.rotary, q.dtype)
            k, v = (part[:, :length].transpose(1, 2) for part in gathered)
            fresh = end - begin == length and (not window or length <= window)  # a window of this length hides nothing
            mask = None if fresh else _chunk_mask(end - begin, length, window)
            queries = q[begin:end].transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=mask, is_causal=fresh, scale=options.scale, enable_gqa=True
            )
            out[begin:end] = attended[0].transpose(0, 1)
        if window is None or math.isfinite(out.sum()):
            return out
    # A window may hide blocks that were evicted and since overwritten by anything, NaN included.
    return reference.prefill_attention(q, cache, rows, options)


@lru_cache(maxsize=8)
def _chunk_mask(queries: int, length: int, window: int | None) -> Tensor:
    """Return which keys a chunk's queries see, at the end of a row of `length` tokens: [queries, length] bool."""
    return reference.visible(torch.arange(length - queries, length)[None], length, window)[0]


def _truncate(scores: Tensor, truncation: Truncation, sampled: Tensor) -> None:
    """`reference.truncate`, in place, but only what each row asks for, and nothing for rows that are not `sampled`."""
    min_p, top_k, top_p = truncation
    ranked = sampled & (((top_k > 0) & (top_k < scores.shape[-1])) | (top_p < 1))
    rows = (sampled & (min_p > 0) & ~ranked).nonzero()[:, 0]
    if len(rows):
        chosen = scores[rows]
        lowest = chosen.amax(-1, keepdim=True) + min_p[rows, None].to(scores.dtype).log()
        scores[rows] = chosen.masked_fill_(chosen < lowest, -torch.inf)
    for rows in ranked.nonzero()[:, 0].split(RANKED_AT_ONCE):
        scores[rows] = reference.truncate(scores[rows], Truncation(*(each[rows] for each in truncation)))


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Truncation | None = None) -> Tensor:
    """As the reference, without the work that no row needs."""
    greedy = temperature == 0
    mixed = bool(greedy.any())
    if mixed:
        if greedy.all():
            return reference.likeliest(logits)
        temperature = temperature.masked_fill(greedy, 1)
    scores = logits.double() / temperature[:, None]
    if truncation is not None:
        _truncate(scores, truncation, ~greedy)
    cumulative = scores.softmax(-1).cumsum(-1)
    target = uniform.double() * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    if not math.isfinite(target.sum()):
        drawn = torch.where(target.isfinite(), drawn, -1)
    return torch.where(greedy, reference.likeliest(logits), drawn) if mixed else drawn
