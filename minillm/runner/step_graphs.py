"""All captured steps of one engine: choosing the graph for a step, capturing and freeing graphs.  Lesson 11."""

from minillm.config import DeviceConfig
from minillm.kv_cache.layer_cache import LayerCache
from minillm.model import Model
from minillm.scheduler.step import Step

from .cuda_graph import CapturedSteps, DecodeShape, Replayed
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
        if mixed and sampling and MixedGraphs.fit(model):
            self.mixed = MixedGraphs(self.decodes, config)

    def replay(self, step: Step) -> Replayed | None:
        """Replay a step. Returns None if no graph can run it."""
        if step.queries_per_decode > 1 or not self.captured.follow():
            return None
        if step.decodes_only:
            return self.decodes.replay(step)
        if self.mixed is None or not self.captured.operations.engines_own:
            return None
        return self.mixed.replay(step)

    def capture_all(self) -> None:
        """Capture every batch size with the narrowest block tables, and every shape with prompts."""
        if self.captured.follow():
            width = self.decodes.width(1)
            self.decodes.capture(DecodeShape(size, width) for size in self.decodes.sizes)
            self.capture_mixed()

    def capture_mixed(self) -> None:
        """Capture every shape of a step with prompts."""
        if self.mixed and self.captured.operations.engines_own:
            for shape in reversed(self.mixed.shapes):
                self.mixed.graph(shape)

    def rehearse_largest(self) -> None:
        """Run the largest steps without capturing them, to measure their memory."""
        self.decodes.rehearse(self.decodes.largest)
        if self.mixed:
            self.mixed.rehearse(self.mixed.shapes[-1])

    def kept_bytes(self, most_blocks: int) -> int:
        """Bytes that all graphs together keep outside their pool. most_blocks: the most blocks in a row's table."""
        widths = {self.decodes.width(blocks) for blocks in range(1, most_blocks + 1)}
        count = len(self.decodes.sizes) * len(widths) + (len(self.mixed.shapes) if self.mixed else 0)
        return CAPTURE_BYTES + count * GRAPH_BYTES

    def close(self) -> None:
        """Free the graphs now instead of at garbage collection."""
        self.captured.clear()
        self.mixed = None
