"""Give a model outliers of activations, as large models have them, without changing its outputs.  Lessons 05 to 07.

Some channels of large models' activations are tens of times larger than the others, in every token (Dettmers et al.
2022, "LLM.int8()", section 4). A small model has none, and its 8-bit activations lose nothing worth saving. Here they
are planted: a channel is multiplied by a power of 2 where it is made, and divided by it where it is read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.model import Model
from minillm.model.decoder import PROJECTIONS

from .folding import allowed_scales, fold

LARGER = 32.0  # a power of 2: multiplying by it rounds nothing, so even float32 outputs stay the same bit for bit
SHARE = 64  # one channel of as many is an outlier


def outlier_scales(
    model: Model,
    products: Sequence[str] = PROJECTIONS,
    *,
    larger: float = LARGER,
    share: int = SHARE,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return what `plant_outliers` divides the inputs [in] of each product by, by address: 1 / larger, or 1."""
    generator, factors = torch.Generator().manual_seed(seed), {}
    for index, layer in enumerate(model.layers):
        for name in products:
            inputs = getattr(layer, name).shape[1]
            size = model.config.head_dim if name == "attention_out" else inputs
            scales = torch.ones(size, dtype=model.dtype)
            scales[torch.randperm(size, generator=generator)[: -(-size // share)]] = 1 / larger
            factors[f"layers.{index}.{name}"] = scales.repeat(inputs // size).to(model.device)
    return factors


def plant_outliers(
    model: Model,
    products: Sequence[str] = PROJECTIONS,
    *,
    larger: float = LARGER,
    share: int = SHARE,
    seed: int = 0,
) -> None:
    """Make random channels of these products' inputs `larger` times as large; weights must be dense.

    One channel of every `share` is chosen. The columns of the weights that read them become as many times smaller; if
    `larger` is below 1, it is the weights that get outliers.
    Inputs of attention_out are values, which query heads share: their outliers are at the same channels of each head.
    """
    for address, scales in outlier_scales(model, products, larger=larger, share=share, seed=seed).items():
        _, index, name = address.split(".")
        layer = model.layers[int(index)]
        fold(model, layer, name, allowed_scales(model, layer, name, scales, model.dtype), model.dtype)
