"""Factors of a module's inputs are folded into what makes these inputs, and the model computes the same."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import ConfigError
from minillm.model.loader import load_model
from tests import models
from tests.quantization.checkpoints import SIZE, logits_of, modelopt_int4, rewrite

CONFIG = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": SIZE, "exclude_modules": []}


def factors_of(inputs, seed):
    return torch.rand(inputs, generator=torch.Generator().manual_seed(seed)) + 0.5


def with_factors(directory, family, factors, **changes):
    """A quantized model whose modules have factors, (module, inputs) -> [in] or None; the directory of its twin."""

    def write(module, rows, inputs, generator):
        stored, weight = modelopt_int4(rows, inputs, generator)
        found = factors(module, inputs)
        if found is None:
            return stored, weight
        return stored | {"pre_quant_scale": found}, weight * found.double()

    models.make(family, **changes).save_pretrained(directory)
    return rewrite(directory, write, CONFIG)


@pytest.mark.parametrize(
    ("family", "heads", "changes", "dtype", "atol"),
    [
        ("gemma-multi-head-untied", 1, {}, "float64", 1e-5),  # its norms are float32 in any model, and have an offset
        ("llama-biases", 2, {"head_dim": 16}, "float64", 1e-10),  # up_proj and v_proj have biases
        ("llama-biases", 2, {"head_dim": 16}, "float32", 1e-3),
    ],
)
def test_the_model_equals_its_dense_twin_with_the_factors_in_its_columns(family, heads, changes, dtype, atol, tmp_path):
    def factors(module, inputs):
        if "o_proj" not in module:
            return factors_of(inputs, 1 if "self_attn" in module else 2 if "down" not in module else 3)
        shared = factors_of(inputs // heads, 4).view(-1, 1, 16)
        return shared.expand(-1, heads, -1).flatten()

    twin = with_factors(tmp_path, family, factors, **changes)
    found, wanted = (logits_of(load_model(each, dtype=dtype)) for each in (tmp_path, twin))
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def test_factors_of_an_output_whose_heads_share_values_must_agree(tmp_path):
    with_factors(tmp_path, "gemma-grouped", lambda name, size: factors_of(size, 0) if "o_proj" in name else None)
    message = r"layers\.0\.self_attn\.o_proj\.pre_quant_scale differs between heads .*: export the model again without"
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("left_out", ["q_proj", "gate_proj"])
@pytest.mark.parametrize("other", [None, 9])
def test_modules_that_share_their_inputs_must_have_the_same_factors(other, left_out, tmp_path):
    def factors(module, inputs):
        if left_out in module:
            return None if other is None else factors_of(inputs, other)
        return factors_of(inputs, 1) if "o_proj" not in module and "down" not in module else None

    with_factors(tmp_path, "llama-biases", factors)
    with pytest.raises(
        ConfigError, match=rf"{left_out}, .* share their inputs, but multiply them by different factors"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_that_are_no_numbers_are_refused(value, tmp_path):
    with_factors(tmp_path, "llama-biases", lambda name, size: torch.ones(size) if "down" in name else None)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.pre_quant_scale"
    tensors = load_file(file)
    tensors[name][3] = value
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj: the factors of their inputs .* must be finite"):
        load_model(tmp_path)
