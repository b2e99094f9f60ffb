"""The gated activation between the two halves of a feed-forward layer.  Lesson 03.

    gate, up = gate_up[:, :I], gate_up[:, I:]
    GeGLU:  gelu_tanh(gate) * up      (Gemma)
    SwiGLU: silu(gate) * up           (Llama)

Shazeer 2020, "GLU Variants Improve Transformer". Both can be computed with a sigmoid, because
(1 + tanh(y)) / 2 = sigmoid(2 y):

    silu(x)      = x * sigmoid(x)
    gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))

Tiling: the operation is elementwise, so any tile works: a program takes 1024 columns of one row. In separate steps the
activated gate would be written and read back; here gate and up are read once and the product is written once.

If the product that reads the result quantizes its inputs (lesson 07), a program takes a whole row, because the scale
needs its largest value, and writes codes: five bytes a column are moved, where two kernels move nine. With 32 columns
per thread, gates and ups of 16 bits and the results fit into registers.
"""

import torch
import triton
import triton.language as tl

from .quantized_inputs import empty_codes, store_row
from .single_row_parts import activated

TILE = 1024
MOST_COLUMNS = 1 << 15  # of a row that one program holds: 64 columns per thread, with the most warps


@triton.jit
def gated_activation_kernel(
    gate_up_ptr, out_ptr, scale_ptr, given_ptr, row_stride,
    SIZE: tl.constexpr, GELU: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    out = (activated(gate, GELU) * up).to(gate_up_ptr.dtype.element_ty)
    store_row(out, row, columns, out_ptr, scale_ptr, given_ptr, SIZE)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [tokens, 2 * I], gate first -> activation(gate) * up [tokens, I].  Lesson 03.

    activation: "gelu_tanh" or "silu". Raises ValueError for another.
    """
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    _gate(gate_up, activation, out, TILE, 4)
    return out


def gated_activation_codes(
    gate_up: torch.Tensor, activation: str, dtype: torch.dtype, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """gated_activation, quantized as `quantize_rows` would: (codes [tokens, I], scales [tokens, 1]).  Lesson 07.

    Raises ValueError for more than MOST_COLUMNS columns, or another activation.
    """
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if size > MOST_COLUMNS:
        raise ValueError(
            f"a row has {size} columns; this kernel holds up to {MOST_COLUMNS}: quantize longer rows separately"
        )
    codes, scales = empty_codes((tokens, size), dtype, gate_up.device)
    tile = triton.next_power_of_2(size)
    _gate(gate_up, activation, codes, tile, min(max(tile // 1024, 4), 16), scales, static)
    return codes, scales


def _gate(
    gate_up: torch.Tensor, activation: str, out: torch.Tensor, tile: int, warps: int,
    scales: torch.Tensor | None = None, static: torch.Tensor | None = None,
) -> None:  # fmt: skip
    if activation not in ("gelu_tanh", "silu"):
        raise ValueError(f'activation is "gelu_tanh" or "silu", not {activation!r}')
    tokens, size = out.shape
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    if tokens:
        gated_activation_kernel[(tokens, triton.cdiv(size, tile))](
            gate_up, out, scales, static, gate_up.stride(0),
            SIZE=size, GELU=activation == "gelu_tanh", TILE=tile, num_warps=warps,
        )  # fmt: skip
