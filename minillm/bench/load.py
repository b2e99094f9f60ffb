"""What other programs take of the machine while something is measured.  Lesson 99."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/stat")


@dataclass
class OtherLoad:
    """cores: how many processors' time other programs took on average; None where that cannot be known."""

    cores: float | None = None


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Measure, until the block ends, what all programs took but this process and its children that have ended."""
    found = OtherLoad()
    before, own, start = _busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    yield found
    after, seconds = _busy_seconds(), time.perf_counter() - start
    if before is not None and after is not None and seconds > 0:
        found.cores = max(0.0, (after - before - (sum(os.times()[:4]) - own)) / seconds)


def _busy_seconds() -> float | None:
    """Seconds that all processors together have worked since the machine started."""
    try:
        fields = PROC.read_text(encoding="ascii").splitlines()[0].split()[1:]
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / tick
