"""Spread connections evenly over workers: those with more of them let the others accept first.  Lesson 99.

All workers accept from the same socket, and whichever wakes up first may take the whole of a burst. So each worker
writes how many connections it has open into memory that all share. One that has more than another gives the others a
head start before it accepts the next.
"""

import mmap
import os
import tempfile

GONE = -1  # in the slot of a worker that accepts no connections
BYTES = 8


class Shares:
    """The number of open connections of each worker, in slots of shared memory; on POSIX systems.

    file: descriptor of the memory, which workers inherit.
    """

    def __init__(self, file: int, count: int):
        self.file, self.count = file, count
        self._memory = mmap.mmap(file, count * BYTES)
        self._open = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, count: int) -> "Shares":
        """Return new slots, of workers that do not accept connections yet."""
        with tempfile.TemporaryFile() as file:
            file.truncate(count * BYTES)
            shares = cls(os.dup(file.fileno()), count)
        for slot in range(count):
            shares.leave(slot)
        return shares

    def set(self, slot: int, connections: int) -> None:
        self._open[slot] = connections

    def leave(self, slot: int) -> None:
        self._open[slot] = GONE

    def ahead(self, slot: int) -> bool:
        """Return whether a worker that accepts connections has fewer than that of `slot`."""
        own = self._open[slot]
        return any(GONE < other < own for other in self._open)

    def close(self) -> None:
        self._open.release()
        self._memory.close()
        os.close(self.file)
