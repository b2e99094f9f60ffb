"""A limit on how long a learner's code may run, so that an endless loop is reported and does not hang the notebook."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 1.0  # seconds of CPU time from one interrupt to the next


class TookTooLong(BaseException):
    """The limit was reached. Not an Exception, so that a learner's `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the block once it has used this much CPU time, so that a busy machine changes nothing.

    There is no limit outside the main thread and on Windows. Python code is interrupted between two instructions; a
    long call into C, such as one matrix product, first returns. An exception that is raised while Python deletes an
    object or collects garbage is lost, so it is raised again until one arrives.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
