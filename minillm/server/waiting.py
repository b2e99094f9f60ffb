"""How long a new request would wait, from the pace at which requests have finished lately.  Lesson 99.

The pace is measured only while requests wait: then rows never stand idle, and a request begins whenever another ends.
Without a queue, few may end because few have come, which says nothing about how many could.
"""

import math
import time
from collections import deque
from collections.abc import Callable

RECENT = 256  # the pace is that of so many ends
FEWEST = 8  # ends before there is a pace
LONGEST = 60  # seconds that a client is asked to wait at most before it tries again


class Pace:
    """Ends of choices while others wait. clock: seconds, of which only differences count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=RECENT)

    def ended(self, waiting: int) -> None:
        """A choice has ended, with so many waiting."""
        if waiting > 0:
            self._ends.append(self._clock())
        else:
            self._ends.clear()

    def seconds(self, count: int) -> float | None:
        """Until so many choices have ended; 0 for none, None if the pace is not known.

        Time without any end counts: if nothing ends any more, the wait grows.
        """
        if count <= 0:
            return 0.0
        ends = list(self._ends)
        if len(ends) < FEWEST:
            return None
        return count * (self._clock() - ends[0]) / (len(ends) - 1)


def retry_after(seconds: float | None) -> int:
    """The whole seconds of a Retry-After header."""
    return 1 if seconds is None else min(max(math.ceil(seconds), 1), LONGEST)
