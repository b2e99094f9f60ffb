"""Fold the factors that a checkpoint's modules multiply their inputs by into what makes these inputs.  Lesson 06.

SmoothQuant and AWQ divide the columns of a matrix by s and multiply its inputs by s. Most tools fold s into the
operation before; some leave a part of it, or all, to the engine. The engine folds the rest when it loads a model, so
that a step has no operation more: into a norm's weight, or into the rows of the product before, whose scales grow.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization import DenseWeight, Weight

from .decoder import Model
from .modules import Module, modules


def fold_input_factors(model: Model, factors: Mapping[str, Tensor]) -> None:
    """Multiply what makes a module's inputs by its factors. factors: a module's name -> [in].

    Raises ConfigError if the factors are not numbers, or if others read the same inputs without them: a module of the
    same weight, or, for the attention's output, another head with the same values.
    """
    if not factors:
        return
    for address, parts in modules(model.local).items():
        own = [factors[part.name].double() for part in parts if part.name in factors]
        if not own:
            continue
        names = ", ".join(part.name for part in parts)
        if not all(each.isfinite().all() for each in own):
            raise ConfigError(f"{names}: the factors of their inputs (pre_quant_scale) must be finite numbers")
        if len(own) < len(parts) or not all(each.equal(own[0]) for each in own):
            raise ConfigError(
                f"{names} share their inputs, but multiply them by different factors (pre_quant_scale), which is not "
                "supported: export the model again with one pre_quant_scale for them"
            )
        _fold(model, address, parts, own[0])


def _fold(model: Model, address: str, parts: list[Module], factors: Tensor) -> None:
    config, name = model.local, parts[0].name
    kind = address.rsplit(".", 1)[-1]
    if kind == "head":
        _multiply(model.final_norm, factors)
        return
    layer = model.layers[int(address.split(".")[1]) - model.held.start]
    if kind in ("qkv", "gate_up"):
        _multiply(layer.attention_norm if kind == "qkv" else layer.mlp_norm, factors)
    elif kind == "down":
        _scale_rows(layer.gate_up, range(config.intermediate_size, 2 * config.intermediate_size), factors)
    else:
        heads = factors.view(config.num_kv_heads, -1, config.head_dim)
        if not heads.equal(heads[:, :1].expand_as(heads)):
            raise ConfigError(
                f"{name}.pre_quant_scale differs between heads that share their keys and values, so it cannot be "
                "folded into the values: export the model again without smoothing the inputs of o_proj"
            )
        values = config.num_kv_heads * config.head_dim
        _scale_rows(layer.qkv, range(layer.qkv.shape[0] - values, layer.qkv.shape[0]), heads[:, 0].flatten())


def _scale_rows(weight: Weight, rows: range, factors: Tensor) -> None:
    """Multiply output rows, and their bias, by factors [len(rows)]."""
    span, codes = slice(rows.start, rows.stop), weight.read(rows)
    if codes is None:
        assert isinstance(weight, DenseWeight)
        _multiply(weight.weight[span], factors[:, None])
    else:
        scales = codes.scales.double() * factors[:, None].to(codes.scales.device)
        weight.fill(rows, replace(codes, scales=scales))
    if weight.bias is not None:
        _multiply(weight.bias[span], factors)


def _multiply(tensor: Tensor, factors: Tensor) -> None:
    tensor.copy_((tensor.double() * factors.to(tensor.device)).to(tensor.dtype))
