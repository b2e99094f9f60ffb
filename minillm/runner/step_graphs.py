"""All captured steps of one engine: choosing the graph for a step, capturing and freeing graphs.  Lesson 11."""

from collections.abc import Iterable
from typing import Any

from minillm.config import DeviceConfig
from minillm.kv_cache.layer_cache import LayerCache
from minillm.model import Model
from minillm.scheduler.step import Step

from .cuda_graph import CapturedSteps, DecodeShape, Graphs, Replayed
from .decode_graphs import DecodeGraphs
from .mixed_graphs import MixedGraphs
from .state import RowState

# Memory outside the graphs' pool, with a margin: the driver's share of each graph, and the workspace that libraries
# allocate for the capturing stream.
GRAPH_BYTES, CAPTURE_BYTES = 1 << 20, 64 << 20


class StepGraphs:
    """Graphs of decode steps and of steps with prompts.

    single_row=False disables the fused step for one request; mixed=False launches steps with prompts kernel by kernel;
    sampling=False does so too, and launches sampling after the graph. All of them only make steps slower, for
    comparison.
    """

    def __init__(
        self,
        model: Model,
        state: RowState,
        caches: list[LayerCache],
        config: DeviceConfig,
        *,
        single_row: bool = True,
        sampling: bool = True,
        mixed: bool = True,
    ):
        self.captured = CapturedSteps(model.ops)
        kinds = {"single_row": single_row, "sampling": sampling}
        self.decodes = DecodeGraphs(model, state, caches, self.captured, config.max_num_seqs, **kinds)
        self.mixed: MixedGraphs | None = None
        if mixed and sampling and MixedGraphs.supports(model):
            self.mixed = MixedGraphs(self.decodes, config)
        self.kinds: list[Graphs[Any]] = [self.decodes] if self.mixed is None else [self.decodes, self.mixed]

    def replay(self, step: Step) -> Replayed | None:
        """Replay a step. Returns None if no graph can run it."""
        if step.drafts is not None or not self.captured.follow():
            return None
        for graphs in self.kinds:
            if (shape := graphs.fits(step)) is not None:
                return graphs.replay(step, shape)
        return None

    def capture_all(self) -> None:
        """Capture every batch size with the narrowest block tables, and every shape with prompts."""
        if self.captured.follow():
            width = self.decodes.width(1)
            self.capture(DecodeShape(size, width) for size in self.decodes.sizes)

    def capture(self, decodes: Iterable[DecodeShape]) -> None:
        """Capture these decode steps, to whose sizes batches are padded from then on, and every shape with prompts."""
        self.decodes.capture_sizes(decodes)
        if self.mixed is not None and self.captured.operations.engines_own:
            for shape in reversed(self.mixed.shapes):
                self.mixed.capture(shape)

    def rehearse_largest(self) -> None:
        """Run the largest steps without capturing them, to measure their memory."""
        for graphs in self.kinds:
            graphs.rehearse(graphs.largest)

    @property
    def kept_bytes(self) -> int:
        """Bytes that all graphs together keep outside their pool."""
        return CAPTURE_BYTES + GRAPH_BYTES * sum(graphs.count for graphs in self.kinds)

    def close(self) -> None:
        """Free the graphs now instead of at garbage collection."""
        self.captured.clear()
        self.kinds.clear()
        self.mixed = None
