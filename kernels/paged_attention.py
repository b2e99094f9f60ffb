"""Attention over keys and values in cache blocks: decode and prefill.  Lessons 04 and 09.

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

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated(k, k_at, cos_sin_ptr, keys, dims, present, DIM: tl.constexpr):
    """k [KEYS, DIM] rotated by the angles of its positions; the other half of each pair is read from the same row."""
    half = DIM // 2
    other = tl.load(k_at + tl.where(dims < half, half, -half)[None, :], mask=present[:, None], other=0.0)
    angles = cos_sin_ptr + keys[:, None] * (2 * DIM) + dims[None, :]
    cos = tl.load(angles, mask=present[:, None], other=0.0).to(tl.float32)
    sin = tl.load(angles + DIM, mask=present[:, None], other=0.0).to(tl.float32)
    return (k.to(tl.float32) * cos + other.to(tl.float32) * sin).to(k.dtype)


@triton.jit
def _attend(
    q, positions, first, last, k_ptr, v_ptr, table_ptr, cos_sin_ptr, scale, block_stride, slot_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """q [ROWS, DIM] against keys first..last-1 -> (output * total, maximum, total), exponents in base 2."""
    dims = tl.arange(0, DIM)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < last
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        at = (block * block_stride + (keys % BLOCK_SIZE) * slot_stride)[:, None] + dims[None, :]
        k = tl.load(k_ptr + at, mask=present[:, None], other=0.0).to(q.dtype)
        if cos_sin_ptr is not None:
            k = _rotated(k, k_ptr + at, cos_sin_ptr, keys, dims, present, DIM)
        # "ieee" keeps float32 products exact: the default, tf32, has a mantissa of 10 bits.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
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
        v = tl.load(v_ptr + at, mask=present[:, None], other=0.0).to(q.dtype)
        out = out * rescale[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        maximum = new_maximum
    return out, maximum, total


@triton.jit(do_not_specialize=["table_stride"])  # or every table width would be compiled separately
def decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, log_total_ptr, cos_sin_ptr, scale, table_stride,
    block_stride, slot_stride, head_stride,
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
    share = tl.cdiv(length - first, SPLITS * KEYS) * KEYS  # full tiles, so that only one program has a partial one
    begin = first + split * share
    out, maximum, total = _attend(
        q, positions, begin, tl.minimum(begin + share, length),
        k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride, table_ptr + row * table_stride,
        cos_sin_ptr, scale, block_stride, slot_stride, ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP,
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
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, query_start_ptr, out_ptr, cos_sin_ptr, scale, table_stride,
    block_stride, slot_stride, head_stride,
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
    out, maximum, total = _attend(
        q, positions, first, last,
        k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride, table_ptr + row * table_stride,
        cos_sin_ptr, scale, block_stride, slot_stride, ROWS, KEYS, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP,
    )  # fmt: skip
    total = tl.where(maximum == float("-inf"), 1.0, total)
    tl.store(out_ptr + at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


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
        decode_launch(dim, q.element_size(), packed)._replace(splits=decode_splits(rows * kv_heads, longest, device)),
        dim=dim, dtype=launch_configs.dtype_name(q.dtype), rows=packed, programs=rows * kv_heads, longest=longest,
    )  # fmt: skip
    splits, parts, log_total = launch.splits, out, out
    if splits > 1:
        parts = torch.empty((rows, queries, heads, splits, dim), dtype=torch.float32, device=q.device)
        log_total = torch.empty((rows, queries, heads, splits), dtype=torch.float32, device=q.device)
    decode_kernel[(rows, kv_heads, splits)](
        q, cache.k, cache.v, block_table, lengths, parts, log_total, rotary, options.scale, block_table.stride(0),
        *cache.k.stride()[:3],
        QUERIES=queries, GROUP=group, SPLITS=splits, ROWS=packed, KEYS=launch.keys, DIM=dim, BLOCK_SIZE=block_size,
        WINDOW=window or 0, SOFT_CAP=options.soft_cap or 0.0, PRODUCT=_product_type(q.dtype),
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
    default = prefill_launch(dim, q.element_size(), _device(q.device))
    dtype = launch_configs.dtype_name(q.dtype)
    launch = launch_configs.tuned("prefill_attention", default, dim=dim, dtype=dtype, group=group)
    grid = (triton.cdiv(max_queries * group, launch.rows), kv_heads, lengths.shape[0])
    prefill_kernel[grid](
        q, cache.k, cache.v, block_table, lengths, query_start, out, options.rotary, options.scale,
        block_table.stride(0), *cache.k.stride()[:3],
        GROUP=group, ROWS=launch.rows, KEYS=launch.keys, DIM=dim, BLOCK_SIZE=block_size,
        WINDOW=options.window or 0, SOFT_CAP=options.soft_cap or 0.0, PRODUCT=_product_type(q.dtype),
        num_warps=launch.warps, num_stages=1 if options.rotary is not None else launch.stages,
    )  # fmt: skip
    return out


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


def decode_launch(dim: int, itemsize: int, packed: int) -> Launch:
    """Two tiles of 32 KiB of keys in flight, which fit on every supported chip.

    Tiles are smaller if many (query, head) pairs per row (`packed`) need registers too.
    """
    keys = 16 if itemsize >= 4 else max(16, min(16384 // dim, 128) * 32 // max(packed, 32))
    return Launch(packed, keys, 4, 2)


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


def _product_type(dtype: torch.dtype) -> tl.dtype:
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
