"""A pool that remembers prefixes.  Lesson 09."""

from ..shared.checks import Exercise
from .checks import SECONDS, all_different, allocate, assert_available, empty_lists, independent, lists_unchanged

prefix_pool = Exercise("MyPrefixPool", seconds=SECONDS)


def _remembering(make, num_blocks: int, sequences: list[int]) -> tuple:
    """A pool, and sequences of so many blocks each, held, with a key for every block: (0, 0), (0, 1), (1, 0), ..."""
    pool, held = make(num_blocks), []
    for number, count in enumerate(sequences):
        blocks = allocate(pool, count)
        for at, block in enumerate(blocks):
            pool.register(block, (number, at))
        held.append(blocks)
    return pool, held


@prefix_pool.example
def _(make):
    pool, (blocks,) = _remembering(make, 4, [2])
    pool.release(list(blocks))
    found = list(pool.lookup([(0, 0), (0, 1)]))
    assert found == blocks, f"blocks {blocks} have keys and were released: expected to find {blocks}, got {found}"
    assert_available(pool, 4, "pool of 4, no block held")


@prefix_pool.property(
    "`references` holds the counts",
    hint="`share` adds 1 for every holder: `self.references[block]` is 1 after `allocate`, then 2, then 3",
)
def _(make):
    pool = make(4)
    one, other = allocate(pool, 2)
    for blocks in ([one, other], [one]):
        pool.share(blocks)
    for block, want, times in ((one, 3, "twice"), (other, 2, "once")):
        got = pool.references[block]
        assert got == want, f"block {block}, allocated and shared {times}: expected a count of {want}, got {got}"


@prefix_pool.property(
    "a block stays in use until its last holder releases it",
    hint="count holders as in exercise 2: `share` may also get blocks in use, and only a count of 0 makes one cached",
)
def _(make):
    for keys in ("with", "without"):
        pool = make(4)
        blocks = allocate(pool, 2)
        for block in blocks if keys == "with" else []:
            pool.register(block, ("key", block))
        story = f"pool of 4, 2 blocks {keys} keys, each with two holders"
        pool.share(list(blocks))
        for who, want in (("one", 2), ("both", 4)):
            pool.release(list(blocks))
            assert_available(pool, want, f"{story}, {who} of which released it")


@prefix_pool.property(
    "blocks without a key are reused first", hint="only blocks in `key_of` are worth keeping; the others become free"
)
def _(make):
    for plain_first in (True, False):
        pool, (known,) = _remembering(make, 4, [2])
        plain = allocate(pool, 2)
        for blocks in (plain, known) if plain_first else (known, plain):
            pool.release(list(blocks))
        got = allocate(pool, 2)
        assert set(got) == set(plain), f"{known} had keys, {plain} had none, all were released; {got} was reused first"
    for plain_first in (True, False):
        pool, (first, second) = _remembering(make, 3, [1, 1])
        plain = allocate(pool, 1)
        mixed = plain + second if plain_first else second + plain
        for blocks in (first, list(mixed)):
            pool.release(blocks)
        story = f"{first + second} had keys, {plain} had none, release({first}) and release({mixed})"
        assert_available(pool, 3, story)
        idle = getattr(pool, "idle", first + second)  # the engine's pool has another name for it
        assert len(idle) == 2, f"{story}: expected {first + second} in `idle`, got {list(idle)}"
        got = allocate(pool, 1)
        assert got == plain, f"{story}; {got} was reused first"


@prefix_pool.property(
    "a cached block that is shared again is in use",
    hint="`share` adds 1 to the count, and takes a cached block out of `idle`, or it could be evicted while in use",
)
def _(make):
    pool, (blocks,) = _remembering(make, 4, [2])
    pool.release(list(blocks))
    pool.share(list(blocks))
    assert_available(pool, 2, "pool of 4, 2 blocks cached, then shared again")
    others = allocate(pool, 2)
    all_different(others, blocks)
    pool.release(list(blocks))
    assert_available(pool, 2, "the same pool after 2 blocks were allocated, and the shared ones released")
    pool, sequences = _remembering(make, 3, [1, 1, 1])
    for blocks in sequences:
        pool.release(list(blocks))
    middle = sequences[1]  # neither the oldest nor the newest
    pool.share(list(middle))
    all_different(allocate(pool, 2), middle)


@prefix_pool.property(
    "a cached block has a count of 0",
    hint="count down first, and cache the block when the count is 0: the engine goes by `references`",
)
def _(make):
    pool, (blocks,) = _remembering(make, 4, [2])
    pool.release(list(blocks))
    for block in blocks:
        got = pool.references[block]
        assert got == 0, f"block {block}, with a key, was released by its only holder, and has a count of {got}"


def _right_for_one(make) -> bool:
    """Return whether a list of one block is counted right; if not, other properties say so."""
    pool, (blocks,) = _remembering(make, 4, [1])
    found = []
    for method in (pool.share, pool.release, pool.release, pool.share, pool.release):
        method(list(blocks))
        found.append(pool.available)
    return found == [3, 3, 4, 3, 4]


@prefix_pool.property(
    "every block of a list has its own count",
    hint="a list can mix blocks in use and cached ones, with different counts: treat each block by itself",
)
def _(make):
    if not _right_for_one(make):
        return
    for at in range(3):
        pool, (blocks,) = _remembering(make, 6, [3])
        pool.share([blocks[at]])
        story = f"pool of 6, blocks {blocks} have keys, and block {blocks[at]} was shared"
        pool.release(list(blocks))
        assert_available(pool, 5, f"{story}; release({blocks})")
        pool.release([blocks[at]])
        assert_available(pool, 6, f"{story}; release({blocks}) and release({[blocks[at]]})")
        pool, (blocks,) = _remembering(make, 6, [3])
        pool.release([blocks[at]])
        story = f"pool of 6, blocks {blocks} have keys, and block {blocks[at]} was released"
        pool.share(list(blocks))
        assert_available(pool, 3, f"{story}; share({blocks})")
        pool.release(list(blocks))
        assert_available(pool, 4, f"{story}; share({blocks}) and release({blocks})")


@prefix_pool.property(
    "the least recently used block is evicted first",
    hint="a block joins `idle` at its end when it is released, so the oldest one is at the beginning",
)
def _(make):
    pool, (first, second, third) = _remembering(make, 3, [1, 1, 1])
    for blocks in (second, first, third):
        pool.release(list(blocks))
    pool.share(list(second))  # used again: now it is the newest
    pool.release(list(second))
    if pool.available == 3:  # else: another property's matter
        got, want = [allocate(pool, 1) for _ in range(3)], [first, third, second]
        assert got == want, (
            f"blocks {sum(want, [])} were last used in this order, and evicted in the order {sum(got, [])}"
        )


@prefix_pool.property(
    "the end of a sequence is evicted before its beginning",
    hint="all blocks of a sequence are released in one call: which of them must join `idle` first?",
)
def _(make):
    for length in (3, 300):
        pool = make(length)
        ordered = sorted(allocate(pool, length))
        sequence = ordered[1:] + ordered[:1]  # a request's blocks have no order in memory
        for at, block in enumerate(sequence):
            pool.register(block, (0, at))
        pool.release(list(sequence))
        got = [block for _ in range(length) for block in allocate(pool, 1)]
        said = f"blocks {sequence}, in the order of the tokens, were evicted in the order {got}"
        if length > 3:
            said = f"the {length:,} blocks of a sequence were released, and not evicted from the last to the first"
        assert got == sequence[::-1], said


@prefix_pool.property(
    "an evicted block can no longer be found",
    hint="take it out of `idle`, and its key out of both dictionaries: its next owner writes something else there",
)
def _(make):
    pool, (blocks,) = _remembering(make, 2, [2])
    pool.release(list(blocks))
    taken = allocate(pool, 2)
    all_different(taken)
    found = pool.lookup([(0, 0), (0, 1)])
    assert not found, f"block {found[0]} was evicted and allocated again, and is still found by its old key"
    for block in taken:
        pool.register(block, ("new", block))
    assert pool.lookup([("new", taken[0])]) == taken[:1], "an evicted block cannot get a new key: forget the old one"


@prefix_pool.property(
    "the other cached blocks are still found", hint="`evict` gives up one block: the others keep theirs"
)
def _(make):
    pool, sequences = _remembering(make, 3, [1, 1, 1])
    for number in (1, 0, 2):  # not in the order of their keys
        (block,) = sequences[number]
        if hasattr(pool, "idle"):  # cached by hand, so that `evict` can be checked before `release` is written
            pool.references[block] = 0
            pool.idle[block] = None
        else:
            pool.release([block])
    evicted = allocate(pool, 1)
    for number, blocks in enumerate(sequences):
        if blocks != evicted:
            found = list(pool.lookup([(number, 0)]))
            assert found == blocks, f"{evicted} was evicted; block {blocks[0]} is cached, and its key finds {found}"


prefix_pool.property(
    "the lists passed in are not changed",
    hint="`blocks.reverse()` changes the caller's list; `reversed(blocks)` only reads it",
)(lists_unchanged)


def _cached_and_forgotten(make, key) -> bool:
    """Return whether a released block is found by its key, and no more after all blocks have been allocated."""
    pool = make(2)
    blocks = allocate(pool, 1)
    pool.register(blocks[0], key)
    pool.release(list(blocks))
    found = list(pool.lookup([key])) == blocks
    all_different(allocate(pool, 2))
    return found and not pool.lookup([key])


@prefix_pool.property(
    "a key can be any value, even 0",
    hint="ask `block in self.key_of`, not whether the key is true: 0 and an empty text are keys too",
)
def _(make):
    if _cached_and_forgotten(make, "a key"):  # else: another property's matter
        for key in (0, "", ()):
            said = f"a block with the key {key!r} was released and evicted: it must be found before, and not after"
            assert _cached_and_forgotten(make, key), said


prefix_pool.property(
    "an empty list changes nothing",
    hint="the engine shares an empty list when it finds no prefix: loop over the list, without a special first block",
)(empty_lists)


prefix_pool.property(
    "two pools know nothing of each other",
    hint="keep all state in `self`, as `__init__` does: a variable of the class or the notebook belongs to all pools",
)(independent)
