"""Keep what a server has counted since it started, in the process that owns the others.  Lesson 99.

Workers and engines come and go, but a counter must not fall: whoever reads it takes a fall for a restart of the server,
and what was counted before it is lost. So each response's status is sent to the owner as it is counted, and the
engine's process sends its counts with each sign of life.
"""

import threading
from collections import Counter
from collections.abc import Callable

# Metric families as JSON: [name, type, description, [[name, labels, value] of each sample]].
Families = list[list]


def summed(*each: Families) -> Families:
    """Return the sum of counters and histograms, sample by sample."""
    totals: dict[str, tuple[list, dict[tuple, list]]] = {}
    for name, kind, text, samples in (family for families in each for family in families):
        family, sums = totals.setdefault(name, ([name, kind, text], {}))
        for sample, labels, value in samples:
            total = sums.setdefault((sample, *sorted(labels.items())), [sample, labels, 0])
            total[2] += value
    return [[*family, list(sums.values())] for family, sums in totals.values()]


class Ledger:
    """The counts of a server; from any thread.

    engine: returns what the engine has counted that runs now, by its latest report.
    """

    def __init__(self) -> None:
        self.engine: Callable[[], Families] = list
        self._before: Families = []  # what engines have counted that have ended
        self._responses = Counter[int]()
        self._restarts = {"engine": 0, "worker": 0}
        self._moved = 0
        self._lock = threading.Lock()

    def answered(self, status: int) -> None:
        """Count a response."""
        with self._lock:
            self._responses[status] += 1

    def report(self, counted: Families) -> None:
        """Store what the engine has counted since it started."""
        with self._lock:
            self.engine = lambda: counted

    def engine_ended(self) -> None:
        """Keep what the engine reported, as its process has ended."""
        with self._lock:
            self._before, self.engine = summed(self._before, self.engine()), list

    def restarted(self, what: str) -> None:
        """Count an "engine" or a "worker" that replaces one that has ended."""
        with self._lock:
            self._restarts[what] += 1

    def moved(self, choices: int) -> None:
        """Count choices that went on in another engine, as theirs had ended."""
        with self._lock:
            self._moved += choices

    def families(self) -> Families:
        """Return all that was counted."""
        with self._lock:
            responses = [[{"status": str(status)}, count] for status, count in sorted(self._responses.items())]
            own = [_counter("http_requests", "HTTP requests by the status that they came to", responses)]
            for what, text in (("engine", "engine's process"), ("worker", "HTTP worker")):
                own.append(
                    _counter(f"{what}_restarts", f"Times that the {text} was replaced", [[{}, self._restarts[what]]])
                )
            own.append(_counter("choices_moved", "Choices that went on in another engine", [[{}, self._moved]]))
            return own + summed(self._before, self.engine())


def _counter(name: str, text: str, values: list) -> list:
    """Return a family of ours. values: [labels, value] of each sample."""
    name = f"minillm_{name}"
    return [name, "counter", text, [[f"{name}_total", labels, value] for labels, value in values]]
