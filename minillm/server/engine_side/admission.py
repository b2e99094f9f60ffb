"""Refuse submissions that exceed a limit or have waited too long in the queue.  Lesson 99."""

import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..config import ServerConfig
from ..limits import retry_after
from ..wire import Failure
from .waiting import Pace, Seen


@dataclass(frozen=True)
class Capacity:
    """The limits on what all clients together may ask for.

    rows: most choices in a step. choices: most that run or wait. max_wait: seconds; None or 0: no limit.
    """

    rows: int
    choices: int
    max_wait: float | None
    pace: Pace

    def refusal(self, running: int, choices: int) -> Failure | None:
        """Return the refusal if the server cannot take `choices` more now, and None if it can.

        running: choices that were accepted and are not finished.
        """
        if running + choices > self.choices:
            seconds = self.pace.seconds(running + choices - self.choices)
            why = f"{running} of at most {self.choices} choices are running or waiting"
        else:
            most = self.max_wait
            wait = self.pace.seconds(running + 1 - self.rows) if most else None
            if not most or wait is None or wait <= most:
                return None
            seconds = wait - most
            why = f"a request would wait about {wait:.0f} s, and the limit is {most:g} s"
        after = retry_after(seconds)
        return Failure("busy", f"the server is busy: {why}; try again in {after} s", after)


class Accepted(Protocol):
    """The choices that were accepted from a worker and are not finished: see `Line`."""

    @property
    def count(self) -> int: ...
    def of(self, client: str | None) -> int: ...
    def waits(self, keys: range) -> bool: ...
    def refuse_unless_begun(self, keys: range) -> None: ...
    def seen(self) -> Iterator[Seen]: ...


class Admission:
    """Decides which submissions of all workers may run or wait.

    A request is refused as busy if it would exceed config.max_queued choices beyond those that fit in a step, or would
    wait longer than config.max_wait, by estimate. rows: most choices in a step. lines: those to the workers now.
    """

    def __init__(self, rows: int, config: ServerConfig, lines: Collection[Accepted]):
        self._config, self._lines = config, lines
        self.pace = Pace(rows, self._seen)
        self.capacity = Capacity(rows, rows + config.max_queued, config.max_wait, self.pace)
        # Submissions, by the time when they must have begun.
        self.waiting: deque[tuple[float, Accepted, range]] = deque()

    @property
    def running(self) -> int:
        """Return the number of choices that were accepted and are not finished."""
        return sum(line.count for line in list(self._lines))  # any thread asks

    def refusal(self, client: str | None, choices: int) -> Failure | None:
        """Return the refusal if the server or this client cannot have `choices` more now, and None if it can."""
        return self.capacity.refusal(self.running, choices) or self._too_many(client, choices)

    def _too_many(self, client: str | None, choices: int) -> Failure | None:
        most = self._config.max_per_client
        if most is None:
            return None
        running = sum(line.of(client) for line in self._lines)
        if running + choices <= most:
            return None
        why = f"has {running} of at most {most} choices running or waiting, and asks for {choices} more"
        return Failure("busy", f"this client {why}: wait until some end, or ask for fewer", 1)

    def waits(self, line: Accepted, keys: range) -> None:
        """Note a submission that is about to wait, for config.queue_timeout at most."""
        if (most := self._config.queue_timeout) is None:
            return
        if len(self.waiting) >= 2 * self.capacity.choices:  # at most half of them can still wait
            self.waiting = deque(each for each in self.waiting if each[1].waits(each[2]))
        self.waiting.append((time.monotonic() + most, line, keys))

    def refuse_the_overdue(self) -> float | None:
        """Refuse what has waited too long. Return the seconds until the next deadline, or None if nothing waits."""
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now:
            _, line, keys = self.waiting.popleft()
            line.refuse_unless_begun(keys)
        return self.waiting[0][0] - now if self.waiting else None

    def _seen(self) -> Iterator[Seen]:
        """Yield what is known of each choice that runs or waits, for the estimate of the wait."""
        for line in list(self._lines):
            yield from line.seen()
