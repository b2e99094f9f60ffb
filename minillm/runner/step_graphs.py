"""All captured steps of one engine: choosing the graph for a step, capturing and freeing graphs.  Lesson 11."""

from collections.abc import Iterable
from typing import Any

from minillm.config import DeviceConfig
from minillm.kv_cache.layer_cache import LayerCache
from minillm.model import Model
from minillm.scheduler.step import Step

from .cuda_graph import CapturedSteps, DecodeShape, Graphs, Replayed
from .decode_graphs import DecodeGraphs
from .lookup_graphs import LookupGraphs
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
        # The fused step sums in other orders than steps of several rows.
        kinds = {"single_row": single_row and not config.exact, "sampling": sampling}
        drafts = 0 if config.speculate == "off" else config.speculate_tokens
        most = max(config.max_num_seqs, 1 + drafts)
        self.decodes = DecodeGraphs(model, state, caches, self.captured, most, **kinds)
        self.mixed: MixedGraphs | None = None
        if mixed and sampling and MixedGraphs.supports(model):
            self.mixed = MixedGraphs(self.decodes, config)
        self.kinds: list[Graphs[Any]] = [self.decodes] if self.mixed is None else [self.decodes, self.mixed]
        # As `scheduler.drafting_ahead` says, of a model with windows the host drafts.
        ahead = config.speculate_ahead and config.ranks == 1 and self.decodes.sampling and not any(model.config.windows)
        self.lookups = LookupGraphs(self.decodes, config.speculate_tokens) if ahead else None

    def replay(self, step: Step) -> Replayed | None:
        """Replay a step. Returns None if no graph can run it."""
        if not self.captured.follow():
            return None
        if step.lookup is not None and self.lookups is not None:
            return None if (shape := self.lookups.fits(step)) is None else self.lookups.replay(step, shape)
        for graphs in self.kinds:
            if (shape := graphs.fits(step)) is not None:
                return graphs.replay(step, shape)
        return None

    def capture_all(self) -> None:
        """Capture every batch size with the narrowest block tables, and every shape with prompts."""
        if self.captured.follow():
            self.capture(DecodeShape(size, self.decodes.width(1)) for size in self.decodes.sizes)

    def capture(self, decodes: Iterable[DecodeShape]) -> None:
        """Capture these decode steps, to whose sizes batches are padded from then on, and every shape with prompts.

        Where there may be adapters, each is captured with them, too: else the first request with one would wait for it,
        and so would all others in its steps.
        """
        shapes = [shape._replace(reach=reach) for shape in decodes for reach in self.decodes.reaches]
        self.decodes.capture_sizes(shapes)
        if self.lookups is not None:
            self.lookups.capture_sizes(shapes)
        if self.mixed is not None and self.captured.operations.engines_own:
            for reach in reversed(self.mixed.reaches):
                for shape in reversed(self.mixed.shapes):
                    self.mixed.capture(shape._replace(reach=reach))

    def rehearse_largest(self) -> None:
        """Run the largest steps without capturing them, to measure their memory."""
        for graphs in self.kinds:
            graphs.rehearse(graphs.largest)

    @property
    def kept_bytes(self) -> int:
        """Return bytes that all graphs together keep outside their pool."""
        counts = [graphs.count for graphs in self.kinds] + [self.lookups.count if self.lookups is not None else 0]
        return CAPTURE_BYTES + GRAPH_BYTES * sum(counts)

    def close(self) -> None:
        """Free the graphs now instead of at garbage collection."""
        self.captured.clear()
        self.kinds.clear()
        self.mixed = self.lookups = None
