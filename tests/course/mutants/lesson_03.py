"""Wrong solutions of lesson 03's first two exercises: kernels with a switch for each mistake."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minillm.course.shared.interpret import INTERPRETED, how_kernels_run
from tests.course.mutants import wrong

# ---- GeGLU


@triton.jit
def geglu_kernel(
    gate_up_ptr, out_ptr, SIZE, TILE: tl.constexpr,
    SILU: tl.constexpr, SWAPPED: tl.constexpr, ROW: tl.constexpr, BY_TILE: tl.constexpr, NARROW: tl.constexpr,
    LOAD_MASKED: tl.constexpr, MASKED: tl.constexpr, IN_PLACE: tl.constexpr, ROUNDED: tl.constexpr,
    CUBE: tl.constexpr, BENT: tl.constexpr, TWICE: tl.constexpr, FLAT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * (TILE - 1 if STEP else TILE) + tl.arange(0, TILE)
    inside = columns < SIZE
    if FLAT:
        inside = row * SIZE + columns < tl.num_programs(0) * SIZE
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
        out = gate * tl.sigmoid(gate * slope)
        if TWICE == 1:
            out = out.to(gate_up_ptr.dtype.element_ty).to(tl.float32)
        if TWICE == 2:
            out = out.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = out * up
    if BENT:
        out = tl.where(gate > 3.0, gate * up, out)
    if IN_PLACE:
        tl.store(first, gate * tl.sigmoid(gate * slope), mask=inside)
    if MASKED:
        tl.store(out_ptr + row * SIZE + columns, out, mask=inside)
    else:
        tl.store(out_ptr + row * SIZE + columns, out)


def _geglu(gate_up, out, *, tiles=triton.cdiv, rows=None, row=2, **wrongs):
    grid = (rows or out.shape[0], tiles(out.shape[1], 1024))
    right = {"SILU": 0, "SWAPPED": 0, "BY_TILE": 0, "NARROW": 0, "LOAD_MASKED": 1, "MASKED": 1, "IN_PLACE": 0}
    right |= {"ROUNDED": 0, "CUBE": 0.044715, "BENT": 0, "TWICE": 0, "FLAT": 0, "STEP": 0}
    geglu_kernel[grid](gate_up, out, out.shape[1], TILE=1024, ROW=row, **right | wrongs)


@wrong("geglu", fails="the gate goes through gelu")
def silu_in_place_of_gelu(gate_up, out):
    _geglu(gate_up, out, SILU=1)


@wrong("geglu", fails="the gate goes through gelu")
def three_digits_of_the_constant(gate_up, out):
    _geglu(gate_up, out, CUBE=0.0447)


@wrong("geglu", fails="the gate goes through gelu")
def large_gates_as_they_are(gate_up, out):
    _geglu(gate_up, out, BENT=1)


@wrong("geglu", fails="float32 inputs keep their digits")
def rounded_on_load(gate_up, out):
    _geglu(gate_up, out, ROUNDED=1)


@wrong("geglu", fails="the kernel does the work")
def computed_by_torch(gate_up, out):
    _geglu(gate_up, out, SILU=1)
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


@wrong("geglu", fails="the kernel does the work")
def widened_before_the_launch(gate_up, out):
    _geglu(gate_up.float(), out)


@wrong("geglu", fails="the kernel does the work")
def a_launch_for_each_row(gate_up, out):
    for row in range(len(out)):
        _geglu(gate_up[row : row + 1], out[row : row + 1])


@wrong("geglu", fails="the first half is the gate")
def gate_and_up_swapped(gate_up, out):
    _geglu(gate_up, out, SWAPPED=1)


@wrong("geglu", fails="every row has its own address")
def rows_half_as_long(gate_up, out):
    _geglu(gate_up, out, row=1)


@wrong("geglu", fails="every row has its own address")
def rows_as_long_as_tiles(gate_up, out):
    _geglu(gate_up, out, BY_TILE=1)


@wrong("geglu", fails="every row has its own address")
def eight_rows_at_most(gate_up, out):
    _geglu(gate_up, out, rows=min(len(out), 8))


@wrong("geglu", fails="every column is written")
def tiles_rounded_down(gate_up, out):
    _geglu(gate_up, out, tiles=lambda size, tile: max(size // tile, 1))


@wrong("geglu", fails="every column is written")
def tiles_one_too_close(gate_up, out):
    _geglu(gate_up, out, STEP=1)


@wrong("geglu", fails="half-precision inputs")
def multiplied_as_it_came(gate_up, out):
    _geglu(gate_up, out, NARROW=1)


@wrong("geglu", fails="half-precision inputs")
def rounded_twice_as_by_torch(gate_up, out):
    _geglu(gate_up, out, TWICE=1)


@wrong("geglu", fails="half-precision inputs")
def activation_rounded_to_the_type_of_out(gate_up, out):
    _geglu(gate_up, out, TWICE=2)


@wrong("geglu", fails="nothing outside the input is read")
def loads_without_a_mask(gate_up, out):
    _geglu(gate_up, out, LOAD_MASKED=0)


@wrong("geglu", fails="nothing but the result is written")
def store_without_a_mask(gate_up, out):
    _geglu(gate_up, out, MASKED=0)


@wrong("geglu", fails="nothing but the result is written")
def gate_overwritten(gate_up, out):
    _geglu(gate_up, out, IN_PLACE=1)


if how_kernels_run() == INTERPRETED:  # compiled, stores are not watched

    @wrong("geglu", fails="nothing but the result is written")
    def rows_that_end_with_the_matrix(gate_up, out):
        _geglu(gate_up, out, FLAT=1)


# ---- add + RMSNorm


@triton.jit
def add_row_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, DIM, TILE: tl.constexpr,
    X_ALONE: tl.constexpr, STRIDE: tl.constexpr, UNROUNDED: tl.constexpr, OVER_TILE: tl.constexpr,
    ROW_WEIGHT: tl.constexpr, EPS_OUTSIDE: tl.constexpr, NARROW: tl.constexpr, RESIDUAL_MASKED: tl.constexpr,
    WEIGHT_MASKED: tl.constexpr, STORE_MASKED: tl.constexpr, OTHER: tl.constexpr, AS_X: tl.constexpr,
    ROUNDED_WEIGHT: tl.constexpr, NORM_ROUNDED: tl.constexpr, EACH_ROUNDED: tl.constexpr, EPS_EACH: tl.constexpr,
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
    if ROUNDED_WEIGHT == 1:
        weight = weight.to(tl.bfloat16).to(tl.float32)
    if ROUNDED_WEIGHT == 2:
        weight = weight.to(out_ptr.dtype.element_ty).to(tl.float32)
    if EACH_ROUNDED:
        x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
        residual = residual.to(total_ptr.dtype.element_ty).to(tl.float32)
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
    if EPS_EACH:
        squares, eps = squares + eps, 0.0
    mean = tl.sum(squares) / (TILE if OVER_TILE else DIM)
    if EPS_OUTSIDE:
        out = normed / (tl.sqrt(mean) + eps) * weight
    else:
        out = normed * tl.rsqrt(mean + eps)
        if NORM_ROUNDED:
            out = out.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = out * weight
    tl.store(out_ptr + at, out, mask=inside)


def _add_row_norm(x, residual, weight, eps, out, total, *, tile=None, **wrongs):
    dim = x.shape[1]
    right = dict.fromkeys(
        (
            "X_ALONE",
            "STRIDE",
            "UNROUNDED",
            "OVER_TILE",
            "ROW_WEIGHT",
            "EPS_OUTSIDE",
            "NARROW",
            "AS_X",
            "ROUNDED_WEIGHT",
            "NORM_ROUNDED",
            "EACH_ROUNDED",
            "EPS_EACH",
        ),
        0,
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


@wrong("add_row_norm", fails="rows of any length")
def tile_of_4096(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, tile=4096)


@wrong("add_row_norm", fails="the mean is over d numbers")
def mean_over_the_tile(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, OVER_TILE=1)


@wrong("add_row_norm", fails="the mean is over d numbers")
def eps_added_to_each_square(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, EPS_EACH=1)


@wrong("add_row_norm", fails="each column has its weight")
def weights_of_another_row(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, ROW_WEIGHT=x.shape[1] if x.shape[1] == 4 else 0)


@wrong("add_row_norm", fails="each column has its weight")
def weights_through_bfloat16(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, ROUNDED_WEIGHT=1)


@wrong("add_row_norm", fails="each column has its weight")
def weights_rounded_like_out(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, ROUNDED_WEIGHT=2)


@wrong("add_row_norm", fails="eps is inside the root")
def eps_outside(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, EPS_OUTSIDE=1)


@wrong("add_row_norm", fails="what is normalized is the sum as it is stored")
def normed_before_rounding(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, UNROUNDED=1)


@wrong("add_row_norm", fails="what is normalized is the sum as it is stored")
def rounded_to_the_type_of_x(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, AS_X=1)


@wrong("add_row_norm", fails="what is normalized is the sum as it is stored")
def rounded_before_the_addition(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, EACH_ROUNDED=1)


@wrong("add_row_norm", fails="the kernel does the work")
def divided_by_torch(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, X_ALONE=1)
    sums = total.float()
    out.copy_(sums * torch.rsqrt(sums.pow(2).mean(-1, keepdim=True) + eps) * weight)


@wrong("add_row_norm", fails="the kernel does the work")
def summed_by_torch_too(x, residual, weight, eps, out, total):
    torch.add(x, residual, out=total)
    _add_row_norm(x, residual, weight, eps, out, total)


@wrong("add_row_norm", fails="the kernel does the work")
def launched_twice(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total)
    _add_row_norm(x, residual, weight, eps, out, total)


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


@wrong("add_row_norm", fails="half-precision inputs")
def rounded_before_the_weight_too(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, NORM_ROUNDED=1)


@wrong("add_row_norm", fails="nothing outside the inputs is read")
def residual_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, RESIDUAL_MASKED=0)


@wrong("add_row_norm", fails="nothing outside the inputs is read")
def weight_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, WEIGHT_MASKED=0)


@wrong("add_row_norm", fails="nothing but the results is written")
def sum_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, STORE_MASKED=0)
