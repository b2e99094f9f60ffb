"""An HTTP worker: a process that accepts, parses, tokenizes, and never imports torch.  Lesson 99.

The engine's process starts it with one line of JSON on its standard input, naming two sockets to inherit: the one that
all workers accept on, and its own to the engine. When that one closes, the worker ends: no engine, no worker.
"""

import asyncio
import base64
import json
import logging
import socket
import sys

from .limits import FLUSH, SWITCH_INTERVAL
from .link import EngineError, RemoteEngine, pack


def share(sock: socket.socket, pid: int) -> int | str:
    """What process `pid` needs to open this socket, which it inherits (on Windows: is given by name)."""
    if sys.platform == "win32":
        return base64.b64encode(sock.share(pid)).decode()
    return sock.fileno()


def _opened(given: int | str) -> socket.socket:
    if isinstance(given, int):
        return socket.socket(fileno=given)
    if sys.platform == "win32":
        return socket.fromshare(base64.b64decode(given))
    raise ValueError(f"a socket is named {given!r}, and only Windows has names for them")


async def work(listener: socket.socket, link: socket.socket, most: int | None = None) -> None:
    """Serve what comes to `listener` until the engine says stop or is gone.

    most: connections at once; None: those for which there are file descriptors.
    """
    loop = asyncio.get_running_loop()
    stopping: asyncio.Queue[float] = asyncio.Queue()  # seconds of grace
    _, engine = await loop.create_connection(lambda: RemoteEngine(stopping.put_nowait), sock=link)
    await engine.connected

    import uvicorn

    from .app import create_app
    from .connections import Acceptor, Connection, most_connections

    class Server(uvicorn.Server):
        """Accepts by itself, and ends what runs past the grace with an answer."""

        grace = engine.timeouts.shutdown_grace

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=[])

            def connect() -> Connection:
                uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": {}}
                return Connection(engine.timeouts, acceptor.freed, **uvicorns)

            acceptor = Acceptor(listener, connect, most_connections() if most is None else most)
            self.servers.append(acceptor)  # type: ignore[arg-type]  # uvicorn only closes its servers and waits
            engine.ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self._give_up_later()
            await super().shutdown()

        def stop(self, grace: float) -> None:
            """Once to begin, and again to change the grace."""
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
    logging.basicConfig(format="minillm: %(message)s")  # to stderr, which is the server's
    given = json.loads(sys.stdin.readline())
    listener, link = _opened(given["listener"]), _opened(given["link"])
    words = socket.socket(fileno=link.detach())
    try:
        asyncio.run(work(listener, words.dup()))
    except EngineError:
        sys.exit(1)  # the engine's process ended first: there is nothing to report to
    except Exception as error:
        words.setblocking(True)
        words.sendall(pack({"op": "failed", "why": f"{type(error).__name__}: {error}"}))
        raise


if __name__ == "__main__":
    main()
