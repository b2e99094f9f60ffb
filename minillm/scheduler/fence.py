"""Rows and blocks that have been given up while steps in flight may still write to them.  Lesson 10."""

from bisect import insort
from collections import deque
from collections.abc import Iterator


class Fence:
    """Holds rows and blocks until the newest step that may touch them has been read."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, int, list[int]]] = deque()  # (step, row or -1, blocks), oldest step first

    def hold(self, step: int, blocks: list[int], row: int = -1) -> None:
        """Keep `blocks`, and a row if one is given, until `step` has been read."""
        insort(self._held, (step, row, blocks))

    def release(self, read: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (row or -1, blocks) of all that steps up to number `read` were the last to touch."""
        while self._held and self._held[0][0] <= read:
            _, row, blocks = self._held.popleft()
            yield row, blocks

    @property
    def rows(self) -> list[int]:
        return [row for _, row, _ in self._held if row >= 0]

    @property
    def blocks(self) -> list[int]:
        """Return the blocks that are held; one may be listed twice."""
        return [block for _, _, blocks in self._held for block in blocks]
