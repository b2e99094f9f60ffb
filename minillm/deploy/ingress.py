"""The HTTP API in a process that Ray Serve's proxy sends requests to, instead of a worker's.

Ray's proxy passes on every request and every piece of an answer, so it is slower than `minillm serve --replicas`.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from minillm.server.ledger import Families, summed
from minillm.server.limits import HEALTH
from minillm.server.worker.scrape import gauges_of, text_of

from .handshake import Address
from .places import Reserve
from .policies import find_policy
from .replicas import Listed, ReplicatedEngine

if TYPE_CHECKING:
    from fastapi import FastAPI


class Ingress:
    """The engines of all models in a process of Ray's that takes HTTP.

    host: the address of Ray's proxy. replicas: what reaches those of each model. reserver, counts: `ray_serve`'s, which
    take that.
    """

    def __init__(
        self,
        router: str,
        host: str,
        replicas: Sequence[Any],
        reserver: Callable[[Any, Listed], Reserve],
        counts: Callable[[Any], Callable[[float], dict[str, Families]]],
    ):
        self._host, self._counts = host, [counts(each) for each in replicas]
        self._engines = [self._engine(partial(reserver, each), router) for each in replicas]

    def _engine(self, reserver: Callable[[Listed], Reserve], router: str) -> ReplicatedEngine:
        loop, engine = asyncio.get_running_loop(), list[ReplicatedEngine]()

        def listed(addresses: dict[str, Address]) -> None:
            loop.call_soon_threadsafe(lambda: engine[0].listed(addresses))

        engine.append(ReplicatedEngine(reserver(listed), find_policy(router)))
        return engine[0]

    async def app(self) -> "FastAPI":
        """Return the application, once a replica of each model is connected."""
        from minillm.server.worker.app import create_app

        await asyncio.gather(*(each.connected for each in self._engines))
        first, *more = self._engines
        return create_app(first, self._host, self._metrics, *more)

    async def _metrics(self) -> bytes:
        """Return what the replicas have counted, and their gauges."""
        found = await asyncio.gather(*(asyncio.to_thread(each, HEALTH) for each in self._counts))
        counted = summed(*(families for each in found for families in each.values()))
        return text_of(counted + await gauges_of(*self._engines))

    def close(self) -> None:
        """Disconnect from all replicas."""
        for each in self._engines:
            each.close()
