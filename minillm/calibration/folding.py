"""Scale the inputs of a layer's products, and undo it in the operation before.  Lesson 06.

A product's weight W [out, in] becomes W diag(s), and what makes its inputs is divided by s: a norm's weight, or the
rows of another product, if nothing but an elementwise factor lies between the two. The layer computes the same.
"""

import torch
from torch import Tensor

from minillm.model import Model
from minillm.model.decoder import Layer
from minillm.quantization import DenseWeight, Weight

NORMS = {"qkv": "attention_norm", "gate_up": "mlp_norm"}  # which norm makes the inputs of a product


def foldable(norm: Tensor, scales: Tensor, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """norm [in], scales [in] -> the norm / scales that can be saved, and the scales that it stands for; both float64.

    A checkpoint stores a norm in `dtype`, less the family's offset. In bfloat16, Gemma's norms near 0 are multiples of
    2^-8, and a large scale can make one 0, which nothing can undo: such a channel keeps its norm, and gets scale 1.
    """
    norm = norm.double()
    rounded = (norm / scales.double() - offset).to(dtype).double() + offset
    usable = (rounded != 0) & (norm != 0)
    return torch.where(usable, rounded, norm), torch.where(usable, norm / torch.where(usable, rounded, 1.0), 1.0)


def allowed_scales(model: Model, layer: Layer, consumer: str, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales [in] that `fold` would fold for these ones, in their dtype. dtype: of the saved model.

    Scales of a norm's outputs are rounded as the norm is. The heads that read the same values must have the same ones.
    """
    config = model.config
    if consumer in NORMS:
        return foldable(getattr(layer, NORMS[consumer]), scales, config.norm_offset, dtype)[1].to(scales)
    if consumer == "down":
        # A rotation between two products mixes the channels, so the one before cannot undo their scales.
        return torch.ones_like(scales) if "down" in config.rotations else scales
    shared = scales.view(config.num_kv_heads, -1, config.head_dim).log().mean(1, keepdim=True).exp()
    return shared.expand(-1, config.num_heads // config.num_kv_heads, -1).reshape(-1)


def fold(model: Model, layer: Layer, consumer: str, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the columns of `consumer` by scales [in], and divide what makes its inputs. Weights must be dense.

    Returns the scales [in] as folded. dtype: of the saved model. Norms and biases are rounded to it here, so that the
    model is the one that will be saved; the scales of norms' outputs are adjusted, so that nothing is lost.
    """
    columns = matrix_of(getattr(layer, consumer))
    if consumer in NORMS:
        norm = getattr(layer, NORMS[consumer])
        stored, scales = foldable(norm, scales, model.config.norm_offset, dtype)
        norm.copy_(stored)
        columns.copy_(columns.double() * scales)
        return scales.to(columns.dtype)
    columns.copy_(columns.double() * scales.double())
    config = model.config
    if consumer == "down":
        producer, rows, divisors = layer.gate_up, slice(config.intermediate_size, None), scales
    else:
        values = config.num_kv_heads * config.head_dim
        producer, rows = layer.qkv, slice(-values, None)
        divisors = scales.view(config.num_kv_heads, -1, config.head_dim)[:, 0].flatten()
    matrix = matrix_of(producer)
    matrix[rows].copy_(matrix[rows].double() / divisors.double()[:, None])
    if producer.bias is not None:
        producer.bias[rows].copy_((producer.bias[rows].double() / divisors.double()).to(dtype))
    return scales


def matrix_of(weight: Weight) -> Tensor:
    """Return a dense weight's matrix [out, in], to be changed in place."""
    assert isinstance(weight, DenseWeight)
    return weight.weight
