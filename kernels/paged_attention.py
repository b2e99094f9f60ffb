"""Attention over keys and values in cache blocks: decode and prefill.  Lessons 04, 08 and 09.

    out = softmax(cap(scale * q k^T)) v      for each query, over the keys that it may see

where cap(s) = soft_cap * tanh(s / soft_cap) if the model has a soft cap (Gemma 2), else s. A query at position p sees
the keys at positions 0..p, or the last `window` of those. The key at position j is in block
block_table[row, j // block_size], at offset j % block_size.

Tiling:

- **Online softmax** (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention"). A program loops over tiles of
  keys with a running maximum, sum and output, which it rescales when the maximum grows. So the scores stay on the
  chip and every key is read once.
- **Query heads packed on their KV head.** With grouped queries (Ainslie et al. 2023, "GQA") several query heads read
  the same keys. A tile's rows are (query, head of the group) pairs of one KV head: Gemma 2B's 8 heads read each key
  once instead of 8 times, and even one query per row fills half of the 16 rows that a matrix instruction takes.
- **Decode splits the keys** (Dao et al. 2023, "Flash-Decoding"). A few long rows are too few programs to read memory
  at full speed, so several programs share the keys of a row, and a second, small kernel adds up their outputs, each
  weighted by its share of the softmax's sum.
- **Prefill tiles the queries too**: a key tile is loaded once for a tile of queries, up to the diagonal. The last
  queries see the most keys, so they start first. Most tiles of keys are seen by all queries of a tile: those are
  computed without a mask.

A quantized cache (lesson 08) holds codes, and a scale for each token and head. Products multiply the codes, which
float16 holds exactly; a key's scale multiplies its scores and a value's scale its softmax weights, which are far fewer
numbers than the tile has. float16 has a smaller range than bfloat16, so queries are divided by their largest number
first, and exponents are shifted so that weights times scales stay below 2^8.

Many tiles of queries of a long prompt read the same keys: these are first gathered in a buffer without gaps, which is
faster to read (`gathered_keys.py`), and converted there if the cache is quantized. A prompt's first chunk needs no
copy: all of its keys have just been computed, and are in a matrix without gaps already.

Attention never computes with what the cache holds beyond a row's length or before its window, so the contents of
unused slots do not matter.

The cache holds a stream's keys before their rotary embedding, because blocks move within their row (Xiao et al. 2023,
"StreamingLLM"). Given a table of angles, the kernels rotate keys as they load them. Without one (None, which Triton
compiles as a constant) that code disappears. With one, a tile of keys needs its other halves, cosines and sines too:
two such tiles in flight do not fit on every chip, so the kernels keep one.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launch_configs
from .arguments import AttentionArguments, CacheArguments, RowArguments, check_strides, is_compiled
from .cache_codes import of_words, product_type, stored, to_numbers
from .gathered_keys import gather, gathers

LOG2E = tl.constexpr(1.4426950408889634)
# Weights times their values' scales are float16 numbers up to 2^8: the larger, the smaller weights they can hold.
LOG2_WEIGHT = tl.constexpr(8)
RAGGED = tl.constexpr(1 << 30)  # see `_ragged`


@triton.jit
def _rotated(k, k_at, cos_sin_ptr, keys, dims, present, DIM: tl.constexpr):
    """k [KEYS, DIM] rotated by the angles of its positions; the other half of each pair is read from the same row."""
    half = DIM // 2
    other = tl.load(k_at + tl.where(dims < half, half, -half)[None, :], mask=present[:, None], other=0)
    other = to_numbers(other, k.dtype)
    angles = cos_sin_ptr + keys[:, None] * (2 * DIM) + dims[None, :]
    cos = tl.load(angles, mask=present[:, None], other=0.0).to(tl.float32)
    sin = tl.load(angles + DIM, mask=present[:, None], other=0.0).to(tl.float32)
    return (k.to(tl.float32) * cos + other.to(tl.float32) * sin).to(k.dtype)


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """FAST: with the GPU's instruction, whose error is 2^-11 of the result, as that of bfloat16's weights."""
    if FAST:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        tanh = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return tanh


@triton.jit
def _described(at, row, start, column, length, KEYS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr):
    """Return a tile of a row's keys or values from a descriptor. PACKED: from `_ragged`, with zeros from `length`
    on.
    """
    if PACKED:
        tile = at.load([RAGGED, row + length, RAGGED - length + start, column])
        tile = tl.reshape(tile, [KEYS, DIM])
    else:
        tile = at.load([row + start, column])
    return tile


@triton.jit
def _attend(
    q, positions, first, last, held, seen_first, seen_last, length, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    cos_sin_ptr, scale, block_stride, slot_stride, scale_stride, row, column,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, PRODUCT: tl.constexpr, MASKED: tl.constexpr, LARGE: tl.constexpr,
    FAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """q [ROWS, DIM] against keys first..last-1 -> (output * total, maximum, total), exponents in base 2.

    held: keys before it are not read, as their blocks may be another row's; None: there are none. Without a table,
    k_ptr and v_ptr are descriptors of gathered keys and values, which begin at (row, column), or (PACKED) of those that
    `_ragged` describes: of them `length` are this row's. PRODUCT: the type of the products' operands. All rows see the
    keys seen_first..seen_last-1: their tiles are not masked unless all are (MASKED). LARGE: 32 bits cannot count the
    cache's numbers. FAST: see `_tanh`.
    """
    dims, offsets = tl.arange(0, DIM), tl.arange(0, KEYS)
    ALIGNED: tl.constexpr = WINDOW == 0 and KEYS % BLOCK_SIZE == 0  # tiles begin with a block
    if k_scale_ptr is not None:  # float16 has a smaller range than bfloat16: divide q by its largest number
        q = q.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
        q, scale = q / largest[:, None], (scale * largest)[:, None]
    q = q.to(PRODUCT)
    unit = SOFT_CAP * LOG2E if SOFT_CAP > 0 else scale * LOG2E  # of scores, for exponents in base 2
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    words: tl.constexpr = v_scale_ptr is not None and v_ptr.dtype.element_ty == tl.int32
    if words:  # each holds codes of four neighboring columns, which are summed up apart
        quarter = tl.arange(0, DIM // 4)
        out_a = tl.zeros([ROWS, DIM // 4], tl.float32)
        out_b, out_c, out_d = out_a, out_a, out_a
    else:
        out = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(first, last, KEYS):
        keys = start + offsets
        present = keys < last
        if WINDOW > 0 and held is not None:
            present = present & (keys >= held)
        if table_ptr is not None:
            if ALIGNED:
                block = tl.load(table_ptr + start // BLOCK_SIZE + offsets // BLOCK_SIZE, mask=present, other=0)
                within = offsets % BLOCK_SIZE
            else:
                block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0)
                within = keys % BLOCK_SIZE
            if LARGE:
                block = block.to(tl.int64)
            slots = block * block_stride + within * slot_stride
            at = slots[:, None] + dims[None, :]
            k = to_numbers(tl.load(k_ptr + at, mask=present[:, None], other=0), PRODUCT)
            if cos_sin_ptr is not None:
                k = _rotated(k, k_ptr + at, cos_sin_ptr, keys, dims, present, DIM)
        else:
            k = _described(k_ptr, row, start, column, length, KEYS, DIM, PACKED).to(PRODUCT)
        # "ieee" keeps float32 products exact: the default, tf32, has a mantissa of 10 bits.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if k_scale_ptr is not None:
            scale_at = (block * BLOCK_SIZE + within) * scale_stride
            scores = scores * tl.load(k_scale_ptr + scale_at, mask=present, other=0.0)[None, :]
        if SOFT_CAP > 0:
            scores = _tanh(scores * (scale / SOFT_CAP), FAST)
        # No key after the last is visible, so a tile that has some is masked.
        if MASKED or ((start + KEYS > seen_last) | ((WINDOW > 0) & (start < seen_first))):
            visible = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        if v_scale_ptr is not None:  # weights times their values' scales are at most 2^LOG2_WEIGHT
            v_scale = tl.load(v_scale_ptr + scale_at, mask=present, other=0.0)
            exponent = tl.maximum(v_scale, 1e-20).to(tl.int32, bitcast=True) >> 23  # v_scale < 2^(exponent - 126)
            bounds = scores * unit + (exponent - (126 + LOG2_WEIGHT)).to(tl.float32)[None, :]
            new_maximum = tl.maximum(maximum, tl.max(bounds, 1))
        else:
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * unit)
        # A query that has seen no key yet has maximum -inf, and -inf - -inf is not a number.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores * unit - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        if v_scale_ptr is not None:
            weights = weights * v_scale[None, :]
        weights = weights.to(PRODUCT)
        if words:
            four = tl.load(v_ptr + slots[:, None] // 4 + quarter[None, :], mask=present[:, None], other=0)
            a, b, c, d = of_words(four, PRODUCT, k_ptr.dtype.element_ty)
            out_a = out_a * rescale[:, None] + tl.dot(weights, a, input_precision="ieee")
            out_b = out_b * rescale[:, None] + tl.dot(weights, b, input_precision="ieee")
            out_c = out_c * rescale[:, None] + tl.dot(weights, c, input_precision="ieee")
            out_d = out_d * rescale[:, None] + tl.dot(weights, d, input_precision="ieee")
        else:
            if table_ptr is not None:
                v = to_numbers(tl.load(v_ptr + at, mask=present[:, None], other=0), PRODUCT)
            else:
                v = _described(v_ptr, row, start, column, length, KEYS, DIM, PACKED).to(PRODUCT)
            out = out * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
    if words:
        out = tl.reshape(tl.join(tl.join(out_a, out_c), tl.join(out_b, out_d)), [ROWS, DIM])
    return out, maximum, total


@triton.jit(do_not_specialize=["table_stride"])  # or every table width would be compiled separately
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, out_ptr, log_total_ptr, cos_sin_ptr, scale,
    table_stride, block_stride, slot_stride, head_stride,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRODUCT: tl.constexpr,
    LARGE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    packed = tl.arange(0, ROWS)  # (query, head of the group)
    real = packed < QUERIES * GROUP
    query = packed // GROUP
    positions = length - QUERIES + query
    head = ((row * QUERIES + query) * tl.num_programs(1) + kv_head) * GROUP + packed % GROUP
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + head[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - QUERIES - WINDOW + 1, 0)
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head
        v_scale_ptr += kv_head
    share = tl.cdiv(length - first, SPLITS * KEYS) * KEYS  # full tiles, so that only one program has a partial one
    begin = first + split * share
    v_ptr += kv_head * head_stride // (4 if v_ptr.dtype.element_ty == tl.int32 else 1)
    out, maximum, total = _attend(
        q, positions, begin, tl.minimum(begin + share, length), None, 0, 0, 0,
        k_ptr + kv_head * head_stride, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr + row * table_stride, cos_sin_ptr, scale, block_stride, slot_stride, tl.num_programs(1), 0, 0,
        ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, PRODUCT, True, LARGE, FAST, False,
    )  # fmt: skip
    total = tl.where(maximum == float("-inf"), 1.0, total)  # an empty share, or a padding row of length 0: zeros
    at = head * SPLITS + split
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * DIM + dims[None, :], out, mask=real[:, None])
    if SPLITS > 1:
        tl.store(log_total_ptr + at, maximum + tl.log2(total), mask=real)


@triton.jit
def combine_kernel(partial_ptr, log_total_ptr, out_ptr, SPLITS: tl.constexpr, DIM: tl.constexpr):
    """out = sum over splits of partial * (its share of the softmax's sum); one program a query head."""
    head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    log_total = tl.load(log_total_ptr + head * SPLITS + splits)
    maximum = tl.max(log_total, 0)
    share = tl.exp2(log_total - tl.where(maximum == float("-inf"), 0.0, maximum))
    share = share / tl.maximum(tl.sum(share, 0), 1e-30)
    partial = tl.load(partial_ptr + (head * SPLITS + splits)[:, None] * DIM + dims[None, :])
    out = tl.sum(partial * share[:, None], 0)
    tl.store(out_ptr + head * DIM + dims, out.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["table_stride", "row_stride"])  # or every table width would be compiled separately
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, query_start_ptr, out_ptr, cos_sin_ptr, scale,
    table_stride, block_stride, slot_stride, head_stride, row_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRODUCT: tl.constexpr, ROWS_LAST: tl.constexpr,
    LARGE: tl.constexpr, FAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Without a table, a row's keys begin at row * row_stride, or where its queries do (PACKED)."""
    TILES: tl.constexpr = 1 if ROWS_LAST else 2  # the axis of the grid
    tile = tl.num_programs(TILES) - 1 - tl.program_id(TILES)
    kv_head, kv_heads, row = tl.program_id(0), tl.num_programs(0), tl.program_id(3 - TILES).to(tl.int64)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    queries = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if tile * ROWS >= queries * GROUP:  # the grid has tiles for the row with the most queries
        return
    length = tl.load(lengths_ptr + row)
    packed = tile * ROWS + tl.arange(0, ROWS)
    query = packed // GROUP
    real = query < queries
    positions = length - queries + query
    head = ((start + query) * kv_heads + kv_head) * GROUP + packed % GROUP
    dims = tl.arange(0, DIM)
    at = head[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=real[:, None], other=0.0)

    earliest = length - queries + tile * ROWS // GROUP  # the position of the tile's first query
    last = tl.minimum(length - queries + (tile * ROWS + ROWS - 1) // GROUP + 1, length)
    first, seen_first = 0, 0
    if WINDOW > 0:
        first = tl.maximum(earliest - WINDOW + 1, 0)
        seen_first = last - WINDOW
    if table_ptr is not None:
        table_ptr += row * table_stride
        k_ptr += kv_head * head_stride
        v_ptr += kv_head * head_stride
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head
        v_scale_ptr += kv_head
    begin = start if PACKED else row * row_stride
    out, maximum, total = _attend(
        q, positions, first, last, None, seen_first, earliest + 1, length, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr, cos_sin_ptr, scale, block_stride, slot_stride, kv_heads, begin.to(tl.int32), kv_head * DIM,
        ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, PRODUCT, False, LARGE, FAST, PACKED,
    )  # fmt: skip
    total = tl.where(maximum == float("-inf"), 1.0, total)
    tl.store(out_ptr + at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


def decode_attention(
    q: torch.Tensor, cache: CacheArguments, rows: RowArguments, options: AttentionArguments
) -> torch.Tensor:
    """q [rows, queries, heads, d] -> like q: each row's newest queries attend to its cached keys.  Lesson 04.

    Query i of n is at position length - n + i of its row. A row of length 0 gives zeros. Raises ValueError unless d is
    a power of two from 16 to 256 and K and V have equal strides.
    """
    count, queries, heads, dim = q.shape
    block_size, kv_heads = _checked_cache(cache, dim)
    window, rotary, table = options.window, options.rotary, rows.block_table
    q = q.contiguous()
    out = torch.empty_like(q)
    if not count:
        return out
    group = heads // kv_heads
    device = _device(q.device)
    packed = max(16, triton.next_power_of_2(queries * group))
    longest = table.shape[1] * block_size
    longest = min(longest, window + queries - 1) if window else longest
    splits = decode_splits(count * kv_heads, longest, device)
    config = launch_configs.tuned(
        "decode_attention",
        decode_config(
            dim, q.element_size(), cache.k.element_size(), packed, longest, count * kv_heads, splits, device
        ),
        dim=dim, rows=packed, programs=count * kv_heads, longest=longest, **_dtypes(q, cache),
    )  # fmt: skip
    k, v = stored(cache)
    splits, parts, log_total = config.splits, out, out
    if splits > 1:
        parts = torch.empty((count, queries, heads, splits, dim), dtype=torch.float32, device=q.device)
        log_total = torch.empty((count, queries, heads, splits), dtype=torch.float32, device=q.device)
    if cache.v_scale is not None:
        v = v.view(torch.int32)  # see `of_words`
    decode_kernel[(count, kv_heads, splits)](
        q, k, v, cache.k_scale, cache.v_scale, table, rows.lengths, parts, log_total, rotary, options.scale,
        table.stride(0), *k.stride()[:3],
        QUERIES=queries, GROUP=group, SPLITS=splits, ROWS=packed, KEYS=config.keys, DIM=dim, BLOCK_SIZE=block_size,
        WINDOW=window or 0, SOFT_CAP=options.soft_cap or 0.0, PRODUCT=product_type(q.dtype, cache.k_scale is not None),
        LARGE=_is_large(cache), FAST=_has_fast_tanh(q), num_warps=config.warps,
        num_stages=1 if rotary is not None else config.stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(count * queries * heads,)](parts, log_total, out, SPLITS=splits, DIM=dim, num_warps=2)
    return out


def prefill_attention(
    q: torch.Tensor,
    cache: CacheArguments,
    rows: RowArguments,
    options: AttentionArguments,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """q [tokens, heads, d] -> like q: rows with any number of queries, packed one after the other.  Lesson 04.

    A row's queries are at the last of its positions. Its keys, including those of earlier chunks, are read from the
    cache. new: keys and values of the same tokens as q, [tokens, kv_heads, d] each, as they are in the cache (which is
    not quantized); the last `rows.whole` rows, which have no others, read these instead. Otherwise as
    `decode_attention`.
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    if len(q):
        count = len(rows.lengths)
        cached = count - rows.whole if new and options.rotary is None else count
        if cached:
            _prefill(q, _cached_keys(q, cache, rows, cached, options), rows, slice(cached), options, out)
        if new and cached < count:
            _prefill(q, _new_keys(q, *new, rows, count - cached), rows, slice(cached, count), options, out)
    return out


class _Keys(NamedTuple):
    """The place of the rows' keys and values, for `prefill_kernel`, and its launch configuration."""

    k: torch.Tensor | TensorDescriptor
    v: torch.Tensor | TensorDescriptor
    kv_heads: int
    nbytes: int
    config: "AttentionConfig"
    row_stride: int = 0  # without blocks: tokens from a row's first key to the next row's; 0: as many as it has
    cache: CacheArguments | None = None  # with blocks
    table: torch.Tensor | None = None


def _cached_keys(
    q: torch.Tensor, cache: CacheArguments, rows: RowArguments, count: int, options: AttentionArguments
) -> _Keys:
    """Return those of the first `count` rows, in the cache or gathered from there."""
    tokens, heads, dim = q.shape
    block_size, kv_heads = _checked_cache(cache, dim)
    group, quantized, table = heads // kv_heads, cache.k_scale is not None, rows.block_table[:count]
    keys, tiles = table.numel() * block_size * kv_heads, triton.cdiv(rows.max_queries * group, 128)
    nbytes = 2 * keys * dim * q.element_size()
    if options.rotary is None and gathers(tiles, keys, tokens * heads, quantized):
        config = _contiguous_config(q, group, tiles * count * kv_heads)
        k, v = gather(cache, table, rows.lengths[:count], q.dtype, config.keys)
        return _Keys(k, v, kv_heads, nbytes, config, k.shape[0] // count)
    default = prefill_config(dim, q.element_size(), quantized, _device(q.device))
    config = launch_configs.tuned("prefill_attention", default, dim=dim, group=group, **_dtypes(q, cache))
    return _Keys(*stored(cache), kv_heads, nbytes, config, cache=cache, table=table)


def _new_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: RowArguments, count: int) -> _Keys:
    """Return those of the last `count` rows, which have no others than k and v [tokens, kv_heads, d]."""
    kv_heads, dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    config = _contiguous_config(q, group, triton.cdiv(rows.max_queries * group, 128) * count * kv_heads)
    one, other = (_ragged(each.flatten(1), [config.keys, dim]) for each in (k, v))
    return _Keys(one, other, kv_heads, 2 * k.numel() * k.element_size(), config)


def _ragged(matrix: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    """Return a descriptor of a matrix [tokens, columns] whose tiles end with any token: after it they have zeros.

    Else a row's last tile would have values of the next row, and zero times these might not be a number. A tile is
    loaded as if the row's last token were the last of RAGGED ones, so the hardware puts zeros after it. Two more
    dimensions move the address back, by RAGGED tokens, and on by those before the row's end: addresses have 64 bits,
    so RAGGED times 2^34 is nothing. (As in Triton's `tools/ragged_tma.py`.)
    """
    stride, most = matrix.stride(0), 2**31 - 1
    shape, strides = [most, most, RAGGED.value, matrix.shape[1]], [2**34 - stride, stride, stride, 1]
    return TensorDescriptor(matrix, shape, strides, [1, 1, *tile])


def _contiguous_config(q: torch.Tensor, group: int, programs: int) -> "AttentionConfig":
    default = gathered_config(q.shape[2], q.element_size(), programs, _device(q.device))
    return launch_configs.tuned("gathered_attention", default, dim=q.shape[2], group=group, **_dtypes(q))


def _prefill(
    q: torch.Tensor, keys: _Keys, rows: RowArguments, part: slice, options: AttentionArguments, out: torch.Tensor
) -> None:
    """Write the attention of the rows `part` to `out`.

    Tiles with the most keys run first. Where keys and values of all rows fit in the L2 cache, that holds for all rows
    together; else one row follows the other, and their programs read the same keys at the same time.
    """
    cache, config, lengths = keys.cache, keys.config, rows.lengths[part]
    k_scale = v_scale = None
    strides: tuple[int, ...] = (0, 0, 0)
    block_size = 1
    if cache is not None:
        k_scale, v_scale, strides, block_size = cache.k_scale, cache.v_scale, cache.k.stride()[:3], cache.k.shape[1]
    group, rows_last = q.shape[1] // keys.kv_heads, keys.nbytes > _device(q.device).l2
    tiles, count = triton.cdiv(rows.max_queries * group, config.rows), len(lengths)
    prefill_kernel[(keys.kv_heads, tiles, count) if rows_last else (keys.kv_heads, count, tiles)](
        q, keys.k, keys.v, k_scale, v_scale, keys.table, lengths, rows.query_start[part.start or 0 :], out,
        options.rotary, options.scale, 0 if keys.table is None else keys.table.stride(0), *strides, keys.row_stride,
        GROUP=group, ROWS=config.rows, KEYS=config.keys, DIM=q.shape[2], BLOCK_SIZE=block_size,
        WINDOW=options.window or 0, SOFT_CAP=options.soft_cap or 0.0,
        PRODUCT=product_type(q.dtype, k_scale is not None), ROWS_LAST=rows_last,
        LARGE=cache is not None and _is_large(cache), FAST=_has_fast_tanh(q),
        PACKED=cache is None and not keys.row_stride,
        num_warps=config.warps, num_stages=1 if options.rotary is not None else config.stages,
    )  # fmt: skip


def takes(dim: int) -> bool:
    """Return whether the kernels support this head_dim: a power of two from 16 to 256."""
    return 16 <= dim <= 256 and dim & (dim - 1) == 0


class Device(NamedTuple):
    """The facts about a GPU that the heuristics need."""

    shared_memory: int  # bytes that one program may use
    processors: int
    l2: int = 16 << 20  # bytes of its L2 cache that keys may take


class AttentionConfig(NamedTuple):
    """A launch configuration of either attention kernel."""

    rows: int  # (query, head) pairs in a tile
    keys: int  # keys in a tile
    warps: int
    stages: int  # tiles of keys and values in flight
    splits: int = 1  # programs that share a row's keys, in decode


launch_configs.register("decode_attention", AttentionConfig)
launch_configs.register("prefill_attention", AttentionConfig)
launch_configs.register("gathered_attention", AttentionConfig)


def decode_config(
    dim: int, itemsize: int, cache_itemsize: int, packed: int, longest: int, rows: int, splits: int, device: Device
) -> AttentionConfig:
    """Return the fastest of those measured on an H200 at head_dim 256 and 128.

    itemsize: of queries. packed: (query, head) pairs of each of the `rows`. A program has `longest / splits` keys.
    Short shares are one tile, so none is loaded early. Tiles of codes have two warps, or four and twice the keys if
    there are few programs: with more warps, conversion does not get faster.
    """
    share = triton.cdiv(longest, splits)
    if itemsize >= 4:
        keys, warps, stages = 16, 4, 2
    elif share <= 32:
        keys, warps, stages = (16 if share <= 16 else 32), 4, 1
    elif cache_itemsize == 1:
        keys, warps, stages = (128, 4, 3) if rows * splits <= device.processors else (64, 2, 3)
    else:
        keys, warps, stages = 64, 4, 2 if dim > 128 else 3
    config = AttentionConfig(packed, max(16, keys * 32 // max(packed, 32)), warps, stages, splits)
    return fitted(config, dim, itemsize, False, device)


def fitted(config: AttentionConfig, dim: int, itemsize: int, prefill: bool, device: Device) -> AttentionConfig:
    """With smaller tiles, if a GPU has less memory for a program than any since Ampere (a T4 has 64 KiB).

    By the bytes of queries, of keys and values in flight, and of weights, as Triton allocates them there.
    """
    if device.shared_memory >= 96 * 1024:
        return config
    rows, keys = config.rows, config.keys

    def needed() -> int:
        tiles = 2 * config.stages * keys * dim + rows * dim + rows * keys if prefill else 2 * (rows + keys) * dim
        return itemsize * tiles

    while needed() > device.shared_memory and max(keys, rows if prefill else 0) > 16:
        if prefill and (rows >= 2 * config.stages * keys or keys <= 16):
            rows //= 2
        else:
            keys //= 2
    return config._replace(rows=rows, keys=keys)


def prefill_config(dim: int, itemsize: int, quantized: bool, device: Device) -> AttentionConfig:
    """As many query rows per key tile as fit on the chip with their output: the more, the fewer reads of each key.

    Unless heads are short and nothing has to be converted: then two small programs on a processor hide each other's
    waiting.
    """
    if itemsize >= 4:  # float32 is for tests: its products do not use the matrix units
        return AttentionConfig(16 if dim > 128 else 32, 16 if dim > 128 else 32, 4, 1)
    if device.shared_memory >= 160 * 1024:
        return AttentionConfig(128, 64, 8, 2) if dim > 128 or quantized else AttentionConfig(64, 64, 4, 2)
    config = AttentionConfig(64 if dim > 128 else 128, 32 if dim > 128 else 64, 4 if dim <= 64 else 8, 2)
    return fitted(config, dim, itemsize, True, device)


def gathered_config(dim: int, itemsize: int, programs: int, device: Device) -> AttentionConfig:
    """As `prefill_config`; smaller tiles for short heads, and if `programs` (of its tiles) leave processors idle."""
    if itemsize < 4 and device.shared_memory >= 160 * 1024 and (dim <= 128 or programs <= device.processors):
        return AttentionConfig(64, 64, 4, 3 if dim <= 128 else 2)
    return prefill_config(dim, itemsize, True, device)


def decode_splits(programs: int, longest: int, device: Device) -> int:
    """Return how many programs share a row's keys: a power of two, at most 64, for full processors and short shares.

    Unless there are 64, shares have at most 768 keys. Full processors matter for few rows. Short shares balance
    many ragged rows, of which the longest would finish last. Each split costs a partial output that is written and
    read, so short rows are not split if there are enough of them.
    `longest` comes from the table's width: the lengths are on the device, and reading them would synchronize.
    """
    fill = min(4 * device.processors // programs, longest // 16)
    balance = longest // 384
    wanted = min(max(fill, balance, 1), 64)
    return 1 << (wanted.bit_length() - 1)


@lru_cache
def _device(device: torch.device) -> Device:
    if device.type != "cuda":  # interpreted: each program is slow, so few of them
        return Device(99 * 1024, 4)
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs lack the field
    return Device(shared, properties.multi_processor_count, properties.L2_cache_size // 3)


def _is_large(cache: CacheArguments) -> bool:
    """Return whether 32 bits cannot count the cache's numbers from its first block to its end, gaps included."""
    return cache.k.shape[0] * cache.k.stride(0) >= 1 << 31


def _has_fast_tanh(q: torch.Tensor) -> bool:
    """Return whether tanh is one instruction (compute capability 7.5), and exact enough for what follows."""
    return q.element_size() < 4 and is_compiled(q) and torch.cuda.get_device_capability(q.device) >= (7, 5)


def _dtypes(q: torch.Tensor, cache: CacheArguments | None = None) -> dict[str, str]:
    """Return the dtypes in a configuration's key: of queries, and of a quantized cache."""
    held = {} if cache is None or cache.k_scale is None else {"cache": launch_configs.dtype_name(cache.k.dtype)}
    return {"dtype": launch_configs.dtype_name(q.dtype), **held}


def _checked_cache(cache: CacheArguments, dim: int) -> tuple[int, int]:
    """(block_size, kv_heads) of a cache. Raises ValueError if the kernels cannot read it."""
    check_strides(cache)
    if not takes(dim):
        raise ValueError(f"head_dim {dim} is not a power of two from 16 to 256: use ops.reference")
    return cache.k.shape[1], cache.k.shape[2]
