"""Attention over some of each row's keys, with the log-sum-exp by which such parts are merged.  Lesson 04.

    out = sum over keys of e^score v / sum over keys of e^score,      log_sum = log(sum over keys of e^score)

Where several GPUs divide the blocks of one KV head, each attends to the keys that it holds. Attention over all keys is
the average of the parts' results, each weighted by e^log_sum. Programs that share a row's keys are merged in the same
way (Dao et al. 2023, "Flash-Decoding"), so one kernel merges both.

Of a row's tokens, a cache has those at the positions first, first + of, first + 2 of, ... Kernels count only these: the
query at position p sees (p + of - first) // of of them, or the newest window / of. In these numbers, attention is that
of `paged_attention.py`, whose inner loop and tiles it uses. One kernel serves prompts, in tiles of queries, and
decodes, whose keys several programs share.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from . import paged_attention
from .arguments import AttentionArguments, CacheArguments, RowArguments
from .cache_codes import product_type, stored
from .paged_attention import LOG2E, _attend


class Held(Protocol):
    """The tokens of each row that a cache has: the one at `first`, and every `of`-th from there."""

    @property
    def first(self) -> int: ...
    @property
    def of(self) -> int: ...


@triton.jit
def _held(tokens, FIRST: tl.constexpr, OF: tl.constexpr):
    """Return how many of a row's first `tokens` tokens the cache has."""
    return (tokens + (OF - 1 - FIRST)) // OF


@triton.jit(do_not_specialize=["table_stride"])
def partial_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, query_start_ptr, out_ptr, log_sum_ptr,
    cos_sin_ptr, scale, table_stride, block_stride, slot_stride,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRODUCT: tl.constexpr, TILED: tl.constexpr,
    LARGE: tl.constexpr, FAST: tl.constexpr, FIRST: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """TILED: the queries of prompts, of which many see most keys of their tile."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last queries see the most keys
    start = tl.load(query_start_ptr + row).to(tl.int64)
    queries = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if tile * ROWS >= queries * GROUP:
        return
    length = tl.load(lengths_ptr + row)
    packed = tile * ROWS + tl.arange(0, ROWS)
    query = packed // GROUP
    real = query < queries
    before = length - queries  # tokens before the row's first query; negative in padding, which has no keys
    positions = _held(tl.maximum(before + query + 1, 0), FIRST, OF) - 1
    earliest = _held(tl.maximum(before + tile * ROWS // GROUP + 1, 0), FIRST, OF) - 1
    last = _held(tl.minimum(tl.maximum(before + (tile * ROWS + ROWS - 1) // GROUP + 1, 0), length), FIRST, OF)
    head = (start + query) * GROUP + packed % GROUP
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + head[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)

    first, seen_first, seen_last = 0, 0, 0
    if WINDOW > 0:
        first = tl.maximum(earliest - WINDOW + 1, 0)
    share = tl.cdiv(last - first, SPLITS * KEYS) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, last)
    if TILED:
        seen_last = earliest + 1
        if WINDOW > 0:
            seen_first = last - WINDOW
    out, maximum, total = _attend(
        q, positions, begin, end, None, seen_first, seen_last, 0, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr + row * table_stride, cos_sin_ptr, scale, block_stride, slot_stride, 1, 0, 0,
        ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, PRODUCT, not TILED, LARGE, FAST, False,
    )  # fmt: skip
    total = tl.where(maximum == float("-inf"), 1.0, total)  # no key here: zeros
    at = head * SPLITS + split
    tl.store(out_ptr + at[:, None] * DIM + dims[None, :], out / total[:, None], mask=real[:, None])
    tl.store(log_sum_ptr + at, (maximum + tl.log2(total)) / LOG2E, mask=real)


@triton.jit
def merge_kernel(
    parts_ptr, log_sums_ptr, out_ptr, log_sum_ptr, part_stride, item_stride, log_part_stride, log_item_stride,
    PARTS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program for each item."""
    item = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, TILE), tl.arange(0, DIM)
    there = parts < PARTS
    log_sums = tl.load(log_sums_ptr + parts * log_part_stride + item * log_item_stride, mask=there, other=float("-inf"))
    maximum = tl.max(log_sums, 0)
    weights = tl.exp(log_sums - tl.where(maximum == float("-inf"), 0.0, maximum))
    weight = tl.sum(weights, 0)
    at = parts_ptr + (parts * part_stride + item * item_stride)[:, None] + dims[None, :]
    part = tl.load(at, mask=there[:, None], other=0.0)
    out = tl.sum(part * weights[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out_ptr + item * DIM + dims, out.to(out_ptr.dtype.element_ty))
    if log_sum_ptr is not None:
        tl.store(log_sum_ptr + item, maximum + tl.log(tl.where(weight > 0, weight, 1.0)))


def partial_attention(
    q: torch.Tensor, cache: CacheArguments, rows: RowArguments, options: AttentionArguments, held: Held, decode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [tokens, heads, d], row after row -> out, like q but float32, and log_sums [tokens, heads] float32.  Lesson 04.

    Each query attends to those of its row's keys that the cache has, whose blocks are `held.of` times smaller than the
    row's. Lengths, windows and rotations are those of whole rows. A query without keys gets zeros, and minus infinity.
    decode: whether each row has `rows.max_queries` queries, few enough for one tile. Raises ValueError unless the cache
    has one KV head, the window is a multiple of `held.of`, and as `paged_attention.decode_attention`.
    """
    tokens, heads, dim = q.shape
    block_size, kv_heads = paged_attention._checked_cache(cache, dim)
    window = options.window or 0
    if kv_heads != 1 or window % held.of:
        raise ValueError(f"{kv_heads} KV heads and a window of {window}: not one, or no multiple of {held.of}")
    q, count, table = q.contiguous(), rows.block_table.shape[0], rows.block_table
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    log_sums = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if not tokens:
        return out, log_sums
    device, quantized = paged_attention._device(q.device), cache.k_scale is not None
    k, v = stored(cache)
    if decode:
        packed = max(16, triton.next_power_of_2(rows.max_queries * heads))
        longest = table.shape[1] * block_size
        longest = min(longest, window // held.of + rows.max_queries - 1) if window else longest
        splits = paged_attention.decode_splits(count, longest, device)
        sizes = q.element_size(), cache.k.element_size()
        config = paged_attention.decode_config(dim, *sizes, packed, longest, count, splits, device)
        v = v.view(torch.int32) if quantized else v  # see `cache_codes.of_words`
    else:
        config = paged_attention.prefill_config(dim, q.element_size(), quantized, device)
    rotary = None if options.rotary is None else options.rotary[held.first :: held.of].contiguous()
    parts, part_sums = out, log_sums
    if config.splits > 1:
        parts = torch.empty((tokens, heads, config.splits, dim), dtype=torch.float32, device=q.device)
        part_sums = torch.empty((tokens, heads, config.splits), dtype=torch.float32, device=q.device)
    partial_kernel[(count, triton.cdiv(rows.max_queries * heads, config.rows), config.splits)](
        q, k, v, cache.k_scale, cache.v_scale, table, rows.lengths, rows.query_start, parts, part_sums, rotary,
        options.scale, table.stride(0), *k.stride()[:2],
        GROUP=heads, SPLITS=config.splits, ROWS=config.rows, KEYS=config.keys, DIM=dim, BLOCK_SIZE=block_size,
        WINDOW=window // held.of, SOFT_CAP=options.soft_cap or 0.0, PRODUCT=product_type(q.dtype, quantized),
        TILED=not decode, LARGE=paged_attention._is_large(cache), FAST=paged_attention._has_fast_tanh(q),
        FIRST=held.first, OF=held.of, num_warps=config.warps, num_stages=1 if rotary is not None else config.stages,
    )  # fmt: skip
    if config.splits > 1:
        _merge(parts.flatten(0, 1).movedim(1, 0), part_sums.flatten(0, 1).movedim(1, 0), out, log_sums)
    return out, log_sums


def merged(parts: torch.Tensor, log_sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Attention over all keys from that over each part: parts [parts, n, d], log_sums [parts, n] -> [n, d] in `dtype`.

    Both float32; d is a power of two. Where no part has a key, the result is zeros.
    """
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    _merge(parts, log_sums, out, None)
    return out


def _merge(parts: torch.Tensor, log_sums: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor | None) -> None:
    count, items, dim = parts.shape
    if items:
        merge_kernel[(items,)](
            parts, log_sums, out, log_sum, *parts.stride()[:2], *log_sums.stride(),
            PARTS=count, TILE=triton.next_power_of_2(count), DIM=dim, num_warps=2,
        )  # fmt: skip
