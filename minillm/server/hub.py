"""The engine's side of the worker sockets: receives requests, sends tokens, and updates the metrics.  Lesson 99.

One thread reads all worker sockets. The engine's thread sends the results of each step. If a socket's buffer is full,
the reading thread sends the rest later, so that a slow worker never delays a step.
"""

import logging
import math
import selectors
import socket
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from minillm import overrides
from minillm.engine.async_llm import AsyncLLM, Prepared
from minillm.errors import InvalidRequest
from minillm.request import Delta, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer, TokenizerError

from .engine_room.state import EngineRoom
from .limits import Timeouts
from .link import NUMBER, TooLong, Unpacker, pack, room
from .metrics import Metrics
from .responses import TokenTexts
from .waiting import Pace, retry_after

log = logging.getLogger(__name__)
CHUNK = 1 << 18  # bytes per read


@dataclass(eq=False)
class Job:
    """A choice that the engine runs for a worker."""

    key: int
    prepared: Prepared = field(init=False)
    sent_prompt_logprobs: bool = False  # whether the worker has the prompt's log-probabilities
    last: float = 0.0  # when it last got tokens; 0: never


class Hub:
    """Connects an engine to its workers.

    max_queued: choices that may wait beyond those that fit in a step; a request that exceeds it is refused as busy.
    max_wait: seconds that a request may have to wait, by estimate; one that would wait longer is refused as busy.
    hang_timeout: seconds after which an engine that is busy with the same step counts as stuck, and not as ready.
    timeouts and api_key (see `gate.digest`) are passed to the workers.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        name: str,
        *,
        max_queued: int,
        max_wait: float | None = None,
        hang_timeout: float = math.inf,
        log_level: str,
        timeouts: Timeouts = Timeouts(),
        api_key: str | None = None,
    ):
        self.engine = engine
        self.rows, self.max_wait, self.pace = engine.config.max_num_seqs, max_wait, Pace()
        self.hang_timeout = hang_timeout
        self.capacity = self.rows + max_queued
        self.metrics = Metrics(name)
        self.room = EngineRoom(engine, self.metrics, self.soon)
        self.texts = TokenTexts(engine.tokenizer)
        directory = engine.tokenizer_directory
        # Whether all text is encoded and decoded here: workers cannot load a tokenizer that was passed as an object.
        self.reads_text = engine.tokenizer is not None and directory is None
        self.hello = {
            "op": "hello",
            "name": name,
            "tokenizer": str(directory.resolve()) if directory else None,
            "encodes": engine.tokenizer is not None,
            "max_model_len": engine.max_model_len,
            "max_request_len": engine.max_request_len,
            "vocab_size": engine.model_config.vocab_size,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "max_num_seqs": engine.config.max_num_seqs,
            "capacity": self.capacity,
            "log_level": log_level,
            "timeouts": asdict(timeouts),
            "api_key": api_key,
        }
        self.lines: set[Line] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._tasks: list[Callable[[], None]] = []
        self._closing = False
        # Compiles grammars, so that neither this thread nor the engine's waits for them.
        self.compiler = ThreadPoolExecutor(1, thread_name_prefix="minillm-grammars")
        self._thread = threading.Thread(target=self._run, name="minillm-hub", daemon=True)
        self._thread.start()

    def connect(self, sock: socket.socket) -> "Line":
        """Start exchanging messages with a worker at the other end of a socket."""
        line = Line(self, sock)
        line.send(self.hello)
        self.soon(lambda: self._listen(line))
        return line

    @property
    def running(self) -> int:
        """The number of choices that were accepted and are not finished."""
        return sum(len(line.jobs) + len(line.compiling) for line in list(self.lines))  # any thread asks

    def busy(self, choices: int) -> dict[str, Any] | None:
        """Why so many more choices are refused for now, and after how many seconds to try again; None: they are not."""
        running = self.running
        if running + choices > self.capacity:
            seconds = self.pace.seconds(running + choices - self.capacity)
            why = f"{running} of at most {self.capacity} choices are running or waiting"
        else:
            wait = self.pace.seconds(running + 1 - self.rows)
            if self.max_wait is None or wait is None or wait <= self.max_wait:
                return None
            seconds = wait - self.max_wait
            why = f"a request would wait about {wait:.0f} s, and the limit is {self.max_wait:g} s"
        after = retry_after(seconds)
        return {"message": f"the server is busy: {why}; try again in {after} s", "retry_after": after}

    def ended(self) -> None:
        """A choice has ended; it is not counted as running any more."""
        self.pace.ended(self.running - self.rows + 1)

    def close(self) -> None:
        """Stop the thread and disconnect every worker; choices that still run are aborted."""
        self._closing = True
        self.soon(lambda: None)
        self._thread.join()
        self.compiler.shutdown(cancel_futures=True)

    def soon(self, task: Callable[[], None]) -> None:
        """Run `task` on the hub's thread."""
        self._tasks.append(task)
        with suppress(OSError):  # the hub was closed
            self._wake.send(b"\0")

    # ---- on the hub's thread

    def _listen(self, line: "Line") -> None:
        self.lines.add(line)
        self._selector.register(line.sock, selectors.EVENT_READ, line)

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                line = key.data
                if line is None:
                    self._woken.recv(4096)
                    while self._tasks:
                        self._tasks.pop(0)()
                    continue
                if not self._serve(line, events):
                    self._drop(line)
        for line in list(self.lines):
            self._drop(line)
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _serve(self, line: "Line", events: int) -> bool:
        """Do the reads and writes that are ready; return False if the connection is closed or broken."""
        try:
            if events & selectors.EVENT_WRITE:
                line.flush()
            return not events & selectors.EVENT_READ or line.read()
        except Exception:  # an error on one line must not affect the other workers
            log.exception("the connection to an HTTP worker failed; its requests are lost")
            return False

    def want_write(self, line: "Line", wanted: bool) -> None:
        if line in self.lines:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(line.sock, events, line)

    def _drop(self, line: "Line") -> None:
        self.lines.discard(line)
        self._selector.unregister(line.sock)
        line.close()


class Line:
    """One worker's socket and the choices that run for it; a mailbox for `AsyncLLM`."""

    def __init__(self, hub: Hub, sock: socket.socket):
        self.hub, self.engine, self.sock = hub, hub.engine, sock
        sock.setblocking(False)
        self.jobs: dict[int, Job] = {}
        self.compiling: set[int] = set()  # keys of choices that wait until their grammar is compiled
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self._lock = threading.Lock()

    # ---- writing, on any thread

    def send(self, message: dict, numbers: Iterable[int] = ()) -> None:
        data = pack(message, numbers)
        with self._lock:
            if self._unsent:
                self._unsent += data
                return
            sent = self._try_to_send(data)
            if sent < len(data):
                self._unsent += data[sent:]
                self.hub.soon(lambda: self.hub.want_write(self, True))

    def _try_to_send(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the worker is gone; the hub's thread will notice
            return len(data)

    def flush(self) -> None:
        with self._lock:
            del self._unsent[: self._try_to_send(self._unsent)]
            if not self._unsent:
                self.hub.want_write(self, False)

    def deliver(self, items: list[tuple[Job, Delta | Exception]]) -> None:
        """Send the results of a step in one message: plain tokens as numbers, everything else as events."""
        plain, events = array(NUMBER), []
        now, waited = time.perf_counter(), Counter[float]()
        for job, delta in items:
            waited[job.last] += 1
            job.last = now
            if isinstance(delta, Exception):
                self.jobs.pop(job.key, None)
                events.append({"key": job.key, "error": str(delta) or type(delta).__name__})
            elif self.hub.reads_text or delta.logprobs or delta.finish_reason or len(delta.token_ids) != 1:
                events.append(self._event(job, delta))
            else:
                plain.append(job.key)
                plain.append(delta.token_ids[0])
        for last, count in waited.items():
            if last:
                self.hub.metrics.between.add(now - last, count)
        self.send({"op": "deltas", "events": events}, plain)

    def _event(self, job: Job, delta: Delta) -> dict:
        event: dict[str, Any] = {"key": job.key, "ids": delta.token_ids}
        if self.hub.reads_text:
            event["text"] = delta.text
        if delta.logprobs is not None:
            event["logprobs"] = delta.logprobs
        if not job.sent_prompt_logprobs:
            job.sent_prompt_logprobs = True
            scores = job.prepared.tracked.completion.prompt_logprobs
            if scores is not None:
                event["prompt_logprobs"] = scores
        if delta.completion is not None:
            event |= {"reason": delta.finish_reason, "stop": delta.stop_reason}
            self.jobs.pop(job.key, None)
            self.hub.metrics.observe(delta.completion)
            self.hub.ended()
        return event

    # ---- reading, on the hub's thread

    def read(self) -> bool:
        """Handle the worker's messages; return False if it has closed the connection."""
        try:
            data = self.sock.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for message, numbers in self._unpacker.feed(data):
            getattr(self, "_on_" + message.pop("op"))(numbers, **message)
        return bool(data)

    def close(self) -> None:
        self.compiling.clear()
        self._abort(list(self.jobs))
        with self._lock:
            self.sock.close()

    def _on_answered(self, _: array, *, status: int) -> None:
        self.hub.metrics.requests.labels(str(status)).inc()

    def _on_abort(self, _: array, *, keys: list[int]) -> None:
        self.compiling.difference_update(keys)
        self._abort(keys)

    def _abort(self, keys: list[int]) -> None:
        for key in keys:
            job = self.jobs.get(key)
            if job is not None:
                self.engine.abort(job.prepared)

    def _on_stopped(self, _: array, *, key: int, string: str) -> None:
        job = self.jobs.pop(key, None)  # complete for the client, so it no longer counts as running
        if job is not None:
            self.engine.stop(job.prepared, string)
            self.hub.ended()

    def _on_submit(self, numbers: array, *, key: int, prompts: list[dict], params: dict, options: dict, n: int) -> None:
        choices = len(prompts) * n

        def check() -> SamplingParams:
            shared = SamplingParams(**params)
            self.engine.check_params(shared)
            return shared

        def begin(check: Callable[[], SamplingParams]) -> None:
            try:
                shared = check()
                ids, encoded = self._read_prompts(numbers, prompts)
                if encoded:
                    lengths = [len(each) for each in ids]
                    message = {"op": "prompts", "key": key, "lengths": lengths, "choices": n}
                    self.send(message, np.concatenate(ids).tolist())
                self._start(key, ids, shared.choices(n), RequestOptions(**options))
            except Exception as error:
                self.send({"op": "refused", "key": key, "choices": choices} | _refusal(error))

        if (busy := self.hub.busy(choices)) is not None:
            self.send({"op": "refused", "key": key, "choices": choices, "kind": "busy"} | busy)
        elif "json_schema" in params:
            self._compile(check, begin, range(key, key + choices))
        else:
            begin(check)

    def _compile(
        self,
        check: Callable[[], SamplingParams],
        begin: Callable[[Callable[[], SamplingParams]], None],
        keys: range,
    ) -> None:
        """Check in the compiler's thread, then begin on this one, unless the choices are aborted meanwhile."""
        self.compiling.update(keys)

        def check_if_wanted() -> SamplingParams:
            if self.compiling.isdisjoint(keys):
                raise InvalidRequest("aborted before it began")
            return check()

        def done(checked: "Future[SamplingParams]") -> None:
            aborted = [key for key in keys if key not in self.compiling]
            self.compiling.difference_update(keys)
            if len(aborted) < len(keys):
                begin(checked.result)
                self._abort(aborted)

        compiled = self.hub.compiler.submit(check_if_wanted)
        compiled.add_done_callback(lambda checked: self.hub.soon(lambda: done(checked)))

    def _read_prompts(self, numbers: array, prompts: list[dict]) -> tuple[list[np.ndarray], bool]:
        """The token ids of each prompt, and whether any prompt was encoded here."""
        left, found, encoded = np.asarray(numbers), [], False
        tokenizer = self.engine.tokenizer
        own = any(each["text"] is not None for each in prompts) and overrides.replaced("bpe_merge")
        for each in prompts:
            length = each["length"] or 0
            ids, left = left[:length], left[length:]
            if tokenizer is not None and each["text"] is not None and (own or each["length"] is None):
                ids = np.array(tokenizer.encode(each["text"], add_special_tokens=each["special"]), np.int64)
                room(len(ids), self.engine.max_request_len)
                encoded = True
            found.append(ids)
        return found, encoded

    def _start(
        self, key: int, prompts: list[np.ndarray], params: list[SamplingParams], options: RequestOptions
    ) -> None:
        """Check all choices, then queue them all. If one is invalid, raises InvalidRequest and queues none.

        params: one for each choice of a prompt; the engine has already checked the values that they share.
        """
        jobs: list[Job] = []
        for ids in prompts:
            for each in params:
                job = Job(key + len(jobs))
                job.prepared = self.engine.prepare(
                    ids, each, self, job, options=options, wants_text=self.hub.reads_text, checked=True
                )
                jobs.append(job)
        self.jobs |= {job.key: job for job in jobs}
        try:
            self.engine.submit([job.prepared for job in jobs])
        except Exception:
            for job in jobs:
                del self.jobs[job.key]
            raise

    def _on_ask(self, _: array, *, id: int, what: str, arguments: dict) -> None:
        def answer() -> Any:
            return getattr(self, "_ask_" + what)(**arguments)

        self._reply(id, answer)

    def _reply(self, id: int, answer: Callable[[], Any]) -> None:
        """Send what `answer` returns or raises; if that is a future, its result, once it has one."""
        try:
            value = answer()
        except Exception as error:
            self.send({"op": "reply", "id": id, "error": _refusal(error)})
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda done: self._reply(id, done.result))
        else:
            self.send({"op": "reply", "id": id, "value": value})

    def _ask_alive(self) -> bool:
        return self.engine.alive and self.engine.working <= self.hub.hang_timeout

    def _ask_metrics(self) -> str:
        return self.hub.metrics.render(self.engine.stats()).decode()

    def _ask_state(self) -> Future[str]:
        return self.hub.room.state()

    def _ask_template(self, messages: list[dict]) -> str:
        return self._tokenizer.apply_chat_template(messages)

    def _ask_encode(self, text: str, special: bool) -> list[int]:
        return self._tokenizer.encode(text, special)

    def _ask_decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "workers ask only if `encodes` is true"
        return tokenizer

    def _ask_tokens(self, ids: list[int]) -> list:
        """The text and bytes of each token."""
        return [self.hub.texts.entry_of(token) for token in ids]


def _refusal(error: Exception) -> dict:
    message = str(error) or type(error).__name__
    if isinstance(error, TooLong):
        return {"kind": "too_long", "message": message}
    kind = "invalid" if isinstance(error, (InvalidRequest, TokenizerError)) else "failed"
    return {"kind": kind, "message": message}
