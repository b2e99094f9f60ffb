"""Methods by short names, as tables and command lines write them.  Lessons 05 to 07.

"awq-g64", "int4-g128-zeros+int8", "w8a8-rotate", "pruned-s70"
"""

import re
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError

from .methods import METHODS, Method, MethodRecipe

# what a name may add to its method's -> the parameter that it sets
FLAGS: dict[str, tuple[str, Any]] = {
    "zeros": ("symmetric", False),
    "actorder": ("act_order", True),
    "tensor": ("scales", "tensor"),
    "static": ("static", True),
}
ROTATE = "rotate"  # what a name adds for a model that is rotated first


def named(name: str) -> MethodRecipe:
    """Return the recipe of a name, METHOD[-gGROUP][-sPERCENT][-FLAG...][-rotate][+HEAD], or of a recipe file,
    NAME.json.

    Raises ConfigError.
    """
    if name.endswith(".json"):
        return MethodRecipe.read(Path(name))
    layers, _, head = name.partition("+")
    method, *parts = layers.split("-")
    parameters: dict[str, Any] = {}
    for part in parts:
        if group := re.fullmatch(r"g(\d{1,9})", part):
            parameters["group_size"] = int(group[1])
        elif percent := re.fullmatch(r"s(\d{1,2})", part):
            parameters["sparsity"] = int(percent[1]) / 100
        elif part in FLAGS:
            parameters |= [FLAGS[part]]
        elif part != ROTATE:
            known = ", -".join((*FLAGS, ROTATE))
            raise ConfigError(f"{name}: unknown part -{part}; a method may have -g64, -s50 and -{known}")
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(f"{name} is neither a method nor a directory nor a recipe file (*.json); methods: {known}")
    try:
        return MethodRecipe.of(Method(method, **parameters), head or None, rotate=ROTATE in parts)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
