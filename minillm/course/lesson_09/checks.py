"""A pool of blocks, a pool that remembers prefixes.  Lesson 09."""

from numbers import Integral

from minillm.kv_cache.block_pool import OutOfBlocks
from minillm.overrides import NotSolvedYet

from ..shared.checks import Exercise

SECONDS = 5.0

# ---- who holds which block

pool = Exercise("MyBlockPool", seconds=SECONDS)


def _allocate(pool, count: int) -> list[int]:
    """What `allocate` gives, if it is a list of blocks."""
    try:
        got = pool.allocate(count)
    except TypeError as error:
        if hasattr(pool, "evict") and "indices must be integers" in str(error):
            raise AssertionError("`evict` must return the number of the evicted block, nothing else") from error
        raise
    assert isinstance(got, list), f"allocate({count}) must return a list, and returned {got!r}"
    assert all(isinstance(block, Integral) for block in got), f"allocate({count}) returned {got}, not blocks' numbers"
    return got


def _all_different(blocks: list[int], *others: list[int]) -> None:
    """Blocks that were just allocated are distinct, and have no other holder."""
    held = {block for each in others for block in each}
    assert len(set(blocks)) == len(blocks), f"allocate returned the same block twice: {blocks}"
    assert not held & set(blocks), f"block {min(held & set(blocks))} was allocated while a request held it"


def _available(pool, want: int, when: str) -> None:
    assert pool.available == want, f"{when}: expected {want} available, got {pool.available}"


@pool.example
def _(make):
    pool = make(4)
    blocks = _allocate(pool, 3)
    right = len(set(blocks)) == len(blocks) == 3 and set(blocks) < set(range(4))
    assert right, f"allocate(3) from a pool of 4: expected three different blocks from 0 to 3, got {blocks}"
    _available(pool, 1, "after allocate(3) from a pool of 4")


@pool.property("released blocks can be allocated again", hint="a block whose count is 0 goes back to the free list")
def _(make):
    pool = make(4)
    pool.release(_allocate(pool, 3))
    _available(pool, 4, "pool of 4, 3 blocks allocated and released")
    pool = make(300)
    pool.release(_allocate(pool, 299))
    _available(pool, 300, "pool of 300, 299 blocks allocated and released in one list")


@pool.property(
    "a block with a holder is not allocated again",
    hint="allocate only blocks from the free list, and remove them from it: requests end in any order",
)
def _(make):
    for early in (1, 0):  # which of two requests ends first
        pool = make(9)
        requests = [_allocate(pool, 4), _allocate(pool, 4)]
        first, second = requests
        assert first is not second, "allocate returned the same list object twice: each request needs its own"
        _all_different(second, first)
        pool.release(list(requests[early]))
        _all_different(_allocate(pool, min(4, pool.available)), requests[1 - early])


@pool.property(
    "a block becomes free when its last holder releases it, and not before",
    hint="`share` adds 1 to the count, `release` subtracts 1; the block is free when the count reaches 0",
)
def _(make):
    for holders in (2, 3, 300):
        pool = make(4)
        blocks = _allocate(pool, 1)
        for _ in range(holders - 1):
            pool.share(list(blocks))
        for released in range(1, holders + 1):
            pool.release(list(blocks))
            want = 4 if released == holders else 3
            _available(pool, want, f"pool of 4, one block with {holders} holders, {released} of which released it")


@pool.property(
    "every block of a list has its own count",
    hint="a request's blocks can have different counts: treat each block in the list by itself",
)
def _(make):
    pool = make(6)
    blocks = _allocate(pool, 3)
    pool.share(list(blocks))
    pool.release(blocks[:1])
    if pool.available == 3:  # else: another property's matter
        story = f"pool of 6, blocks {blocks} allocated and shared, then release({blocks[:1]}) and release({blocks})"
        pool.release(list(blocks))
        _available(pool, 4, story)
        pool.release(blocks[1:])
        _available(pool, 6, f"{story} and release({blocks[1:]})")
    pool = make(6)
    one, *others = _allocate(pool, 3)
    pool.share([one])
    pool.share([one])
    pool.release([one])
    pool.release([one])
    if pool.available == 3:  # else: another property's matter
        pool.share([one])
        for method in (pool.share, pool.release, pool.release):
            method([one, *others])
        story = f"pool of 6, 3 blocks allocated, block {one} with one more holder than {others}, all shared once more"
        _available(pool, 5, f"{story} and released twice")


@pool.property("the whole pool can be allocated", hint="a request for exactly as many blocks as are available fits")
def _(make):
    pool = make(4)
    try:
        _all_different(_allocate(pool, 4))
    except OutOfBlocks as error:
        raise AssertionError("allocate(4) from a pool of 4 raised OutOfBlocks") from error


@pool.property(
    "a request for too many blocks is refused, and takes none",
    hint="compare `count` with `self.available` before you take the first block",
)
def _(make):
    pool = make(4)
    _allocate(pool, 3)
    before = [pool.references[block] for block in range(4)]
    try:
        got = pool.allocate(2)
    except OutOfBlocks:
        _available(pool, 1, "after allocate(2) was refused with 1 block left")
        after = [pool.references[block] for block in range(4)]
        assert after == before, f"`references` was {before}, and is {after} after allocate(2) was refused"
    except NotSolvedYet:
        raise
    except Exception as error:
        raise AssertionError(f"allocate(2) with 1 block left raised {type(error).__name__}, not OutOfBlocks") from error
    else:
        raise AssertionError(f"allocate(2) with 1 block left returned {got} instead of raising OutOfBlocks")


@pool.property("allocate(0) takes no block", hint="allocate(0) returns []; note that free[-0:] is the whole list")
def _(make):
    pool = make(4)
    got = _allocate(pool, 0)
    assert got == [], f"allocate(0) returned {got}"
    _available(pool, 4, "after allocate(0) from a pool of 4")


def _empty_lists(make) -> None:
    pool = make(4)
    blocks = _allocate(pool, 2)
    before = [pool.references[block] for block in blocks]
    for name in ("share", "release"):
        try:
            getattr(pool, name)([])
        except NotSolvedYet:
            raise
        except Exception as error:
            raise AssertionError(f"{name}([]) raised {type(error).__name__}: {error}") from error
        after = [pool.references[block] for block in blocks]
        assert after == before, f"`references` of blocks {blocks} was {before}, and is {after} after {name}([])"
    _available(pool, 2, "pool of 4, 2 blocks allocated, then share([]) and release([])")


pool.property(
    "an empty list changes nothing",
    hint="the engine shares an empty list when it finds no prefix: loop over the list, without a special first block",
)(_empty_lists)


def _lists_unchanged(make) -> None:
    pool = make(4)
    low, middle, high = sorted(_allocate(pool, 3))
    blocks = [middle, high, low]
    for method in (pool.share, pool.release):
        given = list(blocks)
        method(given)
        assert given == blocks, f"{method.__name__}({blocks}) changed the caller's list to {given}"


pool.property(
    "the lists passed in are not changed",
    hint="the list may be a request's block table, which the engine still needs: only loop over it",
)(_lists_unchanged)


@pool.property(
    "`references` holds the counts",
    hint="`self.references[block]` is the number of holders: 0 for a free block, 1 after `allocate`",
)
def _(make):
    pool = make(4)
    one, other = _allocate(pool, 2)
    pool.share([one])
    pool.release([other])
    for block, want, story in ((one, 2, "allocated and shared"), (other, 0, "allocated and released")):
        got = pool.references[block]
        assert got == want, f"block {block}, {story}: expected references[{block}] to be {want}, got {got}"
    pool = make(4)
    for blocks in (_allocate(pool, 2), _allocate(pool, 1)):
        got = [pool.references[block] for block in blocks]
        assert got == [1] * len(blocks), f"blocks {blocks} were allocated, and their counts are {got}, not 1"


def _side_by_side(*pools) -> list[list[int]]:
    """How many blocks each pool has available after each of the same steps, taken in turns."""
    held = [_allocate(pool, 2) for pool in pools]
    available = [[pool.available] for pool in pools]
    for pool, blocks in zip(pools, held, strict=True):
        for block in blocks if hasattr(pool, "register") else []:
            pool.register(block, ("key", block))
    for step in ("share", "release", "release"):
        for pool, blocks in zip(pools, held, strict=True):
            getattr(pool, step)(list(blocks))
        for pool, counts in zip(pools, available, strict=True):
            counts.append(pool.available)
    return available


def _independent(make) -> None:
    (alone,) = _side_by_side(make(4))
    for got in _side_by_side(make(4), make(4)):
        story = "allocate(2), share, release and release"
        assert got == alone, f"{story} leave {alone} blocks available, and {got} if a second pool takes turns"


pool.property(
    "two pools know nothing of each other",
    hint="keep all state in `self`, as `__init__` does: a variable of the class or the notebook belongs to all pools",
)(_independent)


# ---- a pool that remembers prefixes

prefix_pool = Exercise("MyPrefixPool", seconds=SECONDS)


def _remembering(make, num_blocks: int, sequences: list[int]) -> tuple:
    """A pool, and sequences of so many blocks each, held, with a key for every block: (0, 0), (0, 1), (1, 0), ..."""
    pool, held = make(num_blocks), []
    for number, count in enumerate(sequences):
        blocks = _allocate(pool, count)
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
    _available(pool, 4, "pool of 4, no block held")


@prefix_pool.property(
    "`references` holds the counts",
    hint="`share` adds 1 for every holder: `self.references[block]` is 1 after `allocate`, then 2, then 3",
)
def _(make):
    pool = make(4)
    one, other = _allocate(pool, 2)
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
        blocks = _allocate(pool, 2)
        for block in blocks if keys == "with" else []:
            pool.register(block, ("key", block))
        story = f"pool of 4, 2 blocks {keys} keys, each with two holders"
        pool.share(list(blocks))
        for who, want in (("one", 2), ("both", 4)):
            pool.release(list(blocks))
            _available(pool, want, f"{story}, {who} of which released it")


@prefix_pool.property(
    "blocks without a key are reused first", hint="only blocks in `key_of` are worth keeping; the others become free"
)
def _(make):
    for plain_first in (True, False):
        pool, (known,) = _remembering(make, 4, [2])
        plain = _allocate(pool, 2)
        for blocks in (plain, known) if plain_first else (known, plain):
            pool.release(list(blocks))
        got = _allocate(pool, 2)
        assert set(got) == set(plain), f"{known} had keys, {plain} had none, all were released; {got} was reused first"
    for plain_first in (True, False):
        pool, (first, second) = _remembering(make, 3, [1, 1])
        plain = _allocate(pool, 1)
        mixed = plain + second if plain_first else second + plain
        for blocks in (first, list(mixed)):
            pool.release(blocks)
        story = f"{first + second} had keys, {plain} had none, release({first}) and release({mixed})"
        _available(pool, 3, story)
        idle = getattr(pool, "idle", first + second)  # the engine's pool has another name for it
        assert len(idle) == 2, f"{story}: expected {first + second} in `idle`, got {list(idle)}"
        got = _allocate(pool, 1)
        assert got == plain, f"{story}; {got} was reused first"


@prefix_pool.property(
    "a cached block that is shared again is in use",
    hint="`share` adds 1 to the count, and takes a cached block out of `idle`, or it could be evicted while in use",
)
def _(make):
    pool, (blocks,) = _remembering(make, 4, [2])
    pool.release(list(blocks))
    pool.share(list(blocks))
    _available(pool, 2, "pool of 4, 2 blocks cached, then shared again")
    others = _allocate(pool, 2)
    _all_different(others, blocks)
    pool.release(list(blocks))
    _available(pool, 2, "the same pool after 2 blocks were allocated, and the shared ones released")
    pool, sequences = _remembering(make, 3, [1, 1, 1])
    for blocks in sequences:
        pool.release(list(blocks))
    middle = sequences[1]  # neither the oldest nor the newest
    pool.share(list(middle))
    _all_different(_allocate(pool, 2), middle)


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
    """Whether a list of one block is counted right; if not, other properties say so."""
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
        _available(pool, 5, f"{story}; release({blocks})")
        pool.release([blocks[at]])
        _available(pool, 6, f"{story}; release({blocks}) and release({[blocks[at]]})")
        pool, (blocks,) = _remembering(make, 6, [3])
        pool.release([blocks[at]])
        story = f"pool of 6, blocks {blocks} have keys, and block {blocks[at]} was released"
        pool.share(list(blocks))
        _available(pool, 3, f"{story}; share({blocks})")
        pool.release(list(blocks))
        _available(pool, 4, f"{story}; share({blocks}) and release({blocks})")


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
        got, want = [_allocate(pool, 1) for _ in range(3)], [first, third, second]
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
        ordered = sorted(_allocate(pool, length))
        sequence = ordered[1:] + ordered[:1]  # a request's blocks have no order in memory
        for at, block in enumerate(sequence):
            pool.register(block, (0, at))
        pool.release(list(sequence))
        got = [block for _ in range(length) for block in _allocate(pool, 1)]
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
    taken = _allocate(pool, 2)
    _all_different(taken)
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
    evicted = _allocate(pool, 1)
    for number, blocks in enumerate(sequences):
        if blocks != evicted:
            found = list(pool.lookup([(number, 0)]))
            assert found == blocks, f"{evicted} was evicted; block {blocks[0]} is cached, and its key finds {found}"


prefix_pool.property(
    "the lists passed in are not changed",
    hint="`blocks.reverse()` changes the caller's list; `reversed(blocks)` only reads it",
)(_lists_unchanged)


def _cached_and_forgotten(make, key) -> bool:
    """Whether a released block is found by its key, and no more after all blocks have been allocated."""
    pool = make(2)
    blocks = _allocate(pool, 1)
    pool.register(blocks[0], key)
    pool.release(list(blocks))
    found = list(pool.lookup([key])) == blocks
    _all_different(_allocate(pool, 2))
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
)(_empty_lists)


prefix_pool.property(
    "two pools know nothing of each other",
    hint="keep all state in `self`, as `__init__` does: a variable of the class or the notebook belongs to all pools",
)(_independent)
