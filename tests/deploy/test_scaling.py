"""How many replicas there should be: by the tokens that wait."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm.deploy import places, scaling
from minillm.deploy.router import ANSWER
from minillm.deploy.scaling import ByTokens, ReplicaLoad, needed

FREE, FULL = ReplicaLoad(0, 0, 0.0), ReplicaLoad(0, 0, 1.0)


def waiting(tokens: float) -> ReplicaLoad:
    return ReplicaLoad(0, tokens, 1.0)


@pytest.mark.parametrize(
    ("loads", "number"),
    [
        ([FULL], 1),
        ([waiting(100)], 1),
        ([waiting(101)], 2),
        ([waiting(1000)], 10),
        ([waiting(150), FREE], 2),  # 75 on each, by the mean
        ([waiting(150), waiting(150)], 3),
        ([ReplicaLoad(3, 1, 1.0)], 4),  # answers wait, too: 3 * ANSWER + 1 tokens
        ([FULL, FULL], 2),
        ([FREE, FREE, FREE], 1),
        ([ReplicaLoad(0, 0, 0.3), ReplicaLoad(0, 0, 0.3)], 1),
        ([ReplicaLoad(0, 0, 0.4), ReplicaLoad(0, 0, 0.4)], 2),  # one of them would have less room than it should
        ([ReplicaLoad(0, 1, 0.0), FREE], 2),  # something waits
    ],
)
def test_replicas_that_are_needed(loads, number):
    assert ANSWER == 128
    assert needed(loads, target=100) == number


def test_many_requests_that_run_need_no_further_replica():
    assert needed([ReplicaLoad(waiting=0, prompts=0, busy=0.99)] * 3) == 3


def test_the_load_of_an_engine_is_that_of_its_rows_or_of_its_blocks():
    stats = {"waiting": 2, "waiting_tokens": 70, "running": 8, "blocks": 100, "blocks_available": 25}
    assert ReplicaLoad.of(stats, rows=16) == ReplicaLoad(2, 70, 0.75)
    assert ReplicaLoad.of(stats, rows=8) == ReplicaLoad(2, 70, 1.0)
    assert ReplicaLoad.of(stats, rows=16).tokens == 70 + 2 * ANSWER


def context(*loads: ReplicaLoad, now: int, target: int | None = None):
    metrics = {name: {place: getattr(each, name) for place, each in enumerate(loads)} for name in ReplicaLoad._fields}
    return SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=now, target_num_replicas=target or now)


def test_the_policy_reads_what_ray_has_collected():
    policy = ByTokens(target=100)
    assert policy(context(waiting(250), now=1)) == (3, {})
    assert policy(context(FREE, FREE, now=2)) == (1, {})


def test_replicas_that_have_not_reported_yet_are_no_reason_for_fewer():
    policy = ByTokens(target=100)
    assert policy(context(now=2)) == (2, {})
    assert policy(SimpleNamespace(aggregated_metrics=None, current_num_replicas=2, target_num_replicas=3)) == (3, {})
    assert policy(context(FREE, now=2)) == (2, {})
    assert policy(context(waiting(500), now=2)) == (5, {})
    assert policy(context(waiting(150), now=2, target=4)) == (4, {})


def test_waiting_is_looked_at_often_enough_to_be_averaged():
    assert scaling.EVERY < scaling.LOOK_BACK


def test_the_docs_say_when_there_are_more_or_fewer():
    text = " ".join((Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8").split())
    assert (scaling.UP, scaling.DOWN) == (5, 60)
    assert f"`waiting_tokens` ({scaling.WAITING:,.0f}) wait on each, for five seconds" in text
    assert f"nothing has waited for a minute and one less would still have {1 - scaling.ROOM:.0%} of its" in text
    assert f"and {ANSWER:.0f} for each answer" in text
    assert f"reserved {1000 * places.DELAY:.0f} ms after the request" in text and places.KEEP == 1
