"""Models with any mix of weight formats: a quantized model equals its dequantized twin."""

import pytest
import torch

import minillm
from minillm.model.loader import load_model
from minillm.ops import on, reference
from minillm.quantization import DenseWeight, Int8Weight, Recipe
from tests import models
from tests.model.test_decoder import Paged, prompts

MIXES = {
    "everything": {"*": "int8"},
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
    return DenseWeight(weight.dequantize().clone(), weight.bias)


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
    assert Int8Weight in kinds and (mix == "everything") == (DenseWeight not in kinds)
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
