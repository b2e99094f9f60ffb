"""Online softmax, the tiles of a causal prefill, split keys.  Lesson 04."""

import time

import torch

from ..shared.checks import Exercise, a_type
from ..shared.differences import assert_near
from . import paged_rows as paged
from .attention_cases import cases, combined, gives, growing, of_tiles, tile, visited_tiles, weights
from .paged_rows import DIM, near, normal

# ---- attention over keys that come in tiles

SECONDS = 20.0  # a tenth of a second is enough

online_attention = Exercise("online_attention", seconds=SECONDS)

HIDDEN = -torch.inf
TILES = 40  # in the check that none is kept


@online_attention.example
def _(function):
    scores, values = normal(3, 5), normal(5, DIM, seed=1)
    got, want = of_tiles(function, (scores, values)), scores.softmax(-1) @ values
    near(got, want, "one tile of 5 keys")


@online_attention.property(
    "the sum is rescaled when the maximum grows",
    hint="when the maximum grows by d, everything summed so far is worth exp(-d) of what it was: multiply the sum by "
    "that",
)
def _(function):
    for score in (20, 1000):
        what = f"keys with score 0 and value 0, then keys with score {score} and value 1,"
        gives(function, [1.0], what, tile(0, 0.0), tile(score, 1.0))
    what = "a key with score 0 and value 0, then scores 1000 and 1001 with values 0 and 1,"
    last = torch.tensor([[1000.0, 1001.0]]).double(), torch.tensor([[0.0], [1.0]]).double()
    gives(function, [1 / (1 + torch.e**-1)], what, tile(0, 0.0, keys=1), last)
    # Only the last tile has values, so nothing depends on how the output before it is rescaled.
    tiles = [(scores, torch.full((3, 1), float(at == 2)).double()) for at, scores in enumerate(growing())]
    want = torch.cat(growing(), 1).softmax(-1)[:, -3:].sum(-1).tolist()
    gives(function, want, "three tiles whose largest scores grow a little, with values 0, 0 and 1,", *tiles)


@online_attention.property(
    "the output is rescaled when the maximum grows",
    hint="the output so far was computed with the old maximum: multiply it by exp(old maximum - new), like the sum",
)
def _(function):
    what = "keys with score 0 and value 1, then keys with score 20 and value 0,"
    gives(function, [0.0], what, tile(0, 1.0), tile(20, 0.0))
    # With a second column of ones, the quotient does not depend on the sum; a single first key has the weight 1.
    tiles = [(growing()[0][:, :1], normal(1, 1, seed=5) + 2), (growing()[1], normal(3, 1, seed=6) - 2)]
    want = torch.cat([scores for scores, _ in tiles], 1).softmax(-1) @ torch.cat([v for _, v in tiles])
    got = of_tiles(function, *((scores, torch.cat([v, torch.ones_like(v)], 1)) for scores, v in tiles))
    mine = got[:, :1] / got[:, 1:]
    near(mine, want, "the largest score grows a little from one tile to the next")


@online_attention.property(
    "the maximum never decreases",
    hint="keep the larger of the old maximum and the tile's own: otherwise old terms are multiplied by exp(0 - -1000). "
    "A hidden tile changes neither the maximum nor the sum nor the output",
)
def _(function):
    what = "a key with score 0 and value 1, then one with score -1000 and value 2,"
    gives(function, [1.0], what, tile(0, 1.0, keys=1), tile(-1000, 2.0, keys=1))
    gives(
        function, [1.0], "a key with score 3 and value 1, then a hidden tile,", tile(3, 1.0, keys=1), tile(HIDDEN, 3.0)
    )
    what = "two keys with score 3 and value 0, then a hidden tile, then two with score 3 and value 1,"
    gives(function, [0.5], what, tile(3, 0.0), tile(HIDDEN, 3.0), tile(3, 1.0))


@online_attention.property(
    "scores of any size give exact weights",
    hint="exp(1000) is inf, and exp(-1000) is 0: subtract the maximum so far from the scores before exp, even if it is "
    "negative",
)
def _(function):
    values = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for size in (1000, -1000, 10**6, -(10**6)):
        scores = torch.tensor([[size, size + 1.0]], dtype=torch.float64)
        what = f"scores of {size} and {size + 1} with values 0 and 1"
        gives(function, [1 / (1 + torch.e**-1)], what, (scores, values))
    scores, values = 5 * normal(3, 1000, seed=3), normal(1000, 2, seed=4)
    got, want = of_tiles(function, (scores, values)), scores.softmax(-1) @ values
    near(got, want, "one tile of 1,000 keys")


@online_attention.property(
    "the precision is that of the tiles",
    hint="scores.new_zeros(...) and scores.new_full(...) make tensors with the dtype of the scores",
)
def _(function):
    scores, values = 5 * normal(3, 40, seed=3), normal(40, 2, seed=4)
    off = (of_tiles(function, (scores, values)) - scores.softmax(-1) @ values).abs().max().item()
    assert off < 1e-9, f"a tile in float64 gave a result that is off by {off:.1g}: is any step in float32, or rounded?"
    dtype = of_tiles(function, (scores.float(), values.float())).dtype
    assert dtype == torch.float32, f"a tile in float32 gave a result in {dtype}"


@online_attention.property(
    "every row has its own maximum",
    hint="take the maximum over the last axis only, with keepdim=True: one number per row",
)
def _(function):
    scores = torch.tensor([[600.0, 600.0], [0.0, 0.0], [-600.0, -600.0]], dtype=torch.float64)
    tile = scores, torch.tensor([[1.0], [3.0]]).double()
    gives(function, [2.0] * 3, "rows with scores of 600, 0 and -600, and values 1 and 3", tile)


@online_attention.property(
    "hidden keys have no weight",
    hint="a row that has seen no key yet has maximum -inf, and -inf - -inf is nan: subtract 0 there. If the sum is 0 "
    "at the end, divide by 1",
)
def _(function):
    scores = torch.tensor([[HIDDEN, HIDDEN], [0.0, HIDDEN]], dtype=torch.float64)
    first, then = (scores, torch.tensor([[3.0], [7.0]]).double()), tile(0.0, 5.0, keys=1, rows=2)
    what = "a first tile that is hidden (from row 1 in part), then a key with value 5,"
    gives(function, [5.0, 4.0], what, first, then)
    what = "keys with value 0, then a hidden tile, then keys with value 0,"
    gives(function, [0.0], what, tile(0, 0.0), tile(HIDDEN, 3.0), tile(0, 0.0))
    gives(function, [5.0], "a hidden tile, then a key with score -1000", tile(HIDDEN, 3.0), tile(-1000, 5.0))
    gives(function, [0.0], "a row that sees no key", tile(HIDDEN, 3.0))
    part = torch.tensor([[0.0, 0.0], [HIDDEN, HIDDEN]], dtype=torch.float64)
    then = part, torch.ones(2, 1, dtype=torch.float64)
    gives(function, [1.0, 0.0], "two keys with value 1, which row 1 does not see,", then)
    what = "two keys with value 0, then two with value 1, which row 1 does not see,"
    gives(function, [0.5, 0.0], what, tile(0, 0.0, rows=2), then)


@online_attention.property(
    "the output is divided once, at the end",
    hint="the sum of the weights is known only after the last tile: divide after the loop",
)
def _(function):
    what = "three keys with value 2, then one with value 4, all with the same score,"
    gives(function, [2.5], what, tile(0, 2.0, keys=3), tile(0, 4.0, keys=1))
    what = "a hundred tiles of one key with value 0, then a hundred with value 1, all with the same score,"
    gives(function, [0.5], what, *(tile(0, value, keys=1) for value in (0.0, 1.0) for _ in range(100)))


@online_attention.property(
    "no tile is kept",
    hint="use a tile's scores and values before you ask for the next tile, and keep only the maximum, the sum and the "
    "output",
)
def _(function):
    left = paged.left_in_memory(lambda tiles: function(tiles, 1, 1), lambda: tile(0.0, 1.0, keys=1024), TILES)
    # Scores, values, weights and such of the tile before are still bound to names; other threads allocate as well.
    assert left < 1024 * TILES / 2, f"after {TILES - 1} tiles of 1,024 keys, {left:,} numbers were left in memory"
    left = paged.left_in_memory(lambda tiles: function(tiles, 64, 64), lambda: (normal(64, 2), normal(2, 64)), TILES)
    assert left < 64 * 64 * TILES / 2, f"after {TILES - 1} tiles, {left:,} numbers were left: one output is enough"


@online_attention.property(
    "the tiles are not changed",
    hint="an operation whose name ends in `_`, or `-=`, changes the caller's tensor: write `scores = scores - ...`",
)
def _(function):
    scores, values = normal(2, 4), normal(4, 3, seed=1)
    given = [(scores.clone(), values.clone()), (scores.clone(), values.clone())]
    first = of_tiles(function, *given)
    assert all(torch.equal(tile[0], scores) for tile in given), "the scores of a tile changed"
    assert all(torch.equal(tile[1], values) for tile in given), "the values of a tile changed"
    before = first.clone()
    of_tiles(function, (scores, -values))
    assert torch.equal(first, before), "a second call changed the result of the first"


# ---- which key tiles a tile of queries needs

tiles_to_visit = Exercise("tiles_to_visit", instead="the specification", seconds=SECONDS)


@tiles_to_visit.example
def _(function):
    got = sorted(visited_tiles(function, 0, 5, 8))
    assert got == [0], f"queries 0 to 5 see keys 0 to 5, all in tile 0 of 8 keys: expected [0], got {got}"


@tiles_to_visit.property(
    "the tile with the last query's own key is visited",
    hint="the last query sees its own key too, and a range excludes its end",
)
def _(function):
    for what, end, _, visited in cases(function, None):
        assert end in visited, f"{what}: tile {end} is left out"


@tiles_to_visit.property(
    "no tile after the last query is visited", hint="no query here sees a key after `last`: stop with that key's tile"
)
def _(function):
    for what, end, _, visited in cases(function, None):
        assert max(visited, default=0) <= end, f"{what}: no query sees any key of tile {max(visited)}"


@tiles_to_visit.property(
    "without a window the walk begins at tile 0",
    hint="causal attention hides only later keys: without a window every query sees key 0",
)
def _(function):
    for first in (8000, 2_000_000):
        what = f"queries {first:,} to {first + 3:,}, tiles of 16 keys"
        assert 0 in visited_tiles(function, first, first + 3, 16), f"{what}: tile 0 is left out"
    for what, end, needed, visited in cases(function, None):
        assert not (missed := needed - visited - {end}), f"{what}: tile {min(missed)} is left out"


@tiles_to_visit.property(
    "every key inside a window is visited",
    hint="the first query's window begins earliest: begin with the tile of its earliest key",
)
def _(function):
    for what, end, needed, visited in cases(function, 1, 4, 8, 20):
        assert not (missed := needed - visited - {end}), f"{what}: tile {min(missed)} is left out"


@tiles_to_visit.property(
    "no tile before every window is visited",
    hint="which is the earliest key that the first query's window contains? Count the query's own key too",
)
def _(function):
    for what, _, needed, visited in cases(function, 1, 4, 8, 20):
        more = {tile for tile in visited if 0 <= tile < min(needed)}
        assert not more, f"{what}: no query sees any key of tile {max(more)}"


@tiles_to_visit.property(
    "no tile before tile 0 is visited", hint="a window can begin before position 0, where there are no keys"
)
def _(function):
    for what, _, _, visited in cases(function, 20, 100):
        assert min(visited, default=0) >= 0, f"{what}: tile {min(visited)} does not exist"


@tiles_to_visit.property(
    "the range is computed, at any position",
    hint="two divisions are enough: the range needs only the first tile and the last, at position 10,000,003 as at 3",
)
def _(function):
    for window in (None, 1000):
        what = "query 10,000,003, tiles of 3 keys" + (f", a window of {window}" if window else "")
        begin = time.thread_time()
        got = function(10_000_003, 10_000_003, 3, **({"window": window} if window else {}))
        assert isinstance(got, range), f"return a range, not {a_type(got)}"
        seconds = time.thread_time() - begin  # a busy machine changes nothing
        assert got[-1:] == range(3_333_334, 3_333_335), f"{what}: the last tile is 3333334, not {list(got[-1:])}"
        assert seconds < 0.02, f"{what}: that took {seconds:.2f} seconds"


# ---- one output from the parts

combine = Exercise("combine", seconds=SECONDS)


@combine.example
def _(function):
    got, want = function(normal(2, 3, 1, DIM), normal(2, 3, 1, seed=1)), normal(2, 3, 1, DIM)[:, :, 0]
    near(got, want, "a single share is the whole output")


@combine.property(
    "a share counts by the sum of its weights",
    hint="a share's weights sum to exp(log_total): weigh its output by that",
)
def _(function):
    logs = torch.tensor([0.0, 1.0, 2.0]).double()
    near(weights(function, logs), logs.softmax(-1), "weights of log totals 0, 1 and 2, in proportion 1 to e to e²")
    logs = normal(2, 3, 4, seed=2)
    near(weights(function, logs), logs.softmax(-1), "weights of several rows and heads")
    logs = normal(2, 100, seed=3)
    off = (weights(function, logs) - logs.softmax(-1)).abs().max().item()
    assert off < 1e-5, "with 100 shares, the weights are wrong"
    assert off < 1e-9, f"shares in float64: the weights are off by {off:.1g}: is any step in float32, or rounded?"


@combine.property(
    "the weights add up to 1", hint="divide by the sum of exp(log_total) over the shares, as the formula says"
)
def _(function):
    got = combined(function, [0.5, 1.5], [1.0, 1.0])
    assert_near(got, 1, "two shares, each with an output of 1", absolute=1e-6)


@combine.property(
    "logarithms of any size give exact weights",
    hint="exp(1000) is inf: subtract each row's largest log_total from its shares first, as any softmax does",
)
def _(function):
    for size in (1000.0, -1000.0, 1e6, -1e6):
        got = weights(function, torch.tensor([size, size - 40]).double())
        near(got, torch.tensor([1.0, 0.0]), f"weights of log totals {size:.0f} and {size - 40:.0f}")
    got = weights(function, torch.tensor([[1000.0, 1000.0], [-1000.0, -1000.0]]).double())
    near(got, torch.full((2, 2), 0.5), "weights in a row with log totals of 1000, and in another with -1000")
    for logs in ([0.0, 1e4], [1e4, 0.0], [1e4, -torch.inf], [-torch.inf, 1e4]):
        one = combined(function, logs, [float(each == 1e4) for each in logs])
        assert_near(one, 1, f"log totals {logs}, outputs 1 (of the share with 10000) and 0", absolute=1e-6)


@combine.property(
    "an empty share has no weight",
    hint="a share without keys has log_total -inf, and exp(-inf) is 0: do not replace it by a number",
)
def _(function):
    for logs, values in (([0.0, -torch.inf], [1.0, 1000.0]), ([-torch.inf, 0.0], [1000.0, 1.0])):
        got = combined(function, logs, values)
        assert_near(got, 1, "a share with output 1 and an empty one, whose output is 1000", absolute=1e-6)
    for size in (-1000.0, -1e6):
        got = combined(function, [size, -torch.inf], [5.0, 0.0])
        assert_near(got, 5, f"a share with log total {size:.0f} and output 5, and an empty one", absolute=1e-6)


@combine.property(
    "a row without keys gives zeros",
    hint="in a padding row every log_total is -inf, and -inf - -inf is nan: subtract 0 there, and divide by 1",
)
def _(function):
    logs = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]]).double()
    got = function(torch.tensor([[[0.0], [0.0]], [[1.0], [1.0]]]).double(), logs)
    assert (got[0] == 0).all(), f"two empty shares gave {got[0].item()}"
    assert got[1].isfinite().all() and got[1] > 0, f"and the next row, two shares with output 1, gave {got[1].item()}"


@combine.property(
    "the shares are not changed",
    hint="an operation whose name ends in `_`, or `-=`, changes the caller's tensor: write `a = a - b`",
)
def _(function):
    partial, logs = normal(3, 3, 4), normal(3, 3, seed=1)
    logs[0, 1], logs[2] = -torch.inf, -torch.inf
    partial[0, 1], partial[2] = 0.0, 0.0
    given = partial.clone(), logs.clone()
    first = function(*given)
    assert torch.equal(given[0], partial), "partial changed"
    assert torch.equal(given[1], logs), "log_total changed"
    before = first.clone()
    function(-partial, logs.clone())
    assert torch.equal(first.nan_to_num(), before.nan_to_num()), "a second call changed the result of the first"
