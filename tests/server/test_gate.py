"""Request ids, and the API key of a server that has one."""

import asyncio

import httpx
import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi, which is not installed here")

import minillm
from minillm.errors import ConfigError
from minillm.server import running
from minillm.server.config import digest
from minillm.server.worker.gate import OPEN, Gate
from tests.waiting import TIMEOUT

KEY = "a-key-of-23-characters!"
BODY = {"prompt": "The river", "max_tokens": 2}


@pytest.fixture(scope="module")
def locked():
    with minillm.LLM(device="cpu") as llm, running(llm, api_key=KEY) as server:
        yield server


def test_every_answer_has_the_clients_request_id_or_a_new_one(server):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        own = {"x-request-id": "trace-7/\u007e"}
        for answer in (
            client.get("/health", headers=own),
            client.get("/nothing", headers=own),
            client.post("/v1/completions", json=BODY, headers=own),
            client.post("/v1/completions", json=BODY | {"stream": True}, headers=own),
            client.post("/v1/completions", json={"prompt": 7}, headers=own),
        ):
            assert answer.headers.get_list("x-request-id") == ["trace-7/~"]
        new = [
            client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
            for bad in ("", "a b", "x" * 129)
        ]
        assert len(set(new)) == 3 and all(len(each) == 32 for each in new)


@pytest.mark.parametrize("given", [b"a\nset-cookie: x", b"\xff", b"x" * 129])
def test_a_request_id_that_is_no_plain_text_is_replaced(given):
    assert header_of(Gate(hello, None), [(b"x-request-id", given)]) not in (given, b"")


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def header_of(app, headers):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/v1/models", "headers": headers}
    asyncio.run(app(scope, None, send))
    return dict(sent[0]["headers"])[b"x-request-id"]


def test_requests_need_the_key_except_for_health_and_metrics(locked):
    with httpx.Client(base_url=locked.url, timeout=TIMEOUT) as client:
        for wrong in (
            {},
            {"authorization": KEY},
            {"authorization": f"Basic {KEY}"},
            {"authorization": f"Bearer {KEY}x"},
        ):
            for answer in (
                client.get("/v1/models", headers=wrong),
                client.post("/v1/completions", json=BODY, headers=wrong),
            ):
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key" and "x-request-id" in answer.headers
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {KEY}"}
            assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert [client.get(path).status_code for path in OPEN] == [200] * len(OPEN)


def test_openais_client_sends_the_key(locked):
    openai = pytest.importorskip("openai", reason="openai is not installed here")
    with openai.OpenAI(base_url=locked.url + "/v1", api_key=KEY) as client:
        assert client.completions.create(model=locked.model, **BODY).usage.completion_tokens == 2
    wrong = openai.OpenAI(base_url=locked.url + "/v1", api_key="another", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


@pytest.mark.parametrize("key", ["", "short", "with space in it", "caf\u00e9 au lait", "x" * 513, 12345678])
def test_a_key_that_no_client_could_send_is_refused_before_any_work(key):
    with pytest.raises(ConfigError, match="api_key must be 8 to 512 printable ASCII characters") as refused:
        digest(key)
    assert "with space in it" not in str(refused.value)  # a key is nothing for logs
    assert digest(None) is None
