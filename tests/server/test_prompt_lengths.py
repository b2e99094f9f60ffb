"""Prompts at the limit of the context, and refusals that say which of several prompts is meant."""

import json

import pytest

from tests.server.conftest import MAX_MODEL_LEN

SCORE = {"echo": True, "logprobs": 0, "max_tokens": 0}
WHOLE = [2] + [10 + i for i in range(MAX_MODEL_LEN - 1)]


@pytest.fixture(scope="module")
def http(here):
    return here.client


def complete(http, **body):
    return http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True} | body)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"logprobs": None}], ids=str)
def test_a_prompt_that_fills_the_context_is_scored(http, more):
    answer = complete(http, prompt=[WHOLE, WHOLE[:5]], **SCORE | more)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        form = answer.json()
        n = more.get("n", 1)
        assert [choice["finish_reason"] for choice in form["choices"]] == ["length"] * 2 * n
        assert form["usage"]["completion_tokens"] == 0 and form["usage"]["prompt_tokens"] == MAX_MODEL_LEN + 5
        found = [choice["logprobs"] and len(choice["logprobs"]["tokens"]) for choice in form["choices"]]
        assert found == ([None] * 2 if "logprobs" in more else [MAX_MODEL_LEN] * n + [5] * n)


def test_scores_do_not_depend_on_whether_a_token_follows(http):
    found = [complete(http, prompt=WHOLE[:-1], **SCORE | {"max_tokens": count}).json() for count in (0, 1)]
    zero, one = (form["choices"][0]["logprobs"]["token_logprobs"] for form in found)
    assert zero[1:] == pytest.approx(one[1 : MAX_MODEL_LEN - 1], abs=1e-4)
    assert len(one) == len(zero) + 1


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 1}, {"max_tokens": None}, {"max_tokens": 16}], ids=str)
def test_one_token_of_output_fits_after_the_longest_prompt(http, limit):
    answer = complete(http, prompt=WHOLE[:-1], **limit)
    assert answer.json()["usage"]["completion_tokens"] == 1
    refused = complete(http, prompt=WHOLE, **limit)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_chat_may_fill_all_but_one_token_of_the_context(http):
    def turns(words):
        return [{"role": "user", "content": "a" + " a" * words}]

    def count(words):
        return http.post("/tokenize", json={"messages": turns(words)}).json()["count"]

    words = MAX_MODEL_LEN - 1 - count(0)
    assert count(words) == MAX_MODEL_LEN - 1
    for limit in ({}, {"max_tokens": 1}, {"max_completion_tokens": 1}):
        body = {"messages": turns(words), "temperature": 0} | limit
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.json()["usage"]["total_tokens"] == MAX_MODEL_LEN, answer.text
        refused = http.post("/v1/chat/completions", json=body | {"messages": turns(words + 1)})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be a whole number from 0"),
        (
            "/v1/chat/completions",
            {"min_tokens": 5, "max_completion_tokens": 3},
            "min_tokens (5) is above max_completion_tokens (3)",
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ("/v2/models/small-random/generate", {"text_input": "a", "max_tokens": 0}, "max_tokens must be a whole number"),
        ("/v2/models/small-random/generate", {"text_input": "a", "max_tokens": 2**40}, "from 0 to 2147483647"),
    ],
    ids=str,
)
def test_a_wrong_number_is_named_as_the_client_named_it(http, path, body, words):
    turns = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
    answer = http.post(path, json=body | turns)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert words in (error if isinstance(error, str) else error["message"])
    if isinstance(error, dict):
        assert error["param"] == words.split()[0]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[5], WHOLE], "prompt 1 has 256 tokens"),
        (["a", "a", "river " * 300], "prompt 2 has"),
        (["a", "a" * 40_000], "prompt 1 has 40,000 characters"),
        ([[5], [5, 10**6]], "prompt 1: token id 1000000"),
        (["a", "half a pair \ud800"], "prompt 1"),
        (["a", []], "prompt 1 is neither"),
        (["a", 5], "prompt 1 is neither"),
        ([[5], [True]], "prompt 1 is neither"),
        ([WHOLE], "prompt has 256 tokens"),
        (WHOLE, "prompt has 256 tokens"),
    ],
    ids=lambda given: ascii(given)[:30],
)
def test_a_refusal_says_which_of_several_prompts_is_meant(http, prompts, words):
    content = json.dumps({"prompt": prompts, "max_tokens": 1})  # httpx cannot send a lone surrogate
    answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(words) and error["param"] == "prompt", error
