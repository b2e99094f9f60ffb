"""Collect what the replicas have counted, for the counters of a server, which never fall."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from minillm.server.ledger import Families, summed
from minillm.server.limits import BEAT
from minillm.server.supervisor.fleet import Workers

log = logging.getLogger(__name__)
KEPT = 100  # replicas that are not asked any more and might be again; the counts of older ones are one sum
ANSWER = 5 * BEAT  # seconds for the replicas of a model to answer

Count = Callable[[float], dict[str, Families]]  # asks the replicas of a model, for so many seconds at most


class ModelCounts:
    """The counts of a model's replicas, those that have ended too.

    fixed: how many replicas there are; None: as many as Ray finds right.
    """

    def __init__(self, fixed: int | None):
        self._fixed, self._known = fixed, 0
        # Of those that ended long ago, and of the others by their names.
        self._each: tuple[Families, dict[str, Families]] = [], {}

    def report(self, families: Mapping[str, Families]) -> int:
        """Take note of what all replicas have counted, by name. Returns how many of them replace others."""
        before, known = self._each
        new = families.keys() - known.keys()
        known = {**known, **families}
        gone = [name for name in known if name not in families]
        for name in gone[: max(len(gone) - KEPT, 0)]:
            before = summed(before, known.pop(name))
        self._each = before, known  # at once: other threads read it
        replaced, self._known = self._known, self._known + len(new)
        if self._fixed is None:
            return 0
        return max(self._known - self._fixed, 0) - max(replaced - self._fixed, 0)

    @property
    def families(self) -> Families:
        """Return the sum of all counts. On any thread."""
        before, known = self._each
        return summed(before, *known.values())


class Reports:
    """A thread that asks the replicas of all models, again and again.

    counts: what asks those of each model, and how many there are; see `ModelCounts`. workers: whose ledger is told.
    """

    def __init__(self, counts: Sequence[tuple[Count, int | None]], workers: Workers):
        self._models = [(count, ModelCounts(fixed)) for count, fixed in counts]
        self._workers, self._over = workers, threading.Event()
        workers.ledger.engine = lambda: summed(*(counted.families for _, counted in self._models))
        self._thread = threading.Thread(target=self._work, name="minillm-reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(BEAT):
            for count, counted in self._models:
                if self._over.is_set():
                    return
                try:
                    families = count(ANSWER)
                except Exception as error:  # a replica has just ended, for example
                    log.debug("a replica did not report: %s", error)
                    continue
                for _ in range(counted.report(families)):
                    self._workers.ledger.restarted("engine")
