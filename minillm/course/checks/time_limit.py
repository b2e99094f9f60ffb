"""Stop an endless loop in a learner's solution, so that its check ends too."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float = 1.0) -> Iterator[None]:
    """Raise AssertionError in the block once it has used this much CPU time.

    CPU time, so that a busy machine changes nothing. Outside the main thread and on Windows there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise AssertionError(f"it was still running after {seconds:g} s: which of its loops never ends?")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
