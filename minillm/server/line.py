"""One worker's socket, in the engine's process: its requests go to the engine, and their tokens back.  Lesson 99."""

import math
import socket
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minillm import overrides
from minillm.engine.async_llm import Prepared
from minillm.errors import InvalidRequest, MissingPackage, naming
from minillm.request import NOT_NUMBERS, Delta, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer, TokenizerError

from .framing import NUMBER, Unpacker, pack
from .lengths import TooLong, one_of, room
from .waiting import Seen, retry_after

if TYPE_CHECKING:
    from .hub import Hub

CHUNK = 1 << 18  # bytes per read


@dataclass(eq=False)
class Job:
    """A choice that the engine runs for a worker, for a client."""

    key: int
    client: str | None = None  # known only if the number of its choices is limited
    stops: bool = False  # whether a stop string may end it
    prepared: Prepared = field(init=False)
    told: bool = False  # whether the worker knows what there is to know of the prompt
    last: float = 0.0  # when it last got tokens; 0: never

    @property
    def seen(self) -> Seen:
        """What is known of how long it takes."""
        request, done = self.prepared.tracked.request, self.prepared.tracked.completion
        certain = not (self.stops or request.stop_ids or request.matcher)
        times = (math.nan if at is None else at for at in (done.scheduled_time, done.first_token_time))
        return Seen(request.limit - len(request.prompt), certain, len(done.token_ids), *times)


class Line:
    """One worker's socket and the choices that run for it; a mailbox for `AsyncLLM`."""

    def __init__(self, hub: "Hub", sock: socket.socket):
        self.hub, self.engine, self.sock = hub, hub.engine, sock
        sock.setblocking(False)
        self.jobs: dict[int, Job] = {}
        self.compiling: dict[int, str | None] = {}  # choices that wait until their grammar is compiled: their clients
        self._clients: Counter[str | None] = Counter()  # jobs of each
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
            first, job.last = not job.last, now
            if isinstance(delta, Exception):
                self._forget(job.key)
                events.append({"key": job.key, "ids": [], "error": str(delta) or type(delta).__name__})
            elif first or self.hub.reads_text or delta.logprobs or delta.finish_reason or len(delta.token_ids) != 1:
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
            event |= {"text": delta.text, "offsets": delta.text_offsets}
        if delta.logprobs is not None:
            event["logprobs"] = delta.logprobs
        if not job.told:
            job.told = True
            completion = job.prepared.tracked.completion
            if completion.num_cached_tokens:
                event["cached"] = completion.num_cached_tokens
            if completion.prompt_logprobs is not None:
                event["prompt_logprobs"] = completion.prompt_logprobs
        if delta.completion is not None:
            event |= {"reason": delta.finish_reason, "stop": delta.stop_reason}
            if delta.stop_reason == NOT_NUMBERS:
                event |= {"error": NOT_NUMBERS, "kind": "not_numbers"}
            elif delta.finish_reason == "abort" and isinstance(delta.stop_reason, str):  # its grammar failed
                message = f"json_schema cannot be followed to the end of this answer: {delta.stop_reason}"
                event |= {"error": message, "kind": "invalid"}
            self._forget(job.key)
            seen = job.seen
            self.hub.metrics.observe(delta.completion, seen.limit)
            if delta.completion.scheduled_time is not None:  # or else no row is free that was not before
                self.hub.pace.ended(seen, delta.finish_reason == "stop")
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

    def _on_abort(self, _: array, *, keys: list[int]) -> None:
        for key in keys:
            self.compiling.pop(key, None)
        self._abort(keys)

    def _abort(self, keys: list[int]) -> None:
        for key in keys:
            job = self.jobs.get(key)
            if job is not None:
                self.engine.abort(job.prepared)

    def _on_stopped(self, _: array, *, key: int, string: str) -> None:
        job = self._forget(key)  # complete for the client, so it no longer counts as running
        if job is not None:
            self.engine.stop(job.prepared, string)  # whose last event counts as its end

    def of(self, client: str | None) -> int:
        """The number of a client's choices that were accepted and are not finished."""
        return self._clients[client] + sum(each == client for each in self.compiling.values())

    def _forget(self, key: int) -> Job | None:
        """A choice no longer counts as running."""
        job = self.jobs.pop(key, None)
        if job is not None and job.client is not None:
            with self._lock:  # the hub's thread and the engine's both count
                self._clients[job.client] -= 1
                if not self._clients[job.client]:
                    del self._clients[job.client]
        return job

    def waits(self, keys: range) -> bool:
        """Whether a submission waits: no choice of it has ended, and the engine has given a row to none of them."""
        jobs = (self.jobs.get(key) for key in keys if key not in self.compiling)
        return all(job is not None and not job.prepared.tracked.completion.scheduled_time for job in jobs)

    def refuse_unless_begun(self, keys: range) -> None:
        """Refuse a submission that still waits."""
        if not self.waits(keys):
            return
        after = retry_after(self.hub.pace.seconds(1))
        waited = f"it has waited for {self.hub.config.queue_timeout:g} s (queue_timeout) without its turn coming"
        for key in keys:
            self.compiling.pop(key, None)
        busy = {"message": f"the server is busy: {waited}; try again in {after} s", "retry_after": after}
        self.send({"op": "refused", "key": keys.start, "choices": len(keys), "kind": "busy"} | busy)
        self._abort(list(keys))

    def _on_submit(
        self,
        numbers: array,
        *,
        key: int,
        prompts: list[dict],
        params: dict,
        options: dict,
        n: int,
        stops: bool,
        client: str | None = None,
    ) -> None:
        choices = len(prompts) * n

        def check() -> SamplingParams:
            shared = SamplingParams(**params)
            self.engine.check_params(shared)
            return shared

        def begin(check: Callable[[], SamplingParams]) -> None:
            try:
                shared = check()
                ids, encoded = self._read_prompts(numbers, prompts, shared)
                if encoded:
                    lengths = [len(each) for each in ids]
                    message = {"op": "prompts", "key": key, "lengths": lengths, "choices": n}
                    self.send(message, np.concatenate(ids).tolist())
                self._start(key, ids, shared.choices(n), RequestOptions(**options), client, stops)
            except Exception as error:
                self.send({"op": "refused", "key": key, "choices": choices} | _refusal(error))

        busy = self.hub.busy(choices) or self.hub.too_many(client, choices)
        if busy is not None:
            self.send({"op": "refused", "key": key, "choices": choices, "kind": "busy"} | busy)
            return
        self.hub.waits(self, range(key, key + choices))
        if "json_schema" in params:
            self.compiling |= dict.fromkeys(range(key, key + choices), client)
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

        compiled = self.hub.compiler.submit(check_if_wanted)
        compiled.add_done_callback(lambda checked: self.hub.soon(lambda: done(checked)))

    def _read_prompts(
        self, numbers: array, prompts: list[dict], params: SamplingParams
    ) -> tuple[list[np.ndarray], bool]:
        """The token ids of each prompt, and whether any prompt was encoded here."""
        left, found, encoded = np.asarray(numbers), [], False
        tokenizer = self.engine.tokenizer
        own = any(each["text"] is not None for each in prompts) and overrides.replaced("bpe_merge")
        for place, each in enumerate(prompts):
            length = each["length"] or 0
            ids, left = left[:length], left[length:]
            if tokenizer is not None and each["text"] is not None and (own or each["length"] is None):
                with naming("prompt", place, len(prompts)):
                    ids = np.array(tokenizer.encode(each["text"], add_special_tokens=each["special"]), np.int64)
                name, least = one_of(len(prompts), place), int(params.max_tokens != 0)
                room(len(ids), self.engine.max_request_len, name, least)
                encoded = True
            found.append(ids)
        return found, encoded

    def _start(
        self,
        key: int,
        prompts: list[np.ndarray],
        params: list[SamplingParams],
        options: RequestOptions,
        client: str | None,
        stops: bool,
    ) -> None:
        """Check all choices, then queue them all. If one is invalid, raises InvalidRequest and queues none.

        params: one for each choice of a prompt; the engine has already checked the values that they share.
        """
        jobs: list[Job] = []
        for place, ids in enumerate(prompts):
            for each in params:
                job = Job(key + len(jobs), client, stops)
                with naming("prompt", place, len(prompts)):
                    job.prepared = self.engine.prepare(
                        ids, each, self, job, options=options, wants_text=self.hub.reads_text, checked=True
                    )
                jobs.append(job)
        for _ in prompts:
            self.hub.metrics.choices.observe(len(params))
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
        return self.engine.alive and self.engine.working <= self.hub.config.hang_timeout

    def _ask_gauges(self) -> dict[str, Any]:
        return {"alive": self._ask_alive(), "families": self.hub.metrics.gauges(self.engine.stats())}

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
        """What is shown of each token."""
        return [self.hub.texts.of(token) for token in ids]

    def _ask_offsets(self, ids: list[int], prompt: str, written: bool) -> list[int]:
        return self.hub.texts.prompt_offsets(ids, prompt, written)


def _refusal(error: Exception) -> dict:
    message = str(error) or type(error).__name__
    if isinstance(error, TooLong):
        return {"kind": "too_long", "message": message}
    kind = "invalid" if isinstance(error, (InvalidRequest, TokenizerError)) else "failed"
    if isinstance(error, MissingPackage):
        kind = "missing"
    return {"kind": kind, "message": message}
