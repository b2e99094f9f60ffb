"""Runs steps on the device: fixed rows of state there, packed differences sent to it.  Lessons 09 and 10.

A row of the device's state holds a request's tokens and block table. A step names spans of rows; the token ids are
read from the rows, the sampled ids written back to them. So the next step can be launched before anybody has read
this one's tokens, and prefill, chunk, decode and resumption are the same few lines.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import blocks_held
from minillm.kv_cache.storage import LayerCache
from minillm.kv_cache.streams import Stream, missing
from minillm.model.batch import Batch, Rows
from minillm.model.decoder import Model
from minillm.request import Request, SamplingParams, TokenLogprobs
from minillm.scheduler.step import Step

from .cuda_graph import Replayed
from .sampler import GENERAL_AT_ONCE, Sampler, top_logprobs

LOGITS_AT_ONCE = 256  # rows of logits made at a time where a whole prompt's are wanted
CPU_CACHE_BYTES = 1 << 30
# Beside their pool: what the driver keeps of each, and the libraries' workspace for the stream that captures. Both are
# generous: 10 graphs of Gemma 2B took 220 MiB in all, 125 of them logits (data/results/h200/build.json).
GRAPH_BYTES, CAPTURE_BYTES = 1 << 20, 64 << 20


@dataclass
class Results:
    """What a step yielded, on the host."""

    tokens: np.ndarray  # [samples] int64, in the order of the step's sampling rows
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # row -> of its sampled token
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)  # row -> (position, ...)


@dataclass(frozen=True)
class Room:
    """A GPU's memory in bytes: all of it, what is taken already, what a step and the CUDA graphs will take."""

    total: int
    taken: int
    workspace: int
    graphs: int
    utilization: float  # share of `total` that may be used

    @property
    def cache(self) -> int:
        """What is left for keys and values."""
        return int(self.total * self.utilization) - self.taken - self.workspace - self.graphs

    def blocks(self, most: int, request: int, block_bytes: int, config: EngineConfig) -> int:
        """`most` blocks, or as many as there is room for.

        request: blocks of one request of full length. Raises ConfigError, which says what would fit, if not even
        those find room, or not all of the `num_blocks` that were asked for.
        """
        fitting = max(self.cache, 0) // block_bytes
        if fitting >= (most if config.num_blocks else min(most, request)):
            return min(most, fitting)
        used = (
            f"{_gib(self.taken)} of {_gib(self.total)} are taken (weights, other programs), a step of "
            f"max_num_batched_tokens={config.max_num_batched_tokens} and max_num_seqs={config.max_num_seqs} needs "
            f"{_gib(self.workspace)}, CUDA graphs {_gib(self.graphs)}"
        )
        if config.num_blocks:
            raise ConfigError(
                f"num_blocks={most} needs {_gib(most * block_bytes)} for keys and values, and {fitting} blocks would "
                f"fit: {used}"
            )
        wanted = request * block_bytes
        enough = (self.total * self.utilization - self.cache + wanted) / self.total
        ways = ["lower max_num_batched_tokens or max_num_seqs", "free the GPU"]
        if enough <= 1:
            ways.insert(0, f"gpu_memory_utilization={math.ceil(enough * 100) / 100} would fit")
        if fitting:
            ways.insert(0, f"max_model_len={fitting * config.block_size} would fit")
        raise ConfigError(
            f"gpu_memory_utilization={self.utilization} leaves {_gib(max(self.cache, 0))} for keys and values, and one "
            f"request of full length needs {_gib(wanted)}: {used}; {'; '.join(ways)}"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


class Launched:
    """A step on its way; `wait` blocks until its results are on the host."""

    def __init__(self, step: Step, tokens: Tensor, logprobs: list, prompt_logprobs: list):
        self.step = step
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = [(rows, *_to_host(pair)) for rows, pair in logprobs]
        self._prompt = [(row, position, *_to_host(pair)) for row, position, pair in prompt_logprobs]
        self._event = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Results:
        if self._event is not None:
            self._event.synchronize()
        results = Results(self._tokens.numpy())
        for rows, ids, values in self._logprobs:
            for row, found in zip(rows.tolist(), _as_dicts(ids, values), strict=True):
                results.logprobs[row] = found
        for row, position, ids, values in self._prompt:
            results.prompt_logprobs[row] = (position, _as_dicts(ids, values))
        return results


def _to_host(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tuple(tensor.to("cpu", non_blocking=True) for tensor in pair)


def _as_dicts(ids: Tensor, values: Tensor) -> list[TokenLogprobs]:
    return [dict(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


class Runner:
    """The model, its cache and the device's rows."""

    def __init__(self, model: Model, config: EngineConfig, max_model_len: int):
        self.model = model
        self.device = model.device
        self.block_size = config.block_size
        rows, width = config.max_num_seqs, -(-max_model_len // config.block_size)
        groups = len(model.groups.windows)
        self.stream = Stream.of(config, max_model_len, model.config.windows)
        width = self.stream.room if self.stream else width
        # One row more than there are requests: it fills captured batches up.
        self.tokens = torch.zeros(rows + 1, max_model_len + 1, dtype=torch.int32, device=self.device)
        self.block_table = torch.zeros(groups, rows + 1, width, dtype=torch.int32, device=self.device)
        self.sampler = Sampler(rows, self.device, model.ops)
        self.logprobs = np.full(rows, -1, np.int32)  # how many a row's request wants; -1: none
        self.prompt_logprobs = np.full(rows, -1, np.int32)
        self.num_blocks = self._blocks_that_fit(config, max_model_len)
        self.caches = self._allocate_cache(self.num_blocks)
        self.graphs = self._decode_graphs(config)
        self._decoding: tuple[Step | None, Batch | None] = (None, None)  # the last step of decodes only
        self._sampled: Tensor | None = None  # and what it sampled

    def _decode_graphs(self, config: EngineConfig):
        """CUDA graphs where they pay and work: on a GPU, with the kernels that prepare a step there."""
        if self.device.type != "cuda" or config.enforce_eager or self.model.dtype == torch.float64 or self.stream:
            return None
        try:
            from .decode_graphs import DecodeGraphs
        except ImportError:  # no triton
            return None
        return DecodeGraphs(self, config)

    def close(self) -> None:
        """Let go of the cache and the graphs now: graphs and runner know each other, and wait for the collector."""
        if self.graphs is not None:
            self.graphs.close()
        self.caches, self.graphs, self._decoding, self._sampled = [], None, (None, None), None

    # ---- memory

    @property
    def layer_bytes(self) -> int:
        """Bytes of a token's key and value in one layer."""
        shape = self.model.config
        return 2 * shape.num_kv_heads * shape.head_dim * torch.empty(0, dtype=self.model.dtype).element_size()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in all layers of a group."""
        return self.model.groups.size * self.block_size * self.layer_bytes

    def _allocate_cache(self, blocks: int) -> list[LayerCache]:
        """A cache a layer. Those at the same place in their groups are one: a block belongs to one group at a time."""
        shape, groups = self.model.config, self.model.groups
        size = (blocks, self.block_size, shape.num_kv_heads, shape.head_dim)
        try:
            # Zeros, because attention may multiply stale values by a probability of 0, and 0 * NaN is NaN.
            made = [
                LayerCache(*(torch.zeros(size, dtype=self.model.dtype, device=self.device) for _ in "kv"))
                for _ in range(groups.size)
            ]
            return [made[place] for _, place in groups.places]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ConfigError(
                f"num_blocks={blocks} needs {_gib(blocks * self.block_bytes)} for keys and values, more than "
                f"{self.device} has free; lower num_blocks, max_num_seqs or max_model_len"
            ) from error

    def _blocks_that_fit(self, config: EngineConfig, max_model_len: int) -> int:
        """As many blocks as were asked for or the memory allows, and no more than all rows at full length could use."""
        windows, chunk = self.model.groups.windows, config.max_num_batched_tokens
        request = self.stream.room if self.stream else blocks_held(max_model_len, windows, config.block_size, chunk)
        most = config.num_blocks or config.max_num_seqs * request
        if self.device.type != "cuda":
            return most if config.num_blocks else min(most, max(CPU_CACHE_BYTES // self.block_bytes, 1))
        workspace, graphs = self._measure_workspace(config), self._measure_graphs(config)
        free, total = torch.cuda.mem_get_info(self.device)
        room = Room(total, total - free, workspace, graphs, 1.0 if config.num_blocks else config.gpu_memory_utilization)
        return room.blocks(most, request, self.block_bytes, config)

    def _measure_workspace(self, config: EngineConfig) -> int:
        """Bytes that the largest step takes beside weights and cache: found by running one. Raises ConfigError."""
        count = config.max_num_batched_tokens
        try:
            return self._step_bytes(count, config.max_num_seqs)
        except torch.OutOfMemoryError as error:
            halves = (count >> halvings for halvings in range(1, count.bit_length()))
            fitting = next((fewer for fewer in halves if self._step_fits(fewer, config.max_num_seqs)), None)
            way = f"max_num_batched_tokens={fitting} would fit" if fitting else "use a smaller model or dtype"
            raise ConfigError(
                f"a step of max_num_batched_tokens={count} and max_num_seqs={config.max_num_seqs} does not fit beside "
                f"the weights ({_gib(self.model.nbytes)}) on {self.device}, which has "
                f"{_gib(torch.cuda.mem_get_info(self.device)[1])}; {way}, or free the GPU"
            ) from error

    def _step_fits(self, count: int, most_rows: int) -> bool:
        try:
            self._step_bytes(count, most_rows)
        except torch.OutOfMemoryError:
            return False
        return True

    def _step_bytes(self, count: int, most_rows: int) -> int:
        """Bytes that a step of `count` tokens takes, as many rows as may be among them, sampled in every way but for
        log-probabilities."""
        rows = min(most_rows, count)
        longest = min(self.tokens.shape[1] - 1, self.block_table.shape[2] * self.block_size)
        queries = np.full(rows, min(count // rows, longest), np.int32)
        ids = np.arange(rows, dtype=np.int32)
        step = Step(0, ids, np.zeros(rows, np.int32), queries, np.ones(rows, bool), int((queries == 1).sum()))
        wishes = SamplingParams(top_p=0.9, repetition_penalty=1.1, logit_bias={0: 0.0})
        for row in range(min(rows, GENERAL_AT_ONCE)):
            self.sampler.admit(row, wishes, 0, 1, ())

        def run() -> None:
            hidden = self.model.forward(self._batch(step, np.cumsum(queries) - 1), self.caches)
            self._sample(hidden, ids, np.full(rows, longest))  # penalties read all that a row may hold

        try:
            return self._reserved_by(run)
        finally:
            self.sampler.general[:] = False

    def _measure_graphs(self, config: EngineConfig) -> int:
        """Bytes that CUDA graphs will take. They share a pool, and what is captured first, the largest, fills it."""
        graphs = self._decode_graphs(config)
        if graphs is None:
            return 0
        widths = {graphs.width(blocks) for blocks in range(1, self.block_table.shape[2] + 1)}
        count = len(graphs.sizes) * len(widths) + (len(graphs.mixed.shapes) if graphs.mixed else 0)
        kept = CAPTURE_BYTES + count * GRAPH_BYTES
        try:
            return self._reserved_by(graphs.rehearse_largest) + kept
        finally:
            graphs.close()

    @torch.inference_mode()
    def _reserved_by(self, run: Callable[[], None]) -> int:
        """By how many bytes torch's share of the memory grows while `run` runs, on a cache of one block."""
        self.caches = self._allocate_cache(1)
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_reserved(self.device)
            run()
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_reserved(self.device) - before
        finally:
            self.caches = []
            torch.cuda.empty_cache()

    # ---- steps

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Run a step. Returns at once on a GPU; `Launched.wait` gives its tokens."""
        self._update(step)
        if step.singles == len(step.rows) and step.samples.all():
            return self._launch_decodes(step)
        self._decoding = (None, None)
        prompts = self._rows_wanting_prompt_logprobs(step)
        if self.graphs is not None and not prompts and self.graphs.can_run():
            replayed = self.graphs.launch_mixed(step)
            if replayed is not None:
                return self._launched(step, replayed)
        last = np.cumsum(step.queries) - 1
        index = last[step.samples]
        if prompts:
            wanted = np.zeros(last[-1] + 1, bool)
            wanted[index] = True
            for i in prompts:
                wanted[last[i] - step.queries[i] + 1 : last[i] + 1] = True
            index = np.nonzero(wanted)[0]
        hidden = self.model.forward(self._batch(step, index), self.caches)
        prompt_logprobs = [self._prompt_logprobs(step, i, hidden, index, last) for i in prompts]
        if prompts:
            hidden = hidden[self._send(np.searchsorted(index, last[step.samples]))[0]]
        rows = step.rows[step.samples]
        if len(rows) == 0:
            return Launched(step, torch.zeros(0, dtype=torch.int64, device=self.device), [], prompt_logprobs)
        sampled, logprobs = self._sample(hidden, rows, (step.starts + step.queries)[step.samples])
        return Launched(step, sampled, logprobs, prompt_logprobs)

    def _launch_decodes(self, step: Step) -> Launched:
        """A step in which every row runs its newest token."""
        if self.graphs is not None and self.graphs.can_run():
            self._decoding = (None, None)
            return self._launched(step, self.graphs.launch(step))
        before, batch = self._decoding
        if (
            before is not None
            and step.table_rows is None
            and not step.admitted
            and np.array_equal(step.rows, before.rows)
            and np.array_equal(step.starts, before.starts + 1)
        ):
            # The same rows go on in the same blocks: the last batch, moved along by one token.
            batch.token_ids = self._sampled
            for moved in (batch.positions, batch.slots, batch.decode.lengths):
                moved.add_(1)
        else:
            batch = self._batch(step, None)
        self._decoding = (step, batch)
        hidden = self.model.forward(batch, self.caches)
        self._sampled, logprobs = self._sample(hidden, step.rows, step.starts + 1)
        return Launched(step, self._sampled, logprobs, [])

    def _launched(self, step: Step, replayed: Replayed) -> Launched:
        """A step that ran as a graph; rows that ask for more of sampling than it does are sampled again, behind it."""
        rows, lengths = step.rows[step.samples], (step.starts + step.queries)[step.samples]
        sampled, logits, places = replayed.sampled, replayed.logits, replayed.places
        if self.sampler.correct(sampled, logits, places, rows, lengths, self.tokens):
            self.tokens[self._send(rows, lengths)] = sampled.to(torch.int32)
        return Launched(step, sampled, self._logprobs(logits, places, rows, sampled), [])

    def _sample(self, hidden: Tensor, rows: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, list]:
        """Each row's next token, written to its place on the device; and the log-probabilities asked for."""
        logits = self.model.logits(hidden)
        if self.stream:
            self._keep_tokens(int(lengths.max()))
        sampled = self.sampler(logits, rows, lengths, self.tokens)
        self.tokens[self._send(rows, lengths)] = sampled.to(torch.int32)
        return sampled, self._logprobs(logits, np.arange(len(rows)), rows, sampled)

    def _update(self, step: Step) -> None:
        """Send the device what has changed since the last step."""
        for request in step.admitted:
            self._admit(request)
        if step.admitted and self.graphs is not None:
            self.graphs.admit(step.admitted)
        if step.table_rows is not None:
            rows, columns, blocks = self._send(step.table_rows, step.table_columns, step.table_blocks.ravel())
            self.block_table[:, rows, columns] = blocks.view(step.table_blocks.shape).int()

    def _admit(self, request: Request) -> None:
        row, known = request.row, len(request.known)
        self._keep_tokens(known)
        self.tokens[row, :known] = torch.from_numpy(request.known).to(self.device, non_blocking=True)
        self.sampler.admit(row, request.params, request.seed, len(request.prompt), request.stop_ids)
        want = request.params
        self.logprobs[row] = -1 if want.logprobs is None else want.logprobs
        self.prompt_logprobs[row] = -1 if want.prompt_logprobs is None else want.prompt_logprobs

    def _keep_tokens(self, count: int) -> None:
        """Have room for one token behind the first `count` of a row; only streams ever lack it."""
        if more := missing(self.tokens.shape[1], count):
            self.tokens = torch.nn.functional.pad(self.tokens, (0, more))

    def _send(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Indices to the device as int64, in one copy."""
        if self.device.type == "cpu":
            return tuple(torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays)
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False)).pin_memory()
        return packed.to(self.device, non_blocking=True).split([len(array) for array in arrays])

    def _batch(self, step: Step, logits_index: np.ndarray | None) -> Batch:
        """Pack a step's spans; token ids and slots are looked up on the device."""
        lengths, ends = step.starts + step.queries, np.cumsum(step.queries)
        if step.singles == len(step.rows):
            token_rows, positions = step.rows, step.starts
        else:
            token_rows = np.repeat(step.rows, step.queries)
            positions = np.arange(ends[-1]) - np.repeat(ends - step.queries - step.starts, step.queries)
        arrays = [token_rows, positions, step.rows, lengths, np.concatenate([[0], ends])]
        if logits_index is not None:
            arrays.append(logits_index)
        if step.moved is not None:  # the places in the cache are others than those among the row's tokens
            arrays.append(positions)
            arrays[1] = positions - np.repeat(step.moved, step.queries) * self.block_size
            arrays[3] = lengths = lengths - step.moved * self.block_size
        token_rows, positions, rows, lengths_sent, starts_sent, *more = self._send(*arrays)
        at = positions if step.moved is None else more.pop()
        blocks = self.block_table[:, token_rows, positions // self.block_size].long()
        singles = step.singles

        def part(chosen: slice, first: int, after: int) -> Rows | None:
            if after == first:
                return None
            count = int(step.queries[chosen].sum())
            width = -(-int(lengths[chosen].max()) // self.block_size)
            return Rows(
                tokens=count,
                block_table=self.block_table[:, rows[chosen], :width],
                lengths=lengths_sent[chosen].int(),
                query_start=(starts_sent[first : after + 1] - starts_sent[first]).int(),
                max_queries=int(step.queries[chosen].max()),
            )

        return Batch(
            token_ids=self.tokens[token_rows, at].long(),
            positions=positions,
            slots=blocks * self.block_size + positions % self.block_size,
            decode=part(slice(0, singles), 0, singles),
            prefill=part(slice(singles, None), singles, len(step.rows)),
            logits_index=more[0] if more else None,
            streams=self.stream is not None,
        )

    # ---- log-probabilities, for those who asked

    def _logprobs(self, logits: Tensor, places: np.ndarray, rows: np.ndarray, sampled: Tensor) -> list:
        """Grouped by how many each row wants: [(rows, (ids, values))]. places: [rows] of their logits."""
        wanted = self.logprobs[rows]
        found = []
        if (wanted < 0).all():
            return found
        for k in np.unique(wanted[wanted >= 0]):
            chosen = np.nonzero(wanted == k)[0]
            at, index = self._send(places[chosen], chosen)
            found.append((rows[chosen], top_logprobs(logits[at], sampled[index], int(k))))
        return found

    def _rows_wanting_prompt_logprobs(self, step: Step) -> list[int]:
        """Places in the step whose span has prompt tokens with a successor in the prompt."""
        wanting = self.prompt_logprobs[step.rows] >= 0
        if not wanting.any():
            return []
        return np.nonzero(wanting & (step.starts < self.sampler.prompt_length[step.rows] - 1))[0].tolist()

    def _prompt_logprobs(self, step: Step, i: int, hidden: Tensor, index: np.ndarray, last: np.ndarray) -> tuple:
        """(row, position of the first token told about, (ids, values)) for place i of the step."""
        row, start = int(step.rows[i]), int(step.starts[i])
        end = min(start + int(step.queries[i]), int(self.sampler.prompt_length[row]) - 1)
        first = int(np.searchsorted(index, last[i] - step.queries[i] + 1))
        targets = self.tokens[row, start + 1 : end + 1].long()
        k = int(self.prompt_logprobs[row])
        pieces = [
            top_logprobs(self.model.logits(hidden[first + at : first + at + len(chosen)]), chosen, k)
            for at, chosen in zip(range(0, end - start, LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
        ]
        return row, start + 1, tuple(torch.cat(column) for column in zip(*pieces, strict=True))
