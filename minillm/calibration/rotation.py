"""Rotate a model: its outputs stay the same, and its activations lose their outliers.  Lesson 07.

A rotation R of the residual stream can be folded into what writes to the stream and what reads it, because an RMS norm
without weights commutes with it: norm(x R) = norm(x) R. So first each norm's weights go into the products after it.

    reads    W diag(norm) -> W diag(norm) R        qkv, gate_up, and an untied head
    writes   W -> R^T W,  bias -> bias R           attention_out, down, and an untied embedding

R = diag(signs) H: random signs, then a Hadamard matrix. Values are rotated in the same way, within each head, between
qkv and attention_out: attention only averages them. All this costs nothing when the model runs. Two rotations cost a
product with H each, `ops.hadamard`; the model's config names them ("rotations"), and only minillm runs such a model:

    "residual"   A table that is embedding and head at once could only be rotated for both if the final norm had no
                 weights. So it only gets the signs, which commute with any weights, and the stream is rotated after
                 the embedding, and back before the final norm.
    "down"       The inputs of `down` are products of two activations, channel by channel, which mixing does not commute
                 with: only signs can be folded, into the rows of `up`. `minillm quantize` rotates these inputs if they
                 become int8, whose steps are as wide as a token's outliers make them. FP8 has fine steps for small
                 numbers whatever the outliers, so spreading those only adds errors elsewhere.

Ashkboos et al. 2024, "QuaRot", sections 4.1 and 4.2 (stages 1a to 1c), without its rotations of keys, queries and the
cache, which nothing here needs: they stay in 16 bits.
"""

from dataclasses import replace

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.model import Model
from minillm.model.decoder import Layer
from minillm.quantization.methods.hadamard import transform

from .folding import matrix_of

ROWS = 4096


def refusal(model: Model) -> str | None:
    """Return why a model cannot be rotated; None if it can be."""
    if extra := {"after_attention_norm", "after_mlp_norm"} & set(model.layer_norms):
        return (
            f"{model.config.architecture} cannot be rotated: it has norms between its projections and the residual "
            f"stream ({', '.join(sorted(extra))}), so a rotation of the stream cannot be folded into the projections. "
            "Quantize it without a rotation, with smoothquant or awq if rounding to the nearest loses too much"
        )
    if model.config.rotations:
        return "the model is rotated already: rotate the one that it was made from"
    return None


def check_rotates(model: Model) -> None:
    """Raise ConfigError for a model that cannot be rotated."""
    if (reason := refusal(model)) is not None:
        raise ConfigError(reason)


def rotate(model: Model, dtype: torch.dtype, *, seed: int = 0, down: bool) -> None:
    """Rotate a dense model in place; its outputs stay the same but for rounding.

    dtype: of the saved model: biases, and tables that may stay unquantized, are rounded to it here.
    seed: of the random signs. down: whether the inputs of `down` are rotated too, which costs a product in each step.
    Raises ConfigError before any work.
    """
    check_rotates(model)
    config, generator = model.config, torch.Generator().manual_seed(seed)

    def signs(size: int) -> Tensor:
        drawn = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        return drawn.to(model.device, torch.float64)

    stream = signs(config.hidden_size)
    online = ["down"] if down else []
    if config.tie_word_embeddings:
        online.insert(0, "residual")
        matrix_of(model.head).mul_(stream)
    else:
        _rotate(matrix_of(model.embedding), stream, dtype)
        _rotate(matrix_of(model.head), model.final_norm.double() * stream, dtype)
        model.final_norm.fill_(1.0)
    for layer in model.layers:
        for norm, reads in ((layer.attention_norm, layer.qkv), (layer.mlp_norm, layer.gate_up)):
            _rotate(matrix_of(reads), norm.double() * stream)
            norm.fill_(1.0)
        for writes in (layer.attention_out, layer.down):
            _rotate(matrix_of(writes).t(), stream)
            if writes.bias is not None:
                _rotate(writes.bias[None], stream, dtype)
        _rotate_values(model, layer, signs(config.head_dim), dtype)
        if down:
            flips = signs(config.intermediate_size)
            up = slice(config.intermediate_size, None)
            matrix_of(layer.gate_up)[up].mul_(flips[:, None])
            if layer.gate_up.bias is not None:
                layer.gate_up.bias[up].mul_(flips)
            _rotate(matrix_of(layer.down), flips)
    model.config = replace(config, rotations=tuple(online))


def _rotate_values(model: Model, layer: Layer, signs: Tensor, dtype: torch.dtype) -> None:
    """Rotate the values of each KV head, and back in the columns of `attention_out` that read them."""
    kv_heads, head_dim = model.config.num_kv_heads, model.config.head_dim
    rows = slice(-kv_heads * head_dim, None)
    _rotate(matrix_of(layer.qkv)[rows].unflatten(0, (kv_heads, head_dim)).transpose(1, 2), signs)
    if layer.qkv.bias is not None:
        _rotate(layer.qkv.bias[rows].unflatten(0, (kv_heads, head_dim)), signs, dtype)
    _rotate(matrix_of(layer.attention_out).unflatten(1, (-1, head_dim)), signs)


def _rotate(vectors: Tensor, factors: Tensor, dtype: torch.dtype | None = None) -> None:
    """vectors [..., n] times diag(factors) H, in place and in float64; dtype: what the results are rounded to."""
    for part in vectors.split(ROWS):  # float64 copies of a whole table would take several times its memory
        rotated = transform(part.double() * factors)
        part.copy_(rotated if dtype is None else rotated.to(dtype))
