"""compressed-tensors' layout: what that library writes is read, and what we write it and transformers read."""

import copy
import json

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from minillm.errors import ConfigError
from minillm.model.loader import load_model
from minillm.model.saver import save_model
from minillm.quantization import Activations, Dense, DenseWeight, Int4, Recipe
from minillm.quantization.checkpoints import layout_of
from minillm.quantization.checkpoints.compressed_tensors import CompressedTensors
from minillm.quantization.int4 import pack
from tests import models
from tests.model.test_decoder import Paged

SIZE = 16
SCHEMES = {
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": SIZE},
    "pack-quantized, zero points": {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": SIZE,
        "symmetric": False,
    },
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "pack-quantized, 8 bits": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "naive-quantized": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}
INPUTS = {
    "by token": {"num_bits": 8, "strategy": "token", "dynamic": True},
    "static": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def parameters(weight, args):
    """Scales and zero points as compressed-tensors computes them."""
    size = args.group_size or (weight.shape[1] if args.strategy == "channel" else weight.numel())
    grouped = weight.view(-1, size) if args.strategy == "tensor" else weight.view(len(weight), -1, size)
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    return {"weight_scale": scales, "weight_zero_point": zeros}


def compressed(directory, kind, inputs=None, ignore=("lm_head",)):
    """Rewrite a saved model with every projection compressed by compressed-tensors."""
    packing = kind.split(",")[0]
    args = QuantizationArgs(**SCHEMES[kind])
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=packing)
    tensors, file = {}, directory / "model.safetensors"
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module in ignore or "bias" in name:
            tensors[name] = tensor
            continue
        state = {"weight": tensor} | parameters(tensor, args)
        done = BaseCompressor.get_value_from_registry(packing).compress(state, scheme)
        done.pop("weight_zero_point", None) if args.symmetric else None
        if inputs == "static":
            done["input_scale"] = torch.tensor([0.02])
        tensors |= {f"{module}.{last}": value for last, value in done.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": SCHEMES[kind], "format": packing}
    if inputs:
        group["input_activations"] = INPUTS[inputs] | {"type": SCHEMES[kind]["type"]}
    config = {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def assert_same(logits, wanted, exact):
    """exact: no activation is quantized. Else an input at the boundary of two codes may get the other one here."""
    if exact:
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
    else:
        difference = (logits - wanted).abs()
        assert difference.mean() < 2e-3 and difference.median() < 1e-4, difference.max()


def in_transformers(directory):
    # Dequantized while it is read: its own way of reading compressed modules refuses zero points.
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric(directory) else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **how).eval()


def asymmetric(directory):
    groups = json.loads((directory / "config.json").read_text())["quantization_config"]["config_groups"].values()
    return any(group["weights"].get("symmetric") is False for group in groups)


def logits_of(model, ids):
    paged = Paged(model)
    return paged.forward({}, {paged.admit(): ids}, every=True)


@pytest.mark.parametrize(
    ("kind", "inputs"),  # the library packs only weights whose inputs are not quantized
    [(kind, inputs) for kind in SCHEMES for inputs in (None, *INPUTS) if inputs is None or "pack" not in kind],
)
def test_logits_of_what_the_library_compressed_equal_those_of_transformers(kind, inputs, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, kind, inputs)
    theirs = in_transformers(tmp_path)
    ids = list(range(5, 35))
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    model = load_model(tmp_path, dtype="float64")
    assert not any(isinstance(getattr(model.layers[1], name), DenseWeight) for name in ("qkv", "down"))
    assert_same(logits_of(model, ids), wanted, exact=inputs is None)


@pytest.mark.parametrize("kind", [each for each in SCHEMES if each.startswith("pack")])
def test_packed_rows_of_any_length_are_read(kind, tmp_path):
    models.make("llama-biases", intermediate_size=84, hidden_size=52, head_dim=12).save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEMES, kind, SCHEMES[kind] | ({"group_size": 4} if "group_size" in SCHEMES[kind] else {}))
        compressed(tmp_path, kind)
    ids = list(range(5, 35))
    with torch.no_grad():
        wanted = in_transformers(tmp_path)(torch.tensor([ids])).logits[0]
    assert_same(logits_of(load_model(tmp_path, dtype="float64"), ids), wanted, exact=True)


MIXES = {
    "int4": {"layers.*": {"format": "int4", "group_size": SIZE}},
    "int4 with zero points": {"layers.*": {"format": "int4", "group_size": SIZE, "symmetric": False}},
    "int8": {"*": "int8"},
    "int8 activations": {"layers.*": {"format": "int8", "activations": "int8"}},
    "fp8": {"*": {"format": "fp8", "activations": "fp8"}},
    "fp8 by tensor": {"layers.*": {"format": "fp8", "scales": "tensor", "activations": "fp8"}},
    "w4a8": {"layers.*": {"format": "int4", "group_size": SIZE, "activations": "fp8"}},
    "four formats": {
        "*.qkv": "int8",
        "*.attention_out": "fp8",
        "layers.1.*": "dense",
        "layers.*": {"format": "int4", "group_size": SIZE},
    },
}


@pytest.mark.parametrize(
    ("family", "mix"),
    [
        *(("llama-biases", mix) for mix in MIXES),
        *(("gemma-multi-query", mix) for mix in MIXES if "*" not in MIXES[mix]),  # no tied head: see docs/extending.md
    ],
)
def test_what_is_saved_has_the_same_logits_here_and_in_transformers(family, mix, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    models.make(family).save_pretrained(source)
    model = load_model(source, dtype="float64", recipe=Recipe(MIXES[mix]))
    save_model(model, source, saved)
    ids = list(range(40, 70))
    wanted = logits_of(model, ids)
    again = load_model(saved, dtype="float64")
    assert [type(weight) for weight in again.weights()] == [type(weight) for weight in model.weights()]
    assert logits_of(again, ids).equal(wanted)
    with torch.no_grad():
        theirs = in_transformers(saved)(torch.tensor([ids])).logits[0]
    assert_same(theirs, wanted, exact=all(weight.activations is None for weight in model.weights()))


@pytest.mark.parametrize("rule", [{"format": "int4", "group_size": 4, "symmetric": False}, "int8"])
def test_rows_that_do_not_fill_their_last_number_are_saved_as_the_library_does(rule, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    models.make("llama-biases", intermediate_size=82 if rule == "int8" else 84).save_pretrained(source)
    model = load_model(source, dtype="float64", recipe=Recipe({"layers.*": rule}))
    save_model(model, source, saved)
    ids = list(range(40, 70))
    wanted = logits_of(model, ids)
    assert logits_of(load_model(saved, dtype="float64"), ids).equal(wanted)
    with torch.no_grad():
        assert_same(in_transformers(saved)(torch.tensor([ids])).logits[0], wanted, exact=True)


def test_int8_weights_are_packed_unless_their_inputs_are_quantized_too(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path / "source")
    rules = {"*.down": "int8", "*.qkv": {"format": "int8", "activations": "int8"}}
    model = load_model(tmp_path / "source", recipe=Recipe(rules))
    save_model(model, tmp_path / "source", tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored["model.layers.0.mlp.down_proj.weight_packed"].dtype == torch.int32
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8


def act_order(directory, groups_of):
    """Rewrite a saved model with random int4 codes and each input's group; the same model, unquantized, in "dense"."""
    generator = torch.Generator().manual_seed(0)
    tensors, dense, file = {}, {}, directory / "model.safetensors"
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = dense[name] = tensor
            continue
        rows, inputs = tensor.shape
        codes = torch.randint(-8, 8, (rows, inputs), generator=generator, dtype=torch.int8)
        scales = torch.rand(rows, inputs // SIZE, generator=generator) * 0.05 + 0.01
        groups = groups_of(module, inputs)
        dense[name] = codes * scales[:, groups.clamp(0, inputs // SIZE - 1)]
        stored = {"weight_packed": pack(codes).view(torch.int32), "weight_scale": scales, "weight_g_idx": groups.int()}
        tensors |= {f"{module}.{last}": value for last, value in stored.items()}
    (directory / "dense").mkdir()
    path = directory / "config.json"
    (directory / "dense" / "config.json").write_text(path.read_text())
    save_file(dense, directory / "dense" / "model.safetensors")
    save_file(tensors, file)
    weights = SCHEMES["pack-quantized"] | {"actorder": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def shuffled(module, inputs):
    """The same order for the modules of a layer that share their input."""
    seed = 1 if module.rsplit("_", 1)[0][-1] in "qkv" else 2 if "gate" in module or "up" in module else 3
    return (torch.arange(inputs) // SIZE)[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]


def test_act_order_gives_each_input_the_scale_of_its_group(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    act_order(tmp_path, shuffled)
    model, ids = load_model(tmp_path, dtype="float64"), list(range(30))
    assert model.layers[0].qkv.format == Int4(SIZE, act_order=True)
    twin = load_model(tmp_path / "dense", dtype="float64")
    torch.testing.assert_close(logits_of(model, ids), logits_of(twin, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("plain", ["k_proj", "q_proj"])
def test_act_order_of_modules_that_share_an_input_must_agree(plain, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    act_order(
        tmp_path, lambda module, inputs: torch.arange(inputs) // SIZE if plain in module else shuffled("q", inputs)
    )
    with pytest.raises(ConfigError, match="different orders"):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [-1, 0, 5])
def test_groups_of_unequal_sizes_are_refused(value, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    act_order(tmp_path, lambda module, inputs: torch.full((inputs,), value))
    with pytest.raises(ConfigError, match=r"model\.layers.*weight_g_idx: every group from 0 to \d must have 16 inputs"):
        load_model(tmp_path)


def test_what_is_suggested_for_the_cache_does_not_change_the_weights(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "float-quantized", "by token")
    wanted = logits_of(load_model(tmp_path, dtype="float64"), list(range(30)))
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    config = json.loads(path.read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    path.write_text(json.dumps(config))
    scales = {
        f"model.layers.{index}.self_attn.{each}_scale": torch.tensor([7.0]) for index in range(3) for each in "kv"
    }
    save_file(load_file(file) | scales, file)
    assert logits_of(load_model(tmp_path, dtype="float64"), list(range(30))).equal(wanted)


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int4", "quantization_config must be an object, not 'int4'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; supported are"),
        ({}, "quant_method None is not supported"),
        ({"config_groups": []}, "config_groups must be an object of groups"),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "weights must be an object"),
        ({"config_groups": {"a": GROUP | {"targets": "Linear"}}}, "targets must be a list of names"),
        ({"config_groups": {"a": GROUP | {"targets": ["re:("]}}}, "targets: 're:\\(' is no pattern"),
        ({"config_groups": {"a": GROUP}, "ignore": [3]}, "ignore must be a list of names"),
        ({"config_groups": {"a": GROUP}, "kv_cache_scheme": 8}, "kv_cache_scheme must be an object or null, not 8"),
        ({"config_groups": {"a": GROUP}, "transform_config": {"config_groups": {"u": {}}}}, "online transforms"),
        ({"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"num_bits": 3}}}}, "weights of 3 bits"),
        ({"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"group_size": "x"}}}}, "group_size must be"),
        ({"config_groups": {"a": GROUP | {"input_activations": 8}}}, "input_activations must be an object"),
        (
            {"config_groups": {"a": GROUP | {"input_activations": {"num_bits": 4, "strategy": "token"}}}},
            "activations of 4 bits",
        ),
    ],
)
def test_a_configuration_without_support_is_refused_with_the_reason(config, message, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    if isinstance(config, dict) and "quant_method" not in config and config:
        config = config | {"quant_method": "compressed-tensors"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(tmp_path)
    assert str(path) in str(caught.value)


def field(*path):
    """A valid configuration in which the last name of a path has another value."""

    def changed(value):
        config = copy.deepcopy(VALID)
        place = config
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        return config

    return changed


VALID = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": None,
            "weights": SCHEMES["int-quantized"] | {"symmetric": True, "dynamic": False, "group_size": None},
            "input_activations": INPUTS["by token"] | {"type": "int", "symmetric": True},
            "output_activations": None,
        }
    },
}
IN_GROUP = ("config_groups", "group_0")
REFUSED = {
    ("quant_method",): [["compressed-tensors"], {}, 3],
    ("format",): ["marlin-24", "nvfp4-pack-quantized", "float-quantized", "dense", 3, ["int-quantized"]],
    ("quantization_status",): ["quantized", 3, []],
    ("kv_cache_scheme",): ["fp8", 8, [1]],
    ("sparsity_config",): [{"format": "marlin-24"}, "dense", [1]],
    ("transform_config",): [{"config_groups": {"a": 3}}, "x", [1], 8],
    (*IN_GROUP, "format"): ["marlin-24", "pack-quantised", ["x"]],
    (*IN_GROUP, "output_activations"): [{"num_bits": 8}, 8, {}],
    (*IN_GROUP, "weights", "symmetric"): [None, "no", 0, []],
    (*IN_GROUP, "weights", "dynamic"): [True, None, "no"],
    (*IN_GROUP, "weights", "num_bits"): [None, "8", 16, [8]],
    (*IN_GROUP, "weights", "strategy"): [None, "block", ["channel"]],
    (*IN_GROUP, "input_activations"): [8, "int8", [8]],
    (*IN_GROUP, "input_activations", "dynamic"): [None, "local", 1],
    (*IN_GROUP, "input_activations", "symmetric"): [None, "no", False],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in REFUSED.items() for value in values])
def test_what_would_change_the_results_is_refused_by_its_name(path, value):
    CompressedTensors(VALID)
    name = {"num_bits": "bits", "strategy": "weights of"}.get(path[-1], path[-1])
    with pytest.raises(ConfigError, match=name):
        layout_of({"config.json": field(*path)(value)})


@pytest.mark.parametrize("value", [3, "yes", ["group"], {}])
def test_an_unknown_act_order_is_refused(value):
    with pytest.raises(ConfigError, match="actorder must be group, weight or null"):
        CompressedTensors({"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"actorder": value}}}})


def paths(value, path=()):
    yield path
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in named:
        yield from paths(inner, (*path, name))


WRONG = [None, True, 0, -1, 1e400, 4, 10**30, "", "x", "group", "re:(", [], [[]], ["x"], [None], {}, {"x": 1}]


@pytest.mark.parametrize("path", [path for path in paths(VALID) if path], ids=lambda path: ".".join(map(str, path)))
def test_any_wrong_value_is_understood_or_refused(path):
    for value in WRONG:
        try:
            layout = layout_of({"config.json": field(*path)(value)})
            layout.tensors("model.layers.0.mlp.up_proj", 80, 48)
        except ConfigError:
            pass


def test_modules_that_share_an_input_must_quantize_it_in_one_way(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "int-quantized", "by token", ignore=("lm_head", "model.layers.0.self_attn.k_proj"))
    with pytest.raises(ConfigError, match="self_attn.q_proj, .*k_proj, .* share their input, but quantize it"):
        load_model(tmp_path)


def test_a_weight_of_several_formats_keeps_the_quantization_of_its_input(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "float-quantized", "static")
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.k_proj"
    tensors = load_file(file)
    tensors[f"{name}.weight_scale"] = torch.tensor([0.01])  # one scale for the module: another format
    save_file(tensors, file)
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    weights = groups["group_0"]["weights"] | {"strategy": "tensor"}
    groups["group_1"] = groups["group_0"] | {"targets": [name], "weights": weights}
    path.write_text(json.dumps(config))
    mixed = load_model(tmp_path, dtype="float64").layers[0].qkv
    assert isinstance(mixed, DenseWeight) and mixed.activations == Activations("fp8", static=True)
    assert mixed.input_scale.item() == pytest.approx(0.02)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "pack-quantized")
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight_scale"
    tensors = load_file(file)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file)
    with pytest.raises(ConfigError, match=f"1 missing: {name}"):
        load_model(tmp_path)
    save_file(tensors | {name: tensors[name][:, :1].contiguous()}, file)
    with pytest.raises(ConfigError, match=rf"{name} has shape \[80, 1\], but config.json makes it \[80, 3\]"):
        load_model(tmp_path)
    save_file(tensors | {name: tensors[name].int()}, file)
    with pytest.raises(ConfigError, match=f"{name} is I32; supported are F64, F32, BF16, F16"):
        load_model(tmp_path)


def test_modules_that_are_ignored_stay_dense_and_so_does_a_weight_that_shares_its_input_with_them(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    dense = load_model(tmp_path, dtype="float64")
    compressed(tmp_path, "int-quantized", ignore=("lm_head", "model.layers.0.self_attn.k_proj"))
    model = load_model(tmp_path, dtype="float64")
    mixed, other = model.layers[0].qkv, model.layers[1].qkv
    assert isinstance(mixed, DenseWeight) and not isinstance(other, DenseWeight)
    assert mixed.weight[48:72].equal(dense.layers[0].qkv.weight[48:72])  # k_proj
    assert not mixed.weight[:48].equal(dense.layers[0].qkv.weight[:48])
    ids = list(range(20))
    with torch.no_grad():
        theirs = in_transformers(tmp_path)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(theirs, logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", ["Linear", "re:.*_proj$", "model.layers.0.mlp.up_proj"])
def test_a_target_names_modules_by_class_pattern_or_name(target):
    layout = CompressedTensors({"config_groups": {"a": GROUP | {"targets": [target]}}, "ignore": ["re:.*down_proj"]})
    found = [name for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
             if layout.format(f"model.layers.0.{name}", 48) != Dense()]  # fmt: skip
    assert found == (["mlp.up_proj"] if target.startswith("model") else ["mlp.up_proj", "self_attn.q_proj"])
    assert (layout.format("lm_head", 48) == Dense()) == (target != "Linear")


def test_the_most_specific_target_decides():
    exact = GROUP | {"targets": ["model.layers.0.mlp.up_proj"], "weights": GROUP["weights"] | {"group_size": 32}}
    layout = CompressedTensors({"config_groups": {"a": GROUP, "b": exact}})
    assert layout.format("model.layers.0.mlp.up_proj", 64) == Int4(32)
    assert layout.format("model.layers.1.mlp.up_proj", 64) == Int4(16)
