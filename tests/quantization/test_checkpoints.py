"""The layouts of GPTQ, AWQ and Model Optimizer: what other tools wrote is read, and the known traps are none."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import ConfigError
from minillm.model.loader import load_model
from minillm.model.saver import save_model
from minillm.quantization import Activations, Codes, Dense, Fp8, Int4, Int8
from minillm.quantization.checkpoints import layout_of, read_layout
from minillm.quantization.checkpoints.awq import Awq
from minillm.quantization.checkpoints.gptq import Gptq
from tests import models

from .checkpoints import (
    SIZE,
    awq,
    gptq,
    gptq8,
    logits_of,
    modelopt_fp8,
    modelopt_int4,
    modelopt_int8,
    numbers,
    rewrite,
)
from .test_compressed_tensors import in_transformers

MADE = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
FP8_STATIC, INT8_STATIC = Activations("fp8", static=True), Activations("int8", static=True)
# What other tools wrote (data/quantized_checkpoints.py): the formats of qkv, attention_out, gate_up and down.
FORMATS = {
    "awq": (Dense(), *3 * [Int4(SIZE, False)]),  # the tool left k_proj and v_proj out
    "gptq-8-bits": 4 * (Int8(),),
    "gptq-act-order": 4 * (Int4(SIZE, False, act_order=True),),
    "gptq-symmetric": 4 * (Int4(SIZE),),
    "gptq-v2": 4 * (Int4(SIZE, False),),
    "modelopt-awq": 4 * (Int4(SIZE),),
    "modelopt-fp8": 4 * (Fp8("tensor", FP8_STATIC),),
    "modelopt-mixed": (Fp8("tensor", FP8_STATIC), Dense(), Fp8("tensor", FP8_STATIC), Int8()),
    "modelopt-smoothquant": 4 * (Int8(INT8_STATIC),),
    "modelopt-w4a8": 4 * (Int4(SIZE, activations=FP8_STATIC),),
}
BY_TOOLS = [path.name for path in sorted(MADE.iterdir()) if path.is_dir()]
FOUR_BITS = {"bits": 4, "group_size": SIZE}
GPTQ = FOUR_BITS | {"quant_method": "gptq", "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
AWQ = FOUR_BITS | {"quant_method": "awq", "zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def changed(directory, name, change):
    """Rewrite one JSON file."""
    path = directory / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def with_fields(directory, **fields):
    """Change fields of `quantization_config`; None removes one."""

    def change(config):
        merged = config["quantization_config"] | fields
        return config | {"quantization_config": {name: each for name, each in merged.items() if each is not None}}

    changed(directory, "config.json", change)


def retensored(directory, **tensors):
    """Change tensors, by the last part of their names; functions of the old ones."""
    file = directory / "model.safetensors"
    found = load_file(file)
    for name in found:
        if change := tensors.get(name.rsplit(".", 1)[1]):
            found[name] = change(found[name]).contiguous()
    save_file(found, file)


@pytest.fixture
def copied(tmp_path):
    """Copies a checkpoint that a tool wrote: its name -> the directory."""
    return lambda name: Path(shutil.copytree(MADE / name, tmp_path / name))


@pytest.fixture
def made(tmp_path):
    """Writes a quantized model: (family, writer, config) -> the directory and its dense twin's."""

    def make(family, write, config, files=None):
        models.make(family).save_pretrained(tmp_path / "model")
        return tmp_path / "model", rewrite(tmp_path / "model", write, config, files)

    return make


def everywhere(write, **how):
    """The same writer for all projections; the head stays dense."""
    return lambda module, *shape: None if module == "lm_head" else write(*shape, **how)


def assert_equal_twin(directory, twin, dtype="float64", atol=1e-10):
    found = logits_of(load_model(directory, dtype=dtype))
    torch.testing.assert_close(found, logits_of(load_model(twin, dtype=dtype)), rtol=0, atol=atol)


def test_every_checkpoint_that_a_tool_wrote_is_tested():
    assert sorted(FORMATS) == BY_TOOLS


@pytest.mark.parametrize("name", BY_TOOLS)
def test_what_a_tool_wrote_has_the_logits_that_the_tool_says(name):
    expected = load_file(MADE / name / "expected.safetensors")
    model = load_model(MADE / name, dtype="float64")
    layer = model.layers[0]
    found = [weight.format for weight in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]
    assert found == list(FORMATS[name])
    logits = logits_of(model, expected["ids"].tolist()).float()
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"gptq-act-order"}))
def test_what_a_tool_wrote_can_be_saved_and_transformers_computes_the_same_logits(name, tmp_path):
    """In compressed-tensors' layout, where inputs have no order of their own."""
    expected = load_file(MADE / name / "expected.safetensors")
    model = load_model(MADE / name, dtype="float32")
    save_model(model, MADE / name, tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype="float64")
    assert [weight.format for weight in again.weights()] == [weight.format for weight in model.weights()]
    with torch.no_grad():
        theirs = in_transformers(tmp_path / "saved")(expected["ids"][None]).logits[0].float()
    torch.testing.assert_close(theirs, expected["logits"], rtol=0, atol=2e-5)


def test_act_order_cannot_be_saved(tmp_path):
    with pytest.raises(ConfigError, match="in another order are read, but not written"):
        save_model(load_model(MADE / "gptq-act-order"), MADE / "gptq-act-order", tmp_path / "saved")


LAYOUTS = {
    "gptq": (everywhere(gptq), GPTQ),
    "gptq-v2": (everywhere(gptq, minus=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-symmetric": (everywhere(gptq, symmetric=True), GPTQ | {"sym": True}),
    "gptq-8-bits": (everywhere(gptq8), GPTQ | {"bits": 8, "group_size": -1, "sym": True}),
    "awq": (everywhere(awq), AWQ),
    "awq-symmetric": (everywhere(awq, symmetric=True), AWQ | {"zero_point": False}),
    "W4A16_AWQ": (everywhere(modelopt_int4), MODELOPT | {"quant_algo": "W4A16_AWQ", "group_size": SIZE}),
    "W8A16": (everywhere(modelopt_int8), MODELOPT | {"quant_algo": "W8A16"}),
}


@pytest.mark.parametrize("family", ["llama-biases", "gemma-multi-query", "gemma-multi-head-untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_model_equals_its_dense_twin(layout, family, made):
    directory, twin = made(family, *LAYOUTS[layout])
    assert_equal_twin(directory, twin)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_projections_that_are_fused_keep_their_own_codes_and_scales(layout, made):
    """Each module's rows are what its tensors say, bit by bit, though three modules share a weight."""
    directory, twin = made("llama-biases", *LAYOUTS[layout])
    layer, dense = load_model(directory, dtype="float64").layers[1], load_file(twin / "model.safetensors")
    for weight, names in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        assert weight.format != Dense()
        parts = [dense[f"model.layers.1.{name}.weight"] for name in names]
        assert weight.dequantize().equal(torch.cat(parts))


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8_modules_that_are_fused_keep_their_own_scales(per_row, made):
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if per_row else "FP8"

    def write(module, *shape):
        stored, weight = modelopt_fp8(*shape, per_row=per_row)
        return stored | ({} if per_row else {"input_scale": torch.tensor(0.02)}), weight

    directory, twin = made("gemma-multi-query", write, MODELOPT | {"quant_algo": algorithm})
    dense = load_file(twin / "model.safetensors")
    weight = load_model(directory, dtype="float64").layers[2].qkv
    parts = [dense[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert weight.format == Fp8("channel" if per_row else "tensor", Activations("fp8", static=not per_row))
    assert len(weight.scales.unique()) == (len(weight.scales) if per_row else 3)
    assert weight.dequantize().equal(torch.cat(parts))


# GPTQ: zero points


def test_version_1_stores_zero_points_less_one(copied):
    """Read as version 2, every weight is exactly one scale larger."""
    directory = copied("gptq-act-order")
    right = load_model(directory, dtype="float64").layers[0].down
    with_fields(directory, checkpoint_format="gptq_v2", format=None)
    (directory / "quantize_config.json").unlink()
    wrong = load_model(directory, dtype="float64").layers[0].down
    codes = right.read(range(32))
    steps = Codes(torch.ones_like(codes.codes), codes.scales, order=codes.order).dequantize()
    torch.testing.assert_close(wrong.dequantize() - right.dequantize(), steps, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("minus", [0, 1])
def test_symmetric_zero_points_are_read_by_their_values_whatever_the_label_says(minus, label, made):
    config = {name: each for name, each in (GPTQ | {"sym": True, "checkpoint_format": label}).items() if each}
    directory, twin = made("llama-biases", everywhere(gptq, symmetric=True, minus=minus), config)
    assert_equal_twin(directory, twin)


def test_a_zero_point_of_0_borrows_from_its_neighbor():
    """As GPTQModel writes version 1: one is subtracted from each place of a whole number."""
    zeros = torch.tensor([[0, 5, 0, 0, 15, 1, 0, 8]])
    tensors = {
        "qweight": numbers(torch.zeros(8, SIZE)).t(),
        "qzeros": numbers(zeros) - 0x11111111,
        "scales": torch.ones(1, 8),
    }
    codes = Gptq({"config.json": GPTQ}).codes("model.layers.0.mlp.up_proj", SIZE, tensors)
    assert (codes.zeros.flatten() + 8).tolist() == zeros.flatten().tolist()


@pytest.mark.parametrize(
    ("name", "values"), [("gptq-v2", r"\d+, \d+, \d+, \d+, \.\.\."), ("gptq-act-order", r"\d+, .*")]
)
def test_symmetric_weights_with_other_zero_points_are_refused(name, values, copied):
    directory = copied(name)
    with_fields(directory, sym=True)
    changed(directory, "quantize_config.json", lambda config: config | {"sym": True})
    message = (
        rf"model\.safetensors: model\..*_proj\.qzeros has zero points {values}.* makes them all 7 or all 8: correct"
    )
    with pytest.raises(ConfigError, match=message):
        load_model(directory)


def test_awqs_symmetric_zero_points_are_8(copied):
    directory = copied("awq")
    with_fields(directory, zero_point=False, sym=None)
    with pytest.raises(ConfigError, match=r"qzeros has zero points .* makes them all 8"):
        load_model(directory)


# GPTQ: act-order


def test_act_order_needs_desc_act(copied):
    directory = copied("gptq-act-order")
    with_fields(directory, desc_act=False)
    changed(directory, "quantize_config.json", lambda config: config | {"desc_act": False})
    message = r"model\.safetensors: model\..*\.g_idx assigns .*, but desc_act is false: set it to true"
    with pytest.raises(ConfigError, match=message):
        load_model(directory)


def test_act_order_needs_the_groups_and_plain_order_does_not(copied):
    for name, wanted in (("gptq-v2", None), ("gptq-act-order", r"7 missing: .*\.g_idx")):
        directory = copied(name)
        file = directory / "model.safetensors"
        save_file({each: tensor for each, tensor in load_file(file).items() if not each.endswith("g_idx")}, file)
        if wanted is None:
            expected = load_file(MADE / name / "expected.safetensors")
            logits = logits_of(load_model(directory, dtype="float64"), expected["ids"].tolist())
            torch.testing.assert_close(logits.float(), expected["logits"], rtol=0, atol=2e-5)
        else:
            with pytest.raises(ConfigError, match=wanted):
                load_model(directory)


@pytest.mark.parametrize("change", [lambda groups: groups * 0, lambda groups: groups - 1, lambda groups: groups + 1])
def test_groups_that_do_not_exist_or_are_too_large_are_refused(change, copied):
    directory = copied("gptq-act-order")
    retensored(directory, g_idx=change)
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.\S+\.g_idx: every group from 0 to \d must have 16 inputs"
    ):
        load_model(directory)


def test_act_order_of_fused_projections_must_agree(made):
    def write(module, rows, inputs, generator):
        if module == "lm_head":
            return None
        seed = 1 if "q_proj" in module else 2
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
        return gptq(rows, inputs, generator, groups=(torch.arange(inputs) // SIZE)[order])

    directory, _ = made("llama-biases", write, GPTQ | {"desc_act": True})
    with pytest.raises(ConfigError, match=r"model\.safetensors: .*different orders.*: quantize the model again"):
        load_model(directory)


# AWQ: the order of rows


def test_rows_of_awqs_numbers_are_0_2_4_6_1_3_5_7():
    number = torch.tensor([[0x76543210]], dtype=torch.int32).expand(SIZE, 1)
    tensors = {"qweight": number, "qzeros": number[:1], "scales": torch.ones(1, 8)}
    codes = Awq({"config.json": AWQ}).codes("model.layers.0.mlp.up_proj", SIZE, tensors)
    assert (codes.codes[:, 3] + 8).tolist() == (codes.zeros[:, 0] + 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


# Heads and lists of what is not quantized


def head_too(write, **how):
    return lambda module, *shape: write(*shape, **how)


@pytest.mark.parametrize(
    ("write", "config"),
    [
        (head_too(gptq), GPTQ | {"lm_head": True}),
        (head_too(awq), AWQ | {"lm_head": True, "modules_to_not_convert": None}),
        (head_too(modelopt_int4), {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": SIZE}),
    ],
    ids=["gptq", "awq", "modelopt"],
)
def test_a_quantized_head_is_read_and_the_embedding_stays_dense(write, config, made):
    directory, twin = made("gemma-multi-head-untied", write, config)
    model = load_model(directory, dtype="float64")
    assert isinstance(model.head.format, Int4) and model.embedding.format == Dense()
    assert_equal_twin(directory, twin)


def test_a_quantized_head_is_used_even_if_the_configuration_ties_it(made):
    directory, twin = made("gemma-multi-head-untied", head_too(gptq), GPTQ | {"lm_head": True})
    changed(directory, "config.json", lambda config: config | {"tie_word_embeddings": True})
    assert load_model(directory).head.format == Int4(SIZE, False)
    assert_equal_twin(directory, twin)


def test_a_dense_head_of_a_quantized_checkpoint_is_used_even_if_the_configuration_ties_it(made):
    directory, twin = made("gemma-multi-head-untied", everywhere(gptq), GPTQ)
    changed(directory, "config.json", lambda config: config | {"tie_word_embeddings": True})
    assert_equal_twin(directory, twin)


LEFT_OUT = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj", "lm_head")
WITHOUT = {
    "gptq-dynamic": (gptq, GPTQ | {"dynamic": {rf"-:.*\.{name}$": {} for name in (r"0\..*k_proj", r"1\..*down_proj")}}),
    "awq": (awq, AWQ | {"modules_to_not_convert": list(LEFT_OUT)}),
    "modelopt": (modelopt_int4, MODELOPT | {"quant_algo": "W4A16_AWQ", "group_size": SIZE, "ignore": list(LEFT_OUT)}),
    "modelopt-patterns": (
        modelopt_int4,
        MODELOPT | {"quant_algo": "W4A16_AWQ", "group_size": SIZE, "ignore": ["*0.self_attn.k*", *LEFT_OUT[1:]]},
    ),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_modules_that_a_list_leaves_out_stay_dense(kind, made):
    write, config = WITHOUT[kind]
    directory, twin = made("llama-biases", lambda name, *shape: None if name in LEFT_OUT else write(*shape), config)
    first, second, third = load_model(directory, dtype="float64").layers
    assert [each.qkv.format == Dense() for each in (first, second, third)] == [True, False, False]
    assert [each.down.format == Dense() for each in (first, second, third)] == [False, True, False]
    assert_equal_twin(directory, twin)


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        (AWQ | {"modules_to_not_convert": ["layers.1"]}, ["1.mlp.up_proj", "1.self_attn.q_proj"]),
        (AWQ | {"modules_to_not_convert": ["mlp.gate", "model.layers.1.self_attn.q_proj"]}, ["1.self_attn.q_proj"]),
        (MODELOPT | {"ignore": ["model.layers.1"]}, ["1.mlp.up_proj", "1.self_attn.q_proj"]),
        (MODELOPT | {"ignore": ["model.layers.1.*"]}, ["1.mlp.up_proj", "1.self_attn.q_proj"]),
        (MODELOPT | {"ignore": ["*.self_attn*"]}, ["1.self_attn.q_proj", "10.self_attn.q_proj"]),
        (
            GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.gate_proj", "mlp.down_proj"]]},
            ["1.self_attn.q_proj", "10.self_attn.q_proj"],
        ),
        (GPTQ | {"dynamic": {r"-:model\.layers\.1\.": {}}}, ["1.mlp.up_proj", "1.self_attn.q_proj"]),
    ],
)
def test_a_name_in_a_list_leaves_out_whole_parts_of_names_only(config, left_out):
    layout = layout_of({"config.json": config})
    every = [f"{index}.{name}" for index in (1, 10) for name in ("mlp.up_proj", "self_attn.q_proj")]
    assert [name for name in every if layout.format(f"model.layers.{name}", 64) == Dense()] == left_out


def test_dynamic_gives_modules_settings_of_their_own_and_the_first_match_decides(made):
    rules = {
        "+:.*\\.0\\.mlp\\.down": {"sym": True},
        ".*down": {"bits": 8, "group_size": -1, "sym": True},
        "-:.*\\.1\\.": {},
        "+:.*\\.1\\.": {"bits": 8},
    }

    def write(module, *shape):
        if module == "lm_head" or (".1." in module and "down" not in module):
            return None
        return gptq(*shape, symmetric="down" in module) if "down" not in module or ".0." in module else gptq8(*shape)

    directory, twin = made("llama-biases", write, GPTQ | {"dynamic": rules})
    formats = [(layer.qkv.format, layer.down.format) for layer in load_model(directory).layers]
    assert formats == [(Int4(SIZE, False), Int4(SIZE)), (Dense(), Int8()), (Int4(SIZE, False), Int8())]
    assert_equal_twin(directory, twin)


def test_biases_of_zeros_that_the_model_does_not_have_are_ignored_and_others_refused(made):
    def write(module, rows, *rest):
        stored, weight = gptq(rows, *rest)
        return (stored | {"bias": torch.zeros(rows).half()}, weight) if module != "lm_head" else None

    directory, twin = made("gemma-multi-head-untied", write, GPTQ)
    assert_equal_twin(directory, twin)
    retensored(directory, bias=lambda bias: bias + 0.5)
    message = r"model\.safetensors: model\.layers\.0\.\S+\.bias is not 0, but .*: set attention_bias or mlp_bias"
    with pytest.raises(ConfigError, match=message):
        load_model(directory)


# Configurations in several files


@pytest.mark.parametrize(
    ("write", "name", "config"),
    [
        (gptq, "quantize_config.json", {"bits": 4, "group_size": SIZE, "sym": False, "desc_act": False}),
        (awq, "quant_config.json", {"w_bit": 4, "q_group_size": SIZE, "zero_point": True, "version": "GEMM"}),
        (
            modelopt_int4,
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": SIZE, "exclude_modules": ["lm_head"]}},
        ),
    ],
)
def test_a_tools_own_file_alone_describes_the_weights(write, name, config, made):
    directory, twin = made("llama-biases", everywhere(write), None, {name: config})
    assert_equal_twin(directory, twin)


def test_what_one_file_lacks_is_read_from_the_other(copied):
    """Model Optimizer's config.json has no group size."""
    directory = copied("modelopt-awq")
    assert "group_size" not in json.loads((directory / "config.json").read_text())["quantization_config"]
    (directory / "hf_quant_config.json").unlink()
    with pytest.raises(ConfigError, match="config.json: group_size must be a whole number from 1, not None"):
        load_model(directory)


@pytest.mark.parametrize(
    ("name", "file", "fields", "message"),
    [
        ("gptq-v2", "quantize_config.json", {"group_size": 32}, "group_size is 32 in quantize_config.json, but"),
        ("gptq-v2", "quantize_config.json", {"checkpoint_format": "gptq"}, "checkpoint_format is 'gptq' in quantize"),
        ("gptq-v2", "quantize_config.json", {"sym": True}, "sym is True in quantize_config.json, but sym in config"),
        ("gptq-v2", "quantize_config.json", {"quant_method": "awq"}, "quant_method is gptq in config.json and awq in"),
        ("gptq-v2", "hf_quant_config.json", {"quantization": {}}, "and modelopt in hf_quant_config.json: remove the"),
        (
            "modelopt-fp8",
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W8A16"}},
            "quant_algo is 'W8A16' in hf_quant_config.json, but quant_algo in config.json has 'FP8': correct the one",
        ),
        (
            "modelopt-fp8",
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8", "exclude_modules": []}},
            "exclude_modules is .* in hf_quant_config.json, but ignore in config.json has",
        ),
    ],
)
def test_files_that_contradict_each_other_are_named(name, file, fields, message, copied):
    directory = copied(name)
    path = directory / file
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old | fields))
    with pytest.raises(ConfigError, match=message) as caught:
        read_layout(directory)
    assert str(directory / "config.json") in str(caught.value) and str(path) in str(caught.value)


def test_the_order_of_a_list_is_no_contradiction(copied):
    directory = copied("modelopt-fp8")

    def reverse(config):
        return config | {
            "quantization": config["quantization"] | {"exclude_modules": ["model.embed_tokens", "lm_head"]}
        }

    changed(directory, "hf_quant_config.json", reverse)
    assert read_layout(directory).format("lm_head", 32) == Dense()
