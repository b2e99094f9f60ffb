"""Stated scales of a module's inputs are positive, and modules of one weight share the largest."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import ConfigError
from minillm.model.loader import load_model
from tests import models
from tests.quantization.test_compressed_tensors import compressed, logits_of


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_a_static_scale_that_is_not_positive_is_refused(scale, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "int-quantized", "static")
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    save_file(load_file(file) | {f"{name}.input_scale": torch.tensor([scale])}, file)
    with pytest.raises(ConfigError, match=f"{name}: the scale of its inputs must be positive"):
        load_model(tmp_path)


def test_single_scales_may_have_no_axis(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "naive-quantized", "static")
    ids, file = list(range(30)), tmp_path / "model.safetensors"
    wanted = logits_of(load_model(tmp_path, dtype="float64"), ids)
    tensors = load_file(file)
    single = {name for name, tensor in tensors.items() if name.endswith("_scale") and tensor.shape == (1,)}
    assert len(single) == 2 * 3 * 7
    save_file({name: tensor.view(()) if name in single else tensor for name, tensor in tensors.items()}, file)
    assert logits_of(load_model(tmp_path, dtype="float64"), ids).equal(wanted)


@pytest.mark.parametrize("largest", "qkv")
def test_modules_that_share_their_input_get_the_largest_of_their_static_scales(largest, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    compressed(tmp_path, "int-quantized", "static")
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.{}_proj.input_scale"
    scales = {name.format(each): torch.tensor([0.5 if each == largest else 0.25]) for each in "qkv"}
    save_file(load_file(file) | scales, file)
    assert load_model(tmp_path).layers[1].qkv.input_scale.item() == 0.5
