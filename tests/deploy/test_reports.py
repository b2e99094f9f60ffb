"""What replicas have counted stays counted when they end."""

import threading

import pytest

from minillm.deploy import reports
from minillm.deploy.reports import ModelCounts, Reports
from minillm.server.ledger import Ledger
from tests.waiting import TIMEOUT, wait_until

pytestmark = pytest.mark.timeout(TIMEOUT)


def families(count):
    return [["tokens", "counter", "", [["tokens_total", {"model_name": "m"}, count]]]]


def value(found):
    ((_, _, _, ((_, _, count),)),) = found
    return count


def test_counts_of_replicas_that_have_ended_are_kept():
    counted = ModelCounts(2)
    assert counted.families == []
    assert counted.report({"a": families(3), "b": families(4)}) == 0
    assert counted.report({"a": families(5)}) == 0, "b has ended, and nothing replaces it yet"
    assert counted.report({"a": families(6), "c": families(1)}) == 1
    assert counted.report({"a": families(6), "c": families(2)}) == 0
    assert value(counted.families) == 6 + 4 + 2


def test_where_ray_decides_how_many_there_are_none_is_counted_as_a_replacement():
    counted = ModelCounts(None)
    for name in "abc":
        assert counted.report({name: families(1)}) == 0
    assert value(counted.families) == 3


def test_counts_of_many_replicas_are_kept_as_one_sum(monkeypatch):
    monkeypatch.setattr(reports, "KEPT", 3)
    counted = ModelCounts(1)
    replaced = sum(counted.report({str(place): families(1)}) for place in range(50))
    assert replaced == 49
    assert value(counted.families) == 50
    assert len(counted._each[1]) == 4
    counted.report({"46": families(10)})  # it was not asked for a moment
    assert value(counted.families) == 59


def test_the_ledger_has_the_counts_of_all_models_although_one_does_not_answer(monkeypatch):
    monkeypatch.setattr(reports, "BEAT", 0.01)
    answers, asked = {"a": families(1)}, threading.Event()

    def one(seconds):
        if not answers:
            asked.set()
            raise TimeoutError
        return dict(answers)

    class Workers:
        ledger = Ledger()

    def counts():
        found = [family for family in Workers.ledger.families() if family[0] == "tokens"]
        return value(found) if found else 0

    asking = Reports([(one, 1), (lambda seconds: {"x": families(10)}, 1)], Workers())
    wait_until(lambda: counts() == 11)
    answers.clear()
    assert asked.wait(TIMEOUT)
    answers["b"] = families(2)
    wait_until(lambda: counts() == 13)
    asking.close()
    restarts = next(family for family in Workers.ledger.families() if "engine_restarts" in family[0])
    assert restarts[3][0][2] == 1
    assert not asking._thread.is_alive()
