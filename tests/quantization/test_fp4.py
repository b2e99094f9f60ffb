"""NVFP4 and MXFP4: the nearest of sixteen values, and the bytes of compressed-tensors."""

import json

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError
from minillm.model.loader import load_model
from minillm.model.modules import modules
from minillm.model.saver import save_model
from minillm.quantization import DenseWeight, Fp4Weight, Int8, Mxfp4, Nvfp4, Recipe
from minillm.quantization.checkpoints.compressed_tensors import CompressedTensors, describe, write
from minillm.quantization.fp4 import from_exponents, pack, quantize, to_e2m1, to_exponents, unpack
from tests import models

from .checkpoints import logits_of
from .test_models import twin

CPU = torch.device("cpu")
FORMATS = (Nvfp4(), Mxfp4())
PACKING = {Nvfp4(): "nvfp4-pack-quantized", Mxfp4(): "mxfp4-pack-quantized"}
SCALES = {Nvfp4(): ("tensor_group", torch.float8_e4m3fn), Mxfp4(): ("group", torch.uint8)}
# By the definition of e2m1 (OCP MX 1.0, section 5.3.3): a sign, two bits of exponent with bias 1, one of mantissa.
VALUES = torch.tensor(
    [
        sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)
        for sign in (1, -1)
        for exponent in range(4)
        for mantissa in range(2)
    ],
    dtype=torch.float64,
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # blocks of 32 divide them


def by_format(check):
    return pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)(check)


def matrices():
    """Ordinary ones; rows of very different sizes; zeros in a row, in a block, and everywhere."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(24, 96, generator=generator)
    wide = plain * 10.0 ** torch.randint(-12, 5, (24, 1), generator=generator)
    holes = plain.clone()
    holes[3], holes[:, :32] = 0, 0
    return {"plain": plain, "bfloat16": plain.bfloat16().float(), "wide": wide, "holes": holes, "zeros": plain * 0}


def theirs(weight, format):
    """What compressed-tensors stores, with the scales that it chooses, and how it decompresses that."""
    strategy, dtype = SCALES[format]
    args = QuantizationArgs(
        num_bits=4, type="float", strategy=strategy, group_size=format.group_size, scale_dtype=dtype, zp_dtype=dtype
    )
    state = {"weight": weight}
    if format.has_global_scale:
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.unflatten(1, (-1, format.group_size))
    extremes = blocks.amin(-1), blocks.amax(-1)
    state["weight_scale"], _ = calculate_qparams(*extremes, args, global_scale=state.get("weight_global_scale"))
    compressor = BaseCompressor.get_value_from_registry(PACKING[format])
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=PACKING[format])
    done = compressor.compress(state, scheme)
    return done, compressor.decompress(done, scheme)["weight"]


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_each_number_gets_the_nearest_of_the_sixteen_values_and_ties_an_even_mantissa():
    positive = VALUES[:8]
    middles = (positive[1:] + positive[:-1]) / 2
    near = torch.cat([middles, middles.nextafter(middles * 2), middles.nextafter(middles * 0)])
    random = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    x = torch.cat([near, -near, random, torch.tensor([0.0, 6.0, 7.0, 1e30, -1e30], dtype=torch.float64)])
    found = to_e2m1(x)
    distance = (x.clamp(-6, 6)[:, None] - VALUES).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(16) % 2 == 0
    wanted = torch.where(nearest.sum(-1, keepdim=True) > 1, nearest & even, nearest)
    assert ((wanted.sum(-1) == 1) | (found == 0)).all(), "only 0 has two codes"
    assert found.double().equal((VALUES * wanted).sum(-1) / wanted.sum(-1))


def test_a_byte_holds_two_codes_the_first_in_its_low_half():
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    values = unpack(packed)
    assert values[:, 0::2].double().equal(VALUES[packed.long() & 15])
    assert values[:, 1::2].double().equal(VALUES[packed.long() >> 4])
    assert pack(values).equal(packed), "-0 keeps its sign"


def test_exponents_are_powers_of_two_and_255_is_not_a_number():
    stored = torch.arange(256, dtype=torch.uint8)
    found = from_exponents(stored, torch.float64)
    assert found[:255].equal(torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127))
    assert found[255].isnan() and to_exponents(found[:255]).equal(stored[:255])


@by_format
@pytest.mark.parametrize("kind", matrices())
def test_codes_and_scales_equal_those_of_compressed_tensors_to_the_bit(format, kind):
    weight = matrices()[kind]
    done, dequantized = theirs(weight, format)
    codes = quantize(weight, format)
    own = write("model.layers.0.mlp.up_proj", codes, format)
    assert own.keys() == done.keys()
    for name, tensor in own.items():
        assert tensor.dtype == done[name].dtype and tensor.shape == done[name].shape, name
        assert bytes_of(tensor).equal(bytes_of(done[name])), name
    assert codes.dequantize().to(dequantized.dtype).equal(dequantized)


@by_format
def test_no_scale_of_the_module_clips_and_the_largest_is_e4m3s(format):
    weight = matrices()["plain"]
    codes = quantize(weight, format)
    scales = codes.scales if codes.global_scale is None else codes.scales / codes.global_scale
    largest = weight.unflatten(1, (-1, format.group_size)).abs().amax(-1) / scales
    if format.has_global_scale:
        assert codes.scales.max() == 448 and largest.min() > 5.6 and largest.max() < 6.4
    else:
        assert 3.5 <= largest.min() < 4 < 6 < largest.max() < 7


@by_format
def test_a_weight_in_parts_is_the_rounded_matrix_and_takes_half_a_byte_and_its_scales(format):
    matrix = matrices()["plain"]
    weight = format.empty(24, 96, False, dtype=torch.float32, device=CPU)
    weight.load("weight", range(16), iter(matrix[:16].split(5)))
    weight.load("weight", range(16, 24), iter(matrix[16:].split(3)))
    parts = [quantize(part, format).dequantize() for part in (matrix[:16], matrix[16:])]
    assert weight.dequantize().equal(torch.cat(parts))
    assert weight[torch.tensor([20, 3, 3])].equal(weight.dequantize()[[20, 3, 3]])
    scales = 24 * (96 // format.group_size) + (24 * 4 if format.has_global_scale else 0)
    assert sum(tensor.nbytes for tensor in weight.stored()) == 24 * 96 // 2 + scales


@by_format
def test_random_weights_have_the_spread_of_dense_ones(format):
    weight = format.empty(256, 320, False, dtype=torch.float32, device=CPU)
    weight.randomize(torch.Generator().manual_seed(0))
    assert weight.dequantize().std().item() == pytest.approx(320**-0.5, rel=0.42 if format == Mxfp4() else 0.05)


@by_format
def test_blocks_that_do_not_divide_the_inputs_are_refused(format):
    with pytest.raises(ConfigError, match=f"{format.name} has blocks of {format.group_size}.* the 40 inputs.*int8"):
        format.empty(8, 40, False, dtype=torch.float32, device=CPU)


@by_format
@pytest.mark.parametrize("family", ["llama-biases", "gemma-multi-query"])
def test_a_saved_model_has_the_same_logits_here_and_in_transformers(format, family, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    models.make(family, **SIZES).save_pretrained(source)
    model = load_model(source, dtype="float64", recipe=Recipe({"layers.0.*": "dense", "layers.*": format.name}))
    save_model(model, source, saved)
    wanted = logits_of(model)
    again = load_model(saved, dtype="float64")
    assert isinstance(again.layers[1].down, Fp4Weight) and again.layers[1].down.format == format
    assert logits_of(again).equal(wanted)
    assert not torch.allclose(logits_of(load_model(source, dtype="float64")), wanted, atol=0.1)
    how = CompressedTensorsConfig(dequantize=True)  # which rounds what it dequantizes to bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64, quantization_config=how).eval()
    dense = twin(model)
    for layer in dense.layers[1:]:
        for weight in (layer.qkv, layer.attention_out, layer.gate_up, layer.down):
            weight.weight.copy_(weight.weight.bfloat16())
    with torch.no_grad():
        logits = theirs(torch.arange(5, 35)[None]).logits[0]
    torch.testing.assert_close(logits, logits_of(dense), rtol=0, atol=1e-4)


@by_format
def test_the_engine_says_that_it_simulates_the_format(format, caplog):
    with LLM(quantization=format.name, device="cpu") as llm:
        done = llm.generate("Once upon a time", SamplingParams(max_tokens=4, temperature=0.0))
    assert len(done[0].token_ids) == 4
    (record,) = [each for each in caplog.records if "simulated" in each.message]
    assert f"{format.name} weights are simulated, to measure accuracy: this engine has no FP4 product" in record.message


def test_the_other_formats_are_not_called_simulated(caplog):
    load_model(recipe=Recipe({"layers.*": Int8()}))
    assert not caplog.records


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_global_scale_that_is_not_positive_is_refused(scale, tmp_path):
    models.make("llama-biases", **SIZES).save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source", recipe=Recipe({"layers.*": "nvfp4"}))
    save_model(model, tmp_path / "source", tmp_path / "saved")
    file, name = tmp_path / "saved" / "model.safetensors", "model.layers.1.mlp.up_proj.weight_global_scale"
    save_file(load_file(file) | {name: torch.tensor([scale])}, file)
    with pytest.raises(ConfigError, match=f"{name} must be positive"):
        load_model(tmp_path / "saved")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "pruned"])
def test_a_weight_that_shares_its_input_with_a_dense_module_is_dequantized(name, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    models.make("llama-biases", **SIZES).save_pretrained(source)
    model = load_model(source, dtype="float64", recipe=Recipe({"layers.*": name}))
    save_model(model, source, saved)
    file, config, module = saved / "model.safetensors", saved / "config.json", "model.layers.0.self_attn.k_proj"
    tensors = {each: tensor for each, tensor in load_file(file).items() if not each.startswith(f"{module}.")}
    own = {each: tensor for each, tensor in load_file(source / "model.safetensors").items() if module in each}
    save_file(tensors | own, file)
    changed = json.loads(config.read_text())
    quantization = changed["quantization_config"]
    (quantization if name != "pruned" else quantization["sparsity_config"])["ignore"].append(module)
    config.write_text(json.dumps(changed))
    mixed = load_model(saved, dtype="float64").layers[0].qkv
    assert isinstance(mixed, DenseWeight)
    kept = torch.ones(mixed.shape[0], dtype=torch.bool)
    (rows,) = (part.rows for part in modules(model.config)["layers.0.qkv"] if part.name == module)
    kept[rows.start : rows.stop] = False
    assert mixed.weight[kept].equal(model.layers[0].qkv.dequantize()[kept])
    assert mixed.weight[~kept].equal(own[f"{module}.weight"].double())


@by_format
def test_a_configuration_is_read_as_it_is_written_and_what_differs_is_refused(format):
    name = "model.layers.0.mlp.up_proj"
    config = describe({name: format})
    assert config["format"] == PACKING[format]
    assert CompressedTensors(json.loads(json.dumps(config))).format(name, 64) == format
    group = config["config_groups"]["group_0"]
    for change in ({"group_size": 64}, {"strategy": "channel"}, {"symmetric": False}, {"group_size": None}):
        with pytest.raises(ConfigError, match="weights of 4 bits|group_size must be"):
            CompressedTensors(config | {"config_groups": {"a": group | {"weights": group["weights"] | change}}})
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    with pytest.raises(ConfigError, match="weights of 4 bits"):
        CompressedTensors(config | {"config_groups": {"a": group | {"input_activations": inputs}}})
    with pytest.raises(ConfigError, match=f"format 'pack-quantized' of {format.name} weights is not supported"):
        CompressedTensors(config | {"config_groups": {"a": group | {"format": "pack-quantized"}}})
