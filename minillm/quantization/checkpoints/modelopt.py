"""NVIDIA Model Optimizer's layout, as its `export_hf_checkpoint` writes it.  Lessons 06 and 07.

A module's tensors, besides its bias, by its `quant_algo`:

    FP8                        weight [rows, in] float8_e4m3fn, weight_scale [], input_scale []
    FP8_PER_CHANNEL_PER_TOKEN  weight [rows, in] float8_e4m3fn, weight_scale [rows]
    W8A16                      weight [rows, in] int8, weight_scale [rows]
    W8A8_SQ_PER_CHANNEL        weight [rows, in] int8, weight_scale [rows], input_scale [], pre_quant_scale [in]
    W4A16_AWQ                  weight [rows / 2, in] uint8, weight_scale [rows, groups], pre_quant_scale [in]
    W4A8_AWQ                   as W4A16_AWQ, and weight_scale_2 [] and input_scale []
    MIXED_PRECISION            one of these for each module, in `quantized_layers`

A byte holds two rows of one input, the first in its low half, as signed numbers from -8 to 7.
Inputs are multiplied by `pre_quant_scale` where the tool did not fold it into the operation before; the loader does.
`weight_scale_2` is not used: it is for engines that round W4A8's dequantized weights to FP8 for the product.
`kv_cache_quant_algo` is what the tool suggests for the cache, with scales in k_scale and v_scale. The weights do not
depend on it: the cache stays in the precision of the activations, and the scales are not read.

The configuration is in hf_quant_config.json, in config.json, or in both.
https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export/quant_utils.py and convert_hf_config.py
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization.activations import Activations
from minillm.quantization.dense import Dense
from minillm.quantization.fp8 import Fp8
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.weight import Codes, Format
from minillm.values import shown

from .fields import check_groups, flag, gather, group_size, names
from .layout import SCALES, Layout, Stored

METHOD, FILE = "modelopt", "hf_quant_config.json"
MIXED = "MIXED_PRECISION"
FIELDS = {
    "quant_algo": ("quant_algo",),
    "group_size": ("group_size",),
    "has_zero_point": ("has_zero_point",),
    "kv_cache_quant_algo": ("kv_cache_quant_algo",),
    "exclude_modules": ("exclude_modules", "ignore"),
    "quantized_layers": ("quantized_layers",),
}
ALGORITHMS: dict[str, Format] = {
    "FP8": Fp8("tensor", Activations("fp8", static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8("channel", Activations("fp8")),
    "W8A16": Int8(),
    "W8A8_SQ_PER_CHANNEL": Int8(Activations("int8", static=True)),
    "W4A16_AWQ": Int4(),
    "W4A8_AWQ": Int4(activations=Activations("fp8", static=True)),
}
SMOOTHED = ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "W4A8_AWQ")  # those that may have a pre_quant_scale
CACHES = ("FP8", "INT8", "NVFP4")


class ModelOpt(Layout):
    """The layout that Model Optimizer's configurations describe.

    configs: where each was read -> its fields. Raises ConfigError.
    """

    def __init__(self, configs: Mapping[str, Mapping[str, Any]]):
        config = gather({file: _flat(each) for file, each in configs.items()}, FIELDS)
        if (cache := config.get("kv_cache_quant_algo")) not in (None, *CACHES):
            raise ConfigError(f"kv_cache_quant_algo must be one of {', '.join(CACHES)} or null, not {shown(cache)}")
        self.excluded = names(config, "exclude_modules")
        self.all: tuple[str, Format] | None = None
        self.layers: dict[str, tuple[str, Format]] = {}
        if config.get("quant_algo") != MIXED:
            self.all = _algorithm(config)
            return
        layers = config.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
            raise ConfigError(f"{MIXED} needs quantized_layers, an object of modules, not {shown(layers)}")
        for name, each in layers.items():
            try:
                self.layers[name] = _algorithm(each)
            except ConfigError as error:
                raise ConfigError(f"quantized_layers: {shown(name)}: {error}") from None

    def _of(self, module: str) -> tuple[str, Format] | None:
        """Return a module's algorithm and format; None if it is not quantized."""
        if module.endswith("embed_tokens"):
            return None
        if any(fnmatchcase(module, name) or fnmatchcase(module, f"{name}.*") for name in self.excluded):
            return None
        return self.all or self.layers.get(module)

    def format(self, module: str, inputs: int) -> Format:
        own = self._of(module)
        if own is None:
            return Dense()
        if isinstance(own[1], Int4):
            check_groups(own[1].group_size, inputs, module)
        return own[1]

    def tensors(self, module: str, rows: int, inputs: int) -> dict[str, Stored]:
        own = self._of(module)
        assert own is not None  # callers ask only for quantized modules
        algorithm, format = own
        if isinstance(format, Int4):
            stored = {
                "weight": Stored((-(-rows // 2), inputs), (torch.uint8,)),
                "weight_scale": Stored((rows, inputs // format.group_size), SCALES),
            }
        else:
            one = isinstance(format, Fp8) and format.scales == "tensor"
            stored = {
                "weight": Stored((rows, inputs), (torch.float8_e4m3fn if isinstance(format, Fp8) else torch.int8,)),
                "weight_scale": Stored((1,) if one else (rows,), SCALES),
            }
        if algorithm == "W4A8_AWQ":
            stored["weight_scale_2"] = Stored((1,), SCALES, required=False)
        if format.activations is not None and format.activations.static:
            stored["input_scale"] = Stored((1,), SCALES)
        if algorithm in SMOOTHED:
            stored["pre_quant_scale"] = Stored((inputs,), SCALES, required=False)
        return stored

    def codes(self, module: str, inputs: int, tensors: Mapping[str, Tensor]) -> Codes:
        weight, scales = tensors["weight"], tensors["weight_scale"]
        if weight.dtype != torch.uint8:
            return Codes(weight, scales.view(-1, 1))
        halves = torch.stack((weight & 15, weight >> 4), 1).flatten(0, 1)[: len(scales)]
        return Codes((halves ^ 8).to(torch.int8) - 8, scales)

    def input_scale(self, module: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return tensors.get("input_scale")

    def input_factors(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return tensors.get("pre_quant_scale")


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a configuration, which some files hold in an object of its own."""
    inner = config.get("quantization", config)
    if not isinstance(inner, dict):
        raise ConfigError(f"quantization must be an object, not {shown(inner)}")
    return inner


def _algorithm(config: Mapping[str, Any]) -> tuple[str, Format]:
    name = config.get("quant_algo")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(
            f"quant_algo {shown(name)} is not supported; supported are: {', '.join((*ALGORITHMS, MIXED))}. Export the "
            "model with one of them, or quantize it with `minillm quantize`"
        )
    if flag(config, "has_zero_point", False):
        raise ConfigError(f"has_zero_point: {name} weights with zero points are not supported")
    format = ALGORITHMS[name]
    return name, replace(format, group_size=group_size(config)) if isinstance(format, Int4) else format
