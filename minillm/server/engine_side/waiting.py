"""Estimate how long a new request would wait, by simulating the queue.  Lesson 99.

A row is free when its answer ends. The length of an answer is unknown, unless only its limit can end it. But some
answers have ended recently, and those that run are at least as long as they are now. From both, the estimator of Kaplan
and Meier (1958) gives the probability that an answer exceeds a number of tokens. Each answer gets a length according to
these probabilities; a running one gets a length beyond what it has. Then each waiting request takes the first free row.

The rate of recent ends would be a poor estimate: answers of equal length end in the same step, when that rate is
infinite, and then none ends for a long time.
"""

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

FEWEST = 8  # ends before lengths can be estimated
RECENT = 128  # lengths are estimated from so many of the latest ends, or as many as there are rows if that is more
REFRESH = 0.5  # seconds until the queue is played through again: a few ms with 1,024 choices that run and 1,024 more


class Seen(NamedTuple):
    """The facts about a choice that runs or waits. Times are seconds on the clock of `Pace`."""

    limit: int  # most tokens of its answer
    certain: bool = False  # whether only the limit can end it
    tokens: int = 0  # so far
    begun: float = math.nan  # when it got a row; NaN: it waits
    first: float = math.nan  # when it got its first token


class _End(NamedTuple):
    """A choice that has ended."""

    tokens: int
    stopped: bool  # whether it ended by itself: if not, its answer might have become longer
    at: float  # when
    prefill: float  # seconds until the first token
    decode: float  # seconds from then on


class Pace:
    """Predicts when rows become free.

    look: what runs and waits, in the order in which rows are given. clock: seconds, of which only differences count.
    """

    def __init__(self, rows: int, look: Callable[[], Iterable[Seen]], clock: Callable[[], float] = time.perf_counter):
        self._rows, self._look, self._clock = rows, look, clock
        self._ends = deque[_End](maxlen=max(RECENT, rows))
        self._since = -math.inf  # when the last one ended that is no longer among them
        self._at = -math.inf  # when the queue was last played through; what follows is as of then
        self._ended = 0  # choices that have ended since
        self._starts: list[float] = []  # seconds until each further start, in order
        self._enough = 0  # starts until it is played through again
        self._free: list[float] | None = None  # when each row is free after these starts, a heap; None: not known
        self._takes: Iterator[float] = itertools.repeat(0.0)  # seconds for which those to come hold their rows

    def ended(self, seen: Seen, stopped: bool) -> None:
        """Note the end of a choice that had a row. stopped: by itself, neither at its limit nor aborted."""
        now = self._clock()
        self._ended += 1
        if math.isnan(seen.first):
            return
        if len(self._ends) == self._ends.maxlen:
            self._since = self._ends[0].at
        # The length of one that could only end at its limit says nothing about others': it was watched for no token.
        at = -math.inf if seen.certain else now
        self._ends.append(_End(seen.tokens, stopped, at, seen.first - seen.begun, now - seen.first))

    def seconds(self, count: int) -> float | None:
        """Estimate the seconds until `count` choices have ended: 0 for none, None if nothing is known yet."""
        if count <= 0:
            return 0.0
        now, wanted = self._clock(), count + self._ended
        if now - self._at >= REFRESH or wanted > self._enough:
            self._at, self._ended, wanted = now, 0, count
            self._play(now)
            self._enough = max(count, len(self._starts)) * 9 // 8 + 1
        if self._free is None:
            return None
        while len(self._starts) < wanted:  # some have come since
            self._starts.append(heapq.heapreplace(self._free, self._free[0] + next(self._takes)))
        return max(self._starts[wanted - 1] - (now - self._at), 0.0)

    def _play(self, now: float) -> None:
        """Simulate all that runs or waits to its end."""
        limit, certain, tokens, begun, first = _columns(self._look())
        ends = _columns(self._ends)
        runs, decodes = ~np.isnan(begun), ~np.isnan(first)
        self._starts, self._free = [], None
        steps = np.maximum(ends[0] - 1, 0).sum() + (tokens[decodes] - 1).sum()
        prefills = np.concatenate((ends[3], (first - begun)[decodes]))
        if not len(prefills) or not steps and (limit > 1).any():
            return
        per_token = (ends[4].sum() + (now - first[decodes]).sum()) / max(steps, 1)
        prefill = prefills.mean()
        lengths = self._lengths(ends, tokens[runs & (certain == 0)], now, per_token)

        def seconds(tokens: np.ndarray) -> np.ndarray:
            length = tokens if lengths is None else lengths.beyond(tokens)
            return per_token * (np.where(certain, limit, np.minimum(length, limit)) - tokens)

        left = (seconds(tokens) + np.where(decodes, 0, prefill))[runs].tolist()
        whole = seconds(np.zeros_like(tokens)) + prefill
        waiting, at_once = whole[~runs].tolist(), max(self._rows - len(left), 0)
        free = left + waiting[:at_once] + [0.0] * (at_once - len(waiting))
        heapq.heapify(free)
        self._starts = [heapq.heapreplace(free, free[0] + takes) for takes in waiting[at_once:]]
        self._free, self._takes = free, itertools.cycle(_mixed(whole).tolist() or [float(prefill)])

    def _lengths(self, ends: np.ndarray, running: np.ndarray, now: float, per_token: float) -> "_Lengths | None":
        """Estimate the lengths of answers that may end by themselves; None if too few have ended.

        running: the tokens of those that run.
        """
        told = ends[2] > -math.inf
        if told.sum() < FEWEST:
            return None
        tokens = np.concatenate((ends[0][told], running))
        stopped = np.concatenate((ends[1][told] > 0, np.zeros(len(running), bool)))
        at = np.concatenate((ends[2][told], np.full(len(running), now)))
        return _Lengths(np.maximum(tokens - (at - self._since) / max(per_token, 1e-9), 0), tokens, stopped)


class _Lengths:
    """The chance that an answer becomes longer than so many tokens, from those that were watched.

    first, last: an answer's tokens when it was first and last watched. A token counts as one that might have been the
    end only if it was watched: or else the long answers among those that run, whose shorter peers have ended before,
    would count too much. stopped: whether the answer then ended by itself.
    """

    def __init__(self, first: np.ndarray, last: np.ndarray, stopped: np.ndarray):
        watched = last > first
        first, last, stopped = np.sort(first[watched]), last[watched], stopped[watched]
        order = np.lexsort((~stopped, last))
        last, stopped = last[order], stopped[order]
        at_risk = np.searchsorted(first, last) - np.arange(len(last))
        self._ends = last[stopped]
        self._chances = np.cumsum(np.log(np.maximum(1 - 1 / at_risk[stopped], 1e-9)))  # logarithms
        self._rate = len(self._ends) / (last - first).sum() if len(self._ends) else 0.0  # ends for each token

    def beyond(self, tokens: np.ndarray) -> np.ndarray:
        """Return a length beyond each answer's tokens; inf if none has ended by itself.  [n] -> [n]

        As many come from each part of the distribution as its chances say. Behind the longest that has ended, every
        further token is as likely to be the end as a token was on average.
        """
        if not self._rate:
            return np.full(len(tokens), np.inf)
        chances = np.append(0.0, self._chances)[np.searchsorted(self._ends, tokens, side="right")]
        chances = chances + np.log(_mixed((np.arange(len(tokens)) + 0.5) / max(len(tokens), 1)))
        index = np.searchsorted(-self._chances, -chances)
        longer = np.maximum(self._ends[-1], tokens) + (self._chances[-1] - chances) / self._rate
        return np.where(index < len(self._ends), np.append(self._ends, 0.0)[index], longer)


def _columns(rows: Iterable[Seen | _End]) -> np.ndarray:
    """Return the columns of a table.  -> [5, rows]"""
    return np.fromiter(itertools.chain.from_iterable(rows), float).reshape(-1, 5).T


def _mixed(values: np.ndarray) -> np.ndarray:
    """Shuffle the values, in the same way for every array of this length."""
    return np.random.default_rng(0).permutation(values)
