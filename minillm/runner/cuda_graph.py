"""Steps as CUDA graphs, and the tensors that stay valid after a replay.  Lessons 03 and 11.

Graphs that never run at the same time share one memory pool, so a step's logits are valid until the next replay.
Requests that use top-p, penalties or log-probabilities are sampled from them by extra kernels after the graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.ops import OperationSet
from minillm.overrides import OverrideError

ToSample = tuple[Tensor, Tensor, Tensor]  # logits [rows, vocab], temperatures and random numbers [rows]


@dataclass(eq=False)
class Graph:
    """A captured step. What it sampled from lies in the pool, and is the step's until another graph is replayed."""

    graph: torch.cuda.CUDAGraph
    out: Tensor  # [rows] int64: what it sampled
    to_sample: ToSample


@dataclass
class Replayed:
    """What a replayed step yields, on the device until the next one."""

    sampled: Tensor  # [rows that sample] int64
    logits: Tensor  # [rows of the graph, vocab]
    places: np.ndarray  # which of them belong to the rows that sample


class DecodeShape(NamedTuple):
    """What a captured step of decodes has room for."""

    rows: int
    width: int  # blocks of a table


class MixedShape(NamedTuple):
    """What a captured step with prompts in it has room for."""

    tokens: int  # of prompts
    decodes: int
    prompts: int
    width: int  # blocks of a table

    @property
    def rows(self) -> int:
        return self.decodes + self.prompts + 1


class CapturedSteps:
    """The graphs of one version of the operations. When the operations change, their memory is freed."""

    def __init__(self, operations: OperationSet):
        self.decodes: dict[DecodeShape, Graph] = {}
        self.mixed: dict[MixedShape, Graph] = {}
        self.operations, self.functions, self.version = operations, operations.functions, -1
        self.allowed = False  # whether what runs now may be captured

    def __iter__(self) -> Iterator[Graph]:
        yield from self.decodes.values()
        yield from self.mixed.values()

    def follow(self) -> bool:
        """Drop what was captured from other operations than may be captured now; whether these may."""
        if self.version != self.operations.version:
            self.version, self.allowed = self.operations.version, self.operations.capturable
            # Operations that run eagerly leave the graphs as they are, for when the engine's own operations are back.
            if self.allowed and self.functions != self.operations.functions:
                self.functions = self.operations.functions
                self.clear()
                torch.cuda.empty_cache()
        return self.allowed

    def clear(self) -> None:
        self.decodes.clear()
        self.mixed.clear()

    def record(self, step: Callable[[], ToSample], out: Tensor) -> Graph:
        """What `step` launches, as a graph; it is not run. step: puts its tokens into `out`, returns `to_sample`."""
        # One pool for all: they never run at the same time. A pool that lost its graphs cannot be used again.
        other = next(iter(self), None)
        try:
            return capture(step, out, None if other is None else other.graph)
        except RuntimeError as error:
            if self.operations.engines_own:
                raise
            raise OverrideError(
                f"a replaced operation cannot be captured in a CUDA graph ({error}): it may not read values back to "
                "the host; leave out capturable=True, and it runs without graphs"
            ) from error


def capture(step: Callable[[], ToSample], out: Tensor, other: torch.cuda.CUDAGraph | None) -> Graph:
    """Record what `step` launches, in the memory pool of the `other` graph; it is not run.

    step: puts its tokens into `out` and returns `to_sample`.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=None if other is None else other.pool()):
        logits, temperature, uniform = (each.contiguous() for each in step())
    return Graph(graph, out, (borrowed(logits), borrowed(temperature), borrowed(uniform)))


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, owned by no tensor: the pool may give it to other graphs as well.

    It may be read after a replay of its own graph and before the next replay of any graph of the pool, on the same
    stream, and only while its graph exists: the memory goes back to the driver with the pool's last graph.
    """
    plain = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=plain), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)
