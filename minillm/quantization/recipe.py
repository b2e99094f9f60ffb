"""Recipes: the format of each weight of a model.  Lesson 05.

    Recipe({"layers.0.*": "dense", "layers.*": "int8", "head": "int8"})
    Recipe({"layers.*": {"format": "int4", "group_size": 64, "symmetric": False}})

A weight is addressed by its layer and projection: "layers.3.qkv", "layers.3.attention_out", "layers.3.gate_up",
"layers.3.down", "head", and "embedding" if the model's embedding is not tied to its head.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, cast

from minillm.errors import ConfigError
from minillm.values import shown

from .activations import LARGEST, Activations
from .dense import Dense
from .fp4 import Mxfp4, Nvfp4
from .fp8 import Fp8
from .int4 import Int4, fitting_group_size
from .int8 import Int8
from .sparse import Pruned, Sparse24
from .weight import Format

FORMATS: dict[str, type[Format]] = {
    kind.name: kind for kind in (Dense, Int8, Int4, Fp8, Nvfp4, Mxfp4, Sparse24, Pruned)
}

ACTIVATIONS = {
    f"{kind}-static" if static else kind: Activations(kind, static) for kind in LARGEST for static in (False, True)
}

# What rounding to the nearest gives, by the method's name.
UNCALIBRATED: dict[str, Format] = {
    "int8": Int8(),
    "int4": Int4(),
    "fp8": Fp8(activations=Activations("fp8")),
    "w8a8": Int8(Activations("int8")),
    "w4a8": Int4(activations=Activations("fp8")),
    "nvfp4": Nvfp4(),
    "mxfp4": Mxfp4(),
    "sparse24": Sparse24(),
    "pruned": Pruned(),
}


@dataclass(frozen=True)
class Recipe:
    """rules: patterns of addresses, with * and ? as in file names -> a format. The first match decides.

    A format is an object (`Int4(group_size=64)`), its name, or a dictionary of its name and parameters. A weight that
    no pattern matches is dense. Raises ConfigError for an unknown format.
    """

    rules: Mapping[str, Format | str | Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not all(isinstance(pattern, str) for pattern in self.rules):
            raise ConfigError(f"a recipe must map patterns of addresses to formats, not be {shown(self.rules)}")
        formats = {pattern: _format(pattern, rule) for pattern, rule in self.rules.items()}
        object.__setattr__(self, "rules", formats)

    @classmethod
    def uncalibrated(cls, layers: str | None, head: str | None, inputs: Iterable[int]) -> "Recipe | None":
        """Return one format for all layers, and one for the head, by their names. None if neither is given.

        inputs: how many the layers' matrices have; groups of weights are as large as fits all of them.
        """
        chosen = {"layers.*": layers, "head": head}
        rules = {pattern: UNCALIBRATED[name] for pattern, name in chosen.items() if name is not None}
        if isinstance(int4 := rules.get("layers.*"), Int4):
            rules["layers.*"] = replace(int4, group_size=fitting_group_size(inputs))
        return cls(rules) if rules else None

    def format(self, address: str) -> Format:
        """Return the format of the weight at an address."""
        format = next((each for pattern, each in self.rules.items() if fnmatchcase(address, pattern)), Dense())
        assert not isinstance(format, (str, Mapping))  # since they were converted
        return format


def weight_only(format: Format) -> Format:
    """Return the same format with the inputs of products in full precision."""
    return format if format.activations is None else replace(cast(Any, format), activations=None)


def _format(pattern: str, rule: Format | str | Mapping[str, Any]) -> Format:
    if not isinstance(rule, (str, Mapping)):
        if isinstance(rule, type) or not callable(getattr(rule, "empty", None)):
            raise ConfigError(
                f"{pattern!r} must have a format, its name, or a dictionary of its name and parameters, "
                f"not {shown(rule)}"
            )
        return rule
    values: dict[str, Any] = {"format": rule} if isinstance(rule, str) else dict(rule)
    name = values.pop("format", None)
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigError(f"{pattern!r} has the unknown format {shown(name)}; formats are: {', '.join(FORMATS)}")
    kind: Any = FORMATS[name]
    known = [each.name for each in fields(kind) if each.compare]  # the rest is not for users
    if unknown := sorted(map(str, values.keys() - set(known))):
        raise ConfigError(f"{pattern!r}: {name} has no {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")
    if values.get("activations") is not None:
        values["activations"] = _activations(pattern, values["activations"])
    return kind(**values)


def _activations(pattern: str, name: Any) -> Activations:
    """Return an object, or its name: "int8", "fp8" or "fp8-static"."""
    if isinstance(name, Activations):
        return name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"{pattern!r} has activations {shown(name)}; they can be: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
