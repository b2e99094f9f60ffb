"""Decode steps as CUDA graphs: one launch a step, sampling inside.  Lessons 03 and 10.

At a millisecond a step, launching some 200 kernels from Python takes longer than running them. So the step is captured
once for each size of batch and replayed. Its inputs are the device's own rows: while the same rows keep decoding, the
host sends nothing but what changed in their block tables.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, Rows
from .config import EngineConfig
from .kernels import decode_step
from .request import Request
from .scheduler import Step
from .single_row import SingleRow


@dataclass
class Graph:
    """A captured step for up to `len(rows)` rows whose tables need up to `width` blocks."""

    graph: torch.cuda.CUDAGraph
    out: Tensor  # [rows] int64: what the step sampled


class DecodeGraphs:
    """The captured steps, and the device's state that they run on."""

    def __init__(self, runner, config: EngineConfig):
        self.runner = runner
        device, count = runner.device, config.max_num_seqs + 1  # the last row is padding
        self.position = torch.zeros(count, dtype=torch.int32, device=device)  # of the token to run next
        self.seed = torch.zeros(count, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(count, dtype=torch.float32, device=device)
        self.rows = torch.full((count,), count - 1, dtype=torch.int64, device=device)
        self.query_start = torch.arange(count + 1, dtype=torch.int32, device=device)
        self.sizes = batch_sizes(config.max_num_seqs)
        self.single_row = SingleRow(runner.model) if SingleRow.fits(runner.model) else None
        self.graphs: dict[tuple[int, int], Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self._sent = (np.zeros(0, np.int32), np.zeros(0, np.int32))  # rows and positions that the device has

    def admit(self, requests: list[Request]) -> None:
        """Send what sampling needs of newly admitted requests."""
        rows, seeds = self.runner._send(
            np.array([request.row for request in requests]), np.array([request.seed for request in requests])
        )
        self.seed[rows] = seeds
        temperatures = torch.tensor([request.params.temperature for request in requests], dtype=torch.float32)
        self.temperature[rows] = temperatures.pin_memory().to(self.runner.device, non_blocking=True)

    def can_run(self, step: Step) -> bool:
        """Nobody asks for more than the fast path, and the operations are the engine's own."""
        runner = self.runner
        return (
            runner.model.ops.engines_own
            and not runner.sampler.general[step.rows].any()
            and not (runner.logprobs[step.rows] >= 0).any()
        )

    def launch(self, step: Step) -> Tensor:
        """Replay the step; the sampled ids [rows], on the device until the next launch."""
        count = len(step.rows)
        size = next(size for size in self.sizes if size >= count)
        blocks = -(-int(step.starts.max() + 1) // self.runner.block_size)
        width = min(max(1 << (blocks - 1).bit_length(), 16), self.runner.block_table.shape[2])
        rows, positions = self._sent
        if not (np.array_equal(rows, step.rows) and np.array_equal(positions, step.starts)):
            padded = np.full(size, len(self.position) - 1, np.int64)
            padded[:count] = step.rows
            sent_rows, sent_positions = self.runner._send(padded, step.starts)
            self.rows[:size] = sent_rows
            self.position[sent_rows[:count]] = sent_positions.int()
        graph = self.graphs.get((size, width)) or self._capture(size, width)
        graph.graph.replay()
        self._sent = (step.rows, step.starts + 1)
        return graph.out[:count]

    def _capture(self, size: int, width: int) -> Graph:
        out = torch.empty(size, dtype=torch.int64, device=self.runner.device)
        # A first run outside the capture compiles kernels and lets libraries allocate; on padding, it changes nothing.
        padding = torch.full((size,), len(self.position) - 1, dtype=torch.int64, device=self.runner.device)
        self._step(padding, width, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._step(self.rows[:size], width, out)
        self.graphs[size, width] = captured = Graph(graph, out)
        return captured

    def _step(self, rows: Tensor, width: int, out: Tensor) -> None:
        runner, model, count = self.runner, self.runner.model, len(rows)
        state = decode_step.prepare(
            rows, self.position, runner.tokens, runner.block_table, self.seed, self.temperature,
            block_size=runner.block_size, width=width,
        )  # fmt: skip
        batch = Batch(
            token_ids=state["ids"],
            positions=state["positions"],
            slots=state["slots"],
            decode=Rows(count, state["table"], state["lengths"], self.query_start[: count + 1], 1),
            prefill=None,
            logits_index=None,
        )
        if count == 1 and self.single_row is not None:
            logits = self.single_row.logits(batch, runner.caches)
        else:
            logits = model.logits(model.forward(batch, runner.caches))
        sampled = model.ops.sample(logits, state["temperature"], state["uniform"])
        decode_step.advance(rows, sampled, self.position, runner.tokens, out)


def batch_sizes(most: int) -> list[int]:
    """Sizes to capture: a batch is padded to the next. Matrix products come in tiles of 64 to 128 rows anyway."""
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, most + 256, 256)]
    return [size for size in sizes if size < most] + [most]
