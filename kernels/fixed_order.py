"""Products and attention whose sums have one order, whatever else a launch computes.  Lesson 13.

    product    x [tokens, in] W^T + b: every number is the sum over tiles of inputs, one after the other
    attention  softmax(cap(scale * q k^T)) v: the sum over segments of keys, each summed tile by tile

Tiling: other kernels choose their tiles, and how many programs share a sum, by the number of rows, because that is
faster; a sum then has another order in another step. Here both follow from sizes that a model never changes:

- **Products** have tiles of 64 tokens and 64 outputs for one token as for thousands, so that one instruction multiplies
  all of them; of few tokens the rest of a tile is empty. Programs share the inputs of a matrix with few outputs
  (`splits`), by its shape alone, and a second kernel adds their parts in order.
- **Attention** divides the keys into segments that begin at multiples of SEGMENT, and these into tiles. Decode and
  prefill are one kernel: a program has a tile of (query, head of the group) pairs and one segment. Of a segment that
  ends after a query, the rest is masked. A masked tile changes nothing: its weights are 0, and what was summed before
  is multiplied by 2^0. The second kernel adds the segments in order, from the first to the last that the query sees.

What is not summed along tokens or keys needs none of this: norms, the rotary embedding, activations and sampling have
a program for each row with tiles of the same size in every launch. Compare He et al. 2025, "Defeating Nondeterminism in
LLM Inference".
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import paged_attention
from .arguments import AttentionArguments, CacheArguments, RowArguments, is_compiled
from .cache_codes import product_type, stored
from .paged_attention import AttentionConfig, _attend, fitted

TOKENS, OUTPUTS, INPUTS = 64, 64, 64  # a tile of a product
FULL = 128  # programs that keep a GPU's memory busy
MOST_SPLITS = 8
AT_ONCE = 4096  # tokens of a launch, for products whose parts are stored
SEGMENT = 1024  # keys: whole tiles of them
PART_BYTES = 1 << 28  # of the segments' results that a launch stores


class FixedOrderConfig(NamedTuple):
    """The tiles and programs into which a product is divided."""

    inputs: int  # in a tile
    splits: int  # programs that share the inputs


@triton.jit
def _multiplied(x, weight, total, COMPILED: tl.constexpr):
    """total + x weight^T"""
    if COMPILED:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    else:  # the interpreter multiplies the bits of bf16 numbers
        total += tl.dot(x.to(tl.float32), tl.trans(weight.to(tl.float32)), input_precision="ieee")
    return total


# A number of tokens that is 1 or divisible by 16 would be compiled separately.
@triton.jit(do_not_specialize=["COUNT", "x_stride"])
def fixed_product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, COUNT, x_stride, weight_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """out [SPLITS, COUNT, ROWS]: with several splits float32 parts, to which no bias is added."""
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens, split = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.program_id(2)
    real_rows, real_tokens = rows < ROWS, tokens < COUNT
    x_at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    weight_at = weight_ptr + rows.to(tl.int64)[:, None] * weight_stride
    share: tl.constexpr = (COLUMNS + INPUTS * SPLITS - 1) // (INPUTS * SPLITS) * INPUTS
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(split * share, tl.minimum(split * share + share, COLUMNS), INPUTS):
        columns = start + tl.arange(0, INPUTS)
        inside = (columns < COLUMNS)[None, :]
        x = tl.load(x_at + columns[None, :], mask=real_tokens[:, None] & inside, other=0.0)
        weight = tl.load(weight_at + columns[None, :], mask=real_rows[:, None] & inside, other=0.0)
        total = _multiplied(x, weight, total, COMPILED)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=real_rows, other=0.0).to(tl.float32)[None, :]
    at = (split.to(tl.int64) * COUNT + tokens[:, None]) * ROWS + rows[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=real_tokens[:, None] & real_rows[None, :])


@triton.jit(do_not_specialize=["SIZE"])
def add_parts_kernel(part_ptr, bias_ptr, out_ptr, SIZE, ROWS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """out = the parts' sum, in order, plus the bias."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    total = tl.load(part_ptr + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + split * SIZE.to(tl.int64) + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % ROWS, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def fixed_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, query_start_ptr, out_ptr, log_total_ptr,
    scale, table_stride, block_stride, slot_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    PRODUCT: tl.constexpr, LARGE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """out [tokens, heads, segments, DIM] and log_total [tokens, heads, segments], or of one segment out alone."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    segments, kv_heads = tl.num_programs(2) // HEADS, HEADS
    segment, kv_head = tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    start = tl.load(query_start_ptr + row).to(tl.int64)
    queries = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if tile * ROWS >= queries * GROUP:  # the grid has tiles for the row with the most queries
        return
    length = tl.load(lengths_ptr + row)
    packed = tile * ROWS + tl.arange(0, ROWS)
    query = packed // GROUP
    real = query < queries
    positions = length - queries + query
    first = segment * SEGMENT
    last = tl.minimum(first + SEGMENT, length)
    last = tl.minimum(last, length - queries + (tile * ROWS + ROWS - 1) // GROUP + 1)  # no query sees more
    earliest = 0
    if WINDOW > 0:  # tiles of keys begin at multiples of KEYS in every launch; no query sees the first ones
        earliest = tl.maximum(length - queries + tile * ROWS // GROUP - WINDOW + 1, 0)
        first = tl.maximum(first, earliest // KEYS * KEYS)
    if (first >= last) & (log_total_ptr is not None):  # the second kernel does not read it
        return
    head = ((start + query) * kv_heads + kv_head) * GROUP + packed % GROUP
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + head[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head
        v_scale_ptr += kv_head
    out, maximum, total = _attend(
        q, positions, first, last, earliest, 0, 0, 0, k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride,
        k_scale_ptr, v_scale_ptr, table_ptr + row * table_stride, None, scale, block_stride, slot_stride, kv_heads,
        0, 0, ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, PRODUCT, True, LARGE, FAST, False,
    )  # fmt: skip
    total = tl.where(maximum == float("-inf"), 1.0, total)
    at = head * segments + segment
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * DIM + dims[None, :], out, mask=real[:, None])
    if log_total_ptr is not None:
        tl.store(log_total_ptr + at, maximum + tl.log2(total), mask=real)


@triton.jit
def add_segments_kernel(
    part_ptr, log_total_ptr, lengths_ptr, query_start_ptr, out_ptr, SEGMENTS,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """out = the sum over segments of part * (its share of the softmax's sum); programs as in the kernel above."""
    row, tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    queries = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if tile * ROWS >= queries * GROUP:
        return
    length = tl.load(lengths_ptr + row)
    packed = tile * ROWS + tl.arange(0, ROWS)
    query = packed // GROUP
    real = query < queries
    positions = length - queries + query
    last = tl.minimum(length, length - queries + (tile * ROWS + ROWS - 1) // GROUP + 1)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - queries + tile * ROWS // GROUP - WINDOW + 1, 0) // SEGMENT
    head = ((start + query) * HEADS + kv_head) * GROUP + packed % GROUP
    dims = tl.arange(0, DIM)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for segment in range(first, tl.cdiv(last, SEGMENT)):
        seen = real & (segment * SEGMENT <= positions)
        at = head * SEGMENTS + segment
        maximum = tl.maximum(maximum, tl.load(log_total_ptr + at, mask=seen, other=float("-inf")))
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for segment in range(first, tl.cdiv(last, SEGMENT)):
        seen = real & (segment * SEGMENT <= positions)
        at = head * SEGMENTS + segment
        share = tl.exp2(tl.load(log_total_ptr + at, mask=seen, other=float("-inf")) - maximum)
        total += share
        part = tl.load(part_ptr + at[:, None] * DIM + dims[None, :], mask=seen[:, None], other=0.0)
        out += part * share[:, None]
    total = tl.where(total > 0, total, 1.0)
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head[:, None] * DIM + dims[None, :], out, mask=real[:, None])


def product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, in] times matrix [out, in], plus a bias [out] -> [tokens, out] in x's dtype.  Lesson 13.

    bfloat16, float16 or float32, which is multiplied without TF32. ValueError for another dtype, and for two of them.
    """
    if x.dtype != matrix.dtype or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"the product needs two equal dtypes of 16 or 32 bits, not {x.dtype} and {matrix.dtype}")
    x = x if x.stride(-1) == 1 else x.contiguous()
    matrix = matrix if matrix.stride(-1) == 1 else matrix.contiguous()
    rows, columns = matrix.shape
    inputs, splits = product_config(rows, columns, x.element_size())
    out = torch.empty((len(x), rows), dtype=x.dtype, device=x.device)
    for start in range(0, len(x), AT_ONCE if splits > 1 else max(1, len(x))):
        part = x[start : start + AT_ONCE] if splits > 1 else x
        to = out[start : start + len(part)]
        sums = to if splits == 1 else torch.empty((splits, *to.shape), dtype=torch.float32, device=x.device)
        fixed_product_kernel[(triton.cdiv(rows, OUTPUTS), triton.cdiv(len(part), TOKENS), splits)](
            part, matrix, bias if splits == 1 else None, sums, len(part), part.stride(0), matrix.stride(0),
            ROWS=rows, COLUMNS=columns, TOKENS=TOKENS, OUTPUTS=OUTPUTS, INPUTS=inputs, SPLITS=splits,
            COMPILED=is_compiled(x), num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            add_parts_kernel[(triton.cdiv(to.numel(), 1024),)](
                sums, bias, to, to.numel(), ROWS=rows, SPLITS=splits, TILE=1024, num_warps=4
            )
    return out


def product_config(rows: int, columns: int, itemsize: int) -> FixedOrderConfig:
    """By the shape of the matrix alone, on every GPU. A program has at least four tiles of inputs."""
    inputs = INPUTS if itemsize < 4 else INPUTS // 2
    wanted = min(FULL // triton.cdiv(rows, OUTPUTS), columns // (4 * inputs), MOST_SPLITS)
    return FixedOrderConfig(inputs, 1 << (max(wanted, 1).bit_length() - 1))


def attention(q: torch.Tensor, cache: CacheArguments, rows: RowArguments, options: AttentionArguments) -> torch.Tensor:
    """q [tokens, heads, d] -> like q: the queries of each row attend to its keys, in prefill and in decode.  Lesson 13.

    As `paged_attention.prefill_attention`; ValueError too for keys that are cached before their rotation.
    """
    tokens, heads, dim = q.shape
    block_size, _ = paged_attention._checked_cache(cache, dim)
    if options.rotary is not None:
        raise ValueError("attention with a fixed order has no kernel for keys that are cached before their rotation")
    q = q.contiguous()
    out = torch.empty_like(q)
    segments = triton.cdiv(rows.block_table.shape[1] * block_size, SEGMENT)
    at_once = max(1, PART_BYTES // (heads * segments * dim * 4) if segments > 1 else tokens)
    for begin in range(0, tokens, at_once):
        end = min(begin + at_once, tokens)
        _attend_part(q[begin:end], out[begin:end], cache, rows, _bounds(rows, begin, end, tokens), segments, options)
    return out


def _bounds(rows: RowArguments, begin: int, end: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """`lengths`, `query_start` and `max_queries` of the queries begin..end-1: a row ends with its last one there."""
    if end - begin == tokens:
        return rows.lengths, rows.query_start, rows.max_queries
    left_out = (rows.query_start[1:] - end).clamp(min=0)
    return rows.lengths - left_out, rows.query_start.clamp(begin, end) - begin, min(rows.max_queries, end - begin)


def _attend_part(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: CacheArguments,
    rows: RowArguments,
    bounds: tuple[torch.Tensor, torch.Tensor, int],
    segments: int,
    options: AttentionArguments,
) -> None:
    """Write what q [tokens, heads, d] attend to into `out`. bounds: see `_bounds`."""
    tokens, heads, dim = q.shape
    lengths, query_start, max_queries = bounds
    block_size, kv_heads = paged_attention._checked_cache(cache, dim)
    group, config = heads // kv_heads, attention_config(dim, q.element_size(), q.device)
    count, tiles = len(rows.block_table), triton.cdiv(max_queries * group, config.rows)
    parts, log_total = out, None
    if segments > 1:
        parts = torch.empty((tokens, heads, segments, dim), dtype=torch.float32, device=q.device)
        log_total = torch.empty((tokens, heads, segments), dtype=torch.float32, device=q.device)
    k, v = stored(cache)
    tiled = {"HEADS": kv_heads, "GROUP": group, "ROWS": config.rows, "DIM": dim, "SEGMENT": SEGMENT}
    tiled["WINDOW"] = options.window or 0
    fixed_attention_kernel[(count, tiles, segments * kv_heads)](
        q, k, v, cache.k_scale, cache.v_scale, rows.block_table, lengths, query_start, parts, log_total,
        options.scale, rows.block_table.stride(0), *k.stride()[:3],
        KEYS=config.keys, BLOCK_SIZE=block_size, SOFT_CAP=options.soft_cap or 0.0,
        PRODUCT=product_type(q.dtype, cache.k_scale is not None), LARGE=paged_attention._is_large(cache),
        FAST=paged_attention._has_fast_tanh(q),
        num_warps=config.warps, num_stages=config.stages, **tiled,
    )  # fmt: skip
    if log_total is not None:
        add_segments_kernel[(count, tiles, kv_heads)](
            parts, log_total, lengths, query_start, out, segments, num_warps=config.warps, **tiled
        )


def attention_config(dim: int, itemsize: int, device: torch.device) -> AttentionConfig:
    """By the size of a head alone, on one GPU."""
    if itemsize >= 4:
        return AttentionConfig(16, 16, 4, 1)
    return fitted(
        AttentionConfig(64, 32 if dim > 128 else 64, 4, 2), dim, itemsize, True, paged_attention._device(device)
    )
