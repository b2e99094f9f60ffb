"""An HTTP worker: a process that accepts connections, parses requests, and tokenizes prompts.  Lesson 99.

A worker never imports torch. The engine's process starts it and writes one line of JSON to its standard input. The line
names two sockets to inherit: the listener that all workers share, and the worker's own connection to the engine. When
that connection closes, the worker exits.
"""

import asyncio
import base64
import json
import logging
import socket
import sys

from .limits import FLUSH, SWITCH_INTERVAL
from .link import EngineError, RemoteEngine, pack
from .shares import Shares


def share(sock: socket.socket, pid: int) -> int | str:
    """Return what process `pid` needs to open this socket: an inherited file descriptor, or shared data on Windows."""
    if sys.platform == "win32":
        return base64.b64encode(sock.share(pid)).decode()
    return sock.fileno()


def _opened(given: int | str) -> socket.socket:
    if isinstance(given, int):
        return socket.socket(fileno=given)
    if sys.platform == "win32":
        return socket.fromshare(base64.b64decode(given))
    raise ValueError(f"cannot open socket {given!r}: only Windows shares sockets as data")


async def work(
    listener: socket.socket, link: socket.socket, most: int | None = None, shares: tuple[Shares, int] | None = None
) -> None:
    """Serve connections from `listener` until the engine says stop or is gone.

    most: limit on open connections; None for as many as the file descriptors allow. shares: connections of all
    workers, and this one's slot.
    """
    loop = asyncio.get_running_loop()
    stopping: asyncio.Queue[float] = asyncio.Queue()  # grace periods in seconds
    _, engine = await loop.create_connection(lambda: RemoteEngine(stopping.put_nowait), sock=link)
    await engine.connected

    import uvicorn

    from .app import create_app
    from .connections import Acceptor, Connection, most_connections

    class Server(uvicorn.Server):
        """Accepts connections itself, and answers requests that outlast the grace period with an error."""

        grace = engine.timeouts.shutdown_grace

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=[])

            def connect() -> Connection:
                uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": {}}
                return Connection(engine.timeouts, acceptor.freed, **uvicorns)

            acceptor = Acceptor(listener, connect, most_connections() if most is None else most, shares)
            self.servers.append(acceptor)  # type: ignore[arg-type]  # uvicorn only calls close and wait_closed
            engine.ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self._give_up_later()
            await super().shutdown()

        def stop(self, grace: float) -> None:
            """Begin the shutdown; a second call changes the grace period."""
            self.grace = grace
            if self.should_exit:
                self._give_up_later()
            self.should_exit = True

        def _give_up_later(self) -> None:
            loop.call_later(self.grace, engine.give_up)
            loop.call_later(self.grace + FLUSH, self._hang_up)

        def _hang_up(self) -> None:
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    config = uvicorn.Config(
        create_app(engine),
        http=Connection,
        ws="none",
        log_level=engine.log_level,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=engine.timeouts.keep_alive_timeout,  # type: ignore[arg-type]  # call_later takes floats
    )
    server = Server(config)

    async def stop() -> None:
        while True:
            server.stop(await stopping.get())

    stopper = asyncio.create_task(stop())
    try:
        await server.serve()
    finally:
        stopper.cancel()


def main() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL)
    logging.basicConfig(format="minillm: %(message)s")  # stderr is inherited from the server
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has just left
    given = json.loads(sys.stdin.readline())
    listener, link = _opened(given["listener"]), _opened(given["link"])
    channel = socket.socket(fileno=link.detach())
    shares = None
    if "shares" in given:
        file, count, slot = given["shares"]
        shares = Shares(file, count), slot
    try:
        asyncio.run(work(listener, channel.dup(), shares=shares))
    except EngineError:
        sys.exit(1)  # the engine's process is gone: there is no one to report to
    except Exception as error:
        channel.setblocking(True)
        channel.sendall(pack({"op": "failed", "why": f"{type(error).__name__}: {error}"}))
        raise


if __name__ == "__main__":
    main()
