"""Choose how many threads a step uses on a CPU.  Lesson 00.

A step of a small model has hundreds of operations of some microseconds, and the threads of each wait for the slowest
one. While they wait they keep their cores busy, so a single other program delays every operation: with two threads on
two cores, it makes a step three to twenty times slower, and one thread is then the faster choice. So a step uses only
cores that no other program uses, and all of them again once the machine is quiet.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

from minillm import cores
from minillm.config import DeviceConfig
from minillm.cores import FREE, SLOWED, OtherPrograms

EVERY = 0.1  # seconds between measurements: the system counts time in ticks of 0.01 s
STALE = 1.0  # seconds: a longer time than this says little about the machine as it is now
AGAIN = 0.1  # a core that was not free is so again once other programs use less than this of it

log = logging.getLogger(__name__)


class Threads:
    """Chooses the number of threads for each step.

    fixed: always use this many. Otherwise the number is at most what torch has been told to use (OMP_NUM_THREADS,
    `torch.set_num_threads`), and lower while other programs need the cores. others: has measured since the model
    began to load. available, total: cores that this process may use at a time, and may run on.
    """

    def __init__(
        self,
        fixed: int | None = None,
        others: OtherPrograms | None = None,
        *,
        available: int | None = None,
        total: int | None = None,
    ):
        self.fixed = fixed
        self.busy = 0.0  # cores that other programs use, smoothed
        self.limit = self._available = available or cores.available()
        self._total = total or len(cores.allowed())
        self._others = others or OtherPrograms()
        self._warned = False
        if fixed is None and torch.get_num_threads() > 1 and self._others.age >= EVERY:
            self._adapt(self._others.measure(), 1.0)

    @classmethod
    def of(cls, config: DeviceConfig, others: OtherPrograms) -> Self:
        """Return the threads of an engine with these options. With `exact` their number is fixed: sums may depend on
        it.
        """
        steady = min(torch.get_num_threads(), cores.available()) if config.exact else None
        return cls(config.cpu_threads or steady, others)

    @contextmanager
    def chosen(self) -> Iterator[int]:
        """Set torch's threads for a step that runs in this thread, and restore them afterwards."""
        before = torch.get_num_threads()
        adapts = self.fixed is None and before > 1
        count = self.fixed or (min(before, self._free()) if adapts else 1)
        if count != before:
            torch.set_num_threads(count)
        try:
            yield count
        finally:
            if count != before:
                torch.set_num_threads(before)
            if adapts and self._others.age >= STALE:  # all of it in this step, so it does say something
                self._adapt(self._others.measure(), 1.0)

    def _free(self) -> int:
        """Return the number of cores that other programs leave free, at least one."""
        age = self._others.age
        if age >= EVERY:
            used = self._others.measure()
            if age < STALE:
                self._adapt(used, 0.5)
        return self.limit

    def _adapt(self, used: float | None, weight: float) -> None:
        """Take a measurement into account. weight: its share of the new average."""
        if used is None:
            return
        self.busy += weight * (used - self.busy)
        left = self._total - self.busy
        fewest, most = (math.floor(left + share) for share in (AGAIN, FREE))
        self.limit = max(1, min(max(self.limit, fewest), most, self._available))
        if self.limit <= SLOWED * self._available and not self._warned:
            self._warned = True
            log.warning(
                f"other programs use {self.busy:.1f} of {self._total} cores, so steps use {self.limit} "
                f"thread{'s' if self.limit > 1 else ''} and take longer, until these programs end"
            )
