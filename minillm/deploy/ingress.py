"""The same HTTP API as an application of Ray Serve's: its proxy takes the requests, and its replicas parse them.

    serve run minillm.deploy:application models=small=data/tiny-gemma replicas=2

Ray's proxy passes on every request and every piece of an answer, so it is slower than `minillm serve --replicas`.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError
from minillm.server.config import ServerConfig
from minillm.server.ledger import summed
from minillm.server.limits import HEALTH
from minillm.server.worker.scrape import gauges_of, text_of

from .handshake import Address
from .policies import find_policy
from .replicas import ReplicatedEngine
from .serving import ReplicatedModel, check, placement
from .settings import model_of

if TYPE_CHECKING:  # it imports Ray
    from fastapi import FastAPI

    from .ray_serve import DeploymentHandle

OWN = ("models", "router", "host", "replicas", "workers")


def build(arguments: Mapping[str, Any]) -> Any:
    """Return Ray's application.

    arguments: `models`, a list of the fields of `ReplicatedModel`, or NAME=MODEL,NAME=MODEL; `replicas`, of those that
    do not say how many; `router`: see `find_policy`; `host`, the address at which Ray's proxy listens; `workers`: how
    many of Ray's processes take HTTP; and the options of the server (`ServerConfig`). Raises ConfigError,
    MissingPackage.
    """
    allowed = {field.name for field in fields(ServerConfig)} | set(OWN)
    if unknown := set(arguments) - allowed:
        raise ConfigError(f"unknown argument {', '.join(sorted(unknown))}: name some of {', '.join(sorted(allowed))}")
    given = arguments.get("models") or "tiny-gemma=" + str(Path(__file__).parents[1] / "data" / "tiny-gemma")
    if isinstance(given, str):
        pairs = (each.partition("=") for each in given.split(","))
        given = [{"name": name, "model": model} for name, _, model in pairs]
    common = {"replicas": arguments["replicas"]} if "replicas" in arguments else {}
    models = [model_of(common | each) for each in given]
    config = ServerConfig(**{name: value for name, value in arguments.items() if name not in OWN})
    router = arguments.get("router", "prefix")
    check(models, config, router)
    from . import ray_serve

    placements = [placement(_absolute(each), config) for each in models]
    return ray_serve.with_ingress(
        placements, int(arguments.get("workers", 1)), router, arguments.get("host", "127.0.0.1"), config.shutdown_grace
    )


def _absolute(model: ReplicatedModel) -> ReplicatedModel:
    """Return a model whose directory is found from any other one, too."""
    if model.model is None or not Path(model.model).exists():
        return model
    return replace(model, model=str(Path(model.model).resolve()))


class Ingress:
    """The engines of all models in a process of Ray's that takes HTTP. host: the address of Ray's proxy."""

    def __init__(self, router: str, host: str, replicas: "list[DeploymentHandle]"):
        self._host, self._replicas = host, replicas
        self._engines = [self._engine(each, router) for each in replicas]

    def _engine(self, replicas: "DeploymentHandle", router: str) -> ReplicatedEngine:
        from . import ray_serve

        loop, engine = asyncio.get_running_loop(), list[ReplicatedEngine]()

        def listed(addresses: dict[str, Address]) -> None:
            loop.call_soon_threadsafe(lambda: engine[0].listed(addresses))

        engine.append(ReplicatedEngine(ray_serve.reserver(replicas, listed), find_policy(router)))
        return engine[0]

    async def app(self) -> "FastAPI":
        """Return the application, once a replica of each model is connected."""
        from minillm.server.worker.app import create_app

        await asyncio.gather(*(each.connected for each in self._engines))
        first, *more = self._engines
        return create_app(first, self._host, self._metrics, *more)

    async def _metrics(self) -> bytes:
        """Return what the replicas have counted, and their gauges."""
        from . import ray_serve

        ask = [ray_serve.Counts(each) for each in self._replicas]
        found = await asyncio.gather(*(asyncio.to_thread(each, HEALTH) for each in ask))
        counted = summed(*(families for each in found for families in each.values()))
        return text_of(counted + await gauges_of(*self._engines))

    def close(self) -> None:
        """Disconnect from all replicas."""
        for each in self._engines:
            each.close()
