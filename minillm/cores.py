"""The cores that this process may use, and how many of them other programs use.  Lesson 00.

Only Linux says how busy each core is (proc(5), /proc/stat). Elsewhere nothing is known of other programs.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

STAT = Path("/proc/stat")
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FREE = 0.2  # a core counts as free while other programs use less than this of it
SLOWED = 0.75  # of the cores: a step that has more of them is hardly slower
IDLE = (3, 4)  # columns of a core's line in /proc/stat: idle, and idle while it waits for a disk
GUEST = 8  # from this column on, time is counted in an earlier column, too


def allowed() -> set[int]:
    """Return the cores that this process may run on: in a container, often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available() -> int:
    """Return how many cores this process may use: those it may run on, fewer under a quota of time."""
    return max(1, min([len(allowed()), *map(math.ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the cores that each control group of this process pays for: its own and those around it (cgroups(7)).

    The paths are the host's, or the container's own: where a folder does not exist, one above it is the container's.
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder, group = GROUPS / ("cpu" if controllers else ""), PurePosixPath(path)  # version 1, or 2
        for each in (group, *group.parents):
            if (quota := _quota(folder / str(each).lstrip("/"), bool(controllers))) is not None:
                yield quota


def _quota(group: Path, first_version: bool) -> float | None:
    """Return the cores that a control group pays for; None if it has no limit."""
    try:
        if first_version:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (group / "cpu.max").read_text().split()
        cores = int(quota) / int(period)  # "max" or -1: no limit
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def busy_seconds() -> float | None:
    """Return seconds in which any program ran, summed over the cores of `allowed`; None if the system does not say.

    The time in which another virtual machine had a core counts, too.
    """
    wanted = {f"cpu{core}" for core in allowed()}
    try:
        lines = [line.split() for line in STAT.read_text().splitlines()]
        columns = [line[1 : 1 + GUEST] for line in lines if line and line[0] in wanted]
        ticks = [int(each) for line in columns for i, each in enumerate(line) if i not in IDLE]
    except (OSError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


class OtherPrograms:
    """Measures how many of its cores a process leaves to other programs, between two calls of `measure`.

    own: seconds of processor time that are not another program's. By default those of this process.
    """

    def __init__(
        self,
        busy: Callable[[], float | None] = busy_seconds,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._busy, self._own, self._clock = busy, own, clock
        self._before = self._read()

    @property
    def age(self) -> float:
        """Return seconds since the last call of `measure`."""
        return self._clock() - self._before[0]

    def measure(self) -> float | None:
        """Cores that other programs used, on average since the last call; None if the system does not say."""
        (then, busy_then, own_then), self._before = self._before, self._read()
        now, busy, own = self._before
        if busy is None or busy_then is None or now <= then:
            return None
        return max(0.0, busy - busy_then - (own - own_then)) / (now - then)

    def _read(self) -> tuple[float, float | None, float]:
        return self._clock(), self._busy(), self._own()
