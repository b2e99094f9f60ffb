"""Inputs in eight bits: quantizing rows, and products of int8 rows on integer tensor cores.  Lesson 07.

    codes = round(x / scale),   scale = max |x| of the row / 127.5 (int8), / 448 (fp8),
    out = (codes W^T) * scale * scale of W's row

A kernel of its own that quantizes reads what the kernel before it has just written. So the kernels of the norms and of
the gated activation, which have a whole row in registers, end in `store_row` too: if they are given a place for scales,
they write codes, a byte each, instead of numbers of two bytes that would be written, read and written again as codes.

Integer tensor cores multiply twice as fast as bf16 ones, and the sums are exact. The scales multiply them while they
are still in registers: written as int32 and scaled afterwards, they would be twice the bytes of the result.

FP8 products of many rows are the library's, with two choices that its caller has to make:

- FP8 tensor cores add up products with some 14 bits unless sums are moved to float32 registers again and again, which
  takes up to a third longer (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2). Sums of up to FAST
  products may take the fast way: they lose less than a tenth of what rounding the inputs did.
- The library splits the inputs of a product with a single scale among programs, but not with a scale for each row and
  column. If results are few, most processors would idle, the longer the longer the matrix's rows are: then the library
  multiplies without scales, and a small kernel applies them.

Tiling: rows are quantized by one program each, which holds the row. A product takes tiles of 128 x 128 results, or of
64 x 64 if these are too few for all processors; programs that run at the same time have neighboring tiles, so that they
read the same rows from the L2 cache.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .single_row_parts import processors

FAST = 4096
LONG = 8192  # columns of a matrix
NEIGHBORS = 8  # tiles of x's rows that are processed together


@triton.jit
def to_even(x):
    """Round to the nearest integer, halves to the even one, as torch does. |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: its neighbors are integers


@triton.jit
def magnitude(x):
    """|x|, and infinity for NaN: a maximum ignores NaN, and codes have none, so that a row's scale has to tell."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def quantized(x, given_ptr, INTEGER: tl.constexpr):
    """A whole row, float32 -> (codes that are still float32, scale). INTEGER: int8, else e4m3. given_ptr: the scale."""
    LARGEST: tl.constexpr = 127.5 if INTEGER else 448.0
    if given_ptr is not None:
        scale = tl.load(given_ptr)
    else:
        most = tl.max(magnitude(x), 0)
        scale = tl.where(most > 0, most / LARGEST, 1.0)
    x = x / scale
    if INTEGER:
        x = tl.minimum(tl.maximum(to_even(tl.minimum(tl.maximum(x, -200.0), 200.0)), -128.0), 127.0)
    else:
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x, scale


@triton.jit
def store_row(x, row, columns, out_ptr, scale_ptr, given_ptr, SIZE: tl.constexpr):
    """Store a row: as it is, or, if there is a scale_ptr, as codes and a scale.

    x is in the model's dtype in both cases: the codes are always those of the rounded row. They need the whole row, in
    x; elsewhere x may be a tile of it. given_ptr: None, or the scale of all rows.
    """
    inside = columns < SIZE
    if scale_ptr is not None:
        codes, scale = quantized(x.to(tl.float32), given_ptr, out_ptr.dtype.element_ty == tl.int8)
        tl.store(out_ptr + row * SIZE + columns, codes.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(out_ptr + row * SIZE + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, given_ptr, x_stride, COLUMNS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < COLUMNS, other=0.0)
    store_row(x, row, columns, codes_ptr, scale_ptr, given_ptr, COLUMNS)


@triton.jit
def int8_product_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, TOKENS, ROWS,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, X_TILE: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr,
    NEIGHBORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [TOKENS, ROWS]. EVEN: whether PIECE divides COLUMNS."""
    program, down, across = tl.program_id(0), tl.cdiv(TOKENS, X_TILE), tl.cdiv(ROWS, TILE)
    first = program // (NEIGHBORS * across) * NEIGHBORS
    count = tl.minimum(down - first, NEIGHBORS)
    tokens = (first + program % (NEIGHBORS * across) % count) * X_TILE + tl.arange(0, X_TILE)
    rows = program % (NEIGHBORS * across) // count * TILE + tl.arange(0, TILE)
    # Beyond the end, tiles read rows from the beginning: loads need no masks, and those results are not stored.
    x_at = x_ptr + (tokens % TOKENS).to(tl.int64)[:, None] * COLUMNS
    weight_at = weight_ptr + (rows % ROWS).to(tl.int64)[:, None] * COLUMNS
    sums = tl.zeros([X_TILE, TILE], tl.int32)
    for start in tl.range(0, COLUMNS, PIECE, num_stages=STAGES):
        columns = start + tl.arange(0, PIECE)[None, :]
        if EVEN:
            x, weight = tl.load(x_at + columns), tl.load(weight_at + columns)
        else:
            x = tl.load(x_at + columns, mask=columns < COLUMNS, other=0)
            weight = tl.load(weight_at + columns, mask=columns < COLUMNS, other=0)
        sums = tl.dot(x, tl.trans(weight), sums, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + tokens, mask=tokens < TOKENS, other=0.0)
    scale = tl.load(scale_ptr + rows, mask=rows < ROWS, other=0.0)
    out = sums.to(tl.float32) * x_scale[:, None] * scale[None, :]
    at = out_ptr + tokens.to(tl.int64)[:, None] * ROWS + rows[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=(tokens < TOKENS)[:, None] & (rows < ROWS)[None, :])


@triton.jit
def scale_kernel(x_ptr, x_scale_ptr, scale_ptr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """x [rows, COLUMNS] times the scales of its rows and columns, in place."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < COLUMNS
    x = tl.load(x_ptr + row * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.load(x_scale_ptr + row) * tl.load(scale_ptr + columns, mask=inside, other=0.0)
    tl.store(x_ptr + row * COLUMNS + columns, x.to(x_ptr.dtype.element_ty), mask=inside)


def has_int8(device: torch.device) -> bool:
    """Return whether Triton multiplies tiles of int8 numbers on the device: compute capability 8.0 and above."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def has_fp8(device: torch.device) -> bool:
    """Return whether the device converts and multiplies fp8 numbers: compute capability 8.9 and above."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def empty_codes(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for codes [..., columns] and their scales [..., 1]."""
    codes = torch.empty(shape, dtype=dtype, device=device)
    return codes, torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, columns] -> (codes, scales [tokens, 1] float32), rounded to the nearest.  Lesson 07.

    dtype: int8 or float8_e4m3fn. static [1] float32: the scale of all rows; larger values are clipped.
    """
    tokens, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scales = empty_codes(x.shape, dtype, x.device)
    if tokens:
        tile = triton.next_power_of_2(columns)
        quantize_rows_kernel[(tokens,)](
            x, codes, scales, static, x.stride(0), COLUMNS=columns, TILE=tile,
            num_warps=min(max(tile // 512, 1), 16),
        )  # fmt: skip
    return codes, scales


class ProductConfig(NamedTuple):
    """A launch configuration of `int8_product_kernel`."""

    x_tile: int
    tile: int
    warps: int
    stages: int


def default_config(tokens: int, rows: int, processors: int) -> ProductConfig:
    """Large tiles reuse each row more often, if there are about as many of them as processors."""
    if 4 * triton.cdiv(tokens, 128) * triton.cdiv(rows, 128) >= 3 * processors:
        return ProductConfig(128, 128, 8, 3)
    return ProductConfig(64, 64, 4, 5)


def int8_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x [tokens, columns] and weight [rows, columns], both int8 -> [tokens, rows] in `dtype`.  Lesson 07.

    x_scales [tokens, 1] and scales [rows], float32.
    """
    (tokens, columns), rows = x.shape, len(weight)
    out = torch.empty((tokens, rows), dtype=dtype, device=x.device)
    config = default_config(tokens, rows, processors(x.device))
    if tokens:
        int8_product_kernel[(triton.cdiv(tokens, config.x_tile) * triton.cdiv(rows, config.tile),)](
            x, x_scales, weight, scales, out, tokens, rows,
            COLUMNS=columns, EVEN=columns % 128 == 0, X_TILE=config.x_tile, TILE=config.tile, PIECE=128,
            NEIGHBORS=NEIGHBORS, STAGES=config.stages, num_warps=config.warps,
        )  # fmt: skip
    return out


def fp8_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x [tokens, columns] and weight [rows, columns], both e4m3 -> [tokens, rows] in `dtype`, bfloat16.  Lesson 07.

    x_scales [tokens, 1] and scales [rows], float32. Sizes of the weight are multiples of 16. Needs `has_fp8`.
    """
    (tokens, columns), rows = x.shape, len(weight)
    fast = columns <= FAST
    if scales_afterwards(tokens, rows, columns, processors(x.device)):
        one = _one(x.device)
        out = torch._scaled_mm(x, weight.t(), one, one, out_dtype=dtype, use_fast_accum=fast)
        return scaled(out, x_scales, scales)
    return torch._scaled_mm(x, weight.t(), x_scales, scales[None], out_dtype=dtype, use_fast_accum=fast)


def scales_afterwards(tokens: int, rows: int, columns: int, processors: int) -> bool:
    """Return whether a product with scales has too few tiles of 128 x 128: for half or two thirds of the processors."""
    tiles = triton.cdiv(tokens, 128) * triton.cdiv(rows, 128)
    return 3 * tiles <= 2 * processors if columns >= LONG else 2 * tiles <= processors


def scaled(x: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [tokens, rows] * x_scales [tokens, 1] * scales [rows], written to x."""
    tokens, rows = x.shape
    tile = min(2048, triton.next_power_of_2(rows))
    scale_kernel[(tokens, triton.cdiv(rows, tile))](x, x_scales, scales, COLUMNS=rows, TILE=tile, num_warps=4)
    return x


@lru_cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)
