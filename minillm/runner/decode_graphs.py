"""Steps as CUDA graphs: one launch a step, sampling inside.  Lessons 03 and 10.

At a millisecond a step, launching some 200 kernels from Python takes longer than running them. So the step is captured
once for each size of batch and replayed. Its inputs are the device's own rows: while the same rows keep decoding, the
host sends nothing but what changed in their block tables. Steps that also run prompts are in `mixed_graphs`.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from minillm.config import EngineConfig
from minillm.kernels import decode_step
from minillm.model.batch import Batch, Rows
from minillm.model.single_row import SingleRow
from minillm.overrides import Parts
from minillm.request import Request
from minillm.scheduler.step import Step

from .cuda_graph import Graph, Replayed, capture
from .mixed_graphs import MixedGraphs, Shape

NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.int32))


class CapturedSteps(dict[tuple[int, int], Graph]):
    """The graphs of one version of the operations: when others run, their memory is given back.

    mixed: those of steps with prompts in them. They share the others' memory, and go when those go.
    """

    def __init__(self, operations: Parts):
        super().__init__()
        self.operations, self.functions, self.version = operations, operations.functions, -1
        self.allowed = False  # whether what runs now may be captured
        self.mixed: dict[Shape, Graph] = {}

    def follow(self) -> bool:
        """Drop what was captured from other operations than may be captured now; whether these may."""
        if self.version != self.operations.version:
            self.version, self.allowed = self.operations.version, self.operations.capturable
            # Operations that run eagerly leave the graphs alone: the engine's own come back afterwards.
            if self.allowed and self.functions != self.operations.functions:
                self.functions = self.operations.functions
                self.clear()
                self.mixed.clear()
                torch.cuda.empty_cache()
        return self.allowed


class DecodeGraphs:
    """The captured steps, and the device's state that they run on.

    single_row=False leaves out the fused step of one request; mixed=False launches steps with prompts kernel by kernel;
    sampling=False does so too, and launches sampling behind the graph. All only cost time.
    """

    def __init__(
        self, runner, config: EngineConfig, *, single_row: bool = True, sampling: bool = True, mixed: bool = True
    ):
        self.runner = runner
        self.sampling = sampling
        device, count = runner.device, config.max_num_seqs + 1  # the last row is padding
        self.position = torch.zeros(count, dtype=torch.int32, device=device)  # of the token to run next
        self.seed = torch.zeros(count, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(count, dtype=torch.float32, device=device)
        self.rows = torch.full((count,), count - 1, dtype=torch.int64, device=device)
        self.query_start = torch.arange(count + 1, dtype=torch.int32, device=device)
        self.sizes = batch_sizes(config.max_num_seqs)
        self.single_row = SingleRow(runner.model) if single_row and SingleRow.fits(runner.model) else None
        self.graphs = CapturedSteps(runner.model.ops)
        self.mixed = MixedGraphs(self, config) if mixed and sampling and MixedGraphs.fit(runner.model) else None
        self._sent = NOTHING

    def admit(self, requests: list[Request]) -> None:
        """Send what sampling needs of newly admitted requests."""
        rows, seeds = self.runner._send(
            np.array([request.row for request in requests]), np.array([request.seed for request in requests])
        )
        self.seed[rows] = seeds
        temperatures = torch.tensor([request.params.temperature for request in requests], dtype=torch.float32)
        self.temperature[rows] = temperatures.pin_memory().to(self.runner.device, non_blocking=True)

    def width(self, blocks: int) -> int:
        """To how many blocks a table is padded whose longest row has `blocks`."""
        return min(max(1 << (blocks - 1).bit_length(), 16), self.runner.block_table.shape[2])

    @torch.inference_mode()
    def capture(self, steps: Iterable[tuple[int, int]]) -> None:
        """Capture these steps (rows, width in blocks) now; batches are then padded to one of their sizes."""
        steps = sorted(steps, reverse=True)  # the largest first: the others fit into its memory
        for size, width in steps:
            self.captured(size, width)
        if steps:
            self.sizes = sorted({size for size, _ in steps} | {self.sizes[-1]})

    def capture_all(self) -> None:
        """Capture every size of batch with the least width of tables, and every shape with prompts."""
        self.capture([(size, self.width(1)) for size in self.sizes])
        self.capture_mixed()

    def capture_mixed(self) -> None:
        """Capture every shape of a step with prompts."""
        if self.mixed and self.graphs.operations.engines_own:
            for shape in reversed(self.mixed.shapes):
                self.mixed.captured(shape)

    def close(self) -> None:
        """Give the graphs' memory back now: they and what captures them know each other, and wait for the collector."""
        self.graphs.clear()
        self.graphs.mixed.clear()
        self.mixed = None

    def can_run(self) -> bool:
        """Whether the operations that run now may be captured."""
        return self.graphs.follow()

    def launch(self, step: Step) -> Replayed:
        """Replay a step of decodes."""
        count = len(step.rows)
        size = next(size for size in self.sizes if size >= count)
        blocks = -(-int(step.starts.max() + 1) // self.runner.block_size)
        width = self.width(blocks)
        graph = self.captured(size, width)
        rows, positions = self._sent
        if not (np.array_equal(rows, step.rows) and np.array_equal(positions, step.starts)):
            padded = np.full(size, len(self.position) - 1, np.int64)
            padded[:count] = step.rows
            sent_rows, sent_positions = self.runner._send(padded, step.starts)
            self.rows[:size] = sent_rows
            self.position[sent_rows[:count]] = sent_positions.int()
        graph.graph.replay()
        if not self.sampling:
            self._sample(self.rows[:size], graph.to_sample, graph.out)
        self._sent = (step.rows, step.starts + 1)
        return Replayed(graph.out[:count], graph.to_sample[0], np.arange(count))

    def launch_mixed(self, step: Step) -> Replayed | None:
        """Replay a step with prompts in it; None if no shape has room for it."""
        shape = self.mixed.shape(step) if self.mixed and self.graphs.operations.engines_own else None
        if shape is None:
            return None
        self._sent = NOTHING  # the rows' positions on the device are this step's
        return self.mixed.launch(step, shape)

    @property
    def largest(self) -> tuple[int, int]:
        return self.sizes[-1], self.width(self.runner.block_table.shape[2])

    def rehearse_largest(self) -> None:
        """Run the largest step without capturing it, to see what it takes."""
        size, width = self.largest
        self._rehearse(width, torch.empty(size, dtype=torch.int64, device=self.runner.device))
        if self.mixed:
            self.mixed.rehearse(self.mixed.shapes[-1])

    def _rehearse(self, width: int, out: Tensor) -> None:
        """On padding a step changes nothing, but kernels are compiled, and libraries allocate what they want."""
        padding = torch.full_like(out, len(self.position) - 1)
        self._sample(padding, self._logits(padding, width), out)

    def captured(self, size: int, width: int) -> Graph:
        """The graph of `size` rows with tables of `width` blocks, captured now if need be."""
        if (size, width) in self.graphs:
            return self.graphs[size, width]
        # Into the largest's memory all others fit, in whatever order they come. Not so with a replaced operation: it
        # may gather what the engine's own never holds, and nobody has kept memory free for that.
        if not self.graphs and (size, width) != self.largest and self.graphs.operations.engines_own:
            self.captured(*self.largest)
        out = torch.empty(size, dtype=torch.int64, device=self.runner.device)
        self._rehearse(width, out)

        def step() -> tuple[Tensor, ...]:
            to_sample = self._logits(self.rows[:size], width)
            if self.sampling:
                self._sample(self.rows[:size], to_sample, out)
            return to_sample

        self.graphs[size, width] = captured = self.record(step, out)
        return captured

    def record(self, step: Callable[[], tuple[Tensor, ...]], out: Tensor) -> Graph:
        """What `step` launches, as a graph; it is not run. step: puts its tokens into `out`, returns `to_sample`."""
        # One pool for all: they never run at the same time. A pool that lost its graphs cannot be used again.
        others = next(iter(self.graphs.values()), None)
        try:
            return capture(step, out, pool=others and others.graph.pool())
        except RuntimeError as error:
            if self.graphs.operations.engines_own:
                raise
            raise RuntimeError(
                f"a replaced operation cannot be captured in a CUDA graph ({error}): it may not read values back to "
                "the host; leave out capturable=True, and it runs without graphs"
            ) from error

    def _logits(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows' logits, and the temperatures and random numbers to sample them with."""
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
        if count == 1 and self.single_row is not None and model.ops.engines_own:
            logits = self.single_row.logits(batch, runner.caches)
        else:
            logits = model.logits(model.forward(batch, runner.caches))
        return logits, state["temperature"], state["uniform"]

    def _sample(self, rows: Tensor, to_sample: tuple[Tensor, ...], out: Tensor) -> None:
        sampled = self.runner.model.ops.sample(*to_sample)
        decode_step.advance(rows, sampled, self.position, self.runner.tokens, out)


def batch_sizes(most: int) -> list[int]:
    """Sizes to capture: a batch is padded to the next. Matrix products come in tiles of 64 to 128 rows anyway."""
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, most + 256, 256)]
    return [size for size in sizes if size < most] + [most]
