"""compressed-tensors: the layout of vLLM's tools, which `minillm quantize` writes too.  Lesson 06.

A module's tensors, besides its bias, by the `format` of the configuration:

    pack-quantized    weight_packed [rows, in / 8] int32 (8 bits: in / 4), weight_scale [rows, groups],
                      weight_shape [2], and, unless symmetric, weight_zero_point [rows / 8, groups] int32
    int-quantized     weight [rows, in] int8, weight_scale [rows, 1]
    float-quantized   weight [rows, in] float8_e4m3fn, weight_scale [rows, 1] or [1]
    naive-quantized   as int-quantized or float-quantized
    nvfp4-pack-quantized   weight_packed [rows, in / 2] uint8, weight_scale [rows, blocks] float8_e4m3fn, and
                      weight_global_scale [1] float32, which scales are divided by
    mxfp4-pack-quantized   weight_packed [rows, in / 2] uint8, weight_scale [rows, blocks] uint8

and `input_scale` [1] for static activations, `weight_g_idx` [in] for GPTQ's act-order in older files. Packed codes
are 8 above the signed ones (8 bits: 128); the lowest bits come first, and a row's last number is padded with zeros.
Some files store more that changes nothing: zero points of 0 where quantization is symmetric, groups in the usual order,
scales of inputs that the configuration does not quantize, or quantizes dynamically. `quantization_status` is how far a
tool had come when it saved the model. Whether a weight is stored as codes is seen from its tensors, not from this word.
`sparsity_config` names the modules that are sparse instead; `bitmask` has their tensors.

`minillm quantize` packs int8 weights whose activations are not quantized, because vLLM reads them only packed;
not those of the embedding, which transformers reads only unpacked. A head that is tied to the embedding has a group of
its own if its inputs are quantized, and no tensors: the embedding's group says that no inputs are.
`kv_cache_scheme` suggests how to store the cache: weights do not depend on it, so the cache stays in the precision of
the activations, and its scales are not read.
https://github.com/vllm-project/compressed-tensors, compressors/ and quantization/quant_config.py
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization import fp4
from minillm.quantization.activations import Activations
from minillm.quantization.dense import Dense
from minillm.quantization.fp4 import Fp4, Mxfp4, Nvfp4
from minillm.quantization.fp8 import Fp8
from minillm.quantization.int4 import LOWEST, Int4, pack
from minillm.quantization.int8 import Int8
from minillm.quantization.sparse import Pruned, Sparse, Sparse24
from minillm.quantization.weight import Codes, Format
from minillm.values import shown

from . import bitmask
from .fields import flag, group_size, names, pattern
from .layout import NUMBERS, SCALES, Layout, Stored
from .packing import group_of_each, in_group_order, unpack_numbers

METHOD, COMPRESSED, OLDER_FIELD = "compressed-tensors", "compressed", "compression_config"
STATUSES = ("initialized", "calibration", "frozen", COMPRESSED, "decompressed")
# Of inputs; without static activations, none has an effect.
INPUT_TENSORS = ("input_scale", "input_zero_point", "input_global_scale")
NO_MATCH = 3  # the rank of a target that does not name a module
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
PACKED, INT8, FLOAT, NAIVE, MIXED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)


class CompressedTensors(Layout):
    """The layout that a `quantization_config` describes.

    groups: the names of a group's modules, their format, and how it is packed.

    Raises ConfigError for what minillm does not support.
    """

    def __init__(self, config: Mapping[str, Any]):
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
            raise ConfigError(f"config_groups must be an object of groups, not {shown(groups)}")
        _refuse_extras(config)
        self.ignored = _names(config, "ignore")
        self.groups: list[tuple[list[str], Format, str]] = []
        for group in groups.values():
            targets, format = _names(group, "targets"), _format(group)
            packing = _checked_packing(group.get("format") or config.get("format"), format)
            self.groups.append((targets, format, packing))
        self.sparse = _sparse(config.get("sparsity_config"))

    def format(self, module: str, inputs: int) -> Format:
        return self._group(module)[0]

    def _group(self, module: str) -> tuple[Format, str]:
        """Return a module's format, and how it is packed."""
        sparse = self.sparse if self.sparse is not None and self.sparse.names(module) else None
        none: tuple[Format, str] = (Dense() if sparse is None else sparse.format, "")
        if _names_it(self.ignored, module):
            return none
        ranks = [min((_rank(name, module) for name in targets), default=NO_MATCH) for targets, _, _ in self.groups]
        best = min(ranks, default=NO_MATCH)
        if best == NO_MATCH:
            return none
        if sparse is not None:
            raise ConfigError(f"{module} is both sparse (sparsity_config) and quantized, which is not supported")
        return self.groups[ranks.index(best)][1:]

    def tensors(self, module: str, rows: int, inputs: int) -> dict[str, Stored]:
        format, packing = self._group(module)
        if isinstance(format, Sparse):
            return bitmask.tensors(format, rows, inputs)
        if isinstance(format, Fp4):
            stored = {
                "weight_packed": Stored((rows, inputs // 2), (torch.uint8,)),
                "weight_scale": Stored((rows, inputs // format.group_size), (format.scale_dtype,)),
            }
            if format.has_global_scale:
                stored["weight_global_scale"] = Stored((1,), (torch.float32,))
        elif packing == PACKED:
            groups = inputs // format.group_size if isinstance(format, Int4) else 1
            stored = {
                "weight_packed": Stored((rows, -(-inputs // _per_number(format))), (torch.int32,)),
                "weight_scale": Stored((rows, groups), SCALES),
                "weight_shape": Stored((2,), (torch.int64, torch.int32), required=False),
            }
            if isinstance(format, Int4) and not format.symmetric:
                stored["weight_zero_point"] = Stored((-(-rows // 8), groups), (torch.int32,))
            if isinstance(format, Int4):
                stored["weight_g_idx"] = Stored((inputs,), (torch.int32, torch.int64), required=format.act_order)
        else:
            dtype = torch.int8 if isinstance(format, Int8) else torch.float8_e4m3fn
            one = isinstance(format, Fp8) and format.scales == "tensor"
            stored = {
                "weight": Stored((rows, inputs), (dtype,)),
                "weight_scale": Stored((1,) if one else (rows, 1), SCALES),
            }
        static = format.activations is not None and format.activations.static
        if static:
            stored["input_scale"] = Stored((1,), SCALES)
        anything = Stored(None, (*SCALES, *NUMBERS), required=False)
        unused = ("weight_zero_point", *INPUT_TENSORS[1 if static else 0 :])
        return dict.fromkeys(unused, anything) | stored

    def codes(self, module: str, inputs: int, tensors: Mapping[str, Tensor]) -> Codes:
        format = self._group(module)[0]
        if isinstance(format, Sparse):
            return bitmask.codes(module, inputs, tensors)
        _check_zero_points(module, format, tensors)
        if isinstance(format, Fp4):
            return _fp4_codes(module, format, tensors)
        scales = tensors["weight_scale"]
        if "weight" in tensors:
            return Codes(tensors["weight"], scales.view(-1, 1))
        packed = tensors["weight_packed"]
        if not isinstance(format, Int4):
            return Codes(unpack_numbers(packed, bits=8)[:, :inputs], scales)
        zeros = None if format.symmetric else tensors["weight_zero_point"]
        rows = None if zeros is None else unpack_numbers(zeros.t()).t()[: len(packed)]
        codes = Codes(unpack_numbers(packed)[:, :inputs], scales, rows)
        if (groups := tensors.get("weight_g_idx")) is None:
            return codes
        if not format.act_order:
            usual = group_of_each(inputs, scales.shape[1])
            if not ((groups == -1).all() or groups.equal(usual.to(groups.dtype))):  # -1: none, as the library fills it
                raise ConfigError(f"{module}.weight_g_idx has an order of its own, but actorder is not group")
            return codes
        try:
            return in_group_order(codes, groups)
        except ConfigError as error:
            raise ConfigError(f"{module}.weight_g_idx: {error}") from None

    def input_scale(self, module: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
        activations = self.format(module, 0).activations
        return tensors["input_scale"] if activations is not None and activations.static else None


def write(module: str, codes: Codes, format: Format) -> dict[str, Tensor]:
    """Return a module's tensors: the inverse of `CompressedTensors.codes`."""
    rows, inputs = codes.codes.shape
    if isinstance(format, Sparse):
        return bitmask.write(codes.codes, format)
    if isinstance(format, Fp4):
        packed = {"weight_packed": fp4.pack(codes.codes), "weight_scale": fp4.stored_scales(codes.scales, format)}
        if codes.global_scale is None:
            return packed
        return packed | {"weight_global_scale": codes.global_scale[0].float()}
    if _packing(module, format) != PACKED:
        one = isinstance(format, Fp8) and format.scales == "tensor"
        return {"weight": codes.codes, "weight_scale": codes.scales[0] if one else codes.scales}
    if codes.order is not None:
        raise ConfigError("codes with their inputs in another order are read, but not written")
    tensors = {
        "weight_packed": _pack_columns(codes.codes, format),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor([rows, inputs]),
    }
    if codes.zeros is not None:
        tensors["weight_zero_point"] = _pack_rows(codes.zeros)
    return tensors


def describe(formats: Mapping[str, Format]) -> dict[str, Any]:
    """Return the `quantization_config` of modules with these formats: the inverse of reading it.

    Raises ConfigError for formats that the layout does not have.
    """
    groups: dict[tuple[Format, str], list[str]] = {}
    sparse: dict[str, Sparse] = {}
    ignored = []
    for module, each in formats.items():
        if isinstance(each, Sparse):
            sparse[module] = each
            ignored.append(module)
        elif not isinstance(each, Dense):
            groups.setdefault((each, _packing(module, each)), []).append(module)
        elif each.activations is None:
            ignored.append(module)
        else:
            raise ConfigError("dense weights with quantized activations cannot be saved: leave their activations out")
    kinds = {packing for _, packing in groups} or {"dense"}
    extra = {"sparsity_config": _describe_sparse(sparse)} if sparse else {}
    return extra | {
        "quant_method": METHOD,
        "quantization_status": COMPRESSED,
        "format": kinds.pop() if len(kinds) == 1 else MIXED,
        "config_groups": {
            f"group_{index}": {
                "format": packing,
                "targets": _exactly(modules),
                "weights": _weights(each),
                "input_activations": _inputs(each.activations),
                "output_activations": None,
            }
            for index, ((each, packing), modules) in enumerate(groups.items())
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _packing(module: str, format: Format) -> str:
    """Return how a module is written."""
    if isinstance(format, Int8):
        return INT8 if format.activations is not None or _is_embedding(module) else PACKED
    return _USUAL[type(format)]


# Of formats that are written in one way.
_USUAL: dict[type[Format], str] = {Int4: PACKED, Fp8: FLOAT, Nvfp4: NVFP4, Mxfp4: MXFP4}


def _exactly(modules: Iterable[str]) -> list[str]:
    """Targets that name these modules and no others."""
    return [f"re:{re.escape(module)}$" for module in modules]


def _checked_packing(packing: Any, format: Format) -> str:
    """Return how a format is stored, as the file says. Raises ConfigError for a packing that is not read."""
    usual = INT8 if isinstance(format, Int8) else _USUAL[type(format)]
    known = {INT8: (INT8, NAIVE, PACKED), FLOAT: (FLOAT, NAIVE)}.get(usual, (usual,))
    if packing in (None, MIXED):
        return usual
    if packing not in known:
        raise ConfigError(
            f"format {shown(packing)} of {format.name} weights is not supported; supported for them: {', '.join(known)}"
        )
    return str(packing)


def _refuse_extras(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkpoint has what would change its results, and is not implemented."""
    if (status := config.get("quantization_status")) is not None and status not in STATUSES:
        raise ConfigError(f"quantization_status must be one of {', '.join(STATUSES)}, not {shown(status)}")
    if not isinstance(scheme := config.get("kv_cache_scheme") or {}, dict):
        raise ConfigError(f"kv_cache_scheme must be an object or null, not {shown(scheme)}")
    for field in ("transform_config", "sparsity_config"):
        value = config.get(field)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{field} must be an object or null, not {shown(value)}")
    if (config.get("transform_config") or {}).get("config_groups") not in (None, {}):
        raise ConfigError("online transforms (transform_config) are not supported")


def _weights(format: Format) -> dict[str, Any]:
    if isinstance(format, Fp4):
        strategy = "tensor_group" if format.has_global_scale else "group"
        more: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": format.group_size}
        more |= {"symmetric": True, "scale_dtype": str(format.scale_dtype), "zp_dtype": str(format.scale_dtype)}
    elif isinstance(format, Int4):
        more = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": format.group_size}
        more["symmetric"] = format.symmetric
    elif isinstance(format, Fp8):
        more = {"num_bits": 8, "type": "float", "strategy": format.scales, "group_size": None, "symmetric": True}
    else:
        more = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None, "symmetric": True}
    return more | {"dynamic": False}


def _inputs(activations: Activations | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    return {
        "num_bits": 8,
        "type": "int" if activations.kind == "int8" else "float",
        "symmetric": True,
        "strategy": "tensor" if activations.static else "token",
        "dynamic": not activations.static,
    }


def _format(group: Mapping[str, Any]) -> Format:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"a group's weights must be an object, not {shown(weights)}")
    if group.get("output_activations") is not None:
        raise ConfigError("quantized outputs (output_activations) are not supported")
    if flag(weights, "dynamic", False):
        raise ConfigError("weights that are quantized while they are used (dynamic) are not supported")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), _strategy(weights)
    activations = _activations(group.get("input_activations"))
    symmetric = flag(weights, "symmetric", True)
    if (bits, kind) == (4, "int") and strategy == "group":
        return Int4(group_size(weights), symmetric, _act_order(weights), activations)
    if (bits, kind, strategy, symmetric) == (8, "int", "channel", True):
        return Int8(activations)
    if (bits, kind, symmetric) == (8, "float", True) and strategy in ("channel", "tensor"):
        return Fp8(strategy, activations)
    if (bits, kind, symmetric, activations) == (4, "float", True, None):
        size = group_size(weights)
        for each in (Nvfp4(), Mxfp4()):
            if (strategy, size) == ("tensor_group" if each.has_global_scale else "group", each.group_size):
                return each
    raise ConfigError(
        f"weights of {shown(bits)} bits ({shown(kind)}, {shown(strategy)}, symmetric: "
        f"{shown(symmetric)}) are not supported; supported are int4 in groups, symmetric int8 by channel, float8 by "
        "channel or tensor, and, with activations that are not quantized, nvfp4 (tensor_group of 16) and mxfp4 (group "
        "of 32)"
    )


@dataclass(frozen=True)
class _SparseModules:
    """The content of a `sparsity_config`."""

    format: Sparse
    targets: list[str]
    ignored: list[str]

    def names(self, module: str) -> bool:
        return _names_it(self.targets, module) and not _names_it(self.ignored, module)


def _sparse(config: Mapping[str, Any] | None) -> _SparseModules | None:
    if not config or (packing := config.get("format")) == "dense":
        return None
    if packing not in (bitmask.SPARSE24, bitmask.UNSTRUCTURED):
        raise ConfigError(
            f"sparsity_config has format {shown(packing)}; supported are dense, {bitmask.SPARSE24} and "
            f"{bitmask.UNSTRUCTURED}"
        )
    targets = ["Linear"] if config.get("targets") is None else _names(config, "targets")
    format = Sparse24() if packing == bitmask.SPARSE24 else Pruned()
    return _SparseModules(format, targets, _names(config, "ignore"))


def _describe_sparse(formats: Mapping[str, Sparse]) -> dict[str, Any]:
    """Return the inverse of `_sparse`. Raises ConfigError for 2:4 and unstructured sparsity in one model."""
    two_four = {isinstance(each, Sparse24) for each in formats.values()}
    if len(two_four) > 1:
        raise ConfigError("a checkpoint has sparse24 or pruned weights, not both: choose one of them")
    shares = [each.sparsity if isinstance(each, Pruned) else 0.5 for each in formats.values()]
    return {
        "format": bitmask.SPARSE24 if two_four == {True} else bitmask.UNSTRUCTURED,
        "sparsity_structure": "2:4" if two_four == {True} else "unstructured",
        "global_sparsity": sum(shares) / len(shares),
        "targets": _exactly(formats),
        "ignore": [],
    }


def _check_zero_points(module: str, format: Format, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for zero points that are not 0 where quantization is symmetric."""
    static = format.activations is not None and format.activations.static
    symmetric = ["input_zero_point"] if static else []
    if not isinstance(format, Int4) or format.symmetric:
        symmetric.append("weight_zero_point")
    for name in symmetric:
        if (zeros := tensors.get(name)) is not None and zeros.float().any():
            raise ConfigError(f"{module}.{name} is not 0, but the configuration says symmetric: true")


def _fp4_codes(module: str, format: Fp4, tensors: Mapping[str, Tensor]) -> Codes:
    values, stored = fp4.unpack(tensors["weight_packed"]), tensors["weight_scale"]
    if not format.has_global_scale:
        return Codes(values, fp4.from_exponents(stored, torch.float32))
    divisor = tensors["weight_global_scale"]
    if not 0 < divisor.item() < math.inf:
        raise ConfigError(f"{module}.weight_global_scale must be positive, not {divisor.item()}")
    return Codes(values, stored.float(), global_scale=divisor.expand(len(values), 1))


def _act_order(weights: Mapping[str, Any]) -> bool:
    """Return whether groups consist of any inputs ("weight" only names how codes were found)."""
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static", True, "group", "dynamic"):
        raise ConfigError(f"actorder must be group, weight or null, not {shown(order)}")
    return order in (True, "group", "dynamic")


def _strategy(config: Mapping[str, Any]) -> Any:
    """Return which numbers share a scale. If it is not given, the size of groups says so."""
    if (strategy := config.get("strategy")) is not None:
        return strategy
    size = config.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _activations(config: Any) -> Activations | None:
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ConfigError(f"input_activations must be an object or null, not {shown(config)}")
    bits, kind, strategy = config.get("num_bits"), config.get("type", "int"), _strategy(config)
    dynamic, symmetric = flag(config, "dynamic", False), flag(config, "symmetric", True)
    if bits == 8 and kind in ("int", "float") and symmetric:
        if strategy == "token" and dynamic:
            return Activations("int8" if kind == "int" else "fp8")
        if strategy == "tensor" and not dynamic:
            return Activations("int8" if kind == "int" else "fp8", static=True)
    raise ConfigError(
        f"activations of {shown(bits)} bits ({shown(kind)}, {shown(strategy)}, dynamic: "
        f"{dynamic}, symmetric: {symmetric}) are not supported; supported are symmetric 8 bits, dynamic by token or "
        "static by tensor"
    )


def _is_embedding(module: str) -> bool:
    return module.endswith("embed_tokens")


def _names(config: Mapping[str, Any], field: str) -> list[str]:
    """Return names and patterns of modules."""
    listed = names({field: config[field]} if config.get(field) is not None else {}, field)
    for name in listed:
        if name.startswith("re:"):
            pattern(name, field, "re:")
    return listed


def _names_it(targets: Iterable[str], module: str) -> bool:
    return any(_rank(name, module) != NO_MATCH for name in targets)


def _rank(name: str, module: str) -> int:
    """Return how a target names a module, the most specific first: by its name, by a pattern, or by its class."""
    if name == module:
        return 0
    if name.startswith("re:"):
        return 1 if re.match(name[3:], module) else NO_MATCH
    return 2 if name == ("Embedding" if _is_embedding(module) else "Linear") else NO_MATCH


def _per_number(format: Format) -> int:
    """Codes in one int32."""
    return 8 if isinstance(format, Int4) else 4


def _pack_columns(codes: Tensor, format: Format) -> Tensor:
    """codes [rows, in] int8 -> [rows, in / 8] int32 (8 bits: in / 4), the last number padded with zeros."""
    lowest, each = (LOWEST, 8) if isinstance(format, Int4) else (-128, 4)
    codes = F.pad(codes, (0, -codes.shape[1] % each), value=lowest)
    packed = pack(codes) if isinstance(format, Int4) else codes.contiguous().view(torch.uint8).bitwise_xor(128)
    return packed.view(torch.int32)


def _pack_rows(zeros: Tensor) -> Tensor:
    """zeros [rows, groups] int8 -> [rows / 8, groups] int32: eight rows share a number."""
    rows = -(-len(zeros) // 8) * 8
    padded = torch.cat([zeros, zeros.new_zeros(rows - len(zeros), zeros.shape[1])])
    packed = pack(padded.t().contiguous()).contiguous().view(torch.int32)
    return packed.t().contiguous()
