"""Keys and values without gaps: copied from the cache's blocks before prefill attention.  Lessons 04 and 08.

Many tiles of queries of a long prompt read the same keys. If these are in blocks, each tile computes the addresses
again, and converts them again if the cache is quantized. Gathered in a buffer, in which a row's keys follow each other,
a tile of keys is a rectangle of a matrix, [rows * capacity, kv_heads * d], and one instruction loads it: a **tensor
descriptor** tells the GPU's tensor memory accelerator the matrix's shape (compute capability 9.0; Triton computes
addresses on older GPUs).

Tiling: one program per row, block and KV head. A row's keys are followed by zeros, for which every row has room: its
last tile reaches up to a tile beyond its end. Attention gives those keys no weight, but zero times what was in the
buffer, or times another row's values, might not be a number.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .arguments import CacheArguments
from .cache_codes import product_type, stored, to_numbers


@triton.jit(do_not_specialize=["table_stride"])
def gather_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, k_out_ptr, v_out_ptr, table_stride,
    block_stride, slot_stride, head_stride,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """KEYS: of an attention tile. PRODUCT: the type that codes are converted to."""
    row, column, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    kv_head, kv_heads = tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths_ptr + row)
    if column * BLOCK_SIZE >= length + KEYS:
        return
    offset = tl.arange(0, TILE)
    inside = offset < BLOCK_SIZE
    present = inside & (column * BLOCK_SIZE + offset < length)
    block = tl.load(table_ptr + row * table_stride + column, mask=column * BLOCK_SIZE < length, other=0).to(tl.int64)
    dims, mask = tl.arange(0, DIM)[None, :], present[:, None]
    at = (block * block_stride + offset * slot_stride + kv_head * head_stride)[:, None] + dims
    k, v = tl.load(k_ptr + at, mask=mask, other=0), tl.load(v_ptr + at, mask=mask, other=0)
    if k_scale_ptr is not None:
        scale_at = (block * BLOCK_SIZE + offset) * kv_heads + kv_head
        k_scale = tl.load(k_scale_ptr + scale_at, mask=present, other=0.0)[:, None]
        v_scale = tl.load(v_scale_ptr + scale_at, mask=present, other=0.0)[:, None]
        k, v = to_numbers(k, PRODUCT).to(tl.float32) * k_scale, to_numbers(v, PRODUCT).to(tl.float32) * v_scale
    to = ((((row * columns + column) * BLOCK_SIZE + offset) * kv_heads + kv_head) * DIM)[:, None] + dims
    tl.store(k_out_ptr + to, k.to(k_out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(v_out_ptr + to, v.to(v_out_ptr.dtype.element_ty), mask=inside[:, None])


def gathers(tiles: int, keys: int, queries: int, quantized: bool = False) -> bool:
    """Return whether prefill attention gathers its keys first.

    tiles: of 128 queries and heads, which read a row's keys. keys, queries: heads of all rows' keys, and of all
    queries; the buffer for keys and values is at most as large as q, without the zeros. quantized: gathering also saves
    conversions.
    """
    return tiles >= (LEAST_TILES_OF_CODES if quantized else LEAST_TILES) and 2 * keys <= queries


LEAST_TILES = 24
LEAST_TILES_OF_CODES = 8


def gather(
    cache: CacheArguments, block_table: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype, keys: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of rows' keys and values in `dtype`, without gaps and without scales, by tiles of `keys`.  Lesson 08.

    block_table [rows, blocks], lengths [rows] -> matrices [rows * capacity, kv_heads * d] each: a row has the capacity
    of its blocks and of a tile, in full blocks.
    """
    (rows, width), (_, block_size, kv_heads, dim) = block_table.shape, cache.k.shape
    k, v = stored(cache)
    width += triton.cdiv(keys, block_size)
    gathered = torch.empty((2, rows * width * block_size, kv_heads * dim), dtype=dtype, device=k.device)
    gather_kernel[(rows, width, kv_heads)](
        k, v, cache.k_scale, cache.v_scale, block_table, lengths, *gathered, block_table.stride(0), *k.stride()[:3],
        DIM=dim, BLOCK_SIZE=block_size, TILE=triton.next_power_of_2(block_size), KEYS=keys,
        PRODUCT=product_type(dtype, True), num_warps=4,
    )  # fmt: skip
    one, other = (TensorDescriptor.from_tensor(each, [keys, dim]) for each in gathered)
    return one, other
