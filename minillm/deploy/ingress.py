"""The HTTP API in a process that Ray Serve's proxy sends requests to, instead of a worker's.

Ray's proxy passes on every request and every piece of an answer, so it is slower than `minillm serve --replicas`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minillm.server.config import ServerConfig, digest
from minillm.server.ledger import Families, summed
from minillm.server.limits import HEALTH
from minillm.server.worker.scrape import gauges_of, text_of

from .handshake import Address
from .places import Reserve
from .policies import find_policy
from .replicas import Listed, ReplicatedEngine

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)


class Ingress:
    """The engines of all models in a process of Ray's that takes HTTP.

    host: the address of Ray's proxy. config: the server's; in an update, the replicas that are found first may still
    have the one before. replicas: what reaches those of each model. reserver, counts: `ray_serve`'s, which take that.
    """

    def __init__(
        self,
        router: str,
        host: str,
        config: ServerConfig,
        replicas: Sequence[Any],
        reserver: Callable[[Any, Listed], Reserve],
        counts: Callable[[Any], Callable[[float], dict[str, Families]]],
    ):
        self._host, self._config, self._counts = host, config, [counts(each) for each in replicas]
        self._counted = [dict[str, Families]() for _ in replicas]  # the latest counts of each model's replicas
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
        config, key = replace(self._config, api_key=None), digest(self._config.api_key)
        first.facts = replace(first.facts, config=config, api_key=key)
        return create_app(first, self._host, self._metrics, *more)

    async def _metrics(self) -> bytes:
        """Return what the replicas have counted, and their gauges."""
        await asyncio.gather(*(self._count(index) for index in range(len(self._counts))))
        counted = summed(*(families for each in self._counted for families in each.values()))
        return text_of(counted + await gauges_of(*self._engines))

    async def _count(self, index: int) -> None:
        try:
            self._counted[index] = await asyncio.to_thread(self._counts[index], HEALTH)
        except Exception as error:  # a replica has just ended, for example
            log.info("replicas did not say what they have counted: %s", error)

    def close(self) -> None:
        """Disconnect from all replicas."""
        for each in self._engines:
            each.close()
