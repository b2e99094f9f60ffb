"""compressed-tensors files with more in them than weights need: read if it changes nothing, else refused by name."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file

from minillm.errors import ConfigError
from minillm.model.loader import load_model
from tests import models

from .test_compressed_tensors import SCHEMES, SIZE, compressed, logits_of


def with_tensors(directory, made, *modules):
    """Add tensors to modules. made: last part of the name -> the tensor, or a function of the module's weight_scale."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        if not modules or module.endswith(modules):
            for last, value in made.items():
                tensors[f"{module}.{last}"] = value(tensors[name]) if callable(value) else value.clone()
    save_file(tensors, file)


def with_config(directory, change):
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def zeros(dtype, **shape):
    return lambda scale: torch.zeros(shape.get("shape", scale.shape), dtype=dtype)


IDS = list(range(5, 35))


@pytest.mark.parametrize(
    ("kind", "inputs", "tensors"),
    [
        ("naive-quantized", None, {"weight_zero_point": zeros(torch.float8_e4m3fn)}),
        ("naive-quantized", "static", {"weight_zero_point": zeros(torch.int8), "input_zero_point": torch.zeros(1)}),
        ("naive-quantized", "static", {"input_zero_point": torch.zeros((), dtype=torch.float8_e4m3fn)}),
        ("float-quantized", "by token", {"input_scale": torch.tensor([0.5]), "input_zero_point": torch.tensor([3])}),
        ("float-quantized", None, {"input_scale": torch.tensor(0.5), "input_global_scale": torch.tensor([9.0])}),
        ("int-quantized", "static", {"weight_zero_point": zeros(torch.int8), "input_zero_point": zeros(torch.int8)}),
        ("pack-quantized", None, {"weight_zero_point": zeros(torch.int8)}),
        ("pack-quantized", None, {"weight_zero_point": zeros(torch.int32, shape=(3,))}),
    ],
)
def test_tensors_that_change_nothing_are_accepted(kind, inputs, tensors, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, kind, inputs)
    wanted = logits_of(load_model(tmp_path, dtype="float64"), IDS)
    with_tensors(tmp_path, tensors)
    assert logits_of(load_model(tmp_path, dtype="float64"), IDS).equal(wanted)


@pytest.mark.parametrize("kind", ["pack-quantized", "pack-quantized, zero points"])
@pytest.mark.parametrize("usual", [True, False])
def test_groups_in_the_usual_order_are_accepted_without_act_order(kind, usual, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, kind)
    wanted = logits_of(load_model(tmp_path, dtype="float64"), IDS)

    def groups(scale):
        inputs = scale.shape[1] * SIZE
        return (torch.arange(inputs) // SIZE if usual else torch.full((inputs,), -1)).int()

    with_tensors(tmp_path, {"weight_g_idx": groups})
    assert logits_of(load_model(tmp_path, dtype="float64"), IDS).equal(wanted)
    with_tensors(tmp_path, {"weight_g_idx": lambda scale: groups(scale).flip(0) + 2 * (not usual)}, "1.mlp.up_proj")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight_g_idx has an order of its own"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "inputs", "name", "value"),
    [
        ("naive-quantized", None, "weight_zero_point", torch.tensor([1.0])),
        ("int-quantized", "static", "input_zero_point", torch.tensor([-3], dtype=torch.int8)),
        ("int-quantized", "static", "weight_zero_point", torch.tensor([[0], [1]], dtype=torch.int8)),
        ("pack-quantized", None, "weight_zero_point", torch.full((3,), 0x11111111, dtype=torch.int32)),
    ],
)
def test_zero_points_that_change_results_are_refused_by_name(kind, inputs, name, value, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, kind, inputs)
    with_tensors(tmp_path, {name: value}, "1.mlp.up_proj")
    message = rf"model\.layers\.1\.mlp\.up_proj\.{name} is not 0, but the configuration says symmetric: true"
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


EXTRA = {
    "status frozen": {"quantization_status": "frozen"},
    "status initialized": {"quantization_status": "initialized"},
    "status calibration": {"quantization_status": "calibration"},
    "no status": {"quantization_status": None},
    "versions": {"version": "0.9.1", "global_compression_ratio": 1.4, "kv_cache_scheme": None, "sparsity_config": {}},
    "spelling": {"quant_method": "compressed_tensors"},
}


@pytest.mark.parametrize("name", EXTRA)
def test_fields_that_change_nothing_are_accepted(name, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "naive-quantized", "static")
    wanted = logits_of(load_model(tmp_path, dtype="float64"), IDS)
    observer = {"observer": "minmax", "observer_kwargs": {}, "block_structure": None, "actorder": None}

    def change(config):
        found = config["quantization_config"] | EXTRA[name]
        (group,) = found["config_groups"].values()
        group["weights"] |= observer
        group["input_activations"] |= observer | {"observer": None}
        return config | {"quantization_config": found}

    with_config(tmp_path, change)
    assert logits_of(load_model(tmp_path, dtype="float64"), IDS).equal(wanted)


@pytest.mark.parametrize("kind", ["naive-quantized", "pack-quantized"])
def test_a_strategy_that_is_left_out_follows_from_the_groups_as_in_the_library(kind, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, kind)
    wanted = logits_of(load_model(tmp_path, dtype="float64"), IDS)

    def change(config):
        (group,) = config["quantization_config"]["config_groups"].values()
        del group["weights"]["strategy"]
        args = QuantizationArgs(**group["weights"])
        assert args.strategy == SCHEMES[kind]["strategy"]
        return config

    with_config(tmp_path, change)
    assert logits_of(load_model(tmp_path, dtype="float64"), IDS).equal(wanted)


def test_the_configuration_may_be_under_its_older_name(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "naive-quantized")
    wanted = logits_of(load_model(tmp_path, dtype="float64"), IDS)

    def change(config):
        given = config.pop("quantization_config")
        del given["quant_method"]
        return config | {"compression_config": given}

    with_config(tmp_path, change)
    assert logits_of(load_model(tmp_path, dtype="float64"), IDS).equal(wanted)


def test_weights_that_are_not_stored_as_codes_are_named_whatever_the_status_says(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "naive-quantized")
    with_tensors(tmp_path, {"weight": torch.zeros(80, 48)}, "1.mlp.up_proj")
    with_config(
        tmp_path,
        lambda config: (
            config | {"quantization_config": config["quantization_config"] | {"quantization_status": "frozen"}}
        ),
    )
    with pytest.raises(ConfigError, match=r"up_proj\.weight is F32; supported are F8_E4M3"):
        load_model(tmp_path)


@pytest.mark.parametrize("largest", ["k_proj", "q_proj", "v_proj"])
def test_modules_that_share_an_input_share_the_largest_of_their_scales(largest, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "naive-quantized", "static")
    with_tensors(tmp_path, {"input_scale": torch.tensor([0.75])}, f"1.self_attn.{largest}")
    scales = [layer.qkv.input_scale.item() for layer in load_model(tmp_path).layers]
    assert scales == pytest.approx([0.02, 0.75, 0.02])


UNUSED_NAMES = ("self_attn.k_scale", "self_attn.attn.v_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale",
                "self_attn.q_scale", "self_attn.v_proj.output_scale", "self_attn.k_proj.output_zero_point",
                "self_attn.v_zero_point", "self_attn.prob_scale")  # fmt: skip


@pytest.mark.parametrize("name", UNUSED_NAMES)
def test_scales_of_the_cache_are_not_read_whatever_a_tool_calls_them(name, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "naive-quantized")
    wanted = logits_of(load_model(tmp_path, dtype="float64"), IDS)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.0.{name}": torch.tensor([7.0])}, file)
    assert logits_of(load_model(tmp_path, dtype="float64"), IDS).equal(wanted)


@pytest.mark.parametrize("name", ["mlp.up_proj.output_scale", "mlp.k_scale", "self_attn.o_proj.pre_quant_scale"])
def test_other_scales_are_refused_by_name(name, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "naive-quantized")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.0.{name}": torch.tensor([7.0])}, file)
    with pytest.raises(ConfigError, match=f"1 that do not belong to its config.json: model.layers.0.{name}"):
        load_model(tmp_path)
