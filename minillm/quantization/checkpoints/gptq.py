"""GPTQ's layout: that of AutoGPTQ, GPTQModel, Optimum and auto-round.  Lesson 06.

A module's tensors, for 4 bits (8 bits: 4 codes a number instead of 8):

    qweight  [in / 8, rows] int32       codes from 0 to 15; a number holds eight inputs of one row, the first lowest
    qzeros   [groups, rows / 8] int32   zero points; a number holds eight rows of one group
    scales   [groups, rows]
    g_idx    [in] int32                 the group of each input: with act-order (`desc_act`), not those of neighbors

`checkpoint_format` says what qzeros holds: "gptq" (version 1, also if the field is missing) the zero point minus one,
"gptq_v2" the zero point. Read the wrong way, each weight is off by its scale. Minus one was subtracted from whole
numbers, so a zero point of 0 borrows from its neighbor. Symmetric weights have zero point 8 (8 bits: 128), and their
files say themselves which version they are: some call version 2 "gptq", so only the values decide.

Fields: `bits`, `group_size` (-1: a whole row), `sym`, `desc_act`, `lm_head`, `modules_in_block_to_quantize`, and
`dynamic`, patterns of names with other values ("+:") or none ("-:"). They are in config.json, in quantize_config.json,
or in both.
https://github.com/AutoGPTQ/AutoGPTQ, nn_modules/qlinear; https://github.com/ModelCloud/GPTQModel, quantization
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization.dense import Dense
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.weight import Codes, Format
from minillm.values import shown

from .fields import check_groups, check_no_bias, flag, gather, group_size, names, pattern
from .layout import SCALES, Layout, Stored
from .packing import check_zero_points_are, group_of_each, in_group_order, unpack_numbers

METHOD, FILE = "gptq", "quantize_config.json"
FIELDS = {
    "bits": ("bits", "wbits"),
    "group_size": ("group_size",),
    "sym": ("sym",),
    "desc_act": ("desc_act",),
    "checkpoint_format": ("checkpoint_format", "format"),
    "lm_head": ("lm_head",),
    "dynamic": ("dynamic",),
    "modules_in_block_to_quantize": ("modules_in_block_to_quantize",),
    "is_marlin_format": ("is_marlin_format",),
    "pack_dtype": ("pack_dtype",),
    "adapter": ("adapter",),
    "rotation": ("rotation",),
}
ONE_EACH = {4: 0x11111111, 8: 0x01010101}  # 1 in every code of a number


@dataclass(frozen=True)
class GptqSettings:
    """Says how a module is quantized."""

    bits: int
    group_size: int  # -1: all inputs
    symmetric: bool
    act_order: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "GptqSettings":
        bits = config.get("bits")
        if type(bits) is not int or bits not in ONE_EACH:
            raise ConfigError(f"bits must be 4 or 8, not {shown(bits)}; other widths are not supported")
        return cls(bits, group_size(config, -1), flag(config, "sym", True), flag(config, "desc_act", False))


class Gptq(Layout):
    """The layout that GPTQ configurations describe. configs: where each was read -> its fields. Raises ConfigError."""

    def __init__(self, configs: Mapping[str, Mapping[str, Any]]):
        config = gather(configs, FIELDS)
        stored = config.get("checkpoint_format", "gptq")
        if stored not in ("gptq", "gptq_v2") or flag(config, "is_marlin_format", False):
            raise ConfigError(
                f"checkpoint_format {shown('marlin' if stored == 'gptq' else stored)} is not supported; supported are "
                "gptq and gptq_v2: convert the checkpoint with the tool that wrote it"
            )
        if config.get("pack_dtype", "int32") != "int32":
            raise ConfigError(f"pack_dtype must be int32, not {shown(config['pack_dtype'])}")
        for field in ("adapter", "rotation"):
            if config.get(field):
                raise ConfigError(
                    f"{field} {shown(config[field])} changes what the model computes, and is not supported"
                )
        self.minus_one = stored == "gptq"
        self.settings = GptqSettings.of(config)
        self.with_head = flag(config, "lm_head", False)
        self.only = _flattened(config.get("modules_in_block_to_quantize", []))
        self.rules = _rules(config.get("dynamic", {}), config)

    def _settings(self, module: str) -> GptqSettings | None:
        """Return how a module is quantized; None: it is not. The first rule that matches decides."""
        if module.endswith("embed_tokens") or (module == "lm_head" and not self.with_head):
            return None
        for rule, settings in self.rules:
            if rule.match(module):
                return settings
        if self.only and module != "lm_head" and not any(module.endswith(f".{name}") for name in self.only):
            return None
        return self.settings

    def _of(self, module: str) -> GptqSettings:
        settings = self._settings(module)
        assert settings is not None  # callers ask only for quantized modules
        return settings

    def format(self, module: str, inputs: int) -> Format:
        settings = self._settings(module)
        if settings is None:
            return Dense()
        size = inputs if settings.group_size == -1 else settings.group_size
        if settings.bits == 8:
            if size != inputs or not settings.symmetric:
                raise ConfigError(
                    f"{module} has 8 bits in groups of {size} inputs (sym: {settings.symmetric}), but 8 bits are "
                    "supported only with sym true and group_size -1, a scale for each row: use a checkpoint of 4 bits"
                )
            return Int8()
        check_groups(size, inputs, module)
        return Int4(size, settings.symmetric, settings.act_order and size < inputs)

    def tensors(self, module: str, rows: int, inputs: int) -> dict[str, Stored]:
        settings, each = self._of(module), 32 // self._of(module).bits
        groups = 1 if settings.group_size == -1 else inputs // settings.group_size
        return {
            "qweight": Stored((-(-inputs // each), rows), (torch.int32,)),
            "qzeros": Stored((groups, -(-rows // each)), (torch.int32,)),
            "scales": Stored((groups, rows), SCALES),
            "g_idx": Stored((inputs,), (torch.int32, torch.int64), required=settings.act_order),
            "bias": Stored((rows,), SCALES, required=False),
        }

    def codes(self, module: str, inputs: int, tensors: Mapping[str, Tensor]) -> Codes:
        check_no_bias(module, tensors.get("bias"))
        settings, scales = self._of(module), tensors["scales"].t()
        codes = unpack_numbers(tensors["qweight"].t(), settings.bits)[:, :inputs]
        stored = Codes(codes, scales, self._zeros(module, settings, tensors["qzeros"], len(codes)))
        groups, neighbors = tensors.get("g_idx"), group_of_each(inputs, scales.shape[1])
        if groups is None or groups.equal(neighbors.to(groups.dtype)):
            return stored
        if not settings.act_order:
            raise ConfigError(
                f"{module}.g_idx assigns inputs to groups in an order of their own, but desc_act is false: set it to "
                "true in the quantization's configuration"
            )
        try:
            return in_group_order(stored, groups)
        except ConfigError as error:
            raise ConfigError(f"{module}.g_idx: {error}") from None

    def _zeros(self, module: str, settings: GptqSettings, numbers: Tensor, rows: int) -> Tensor | None:
        """qzeros -> [rows, groups] int8, signed as the codes are; None for symmetric weights."""
        if settings.symmetric:
            zeros = unpack_numbers(numbers, settings.bits)[:, :rows]
            check_zero_points_are((-1, 0), zeros, module, stored=8 if settings.bits == 4 else 128)
            return None
        if self.minus_one:
            numbers = numbers + ONE_EACH[settings.bits]
        return unpack_numbers(numbers, settings.bits)[:, :rows].t()


def _flattened(modules: Any) -> list[str]:
    """Return names of a block's modules, in a list of lists or in one list."""
    nested = modules if isinstance(modules, list) else [modules]
    flat = [name for each in nested for name in (each if isinstance(each, list) else [each])]
    return names({"modules_in_block_to_quantize": flat}, "modules_in_block_to_quantize")


def _rules(dynamic: Any, config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], GptqSettings | None]]:
    """Patterns of module names with their settings; None: these modules are not quantized."""
    if not isinstance(dynamic, dict):
        raise ConfigError(f"dynamic must be an object of patterns, not {shown(dynamic)}")
    rules: list[tuple[re.Pattern[str], GptqSettings | None]] = []
    for rule, values in dynamic.items():
        name = pattern(rule, "dynamic", "-:", "+:")
        if not isinstance(values, dict):
            raise ConfigError(f"dynamic: {shown(rule)} must have an object of fields, not {shown(values)}")
        try:
            rules.append((name, None if rule.startswith("-:") else GptqSettings.of({**config, **values})))
        except ConfigError as error:
            raise ConfigError(f"dynamic: {shown(rule)}: {error}") from None
    return rules
