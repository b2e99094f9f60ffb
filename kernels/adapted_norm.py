"""`normalization.add_rms_norm` of a product to which adapters add.  Lessons 03 and 15.

    add_rms_norm(x, r) = rms_norm(y + r), y + r,   y[t] = x[t] + B[slots[t]] h[t]

h as in `low_rank`, from the same product as x. `low_rank.add_grouped` would read and write x before the norm reads it
again; here it is one launch. y is rounded to the dtype of x, as with two launches.

Tiling: one program a token, as without adapters. It also reads all of its adapter's B, so it has more threads.
"""

import torch
import triton
import triton.language as tl

from .low_rank import TERM_WARPS, Term, added_to_token, b_of_slot
from .single_row_parts import dependent_launch, wait_for_inputs


@triton.jit
def adapted_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, x_stride, residual_stride, eps,
    slots_ptr, inner_ptr, token_stride, inner_stride, up_ptr, slot_stride,
    DIM: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    b = b_of_slot(up_ptr, slot_stride, slot, columns[None, :], inside[None, :], RANK, RANK_TILE)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    kind = sum_ptr.dtype.element_ty
    added = added_to_token(inner_ptr, token_stride, inner_stride, slot, row, 0, b, RANK, RANK_TILE)
    x = (x + tl.reshape(added, [TILE])).to(kind).to(tl.float32)
    rounded = (x + residual).to(kind)
    tl.store(sum_ptr + row * DIM + columns, rounded, mask=inside)
    x = rounded.to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * weight
    tl.store(out_ptr + row * DIM + columns, out.to(kind), mask=inside)


def adapted_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, term: Term
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [tokens, dim] -> (rms_norm(y + residual), y + residual), where y is x and the term.  Lesson 15.

    All but x and its h is read before the last launch has ended.
    """
    tokens, dim = x.shape
    out, total = (torch.empty((tokens, dim), dtype=x.dtype, device=x.device) for _ in range(2))
    if tokens:
        adapted_norm_kernel[(tokens,)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), eps, *term.arguments,
            DIM=dim, TILE=triton.next_power_of_2(dim), **term.sizes, num_warps=TERM_WARPS,
            **dependent_launch(x.device),
        )  # fmt: skip
    return out, total
