"""An HTTP worker: a process that accepts connections, parses requests, and tokenizes prompts.  Lesson 99.

A worker never imports torch. It inherits two sockets: the listener that all workers share, and its control socket, over
which its owner hands it connections to the engine (see `control`). It outlives the engine, and exits with its owner.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from minillm import garbage

from .. import control, logs
from ..config import ServerConfig
from ..control import Control
from ..limits import BEAT, FLUSH, RELINK, SWITCH_INTERVAL
from ..shares import Shares
from .link import EngineClient, RemoteEngine
from .tasks import Tasks

if TYPE_CHECKING:  # it imports what is slow to import, which waits until the engine is there
    from .scrape import Scrape


async def work(
    listener: socket.socket,
    owner: Control,
    most: int | None = None,
    shares: tuple[Shares, int] | None = None,
    log_as: Callable[[str, str], object] = lambda form, level: None,
) -> None:
    """Serve connections from `listener` until the owner says stop or is gone.

    most: limit on open connections; None for as many as the file descriptors allow. shares: connections of all
    workers, and this one's slot. log_as: called with the log's format and level once they are known.
    """
    loop = asyncio.get_running_loop()
    engine = RemoteEngine(lambda: loop.call_later(RELINK, lambda: engine.alive or owner.send({"op": "lost"})))
    connecting = Tasks()

    def obey(message: dict) -> None:
        if message["op"] == "gone":
            engine.expect(message["seconds"])
        elif message["op"] == "engine":
            connecting.start(engine.connect(message["socket"], message["seconds"]))

    await Front([engine], listener, owner, obey, most, shares).serve(engine.connected, log_as)


class Front:
    """The HTTP server of a worker, for engines that it can reach.

    obey: called on the event loop with the owner's messages that are about engines. most, shares: see `work`.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        listener: socket.socket,
        owner: Control,
        obey: Callable[[dict], object],
        most: int | None = None,
        shares: tuple[Shares, int] | None = None,
    ):
        self._engines, self._listener, self._owner, self._obey = engines, listener, owner, obey
        self._most, self._shares = most, shares
        self._scrape: Scrape | None = None  # once it serves
        self._loop = asyncio.get_running_loop()
        self._stopping: asyncio.Queue[float] = asyncio.Queue()  # grace periods in seconds

    def _heard(self, message: dict) -> None:
        match message["op"]:
            case "stop":
                self._stopping.put_nowait(message["grace"])
            case "counted" if self._scrape is not None:
                self._scrape.received(message["id"], message["families"])
            case _:
                self._obey(message)

    def _on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    async def serve(
        self, connected: Awaitable[None], log_as: Callable[[str, str], object] = lambda form, level: None
    ) -> None:
        """Serve once all engines are connected, until the owner says stop or is gone."""
        give_up = partial(self._on_loop, self._stopping.put_nowait, 0.0)
        self._owner.listen(partial(self._on_loop, self._heard), give_up)
        stop_early, ready = asyncio.ensure_future(self._stopping.get()), asyncio.ensure_future(connected)
        await asyncio.wait([ready, stop_early], return_when=asyncio.FIRST_COMPLETED)
        if stop_early.done():
            return
        stop_early.cancel()
        ready.result()
        facts = self._engines[0].facts
        log_as(facts.config.log_format, facts.config.log_level)
        await self._run(facts.config)

    async def _run(self, options: ServerConfig) -> None:
        import uvicorn

        from .app import create_app
        from .connections import Acceptor, Connection, most_connections
        from .scrape import Counted, Scrape

        self._scrape = scrape = Scrape(self._engines, self._owner)
        front, loop = self, self._loop

        class Server(uvicorn.Server):
            """Accepts connections itself, and answers requests that outlast the grace period with an error."""

            grace = options.shutdown_grace

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets=[])

                def connect() -> Connection:
                    uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": {}}
                    return Connection(options, acceptor.freed, scrape.answered, **uvicorns)

                most = most_connections() if front._most is None else front._most
                acceptor = Acceptor(front._listener, connect, most, front._shares)
                self.servers.append(acceptor)  # type: ignore[arg-type]  # uvicorn only calls close and wait_closed
                front._owner.send({"op": "ready"})
                self._beat()

            def _beat(self) -> None:
                """Report from the event loop, again and again: a worker whose loop is stuck serves no client."""
                front._owner.send({"op": "beat"})
                loop.call_later(BEAT, self._beat)

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
                for engine in front._engines:
                    loop.call_later(self.grace, engine.give_up)
                loop.call_later(self.grace + FLUSH, self._hang_up)

            def _hang_up(self) -> None:
                for connection in list(self.server_state.connections):
                    connection.transport.abort()

        first, *more = self._engines
        app = create_app(first, self._listener.getsockname()[0], scrape.render, *more)
        config = uvicorn.Config(
            Counted(app, scrape.answered),
            http=Connection,
            ws="none",
            log_level=options.log_level,
            log_config=None,  # its own writes to stderr from the event loop, which waits if that is not read
            access_log=False,
            proxy_headers=False,  # or else any client of this machine could name its own address
            lifespan="off",
            timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]  # call_later takes floats
        )
        server = Server(config)

        async def stop() -> None:
            while True:
                server.stop(await self._stopping.get())

        stopper = asyncio.create_task(stop())
        try:
            with garbage.frozen():
                await server.serve()
        finally:
            stopper.cancel()


def run(serve: Callable[[dict[str, Any], Control, tuple[Shares, int] | None], Coroutine[Any, Any, None]]) -> None:
    """Be a worker's process: `serve` with what it was given, the connection to its owner, and all workers' shares."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    logs.set_up("text", "warning")  # stderr is inherited from the server
    arguments = control.arguments()
    owner, shares = arguments["control"], None
    if "shares" in arguments:
        file, count, slot = arguments["shares"]
        shares = Shares(file, count), slot
    try:
        asyncio.run(serve(arguments, owner, shares))
    except Exception as error:
        owner.send({"op": "failed", "why": f"{type(error).__name__}: {error}"})
        raise


def main() -> None:
    run(lambda arguments, owner, shares: work(control.opened(arguments["listener"]), owner, None, shares, logs.set_up))


if __name__ == "__main__":
    main()
