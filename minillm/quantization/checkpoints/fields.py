"""Fields of quantization configurations, which have several names and are in several files.  Lesson 06."""

import re
from collections.abc import Mapping
from typing import Any

from minillm.errors import ConfigError
from minillm.values import as_int, shown


def gather(configs: Mapping[str, Mapping[str, Any]], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the value of each field that is given; null counts as absent.

    configs: where a configuration was read -> its fields. names: a field -> its names in the files. Raises ConfigError
    if a field has two values.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for file, config in configs.items():
        for field, aliases in names.items():
            for name in aliases:
                value = config.get(name)
                if value is None:
                    continue
                if field in values and _comparable(values[field]) != _comparable(value):
                    raise ConfigError(
                        f"{name} is {shown(value)} in {file}, but {origin[field]} has {shown(values[field])}: correct "
                        "the one that is wrong"
                    )
                values.setdefault(field, value)
                origin.setdefault(field, f"{name} in {file}")
    return values


def _comparable(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return set(value)
    return value.lower() if isinstance(value, str) else value


def flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{field} must be true or false, not {shown(value)}")
    return value


def group_size(config: Mapping[str, Any], lowest: int = 1) -> int:
    """Return the inputs of a group; lowest=-1 allows -1, all inputs."""
    value = config.get("group_size")
    size = as_int(value)
    if size is None or size < lowest or size == 0:
        raise ConfigError(
            f"group_size must be a whole number from 1{' or -1 for all inputs' if lowest < 0 else ''}, "
            f"not {shown(value)}"
        )
    return size


def names(config: Mapping[str, Any], field: str) -> list[str]:
    value = config.get(field, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{field} must be a list of names, not {shown(value)}")
    return value


def pattern(text: str, field: str, *prefixes: str) -> re.Pattern[str]:
    """Return a pattern after one of the prefixes."""
    prefix = next((each for each in prefixes if text.startswith(each)), "")
    try:
        return re.compile(text.removeprefix(prefix))
    except re.error as error:
        raise ConfigError(f"{field}: {shown(text)} is no pattern ({error})") from None


def check_groups(size: int, inputs: int, module: str) -> None:
    """Raise ConfigError unless groups of this size divide a module's inputs."""
    if size < 2 or size % 2 or inputs % size:
        raise ConfigError(
            f"group_size {size} does not divide the {inputs} inputs of {module} into groups of an even size: "
            "correct the configuration"
        )


def check_no_bias(module: str, bias: Any) -> None:
    """Raise ConfigError if a model without biases has one that is not 0; some tools write zeros."""
    if bias is not None and bias.any():
        raise ConfigError(
            f"{module}.bias is not 0, but config.json describes a model without this bias: set attention_bias or "
            "mlp_bias there to true if the model has it"
        )
