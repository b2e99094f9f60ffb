"""Fake quantization, to train a model that will be rounded: quantization-aware training.  Lesson 08.

    forward:   w' = clamp(round(w / s), -2^(b-1), 2^(b-1) - 1) * s,   s = max |w| of the group / (2^(b-1) - 1/2)
    backward:  dL/dw = dL/dw'

Rounding has the derivative 0 almost everywhere, so nothing could be learned through it. The straight-through estimator
takes it for the identity (Bengio et al. 2013, "Estimating or propagating gradients through stochastic neurons", section
4; in training for quantization: Jacob et al. 2018, section 3). Training keeps the weights in full precision; each step
computes with their rounded values.
"""

from typing import Any

import torch
from torch import Tensor


class _Identity(torch.autograd.Function):
    """The second argument, with the gradient going to the first."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def fake_quantize(
    weight: Tensor, bits: int = 4, group_size: int = 128, scale_dtype: torch.dtype | None = None
) -> Tensor:
    """weight [rows, in], floating point -> its rounded values, in the same dtype; the gradient passes unchanged.

    bits         of a code, from 2. With 4, the values are those of `Int4(group_size, scale_dtype=scale_dtype)`
    group_size   inputs that share a scale; it must divide the inputs
    scale_dtype  precision that scales are rounded to, as they will be stored; default: the weight's
    """
    with torch.no_grad():
        lowest = -(1 << bits - 1)
        grouped = weight.unflatten(-1, (-1, group_size))
        steps = grouped.abs().amax(-1, keepdim=True) / (-lowest - 0.5)
        steps = steps.to(scale_dtype or steps.dtype).to(weight.dtype)
        scales = torch.where(steps > 0, steps, torch.ones_like(steps))
        rounded = (grouped / scales).round().clamp(lowest, -lowest - 1) * scales
    return _Identity.apply(weight, rounded.flatten(-2))
