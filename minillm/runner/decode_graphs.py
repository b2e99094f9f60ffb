"""Decode steps as CUDA graphs: one launch per step, including sampling.  Lesson 11.

Launching every kernel of a small step from Python takes longer than running the kernels. Therefore the step is captured
once per batch size and block table width, and replayed. It reads its inputs from the row state on the device: while the
same rows keep decoding, the host sends only changes to their block tables.

A step with drafts (lesson 13) is replayed by the same graphs, as if each of its tokens were a row of its own, with its
row's block table: a row's newest token and seven drafts take the time of eight rows. So no step is padded to the row
with the most drafts, and there are no further graphs to capture. Attention reads the row's keys once for each of its
tokens, from the GPU's L2 cache: next to reading the weights that is little, until rows have many thousands of tokens.
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
    """Captured decode steps of up to `most_tokens` tokens: one of each row, and its drafts.

    single_row=False disables the fused step for one request; sampling=False launches sampling after the graph. Both
    only make steps slower, for comparison.
    """

    def __init__(
        self,
        model: Model,
        state: RowState,
        caches: list[LayerCache],
        captured: CapturedSteps,
        most_tokens: int,
        *,
        single_row: bool = True,
        sampling: bool = True,
    ):
        self.model, self.state, self.caches, self.captured = model, state, caches, captured
        self.sampling = sampling
        self._inputs = torch.full((3 * most_tokens,), state.padding, dtype=torch.int64, device=state.device)
        self.query_start = torch.arange(most_tokens + 2, dtype=torch.int32, device=state.device)
        self.sizes = batch_sizes(most_tokens)
        factors = None if state.adapters is None else state.adapters.factors
        self.single_row = SingleRow(model, factors) if single_row and SingleRow.fits(model) else None
        self._sent = NOTHING

    def width(self, blocks: int) -> int:
        """Return the padded width, in blocks, of a block table whose longest row has `blocks`."""
        return min(max(1 << (blocks - 1).bit_length(), 16), self.state.block_table.shape[2])

    def inputs(self, size: int) -> Tensor:
        """Return the inputs of a graph of this size, one after the other so that one copy brings them: [3, size] int64.

        The rows of its tokens, their positions, and the tokens where the host knows them, as it does drafts; else -1.
        """
        return self._inputs[: 3 * size].view(3, size)

    @property
    def count(self) -> int:
        widths = {self.width(blocks) for blocks in range(1, self.state.block_table.shape[2] + 1)}
        return len(self.sizes) * len(widths) * len(self.reaches)

    @property
    def reaches(self) -> tuple[int, ...]:
        """Return how many slots of adapters a step may reach: each has graphs of its own."""
        return (0,) if self.state.adapters is None else (0, *self.state.adapters.reaches)

    @torch.inference_mode()
    def capture_sizes(self, shapes: Iterable[DecodeShape]) -> None:
        """Capture these steps now. From then on, batches are padded to one of their sizes or the largest size."""
        shapes = sorted(shapes, reverse=True)  # largest first: the others fit in its memory
        for shape in shapes:
            self.capture(shape)
        if shapes:
            self.sizes = sorted({shape.rows for shape in shapes} | {self.sizes[-1]})

    def fits(self, step: Step) -> DecodeShape | None:
        if not (step.decodes_only if step.drafts is None else self._takes(step)):
            return None
        count = int(step.queries.sum())
        size = next((size for size in self.sizes if size >= count), None)
        if size is None:
            return None
        return DecodeShape(size, self.width(-(-int(step.ends.max()) // self.state.block_size)), self.reach(step))

    def reach(self, step: Step) -> int:
        """Return the slots of adapters that a step reaches."""
        return 0 if self.state.adapters is None else self.state.adapters.reach(step.rows)

    def _takes(self, step: Step) -> bool:
        """Return whether each row of a step with drafts runs its newest token and drafts, and its ring holds them."""
        most = self.state.arrived.shape[1]
        return bool((step.samples & (step.queries == step.drafted + 1) & (step.queries <= most)).all())

    def replay(self, step: Step, shape: DecodeShape) -> Replayed:
        rows, positions = step.token_rows, step.for_each_token(step.ends) - 1
        state, count, size = self.state, len(rows), shape.rows
        graph = self.capture(shape)
        if not all(map(np.array_equal, self._sent, (rows, positions))):
            sent = np.full((3, size), -1, np.int64)
            sent[0], sent[0, :count], sent[1, :count] = state.padding, rows, positions
            if step.drafts is not None:
                drafts = np.repeat(step.ends - step.drafted, step.queries) <= positions
                sent[2, :count][drafts] = step.drafts[step.drafts >= 0]
            self.inputs(size).copy_(torch.from_numpy(sent).pin_memory(), non_blocking=True)
        graph.graph.replay()
        if not self.sampling:
            self._sample(self.inputs(size), graph.to_sample, graph.out)
        # The graph has moved the positions on, but the host's tokens stay.
        self._sent = (rows, positions + 1) if step.drafts is None else NOTHING
        if step.drafts is not None and state.sampling.general[step.rows].any():
            # `Runner` samples these rows again; penalties read the drafts, which the graph has overwritten.
            state.store_drafts(step)
        return Replayed(graph.out[:count], graph.to_sample[0], np.arange(count), self.model.ops.scores)

    @property
    def largest(self) -> DecodeShape:
        return DecodeShape(self.sizes[-1], self.width(self.state.block_table.shape[2]), self.reaches[-1])

    def rehearse(self, shape: DecodeShape) -> None:
        inputs = torch.full((3, shape.rows), -1, dtype=torch.int64, device=self.state.device)
        inputs[0] = self.state.padding
        self._sample(inputs, self._logits(inputs, shape), torch.empty_like(inputs[0]))

    def capture(self, shape: DecodeShape) -> Graph:
        """Return the graph of this shape, captured now if necessary."""
        size, have = shape.rows, self.captured.decodes
        if shape in have:
            return have[shape]
        # All other graphs fit into the largest one's memory, in any order. That does not hold for a replaced operation:
        # it may allocate what the engine's own never does, and no memory was reserved for that.
        if not have and shape != self.largest and self.captured.operations.engines_own:
            self.capture(self.largest)
        self.rehearse(shape)
        out = torch.empty(size, dtype=torch.int64, device=self.state.device)

        def step() -> ToSample:
            inputs = self.inputs(size)
            to_sample = self._logits(inputs, shape)
            if self.sampling:
                self._sample(inputs, to_sample, out)
            return to_sample

        have[shape] = graph = self.captured.record(step, out)
        return graph

    def _logits(self, inputs: Tensor, shape: DecodeShape) -> ToSample:
        """Return the logits of each token, and what to sample them with. inputs: as `inputs` returns them."""
        state, model, (rows, positions, host_tokens) = self.state, self.model, inputs.unbind()
        count = len(rows)
        prepared = decode_step.prepare(
            rows, positions, state.tokens, state.block_table, state.seed, state.parameters,
            block_size=state.block_size, width=shape.width, host_tokens=host_tokens,
        )  # fmt: skip
        batch = Batch(
            token_ids=prepared["ids"],
            positions=prepared["positions"],
            slots=prepared["slots"],
            decode=Rows.of_groups(prepared["table"], prepared["lengths"], self.query_start[: count + 1], 1),
            prefill=(),
            logits_index=None,
            adapted=None if state.adapters is None else state.adapters.of_tokens(rows, shape.reach),
        )
        fused = self.single_row if count == 1 and model.ops.engines_own else None
        if fused is not None and (batch.adapted is None or fused.takes_adapters):
            logits = fused.logits(batch, self.caches)
        else:
            logits = model.logits(model.forward(batch, self.caches))
        return ToSample.of(logits, prepared)

    def _sample(self, inputs: Tensor, to_sample: ToSample, out: Tensor) -> None:
        rows, positions, _ = inputs.unbind()
        to_sample.sample(rows, positions, self.model.ops, self.state, out)
