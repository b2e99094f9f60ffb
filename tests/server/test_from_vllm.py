"""Requests as vLLM's clients send them: fields, paths and members that OpenAI's API does not have."""

import json

import httpx
import pytest

from minillm import __version__, from_vllm
from minillm.server.protocol import UNSUPPORTED, UNSUPPORTED_IN_CHATS
from tests.waiting import TIMEOUT

BODIES = {
    "/v1/completions": {"prompt": "The river", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0},
}
FIELDS = {"/v1/completions": UNSUPPORTED, "/v1/chat/completions": UNSUPPORTED_IN_CHATS}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_ask_for_nothing_change_nothing(http, path):
    plain = http.post(path, json=BODIES[path]).json()
    for place in range(2):
        values = {name: nothing[place] for name, (nothing, _) in FIELDS[path].items() if len(nothing) > place}
        answer = http.post(path, json=BODIES[path] | values | {"skip_special_tokens": None})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain["choices"]


@pytest.mark.parametrize("path", BODIES)
def test_other_values_are_refused_with_what_to_do_instead(http, path):
    for name, (_, instead) in FIELDS[path].items():
        answer = http.post(path, json=BODIES[path] | {name: "something"})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == name and error["code"] == "unsupported_parameter"
        assert error["message"].startswith(f"{name} is not supported: {instead}") and len(error["message"]) > 40


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_last_piece_says_what_stopped_it(http, path, stream):
    said = http.post(path, json=BODIES[path] | {"return_token_ids": True}).json()["choices"][0]
    token = said["token_ids"][1]
    wanted = said["token_ids"].index(token) + 1
    body = BODIES[path] | {"stop_token_ids": [token], "stream": stream, "return_token_ids": True}
    answer = http.post(path, json=body)
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        assert [choice["stop_reason"] for choice in choices if choice["finish_reason"]] == [token]
        assert not any("stop_reason" in choice for choice in choices if not choice["finish_reason"])
    else:
        (choice,) = answer.json()["choices"]
        assert choice["stop_reason"] == token and len(choice["token_ids"]) == wanted
    whole = http.post(path, json=BODIES[path]).json()["choices"][0]
    assert whole["finish_reason"] == "length" and whole["stop_reason"] is None


def test_the_small_paths(http):
    assert http.get("/ping").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": __version__}


def test_a_path_that_is_missing_says_what_to_do_instead(http):
    for path, instead in from_vllm.PATHS.items():
        answer = http.post(path, json={})
        assert answer.status_code == 404 and answer.json()["error"]["message"].endswith(f"; {instead}")
    assert http.get("/other").json()["error"]["message"] == "GET /other: Not Found"


def test_pictures_and_tools_are_refused_with_the_reason(http):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "messages.0.content.1 is of type 'image_url', but models read text only"
    body = BODIES["/v1/chat/completions"] | {"tools": [{"type": "function"}]}
    assert (
        "use response_format for the answer" in http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    )
