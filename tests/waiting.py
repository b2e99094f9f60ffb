"""Waiting in tests: for a condition, never for a fixed time."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import minillm

TIMEOUT = 300  # seconds until a test gives up; long enough for a busy machine, so only a hang reaches it


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "timed out waiting for the condition"
        time.sleep(0.01)


async def async_wait_until(condition: Callable[[], object]) -> None:
    """`wait_until` without blocking the event loop."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.002)


@contextmanager
def paused_steps(free: int = 0) -> Iterator[threading.Event]:
    """Engines take `free` steps, then pause until the test sets the event, so no request ends too early."""
    resume, steps = threading.Event(), itertools.count()

    def embedding(ids, weight, scale):
        if next(steps) >= free:
            assert resume.wait(TIMEOUT), "the test never resumed the steps"
        return weight[ids] * scale

    with minillm.using(embedding=embedding):
        try:
            yield resume
        finally:
            resume.set()


def idle(engine) -> bool:
    """Whether an engine has no requests and all its blocks are available."""
    stats = engine.stats()
    return stats["running"] == stats["waiting"] == 0 and stats["blocks_available"] == stats["blocks"]
