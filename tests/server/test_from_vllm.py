"""Requests as vLLM's clients send them: fields, paths and members that OpenAI's API does not have."""

import json

import pytest

from minillm.from_vllm.http import PATHS, TURN
from minillm.server.worker.protocol import UNSUPPORTED, UNSUPPORTED_IN_CHATS, CompletionRequest
from minillm.version import __version__

BODIES = {
    "/v1/completions": {"prompt": "The river", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0},
}
FIELDS = {"/v1/completions": UNSUPPORTED, "/v1/chat/completions": UNSUPPORTED_IN_CHATS}


@pytest.fixture(scope="module")
def http(here):
    return here.client


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


def test_minus_one_is_no_seed():
    seeds = [CompletionRequest(prompt="a", seed=seed).params().seed for seed in (-1, -2, 0, None)]
    assert seeds == [None, -2, 0, None]


def test_the_small_paths(http):
    assert http.get("/ping").json() == http.post("/ping").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": __version__}


def test_a_path_that_is_missing_says_what_to_do_instead(http):
    for path, instead in PATHS.items():
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


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_turns_with_tools_are_refused_with_what_to_do_instead(http):
    user = {"role": "user", "content": "a"}
    for path, limits in (("/v1/chat/completions", {"max_tokens": 2}), ("/tokenize", {})):

        def ask(turn, path=path, limits=limits):
            return http.post(path, json={"messages": [user, turn, user]} | limits)

        for name, (nothing, instead) in TURN.items():
            for value in (None, *nothing):
                assert ask({"role": "assistant", "content": "b", name: value}).status_code == 200
            for value in ([CALL], CALL, "x"):
                error = ask({"role": "assistant", "content": None, name: value}).json()["error"]
                message = f"messages.1.{name} is not supported: {instead}"
                assert (error["message"], error["param"]) == (message, "messages")
        error = ask({"role": "assistant", "content": None}).json()["error"]
        assert error["message"] == 'messages.1.content is null: send the text, or "" if there is none'
        assert ask({"role": "assistant", "content": ""}).status_code == 200


def test_other_ways_to_ask_for_a_structure_name_what_there_is(http):
    for path, body in BODIES.items():
        for wanted in ({"type": "structural_tag", "format": {}}, {"type": "structural_tag", "structures": []}):
            error = http.post(path, json=body | {"response_format": wanted}).json()["error"]["message"]
            assert error.endswith('must be "text", "json_object" or "json_schema", not \'structural_tag\'')
        for name, ours in (("regex", "pattern"), ("choice", "enum")):
            error = http.post(path, json=body | {"structured_outputs": {name: "a"}}).json()["error"]["message"]
            assert ours in error and f"(for {name})" in error


def test_the_models_card_has_what_vllms_benchmark_reads(http):
    (card,) = http.get("/v1/models").json()["data"]
    assert card["root"] == card["id"] == "small-random" and card["parent"] is None
    assert http.get("/v1/models/small-random").json() == card
