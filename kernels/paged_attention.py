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
  queries see the most keys, so they start first.

A quantized cache (lesson 08) holds codes, and a scale for each token and head. Products multiply the codes, which
bfloat16 holds exactly; a key's scale multiplies its scores and a value's scale its softmax weights, which are far fewer
numbers than the tile has. Converting a tile takes as long whether 16 rows read it or 128, so many tiles of queries of
one prompt would convert the same keys again and again: a long prompt's keys and values are first dequantized to a
contiguous buffer.

Keys beyond a row's length and before its window are never loaded, so the contents of unused slots do not matter.

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

from . import launch_configs
from .arguments import Cache, Options, check_strides
from .cache_codes import of_words, stored, to_numbers

LOG2E = tl.constexpr(1.4426950408889634)
# Weights times a value's scale may be too small for float16: they are multiplied by this, and the output divided.
UNIT = tl.constexpr(128.0)


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
def _attend(
    q, positions, first, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, cos_sin_ptr, scale,
    block_stride, slot_stride, scale_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """q [ROWS, DIM] against keys first..last-1 -> (output * total, maximum, total), exponents in base 2."""
    dims = tl.arange(0, DIM)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    words: tl.constexpr = v_ptr.dtype.element_ty == tl.int32
    if words:  # each holds codes of four neighboring columns, which are summed up apart
        quarter = tl.arange(0, DIM // 4)
        out_a = tl.zeros([ROWS, DIM // 4], tl.float32)
        out_b, out_c, out_d = out_a, out_a, out_a
    else:
        out = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < last
        if table_ptr is not None:
            block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
            slots = block * block_stride + (keys % BLOCK_SIZE) * slot_stride
        else:  # keys of a row are contiguous
            slots = keys * slot_stride
        at = slots[:, None] + dims[None, :]
        k = to_numbers(tl.load(k_ptr + at, mask=present[:, None], other=0), q.dtype)
        if cos_sin_ptr is not None:
            k = _rotated(k, k_ptr + at, cos_sin_ptr, keys, dims, present, DIM)
        # "ieee" keeps float32 products exact: the default, tf32, has a mantissa of 10 bits.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if k_scale_ptr is not None:
            scale_at = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * scale_stride
            scores = scores * tl.load(k_scale_ptr + scale_at, mask=present, other=0.0)[None, :]
        if SOFT_CAP > 0:
            scores = SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)  # tanh
        visible = (keys[None, :] <= positions[:, None]) & present[None, :]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A query that has seen no key yet has maximum -inf, and -inf - -inf is not a number.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        if v_scale_ptr is not None:
            weights = weights * (tl.load(v_scale_ptr + scale_at, mask=present, other=0.0) * UNIT)[None, :]
        weights = weights.to(q.dtype)
        if words:
            four = tl.load(v_ptr + slots[:, None] // 4 + quarter[None, :], mask=present[:, None], other=0)
            a, b, c, d = of_words(four, q.dtype, k_ptr.dtype.element_ty)
            out_a = out_a * rescale[:, None] + tl.dot(weights, a, input_precision="ieee")
            out_b = out_b * rescale[:, None] + tl.dot(weights, b, input_precision="ieee")
            out_c = out_c * rescale[:, None] + tl.dot(weights, c, input_precision="ieee")
            out_d = out_d * rescale[:, None] + tl.dot(weights, d, input_precision="ieee")
        else:
            v = to_numbers(tl.load(v_ptr + at, mask=present[:, None], other=0), q.dtype)
            out = out * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
    if words:
        out = tl.reshape(tl.join(tl.join(out_a, out_c), tl.join(out_b, out_d)), [ROWS, DIM])
    if v_scale_ptr is not None:
        out = out * (1.0 / UNIT)
    return out, maximum, total


@triton.jit(do_not_specialize=["table_stride"])  # or every table width would be compiled separately
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, out_ptr, log_total_ptr, cos_sin_ptr, scale,
    table_stride, block_stride, slot_stride, head_stride,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    packed = tl.arange(0, ROWS)  # (query, head of the group)
    real = packed < QUERIES * GROUP
    query = packed // GROUP
    positions = length - QUERIES + query
    head = ((row * QUERIES + query) * tl.num_programs(1) + kv_head) * GROUP + packed % GROUP
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + head[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0).to(PRODUCT)

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
        q, positions, begin, tl.minimum(begin + share, length),
        k_ptr + kv_head * head_stride, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr + row * table_stride, cos_sin_ptr, scale, block_stride, slot_stride, tl.num_programs(1),
        ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP,
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


@triton.jit(do_not_specialize=["table_stride"])  # or every table width would be compiled separately
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, query_start_ptr, out_ptr, cos_sin_ptr, scale,
    table_stride, block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    queries = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if tile * ROWS >= queries * GROUP:  # the grid has tiles for the row with the most queries
        return
    length = tl.load(lengths_ptr + row)
    packed = tile * ROWS + tl.arange(0, ROWS)
    query = packed // GROUP
    real = query < queries
    positions = length - queries + query
    head = ((start + query) * tl.num_programs(1) + kv_head) * GROUP + packed % GROUP
    dims = tl.arange(0, DIM)
    at = head[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=real[:, None], other=0.0).to(PRODUCT)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - queries + tile * ROWS // GROUP - WINDOW + 1, 0)
    last = tl.minimum(length - queries + (tile * ROWS + ROWS - 1) // GROUP + 1, length)
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head
        v_scale_ptr += kv_head
    if table_ptr is not None:
        table_ptr += row * table_stride
    else:
        k_ptr += row * block_stride
        v_ptr += row * block_stride
    out, maximum, total = _attend(
        q, positions, first, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, cos_sin_ptr, scale,
        block_stride, slot_stride, tl.num_programs(1), ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP,
    )  # fmt: skip
    total = tl.where(maximum == float("-inf"), 1.0, total)
    tl.store(out_ptr + at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["table_stride"])
def dequantize_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, k_out_ptr, v_out_ptr, table_stride,
    block_stride, slot_stride, head_stride,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """One block of a row and KV head, from the cache to a buffer in which the row's keys have no gaps."""
    row, column, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    kv_head, kv_heads = tl.program_id(2), tl.num_programs(2)
    offset = tl.arange(0, TILE)
    present = (offset < BLOCK_SIZE) & (column * BLOCK_SIZE + offset < tl.load(lengths_ptr + row))
    block = tl.load(table_ptr + row * table_stride + column).to(tl.int64)
    dims, mask = tl.arange(0, DIM)[None, :], present[:, None]
    at = (block * block_stride + offset * slot_stride + kv_head * head_stride)[:, None] + dims
    scale_at = (block * BLOCK_SIZE + offset) * kv_heads + kv_head
    k_scale = tl.load(k_scale_ptr + scale_at, mask=present, other=0.0)[:, None]
    v_scale = tl.load(v_scale_ptr + scale_at, mask=present, other=0.0)[:, None]
    k = to_numbers(tl.load(k_ptr + at, mask=mask, other=0), PRODUCT).to(tl.float32) * k_scale
    v = to_numbers(tl.load(v_ptr + at, mask=mask, other=0), PRODUCT).to(tl.float32) * v_scale
    to = ((((row * columns + column) * BLOCK_SIZE + offset) * kv_heads + kv_head) * DIM)[:, None] + dims
    tl.store(k_out_ptr + to, k.to(k_out_ptr.dtype.element_ty), mask=mask)
    tl.store(v_out_ptr + to, v.to(v_out_ptr.dtype.element_ty), mask=mask)


def decode_attention(
    q: torch.Tensor, cache: Cache, block_table: torch.Tensor, lengths: torch.Tensor, options: Options
) -> torch.Tensor:
    """q [rows, queries, heads, d] -> like q: each row's newest queries attend to its cached keys.  Lesson 04.

    block_table [rows, blocks] int32; lengths [rows] int32: the keys that a row's last query sees, its own included.
    Query i of n is at position lengths - n + i. A row of length 0 gives zeros. Raises ValueError unless d is a power of
    two from 16 to 256 and K and V have equal strides.
    """
    rows, queries, heads, dim = q.shape
    block_size, kv_heads = _checked_cache(cache, dim)
    window, rotary = options.window, options.rotary
    q = q.contiguous()
    out = torch.empty_like(q)
    if not rows:
        return out
    group = heads // kv_heads
    device = _device(q.device)
    packed = max(16, triton.next_power_of_2(queries * group))
    longest = block_table.shape[1] * block_size
    longest = min(longest, window + queries - 1) if window else longest
    launch = launch_configs.tuned(
        "decode_attention",
        decode_launch(dim, q.element_size(), cache.k.element_size(), packed)._replace(
            splits=decode_splits(rows * kv_heads, longest, device)
        ),
        dim=dim, rows=packed, programs=rows * kv_heads, longest=longest, **_dtypes(q, cache),
    )  # fmt: skip
    k, v = stored(cache)
    splits, parts, log_total = launch.splits, out, out
    if splits > 1:
        parts = torch.empty((rows, queries, heads, splits, dim), dtype=torch.float32, device=q.device)
        log_total = torch.empty((rows, queries, heads, splits), dtype=torch.float32, device=q.device)
    if cache.v_scale is not None:
        v = v.view(torch.int32)  # see `of_words`
    decode_kernel[(rows, kv_heads, splits)](
        q, k, v, cache.k_scale, cache.v_scale, block_table, lengths, parts, log_total, rotary, options.scale,
        block_table.stride(0), *k.stride()[:3],
        QUERIES=queries, GROUP=group, SPLITS=splits, ROWS=packed, KEYS=launch.keys, DIM=dim, BLOCK_SIZE=block_size,
        WINDOW=window or 0, SOFT_CAP=options.soft_cap or 0.0, PRODUCT=product_type(q.dtype),
        num_warps=launch.warps, num_stages=1 if rotary is not None else launch.stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows * queries * heads,)](parts, log_total, out, SPLITS=splits, DIM=dim, num_warps=2)
    return out


def prefill_attention(
    q: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    max_queries: int,
    options: Options,
) -> torch.Tensor:
    """q [tokens, heads, d] -> like q: rows with any number of queries, packed one after the other.  Lesson 04.

    Row r's queries are q[query_start[r] : query_start[r + 1]], at most `max_queries`, at the last of its `lengths[r]`
    positions. Its keys, including those of earlier chunks, are read from the cache. Otherwise as `decode_attention`.
    """
    tokens, heads, dim = q.shape
    block_size, kv_heads = _checked_cache(cache, dim)
    q = q.contiguous()
    out = torch.empty_like(q)
    if not tokens:
        return out
    group = heads // kv_heads
    rows, width = block_table.shape
    default = prefill_launch(dim, q.element_size(), _device(q.device))
    k, v = stored(cache)
    k_scale, v_scale = cache.k_scale, cache.v_scale
    table: torch.Tensor | None = block_table
    tiles = triton.cdiv(max_queries * group, default.rows)
    if k_scale is not None and dequantizes(tiles, rows * width * block_size * kv_heads, tokens * heads):
        k, v = dequantize(cache, block_table, lengths, q.dtype)
        k_scale = v_scale = table = None
        dtypes = {"dtype": launch_configs.dtype_name(q.dtype)}
    else:
        dtypes = _dtypes(q, cache)
    launch = launch_configs.tuned("prefill_attention", default, dim=dim, group=group, **dtypes)
    grid = (triton.cdiv(max_queries * group, launch.rows), kv_heads, rows)
    prefill_kernel[grid](
        q, k, v, k_scale, v_scale, table, lengths, query_start, out, options.rotary, options.scale,
        0 if table is None else table.stride(0), *k.stride()[:3],
        GROUP=group, ROWS=launch.rows, KEYS=launch.keys, DIM=dim, BLOCK_SIZE=block_size,
        WINDOW=options.window or 0, SOFT_CAP=options.soft_cap or 0.0, PRODUCT=product_type(q.dtype),
        num_warps=launch.warps, num_stages=1 if options.rotary is not None else launch.stages,
    )  # fmt: skip
    return out


def dequantizes(tiles: int, keys: int, queries: int) -> bool:
    """Whether prefill attention dequantizes its keys first, instead of each tile of them as often as it is read.

    tiles: programs that read a row's keys. keys, queries: heads of all rows' keys, and of all queries; the buffer for
    keys and values is at most as large as q.
    """
    return tiles >= 8 and 2 * keys <= queries


def dequantize(
    cache: Cache, block_table: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of rows of a quantized cache, in `dtype`, without gaps.  Lesson 08.

    block_table [rows, blocks], lengths [rows] -> [rows, blocks * block_size, kv_heads, d] each; the first `lengths`
    tokens of a row are written.
    """
    (rows, width), (_, block_size, kv_heads, dim) = block_table.shape, cache.k.shape
    k, v = stored(cache)
    found = torch.empty((2, rows, width * block_size, kv_heads, dim), dtype=dtype, device=k.device)
    dequantize_kernel[(rows, width, kv_heads)](
        k, v, cache.k_scale, cache.v_scale, block_table, lengths, *found, block_table.stride(0), *k.stride()[:3],
        DIM=dim, BLOCK_SIZE=block_size, TILE=triton.next_power_of_2(block_size), PRODUCT=product_type(dtype),
        num_warps=4,
    )  # fmt: skip
    return found[0], found[1]


def takes(dim: int) -> bool:
    """Whether the kernels support this head_dim: a power of two from 16 to 256."""
    return 16 <= dim <= 256 and dim & (dim - 1) == 0


class Device(NamedTuple):
    """What launch heuristics need to know of a GPU."""

    shared_memory: int  # bytes that one program may use
    processors: int


class Launch(NamedTuple):
    """A launch configuration of either attention kernel."""

    rows: int  # (query, head) pairs in a tile
    keys: int  # keys in a tile
    warps: int
    stages: int  # tiles of keys and values in flight
    splits: int = 1  # programs that share a row's keys, in decode


launch_configs.register("decode_attention", Launch)
launch_configs.register("prefill_attention", Launch)


def decode_launch(dim: int, itemsize: int, cache_itemsize: int, packed: int) -> Launch:
    """Two tiles of 32 KiB of keys in flight, which fit on every supported chip. itemsize: of queries.

    Tiles of codes are half as large, so twice as many are in flight. Tiles are smaller if many (query, head) pairs per
    row (`packed`) need registers too.
    """
    keys = 16 if itemsize >= 4 else max(16, min(16384 // dim, 128) * 32 // max(packed, 32))
    return Launch(packed, keys, 4, 2 if cache_itemsize > 1 else 5)


def prefill_launch(dim: int, itemsize: int, device: Device) -> Launch:
    """As many query rows per key tile as fit on the chip with their output: the more, the fewer reads of each key."""
    if itemsize >= 4:  # float32 is for tests: its products do not use the matrix units
        return Launch(16 if dim > 128 else 32, 16 if dim > 128 else 32, 4, 1)
    if device.shared_memory >= 160 * 1024:
        return Launch(128, 64, 8, 2)
    return Launch(64 if dim > 128 else 128, 32 if dim > 128 else 64, 4 if dim <= 64 else 8, 2)


def decode_splits(programs: int, longest: int, device: Device) -> int:
    """How many programs share a row's keys: a power of two, at most 64, for full processors and short shares.

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
    return Device(shared, properties.multi_processor_count)


def _dtypes(q: torch.Tensor, cache: Cache) -> dict[str, str]:
    """The dtypes in a launch's key: of queries, and of a quantized cache."""
    held = {} if cache.k_scale is None else {"cache": launch_configs.dtype_name(cache.k.dtype)}
    return {"dtype": launch_configs.dtype_name(q.dtype), **held}


def product_type(dtype: torch.dtype) -> tl.dtype:
    """The type of the operands of products; sums are always float32.

    Triton's interpreter computes bfloat16 products wrongly, so there operands are converted to float32 first.
    """
    if dtype == torch.float32 or not isinstance(decode_kernel, triton.runtime.JITFunction):
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _checked_cache(cache: Cache, dim: int) -> tuple[int, int]:
    """(block_size, kv_heads) of a cache. Raises ValueError if the kernels cannot read it."""
    check_strides(cache)
    if not takes(dim):
        raise ValueError(f"head_dim {dim} is not a power of two from 16 to 256: use ops.reference")
    return cache.k.shape[1], cache.k.shape[2]
