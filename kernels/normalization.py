"""RMSNorm, alone and fused with the residual addition before it.  Lesson 03.

    rms_norm(x)        = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm(x, r) = rms_norm(x + r), x + r

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". `weight` already includes Gemma's `1 +`.

Tiling: one program per row, with the row in registers. The mean needs every element of the row, and a row of a few
thousand elements fits, so it is read once and written once: the minimum. The fused form also saves writing the sum
and reading it back. Qwen 3 and Gemma 3 normalize queries and keys head by head: then a row is a head, read in place
from the output of the QKV product, so a row is addressed by two strides. A head is too short for a program of its own:
one program has all heads of a token.

If the product that reads the norm quantizes its inputs (lesson 07), the kernel writes the row's codes and scale: the
row is already in registers, with its largest value. The codes are those of the row as rms_norm rounds it, bit by bit.
So both forms must add up the squares in the same order, which depends on the columns that a thread has. The compiler
would give a thread 16 columns, for stores of 16 codes; `max_contiguous` keeps the 8 that 16 bytes of bf16 are.
"""

import torch
import triton
import triton.language as tl

from .quantized_inputs import empty_codes, store_row
from .single_row_parts import dependent_launch, wait_for_inputs

LARGEST_TOKEN = 16384  # numbers that a program holds


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, scale_ptr, given_ptr, x_stride, head_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.max_contiguous(tl.arange(0, TILE), 8)
    inside = columns < DIM
    at = row // HEADS * x_stride + row % HEADS * head_stride
    x = tl.load(x_ptr + at + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = (x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * weight).to(x_ptr.dtype.element_ty)
    store_row(out, row, columns, out_ptr, scale_ptr, given_ptr, DIM)


@triton.jit
def head_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, head_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """rms_norm of each of a token's heads."""
    token = tl.program_id(0).to(tl.int64)
    heads, columns = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, TILE)[None, :]
    inside = (heads < HEADS) & (columns < DIM)
    x = tl.load(x_ptr + token * x_stride + heads * head_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * weight
    tl.store(out_ptr + (token * HEADS + heads) * DIM + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, given_ptr, sum_ptr, x_stride, residual_stride, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.max_contiguous(tl.arange(0, TILE), 8)
    inside = columns < DIM
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # The sum is rounded before it is normalized: the next layer reads the rounded sum, and both must agree.
    rounded = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * DIM + columns, rounded, mask=inside)
    x = rounded.to(tl.float32)
    out = (x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * weight).to(rounded.dtype)
    store_row(out, row, columns, out_ptr, scale_ptr, given_ptr, DIM)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., dim] scaled to a root mean square of 1, times weight [dim] -> like x; computed in float32.  Lesson 03."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, weight, eps, out)
    return out


def rms_norm_codes(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm, quantized as `quantize_rows` would: (codes [..., dim] of `dtype`, scales [..., 1]).  Lesson 07."""
    codes, scales = empty_codes(x.shape, dtype, x.device)
    _norm(x, weight, eps, codes, scales, static)
    return codes, scales


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., dim] -> (rms_norm(x + residual), x + residual), in one launch.  Lesson 03.

    weight is read before the last launch has ended.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, _add_norm(x, residual, weight, eps, out)


def add_rms_norm_codes(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype,
    static: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """add_rms_norm, its norm quantized as `quantize_rows` would: (codes, scales [..., 1], x + residual).  Lesson 07."""
    codes, scales = empty_codes(x.shape, dtype, x.device)
    return codes, scales, _add_norm(x, residual, weight, eps, codes, scales, static)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor,
    scales: torch.Tensor | None = None, static: torch.Tensor | None = None,
) -> None:  # fmt: skip
    dim = x.shape[-1]
    rows = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, dim)  # the heads of a token may have any stride
    tile, warps = _config(dim)
    heads_tile = triton.next_power_of_2(rows.shape[1])
    if x.numel() and heads_tile > 1 and heads_tile * tile <= LARGEST_TOKEN and scales is None:
        head_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), rows.stride(1), eps,
            HEADS=rows.shape[1], DIM=dim, HEADS_TILE=heads_tile, TILE=tile, num_warps=_config(heads_tile * tile)[1],
        )  # fmt: skip
    elif x.numel():
        rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
            rows, weight, out, scales, static, rows.stride(0), rows.stride(1), eps,
            HEADS=rows.shape[1], DIM=dim, TILE=tile, num_warps=warps,
        )  # fmt: skip


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor,
    scales: torch.Tensor | None = None, static: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    dim = x.shape[-1]
    rows, residual_rows = x.reshape(-1, dim), residual.reshape(-1, dim)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        tile, warps = _config(dim)
        add_rms_norm_kernel[(rows.shape[0],)](
            rows, residual_rows, weight, out, scales, static, total, rows.stride(0), residual_rows.stride(0), eps,
            DIM=dim, TILE=tile, num_warps=warps, **dependent_launch(x.device),
        )  # fmt: skip
    return total


def _config(dim: int) -> tuple[int, int]:
    """Return the row padded to a power of two, and enough warps for about 16 elements per thread."""
    tile = triton.next_power_of_2(dim)
    return tile, min(max(tile // 512, 1), 16)
