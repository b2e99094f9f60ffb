"""A worker in the test's own process and loop, steps that wait for the test, and waiting for what must come to pass."""

import asyncio
import socket
import threading
from contextlib import asynccontextmanager, contextmanager

import minillm
from minillm.server.hub import Hub, Line
from minillm.server.limits import Timeouts
from minillm.server.worker import work

JSON = {"content-type": "application/json"}


@contextmanager
def gate():
    """Steps wait until the gate is set."""
    opened = threading.Event()

    def embedding(ids, weight, scale):
        opened.wait(60)
        return weight[ids] * scale

    with minillm.using(embedding=embedding):
        try:
            yield opened
        finally:
            opened.set()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def worker_here(engine, *, most: int | None = None, **timeouts: float):
    """A worker in this very loop, where its tasks and files can be counted; yields its port and its hub."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    port = listener.getsockname()[1]
    options = {"max_queued": 1024, "log_level": "warning", "timeouts": Timeouts(**timeouts)}
    hub = Hub(engine, "here", on_gone=lambda line: None, **options)
    line = Line(hub, ours)
    hub.connect(line)
    task = asyncio.create_task(work(listener, theirs, most))
    await asyncio.wrap_future(line.ready)
    yield port, hub
    line.send({"op": "stop", "grace": hub.hello["timeouts"]["shutdown_grace"]})
    await task
    hub.close()
