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
def test_a_container_with_a_quota_has_as_many_cores_as_it_pays_for(groups, content, expected):
    (groups / "own").write_text("0::/\n")
    assert cores.available() == 8
    (groups / "cpu.max").write_text(content + "\n")
    assert cores.available() == expected


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """A folder of control groups, on a machine of 8 cores."""
    monkeypatch.setattr(cores, "GROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cores, "allowed", lambda: set(range(8)))
    return tmp_path


def test_a_quota_of_any_group_around_the_process_counts(groups):
    """As systemd's CPUQuota= sets it, for a service or for a slice of services."""
    inner = groups / "system.slice" / "minillm.service"
    inner.mkdir(parents=True)
    (groups / "own").write_text("0::/system.slice/minillm.service\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert cores.available() == 8
    (inner.parent / "cpu.max").write_text("300000 100000\n")
    assert cores.available() == 3
    (inner / "cpu.max").write_text("150000 100000\n")
    assert cores.available() == 2


@pytest.mark.parametrize("path", ["/", "/docker/0a1b"])  # as the container sees its group, or as the host does
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "expected"), [(-1, 8), (200_000, 2), (250_000, 3), (1_000, 1)])
def test_a_quota_of_the_first_version_counts(groups, path, controllers, quota, expected):
    (groups / "own").write_text(f"9:memory:/x\n2:{controllers}:{path}\n1:cpuset:{path}\n0::/\n")
    (groups / "cpu").mkdir()
    (groups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.available() == expected


@pytest.mark.parametrize("content", ["", "5", "a b", "1 0", "-1 100000"])
def test_a_quota_that_says_nothing_is_none(groups, content):
    (groups / "own").write_text("0::/\n")
    (groups / "cpu.max").write_text(content)
    assert cores.available() == 8


def test_a_system_without_control_groups_has_no_quota(groups):
    assert cores.available() == 8


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
