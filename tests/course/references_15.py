"""What lesson 15's solutions are compared with."""

import torch

from minillm.course.lesson_15 import adapting
from minillm.engine.adapters import LoadedAdapters
from minillm.ops import reference
from minillm.ops.signatures import LowRank
from minillm.request import RequestOptions
from tests.course.references import against


def drawn(rng, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)), dtype=torch.float64)


@against("low_rank")
def _(solution, rng):
    out, inputs = rng.randint(2, 20), rng.randint(2, 20)
    rank, change = rng.randint(1, min(out, inputs)), drawn(rng, out, inputs)
    (mine, my_up), (theirs, their_up) = (each(change, rank) for each in (solution, adapting.low_rank))
    torch.testing.assert_close(my_up @ mine, their_up @ theirs)


@against("numbers_read", cases=50)
def _(solution, rng):
    """Counted by going through a batch token by token."""
    out, inputs, rank = (rng.randint(1, 9) for _ in range(3))
    batch = [rng.choice((None, "a", "b", "c")) for _ in range(rng.randint(0, 6))]
    tokens = {name: batch.count(name) for name in {*batch, "unused"}}
    factors = rank * (out + inputs)
    matrix = out * inputs if batch else 0
    merged = len({*batch}) * out * inputs
    by_token = matrix + sum(factors for name in batch if name)
    assert tuple(solution(out, inputs, rank, tokens)) == (merged, by_token, matrix + len({*batch} - {None}) * factors)


@against("add_low_rank")
def _(solution, rng):
    tokens, inputs, rank, slots = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 6)
    ends = (rng.randint(1, 5), rng.randint(6, 9))
    x, out = drawn(rng, tokens, inputs), drawn(rng, tokens, ends[-1])
    factors = LowRank(drawn(rng, slots, 2 * rank, inputs), drawn(rng, slots, ends[-1], rank), ends)
    chosen = torch.tensor([rng.randrange(slots) for _ in range(tokens)])
    found = adapting.by_parts(solution)(out.clone(), x, chosen, factors)
    torch.testing.assert_close(found, reference.add_low_rank(out.clone(), x, chosen, factors))


@against("MyAdapters")
def _(solution, rng):
    """As the engine numbers them: two keys are equal where the engine's are."""
    mine, theirs, loaded, keys = solution(), LoadedAdapters([], {}), [], []
    for _ in range(40):
        if loaded and rng.random() < 0.4:
            name = loaded.pop(rng.randrange(len(loaded)))
            mine.unload(name)
            del theirs.by_name[name]
        elif free := [name for name in "abcd" if name not in loaded]:
            loaded.append(rng.choice(free))
            mine.load(loaded[-1])
            theirs.by_name[loaded[-1]] = theirs.reserve(loaded[-1])
        for name in (None, *loaded):
            salt = rng.choice(("", "ann", "1"))
            load = 0 if name is None else theirs.by_name[name]
            keys.append((mine.cache_key(salt, name), RequestOptions(cache_salt=salt, adapter=name).cache_key(load)))
    assert [[one[0] == other[0] for other in keys] for one in keys] == [
        [one[1] == other[1] for other in keys] for one in keys
    ]
