"""Run a model's first layers on calibration text, and record the inputs of products.  Lesson 06."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minillm.model import Batch, Model
from minillm.model.batch import Rows
from minillm.ops import reference
from minillm.overrides import using
from minillm.quantization import Weight
from minillm.quantization.methods.statistics import SAMPLES, InputStatistics

BLOCK = 16
STEP_TOKENS = 4096  # tokens of one forward pass


def hidden_states(model: Model, ids: Tensor, layers: int | None = None) -> Tensor:
    """The states [rows * length, hidden] after the first `layers` layers (default: all) and the final norm.

    ids: [rows, length] int64. Nothing is kept between calls.
    """
    rows, length = ids.shape
    blocks = -(-length // BLOCK)
    table = torch.arange(rows * blocks, dtype=torch.int32, device=model.device).view(rows, blocks)
    positions = torch.arange(length, device=model.device).repeat(rows)
    slots = (torch.arange(rows, device=model.device) * blocks * BLOCK).repeat_interleave(length) + positions
    groups = len(model.groups.windows)
    full = torch.full((rows,), length, dtype=torch.int32, device=model.device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=model.device) * length
    prefill = Rows(rows * length, table.repeat(groups, 1, 1), full, starts, length)
    batch = Batch(ids.flatten(), positions, slots.repeat(groups, 1), None, prefill, None)
    shallow = copy.copy(model)
    shallow.layers = model.layers[:layers]
    # A layer reads only what it has just written, so all layers can use the same cache.
    cache = model.cache_spec.allocate(rows * blocks, BLOCK, model.device)
    return shallow.forward(batch, [cache] * len(shallow.layers))


@contextmanager
def recording(weights: dict[str, Weight], dtype: torch.dtype, keep: int) -> Iterator[dict[str, InputStatistics]]:
    """Record the inputs of these weights' products, by name, while the block runs. keep: samples of each step."""
    found = {
        name: InputStatistics(weight.shape[1], weight.stored()[0].device, dtype) for name, weight in weights.items()
    }
    by_weight = {id(weight): found[name] for name, weight in weights.items()}

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if id(weight) in by_weight:
            by_weight[id(weight)].add(x, keep)
        return reference.linear(x, weight)

    with using(linear=linear):
        yield found


def collect(
    model: Model, weights: dict[str, Weight], ids: Tensor, layers: int, dtype: torch.dtype = torch.float32
) -> dict[str, InputStatistics]:
    """The statistics of these weights' inputs over rows ids [rows, length], in the first `layers` layers."""
    step = max(1, STEP_TOKENS // ids.shape[1])
    keep = max(1, SAMPLES // -(-len(ids) // step))
    with recording(weights, dtype, keep) as found, torch.inference_mode():
        for start in range(0, len(ids), step):
            hidden_states(model, ids[start : start + step], layers)
    return found
