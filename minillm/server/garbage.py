"""Keep Python's garbage collector from stopping a server.  Lesson 99.

A full collection visits every object that may be part of a cycle. With torch imported that takes 0.04 s or more, in
which no stream gets a token. Objects that stay until the server ends need no visit.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """Collect garbage now; until the block ends, collections visit only objects that are made inside it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
