"""Launch configurations: each kernel's own heuristic, or one that was measured on this GPU.  Lesson 11.

Before it launches, a kernel looks up its configuration by its name and the sizes of its problem:

    config = tuned("prefill_attention", prefill_config(...), dim=256, dtype="bfloat16", group=8)

The second argument is the heuristic's choice, a NamedTuple; a measured configuration has the same fields. A kernel's
module registers that type on import, so plans and the tuner need no list of kernels. A table of measured configurations
belongs to an engine's plan and is in effect in one thread while it runs that engine. Every configuration gives the same
results; only the speed differs.
"""

import pkgutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

Config = TypeVar("Config", bound=tuple)


class Problem(NamedTuple):
    """The key of a configuration: a kernel's name, and its sizes and dtypes, sorted by their names."""

    kernel: str
    sizes: tuple[tuple[str, int | str], ...]


Table = Mapping[Problem, Mapping[str, int]]  # the configuration's fields by name
_kinds: dict[str, type[tuple]] = {}


def register(kernel: str, kind: type[tuple]) -> None:
    """Register the NamedTuple that is a kernel's launch configuration."""
    _kinds[kernel] = kind


def registered() -> dict[str, type[tuple]]:
    """Return, for every registered kernel, the type of its launch configuration. Imports all kernels."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return dict(_kinds)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16". Names, not sizes, because bfloat16 and float16 are different problems."""
    return str(dtype).removeprefix("torch.")


class _Thread(threading.local):
    table: Table = {}
    asked: dict[Problem, tuple] | None = None


_thread = _Thread()


def problem(kernel: str, **sizes: int | str) -> Problem:
    """Return the key of a configuration: `problem("prefill_attention", dim=256, dtype="bfloat16")`."""
    return Problem(kernel, tuple(sorted(sizes.items())))


def tuned(kernel: str, default: Config, **sizes: int | str) -> Config:
    """Return the measured launch configuration of this problem, if there is one, else `default`.  Lesson 11."""
    if not _thread.table and _thread.asked is None:
        return default
    key = problem(kernel, **sizes)
    if _thread.asked is not None:
        _thread.asked[key] = default
    measured = _thread.table.get(key)
    return default if measured is None else type(default)(**measured)


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Inside the block, `tuned` returns the entries of `table`, in this thread only."""
    before, _thread.table = _thread.table, table
    try:
        yield
    finally:
        _thread.table = before


@contextmanager
def listening() -> Iterator[dict[Problem, tuple]]:
    """Record the calls of `tuned` in this thread, inside the block: each problem -> the heuristic's choice."""
    before, _thread.asked = _thread.asked, {}
    try:
        yield _thread.asked
    finally:
        _thread.asked = before
