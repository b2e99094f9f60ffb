"""Steps with prompts as CUDA graphs, padded to a few shapes.  Lesson 11.

Prompts have different lengths, but a graph's shapes are fixed. Tokens are therefore padded to the next captured count.
What differs from step to step (which row a token belongs to, where its queries begin) is sent in one array, which the
captured kernels read. The attention grid is sized for a full shape; programs without a query exit at once.

    tokens of a step:   decodes, one each, padded | prompt tokens, row after row, padded
    rows of a step:     decodes, padded           | prompts, padded, and a last row for the padding tokens

A row with drafts is among the decodes once for each of its tokens, as in `DecodeGraphs`.

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
    """Parts of the one int64 array that the host sends: NumPy arrays on the host, tensors on the device."""

    rows: Array  # [rows]: rows of the state, whose last row is padding
    positions: Array  # [rows]: position of the last token that each row runs
    sampling: Array  # [rows]: the row if it samples, else padding
    last: Array  # [rows]: index of that last token among the step's tokens
    order: Array  # [rows]: indices of the rows that sample, then zeros
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
        counts = {min(count, decodes.sizes[-1], budget) for count in DECODES}
        self.shapes = [
            MixedShape(tokens, rows, min(PROMPTS, max(1, tokens // 4), most_rows), width)
            for tokens, rows, width in sorted(product({min(count, budget) for count in TOKENS}, counts, widths))
            if tokens >= min(rows // 2, budget)  # next to many decodes, padding a few prompt tokens costs little
        ]
        most = sum(Inputs.sizes(self.shapes[-1]))
        self.inputs = torch.zeros(most, dtype=torch.int64, device=self.state.device)

    @property
    def largest(self) -> MixedShape:
        return self.shapes[-1]._replace(reach=self.reaches[-1])

    @property
    def count(self) -> int:
        return len(self.shapes) * len(self.reaches)

    @property
    def reaches(self) -> tuple[int, ...]:
        """Return those of these graphs: a step with any adapter reaches all slots."""
        return tuple({0, self.decodes.reaches[-1]})

    @staticmethod
    def supports(model: Model) -> bool:
        """Return whether prefill attention has a kernel. The reference reads lengths on the host: no graph has it."""
        return paged_attention.takes(model.config.head_dim)

    def fits(self, step: Step) -> MixedShape | None:
        if step.decodes_only or not self.captured.operations.engines_own:
            return None
        spans = self.spans(step)
        if spans.max() > self.state.arrived.shape[1]:  # the ring in which its tokens arrive
            return None
        decodes, prompts, tokens = int(spans.sum()), int((spans == 0).sum()), int(step.queries[spans == 0].sum())
        blocks = -(-int(step.ends.max()) // self.state.block_size)
        fitting = (
            shape
            for shape in self.shapes
            if shape.tokens >= tokens
            and shape.decodes >= decodes
            and shape.width >= blocks
            and shape.prompts >= prompts
        )
        shape = next(fitting, None)
        return None if shape is None else shape._replace(reach=self.reaches[-1] if self.decodes.reach(step) else 0)

    def replay(self, step: Step, shape: MixedShape) -> Replayed | None:
        try:
            captured = self.capture(shape)
        except torch.OutOfMemoryError as error:
            self._check_alone(error)
            self.shapes.remove(shape._replace(reach=0))  # it is not tried again
            return None
        self.state.store_drafts(step)
        self._fill(step, shape)
        captured.graph.replay()
        indices = step.for_each_token(self.indices(step, shape))
        if step.drafts is not None and self.state.sampling.general[step.rows].any():
            self.state.store_drafts(step)  # as in `DecodeGraphs.replay`
        return Replayed(captured.out[: len(indices)], captured.to_sample[0], indices, self.model.ops.scores)

    def _check_alone(self, error: torch.OutOfMemoryError) -> None:
        """Raise MemoryError if other ranks share the model: they may have room, and run another shape than this."""
        if self.model.parallel.size > 1:
            raise MemoryError(
                "no memory is left for the CUDA graphs of steps with prompts, which all ranks have to run: lower "
                "gpu_memory_utilization, num_blocks or max_num_batched_tokens, or set enforce_eager"
            ) from error

    @staticmethod
    def spans(step: Step) -> np.ndarray:
        """[n]: how many of the decodes are a row's: one for its newest token and for each draft; 0: it is a prompt."""
        if step.drafts is None:
            return np.repeat([1, 0], [step.decodes, len(step.rows) - step.decodes])
        return np.where(step.queries == step.drafted + 1, step.queries, 0)

    @classmethod
    def indices(cls, step: Step, shape: MixedShape) -> np.ndarray:
        """[n]: the index of each row, the last one of its, in the captured step. Prompts follow the padded decodes."""
        spans = cls.spans(step)
        return np.where(spans > 0, np.cumsum(spans), shape.decodes + np.cumsum(spans == 0)) - 1

    def _fill(self, step: Step, shape: MixedShape) -> None:
        packed = self._packed(step, shape)
        self.inputs[: len(packed)] = self.state.send(packed)[0]

    def _packed(self, step: Step, shape: MixedShape) -> np.ndarray:
        padding, spans, indices = self.state.padding, self.spans(step), self.indices(step, shape)
        counts, prompts = np.maximum(spans, 1), np.nonzero(spans == 0)[0]
        queries = step.queries[prompts]
        ends = np.cumsum(queries)
        arrays = [np.zeros(size, np.int64) for size in Inputs.sizes(shape)]
        sent: Inputs[np.ndarray] = Inputs(*arrays)
        sent.rows[:] = sent.sampling[:] = sent.token_rows[:] = padding
        every = _up_to(indices, counts)
        sent.rows[every] = np.repeat(step.rows, counts)
        sent.positions[every] = _up_to(step.ends - 1, counts)
        sampled = step.for_each_token(indices)
        sent.sampling[sampled] = step.token_rows
        sent.last[every] = every
        sent.last[indices[prompts]] = shape.decodes + ends - 1
        sent.order[: len(sampled)] = sampled
        count = int(ends[-1]) if len(ends) else 0
        sent.token_rows[:count] = np.repeat(step.rows[prompts], queries)
        sent.token_positions[:count] = _up_to(step.ends[prompts] - 1, queries)
        sent.query_start[1:-1] = count
        sent.query_start[1 : len(ends) + 1] = ends
        sent.query_start[-1] = shape.tokens
        return np.concatenate(arrays)

    # ---- capturing

    @torch.inference_mode()
    def capture(self, shape: MixedShape) -> Graph:
        have = self.captured.mixed
        if shape in have:
            return have[shape]
        # Capture the largest shape first, as for decodes, so that the others fit in its memory.
        if not self.captured.decodes:
            self.decodes.capture(self.decodes.largest)
        while not have and shape != self.largest:
            try:
                self.capture(self.largest)
            except torch.OutOfMemoryError as error:
                self._check_alone(error)
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
        prepared = decode_step.prepare(
            sent.rows, sent.positions, state.tokens, state.block_table, state.seed, state.parameters,
            block_size=block_size, width=shape.width, sampling=sent.sampling,
        )  # fmt: skip
        ids = state.tokens[sent.token_rows, sent.token_positions].long()
        blocks = state.block_table[:, sent.token_rows, sent.token_positions // block_size].long()
        slots = blocks * block_size + sent.token_positions % block_size
        table, lengths = prepared["table"], prepared["lengths"]
        query_start = self.decodes.query_start[: decodes + 1]
        batch = Batch(
            token_ids=torch.cat((prepared["ids"][:decodes], ids)),
            positions=torch.cat((prepared["positions"][:decodes], sent.token_positions)),
            slots=torch.cat((prepared["slots"][:, :decodes], slots.where(sent.token_rows != state.padding, -1)), dim=1),
            decode=Rows.of_groups(table[:, :decodes], lengths[:decodes], query_start, 1),
            prefill=Rows.of_groups(table[:, decodes:], lengths[decodes:], sent.query_start.int(), shape.tokens),
            logits_index=sent.last,
        )
        if state.adapters is not None:
            rows = torch.cat((sent.rows[:decodes], sent.token_rows))
            batch.adapted = state.adapters.of_tokens(rows, shape.reach)
        logits = model.logits(model.forward(batch, self.decodes.caches))
        to_sample = ToSample.of(logits, prepared)
        out.copy_(to_sample.sample(sent.sampling, sent.positions, model.ops, state, out)[sent.order])
        return to_sample


def _up_to(last: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return `counts` numbers that count up to `last`, for each entry [n]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - 1 - last, counts)
