"""The identity of what is cached, when adapters come and go.  Lesson 15."""

import random
from collections.abc import Callable, Hashable, Iterator
from unittest.mock import patch

from ..shared.checks import Exercise, Explained, a_type

SECONDS = 5  # of CPU time for one property: correct solutions take milliseconds

adapters = Exercise("MyAdapters", returns=False, seconds=SECONDS)
TWELVE = tuple(f"adapter {number}" for number in range(12))
SALTS = ("", "1", "11", "ann", "ann1")
SHORT = (  # loads and unloads, in order
    "+a -a +a",
    "+a -a +b",
    "+a -a +b -b +a",
    "+a +b -b +b",
    "+a +b -b +c",
    "+a +b -a +c",
    "+a +b -b -a +c +d",
    "+a +b -a -b +c +d",
    "+a +b -a -b +b +a",
)


def _key(known, salt: str, name: str | None) -> tuple:
    """The key of a request, if it is a tuple of strings and numbers."""
    key = known.cache_key(salt, name)
    call = f"cache_key({salt!r}, {name!r})"
    if not isinstance(key, tuple):
        raise Explained(f"{call}: expected a tuple, got {a_type(key)}, {key!r}")
    for each in key:
        if not isinstance(each, str | int):
            raise Explained(
                f"{call}: a key is a tuple of strings and whole numbers, not with {a_type(each)}: it is written down "
                "and hashed, and must be the same in every process"
            )
    return key


def _loaded(make: Callable, *names: str):
    known = make()
    for name in names:
        known.load(name)
    return known


def _expect_different(known, one: tuple[str, str | None], other: tuple[str, str | None], when: str) -> None:
    found = [_key(known, *each) for each in (one, other)]
    assert found[0] != found[1], f"{when}: cache_key{one} and cache_key{other} are both {found[0]}"


@adapters.example
def _(make):
    known = _loaded(make, "pirate")
    keys = [_key(known, "", "pirate") for _ in range(2)]
    assert keys[0] == keys[1], f"two requests with one adapter have the keys {keys[0]} and {keys[1]}"


@adapters.property(
    "requests of one load share a key",
    "as long as an adapter stays loaded, its key stays; whatever else is loaded and unloaded meanwhile",
)
def _(make):
    known = _loaded(make, "a", "b")
    before = {name: _key(known, "ann", name) for name in ("a", None)}
    for act, name in (("load", "c"), ("unload", "b"), ("load", "d"), ("load", "b"), ("unload", "c")):
        getattr(known, act)(name)
        for each, key in before.items():
            now = _key(known, "ann", each)
            assert now == key, f"after {act}({name!r}), the key of {each!r} is {now}, and was {key}"


@adapters.property(
    "the model itself has another key than any adapter",
    "None is no adapter, whatever they are called: an adapter may have the name 'None', 'model' or '0'",
)
def _(make):
    for name in ("first", "None", "base", "0", "none", "model", "the model"):
        known = _loaded(make, name)
        _expect_different(known, ("", name), ("", None), f"{name!r} was loaded")
    for count in (2, 5):
        known = _loaded(make, *map(str, range(count)))
        for name in map(str, range(count)):
            _expect_different(known, ("", name), ("", None), f"{count} adapters were loaded")


@adapters.property(
    "two adapters have different keys",
    "each load has a number of its own; if the name is there, too, keep it apart: 'a1' and 1 are not 'a' and 11",
)
def _(make):
    known = _loaded(make, *TWELVE)
    for at, name in enumerate(TWELVE):
        for other in TWELVE[:at]:
            _expect_different(known, ("", name), ("", other), "12 adapters were loaded")
    # Glued together, the first name and number would be the last ones: "a1" and 1, or "a" and 11.
    known = _loaded(make, "a1", *TWELVE[:9], "a")
    _expect_different(known, ("", "a1"), ("", "a"), "11 adapters were loaded")


@adapters.property(
    "another salt is another key, wherever the load's number begins",
    "put the salt itself into the tuple, and keep the parts apart: 'ann' and 11 are not 'ann1' and 1",
)
def _(make):
    names = [str(number) for number in range(1, 13)]
    known = _loaded(make, *names)
    seen: dict[Hashable, tuple[str, str | None]] = {}
    for name in (None, *names):
        for salt in SALTS:
            key = _key(known, salt, name)
            other = seen.setdefault(key, (salt, name))
            assert other[0] == salt, f"cache_key{other} and cache_key{(salt, name)} are both {key}"
            assert salt in key, f"cache_key{(salt, name)} is {key}, in which the salt is not"


@adapters.property(
    "the same loads have the same keys in every process",
    "a router computes the keys, too: leave out what hash() or id() returns, the time, and random numbers",
)
def _(make):
    own, found = hash, []
    for process in range(2):  # in another one, hash() of the same string returns another number
        with patch("builtins.hash", lambda value, process=process: own((process, value))):
            known = _loaded(make, "a", "b", "c")
            known.unload("b")
            known.load("d")
            found.append([_key(known, "ann", name) for name in (None, "a", "c", "d")])
    if any("ann" not in key for key in found[0]):
        return  # another property's matter
    for name, one, other in zip((None, "a", "c", "d"), *found, strict=True):
        assert one == other, f"cache_key('ann', {name!r}) is {one} in one process and {other} in another one"


@adapters.property(
    "an adapter that is loaded again under its name has another key",
    "its files may have changed: what must be equal is the load, not the name",
)
def _(make):
    _loaded_again(make)


def _loaded_again(make: Callable) -> None:
    known = _loaded(make, "style")
    first = _key(known, "", "style")
    known.unload("style")
    known.load("other")
    known.load("style")
    again = _key(known, "", "style")
    assert again != first, f"'style' was loaded, unloaded, and later loaded again: both loads have the key {first}"


@adapters.property(
    "no number is ever used again",
    "forget the name, but never its number: count all loads there have been, not those that are left, since what an "
    "unloaded adapter has cached is still there",
)
def _(make):
    known = _loaded(make, *TWELVE)
    if len({_key(known, "", name) for name in TWELVE}) < len(TWELVE):
        return  # another property's matter
    try:
        _loaded_again(make)
    except AssertionError:
        return  # that property says so
    for acts in SHORT:
        _expect_new_keys(make, acts.split())
    for seed in range(8):
        _expect_new_keys(make, list(_drawn(random.Random(seed), new_names=seed % 2 == 0)))


def _drawn(rng: random.Random, new_names: bool) -> Iterator[str]:
    """Loads, with unloads between them: of the newest, of several in a row, of all, or of any."""
    loaded, loads = list[str](), 0
    for _ in range(40):
        for _ in range(rng.randint(1, 3)):
            names = [f"adapter-{loads}"] if new_names else [each for each in "abcdef" if each not in loaded]
            if names:
                loads += 1
                loaded.append(rng.choice(names))
                yield f"+{loaded[-1]}"
        newest = loaded[::-1]
        gone = rng.choice((newest[:1], newest[:2], newest, loaded[:], loaded[:1], rng.sample(loaded, 1), []))
        for each in gone:
            loaded.remove(each)
            yield f"-{each}"


def _expect_new_keys(make: Callable, acts: list[str]) -> None:
    """Load (+) and unload (-) adapters: each load has a key that no load before it had."""
    known, seen = make(), dict[Hashable, int]()
    for at, act in enumerate(acts):
        name = act[1:]
        if act[0] == "-":
            known.unload(name)
            continue
        known.load(name)
        key = _key(known, "", name)
        first = seen.setdefault(key, at)
        between = " ".join(acts[first : at + 1]) if at - first <= 12 else f"{acts[first]} ... {act}"
        assert first == at, f"of {between} (+ loads and - unloads), the first and the last load have one key: {key}"


@adapters.property(
    "a name that is not loaded raises KeyError",
    "a request must not run with the model itself because its adapter is gone",
)
def _(make):
    known = _loaded(make, "a", "b")
    known.unload("a")
    for name in ("a", "never loaded"):
        try:
            key = known.cache_key("", name)
        except KeyError:
            continue
        raise AssertionError(f"{name!r} is not loaded, and cache_key('', {name!r}) returned {key!r}")


@adapters.property("two tables know nothing of each other", "what an object knows belongs into `self`")
def _(make):
    def knows(name: str) -> bool:
        try:
            other.cache_key("", name)
        except KeyError:
            return False
        return True

    one, other = make(), make()
    one.load("here")
    if not knows("nowhere"):  # else: another property's matter
        assert not knows("here"), "'here' was loaded into one MyAdapters, and another one knows it"
