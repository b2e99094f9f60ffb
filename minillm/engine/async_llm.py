"""`AsyncLLM`: the engine in a thread of its own, for servers and notebooks.  Lesson 99.

The thread steps while there is work; others submit and abort through a queue that it empties between steps. What a
step brought goes to each mailbox in one call.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch

from minillm.config import EngineOptions
from minillm.errors import ConfigError, EngineClosed, InvalidRequest
from minillm.request import Completion, Delta, Prompt, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.values import shown

from .engine import Engine, Tracked
from .llm import LLM
from .snapshot import Snapshot


class Mailbox(Protocol):
    """Receives the deltas of the requests that were submitted with it; hashable."""

    def deliver(self, items: list[tuple[Any, Delta | Exception]]) -> None:
        """Take (the key that the request was prepared with, what it gained) of each request that gained something.

        Called in the engine's thread, which waits: it must neither block nor raise. An exception is a request's last.
        """


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that has been checked, and where its deltas go."""

    tracked: Tracked
    mailbox: Mailbox
    key: Any

    @property
    def request_id(self) -> str:
        return self.tracked.request.request_id


class AsyncLLM:
    """The same arguments as `LLM`, or `AsyncLLM(engine=llm)` to serve from an `LLM` that stays open and usable."""

    def __init__(
        self,
        model: str | Path | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        *,
        engine: LLM | Engine | None = None,
        **options: Unpack[EngineOptions],
    ):
        if engine is not None and (options or model is not None or tokenizer is not None):
            raise ConfigError("engine= is loaded already: its model, tokenizer and options cannot be set here")
        if not (engine is None or isinstance(engine, (LLM, Engine))):
            raise ConfigError(f"engine must be an LLM or an Engine, not {shown(engine)}")
        if isinstance(engine, LLM):
            engine = engine.engine
        self._owns_engine = engine is None
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._outbox: dict[Mailbox, list[tuple[Any, Delta | Exception]]] = {}
        self._listening: dict[str, Prepared] = {}
        self._snapshots: list[Future[Snapshot]] = []  # wanted, and not taken yet
        self._turn_began: float | None = None  # when the thread last began to work; None while it waits for work
        self.failed_steps = 0  # in a row
        # The engine is made in the thread that steps it: OpenMP keeps a pool of threads for each thread that computes,
        # and a second pool would compete with the first for the cores.
        make = (lambda: Engine(model, tokenizer, **options)) if engine is None else (lambda: engine)
        made: Future[Engine] = Future()
        # A new thread would take over the number of threads that a step of another engine, in its thread, has just set.
        start = (make, made, torch.get_num_threads())
        self._thread = threading.Thread(target=self._run, args=start, name="minillm-engine", daemon=True)
        self._thread.start()
        try:
            self.engine = made.result()
        except BaseException:
            self._closing = True  # interrupted while it loads: end once it has
            raise
        self.tokenizer, self.tokenizer_directory = self.engine.tokenizer, self.engine.tokenizer_directory
        self.dtype = self.engine.facts.dtype
        self.model_config = self.engine.model_config
        self.config = self.engine.config
        self.name = self.engine.name
        self.max_model_len = self.engine.max_model_len
        self.max_request_len = self.engine.max_request_len

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Yield new text and token ids as they are generated; the last delta has the finish reason and the completion.

        Leaving the iteration early aborts the request. Raises InvalidRequest before the first delta.
        """
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        mailbox = _LoopMailbox(asyncio.get_running_loop())
        prepared = self.prepare(prompt, params, mailbox, queue, request_id=request_id, options=options)
        self.submit([prepared])
        finished = False
        try:
            while not finished:
                delta = await queue.get()
                if isinstance(delta, Exception):
                    finished = True
                    raise delta
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                self.abort(prepared)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        """Return the whole completion; arguments as those of `stream`."""
        completion: Completion | None = None
        async for delta in self.stream(prompt, params, request_id, options):
            completion = delta.completion
        assert completion is not None, "the last delta of a stream has the completion"
        return completion

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        mailbox: Mailbox,
        key: Any,
        *,
        options: RequestOptions | None = None,
        request_id: str | None = None,
        wants_text: bool = True,
        checked: bool = False,
    ) -> Prepared:
        """Check a request whose deltas go to `mailbox` under a hashable `key`; in any thread. Raises InvalidRequest.

        wants_text and checked are `Engine.prepare`'s.
        """

        def listener(delta: Delta) -> None:
            if delta.completion is not None:
                self._listening.pop(delta.completion.request_id, None)
            self._post(mailbox, key, delta)

        if isinstance(params, SamplingParams) and params.n > 1:
            raise InvalidRequest(f"n is {params.n}, but a stream has one choice: submit the prompt {params.n} times")
        tracked = self.engine.prepare(
            prompt,
            params,
            options,
            request_id=request_id,
            listener=listener,
            wants_text=wants_text,
            checked=checked,
        )
        return Prepared(tracked, mailbox, key)

    def check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model, once for all requests that share it. Raises InvalidRequest."""
        self.engine.check_params(params)

    @property
    def adapters(self) -> list[str]:
        """Return the names of the adapters that requests may give."""
        return self.engine.adapters.names

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """As `Engine.load_adapter`: it blocks until the files are read, while other requests run on."""
        self.engine.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        """As `Engine.unload_adapter`."""
        self.engine.unload_adapter(name)

    def submit(self, requests: Sequence[Prepared]) -> None:
        """Queue prepared requests; from any thread. The error of one that cannot be queued goes to its mailbox."""
        self._tell(lambda: self._submit(requests))

    def abort(self, request: str | Prepared) -> None:
        """End a request, given by its id or as prepared; its stream ends with finish_reason "abort". From any thread.

        A prepared request that was refused because its id is in use leaves the other request with that id alone.
        """
        if not isinstance(request, (str, Prepared)):
            raise InvalidRequest(f"abort takes one request's id, not {shown(request)}: call it for each")
        one = request if isinstance(request, str) else request.tracked
        self._end(lambda: self.engine.abort(one))

    def stop(self, request: str | Prepared, string: str) -> None:
        """End a request in whose text the caller found a stop string. From any thread."""
        one = request if isinstance(request, str) else request.tracked
        self._end(lambda: self.engine.stop(one, string))

    def stats(self) -> dict[str, int]:
        return self.engine.stats()

    def snapshot(self, cells: int, listed: int) -> "Future[Snapshot]":
        """Copy what the engine holds, as `Snapshot.of` gives it, in the engine's thread after the current step.

        From any thread; the caller does not wait for a step, and no step waits for the caller. Raises EngineClosed.
        """
        wanted: Future[Snapshot] = Future()
        self._tell(lambda: self._copy(wanted, cells, listed), wanted)
        return wanted

    @property
    def alive(self) -> bool:
        """Return whether the engine's thread runs."""
        return not self._closing and self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Return why the engine can run no further step, if one of several GPUs lost its process; None if it can."""
        return self.engine.executor.failure

    @property
    def working(self) -> float:
        """Return seconds that the engine's thread has been busy with the same step; 0 if it waits for work."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Abort this object's requests and stop the thread; an engine of its own is freed."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _end(self, command: Callable[[], None]) -> None:
        if not self._closing:
            self._tell(lambda: self._attempt(command))

    def _tell(self, command: Callable[[], object], snapshot: "Future[Snapshot] | None" = None) -> None:
        with self._wake:
            if self._closing:
                raise EngineClosed("this AsyncLLM is closed; make a new one")
            if snapshot is not None:
                self._snapshots.append(snapshot)
            self._commands.append(command)
            self._wake.notify()

    # ---- in the engine's thread

    def _copy(self, wanted: "Future[Snapshot]", cells: int, listed: int) -> None:
        try:
            with self.engine.lock:
                copied = Snapshot.of(self.engine, cells, listed)
        except Exception as error:  # a user-supplied pool's mistake ends no request
            wanted.set_exception(error)
        else:
            wanted.set_result(copied)
        self._snapshots.remove(wanted)

    def _submit(self, requests: Sequence[Prepared]) -> None:
        for each in requests:
            try:
                self.engine.submit(each.tracked)
                self._listening[each.request_id] = each
            except Exception as error:  # InvalidRequest, or a user-supplied policy's mistake
                self._post(each.mailbox, each.key, error)

    def _run(self, make: Callable[[], Engine], made: "Future[Engine]", cpu_threads: int) -> None:
        torch.set_num_threads(cpu_threads)
        try:
            self.engine = make()
            unlimited = self.engine.config
            self.engine.configure(unlimited.for_streams())
            if self._owns_engine:
                self.engine.warm_up()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(self.engine)
        try:
            self._work()
        except BaseException as error:  # a bug: no client may wait for tokens that never come
            with self._wake:
                self._closing = True
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()  # requests that came meanwhile end like the others
            failure = error if isinstance(error, Exception) else EngineClosed(f"the engine's thread ended: {error!r}")
            for each in list(self._listening.values()):
                self._post(each.mailbox, each.key, failure)
            self._deliver()
            while self._snapshots:
                self._snapshots.pop().set_exception(failure)
            raise
        finally:
            if not self._owns_engine:
                self.engine.configure(unlimited)

    def _work(self) -> None:
        while True:
            self._turn_began = None
            busy = self._busy  # not under `_wake`: a thread that has the engine's lock may be waiting for that
            with self._wake:
                while not (self._commands or self._closing or busy):
                    self._wake.wait()
                self._turn_began = time.monotonic()
                commands = [self._commands.popleft() for _ in range(len(self._commands))]
                closing = self._closing
            for command in commands:
                command()
            if closing:
                self._stop()
            self._deliver()
            if closing:
                return
            self._step()
            self._deliver()

    @property
    def _busy(self) -> bool:
        # Where the engine is borrowed, its owner may step it too, and so put deltas into the outbox.
        with self.engine.lock:
            return self.engine.has_work or bool(self._outbox)

    def _stop(self) -> None:
        for request_id in list(self._listening):
            self.engine.abort(request_id)
        if self._owns_engine:
            self.engine.close()

    def _step(self) -> None:
        self.failed_steps = 0 if self._attempt(self.engine.step) else self.failed_steps + 1

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Run `work` and return whether it succeeded; if it raised, all requests end with the error."""
        listening = list(self._listening.values())
        try:
            work()
            return True
        except Exception as error:
            # The engine has aborted all its requests: deliver the reason instead. Others had ended before it failed.
            failed = {(each.mailbox, each.key) for each in listening}
            with self.engine.lock:
                kept = [
                    (to, item) for to, items in self._outbox.items() for item in items if (to, item[0]) not in failed
                ]
                self._outbox.clear()
                for mailbox, item in kept:
                    self._post(mailbox, *item)
                for each in listening:
                    self._post(each.mailbox, each.key, error)
            return False

    def _post(self, mailbox: Mailbox, key: Any, delta: Delta | Exception) -> None:
        self._outbox.setdefault(mailbox, []).append((key, delta))

    def _deliver(self) -> None:
        with self.engine.lock:
            outbox, self._outbox = self._outbox, {}
        for mailbox, items in outbox.items():
            mailbox.deliver(items)


class _LoopMailbox:
    """The coroutines of one event loop: one call wakes the loop, however many of them got something."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop

    def __hash__(self) -> int:
        return hash(self.loop)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LoopMailbox) and other.loop is self.loop

    def deliver(self, items: list[tuple[asyncio.Queue, Delta | Exception]]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_put_all, items)


def _put_all(items: list[tuple[asyncio.Queue, Delta | Exception]]) -> None:
    for queue, delta in items:
        queue.put_nowait(delta)
