"""Lesson 08's references: each solution compared with the engine's own."""

import itertools

import torch

from minillm.course.lesson_08 import choices, four_bits
from minillm.kv_cache.layer_cache import LayerCache, quantize
from minillm.ops import AttentionOptions, Rows, reference
from minillm.quantization import Mxfp4, Nvfp4, fp4
from minillm.quantization.methods import straight_through
from tests.course.references import against


def drawn(rng, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)), dtype=torch.float64)


@against("quantize_kv")
def _(solution, rng):
    x = drawn(rng, rng.randint(1, 5), rng.randint(1, 3), rng.choice((8, 64))) * 10 ** rng.uniform(-4, 4)
    x[rng.randrange(len(x)), 0] = 0
    for given in (x.float(), x.bfloat16()):
        for dtype in (torch.int8, torch.float8_e4m3fn):
            (codes, scales), (wanted, wanted_scales) = solution(given, dtype), quantize(given, dtype)
            assert torch.equal(codes.float(), wanted.float()) and torch.equal(scales, wanted_scales)


@against("attend_codes")
def _(solution, rng):
    """Of one request whose cache is one block."""
    keys, queries, group, dim = rng.randint(1, 20), 1, rng.randint(1, 4), 8
    k, v = (drawn(rng, keys, 1, dim).float() for _ in "kv")
    dtype = rng.choice((torch.int8, torch.float8_e4m3fn))
    (k_codes, k_scales), (v_codes, v_scales) = quantize(k, dtype), quantize(v, dtype)
    q = drawn(rng, queries, group, dim).float()
    cache = LayerCache(k_codes[None], v_codes[None], k_scales[None], v_scales[None])
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)
    wanted = reference.decode_attention(q[None], cache, Rows.decoding(table, length), AttentionOptions(0.3))[0, 0]
    hidden = torch.zeros(group, keys, dtype=torch.bool)
    given = q[0], k_codes[:, 0], k_scales[:, 0], v_codes[:, 0], v_scales[:, 0], hidden, 0.3
    torch.testing.assert_close(solution(*given), wanted)


@against("quantize_fp4")
def _(solution, rng):
    weight = drawn(rng, rng.randint(1, 5), 64).float() * 10 ** rng.uniform(-3, 1)
    for format, round_scales in ((Nvfp4(), four_bits.to_e4m3), (Mxfp4(), four_bits.to_power_of_two)):
        wanted = fp4.quantize(weight, format).dequantize()
        for function in (solution, four_bits.quantize_fp4):
            values, scales = function(weight, format.group_size, round_scales)
            found = (values.unflatten(1, (-1, format.group_size)) * scales[..., None]).flatten(1)
            off = (found - wanted).abs() > 1e-5 * wanted.abs().max()
            assert off.double().mean() < 0.02  # quotients near a tie: the two divide in another order


@against("fake_quantize")
def _(solution, rng):
    bits, size = rng.randint(2, 8), rng.choice((4, 16, 32))
    weight = drawn(rng, rng.randint(1, 5), 32).requires_grad_()
    found, wanted = solution(weight, bits, size), straight_through.fake_quantize(weight, bits, size)
    torch.testing.assert_close(found, wanted)
    upstream = drawn(rng, *weight.shape)
    mine, theirs = (torch.autograd.grad(each, weight, upstream)[0] for each in (found, wanted))
    torch.testing.assert_close(mine, theirs)


@against("pareto_front", cases=200)
def _(solution, rng):
    count = rng.randint(1, 3)
    every = list(itertools.product(range(4), repeat=count))
    points = {f"p{number}": rng.choice(every) for number in range(rng.randint(0, 9))}
    # By definition: no other point is at most as large in all numbers and smaller in their sum.
    wanted = [
        name
        for name, mine in points.items()
        if not any(
            sum(other) < sum(mine) and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in points.values()
        )
    ]  # fmt: skip
    assert solution(points) == wanted == choices.pareto_front(points)
