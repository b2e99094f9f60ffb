"""How many cores a process may use, and how many other programs use."""

import os

import pytest

from minillm import cores

TICK = os.sysconf("SC_CLK_TCK")


def stat(path, seconds):
    """A /proc/stat with these seconds for each core: user, nice, system, idle, iowait, irq, softirq, steal, guest."""
    lines = ["cpu  1 1 1 1 1 1 1 1 1 1"]
    for core, columns in enumerate(seconds):
        lines.append(f"cpu{core} " + " ".join(str(round(each * TICK)) for each in (*columns, 0)))
    path.write_text("\n".join([*lines, "intr 12345 0 0", "ctxt 99"]))


def test_busy_seconds_are_those_of_the_cores_that_the_process_may_run_on(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "STAT", tmp_path / "stat")
    monkeypatch.setattr(cores, "allowed", lambda: {0, 2})
    # Idle time and waiting for a disk are not busy; a guest's time is counted in user time already.
    stat(tmp_path / "stat", [(1, 2, 3, 100, 50, 4, 5, 6, 1), (1000,) * 9, (10, 0, 0, 7, 7, 0, 0, 0, 10)])
    assert cores.busy_seconds() == pytest.approx(1 + 2 + 3 + 4 + 5 + 6 + 10)


@pytest.mark.parametrize("content", [None, "", "cpu0 a b c d", "something else\n"])
def test_busy_seconds_are_unknown_where_the_system_does_not_say(monkeypatch, tmp_path, content):
    monkeypatch.setattr(cores, "STAT", tmp_path / "stat")
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert cores.busy_seconds() is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("1600000 100000", 8)],
)
def test_a_container_with_a_quota_has_as_many_cores_as_it_pays_for(monkeypatch, tmp_path, content, expected):
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cores, "allowed", lambda: set(range(8)))
    assert cores.available() == 8
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert cores.available() == expected


class Clocks:
    def __init__(self):
        self.busy, self.own, self.now = 100.0, 40.0, 7.0

    def others(self):
        return cores.OtherPrograms(lambda: self.busy, lambda: self.own, lambda: self.now)


def test_other_programs_are_what_is_busy_without_this_process():
    clocks = Clocks()
    others = clocks.others()
    clocks.busy, clocks.own, clocks.now = 107.0, 44.0, 9.0
    assert others.age == pytest.approx(2.0)
    assert others.measure() == pytest.approx((7 - 4) / 2)
    clocks.now = 10.0
    assert others.measure() == 0.0  # since the last call, nothing ran
    clocks.own, clocks.now = 45.0, 11.0
    assert others.measure() == 0.0  # ticks of the system are coarser than the process's own time


def test_nothing_is_measured_in_no_time_or_where_the_system_does_not_say():
    clocks = Clocks()
    others = clocks.others()
    assert others.measure() is None
    clocks.busy, clocks.now = None, 8.0
    assert others.measure() is None
