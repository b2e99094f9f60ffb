"""Measuring the load of other programs, and repeating comparisons that it disturbs."""

import pytest

from minillm.bench import load, offline, records
from minillm.bench.workloads import BenchRequest
from minillm.cores import OtherPrograms


@pytest.fixture
def clocks(monkeypatch):
    """A machine whose clocks stand still unless a test advances them: seconds of all programs, of this one, of time."""
    times = {"all": 0.0, "own": 0.0, "wall": 0.0}
    monkeypatch.setattr(load.os, "times", lambda: (times["own"], 0.0, 0.0, 0.0, 0.0))

    def measuring(own):
        return OtherPrograms(lambda: times["all"], own, lambda: times["wall"])

    monkeypatch.setattr(load, "OtherPrograms", measuring)
    return times


def test_other_load_is_total_minus_own_cpu_time_over_wall_time(clocks):
    with load.other_load() as others:
        clocks |= {"all": 7.0, "own": 4.0, "wall": 2.0}
    assert others.cores == pytest.approx(1.5)


def test_other_load_is_unknown_if_the_system_does_not_report_it(clocks):
    clocks["all"] = None
    with load.other_load() as others:
        clocks["wall"] = 1.0
    assert others.cores is None


class Contender:
    def __init__(self, name, seconds):
        self.name, self.seconds = name, iter(seconds)

    def run(self, *_):
        return next(self.seconds)


def compared(ours, theirs, patience=4):
    contenders = Contender("minillm", ours), Contender("transformers", theirs)
    facts = {"output_tokens": 60, "workload": "w"}
    return offline._alternate(contenders[0], contenders[1:], [BenchRequest([1], 2)], facts, 2, 1.0, (8,), patience)


def test_a_comparison_continues_until_its_last_runs_agree():
    ours, theirs = compared([9, 9, 1.0, 2.0, 1.0, 1.05], [9, 9, 2.0, 2.0, 2.0, 2.1])
    assert ours["runs"] == [1.0, 1.05] and ours["unsteady_runs"] == [1.0, 2.0]
    assert theirs["runs"] == [2.0, 2.1] and theirs["unsteady_runs"] == [2.0, 2.0]
    assert ours["spread"] == pytest.approx(0.049, abs=1e-3) and ours["times_transformers"] == 2.0
    assert offline.caveat({"results": [ours, theirs]}) == ""


def test_a_comparison_that_never_settles_ends_and_reports_the_load():
    rows = compared([9, 9, *[1.0, 2.0] * 4], [9, 9, *[2.0] * 8])
    rows[0]["other_programs_cores"] = rows[1]["other_programs_cores"] = 0.9
    said = offline.caveat(records.record(rows, records.begin()))
    assert "runs of the same work differ by 67%, and other programs took 0.9 of" in said
    assert len(rows[0]["runs"] + rows[0]["unsteady_runs"]) == 8


def test_without_patience_only_the_requested_runs_are_made():
    rows = compared([9, 9, 1.0, 2.0], [9, 9, 2.0, 2.0], patience=1)
    assert rows[0]["runs"] == [1.0, 2.0] and rows[0]["unsteady_runs"] == []
