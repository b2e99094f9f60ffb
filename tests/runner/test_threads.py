"""A step uses the cores that other programs leave free."""

import contextlib
import logging
import threading
from concurrent.futures import Future

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.config import EngineConfig
from minillm.cores import FREE, OtherPrograms
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError
from minillm.runner.threads import AGAIN, EVERY, STALE, Threads


class Machine:
    """A machine whose other programs use as many cores as a test says."""

    def __init__(self, total=4, fixed=None, available=None):
        self.now = self.busy = 0.0
        others = OtherPrograms(lambda: self.busy, lambda: 0.0, lambda: self.now)
        self.threads = Threads(fixed, others, available=available or total, total=total)

    def run(self, used, seconds=1.0):
        """Steps of 10 ms for some seconds; returns the number of threads of each."""
        counts = []
        for _ in range(round(seconds * 100)):
            self.now += 0.01
            self.busy += used * 0.01
            with self.threads.chosen() as count:
                assert torch.get_num_threads() == count
                counts.append(count)
        return counts


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("used", "expected"), [(0, 4), (0.15, 4), (1, 3), (1.5, 2), (2.1, 2), (3, 1), (4, 1)])
def test_steps_use_the_cores_that_others_leave(used, expected):
    machine = Machine()
    assert machine.run(used)[-1] == expected
    assert torch.get_num_threads() == 4  # the caller's own number is as before


def test_the_number_follows_the_machine_within_half_a_second_both_ways():
    machine = Machine(total=2)
    assert set(machine.run(0)) == {2}
    assert machine.run(1)[50:] == [1] * 50
    assert machine.run(0)[50:] == [2] * 50


def test_the_number_follows_the_machine_if_each_step_takes_seconds():
    """As those of a large model do."""
    machine = Machine(total=2)

    def step(used):
        with machine.threads.chosen() as count:
            machine.now += 3 * STALE
            machine.busy += used * 3 * STALE
        return count

    assert [step(used) for used in (0, 1, 1, 0, 0)] == [2, 2, 1, 1, 2]


def test_a_load_between_the_two_bounds_changes_nothing():
    between = (FREE + AGAIN) / 2
    machine = Machine(total=2)
    assert set(machine.run(between)) == {2}
    machine.run(1)
    assert set(machine.run(between)[50:]) == {1}


def test_a_moment_of_another_programs_work_changes_nothing():
    machine = Machine(total=2)
    machine.run(0)
    assert set(machine.run(1.5 * FREE, EVERY) + machine.run(0)) == {2}


def test_ticks_of_the_systems_clock_are_not_taken_for_a_busy_core():
    """A program that uses 2% of a core has all of a step in which the system counts its tick."""
    machine = Machine(total=2)
    for _ in range(10):
        machine.busy += 0.01
        assert set(machine.run(0, 0.5)) == {2}


def test_steps_never_use_more_threads_than_torch_may():
    torch.set_num_threads(2)
    assert set(Machine(total=8).run(0)) == {2}
    torch.set_num_threads(1)
    assert set(Machine(total=8).run(0)) == {1}


def test_steps_use_no_more_threads_than_a_containers_quota_pays_for():
    assert set(Machine(total=8, available=2).run(0)) == {2}


def test_a_fixed_number_is_used_whatever_other_programs_do():
    assert set(Machine(fixed=3).run(4)) == {3}


@pytest.mark.parametrize("count", [0, 1025, 2**40])
def test_a_number_that_no_machine_has_is_refused(count):
    with pytest.raises(ConfigError, match="cpu_threads must be a whole number from 1 to 1024"):
        EngineConfig(cpu_threads=count)


def test_what_was_measured_while_the_engine_was_idle_is_not_used():
    machine = Machine(total=2)
    machine.now += 10 * STALE
    machine.busy += 2 * 10 * STALE
    assert machine.run(0, EVERY / 2)[-1] == 2


def test_an_engine_that_starts_on_a_busy_machine_says_so_once(caplog):
    now = {"busy": 0.0, "now": 0.0}
    others = OtherPrograms(lambda: now["busy"], lambda: 0.0, lambda: now["now"])
    now |= {"busy": 3.0, "now": 2.0}  # while the model was loaded
    with caplog.at_level(logging.WARNING, "minillm"):
        threads = Threads(None, others, available=2, total=2)
        assert threads.limit == 1
        now |= {"busy": 3.4, "now": 2.2}
        with threads.chosen() as count:
            assert count == 1
    assert [record.getMessage() for record in caplog.records] == [
        "other programs use 1.5 of 2 cores, so steps use 1 thread and take longer, until these programs end"
    ]


def test_a_core_less_of_many_is_no_warning(caplog):
    with caplog.at_level(logging.WARNING, "minillm"):
        assert Machine(total=16).run(0.5)[-1] == 4  # torch's own number
    assert not caplog.records


def test_threads_stay_as_they_are_where_the_system_does_not_say_how_busy_it_is():
    now = iter(range(100))
    threads = Threads(None, OtherPrograms(lambda: None, lambda: 0.0, lambda: next(now) / 8), available=2, total=2)
    for _ in range(20):
        with threads.chosen() as count:
            assert count == 2


def test_the_engine_runs_its_steps_with_the_number_it_was_given(monkeypatch):
    with LLM(device="cpu", cpu_threads=2) as llm:
        seen, forward = set(), llm.engine.model.forward

        def counted(*arguments):
            seen.add(torch.get_num_threads())
            return forward(*arguments)

        monkeypatch.setattr(llm.engine.model, "forward", counted)
        llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
    assert seen == {2} and torch.get_num_threads() == 4


def test_an_engine_that_starts_during_anothers_step_does_not_take_over_its_number():
    """A new thread begins with the number that was last set in any thread."""
    began, may_end = threading.Event(), threading.Event()

    def step():
        with Threads(fixed=1).chosen():
            began.set()
            may_end.wait()

    other = threading.Thread(target=step)
    other.start()
    began.wait()
    try:
        with contextlib.closing(AsyncLLM(device="cpu")) as engine:
            found = Future()
            engine._tell(lambda: found.set_result(torch.get_num_threads()))
            assert found.result() == 4
    finally:
        may_end.set()
        other.join()
