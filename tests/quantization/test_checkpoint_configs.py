"""Configurations of GPTQ, AWQ and Model Optimizer that are not supported are refused before any tensor is read."""

import copy
import json

import pytest
import torch

from minillm.calibration import quantize as calibration
from minillm.errors import ConfigError
from minillm.model.loader import load_model
from minillm.quantization import Dense, Fp8, Int4
from minillm.quantization.checkpoints import layout_of, read_layout
from tests import models

from .checkpoints import modelopt_fp8, rewrite

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
    "checkpoint_format": "gptq",
    "is_marlin_format": False,
    "pack_dtype": "int32",
    "dynamic": {"+:.*down": {"group_size": 32, "sym": False}, "-:.*gate": {}},
    "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]],
    "damp_percent": 0.05,
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 16,
    "zero_point": True,
    "sym": False,
    "version": "gemm",
    "lm_head": False,
    "modules_to_not_convert": ["lm_head"],
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_AWQ", "group_size": 16, "has_zero_point": False},
        "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
    },
    "ignore": ["lm_head"],
}
UNIFORM = {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ", "group_size": 16}}
VALID = {"gptq": GPTQ, "awq": AWQ, "modelopt-mixed": MIXED, "modelopt-uniform": UNIFORM}


def replaced(kind, path, value):
    """A valid configuration with another value at a path."""
    config = copy.deepcopy(VALID[kind])
    place = config
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return config


RULE, LAYER = ("dynamic", "+:.*down"), ("quantized_layers", "model.layers.0.mlp.up_proj")
REFUSED = [
    ("gptq", ("bits",), [2, 3, 16, "4", None, [4], 4.0], "bits must be 4 or 8, not"),
    ("gptq", ("group_size",), [0, -2, "16", None, 1.5], "group_size must be a whole number from 1 or -1 for all"),
    ("gptq", ("sym",), ["yes", 1], "sym must be true or false"),
    ("gptq", ("desc_act",), ["no", 0], "desc_act must be true or false"),
    ("gptq", ("lm_head",), ["x"], "lm_head must be true or false"),
    ("gptq", ("checkpoint_format",), ["marlin", "bitblas", 3, ["gptq"]], "checkpoint_format .* supported are gptq and"),
    ("gptq", ("is_marlin_format",), [True], "checkpoint_format 'marlin' is not supported; .*: convert the checkpoint"),
    ("gptq", ("pack_dtype",), ["int16"], "pack_dtype must be int32"),
    ("gptq", ("adapter",), [{"name": "lora", "rank": 64}], "adapter .* changes what the model computes"),
    ("gptq", ("rotation",), ["hadamard"], "rotation 'hadamard' changes what the model computes"),
    ("gptq", ("dynamic",), [[1], "x"], "dynamic must be an object of patterns"),
    ("gptq", RULE, [[], "x", None], r"dynamic: '\+:\.\*down' must have an object of fields"),
    ("gptq", (*RULE, "bits"), [5], r"dynamic: '\+:\.\*down': bits must be 4 or 8, not 5"),
    ("gptq", ("dynamic", "-:("), [{}], r"dynamic: '-:\(' is no pattern"),
    ("gptq", ("modules_in_block_to_quantize",), [3, [[3]]], "modules_in_block_to_quantize must be a list of names"),
    ("awq", ("bits",), [8, "4", None, True], "bits must be 4, not"),
    ("awq", ("version",), ["gemv", "gemv_fast", "marlin", "llm-awq", 3], "version .* is not supported; supported is"),
    ("awq", ("zero_point",), ["x", 0], "zero_point must be true or false"),
    ("awq", ("sym",), [True], "sym and zero_point are both True, but they are opposites"),
    ("awq", ("w_bit",), [8], "w_bit in config.json has 8|bits in config.json has 4"),
    ("awq", ("q_group_size",), [128], "q_group_size is 128 in config.json, but group_size in config.json has 16"),
    ("awq", ("modules_to_not_convert",), ["lm_head", [3]], "modules_to_not_convert must be a list of names"),
    ("modelopt-mixed", ("quant_algo",), ["NVFP4", "FP8_PB_WO", "fp8", None, 8], "quant_algo .* supported are: FP8,"),
    ("modelopt-mixed", ("kv_cache_quant_algo",), ["FP6", {}], "kv_cache_quant_algo must be one of FP8, INT8, NVFP4 or"),
    ("modelopt-mixed", ("quantized_layers",), [None, [], {"a": 3}], "MIXED_PRECISION needs quantized_layers"),
    ("modelopt-mixed", (*LAYER, "quant_algo"), ["NVFP4"], "quantized_layers: '.*up_proj': quant_algo 'NVFP4' is not"),
    ("modelopt-mixed", (*LAYER, "group_size"), [None, 0, "x"], "up_proj': group_size must be a whole number"),
    ("modelopt-mixed", (*LAYER, "has_zero_point"), [True], "has_zero_point: W4A16_AWQ weights with zero points are"),
    ("modelopt-mixed", ("ignore",), ["lm_head"], "exclude_modules must be a list of names"),
    ("modelopt-uniform", ("quantization",), [3, []], "quantization must be an object"),
]


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [(kind, path, value, message) for kind, path, values, message in REFUSED for value in values],
)
def test_what_is_not_supported_is_refused_with_the_file_and_the_field(kind, path, value, message):
    layout_of({"config.json": VALID[kind]})
    with pytest.raises(ConfigError, match=message) as caught:
        layout_of({"some/where/config.json": replaced(kind, path, value)})
    assert str(caught.value).startswith("some/where/config.json: ")


def paths(value, path=()):
    if path:
        yield path
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in named:
        yield from paths(inner, (*path, name))


WRONG = [None, True, 0, -1, 1e400, 4, 10**30, "", "x", "FP8", "re:(", "(", [], [[]], ["x"], [None], {}, {"x": 1}]
NAMES = [f"model.layers.0.{name}" for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")]


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind in VALID for path in paths(VALID[kind])], ids=lambda each: str(each)
)
def test_any_wrong_value_is_understood_or_refused(kind, path):
    for value in WRONG:
        try:
            layout = layout_of({"config.json": replaced(kind, path, value)})
            for name in (*NAMES, "lm_head", "model.embed_tokens"):
                if layout.format(name, 64) != Dense():
                    layout.tensors(name, 80, 64)
        except ConfigError:
            pass


@pytest.mark.parametrize("kind", ["gptq", "awq", "modelopt-uniform"])
def test_groups_that_do_not_divide_a_modules_inputs_are_refused_by_its_name(kind):
    path = ("quantization", "group_size") if kind == "modelopt-uniform" else ("group_size",)
    layout = layout_of({"config.json": replaced(kind, path, 48)})
    with pytest.raises(ConfigError, match=r"group_size 48 does not divide the 64 inputs of model\.layers\.0\.mlp\.up"):
        layout.format("model.layers.0.mlp.up_proj", 64)


@pytest.mark.parametrize(("size", "symmetric"), [(16, True), (-1, False)])
def test_eight_bits_in_groups_or_with_zero_points_are_refused_before_the_model_is_allocated(size, symmetric, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = {"quant_method": "gptq", "bits": 8, "group_size": size, "sym": symmetric}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.q_proj has 8 bits .*: use a checkpoint of 4"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_group_of_all_inputs_has_the_size_of_each_modules_rows(kind):
    layout = layout_of({"config.json": replaced(kind, ("group_size",), -1)})
    for inputs in (64, 80):
        assert layout.format("model.layers.0.mlp.up_proj", inputs).group_size == inputs
        assert layout.tensors("model.layers.0.mlp.up_proj", 96, inputs)["scales"].shape == (1, 96)


def test_a_model_that_only_a_tools_own_file_calls_quantized_is_not_quantized_again(tmp_path):
    source = tmp_path / "source"
    models.make("llama-biases").save_pretrained(source)
    (source / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 16}))
    assert read_layout(source).format("model.layers.0.mlp.up_proj", 48) == Int4(16)
    with pytest.raises(ConfigError, match="is quantized already"):
        calibration.quantize(source, {}, tmp_path / "out")


def test_the_caches_scales_are_not_read(tmp_path):
    """What Model Optimizer suggests for the cache has no effect on the weights."""

    def write(module, *shape):
        if module == "lm_head":
            return None
        stored, weight = modelopt_fp8(*shape)
        for each in "kv":
            if module.endswith(f"{each}_proj"):
                stored[f"{each}_scale"] = torch.tensor(7.0)
        return stored | {"input_scale": torch.tensor(0.02)}, weight

    models.make("llama-biases").save_pretrained(tmp_path)
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"]}
    rewrite(tmp_path, write, config)
    assert isinstance(load_model(tmp_path).layers[0].qkv.format, Fp8)
