"""How much of the machine other programs use during a measurement.  Lesson 99."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/stat")


@dataclass
class OtherLoad:
    """cores: how many processors other programs kept busy on average; None if the system does not say."""

    cores: float | None = None


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Measure the processor time of other programs in the block: all but this process and its finished children."""
    found = OtherLoad()
    before, own, start = _busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    yield found
    after, seconds = _busy_seconds(), time.perf_counter() - start
    if before is not None and after is not None and seconds > 0:
        found.cores = max(0.0, (after - before - (sum(os.times()[:4]) - own)) / seconds)


def _busy_seconds() -> float | None:
    """Busy seconds of all processors together since the machine started; None if the system does not say."""
    try:
        fields = PROC.read_text(encoding="ascii").splitlines()[0].split()[1:]
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / tick
