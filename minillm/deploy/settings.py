"""Settings of single models: replicas, a share of a GPU, and options of its engine, from text or from a file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast

from minillm.config import EngineConfig, EngineOptions
from minillm.errors import ConfigError

from .serving import ReplicatedModel

NUMBERS: dict[str, type] = {
    "replicas": int, "max_replicas": int, "cpus": float, "gpus": float, "waiting_tokens": float
}  # fmt: skip


def model_of(values: Mapping[str, Any]) -> ReplicatedModel:
    """Return a model from the fields of `ReplicatedModel`; numbers may be text. Raises ConfigError."""
    names = [field.name for field in fields(ReplicatedModel)]
    if unknown := set(values) - set(names):
        raise ConfigError(f"a model has no {', '.join(sorted(unknown))}: name some of {', '.join(names)}")
    if not values.get("name"):
        raise ConfigError(f"a model needs a name, not {dict(values)}")
    converted = {name: _number(name, value) if name in NUMBERS else value for name, value in values.items()}
    converted["options"] = _checked(converted.get("options", {}))
    return ReplicatedModel(**{"model": None} | converted)


def models_of(
    models: Mapping[str, str | None], common: Mapping[str, Any], texts: Iterable[str] = ()
) -> list[ReplicatedModel]:
    """Return models by their names. common: fields of all. texts: of some; see `settings_of`. Raises ConfigError."""
    own = settings_of(texts)
    if unknown := set(own) - set(models):
        raise ConfigError(f"no model is called {', '.join(sorted(unknown))}: there are {', '.join(models)}")
    replicated = []
    for name, model in models.items():
        mine = own.get(name, {"options": {}})
        options = {**common["options"], **mine["options"]}
        replicated.append(model_of({**common, **mine, "name": name, "model": model, "options": options}))
    return replicated


def settings_of(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the fields of `ReplicatedModel` by model, from texts NAME:SETTING=VALUE,SETTING=VALUE.

    A setting is a field, or an option of the engine as on the command line. Raises ConfigError.
    """
    ours, engines = {field.name for field in fields(ReplicatedModel)} - {"name", "model", "options"}, _engine_options()
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, _ = text.partition("=")[0].rpartition(":")
        mine = settings.setdefault(name, {"options": {}})
        for setting in text.removeprefix(f"{name}:").split(","):
            key, equals, value = setting.partition("=")
            key = key.strip().removeprefix("--").replace("-", "_")
            if not (name and equals and value) or key not in ours | engines:
                raise ConfigError(
                    f"{text!r} is not NAME:SETTING=VALUE,...: a setting is {', '.join(sorted(ours))}, or an option of "
                    "the engine such as max_num_seqs"
                )
            if key in ours:
                mine[key] = _number(key, value) if key in NUMBERS else value
            else:
                mine["options"][key] = _value(value)
        _checked(mine["options"])
    return settings


def _engine_options() -> set[str]:
    return {field.name for field in fields(EngineConfig)}


def _checked(options: Mapping[str, Any]) -> EngineOptions:
    if unknown := set(options) - _engine_options():
        raise ConfigError(f"the engine has no option {', '.join(sorted(unknown))}")
    EngineConfig(**options)
    return cast(EngineOptions, dict(options))


def _number(name: str, value: Any) -> Any:
    if value is None or value == "None":
        return None
    try:
        return NUMBERS[name](value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a number, not {value!r}") from None


def _value(text: str) -> Any:
    """Return a number, true, false or null as JSON has it, and anything else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
