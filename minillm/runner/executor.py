"""The interface between an engine and its device: steps go in, results come out.  Lesson 10.

The engine uses an executor through this interface only, so steps could also run in other processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from minillm.config import DeviceConfig
from minillm.kernels import launches
from minillm.kv_cache.streams import Stream
from minillm.model import Model
from minillm.scheduler.step import Step

from .cuda_graph import DecodeShape
from .launched import Launched
from .plan import Plan
from .runner import Runner


@dataclass(frozen=True)
class Facts:
    """What scheduling must know about the device; constant once an executor has started."""

    num_blocks: int  # cache blocks
    windows: tuple[int | None, ...]  # of each layer group: tokens that its queries see; None: all
    stream: Stream | None  # what a row keeps where requests may be longer than max_model_len
    captures: bool  # whether steps are captured, so that there is something to warm up


class Executor(Protocol):
    """Runs steps, in the order in which they are launched."""

    facts: Facts

    def launch(self, step: Step) -> Launched:
        """Run a step; returns before it is done where the device allows."""
        ...

    def warm_up(self) -> None:
        """Compile and capture now what the first steps need."""
        ...

    def close(self) -> None:
        """Free the cache and the graphs."""
        ...


class LocalExecutor:
    """Steps run in this process, on one device, with the launches that a plan measured for it."""

    def __init__(self, model: Model, config: DeviceConfig, max_model_len: int, plan: Plan | None = None):
        self._table = {} if plan is None else plan.table()
        with self._launches():
            self.runner = Runner(model, config, max_model_len)
            if plan is not None and plan.graphs and self.runner.graphs is not None:
                self.runner.graphs.decodes.capture(DecodeShape(*shape) for shape in plan.graphs)
                self.runner.graphs.capture_mixed()
        self.facts = Facts(
            num_blocks=self.runner.num_blocks,
            windows=model.groups.windows,
            stream=self.runner.stream,
            captures=self.runner.graphs is not None,
        )

    def launch(self, step: Step) -> Launched:
        with self._launches():
            return self.runner.launch(step)

    def warm_up(self) -> None:
        """Capture every size of batch with tables of the least width, and every shape with prompts."""
        if self.runner.graphs is not None:
            with self._launches():
                self.runner.graphs.capture_all()

    def close(self) -> None:
        self.runner.close()

    @contextmanager
    def _launches(self) -> Iterator[None]:
        with launches.using(self._table):
            yield
