"""Measure how much of the machine other programs use during a measurement.  Lesson 99."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minillm.cores import OtherPrograms


@dataclass
class OtherLoad:
    """cores: how many processors other programs kept busy on average; None if the system does not say."""

    cores: float | None = None


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Measure the processor time of other programs in the block: all but this process and its finished children."""
    load, others = OtherLoad(), OtherPrograms(own=_own_seconds)
    yield load
    load.cores = others.measure()


def _own_seconds() -> float:
    return sum(os.times()[:4])
