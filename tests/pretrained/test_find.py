"""Which of the kinds of models a name stands for."""

from pathlib import Path

import pytest

from minillm import ConfigError
from minillm.engine.engine import Engine
from minillm.model.loader import EMBEDDED, resolve
from minillm.pretrained import download, hub


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """The names that are asked of the Hub, which has each of them: the embedded model, at a place of its cache."""
    asked, place = [], tmp_path / "models--org--small" / "snapshots" / "0123"
    place.parent.mkdir(parents=True)
    place.symlink_to(EMBEDDED)
    monkeypatch.setattr(hub, "snapshot", lambda name: asked.append(name) or place)
    return asked, place


@pytest.mark.parametrize("name", ["org/small", "org/small@v1"])
def test_org_and_name_are_a_model_of_the_hub(fetched, name):
    asked, place = fetched
    assert resolve(name) == download(name) == place
    assert asked == [name, name]


def test_an_engine_has_the_models_name_and_asks_the_hub_once(fetched):
    engine = Engine("org/small", device="cpu", num_blocks=16)
    assert (engine.name, fetched[0]) == ("org/small", ["org/small"])
    engine.close()


@pytest.mark.parametrize("name", ["org/small", "smollm2-135m", "some.gguf", "gemma-2b"])
def test_a_directory_of_that_name_comes_first(fetched, somewhere, name):
    (somewhere / name).mkdir(parents=True)
    assert resolve(name) == Path(name) and not fetched[0]


@pytest.mark.parametrize("name", ["./org/small", "org/small/", "/org/small", "a/b/c", "org/", "nothing"])
def test_what_looks_like_a_path_is_one(fetched, name):
    with pytest.raises(ConfigError, match="no such model directory: .*`minillm models` lists"):
        resolve(name)
    assert not fetched[0]


def test_a_path_that_has_the_form_of_a_model_of_the_hub_is_said_to_be_no_directory():
    """Tests run with HF_HUB_OFFLINE=1."""
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, and models/mine is neither a directory nor"):
        resolve("models/mine")


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".gguf", "~no-such-user/model", "a\0b"])
def test_what_can_be_no_path_is_one_sentence(name):
    with pytest.raises(ConfigError, match="no such model directory|cannot be read as a model's directory: File name"):
        resolve(name)


def test_a_file_of_another_kind_is_said_to_be_a_file(somewhere):
    (somewhere / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="model.safetensors is a file: give the directory"):
        resolve("model.safetensors")


def test_a_name_that_is_nearly_right_is_corrected():
    with pytest.raises(ConfigError, match="Did you mean smollm2-135m"):
        resolve("smollm2-153m")
    with pytest.raises(ConfigError, match="Did you mean gemma-2b"):
        resolve("gemma2b")
