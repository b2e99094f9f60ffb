"""Capture steps as CUDA graphs, and keep their results valid after a replay.  Lesson 11.

All graphs share one memory pool because they never run at the same time. A step's logits are therefore valid until the
next replay. For requests that use penalties, biases or grammars, extra kernels read them after the graph.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from minillm.ops import OperationSet
from minillm.ops.signatures import Truncation
from minillm.overrides import OverrideError
from minillm.scheduler.step import Step

from .state import RowState


class ToSample(NamedTuple):
    """The arguments of `Compositions.scored_sample`; without the last, of the operation `sample`."""

    logits: Tensor
    temperature: Tensor
    uniform: Tensor
    truncation: Truncation
    scored: Tensor

    @classmethod
    def of(cls, logits: Tensor, prepared: Mapping[str, Tensor]) -> Self:
        """With what `decode_step.prepare` has found for each row."""
        truncation = Truncation(*(prepared[name] for name in Truncation._fields))
        return cls(logits, prepared["temperature"], prepared["uniform"], truncation, prepared["scored"])

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same with every tensor changed."""
        truncation = Truncation(*map(change, self.truncation))
        logits, temperature, uniform, scored = map(change, (self.logits, self.temperature, self.uniform, self.scored))
        return type(self)(logits, temperature, uniform, truncation, scored)

    def sample(self, rows: Tensor, positions: Tensor, operations: OperationSet, state: RowState, out: Tensor) -> Tensor:
        """Sample a token after each of those that `rows` [n] have at `positions` [n], and move these on by one.

        It is written to `out` and to the state. Returns the tokens.
        """
        from minillm.kernels import decode_step  # lesson 11 reads this file where there is no Triton

        sampled, scores = operations.scored_sample(*self)
        arriving = None if scores is None else decode_step.ScoreBuffers(self.scored, *scores)
        arrived = state.arrived_ids, state.arrived_scores
        decode_step.advance(rows, sampled, positions, state.tokens, out, state.arrived, arriving, arrived)
        return sampled


@dataclass(eq=False)
class Graph:
    """A captured step. `to_sample` is in the pool's memory and valid until another graph of the pool is replayed."""

    graph: torch.cuda.CUDAGraph
    out: Tensor  # [rows] int64: the sampled tokens
    to_sample: ToSample


@dataclass
class Replayed:
    """The results of a replayed step, on the device, valid until the next replay."""

    sampled: Tensor  # [rows that sample] int64
    logits: Tensor  # [rows of the graph, vocab]
    indices: np.ndarray  # [rows that sample]: their indices in `logits`
    scored: bool  # whether log-probabilities were written to the state


class DecodeShape(NamedTuple):
    """The capacity of a captured decode step."""

    rows: int  # with drafts, tokens: each counts as a row
    width: int  # blocks of a table
    reach: int = 0  # slots of adapters whose changes it adds; 0: none, so steps without adapters do nothing for them
    lookup: bool = False  # whether the device finds the step's drafts


class MixedShape(NamedTuple):
    """The capacity of a captured step with prompts."""

    tokens: int  # prompt tokens
    decodes: int
    prompts: int
    width: int  # blocks of a table
    reach: int = 0  # as in `DecodeShape`

    @property
    def rows(self) -> int:
        return self.decodes + self.prompts + 1


Shape = TypeVar("Shape", DecodeShape, MixedShape)


class Graphs(Protocol[Shape]):
    """One kind of captured steps: the shapes that steps are padded to, and a graph of each shape that was captured."""

    @property
    def largest(self) -> Shape:
        """Return the shape in whose memory the graphs of all others fit."""
        ...

    @property
    def count(self) -> int:
        """Return the number of shapes: the most graphs of this kind."""
        ...

    def fits(self, step: Step) -> Shape | None:
        """Return the smallest shape that has room for the step. Returns None if no graph of this kind can run it."""
        ...

    def replay(self, step: Step, shape: Shape) -> Replayed | None:
        """Replay the step in a shape that fits it. Returns None if the shape cannot be captured."""
        ...

    def capture(self, shape: Shape) -> Graph:
        """Return the graph of this shape, captured now if necessary."""
        ...

    def rehearse(self, shape: Shape) -> None:
        """Run a step of padding without capturing it.

        It changes no request's state, but it compiles the kernels and makes libraries allocate their workspace.
        """
        ...


class CapturedSteps:
    """All captured graphs. They are freed when other operations that may be captured take effect."""

    def __init__(self, operations: OperationSet):
        self.decodes: dict[DecodeShape, Graph] = {}
        self.mixed: dict[MixedShape, Graph] = {}
        self.operations, self.functions, self.version = operations, operations.functions, -1
        self.allowed = False  # whether the current operations may be captured

    def __iter__(self) -> Iterator[Graph]:
        yield from self.decodes.values()
        yield from self.mixed.values()

    def follow(self) -> bool:
        """Return whether the current operations may be captured; if so, drop the graphs of any others."""
        if self.version != self.operations.version:
            self.version, self.allowed = self.operations.version, self.operations.capturable
            # While operations run eagerly, the graphs stay for when the engine's own operations are back.
            if self.allowed and self.functions != self.operations.functions:
                self.functions = self.operations.functions
                self.clear()
                torch.cuda.empty_cache()
        return self.allowed

    def clear(self) -> None:
        self.decodes.clear()
        self.mixed.clear()

    def record(self, step: Callable[[], ToSample], out: Tensor) -> Graph:
        """Capture `step` as a graph without running it. step: writes its tokens to `out` and returns `to_sample`."""
        # Take the pool of any existing graph. A pool whose graphs are all gone cannot be reused.
        other = next(iter(self), None)
        try:
            return capture(step, out, None if other is None else other.graph)
        except RuntimeError as error:
            if self.operations.engines_own:
                raise
            raise OverrideError(
                f"a replaced operation cannot be captured in a CUDA graph ({error}): it must not read values back "
                "to the host; leave out capturable=True to run it without graphs"
            ) from error


def capture(step: Callable[[], ToSample], out: Tensor, other: torch.cuda.CUDAGraph | None) -> Graph:
    """Capture `step` as a graph without running it, in the memory pool of the `other` graph if there is one.

    step: writes its tokens to `out` and returns `to_sample`.
    """
    graph, pool = torch.cuda.CUDAGraph(), None if other is None else other.pool()
    # By default, calls that cannot be captured fail in all threads. Some others load adapters, or answer for a rank.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        to_sample = step().each(Tensor.contiguous)
    return Graph(graph, out, to_sample.each(borrowed))


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not own it, so the pool may give the memory to other graphs too.

    Read it only on the same stream, after a replay of its own graph and before the next replay of any graph in the
    pool, and only while its graph exists: the pool's memory is freed with its last graph.
    """
    plain = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=plain), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)


def batch_sizes(most: int) -> list[int]:
    """Sizes of decode steps to capture: a batch is padded to the next. Products are tiled by 64 to 128 rows anyway."""
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, most + 256, 256)]
    return [size for size in sizes if size < most] + [most]
