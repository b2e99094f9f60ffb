"""Steps with prompts in them as CUDA graphs, padded to a few shapes.  Lessons 03 and 10.

Such a step is as ragged as its prompts are, and a graph is not: so tokens are padded to the next captured number, and
what differs from step to step (which row a token is of, where a row's queries begin) travels in one array that the
captured kernels read. Attention's grid is as wide as the captured step allows; programs without a query end at once.

    tokens of a step:   decodes, one each, padded | prompts' tokens, row after row, padded
    rows of a step:     decodes, padded           | prompts, padded, and a last row that the tokens' padding belongs to

Padding is computed with the rest. Up to some hundred tokens that costs little, since a step takes the time that it
takes to read the weights; beyond the largest shape the GPU is busy for longer than launching takes, and the step is
launched kernel by kernel. The shapes were chosen on an H200.
"""

from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.config import EngineConfig
from minillm.kernels import decode_step, paged_attention
from minillm.model.batch import Batch, Rows
from minillm.model.decoder import Model
from minillm.scheduler.step import Step

from .cuda_graph import Graph, Replayed

DECODES = (16, 64, 256)
TOKENS = (64, 128, 256, 512, 768, 1024)
PROMPTS = 64  # at most in one step; of few tokens, a quarter as many as tokens
NARROW = 1024  # tokens a row: up to this a graph has narrow block tables, so that attention splits them less


class Shape(NamedTuple):
    """What a captured step has room for; the last of all shapes has the most of everything."""

    tokens: int  # of prompts
    decodes: int
    prompts: int
    width: int  # blocks of a table

    @property
    def rows(self) -> int:
        return self.decodes + self.prompts + 1


class Inputs(NamedTuple):
    """What the host sends, one array [all] int64 in the order of these fields."""

    rows: Tensor  # [rows] of the state; the last row of it is padding
    positions: Tensor  # [rows]: of the last token that each row runs
    sampling: Tensor  # [rows]: those rows that sample, padding for the others
    last: Tensor  # [rows]: the place of that last token among the step's tokens
    order: Tensor  # [rows]: places of the rows that sample, first
    token_rows: Tensor  # [tokens]: the row of each token of a prompt
    token_positions: Tensor  # [tokens]
    query_start: Tensor  # [prompts + 2]: among the prompts' tokens

    @staticmethod
    def sizes(shape: Shape) -> tuple[int, ...]:
        return (shape.rows,) * 5 + (shape.tokens,) * 2 + (shape.prompts + 2,)


class MixedGraphs:
    """Captured steps with prompts in them, over the state and the memory of `DecodeGraphs`."""

    def __init__(self, graphs, config: EngineConfig):
        self.graphs, self.runner = graphs, graphs.runner
        full, budget = self.runner.block_table.shape[2], config.max_num_batched_tokens
        widths = {min(full, -(-NARROW // self.runner.block_size)), full}
        decodes = {min(count, config.max_num_seqs, budget) for count in DECODES}
        self.shapes = [
            Shape(tokens, rows, min(PROMPTS, max(1, tokens // 4), config.max_num_seqs), width)
            for tokens, rows, width in sorted(product({min(count, budget) for count in TOKENS}, decodes, widths))
        ]
        most = sum(Inputs.sizes(self.shapes[-1]))
        self.inputs = torch.zeros(most, dtype=torch.int64, device=self.runner.device)

    @staticmethod
    def fit(model: Model) -> bool:
        """Whether attention over prompts is a kernel; the reference looks at the rows on the host."""
        return paged_attention.takes(model.config.head_dim)

    def shape(self, step: Step) -> Shape | None:
        """The least shape that has room for a step, if any has."""
        prompts = len(step.rows) - step.singles
        tokens = int(step.queries.sum()) - step.singles
        blocks = -(-int((step.starts + step.queries).max()) // self.runner.block_size)
        fitting = (
            shape
            for shape in self.shapes
            if shape.tokens >= tokens
            and shape.decodes >= step.singles
            and shape.width >= blocks
            and shape.prompts >= prompts
        )
        return next(fitting, None)

    def launch(self, step: Step, shape: Shape) -> Replayed | None:
        """Replay the step.

        None, and never again this shape, if there is no memory to capture it: the step can still be launched without.
        """
        try:
            captured = self.captured(shape)
        except torch.OutOfMemoryError:
            self.shapes.remove(shape)
            return None
        self._fill(step, shape)
        captured.graph.replay()
        places = self.places(step, shape)[step.samples]
        return Replayed(captured.out[: len(places)], captured.to_sample[0], places)

    @staticmethod
    def places(step: Step, shape: Shape) -> np.ndarray:
        """Where each row stands among the captured step's: prompts come behind the padding of the decodes."""
        places = np.arange(len(step.rows))
        places[step.singles :] += shape.decodes - step.singles
        return places

    def _fill(self, step: Step, shape: Shape) -> None:
        packed = self._packed(step, shape)
        self.inputs[: len(packed)] = self.runner._send(packed)[0]

    def _packed(self, step: Step, shape: Shape) -> np.ndarray:
        padding, singles = len(self.graphs.position) - 1, step.singles
        queries = step.queries[singles:]
        ends = np.cumsum(queries)
        places = self.places(step, shape)
        found = [np.zeros(size, np.int64) for size in Inputs.sizes(shape)]
        sent = Inputs(*found)
        sent.rows[:] = sent.sampling[:] = sent.token_rows[:] = padding
        sent.rows[places] = step.rows
        sent.positions[places] = step.starts + step.queries - 1
        sampled = places[step.samples]
        sent.sampling[sampled] = step.rows[step.samples]
        sent.last[places] = places
        sent.last[places[singles:]] = shape.decodes + ends - 1
        sent.order[: len(sampled)] = sampled
        count = int(ends[-1]) if len(ends) else 0
        sent.token_rows[:count] = np.repeat(step.rows[singles:], queries)
        sent.token_positions[:count] = np.arange(count) - np.repeat(ends - queries - step.starts[singles:], queries)
        sent.query_start[1:-1] = count
        sent.query_start[1 : len(ends) + 1] = ends
        sent.query_start[-1] = shape.tokens
        return np.concatenate(found)

    # ---- capturing

    @torch.inference_mode()
    def captured(self, shape: Shape) -> Graph:
        """The graph of this shape, captured now if need be."""
        graphs, have = self.graphs, self.graphs.graphs.mixed
        if shape in have:
            return have[shape]
        # What takes most comes first, here as among the decodes: into its memory the others fit.
        if not graphs.graphs:
            graphs.captured(*graphs.largest)
        if not have and shape != self.shapes[-1]:
            self.captured(self.shapes[-1])
        out = torch.empty(shape.rows, dtype=torch.int64, device=self.runner.device)
        self.rehearse(shape)
        have[shape] = captured = graphs.record(lambda: self._run(shape, out), out)
        return captured

    def rehearse(self, shape: Shape) -> None:
        """Run padding alone: nothing changes, but kernels are compiled, and libraries allocate what they want."""
        nothing = np.zeros(0, np.int32)
        self._fill(Step(0, nothing, nothing, nothing, nothing.astype(bool), 0), shape)
        self._run(shape, torch.empty(shape.rows, dtype=torch.int64, device=self.runner.device))

    def _run(self, shape: Shape, out: Tensor) -> tuple[Tensor, ...]:
        graphs, runner, model = self.graphs, self.runner, self.runner.model
        ends = [0, *accumulate(Inputs.sizes(shape))]
        sent = Inputs(*(self.inputs[begin:end] for begin, end in pairwise(ends)))
        decodes, block_size, padding = shape.decodes, runner.block_size, len(graphs.position) - 1
        graphs.position[sent.rows] = sent.positions.int()
        state = decode_step.prepare(
            sent.rows, graphs.position, runner.tokens, runner.block_table, graphs.seed, graphs.temperature,
            block_size=block_size, width=shape.width,
        )  # fmt: skip
        ids = runner.tokens[sent.token_rows, sent.token_positions].long()
        blocks = runner.block_table[:, sent.token_rows, sent.token_positions // block_size].long()
        slots = blocks * block_size + sent.token_positions % block_size
        table, lengths = state["table"], state["lengths"]
        batch = Batch(
            token_ids=torch.cat((state["ids"][:decodes], ids)),
            positions=torch.cat((state["positions"][:decodes], sent.token_positions)),
            slots=torch.cat((state["slots"][:, :decodes], slots.where(sent.token_rows != padding, -1)), dim=1),
            decode=Rows(decodes, table[:, :decodes], lengths[:decodes], graphs.query_start[: decodes + 1], 1),
            prefill=Rows(shape.tokens, table[:, decodes:], lengths[decodes:], sent.query_start.int(), shape.tokens),
            logits_index=sent.last,
        )
        logits = model.logits(model.forward(batch, runner.caches))
        sampled = model.ops.sample(logits, state["temperature"], state["uniform"])
        decode_step.advance(sent.sampling, sampled, graphs.position, runner.tokens, out)
        out.copy_(sampled[sent.order])
        return logits, state["temperature"], state["uniform"]
