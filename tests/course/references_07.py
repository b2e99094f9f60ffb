"""Lesson 07's references: each solution compared with the engine's own."""

import torch

from minillm.course.lesson_07 import eight_bits
from minillm.ops import reference
from minillm.quantization import Activations, Int8
from minillm.quantization.activations import to_codes
from minillm.quantization.methods import hadamard as matrices
from minillm.quantization.methods import smoothquant
from minillm.quantization.methods.statistics import InputStatistics
from tests.course.references import against


def drawn(rng, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)), dtype=torch.float64)


@against("int8_linear", cases=30)
def _(solution, rng):
    static = rng.random() < 0.5
    x, weight = drawn(rng, rng.randint(1, 5), 32), drawn(rng, rng.randint(1, 9), 32)
    stored = Int8(Activations("int8", static)).empty(*weight.shape, False, dtype=x.dtype, device=x.device)
    stored.fill(range(len(weight)), stored.round(weight))
    if static:
        stored.input_scale.fill_(rng.uniform(0.005, 0.05))
    given = x, stored.codes, stored.scales, stored.input_scale
    torch.testing.assert_close(solution(*given), reference.linear(x, stored))
    torch.testing.assert_close(eight_bits.int8_linear(*given), reference.linear(x, stored))


@against("smooth_scales")
def _(solution, rng):
    x, weight, strength = drawn(rng, 9, 6), drawn(rng, 4, 6), rng.choice((0, 0.3, 0.5, 1))
    x[:, rng.randrange(6)] = 0
    weight[:, rng.randrange(6)] = 0
    inputs = InputStatistics(6, x.device, x.dtype)
    inputs.add(x)
    expected = smoothquant.scales_for(weight, inputs, strength)
    torch.testing.assert_close(solution(inputs.largest, weight, strength), expected)
    torch.testing.assert_close(eight_bits.smooth_scales(inputs.largest, weight, strength), expected)


@against("hadamard")
def _(solution, rng):
    x = drawn(rng, rng.randint(1, 4), 1 << rng.randint(0, 10))
    torch.testing.assert_close(solution(x), matrices.transform(x))


@against("round_to_e4m3", cases=5)
def _(solution, rng):
    every = torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
    some = drawn(rng, 1000) * 2.0 ** drawn(rng, 1000).mul(6)
    for x in (every[every.isfinite()], some):
        assert torch.equal(solution(x), to_codes(x, "fp8").to(x.dtype))
        assert torch.equal(eight_bits.round_to_e4m3(x), to_codes(x, "fp8").to(x.dtype))
