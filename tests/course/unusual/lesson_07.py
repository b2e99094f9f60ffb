"""Right but unusual solutions of lesson 07."""

import math

import torch

from tests.course.unusual import right


@right("int8_linear")
def token_by_token(x, codes, scales, input_scale=None):
    rows = []
    for token in x.double():
        scale = token.abs().max() / 127.5 if input_scale is None else input_scale.double().squeeze()
        scale = scale if scale > 0 else torch.ones_like(scale)
        mine = torch.clip(torch.round(token / scale), -128, 127).to(torch.int64)
        rows.append((codes.to(torch.int64) @ mine) * scale * scales.double())
    return torch.stack(rows).to(x.dtype)


@right("smooth_scales")
def by_logarithms(largest, weight, strength):
    """exp and log in float64, which lose nothing that counts."""
    weights = weight.abs().max(dim=0).values.double()
    scales = (strength * largest.double().log() - (1 - strength) * weights.log()).exp()
    scales[(largest == 0) | (weights == 0)] = 1
    return scales.to(weight.dtype)


@right("hadamard")
def halves_of_the_axis(x):
    """Recursive: the transform of [a, b] is [a + b, a - b], transformed."""
    if x.shape[-1] == 1:
        return x.clone()
    first, second = x.chunk(2, -1)
    return torch.cat((halves_of_the_axis(first + second), halves_of_the_axis(first - second)), -1) / math.sqrt(2)


@right("round_to_e4m3")
def by_adding_and_subtracting(x):
    """Adding a number whose last digit is the step rounds to the step."""
    size = x.abs().double().clamp(max=448)
    power = torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-6))))
    power = torch.where(power > size.clamp(min=2.0**-6), power / 2, power)
    large = power * 2.0 ** (52 - 3)
    return torch.copysign((size + large) - large, x.double()).to(x.dtype)
