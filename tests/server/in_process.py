"""A worker in the test's own process and event loop."""

import asyncio
import socket
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext

import pytest

from minillm import garbage
from minillm.server.config import ServerConfig
from minillm.server.control import Control
from minillm.server.engine_side.hub import Hub
from minillm.server.ledger import Ledger
from minillm.server.worker.worker import work

JSON = {"content-type": "application/json"}


@asynccontextmanager
async def worker_here(engine, *, most: int | None = None, frozen=nullcontext, **options):
    """Run a worker in this event loop, where its tasks and files can be counted; yields its port and hub.

    frozen: in place of `garbage.frozen`, whose collection takes a second where all tests have been collected.
    """
    ours, theirs = socket.socketpair()
    owner, owned = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    port = listener.getsockname()[1]
    hub = Hub(engine, "here", ServerConfig(log_level="warning", **options))
    hub.connect(ours)
    control, ready, ledger = Control(owner), Future[None](), Ledger()
    ledger.engine = hub.counted

    def hear(message: dict) -> None:
        match message["op"]:
            case "ready":
                ready.set_result(None)
            case "answered":
                ledger.answered(message["status"])
            case "count":
                control.send({"op": "counted", "id": message["id"], "families": ledger.families()})

    control.listen(hear, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "frozen", frozen)
        task = asyncio.create_task(work(listener, Control(owned), most))
        with theirs:
            control.send({"op": "engine", "seconds": 0.0}, theirs)
        await asyncio.wrap_future(ready)
    yield port, hub
    control.send({"op": "stop", "grace": hub.config.shutdown_grace})
    await task
    hub.close()
    control.close()
