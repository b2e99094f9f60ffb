"""How a kernel is launched: its own rule of thumb, or what was measured on this GPU.  Lesson 04.

A kernel asks here, by its name and the sizes of its problem, before it launches:

    launch = choose("prefill_attention", prefill_launch(...), dim=256, dtype="bfloat16", group=8)

The second argument is its own choice, a NamedTuple; a measured one has the same fields. Its module registers that type
when it is imported, so plans and the tuner know every kernel without a list of them. Tables of measured launches belong
to an engine's plan and hold for one thread while it runs that engine: any launch gives the same numbers, so what
another engine measured could only cost time.
"""

import pkgutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

Launch = TypeVar("Launch", bound=tuple)


class Problem(NamedTuple):
    """What one launch is chosen for: a kernel's name, and its sizes and dtypes, by name, sorted by that."""

    kernel: str
    sizes: tuple[tuple[str, int | str], ...]


Table = Mapping[Problem, Mapping[str, int]]  # the launch's fields by name
_kinds: dict[str, type[tuple]] = {}


def register(kernel: str, kind: type[tuple]) -> None:
    """Say that a kernel chooses its launch here, and which NamedTuple that is."""
    _kinds[kernel] = kind


def registered() -> dict[str, type[tuple]]:
    """Every kernel that chooses its launch here -> the launch's type."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return dict(_kinds)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16": types of one size are different problems."""
    return str(dtype).removeprefix("torch.")


class _Thread(threading.local):
    table: Table = {}
    asked: dict[Problem, tuple] | None = None


_thread = _Thread()


def problem(kernel: str, **sizes: int | str) -> Problem:
    return Problem(kernel, tuple(sorted(sizes.items())))


def choose(kernel: str, default: Launch, **sizes: int | str) -> Launch:
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
