"""RMSNorm, alone and fused with the residual addition before it.  Lesson 03.

    rms_norm(x)        = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm(x, r) = rms_norm(x + r), x + r

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". Gemma's `1 + weight` is in `weight` already.

Tiling: one program a row, the whole row in registers. The mean needs every element of the row, and a row of a few
thousand elements fits: so it is read once and written once, the fewest bytes there can be. The fused form saves
writing the sum and reading it back. Queries and keys are normed a head at a time (Qwen 3, Gemma 3): a row is a head
then, and the heads are read where the QKV product left them, so two strides lead to a row.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, head_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    at = row // HEADS * x_stride + row % HEADS * head_stride
    x = tl.load(x_ptr + at + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * weight
    tl.store(out_ptr + row * DIM + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, x_stride, residual_stride, eps,
    DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # The sum is rounded before it is normalised: the next layer reads the rounded one, and both must agree.
    rounded = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * DIM + columns, rounded, mask=inside)
    x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * weight
    tl.store(out_ptr + row * DIM + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., dim] scaled to unit root mean square, times weight [dim]; computed in float32.  Lesson 03."""
    dim = x.shape[-1]
    rows = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, dim)  # heads of a token may lie anywhere
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tile, warps = _launch(dim)
        rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
            rows, weight, out, rows.stride(0), rows.stride(1), eps,
            HEADS=rows.shape[1], DIM=dim, TILE=tile, num_warps=warps,
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., dim] -> (rms_norm(x + residual), x + residual), in one launch.  Lesson 03."""
    dim = x.shape[-1]
    rows, residual_rows = x.reshape(-1, dim), residual.reshape(-1, dim)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        tile, warps = _launch(dim)
        add_rms_norm_kernel[(rows.shape[0],)](
            rows, residual_rows, weight, out, total, rows.stride(0), residual_rows.stride(0), eps,
            DIM=dim, TILE=tile, num_warps=warps,
        )  # fmt: skip
    return out, total


def _launch(dim: int) -> tuple[int, int]:
    """The row padded to a power of two, and enough warps for about 16 elements a thread."""
    tile = triton.next_power_of_2(dim)
    return tile, min(max(tile // 512, 1), 16)
