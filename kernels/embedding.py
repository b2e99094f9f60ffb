"""Rows of an embedding table of int8 or fp8 codes, dequantized as they are gathered.  Lesson 05.

    out[t] = table[ids[t]] * row scale * embedding scale

Tiling: one program per token. In torch, gathering codes and scales and multiplying them takes five launches, which a
decode step of one request would notice.
"""

import torch
import triton
import triton.language as tl

from .cache_codes import to_numbers
from .single_row_parts import dependent_launch, wait_for_inputs


@triton.jit
def code_embedding_kernel(
    ids_ptr, codes_ptr, scale_ptr, out_ptr, factor, COLUMNS: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    inside = columns < COLUMNS
    row = tl.load(ids_ptr + token).to(tl.int64)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    codes = tl.load(codes_ptr + row * COLUMNS + columns, mask=inside, other=0)
    numbers = to_numbers(codes, tl.float32) * tl.load(scale_ptr + row)
    weight = numbers.to(kind).to(tl.float32)  # rounded like the dequantized table
    tl.store(out_ptr + token * COLUMNS + columns, (weight * factor).to(kind), mask=inside)


def code_embedding(
    ids: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, factor: float, dtype: torch.dtype
) -> torch.Tensor:
    """ids [tokens] int64, codes [vocab, hidden] int8 or e4m3, scales [vocab] float32 -> [tokens, hidden] in `dtype`."""
    tokens, columns = len(ids), codes.shape[1]
    codes = codes if codes.dtype == torch.int8 else codes.view(torch.uint8)
    out = torch.empty((tokens, columns), dtype=dtype, device=codes.device)
    if tokens:
        tile = triton.next_power_of_2(columns)
        dependent = dependent_launch(ids.device)
        code_embedding_kernel[(tokens,)](
            ids, codes, scales, out, factor, COLUMNS=columns, TILE=tile,
            num_warps=min(max(tile // 512, 1), 16), **dependent,
        )  # fmt: skip
    return out
