"""Which web pages may use the server: CORS, and pages that do not ask first."""

import asyncio

import httpx
import pytest

from minillm.errors import ConfigError
from minillm.server import running
from minillm.server.config import digest
from minillm.server.worker.gate import Gate, origins
from tests.waiting import TIMEOUT

KEY = "a-key-of-23-characters!"
PAGE = "http://localhost:3000"
BODY = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type,x-mine"}


@pytest.fixture(scope="module")
def open_to(server):
    with (
        running(server.engine, cors_origins=f"https://chat.example, {PAGE}", api_key=KEY) as shared,
        httpx.Client(base_url=shared.url, timeout=TIMEOUT, headers={"origin": PAGE}) as client,
    ):
        yield client


def readable(answer, origin=PAGE) -> bool:
    """Whether a browser lets a page of this origin read the answer (the Fetch standard's CORS check)."""
    assert "access-control-allow-credentials" not in answer.headers
    assert "origin" in answer.headers["vary"].lower()
    return answer.headers.get("access-control-allow-origin") in (origin, "*")


def test_a_preflight_request_needs_no_key(open_to):
    answer = open_to.options("/v1/chat/completions", headers=ASKS | {"access-control-request-private-network": "true"})
    assert answer.status_code == 200 and readable(answer)
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower().split(",")
    assert {"authorization", "content-type", "x-mine"} <= {name.strip() for name in allowed}
    assert answer.headers["access-control-allow-private-network"] == "true"
    other = open_to.options("/v1/chat/completions", headers=ASKS | {"origin": "http://evil.example"})
    assert other.status_code == 400 and not readable(other, "http://evil.example")


def test_a_page_may_read_answers_streams_and_errors(open_to):
    key = {"authorization": f"Bearer {KEY}"}
    for status, body, headers in (
        (200, BODY, key),
        (200, BODY | {"stream": True}, key),
        (400, BODY | {"max_tokens": -1}, key),
        (401, BODY, {}),
        (404, BODY | {"model": "none"}, key),
    ):
        answer = open_to.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert readable(answer), body
        assert {"retry-after", "x-request-id"} <= set(answer.headers["access-control-expose-headers"].split(", "))
    assert "data: [DONE]" in open_to.post("/v1/completions", json=BODY | {"stream": True}, headers=key).text
    assert readable(open_to.get("/v1/nothing", headers=key)) and readable(open_to.get("/health"))
    assert not readable(open_to.get("/health", headers={"origin": "http://evil.example"}), "http://evil.example")


def test_without_the_option_no_page_may_read_anything(server):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT, headers={"origin": PAGE}) as client:
        asked = client.options("/v1/completions", headers=ASKS)
        assert (asked.status_code, asked.headers["allow"]) == (204, "OPTIONS, POST")
        for answer in (asked, client.get("/v1/models")):
            assert not [name for name in answer.headers if name.startswith("access-control")]


FOREIGN = ["http://evil.example", "https://localhost.evil.example", "null", "file://", "http://127.0.0.1:9", PAGE]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json", None])
def test_a_page_that_may_not_read_the_answer_cannot_start_work_either(server, origin, kind):
    """A browser sends text/plain without a preflight request: the Fetch standard's CORS-safelisted request-headers."""
    headers = {"origin": origin} | ({} if kind is None else {"content-type": kind})
    with httpx.Client(base_url=server.url, timeout=TIMEOUT, headers=headers) as client:
        before = server.engine.stats()["steps"]
        answer = client.post("/v2/models/small-random/generate", content='{"text_input": "a", "max_tokens": 1}')
        assert answer.status_code == 403 and "start it with --cors-origins" in answer.json()["error"]
        assert client.post("/v1/completions", content="{}").json()["error"]["code"] == "origin_not_allowed"
        assert server.engine.stats()["steps"] == before
        assert client.get("/v1/models").status_code == 200, "the browser keeps it from the page"


def answering(code: int = 200):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": code, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


def answer_of(gate, headers, method="POST"):
    """The answer's first message."""
    sent = []

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(gate({"type": "http", "method": method, "path": "/v1/models", "headers": raw}, None, send))
    return sent[0]


def status(gate, headers):
    return answer_of(gate, headers)["status"]


@pytest.mark.parametrize("code", [200, 429, 499, 500, 503, 504])
@pytest.mark.parametrize("pages", [PAGE, "*"])
def test_a_page_may_read_why_a_busy_or_failing_server_refuses(code, pages):
    gate = Gate(answering(code), None, pages=origins(pages))
    answer = answer_of(gate, {"host": "localhost:8000", "origin": PAGE})
    headers = {name.decode(): value.decode() for name, value in answer["headers"]}
    assert answer["status"] == code
    assert headers["access-control-allow-origin"] == (pages if pages == "*" else PAGE) and "Origin" in headers["vary"]
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("LLM.example", "https://llm.example"),  # behind a proxy that adds TLS
        ("llm.example:443", "https://llm.example"),
        ("llm.example:80", "http://llm.example"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_servers_own_pages_may_start_work(host, origin):
    assert status(Gate(answering(), None), {"host": host, "origin": origin}) == 200
    assert status(Gate(answering(), None), {"host": host, "origin": origin + "0"}) == 403


def test_allowed_pages_and_those_that_send_the_key_may_start_work():
    page = {"host": "localhost:8000", "origin": PAGE}
    assert status(Gate(answering(), None), page) == 403
    assert status(Gate(answering(), None, pages=origins(PAGE)), page) == 200
    assert status(Gate(answering(), None, pages=origins("*")), page | {"origin": "null"}) == 200
    for name, value in (("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)):
        assert status(Gate(answering(), digest(KEY)), page | {name: value}) == 200
        assert status(Gate(answering(), digest(KEY)), page | {name: value + "x"}) == 401


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (None, set()),
        (" ", set()),
        ("*", {"*"}),
        ("HTTP://Localhost:3000/, https://a.example:443", {"http://localhost:3000", "https://a.example"}),
        ("null, chrome-extension://abc", {"null", "chrome-extension://abc"}),
    ],
)
def test_the_origins_of_the_option(given, want):
    assert origins(given) == want


@pytest.mark.parametrize("wrong", ["localhost:3000", "http://a.example/chat", "http://", "http://a b"])
def test_what_is_no_origin_is_refused_before_the_model_loads(wrong):
    with pytest.raises(ConfigError, match="is not an origin: name it as"), running("no/such", cors_origins=wrong):
        pass
