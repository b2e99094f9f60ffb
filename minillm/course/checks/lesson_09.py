"""Slots of tokens, a pool of blocks, keys of beginnings, a pool that remembers them.  Lesson 09."""

from collections.abc import Callable

from minillm.kv_cache.block_pool import OutOfBlocks

from . import Exercise

# ---- where the tokens of a request lie

slots_of = Exercise("slots_of")


def _slots(function: Callable, table: list[int], start: int, end: int, block_size: int) -> list[int]:
    return [int(slot) for slot in function(table, start, end, block_size)]


def _expect_slots(function: Callable, table: list[int], start: int, end: int, block_size: int) -> None:
    want = [table[at // block_size] * block_size + at % block_size for at in range(start, end)]
    got = _slots(function, table, start, end, block_size)
    assert got == want, f"table {table}, tokens {start} to {end - 1}, blocks of {block_size}: slots {want}, not {got}"


@slots_of.example
def _(function):
    got = _slots(function, [2, 3], 0, 4, 4)
    assert got == [8, 9, 10, 11], f"table [2, 3], tokens 0 to 3, blocks of 4: slots 8 to 11, not {got}"


@slots_of.property(
    "blocks may be anywhere in memory",
    hint="look every token's block up in the table: the next block in memory may belong to another request",
)
def _(function):
    one, other = (_slots(function, [5, block], 0, 8, 4) for block in (1, 2))
    moved = [there - here for here, there in zip(one, other, strict=True)]
    assert moved == [0] * 4 + [4] * 4, f"table [5, 1] became [5, 2], and the slots of tokens 0 to 7 moved by {moved}"


@slots_of.property(
    "the offset starts again in each block",
    hint="slot = block * block_size + position % block_size: the first slot of a block is offset 0",
)
def _(function):
    got = _slots(function, [2, 3, 4], 0, 12, 4)
    assert got == list(range(8, 20)), f"table [2, 3, 4], tokens 0 to 11, blocks of 4: slots 8 to 19, not {got}"


@slots_of.property(
    "positions count from the request's first token",
    hint="tokens `start` to `end - 1`: the token at `start` is number start of the request, and not its first",
)
def _(function):
    whole = _slots(function, [2, 3], 0, 8, 4)
    for start, end in ((6, 7), (3, 6), (4, 8)):
        got = _slots(function, [2, 3], start, end, 4)
        assert got == whole[start:end], f"tokens {start} to {end - 1} are in slots {whole[start:end]}, not {got}"


@slots_of.property("the block size is the one given", hint="nothing but `block_size` says how many slots a block has")
def _(function):
    for size in (1, 2, 16):
        got = _slots(function, [3], 0, size, size)
        assert got == list(range(3 * size, 4 * size)), f"block 3 of blocks of {size} begins at slot {3 * size}: {got}"


# ---- who holds which block

pool = Exercise("MyBlockPool")


def _without(blocks: list[int], *others: list[int]) -> None:
    """Blocks that were just allocated are distinct, and have no other holder."""
    held = {block for each in others for block in each}
    assert len(set(blocks)) == len(blocks), f"allocate gave a block twice: {blocks}"
    assert not held & set(blocks), f"block {min(held & set(blocks))} was allocated while it had a holder"


def _available(pool, want: int, when: str) -> None:
    assert pool.available == want, f"{when}: {want} blocks are available, not {pool.available}"


@pool.example
def _(make):
    pool = make(4)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and set(blocks) <= set(range(4)), f"allocate(3) of 4 blocks gave {blocks}"
    _available(pool, 1, "4 blocks, 3 of them allocated")


@pool.property(
    "what is released can be given out again",
    hint="when its count falls to 0, the block goes back into the list of free ones",
)
def _(make):
    pool = make(4)
    pool.release(pool.allocate(3))
    _available(pool, 4, "4 blocks, 3 of them allocated and released")


@pool.property(
    "a block with a holder is not allocated again",
    hint="give out blocks from the list of free ones, and take them off it: requests end in any order",
)
def _(make):
    pool = make(8)
    first, second = pool.allocate(4), pool.allocate(4)
    _without(second, first)
    pool.release(second)
    try:
        third = pool.allocate(4)
    except OutOfBlocks:
        return  # another property's matter
    _without(third, first)


@pool.property(
    "a block is free when its last holder releases it, and not before",
    hint="`share` adds 1 to the count, `release` takes 1 off; free is what has a count of 0, and it becomes so once",
)
def _(make):
    for holders in (2, 3):
        pool = make(4)
        blocks = pool.allocate(1)
        for _ in range(holders - 1):
            pool.share(blocks)
        for let_go in range(1, holders + 1):
            pool.release(blocks)
            want = 4 if let_go == holders else 3
            _available(pool, want, f"a block with {holders} holders, of which {let_go} released it, and 3 never used")


@pool.property(
    "more than there are is refused, and takes nothing",
    hint="compare `count` with `self.available` first, and raise OutOfBlocks before you take any",
)
def _(make):
    pool = make(4)
    pool.allocate(3)
    try:
        got = pool.allocate(2)
    except OutOfBlocks:
        _available(pool, 1, "allocate(2) with 1 block left was refused")
    else:
        raise AssertionError(f"allocate(2) with 1 block left gave {got}, and raised no OutOfBlocks")


@pool.property(
    "none are given where none are asked for", hint="allocate(0) is []; mind that free[-0:] is the whole list"
)
def _(make):
    pool = make(4)
    got = pool.allocate(0)
    assert got == [], f"allocate(0) gave {got}"
    _available(pool, 4, "allocate(0)")


# ---- keys of beginnings

prefix_keys = Exercise("prefix_keys")


def _keys(function: Callable, tokens: list[int], block_size: int = 4, **salt: str) -> list:
    return list(function(tokens, block_size, **salt))


@prefix_keys.example
def _(function):
    keys, again = (_keys(function, [1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(2))
    assert len(keys) == 2, f"8 tokens in blocks of 4 have 2 keys, not {len(keys)}"
    assert keys == again, "the same tokens gave other keys the second time"
    assert keys[0] != keys[1], "two different blocks have the same key"


@prefix_keys.property(
    "a key speaks for all tokens before it",
    hint="hash a block's tokens together with the key of the block before: it says what came before",
)
def _(function):
    one, other = _keys(function, [1, 2, 3, 4, 5, 6, 7, 8]), _keys(function, [9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1], "the same second block after two different first ones has the same key"


@prefix_keys.property(
    "what comes later does not matter", hint="a block's key is made of its own tokens and of those before, nothing else"
)
def _(function):
    short, long = _keys(function, [1, 2, 3, 4, 5]), _keys(function, [1, 2, 3, 4, 6, 7, 8, 9])
    assert short[0] == long[0], "two prompts with the same first block have different first keys"


@prefix_keys.property(
    "only full blocks have a key",
    hint="the last tokens, too few for a block, get none: their block is still written to",
)
def _(function):
    for tokens in (3, 4, 6):
        got = len(_keys(function, list(range(1, tokens + 1))))
        assert got == tokens // 4, f"{tokens} tokens in blocks of 4 have {tokens // 4} keys, not {got}"


@prefix_keys.property("the order of the tokens counts", hint="a sum or a set forgets the order; hash them as they come")
def _(function):
    assert _keys(function, [1, 2, 3, 4]) != _keys(function, [4, 3, 2, 1]), "1 2 3 4 and 4 3 2 1 have the same key"


@prefix_keys.property(
    "each token counts for itself",
    hint="written without a gap, 1 and 23 look like 12 and 3: keep them apart, or use the same width for each",
)
def _(function):
    assert _keys(function, [1, 23], 2) != _keys(function, [12, 3], 2), "1 23 and 12 3 have the same key"


@prefix_keys.property(
    "another salt gives other keys", hint="start the chain with the salt, as if it were before the first block"
)
def _(function):
    one, other = (_keys(function, [1, 2, 3, 4, 5, 6, 7, 8], salt=salt) for salt in ("ann", "bob"))
    assert not set(one) & set(other), "the same tokens with two salts share a key"


# ---- a pool that remembers beginnings

prefix_pool = Exercise("MyPrefixPool")


def _remembering(make, num_blocks: int, sequences: list[int]) -> tuple:
    """A pool, and sequences of so many blocks each, held, with a key for every block: (0, 0), (0, 1), (1, 0), ..."""
    pool, held = make(num_blocks), []
    for number, count in enumerate(sequences):
        blocks = pool.allocate(count)
        for at, block in enumerate(blocks):
            pool.register(block, (number, at))
        held.append(blocks)
    return pool, held


@prefix_pool.example
def _(make):
    pool, (blocks,) = _remembering(make, 4, [2])
    pool.release(blocks)
    assert pool.lookup([(0, 0), (0, 1)]) == blocks, "two blocks with keys were released, and are not found again"
    _available(pool, 4, "4 blocks, none of them held")


@prefix_pool.property(
    "blocks without a key are evicted first",
    hint="a block without a key, not in `key_of`, goes to the free ones: only those with one are worth keeping",
)
def _(make):
    for plain_first in (True, False):
        pool, (known,) = _remembering(make, 4, [2])
        plain = pool.allocate(2)
        for blocks in (plain, known) if plain_first else (known, plain):
            pool.release(blocks)
        got = pool.allocate(2)
        assert set(got) == set(plain), f"blocks {known} had keys, {plain} had none, all were released; {got} went first"


@prefix_pool.property(
    "the least recently used block is evicted first",
    hint="`release` puts a block at the end of the cached ones, `evict` takes the one at the beginning",
)
def _(make):
    pool, (first, second, third) = _remembering(make, 3, [1, 1, 1])
    for blocks in (second, first, third):
        pool.release(blocks)
    pool.share(second)  # used again: now it is the newest
    pool.release(second)
    got, want = [pool.allocate(1) for _ in range(3)], [first, third, second]
    assert got == want, f"used last, in this order, were blocks {sum(want, [])}; they were evicted as {sum(got, [])}"


@prefix_pool.property(
    "the end of a sequence goes before its beginning",
    hint="without its first block the others cannot be found: `release` goes through the blocks in `reversed` order",
)
def _(make):
    pool, (blocks,) = _remembering(make, 3, [3])
    pool.release(blocks)
    got = pool.allocate(1)
    assert got == blocks[-1:], f"of a sequence in blocks {blocks}, released at once, {got} was evicted first"


@prefix_pool.property(
    "a block that is shared again is safe",
    hint="`share` takes a block whose count was 0 off the cached ones, or it is evicted while it is read",
)
def _(make):
    pool, (blocks,) = _remembering(make, 4, [2])
    pool.release(blocks)
    pool.share(blocks)
    _available(pool, 2, "4 blocks, 2 of them cached and shared again")
    _without(pool.allocate(2), blocks)


@prefix_pool.property(
    "an evicted block is forgotten",
    hint="delete its key from `block_of` and from `key_of`: the next owner writes something else there",
)
def _(make):
    pool, (blocks,) = _remembering(make, 2, [2])
    pool.release(blocks)
    taken = pool.allocate(2)
    found = pool.lookup([(0, 0), (0, 1)])
    assert not found, f"block {found[:1]} was evicted and given out, and is still found by its old key"
    for block in taken:
        pool.register(block, ("new", block))
    assert pool.lookup([("new", taken[0])]) == taken[:1], "an evicted block cannot get a new key: forget the old one"
