"""In-flight batching: which tokens run in the next step.  Lesson 10.

One rule covers prefill, chunked prefill, decode and resuming after preemption: a request's *computed* tokens (whose
keys and values are in the cache) chase its *known* tokens (prompt and output), as far as the token budget of a step
allows. When the last known token is computed, the model yields one more (Yu et al. 2022, "Orca", section 3.2;
Agrawal et al. 2024, "Sarathi-Serve", section 4).

Steps are launched before the tokens of earlier ones are read, so the scheduler counts tokens it has not seen: `known`
runs ahead of `confirmed`. State is kept in numpy columns, one entry a row, so that a step costs a few vector
operations; Python loops run over events only: admit, finish, preempt.
"""

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from minillm.errors import InvalidRequest
from minillm.grammar import Matcher
from minillm.kv_cache.attention_sinks import STREAM_TOKENS, Stream, StreamTables, missing
from minillm.kv_cache.block_pool import BlockPool, prefix_keys
from minillm.kv_cache.block_tables import BlockTables, group_key
from minillm.request import NOT_NUMBERS, Request
from minillm.speculation.control import Speculation
from minillm.trace.record import NO_TRACE, Trace

from . import accounts
from .admission import admit
from .drafting import Drafts, continues_at_once, draft, waiting_for_drafts
from .drafting_ahead import draft_ahead, needs_no_host, reject_ahead
from .fence import Fence
from .hidden_blocks import release_hidden
from .policies import FirstComeFirstServed, Policy
from .slot_ledger import SlotLedger
from .step import NewRow, Step
from .turns import turn


class Scheduler:
    """Requests join in the order that `policy` gives; when blocks run out one is preempted, and recomputed later.

    windows: one entry a layer group, the tokens that its queries see, None for all; see `layer_groups`. stream: what a
    row keeps where requests may be longer than max_model_len; see `kv_cache.attention_sinks`. max_prefill_tokens:
    the most prompt tokens in a step that also decodes, so that running streams never wait long. 0: only the step's own
    limit applies. speculation: what drafts tokens, if anything does. adapter_slots: the most adapters in one step.
    stages: of a pipeline; see `turns`.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        windows: tuple[int | None, ...] = (None,),
        stream: Stream | None = None,
        prefix_caching: bool = True,
        max_prefill_tokens: int = 0,
        policy: Policy | None = None,
        pool: BlockPool | None = None,
        speculation: Speculation | None = None,
        adapter_slots: int = 0,
        stages: int = 1,
    ):
        self.max_num_batched_tokens, self.max_prefill_tokens = max_num_batched_tokens, max_prefill_tokens
        self.longest = max_model_len if stream is None else STREAM_TOKENS  # most tokens of a request
        self.stream = stream
        self.block_size, self.prefix_caching = block_size, prefix_caching
        self.policy: Policy = policy or FirstComeFirstServed()
        self.max_num_seqs, self.max_model_len, self.windows = max_num_seqs, max_model_len, windows
        self.newest = -1  # number of the newest step launched
        self.read = -1  # number of the newest step whose tokens were read
        self.trace: Trace = NO_TRACE  # `Trace.watch` puts another here
        self.tokens_run = self.generated = 0  # tokens that steps were launched with, and that requests got
        self.preemptions = self.corrupted = 0  # corrupted: requests ended because their logits are not numbers
        self.prefix_queries = self.prefix_hits = 0  # tokens looked up in the cache at admission, and found
        self.speculation, self.adapter_slots, self.stages = speculation, adapter_slots, stages
        self._arrivals = 0
        self._start(BlockPool(num_blocks) if pool is None else pool)

    def _start(self, pool: BlockPool) -> None:
        """Start with an empty queue, free rows and an unused `pool`."""
        rows, self.pool = self.max_num_seqs, pool
        self.requests: list[Request | None] = [None] * rows
        if self.stream is None:
            self.tables = BlockTables(
                rows, self.max_model_len, self.block_size, self.windows, self.max_num_batched_tokens
            )
        else:
            self.tables = StreamTables(rows, self.stream, self.block_size)
        self.tokens = np.zeros((rows, self.max_model_len + 1), np.int32)  # confirmed tokens
        self.confirmed = np.zeros(rows, np.int32)  # tokens in `tokens`
        self.known = np.zeros(rows, np.int32)  # confirmed, and sampled by steps not read yet
        self.computed = np.zeros(rows, np.int32)  # tokens whose K and V launched steps have written
        self.prompt = np.zeros(rows, np.int32)  # tokens of the prompt
        self.limit = np.zeros(rows, np.int32)  # most tokens, prompt and output
        self.stop_ids = np.full((rows, 4), -1, np.int32)
        self.arrival = np.zeros(rows, np.int64)
        self.last_step = np.full(rows, -1, np.int64)  # the newest step that runs the row
        self.matchers: dict[int, Matcher] = {}  # of rows with a grammar
        self.waits = np.zeros(rows, bool)  # whether each of the row's tokens must be read before it runs on

        self.order = np.zeros(0, np.int32)  # running rows, oldest request first
        self.waiting: list[Request] = []  # in the order in which they are to be admitted
        self._free_rows = list(range(rows - 1, -1, -1))
        self.fence = Fence()
        self.slots = SlotLedger(self.adapter_slots)
        self._lacking: tuple[Request | None, int] = (None, 0)  # a waiting request, and the blocks that it waits for
        self._new_rows: list[NewRow] = []

    # ---- requests: submit, finish, reset

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest if the request could never run, however long it waited. Changes nothing."""
        prompt, limit, dropped = len(request.prompt), request.limit, int(not request.generates)
        if not 0 < prompt < limit <= self.longest + dropped:
            name, way = ("a stream's limit", "") if self.stream else ("max_model_len", " or raise max_model_len")
            misfit = "does not fit" if dropped else "leaves no room for output"
            raise InvalidRequest(
                f"a prompt of {prompt} tokens {misfit}: prompt and output share {name} = {self.longest} tokens, and "
                f"the prompt needs at least one; shorten it{way}"
            )
        needed = self.tables.most(limit - dropped)
        if needed > self.pool.num_blocks:
            raise InvalidRequest(
                f"{limit} tokens of prompt and output need {needed} cache blocks of {self.block_size} tokens, and the "
                f"cache has {self.pool.num_blocks}; lower max_tokens or raise num_blocks"
            )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it could never run."""
        self.validate(request)
        request.arrival = self._arrivals
        self._arrivals += 1
        request.rank = (self.policy.key(request), request.arrival)
        self._queue(request)
        self.trace.submit(request)

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=attrgetter("rank"))

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request now, wherever it is. Steps in flight may still run its row; what they yield is dropped."""
        if request.finish_reason is not None:
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        row = request.row
        self.waiting.remove(request) if row < 0 else self._vacate(request)
        if self.speculation is not None:
            self.speculation.forget(request.request_id)
        self.trace.finish(request, row, self.newest)

    def reset(self, requests: Iterable[Request], pool: BlockPool) -> None:
        """Abort these requests, which must be all, give up every step in flight, and go on with an empty pool.

        It is called after a failure. What the failed steps were to write is missing. The old pool is not called, since
        it may be the part that failed.
        """
        for request in requests:
            row = request.row
            if row >= 0:
                request.known, request.row = self.tokens[row, : self.confirmed[row]].copy(), -1
            if request.finish_reason is None:
                request.finish_reason = "abort"
                if self.speculation is not None:
                    self.speculation.forget(request.request_id)
                self.trace.finish(request, row, self.newest)
        self._start(pool)
        self.read = self.newest
        self.trace.reset(self)

    def tokens_of(self, request: Request) -> int:
        """Return how many tokens of a request are known, its prompt included."""
        return len(request.known) if request.row < 0 else int(self.confirmed[request.row])

    @property
    def in_flight(self) -> int:
        return self.newest - self.read

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or len(self.order) > 0

    # ---- choosing a step

    continues_at_once = property(continues_at_once)

    def schedule(self) -> Step | None:
        """Return the next step, or None when nothing can be launched before a step in flight has been read."""
        if (ahead := draft_ahead(self)) is not None:
            return ahead
        if self.speculation is not None and self.in_flight and self.stages == 1 and waiting_for_drafts(self):
            return None
        # Running requests go first, and preempt the last of them if blocks run out.
        rows, queries, budget = self._share_budget(self._runnable())
        while not self._grow(rows, queries):
            if self.in_flight:
                return None  # reading may finish requests, which is cheaper than preempting one
            self._preempt()
            rows, queries, budget = self._share_budget(self._runnable())

        # Waiting requests join with what is left of the budget.
        admitted, refusal = self._admit(budget)
        if admitted:
            rows = np.concatenate([rows, np.array([row for row, _ in admitted], np.int32)])
            queries = np.concatenate([queries, np.array([count for _, count in admitted], np.int32)])
        if refusal is not None and refusal.by == "blocks":
            self._lacking = refusal.lacking

        if len(rows) == 0:
            if self.has_work and not self.in_flight:
                raise self._stuck(refusal)
            return None
        drafts = None
        if self.speculation is not None and (drafts := draft(self, rows, queries)) is not None:
            queries = queries + drafts.counts
            self.known[rows] += drafts.counts
        step = self._launch(rows, queries, drafts)
        if step.decodes < len(rows):
            self._lacking = None, 0  # a waiting request may share the chunks' blocks, and so need fewer
        return step

    def _runnable(self) -> np.ndarray:
        rows = self.order
        known = self.known[rows]
        ready = (self.computed[rows] < known) & (known < self.limit[rows])
        ready &= ~self.waits[rows] | (known == self.confirmed[rows])
        return rows[ready] if self.stages == 1 else turn(self, rows[ready])

    def _share_budget(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the rows to which the policy gives tokens, how many each, and what is left of the budget."""
        pending = self.tables.pending(self.computed[rows], self.known[rows])
        budget = self.max_num_batched_tokens
        if self.max_prefill_tokens and (decodes := int((pending == 1).sum())):
            budget = min(budget, decodes + self.max_prefill_tokens)
        if len(rows) == 0:
            return rows, rows, budget
        queries = self.policy.share(pending, budget)
        if queries is not pending:
            rows, queries = rows[queries > 0], queries[queries > 0]
        return rows, queries, budget - int(queries.sum())

    def _grow(self, rows: np.ndarray, queries: np.ndarray) -> bool:
        """Give blocks to the rows whose next tokens need some; False, and none given, if there are too few."""
        ends = self.computed[rows] + queries
        short = ends > self.tables.covered[rows]
        if not short.any():
            return True
        self._release_hidden(rows[short])
        entries = self.tables.grow(rows[short], ends[short], self.pool)
        if entries is None:
            return False
        self.trace.grow(*entries)
        return True

    _release_hidden = release_hidden

    def _preempt(self) -> None:
        """Send the request that comes last back into the queue. Nothing is in flight: its tokens are all known."""
        self._requeue(max((each for each in self.requests if each is not None), key=attrgetter("rank")))

    def _requeue(self, request: Request) -> None:
        """Send a request back into the queue, with its confirmed tokens."""
        row = request.row
        self._vacate(request)
        self._queue(request)
        self._lacking = None, 0  # it may need fewer blocks than when it first waited: others share them now
        self.preemptions += 1
        self.trace.preempt(request, row, self.newest)

    _admit = admit

    def _find_prefix(self, request: Request) -> list[list[int]]:
        """Cached blocks of the request's beginning, [groups][blocks]. At least one token is left to compute."""
        if not self._shares(request) or request.params.prompt_logprobs is not None:
            return [[]] * self.tables.groups
        full = (len(request.known) - 1) // self.block_size
        request.keys = self._keys_of(request, request.known, request.keys)
        return self.tables.find_prefix(self.pool, request.keys[:full])

    def _keys_of(self, request: Request, tokens: np.ndarray, known: list[bytes]) -> list[bytes]:
        """Return the prefix keys of the first tokens of a request. known: those of its first blocks."""
        return prefix_keys(tokens, self.block_size, request.cache_key, known, request.embeddings)

    def _launch(self, rows: np.ndarray, queries: np.ndarray, drafts: Drafts | None = None) -> Step:
        per_decode = 1 if drafts is None else drafts.queries_per_decode
        decodes = int((queries == per_decode).sum())
        if decodes < len(rows):
            order = np.argsort(queries != per_decode, kind="stable")
            rows, queries = rows[order], queries[order]
        starts = self.computed[rows]
        self.newest += 1
        self.last_step[rows] = self.newest
        self.computed[rows] += queries
        self.tokens_run += int(queries.sum())
        for row in rows[decodes:]:
            self._register(self.requests[row], int(self.computed[row]))
        samples = self.computed[rows] == self.known[rows]
        self.known[rows[samples]] += 1
        step = Step(self.newest, rows, starts, queries, samples, decodes, per_decode, new_rows=self._new_rows)
        step.first = samples & (self.computed[rows] == self.prompt[rows])
        if self.matchers:
            step.masks = {row: self.matchers[row].mask[None] for row in rows[samples].tolist() if row in self.matchers}
        if drafts is not None:
            drafts.put_into(step)
        step.moved = self.tables.moved(rows)
        step.table_changes = self.tables.take_changes()
        self._release_hidden(rows[decodes:])  # columns that move up for it do so in the next step
        self._new_rows = []
        self.trace.launch(self, step)
        return step

    # ---- reading a step

    def complete(
        self, step: Step, tokens: np.ndarray, accepted: np.ndarray | None = None, looked_up: np.ndarray | None = None
    ) -> list[Request]:
        """Take in the tokens that `step` yielded, in its rows' order; returns the requests that ended.

        tokens: [samples] int, or with drafts [samples, most], of which the first `accepted` [samples] are the row's
        next; -1: the row's logits are not numbers. looked_up: [samples] drafts that the device has found, if it did.
        Steps are read in the order they were launched.
        """
        assert step.number == self.read + 1, "steps are read in the order they were launched"
        self.read = step.number
        self.trace.arrived(step.number)
        rows = step.sampling_rows
        if accepted is None:
            tokens, accepted = tokens.reshape(-1, 1), np.ones(len(rows), np.int64)
        if looked_up is not None:
            reject_ahead(self, step, accepted, looked_up)
        elif step.drafts is not None:
            self._reject(step, accepted)
        going = self.confirmed[rows] > 0  # rows that ended meanwhile have confirmed none
        ended = self._confirm(rows[going], tokens[going], accepted[going])
        self._open_fence()
        return ended

    def _reject(self, step: Step, accepted: np.ndarray) -> None:
        """Take back the drafts that were not accepted: they are neither known nor computed.

        What was written for them is overwritten, and no block that holds any of it has been registered.
        """
        rows, drafted = step.sampling_rows, step.drafted[step.samples]
        going = (self.confirmed[rows] > 0) & (drafted > 0)
        rows, drafted, right = rows[going], drafted[going], accepted[going] - 1
        assert (self.last_step[rows] == step.number).all(), "a row ran on from drafts that may be rejected"
        assert self.speculation is not None, "without it there are no drafts"
        self.speculation.learn(rows, drafted, right)
        self.known[rows] -= drafted - right
        self.computed[rows] -= drafted - right
        self.trace.reject(rows, drafted - right)

    def _confirm(self, rows: np.ndarray, sampled: np.ndarray, accepted: np.ndarray) -> list[Request]:
        """Append the first `accepted` [n] of each row's tokens [n, most]; returns the requests that they end."""
        first = self.confirmed[rows]
        if self.stream and len(rows):
            self._keep_tokens(int(first.max()) + sampled.shape[1] - 1)
        stops = (self.stop_ids[rows, None] == sampled[:, :, None]).any(axis=2)  # also by -1, no token, which pads them
        if sampled.shape[1] == 1:
            stopped, kept = stops[:, 0], accepted
            self.tokens[rows, first] = sampled[:, 0]
        else:
            kept, order = np.minimum(accepted, self.limit[rows] - first), np.arange(sampled.shape[1])
            stops &= order < kept[:, None]
            stopped = stops.any(axis=1)
            kept[stopped] = stops[stopped].argmax(axis=1) + 1
            mine, order = np.nonzero(order < kept[:, None])
            self.tokens[rows[mine], first[mine] + order] = sampled[mine, order]
        self.confirmed[rows] = first + kept
        self.generated += int(kept.sum())
        full = self.confirmed[rows] == self.limit[rows]
        ended = []
        for i in np.nonzero(stopped | full)[0]:
            request, last = self.requests[rows[i]], int(sampled[i, kept[i] - 1])
            assert request is not None, "rows that ended have confirmed none"
            if last < 0:
                self.confirmed[rows[i]] -= 1
                self.generated -= 1
                if not self.fail(request):
                    continue
            elif stopped[i]:
                self.finish(request, "stop", last)
            else:
                self.finish(request, "length")
            ended.append(request)
        return ended

    def fail(self, request: Request) -> bool:
        """End a running request whose logits are not numbers. Returns whether it has ended.

        Keys and values of its tokens may hold NaN, so none of its prefix stays in the cache. If it found a part of its
        prefix there, another request may have written the NaN: then it is computed again, once, without the cache.
        """
        retry, request.alone = request.borrowed, True
        blocks = [block for key in request.keys for block in self.tables.blocks_of(self.pool, key)]
        self.pool.forget(blocks)
        self.trace.forget(blocks)
        if retry:
            self._requeue(request)
        else:
            self.corrupted += 1
            self.finish(request, "abort", NOT_NUMBERS)
        return not retry

    # ---- rows and blocks

    def _keep_tokens(self, count: int) -> None:
        """Make room for one token after the first `count`; only streams ever need it."""
        if more := missing(self.tokens.shape[1], count):
            self.tokens = np.pad(self.tokens, ((0, 0), (0, more)))

    def _shares(self, request: Request) -> bool:
        return self.prefix_caching and request.options.use_prefix_cache and not request.alone

    def _occupy(self, request: Request, computed: int) -> int:
        """Put a request into a free row, its first `computed` tokens being in the cache."""
        row = self._free_rows.pop()
        request.row = row
        self.requests[row] = request
        known = len(request.known)
        self._keep_tokens(known)
        self.tokens[row, :known] = request.known
        self.confirmed[row] = self.known[row] = known
        self.computed[row] = computed
        request.borrowed = computed > 0
        self.prompt[row], self.limit[row] = len(request.prompt), request.limit
        stops = request.stop_ids
        if len(stops) >= self.stop_ids.shape[1]:  # one entry stays -1
            wider = np.full((len(self.requests), len(stops) + 1), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
        request.registered = computed // self.block_size
        self.waits[row] = self.stages > 1 or request.matcher is not None
        if request.matcher is not None:
            self.matchers[row] = request.matcher
        if self.speculation is not None:
            self.speculation.occupy(row, self.speculation.takes(request), needs_no_host(request))
        self.arrival[row] = request.arrival
        index = int(np.searchsorted(self.arrival[self.order], request.arrival))
        self.order = np.insert(self.order, index, row)
        self._new_rows.append(NewRow.of(request, self.slots.take(request.load)))
        return row

    def _vacate(self, request: Request) -> None:
        """Take a request out of its row. Row and blocks stay fenced until the steps in flight are read."""
        row = request.row
        self._register(request, int(self.computed[row]))
        request.known = self.tokens[row, : self.confirmed[row]].copy()
        request.row, self.requests[row] = -1, None
        self.confirmed[row] = self.known[row] = self.limit[row] = 0
        self.matchers.pop(row, None)
        self.slots.give(request.load)
        self.order = self.order[self.order != row]
        self.fence.hold(int(self.last_step[row]), self.tables.vacate(row), row)
        self._open_fence()

    def _open_fence(self) -> None:
        for row, blocks in self.fence.release(self.read):
            self.pool.release(blocks)
            if row >= 0:
                self._free_rows.append(row)

    def _register(self, request: Request, written: int) -> None:
        """Let others share the full blocks among the first `written` tokens whose tokens are confirmed.

        The steps that write them need not have been read, nor even launched before the one that shares them: steps run
        in order, and within a step every layer writes all keys and values before any row attends to them.
        """
        row = request.row
        full = self.tables.findable(row, min(written, int(self.confirmed[row])) // self.block_size)
        if full <= request.registered or not self._shares(request):
            return
        known = self.tokens[row, : full * self.block_size]
        request.keys = self._keys_of(request, known, request.keys[:full])
        keys: dict[int, bytes] = {}
        for group, gone in enumerate(self.tables.gone[:, row].tolist()):
            first = max(request.registered, gone)
            blocks = self.tables.blocks[group, row, first:full].tolist()
            keys |= {block: group_key(key, group) for block, key in zip(blocks, request.keys[first:full], strict=True)}
        for block, key in keys.items():
            self.pool.register(block, key)
        self.trace.register(self.pool, row, keys)
        request.registered = full

    check, count_on_from, _stuck = accounts.check, accounts.count_on_from, accounts.stuck
