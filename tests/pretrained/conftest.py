"""For the tests in this folder: the Hub, as `standin` plays it, with a small model."""

import shutil

import pytest
from huggingface_hub import constants

from minillm.tokenizer import train_bpe, write_tokenizer
from tests import models
from tests.pretrained import standin
from tests.pretrained.standin import NAME, OTHERS, TEXT, at


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with a tokenizer, as transformers saves it."""
    place = tmp_path_factory.mktemp("model")
    write_tokenizer(place, *train_bpe(TEXT, 300))
    models.make("llama3-grouped", vocab_size=300).save_pretrained(place)
    (place / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return place


@pytest.fixture(scope="module")
def sharded(model, tmp_path_factory):
    """The same model in several files."""
    place = tmp_path_factory.mktemp("sharded")
    shutil.copytree(model, place, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    models.reference(model).save_pretrained(place, max_shard_size="150KB")
    return place


@pytest.fixture(scope="module")
def server():
    with standin.running() as hub:
        yield hub


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """The Hub with nothing in it, and an empty cache; no token."""
    server.repositories, server.asked, server.tokens = {}, [], {}
    server.answer, server.breaks = None, set()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses"), raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    at(monkeypatch, server.url)
    return server


@pytest.fixture
def repository(hub, model):
    hub.repositories[NAME] = found = standin.Repository()
    found.commit(standin.contents(model) | OTHERS)
    return found
