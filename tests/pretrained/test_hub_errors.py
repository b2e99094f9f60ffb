"""When the Hub cannot be had, refuses, or has something else: the cache is used, or one sentence says what to do."""

import errno
import logging
import os
import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from minillm.pretrained.hub import snapshot
from tests.pretrained import standin
from tests.pretrained.standin import NAME, at, refusal

ROOT = Path(__file__).resolve().parents[2]


# No connection


@pytest.mark.parametrize("how", ["offline", "refused", "silent", "a login page", "failing", "private by now"])
def test_without_the_hub_a_complete_copy_in_the_cache_is_used(hub, repository, how, monkeypatch, caplog, dead_url):
    folder = snapshot(NAME)
    hub.asked.clear()
    with unavailable(hub, how, monkeypatch, dead_url), caplog.at_level(logging.WARNING, "minillm"):
        assert snapshot(NAME) == folder
    said = [record.getMessage() for record in caplog.records if record.name.startswith("minillm")]
    if how == "offline":
        assert hub.asked == [] and said == []
    else:
        assert len(said) == 1 and said[0].endswith(f"the copy in the cache is used: {folder}")


def unavailable(hub, how, monkeypatch, dead_url):
    """A context in which the Hub cannot be had."""
    listener = socket.socket()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "refused":
        at(monkeypatch, dead_url)
    elif how == "silent":  # connections are made, by the system, and never answered
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        at(monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
    elif how == "a login page":
        hub.answer = (200, {"Content-Type": "text/html"}, b"<html>Welcome to the library. Please log in.</html>")
    elif how == "another API":
        hub.answer = (200, {"Content-Type": "application/json"}, b'{"id": "a/b", "sha": null, "siblings": []}')
    elif how == "failing":
        hub.answer = (502, {}, b"")
    elif how == "busy":
        hub.answer = (429, {}, b"")
    else:
        hub.repositories.clear()
    return listener


@pytest.mark.parametrize(
    ("how", "why", "way_out"),
    [
        ("offline", "HF_HUB_OFFLINE is set", "unset it, or fetch the model where there is a network with"),
        ("refused", "{site} cannot be reached (ConnectError", "check the network and HF_ENDPOINT, then try"),
        ("silent", "{site} does not answer", "check the network, then try"),
        (
            "a login page",
            "{site} does not answer as the Hugging Face Hub does",
            "check HF_ENDPOINT and the proxy",
        ),
        ("another API", "{site} does not answer as the Hugging Face Hub does", "check HF_ENDPOINT and the proxy"),
        ("failing", "{site} answers with status 502", "try again later with"),
    ],
)
def test_without_the_hub_and_a_copy_the_error_says_what_to_do(
    hub, repository, how, why, way_out, monkeypatch, dead_url
):
    with unavailable(hub, how, monkeypatch, dead_url):
        said = refusal()
    assert said.startswith(why.format(site=constants.ENDPOINT))
    state = f", and {NAME} is neither a directory nor in the cache at {constants.HF_HUB_CACHE}: {way_out}"
    assert state in said and said.endswith(f"`hf download {NAME}`")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("busy", "has had too many requests from here: wait some minutes, or log in with `hf auth login` or set"),
        (
            "not there",
            f"has no model {NAME}, or it is private: check the spelling, or name a directory that exists; if",
        ),
    ],
)
def test_what_the_hub_refuses_without_a_copy(hub, repository, how, says, monkeypatch, dead_url):
    with unavailable(hub, how, monkeypatch, dead_url):
        assert refusal().startswith(f"{hub.url} {says}")


# Refusals of the Hub


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (None, "is gated: accept its terms at {site}/{name}, then log in with `hf auth login` or set HF_TOKEN"),
        (standin.TOKEN, "is gated: accept its terms at {site}/{name}, with the account of your token"),
    ],
)
def test_a_gated_model(hub, repository, token, says, monkeypatch):
    repository.gated = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refusal() == f"{NAME} {says.format(site=hub.url, name=NAME)}"


def test_a_token_that_is_not_valid(hub, repository, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_mistyped")
    assert refusal().startswith(f"{hub.url} rejects the token: log in with `hf auth login` or set HF_TOKEN")


def test_a_token_without_the_right_to_read(hub, repository):
    hub.answer = (403, {"X-Error-Message": "no"}, b"")
    assert refusal() == (
        f"the token may not read {NAME}: give it the right to at {hub.url}/settings/tokens, or use another"
    )


def test_a_model_that_is_not_there_for_a_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", standin.TOKEN)
    assert refusal().endswith("; if it is private, use a token that may read it")


def test_a_revision_that_is_not_there_is_not_replaced_by_what_the_cache_has(hub, repository):
    snapshot(f"{NAME}@main")
    repository.commit(repository.files[repository.revisions["main"]], "v1")
    snapshot(f"{NAME}@v1")
    del repository.revisions["v1"]
    assert refusal(f"{NAME}@v1") == (
        f"{NAME} has no revision v1: its branches, tags and commits are at {hub.url}/{NAME}/tree/main"
    )


@pytest.mark.parametrize(
    ("has", "says"),
    [
        (["config.json", "pytorch_model.bin"], "has no *.safetensors, only pytorch_model.bin, which minillm does not"),
        (["b.gguf", "a.gguf"], "has its weights only as GGUF (a.gguf, b.gguf), not as safetensors"),
        (["config.json", "x.gguf", "onnx/model.safetensors"], "has its weights only as GGUF (x.gguf), not as"),
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter for another model"),
        (["model.safetensors"], "has no config.json"),
        (["config.json"], "has no weights"),
    ],
)
def test_a_repository_without_weights_that_can_be_loaded(hub, has, says):
    hub.repositories[NAME] = found = standin.Repository()
    found.commit(dict.fromkeys(has, b"{}"))
    assert refusal().startswith(f"{NAME} {says}")
    assert hub.downloaded() == []
    assert refusal(tokenizer_only=True).startswith(f"{NAME} has no tokenizer.json")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"<html>", "is not JSON"),
        (b"{}", "weight_map must give each tensor's file by its name"),
        (b'{"weight_map": {"a": "../../token"}}', "names ../../token, which the repository lacks"),
    ],
)
def test_a_wrong_index(hub, index, says):
    hub.repositories[NAME] = found = standin.Repository()
    found.commit({"config.json": b"{}", "a.safetensors": b"", "model.safetensors.index.json": index})
    assert says in refusal()


# The disk


def test_a_model_that_does_not_fit_on_the_disk_is_refused_before_its_weights_are_downloaded(
    hub, repository, monkeypatch
):
    size = len(repository.files[repository.revisions["main"]]["model.safetensors"])
    usage = shutil.disk_usage(ROOT)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    assert refusal() == (
        f"{NAME} needs 0.0 GB more, and {constants.HF_HUB_CACHE} has 0.0 GB free: free some space, or set HF_HOME to a "
        "directory on a larger disk"
    )
    assert "model.safetensors" not in hub.downloaded()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    folder = snapshot(NAME)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))  # nothing more is needed
    assert snapshot(NAME) == folder
    repository.commit(repository.files[repository.revisions["main"]] | {"README.md": b"more"}, "v2")
    assert snapshot(NAME, revision="v2") != folder


def test_a_disk_that_fills_up_meanwhile(hub, repository, monkeypatch):
    def download(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", download)
    assert refusal() == (
        f"{NAME} could not be downloaded because the disk of {constants.HF_HUB_CACHE} is full: free some space, or set "
        "HF_HOME to a directory on a larger disk"
    )


def test_a_cache_that_cannot_be_written(hub, repository, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    said = refusal()
    assert said.startswith(f"{NAME} could not be downloaded because {cache}") and "(Not a directory)" in said
    assert said.endswith(f"make the cache at {cache} writable, or set HF_HOME to a directory that is")
