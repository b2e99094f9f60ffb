"""Keep Python's garbage collector from stopping an engine.  Lesson 99.

A full collection visits every object that may be part of a cycle. With torch imported that takes 0.04 s or more, in
which no stream gets a token. Objects that stay until the server ends need no visit.
"""

import gc
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

    For work that makes many objects of which none are in cycles, as log-probabilities are. Python 3.14 has no full
    collections, and ignores this.
    """
    with _lock:
        _thresholds.append(gc.get_threshold())
        gc.set_threshold(*_thresholds[0][:2], NEVER)
    try:
        yield
    finally:
        with _lock:
            first = _thresholds[0]
            _thresholds.pop()
            gc.set_threshold(*first[:2], NEVER if _thresholds else first[2])
