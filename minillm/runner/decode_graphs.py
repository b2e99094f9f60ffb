"""Decode steps as CUDA graphs: one launch per step, including sampling.  Lesson 11.

Launching every kernel of a small step from Python takes longer than running the kernels. Therefore the step is captured
once per batch size and block table width, and replayed. It reads its inputs from the row state on the device: while the
same rows keep decoding, the host sends only changes to their block tables.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from minillm.kernels import decode_step
from minillm.kv_cache.layer_cache import LayerCache
from minillm.model import Model
from minillm.model.batch import Batch
from minillm.model.single_row import SingleRow
from minillm.ops import Rows
from minillm.scheduler.step import Step

from .cuda_graph import CapturedSteps, DecodeShape, Graph, Graphs, Replayed, ToSample, batch_sizes
from .state import RowState

NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.int32))


class DecodeGraphs(Graphs[DecodeShape]):
    """Captured decode steps.

    single_row=False disables the fused step for one request; sampling=False launches sampling after the graph. Both
    only make steps slower, for comparison.
    """

    def __init__(
        self,
        model: Model,
        state: RowState,
        caches: list[LayerCache],
        captured: CapturedSteps,
        most_rows: int,
        *,
        single_row: bool = True,
        sampling: bool = True,
    ):
        self.model, self.state, self.caches, self.captured = model, state, caches, captured
        self.sampling = sampling
        self.rows = torch.full((most_rows + 1,), state.padding, dtype=torch.int64, device=state.device)
        self.query_start = torch.arange(most_rows + 2, dtype=torch.int32, device=state.device)
        self.sizes = batch_sizes(most_rows)
        self.single_row = SingleRow(model) if single_row and SingleRow.fits(model) else None
        self._sent = NOTHING

    def width(self, blocks: int) -> int:
        """The padded width, in blocks, of a block table whose longest row has `blocks`."""
        return min(max(1 << (blocks - 1).bit_length(), 16), self.state.block_table.shape[2])

    @property
    def count(self) -> int:
        widths = {self.width(blocks) for blocks in range(1, self.state.block_table.shape[2] + 1)}
        return len(self.sizes) * len(widths)

    @torch.inference_mode()
    def capture_sizes(self, shapes: Iterable[DecodeShape]) -> None:
        """Capture these steps now. From then on, batches are padded to one of their sizes or the largest size."""
        shapes = sorted(shapes, reverse=True)  # largest first: the others fit in its memory
        for shape in shapes:
            self.capture(shape)
        if shapes:
            self.sizes = sorted({shape.rows for shape in shapes} | {self.sizes[-1]})

    def fits(self, step: Step) -> DecodeShape | None:
        if not step.decodes_only:
            return None
        size = next(size for size in self.sizes if size >= len(step.rows))
        return DecodeShape(size, self.width(-(-int(step.starts.max() + 1) // self.state.block_size)))

    def replay(self, step: Step, shape: DecodeShape) -> Replayed:
        state, count, size = self.state, len(step.rows), shape.rows
        graph = self.capture(shape)
        rows, positions = self._sent
        if not (np.array_equal(rows, step.rows) and np.array_equal(positions, step.starts)):
            padded = np.full(size, state.padding, np.int64)
            padded[:count] = step.rows
            sent_rows, sent_positions = state.send(padded, step.starts)
            self.rows[:size] = sent_rows
            state.position[sent_rows[:count]] = sent_positions.int()
        graph.graph.replay()
        if not self.sampling:
            self._sample(self.rows[:size], graph.to_sample, graph.out)
        self._sent = (step.rows, step.starts + 1)
        return Replayed(graph.out[:count], graph.to_sample[0], np.arange(count), self.model.ops.scores)

    def forget_positions(self) -> None:
        """Make the next step send its rows' positions again, because another kind of step has changed them."""
        self._sent = NOTHING

    @property
    def largest(self) -> DecodeShape:
        return DecodeShape(self.sizes[-1], self.width(self.state.block_table.shape[2]))

    def rehearse(self, shape: DecodeShape) -> None:
        padding = torch.full((shape.rows,), self.state.padding, dtype=torch.int64, device=self.state.device)
        self._sample(padding, self._logits(padding, shape.width), torch.empty_like(padding))

    def capture(self, shape: DecodeShape) -> Graph:
        """The graph of this shape, captured now if necessary."""
        (size, width), have = shape, self.captured.decodes
        if shape in have:
            return have[shape]
        # All other graphs fit into the largest one's memory, in any order. That does not hold for a replaced operation:
        # it may allocate what the engine's own never does, and no memory was reserved for that.
        if not have and shape != self.largest and self.captured.operations.engines_own:
            self.capture(self.largest)
        self.rehearse(shape)
        out = torch.empty(size, dtype=torch.int64, device=self.state.device)

        def step() -> ToSample:
            to_sample = self._logits(self.rows[:size], width)
            if self.sampling:
                self._sample(self.rows[:size], to_sample, out)
            return to_sample

        have[shape] = graph = self.captured.record(step, out)
        return graph

    def _logits(self, rows: Tensor, width: int) -> ToSample:
        """The rows' logits, and what to sample them with."""
        state, model, count = self.state, self.model, len(rows)
        found = decode_step.prepare(
            rows, state.position, state.tokens, state.block_table, state.seed, state.parameters,
            block_size=state.block_size, width=width,
        )  # fmt: skip
        batch = Batch(
            token_ids=found["ids"],
            positions=found["positions"],
            slots=found["slots"],
            decode=Rows.of_groups(found["table"], found["lengths"], self.query_start[: count + 1], 1),
            prefill=(),
            logits_index=None,
        )
        if count == 1 and self.single_row is not None and model.ops.engines_own:
            logits = self.single_row.logits(batch, self.caches)
        else:
            logits = model.logits(model.forward(batch, self.caches))
        return ToSample.of(logits, found)

    def _sample(self, rows: Tensor, to_sample: ToSample, out: Tensor) -> None:
        to_sample.sample(rows, self.model.ops, self.state, out)
