"""Clients of a completions server: they stream answers and note when each token comes.  Lesson 99.

The load generator's own work delays what it measures, so this module reads HTTP/1.1 itself, as its bytes arrive: tens
of thousands of events a second leave no time for a general library. It imports neither torch nor any package.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import MinillmError

from .workloads import BenchRequest

HEADERS_LIMIT = 65536  # bytes
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "was",
    "on",
    "are",
    "with",
    "as",
    "at",
    "be",
    "this",
    "have",
)


class BrokenAnswer(MinillmError):
    """An answer that is not HTTP, or that ended early."""


@dataclass
class RequestTimes:
    """One request as its client saw it; times are in seconds since the run began.

    due: when it should have been sent. Latencies count from there: a user also waits while the request is not yet
    sent.
    """

    due: float
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # of each event: (time, tokens that it brought)
    end: float = 0.0
    refused: bool = False
    error: str | None = None
    counted: str = "ids"  # how the server said how many tokens there are: by their ids, by usage, or only by events
    input_tokens: int | None = None  # of the prompt, if the server said so

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.due

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def gaps(self) -> Iterable[float]:
        """Yield seconds before each token except the first; tokens that arrived together have gaps of 0."""
        last, together = self.arrivals[0]
        yield from [0.0] * (together - 1)
        for when, tokens in self.arrivals[1:]:
            yield when - last
            yield from [0.0] * (tokens - 1)
            last = when


@dataclass(frozen=True)
class Target:
    """The server to measure. base: its URL without /v1; headers: more of them, for each request.

    extensions: ask for the exact length and for token ids, which OpenAI's own API does not know; usage: ask for the
    number of tokens at the answer's end; text: send words, not token ids; exact: an answer of another length is an
    error; sampling: more fields of each request's body.
    """

    base: str
    model: str
    temperature: float = 1.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extensions: bool = True
    usage: bool = False
    text: bool = False
    exact: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def message(self, request: BenchRequest) -> bytes:
        """Return the HTTP request that asks for a streamed completion."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": words(request.prompt) if self.text else request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            **self.sampling,
        }
        if self.extensions:
            body |= {"ignore_eos": True, "return_token_ids": True}
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        content = json.dumps(body).encode()
        parts = urlsplit(self.base)
        fields = {"Host": parts.netloc, "Content-Type": "application/json"}
        fields |= {"Content-Length": str(len(content)), "Accept": "text/event-stream", **self.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {parts.path}/v1/completions HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + content


def words(ids: Sequence[int]) -> str:
    """Return a text of about as many tokens, for servers that take no token ids: a common word for each."""
    return " ".join(WORDS[each % len(WORDS)] for each in ids)


class ClientConnection(asyncio.Protocol):
    """A connection that carries one request at a time, and others after it if the server keeps it open."""

    def __init__(self) -> None:
        self.reusable = self.used = False
        self._buffer = b""
        self._read: Callable[[], bool] | None = None  # takes what it can from the buffer; True at the answer's end
        self._answer: StreamedAnswer | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.reusable = True

    async def ask(self, message: bytes, answer: "StreamedAnswer") -> None:
        """Send a request and read its whole answer. Raises BrokenAnswer or OSError."""
        self._answer, self._buffer, self._read = answer, b"", self._head
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._read = self._answer = None
            self.used = True

    def close(self) -> None:
        self.reusable = False
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._read is None or self._answer is None:
            return self.close()  # bytes that answer no request
        self._answer.now = time.monotonic()
        self._buffer += data
        try:
            if self._read():
                self._finish(None)
        except BrokenAnswer as error:
            self.reusable = False
            self._finish(error)
        except ValueError as error:
            self.reusable = False
            self._finish(BrokenAnswer(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._read == self._until_close:
            return self._finish(None)
        self._finish(BrokenAnswer("the server closed the connection before the answer's end"))

    def _finish(self, error: BrokenAnswer | None) -> None:
        self._read = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None) if error is None else self._done.set_exception(error)

    def _head(self) -> bool:
        assert self._answer is not None
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEADERS_LIMIT:
                raise BrokenAnswer(f"its headers exceed {HEADERS_LIMIT} bytes")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        self._buffer = self._buffer[end + 4 :]
        version, status = first.split(maxsplit=2)[:2]
        if not version.startswith("HTTP/1."):
            raise BrokenAnswer(f"the answer is not HTTP: {first[:80]!r}")
        self._answer.status = int(status)
        if self._answer.status < 200:  # "100 Continue": the answer follows
            return self._head()
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if version == "HTTP/1.0" or "close" in fields.get("connection", "").lower():
            self.reusable = False
        if "chunked" in fields.get("transfer-encoding", "").lower():
            self._read = self._chunks
        elif "content-length" in fields:
            self._left = int(fields["content-length"])
            self._read = self._length
        else:
            self.reusable, self._read = False, self._until_close
        return self._read()

    def _chunks(self) -> bool:
        assert self._answer is not None
        buffer, at = self._buffer, 0
        try:
            while (end := buffer.find(b"\r\n", at)) >= 0:
                size = int(buffer[at:end].partition(b";")[0], 16)
                if size == 0:  # trailers may follow, then an empty line
                    return buffer.find(b"\r\n\r\n", end) >= 0
                after = end + 4 + size  # the chunk's own line ends, too
                if len(buffer) < after:
                    return False
                self._answer.take(buffer[end + 2 : after - 2])
                at = after
            return False
        finally:
            self._buffer = buffer[at:]

    def _length(self) -> bool:
        assert self._answer is not None
        piece, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        self._left -= len(piece)
        self._answer.take(piece)
        return self._left == 0

    def _until_close(self) -> bool:
        assert self._answer is not None
        piece, self._buffer = self._buffer, b""
        self._answer.take(piece)
        return False


class StreamedAnswer:
    """A streamed completion as it comes in: notes in `seen` when each of its events brings how many tokens.

    start: the run's first moment on the clock of `time.monotonic`.
    """

    def __init__(self, seen: RequestTimes, start: float) -> None:
        self.seen, self.start = seen, start
        self.status = 0  # 0 before the answer's first line
        self.now = 0.0
        self.complete = False
        self._rest = b""
        self._ids = False
        self._usage: dict[str, Any] | None = None

    def take(self, piece: bytes) -> None:
        """Read the next bytes of the answer's body."""
        self._rest += piece
        if self.status != 200:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                self.seen.error = self.seen.error or _message(chunk["error"])
                return
            tokens = sum(map(self._tokens, chunk["choices"]))
            self._usage = chunk.get("usage") or self._usage
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BrokenAnswer(f"an event is not a completion's chunk: {data[:200]!r}") from None
        if tokens:
            self.seen.arrivals.append((self.now - self.start, tokens))

    def _tokens(self, choice: Mapping[str, Any]) -> int:
        """Return the tokens that an event brought; where the server gives no ids, an event with text counts as one."""
        ids = choice.get("token_ids")
        if ids is not None:
            self._ids = True
            return len(ids)
        return 1 if not self._ids and choice.get("text") else 0

    def finish(self, wanted: int | None) -> None:
        """The answer is over: note what was wrong with it. wanted: the tokens it must have; None for any number."""
        seen = self.seen
        if self.status == 429:
            seen.refused = True
        elif self.status != 200:
            seen.error = f"status {self.status}: {self._rest.decode(errors='replace')}"
        elif not seen.error and not self.complete:
            seen.error = "the stream ended without [DONE]"
        if seen.error or seen.refused:
            return
        self._count()
        if wanted is not None and seen.output_tokens != wanted:
            seen.error = f"{seen.output_tokens} tokens came where the request has {wanted}"
        elif not seen.arrivals:
            seen.error = "the answer has no tokens"

    def _count(self) -> None:
        """Without ids, spread the number of tokens in the usage evenly over the events."""
        seen, usage = self.seen, self._usage or {}
        seen.input_tokens = usage.get("prompt_tokens")
        total = usage.get("completion_tokens")
        if self._ids:
            return
        seen.counted = "events" if total is None else "usage"
        if total is not None and seen.arrivals:
            each, more = divmod(total, len(seen.arrivals))
            spread = [(when, each + (index < more)) for index, (when, _) in enumerate(seen.arrivals)]
            seen.arrivals = [(when, tokens) for when, tokens in spread if tokens]


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class Client:
    """Sends requests over as many connections as they need, and notes when tokens arrive, from `start` on."""

    def __init__(self, target: Target, start: float | None = None) -> None:
        self.target = target
        self.start = time.monotonic() if start is None else start
        self._idle: list[ClientConnection] = []
        self._messages: dict[int, bytes] = {}

    def prepare(self, work: Iterable[BenchRequest]) -> None:
        """Write the requests' messages ahead of time. `work` has to outlive this client."""
        self._messages |= {id(request): self.target.message(request) for request in work}

    def now(self) -> float:
        return time.monotonic() - self.start

    async def ask(self, request: BenchRequest, due: float) -> RequestTimes:
        """Stream one completion. Its errors are recorded, not raised."""
        message = self._messages.get(id(request)) or self.target.message(request)
        seen = RequestTimes(due, sent=self.now())
        try:
            answer = await self._exchange(message, seen)
            answer.finish(request.output_tokens if self.target.exact else None)
        except (OSError, BrokenAnswer) as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.end = self.now()
        return seen

    async def _exchange(self, message: bytes, seen: RequestTimes) -> StreamedAnswer:
        while True:
            connection = await self._connection()
            answer = StreamedAnswer(seen, self.start)
            again = connection.used
            try:
                await connection.ask(message, answer)
            except BrokenAnswer:
                if again and not answer.status:
                    continue  # the server closed a connection that was idle: others, or a new one, remain
                raise
            if connection.reusable:
                self._idle.append(connection)
            return answer

    async def _connection(self) -> ClientConnection:
        while self._idle:
            if (idle := self._idle.pop()).reusable:
                return idle
        parts = urlsplit(self.target.base)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(ClientConnection, parts.hostname or "", port, ssl=secure))[1]

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def closed_loop(client: Client, work: Sequence[BenchRequest], concurrency: int) -> list[RequestTimes]:
    """`concurrency` clients take the requests in order; each sends its next one when its last is answered."""
    queue = iter(enumerate(work))
    measured: dict[int, RequestTimes] = {}

    async def one_client() -> None:
        for index, request in queue:
            measured[index] = await client.ask(request, client.now())

    await asyncio.gather(*(one_client() for _ in range(min(concurrency, len(work)))))
    return [measured[index] for index in range(len(work))]


async def open_loop(client: Client, work: Sequence[BenchRequest]) -> list[RequestTimes]:
    """Send every request when it is due, regardless of what still runs: a slow server gets a growing queue."""

    async def one_request(request: BenchRequest) -> RequestTimes:
        await asyncio.sleep(max(0.0, request.due - client.now()))
        return await client.ask(request, request.due)

    return await asyncio.gather(*map(one_request, work))
