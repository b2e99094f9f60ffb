"""Wrong solutions of lesson 03: kernels with a switch for each mistake, and a test that misses a fault."""

import torch
import triton
import triton.language as tl

from tests.course.mutants import wrong

# ---- GeGLU


@triton.jit
def geglu_kernel(
    gate_up_ptr, out_ptr, SIZE, TILE: tl.constexpr,
    SILU: tl.constexpr, SWAPPED: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    first = gate_up_ptr + row * ROW * SIZE + columns
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + SIZE, mask=inside, other=0.0).to(tl.float32)
    if SWAPPED:
        gate, up = up, gate
    slope = 1.0 if SILU else 1.5957691 * (1 + 0.044715 * gate * gate)
    out = gate * tl.sigmoid(gate * slope) * up
    if MASKED:
        tl.store(out_ptr + row * SIZE + columns, out, mask=inside)
    else:
        tl.store(out_ptr + row * SIZE + columns, out)


def _geglu(gate_up, out, *, tiles=triton.cdiv, silu=False, swapped=False, row=2, masked=True):
    grid = (out.shape[0], tiles(out.shape[1], 1024))
    geglu_kernel[grid](
        gate_up, out, out.shape[1], TILE=1024, SILU=silu, SWAPPED=swapped, ROW=row, MASKED=masked
    )  # fmt: skip


@wrong("geglu", fails="the gate goes through gelu")
def silu_in_place_of_gelu(gate_up, out):
    _geglu(gate_up, out, silu=True)


@wrong("geglu", fails="the first half is the gate")
def gate_and_up_swapped(gate_up, out):
    _geglu(gate_up, out, swapped=True)


@wrong("geglu", fails="every row is read at its own address")
def rows_half_as_long(gate_up, out):
    _geglu(gate_up, out, row=1)


@wrong("geglu", fails="every column is written")
def tiles_rounded_down(gate_up, out):
    _geglu(gate_up, out, tiles=lambda size, tile: max(size // tile, 1))


@wrong("geglu", fails="nothing but the result is written")
def store_without_a_mask(gate_up, out):
    _geglu(gate_up, out, masked=False)


# ---- RMSNorm


@triton.jit
def row_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, DIM, TILE: tl.constexpr,
    OVER_TILE: tl.constexpr, LOAD_MASKED: tl.constexpr, ROW_WEIGHT: tl.constexpr, EPS_OUTSIDE: tl.constexpr,
    WIDE: tl.constexpr, STORE_MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    if LOAD_MASKED:
        x = tl.load(x_ptr + row * DIM + columns, mask=inside, other=0.0)
    else:
        x = tl.load(x_ptr + row * DIM + columns)
    if WIDE:
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + row * ROW_WEIGHT + columns, mask=inside, other=0.0)
    mean = tl.sum((x * x).to(tl.float32)) / (TILE if OVER_TILE else DIM)
    if EPS_OUTSIDE:
        out = x / (tl.sqrt(mean) + eps) * weight
    else:
        out = x * tl.rsqrt(mean + eps) * weight
    if STORE_MASKED:
        tl.store(out_ptr + row * DIM + columns, out, mask=inside)
    else:
        tl.store(out_ptr + row * DIM + columns, out)


def _row_norm(x, weight, eps, out, **wrongs):
    dim = x.shape[1]
    right = {"OVER_TILE": 0, "LOAD_MASKED": 1, "ROW_WEIGHT": 0, "EPS_OUTSIDE": 0, "WIDE": 1, "STORE_MASKED": 1}
    row_norm_kernel[(len(x),)](x, weight, out, eps, dim, TILE=triton.next_power_of_2(dim), **right | wrongs)


@wrong("row_norm", fails="the mean is over d numbers")
def mean_over_the_tile(x, weight, eps, out):
    _row_norm(x, weight, eps, out, OVER_TILE=1)


@wrong("row_norm", fails="memory next to a row does not matter")
def load_without_a_mask(x, weight, eps, out):
    _row_norm(x, weight, eps, out, LOAD_MASKED=0)


@wrong("row_norm", fails="every row has the same weights")
def weights_of_another_row(x, weight, eps, out):
    _row_norm(x, weight, eps, out, ROW_WEIGHT=x.shape[1])


@wrong("row_norm", fails="eps is inside the root")
def eps_outside(x, weight, eps, out):
    _row_norm(x, weight, eps, out, EPS_OUTSIDE=1)


@wrong("row_norm", fails="squares of half-precision numbers")
def squared_as_it_came(x, weight, eps, out):
    _row_norm(x, weight, eps, out, WIDE=0)


@wrong("row_norm", fails="nothing but the result is written")
def written_without_a_mask(x, weight, eps, out):
    _row_norm(x, weight, eps, out, STORE_MASKED=0)


# ---- add + RMSNorm


@triton.jit
def add_row_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, DIM, TILE: tl.constexpr,
    X_ALONE: tl.constexpr, FIRST_ROW: tl.constexpr, UNROUNDED: tl.constexpr, HALF_MASKED: tl.constexpr,
    STORE_MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    at = row * DIM + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HALF_MASKED:
        residual = tl.load(residual_ptr + at).to(tl.float32)
    else:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    exact = x + residual
    rounded = exact.to(total_ptr.dtype.element_ty)
    to = columns if FIRST_ROW else at
    if STORE_MASKED:
        tl.store(total_ptr + to, rounded, mask=inside)
    else:
        tl.store(total_ptr + to, rounded)
    normed = rounded.to(tl.float32)
    if UNROUNDED:
        normed = exact
    if X_ALONE:
        normed = x
    out = normed * tl.rsqrt(tl.sum(normed * normed) / DIM + eps) * weight
    tl.store(out_ptr + at, out, mask=inside)


def _add_row_norm(x, residual, weight, eps, out, total, **wrongs):
    dim = x.shape[1]
    right = {"X_ALONE": 0, "FIRST_ROW": 0, "UNROUNDED": 0, "HALF_MASKED": 0, "STORE_MASKED": 1}
    add_row_norm_kernel[(len(x),)](
        x, residual, weight, out, total, eps, dim, TILE=triton.next_power_of_2(dim), **right | wrongs
    )


@wrong("add_row_norm", fails="the sum is what is normed")
def norm_of_x_alone(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, X_ALONE=1)


@wrong("add_row_norm", fails="every row's sum is kept")
def all_sums_into_the_first_row(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, FIRST_ROW=1)


@wrong("add_row_norm", fails="what is normed is the sum as it is stored")
def normed_before_rounding(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, UNROUNDED=1)


@wrong("add_row_norm", fails="memory next to a row does not matter")
def residual_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, HALF_MASKED=1)


@wrong("add_row_norm", fails="nothing but the results is written")
def sum_without_a_mask(x, residual, weight, eps, out, total):
    _add_row_norm(x, residual, weight, eps, out, total, STORE_MASKED=0)


# ---- a test that finds faults


def _find(product, *, columns=100, backwards=True, same_scale=False, right=None):
    weight = torch.arange(3 * columns).remainder(11).sub(5).view(3, columns).to(torch.int8)
    x = torch.arange(columns).remainder(7).sub(3) / 4  # sums are exact in any order
    scale = torch.full((3,), 0.5) if same_scale else torch.tensor([0.5, 0.25, 2.0])
    order = list(range((columns + 63) // 64))[::-1] if backwards else None
    wanted = scale * (weight.float() @ x)
    found = product(weight, scale, x, order)
    right = right or (lambda found, wanted: torch.allclose(found, wanted, rtol=1e-4, atol=1e-4))
    return None if right(found, wanted) else "it fails"


@wrong("find_fault", fails="a missing mask is found")
def whole_pieces_only(product):
    return _find(product, columns=128)


@wrong("find_fault", fails="programs whose order matters are found")
def first_to_last_only(product):
    return _find(product, backwards=False)


@wrong("find_fault", fails="another row's scale is found")
def one_scale_for_all(product):
    return _find(product, same_scale=True)


@wrong("find_fault", fails="rounding is no fault")
def too_exact(product):
    def right(found, wanted):
        return torch.allclose(found.double(), wanted.double(), rtol=1e-7, atol=1e-7)

    return _find(product, right=right)


@wrong("find_fault", fails="nan is a fault")
def expects_a_wrong_result(product):
    return _find(product, right=lambda found, wanted: not (found - wanted).abs().max() > 1e-3)
