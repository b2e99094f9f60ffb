"""SmoothQuant: move the activations' outliers into the weights.  Lesson 07.

Xiao et al. 2022, "SmoothQuant", section 4, equations 3 and 4:

    X W^T = (X diag(1/s)) (W diag(s))^T,   s_j = max |X_j| ^ strength / max |W_j| ^ (1 - strength)

A few channels of X are tens of times larger than the others, and each token's eight bits must span them. Dividing by s
evens them out; the weights, whose channels are alike, can carry the factor. diag(1/s) is folded into the operation that
makes X.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.quantization.activations import Activations
from minillm.quantization.weight import Codes

from .statistics import InputStatistics

STRENGTHS = tuple(step / 20 for step in range(20))


def scales_for(weight: Tensor, inputs: InputStatistics, strength: float) -> Tensor:
    """weight [out, in] -> scales [in]; channels without inputs or weights keep scale 1."""
    largest = inputs.largest.to(weight.dtype)
    weights = weight.abs().amax(0)
    scales = largest.clamp(min=1e-8) ** strength / weights.clamp(min=1e-8) ** (1 - strength)
    return torch.where((largest > 0) & (weights > 0), scales, torch.ones_like(scales))


def search_scales(
    weight: Tensor,
    inputs: InputStatistics,
    activations: Activations,
    rounded: Callable[[Tensor], Codes],
    *,
    allowed: Callable[[Tensor], Tensor] = lambda scales: scales,
    strengths: Sequence[float] = STRENGTHS,
) -> tuple[Tensor, float | None]:
    """Return the scales [in] whose quantized product has the smallest error on the kept inputs, and their strength.

    rounded: rounds a weight to the codes of the format. allowed: the nearest scales [in] that can be folded. Scales of
    1 (strength None) are tried too, so the result is never worse than without on the kept inputs.
    """
    x = torch.cat(inputs.samples).to(weight.dtype)
    exact = x @ weight.t()
    best: tuple[float, float | None, Tensor] | None = None
    for strength in (None, *strengths):
        scales = torch.ones_like(weight[0])
        if strength is not None:
            scales = allowed(scales_for(weight, inputs, strength))
        codes = activations.quantize(x / scales).dequantize(x.dtype)
        error = (codes @ rounded(weight * scales).dequantize().to(x.dtype).t() - exact).square().sum().item()
        if best is None or error < best[0]:
            best = error, strength, scales
    assert best is not None
    return best[2], best[1]
