"""Prefix keys.  Lesson 09."""

import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import combinations, permutations
from numbers import Real

from ..shared.checks import Exercise, assert_list

prefix_keys = Exercise("prefix_keys", seconds=5.0)
LONGEST_SEARCH = 2.5  # seconds
ONE_TO_EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


def _keys(function: Callable, tokens: Iterable[int], block_size: int = 4, **salt: str) -> list:
    """The keys of these tokens: at least one for each full block."""
    tokens = list(tokens)
    keys, blocks = list(function(list(tokens), block_size, **salt)), len(tokens) // block_size
    assert len(keys) >= blocks, _wrong_number(len(tokens), block_size, len(keys))
    return keys


def _wrong_number(tokens: int, block_size: int, got: int) -> str:
    return f"{tokens} tokens in blocks of {block_size}: expected {tokens // block_size} keys, got {got}"


@prefix_keys.example
def _(function):
    keys, again = (_keys(function, ONE_TO_EIGHT) for _ in range(2))
    assert len(keys) == 2, _wrong_number(8, 4, len(keys))
    assert keys == again, f"the same tokens gave {keys} the first time and {again} the second"
    assert keys[0] != keys[1], f"two different blocks have the same key, {keys[0]!r}"


def _unchanged(function: Callable) -> Iterator[tuple[int, list[int]]]:
    """Change one token of 20 blocks of 4 at a time: its position, and the blocks from its own on that keep their key"""
    tokens = list(range(1, 81))
    keys = _keys(function, tokens)
    for position in range(len(tokens)):
        changed = _keys(function, [99 if at == position else token for at, token in enumerate(tokens)])
        yield position, [block for block in range(position // 4, 20) if keys[block] == changed[block]]


@prefix_keys.property("a key depends on all tokens of its block", hint="use all of the block's own tokens")
def _(function):
    for position, same in _unchanged(function):
        own = position // 4
        assert own not in same, f"blocks of 4: token {position} changed, and its block {own} has the same key as before"
    tokens = list(range(1, 33))
    before, *more = _keys(function, tokens, 32)
    for position in () if more else range(32):  # more: another property's matter
        changed = _keys(function, [99 if at == position else token for at, token in enumerate(tokens)], 32)
        assert changed[0] != before, f"a block of 32: token {position} changed, and the key is the same as before"


@prefix_keys.property(
    "a key depends on all tokens before its block",
    hint="put the previous block's key into the hash: it depends on the key before it, and so on",
)
def _(function):
    for position, same in _unchanged(function):
        if position // 4 not in same:  # else: another property's matter
            said = f"blocks of 4: token {position} changed, and block {min(same, default=0)} has the same key as before"
            assert not same, said
    tokens = list(range(1, 1_201))
    one, other = _keys(function, tokens), _keys(function, [9_999, *tokens[1:]])
    if one[0] != other[0]:  # else: another property's matter
        said = "blocks of 4: the first of 1,200 tokens changed, and the last block has the same key as before"
        assert one[-1] != other[-1], said
    one, other = (_keys(function, [first, *range(2, 13)], salt="ann") for first in (1, 99))
    if one[0] != other[0]:  # else: another property's matter
        for block in (1, 2):
            said = f"blocks of 4, with the salt 'ann': token 0 changed, and block {block} has the same key as before"
            assert one[block] != other[block], said


@prefix_keys.property(
    "a key does not depend on later tokens", hint="a block's key comes from its own tokens and those before it only"
)
def _(function):
    short, long = _keys(function, [1, 2, 3, 4, 5]), _keys(function, [1, 2, 3, 4, 6, 7, 8, 9])
    assert short[0] == long[0], "two prompts with the same first block have different first keys"


@prefix_keys.property(
    "each full block has a key, and no other",
    hint="blocks have `block_size` tokens; if the last one has fewer, it gets no key: it will still be written to",
)
def _(function):
    for size, counts in ((4, (0, 3, 4, 6, 8, 1_203)), (3, (2, 3, 7)), (1, (2,)), (16, (15, 33))):
        for tokens in counts:
            got = len(_keys(function, range(1, tokens + 1), size))
            assert got == tokens // size, _wrong_number(tokens, size, got)


@prefix_keys.property(
    "the order of the tokens matters",
    hint="sums, sets and sorting lose the order, within a block and between blocks; and 0 is a token like any other",
)
def _(function):
    assert _keys(function, [1, 2, 3, 4]) != _keys(function, [4, 3, 2, 1]), "1 2 3 4 and 4 3 2 1 have the same key"
    seen: list[tuple] = []
    for order in permutations([0, 1, 2, 3]):
        key = _keys(function, order)[0]
        same = next((other for other, its_key in seen if its_key == key), None)
        assert same is None, f"{' '.join(map(str, same or ()))} and {' '.join(map(str, order))} have the same key"
        seen.append((order, key))
    second = _keys(function, ONE_TO_EIGHT)[1]
    if second != _keys(function, [9, 2, 3, 4, 5, 6, 7, 8])[1]:  # else: another property's matter
        for other in ([5, 6, 7, 8, 1, 2, 3, 4], [4, 3, 2, 1, 5, 6, 7, 8]):
            assert second != _keys(function, other)[1], f"{ONE_TO_EIGHT} and {other} have the same second key"


@prefix_keys.property(
    "different tokens are told apart",
    hint="joined without a separator, 1 and 23 look like 12 and 3; a token can come twice, and its number can be "
    "above 65,535",
)
def _(function):
    small = ([1, 23, 5, 6], [12, 3, 5, 6]), ([1, 1, 2, 3], [1, 2, 2, 3])
    large = ([1, 2, 3, 4], [257, 2, 3, 4]), ([7] * 4, [65_543] + [7] * 3), ([50_001] * 4, [50_002] * 4)
    for one, other in (*small, *large):
        said = f"{' '.join(map(str, one))} and {' '.join(map(str, other))} have the same key"
        assert _keys(function, one) != _keys(function, other), said


@prefix_keys.property(
    "thousands of blocks have thousands of keys",
    hint="use every bit of the hash, and put all of it into the next one: with few values, two blocks soon share a key",
)
def _(function):
    pairs = list(combinations(range(10, 100), 2))
    keys = [_keys(function, pair, 2)[0] for pair in pairs]
    if _hashable(keys):  # else: another property's matter
        assert len(set(keys)) == len(pairs), f"{len(pairs):,} different blocks have only {len(set(keys)):,} keys"
        if _has_few_values(_keys(function, range(10_000, 10_020), 20)[0]):
            _collide(function)
        _meet(function)


def _has_few_values(key: object) -> bool:
    """Return whether a key of 20 tokens seems to have at most some 2**36 values: half a million keys then collide."""
    if isinstance(key, Real):
        return abs(float(key)) < 2**36
    return isinstance(key, str | bytes) and len(key) <= (4 if isinstance(key, bytes) else 11)


def _collide(function: Callable, prompts: int = 8_192, blocks: int = 64) -> None:
    """Look for two prefixes with the same key. Numbers in the order of their first use are short too, and collide not.

    prompts: at most so many, each with so many blocks of one token; fewer if the function is slow.
    """
    rng, seen, started = random.Random(0), set(), time.process_time()
    for first in range(prompts):
        keys = _keys(function, [first, *rng.choices(range(100_000), k=blocks - 1)], 1)[:blocks]
        seen.update(keys)
        count = (first + 1) * blocks
        assert len(seen) == count, f"{count:,} different prefixes have only {len(seen):,} keys"
        if time.process_time() - started > LONGEST_SEARCH:
            return


def _meet(function: Callable, prompts: int = 1_024, blocks: int = 64) -> None:
    """Look for different prefixes that end with the same block, 7, and have the same key: the chain has lost them."""
    if any(same for _, same in _unchanged(function)):  # another property's matter
        return
    rng, started = random.Random(0), time.process_time()
    seen: dict[Hashable, tuple[int, ...]] = {}
    for _ in range(prompts):
        tokens = [7 if at % 2 else rng.randrange(200) for at in range(blocks)]
        keys = _keys(function, tokens, 1)
        for end in range(blocks // 2, blocks, 2):  # from a length on that makes every prefix different
            prefix = tuple(tokens[: end + 2])
            said = f"of {len(seen) + 1:,} different prefixes that end with the same block, two have the same key"
            assert seen.setdefault(keys[end + 1], prefix) == prefix, said
        if time.process_time() - started > LONGEST_SEARCH / 2:
            return


LONG_SALT = "a-service-for-customers-in-europe/"


@prefix_keys.property("another salt gives other keys", hint="start the chain with the salt, all of it")
def _(function):
    short = (("ann", "bob"), ("ann", "anna"), ("", "ann"), ("on", "no"), ("Ann", "ann"), ("ann", " ann"), ("é", "ü"))
    long = (("ann" + LONG_SALT, "bob" + LONG_SALT), (LONG_SALT + "ann", LONG_SALT + "bob"))
    for salts in (*short, *long):
        one, other = (_keys(function, ONE_TO_EIGHT, salt=salt) for salt in salts)
        shared = [key for key in one if key in other]
        assert not shared, f"with the salts {salts[0]!r} and {salts[1]!r} the same tokens have a key in common"
    runs_on = [_keys(function, tokens, salt=salt) for salt, tokens in (("a1", [2, 3, 4, 5]), ("a", [12, 3, 4, 5]))]
    said = "the salt 'a1' with the tokens 2 3 4 5 and the salt 'a' with 12 3 4 5 have the same key"
    if _keys(function, [1, 23, 5, 6]) != _keys(function, [12, 3, 5, 6]):  # else: another property's matter
        assert runs_on[0] != runs_on[1], f"{said}: keep the salt apart from the first token"
    plain = _keys(function, ONE_TO_EIGHT)
    assert plain == _keys(function, ONE_TO_EIGHT, salt=""), "without a salt and with the salt '' the keys differ"


@prefix_keys.property("the tokens are not changed", hint="the prompt is still needed: take slices of it")
def _(function):
    tokens = list(ONE_TO_EIGHT)
    list(function(tokens, 4))
    assert tokens == ONE_TO_EIGHT, f"the tokens were {ONE_TO_EIGHT}, and are {tokens} after the call"


@prefix_keys.property(
    "the result is a list of dictionary keys", hint="collect hashes, numbers, bytes or tuples in a list"
)
def _(function):
    keys = function(list(ONE_TO_EIGHT), 4)
    assert_list(keys, "keys")
    assert _hashable(keys), f"{keys[0]!r}, of type {type(keys[0]).__name__}, cannot be a key of a dictionary"


@prefix_keys.property("each call returns a new list", hint="the caller keeps the list: build another one in each call")
def _(function):
    first = function(list(ONE_TO_EIGHT), 4)
    if isinstance(first, list):  # else: another property's matter
        before = list(first)
        again, _ = function(list(ONE_TO_EIGHT), 4), function([5, 6, 7, 8], 4)
        assert first == before, f"it returned {before}, which a later call changed to {first}"
        assert first is not again, "two calls returned the same list object"


def _hashable(keys: Iterable) -> bool:
    try:
        return bool(set(keys))
    except TypeError:
        return False
