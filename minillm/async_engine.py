"""`AsyncLLM`: the engine in a thread of its own, for servers and notebooks.  Lesson 99.

The thread steps while there is work; coroutines submit and abort through a queue that it empties between steps.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from .engine import LLM, Engine, Tracked
from .request import Completion, Delta, InvalidRequest, SamplingParams


class AsyncLLM:
    """The same arguments as `LLM`, or `AsyncLLM(engine=llm)` to serve from an `LLM` that stays open and usable."""

    def __init__(
        self,
        model: str | Path | None = None,
        tokenizer=None,
        *,
        engine: LLM | Engine | None = None,
        **options,
    ):
        if isinstance(engine, LLM):
            engine = engine.engine
        self._owns_engine = engine is None
        self.engine = engine or Engine(model, tokenizer, **options)
        self.tokenizer = self.engine.tokenizer
        self.model_config = self.engine.model_config
        self.config = self.engine.config
        self.name = self.engine.name
        self.max_model_len = self.engine.max_model_len
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, Delta | Exception]]] = {}
        self._listening: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue]] = {}
        self._thread = threading.Thread(target=self._run, name="minillm-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """New text and token ids as they come; the last delta carries the finish reason and the whole completion.

        Leaving the iteration early aborts the request. Raises InvalidRequest before the first delta.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def listener(delta: Delta) -> None:
            if delta.completion is not None:
                self._listening.pop(delta.completion.request_id, None)
            self._post(loop, queue, delta)

        tracked = self.engine.prepare(prompt, params, request_id=request_id, listener=listener)
        self._tell(lambda: self._submit(tracked, loop, queue))
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
                self.abort(tracked.request.request_id)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> Completion:
        """The whole completion."""
        async for delta in self.stream(prompt, params, request_id):
            completion = delta.completion
        return completion

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason "abort". From any thread."""
        if not self._closing:
            self._tell(lambda: self.engine.abort(request_id))

    def stats(self) -> dict[str, int]:
        return self.engine.stats()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return not self._closing and self._thread.is_alive()

    def close(self) -> None:
        """Abort this object's requests and stop the thread; an engine of its own is freed."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise RuntimeError("this AsyncLLM is closed; make a new one")
            self._commands.append(command)
            self._wake.notify()

    # ---- in the engine's thread

    def _submit(self, tracked: Tracked, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue) -> None:
        try:
            self.engine.submit(tracked)
            self._listening[tracked.request.request_id] = (loop, queue)
        except InvalidRequest as error:
            self._post(loop, queue, error)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._closing or self.engine.has_work):
                    self._wake.wait()
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

    def _stop(self) -> None:
        for request_id in list(self._listening):
            self.engine.abort(request_id)
        if self._owns_engine:
            self.engine.close()

    def _step(self) -> None:
        listening = list(self._listening.values())
        try:
            self.engine.step()
        except Exception as error:
            # The engine has given up what was running: say why instead of a bare "abort".
            self._outbox.clear()
            for loop, queue in listening:
                self._post(loop, queue, error)

    def _post(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue, delta: Delta | Exception) -> None:
        self._outbox.setdefault(loop, []).append((queue, delta))

    def _deliver(self) -> None:
        """Hand a step's deltas to each event loop in one call."""
        outbox, self._outbox = self._outbox, {}
        for loop, deltas in outbox.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, deltas)


def _put_all(deltas: list[tuple[asyncio.Queue, Delta | Exception]]) -> None:
    for queue, delta in deltas:
        queue.put_nowait(delta)
