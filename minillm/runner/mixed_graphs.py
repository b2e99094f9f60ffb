"""Steps with prompts as CUDA graphs, padded to a few shapes.  Lesson 11.

Prompts have different lengths, but a graph's shapes are fixed. Tokens are therefore padded to the next captured count.
What differs from step to step (which row a token belongs to, where its queries begin) is sent in one array, which the
captured kernels read. The attention grid is sized for a full shape; programs without a query exit at once.

    tokens of a step:   decodes, one each, padded | prompt tokens, row after row, padded
    rows of a step:     decodes, padded           | prompts, padded, and a last row for the padding tokens

Padding is computed like real tokens. Up to a few hundred tokens this costs little, because most of the step is spent
reading the weights. A step beyond the largest shape keeps the GPU busy for longer than the launches take, so it is
launched kernel by kernel. The shapes were chosen on an H200.
"""

from itertools import accumulate, pairwise, product
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from minillm.config import DeviceConfig
from minillm.kernels import decode_step, paged_attention
from minillm.model import Model
from minillm.model.batch import Batch
from minillm.ops import Rows
from minillm.scheduler.step import Step

from .cuda_graph import Graph, Graphs, MixedShape, Replayed, ToSample
from .decode_graphs import DecodeGraphs

DECODES = (16, 64, 256, 320, 384, 448, 512, 1024)
TOKENS = (64, 128, 256, 512, 768, 1024)
PROMPTS = 64  # the most in one step; in small shapes, a quarter of the tokens
NARROW = 1024  # tokens per row that a narrow block table covers; attention splits narrow tables less


Array = TypeVar("Array", np.ndarray, Tensor)


class Inputs(NamedTuple, Generic[Array]):
    """What the host sends, concatenated to one int64 array: NumPy arrays on the host, tensors on the device."""

    rows: Array  # [rows]: rows of the state, whose last row is padding
    positions: Array  # [rows]: position of the last token that each row runs
    sampling: Array  # [rows]: the row if it samples, else padding
    last: Array  # [rows]: index of that last token among the step's tokens
    order: Array  # [rows]: places of the rows that sample, then zeros
    token_rows: Array  # [tokens]: the row of each prompt token
    token_positions: Array  # [tokens]: its position
    query_start: Array  # [prompts + 2]: where each row's queries begin among the prompt tokens

    @staticmethod
    def sizes(shape: MixedShape) -> tuple[int, ...]:
        return (shape.rows,) * 5 + (shape.tokens,) * 2 + (shape.prompts + 2,)


class MixedGraphs(Graphs[MixedShape]):
    """Captured steps with prompts, in the memory pool of the captured decode steps."""

    def __init__(self, decodes: DecodeGraphs, config: DeviceConfig):
        self.decodes, self.captured = decodes, decodes.captured
        self.model, self.state = decodes.model, decodes.state
        full, budget, most_rows = self.state.block_table.shape[2], config.max_num_batched_tokens, config.max_num_seqs
        widths = {min(full, -(-NARROW // self.state.block_size)), full}
        counts = {min(count, most_rows, budget) for count in DECODES}
        self.shapes = [
            MixedShape(tokens, rows, min(PROMPTS, max(1, tokens // 4), most_rows), width)
            for tokens, rows, width in sorted(product({min(count, budget) for count in TOKENS}, counts, widths))
            if tokens >= min(rows // 2, budget)  # next to many decodes, padding a few prompt tokens costs little
        ]
        most = sum(Inputs.sizes(self.shapes[-1]))
        self.inputs = torch.zeros(most, dtype=torch.int64, device=self.state.device)

    @property
    def largest(self) -> MixedShape:
        return self.shapes[-1]

    @property
    def count(self) -> int:
        return len(self.shapes)

    @staticmethod
    def supports(model: Model) -> bool:
        """Return whether prefill attention has a kernel. The reference reads lengths on the host: no graph has it."""
        return paged_attention.takes(model.config.head_dim)

    def fits(self, step: Step) -> MixedShape | None:
        if step.decodes_only or not self.captured.operations.engines_own:
            return None
        prompts = len(step.rows) - step.decodes
        tokens = int(step.queries[step.decodes :].sum())
        blocks = -(-int(step.ends.max()) // self.state.block_size)
        fitting = (
            shape
            for shape in self.shapes
            if shape.tokens >= tokens
            and shape.decodes >= step.decodes
            and shape.width >= blocks
            and shape.prompts >= prompts
        )
        return next(fitting, None)

    def replay(self, step: Step, shape: MixedShape) -> Replayed | None:
        try:
            captured = self.capture(shape)
        except torch.OutOfMemoryError:
            self.shapes.remove(shape)  # it is not tried again
            return None
        self.decodes.forget_positions()
        self._fill(step, shape)
        captured.graph.replay()
        places = self.places(step, shape)[step.samples]
        return Replayed(captured.out[: len(places)], captured.to_sample[0], places, self.model.ops.scores)

    @staticmethod
    def places(step: Step, shape: MixedShape) -> np.ndarray:
        """The place of each row in the captured step: prompts follow the padded decodes."""
        places = np.arange(len(step.rows))
        places[step.decodes :] += shape.decodes - step.decodes
        return places

    def _fill(self, step: Step, shape: MixedShape) -> None:
        packed = self._packed(step, shape)
        self.inputs[: len(packed)] = self.state.send(packed)[0]

    def _packed(self, step: Step, shape: MixedShape) -> np.ndarray:
        padding, decodes = self.state.padding, step.decodes
        queries = step.queries[decodes:]
        ends = np.cumsum(queries)
        places = self.places(step, shape)
        found = [np.zeros(size, np.int64) for size in Inputs.sizes(shape)]
        sent: Inputs[np.ndarray] = Inputs(*found)
        sent.rows[:] = sent.sampling[:] = sent.token_rows[:] = padding
        sent.rows[places] = step.rows
        sent.positions[places] = step.ends - 1
        sampled = places[step.samples]
        sent.sampling[sampled] = step.sampling_rows
        sent.last[places] = places
        sent.last[places[decodes:]] = shape.decodes + ends - 1
        sent.order[: len(sampled)] = sampled
        count = int(ends[-1]) if len(ends) else 0
        sent.token_rows[:count] = np.repeat(step.rows[decodes:], queries)
        sent.token_positions[:count] = np.arange(count) - np.repeat(ends - queries - step.starts[decodes:], queries)
        sent.query_start[1:-1] = count
        sent.query_start[1 : len(ends) + 1] = ends
        sent.query_start[-1] = shape.tokens
        return np.concatenate(found)

    # ---- capturing

    @torch.inference_mode()
    def capture(self, shape: MixedShape) -> Graph:
        have = self.captured.mixed
        if shape in have:
            return have[shape]
        # Capture the largest shape first, as for decodes, so that the others fit in its memory.
        if not self.captured.decodes:
            self.decodes.capture(self.decodes.largest)
        while not have and shape != self.shapes[-1]:
            try:
                self.capture(self.shapes[-1])
            except torch.OutOfMemoryError:
                self.shapes.pop()
        out = torch.empty(shape.rows, dtype=torch.int64, device=self.state.device)
        self.rehearse(shape)
        have[shape] = graph = self.captured.record(lambda: self._run(shape, out), out)
        return graph

    def rehearse(self, shape: MixedShape) -> None:
        nothing = np.zeros(0, np.int32)
        self._fill(Step(0, nothing, nothing, nothing, nothing.astype(bool), 0), shape)
        self._run(shape, torch.empty(shape.rows, dtype=torch.int64, device=self.state.device))

    def _run(self, shape: MixedShape, out: Tensor) -> ToSample:
        state, model = self.state, self.model
        ends = [0, *accumulate(Inputs.sizes(shape))]
        sent: Inputs[Tensor] = Inputs(*(self.inputs[begin:end] for begin, end in pairwise(ends)))
        decodes, block_size = shape.decodes, state.block_size
        state.position[sent.rows] = sent.positions.int()
        found = decode_step.prepare(
            sent.rows, state.position, state.tokens, state.block_table, state.seed, state.parameters,
            block_size=block_size, width=shape.width, sampling=sent.sampling,
        )  # fmt: skip
        ids = state.tokens[sent.token_rows, sent.token_positions].long()
        blocks = state.block_table[:, sent.token_rows, sent.token_positions // block_size].long()
        slots = blocks * block_size + sent.token_positions % block_size
        table, lengths = found["table"], found["lengths"]
        query_start = self.decodes.query_start[: decodes + 1]
        batch = Batch(
            token_ids=torch.cat((found["ids"][:decodes], ids)),
            positions=torch.cat((found["positions"][:decodes], sent.token_positions)),
            slots=torch.cat((found["slots"][:, :decodes], slots.where(sent.token_rows != state.padding, -1)), dim=1),
            decode=Rows.of_groups(table[:, :decodes], lengths[:decodes], query_start, 1),
            prefill=Rows.of_groups(table[:, decodes:], lengths[decodes:], sent.query_start.int(), shape.tokens),
            logits_index=sent.last,
        )
        logits = model.logits(model.forward(batch, self.decodes.caches))
        to_sample = ToSample.of(logits, found)
        out.copy_(to_sample.sample(sent.sampling, model.ops, state, out)[sent.order])
        return to_sample
