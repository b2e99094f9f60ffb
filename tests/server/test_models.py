"""One server, several models: a request's `model` says which one is meant, on every path."""

import json

import pytest
from starlette.testclient import TestClient

from minillm.server.config import ServerConfig
from minillm.server.local import LocalServedEngine
from minillm.server.worker.app import create_app
from minillm.server.worker.scrape import gauges_of, text_of

BODY = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4, "ignore_eos": True}
NAMES = ("one", "two")


@pytest.fixture(scope="module")
def engines(engine):
    made = [LocalServedEngine(engine, name, ServerConfig(log_level="warning")) for name in NAMES]
    yield made
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def client(engines):
    async def metrics() -> bytes:
        return text_of(await gauges_of(*engines))

    first, *more = engines
    with TestClient(create_app(first, "127.0.0.1", metrics, *more), "http://localhost") as client:
        yield client


@pytest.fixture
def asked(engines, monkeypatch):
    """The names of the models whose engines got a request."""
    found = []
    for each in engines:

        def stream(*arguments, each=each, stream=each.stream, **options):
            found.append(each.facts.name)
            return stream(*arguments, **options)

        monkeypatch.setattr(each, "stream", stream)
    return found


def test_all_models_are_listed(client):
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == list(NAMES)
    assert client.get("/v1/models/two").json()["id"] == "two"
    assert client.get("/v1/models/three").status_code == 404


@pytest.mark.parametrize("name", NAMES)
def test_a_request_runs_on_the_model_that_it_names(client, asked, name):
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        answer = client.post(path, json=body | {"model": name})
        assert (answer.status_code, answer.json()["model"]) == (200, name)
    text = client.post("/v1/completions", json=BODY | {"model": name, "stream": True}).text
    assert {json.loads(line[6:])["model"] for line in text.splitlines() if line.startswith("data: {")} == {name}
    tritons = client.post(f"/v2/models/{name}/generate", json={"text_input": "The river", "max_tokens": 4})
    assert tritons.json()["model_name"] == name
    assert asked == [name] * 4
    assert client.post("/tokenize", json={"model": name, "prompt": "The river"}).status_code == 200
    assert client.get(f"/v2/models/{name}/ready").status_code == 200
    assert client.get(f"/v2/models/{name}").json()["name"] == name
    assert client.get("/engine/state", params={"model": name}).json()["model"] == name


@pytest.mark.parametrize("more", [{}, {"model": "three"}])
def test_without_a_known_name_nothing_runs_and_the_error_lists_the_models(client, asked, more):
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        answer = client.post(path, json=body | more)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "this server serves 'one', 'two'" in answer.json()["error"]["message"]
    assert not asked


def test_a_name_in_the_body_must_be_known_even_if_the_path_names_a_model(client, asked):
    body = {"text_input": "The river", "max_tokens": 4, "model": "three"}
    assert client.post("/v2/models/one/generate", json=body).status_code == 404
    assert not asked


def test_the_server_is_healthy_only_if_every_model_is(client, engines, monkeypatch):
    assert client.get("/health").status_code == client.get("/v2/health/ready").status_code == 200
    assert "minillm_engine_up 1.0" in client.get("/metrics").text.splitlines()

    async def ask(question):
        return {"alive": False, "families": []} if type(question).__name__ == "Gauges" else False

    monkeypatch.setattr(engines[1], "ask", ask)
    assert client.get("/health").status_code == client.get("/v2/health/ready").status_code == 503
    assert client.get("/v2/models/one/ready").status_code == 200
    assert client.get("/v2/models/two/ready").status_code == 503
    assert "minillm_engine_up 0.0" in client.get("/metrics").text.splitlines()


def test_gauges_of_different_models_have_their_names(client):
    lines = client.get("/metrics").text.splitlines()
    for name in NAMES:
        assert f'vllm:num_requests_running{{model_name="{name}"}} 0.0' in lines
