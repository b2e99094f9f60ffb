"""Divide a GPU's memory: measure what steps and graphs need, and give the rest to the cache.  Lessons 09 and 11."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from minillm.config import DeviceConfig
from minillm.errors import ConfigError
from minillm.kv_cache.layer_cache import CacheSpec, LayerCache
from minillm.model import Model
from minillm.request import SamplingParams
from minillm.scheduler.step import NewRow, Step

from .packing import pack
from .sampler import GENERAL_AT_ONCE, Sampler
from .state import RowState

if TYPE_CHECKING:  # importing it needs triton
    from .step_graphs import StepGraphs

CPU_CACHE_BYTES = 1 << 30
MakeGraphs = Callable[[list[LayerCache]], "StepGraphs | None"]


@dataclass(frozen=True)
class MemoryBudget:
    """A GPU's memory in bytes: in total, already taken, and needed by the largest step and by the CUDA graphs."""

    total: int
    taken: int
    workspace: int
    graphs: int
    utilization: float  # the fraction of `total` that may be used

    @property
    def cache(self) -> int:
        """Return the bytes that are left for keys and values."""
        return int(self.total * self.utilization) - self.taken - self.workspace - self.graphs

    def blocks(self, most: int, least: int, block_bytes: int, config: DeviceConfig) -> int:
        """`most` blocks, or as many as fit.

        least: blocks of the shortest request. Raises ConfigError, saying what would fit, if that does not fit, or if
        `num_blocks` is set and not all of them fit.
        """
        fitting = max(self.cache, 0) // block_bytes
        if fitting >= (most if config.num_blocks else min(most, least)):
            return min(most, fitting)
        slots = config.adapter_slots
        holders = f"weights, {slots + 1} slots of adapters, other programs" if slots else "weights, other programs"
        used = (
            f"{gib(self.taken)} of {gib(self.total)} are taken ({holders}), a step of "
            f"max_num_batched_tokens={config.max_num_batched_tokens} and max_num_seqs={config.max_num_seqs} needs "
            f"{gib(self.workspace)}, CUDA graphs {gib(self.graphs)}"
        )
        if config.num_blocks:
            raise ConfigError(
                f"num_blocks={most} needs {gib(most * block_bytes)} for keys and values, and {fitting} blocks would "
                f"fit: {used}"
            )
        wanted = least * block_bytes
        enough = (self.total * self.utilization - self.cache + wanted) / self.total
        ways = [f"lower max_num_batched_tokens{', max_loras' if slots else ''} or max_num_seqs", "free the GPU"]
        if enough <= 1:
            ways.insert(0, f"gpu_memory_utilization={math.ceil(enough * 100) / 100} would fit")
        raise ConfigError(
            f"gpu_memory_utilization={self.utilization} leaves {gib(max(self.cache, 0))} for keys and values, and even "
            f"the shortest request needs {gib(wanted)}: {used}; {'; '.join(ways)}"
        )


@dataclass(frozen=True)
class Memory:
    """Measures how much memory an engine's steps need, and allocates its cache."""

    model: Model
    state: RowState
    sampler: Sampler
    spec: CacheSpec

    @property
    def block_bytes(self) -> int:
        """Return bytes of one block across all layers of a group that are here."""
        return self.model.groups.size * self.state.block_size * self.spec.bytes_per_token

    @property
    def longest(self) -> int:
        """Return the most tokens of a request that a row and its block table have room for."""
        return min(self.state.longest, self.state.block_table.shape[2] * self.state.block_size)

    def allocate(self, blocks: int) -> list[LayerCache]:
        """Return one cache per layer. Layers with the same index in their groups share one: a block belongs to one
        group.
        """
        groups, device = self.model.groups, self.state.device
        try:
            made = [self.spec.allocate(blocks, self.state.block_size, device) for _ in range(groups.size)]
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"num_blocks={blocks} needs {gib(blocks * self.block_bytes)} for keys and values, more than {device} "
                "has free; lower num_blocks, max_num_seqs or max_model_len"
            ) from error
        return [made[index] for _, index in groups.of_layer]

    def blocks_that_fit(self, config: DeviceConfig, request: int, least: int, make_graphs: MakeGraphs) -> int:
        """Return the requested number of blocks, or as many as fit in memory, up to what all rows need at full length.

        The same for all ranks. request, least: blocks of one request of full length, and of the shortest. Raises
        ConfigError.
        """
        return self.model.parallel.least(self._blocks_here(config, request, least, make_graphs))

    def _blocks_here(self, config: DeviceConfig, request: int, least: int, make_graphs: MakeGraphs) -> int:
        """Return the same on this device alone."""
        most = config.num_blocks or config.max_num_seqs * request
        if self.state.device.type != "cuda":
            return most if config.num_blocks else min(most, max(CPU_CACHE_BYTES // self.block_bytes, least))
        workspace, graphs = self.workspace(config), self.graphs(make_graphs)
        free, total = torch.cuda.mem_get_info(self.state.device)
        utilization = 1.0 if config.num_blocks else config.gpu_memory_utilization
        budget = MemoryBudget(total, total - free, workspace, graphs, utilization)
        return budget.blocks(most, least, self.block_bytes, config)

    def workspace(self, config: DeviceConfig) -> int:
        """Return bytes that the largest step needs in addition to weights and cache, measured by running one.

        Raises ConfigError.
        """
        count, rows = config.max_num_batched_tokens, config.max_num_seqs
        try:
            long = self.step_bytes(count, min(rows, -(-count // self.longest)))  # attention gathers long prompts' keys
            return max(long, self.step_bytes(count, rows))
        except torch.OutOfMemoryError as error:
            halves = (count >> halvings for halvings in range(1, count.bit_length()))
            fitting = None
            if (
                self.model.parallel.size * self.model.parallel.stage.count == 1
            ):  # other ranks would be in the middle of the first step still
                fitting = next((fewer for fewer in halves if self._step_fits(fewer, rows)), None)
            way = f"max_num_batched_tokens={fitting} would fit" if fitting else "use a smaller model or dtype"
            raise ConfigError(
                f"a step of max_num_batched_tokens={count} and max_num_seqs={rows} does not fit next to the weights "
                f"({gib(self.model.nbytes)}) on {self.state.device}, which has "
                f"{gib(torch.cuda.mem_get_info(self.state.device)[1])}; {way}, or free the GPU"
            ) from error

    def _step_fits(self, count: int, most_rows: int) -> bool:
        try:
            self.step_bytes(count, most_rows)
        except torch.OutOfMemoryError:
            return False
        return True

    def step_bytes(self, count: int, most_rows: int) -> int:
        """Return bytes that a step of `count` tokens needs, with as many rows as possible, an adapter of each, if there
        may be any, and every sampling option except log-probabilities.
        """
        state, rows, longest = self.state, min(most_rows, count), self.longest
        queries = np.full(rows, min(count // rows, longest), np.int32)
        ids = np.arange(rows, dtype=np.int32)
        step = Step(0, ids, np.zeros(rows, np.int32), queries, np.ones(rows, bool), int((queries == 1).sum()))
        everything = SamplingParams(top_p=0.9, repetition_penalty=1.1, logit_bias={0: 0.0})
        for row in range(min(rows, GENERAL_AT_ONCE)):
            state.sampling.fill(NewRow(row, ids, 0, everything, seed=0, stop_ids=()))

        def run(caches: list[LayerCache]) -> None:
            hidden = self.model.forward(pack(step, state, np.cumsum(queries) - 1), caches)
            if self.model.parallel.stage.last:
                # Penalties read all tokens that a row can hold.
                self.sampler(self.model.logits(hidden), ids, np.full(rows, longest))

        try:
            with nullcontext() if state.adapters is None else state.adapters.as_if_used():
                return self.reserved_by(run)
        finally:
            state.sampling.general[:] = False

    def graphs(self, make_graphs: MakeGraphs) -> int:
        """Return bytes that CUDA graphs will need. They share a memory pool, whose size the largest graph
        determines.
        """
        kept = 0

        def run(caches: list[LayerCache]) -> None:
            nonlocal kept
            graphs = make_graphs(caches)
            if graphs is not None:
                graphs.rehearse_largest()
                kept = graphs.kept_bytes
                graphs.close()

        return self.reserved_by(run) + kept

    @torch.inference_mode()
    def reserved_by(self, run: Callable[[list[LayerCache]], None]) -> int:
        """Return the growth in bytes of torch's peak reserved memory during `run`, which gets caches of one block."""
        device, caches = self.state.device, self.allocate(1)
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_reserved(device)
            run(caches)
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_reserved(device) - before
        finally:
            caches.clear()
            torch.cuda.empty_cache()


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
