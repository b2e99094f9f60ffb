"""AWQ: scale up the inputs' important channels before rounding to the nearest.  Lesson 06.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", section 3.2, equations 4 and 5:

    W x = (W diag(s)) (diag(1/s) x),   s = mean |x| ^ strength

Rounding W diag(s) leaves an error of about a step in each weight, which the product divides by s again: the channels
whose inputs are large lose less. A large s also makes the group's largest weight, and with it the step, larger; so the
strength is searched. diag(1/s) is folded into the operation that makes x.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.quantization.int4 import Int4, round_to_int4, scales_of
from minillm.quantization.weight import Codes

from .statistics import InputStatistics, output_error

STRENGTHS = tuple(step / 20 for step in range(20))
# Shares of a group's own range that `search_clipping` tries, its own first. Above 1, a symmetric group's largest weight
# is no longer half a step beyond the last level.
RANGES = (1.0, *(step / 40 for step in range(20, 44) if step != 40))
SMALLEST = 1e-4  # scales below it are raised to it, as in the authors' code
LARGE = 1 << 19  # weights of a matrix from which on the search reads only some of its rows
SEARCHED = 512  # rows that it then reads


def search_scales(
    weight: Tensor,
    inputs: InputStatistics,
    format: Int4,
    *,
    allowed: Callable[[Tensor], Tensor] = lambda scales: scales,
    strengths: Sequence[float] = STRENGTHS,
) -> tuple[Tensor, float]:
    """weight [out, in], float32 or wider -> the scales [in] with the smallest error of the outputs, and their strength.

    allowed: the nearest scales [in] that can be folded into the operation before.
    Strength 0 leaves the weight as it is, so the result is never worse than rounding to the nearest on these statistics
    (of a large matrix: in the rows that are searched, evenly spread, since all rows have the same scales).
    """
    if weight.numel() > LARGE:
        weight = weight[:: -(-len(weight) // SEARCHED)]
    magnitude = inputs.mean_magnitude.to(weight.dtype)
    moment = inputs.second_moment.to(weight.dtype)
    best: tuple[float, float, Tensor] | None = None
    for strength in strengths:
        scales = allowed(scales_for(magnitude, strength))
        rounded = rounded_to_nearest(weight * scales, format).dequantize() / scales
        error = output_error(rounded - weight, moment).item()
        if best is None or error < best[0]:
            best = error, strength, scales
    assert best is not None
    return best[2], best[1]


def scales_for(magnitude: Tensor, strength: float) -> Tensor:
    """magnitude [in]: mean of |x| -> scales [in], whose smallest is as far below 1 as the largest is above.

    Channels that are always zero get scale 1: one of them would otherwise move the scales of all others.
    """
    used = magnitude > 0
    scales = (magnitude**strength).clamp(min=SMALLEST)
    live = scales[used] if used.any() else torch.ones_like(scales)
    return torch.where(used, scales / (live.amax() * live.amin()).sqrt(), 1.0)


def rounded_to_nearest(weight: Tensor, format: Int4, shrink: Tensor | float = 1.0) -> Codes:
    """weight [rows, in] in groups of the format. shrink: multiplies the range of each group [rows, groups]."""
    grouped = weight.view(len(weight), -1, format.group_size)
    return _rounded(grouped, grouped, format, shrink)


def _rounded(grouped: Tensor, ends: Tensor, format: Int4, shrink: Tensor | float) -> Codes:
    """ends [rows, groups, n]: the smallest and the largest weight of each group, or all of them."""
    scales, zeros = scales_of(ends, format, shrink)
    return Codes(round_to_int4(grouped, scales, zeros).flatten(1), scales, zeros)


def search_clipping(weight: Tensor, inputs: InputStatistics, format: Int4) -> Codes:
    """Codes whose groups may leave out their largest weights if that makes the others precise enough.

    Each group tries ranges from half its own to a little more, and keeps the one whose error in the outputs is
    smallest, as if the other groups were exact (`auto_clip` of the authors' code does so with fewer, narrower ranges,
    and leaves out the queries' and keys' weights).
    """
    rows, size = len(weight), format.group_size
    groups = weight.shape[1] // size
    moment = inputs.second_moment.to(weight.dtype).view(groups, size, groups, size)
    own = torch.stack([moment[group, :, group] for group in range(groups)])  # [groups, size, size]
    best = torch.full((rows, groups), float("inf"), dtype=weight.dtype, device=weight.device)
    chosen = torch.ones_like(best)
    grouped = weight.view(rows, groups, size)
    ends = torch.stack(grouped.aminmax(dim=-1), -1)  # all that a group's scales depend on, found once
    for shrink in RANGES:
        difference = (_rounded(grouped, ends, format, shrink).dequantize() - weight).view(rows, groups, size)
        error = (torch.einsum("rgi,gij->rgj", difference, own) * difference).sum(-1)
        chosen = torch.where(error < best, shrink, chosen)
        best = torch.minimum(best, error)
    return _rounded(grouped, ends, format, chosen)
