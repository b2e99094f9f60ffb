"""What lesson 14's solutions are compared with."""

import torch

from minillm.course.lesson_14 import dividing
from minillm.course.lesson_14.ranks import together
from minillm.model import modules, parallel
from minillm.model.modules import Module
from tests.course.references import against


@against("shard", cases=100)
def _(solution, rng):
    name = rng.choice(("q_proj", "v_proj", "o_proj", "down_proj", "lm_head"))
    parts, size = rng.choice((1, 2, 4)), rng.choice((4, 8))
    by_inputs = name in dividing.BY_COLUMNS
    parts = 8 * parts if by_inputs or name == "lm_head" else parts
    out, inputs = (10, 8 * parts) if by_inputs else (8 * parts, 10)
    module = Module(name, range(out), inputs, parts, by_inputs)
    for rank in range(size):
        assert tuple(solution(name, out, inputs, parts, rank, size)) == tuple(modules.shard(module, rank, size))


@against("all_reduce", cases=30)
def _(solution, rng):
    size, dtype = rng.randint(1, 5), rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    parts = [torch.randn(7, 5, generator=generator).to(dtype) for _ in range(size)]
    mine, theirs = (together(each, parts).results for each in (solution, parallel.all_reduce))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@against("sharded_argmax", cases=30)
def _(solution, rng):
    size, rows = rng.randint(1, 5), rng.randint(1, 4)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    shards = torch.randn(rows, 6 * size, generator=generator).round(decimals=rng.randint(0, 2)).chunk(size, -1)
    mine, theirs = (together(each, shards).results for each in (solution, parallel.sharded_argmax))
    for (value, token), (wanted, first) in zip(mine, theirs, strict=True):
        assert torch.equal(token, first) and torch.equal(value.double(), wanted)


@against("timeline", cases=50)
def _(solution, rng):
    stage_ms = [rng.randint(1, 8) / 4 for _ in range(rng.randint(1, 4))]
    batches, steps = rng.randint(1, 4), rng.randint(1, 3)
    assert solution(stage_ms, batches, steps) == dividing.timeline(stage_ms, batches, steps)
