"""Models with any mix of weight formats: a quantized model equals its dequantized twin."""

import pytest
import torch

import minillm
from minillm.errors import ConfigError
from minillm.model.loader import load_model
from minillm.model.saver import save_model
from minillm.ops import on, reference
from minillm.quantization import Dense, DenseWeight, Int8, Int8Weight, Recipe
from minillm.quantization.checkpoints import read_layout
from tests import models
from tests.model.test_decoder import Paged, prompts

FP8 = {"format": "fp8", "activations": "fp8"}
MIXES = {
    "everything": {"*": "int8"},
    "int4": {"*": {"format": "int4", "group_size": 16}},
    "int4 with zero points": {"*": {"format": "int4", "group_size": 8, "symmetric": False}},
    "fp8 by channel": {"*": FP8},
    "fp8 by tensor": {"*": FP8 | {"scales": "tensor"}},
    "int8 activations": {"*": {"format": "int8", "activations": "int8"}},
    "nvfp4": {"*": "nvfp4"},
    "2:4 sparsity": {"*": "sparse24"},
    "pruned": {"*": {"format": "pruned", "sparsity": 0.3}},
    "four formats": {"*.qkv": "int8", "*.attention_out": "fp8", "layers.*": {"format": "int4", "group_size": 16}},
    "one projection of one layer": {"layers.1.down": "int8"},
    "head": {"head": "int8"},
    "all but the first layer": {"layers.0.*": "dense", "layers.*": "int8"},
}
FAMILIES = ("gemma-multi-query", "gemma-multi-head-untied", "llama-biases", "qwen3-sliding-tied")


def logits(model):
    paged = Paged(model)
    first, second = prompts(20, 11)
    rows = paged.admit(), paged.admit()
    prefilled = paged.forward({}, dict(zip(rows, (first, second), strict=True)), every=True)
    return torch.cat([prefilled, paged.forward({rows[0]: [5], rows[1]: [9]}, {})])


def dequantized(weight):
    return DenseWeight(weight.dequantize().clone(), weight.bias, weight.input_scale, Dense(weight.activations))


def twin(model):
    """The same model with every weight dequantized to a dense one."""
    tied = model.head is model.embedding
    model.head = dequantized(model.head)
    model.embedding = model.head if tied else dequantized(model.embedding)
    for layer in model.layers:
        for name in ("qkv", "attention_out", "gate_up", "down"):
            setattr(layer, name, dequantized(getattr(layer, name)))
    return model


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_model_equals_its_dequantized_twin(family, mix, tmp_path):
    models.make(family).save_pretrained(tmp_path)
    recipe = Recipe(MIXES[mix])
    model = load_model(tmp_path, dtype="float64", recipe=recipe)
    quantized = logits(model)
    kinds = {type(weight) for weight in model.weights()}
    assert kinds - {DenseWeight} and ("*" in MIXES[mix]) == (DenseWeight not in kinds)
    torch.testing.assert_close(quantized, logits(twin(model)), rtol=0, atol=1e-9)
    assert not torch.allclose(quantized, logits(load_model(tmp_path, dtype="float64")), rtol=0, atol=1e-4)


def test_a_tied_matrix_is_quantized_once_for_embedding_and_head(tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float64", recipe=Recipe({"head": "int8"}))
    assert isinstance(model.head, Int8Weight) and model.embedding is model.head
    dense = load_model(tmp_path, dtype="float64")
    assert model.num_parameters == dense.num_parameters
    vocab, hidden = model.head.shape
    assert dense.nbytes - model.nbytes == vocab * hidden * 7 - vocab * 8  # one byte instead of 8, plus the scales


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("activations", [None, "same", "same-static"])
def test_a_tied_head_keeps_how_its_inputs_are_quantized(activations, kind, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    models.make("gemma-multi-query").save_pretrained(source)
    if activations is not None:
        activations = activations.replace("same", kind)
    recipe = Recipe({"head": {"format": kind, "activations": activations}})
    model = load_model(source, dtype="float64", recipe=recipe)
    dynamic = activations == kind
    assert model.head is model.embedding and (model.head.activations is not None) == dynamic
    save_model(model, source, saved)
    again = load_model(saved, dtype="float64")
    assert again.embedding is again.head and again.head.format == model.head.format
    assert logits(again).equal(logits(model))
    layout = read_layout(saved)
    assert layout.format("model.embed_tokens", 32).activations is None, "other programs gather its rows"
    assert layout.format("lm_head", 32) == (model.head.format if dynamic else Dense())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("operation", ["linear", "embedding", "lm_head"])
def test_the_cpus_implementations_for_a_format_equal_the_default(operation, dtype, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype, recipe=Recipe({"*": "int8"}))
    weight = model.layers[0].qkv if operation == "linear" else model.head
    x, rest = torch.randn(3, model.config.hidden_size, dtype=model.dtype), ()
    if operation == "embedding":
        x, rest = torch.tensor([3, 0, 9]), (2.0,)
    wanted = getattr(reference, operation)(x, weight, *rest)
    torch.testing.assert_close(getattr(on("cpu"), operation)(x, weight, *rest), wanted)


def test_a_linear_override_is_called_with_weights_of_every_format(tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float64", recipe=Recipe(MIXES["all but the first layer"]))
    own, seen = logits(model), set()

    def linear(x, weight):
        seen.add(type(weight))
        return x @ weight.dequantize().t()

    with minillm.using(linear=linear):
        torch.testing.assert_close(logits(model), own, rtol=0, atol=1e-9)
    assert seen == {DenseWeight, Int8Weight}


def test_random_weights_can_have_any_format(tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    made = [load_model(tmp_path, load_format="dummy", seed=seed, recipe=Recipe({"*": "int8"})) for seed in (3, 3, 4)]
    one, same, other = map(logits, made)
    assert one.equal(same) and not one.equal(other) and 0.1 < one.std() < 10


STATIC = [{"format": name, "activations": f"{kind}-static"}
          for name in ("dense", "int8", "fp8", "int4") for kind in ("int8", "fp8")]  # fmt: skip


@pytest.mark.parametrize("rule", STATIC)
def test_static_activations_need_calibration(rule, tmp_path):
    rule = rule | ({"group_size": 16} if rule["format"] == "int4" else {})
    models.make("llama-biases").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="need scales from calibration.*minillm quantize --static"):
        load_model(tmp_path, recipe=Recipe({"layers.*": rule}))
    made = load_model(tmp_path, load_format="dummy", dtype="float64", recipe=Recipe({"layers.*": rule}))
    weight = made.layers[0].down
    assert weight.input_scale > 0 and any(each is weight.input_scale for each in weight.stored())
    assert 0.1 < logits(made).std() < 10


def test_int8_products_in_half_precision_stay_in_its_range():
    weight = Int8().empty(4, 2048, True, dtype=torch.float16, device=torch.device("cpu"))
    weight.load("weight", range(4), [torch.full((4, 2048), 0.02)])
    weight.load("bias", range(4), [torch.ones(4)])
    x = torch.full((1, 2048), 2.0, dtype=torch.float16)
    found = on("cpu").linear(x, weight)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, reference.linear(x, weight), rtol=1e-3, atol=0)
