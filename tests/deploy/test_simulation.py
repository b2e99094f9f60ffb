"""Routing in simulated time: how much of the best possible hit rate it keeps, and how evenly it spreads the load.

The best is what one cache of the size of all replicas' caches finds.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from minillm.bench import records
from minillm.deploy.router import by_load, by_prefix_and_load
from minillm.deploy.simulation import H200, Size, conversations, run
from minillm.scheduler import Step

DOCS = Path(__file__).parents[2] / "docs"
SIZE = Size(blocks=800)
REPLICAS = 4
FEW = 16  # conversations


@cache
def talks(count: int = 100):
    return tuple(conversations(count, rate=400, pause=0.5))


@cache
def best(count: int = 100) -> float:
    return run(talks(count), 1, SIZE.times(REPLICAS)).hit_rate


@cache
def routed(count: int = 100):
    return run(talks(count), REPLICAS, SIZE)


def by_prefix(candidates):
    return sorted(candidates, key=lambda each: (-each.cached, each.load))


def test_a_few_conversations_stay_where_they_began():
    assert routed(FEW).hit_rate >= 0.85 * best(FEW) > 0.7
    assert run(talks(FEW), REPLICAS, SIZE, by_load).hit_rate < 0.7 * best(FEW)


@pytest.mark.proof
def test_routing_keeps_the_hit_rate_of_one_large_cache_and_spreads_the_load():
    assert routed().hit_rate >= 0.92 * best() > 0.8
    assert routed().imbalance <= 1.25


@pytest.mark.proof
def test_neither_load_nor_prefix_alone_would_do():
    """So the trace can tell a good policy from others."""
    assert run(talks(), REPLICAS, SIZE, by_load).hit_rate < 0.6 * best()
    assert run(talks(), REPLICAS, SIZE, by_prefix).imbalance > 2


@pytest.mark.proof
def test_workers_that_tell_each_other_route_nearly_as_well_as_one():
    assert run(talks(), REPLICAS, SIZE, workers=4).hit_rate > 0.92 * best()
    assert run(talks(), REPLICAS, SIZE, workers=4, told=False).hit_rate < 0.8 * best()


def test_every_answer_comes_and_every_token_is_counted():
    asked = sum(len(talk.turns) for talk in talks(FEW))
    answers = sum(len(turn.answer) for talk in talks(FEW) for turn in talk.turns)
    found = routed(FEW)
    assert len(found.first_tokens) == asked and min(found.first_tokens) > 0
    # An answer's last token is not computed, unless the next turn repeats it.
    computed = found.prompt_tokens - found.cached_tokens + answers - asked
    assert sum(found.computed) == computed


def test_a_run_is_the_same_every_time():
    again, first = run(talks(FEW), REPLICAS, SIZE, by_prefix_and_load), routed(FEW)
    assert (again.first_tokens, again.computed, again.held) == (first.first_tokens, first.computed, first.held)


def test_conversations_of_different_users_share_nothing():
    apart = list(conversations(FEW, rate=400, pause=0.5, salts=1000))
    shared = [replace(talk, salt="") for talk in apart]
    rates = [run(each, 1, SIZE.times(REPLICAS)).hit_rate for each in (apart, shared)]
    assert rates[0] < rates[1] - 0.05


def test_the_docs_say_what_the_record_has():
    rows = [row for row in records.read("cpu/routing")["results"] if row["policy"] == "prefix and load"]
    text = " ".join((DOCS / "operating.md").read_text(encoding="utf-8").split())
    assert len(rows) >= 15
    lowest = int(100 * min(row["of_best"] for row in rows))
    assert f"this finds {lowest}% to 100% of the tokens" in text
    assert f"at most {max(row['imbalance'] for row in rows):.1f} times the mean" in text


def test_a_step_takes_as_long_as_the_recorded_one():
    rows = {row["name"]: row["seconds"] for row in records.read("h200/roofline")["results"]}
    for count, seconds in H200.decode:
        assert seconds == pytest.approx(rows[f"decode, {count} at once"], rel=0.01)
    slope = (rows["prefill of 2048"] - rows["prefill of 400"]) / (2048 - 400)
    assert H200.prompt_token == pytest.approx(slope, rel=0.01)


def test_one_large_engine_has_the_speed_of_all():
    def step(rows: int) -> Step:
        ones = np.ones(rows, np.int32)
        return Step(0, ones, ones, ones, ones > 0, rows)

    assert SIZE.times(8).speed.seconds(step(64)) == pytest.approx(H200.seconds(step(8)))
