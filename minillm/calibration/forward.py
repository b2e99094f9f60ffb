"""Run a model on calibration text one layer at a time, and record the inputs of products.  Lesson 06."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache
from minillm.model import Batch, Model
from minillm.model.decoder import Layer
from minillm.ops import Rows, reference
from minillm.overrides import using
from minillm.quantization import Weight
from minillm.quantization.methods.statistics import SAMPLES, InputStatistics

BLOCK = 16
STEP_TOKENS = 4096  # tokens of one forward pass


class CalibrationRun:
    """Calibration rows on their way through a model: the residual stream before the next layer is kept.

    So each layer runs twice, however many there are: `record` runs it unquantized, and `advance` quantized, for the
    layers after it to be calibrated on. The stream takes rows * length * hidden numbers of the model's dtype.

    ids: [rows, length] int64
    """

    def __init__(self, model: Model, ids: Tensor):
        self.model = model
        self.batches = [packed(model, part) for part in ids.split(max(1, STEP_TOKENS // ids.shape[1]))]
        with torch.inference_mode():
            self.streams = [model.embed(batch) for batch in self.batches]

    def record(
        self, layer: Layer, weights: dict[str, Weight], dtype: torch.dtype = torch.float32
    ) -> dict[str, InputStatistics]:
        """Return the statistics of the inputs of these weights, which belong to the next layer, by name."""
        keep = max(1, SAMPLES // len(self.batches))
        with recording(weights, dtype, keep, unused=layer.down) as statistics:
            for batch, stream in zip(self.batches, self.streams, strict=True):
                self._run(layer, batch, stream)
        return statistics

    def advance(self, layer: Layer) -> None:
        """Run the next layer as it now is, and keep its outputs instead of its inputs."""
        for index, (batch, stream) in enumerate(zip(self.batches, self.streams, strict=True)):
            x, residual = self._run(layer, batch, stream)
            self.streams[index] = residual + x

    def _run(self, layer: Layer, batch: Batch, stream: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            metadata, cache = self.model.metadata(batch), _cache(self.model, batch)
            x, residual = self.model.run_layer(layer, None, stream, batch, metadata, cache)
            return self.model.ops.added(x), residual


def hidden_states(model: Model, ids: Tensor) -> Tensor:
    """Return the final hidden states [rows * length, hidden] of rows ids [rows, length] int64. Nothing is kept."""
    batch = packed(model, ids)
    # A layer reads only what it has just written, so all layers can use the same cache.
    return model.forward(batch, [_cache(model, batch)] * len(model.layers))


def packed(model: Model, ids: Tensor) -> Batch:
    """ids [rows, length] int64 as one batch of whole prompts."""
    rows, length = ids.shape
    blocks = -(-length // BLOCK)
    table = torch.arange(rows * blocks, dtype=torch.int32, device=model.device).view(rows, blocks)
    positions = torch.arange(length, device=model.device).repeat(rows)
    slots = (torch.arange(rows, device=model.device) * blocks * BLOCK).repeat_interleave(length) + positions
    groups = len(model.groups.windows)
    full = torch.full((rows,), length, dtype=torch.int32, device=model.device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=model.device) * length
    prefill = (Rows(table, full, starts, length),) * groups
    return Batch(ids.flatten(), positions, slots.repeat(groups, 1), (), prefill, None)


def _cache(model: Model, batch: Batch) -> LayerCache:
    return model.cache_spec.allocate(batch.prefill[0].block_table.numel(), BLOCK, model.device)


@contextmanager
def recording(
    weights: dict[str, Weight], dtype: torch.dtype, keep: int, unused: Weight
) -> Iterator[dict[str, InputStatistics]]:
    """Record the inputs of these weights' products, by name, while the block runs.

    keep: samples of each step. unused: a weight whose product nothing reads, and which is not computed.
    """
    statistics = {
        name: InputStatistics(weight.shape[1], weight.stored()[0].device, dtype) for name, weight in weights.items()
    }
    by_weight = {id(weight): statistics[name] for name, weight in weights.items()}

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if id(weight) in by_weight:
            by_weight[id(weight)].add(x, keep)
        if weight is unused:
            return x.new_zeros(*x.shape[:-1], weight.shape[0])
        return reference.linear(x, weight)

    with using(linear=linear):
        yield statistics
