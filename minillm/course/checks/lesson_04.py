"""Online softmax, the tiles of a causal prefill, decode attention over pages, split keys.  Lesson 04."""

import weakref

import torch
from torch import Tensor

from minillm.kv_cache.storage import LayerCache

from ..interpret import kernel_device
from . import Exercise

DIM = 16


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _near(got: Tensor, want: Tensor, tolerance: float = 1e-6) -> bool:
    assert got.shape == want.shape, f"the shape is {list(got.shape)}, not {list(want.shape)}"
    return torch.allclose(got.double().cpu(), want.double().cpu(), rtol=0, atol=tolerance)


# ---- attention over keys that come by in tiles

online_attention = Exercise("online_attention")

HIDDEN = -torch.inf


def _tile(scores: float, values: float, keys: int = 2, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Keys that all have these scores and values."""
    return torch.full((rows, keys), scores, dtype=torch.float64), torch.full((keys, 1), values, dtype=torch.float64)


def _of_tiles(function, *tiles: tuple[Tensor, Tensor]) -> Tensor:
    """[rows, d] of tiles that can be looked at once, one after the other."""
    rows, dim = len(tiles[0][0]), tiles[0][1].shape[1]
    got = function(iter(tiles), rows, dim)
    assert list(got.shape) == [rows, dim], f"the shape is {list(got.shape)}, not {[rows, dim]}"
    return got


@online_attention.example
def _(function):
    scores, values = _random(3, 5), _random(5, DIM, seed=1)
    assert _near(_of_tiles(function, (scores, values)), scores.softmax(-1) @ values), "one tile: the plain softmax"


@online_attention.property(
    "the sum is rescaled when the maximum grows",
    hint="when the maximum grows by d, what was summed up before is worth exp(-d) of it: multiply the total by that",
)
def _(function):
    got = _of_tiles(function, _tile(0, 0.0), _tile(20, 1.0)).item()
    assert got > 0.99, f"keys with score 0 and value 0, then with score 20 and value 1, gave {got:.3f}, not 1"


@online_attention.property(
    "the output is rescaled when the maximum grows",
    hint="the output so far is a sum with the old maximum in it: multiply it by exp(old maximum - new), as the total",
)
def _(function):
    got = _of_tiles(function, _tile(0, 1.0), _tile(20, 0.0)).item()
    assert got < 0.01, f"keys with score 0 and value 1, then with score 20 and value 0, gave {got:.3f}, not 0"


@online_attention.property(
    "the maximum never falls",
    hint="keep the larger of the old maximum and the tile's own: with scores of 1000 and then 0, exp(1000 - 0) is inf",
)
def _(function):
    got = _of_tiles(function, _tile(1000, 1.0), _tile(0, 2.0))
    assert got.isfinite().all(), f"scores of 1000, then of 0, gave {got.item()}"


@online_attention.property(
    "keys that no query sees do not count",
    hint="a row that has seen no key yet has maximum -inf, and -inf - -inf is nan: subtract 0 there; and no total is 0 "
    "when you divide",
)
def _(function):
    scores = torch.tensor([[HIDDEN, HIDDEN], [0.0, HIDDEN]], dtype=torch.float64)
    first, then = (scores, torch.tensor([[3.0], [7.0]]).double()), _tile(0.0, 5.0, keys=1, rows=2)
    got = _of_tiles(function, first, then)[:, 0].tolist()
    assert _near(torch.tensor(got), torch.tensor([5.0, 4.0])), f"a hidden first tile, then values of 5, gave {got[0]}"
    nothing = _of_tiles(function, _tile(HIDDEN, 3.0)).item()
    assert nothing == 0, f"a row that sees no key gave {nothing}, not 0"


@online_attention.property(
    "division comes once, at the end",
    hint="the sum of the weights is known when the last tile is through: divide after the loop",
)
def _(function):
    got = _of_tiles(function, _tile(0, 2.0), _tile(0, 4.0)).item()
    assert abs(got - 3) < 1e-6, f"two tiles of equal scores with values of 2 and of 4 gave {got:.3f}, not 3"


@online_attention.property(
    "no tile is kept",
    hint="let a tile's scores and values go before you ask for the next: maximum, total and output are all you need",
)
def _(function):
    known: list[weakref.ref[Tensor]] = []
    most = 0

    def tiles():
        nonlocal most
        for number in range(6):
            most = max(most, sum(tile() is not None for tile in known))
            made = [_tile(float(number), 1.0)]
            known.append(weakref.ref(made[0][0]))
            yield made.pop()  # only the caller has it now

    function(tiles(), 1, 1)
    assert most <= 2, f"when the last of six tiles was asked for, {most} earlier ones were still there"


# ---- which key tiles a tile of queries needs

tiles_to_visit = Exercise("tiles_to_visit")


def _visited(function, *given, **options) -> set[int]:
    return set(function(*given, **options))


def _needed(first: int, last: int, keys: int, window: int | None) -> set[int]:
    """By trying every pair of a query and a key."""
    seen = ((q, k) for q in range(first, last + 1) for k in range(q + 1) if not window or k > q - window)
    return {key // keys for _, key in seen}


SPANS = [(0, 15), (16, 31), (48, 55), (5, 5), (16, 16), (30, 40)]


@tiles_to_visit.example
def _(function):
    got = _visited(function, 0, 5, 8)
    assert got == {0}, f"queries 0 to 5 see keys 0 to 5, which lie in tile 0 of 8 keys; you visit {sorted(got)}"


@tiles_to_visit.property(
    "the tile with the last query's own key is visited",
    hint="the last query sees its own key too: a range ends before its second number",
)
def _(function):
    for first, last in SPANS:
        missed = {last // 8} - _visited(function, first, last, 8)
        assert not missed, f"queries {first} to {last}, tiles of 8 keys: tile {missed} is left out"


@tiles_to_visit.property(
    "no tile after the last query is visited", hint="no query here sees keys later than `last`: stop before them"
)
def _(function):
    for first, last in SPANS:
        more = {tile for tile in _visited(function, first, last, 8) if tile > last // 8}
        assert not more, f"queries {first} to {last}, tiles of 8 keys: no query sees any key of tile {max(more)}"


@tiles_to_visit.property(
    "no key that a window shows is missed",
    hint="the first query's window begins earliest, at first - window + 1: that key's tile is where to begin",
)
def _(function):
    for first, last in SPANS:
        for window in (1, 4, 8, 20):
            missed = _needed(first, last, 8, window) - _visited(function, first, last, 8, window=window) - {last // 8}
            assert not missed, f"queries {first} to {last}, a window of {window}: tile {min(missed)} is left out"


@tiles_to_visit.property(
    "nothing before every window is visited",
    hint="with a window the query at position p sees keys p - window + 1 to p; earlier tiles can be skipped",
)
def _(function):
    for first, last in SPANS:
        for window in (1, 4, 8, 20):
            least = min(_needed(first, last, 8, window))
            more = {tile for tile in _visited(function, first, last, 8, window=window) if 0 <= tile < least}
            assert not more, f"queries {first} to {last}, a window of {window}: no query sees keys of tile {max(more)}"


@tiles_to_visit.property(
    "there are no keys before position 0", hint="a window may reach back beyond the beginning: begin at tile 0 then"
)
def _(function):
    for window in (20, 100):
        less = {tile for tile in _visited(function, 0, 15, 8, window=window) if tile < 0}
        assert not less, f"queries 0 to 15, a window of {window}: tile {min(less)} does not exist"


# ---- decode attention over a paged cache

paged_decode = Exercise("paged_decode")

SIZE = 16  # slots of a block
BLOCKS = 64  # of a cache; those in the middle are used, so that a wrong address is still inside the memory


def _cache(kv_heads: int = 1) -> LayerCache:
    shape = (BLOCKS, SIZE, kv_heads, DIM)
    return LayerCache(*(_random(*shape, seed=seed).float().to(kernel_device()) for seed in (1, 2)))


def _run(function, cache: LayerCache, blocks: list[int], length: int, q: Tensor | None = None, **options) -> Tensor:
    """[heads, d] of one query a row; two rows: a short one in block 9, then one of `length` tokens in `blocks`."""
    if q is None:
        q = _random(1, 2 * cache.k.shape[2], DIM, seed=9).float()
    table = torch.zeros(2, len(blocks) + 8, dtype=torch.int32)
    table[0, 0], table[1, : len(blocks)] = 9, torch.tensor(blocks)
    lengths = torch.tensor([3, length], dtype=torch.int32)
    given = (each.to(kernel_device()) for each in (table, lengths))
    return function(q.expand(2, *q.shape).to(kernel_device()), cache, *given, **{"scale": 0.25} | options)[1, 0]


@paged_decode.example
def _(function):
    # Two full blocks of keys whose values are all 7: whatever the weights are, both heads get 7.
    cache = _cache()
    cache.v[:] = 7.0
    got = _run(function, cache, [40, 41], 32)
    assert _near(got, torch.full((2, DIM), 7.0), 1e-3), f"32 keys, all values 7, gave {got.flatten()[0].item():.3f}"


@paged_decode.property(
    "a key's offset is counted inside its block",
    hint="key j is at offset j % BLOCK_SIZE of its block: the offset of key 16 is 0 again",
)
def _(function):
    cache = _cache()
    before = _run(function, cache, [40, 50], 32)
    cache.k[51], cache.v[51] = 3.0, 1e4
    assert _near(_run(function, cache, [40, 50], 32), before, 1e-3), (
        "keys 16 to 31 lie in block 50, and the result changes with what is in block 51"
    )


@paged_decode.property(
    "a tile of keys may lie in several blocks",
    hint="look up every key's block, at table_ptr + keys // BLOCK_SIZE: blocks that are neighbours in the table lie "
    "anywhere in memory",
)
def _(function):
    cache = _cache()
    before = _run(function, cache, [40, 50], 32)
    cache.k[41], cache.v[41] = 3.0, 1e4
    assert _near(_run(function, cache, [40, 50], 32), before, 1e-3), (
        "keys 0 to 15 lie in block 40, 16 to 31 in block 50, and the result changes with what is in block 41"
    )
    cache.v[50:52] += 100.0
    moved = (_run(function, cache, [40, 50], 32) - before).abs().max()
    assert moved > 1, "keys 16 to 31 lie in block 50, and the result does not change with their values"


@paged_decode.property(
    "slots beyond the length do not matter",
    hint="keys from `length` on: do not load them, and set their scores to -inf, or each has a weight of exp(0)",
)
def _(function):
    cache = _cache()
    before = _run(function, cache, [40, 50], 20)
    cache.k[50:52, 4:], cache.v[50:52, 4:] = 3.0, 1e4
    assert _near(_run(function, cache, [40, 50], 20), before, 1e-3), "with 20 keys, slot 21 changes the result"
    cache.v[:] = 1.0
    got = _run(function, cache, [40, 50], 20)
    assert _near(got, torch.ones(2, DIM), 1e-3), f"20 keys, all values 1, gave {got.flatten()[0].item():.3f}"


@paged_decode.property(
    "every KV head is read",
    hint="a slot holds kv_heads keys, head_stride apart: kv_head * head_stride belongs to the address",
)
def _(function):
    cache = _cache(kv_heads=2)
    cache.v[:, :, 0], cache.v[:, :, 1] = 1.0, 2.0
    got = _run(function, cache, [40, 50], 32)[:, 0]
    heads = [round(value, 3) for value in got.tolist()]
    assert heads == [1, 1, 2, 2], f"KV heads with values 1 and 2 gave heads with {heads}, not [1, 1, 2, 2]"


@paged_decode.property("scores are multiplied by the scale", hint="q · k times `scale`, before the maximum is taken")
def _(function):
    cache, q = _cache(), _random(1, 2, DIM, seed=9).float()
    got = _run(function, cache, [40, 50], 32, q, scale=0.125)
    return _near(got, _run(function, cache, [40, 50], 32, q * 0.125, scale=1.0), 1e-3)


@paged_decode.property(
    "the sum and the output are rescaled from tile to tile",
    hint="as in online_attention: exp(old maximum - new maximum) times both, before the tile's own part is added",
)
def _(function):
    cache, q = _cache(), torch.zeros(1, 2, DIM)
    q[..., 0] = 1.0
    blocks = [12, 13, 14, 40, 41, 42]
    cache.k[:] = 0.0
    cache.k[30:] = 20.0
    cache.v[:] = 1.0
    ones = _run(function, cache, blocks, 96, q, scale=1.0)
    assert _near(ones, torch.ones(2, DIM), 1e-3), f"96 keys, all values 1, gave {ones.flatten()[0].item():.3f}"
    cache.v[:30] = 0.0
    late = _run(function, cache, blocks, 96, q, scale=1.0).flatten()[0].item()
    assert late > 0.99, f"48 keys with score 0 and value 0, then 48 with score 20 and value 1, gave {late:.3f}, not 1"


# ---- one output from the parts

combine = Exercise("combine")


def _parts(log_totals: list[float], values: list[float]) -> tuple[Tensor, Tensor]:
    """Of one head: an output [shares, 1] and the logarithm of its weights' sum [shares], share by share."""
    return torch.tensor(values, dtype=torch.float64)[:, None], torch.tensor(log_totals, dtype=torch.float64)


def _combined(function, log_totals: list[float], values: list[float]) -> float:
    got = function(*_parts(log_totals, values))
    assert list(got.shape) == [1], f"the shape is {list(got.shape)}, not [1]"
    return got.item()


@combine.example
def _(function):
    got = function(_random(2, 3, 1, DIM), _random(2, 3, 1, seed=1))
    assert _near(got, _random(2, 3, 1, DIM)[:, :, 0]), "one share alone is the whole output"


@combine.property(
    "a share counts by the sum of its weights",
    hint="a share's weights sum to exp(log_total): that is what it counts, not 1, and not log_total itself",
)
def _(function):
    # In units of the first share, so that what all of them sum to does not matter.
    parts = [_combined(function, [0.0, 1.0, 2.0], [float(i == j) for i in range(3)]) for j in range(3)]
    ratios = [part / parts[0] for part in parts] if parts[0] else [0.0]
    want = [1.0, torch.e, torch.e**2]
    got = [round(ratio, 3) for ratio in ratios]
    assert _near(torch.tensor(ratios), torch.tensor(want), 1e-3), (
        f"log totals 0, 1 and 2 count as {got}, not 1 : e : e²"
    )


@combine.property("what the shares count adds up to 1", hint="divide by the sum of exp(log_total) over the shares")
def _(function):
    got = _combined(function, [0.5, 1.5], [1.0, 1.0])
    assert abs(got - 1) < 1e-6, f"two shares that both say 1 gave {got:.3f}"


@combine.property(
    "large logarithms do not overflow",
    hint="exp(1000) is inf: subtract the largest log_total of the shares first, as any softmax does",
)
def _(function):
    got = function(*_parts([1000.0, 999.0], [1.0, 3.0]))
    assert got.isfinite().all(), f"shares with log totals of 1000 and 999 gave {got.item()}"


@combine.property(
    "an empty share counts nothing",
    hint="a share without keys has log_total -inf, and exp(-inf) is 0: do not turn it into a number",
)
def _(function):
    got = _combined(function, [0.0, -torch.inf], [1.0, 1000.0])
    assert abs(got - 1) < 1e-6, f"a share that says 1, and an empty one that has 1000 in it, gave {got:.3f}"


@combine.property(
    "a row without keys gives zeros",
    hint="padding rows have length 0: every log_total is -inf, and -inf - -inf is nan; what would you divide by?",
)
def _(function):
    got = function(*_parts([-torch.inf, -torch.inf], [0.0, 0.0]))
    assert (got == 0).all(), f"two empty shares gave {got.item()}"
