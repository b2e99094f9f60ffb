"""The table of operations: one entry a name, one function that runs now.  Lessons 00 and 04.

Each entry has a plain-torch reference (`reference.py`, the executable specification); a device may have a faster
function for it (`cpu.py`, `triton.py`); and `using` puts the reader's own function in its place:

    with minillm.using(decode_attention=my_attention) as used:
        llm.generate(...)
    print(used.calls)
"""

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import reference

ENTRIES = (
    "embedding",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "rotary_embedding",
    "gated_activation",
    "write_kv",
    "decode_attention",
    "prefill_attention",
    "lm_head",
    "sample",
)


class NotSolvedYet(NotImplementedError):
    """Raised by an exercise's stub: the engine's own part runs instead, so nobody is ever blocked."""


def names() -> tuple[str, ...]:
    return ENTRIES


class OperationSet:
    """The functions that run now on one type of device: `ops.on("cpu").linear(x, weight)`.

    Callers read the attribute at every call, so that an override takes effect at once. `version` changes with
    every override: whatever was captured or compiled belongs to one version.
    """

    def __init__(self, device: str):
        self.device = device
        self.version = 0
        self.origin: dict[str, tuple[str, str]] = {}
        module, why_not = _fast_module(device)
        for name in ENTRIES:
            fast = getattr(module, name, None)
            setattr(self, name, fast or getattr(reference, name))
            label = module.__name__.rsplit(".", 1)[-1] if fast else "reference"
            reason = f"faster on {device}" if fast else why_not or "the reference is as fast here"
            self.origin[name] = (label, reason)

    @property
    def engines_own(self) -> bool:
        """Whether nothing is replaced: what was captured from these functions may run."""
        return all(label != "yours" for label, _ in self.origin.values())


def _fast_module(device: str):
    wanted = {"cpu": "cpu", "cuda": "triton"}.get(device)
    if wanted is None:
        return None, f"no faster functions for {device}"
    try:
        return importlib.import_module(f".{wanted}", __package__), ""
    except ImportError as error:
        return None, f"{wanted} functions cannot be imported ({error})"


_sets: dict[str, OperationSet] = {}
_lock = threading.RLock()


def on(device: str) -> OperationSet:
    """The operations for a device type ("cpu", "cuda"). There is one set a type, shared by all engines."""
    with _lock:
        if device not in _sets:
            _sets[device] = OperationSet(device)
        return _sets[device]


@dataclass
class Used:
    """How often each replaced operation ran, and which fell back to the engine's own part."""

    calls: dict[str, int] = field(default_factory=dict)
    not_solved: dict[str, str] = field(default_factory=dict)


@contextmanager
def using(**replacements: Callable) -> Iterator[Used]:
    """Run the given functions in place of the engine's own, everywhere, until the block ends.  Lesson 00.

    Names are those of `names()`; a function takes what its reference in `minillm.ops.reference` takes. One that
    raises `NotSolvedYet` falls back to the engine's own. Yields a `Used` that counts the calls. Nested blocks
    work; the inner one wins.
    """
    for name, function in replacements.items():
        if name not in ENTRIES:
            raise ValueError(f"no operation is called {name!r}; there are: {', '.join(ENTRIES)}")
        if not callable(function):
            raise TypeError(f"{name} must be a function, not {type(function).__name__}")
    used = Used(calls=dict.fromkeys(replacements, 0))
    sets = [on(device) for device in _devices()]
    before = [{name: (getattr(s, name), s.origin[name]) for name in replacements} for s in sets]
    with _lock:
        for operations, saved in zip(sets, before, strict=True):
            for name, function in replacements.items():
                setattr(operations, name, _counted(name, function, saved[name][0], used))
                label = getattr(function, "__name__", type(function).__name__)
                operations.origin[name] = ("yours", f"{label} replaces {saved[name][1][0]}")
            operations.version += 1
    try:
        yield used
    finally:
        with _lock:
            for operations, saved in zip(sets, before, strict=True):
                for name, (function, origin) in saved.items():
                    setattr(operations, name, function)
                    operations.origin[name] = origin
                operations.version += 1


def _devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else sorted({"cpu", *_sets})


def _counted(name: str, function: Callable, engines_own: Callable, used: Used) -> Callable:
    def replacement(*args, **kwargs):
        if name in used.not_solved:
            return engines_own(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except NotSolvedYet as todo:
            used.not_solved[name] = str(todo) or "not solved yet"
            return engines_own(*args, **kwargs)
        used.calls[name] += 1
        return result

    return replacement


def table(device: str = "cpu") -> list[dict[str, str]]:
    """Every operation with what runs for it now and why: name, runs, why, signature."""
    operations = on(device)
    return [
        {
            "name": name,
            "runs": operations.origin[name][0],
            "why": operations.origin[name][1],
            "signature": f"{name}{inspect.signature(getattr(reference, name))}",
        }
        for name in ENTRIES
    ]
