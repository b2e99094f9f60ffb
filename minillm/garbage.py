"""Keep Python's garbage collector from stopping an engine.  Lesson 99.

A full collection visits every object that may be part of a cycle. With torch imported that takes 0.04 s or more, in
which no stream gets a token. Objects that stay until the server ends need no visit.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

NEVER = 1 << 30  # collections of the others before a full one


@contextmanager
def frozen() -> Iterator[None]:
    """Collect garbage now; until the block ends, collections visit only objects that are made inside it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_lock = Lock()
_thresholds: list[tuple[int, int, int]] = []  # before each block of `young` that has not ended, in any thread


@contextmanager
def young() -> Iterator[None]:
    """Until the block ends, automatic collections leave out objects that have survived two of them.

    For work that makes many objects of which none are in cycles, as log-probabilities are. A Python without full
    collections, 3.14.0 for example, ignores this.
    """
    with _lock:
        _thresholds.append(gc.get_threshold())
        gc.set_threshold(*_thresholds[0][:2], NEVER)
    begun_in = os.getpid()
    try:
        yield
    finally:
        with _lock:
            if os.getpid() == begun_in:  # else the fork has ended it
                first = _thresholds[0]
                _thresholds.pop()
                gc.set_threshold(*first[:2], NEVER if _thresholds else first[2])


def _end_all() -> None:
    """End all blocks of `young`, in a process that was just forked: their threads do not run there."""
    global _lock
    _lock = Lock()
    if _thresholds:
        gc.set_threshold(*_thresholds[0])
        _thresholds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)
