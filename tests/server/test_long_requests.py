"""Streams over HTTP: prompts and outputs longer than the context, up to the engine's own limit."""

import httpx
import pytest

import minillm
from minillm import LLM, SamplingParams
from minillm.kv_cache.attention_sinks import STREAM_TOKENS
from minillm.server import running
from tests.waiting import TIMEOUT

CONTEXT = 64
LONG = [7 * i % 90 + 5 for i in range(3 * CONTEXT)]
BODY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
CHAT = {"messages": [{"role": "user", "content": "word " * 2 * CONTEXT}]}


@pytest.fixture(scope="module")
def llm(model_directory):
    options = {"attention_sinks": 4, "attention_window": 32, "max_model_len": CONTEXT, "max_num_seqs": 4}
    with LLM(model_directory, load_format="dummy", device="cpu", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def http(llm):
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        yield client


def ask(http, path="completions", **more):
    answer = http.post(f"/v1/{path}", json=BODY | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_longer_than_the_context_gives_the_engines_tokens(http, llm):
    text = "The river " * CONTEXT
    for prompt in (LONG, text):
        expected = llm.generate([prompt], PARAMS)[0]
        answer = ask(http, prompt=prompt)
        assert answer["choices"][0]["token_ids"] == expected.token_ids
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids) > CONTEXT
    streamed = http.post("/v1/completions", json=BODY | {"prompt": LONG, "stream": True})
    assert streamed.status_code == 200 and '"finish_reason":"length"' in streamed.text.replace(" ", "")


def test_max_tokens_may_exceed_the_context(http, llm):
    answer = ask(http, prompt="The river", max_tokens=3 * CONTEXT)
    expected = llm.generate(["The river"], SamplingParams(max_tokens=3 * CONTEXT, temperature=0, ignore_eos=True))
    assert answer["choices"][0]["token_ids"] == expected[0].token_ids
    assert answer["usage"]["completion_tokens"] == 3 * CONTEXT


@pytest.mark.parametrize("messages", [CHAT["messages"], [{"role": "user", "content": "hi"}]], ids=["long", "short"])
def test_a_chat_without_a_limit_gets_at_most_one_context_of_tokens(http, messages):
    answer = ask(http, "chat/completions", messages=messages, max_tokens=None)
    assert answer["usage"]["completion_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"
    more = ask(http, "chat/completions", messages=messages, max_tokens=None, max_completion_tokens=2 * CONTEXT)
    assert more["usage"]["completion_tokens"] == 2 * CONTEXT


def test_a_prompt_that_user_supplied_merges_lengthen_past_the_context_runs(http):
    with minillm.using(bpe_merge=lambda symbols, ranks: symbols) as used:
        answer = ask(http, prompt="river " * CONTEXT)
    assert used.calls["bpe_merge"] and answer["usage"]["prompt_tokens"] > 5 * CONTEXT


def test_a_prompt_over_the_streams_limit_is_rejected_and_affects_no_other_request(http):
    answer = http.post("/v1/completions", json=BODY | {"prompt": [5] * STREAM_TOKENS})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert f"at most {STREAM_TOKENS}" in error["message"]
    assert ask(http, prompt="The river")["usage"]["completion_tokens"] == 8


def test_the_model_card_gives_the_context_length_and_the_longest_request(http, server):
    card = http.get("/v1/models").json()["data"][0]
    assert (card["max_model_len"], card["max_request_len"]) == (CONTEXT, STREAM_TOKENS)
    card = httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT).json()["data"][0]
    assert card["max_request_len"] == card["max_model_len"] == server.engine.max_model_len
