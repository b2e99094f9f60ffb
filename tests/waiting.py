"""How tests wait: for what has to come, never for seconds."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import minillm

PATIENCE = 300  # seconds until a test gives up: a busy machine takes its time, only what hangs takes this long


def until(condition: Callable[[], object]) -> None:
    """Wait for what nothing tells of."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


async def come(condition: Callable[[], object]) -> None:
    """`until`, while the loop goes on."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


@contextmanager
def gate(free: int = 0) -> Iterator[threading.Event]:
    """All steps of engines but the first `free` wait until the gate is set: nothing ends before a test wants it to."""
    opened, steps = threading.Event(), itertools.count()

    def embedding(ids, weight, scale):
        if next(steps) >= free:
            assert opened.wait(PATIENCE), "the gate was not opened"
        return weight[ids] * scale

    with minillm.using(embedding=embedding):
        try:
            yield opened
        finally:
            opened.set()


def idle(engine) -> bool:
    """Whether an engine holds no request and no block."""
    stats = engine.stats()
    return stats["running"] == stats["waiting"] == 0 and stats["blocks_available"] == stats["blocks"]
