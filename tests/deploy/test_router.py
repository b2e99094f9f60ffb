"""The router: cached prefixes against load, for any order of requests, and a policy of the user's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.deploy.router import LOAD, ReplicaState, Router, by_load, by_prefix_and_load
from minillm.kv_cache.block_pool import BlockPool, prefix_keys

BLOCK = 4
ANY = ("a", "b", "c")
SAID = list(range(40))


def keys_of(tokens, salt=""):
    return prefix_keys(np.array(tokens), BLOCK, (salt,))


class Seen(list):
    """A policy that keeps what it was shown."""

    def __call__(self, candidates):
        self[:] = candidates
        return by_prefix_and_load(candidates)

    def of(self, replica: str) -> ReplicaState:
        return next(each for each in self if each.replica == replica)


@pytest.fixture
def seen():
    return Seen()


@pytest.fixture
def router(seen):
    router = Router(BLOCK, seen)
    for name in ANY:
        router.join(name, blocks=100)
    return router


def test_a_request_follows_its_prefix(router, seen):
    for name in ANY:  # each has something else in its cache
        router.end(router.begin(name, 40, keys_of([ord(name)] * 40)), 8)
    router.end(router.begin("b", 40, keys_of(SAID)), 8)
    assert router.order(80, keys_of(SAID + SAID), ANY)[0] == "b"
    assert [seen.of(name).cached for name in ANY] == [0, 40, 0]
    assert router.order(80, keys_of([ord("c")] * 40 + SAID), ANY)[0] == "c"


def test_the_answer_belongs_to_the_next_prompts_prefix(router, seen):
    answer = list(range(100, 121))
    router.end(router.begin("a", 40, keys_of(SAID)), 21, keys_of(SAID + answer))
    router.order(70, keys_of(SAID + answer + SAID), ANY)
    assert seen.of("a").cached == 60, "full blocks only"


def test_a_whole_prompt_is_never_cached(router, seen):
    """The engine computes at least one token of each prompt."""
    router.begin("a", 40, keys_of(SAID))
    router.order(40, keys_of(SAID), ANY)
    assert seen.of("a").cached == 39


def test_prefixes_of_different_salts_are_apart(router, seen):
    router.begin("a", 40, keys_of(SAID, "one"))
    router.order(40, keys_of(SAID, "another"), ANY)
    assert seen.of("a").cached == 0
    router.order(40, keys_of(SAID, "one"), ANY)
    assert seen.of("a").cached == 39


def test_blocks_behind_a_missing_one_are_not_cached(router, seen):
    router.learn("a", keys_of(SAID)[1:])
    router.order(50, keys_of(SAID), ANY)
    assert seen.of("a").cached == 0


def test_without_a_cached_prefix_the_least_loaded_replica_is_chosen(router):
    router.begin("a", 400, ())
    router.begin("b", 10, ())
    router.begin("c", 100, ())
    assert router.order(8, keys_of(SAID[:8]), ANY) == ["b", "c", "a"]


def test_the_load_is_what_runs_without_what_is_cached(router, seen):
    routed = router.begin("a", 40, keys_of(SAID))
    first = routed.work
    again = router.begin("a", 44, keys_of(SAID + [1] * 4))
    assert again.work == first - 40 + 4
    router.order(1, (), ANY)
    assert seen.of("a").load == first + again.work
    router.end(routed, 128)
    router.order(1, (), ANY)
    assert seen.of("a").load == pytest.approx(again.work)
    router.end(again, 128)
    router.order(1, (), ANY)
    assert seen.of("a").load == 0


def test_requests_that_others_route_are_load_too(router, seen):
    router.begin("a", 40, ())
    assert router.order(8, (), ANY, {"a": 1, "b": 5, "c": 6}) == ["a", "b", "c"]
    assert seen.of("c").load == 6 / 5 * seen.of("b").load > 0


def test_what_another_router_did_is_known_once_it_is_told(router, seen):
    router.learn("c", keys_of(SAID))
    router.learn("gone", keys_of(SAID))
    router.order(50, keys_of(SAID), ANY)
    assert [seen.of(name).cached for name in ANY] == [0, 0, 40] and not any(each.load for each in seen)


def test_the_length_of_answers_is_learned(router, seen):
    for _ in range(1000):
        router.end(router.begin("a", 1, ()), 8)
    assert router.begin("a", 1, ()).work == pytest.approx(1 + 8, rel=1e-3)


def test_a_replica_that_left_is_not_chosen_and_its_requests_can_still_end(router):
    routed = router.begin("a", 40, keys_of(SAID))
    router.leave("a")
    assert router.order(40, keys_of(SAID), ANY) == ["b", "c"]
    router.end(routed, 5, keys_of(SAID))
    router.join("a", blocks=100)
    assert router.order(40, keys_of(SAID), ["a"]) == ["a"]


def test_only_the_given_replicas_are_chosen_from(router):
    assert router.order(8, (), ["c", "unknown"]) == ["c"]
    assert router.order(8, (), []) == []


def test_a_users_policy_takes_the_place_of_the_routers():
    router = Router(BLOCK, lambda candidates: sorted(candidates, key=lambda each: each.replica, reverse=True)[:2])
    for name in ANY:
        router.join(name, blocks=8)
    assert router.order(8, (), ANY) == ["c", "b"]


def test_by_load_ignores_the_cache():
    busy, idle = ReplicaState("busy", 500, 100, 100), ReplicaState("idle", 0, 0, 100)
    assert by_load([busy, idle])[0] is idle


@given(
    loads=st.lists(st.floats(0, 1e6), min_size=2, max_size=6),
    cached=st.lists(st.integers(0, 4000), min_size=6, max_size=6),
)
def test_a_prefix_attracts_requests_only_up_to_a_bound(loads, cached):
    candidates = [ReplicaState(str(i), load, cached[i], 4000) for i, load in enumerate(loads)]
    best = by_prefix_and_load(candidates)[0]
    assert best.load <= min(loads) + best.cached / LOAD + 1e-6


def test_a_prefix_in_high_demand_is_spread(router):
    """All requests share one prefix and none ends: the other replicas compute it too, long before it is too late."""
    chosen = []
    for place in range(300):
        keys = keys_of(SAID + [place])
        chosen.append(router.order(41, keys, ANY)[0])
        router.begin(chosen[-1], 41, keys)
    counts = [chosen.count(name) for name in ANY]
    assert max(counts) <= min(counts) + 2


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=40))
def test_the_router_evicts_what_the_engines_pool_evicts(prompts):
    """One request after the other, on a replica with few blocks. prompts: the blocks of each, of two kinds."""
    blocks, seen = 7, Seen()
    pool, router = BlockPool(blocks), Router(BLOCK, seen)
    router.join("a", blocks)
    for kinds in prompts:
        tokens = [kind for kind in kinds for _ in range(BLOCK)] + [9]  # a token more: every block may be cached
        keys = keys_of(tokens)
        router.order(len(tokens), keys, ["a"])
        found = pool.lookup(keys)
        assert seen.of("a").cached == len(found) * BLOCK
        pool.share(found)
        held = found + pool.allocate(len(keys) - len(found))
        for block, key in zip(held, keys, strict=True):
            pool.register(block, key)
        pool.release(held)
        router.end(router.begin("a", len(tokens), keys), 0)
