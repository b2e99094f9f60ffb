"""Wrong solutions of lesson 03's exercises on tiles of rows and columns: kernels with a switch for each mistake."""

import triton
import triton.language as tl

from minillm.course.shared.interpret import INTERPRETED, how_kernels_run
from tests.course.mutants import wrong

# ---- a tile of rows and columns


@triton.jit
def transpose_kernel(
    x_ptr, out_ptr, ROWS, COLUMNS, x_row, x_column, out_row, out_column, TILE: tl.constexpr,
    LOAD_MASKED: tl.constexpr, STORE_MASKED: tl.constexpr, WIDENED: tl.constexpr, TYPE: tl.constexpr,
    ZEROS: tl.constexpr, NANS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside_row, inside_column = (rows < ROWS)[:, None], (columns < COLUMNS)[None, :]
    mask = inside_row & inside_column
    at = rows[:, None] * x_row + columns[None, :] * x_column
    x = tl.load(x_ptr + at, mask=mask if LOAD_MASKED else inside_row & (columns >= 0)[None, :], other=0.0)
    if WIDENED:
        x = x.to(TYPE)
    if not NANS:
        x = tl.where(x == x, x, 0)
    if not ZEROS:
        mask &= x != 0
    to = columns[None, :] * out_row + rows[:, None] * out_column
    tl.store(out_ptr + to, x, mask=mask if STORE_MASKED else inside_row & (columns >= 0)[None, :])


def _transpose(x, out, *, grid=None, x_strides=None, out_strides=None, load=1, store=1, through=None, zeros=1, nans=1):
    grid = grid or [triton.cdiv(size, 32) for size in x.shape]
    transpose_kernel[tuple(grid)](
        x, out, *x.shape, *(x_strides or x.stride()), *(out_strides or out.stride()), TILE=32,
        LOAD_MASKED=load, STORE_MASKED=store, WIDENED=through is not None, TYPE=through, ZEROS=zeros, NANS=nans,
    )  # fmt: skip


@wrong("transpose", fails="a matrix of several tiles")
def one_tile_only(x, out):
    _transpose(x, out, grid=(1, 1))


@wrong("transpose", fails="a matrix of several tiles")
def grid_of_the_result(x, out):
    _transpose(x, out, grid=[triton.cdiv(size, 32) for size in out.shape])


@wrong("transpose", fails="a matrix of several tiles")
def eight_tiles_at_most(x, out):
    _transpose(x, out, grid=[min(triton.cdiv(size, 32), 8) for size in x.shape])


@wrong("transpose", fails="x may have any strides")
def x_taken_for_contiguous(x, out):
    _transpose(x, out, x_strides=(x.shape[1], 1))


@wrong("transpose", fails="out may have any strides")
def out_taken_for_contiguous(x, out):
    _transpose(x, out, out_strides=(x.shape[0], 1))


@wrong("transpose", fails="numbers are copied as they are")
def through_float32(x, out):
    _transpose(x, out, through=tl.float32)


@wrong("transpose", fails="numbers are copied as they are")
def through_float64(x, out):
    _transpose(x, out, through=tl.float64)


@wrong("transpose", fails="numbers are copied as they are")
def zeros_taken_for_masked(x, out):
    _transpose(x, out, zeros=0)


@wrong("transpose", fails="numbers are copied as they are")
def nan_becomes_zero(x, out):
    _transpose(x, out, nans=0)


@wrong("transpose", fails="the kernel does the work")
def copied_by_torch(x, out):
    _transpose(x, out, x_strides=(0, 0))
    out.copy_(x.T)


@wrong("transpose", fails="the kernel does the work")
def made_contiguous_first(x, out):
    _transpose(x.contiguous(), out)


@wrong("transpose", fails="the kernel does the work")
def copied_by_torch_too(x, out):
    _transpose(x, out)
    out.copy_(x.T)


@wrong("transpose", fails="nothing outside x is read")
def only_rows_masked(x, out):
    _transpose(x, out, load=0)


@wrong("transpose", fails="nothing but out is written")
def only_rows_of_the_store_masked(x, out):
    _transpose(x, out, store=0)


# ---- a matrix product, tile by tile


@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, out_ptr, ROWS, OUT, IN, END, TILE: tl.constexpr, PIECE: tl.constexpr,
    ADD: tl.constexpr, NARROW: tl.constexpr, WEIGHT_MASKED: tl.constexpr, STORE_MASKED: tl.constexpr,
    ROUNDED: tl.constexpr, PRECISION: tl.constexpr, OTHER: tl.constexpr, PART_NARROW: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    outs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, END, PIECE):
        columns = start + tl.arange(0, PIECE)
        inside = (columns < IN)[None, :]
        at = x_ptr + rows[:, None] * IN + columns[None, :]
        if OTHER:
            x = tl.load(at, mask=(rows < ROWS)[:, None] & inside, other=0.0)
        else:
            x = tl.load(at, mask=(rows < ROWS)[:, None] & inside)
        weight = tl.load(
            weight_ptr + outs[:, None] * IN + columns[None, :],
            mask=(outs < OUT)[:, None] & (inside if WEIGHT_MASKED else columns >= 0), other=0.0,
        )  # fmt: skip
        x, weight = x.to(tl.float32), tl.trans(weight.to(tl.float32))
        if ROUNDED:
            x, weight = x.to(tl.float16).to(tl.float32), weight.to(tl.float16).to(tl.float32)
        part = tl.dot(x, weight, input_precision=PRECISION)
        if PART_NARROW:
            part = part.to(out_ptr.dtype.element_ty).to(tl.float32)
        total = total + part if ADD else part
        if NARROW:
            total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    mask = (outs < OUT)[None, :] & ((rows < ROWS)[:, None] if STORE_MASKED else (rows >= 0)[:, None])
    tl.store(out_ptr + rows[:, None] * OUT + outs[None, :], total, mask=mask)


def _linear(x, weight, out, *, grid=None, end=None, **wrongs):
    (rows, columns), outs = x.shape, len(weight)
    grid = grid or (triton.cdiv(rows, 32), triton.cdiv(outs, 32))
    right = {
        "ADD": 1,
        "NARROW": 0,
        "WEIGHT_MASKED": 1,
        "STORE_MASKED": 1,
        "ROUNDED": 0,
        "PRECISION": "ieee",
        "OTHER": 1,
        "PART_NARROW": 0,
    }
    linear_kernel[tuple(grid)](
        x, weight, out, rows, outs, columns, end or columns, TILE=32, PIECE=32, **right | wrongs
    )  # fmt: skip


@wrong("tiled_linear", fails="all columns of x count")
def whole_pieces_of_the_columns(x, weight, out):
    columns = x.shape[1]
    _linear(x, weight, out, end=columns // 32 * 32 if columns in (100, 257) else columns)


@wrong("tiled_linear", fails="all columns of x count")
def a_thousand_columns_at_most(x, weight, out):
    _linear(x, weight, out, end=min(x.shape[1], 1100))


@wrong("tiled_linear", fails="every tile of out")
def rows_and_columns_of_the_grid_swapped(x, weight, out):
    _linear(x, weight, out, grid=(triton.cdiv(len(weight), 32), triton.cdiv(len(x), 32)))


@wrong("tiled_linear", fails="every tile of out")
def eight_tiles_at_most_of_a_side(x, weight, out):
    _linear(x, weight, out, grid=[min(triton.cdiv(len(each), 32), 8) for each in (x, weight)])


@wrong("tiled_linear", fails="half-precision inputs")
def total_in_the_type_of_out(x, weight, out):
    _linear(x, weight, out, NARROW=1)


@wrong("tiled_linear", fails="half-precision inputs")
def each_product_in_the_type_of_out(x, weight, out):
    _linear(x, weight, out, PART_NARROW=1)


@wrong("tiled_linear", fails="float32 inputs keep their digits")
def inputs_through_float16(x, weight, out):
    _linear(x, weight, out, ROUNDED=1)


@wrong("tiled_linear", fails="float32 inputs keep their digits")
def without_ieee(x, weight, out):
    _linear(x, weight, out, PRECISION="tf32")


@wrong("tiled_linear", fails="the kernel does the work")
def multiplied_by_torch(x, weight, out):
    _linear(x, 0 * weight, out)
    out.copy_(x.float() @ weight.float().T)


@wrong("tiled_linear", fails="the kernel does the work")
def multiplied_by_torch_too(x, weight, out):
    _linear(x, weight, out)
    out.copy_(x.float() @ weight.float().T)


@wrong("tiled_linear", fails="the kernel does the work")
def widened_by_torch(x, weight, out):
    _linear(x.float(), weight.float(), out)


if how_kernels_run() == INTERPRETED:

    @wrong("tiled_linear", fails="nothing outside the inputs is read")
    def x_masked_without_other(x, weight, out):
        _linear(x, weight, out, OTHER=0)


@wrong("tiled_linear", fails="nothing outside the inputs is read")
def weight_masked_by_rows_alone(x, weight, out):
    _linear(x, weight, out, WEIGHT_MASKED=0)


@wrong("tiled_linear", fails="nothing but out is written")
def result_masked_by_columns_alone(x, weight, out):
    _linear(x, weight, out, STORE_MASKED=0)
