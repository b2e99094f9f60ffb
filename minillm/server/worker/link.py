"""The engine as an HTTP worker sees it: a `RemoteEngine`, at the other end of a local socket.  Lesson 99.

The messages are those of `wire`. The connection ends with the engine's process. The worker then waits for one to the
next engine (see `control`).
"""

import asyncio
import itertools
import logging
import socket
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import TypeVar, cast

from minillm.errors import InvalidRequest, MinillmError, MissingPackage
from minillm.request import Delta, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer

from ..access import CURRENT, Access
from ..lengths import TooLong
from ..limits import retry_after
from ..wire import (
    NUMBER,
    Abort,
    Ask,
    Deltas,
    Encoded,
    EngineFacts,
    Event,
    Failure,
    FromWorker,
    Hello,
    MalformedMessage,
    Message,
    MessageDecoder,
    Question,
    Refused,
    Reply,
    Stopped,
    Submit,
    encode,
)
from .choice import ONLY_TOKENS, Choice, Prompt

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

MANY_NUMBERS = 1 << 16  # more than this are joined in a thread, so that other streams keep going


class EngineError(MinillmError):
    """The engine, or a function installed in it, failed; the message is that of the original error."""


class Busy(MinillmError):
    """The server is at a limit and accepts no further request for now, but may after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class EngineGone(EngineError):
    """The engine's process has ended; another one may be ready after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDown(EngineError):
    """The server is stopping and its grace period is over: requests that still run are aborted."""


class PastDeadline(EngineError):
    """A request was aborted because it met a deadline; `code` is the deadline's name."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class NotNumbers(EngineError):
    """The model's logits for this choice are not numbers."""


ERRORS: dict[str, Callable[..., Exception]] = {
    "invalid": InvalidRequest,
    "too_long": TooLong,
    "busy": Busy,
    "missing": MissingPackage,
    "not_numbers": NotNumbers,
    "failed": EngineError,
    "lost": EngineGone,  # it can run no more, and is about to end
}


def _error(failure: Failure) -> Exception:
    """Return the exception that stands for a failure. Raises MalformedMessage for an unknown kind."""
    if failure.kind not in ERRORS:
        raise MalformedMessage(f"no error is of the kind {failure.kind!r}")
    after = () if failure.retry_after is None else (failure.retry_after,)
    return ERRORS[failure.kind](failure.message, *after)


def changed_fields(options: SamplingParams | RequestOptions) -> dict:
    """Return the fields that differ from their defaults."""
    pairs = ((field, getattr(options, field.name)) for field in fields(options) if field.init)
    return {field.name: value for field, value in pairs if value != field.default}


class EngineClient(ABC):
    """Submits requests to an engine and assembles their choices; a subclass exchanges the messages with it."""

    facts: EngineFacts
    tokenizer: Tokenizer | None

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._choices: dict[int, tuple[Choice, asyncio.Queue]] = {}
        self._ids = itertools.count()
        self._replies: dict[int, asyncio.Future] = {}
        self._blocks: set[asyncio.Timeout] = set()  # interrupted by `give_up`
        self._given_up = False

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Return whether messages reach the engine."""

    @abstractmethod
    def _send(self, message: FromWorker) -> None:
        """Send a message to the engine. Raises EngineGone."""

    def _begin(self, request: Submit, params: SamplingParams) -> None:
        """Submit a request. Raises EngineGone. params: the request's, with what `request.params` leaves out."""
        self._send(request)

    def _end(self, keys: Iterable[int]) -> None:
        """Abort what still runs of a request that is over. keys: those of its choices."""
        self._abort(keys)

    # ---- what the HTTP side uses

    async def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        n: int = 1,
        options: RequestOptions = RequestOptions(),
        partly: bool = False,
    ) -> AsyncGenerator[tuple[Choice, Delta]]:
        """Run n choices of each prompt; yields pairs of a choice and its next delta.

        partly: if the engine cannot complete some of the choices, go on with the others. The last delta of such a
        choice has finish_reason "abort", and its stop_reason says why. If there is no other, its error is raised.

        Choices are numbered prompt by prompt. Either all of them run or none: InvalidRequest and Busy are raised before
        the first delta, EngineError at any time. Closing the generator early aborts the choices that still run.
        """
        if self._given_up:
            raise _shutting_down()
        queue: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue()
        mine: dict[int, Choice] = {}
        for index, (prompt, _) in enumerate(itertools.product(prompts, range(n))):
            mine[next(self._keys)] = Choice(index, prompt, self.tokenizer, params)
        self._choices |= {key: (choice, queue) for key, choice in mine.items()}
        changed = changed_fields(params)
        if self.tokenizer is not None:  # stop strings are found here, where tokens become text
            changed.pop("stop", None)
        access = CURRENT.get() or Access()
        client = None if self.facts.config.max_per_client is None else access.client
        deadlines = self._set_deadlines(mine, queue)
        try:
            ids = [prompt.ids or [] for prompt in prompts]
            many = sum(map(len, ids)) > MANY_NUMBERS
            numbers = await asyncio.to_thread(_joined, ids) if many else _joined(ids)
            forms, stops = [each.form for each in prompts], bool(params.stop)
            self._begin(Submit(min(mine), forms, changed, changed_fields(options), n, stops, client, numbers), params)
            left, failed = len(mine), 0
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                choice, delta = item
                if choice.failure is not None and delta.finish_reason is not None:
                    failed += 1
                    if failed == len(mine) or not partly:
                        raise choice.failure
                if access.first_token is None:
                    access.first_token = access.seconds
                left -= delta.finish_reason is not None
                yield choice, delta
        finally:
            for deadline in deadlines:
                deadline.cancel()
            self._end(mine)
            for choice in mine.values():
                access.ended(choice.completion, choice.index % n == 0)

    def _abort(self, keys: Iterable[int]) -> None:
        """Abort those that still run."""
        unfinished = [key for key in keys if self._choices.pop(key, None) is not None]
        if unfinished and self.alive:
            self._send(Abort(unfinished))

    def _set_deadlines(self, choices: dict[int, Choice], queue: asyncio.Queue) -> list[asyncio.TimerHandle]:
        """Start the clocks of a request that is about to be submitted."""

        def none_begun() -> bool:
            return not any(choice.completion.token_ids for choice in choices.values())

        def expire(name: str, seconds: float, met: str, applies: Callable[[], bool]) -> None:
            if applies():
                self._abort(choices)
                message = f"the request was aborted: it {met} within {seconds:g} s ({name}); ask for less, or try again"
                queue.put_nowait(PastDeadline(message, name))

        loop, config, timers = asyncio.get_running_loop(), self.facts.config, []
        for name, seconds, met, applies in (
            ("first_token_timeout", config.first_token_timeout, "had no token", none_begun),
            ("request_timeout", config.request_timeout, "was not complete", lambda: True),
        ):
            if seconds is not None:
                timers.append(loop.call_later(seconds, expire, name, seconds, met, applies))
        return timers

    @asynccontextmanager
    async def until_given_up(self) -> AsyncIterator[None]:
        """Return a block that `give_up` interrupts with ShuttingDown."""
        if self._given_up:
            raise _shutting_down()
        try:
            async with asyncio.timeout(None) as block:
                self._blocks.add(block)
                yield
        except TimeoutError:
            if not block.expired():
                raise
            raise _shutting_down() from None
        finally:
            self._blocks.discard(block)

    def give_up(self) -> None:
        """Abort all requests that still run, with ShuttingDown."""
        self._given_up = True
        for block in self._blocks:
            block.reschedule(asyncio.get_running_loop().time())
        for _, queue in self._choices.values():
            queue.put_nowait(_shutting_down())

    async def ask(self, question: Question[Answer]) -> Answer:
        """Ask the engine's process. Raises EngineError or InvalidRequest."""
        number, reply = next(self._ids), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._send(Ask(number, question))
            return await reply
        finally:
            self._replies.pop(number, None)

    def _end_all(self, error: Callable[[str], EngineGone]) -> None:
        """End all that the engine was asked; error: makes an exception of a message."""
        for _, queue in self._choices.values():
            queue.put_nowait(error("the engine has stopped, and this request with it"))
        self._choices.clear()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error("the engine has stopped"))

    # ---- messages from the engine

    def receive(self, message: Message) -> None:
        """Handle a message from the engine. Raises MalformedMessage."""
        match message:
            case Deltas():
                for key, token in zip(message.numbers[::2], message.numbers[1::2], strict=True):
                    self._gained(key, [token])
                for event in message.events:
                    self._gained(event.key, event.ids, event)
            case Encoded():
                self._follow(message)
            case Refused():
                self._refuse(message)
            case Reply():
                self._answered(message)
            case _:
                raise MalformedMessage(f"the engine sent {type(message).__name__}, which is a worker's message")

    def _gained(self, key: int, ids: list[int], event: Event = ONLY_TOKENS) -> None:
        """Give a choice these tokens and the other fields of an event."""
        running = self._choices.get(key)
        if running is None:  # aborted or stopped, but this event was already on its way
            return
        choice, queue = running
        if event.failure is not None:
            error = _error(event.failure)
            if event.reason is None:
                del self._choices[key]
                queue.put_nowait(error)
                return
            choice.failure = error
        # Not in `stream`: even if the client reads slowly, the engine must learn of a stop string at once.
        try:
            delta = choice.take(ids, event)
        except Exception as mistake:  # an error in the tokenizer ends only this request
            queue.put_nowait(mistake)
            return
        queue.put_nowait((choice, delta))
        if delta.finish_reason is not None:
            del self._choices[key]
            if event.reason is None and self.alive:
                self._send(Stopped(key, cast(str, delta.stop_reason)))  # only a stop string ends a choice here

    def _follow(self, encoded: Encoded) -> None:
        key, numbers = encoded.key, encoded.numbers
        for length in encoded.lengths:
            for each in range(key, key + encoded.n):
                if each in self._choices:
                    self._choices[each][0].follow(numbers[:length].tolist())
            numbers, key = numbers[length:], key + encoded.n

    def _refuse(self, refused: Refused) -> None:
        keys = range(refused.key, refused.key + refused.choices)
        queue = next((self._choices[key][1] for key in keys if key in self._choices), None)
        if queue is not None:
            queue.put_nowait(_error(refused.failure))
        for key in keys:
            self._choices.pop(key, None)

    def _answered(self, message: Reply) -> None:
        reply = self._replies.get(message.id)
        if reply is None or reply.done():
            return
        if message.failure is None:
            reply.set_result(message.value)
        else:
            reply.set_exception(_error(message.failure))


class RemoteEngine(EngineClient):
    """The engine as an HTTP worker sees it, behind a socket. `connected` is done once one was connected.

    facts are those of the latest engine. tokenizer: loaded in this process; None if the model has none or the engine's
    was passed as an object. on_lost: called when the connection to the engine is closed.
    """

    def __init__(self, on_lost: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_lost = on_lost
        self._link: _Link | None = None
        self._expected = 0.0  # when the next engine may be ready
        self._reload = 0.0  # seconds from an engine's end until the next one is ready, by estimate

    async def connect(self, sock: socket.socket, reload: float = 0.0) -> None:
        """Use the engine at the other end of this socket from now on.

        reload: seconds from its end until another one is ready, by estimate.
        """
        self._reload = reload
        await asyncio.get_running_loop().create_connection(lambda: _Link(self), sock=sock)

    @property
    def alive(self) -> bool:
        return self._link is not None

    def receive(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._meet(message)
        else:
            super().receive(message)

    def _send(self, message: FromWorker) -> None:
        if self._link is None:
            raise self._gone("the engine has stopped, and another one starts")
        self._link.transport.write(encode(message))

    def made(self, link: "_Link") -> None:
        """Use a new connection."""
        self._lose()
        self._link = link

    def expect(self, seconds: float) -> None:
        """Note in how many seconds another engine is ready, by estimate."""
        self._expected = time.monotonic() + seconds

    def _gone(self, what: str) -> EngineGone:
        after = retry_after(self._expected - time.monotonic())
        return EngineGone(f"{what}: try again in {after} s", after)

    def lost(self, link: "_Link") -> None:
        """Forget a connection that is closed."""
        if link is self._link:
            self._lose()
            self._on_lost()

    def _lose(self) -> None:
        """Forget the engine: all that it was asked ends with EngineGone."""
        if self._link is None:
            return
        self._link.transport.close()
        self._link = None
        self._expected = max(self._expected, time.monotonic() + self._reload)  # until the owner says more, in `expect`
        self._end_all(self._gone)

    def _meet(self, hello: Hello) -> None:
        self.facts = hello.facts
        if self.connected.done():  # the next engine has the same tokenizer
            return
        try:
            self.tokenizer = Tokenizer.from_pretrained(Path(hello.tokenizer)) if hello.tokenizer else None
        except Exception as error:
            self.connected.set_exception(error)
            return
        self.connected.set_result(None)


class _Link(asyncio.Protocol):
    """One connection of a `RemoteEngine`."""

    def __init__(self, engine: RemoteEngine):
        self.engine, self._decoder = engine, MessageDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # a stream socket has a stream transport
        self.engine.made(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self.engine.receive(message)
        except Exception:
            log.exception("the connection to the engine failed; its requests are lost")
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.engine.lost(self)


def _joined(prompts: Sequence[list[int]]) -> array:
    """Join the ids of all prompts."""
    ids = array(NUMBER)
    for each in prompts:
        ids.extend(each)
    return ids


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is stopping and aborted this request: send it again")
