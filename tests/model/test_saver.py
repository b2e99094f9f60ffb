"""Saving: a directory is written whole or not at all, and what cannot be written is refused before any work."""

import json
import os
import stat

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from minillm.errors import ConfigError
from minillm.model import saver
from minillm.model.loader import load_model
from minillm.model.saver import check_free, save_model
from minillm.quantization import Recipe
from tests import models


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    models.make("llama-biases").save_pretrained(directory)
    (directory / "vocab.json").write_text("{}")
    (directory / "merges.txt").write_text("")
    return directory


@pytest.fixture(scope="module")
def model(source):
    return load_model(source, recipe=Recipe({"*.qkv": "int8"}))


def place(kind, tmp_path):
    """A directory to write, and where the files must then lie."""
    real = tmp_path / "real"
    if kind == "new":
        return real, real
    if kind == "nested":
        return real / "a" / "b", real / "a" / "b"
    if kind in ("empty", "link"):
        real.mkdir()
    if kind in ("link", "dangling link"):
        (tmp_path / "link").symlink_to(real)
        return tmp_path / "link", real
    return real, real


@pytest.mark.parametrize("kind", ["new", "nested", "empty", "link", "dangling link"])
def test_a_new_or_empty_directory_is_written(kind, model, source, tmp_path):
    directory, real = place(kind, tmp_path)
    assert check_free(directory) == real
    size = save_model(model, source, directory)
    assert size == sum(tensor.nbytes for tensor in load_file(real / "model.safetensors").values())
    assert {"config.json", "vocab.json", "merges.txt", "model.safetensors"} <= set(os.listdir(real))
    assert not [name for name in os.listdir(real) if name.startswith(".")]
    again = load_model(directory)
    assert all(mine.equal(theirs) for mine, theirs in zip(again.tensors(), model.tensors(), strict=True))


def test_the_current_directory_is_written_if_it_is_empty(model, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(model, source, saver.Path("."))
    assert (tmp_path / "config.json").is_file() and os.path.exists("config.json")


@pytest.mark.parametrize(
    "name", ["file", "file/sub", "full", "loop", "/proc/new", "/proc/self/new/sub", "x" * 300, "null\0byte"]
)
def test_what_cannot_be_written_is_refused_before_any_work(name, model, source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("keep")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("keep")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(saver, "_tensors", lambda *given: pytest.fail("work was done"))
    for call in (check_free, lambda directory: save_model(model, source, directory)):
        with pytest.raises(ConfigError, match="not an empty directory|cannot be written") as refused:
            call(tmp_path / name)
        assert ("cannot be written" in str(refused.value)) != ("an empty directory" in str(refused.value)), "one reason"
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("kind", ["new", "empty"])
@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_nothing(kind, error, model, source, tmp_path, monkeypatch):
    def fail(*given, **more):
        raise error

    directory, real = place(kind, tmp_path)
    monkeypatch.setattr(saver, "save_file", fail)
    with pytest.raises(type(error) if not isinstance(error, SafetensorError) else OSError):
        save_model(model, source, directory)
    assert not real.exists() if kind == "new" else os.listdir(real) == []


def test_files_have_the_mode_that_the_umask_gives(model, source, tmp_path):
    before = os.umask(0o027)
    try:
        save_model(model, source, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {
        name: stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in ("model.safetensors", "config.json")
    }
    assert modes == {"model.safetensors": 0o640, "config.json": 0o640}


def test_only_tensors_that_share_storage_are_copied():
    whole = torch.randn(8, 4)
    assert saver._owned(whole).data_ptr() == whole.data_ptr()
    part = saver._owned(whole[2:4])
    assert part.equal(whole[2:4]) and part.untyped_storage().nbytes() == part.nbytes


def test_dense_weights_with_quantized_activations_are_refused_before_any_file_is_written(source, tmp_path):
    model = load_model(source, recipe=Recipe({"layers.*": {"format": "dense", "activations": "fp8"}}))
    with pytest.raises(ConfigError, match="dense weights with quantized activations cannot be saved"):
        save_model(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_quantized_weights_has_no_quantization_config(source, tmp_path):
    path = tmp_path / "source" / "config.json"
    path.parent.mkdir()
    config = json.loads((source / "config.json").read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "compressed-tensors"}}))
    save_model(load_model(source), path.parent, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
