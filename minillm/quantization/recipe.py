"""Recipes: the format of each weight of a model.  Lesson 05.

    Recipe({"layers.0.*": "dense", "layers.*": "int8", "head": "int8"})

A weight is addressed by its layer and projection: "layers.3.qkv", "layers.3.attention_out", "layers.3.gate_up",
"layers.3.down", "head", and "embedding" if the model's embedding is not tied to its head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from minillm.errors import ConfigError

from .dense import DenseWeight
from .int8 import Int8Weight
from .weight import Weight

FORMATS: dict[str, type[Weight]] = {"dense": DenseWeight, "int8": Int8Weight}


@dataclass(frozen=True)
class Recipe:
    """rules: patterns of addresses, with * and ? as in file names -> the name of a format. The first match decides.

    A weight that no pattern matches is dense. Raises ConfigError for an unknown format.
    """

    rules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, name in self.rules.items():
            if name not in FORMATS:
                raise ConfigError(f"{pattern!r} has the unknown format {name!r}; formats are: {', '.join(FORMATS)}")

    def format(self, address: str) -> type[Weight]:
        """The class of the weight at an address."""
        name = next((name for pattern, name in self.rules.items() if fnmatchcase(address, pattern)), "dense")
        return FORMATS[name]
