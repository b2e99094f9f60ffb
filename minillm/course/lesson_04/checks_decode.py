"""A kernel for decode attention over a paged cache.  Lesson 04."""

import torch

from minillm.kv_cache.layer_cache import LayerCache

from ..shared.checks import Exercise
from ..shared.differences import assert_near
from ..shared.interpret import Watched
from . import paged_rows as paged
from .paged_rows import DIM, near, normal

paged_decode = Exercise("paged_decode", seconds=60.0)


@paged_decode.example
def _(function):
    # Two full blocks of keys whose values are all 7: with any weights, both heads get 7.
    cache = paged.cache_of()
    cache.v[:] = 7.0
    got = paged.run(function, cache, [40, 41], 32)
    want = torch.full((2, DIM), 7.0)
    near(got, want, "32 keys with values of 7", 1e-3)


@paged_decode.property(
    "a key's offset is counted inside its block",
    hint="the first key of each block has offset 0: what is left when you divide the key's number by BLOCK_SIZE?",
)
def _(function):
    cache = paged.cache_of()
    before = paged.run(function, cache, [40, 50], 32)
    cache.k[51], cache.v[51] = 3.0, 1e4
    near(
        paged.run(function, cache, [40, 50], 32),
        before,
        "keys 16 to 31 are in block 50, and the result changes with the contents of block 51",
        1e-3,
    )


@paged_decode.property(
    "a tile of keys may come from several blocks",
    hint="look up the block of every key, not of the tile: blocks next to each other in the table can be anywhere in "
    "memory",
)
def _(function):
    cache = paged.cache_of()
    before = paged.run(function, cache, [40, 50], 32)
    cache.k[41], cache.v[41] = 3.0, 1e4
    near(
        paged.run(function, cache, [40, 50], 32),
        before,
        "keys 0 to 15 are in block 40, 16 to 31 in block 50, and the result changes with the contents of block 41",
        1e-3,
    )
    cache.v[50:52] += 100.0
    moved = (paged.run(function, cache, [40, 50], 32) - before).abs().max()
    assert moved > 1, "keys 16 to 31 are in block 50, and the result does not change with their values"


@paged_decode.property(
    "sizes and strides are those of the cache",
    hint="block and slot strides differ from cache to cache: use block_stride, slot_stride, BLOCK_SIZE and DIM, no "
    "numbers of your own. If they are right: the last key counts too, and scores 0 and 1 must weigh 0.269 and 0.731",
)
def _(function):
    wide = paged.cache_of(3, size=40, dim=32)
    cache = LayerCache(wide.k[:, :32, :1], wide.v[:, :32, :1])
    q = normal(1, 2, 32, seed=9)
    got = paged.run(function, cache, [30], 32, q, scale=1.0)
    what = "a cache with blocks of 32 slots, heads of 32 numbers and gaps between blocks and slots"
    near(got, paged.attention_of(cache, [30], 32, q, 1.0), what, 1e-3)
    cache = paged.cache_of(size=64)
    cache.k[:] = 0.0
    got, want = paged.run(function, cache, [40], 64), cache.v[40, :, 0].mean(0).expand(2, DIM)
    near(got, want, "64 keys with score 0 in one block of 64 slots", 1e-3)


@paged_decode.property(
    "every key before the length counts",
    hint="the last tile can hold any number of keys, even one: treat it like the others, with `present` as the mask",
)
def _(function):
    got = paged.climbing(function, [20.0], [1.0], (1.0, 1.0), 1)[0]
    assert_near(got, 1, "a row of one key with value 1", absolute=1e-3)
    for more in (1, 13, 31):
        got, want = paged.climbing(function, [20.0, 20.0], [0.0, 1.0], (1.0, 1.0), 32 + more)[0], more / (32 + more)
        what = f"32 keys with value 0, then {more} with value 1, all with the same score"
        assert_near(got, want, what, absolute=1e-3)


@paged_decode.property(
    "slots from the length on have no weight",
    hint="a masked load gives 0, and a score of 0 still has a weight: set the scores of absent keys to -inf",
)
def _(function):
    cache = paged.cache_of()
    before = paged.run(function, cache, [40, 50], 20)
    cache.k[50:52, 4:], cache.v[50:52, 4:] = 3.0, 1e4
    near(paged.run(function, cache, [40, 50], 20), before, "with 20 keys, slot 21 changes the result", 1e-3)
    cache.v[:] = 1.0
    got, want = paged.run(function, cache, [40, 50], 20), torch.ones(2, DIM)
    near(got, want, "20 keys with values of 1", 1e-3)
    cache.k[:] = -1e5
    got = paged.run(function, cache, [40, 50], 20, torch.ones(1, 2, DIM))
    near(got, want, "20 keys with scores far below zero and values of 1", 1e-3)


@paged_decode.property(
    "nothing from the length on is loaded",
    hint="table, k and v all need the mask: unused slots can hold nan, and 0 x nan is nan; unused table entries can be "
    "any number",
)
def _(function):
    for length in (16, 15, 1):  # 16: a full block, but half a tile
        cache = paged.cache_of()
        for part in (cache.k, cache.v):
            kept = part[9, :3].clone(), part[40, :length].clone()
            part[:] = torch.nan
            part[9, :3], part[40, :length] = kept
        got = paged.run(function, cache, [40], length, strict=True)
        assert got.isfinite().all(), f"{length} keys, and nan in all other slots, gave nan"


@paged_decode.property(
    "every KV head is read",
    hint="a slot holds the keys of all KV heads, head_stride apart: kv_head * head_stride is part of the address. "
    "If it is: scores 0 and 1 must weigh 0.269 and 0.731",
)
def _(function):
    # Strides of 4 and 20 times DIM: no product or quotient of the sizes, such as GROUP * DIM, happens to equal them.
    wide = paged.cache_of(kv_heads=5, dim=4 * DIM)
    cache = LayerCache(wide.k[:, :, :3, :DIM], wide.v[:, :, :3, :DIM])
    for part in (cache.k, cache.v):
        part[:] = part[40].clone()  # all blocks are equal, so that only heads matter
    q = normal(1, 6, DIM, seed=9)
    got, want = paged.run(function, cache, [40, 50], 32, q, scale=1.0), paged.attention_of(cache, [40, 50], 32, q, 1.0)
    near(got, want, "6 query heads on 3 KV heads, which have a gap between them", 1e-3)


@paged_decode.property("scores are multiplied by the scale", hint="the score is q · k times `scale`")
def _(function):
    cache, q = paged.cache_of(), normal(1, 2, DIM, seed=9)
    # Several tiles, so that the maximum and its changes need the scale too.
    got, want = (
        paged.run(function, cache, paged.BLOCKS_OF_96, 96, q * by, scale=scale)
        for by, scale in ((1, 0.125), (0.125, 1))
    )
    near(got, want, "q and a scale of 0.125, compared with q times 0.125 and a scale of 1", 1e-3)


@paged_decode.property(
    "the sum and the output are rescaled from tile to tile",
    hint="as in online_attention: multiply both by exp(old maximum - new maximum) before you add the tile's part",
)
def _(function):
    for values, want in (((1.0, 1.0), 1.0), ((0.0, 1.0), 1.0), ((1.0, 0.0), 0.0)):
        got = paged.graded(function, (0.0, 20.0), values)[0]
        what = f"48 keys with score 0 and value {values[0]:.0f}, then 48 with score 20 and value {values[1]:.0f}"
        assert_near(got, want, what, absolute=1e-3)
    scores, numbers, heads = [0.0, 0.5, 2.0, 1.5, 3.0], [1.0, 0.0, 3.0, -2.0, 5.0], (1.0, -0.7)
    mine = paged.climbing(function, scores, numbers, heads)
    for factor, got in zip(heads, mine, strict=True):
        each = [round(factor * score, 2) for score in scores]
        expected = (torch.tensor(each).softmax(-1) @ torch.tensor(numbers)).item()
        assert_near(got, expected, f"five tiles with scores {each} and values {numbers}, two heads", absolute=1e-3)
    got = paged.halves(function)
    assert_near(got, 0.5, "512 keys with value 0, then 512 with value 1, all with score 0", absolute=1e-3)


@paged_decode.property(
    "scores of any size give exact weights",
    hint="subtract each row's own maximum so far before exp: tl.max(x, 1) along the keys, tl.maximum of old and new",
)
def _(function):
    half = torch.arange(paged.SIZE) % 2.0
    for factors in ((1000.0, 1000.0), (-1000.0, -1000.0), (1000.0, -1000.0)):
        got = paged.graded(function, (1.0, 1.0), (half, half), factors)
        what = f"two heads with scores of {factors[0]:.0f} and {factors[1]:.0f}, half of the values 0, half 1"
        assert_near(got, [0.5, 0.5], what, absolute=1e-3)
    for size, high in ((1000.0, half), (-1000.0, 1 - half)):
        got = paged.graded(function, (size + half, size + half), (high, high))
        want = 1 / (1 + torch.e ** (-1 if size > 0 else 1))
        what = f"scores of {size:.0f} and {size + 1:.0f} in turn, with values {high[0]:.0f} and {high[1]:.0f}"
        assert_near(got[0], want, what, absolute=1e-3)
    got = paged.graded(function, (0.0, -1000.0), (1.0, 0.0))
    assert_near(got[0], 1, "48 keys with score 0 and value 1, then 48 with score -1000", absolute=1e-3)
    got = paged.graded(function, (0.0, 1000.0), (0.0, 1.0))
    assert_near(got[0], 1, "48 keys with score 0, then 48 with score 1000 and value 1", absolute=1e-3)


@paged_decode.property(
    "sums are in 32 bits, also with 16-bit keys and values",
    hint="convert what you load with .to(tl.float32), and keep maximum, total and out in float32",
)
def _(function):
    cache = paged.cache_of()
    cache = LayerCache(cache.k.half(), cache.v.half())
    cache.k[:] = 0.0
    cache.v[:] = 2000.0
    got, want = paged.run(function, cache, paged.BLOCKS_OF_96, 96), torch.full((2, DIM), 2000.0)
    near(got, want, "96 keys with values of 2,000", 1.0)
    got, want = paged.tail(function), torch.full((2, DIM), 1000.0)
    near(got, want, "32 keys with score 0, then 960 with score -8, all with values of 1,000", 1.0)


@paged_decode.property(
    "addresses have 64 bits, and products all of float32's",
    hint="block * block_stride can exceed 32 bits: convert the block number before you multiply. tl.dot rounds float32 "
    'operands to TF32 without input_precision="ieee", also where an interpreted kernel does not show it',
)
def _(function):
    cache, q = paged.cache_of(), normal(1, 2, DIM, seed=9) / 4
    for part in (cache.k, cache.v):
        part[:] = part[40].clone()  # all blocks are equal, so that only products matter
    watched: list[Watched] = []
    got = paged.run(function, cache, [40, 50], 32, q, scale=1.0, watched=watched)
    want = paged.attention_of(cache, [40, 50], 32, q, 1.0)
    near(got, want, "32 keys in float32 (are a product's operands rounded?)", 3e-5)
    kernels = paged.kernels_of(function)
    names = {name for kernel in kernels for name in kernel.__code__.co_names}
    if watched[0].watched:
        assert not watched[0]["TF32"], 'a tl.dot without input_precision="ieee"'
        paged.far_block(function)
    elif kernels:  # compiled, an address with an error would end the process
        assert "int64" in names, "no block number is converted with .to(tl.int64)"


@paged_decode.property(
    "your own kernel computes the result",
    hint="paged_decode launches paged_decode_kernel and returns the tensor that the kernel has stored",
)
def _(function):
    watched: list[Watched] = []
    got = paged.run(function, paged.cache_of(), [40, 50], 32, watched=watched)
    found = watched[0]
    assert found.modules, "no kernel is launched"
    engines = [module for module in found.modules if module.startswith("minillm.")]
    assert not engines, f"the kernel that is launched is the engine's, from {engines[0]}"
    assert not found.watched or found.all_stored(got), "the kernel did not store the numbers that are returned"
