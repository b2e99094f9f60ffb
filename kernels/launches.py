"""How a kernel is launched: its own rule of thumb, or what was measured on this GPU.  Lesson 04.

A kernel asks here, by its name and the sizes of its problem, before it launches:

    launch = choose("prefill_attention", prefill_launch(...), dim=256, itemsize=2, group=8)

The second argument is its own choice, a NamedTuple; a measured one has the same fields. Tables of those belong to an
engine's plan and hold for one thread while it runs that engine: any launch gives the same numbers, so what another
engine measured could only cost time.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

Launch = TypeVar("Launch", bound=tuple)


class Problem(NamedTuple):
    """What one launch is chosen for: a kernel's name, and its sizes sorted by name."""

    kernel: str
    sizes: tuple[tuple[str, int], ...]


Table = Mapping[Problem, Mapping[str, int]]  # the launch's fields by name


class _Thread(threading.local):
    table: Table = {}
    asked: dict[Problem, tuple] | None = None


_thread = _Thread()


def problem(kernel: str, **sizes: int) -> Problem:
    return Problem(kernel, tuple(sorted(sizes.items())))


def choose(kernel: str, default: Launch, **sizes: int) -> Launch:
    """The measured launch of this problem, if there is one, else `default`."""
    if not _thread.table and _thread.asked is None:
        return default
    key = problem(kernel, **sizes)
    if _thread.asked is not None:
        _thread.asked[key] = default
    measured = _thread.table.get(key)
    return default if measured is None else type(default)(**measured)


@contextmanager
def using(table: Table) -> Iterator[None]:
    """In this thread, until the block ends, launches come from `table` where it has them."""
    before, _thread.table = _thread.table, table
    try:
        yield
    finally:
        _thread.table = before


@contextmanager
def listening() -> Iterator[dict[Problem, tuple]]:
    """What is asked for in this thread until the block ends: each problem, and the kernel's own choice."""
    before, _thread.asked = _thread.asked, {}
    try:
        yield _thread.asked
    finally:
        _thread.asked = before
