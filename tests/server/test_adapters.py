"""Adapters over HTTP: named as the model, listed, loaded and unloaded while the server runs."""

import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from safetensors.torch import save_file

from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError
from minillm.server.engine_side.adapter_loader import AdapterLoader
from minillm.server.engine_side.hub import Hub
from minillm.server.limits import MAX_LOADS
from tests import models, peft_files
from tests.server.conftest import served_here
from tests.server.processes import serving
from tests.server.test_supervisor import engine_of
from tests.waiting import TIMEOUT, wait_until

GREEDY = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and a folder with three adapters of it, next to one that is outside."""
    place = tmp_path_factory.mktemp("files")
    models.make("gemma-grouped").save_pretrained(place / "model")
    for seed, name in enumerate(["one", "two", "three"]):
        peft_files.write(place / "folder" / name, place / "model", seed)
    peft_files.write(place / "outside", place / "model", 9)
    (place / "folder" / "link").symlink_to(place / "outside")
    for leak in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copytree(place / "folder" / "one", place / "folder" / f"leak {leak}")
        (place / "folder" / f"leak {leak}" / leak).unlink()
        (place / "folder" / f"leak {leak}" / leak).symlink_to(place / "outside" / leak)
    (place / "folder" / "circle").symlink_to("circle")
    soft = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}
    (place / "folder" / "soft").mkdir()
    (place / "folder" / "soft" / "adapter_config.json").write_text(json.dumps(soft))
    hidden = json.loads((place / "model" / "config.json").read_text())["hidden_size"]
    values = torch.linspace(-1, 1, 2 * hidden).view(2, hidden)
    save_file({"prompt_embeddings": values}, place / "folder" / "soft" / "adapter_model.safetensors")
    return place


@pytest.fixture(scope="module")
def loading(files):
    """A server with one adapter, to which clients may load others."""
    engine = AsyncLLM(files / "model", adapters={"one": files / "folder" / "one"}, max_loras=2)
    with served_here(engine, adapter_folder=str(files / "folder")) as here:
        yield here
    engine.close()


@pytest.fixture(scope="module")
def fixed(files):
    """A server whose adapters are those that it started with."""
    engine = AsyncLLM(files / "model", adapters={"one": files / "folder" / "one"})
    with served_here(engine) as here:
        yield here
    engine.close()


def tokens(here, model, **more):
    answer = here.client.post("/v1/completions", json=GREEDY | {"model": model} | more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def names(here):
    return [each["id"] for each in here.client.get("/v1/models").json()["data"]]


def load(here, name, path):
    return here.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


def unload(here, name):
    return here.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_the_model_of_a_request_may_be_an_adapter(fixed):
    base, adapted = tokens(fixed, fixed.model), tokens(fixed, "one")
    assert base != adapted
    streamed = fixed.client.post("/v1/completions", json=GREEDY | {"model": "one", "stream": True}).text
    assert '"model":"one"' in streamed and f'"model":"{fixed.model}"' not in streamed
    counted = fixed.client.post("/detokenize", json={"model": "one", "tokens": [5]})
    assert counted.json()["error"]["message"] == "this model has no tokenizer"


def test_adapters_are_listed_as_models_whose_parent_is_the_model(fixed):
    base, adapted = fixed.client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == (fixed.model, None)
    assert (adapted["id"], adapted["parent"]) == ("one", fixed.model)
    assert fixed.client.get("/v1/models/one").json() == adapted
    missing = fixed.client.post("/v1/completions", json=GREEDY | {"model": "two"})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_adapters_are_loaded_and_unloaded_while_it_runs(loading):
    assert load(loading, "two", "two").json() == {"status": "adapter two is loaded"}
    assert names(loading) == [loading.model, "one", "two"]
    assert tokens(loading, "two") != tokens(loading, "one")
    assert unload(loading, "two").json() == {"status": "adapter two is unloaded"}
    assert names(loading) == [loading.model, "one"]
    gone = loading.client.post("/v1/completions", json=GREEDY | {"model": "two"})
    assert gone.status_code == 404
    assert load(loading, "two", "three").status_code == 200  # another adapter of the same name
    assert load(loading, "three", "three").status_code == 200
    assert tokens(loading, "two") == tokens(loading, "three") != tokens(loading, "one")
    for name in ("two", "three"):
        assert unload(loading, name).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["../outside", "link", "/", "one/../../outside", "leak adapter_config.json", "leak adapter_model.safetensors"],
)
def test_nothing_outside_the_folder_is_loaded(path, loading):
    refused = load(loading, "new", path)
    assert refused.status_code == 400
    assert "is not within the server's folder of adapters" in refused.json()["error"]["message"]
    assert names(loading) == [loading.model, "one"]


def test_what_cannot_be_loaded_or_unloaded_is_refused(loading):
    for path in ("missing", "a\0b", "x" * 1000, "circle", "circle/one"):
        refused = load(loading, "new", path)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "lora_path"
        assert "is no directory in the server's folder of adapters" in refused.json()["error"]["message"]
    assert "has no adapter_config.json" in load(loading, "new", ".").json()["error"]["message"]
    for name in ("one", loading.model):
        taken = load(loading, name, "two")
        assert taken.status_code == 400 and "already" in taken.json()["error"]["message"]
    assert unload(loading, "new").status_code == unload(loading, loading.model).status_code == 404
    assert load(loading, "", "two").status_code == 400


def test_a_soft_prompt_is_served_without_room_for_factors(files):
    engine = AsyncLLM(files / "model")
    try:
        with served_here(engine, adapter_folder=str(files / "folder")) as here:
            assert load(here, "soft", "soft").status_code == 200
            assert names(here) == [here.model, "soft"]
            assert tokens(here, "soft") != tokens(here, here.model)
    finally:
        engine.close()


def test_an_adapter_with_the_models_name_is_refused_at_the_start(files):
    engine = AsyncLLM(files / "model", adapters={"one": files / "folder" / "one"})
    try:
        with pytest.raises(ConfigError, match="adapter 'one' has the name of the model"):
            Hub(engine, "one")
    finally:
        engine.close()


def test_the_paths_are_off_unless_a_folder_is_given(fixed):
    for refused in (load(fixed, "two", "two"), unload(fixed, "one")):
        assert refused.status_code == 404
        assert "start the server with --adapter-folder DIR" in refused.json()["error"]["message"]


@pytest.fixture
def slow(monkeypatch):
    """Loads that wait until this event is set; `slow.begun`: that one has begun."""
    go_on, own = threading.Event(), AsyncLLM.load_adapter
    go_on.begun = threading.Event()

    def load_adapter(engine, name, directory):
        go_on.thread = threading.current_thread().name
        go_on.begun.set()
        assert go_on.wait(TIMEOUT)
        own(engine, name, directory)

    monkeypatch.setattr(AsyncLLM, "load_adapter", load_adapter)
    yield go_on
    go_on.set()


def test_a_slow_load_delays_neither_a_grammar_nor_other_requests(model_directory, files, slow):
    engine = AsyncLLM(model_directory, load_format="dummy", device="cpu")
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    chat |= {"response_format": {"type": "json_object"}}
    try:
        with served_here(engine, adapter_folder=str(files / "folder")) as here, ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(load, here, "soft", "soft")
            try:
                assert slow.begun.wait(TIMEOUT)
                assert slow.thread.startswith("minillm-adapters"), "it holds up what else this thread does"
                assert here.client.post("/v1/chat/completions", json=chat).status_code == 200
                assert not loaded.done()
            finally:
                slow.set()
            assert loaded.result().status_code == 400, "it is of another model"
    finally:
        engine.close()


def test_only_so_many_loads_wait_and_the_next_is_told_when_to_try_again(loading, slow):
    with ThreadPoolExecutor(MAX_LOADS) as pool:
        first = pool.submit(load, loading, "new", "two")
        assert slow.begun.wait(TIMEOUT)
        behind = [pool.submit(load, loading, f"new {index}", "missing") for index in range(1, MAX_LOADS)]
        wait_until(lambda: loading.hub.loader.waiting == MAX_LOADS)
        refused = load(loading, "one more", "three")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        assert f"{MAX_LOADS} adapters wait to be loaded already" in refused.json()["error"]["message"]
        slow.set()
        assert first.result().status_code == 200
        assert [each.result().status_code for each in behind] == [400] * len(behind)
    assert unload(loading, "new").status_code == 200
    assert load(loading, "one more", "three").status_code == unload(loading, "one more").status_code == 200


def test_no_more_adapters_are_loaded_than_the_server_may_keep(files):
    engine = AsyncLLM(files / "model", adapters={"one": files / "folder" / "one"}, max_loras=1)
    try:
        with served_here(engine, adapter_folder=str(files / "folder"), max_adapters=2) as here:
            assert load(here, "two", "two").status_code == 200
            refused = load(here, "three", "three")
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert message == "2 adapters are loaded, and max_adapters=2: unload one, or start the server with more"
            assert unload(here, "one").status_code == 200
            assert load(here, "three", "three").status_code == 200
    finally:
        engine.close()


def test_what_clients_loaded_is_loaded_again_by_the_next_engine(files, caplog):
    """The engine's process may end at any time: its owner keeps the changes, and starts the next one with them."""
    told = []

    def loader():
        engine = AsyncLLM(files / "model", adapters={"one": files / "folder" / "one"}, max_loras=1)
        return AdapterLoader(engine, str(files / "folder"), 8, told.append)

    first, second = loader(), loader()
    try:
        first.load("two", "two").result()
        first.load("three", "three").result()
        first.unload("three").result()
        first.unload("one").result()
        assert told[-1] == {"two": "two", "one": None} and first.engine.adapters == ["two"]
        second.restore(told[-1] | {"away": "missing"})
        assert second.engine.adapters == ["two"]
        assert "adapter away was loaded before the engine ended, and cannot be loaded again" in caplog.text
        second.load("one", "three").result()
        assert told[-1] == {"two": "two", "one": "three"}
    finally:
        for each in (first, second):
            each.close()
            each.engine.close()


@pytest.mark.proof
def test_an_adapter_loaded_over_http_outlives_the_engines_process(files):
    options = ("--load-format", "auto", "--max-loras", "2", "--adapter-folder", str(files / "folder"))
    with serving(files / "model", *options) as (process, url), httpx.Client(base_url=url, timeout=TIMEOUT) as client:
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "two"})
        assert answer.status_code == 200, answer.text
        body = GREEDY | {"model": "two"}
        before = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
        os.kill(engine_of(process), signal.SIGKILL)
        wait_until(lambda: client.get("/v1/health/ready").status_code == 503)
        wait_until(lambda: client.get("/v1/health/ready").status_code == 200)
        assert "two" in [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == before
        process.terminate()
        process.communicate(timeout=TIMEOUT)


def test_openais_client_names_an_adapter_as_its_model(fixed):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=fixed.client)
    assert [each.id for each in client.models.list()] == [fixed.model, "one"]
    extra = {"return_token_ids": True, "ignore_eos": True}
    done = client.completions.create(model="one", prompt=[5, 6, 7, 8], max_tokens=8, temperature=0, extra_body=extra)
    assert done.model == "one" and done.choices[0].token_ids == tokens(fixed, "one")
