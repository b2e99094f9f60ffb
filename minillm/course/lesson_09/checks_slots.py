"""Slots of a request's tokens.  Lesson 09."""

from collections.abc import Callable
from numbers import Integral

from ..shared.checks import Exercise, assert_list

slots_of = Exercise("slots_of", seconds=5.0)


def _slots(function: Callable, table: list[int], start: int, end: int, block_size: int) -> list[int]:
    return [int(slot) for slot in function(table, start, end, block_size)]


@slots_of.example
def _(function):
    got = _slots(function, [2, 3], 0, 4, 4)
    assert got == [8, 9, 10, 11], f"table [2, 3], tokens 0 to 3, blocks of 4: expected [8, 9, 10, 11], got {got}"


@slots_of.property(
    "blocks may be anywhere in memory",
    hint="look up every token's block in the table: the next block in memory may belong to another request",
)
def _(function):
    one, other = (_slots(function, [5, block], 0, 8, 4) for block in (1, 2))
    moved = [there - here for here, there in zip(one, other, strict=True)]
    assert moved == [0] * 4 + [4] * 4, f"table [5, 1] became [5, 2], and the slots of tokens 0 to 7 moved by {moved}"
    one, other = (_slots(function, [5, block, 3], 0, 12, 4) for block in (1, 2))
    moved = [there - here for here, there in zip(one, other, strict=True)]
    said = f"table [5, 1, 3] became [5, 2, 3], and the slots of tokens 0 to 11 moved by {moved}"
    assert moved == [0] * 4 + [4] * 4 + [0] * 4, said


@slots_of.property(
    "the offset starts again in each block",
    hint="the offset is counted from the start of the token's block, not from the start of the request",
)
def _(function):
    got = _slots(function, [2, 3, 4], 0, 12, 4)
    assert got == list(range(8, 20)), f"table [2, 3, 4], tokens 0 to 11, blocks of 4: slots 8 to 19, not {got}"


@slots_of.property(
    "positions count from the request's first token",
    hint="the token at position `start` is not the first of the request, and the one at `end` is not included",
)
def _(function):
    whole = _slots(function, [2, 3], 0, 8, 4)
    for start, end in ((6, 7), (3, 6), (4, 8), (5, 5)):
        got = _slots(function, [2, 3], start, end, 4)
        span = f"start {start}, end {end}, table [2, 3], blocks of 4"
        assert got == whole[start:end], f"{span}: expected {whole[start:end]}, got {got}"


@slots_of.property("the block size is the one given", hint="use `block_size` everywhere; it need not be a power of two")
def _(function):
    for size in (1, 2, 3, 16):
        got, want = _slots(function, [3], 0, size, size), list(range(3 * size, 4 * size))
        assert got == want, f"table [3], blocks of {size}: expected {want}, got {got}"
    for size in (2, 5):  # the same table and positions, other slots
        got = _slots(function, [3], 0, 2, size)
        assert got == [3 * size, 3 * size + 1], f"table [3], tokens 0 and 1, blocks of {size}: got {got}"


@slots_of.property(
    "a long request finds its tokens in a large memory",
    hint="a GPU's memory has millions of slots: their numbers need more than 16 bits, and more than float32 can hold",
)
def _(function):
    if _slots(function, [1, 2, 0], 18, 34, 16) != [*range(34, 48), 0, 1]:  # another property's matter
        return
    for first, step in ((0, 1), (2_200_000, -7)):
        table = [first + step * number for number in range(300)]
        start, got = 4_210, _slots(function, list(table), 4_210, 4_790, 16)
        want = [16 * table[at // 16] + at % 16 for at in range(start, 4_790)]
        assert len(got) == len(want), f"a table of 300 blocks of 16, tokens 4210 to 4789: {len(got)} slots, not 580"
        for at, (slot, right) in enumerate(zip(got, want, strict=True), start):
            assert slot == right, f"blocks of 16, token {at} in block {table[at // 16]:,}: slot {right:,}, not {slot:,}"


@slots_of.property(
    "the table may have more blocks than needed",
    hint="go by `start` and `end`: the last block of the table need not hold the last token",
)
def _(function):
    for end in (3, 4, 6):
        want, got = (_slots(function, table, 0, end, 4) for table in ([2, 3][: -(-end // 4)], [2, 3, 9]))
        assert got == want, f"tokens 0 to {end - 1}, blocks of 4: with block 9 added to the table, {want} became {got}"


@slots_of.property("the table is not changed", hint="the engine still needs the table: read it, take nothing out of it")
def _(function):
    for end in (12, 4):
        table = [5, 1, 2]
        _slots(function, table, 0, end, 4)
        story = f"the table was [5, 1, 2], and is {table} after the slots of tokens 0 to {end - 1} were asked for"
        assert table == [5, 1, 2], story


@slots_of.property(
    "the result is a list of integers",
    hint="return a list, of whole numbers; an array or a tensor becomes one with `.tolist()`",
)
def _(function):
    got = function([2, 3], 3, 6, 4)
    assert_list(got, "slots")
    wrong = [each for each in got if not isinstance(each, Integral)]
    assert not wrong, f"one of the slots is {wrong[0]!r}, of type {type(wrong[0]).__name__}"


@slots_of.property("each call returns a new list", hint="the caller keeps the list: build another one in each call")
def _(function):
    first = function([2, 3], 0, 4, 4)
    if isinstance(first, list):  # else: another property's matter
        before = list(first)
        again, _ = function([2, 3], 0, 4, 4), function([5, 1], 2, 6, 4)
        assert first == before, f"it returned {before}, which a later call changed to {first}"
        assert first is not again, "two calls returned the same list object"
