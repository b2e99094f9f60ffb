"""Parts of the scheduler that hold state, and that a class of yours can replace.  Lessons 09 and 10.

    with minillm.using(policy=MyPolicy) as used:
        llm.generate(...)

An engine makes them while it is idle (`Engine._adopt`). It then holds yours inside a wrapper, which counts calls
and checks each answer before anything is written where it points. The engine's own parts are trusted and run without.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from minillm.kv_cache.block_pool import BlockPool, BlockPoolError
from minillm.overrides import NotSolvedYet, OverrideError, Parts, Used, register
from minillm.request import Request, SamplingParams
from minillm.speculation.ngram import NgramProposer
from minillm.speculation.proposer import Asked, Proposer

from .policies import FirstComeFirstServed, Policy, PolicyError

SHOWN = 8  # numbers of an array that an error shows


class CheckedPolicy:
    """A user-supplied policy. Raises PolicyError for an answer that cannot be followed."""

    own = FirstComeFirstServed
    members = ("key", "admits", "share")

    def __init__(self, part: Policy, count: Callable[[], None]):
        self.part, self._count = part, count
        self.name = type(part).__name__

    @classmethod
    def rehearse(cls, make: Callable[[], Policy]) -> None:
        """Run each of its methods. Raises NotSolvedYet where one does."""
        policy = make()
        request = Request("rehearsal", np.zeros(4, np.int32), SamplingParams(max_tokens=4), limit=8, arrival=0)
        _each(lambda: policy.key(request), lambda: policy.admits(0), lambda: policy.admits(1))
        for pending, budget in (([1], 1), ([9], 4), ([1, 9, 1], 64), ([9, 1, 9], 8)):
            _each(lambda pending=pending, budget=budget: policy.share(np.array(pending, np.int32), budget))

    def key(self, request: Request) -> float:
        self._count()
        key = self.part.key(request)
        try:
            number = float(key)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if number != number:
            raise PolicyError(f"policy {self.name}: key must give a number to sort by, not {key!r}")
        return number

    def admits(self, running: int) -> bool:
        self._count()
        return self.part.admits(running)

    def share(self, pending: np.ndarray, budget: int) -> np.ndarray:
        """Whole numbers within what is pending, and within the budget together."""
        self._count()
        pending.flags.writeable = False
        answer = self.part.share(pending, budget)
        pending.flags.writeable = True
        shares = np.asarray(answer)
        if shares.shape != pending.shape or shares.dtype.kind not in "iu":
            wrong = f"one whole number for each of {len(pending)} rows was asked for"
        elif (shares < 0).any() or (shares > pending).any():
            wrong = "each must be from 0 to what is pending"
        elif shares.sum() > budget:
            wrong = f"that is {int(shares.sum())} tokens in all"
        else:
            return shares.astype(np.int32, copy=False)
        call = f"share(pending={_shown(pending)}, budget={budget})"
        raise PolicyError(f"policy {self.name}: {call} gave {_shown(shares)}; {wrong}")


class CheckedPool:
    """A user-supplied block pool. Raises BlockPoolError for blocks that the cache does not have: a kernel would write
    outside its memory."""

    own = BlockPool
    members = (
        *("num_blocks", "available", "cached", "allocate", "share", "release"),
        *("lookup", "register", "forget", "unreferenced"),
    )

    def __init__(self, part: BlockPool, count: Callable[[], None], num_blocks: int):
        self.part, self._count, self.num_blocks = part, count, num_blocks
        self.name = type(part).__name__
        if part.num_blocks != num_blocks:
            raise BlockPoolError(
                f"{self.name}.num_blocks is {part.num_blocks!r}, and it was made for {num_blocks} blocks"
            )

    @classmethod
    def rehearse(cls, make: Callable[[int], BlockPool]) -> None:
        """Run each of its methods. Raises NotSolvedYet where one does."""
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

    @property
    def available(self) -> int:
        return self.part.available

    @property
    def cached(self) -> int:
        return self.part.cached

    def allocate(self, count: int) -> list[int]:
        self._count()
        blocks = self._known("allocate", self.part.allocate(count))
        if len(blocks) != count:
            raise BlockPoolError(f"{self.name}.allocate({count}) gave {len(blocks)} blocks")
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        self._count()
        self.part.share(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self._count()
        self.part.release(blocks)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        self._count()
        keys = list(keys)
        return self._known("lookup", self.part.lookup(keys))[: len(keys)]

    def register(self, block: int, key: bytes) -> None:
        self._count()
        self.part.register(block, key)

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        """Return a user-supplied pool forgets all blocks if only some are asked for."""
        self._count()
        self.part.forget()

    def unreferenced(self, blocks: Iterable[int]) -> int:
        self._count()
        return self.part.unreferenced(blocks)

    def check(self, holders: Iterable[int]) -> None:
        if hasattr(self.part, "check"):
            self.part.check(holders)

    def are_cached(self, blocks: Iterable[int]) -> list[bool]:
        """Return False for each block if the user-supplied pool lacks the method."""
        return self.part.are_cached(blocks) if hasattr(self.part, "are_cached") else [False for _ in blocks]

    def watch_evictions(self, on_evict: Callable[[int], None]) -> None:
        if hasattr(self.part, "watch_evictions"):
            self.part.watch_evictions(on_evict)

    def _known(self, method: str, answer: Iterable[int]) -> list[int]:
        blocks = np.array(list(answer))
        if len(blocks) and (blocks.dtype.kind not in "iu" or blocks.min() < 0 or blocks.max() >= self.num_blocks):
            raise BlockPoolError(
                f"{self.name}.{method} gave {blocks.tolist()}; blocks go from 0 to {self.num_blocks - 1}"
            )
        return blocks.tolist()


class CheckedProposer:
    """A user-supplied proposer. `Speculation` checks every proposer's answers."""

    own = NgramProposer
    members = ("propose", "forget")

    def __init__(self, part: Proposer, count: Callable[[], None]):
        self.part, self._count = part, count
        self.name, self.slow = type(part).__name__, bool(getattr(part, "slow", False))

    @classmethod
    def rehearse(cls, make: Callable[[], Proposer]) -> None:
        """Run each of its methods. Raises NotSolvedYet where one does."""
        proposer = make()
        asked = [Asked("rehearsal", np.array([1, 2, 3, 1, 2], np.int32), 2)]
        _each(lambda: proposer.propose(asked), lambda: proposer.forget("rehearsal"))

    def propose(self, asked: Sequence[Asked]) -> Sequence[Sequence[int]]:
        self._count()
        return self.part.propose(asked)

    def forget(self, request_id: str) -> None:
        self._count()
        self.part.forget(request_id)


WRAPPERS: dict[str, type[CheckedPolicy] | type[CheckedPool] | type[CheckedProposer]] = {
    "policy": CheckedPolicy,
    "block_pool": CheckedPool,
    "proposer": CheckedProposer,
}


class StatefulParts(Parts):
    """Each entry makes an object: called with the engine's own class and what that takes."""

    refusal = "{name} must be a class, not an object of {type}; give the class itself"

    def replacement(self, name: str, function: Callable, used: Used, capturable: bool) -> Callable:
        wrapper = WRAPPERS[name]

        def count() -> None:
            used.calls[name] += 1

        def make(own: Callable, *arguments: Any) -> Any:
            try:
                wrapper.rehearse(function)
            except NotSolvedYet as todo:
                used.not_solved[name] = str(todo) or "not solved yet"
                return own(*arguments)
            part = function(*arguments)
            missing = [each for each in wrapper.members if not (hasattr(type(part), each) or hasattr(part, each))]
            if missing:
                way = f"write them, or derive the class from {wrapper.own.__module__}.{wrapper.own.__name__}"
                raise OverrideError(f"{type(part).__name__} cannot be a {name}: it has no {', '.join(missing)}; {way}")
            return wrapper(part, count, *arguments)

        return make


def made(own: Callable, *arguments: Any) -> Any:
    """Make the engine's own part."""
    return own(*arguments)


PARTS = StatefulParts(dict.fromkeys(WRAPPERS, made))


@register
def _parts_here() -> list[Parts]:
    return [PARTS]


def _each(*calls: Callable) -> None:
    """Make each call and raise a stub's NotSolvedYet. Ignore other errors: the engine shows them where they happen."""
    for call in calls:
        try:
            call()
        except NotSolvedYet:
            raise
        except Exception:
            continue


def _shown(numbers: np.ndarray) -> str:
    return np.array2string(numbers, threshold=SHOWN, edgeitems=SHOWN // 2, separator=", ")
