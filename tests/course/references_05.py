"""Lesson 05's references: each solution compared with the engine's own formats."""

import torch
from torch import Tensor

from minillm.ops import reference
from minillm.quantization import Int4, int4, int8
from tests.course.references import against


def drawn(rng, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)), dtype=dtype)


def weight_of(rng, inputs: int) -> Tensor:
    """Rows of different sizes, one of which may be all zeros."""
    weight = drawn(rng, rng.randint(1, 6), inputs, dtype=rng.choice((torch.float32, torch.float64)))
    weight[rng.randrange(len(weight))] *= rng.choice((0.0, 0.01, 1.0, 100.0))
    return weight + rng.choice((0.0, 0.5))


@against("quantize_rows")
def _(solution, rng):
    weight = weight_of(rng, rng.randint(1, 40))
    codes, scales = solution(weight.clone(), 8)
    wanted = int8.quantize(weight)
    assert torch.equal(codes, wanted.codes) and torch.equal(scales, wanted.scales)


@against("quantize_groups")
def _(solution, rng):
    size, groups = 2 * rng.randint(1, 16), rng.randint(1, 5)
    weight = weight_of(rng, size * groups)
    grouped = weight.view(len(weight), groups, size)
    scales, zeros = int4.scales_of(grouped, Int4(size, symmetric=False))
    assert zeros is not None
    wanted = int4.round_to_int4(grouped, scales, zeros).view_as(weight), scales, zeros
    assert all(torch.equal(got, want) for got, want in zip(solution(weight.clone(), size), wanted, strict=True))


@against("pack_codes")
def _(solution, rng):
    codes = torch.tensor([rng.choices(range(-8, 8), k=2 * rng.randint(1, 20))], dtype=torch.int8).repeat(3, 1)
    assert torch.equal(solution(codes), int4.pack(codes))


@against("packed_linear")
def _(solution, rng):
    size, groups, dtype = 2 * rng.randint(1, 16), rng.randint(1, 5), rng.choice((torch.float32, torch.float64))
    format = Int4(size, symmetric=False)
    weight = format.empty(rng.randint(1, 20), size * groups, False, dtype=dtype, device=torch.device("cpu"))
    weight.load("weight", range(weight.shape[0]), iter([drawn(rng, *weight.shape, dtype=dtype) + 0.3]))
    x = drawn(rng, rng.randint(1, 9), size * groups, dtype=dtype)
    torch.testing.assert_close(solution(x, weight.packed, weight.scales, weight.zeros), reference.linear(x, weight))
