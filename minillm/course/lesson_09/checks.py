"""A pool of blocks: who holds which.  Lesson 09."""

from numbers import Integral

from minillm.kv_cache.block_pool import OutOfBlocks
from minillm.overrides import NotSolvedYet

from ..shared.checks import Exercise

SECONDS = 5.0

pool = Exercise("MyBlockPool", seconds=SECONDS)


def allocate(pool, count: int) -> list[int]:
    """Return what `allocate` gives, if it is a list of blocks."""
    try:
        got = pool.allocate(count)
    except TypeError as error:
        if hasattr(pool, "evict") and "indices must be integers" in str(error):
            raise AssertionError("`evict` must return the number of the evicted block, nothing else") from error
        raise
    assert isinstance(got, list), f"allocate({count}) must return a list, and returned {got!r}"
    assert all(isinstance(block, Integral) for block in got), f"allocate({count}) returned {got}, not blocks' numbers"
    return got


def all_different(blocks: list[int], *others: list[int]) -> None:
    """Blocks that were just allocated are distinct, and have no other holder."""
    held = {block for each in others for block in each}
    assert len(set(blocks)) == len(blocks), f"allocate returned the same block twice: {blocks}"
    assert not held & set(blocks), f"block {min(held & set(blocks))} was allocated while a request held it"


def assert_available(pool, want: int, when: str) -> None:
    assert pool.available == want, f"{when}: expected {want} available, got {pool.available}"


@pool.example
def _(make):
    pool = make(4)
    blocks = allocate(pool, 3)
    right = len(set(blocks)) == len(blocks) == 3 and set(blocks) < set(range(4))
    assert right, f"allocate(3) from a pool of 4: expected three different blocks from 0 to 3, got {blocks}"
    assert_available(pool, 1, "after allocate(3) from a pool of 4")


@pool.property("released blocks can be allocated again", hint="a block whose count is 0 goes back to the free list")
def _(make):
    pool = make(4)
    pool.release(allocate(pool, 3))
    assert_available(pool, 4, "pool of 4, 3 blocks allocated and released")
    pool = make(300)
    pool.release(allocate(pool, 299))
    assert_available(pool, 300, "pool of 300, 299 blocks allocated and released in one list")


@pool.property(
    "a block with a holder is not allocated again",
    hint="allocate only blocks from the free list, and remove them from it: requests end in any order",
)
def _(make):
    for early in (1, 0):  # which of two requests ends first
        pool = make(9)
        requests = [allocate(pool, 4), allocate(pool, 4)]
        first, second = requests
        assert first is not second, "allocate returned the same list object twice: each request needs its own"
        all_different(second, first)
        pool.release(list(requests[early]))
        all_different(allocate(pool, min(4, pool.available)), requests[1 - early])


@pool.property(
    "a block becomes free when its last holder releases it, and not before",
    hint="`share` adds 1 to the count, `release` subtracts 1; the block is free when the count reaches 0",
)
def _(make):
    for holders in (2, 3, 300):
        pool = make(4)
        blocks = allocate(pool, 1)
        for _ in range(holders - 1):
            pool.share(list(blocks))
        for released in range(1, holders + 1):
            pool.release(list(blocks))
            want = 4 if released == holders else 3
            assert_available(
                pool, want, f"pool of 4, one block with {holders} holders, {released} of which released it"
            )


@pool.property(
    "every block of a list has its own count",
    hint="a request's blocks can have different counts: treat each block in the list by itself",
)
def _(make):
    pool = make(6)
    blocks = allocate(pool, 3)
    pool.share(list(blocks))
    pool.release(blocks[:1])
    if pool.available == 3:  # else: another property's matter
        story = f"pool of 6, blocks {blocks} allocated and shared, then release({blocks[:1]}) and release({blocks})"
        pool.release(list(blocks))
        assert_available(pool, 4, story)
        pool.release(blocks[1:])
        assert_available(pool, 6, f"{story} and release({blocks[1:]})")
    pool = make(6)
    one, *others = allocate(pool, 3)
    pool.share([one])
    pool.share([one])
    pool.release([one])
    pool.release([one])
    if pool.available == 3:  # else: another property's matter
        pool.share([one])
        for method in (pool.share, pool.release, pool.release):
            method([one, *others])
        story = f"pool of 6, 3 blocks allocated, block {one} with one more holder than {others}, all shared once more"
        assert_available(pool, 5, f"{story} and released twice")


@pool.property("the whole pool can be allocated", hint="a request for exactly as many blocks as are available fits")
def _(make):
    pool = make(4)
    try:
        all_different(allocate(pool, 4))
    except OutOfBlocks as error:
        raise AssertionError("allocate(4) from a pool of 4 raised OutOfBlocks") from error


@pool.property(
    "a request for too many blocks is refused, and takes none",
    hint="compare `count` with `self.available` before you take the first block",
)
def _(make):
    pool = make(4)
    allocate(pool, 3)
    before = [pool.references[block] for block in range(4)]
    try:
        got = pool.allocate(2)
    except OutOfBlocks:
        assert_available(pool, 1, "after allocate(2) was refused with 1 block left")
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
    got = allocate(pool, 0)
    assert got == [], f"allocate(0) returned {got}"
    assert_available(pool, 4, "after allocate(0) from a pool of 4")


def empty_lists(make) -> None:
    pool = make(4)
    blocks = allocate(pool, 2)
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
    assert_available(pool, 2, "pool of 4, 2 blocks allocated, then share([]) and release([])")


pool.property(
    "an empty list changes nothing",
    hint="the engine shares an empty list when it finds no prefix: loop over the list, without a special first block",
)(empty_lists)


def lists_unchanged(make) -> None:
    pool = make(4)
    low, middle, high = sorted(allocate(pool, 3))
    blocks = [middle, high, low]
    for method in (pool.share, pool.release):
        given = list(blocks)
        method(given)
        assert given == blocks, f"{method.__name__}({blocks}) changed the caller's list to {given}"


pool.property(
    "the lists passed in are not changed",
    hint="the list may be a request's block table, which the engine still needs: only loop over it",
)(lists_unchanged)


@pool.property(
    "`references` holds the counts",
    hint="`self.references[block]` is the number of holders: 0 for a free block, 1 after `allocate`",
)
def _(make):
    pool = make(4)
    one, other = allocate(pool, 2)
    pool.share([one])
    pool.release([other])
    for block, want, story in ((one, 2, "allocated and shared"), (other, 0, "allocated and released")):
        got = pool.references[block]
        assert got == want, f"block {block}, {story}: expected references[{block}] to be {want}, got {got}"
    pool = make(4)
    for blocks in (allocate(pool, 2), allocate(pool, 1)):
        got = [pool.references[block] for block in blocks]
        assert got == [1] * len(blocks), f"blocks {blocks} were allocated, and their counts are {got}, not 1"


def _side_by_side(*pools) -> list[list[int]]:
    """Return how many blocks each pool has available after each of the same steps, taken in turns."""
    held = [allocate(pool, 2) for pool in pools]
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


def independent(make) -> None:
    (alone,) = _side_by_side(make(4))
    for got in _side_by_side(make(4), make(4)):
        story = "allocate(2), share, release and release"
        assert got == alone, f"{story} leave {alone} blocks available, and {got} if a second pool takes turns"


pool.property(
    "two pools know nothing of each other",
    hint="keep all state in `self`, as `__init__` does: a variable of the class or the notebook belongs to all pools",
)(independent)
