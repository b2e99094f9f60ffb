"""The application for Ray's own tools: `serve run minillm.deploy:application`, or a config file of `serve deploy`."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.server.config import ServerConfig

from .serving import ReplicatedModel, check, placement
from .settings import model_of

OWN = ("models", "router", "host", "replicas", "workers")


def build(arguments: Mapping[str, Any]) -> Any:
    """Return Ray's application.

    arguments: `models`, a list of the fields of `ReplicatedModel`, or text such as NAME=MODEL,MODEL; `replicas`, of
    those that do not say how many; `router`: see `find_policy`; `host`, the address at which Ray's proxy listens;
    `workers`: how many of Ray's processes take HTTP; and the options of the server (`ServerConfig`). Raises
    ConfigError, MissingPackage.
    """
    allowed = {field.name for field in fields(ServerConfig)} | set(OWN)
    if unknown := set(arguments) - allowed:
        raise ConfigError(f"unknown argument {', '.join(sorted(unknown))}: name some of {', '.join(sorted(allowed))}")
    given = arguments.get("models") or "tiny-gemma=" + str(Path(__file__).parents[1] / "data" / "tiny-gemma")
    if isinstance(given, str):
        pairs = (each.partition("=") for each in given.split(","))
        given = [{"name": name if equals else Path(name).name, "model": model or name} for name, equals, model in pairs]
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
