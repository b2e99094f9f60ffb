"""Ranks' processes for tests: forked from one that has imported torch and this, so that each starts in no time."""

import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch

from minillm import LLM
from minillm.parallel.rank import Rank
from minillm.parallel.ranks import Ranks
from minillm.runner import memory

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["minillm.parallel.rank", __name__])  # each rank would import this module


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that ranks need."""

    def __init__(self, process):
        self.process, self.pid, self.kill = process, process.pid, process.kill

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.process.exitcode


def run(theirs, arguments, plant: Callable[[int], None] | None) -> None:
    """What a process does. plant: called with its rank before it begins; it may replace what is about to run."""
    rank, size, meeting, device = arguments
    torch.set_num_threads(1)
    if plant is not None:
        plant(int(rank))
    Rank(Connection(theirs.detach()), int(rank), int(size), meeting, device).run()


def start(theirs, arguments, plant=None) -> Forked:
    process = CONTEXT.Process(target=run, args=(theirs, arguments, plant), daemon=True)
    process.start()
    return Forked(process)


def little_memory(rank: int) -> None:
    """To plant. It is here because each rank imports the module that has it, and has imported this one."""
    memory.CPU_CACHE_BYTES = 1 << 18  # for engines without num_blocks


@contextmanager
def ranks(size: int, plant: Callable[[int], None] | None = None, patience: float = 120) -> Iterator[Ranks]:
    """Ranks that outlive an engine, and serve the next one too."""
    found = Ranks(["cpu"] * size, patience, partial(start, plant=plant))
    try:
        yield found
    finally:
        found.close()


class Lent:
    """Ranks that an engine does not end."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def __getattr__(self, name):
        return getattr(self._ranks, name)

    def close(self):
        pass


@contextmanager
def engine(ranks: Ranks, place=None, **options) -> Iterator[LLM]:
    """An LLM whose model is divided between these ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minillm.parallel.executor.Ranks", lambda devices: Lent(ranks))
        stages = options.get("pipeline_parallel_size", 1)
        size = len(ranks.devices) // stages
        with LLM(place, device="cpu", cpu_threads=1, tensor_parallel_size=size, **options) as llm:
            yield llm
