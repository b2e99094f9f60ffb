"""Wrong solutions of lesson 03: kernels with a switch for each mistake."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minillm.course.interpret import INTERPRETED, how_kernels_run
from tests.course.mutants import wrong

# ---- GeGLU


@triton.jit
def geglu_kernel(
    gate_up_ptr, out_ptr, SIZE, TILE: tl.constexpr,
    SILU: tl.constexpr, SWAPPED: tl.constexpr, ROW: tl.constexpr, BY_TILE: tl.constexpr, NARROW: tl.constexpr,
    LOAD_MASKED: tl.constexpr, MASKED: tl.constexpr, IN_PLACE: tl.constexpr, ROUNDED: tl.constexpr,
    CUBE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    first = gate_up_ptr + row * ROW * (TILE if BY_TILE else SIZE) + columns
    if LOAD_MASKED:
        gate, up = tl.load(first, mask=inside, other=0.0), tl.load(first + SIZE, mask=inside, other=0.0)
    else:
        gate, up = tl.load(first), tl.load(first + SIZE)
    if SWAPPED:
        gate, up = up, gate
    both = (gate * up).to(tl.float32)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if ROUNDED:
        gate, up = gate.to(tl.float16).to(tl.float32), up.to(tl.float16).to(tl.float32)
    slope = 1.0 if SILU else 1.5957691 * (1 + CUBE * gate * gate)
    if NARROW:
        out = tl.sigmoid(gate * slope) * both
    else:
        out = gate * tl.sigmoid(gate * slope) * up
    if IN_PLACE:
        tl.store(first, gate * tl.sigmoid(gate * slope), mask=inside)
    if MASKED:
        tl.store(out_ptr + row * SIZE + columns, out, mask=inside)
    else:
        tl.store(out_ptr + row * SIZE + columns, out)


def _geglu(gate_up, out, *, tiles=triton.cdiv, row=2, **wrongs):
    grid = (out.shape[0], tiles(out.shape[1], 1024))
    right = {"SILU": 0, "SWAPPED": 0, "BY_TILE": 0, "NARROW": 0, "LOAD_MASKED": 1, "MASKED": 1, "IN_PLACE": 0}
    right |= {"ROUNDED": 0, "CUBE": 0.044715}
    geglu_kernel[grid](gate_up, out, out.shape[1], TILE=1024, ROW=row, **right | wrongs)


@wrong("geglu", fails="the gate goes through gelu")
def silu_in_place_of_gelu(gate_up, out):
    _geglu(gate_up, out, SILU=1)


@wrong("geglu", fails="the gate goes through gelu")
def three_digits_of_the_constant(gate_up, out):
    _geglu(gate_up, out, CUBE=0.0447)


@wrong("geglu", fails="float32 inputs keep their digits")
def rounded_on_load(gate_up, out):
    _geglu(gate_up, out, ROUNDED=1)


@wrong("geglu", fails="the kernel does the work")
def computed_by_torch(gate_up, out):
    _geglu(gate_up, out, SILU=1)
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


@wrong("geglu", fails="the first half is the gate")
def gate_and_up_swapped(gate_up, out):
    _geglu(gate_up, out, SWAPPED=1)


@wrong("geglu", fails="every row has its own address")
def rows_half_as_long(gate_up, out):
    _geglu(gate_up, out, row=1)


@wrong("geglu", fails="every row has its own address")
def rows_as_long_as_tiles(gate_up, out):
    _geglu(gate_up, out, BY_TILE=1)


@wrong("geglu", fails="every column is written")
def tiles_rounded_down(gate_up, out):
    _geglu(gate_up, out, tiles=lambda size, tile: max(size // tile, 1))


@wrong("geglu", fails="half-precision inputs")
def multiplied_as_it_came(gate_up, out):
    _geglu(gate_up, out, NARROW=1)


@wrong("geglu", fails="nothing outside the input is read")
def loads_without_a_mask(gate_up, out):
    _geglu(gate_up, out, LOAD_MASKED=0)


@wrong("geglu", fails="nothing but the result is written")
def store_without_a_mask(gate_up, out):
    _geglu(gate_up, out, MASKED=0)


@wrong("geglu", fails="nothing but the result is written")
def gate_overwritten(gate_up, out):
    _geglu(gate_up, out, IN_PLACE=1)


# ---- add + RMSNorm


@triton.jit
def add_row_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, DIM, TILE: tl.constexpr,
    X_ALONE: tl.constexpr, STRIDE: tl.constexpr, UNROUNDED: tl.constexpr, OVER_TILE: tl.constexpr,
    ROW_WEIGHT: tl.constexpr, EPS_OUTSIDE: tl.constexpr, NARROW: tl.constexpr, RESIDUAL_MASKED: tl.constexpr,
    WEIGHT_MASKED: tl.constexpr, STORE_MASKED: tl.constexpr, OTHER: tl.constexpr, AS_X: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    at = row * (DIM if STRIDE == 0 else STRIDE) + columns
    if OTHER:
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    if RESIDUAL_MASKED:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        residual = tl.load(residual_ptr + at).to(tl.float32)
    if WEIGHT_MASKED:
        weight = tl.load(weight_ptr + row * ROW_WEIGHT + columns, mask=inside, other=0.0)
    else:
        weight = tl.load(weight_ptr + row * ROW_WEIGHT + columns)
    exact = x + residual
    if AS_X:
        rounded = exact.to(x_ptr.dtype.element_ty)
    else:
        rounded = exact.to(total_ptr.dtype.element_ty)
    if STORE_MASKED:
        tl.store(total_ptr + at, rounded, mask=inside)
    else:
        tl.store(total_ptr + at, rounded)
    normed = rounded.to(tl.float32)
    if UNROUNDED:
        normed = exact
    if X_ALONE:
        normed = x
    if NARROW:
        squares = (rounded * rounded).to(tl.float32)
    else:
        squares = normed * normed
    mean = tl.sum(squares) / (TILE if OVER_TILE else DIM)
    if EPS_OUTSIDE:
        out = normed / (tl.sqrt(mean) + eps) * weight
    else:
        out = normed * tl.rsqrt(mean + eps) * weight
    tl.store(out_ptr + at, out, mask=inside)


def _add_row_norm(x, residual, weight, eps, out, total, *, tile=None, **wrongs):
    dim = x.shape[1]
    right = dict.fromkeys(
        ("X_ALONE", "STRIDE", "UNROUNDED", "OVER_TILE", "ROW_WEIGHT", "EPS_OUTSIDE", "NARROW", "AS_X"), 0
    ) | dict.fromkeys(("RESIDUAL_MASKED", "WEIGHT_MASKED", "STORE_MASKED", "OTHER"), 1)
    add_row_norm_kernel[(len(x),)](
        x, residual, weight, out, total, eps, dim, TILE=tile or triton.next_power_of_2(dim), **right | wrongs
    )


@wrong("add_row_norm", fails="the sum is normalized")
def norm_of_x_alone(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, X_ALONE=1)


@wrong("add_row_norm", fails="every row has its own address")
def rows_of_a_tile(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, STRIDE=triton.next_power_of_2(x.shape[1]))


@wrong("add_row_norm", fails="rows of any length")
def tile_of_64(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, tile=64)


@wrong("add_row_norm", fails="rows of any length")
def tile_of_gemma_2b(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, tile=2048)


@wrong("add_row_norm", fails="the mean is over d numbers")
def mean_over_the_tile(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, OVER_TILE=1)


@wrong("add_row_norm", fails="each column has its weight")
def weights_of_another_row(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, ROW_WEIGHT=x.shape[1] if x.shape[1] == 4 else 0)


@wrong("add_row_norm", fails="eps is inside the root")
def eps_outside(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, EPS_OUTSIDE=1)


@wrong("add_row_norm", fails="what is normalized is the sum as it is stored")
def normed_before_rounding(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, UNROUNDED=1)


@wrong("add_row_norm", fails="what is normalized is the sum as it is stored")
def rounded_to_the_type_of_x(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, AS_X=1)


@wrong("add_row_norm", fails="the kernel does the work")
def divided_by_torch(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, X_ALONE=1)
    sums = total.float()
    out.copy_(sums * torch.rsqrt(sums.pow(2).mean(-1, keepdim=True) + eps) * weight)


if how_kernels_run() == INTERPRETED:  # compiled, loads are not watched, and a masked element without `other` is 0

    @wrong("add_row_norm", fails="the kernel does the work")
    def added_by_torch(x, residual, weight, eps, out, total):
        _add_row_norm(x.float() + residual, 0 * residual, weight, eps, out, total)

    @wrong("add_row_norm", fails="nothing outside the inputs is read")
    def masked_without_other(x, residual, weight, eps, out, total):
        _add_row_norm(x, residual, weight, eps, out, total, OTHER=0)


@wrong("add_row_norm", fails="half-precision inputs")
def squared_in_half_precision(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, NARROW=1)


@wrong("add_row_norm", fails="nothing outside the inputs is read")
def residual_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, RESIDUAL_MASKED=0)


@wrong("add_row_norm", fails="nothing outside the inputs is read")
def weight_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, WEIGHT_MASKED=0)


@wrong("add_row_norm", fails="nothing but the results is written")
def sum_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, STORE_MASKED=0)


# ---- a tile of rows and columns


@triton.jit
def transpose_kernel(
    x_ptr, out_ptr, ROWS, COLUMNS, x_row, x_column, out_row, out_column, TILE: tl.constexpr,
    LOAD_MASKED: tl.constexpr, STORE_MASKED: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside_row, inside_column = (rows < ROWS)[:, None], (columns < COLUMNS)[None, :]
    mask = inside_row & inside_column
    at = rows[:, None] * x_row + columns[None, :] * x_column
    x = tl.load(x_ptr + at, mask=mask if LOAD_MASKED else inside_row & (columns >= 0)[None, :], other=0.0)
    if WIDENED:
        x = x.to(tl.float32)
    to = columns[None, :] * out_row + rows[:, None] * out_column
    tl.store(out_ptr + to, x, mask=mask if STORE_MASKED else inside_row & (columns >= 0)[None, :])


def _transpose(x, out, *, grid=None, x_strides=None, out_strides=None, load=1, store=1, widened=0):
    grid = grid or [triton.cdiv(size, 32) for size in x.shape]
    transpose_kernel[tuple(grid)](
        x, out, *x.shape, *(x_strides or x.stride()), *(out_strides or out.stride()), TILE=32,
        LOAD_MASKED=load, STORE_MASKED=store, WIDENED=widened,
    )  # fmt: skip


@wrong("transpose", fails="a matrix of several tiles")
def one_tile_only(x, out):
    _transpose(x, out, grid=(1, 1))


@wrong("transpose", fails="a matrix of several tiles")
def grid_of_the_result(x, out):
    _transpose(x, out, grid=[triton.cdiv(size, 32) for size in out.shape])


@wrong("transpose", fails="x may have any strides")
def x_taken_for_contiguous(x, out):
    _transpose(x, out, x_strides=(x.shape[1], 1))


@wrong("transpose", fails="out may have any strides")
def out_taken_for_contiguous(x, out):
    _transpose(x, out, out_strides=(x.shape[0], 1))


@wrong("transpose", fails="numbers are copied as they are")
def through_float32(x, out):
    _transpose(x, out, widened=1)


@wrong("transpose", fails="the kernel does the work")
def copied_by_torch(x, out):
    _transpose(x, out, x_strides=(0, 0))
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
    ROUNDED: tl.constexpr, PRECISION: tl.constexpr, OTHER: tl.constexpr,
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
    }
    linear_kernel[grid](
        x, weight, out, rows, outs, columns, end or columns, TILE=32, PIECE=32, **right | wrongs
    )  # fmt: skip


@wrong("tiled_linear", fails="all columns of x count")
def whole_pieces_of_the_columns(x, weight, out):
    columns = x.shape[1]
    _linear(x, weight, out, end=columns // 32 * 32 if columns in (100, 257) else columns)


@wrong("tiled_linear", fails="every tile of out")
def rows_and_columns_of_the_grid_swapped(x, weight, out):
    _linear(x, weight, out, grid=(triton.cdiv(len(weight), 32), triton.cdiv(len(x), 32)))


@wrong("tiled_linear", fails="half-precision inputs")
def total_in_the_type_of_out(x, weight, out):
    _linear(x, weight, out, NARROW=1)


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
