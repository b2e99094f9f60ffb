"""A worker in the test's own process and event loop."""

import asyncio
import socket
from contextlib import asynccontextmanager

from minillm.server.hub import Hub, Line
from minillm.server.limits import Timeouts
from minillm.server.worker import work

JSON = {"content-type": "application/json"}


@asynccontextmanager
async def worker_here(engine, *, most: int | None = None, **timeouts: float):
    """Run a worker in this event loop, where its tasks and files can be counted; yields its port and hub."""
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
