"""An HTTP worker: a process that accepts connections, parses requests, and tokenizes prompts.  Lesson 99.

A worker never imports torch. It inherits two sockets: the listener that all workers share, and its control socket, over
which its owner hands it connections to the engine (see `control`). It outlives the engine, and exits with its owner.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from .. import control, garbage, logs
from ..control import Control
from ..limits import BEAT, FLUSH, RELINK, SWITCH_INTERVAL
from ..shares import Shares
from .link import RemoteEngine


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
    stopping: asyncio.Queue[float] = asyncio.Queue()  # grace periods in seconds
    connecting: set[asyncio.Task] = set()

    def obey(message: dict) -> None:
        if message["op"] == "stop":
            stopping.put_nowait(message["grace"])
            return
        if message["op"] == "gone":
            engine.expect(message["seconds"])
            return
        if message["op"] == "counted":
            scrape.received(message["id"], message["families"])
            return
        task = loop.create_task(engine.connect(message["socket"], message["seconds"]))
        connecting.add(task)
        task.add_done_callback(connecting.discard)

    def on_loop(function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(function, *arguments)

    owner.listen(lambda message: on_loop(obey, message), lambda: on_loop(stopping.put_nowait, 0.0))
    stop_early = asyncio.ensure_future(stopping.get())
    first: list[asyncio.Future] = [engine.connected, stop_early]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if stop_early.done():
        return
    stop_early.cancel()
    engine.connected.result()
    log_as(engine.facts.config.log_format, engine.facts.config.log_level)

    import uvicorn

    from .app import create_app
    from .connections import Acceptor, Connection, most_connections
    from .scrape import Counted, Scrape

    scrape = Scrape(engine, owner)

    class Server(uvicorn.Server):
        """Accepts connections itself, and answers requests that outlast the grace period with an error."""

        grace = engine.facts.config.shutdown_grace

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=[])

            def connect() -> Connection:
                uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": {}}
                return Connection(engine.facts.config, acceptor.freed, scrape.answered, **uvicorns)

            acceptor = Acceptor(listener, connect, most_connections() if most is None else most, shares)
            self.servers.append(acceptor)  # type: ignore[arg-type]  # uvicorn only calls close and wait_closed
            owner.send({"op": "ready"})
            self._beat()

        def _beat(self) -> None:
            """Report from the event loop, again and again: a worker whose loop is stuck serves no client."""
            owner.send({"op": "beat"})
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
            loop.call_later(self.grace, engine.give_up)
            loop.call_later(self.grace + FLUSH, self._hang_up)

        def _hang_up(self) -> None:
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    config = uvicorn.Config(
        Counted(create_app(engine, listener.getsockname()[0], scrape.render), scrape.answered),
        http=Connection,
        ws="none",
        log_level=engine.facts.config.log_level,
        log_config=None,  # its own writes to stderr from the event loop, which waits if that is not read
        access_log=False,
        proxy_headers=False,  # or else any client of this machine could name its own address
        lifespan="off",
        timeout_keep_alive=engine.facts.config.keep_alive_timeout,  # type: ignore[arg-type]  # call_later takes floats
    )
    server = Server(config)

    async def stop() -> None:
        while True:
            server.stop(await stopping.get())

    stopper = asyncio.create_task(stop())
    try:
        with garbage.frozen():
            await server.serve()
    finally:
        stopper.cancel()


def main() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL)
    logs.set_up("text", "warning")  # stderr is inherited from the server
    given = control.given()
    owner, shares = given["control"], None
    if "shares" in given:
        file, count, slot = given["shares"]
        shares = Shares(file, count), slot
    try:
        asyncio.run(work(control.opened(given["listener"]), owner, shares=shares, log_as=logs.set_up))
    except Exception as error:
        owner.send({"op": "failed", "why": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
