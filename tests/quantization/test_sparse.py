"""2:4 sparsity and magnitude pruning: what stays is what is largest, and files hold only that."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.quantize import quantize
from minillm.errors import ConfigError
from minillm.model.loader import load_model
from minillm.model.saver import save_model
from minillm.quantization import Dense, Int4, Pruned, Recipe, Sparse24, SparseWeight
from minillm.quantization.checkpoints import bitmask
from minillm.quantization.checkpoints.compressed_tensors import CompressedTensors, describe
from tests import models

from .checkpoints import logits_of

THEIRS = load_file(Path(__file__).resolve().parents[2] / "data" / "checkpoints" / "sparse.safetensors")
NAME = "model.layers.0.mlp.up_proj"
CPU = torch.device("cpu")


def weight_of(matrix, format):
    weight = format.empty(*matrix.shape, False, dtype=matrix.dtype, device=CPU)
    weight.load("weight", range(len(matrix)), iter(matrix.split(5)))
    return weight


def test_of_four_neighbors_the_two_largest_stay():
    matrix = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, -4.0], [2.0, 2.0, -2.0, 2.0, -1.0, -2.0, -3.0, -4.0]])
    assert weight_of(matrix, Sparse24()).dequantize().tolist() == [
        [0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, -4.0],
        [2.0, 2.0, 0.0, 0.0, 0.0, 0.0, -3.0, -4.0],
    ]


@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.9])
def test_the_largest_weights_of_a_whole_matrix_stay(sparsity):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(12, 20, generator=generator) * torch.arange(1, 13)[:, None]
    found = weight_of(matrix, Pruned(sparsity)).dequantize()
    kept = found != 0
    assert found[kept].equal(matrix[kept]) and kept.sum() == 240 - round(240 * sparsity)
    assert matrix[kept].abs().min() > matrix[~kept].abs().max()
    assert len(kept.sum(1).unique()) > 1, "rows keep different numbers of weights"


def test_equal_weights_are_pruned_to_the_number_that_is_asked_for():
    assert weight_of(torch.ones(4, 10), Pruned(0.3)).dequantize().sum() == 28


@pytest.mark.parametrize(
    ("name", "format", "source"), [("sparse24", Sparse24(), "weight"), ("pruned", Pruned(), "holes")]
)
def test_files_equal_those_of_an_older_compressed_tensors(name, format, source):
    own = bitmask.write(THEIRS[source], format)
    theirs = {each.removeprefix(f"{name}."): tensor for each, tensor in THEIRS.items() if each.startswith(f"{name}.")}
    dense = theirs.pop("dense")
    assert own.keys() == theirs.keys()
    assert all(own[each].equal(tensor) and own[each].dtype == tensor.dtype for each, tensor in theirs.items())
    assert bitmask.codes(NAME, 20, theirs).dequantize().equal(dense)


@pytest.mark.parametrize("method", [Method("sparse24"), Method("pruned", sparsity=0.7)], ids=lambda each: each.name)
def test_a_pruned_checkpoint_is_loaded_as_it_was_and_holds_what_stays(method, tmp_path):
    quantize(None, MethodRecipe.of(method), tmp_path / "saved")
    again, pruned = load_model(tmp_path / "saved"), load_model(recipe=Recipe({"layers.*": method.format()}))
    assert isinstance(again.layers[0].qkv, SparseWeight) and logits_of(again).equal(logits_of(pruned))
    name, stored = "model.layers.3.mlp.down_proj", load_file(tmp_path / "saved" / "model.safetensors")
    weights, kept = 256 * 768, 0.5 if method.name == "sparse24" else 0.3
    assert stored[f"{name}.compressed"].numel() == round(weights * kept)
    assert stored[f"{name}.compressed"].dtype == torch.bfloat16 and stored[f"{name}.bitmask"].nbytes == weights // 8


def test_sparse_and_quantized_weights_share_a_checkpoint(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path / "source")
    rules = {"*.down": "sparse24", "layers.0.*": {"format": "int4", "group_size": 16}, "head": "int8"}
    model = load_model(tmp_path / "source", dtype="float64", recipe=Recipe(rules))
    save_model(model, tmp_path / "source", tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype="float64")
    assert [type(weight) for weight in again.weights()] == [type(weight) for weight in model.weights()]
    assert logits_of(again).equal(logits_of(model))


def test_a_module_that_is_all_zeros_is_saved_and_loaded(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source", dtype="float64", recipe=Recipe({"layers.*": "pruned"}))
    model.layers[0].down.values.zero_()
    save_model(model, tmp_path / "source", tmp_path / "saved")
    assert logits_of(load_model(tmp_path / "saved", dtype="float64")).equal(logits_of(model))


def test_values_and_bits_that_do_not_match_are_refused(tmp_path):
    quantize(None, MethodRecipe.of(Method("pruned")), tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{NAME}.compressed": tensors[f"{NAME}.compressed"][1:]}, file)
    with pytest.raises(ConfigError, match=f"{NAME}.bitmask says that 98304 values are stored, but there are 98303"):
        load_model(tmp_path / "saved")
    save_file(tensors | {f"{NAME}.compressed": tensors[f"{NAME}.compressed"][None]}, file)
    with pytest.raises(ConfigError, match=rf"{NAME}.compressed has shape \[1, 98304\], but config.json makes it"):
        load_model(tmp_path / "saved")


def test_a_configuration_is_read_as_it_is_written():
    for format in (Sparse24(), Pruned()):
        layout = CompressedTensors(json.loads(json.dumps(describe({NAME: format, "lm_head": Dense()}))))
        assert layout.format(NAME, 64) == format and layout.format("lm_head", 64) == Dense()
    bare = CompressedTensors({"config_groups": {}, "sparsity_config": {"format": "sparse-bitmask", "ignore": [NAME]}})
    assert bare.format("model.layers.1.mlp.up_proj", 64) == Pruned() and bare.format(NAME, 64) == Dense()


def test_what_the_layout_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="sparse24 or pruned weights, not both"):
        describe({NAME: Sparse24(), "model.layers.0.mlp.down_proj": Pruned()})
    config = describe({NAME: Int4()}) | {"sparsity_config": {"format": "sparse-24-bitmask"}}
    with pytest.raises(ConfigError, match=f"{NAME} is both sparse .* and quantized"):
        CompressedTensors(config).format(NAME, 128)
    for given in ({"format": "marlin-24"}, {"sparsity_structure": "2:4"}, {"format": ["dense"]}):
        with pytest.raises(ConfigError, match="sparsity_config has format .*; supported are dense, sparse-24"):
            CompressedTensors({"config_groups": {}, "sparsity_config": given})


def test_impossible_parameters_are_refused():
    for sparsity in (0, 1, 1.5, -0.1, "0.5", None, float("nan"), True):
        with pytest.raises(ConfigError, match="sparsity must be a number between 0 and 1"):
            Pruned(sparsity)
    with pytest.raises(
        ConfigError, match="sparse24 prunes groups of 4 inputs, which do not divide.* of 42: use pruned"
    ):
        Sparse24().empty(8, 42, False, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("format", [Sparse24(), Pruned(0.8)])
def test_random_weights_are_pruned_too(format):
    weight = format.empty(64, 200, True, dtype=torch.float32, device=CPU)
    weight.randomize(torch.Generator().manual_seed(0))
    assert (weight.dequantize() == 0).float().mean().item() == pytest.approx(0.8 if format == Pruned(0.8) else 0.5)
    assert weight.dequantize().std().item() == pytest.approx(200**-0.5, rel=0.5)
