"""Invalid requests are rejected in OpenAI's error format, with the field, the limit and what to do."""

import json
from dataclasses import fields

import openai
import pytest

from minillm import SamplingParams
from minillm.server.worker.protocol import ChatRequest, CompletionRequest

pytestmark = pytest.mark.key

GOOD = {"prompt": "The river", "max_tokens": 4}
TURNS = [{"role": "user", "content": "hi"}]
CHAT = {"messages": TURNS, "max_tokens": 4}


@pytest.fixture(scope="module")
def http(here):
    return here.client


def post(http, body):
    """Python's JSON encoding: a lone surrogate stays an escape."""
    return http.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})


def assert_rejected(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


NO_JSON = [
    (b'{"prompt": "a"', "Expecting ',' delimiter at character 14"),
    (b"", "Expecting value at character 0"),
    (b"[1, 2", "delimiter at character 5"),
    (b"nonsense", "Expecting value at character 0"),
    (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": "a", "seed": ' + b"5" * 5000 + b"}", "too many digits"),
]


@pytest.mark.parametrize("body, reason", NO_JSON, ids=[reason for _, reason in NO_JSON])
def test_a_body_that_is_not_json_is_rejected_with_the_reason_and_counted(http, body, reason):
    def count():
        name = 'minillm_http_requests_total{status="400"} '
        lines = http.get("/metrics").text.splitlines()
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0)

    before = count()
    error = assert_rejected(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_json"
    assert error["message"].startswith("the body is not valid JSON: ") and reason in error["message"]
    assert count() == before + 1


@pytest.mark.parametrize("body", ["[]", '"text"', "3", "null"])
def test_a_body_that_is_not_an_object_is_rejected(http, body):
    assert_rejected(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))


WRONG = [
    ("max_tokens", "four"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 10**30),
    ("temperature", "hot"),
    ("temperature", -0.1),
    ("temperature", 1e300),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 2),
    ("n", 0),
    ("n", 10_000),
    ("n", "2"),
    ("seed", 2**70),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", "a" * 257),
    ("stop_token_ids", [5] * 65),
    ("stop_token_ids", [-1]),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"1_0": 1}),
    ("logit_bias", {" 10": 1}),
    ("logit_bias", {"010": 1}),
    ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"5" * 5000: 1}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", [1]),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"nonsense": True}),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", {"continuous_usage_stats": "yes"}),
    ("stream_options", {"include_obfuscation": 0}),
    ("best_of", 5),
    ("suffix", "end"),
    ("temprature", 1),
    ("prompt", None),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", 5),
    ("prompt", {"text": "a"}),
    ("prompt", [1, "a"]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [-1]),
    ("prompt", [10**9]),
    ("prompt", [10**30]),
    ("prompt", ["a"] * 5000),
    ("prompt", "half a pair \ud800"),
    ("logit_bias", {"5": None}),
    ("max_tokens", 2**31),
    ("priority", 2**31),
    ("priority", "high"),
    ("cache_salt", "half a pair \ud800"),
    ("cache_salt", "a" * 1025),
    ("logit_bias", {"\ud800": 1}),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
]


@pytest.mark.parametrize("field, value", WRONG, ids=[f"{field}={str(value)[:30]}" for field, value in WRONG])
def test_an_invalid_field_is_rejected_by_name(http, field, value):
    error = assert_rejected(post(http, GOOD | {field: value}))
    assert field in (error["param"], error["message"].split(" ")[0]), error


def test_an_unknown_stream_option_is_named(http):
    error = assert_rejected(
        post(http, GOOD | {"stream": True, "stream_options": {"include_usage": True, "usage": True}})
    )
    assert error["message"] == "stream_options.usage is not a field of this request"
    assert (error["param"], error["code"]) == ("stream_options", "unknown_parameter")


def test_the_number_of_choices_over_all_prompts_is_limited(http):
    error = assert_rejected(http.post("/v1/completions", json=GOOD | {"prompt": ["a"] * 100, "n": 100}))
    assert error["param"] == "n" and "2048" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_are_rejected(http, number):
    content = f'{{"prompt": "a", "temperature": {number}}}'
    assert_rejected(http.post("/v1/completions", content=content, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"messages": [*TURNS, {"role": "assistant", "content": "a", "tool_calls": [{"id": "b"}]}, *TURNS]},
        {"messages": [*TURNS, {"role": "assistant", "content": "a", "refusal": "no"}, *TURNS]},
        {"top_logprobs": 3},
        {"top_logprobs": 50, "logprobs": True},
        {"logprobs": 3},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"tools": "none", "tool_choice": "none"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": 5}]}]},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        {"response_format": {"type": "json_object", "schema": [5]}},
        {"response_format": {"type": "json_object", "schema": False}},
        {"response_format": {"type": "text", "schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "word"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a" * 70_000]}}}},
        {"response_format": {"type": "json_object", "strict": True}},
        {"min_tokens": 3, "response_format": {"type": "json_object"}},
        {"modalities": ["text", "audio"]},
        {"service_tier": "fastest"},
        {"store": 0},
        {"reasoning_effort": "high"},
        {"parallel_tool_calls": "yes"},
        {"metadata": "a"},
        {"metadata": {str(i): "a" for i in range(17)}},
    ],
    ids=str,
)
def test_an_invalid_chat_is_rejected(http, change):
    error = assert_rejected(http.post("/v1/chat/completions", json=CHAT | change))
    assert error["param"] == next(iter(change))


def test_openai_fields_without_effect_are_accepted_and_change_nothing(http):
    def ask(**more):
        answer = http.post("/v1/chat/completions", json=CHAT | {"temperature": 0} | more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    nothing = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    nothing |= {"store": False, "metadata": {"run": "7"}, "service_tier": "auto", "user": "ada", "modalities": ["text"]}
    assert ask(**nothing) == ask() == ask(**dict.fromkeys(nothing))


def test_what_clients_add_unasked_changes_nothing(http):
    def ask(messages=TURNS, **more):
        answer = http.post("/v1/chat/completions", json=CHAT | {"messages": messages, "temperature": 0} | more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    plain = ask()
    for more in (
        {"store": True, "service_tier": "flex", "verbosity": "medium", "prompt_cache_retention": "24h"},
        {"service_tier": "priority", "tools": [tool], "tool_choice": "none"},
        {"tools": [], "tool_choice": "none"},
    ):
        assert ask(**more) == plain
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert ask([{"role": "user", "id": "msg_1", "content": [marked]}]) == plain
    assert ask([{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}]) == plain
    roles = [[{"role": role, "content": "Be brief."}, *TURNS] for role in ("system", "developer")]
    ids = [http.post("/tokenize", json={"messages": turns}).json()["tokens"] for turns in (*roles, TURNS)]
    assert ids[0] == ids[1] != ids[2]
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    forms = (
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        {"type": "json_object", "schema": schema},
    )
    found = [ask(response_format=form, max_tokens=80)[0]["message"]["content"] for form in forms]
    assert len(set(found)) == 1 and '"a"' in found[0]


def test_a_typo_in_a_message_is_named(http):
    change = {"messages": [{"role": "user", "contents": "hi"}]}
    error = assert_rejected(http.post("/v1/chat/completions", json=CHAT | change))
    assert error["message"] == "messages.0.contents is not a field of this request"


@pytest.mark.parametrize("value", [0, -1, 1.5, 2**31])
def test_an_invalid_max_completion_tokens_is_rejected_by_its_own_name(http, value):
    error = assert_rejected(http.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": value}))
    assert error["param"] == "max_completion_tokens" in error["message"]


def test_a_chat_templates_error_is_reported_once(http):
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    error = assert_rejected(http.post("/v1/chat/completions", json=CHAT | {"messages": turns}))
    words = "the chat template rejects these messages: turn 2 must be from the assistant, not user"
    assert (error["message"], error["param"]) == (words, "messages")


def test_a_lone_surrogate_is_rejected_in_any_field(http):
    def ask(path, body):
        content = json.dumps(body)
        return assert_rejected(http.post(path, content=content, headers={"content-type": "application/json"}))

    assert "surrogate" in ask("/v1/completions", GOOD | {"\ud800": 1})["message"]
    turns = [{"role": "\ud800", "content": "a"}]
    assert "\ud800" in ask("/v1/chat/completions", CHAT | {"messages": turns})["message"]


def test_an_unknown_model_is_not_found(http):
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)
    with pytest.raises(openai.NotFoundError, match="'gpt-5': this server serves 'small-random'") as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_rejected(http, here, stream):
    limit = here.engine.max_model_len
    for path, body in (
        ("/v1/completions", {"prompt": [5] * limit}),
        ("/v1/completions", {"prompt": ["short", "word " * 1000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 1000}]}),
    ):
        error = assert_rejected(http.post(path, json=body | {"stream": stream}))
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"]


def test_unknown_routes_and_methods_use_the_same_error_format(http):
    assert_rejected(http.get("/v1/nothing"), 404)
    assert_rejected(http.get("/v1/completions"), 405)


def test_the_server_keeps_working_after_a_rejected_request(http):
    assert_rejected(http.post("/v1/completions", json=GOOD | {"n": 0}))
    assert http.post("/v1/completions", json=GOOD).status_code == 200


def test_every_sampling_option_can_be_sent_except_these():
    """Others are set by response_format, by echo with logprobs, or by fields outside of SamplingParams."""
    offline = {"json_schema", "regex", "grammar", "prompt_logprobs"}
    for request in (CompletionRequest, ChatRequest):
        assert {each.name for each in fields(SamplingParams)} - set(request.model_fields) == offline
