"""Accept connections while file descriptors are free, and close those whose client is too slow.  Lesson 99.

uvicorn closes a connection that stays idle after a response, but not one that sends its request too slowly. This module
adds the missing deadlines, except the one for a request body, which `BodyReader` enforces and answers with 408.
"""

import asyncio
import errno
import json
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from .. import limits
from ..config import ServerConfig
from ..shares import Shares
from .api_error import APIError
from .event_stream import DIRECT
from .http1 import Parser
from .scrape import REFUSED

log = logging.getLogger(__name__)
_ENDED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)  # errors of accept() on a closed listener


class Connection(H11Protocol):
    """HTTP/1.1 over one connection, with deadlines."""

    def __init__(
        self, deadlines: ServerConfig, on_lost: Callable[[], None], count: Callable[[int], object], **options: Any
    ):
        super().__init__(**options)
        self.conn = self._parser = Parser()
        self._deadlines, self._on_lost, self._count = deadlines, on_lost, count
        self._awaited: str | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None  # set while more is to be sent than the system takes
        self._half_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))  # TCP: always a stream transport
        if hasattr(transport, "max_size"):  # only asyncio's selector transport has this attribute
            transport.max_size = limits.READ
        self.transport.set_write_buffer_limits(high=0)  # pause as soon as the system takes no more
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self.cycle.scope["http_version"] == "1.1":
            self.cycle.scope["extensions"] = {DIRECT: {"write": DirectBody(self.cycle)}}

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, and end the connection. What already works on the request finds the client gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # or else an answer has begun
            self._refuse(self._parser.refusal)
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self._half_closed and self.cycle.response_complete:  # uvicorn may have begun with the next request
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio allows it
        """The client will send no more. Returns whether the connection stays, for the answer that it waits for.

        A client that has closed the whole connection looks the same, until the system refuses to send it anything. One
        whose answer has begun is taken to have left: until the next token there is nothing to send.
        """
        waits = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE) and not self.cycle.response_started
        if not waits or self.cycle.scope["http_version"] != "1.1":
            return False
        self._half_closed = True
        self._probe(limits.FIRST_PROBE)
        return True

    def _probe(self, seconds: float) -> None:
        """Find out whether the client is still there, by saying that its answer will come, until it comes."""
        if not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(seconds, self._probe, limits.PROBE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def _wait_for_reading(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._deadlines.write_timeout, self._check_reading, left)

    def _check_reading(self, left: int) -> None:
        """Disconnect a client that has read nothing of what was left."""
        if self.transport.get_write_buffer_size() < left:
            self._wait_for_reading()
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, error: Exception | None) -> None:
        self._expect(None, 0)
        self._stop_waiting()
        super().connection_lost(error)
        self._on_lost()

    def _watch(self) -> None:
        """Set a deadline for what the client must send next."""
        state = self.conn.their_state
        if self.transport.is_closing():
            self._expect(None, 0)
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._expect("headers", self._deadlines.header_timeout)
        elif state is h11.SEND_BODY and self.cycle.response_complete:
            # The response is complete. Discard the rest of the body, so that the client can go on to read the response.
            self._expect("the rest of the body", self._deadlines.body_timeout)
        else:
            self._expect(None, 0)

    def _expect(self, what: str | None, seconds: float) -> None:
        if what == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited = what
        self._deadline = None if what is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self._awaited == "headers" and self.conn.trailing_data[0] and not self.transport.is_closing():
            seconds = f"{self._deadlines.header_timeout:g} s"
            self._refuse(APIError(f"the headers did not arrive within {seconds}", status=408, code="request_timeout"))
        self.transport.close()

    def _refuse(self, error: APIError) -> None:
        """Send an error response to an incomplete request, and count it."""
        self._count(error.status)
        if self.cycle is not None:
            self.cycle.scope[REFUSED] = True  # type: ignore[literal-required]  # as an extension, but of one request
        body = json.dumps(error.body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        answer = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        content = b"" if self._parser.method == b"HEAD" else body
        for event in (answer, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))


class DirectBody:
    """Writes pieces of a response's body as HTTP/1.1 chunks, past ASGI and h11, which take longer than the system call.

    Only for a response that has started without a Content-Length, and neither for its last piece nor an empty one. A
    chunk changes nothing in h11's state, so that the rest of the response can go through ASGI's `send`.
    """

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    async def __call__(self, data: bytes) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Acceptor:
    """Accepts connections. uvicorn keeps it in its list of servers and closes it at shutdown.

    When file descriptors run out, asyncio's own server keeps retrying and logs a traceback each time. This one waits
    until a connection closes or a delay has passed, and logs that once.

    make: creates the protocol of a connection, which must call `freed` when the connection is lost. most: limit on open
    connections; None for no limit but the operating system's. shares: the connections of all workers, and this one's
    slot; it lets others accept first while it has more.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        most: int | None,
        shares: tuple[Shares, int] | None = None,
    ):
        listener.setblocking(False)
        self._shares = shares
        self._listener, self._make, self._most = listener, make, most
        self._open = 0
        self._count(0)
        self._freed = asyncio.Event()
        self._waiting = False  # whether new connections must wait; logged once
        self._task = asyncio.create_task(self._accept())

    def freed(self) -> None:
        """Call this when a connection has closed."""
        self._count(-1)
        self._freed.set()

    def close(self) -> None:
        self._task.cancel()
        self._listener.close()
        if self._shares is not None:
            shares, slot = self._shares
            shares.leave(slot)

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._most is not None and self._open >= self._most:
                await self._wait(f"all {self._most} connections are in use", None)
            try:
                accepted = await self._next(loop)
            except OSError as error:
                if error.errno in _ENDED:
                    return
                await self._wait(f"cannot accept connections ({error})", limits.ACCEPT_RETRY)
                continue
            self._count(1)
            self._waiting = False
            await loop.connect_accepted_socket(self._make, accepted)

    def _count(self, change: int) -> None:
        self._open += change
        if self._shares is not None and self._listener.fileno() >= 0:  # it accepts
            shares, slot = self._shares
            shares.set(slot, self._open)

    async def _next(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        """Return the next connection. Raises OSError."""
        while self._shares is not None:
            await _readable(loop, self._listener)
            shares, slot = self._shares
            for _ in range(limits.HEAD_START):
                if not shares.ahead(slot):
                    break
                await asyncio.sleep(0.001)
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:  # another worker took it
                continue
            accepted.setblocking(False)
            return accepted
        return (await loop.sock_accept(self._listener))[0]

    async def _wait(self, why: str, seconds: float | None) -> None:
        """Wait until a connection closes, or for `seconds` if given."""
        if not self._waiting:
            log.warning("%s; new connections must wait", why)
        self._waiting = True
        self._freed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._freed.wait()
        except TimeoutError:
            pass


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Wait until there is something to accept or an error to raise."""
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def most_connections() -> int | None:
    """Return how many connections the limit on file descriptors allows; None if the process has no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if files == resource.RLIM_INFINITY else max(1, files - limits.RESERVED_FILES)
