"""The engine loop.  Lesson 10.

One request, as it travels: text -> tokenizer -> `Engine.submit` -> scheduler (waiting, then a row and blocks) ->
runner (one ragged forward a step) -> sampler, on the device -> token ids, read one or more steps later -> text.
"""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np

from minillm.advice import precision
from minillm.advice.plan import Plan
from minillm.config import DeviceConfig, EngineConfig, EngineOptions
from minillm.errors import ConfigError, EngineClosed, InvalidRequest
from minillm.grammar import Grammars
from minillm.kv_cache.block_pool import BlockPool
from minillm.model import Model
from minillm.model.loader import check_tokenizer, read_config, resolve, resolve_device
from minillm.parallel.executor import ParallelExecutor
from minillm.pretrained import model_name
from minillm.prompts import EmbeddedPrompt
from minillm.request import Completion, Prompt, Request, RequestOptions, SamplingParams
from minillm.runner.draft_model import loaded
from minillm.runner.executor import Executor, Facts, LocalExecutor, WatchedExecutor
from minillm.runner.launched import Results, StepInFlight
from minillm.runner.sampling_columns import derived_seed
from minillm.scheduler.checked import PARTS
from minillm.scheduler.policies import POLICIES
from minillm.scheduler.scheduler import Scheduler
from minillm.scheduler.step import Step
from minillm.speculation import PROPOSERS, Speculation
from minillm.tokenizer import Tokenizer
from minillm.trace.record import Trace
from minillm.values import shown

from .adapters import LoadedAdapters, forget_adapter, load_adapter, soft_prompts, unload_adapter, without_soft_prompts
from .inputs import check_is_tokenizer, check_params, log_sampling_defaults, of_kind, read_prompt, split
from .output_text import OutputText
from .recent import Recent
from .tracked import Listener, Tracked
from .warming import warm_up

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _mark_forked() -> None:
    for engine in _engines:
        engine.forked = engine.closed = True
        engine.lock = threading.RLock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


class Engine:
    """Submit requests, step, read completions. Threads may share it: each call takes the engine's lock."""

    def __init__(
        self,
        model: str | Path | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        **options: Unpack[EngineOptions],
    ):
        if not (model is None or isinstance(model, (str, Path))):
            raise ConfigError(f"model must be a directory, a preset's name or None, not {shown(model)}")
        check_is_tokenizer(tokenizer)
        config = EngineConfig.of(**options)
        self.trace = Trace.of(config.trace)
        device = resolve_device(config.device)
        source = resolve(model)
        log_sampling_defaults(source)
        self.plan = None if config.plan is None else Plan.read(config.plan)
        if self.plan is not None:
            config = self.plan.configure(config, read_config(source), device)
        config = precision.resolved(config, source, device, self.plan.traffic if self.plan else None)
        self.config, soft = without_soft_prompts(config.on(device))
        self.name = model_name(source) if isinstance(source, Path) else source
        if tokenizer is None and isinstance(source, Path) and (source / "tokenizer.json").exists():
            tokenizer = source
        # Where another process may read the same tokenizer; None for an object of the user's own.
        self.tokenizer_directory = Path(tokenizer) if isinstance(tokenizer, (str, Path)) else None
        self.tokenizer = Tokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
        described = read_config(source)
        self.grammars = Grammars(self.tokenizer, described.vocab_size, described.eos_token_ids)
        self.grammars.make_tokenizer_in_background()  # before there are steps that would wait for it
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer, described)
        self.draft_model = loaded(self.config, described, self.tokenizer)  # before the cache takes all memory
        start = LocalExecutor if self.config.ranks == 1 else ParallelExecutor
        measured = {} if self.plan is None else self.plan.for_executor()
        self.executor: Executor = start(source, self.config, **measured)
        self.model_config, self.max_model_len = self.facts.model, self.facts.max_model_len
        self.adapters = LoadedAdapters((name for name, _ in self.config.adapters), soft_prompts(self, soft))
        self.in_flight: deque[StepInFlight] = deque()
        self.tracked: dict[str, Tracked] = {}
        self._watched: dict[int, Tracked] = {}  # by row
        self.lock = threading.RLock()
        self._counter = itertools.count(1)
        self._finished: list[Completion] = []
        self.first_waits = Recent()  # seconds from a request's arrival to its first token
        self.closed = False
        self.forked = False  # True in a child process, where none of the engine's threads runs
        _engines.add(self)
        # What made the scheduler's policy and block pool; None: they are made again for the next request.
        self._adopted: tuple[Callable, ...] | None = PARTS.functions
        self.scheduler = self._make_scheduler(None, *self._adopted)
        self.grammars.wait()  # so that no request does

    @property
    def facts(self) -> Facts:
        """Return what the executor reports of the model and the device."""
        return self.executor.facts

    @property
    def model(self) -> Model:
        """Return the model, for lessons and tests. Raises TypeError if it does not run in this process."""
        executor = self.executor
        while isinstance(executor, WatchedExecutor):
            executor = executor.executor
        if not isinstance(executor, LocalExecutor):
            raise TypeError(f"{type(executor).__name__} has no model in this process")
        return executor.runner.model

    @contextmanager
    def running_on(self, executor: Executor) -> Iterator[None]:
        """Use another executor inside the block: one that watches the engine's own, as `WatchedExecutor` does."""
        own, self.executor = self.executor, executor
        try:
            yield
        finally:
            self.executor = own

    def configure(self, config: DeviceConfig) -> None:
        """Replace the options from the next step on. Raises ConfigError if more than the following two differ.

        run_ahead, max_prefill_tokens: may change while requests run, in any thread.
        """
        with self.lock:
            now = self.config
            if replace(config, run_ahead=now.run_ahead, max_prefill_tokens=now.max_prefill_tokens) != now:
                raise ConfigError("only run_ahead and max_prefill_tokens can change after an engine was made")
            self.config = config
            self.scheduler.max_prefill_tokens = config.max_prefill_tokens or 0

    def _adopt(self) -> None:
        """Use a scheduler with the policy and block pool that `using` has set. Call it only while no request runs."""
        functions = PARTS.functions
        if functions != self._adopted:
            while self.in_flight:  # launched ahead of the last request's end
                self._read(self.in_flight.popleft())
            self.scheduler = self._make_scheduler(self.scheduler, *functions)
            self._adopted = functions

    def _make_scheduler(
        self, before: Scheduler | None, make_policy: Callable, make_pool: Callable, make_proposer: Callable
    ) -> Scheduler:
        speculation = None
        if self.config.speculate != "off":
            own = (lambda: self.draft_model) if self.draft_model else PROPOSERS[self.config.speculate]
            proposer = make_proposer(own)
            speculation = Speculation(proposer, self.config, self.model_config.vocab_size)
        scheduler = Scheduler(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            num_blocks=self.facts.num_blocks,
            windows=self.facts.windows,
            stream=self.facts.stream,
            prefix_caching=self.config.enable_prefix_caching,
            max_prefill_tokens=self.config.max_prefill_tokens or 0,
            policy=make_policy(POLICIES[self.config.policy]),
            pool=make_pool(BlockPool, self.facts.num_blocks),
            speculation=speculation,
            adapter_slots=self.config.adapter_slots,
            stages=self.config.pipeline_parallel_size,
        )
        if before is not None:
            scheduler.count_on_from(before)
        self.trace.watch(scheduler)
        return scheduler

    # ---- requests

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        request_id: str | None = None,
        listener: Listener | None = None,
        wants_text: bool = True,
        checked: bool = False,
    ) -> Tracked:
        """Check a request and prepare it for `submit`; safe in any thread. Raises InvalidRequest, EngineClosed.

        prompt: as `LLM.generate` takes it. listener: called in the engine's thread with each new `Delta`.
        wants_text=False leaves the text empty, unless stop strings need it. checked=True: `check_params` has accepted
        the params.
        """
        self._check_usable()
        params = of_kind(params, SamplingParams, "params")
        options = of_kind(options, RequestOptions, "options")
        load, whole = self.adapters.resolve(options.adapter, self.read(prompt))
        ids, embeddings = split(whole, params)
        if not checked:
            self.check_params(params)
        count = next(self._counter)
        request = Request(
            request_id=request_id or f"request-{count}",
            prompt=ids,
            params=params,
            limit=min(len(ids) + (params.max_tokens or self.scheduler.longest), self.scheduler.longest),
            stop_ids=tuple(params.stop_token_ids) + (() if params.ignore_eos else self.model_config.eos_token_ids),
            seed=params.seed if params.seed is not None else derived_seed(self.config.seed, count),
            options=options,
            matcher=None if params.grammar is None else self.grammars.matcher(*params.grammar),
            load=load,
            cache_dtype=self.facts.kv_cache_dtype,
            embeddings=embeddings,
        )
        self.scheduler.validate(request)
        return Tracked.of(request, self.tokenizer, listener, wants_text)

    load_adapter, unload_adapter, _forget_adapter = load_adapter, unload_adapter, forget_adapter
    warm_up = warm_up

    def read(self, prompt: Prompt) -> np.ndarray | EmbeddedPrompt:
        """Return a prompt as token ids [tokens], or joined with its embeddings. Raises InvalidRequest."""
        return read_prompt(prompt, self.tokenizer, self.model_config, self.facts.dtype, self.max_request_len)

    def check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model. Raises InvalidRequest."""
        check_params(params, self.tokenizer, self.model_config.vocab_size, self.grammars)

    def submit(self, tracked: Tracked) -> None:
        """Queue a prepared request. Raises InvalidRequest if another one with its id runs, EngineClosed."""
        self._check_usable()
        request_id = tracked.request.request_id
        with self.lock:
            if request_id in self.tracked:
                raise InvalidRequest(f"request id {request_id!r} is running already; choose another")
            if not self.tracked:
                self._adopt()
            self.adapters.check(tracked.request.load, tracked.request.options.adapter)
            self.scheduler.submit(tracked.request)
            self.tracked[request_id] = tracked

    def abort(self, request: str | Tracked) -> None:
        """End a request now; its blocks are free at the next step. An unknown or finished request is no error.

        request: an id, or what `prepare` returned. The latter never ends another request that has the same id.
        """
        self._end(request, "abort")

    def stop(self, request: str | Tracked, string: str) -> None:
        """End a request like `abort`, but with `string` as its stop string, which the caller found in its text."""
        self._end(request, "stop", string)

    def _end(self, request: str | Tracked, reason: str, stop_reason: str | None = None) -> None:
        request_id = request if isinstance(request, str) else request.request.request_id
        with self.lock:
            tracked = self.tracked.get(request_id)
            if tracked is not None and (isinstance(request, str) or tracked is request):
                with self._or_reset():
                    self.scheduler.finish(tracked.request, reason, stop_reason)
                self._finish(tracked)

    @property
    def max_request_len(self) -> int:
        """Most tokens of one request, prompt and output: max_model_len, or far more where requests are streams."""
        return self.scheduler.longest

    @property
    def has_work(self) -> bool:
        return bool(self.tracked or self.in_flight)

    def stats(self) -> dict[str, int]:
        """Counts of requests (running, waiting), prompt tokens that wait, blocks (total, available, cached), events."""
        scheduler = self.scheduler
        return {
            "running": len(scheduler.order),
            "waiting": len(scheduler.waiting),
            "waiting_tokens": sum(len(request.prompt) for request in tuple(scheduler.waiting)),
            "blocks": scheduler.pool.num_blocks,
            "blocks_available": scheduler.pool.available,
            "blocks_cached": scheduler.pool.cached,
            "steps": scheduler.newest + 1,
            "preemptions": scheduler.preemptions,
            "corrupted": scheduler.corrupted,
            "prefix_query_tokens": scheduler.prefix_queries,
            "prefix_hit_tokens": scheduler.prefix_hits,
        } | ({} if scheduler.speculation is None else scheduler.speculation.stats())

    # ---- steps

    def step(self) -> list[Completion]:
        """Launch as far ahead as allowed, read the oldest step, and return the requests that ended."""
        with self.lock, self._or_reset():
            speculation, began = self.scheduler.speculation, time.perf_counter()
            self._launch()
            if self.in_flight:
                self.trace.write_in_time()
                oldest = self.in_flight.popleft()
                self._read(oldest)
                if speculation is not None:
                    speculation.timed(oldest.step, time.perf_counter() - began)
            finished, self._finished = self._finished, []
            if not self.has_work:
                self.trace.flush()
            return finished

    def _launch(self) -> None:
        """Launch steps as far ahead as allowed."""
        while len(self.in_flight) < self.config.most_in_flight and (step := self.scheduler.schedule()) is not None:
            for new in step.new_rows:
                self._scheduled(new.row, step)
            self.in_flight.append(self.executor.launch(step))

    @contextmanager
    def _or_reset(self) -> Iterator[None]:
        """After a failure, of a user-supplied part or because memory ran out, abort every request."""
        try:
            yield
        except BaseException:
            self.in_flight.clear()
            requests = [tracked.request for tracked in self.tracked.values()]
            self.scheduler.reset(requests, BlockPool(self.facts.num_blocks))
            if self._adopted != PARTS.own:
                self._adopted = None  # user-supplied parts are created again for the next request
            for tracked in list(self.tracked.values()):
                with suppress(Exception):  # one failing listener must not keep the other requests waiting
                    self._finish(tracked)
            self._finished.clear()
            self.trace.flush()
            raise

    def _watch(self, tracked: Tracked, row: int) -> None:
        """Read each token of `row` from now on, if the request needs that; row -1: read no more of its tokens."""
        if self._watched.get(tracked.row) is tracked:
            del self._watched[tracked.row]
        tracked.row = row
        if row >= 0 and tracked.watched:
            self._watched[row] = tracked

    def _scheduled(self, row: int, step: Step) -> None:
        """Record when a request got `row`, and how many of its tokens were cached."""
        request = self.scheduler.requests[row]
        assert request is not None, "a new row has a request"
        tracked = self.tracked[request.request_id]
        completion = tracked.completion
        if completion.scheduled_time is None:  # not after a preemption, when tokens of its own are cached
            completion.scheduled_time = time.perf_counter()
            completion.num_cached_tokens = int(step.starts[step.rows == row].sum())
        self._watch(tracked, row)

    def _read(self, oldest: StepInFlight) -> None:
        results, step = oldest.wait(), oldest.step
        now = time.perf_counter()
        rows = step.sampling_rows
        requests = self.scheduler.requests
        assert step.first is not None, "the scheduler sets it"
        for row in rows[step.first[step.samples] & (results.tokens[:, 0] >= 0)]:
            if (request := requests[row]) is not None:
                completion = self.tracked[request.request_id].completion
                if completion.first_token_time is None:
                    completion.first_token_time = now
                    self.first_waits.add(now - completion.arrival_time)
        for row, (position, scores) in results.prompt_logprobs.items():
            if (request := requests[row]) is not None:
                tracked = self.tracked[request.request_id]
                if scores is None:
                    self.scheduler.fail(request)  # it ends: the prefix cache is not used for prompts that are scored
                    self._finish(tracked)
                    continue
                assert tracked.completion.prompt_logprobs is not None, "a runner scores no prompt unasked"
                tracked.completion.prompt_logprobs[position : position + len(scores)] = scores
        for row, gained in results.logprobs.items():
            if (request := requests[row]) is not None:
                # No runner scores a token unasked.
                self.tracked[request.request_id].completion.logprobs.extend(gained)  # type: ignore[union-attr]
        watched = []
        if self._watched:
            known = results.known()
            watched = [
                (each, row, tokens)
                for row, tokens in zip(rows.tolist(), known, strict=True)
                if tokens and (each := self._watched.get(row)) is not None and requests[row] is each.request
            ]
        ended = self.scheduler.complete(step, results.tokens, results.accepted, results.looked_up)
        try:
            if not self.in_flight and self.scheduler.continues_at_once:
                self._launch()  # so the device need not wait until the tokens are given out
        finally:
            for tracked, row, tokens in watched:
                if tracked.completion.finish_reason is None:  # an earlier listener may have ended it
                    self._look_at(tracked, row, tokens, results)
            for request in ended:
                if request.request_id in self.tracked:
                    self._finish(self.tracked[request.request_id])

    def _look_at(self, tracked: Tracked, row: int, tokens: list[int], results: Results) -> None:
        """Add new tokens to a request's text and log-probabilities, and look for stop strings."""
        request, completion = tracked.request, tracked.completion
        if len(tokens) > 1:  # those after its end are not its own
            known = len(request.prompt) + len(completion.token_ids)
            tokens = tokens[: self.scheduler.tokens_of(request) - known]
        if tracked.output is not None:
            kept = tracked.output.add(tokens, request.finish_reason)
            string = tracked.output.stop_string
            if string is not None and request.finish_reason is None:
                self.scheduler.finish(request, "stop", string)
            elif string is not None:
                request.finish_reason, request.stop_reason = "stop", string
            if kept < len(tokens):
                request.known = request.known[: kept - len(tokens)]
                tokens = tokens[:kept]
        completion.token_ids += tokens
        logprobs = None if completion.logprobs is None else results.logprobs[row][: len(tokens)]
        matcher = request.matcher
        if matcher is not None and request.finish_reason is None and (failure := matcher.advance(tokens)):
            self.scheduler.finish(request, "abort", failure)
        if request.finish_reason is not None:
            self._finish(tracked, tokens, logprobs)
        elif tracked.listener is not None:
            tracked.listener(tracked.gained(tokens, logprobs))

    def _finish(self, tracked: Tracked, token_ids: Sequence[int] = (), logprobs: list | None = None) -> None:
        """Complete a request's result and deliver it, once."""
        request, completion = tracked.request, tracked.completion
        if completion.finish_reason is not None:
            return
        completion.finish_reason, completion.stop_reason = request.finish_reason, request.stop_reason
        completion.finish_time = time.perf_counter()
        completion.token_ids = request.output.tolist()
        del (completion.logprobs or [])[len(completion.token_ids) :]  # those of tokens after its end
        output = tracked.output
        if output is None and self.tokenizer is not None and tracked.wants_text:
            output = OutputText(self.tokenizer, prompt=completion.prompt_token_ids)
            by_string = isinstance(request.stop_reason, str)  # found elsewhere: the last token is text like the others
            output.add(completion.token_ids, None if by_string else request.finish_reason)
        if output is not None:
            output.end()
            completion.text = output.text
        del self.tracked[request.request_id]
        self._forget_adapter(request.load)
        self._watch(tracked, -1)  # drops the reference to its listener
        self._finished.append(completion)
        if tracked.listener is not None:
            tracked.listener(tracked.gained(list(token_ids), logprobs))

    # ---- end of life

    def _check_usable(self) -> None:
        """Raise EngineClosed after `close`, and in a child process that was forked from the engine's."""
        if self.forked:
            raise EngineClosed(
                "this engine was made before the process was forked, and its threads are not in the child: make a new "
                'one here, or start processes with multiprocessing.get_context("spawn")'
            )
        if self.closed:
            raise EngineClosed("this engine is closed; make a new one")

    def close(self) -> None:
        """Abort running requests and free the model and its cache. The engine cannot be used afterwards."""
        if self.closed:
            return
        self.closed = True
        for tracked in list(self.tracked.values()):
            self.abort(tracked)
        self.in_flight.clear()
        self.executor.close()
        if self.draft_model is not None:
            self.draft_model.close()
        self.trace.close()
