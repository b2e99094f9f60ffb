"""The newest values of something that is measured all the time.  Lesson 99."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate


class Recent:
    """Keeps the newest values, for current percentiles; a histogram's cover everything since the start."""

    def __init__(self, most: int = 1024):
        self._newest: deque[tuple[float, int]] = deque(maxlen=most)  # (value, how often)

    def add(self, value: float, count: int = 1) -> None:
        self._newest.append((value, count))

    def percentiles(self, *wanted: int) -> dict[str, float | None]:
        """Return what `wanted` percent of the newest values do not exceed, as {"p50": ...}; None if there are none."""
        newest = sorted(self._newest.copy())  # a copy: another thread may add to it
        ranks = list(accumulate(count for _, count in newest))
        indices = [bisect_left(ranks, percent / 100 * ranks[-1]) if ranks else None for percent in wanted]
        return {
            f"p{percent}": None if index is None else newest[index][0]
            for percent, index in zip(wanted, indices, strict=True)
        }
