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
"""

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit
def gated_activation_kernel(
    gate_up_ptr, out_ptr, row_stride, SIZE: tl.constexpr, GELU: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)  # 2 * sqrt(2 / pi)
    else:
        slope = 1.0
    out = gate * tl.sigmoid(gate * slope) * up
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [tokens, 2 * I], gate first -> activation(gate) * up [tokens, I].  Lesson 03.

    activation: "gelu_tanh" or "silu". Raises ValueError for another.
    """
    if activation not in ("gelu_tanh", "silu"):
        raise ValueError(f'activation is "gelu_tanh" or "silu", not {activation!r}')
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        gated_activation_kernel[(tokens, triton.cdiv(size, TILE))](
            gate_up, out, gate_up.stride(0), SIZE=size, GELU=activation == "gelu_tanh", TILE=TILE, num_warps=4
        )
    return out
