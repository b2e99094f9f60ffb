"""Parts with a state: the reader's class in place of the engine's policy or block pool.  Lessons 09 and 10.

    with minillm.using(policy=MyPolicy) as used:
        llm.generate(...)

An engine has them made while it is idle (`Engine._adopt`). What it then holds counts the calls of the reader's methods,
and looks at each block number before anything is written there.
"""

from collections.abc import Callable, Iterable

import numpy as np

from minillm.kv_cache.block_pool import BlockPool, BlockPoolError
from minillm.overrides import NotSolvedYet, Parts, Used, register
from minillm.request import Request, SamplingParams

from .policies import FirstComeFirstServed

INTERFACES = {
    "policy": ("key", "admits", "share"),
    "block_pool": (
        *("num_blocks", "available", "cached", "allocate", "share", "release"),
        *("lookup", "register", "forget", "unreferenced"),
    ),
}


class StatefulParts(Parts):
    """Each entry makes an object: called with the engine's own class and what that takes."""

    refusal = "{name} must be a class, not an object of {type}; give the class itself"

    def replacement(self, name: str, function: Callable, used: Used, capturable: bool) -> Callable:
        def make(own: Callable, *arguments):
            try:
                REHEARSALS[name](function)
            except NotSolvedYet as todo:
                used.not_solved[name] = str(todo) or "not solved yet"
                return own(*arguments)
            part = function(*arguments)
            missing = [each for each in INTERFACES[name] if not (hasattr(type(part), each) or hasattr(part, each))]
            if missing:
                way = f"write them, or derive the class from {own.__module__}.{own.__name__}"
                raise TypeError(f"{type(part).__name__} cannot be a {name}: it has no {', '.join(missing)}; {way}")
            counted = type(type(part).__name__, (Counted,), {})(part, name, used)
            if name == "block_pool":
                _look_at_blocks(counted, *arguments)
            return counted

        return make


def made(own: Callable, *arguments):
    """The engine's own."""
    return own(*arguments)


PARTS = StatefulParts(dict.fromkeys(INTERFACES, made))


@register
def _parts_here() -> list[Parts]:
    return [PARTS]


class Counted:
    """The reader's object, each call of a method counted; attributes are its own."""

    def __init__(self, part, name: str, used: Used):
        self.__dict__.update(_part=part, _name=name, _used=used)

    def __setattr__(self, attribute: str, value) -> None:
        setattr(self._part, attribute, value)

    def __getattr__(self, attribute: str):
        found = getattr(self._part, attribute)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            self._used.calls[self._name] += 1
            return found(*args, **kwargs)

        self.__dict__[attribute] = call
        return call


def _look_at_blocks(pool: Counted, num_blocks: int) -> None:
    """Have a pool refused that gives blocks which the cache does not have: a kernel would write outside its memory."""
    name = type(pool).__name__
    if pool.num_blocks != num_blocks:
        raise BlockPoolError(f"{name}.num_blocks is {pool.num_blocks!r}, and it was made for {num_blocks} blocks")
    give, look_up = pool.allocate, pool.lookup

    def checked(method: str, blocks: Iterable[int]) -> list[int]:
        blocks = np.array(list(blocks))
        if len(blocks) and (blocks.dtype.kind not in "iu" or blocks.min() < 0 or blocks.max() >= num_blocks):
            raise BlockPoolError(f"{name}.{method} gave {blocks.tolist()}; blocks go from 0 to {num_blocks - 1}")
        return blocks.tolist()

    def allocate(count: int) -> list[int]:
        blocks = checked("allocate", give(count))
        if len(blocks) != count:
            raise BlockPoolError(f"{name}.allocate({count}) gave {len(blocks)} blocks")
        return blocks

    def lookup(keys: Iterable[bytes]) -> list[int]:
        keys = list(keys)
        return checked("lookup", look_up(keys))[: len(keys)]

    pool.__dict__.update(allocate=allocate, lookup=lookup)


# ---- is it written already?


def _rehearse_policy(make: Callable[[], FirstComeFirstServed]) -> None:
    policy = make()
    request = Request("rehearsal", np.zeros(4, np.int32), SamplingParams(max_tokens=4), limit=8, arrival=0)
    _each(lambda: policy.key(request), lambda: policy.admits(0), lambda: policy.admits(1))
    for pending, budget in (([1], 1), ([9], 4), ([1, 9, 1], 64), ([9, 1, 9], 8)):
        _each(lambda pending=pending, budget=budget: policy.share(np.array(pending, np.int32), budget))


def _rehearse_pool(make: Callable[[int], BlockPool]) -> None:
    pool, held = make(4), []
    _each(
        lambda: pool.available,
        lambda: held.extend(pool.allocate(2)),
        lambda: pool.register(held[0], b"known"),
        lambda: pool.share(pool.lookup([b"known", b"unknown"])),
        lambda: pool.unreferenced(held),
        lambda: pool.release(held[:1]),
        lambda: pool.release(held),
        lambda: pool.cached,
        lambda: pool.release(pool.allocate(4)),  # the cached one too
        lambda: pool.forget(),
    )


def _each(*calls: Callable) -> None:
    """What a stub raises; any other mistake is left for the engine to show, where it happens."""
    for call in calls:
        try:
            call()
        except NotSolvedYet:
            raise
        except Exception:
            continue


REHEARSALS = {"policy": _rehearse_policy, "block_pool": _rehearse_pool}
