"""A limit on how long code may run: what it stops, and that it leaves nothing behind."""

import signal

import pytest

from minillm.course.shared import time_limit as module
from minillm.course.shared.time_limit import TookTooLong, time_limit


class Endless:
    def __del__(self):
        while True:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_code_is_stopped_although_python_ignored_the_first_interrupt(monkeypatch):
    monkeypatch.setattr(module, "AGAIN", 0.05)
    reached = []
    with pytest.raises(TookTooLong), time_limit(0.05):
        Endless()  # whatever is raised in __del__ is ignored
        reached.append(True)
        while True:
            pass
    assert reached


def test_what_ends_in_time_is_left_alone():
    before = signal.getsignal(signal.SIGPROF)
    with time_limit(60):
        pass
    assert signal.getsignal(signal.SIGPROF) is before and signal.getitimer(signal.ITIMER_PROF) == (0, 0)
