"""Prefix caching over HTTP: hits need the same salt, and requests can opt out."""

import itertools
import random

import pytest

NUMBERS = itertools.count()  # a different prompt for each test, because they share an engine
MESSAGE = "What does the quirrel eat on the island, and who told the lighthouse keeper? " * 3


@pytest.fixture(scope="module")
def http(here):
    return here.client


@pytest.fixture(params=["completions", "chat/completions"])
def found(http, request):
    """A function that sends a request and returns how many of its prompt's tokens were cached."""

    def hits() -> int:
        lines = http.get("/metrics").text.splitlines()
        return int(next(float(line.split()[-1]) for line in lines if line.startswith("minillm_engine_prefix_hit_")))

    number = next(NUMBERS)
    if request.param == "completions":
        prompt = {"prompt": random.Random(number).choices(range(300, 4000), k=100)}
    else:
        prompt = {"messages": [{"role": "user", "content": f"{number} {MESSAGE}"}]}

    def send(**more) -> int:
        before = hits()
        answer = http.post(f"/v1/{request.param}", json=prompt | {"max_tokens": 2, "ignore_eos": True} | more)
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["usage"]["prompt_tokens"]
        whole, got = (tokens - 1) // 16 * 16, hits() - before
        assert whole >= 16 * 2 and got in (0, whole), "hits must be all full blocks or none"
        return got

    return send


@pytest.mark.parametrize("salt", [None, "ann"])
def test_the_same_prompt_hits_the_cache_with_the_same_salt(found, salt):
    assert found(cache_salt=salt) == 0 < found(cache_salt=salt)


@pytest.mark.parametrize("other", ["bob", None])
def test_a_different_salt_never_hits(found, other):
    assert [found(cache_salt="ann"), found(cache_salt=other)] == [0, 0] and found(cache_salt="ann") > 0


def test_a_request_that_opts_out_does_not_use_cached_blocks(found):
    assert [found(), found(use_prefix_cache=False)] == [0, 0] and found(use_prefix_cache=True) > 0


def test_a_request_that_opts_out_caches_nothing(found):
    assert [found(use_prefix_cache=False), found(), found() > 0] == [0, 0, True]


def test_an_opt_out_that_is_not_a_boolean_is_rejected(http):
    answer = http.post("/v1/completions", json={"prompt": "The river", "use_prefix_cache": "no"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_prefix_cache"
