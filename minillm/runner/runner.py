"""Run steps on one device, as CUDA graphs where that is faster.  Lessons 09 to 11."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minillm.adapters.slots import AdapterSlots
from minillm.config import DeviceConfig
from minillm.errors import ConfigError
from minillm.kv_cache.attention_sinks import Stream
from minillm.kv_cache.layer_cache import LayerCache
from minillm.kv_cache.layer_groups import blocks_held, longest_held
from minillm.model import Model
from minillm.model.batch import Batch
from minillm.scheduler.step import Step

from . import logprobs
from .device_drafts import DeviceDrafts
from .launched import LaunchedStep
from .memory import Memory, gib
from .packing import pack
from .sampler import Sampler
from .state import RowState

if TYPE_CHECKING:  # importing it needs triton
    from .cuda_graph import Replayed
    from .step_graphs import StepGraphs

log = logging.getLogger(__name__)


class Runner:
    """A model with its cache and row state; `run` runs a step.

    Raises ConfigError if the memory is too small for the options.
    """

    def __init__(self, model: Model, config: DeviceConfig, max_model_len: int, adapters: AdapterSlots | None = None):
        self.model = model
        windows, chunk = model.groups.windows, config.max_num_batched_tokens
        rows, block_size = config.max_num_seqs, config.block_size
        sizes = config.attention_sinks, config.attention_window, block_size
        self.stream = Stream.of(*sizes, max_model_len, model.config.windows)
        width = self.stream.max_blocks if self.stream else -(-max_model_len // block_size)
        try:
            self.state = RowState(rows, max_model_len, len(windows), width, block_size, model.device)
        except (RuntimeError, MemoryError) as error:  # how torch and NumPy report that memory is exhausted
            raise ConfigError(
                f"max_num_seqs={rows} rows of max_model_len={max_model_len} tokens need more memory than "
                f"{model.device} has free; lower one of them"
            ) from error
        self.state.adapters = adapters
        self.device_drafts = DeviceDrafts(self.state)
        self.sampler = Sampler(self.state, model.ops)
        self.memory = Memory(model, self.state, self.sampler, model.cache_spec)

        def make_graphs(caches: list[LayerCache]) -> "StepGraphs | None":
            return self._make_graphs(config, caches)

        def blocks(tokens: int) -> int:
            return self.stream.max_blocks if self.stream else blocks_held(tokens, windows, block_size, chunk)

        request = blocks(max_model_len)
        self.num_blocks = self.memory.blocks_that_fit(config, request, blocks(block_size), make_graphs)
        self.max_model_len = max_model_len
        if self.num_blocks < request and config.num_blocks is None:
            self.max_model_len = longest_held(self.num_blocks, windows, block_size, chunk)
            more = "a higher gpu_memory_utilization" if model.device.type == "cuda" else "num_blocks"
            log.warning(
                f"max_model_len is lowered from {max_model_len:,} to {self.max_model_len:,} tokens: the memory for "
                f"keys and values, {gib(self.num_blocks * self.memory.block_bytes)}, cannot hold a longer request; "
                f"{more} or kv_cache_dtype='fp8' makes room for more"
            )
        self.caches = self.memory.allocate(self.num_blocks)
        self.graphs = make_graphs(self.caches)
        self._decoding: tuple[Step, Batch, Tensor] | None = None  # the last decode-only step, its batch, its tokens

    def _make_graphs(self, config: DeviceConfig, caches: list[LayerCache]) -> "StepGraphs | None":
        """CUDA graphs, or None where they are not supported or not wanted."""
        if self.model.device.type != "cuda" or config.enforce_eager or self.stream:
            return None
        if self.model.dtype == torch.float64 or config.pipeline_parallel_size > 1:
            return None
        try:
            from .step_graphs import StepGraphs
        except ImportError:  # no triton
            return None
        return StepGraphs(self.model, self.state, caches, config)

    def close(self) -> None:
        """Free the cache and the graphs now instead of at garbage collection."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # steps in flight still write to the host's memory
        if self.graphs is not None:
            self.graphs.close()
        self.caches.clear()
        self.graphs = self._decoding = None

    @torch.inference_mode()
    def put(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Write tokens [n] to these positions of the rows, in place of those that steps sampled there."""
        self.state.store(rows, positions, self.state.to_device(tokens))
        self._decoding = None  # its tokens are no longer the next step's

    @torch.inference_mode()
    def run(self, step: Step) -> LaunchedStep:
        """Run a step. On a GPU it returns without waiting; `LaunchedStep.wait` gives the results."""
        self.state.update(step)
        before, self._decoding = self._decoding, None
        if step.lookup is not None:
            return self.device_drafts.run(self, step)
        embedded = self.state.embedded.take(step)
        scores = self.model.parallel.stage.last and not step.decodes_only
        prompts = logprobs.rows_wanting_prompts(self.state, step) if scores else []
        if self.graphs is not None and not prompts and embedded is None:
            replayed = self.graphs.replay(step)
            if replayed is not None:
                return self._correct(step, replayed)
        if step.decodes_only and step.drafts is None and embedded is None:
            return self._decode(step, before)
        return self._run_mixed(step, prompts, embedded)

    def _correct(self, step: Step, replayed: "Replayed") -> LaunchedStep:
        """Finish a replayed step: sample rows again if they need more than the sampling in the graph."""
        state, rows, ends = self.state, step.token_rows, step.for_each_token(step.ends)
        sampled, logits, indices = replayed.sampled, replayed.logits, replayed.indices
        corrected = self.sampler.correct(sampled, logits, indices, rows, ends)
        if corrected:
            state.store(rows, ends, sampled)
        read = None if corrected else partial(state.read, rows, ends)
        done = ~state.sampling.general[rows] & replayed.scored
        scores = logprobs.of_sampled(state, logits, indices, rows, sampled, ~done)
        arrived = logprobs.arrived(state, rows[done], ends[done], logits.shape[1])
        return LaunchedStep(step, sampled, [*scores, *arrived], read=read)

    def _decode(self, step: Step, before: tuple[Step, Batch, Tensor] | None) -> LaunchedStep:
        """Launch a decode-only step kernel by kernel."""
        if before is not None and _continues(step, before[0]) and not self._enters_blocks(step):
            # The same rows continue in the same blocks: reuse the last batch, advanced by one token.
            _, batch, sampled = before
            batch.token_ids = sampled
            for moved in (batch.positions, batch.slots, batch.decode[0].lengths):  # the groups share these lengths
                moved.add_(1)
        else:
            batch = pack(step, self.state, None, streams=self.stream is not None)
        hidden = self.model.forward(batch, self.caches)
        launched, sampled = self._sample(step, hidden)
        self._decoding = (step, batch, sampled)
        return launched

    def _enters_blocks(self, step: Step) -> bool:
        """Return whether a row's next token begins a block. The row may have got it some steps ago, for drafts."""
        return bool((step.starts % self.state.block_size == 0).any())

    def _run_mixed(
        self, step: Step, prompts: list[int], embedded: tuple[np.ndarray, np.ndarray] | None
    ) -> LaunchedStep:
        """Launch a step kernel by kernel.

        prompts: indices of the rows whose prompts are scored. embedded: tokens with embeddings, and these.
        """
        self.state.store_drafts(step)
        last = np.cumsum(step.queries) - 1
        index = sampled = step.for_each_token(last)
        if prompts:
            used = np.zeros(last[-1] + 1, bool)
            used[sampled] = True
            for i in prompts:
                used[last[i] - step.queries[i] + 1 : last[i] + 1] = True
            index = np.nonzero(used)[0]
        batch = pack(step, self.state, index, streams=self.stream is not None, embedded=embedded)
        hidden = self.model.forward(batch, self.caches)
        scores = []
        for i in prompts:
            first = int(np.searchsorted(index, last[i] - step.queries[i] + 1))
            scores.append(logprobs.of_prompt(self.model, self.state, step, i, hidden[first:]))
        if prompts:
            hidden = hidden[self.state.send(np.searchsorted(index, sampled))[0]]
        return self._sample(step, hidden, scores)[0]

    def _sample(
        self, step: Step, hidden: Tensor, prompts: Sequence[logprobs.PromptScores] = ()
    ) -> tuple[LaunchedStep, Tensor]:
        """Sample the tokens that the step yields and store them on the device. hidden: [tokens, hidden].

        After a draft that is wrong, what is stored is wrong too, until the row's next step writes there.
        Returns the tokens as the next step's inputs too. Only the last stage of a pipeline samples: `put` tells the
        others.
        """
        rows, ends = step.token_rows, step.for_each_token(step.ends)
        if len(rows) == 0 or not self.model.parallel.stage.last:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.model.device)
            return LaunchedStep(step, nothing, [], prompts), nothing
        if self.model.parallel.size > 1 and self.sampler.samples_in_shards(rows):
            logits = self.model.own_logits(hidden)
            sampled = self.sampler.of_shards(self.model.parallel, logits, rows, ends)
        else:
            logits = self.model.logits(hidden)
            sampled = self.sampler(logits, rows, ends)
        inputs = self.state.store(rows, ends, sampled)
        scores = logprobs.of_sampled(self.state, logits, np.arange(len(rows)), rows, sampled)
        return LaunchedStep(step, sampled, scores, prompts), inputs


def _continues(step: Step, before: Step) -> bool:
    """Return whether the same rows run their next tokens, with unchanged block tables."""
    return (
        step.table_changes is None
        and not step.new_rows
        and np.array_equal(step.rows, before.rows)
        and np.array_equal(step.starts, before.starts + 1)
    )
