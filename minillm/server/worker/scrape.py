"""Count the responses that a worker sends, and answer /metrics.  Lesson 99.

Counts come from the owner of the workers (see `ledger`), also while there is no engine. Gauges come from the engine.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from ..access import CURRENT
from ..control import Control
from ..ledger import Families, summed
from ..limits import HEALTH
from ..wire import Gauges
from .gate import App, Message, Receive, Scope, Send
from .link import EngineError
from .served_engine import ServedEngine

REFUSED = "minillm.refused"  # in the scope of a request that its connection has refused, and counted, meanwhile


class Scrape:
    """The metrics of the whole server, as one of its workers gives them."""

    def __init__(self, engines: Sequence[ServedEngine], owner: Control):
        self._engines, self._owner = engines, owner
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Families]] = {}

    def answered(self, status: int) -> None:
        """Count a response."""
        self._owner.send({"op": "answered", "status": status})

    async def render(self) -> bytes:
        """Return all metrics, in Prometheus' text format."""
        gauges = await gauges_of(*self._engines)
        return text_of(await self._counted() + gauges)

    async def _counted(self) -> Families:
        """Return what the owner has counted. Raises EngineError if it does not answer."""
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._owner.send({"op": "count", "id": number})
            async with asyncio.timeout(HEALTH):
                return await reply
        except TimeoutError:
            raise EngineError("the server's own process does not answer: try again, or restart it") from None
        finally:
            del self._replies[number]

    def received(self, number: int, families: Families) -> None:
        """Take the owner's reply to a question."""
        reply = self._replies.get(number)
        if reply is not None and not reply.done():
            reply.set_result(families)


async def gauges_of(*engines: ServedEngine) -> Families:
    """Return all that may rise and fall, as far as the engines answer; of several, the sums."""
    gauges = await asyncio.gather(*map(_gauges, engines))
    up = ["minillm_engine_up", "gauge", "1 while the engine accepts requests, and 0 while it is gone or stuck"]
    alive = int(all(each["alive"] for each in gauges))
    return [[*up, [["minillm_engine_up", {}, alive]]], *summed(*(each["families"] for each in gauges))]


async def _gauges(engine: ServedEngine) -> dict[str, Any]:
    try:
        async with asyncio.timeout(HEALTH):  # an engine that is stuck in a step may not even answer
            return await engine.ask(Gauges())
    except (EngineError, TimeoutError):
        return {"alive": False, "families": []}


def text_of(families: Families) -> bytes:
    """Return metric families in Prometheus' text format."""
    return generate_latest(_Shown(families))


class _Shown:
    """Families as a collector for prometheus_client."""

    def __init__(self, families: Families):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, kind, text, samples in self._families:
            metric = Metric(name, text, kind)
            for sample in samples:
                metric.add_sample(*sample)
            yield metric


class Counted:
    """Wraps the outermost ASGI application: every request is counted once, by what it came to.

    That is the status that was sent. But a stream that ends with an error counts as this error; a client that has left
    before its answer began as 499; and an error that no other part has dealt with as 500.
    """

    def __init__(self, app: App, count: Callable[[int], object]):
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, counted = 499, False

        def count(status: int) -> None:
            nonlocal counted
            if not counted and REFUSED not in scope:
                self._count(status)
            counted = True

        def outcome() -> int:
            access = CURRENT.get()
            return status if access is None or access.failed is None else access.failed

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                count(outcome())  # before the client can know that its answer is complete
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            count(500)
            raise
        finally:
            count(outcome())
