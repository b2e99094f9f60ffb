"""The methods of `minillm quantize`: the format that each one gives, and its parameters.  Lessons 05 to 07."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.quantization import Activations, Dense, Format, Fp8, Int4, Int8, Mxfp4, Nvfp4, Pruned, Sparse24
from minillm.quantization.int4 import GROUP_SIZES, fitting_group_size
from minillm.values import read_json, shown

# name -> what it is
METHODS = {
    "int8": "8-bit weights, rounded to the nearest",
    "int4": "4-bit weights in groups, rounded to the nearest",
    "fp8": "8-bit floating-point weights and activations",
    "w8a8": "8-bit weights and activations, rounded to the nearest",
    "smoothquant": "8-bit weights and activations, outliers moved into the weights",
    "awq": "4-bit weights in groups, important channels scaled up",
    "gptq": "4-bit weights in groups, errors compensated",
    "w4a8": "as awq, with 8-bit floating-point activations",
    "nvfp4": "4-bit floating-point weights in blocks of 16, simulated",
    "mxfp4": "4-bit floating-point weights in blocks of 32, simulated",
    "sparse24": "two of four weights are 0, simulated",
    "pruned": "the smallest weights of each matrix are 0, simulated",
}
# name -> the parameters that it takes (see `Method`)
GROUPED = ("group_size", "symmetric")
PARAMETERS = {
    "dense": (),
    "int8": (),
    "int4": GROUPED,
    "fp8": ("scales", "static"),
    "w8a8": ("static",),
    "smoothquant": ("static",),
    "awq": GROUPED,
    "gptq": (*GROUPED, "act_order"),
    "w4a8": (*GROUPED, "static"),
    "nvfp4": (),
    "mxfp4": (),
    "sparse24": (),
    "pruned": ("sparsity",),
}
TYPES = {"group_size": int, "scales": str, "sparsity": float}  # of parameters; the others are True or False
CALIBRATED = ("smoothquant", "awq", "gptq", "w4a8")
HEADS = ("int8", "fp8")


@dataclass(frozen=True)
class Method:
    """A method with its parameters.

    group_size  inputs that share a scale (int4, awq, gptq, w4a8); None: the largest of 128, 64 and 32 that divides the
                inputs of all weights with this method, which `MethodRecipe.fitted` finds
    symmetric   whether groups have no zero points (the same)
    act_order   gptq: round the inputs with the largest activations first
    scales      fp8: "channel" or "tensor"
    static      fp8, w8a8, smoothquant, w4a8: one scale for all tokens' activations, from calibration
    sparsity    pruned: the share of weights that become 0
    """

    name: str
    group_size: int | None = None
    symmetric: bool = True
    act_order: bool = False
    scales: str = "channel"
    static: bool = False
    sparsity: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in PARAMETERS:
            raise ConfigError(f"unknown method {shown(self.name)}; methods are: {', '.join(METHODS)}")
        defaults = {each.name: each.default for each in fields(self) if each.name != "name"}
        self.check_takes([name for name, default in defaults.items() if getattr(self, name) != default])
        self.format()

    def check_takes(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a parameter that this method has no use for."""
        own = PARAMETERS[self.name]
        if unknown := [name for name in names if name not in own]:
            raise ConfigError(f"{self.name} takes no {', '.join(unknown)}; it takes: {', '.join(own) or 'nothing'}")

    def format(self) -> Format:
        """Return how it stores weights. Raises ConfigError for a parameter's wrong value."""
        name = self.name
        plain = {"dense": Dense(), "int8": Int8(), "nvfp4": Nvfp4(), "mxfp4": Mxfp4(), "sparse24": Sparse24()}
        if name in plain:
            return plain[name]
        if name == "pruned":
            return Pruned(self.sparsity)
        if name in ("w8a8", "smoothquant"):
            return Int8(Activations("int8", self.static))
        fp8 = Activations("fp8", self.static)
        if name == "fp8":
            return Fp8(self.scales, fp8)
        size = GROUP_SIZES[0] if self.group_size is None else self.group_size
        return Int4(size, self.symmetric, activations=fp8 if name == "w4a8" else None)

    @property
    def calibrated(self) -> bool:
        """Return whether it needs to see activations."""
        return self.name in CALIBRATED or self.static

    @property
    def searches_scales(self) -> bool:
        """Return whether it scales inputs, and folds that into the operation before."""
        return self.name in ("smoothquant", "awq", "w4a8")


@dataclass(frozen=True)
class MethodRecipe:
    """The method of each weight: the first pattern that matches its address decides, else it stays dense.

    rotate  whether the model is rotated first (see `rotation`)
    """

    rules: Mapping[str, Method]
    rotate: bool = False

    def at(self, address: str) -> Method:
        """Return the method of the weight at an address, such as "layers.3.qkv"."""
        return next((each for pattern, each in self.rules.items() if fnmatchcase(address, pattern)), Method("dense"))

    def fitted(self, inputs: Mapping[str, int]) -> "MethodRecipe":
        """With a group size for each method in groups that names none. inputs: of each weight, by address."""
        rules = dict(self.rules)
        for pattern, method in self.rules.items():
            if method.group_size is None and "group_size" in PARAMETERS[method.name]:
                own = [count for address, count in inputs.items() if self.at(address) is method]
                rules[pattern] = replace(method, group_size=fitting_group_size(own))
        return replace(self, rules=rules)

    @property
    def seeded(self) -> bool:
        """Return whether a seed changes the result: it chooses the calibration rows, and the signs of a rotation."""
        return self.rotate or any(method.calibrated for method in self.rules.values())

    @classmethod
    def of(cls, method: Method, head: str | None = None, *, rotate: bool = False) -> "MethodRecipe":
        """Return one method for all layers; head: "int8" or "fp8" for the output head (and the embedding, if they are
        tied).

        Raises ConfigError.
        """
        if head not in (None, *HEADS):
            raise ConfigError(f"head must be one of {', '.join(HEADS)}, not {shown(head)}")
        return cls({"layers.*": method} | ({} if head is None else {"head": Method(head)}), rotate)

    @classmethod
    def read(cls, file: Path) -> "MethodRecipe":
        """Return a recipe file: {pattern: method} or {pattern: {"method": ..., its parameters}}. Raises ConfigError."""
        rules = {}
        for pattern, rule in read_json(file, ConfigError).items():
            values: dict[str, Any] = {"method": rule} if isinstance(rule, str) else rule
            if not isinstance(values, dict) or not isinstance(values.get("method"), str):
                raise ConfigError(f"{file}: {pattern!r} must be a method's name, or an object with one")
            try:
                rules[pattern] = method_of(values)
            except ConfigError as error:
                raise ConfigError(f"{file}: {pattern!r}: {error}") from None
        return cls(rules)


def method_of(values: Mapping[str, Any]) -> Method:
    """Return the method that {"method": name, and parameters} describes. Raises ConfigError for a wrong or unused
    one.
    """
    method = Method(values["method"])
    more = {name: value for name, value in values.items() if name != "method"}
    method.check_takes(sorted(more))
    for name, value in more.items():
        kind = TYPES.get(name, bool)
        if type(value) is not kind:
            raise ConfigError(f"{name} must be {kind.__name__}, not {shown(value)}")
    return replace(method, **more)
