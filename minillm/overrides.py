"""Overrides: parts of the running engine that user-supplied functions replace.  Lesson 00.

    with minillm.using(decode_attention=my_attention) as used:
        llm.generate(...)
    print(used.calls)

A module with replaceable functions keeps them in a `Parts` and calls them through it. What can be replaced are the
operations of `minillm.ops`; of the tokenizer, `bpe_merge`; of quantization, `awq_scales`, `awq_clipping` and `gptq`;
of several GPUs, `shard`, `all_reduce` and `sharded_argmax`; and, by classes, the scheduler's `policy`, `block_pool` and
`proposer`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from minillm.errors import MinillmError

# Importing these modules registers their parts.
HOMES = ("ops.table", "tokenizer.bpe", "scheduler.checked", "quantization.methods.replaceable", "model.replaceable")


class OverrideError(MinillmError, ValueError):
    """A part that does not exist, or that what is given cannot replace."""


class NotSolvedYet(MinillmError, NotImplementedError):
    """Raised by an exercise's stub: the engine then uses its own implementation."""


class Parts:
    """Named functions, each an attribute that callers read at every call, so that a replacement works at once.

    `version` changes with every replacement: whatever was captured, compiled or remembered belongs to one version.
    `origin` says of each name what runs, and why.
    """

    refusal = "{name} must be a function, not {type}"

    def __init__(self, functions: dict[str, Callable], origin: dict[str, tuple[str, str]] | None = None):
        self.names, self.own = tuple(functions), tuple(functions.values())
        self.version = 0
        self.origin = origin or dict.fromkeys(functions, ("engine", "the engine's own"))
        for name, function in functions.items():
            setattr(self, name, function)

    @property
    def functions(self) -> tuple[Callable, ...]:
        """Return what runs now, in the order of `names`; of what a block of `using` replaces, all or nothing."""
        with _lock:
            return tuple(getattr(self, name) for name in self.names)

    def are_own(self, *names: str) -> bool:
        """Return whether these functions are the ones that this was made with."""
        return all(getattr(self, name) is self.own[self.names.index(name)] for name in names)

    @property
    def engines_own(self) -> bool:
        """Return whether nothing is replaced."""
        return all(label != "yours" for label, _ in self.origin.values())

    @property
    def capturable(self) -> bool:
        """Return whether a CUDA graph may be captured of these functions: each replacement says that it allows it."""
        return all(self.origin[name][0] != "yours" or getattr(self, name).capturable for name in self.names)

    def replacement(self, name: str, function: Callable, used: "Used", capturable: bool) -> Callable:
        """Return what runs in place of `name` while `function` replaces it."""
        return _Counted(name, function, getattr(self, name), used, capturable)


_registered: list[Callable[[], list[Parts]]] = []
_lock = threading.RLock()


def register(parts: Callable[[], list[Parts]]) -> Callable[[], list[Parts]]:
    """Make the parts that a call of `parts` returns replaceable."""
    _registered.append(parts)
    return parts


def _all() -> list[Parts]:
    for home in HOMES:
        import_module(f".{home}", __package__)
    return [each for parts in _registered for each in parts()]


def names() -> tuple[str, ...]:
    """Everything that `using` can replace."""
    return tuple(dict.fromkeys(name for parts in _all() for name in parts.names))


def replaced(name: str) -> bool:
    """Return whether a user-supplied function runs for `name` now."""
    return any(parts.origin[name][0] == "yours" for parts in _all() if name in parts.names)


def any_replaced() -> bool:
    """Return whether a user-supplied function or class runs in place of any part. Imports nothing."""
    return not all(parts.engines_own for make in _registered for parts in make())


@dataclass
class Used:
    """Counts how often each replaced part ran (of a class: calls of its methods), and those that fell back."""

    calls: dict[str, int] = field(default_factory=dict)
    not_solved: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Block:
    """A block of `using` that has not ended."""

    replacements: dict[str, Callable]  # as they were given
    used: Used


_blocks: list[Block] = []


def blocks() -> tuple[Block, ...]:
    """Return the blocks of `using` that have not ended, from the outermost to the innermost."""
    with _lock:
        return tuple(_blocks)


@contextmanager
def using(*, capturable: bool = False, **replacements: Callable) -> Iterator[Used]:
    """Run the given parts in place of the engine's own, everywhere, until the block ends.  Lesson 00.

    Names are those of `minillm.overrides.names()`; a function takes what the one it replaces takes (for operations:
    their reference in `minillm.ops.reference`). One that raises `NotSolvedYet` falls back to the engine's own.
    Yields a `Used` that counts the calls. Nested blocks work; the inner one wins. Raises OverrideError.

    policy, block_pool and proposer are classes (or functions that make an object): `policy` is called with nothing and
    gives what `minillm.scheduler.policies.FirstComeFirstServed` describes, `block_pool` with the number of blocks and
    gives what `minillm.kv_cache.BlockPool` does, and `proposer`, in an engine that speculates, with nothing and gives
    what `minillm.speculation.Proposer` describes. They have a state, so an engine changes them only while it is idle:
    the first request after that runs with what is in place then, on a fresh scheduler that knows no prefix; an engine
    that is working, when the block begins or ends, keeps what it has until it has nothing left to do. A class falls
    back whole if a short rehearsal finds a method that raises `NotSolvedYet`.

    On a GPU replaced operations run without CUDA graphs. capturable=True declares that these may be captured in one
    (lesson 11): they launch the same kernels for equal shapes, read no value back to the host, and leave the padding
    of a batch alone, rows of length 0 with slot -1. Graphs of decode steps are then captured again, and `Used` counts
    the captures: their replays call no Python. Steps that run prompts stay outside.

    With tensor_parallel_size, operations run in processes of their own, which get copies of your functions (lesson 14):
    what a function changes outside itself is not seen here, and a call in all processes counts once. shard, all_reduce
    and sharded_argmax are what `minillm.model.replaceable` describes; an engine uses `shard` when it is made.
    """
    tables = _all()
    for name, function in replacements.items():
        refusals = [parts.refusal for parts in tables if name in parts.names]
        if not refusals:
            raise OverrideError(f"no part is called {name!r}; there are: {', '.join(names())}")
        if not callable(function):
            raise OverrideError(refusals[0].format(name=name, type=type(function).__name__))
    used = Used(calls=dict.fromkeys(replacements, 0))
    block = Block(replacements, used)
    with _lock:
        before = []
        for parts in tables:
            saved = {name: (getattr(parts, name), parts.origin[name]) for name in replacements if name in parts.names}
            before.append((parts, saved))
            for name, (_, origin) in saved.items():
                function = replacements[name]
                setattr(parts, name, parts.replacement(name, function, used, capturable))
                label = getattr(function, "__name__", type(function).__name__)
                parts.origin[name] = ("yours", f"{label} replaces {origin[0]}")
            parts.version += bool(saved)
        _blocks.append(block)
    try:
        yield used
    finally:
        with _lock:
            _blocks.remove(block)
            for parts, saved in before:
                for name, (own, origin) in saved.items():
                    setattr(parts, name, own)
                    parts.origin[name] = origin
                parts.version += bool(saved)


class _Counted:
    """A user-supplied function that runs in place of the engine's own; the engine's own runs where it is a stub."""

    def __init__(self, name: str, function: Callable, engines_own: Callable, used: Used, capturable: bool):
        self.name, self.function, self.engines_own = name, function, engines_own
        self.used, self.capturable = used, capturable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name in self.used.not_solved:
            return self.engines_own(*args, **kwargs)
        try:
            result = self.function(*args, **kwargs)
        except NotSolvedYet as todo:
            self.used.not_solved[self.name] = str(todo) or "not solved yet"
            return self.engines_own(*args, **kwargs)
        self.used.calls[self.name] += 1
        return result
