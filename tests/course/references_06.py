"""Lesson 06's references: the engine's statistics, search and GPTQ."""

import torch
from torch import Tensor

from minillm.course.lesson_06 import calibrated
from minillm.quantization.methods import awq
from tests.course.references import against


def drawn(rng, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)), dtype=torch.float64)


def inputs_of(rng, inputs: int) -> Tensor:
    """Rows of inputs that go together, of any size."""
    mixing = drawn(rng, inputs, inputs) + torch.eye(inputs, dtype=torch.float64)
    return drawn(rng, 4 * inputs + 8, inputs) @ mixing * 10 ** rng.uniform(-2, 2)


@against("MyStatistics")
def _(solution, rng):
    inputs, out = rng.randint(1, 12), rng.randint(1, 5)
    x, own, mine = inputs_of(rng, inputs), calibrated.Statistics(inputs), solution(inputs)
    for part in x.split(rng.randint(1, len(x))):
        own.add(part)
        mine.add(part)
    difference = drawn(rng, out, inputs)
    torch.testing.assert_close(mine.mean_magnitude(), own.mean_magnitude())
    torch.testing.assert_close(mine.error(difference), own.error(difference))
    assert mine.rows == own.own.rows


@against("awq_scales")
def _(solution, rng):
    size = rng.choice((2, 4, 8))
    inputs, out = size * rng.randint(1, 4), rng.randint(1, 6)
    x, weight = inputs_of(rng, inputs), drawn(rng, out, inputs)
    given = (x.abs().mean(0), x.T @ x, lambda matrix: calibrated.rounded(matrix, size), lambda scales: scales)
    wanted, strength = calibrated.engines_scales(awq.STRENGTHS[::2])(weight, *given)
    found = solution(weight, *given)
    assert abs(found[1] - strength) < 1e-9
    torch.testing.assert_close(found[0], wanted)


@against("compensate")
def _(solution, rng):
    inputs, out = rng.randint(1, 12), rng.randint(1, 5)
    x, weights, value = inputs_of(rng, inputs), drawn(rng, out, inputs), drawn(rng, out)
    at = rng.randrange(inputs)
    wanted = calibrated.compensate(weights, at, value, x.T @ x)
    torch.testing.assert_close(solution(weights, at, value, x.T @ x), wanted, rtol=1e-6, atol=1e-6)


@against("gptq")
def _(solution, rng):
    size = rng.choice((2, 4, 8))
    inputs, out = size * rng.randint(1, 5), rng.randint(1, 6)
    x, weight = inputs_of(rng, inputs), drawn(rng, out, inputs)
    factor = torch.linalg.cholesky(torch.linalg.inv(x.T @ x), upper=True)
    codes, scales = solution(weight, factor, calibrated.Grid(size))
    wanted, wanted_scales = calibrated.engines_gptq(weight, factor, calibrated.Grid(size))
    assert codes.equal(wanted)
    torch.testing.assert_close(scales, wanted_scales)
