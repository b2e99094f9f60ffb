"""Operations for GPUs whose result for a token has the same bits whatever else a step computes.  Lesson 13.

As `exact.py`, which says why. Products and attention have kernels of their own (`kernels/fixed_order.py`), in place of
those that choose by the number of rows and of the library's products. Norms, the rotary embedding, the gated activation
and the embedding have one program a token, with tiles of one size, in `triton.py` too. Sampling always gets limits,
because the kernel without them divides its sums among fewer threads.

Not here are `scored_sample`, which has log-probabilities that other steps do not compute the same way, and the
compositions that quantize what a norm or an activation writes.
"""

import torch
from torch import Tensor, bfloat16, float16

from minillm.kernels import fixed_order, sampling
from minillm.kv_cache.layer_cache import LayerCache
from minillm.quantization import Weight
from minillm.quantization.methods.hadamard import largest_order
from minillm.quantization.methods.hadamard import matrix as hadamard_matrix

from . import triton
from .signatures import AttentionOptions, Rows, Truncation
from .triton import add_rms_norm as add_rms_norm
from .triton import embedding as embedding
from .triton import gated_activation as gated_activation
from .triton import rms_norm as rms_norm
from .triton import rotary_embedding as rotary_embedding
from .triton import write_kv as write_kv


def linear(x: Tensor, weight: Weight) -> Tensor:
    """As the reference. A quantized matrix is dequantized first, in every step."""
    if weight.activations is not None:
        x = weight.activations.quantize(x, weight.input_scale).dequantize(x.dtype)
    return _product(x, weight.dequantize(), weight.bias)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    out = fixed_order.product(x.reshape(-1, x.shape[-1]), matrix, bias)
    return out.view(*x.shape[:-1], len(matrix))


def hadamard(x: Tensor, inverse: bool = False) -> Tensor:
    """As the reference."""
    order = largest_order(x.shape[-1])
    matrix = (hadamard_matrix(order) / order**0.5).to(x)
    return _product(x.unflatten(-1, (-1, order)), matrix if inverse else matrix.t()).flatten(-2)


def lm_head(hidden: Tensor, weight: Weight, soft_cap: float | None = None) -> Tensor:
    """As the reference, but logits stay in half precision: sampling converts them as it reads."""
    logits = linear(hidden, weight)
    if not soft_cap:
        return logits
    if hidden.dtype in (bfloat16, float16):
        return sampling.soft_cap(logits, soft_cap)
    return soft_cap * torch.tanh(logits / soft_cap)


def rotary_write(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: LayerCache, slots: Tensor, rotate_keys: bool, keep: bool
) -> tuple[Tensor, Tensor] | None:
    """As `Compositions.rotary_write`. Attention reads the cache alone, so keys are never kept.

    A kernel that keeps them is compiled separately, and whether a step has new prompts would choose the one that runs.
    """
    return triton.rotary_write(q, k, v, cos_sin, cache, slots, rotate_keys, keep=False)


def decode_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """As the reference, by the same sums as `prefill_attention`."""
    return fixed_order.attention(q.flatten(0, 1), cache, rows, options).view(q.shape)


def prefill_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """As the reference."""
    return fixed_order.attention(q, cache, rows, options)


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Truncation | None = None) -> Tensor:
    """As the reference, always with limits: those of 0, 0 and 1 leave nothing out."""
    if truncation is None:
        nothing = temperature.new_zeros(len(logits), dtype=torch.float32)
        truncation = Truncation(nothing, nothing.int(), nothing + 1)
    return sampling.sample(logits, temperature, uniform, truncation)
