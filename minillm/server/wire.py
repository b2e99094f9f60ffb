"""The messages between the engine's process and its HTTP workers, and their form on the local socket.  Lesson 99.

Each message is a dataclass; a receiver is a `match` over them: `Line.receive` in the engine's process, and
`EngineClient.receive` in a worker. On the socket, a message is a list in JSON, which has the class's name and then the
fields in their order, and an array of integers (mostly token ids) for the field `numbers`. Unlike a pickle, it cannot
execute code. Both processes run the same version, so the list needs no names of fields.

Stop strings are found in two places: in the worker, which turns tokens into text and reports `Stopped`, so that the
engine's process need not decode text; and in the engine, for requests without a worker, and where only the engine's
process has the tokenizer.
"""

import base64
import json
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from pydantic_core import PydanticSerializationError, from_json, to_json

from minillm.errors import MinillmError
from minillm.prompts import EmbeddedPrompt
from minillm.prompts.embeddings import precision
from minillm.values import shown

from .config import ServerConfig

MAGIC = b"mini"
HEADER = struct.Struct("<4sII")  # MAGIC; bytes of JSON; bytes of numbers that follow it
NUMBER = "q"
Answer = TypeVar("Answer")


class MalformedMessage(MinillmError):
    """Bytes on the socket are no message, or none for this end; the connection cannot be used any further."""


# ---- parts of messages


class PromptForm(NamedTuple):
    """A prompt of a `Submit`. Its text is sent too, as the engine's process may tokenize differently."""

    length: int | None  # of its ids among the numbers; None: only the engine's process can tokenize
    text: str | None = None
    special: bool = True  # whether the tokenizer adds its special tokens
    values: str = ""  # base64 of its embeddings [n, hidden], in `prompts.embeddings.precision` of the model's dtype

    def embedded(self, ids: np.ndarray, hidden_size: int, dtype: str) -> np.ndarray | EmbeddedPrompt:
        """Return its ids [tokens], or those with its embeddings, if it has any."""
        if not self.values:
            return ids
        values = np.frombuffer(base64.b64decode(self.values), precision(dtype))
        return EmbeddedPrompt(ids.astype(np.int32), values.reshape(-1, hidden_size))


class Failure(NamedTuple):
    """An error that is sent. kind: a key of `link.ERRORS`. retry_after: seconds until another try may succeed."""

    kind: str
    message: str
    retry_after: int | None = None


class Event(NamedTuple):
    """A choice's progress, if that is anything but one token alone. The fields that most events have come first."""

    key: int
    ids: list[int]
    logprobs: list | None = None
    reason: str | None = None  # of a finished choice
    stop: int | str | None = None
    cached: int = 0  # tokens of the prompt found in the prefix cache
    text: str = ""  # this and offsets: only where workers cannot decode
    offsets: list[int] | None = None
    prompt_logprobs: list | None = None
    failure: Failure | None = None  # the error that ends the choice; with a reason, this choice alone


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Describes the engine to an HTTP worker."""

    name: str  # the model's name for clients
    encodes: bool  # whether text can be tokenized at all, in this process or the engine's
    max_model_len: int  # tokens in the context
    max_request_len: int  # most tokens in prompt and output together; more than max_model_len if requests stream past
    vocab_size: int
    dtype: str  # such as "bfloat16"
    max_num_seqs: int  # most choices in a batch
    capacity: int  # most choices that may run or wait in the server
    config: ServerConfig  # without the key
    api_key: str | None = None  # what `config.digest` returned for the server's key, if it has one
    hidden_size: int = 0  # numbers in an embedding
    block_size: int = 0  # tokens in a block of the cache
    prefix_blocks: int = 0  # blocks that the cache can hold of prefixes; 0 if it keeps none
    takes_adapters: bool = False  # whether requests may name adapters as their model
    adapters: dict[str, int] = field(default_factory=dict)  # of the start: the number of each load, 0 for soft prompts
    cache_dtype: str = ""  # of keys and values: a dtype, or int8 or fp8


# ---- from a worker


@dataclass(frozen=True, slots=True)
class Submit:
    """Run n choices of each prompt. Their keys are consecutive, prompt by prompt."""

    key: int  # of the first choice
    prompts: list[PromptForm]
    params: dict[str, Any]  # fields of `SamplingParams` that differ from their defaults
    options: dict[str, Any]  # fields of `RequestOptions`, likewise
    n: int
    stops: bool  # whether there are stop strings
    client: str | None  # known only if the number of its choices is limited
    numbers: array  # the ids of all prompts, joined


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort these choices."""

    keys: list[int]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The choice has reached this stop string and needs no more tokens."""

    key: int
    string: str


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """A question of a worker, which has an answer of this type."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer a question, with a `Reply` of the same id."""

    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class Alive(Question[bool]):
    """Ask whether the engine accepts requests."""


@dataclass(frozen=True, slots=True)
class Gauges(Question[dict[str, Any]]):
    """Ask whether the engine is alive, and for the metrics that may rise and fall."""


@dataclass(frozen=True, slots=True)
class State(Question[str]):
    """Ask what the engine holds, as JSON for the page."""


@dataclass(frozen=True, slots=True)
class Adapters(Question[list[str]]):
    """Ask for the names of the adapters that are loaded now."""


@dataclass(frozen=True, slots=True)
class LoadAdapter(Question[None]):
    """Load an adapter under a name. directory: within the server's folder of adapters."""

    name: str
    directory: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter(Question[None]):
    """Forget an adapter."""

    name: str


@dataclass(frozen=True, slots=True)
class RenderChat(Question[str]):
    """Ask for a conversation in the chat template. This and what follows: only where workers have no tokenizer."""

    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Encode(Question[list[int]]):
    """Ask for the token ids of a text."""

    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Decode(Question[str]):
    """Ask for the text of token ids."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class ShowTokens(Question[list]):
    """Ask what is shown of each token: the fields of its `TokenText`."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class Offsets(Question[list[int]]):
    """Ask where each token begins in an echoed prompt: see `TokenTexts.prompt_offsets`."""

    ids: list[int]
    prompt: str
    written: bool


# ---- from the engine


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message. tokenizer: the directory to load it from; None if there is none or it is an object."""

    facts: EngineFacts
    tokenizer: str | None


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of prompts that the engine's process encoded."""

    key: int  # of the first choice of the first prompt
    lengths: list[int]
    n: int  # choices of each prompt
    numbers: array  # the ids, joined


@dataclass(frozen=True, slots=True)
class Deltas:
    """The progress of choices in a step. A step sends all of its tokens for a worker in one message."""

    events: list[Event]
    numbers: array  # key and token of each choice that gained one token and nothing else


@dataclass(frozen=True, slots=True)
class Refused:
    """Refuse a submission: no choice of this submission runs."""

    key: int  # of the first choice
    choices: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to an `Ask`, or the error."""

    id: int
    value: Any
    failure: Failure | None = None


FromWorker = Submit | Abort | Stopped | Ask
FromEngine = Hello | Encoded | Deltas | Refused | Reply
Message = FromWorker | FromEngine


# ---- on the socket

_QUESTIONS: dict[str, type[Question]] = {
    each.__name__: each
    for each in (Alive, Gauges, State, Adapters, LoadAdapter, UnloadAdapter)
    + (RenderChat, Encode, Decode, ShowTokens, Offsets)
}
_NAMES = {
    kind: [each.name for each in fields(kind) if each.name != "numbers"]
    for kind in (Submit, Abort, Stopped, Ask, Hello, Encoded, Deltas, Refused, Reply, *_QUESTIONS.values())
}
_NONE = array(NUMBER)
_PLAIN = b'["Deltas",[]]'  # nearly all messages have this JSON, which is neither written nor read anew
_AFTER_LOGPROBS, _AFTER_STOP = Event(0, [])[3:], Event(0, [])[5:]  # the defaults of an event's last fields


def encode(message: Message) -> bytes:
    """Return a message as bytes for the socket."""
    if isinstance(message, Deltas):
        events = [_short(each) for each in message.events]
        head = _quick_json(["Deltas", events]) if events else _PLAIN
    else:
        head = _json(_listed(message))
    data = getattr(message, "numbers", _NONE).tobytes()
    return HEADER.pack(MAGIC, len(head), len(data)) + head + data


def _listed(part: Any) -> list | dict:
    """Return a dataclass within a message as JSON has it."""
    kind = type(part)
    if kind in _NAMES:
        return [kind.__name__, *[getattr(part, name) for name in _NAMES[kind]]]
    if kind is EngineFacts:
        return asdict(part)
    raise TypeError(f"a {kind.__name__} cannot be sent: {shown(part)}")


# UTF-8, not ASCII: escapes would make text in most scripts longer and slower to decode.
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_listed)


def _json(content: list | dict) -> bytes:
    return _encoder.encode(content).encode("utf-8", "surrogatepass")


def _quick_json(content: list) -> bytes:
    """`_json` of content without dataclasses, several times as fast: a step may have thousands of log-probabilities."""
    try:
        return to_json(content)
    except PydanticSerializationError:  # it refuses lone surrogates
        return _json(content)


def _from_json(head: bytes | bytearray) -> Any:
    try:
        return from_json(head)
    except ValueError:  # it refuses lone surrogates, too
        return json.loads(head)


def decode(head: bytes | bytearray, data: bytes) -> Message:
    """Return the message of these bytes, without the header. Raises MalformedMessage."""
    try:
        if head == _PLAIN:
            return Deltas([], array(NUMBER, data))
        return _read(_from_json(head), array(NUMBER, data))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise MalformedMessage(f"not a message: {shown(bytes(head[:200]))} ({error})") from error


def _read(values: Any, numbers: array) -> Message:
    match values:
        case ["Deltas", events]:
            return Deltas([_event(each) for each in events], numbers)
        case ["Submit", key, prompts, params, options, n, stops, client]:
            return Submit(key, [PromptForm(*each) for each in prompts], params, options, n, stops, client, numbers)
        case ["Abort", keys]:
            return Abort(keys)
        case ["Stopped", key, string]:
            return Stopped(key, string)
        case ["Ask", id, [question, *arguments]]:
            return Ask(id, _QUESTIONS[question](*arguments))
        case ["Hello", facts, tokenizer]:
            return Hello(EngineFacts(**facts | {"config": ServerConfig(**facts["config"])}), tokenizer)
        case ["Encoded", key, lengths, n]:
            return Encoded(key, lengths, n, numbers)
        case ["Refused", key, choices, [*failure]]:
            return Refused(key, choices, Failure(*failure))
        case ["Reply", id, value, failure]:
            return Reply(id, value, _failure(failure))
    raise ValueError("no message has this name and these fields")


def _short(event: Event) -> tuple:
    """Return an event as JSON has it: without its last fields, if they have their defaults."""
    if event[3:] == _AFTER_LOGPROBS:
        return event[:3]
    return event[:5] if event[5:] == _AFTER_STOP else event


def _event(values: list) -> Event:
    event = Event(*values)
    return event if event.failure is None else event._replace(failure=Failure(*event.failure))


def _failure(values: list | None) -> Failure | None:
    return None if values is None else Failure(*values)


def numbers_of(values: Iterable[int]) -> array:
    """Return integers for a message."""
    return array(NUMBER, values)


class MessageDecoder:
    """Turns incoming bytes into messages, each as soon as it is complete."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that these bytes complete. Raises MalformedMessage."""
        self._held += data
        while len(self._held) >= HEADER.size:
            magic, head, numbers = HEADER.unpack_from(self._held)
            if magic != MAGIC:  # or else this end might wait for gigabytes that never come
                raise MalformedMessage(f"no message begins with {shown(bytes(self._held[: HEADER.size]))}")
            start, end = HEADER.size + head, HEADER.size + head + numbers
            if len(self._held) < end:
                return
            message = decode(self._held[HEADER.size : start], bytes(self._held[start:end]))
            del self._held[:end]
            yield message
