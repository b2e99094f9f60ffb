"""A worker's connections: accepted while there are file descriptors, and closed when a client keeps silent.  Lesson 99.

uvicorn closes a connection that is idle after an answer, and none that is slow with a request. A body's own deadline is
`BodyReader`'s, which has an answer for it.
"""

import asyncio
import errno
import json
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from . import limits
from .limits import Timeouts
from .protocol import APIError

log = logging.getLogger(__name__)
_ENDED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)  # of a listener that was closed


class Connection(H11Protocol):
    """HTTP/1.1 over one connection, with deadlines."""

    def __init__(self, timeouts: Timeouts, on_lost: Callable[[], None], **uvicorns: Any):
        super().__init__(**uvicorns)
        self._timeouts, self._on_lost = timeouts, on_lost
        self._awaited: str | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))  # of a stream, as a TCP connection is one
        if hasattr(transport, "max_size"):  # asyncio's own, where the loop waits for sockets to be readable
            transport.max_size = limits.READ
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._expect(None, 0)
        super().connection_lost(error)
        self._on_lost()

    def _watch(self) -> None:
        """See what the client has to send next, and give it a deadline."""
        theirs = self.conn.their_state
        if theirs is h11.IDLE and self.timeout_keep_alive_task is None:
            self._expect("headers", self._timeouts.header_timeout)
        elif theirs is h11.SEND_BODY and self.cycle.response_complete:
            # Read, so that the client gets to the answer, and thrown away.
            self._expect("a body that is answered", self._timeouts.body_timeout)
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
            seconds = f"{self._timeouts.header_timeout:g} s"
            self._refuse(APIError(f"the headers did not come within {seconds}", status=408, code="request_timeout"))
        self.transport.close()

    def _refuse(self, error: APIError) -> None:
        """Answer what is no whole request."""
        body = json.dumps(error.body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        answer = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))


class Acceptor:
    """Accepts connections. Stands among uvicorn's servers, which it closes when it shuts down.

    asyncio's own goes on trying when there is no file descriptor left, and writes a traceback for each try. This one
    waits until a connection ends, and says so once.

    make: a protocol for each connection, which calls `freed` when it is lost. most: connections at once; None: as many
    as the machine lets have.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.Protocol], most: int | None):
        listener.setblocking(False)
        self._listener, self._make, self._most = listener, make, most
        self._open = 0
        self._freed = asyncio.Event()
        self._waiting = False  # and has said so
        self._task = asyncio.create_task(self._accept())

    def freed(self) -> None:
        """A connection is closed."""
        self._open -= 1
        self._freed.set()

    def close(self) -> None:
        self._task.cancel()
        self._listener.close()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._most is not None and self._open >= self._most:
                await self._wait(f"all {self._most} connections are taken", None)
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _ENDED:
                    return
                await self._wait(f"no connection can be accepted ({error})", limits.ACCEPT_RETRY)
                continue
            self._open += 1
            self._waiting = False
            await loop.connect_accepted_socket(self._make, accepted)

    async def _wait(self, why: str, seconds: float | None) -> None:
        """Until a connection ends, or for some seconds."""
        if not self._waiting:
            log.warning("%s; others wait until one ends", why)
        self._waiting = True
        self._freed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._freed.wait()
        except TimeoutError:
            pass


def most_connections() -> int | None:
    """Connections for which the process may have file descriptors; None where that has no limit of its own."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if files == resource.RLIM_INFINITY else max(1, files - limits.RESERVED_FILES)
