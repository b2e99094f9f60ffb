"""Decode steps as CUDA graphs that find their drafts themselves.  Lesson 13.

Such a graph is a decode step (`decode_graphs`) between two more kernels: the first one looks up drafts and writes the
step's inputs, and the last one counts which drafts were right. While the same rows have the same number of drafts, the
host sends nothing but new blocks.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from minillm.kernels import prompt_lookup
from minillm.scheduler.step import Step

from .cuda_graph import DecodeShape, Graph, Replayed, ToSample
from .decode_graphs import DecodeGraphs


class LookupGraphs:
    """Captured decode steps whose drafts, at most `most` of a row, the device finds."""

    def __init__(self, decodes: DecodeGraphs, most: int):
        self.decodes, self.most = decodes, most
        tokens, device = decodes.sizes[-1], decodes.state.device
        self._inputs = torch.full((3 * tokens,), decodes.state.padding, dtype=torch.int64, device=device)
        self._running = torch.empty(3 * tokens, dtype=torch.int64, device=device)
        self._sent: tuple[int, list[int], list[int]] | None = None  # the graph's size, rows and their drafts

    @property
    def count(self) -> int:
        """Return the number of shapes: the most graphs of this kind."""
        return self.decodes.count

    def fits(self, step: Step) -> DecodeShape | None:
        """Return the smallest shape that has room for the step, None if none has."""
        shape = self.decodes.fits(step) if self.decodes.sampling else None
        return None if shape is None else shape._replace(lookup=True)

    def inputs(self, size: int) -> Tensor:
        """Return rows, counts and host_lengths of a graph of this size, [3, size] int64, as `look_up` takes them."""
        return self._inputs[: 3 * size].view(3, size)

    def replay(self, step: Step, shape: DecodeShape) -> Replayed:
        """Replay the step in a shape that fits it."""
        graph, size, counts = self.capture(shape), shape.rows, step.drafted
        assert step.lookup is not None, "steps with the host's drafts replay other graphs"
        sent = size, step.rows.tolist(), counts.tolist()
        if self._sent != sent or step.lookup.any():
            ends = np.cumsum(step.queries)
            entries = np.full((3, size), -1, np.int64)
            entries[0] = self.decodes.state.padding
            entries[0, : ends[-1]] = step.token_rows
            entries[1, ends - step.queries] = counts
            entries[2, ends - step.queries] = np.where(step.lookup, step.starts + 1, -1)
            self.inputs(size).copy_(torch.from_numpy(entries).pin_memory(), non_blocking=True)
            self._sent = sent
        graph.graph.replay()
        count = int(step.queries.sum())
        return Replayed(graph.out[:count], graph.to_sample[0], np.arange(count), True)

    def capture_sizes(self, shapes: Iterable[DecodeShape]) -> None:
        """Capture these steps now, in the sizes of the other decode steps."""
        for shape in sorted(shapes, reverse=True):
            self.capture(shape._replace(lookup=True))

    @torch.inference_mode()
    def capture(self, shape: DecodeShape) -> Graph:
        """Return the graph of this shape, captured now if necessary."""
        size, captured = shape.rows, self.decodes.captured
        if shape in captured.decodes:
            return captured.decodes[shape]
        if not captured.decodes and captured.operations.engines_own:
            self.decodes.capture(self.decodes.largest)  # in whose memory all others fit
        padding = torch.full((3, size), -1, dtype=torch.int64, device=self.decodes.state.device)
        padding[0] = self.decodes.state.padding
        out = torch.empty(size, dtype=torch.int64, device=padding.device)
        self._run(padding, shape, out)  # compiles the kernels, and changes no request's state
        graph = captured.record(lambda: self._run(self.inputs(size), shape, out), out)
        captured.decodes[shape] = graph
        return graph

    def _run(self, inputs: Tensor, shape: DecodeShape, out: Tensor) -> ToSample:
        """Run a step. inputs: as `inputs` returns them. Returns what its tokens were sampled from."""
        (rows, counts, host_lengths), state = inputs.unbind(), self.decodes.state
        running = self._running[: 3 * shape.rows].view(3, shape.rows)
        entries = prompt_lookup.RunningTokens(*running.unbind())
        prompt_lookup.look_up(rows, counts, host_lengths, state.lengths, state.tokens, self.most, entries)
        to_sample = self.decodes._logits(running, shape)
        self.decodes._sample(running, to_sample, out)
        prompt_lookup.accept(rows, counts, entries, out, state.lengths, state.accepted, self.most)
        return to_sample
