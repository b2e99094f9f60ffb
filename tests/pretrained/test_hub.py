"""Models of the Hub: which files are downloaded, and what the cache is good for.

The Hub is a server of this machine (`standin`); the library that asks it is the real one.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import example, given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.errors import MissingPackage
from minillm.pretrained.hub import is_repository, snapshot
from minillm.tokenizer import Tokenizer
from tests import models
from tests.pretrained import standin
from tests.pretrained.standin import NAME, OTHERS, TEXT, refusal

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def tokens(folder: Path, prompt: list[int], count: int = 12) -> list[int]:
    with LLM(folder, dtype="float64", device="cpu") as llm:
        return llm.generate(prompt, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))[0].token_ids


def expected(folder: Path, prompt: list[int], monkeypatch, count: int = 12) -> list[int]:
    """What transformers generates."""
    models.keep_float64(monkeypatch)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        reference = models.reference(folder, dtype=torch.float64)
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


# What is downloaded


def test_only_the_files_that_the_engine_reads_are_downloaded(hub, repository, model, monkeypatch):
    folder = snapshot(NAME)
    assert files(folder) == set(hub.downloaded()) == NEEDED
    assert Tokenizer.from_pretrained(folder).decode(Tokenizer.from_pretrained(folder).encode(TEXT[0])) == TEXT[0]
    prompt = Tokenizer.from_pretrained(folder).encode("The old mill")
    assert tokens(folder, prompt) == expected(model, prompt, monkeypatch)


def test_of_several_sets_of_weights_the_index_says_which(hub, sharded, monkeypatch):
    own = standin.contents(sharded)
    shards = {name for name in own if name.startswith("model-0")}
    assert len(shards) > 2
    hub.repositories[NAME] = found = standin.Repository()
    found.commit(own | {"model.safetensors": b"the same again"} | OTHERS)
    folder = snapshot(NAME)
    assert files(folder) == NEEDED - {"model.safetensors"} | shards | {"model.safetensors.index.json"}
    prompt = [5, 17, 80, 3]
    assert tokens(folder, prompt) == expected(sharded, prompt, monkeypatch)


def test_weights_under_another_name_are_downloaded_and_so_is_how_they_are_quantized(hub, model):
    own = standin.contents(model) | {"quantize_config.json": b"{}"}
    own["consolidated.safetensors"] = own.pop("model.safetensors")
    hub.repositories[NAME] = found = standin.Repository()
    found.commit(own)
    folder = snapshot(NAME)
    assert {"consolidated.safetensors", "quantize_config.json"} <= files(folder)


def test_tokenizer_only(hub, repository):
    folder = snapshot(NAME, tokenizer_only=True)
    assert files(folder) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert Tokenizer.from_pretrained(folder).vocab_size == 300
    hub.asked.clear()
    assert files(snapshot(NAME)) == NEEDED
    assert "tokenizer.json" not in hub.downloaded()


@pytest.mark.parametrize("form", ["name@revision", "argument", "both"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, repository, model, form):
    old = repository.revisions["main"]
    new = repository.commit(standin.contents(model) | {"generation_config.json": b"{}"}, "refs/pr/1")
    for revision, commit in (("refs/pr/1", new), (old, old), ("main", old)):
        name = NAME if form == "argument" else f"{NAME}@{revision}"
        assert snapshot(name, revision=None if form == "name@revision" else revision).name == commit
    assert refusal(f"{NAME}@main", revision="v2").startswith(f"{NAME}@main names the revision 'main' and revision='v2'")


def test_a_token_is_sent_to_the_hub_and_to_no_other_host(hub, repository, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", standin.TOKEN)
    snapshot(NAME)
    sent = {path: token for path, token in hub.tokens.items() if "/content/" not in path or "safetensors" in path}
    assert {token for path, token in sent.items() if "/content/" not in path} == {f"Bearer {standin.TOKEN}"}
    assert [token for path, token in sent.items() if "/content/" in path] == [None]


# The cache


def test_for_a_cached_commit_the_hub_is_not_asked(hub, repository):
    commit = repository.revisions["main"]
    folder = snapshot(f"{NAME}@{commit}")
    hub.asked.clear()
    assert snapshot(NAME, revision=commit) == folder
    assert hub.asked == []


def test_a_branch_is_looked_up_and_only_what_changed_is_downloaded(hub, repository, model, monkeypatch):
    first = snapshot(NAME)
    hub.asked.clear()
    assert snapshot(NAME) == first
    assert hub.asked == [f"GET /api/models/{NAME}/revision/main"]
    repository.commit(standin.contents(model) | {"generation_config.json": b'{"eos_token_id": 7}'})
    second = snapshot(NAME)
    assert (second / "generation_config.json").read_bytes() != (first / "generation_config.json").read_bytes()
    assert hub.downloaded() == ["generation_config.json"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert snapshot(NAME) == second


def test_the_hub_is_asked_with_the_librarys_own_time_limit(hub, repository, monkeypatch):
    limits = []
    own = huggingface_hub.HfApi.model_info

    def model_info(self, *arguments, timeout=None, **options):
        limits.append(timeout)
        return own(self, *arguments, timeout=timeout, **options)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    snapshot(NAME)
    assert limits == [constants.HF_HUB_ETAG_TIMEOUT] and 0 < limits[0] < 60


@pytest.mark.parametrize("lacking", ["model-00002-of-00003.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_copy_that_lacks_files_is_not_used_and_is_completed_once_there_is_a_connection(
    hub, sharded, lacking, monkeypatch
):
    hub.repositories[NAME] = found = standin.Repository()
    found.commit(standin.contents(sharded) if lacking != "model-00002-of-00003.safetensors" else three_shards(sharded))
    commit = found.revisions["main"]
    folder = snapshot(NAME)
    whole = files(folder)
    (folder / lacking).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = f"HF_HUB_OFFLINE is set, and the copy of {{}} in the cache lacks {lacking}: unset it, or fetch the model"
    assert said.format(NAME) in refusal()
    at_commit = refusal(revision=commit)
    assert said.format(f"{NAME}@{commit}") in at_commit and f"`hf download {NAME} --revision {commit}`" in at_commit
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert snapshot(NAME, revision=commit) == folder
    assert files(folder) == whole


def three_shards(sharded: Path) -> dict[str, bytes]:
    """A repository of three files of weights; what is in them does not matter."""
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.dumps({"weight_map": {f"tensor {number}": shard for number, shard in enumerate(shards)}})
    whole = {name: content for name, content in standin.contents(sharded).items() if "safetensors" not in name}
    return whole | dict.fromkeys(shards, b"weights") | {"model.safetensors.index.json": index.encode()}


def test_a_copy_that_another_program_downloaded_is_used(hub, repository, monkeypatch):
    """transformers, too, keeps models in this cache, and only the files that it reads."""
    for name in ("config.json", "model.safetensors"):
        huggingface_hub.hf_hub_download(NAME, name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert files(snapshot(NAME)) == {"config.json", "model.safetensors"}
    assert "the copy of" in refusal(tokenizer_only=True)


def test_after_an_interrupted_download_finished_files_are_kept_and_the_older_copy_still_counts(
    hub, repository, model, monkeypatch
):
    old = snapshot(NAME)
    new = repository.commit(standin.contents(model) | {"config.json": b"{}", "model.safetensors": bytes(1000)})
    hub.breaks = {f"/content/{NAME}/{new}/model.safetensors"}
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the library's attempts
    assert refusal().startswith(f"{NAME} could not be downloaded because {hub.url} cannot be reached (RemoteProtocol")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert snapshot(NAME) == old
    assert "lacks model.safetensors" in refusal(revision=new)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.breaks, hub.asked[:] = set(), []
    assert snapshot(NAME).name == new
    assert hub.downloaded() == ["model.safetensors"]


# Names


@given(st.text(alphabet="abZ09_-./é", max_size=12))
@example("a" * 96 + "/" + "b" * 96)
@example("a" * 97 + "/b")
@example("a/b.git")
def test_the_form_of_a_name_follows_the_hubs_own_rules(text):
    try:
        validate_repo_id(text)
        valid = text.count("/") == 1
    except HFValidationError:
        valid = False
    assert is_repository(text) is is_repository(f"{text}@main") is valid


@pytest.mark.parametrize(
    "text",
    ["models/a.gguf", "./a/b", "../b", "/a/b", "~/a", "a\\b", "a", "a/b/c", "", "https://site/a", None, ROOT],
)
def test_paths_are_no_repositories(text):
    assert not is_repository(text)
    assert refusal(text).startswith("a model on the Hugging Face Hub is named org/name or org/name@revision")


@pytest.mark.parametrize("revision", ["", "-x", "a b", "../x", "a/../../b", "/a", "a/", "v1@x", 3])
def test_a_revision_with_a_form_that_git_does_not_allow(revision, hub):
    assert refusal(revision=revision).startswith(f"a revision of {NAME} is a branch, a tag or a commit")
    if isinstance(revision, str):
        assert refusal(f"{NAME}@{revision}").startswith(f"a revision of {NAME} is a branch, a tag or a commit")
    assert hub.asked == []


# The library


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match="`huggingface_hub`, which is not installed: "):
        snapshot(NAME)


def test_the_library_is_imported_only_for_a_model_and_reads_its_variables(hub, repository, tmp_path):
    """In a process of its own: the library reads them when it is imported."""
    code = (
        "import sys, minillm.pretrained.hub as hub\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        f"print(hub.snapshot({NAME!r}))"
    )
    ours = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": standin.TOKEN, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commit = repository.revisions["main"]
    folder = tmp_path / "home" / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / commit
    assert done.stdout.splitlines()[-1] == str(folder)
    assert hub.tokens[f"/api/models/{NAME}/revision/main"] == f"Bearer {standin.TOKEN}"
    weights = repository.files[commit]["model.safetensors"]
    assert (folder / "model.safetensors").resolve().name == hashlib.sha256(weights).hexdigest()
