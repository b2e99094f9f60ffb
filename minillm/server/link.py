"""The local socket between the engine's process and its HTTP workers: messages, and a worker's end.  Lesson 99.

A message is a JSON object and an array of whole numbers (token ids): nothing that arrives can run code, as a pickle
would. All tokens that a step made for a worker travel in one message.

From a worker:
    submit      key of the first choice; prompts; params; options; n of each; numbers: the prompts' ids, end to end
    abort       keys
    stopped     key, string: a stop string ended the text; what is generated beyond it is of no use
    ask         id, what, arguments: answered by a reply with the same id
    answered    status: an HTTP answer, to be counted
    ready, failed (why)
From the engine:
    hello       what the worker must know about the engine
    prompts     key, lengths; numbers: the ids of prompts that the engine's process encoded
    deltas      events of choices that gained more than a plain token; numbers: key, token of those that did not
    refused     key, kind, message: none of a submission runs
    reply       id, and a value or an error
    stop        finish what runs, take nothing new; grace: seconds until what still runs is given up
"""

import asyncio
import itertools
import json
import struct
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from minillm.engine.output_text import OutputText
from minillm.errors import InvalidRequest, MinillmError
from minillm.request import Completion, Delta, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer

from .limits import Timeouts

SIZES = struct.Struct("<II")  # bytes of JSON, bytes of numbers
NUMBER = "q"
MANY_NUMBERS = 1 << 16  # that take milliseconds to put together
CHARACTERS_PER_TOKEN = 128  # the longest tokens in use are runs of 128 spaces; text has about four


class EngineError(MinillmError):
    """The engine, or a function put into it, failed; the message is the failure's own."""


class Busy(MinillmError):
    """So many requests wait already that another is not taken."""


class ShuttingDown(EngineError):
    """The server stops, and its grace is over: what still ran is given up."""


class TooLong(InvalidRequest):
    """A prompt that leaves no room for output."""


REFUSALS = {"invalid": InvalidRequest, "too_long": TooLong, "busy": Busy, "failed": EngineError}


def room(tokens: int, limit: int, name: str = "prompt") -> int:
    """Tokens left for the output when it and the prompt may have `limit` together. Raises TooLong."""
    if tokens >= limit:
        reason = f"has {tokens} tokens, but prompt and output together have at most {limit}, one of them output"
        raise TooLong(f"{name} {reason}: shorten it")
    return limit - tokens


def readable(characters: int, limit: int, name: str = "prompt") -> None:
    """Refuse a text that cannot fit, before anything reads it. Raises TooLong."""
    most = limit * CHARACTERS_PER_TOKEN
    if characters > most:
        reason = f"has {characters:,} characters, but at most {most:,} are read, {CHARACTERS_PER_TOKEN} for each"
        raise TooLong(f"{name} {reason} of the {limit:,} tokens that prompt and output have together: shorten it")


def pack(message: dict, numbers: Iterable[int] = ()) -> bytes:
    # Not in ASCII: escapes would make most alphabets three times as long and slow to read.
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    numbers = numbers if isinstance(numbers, array) else array(NUMBER, numbers)
    head, data = text.encode("utf-8", "surrogatepass"), numbers.tobytes()
    return SIZES.pack(len(head), len(data)) + head + data


class Unpacker:
    """Bytes as they arrive -> (message, numbers) as they are complete."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict, array]]:
        self._held += data
        while len(self._held) >= SIZES.size:
            head, numbers = SIZES.unpack_from(self._held)
            end = SIZES.size + head + numbers
            if len(self._held) < end:
                return
            message = json.loads(self._held[SIZES.size : SIZES.size + head])
            found = array(NUMBER, bytes(self._held[SIZES.size + head : end]))
            del self._held[:end]
            yield message, found


@dataclass
class Prompt:
    """A prompt on its way to the engine. Its text is sent too: the engine's process may tokenize differently."""

    ids: list[int] | None  # None: the tokenizer is in the engine's process
    text: str | None = None
    special: bool = True  # whether the tokenizer puts its special tokens around the text

    @property
    def form(self) -> dict:
        return {"length": None if self.ids is None else len(self.ids), "text": self.text, "special": self.special}


class Choice:
    """One running choice of an answer, as a worker puts it together."""

    def __init__(self, index: int, prompt: Prompt, tokenizer: Tokenizer | None, params: SamplingParams):
        self.index = index
        self.output = OutputText(tokenizer, params.stop, params.min_tokens) if tokenizer is not None else None
        self.completion = Completion("", prompt.ids or [])
        if params.logprobs is not None:
            self.completion.logprobs = []

    def take(self, event: dict) -> Delta:
        """What the engine tells, without the tokens after a stop string; one that is found ends the choice."""
        ids, reason, stop = event["ids"], event.get("reason"), event.get("stop")
        text, logprobs, done = event.get("text", ""), event.get("logprobs"), self.completion
        if self.output is not None:
            ids = ids[: self.output.add(ids, reason)]
            if self.output.stop_string is not None:
                reason, stop = "stop", self.output.stop_string
            text = self.output.new()
        done.text += text
        done.token_ids += ids
        if logprobs is not None:
            logprobs = [_with_ids(entry) for entry in logprobs[: len(ids)]]
            if done.logprobs is not None:
                done.logprobs += logprobs
        if "prompt_logprobs" in event:
            done.prompt_logprobs = [_with_ids(entry) for entry in event["prompt_logprobs"]]
        delta = Delta(text, ids, logprobs, reason, stop)
        if reason is not None:
            done.finish_reason, done.stop_reason = reason, stop
            delta.completion = done
        return delta


def _with_ids(entry: dict[str, float] | None) -> dict[int, float] | None:
    """Log-probabilities as JSON brought them: its keys are strings."""
    return None if entry is None else {int(token): logprob for token, logprob in entry.items()}


def _changed(given: SamplingParams | RequestOptions) -> dict:
    """The fields that differ from their defaults."""
    pairs = ((field, getattr(given, field.name)) for field in fields(given) if field.init)
    return {field.name: value for field, value in pairs if value != field.default}


class RemoteEngine(asyncio.Protocol):
    """The engine as an HTTP worker sees it. Once `connected` is done it knows

    name           what the model is served as
    tokenizer      read in this process; None where the model has none, or the engine's is an object of the user's own
    encodes        whether text can be encoded at all, here or there
    max_model_len  tokens of the context;  max_request_len  of prompt and output together: more, where they stream on
    capacity       choices that the server holds, those that wait included;  timeouts  what clients are given
    vocab_size;  dtype  the model's, as "bfloat16";  max_num_seqs  places in the batch;  log_level  uvicorn's

    on_stop: called with the seconds of grace when the engine says stop, or is gone.
    """

    def __init__(self, on_stop: Callable[[float], None] = lambda grace: None) -> None:
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.alive = True
        self._stop = on_stop
        self._unpacker = Unpacker()
        self._keys = itertools.count()
        self._choices: dict[int, tuple[Choice, asyncio.Queue]] = {}
        self._ids = itertools.count()
        self._replies: dict[int, asyncio.Future] = {}
        self._blocks: set[asyncio.Timeout] = set()  # that `give_up` ends
        self._given_up = False

    # ---- what the HTTP side uses

    async def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams, n: int = 1, options: RequestOptions = RequestOptions()
    ) -> AsyncGenerator[tuple[Choice, Delta]]:
        """Run `params.choices(n)` of each prompt; yields each choice with what it gained.

        Choices are numbered prompt by prompt. All run, or none: raises InvalidRequest or Busy before the first
        delta; EngineError at any time. Leaving early aborts what runs.
        """
        if self._given_up:
            raise _shutting_down()
        queue: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue()
        mine: dict[int, Choice] = {}
        for index, (prompt, _) in enumerate(itertools.product(prompts, range(n))):
            mine[next(self._keys)] = Choice(index, prompt, self.tokenizer, params)
        self._choices |= {key: (choice, queue) for key, choice in mine.items()}
        changed = _changed(params)
        if self.tokenizer is not None:  # stop strings are looked for where text is made
            changed.pop("stop", None)
        message = {"op": "submit", "key": min(mine), "prompts": [each.form for each in prompts]}
        message |= {"params": changed, "options": _changed(options), "n": n}
        try:
            ids = [prompt.ids or [] for prompt in prompts]
            many = sum(map(len, ids)) > MANY_NUMBERS
            self._send(message, await asyncio.to_thread(_joined, ids) if many else _joined(ids))
            left = len(mine)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                choice, delta = item
                left -= delta.finish_reason is not None
                yield choice, delta
        finally:
            unfinished = [key for key in mine if self._choices.pop(key, None) is not None]
            if unfinished and self.alive:
                self._send({"op": "abort", "keys": unfinished})

    @asynccontextmanager
    async def until_given_up(self) -> AsyncIterator[None]:
        """A block that `give_up` interrupts. Raises ShuttingDown."""
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
        """End all that still runs for clients with ShuttingDown."""
        self._given_up = True
        for block in self._blocks:
            block.reschedule(asyncio.get_running_loop().time())
        for _, queue in self._choices.values():
            queue.put_nowait(_shutting_down())

    async def ask(self, what: str, **arguments: Any) -> Any:
        """Have the engine's process answer: see `Hub`. Raises EngineError or InvalidRequest."""
        number, reply = next(self._ids), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._send({"op": "ask", "id": number, "what": what, "arguments": arguments})
            return await reply
        finally:
            self._replies.pop(number, None)

    def answered(self, status: int) -> None:
        """Count an HTTP answer."""
        if self.alive:
            self._send({"op": "answered", "status": status})

    def ready(self) -> None:
        self._send({"op": "ready"})

    # ---- the socket

    def _send(self, message: dict, numbers: Iterable[int] = ()) -> None:
        if not self.alive:
            raise EngineError("the engine's process is gone")
        self._transport.write(pack(message, numbers))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream's, since the socket is one

    def data_received(self, data: bytes) -> None:
        for message, numbers in self._unpacker.feed(data):
            getattr(self, "_on_" + message.pop("op"))(numbers, **message)

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        gone = EngineError("the engine's process is gone")
        for _, queue in self._choices.values():
            queue.put_nowait(gone)
        self._choices.clear()
        for future in [*self._replies.values(), self.connected]:
            if not future.done():
                future.set_exception(gone)
        self._stop(0)

    def _on_hello(self, _: array, *, tokenizer: str | None, **facts: Any) -> None:
        self.name, self.encodes, self.log_level = facts["name"], facts["encodes"], facts["log_level"]
        self.max_model_len, self.max_request_len = facts["max_model_len"], facts["max_request_len"]
        self.vocab_size, self.dtype, self.max_num_seqs = facts["vocab_size"], facts["dtype"], facts["max_num_seqs"]
        self.capacity, self.timeouts = facts["capacity"], Timeouts(**facts["timeouts"])
        try:
            self.tokenizer = Tokenizer.from_pretrained(Path(tokenizer)) if tokenizer else None
        except Exception as error:
            self.connected.set_exception(error)
            return
        self.connected.set_result(None)

    def _on_deltas(self, numbers: array, *, events: list[dict]) -> None:
        for i in range(0, len(numbers), 2):
            self._gained(numbers[i], {"ids": [numbers[i + 1]]})
        for event in events:
            self._gained(event.pop("key"), event)

    def _gained(self, key: int, event: dict) -> None:
        found = self._choices.get(key)
        if found is None:  # aborted, or ended by a stop string: what was under way still comes
            return
        choice, queue = found
        if event.get("error") is not None:
            del self._choices[key]
            queue.put_nowait(EngineError(event["error"]))
            return
        # Here, not where it is awaited: however slowly a client reads, the engine hears of a stop string at once.
        try:
            delta = choice.take(event)
        except Exception as mistake:  # of the tokenizer's: it ends this request, and no other
            queue.put_nowait(mistake)
            return
        if delta.finish_reason is not None:
            del self._choices[key]
            if event.get("reason") is None:
                self._send({"op": "stopped", "key": key, "string": delta.stop_reason})
        queue.put_nowait((choice, delta))

    def _on_prompts(self, numbers: array, *, key: int, lengths: list[int], choices: int) -> None:
        """choices: how many share each prompt."""
        for length in lengths:
            for each in range(key, key + choices):
                if each in self._choices:
                    self._choices[each][0].completion.prompt_token_ids = numbers[:length].tolist()
            numbers, key = numbers[length:], key + choices

    def _on_refused(self, _: array, *, key: int, choices: int, kind: str, message: str) -> None:
        found = [self._choices.pop(each, None) for each in range(key, key + choices)]
        queue = next((entry[1] for entry in found if entry is not None), None)
        if queue is not None:
            queue.put_nowait(REFUSALS[kind](message))

    def _on_reply(self, _: array, *, id: int, value: Any = None, error: dict | None = None) -> None:
        reply = self._replies.get(id)
        if reply is None or reply.done():
            return
        if error is None:
            reply.set_result(value)
        else:
            reply.set_exception(REFUSALS[error["kind"]](error["message"]))

    def _on_stop(self, _: array, *, grace: float) -> None:
        self._stop(grace)


def _joined(prompts: Sequence[list[int]]) -> array:
    """All ids, one prompt after the other."""
    ids = array(NUMBER)
    for each in prompts:
        ids.extend(each)
    return ids


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is stopping, and gave this request up: send it again")
