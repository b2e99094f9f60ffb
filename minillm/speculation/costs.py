"""Measure how long steps take, by the tokens they run, while the engine works."""

import numpy as np

EXACT = 16  # token counts up to here have an entry each; above, there are four for each doubling
SEEN = 2  # steps after which an entry counts
WEIGHT = 0.2  # of a new time
MOST = 2.0  # times the entry: a step that took longer was disturbed, and counts as this long


class Costs:
    """Tables of seconds: of steps without drafts, of steps with some, which cannot be launched ahead, and, if the
    proposer is slow, of drafting one token for each row.
    """

    def __init__(self) -> None:
        entries = _entry(1 << 24) + 1
        self._seconds = np.zeros((3, entries))
        self._seen = np.zeros((3, entries), np.int64)

    def observe(self, drafted: bool, tokens: int, seconds: float) -> None:
        """Take in the time of a step that ran `tokens` tokens, all of them of rows that decode."""
        self._observe(int(drafted), tokens, seconds)

    def observe_drafting(self, rows: int, drafts: int, seconds: float) -> None:
        """Take in how long it took to draft up to `drafts` tokens for so many rows."""
        self._observe(2, rows, seconds / drafts)

    def drafting(self, rows: int) -> float:
        """Return seconds that each further draft takes for so many rows; 0 before it was measured."""
        known = np.flatnonzero(self._seen[2])
        return float(np.interp(_entry(rows), known, self._seconds[2, known])) if len(known) else 0.0

    def _observe(self, kind: int, count: int, seconds: float) -> None:
        entry = _entry(count)
        known = self._seconds[kind, entry]
        if self._seen[kind, entry] < SEEN:  # the first steps of a kind are slow: they compile, or fill caches
            self._seconds[kind, entry] = min(known, seconds) if known else seconds
        else:
            self._seconds[kind, entry] += WEIGHT * (min(seconds, MOST * known) - known)
        self._seen[kind, entry] += 1

    def plain(self, rows: int) -> float | None:
        """Return seconds of a step without drafts; None: too few were measured."""
        entry = _entry(rows)
        return float(self._seconds[0, entry]) if self._seen[0, entry] >= SEEN else None

    def drafted(self, tokens: np.ndarray, rows: int, plain: float) -> np.ndarray:
        """Return seconds of steps of `rows` rows with drafts that run `tokens` [n], interpolated between the measured
        ones.

        plain: seconds of a step without drafts, which is where the line begins, and the least that is returned. Fewer
        tokens than were measured are taken to cost less, so that they are tried.
        """
        first = _entry(rows)
        known = np.flatnonzero(self._seen[1] >= SEEN)
        known = known[known >= first]
        begin = slice(int(first in known), None)  # one entry may have both kinds of steps
        entries = np.where(tokens <= EXACT, tokens, EXACT + (4 * np.log2(tokens / EXACT)).astype(int))
        seconds = np.interp(entries, [first, *known][begin], [plain, *self._seconds[1, known]][begin])
        return np.maximum(seconds, plain)


def _entry(tokens: int) -> int:
    return tokens if tokens <= EXACT else EXACT + int(4 * np.log2(tokens / EXACT))
