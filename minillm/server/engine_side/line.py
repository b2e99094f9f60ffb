"""Pass one worker's requests to the engine and their tokens back, in the engine's process.  Lesson 99."""

import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm import overrides
from minillm.engine.async_llm import AsyncLLM, Prepared
from minillm.errors import InvalidRequest, MissingPackage, RankFailed, naming
from minillm.prompts import EmbeddedPrompt
from minillm.request import NOT_NUMBERS, Delta, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer, TokenizerError

from ..config import ServerConfig
from ..engine_room.state import EngineRoom
from ..lengths import TooLong, check_length, one_of
from ..limits import LOADED_SOON, retry_after
from ..token_texts import TokenTexts
from ..wire import (
    NUMBER,
    Abort,
    Adapters,
    Alive,
    Ask,
    Decode,
    Deltas,
    Encode,
    Encoded,
    Event,
    Failure,
    FromEngine,
    Gauges,
    LoadAdapter,
    MalformedMessage,
    Message,
    MessageDecoder,
    Offsets,
    PromptForm,
    Question,
    Refused,
    RenderChat,
    Reply,
    ShowTokens,
    State,
    Stopped,
    Submit,
    UnloadAdapter,
    encode,
    numbers_of,
)
from .adapter_loader import AdapterLoader, TooManyLoads
from .admission import Admission
from .metrics import Metrics
from .waiting import Seen

CHUNK = 1 << 18  # bytes per read


@dataclass(eq=False)
class Job:
    """A choice that the engine runs for a worker, for a client."""

    key: int
    client: str | None = None  # known only if the number of its choices is limited
    stops: bool = False  # whether a stop string may end it
    prepared: Prepared = field(init=False)
    prompt_reported: bool = False  # whether the worker knows the prompt's log-probabilities and cached tokens
    last: float = 0.0  # when it last got tokens; 0: never

    @property
    def seen(self) -> Seen:
        """Return what is known of how long it takes."""
        request, done = self.prepared.tracked.request, self.prepared.tracked.completion
        certain = not (self.stops or request.stop_ids or request.matcher)
        times = (math.nan if at is None else at for at in (done.scheduled_time, done.first_token_time))
        return Seen(request.limit - len(request.prompt), certain, len(done.token_ids), *times)


@dataclass(frozen=True)
class Shared:
    """Shared by the lines to all workers. soon: runs a function on the hub's thread.

    compiler: compiles grammars, so that neither the hub's thread nor the engine's waits for them. loader: the same for
    adapters.
    """

    engine: AsyncLLM
    config: ServerConfig
    admission: Admission
    metrics: Metrics
    engine_room: EngineRoom
    texts: TokenTexts
    compiler: ThreadPoolExecutor
    loader: AdapterLoader
    soon: Callable[[Callable[[], None]], None]


class Line(ABC):
    """The choices that run for one worker; a mailbox for `AsyncLLM`. A subclass sends its messages to the worker.

    reads_text: whether all text is encoded and decoded here.
    """

    def __init__(self, shared: Shared, reads_text: bool):
        self.shared, self.engine, self.reads_text = shared, shared.engine, reads_text
        self.jobs: dict[int, Job] = {}
        self.compiling: dict[int, str | None] = {}  # choices that wait until their grammar is compiled: their clients
        self._clients: Counter[str | None] = Counter()  # jobs of each
        self._lock = threading.Lock()

    @abstractmethod
    def send(self, message: FromEngine) -> None:
        """Send a message to the worker, without waiting; on any thread."""

    def close(self) -> None:
        """Abort what runs: the worker is gone."""
        self.compiling.clear()
        self._abort(list(self.jobs))

    def deliver(self, items: list[tuple[Job, Delta | Exception]]) -> None:
        """Send the results of a step in one message: plain tokens as numbers, everything else as events."""
        plain, events = array(NUMBER), list[Event]()
        now, waited = time.perf_counter(), Counter[float]()
        for job, delta in items:
            waited[job.last] += 1
            first, job.last = not job.last, now
            if isinstance(delta, Exception):
                self._forget(job.key)
                kind = "lost" if isinstance(delta, RankFailed) else "failed"
                events.append(Event(job.key, [], failure=Failure(kind, str(delta) or type(delta).__name__)))
            elif first or self.reads_text or delta.logprobs or delta.finish_reason or len(delta.token_ids) != 1:
                events.append(self._event(job, delta))
            else:
                plain.append(job.key)
                plain.append(delta.token_ids[0])
        for last, count in waited.items():
            if last:
                self.shared.metrics.between.add(now - last, count)
        self.send(Deltas(events, plain))

    def _event(self, job: Job, delta: Delta) -> Event:
        text, offsets = (delta.text, delta.text_offsets) if self.reads_text else ("", None)
        cached, prompt_logprobs = 0, None
        if not job.prompt_reported:
            job.prompt_reported = True
            completion = job.prepared.tracked.completion
            cached, prompt_logprobs = completion.num_cached_tokens, completion.prompt_logprobs
        failure, reason, stop = None, None, None
        if delta.completion is not None:
            reason, stop = delta.finish_reason, delta.stop_reason
            if stop == NOT_NUMBERS:
                failure = Failure("not_numbers", NOT_NUMBERS)
            elif reason == "abort" and isinstance(stop, str):  # its grammar failed
                failure = Failure("invalid", f"json_schema cannot be followed to the end of this answer: {stop}")
            self._forget(job.key)
            seen = job.seen
            self.shared.metrics.observe(delta.completion, seen.limit)
            if delta.completion.scheduled_time is not None:  # or else no row is free that was not before
                self.shared.admission.pace.ended(seen, delta.finish_reason == "stop")
        return Event(
            job.key, delta.token_ids, delta.logprobs, reason, stop, cached, text, offsets, prompt_logprobs, failure
        )

    # ---- messages from the worker, on the hub's thread

    def receive(self, message: Message) -> None:
        """Handle a message from the worker. Raises MalformedMessage."""
        match message:
            case Submit():
                self._submit(message)
            case Abort(keys):
                for key in keys:
                    self.compiling.pop(key, None)
                self._abort(keys)
            case Stopped(key, string):
                job = self._forget(key)  # complete for the client, so it no longer counts as running
                if job is not None:
                    self.engine.stop(job.prepared, string)  # whose last event counts as its end
            case Ask(id, question):
                self._reply(id, lambda: self._answer(question))
            case _:
                raise MalformedMessage(f"a worker sent {type(message).__name__}, which is the engine's message")

    def _abort(self, keys: list[int]) -> None:
        for key in keys:
            job = self.jobs.get(key)
            if job is not None:
                self.engine.abort(job.prepared)

    @property
    def count(self) -> int:
        """Return the number of choices that were accepted and are not finished."""
        return len(self.jobs) + len(self.compiling)

    def seen(self) -> Iterator[Seen]:
        """Yield what is known of each choice, in the order in which the engine starts them."""
        for job in list(self.jobs.values()):  # a copy: the engine's thread removes those that have ended
            yield job.seen

    def of(self, client: str | None) -> int:
        """Return the number of a client's choices that were accepted and are not finished."""
        return self._clients[client] + sum(each == client for each in self.compiling.values())

    def _forget(self, key: int) -> Job | None:
        """Stop counting a choice as running."""
        job = self.jobs.pop(key, None)
        if job is not None and job.client is not None:
            with self._lock:  # the hub's thread and the engine's both count
                self._clients[job.client] -= 1
                if not self._clients[job.client]:
                    del self._clients[job.client]
        return job

    def waits(self, keys: range) -> bool:
        """Return whether a submission waits: no choice of it has ended or has got a row from the engine."""
        jobs = (self.jobs.get(key) for key in keys if key not in self.compiling)
        return all(job is not None and not job.prepared.tracked.completion.scheduled_time for job in jobs)

    def refuse_unless_begun(self, keys: range) -> None:
        """Refuse a submission that still waits."""
        if not self.waits(keys):
            return
        after = retry_after(self.shared.admission.pace.seconds(1))
        waited = f"it has waited for {self.shared.config.queue_timeout:g} s (queue_timeout) without its turn coming"
        for key in keys:
            self.compiling.pop(key, None)
        busy = Failure("busy", f"the server is busy: {waited}; try again in {after} s", after)
        self.send(Refused(keys.start, len(keys), busy))
        self._abort(list(keys))

    def _submit(self, message: Submit) -> None:
        choices, client = len(message.prompts) * message.n, message.client
        keys = range(message.key, message.key + choices)

        def check() -> SamplingParams:
            shared = SamplingParams(**message.params)
            self.engine.check_params(shared)
            return shared

        def begin(check: Callable[[], SamplingParams]) -> None:
            try:
                shared = check()
                ids, encoded = self._read_prompts(message.numbers, message.prompts, shared)
                if encoded:
                    numbers = numbers_of(np.concatenate(ids).tolist())
                    self.send(Encoded(message.key, [len(each) for each in ids], message.n, numbers))
                options = RequestOptions(**message.options)
                model, dtype = self.engine.model_config, self.engine.dtype
                prompts = [
                    form.embedded(each, model.hidden_size, dtype)
                    for form, each in zip(message.prompts, ids, strict=True)
                ]
                self._start(message.key, prompts, shared.choices(message.n), options, client, message.stops)
            except Exception as error:
                self.send(Refused(message.key, choices, _failure(error)))

        busy = self.shared.admission.refusal(client, choices)
        if busy is not None:
            self.send(Refused(message.key, choices, busy))
            return
        self.shared.admission.waits(self, keys)
        if "json_schema" in message.params:
            self.compiling |= dict.fromkeys(keys, client)
            self._compile(check, begin, keys)
        else:
            begin(check)

    def _compile(
        self,
        check: Callable[[], SamplingParams],
        begin: Callable[[Callable[[], SamplingParams]], None],
        keys: range,
    ) -> None:
        """Check in the compiler's thread, then begin on this one, unless the choices are aborted meanwhile."""

        def check_if_wanted() -> SamplingParams:
            if not any(key in self.compiling for key in keys):
                raise InvalidRequest("aborted before it began")
            return check()

        def done(checked: "Future[SamplingParams]") -> None:
            aborted = [key for key in keys if key not in self.compiling]
            for key in keys:
                self.compiling.pop(key, None)
            if len(aborted) < len(keys):
                begin(checked.result)
                self._abort(aborted)

        compiled = self.shared.compiler.submit(check_if_wanted)
        compiled.add_done_callback(lambda checked: self.shared.soon(lambda: done(checked)))

    def _read_prompts(
        self, numbers: array, prompts: list[PromptForm], params: SamplingParams
    ) -> tuple[list[np.ndarray], bool]:
        """Return the token ids of each prompt, and whether any prompt was encoded here."""
        left, ids_of_all, encoded = np.asarray(numbers), [], False
        tokenizer = self.engine.tokenizer
        own = any(each.text is not None for each in prompts) and overrides.replaced("bpe_merge")
        for index, each in enumerate(prompts):
            length = each.length or 0
            ids, left = left[:length], left[length:]
            if tokenizer is not None and each.text is not None and (own or each.length is None):
                with naming("prompt", index, len(prompts)):
                    ids = np.array(tokenizer.encode(each.text, add_special_tokens=each.special), np.int64)
                name, least = one_of(len(prompts), index), int(params.max_tokens != 0)
                check_length(len(ids), self.engine.max_request_len, name, least)
                encoded = True
            ids_of_all.append(ids)
        return ids_of_all, encoded

    def _start(
        self,
        key: int,
        prompts: Sequence[np.ndarray | EmbeddedPrompt],
        params: list[SamplingParams],
        options: RequestOptions,
        client: str | None,
        stops: bool,
    ) -> None:
        """Check all choices, then queue them all. If one is invalid, raises InvalidRequest and queues none.

        params: one for each choice of a prompt; the engine has already checked the values that they share.
        """
        jobs: list[Job] = []
        for index, prompt in enumerate(prompts):
            for each in params:
                job = Job(key + len(jobs), client, stops)
                with naming("prompt", index, len(prompts)):
                    job.prepared = self.engine.prepare(
                        prompt, each, self, job, options=options, wants_text=self.reads_text, checked=True
                    )
                jobs.append(job)
        for _ in prompts:
            self.shared.metrics.choices.observe(len(params))
        self.jobs |= {job.key: job for job in jobs}
        if client is not None:
            with self._lock:
                self._clients[client] += len(jobs)
        try:
            self.engine.submit([job.prepared for job in jobs])
        except Exception:
            for job in jobs:
                self._forget(job.key)
            raise

    def _reply(self, id: int, answer: Callable[[], Any]) -> None:
        """Send what `answer` returns or raises; if that is a future, its result, once it has one."""
        try:
            value = answer()
        except Exception as error:
            self.send(Reply(id, None, _failure(error)))
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda done: self._reply(id, done.result))
        else:
            self.send(Reply(id, value))

    def _answer(self, question: Question[Any]) -> Any:
        """Return the answer to a question, or a future of it."""
        match question:
            case Alive():
                return self._alive
            case Gauges():
                return {"alive": self._alive, "families": self.shared.metrics.gauges(self.engine.stats())}
            case State():
                return self.shared.engine_room.state()
            case Adapters():
                return self.engine.adapters
            case LoadAdapter(name, directory):
                return self.shared.loader.load(name, directory)
            case UnloadAdapter(name):
                return self.shared.loader.unload(name)
            case RenderChat(messages):
                return self._tokenizer.apply_chat_template(messages)
            case Encode(text, special):
                return self._tokenizer.encode(text, special)
            case Decode(ids):
                return self._tokenizer.decode(ids)
            case ShowTokens(ids):
                return [self.shared.texts.of(token) for token in ids]
            case Offsets(ids, prompt, written):
                return self.shared.texts.prompt_offsets(ids, prompt, written)
        raise MalformedMessage(f"{type(question).__name__} is no question")

    @property
    def _alive(self) -> bool:
        return self.engine.alive and self.engine.working <= self.shared.config.hang_timeout

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "workers ask only if `encodes` is true"
        return tokenizer


class SocketLine(Line):
    """A worker behind a socket.

    want_write: called on the hub's thread with whether `flush` is to be called once the socket can be written to.
    closed: called on the hub's thread once the connection is closed.
    """

    def __init__(
        self,
        shared: Shared,
        reads_text: bool,
        sock: socket.socket,
        want_write: Callable[["SocketLine", bool], None],
        closed: Callable[[], object] = lambda: None,
    ):
        super().__init__(shared, reads_text)
        self.sock, self._want_write, self._closed = sock, want_write, closed
        sock.setblocking(False)
        self._decoder = MessageDecoder()
        self._unsent = bytearray()

    # ---- writing, on any thread

    def send(self, message: FromEngine) -> None:
        data = encode(message)
        with self._lock:
            if self._unsent:
                self._unsent += data
                return
            sent = self._try_to_send(data)
            if sent < len(data):
                self._unsent += data[sent:]
                self.shared.soon(lambda: self._want_write(self, True))

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
                self._want_write(self, False)

    # ---- reading, on the hub's thread

    def read(self) -> bool:
        """Handle the worker's messages; return False if it has closed the connection."""
        try:
            data = self.sock.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for message in self._decoder.feed(data):
            self.receive(message)
        return bool(data)

    def close(self) -> None:
        with self._lock:
            self.sock.close()  # first: the worker must not take what is aborted for the ends of its answers
        super().close()
        self._closed()


def _failure(error: Exception) -> Failure:
    message = str(error) or type(error).__name__
    if isinstance(error, TooLong):
        return Failure("too_long", message)
    if isinstance(error, MissingPackage):
        return Failure("missing", message)
    if isinstance(error, TooManyLoads):
        return Failure("busy", message, LOADED_SOON)
    return Failure("invalid" if isinstance(error, (InvalidRequest, TokenizerError)) else "failed", message)
