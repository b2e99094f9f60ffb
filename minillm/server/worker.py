"""An HTTP worker: a process that accepts, parses, tokenizes, and never imports torch.  Lesson 99.

The engine's process starts it with one line of JSON on its standard input, naming two sockets to inherit: the one that
all workers accept on, and its own to the engine. When that one closes, the worker ends: no engine, no worker.
"""

import asyncio
import base64
import json
import socket
import sys

from .link import EngineError, RemoteEngine, pack

GRACE = 5  # seconds that requests in flight get to finish when the server stops


def share(sock: socket.socket, pid: int) -> int | str:
    """What process `pid` needs to open this socket, which it inherits (on Windows: is given by name)."""
    return base64.b64encode(sock.share(pid)).decode() if hasattr(sock, "share") else sock.fileno()


def _opened(given: int | str) -> socket.socket:
    return socket.socket(fileno=given) if isinstance(given, int) else socket.fromshare(base64.b64decode(given))


async def work(listener: socket.socket, link: socket.socket) -> None:
    """Serve what comes to `listener` until the engine says stop or is gone."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    _, engine = await loop.create_connection(lambda: RemoteEngine(stopping.set), sock=link)
    await engine.connected

    import uvicorn

    from .app import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            engine.ready()

    config = uvicorn.Config(
        create_app(engine),
        log_level=engine.log_level,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE,
    )
    server = Server(config)

    async def stop() -> None:
        await stopping.wait()
        server.should_exit = True

    stopper = asyncio.create_task(stop())
    try:
        await server.serve(sockets=[listener])
    finally:
        stopper.cancel()


def main() -> None:
    given = json.loads(sys.stdin.readline())
    listener, link = _opened(given["listener"]), _opened(given["link"])
    words = socket.socket(fileno=link.detach())
    try:
        asyncio.run(work(listener, words.dup()))
    except EngineError:
        sys.exit(1)  # the engine went away first, and has nobody to tell
    except Exception as error:
        words.setblocking(True)
        words.sendall(pack({"op": "failed", "why": f"{type(error).__name__}: {error}"}))
        raise


if __name__ == "__main__":
    main()
