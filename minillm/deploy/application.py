"""The application for Ray's own tools: `serve run minillm.deploy:application`, or a config file of `serve deploy`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.server.config import ServerConfig

from .serving import check, placement
from .settings import model_of

COMMON = ("replicas", "cpus", "gpus")  # of the models that have none of their own
OWN = ("models", "router", "host", "workers", *COMMON)


def build(arguments: Mapping[str, Any]) -> Any:
    """Return Ray's application.

    arguments: `models`, a list of the fields of `ReplicatedModel`, or text such as NAME=MODEL,MODEL; `replicas`,
    `cpus` and `gpus`, of those that have none of their own; `router`: see `find_policy`; `host`, the address at which
    Ray's proxy listens; `workers`: how many of Ray's processes take HTTP; and the options of the server
    (`ServerConfig`). Raises ConfigError, MissingPackage.
    """
    allowed = {field.name for field in fields(ServerConfig)} | set(OWN)
    if unknown := set(arguments) - allowed:
        raise ConfigError(f"unknown argument {', '.join(sorted(unknown))}: name some of {', '.join(sorted(allowed))}")
    listed = arguments.get("models") or "tiny-gemma=" + str(Path(__file__).parents[1] / "data" / "tiny-gemma")
    if isinstance(listed, str):
        pairs = (each.partition("=") for each in listed.split(","))
        listed = [
            {"name": name if equals else Path(name).name, "model": model or name} for name, equals, model in pairs
        ]
    common = {name: arguments[name] for name in COMMON if name in arguments}
    models = [model_of(common | each) for each in listed]
    config = ServerConfig(**{name: value for name, value in arguments.items() if name not in OWN})
    router = arguments.get("router", "prefix")
    check(models, config, router)
    from . import ray_serve

    placements = [placement(each, config) for each in models]
    return ray_serve.with_ingress(
        placements, int(arguments.get("workers", 1)), router, arguments.get("host", "127.0.0.1"), config
    )
