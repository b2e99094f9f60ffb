"""Decide how many tokens to draft for each row, and learn from what became of them.  Lesson 13.

Draft j of a row is needed with the probability p^j, where p is how often the row's drafts were right lately.
So k drafts yield 1 + p + ... + p^k tokens on average. They are worth their time if that many tokens for the time of the
step with drafts are more than one token for the time of the step without; both times are measured. A row whose drafts
are not worth it gets none for a while, and runs ahead like any other; the while doubles each time.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import numpy as np

from minillm.config import DeviceConfig
from minillm.request import Request

from .costs import Costs
from .ngram import NgramProposer
from .proposer import Asked, Proposer, ProposerError

NEVER = np.iinfo(np.int32).max
MEMORY = 0.8  # weight of a row's earlier drafts, at each step with some
FIRST, LONGEST = 16, 512  # tokens without drafts, after the first time that they were not worth it, and at most
MISSES = 4  # proposals in a row without a draft, after which a row that could run ahead does
# Least probabilities with which a draft is needed, from which the best is chosen in each step; above 1: no drafts.
NEEDED = np.array([2.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05])


class TimedStep(Protocol):
    """The part of a step (`minillm.scheduler.Step`) that its time depends on."""

    rows: np.ndarray
    queries: np.ndarray
    drafts: np.ndarray | None

    @property
    def drafted(self) -> np.ndarray: ...


class Speculation:
    """A scheduler's proposer, and for each row how many drafts it takes.

    config: the engine's. vocab_size: the model's.
    """

    def __init__(self, proposer: Proposer, config: DeviceConfig, vocab_size: int):
        self.proposer, self.vocab_size = proposer, vocab_size
        self.most, rows = config.speculate_tokens, config.max_num_seqs
        on_gpu = config.device.startswith("cuda")
        # Tokens that a step may yield: on a GPU the memory for logits is that of a step without drafts.
        self.most_yielded = max(rows, self.most + 1) if on_gpu else 1 << 30
        self.runs_ahead = on_gpu and config.run_ahead > 0  # a CPU computes a step while it is launched
        self.slow = bool(getattr(proposer, "slow", False))
        # Whether the device may look up drafts itself, as `scheduler.drafting_ahead` says.
        self.on_device = config.speculate_ahead and type(proposer) is NgramProposer and config.ranks == 1
        self.follows = np.zeros(rows, bool)  # whether the row's request lets it
        self._newest = np.full(rows, -1)  # the newest step for which it drafts for the row
        self.newest_ahead = -1  # the newest step for which it does so for any
        self.costs, self._proposing = Costs(), 0.0  # seconds since a step was timed
        self._caught_up: set[str] = set()  # requests that a slow proposer was asked for before
        self.unread = np.zeros(rows, bool)  # whether a step in flight has drafts of the row
        self._next = np.full(rows, NEVER, np.int32)  # known tokens from which the row takes drafts
        self._pause = np.zeros(rows, np.int32)  # tokens without drafts, the next time that they are not worth it
        self._right, self._tried = np.zeros(rows), np.zeros(rows)  # drafts, older ones counting less
        self._misses = np.zeros(rows, np.int32)
        # Whether the device found nothing for a row, so that the host looks first, whose misses cost less. If the
        # device then misses what the host had found, the host looks again from so many tokens on.
        self.searches, self._hoped = np.zeros(rows, bool), np.zeros(rows, bool)
        self._looks_from = np.zeros(rows, np.int32)
        self._chosen = np.full(rows, -1, np.int32)  # drafts that `plan` has chosen for the row; -1: it has not
        self.planned_after = -1  # the newest step when it did so last
        self._learned: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # what `learn` got and nothing needed yet
        self._all_right, self._all_tried = 1.0, 2.0  # of all rows, with which a new one begins
        # So far: rows of steps that had drafts, their drafts, and those that were right.
        self.drafts = self.draft_tokens = self.accepted_tokens = 0

    def occupy(self, row: int, wanted: bool, follows: bool = False) -> None:
        """Begin with a row's new request, and with drafts for it if they are `wanted`.

        follows: whether the request needs nothing of the host between two tokens.
        """
        self._take_in()
        self._next[row], self._chosen[row] = 0 if wanted else NEVER, -1
        self._right[row], self._tried[row] = self._all_right / self._all_tried, 1.0
        self._pause[row], self._misses[row], self.unread[row] = FIRST, 0, False
        self.follows[row], self.searches[row], self._hoped[row], self._looks_from[row] = follows, False, False, 0

    def takes(self, request: Request) -> bool:
        """Return whether a request may get drafts. A model that drafts reads tokens alone."""
        return request.options.speculate and not (self.slow and request.embeddings is not None)

    def waits(self, rows: np.ndarray, known: np.ndarray) -> np.ndarray:
        """[n] bool: whether rows with `known` [n] tokens run only once all are read, because they may get drafts."""
        return (known >= self._next[rows]) | self.unread[rows]

    def drafts_now(self, rows: np.ndarray, known: np.ndarray) -> np.ndarray:
        """[n] bool: whether rows with at most `known` [n] tokens take drafts."""
        return known >= self._next[rows]

    def launched_ahead(self, number: int, rows: np.ndarray) -> None:
        """Take in that a step was launched in which the device drafts for these rows [n]."""
        self.newest_ahead = number
        self._newest[rows], self.unread[rows] = number, True

    def unread_ahead(self, rows: np.ndarray, read: int) -> np.ndarray:
        """[n] bool: whether a step after number `read` has drafts that the device finds for these rows [n]."""
        return self._newest[rows] > read

    def learn_ahead(
        self, number: int, rows: np.ndarray, known: np.ndarray, drafted: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Take in the drafts that the device found for rows [n] in a step, and how many of them were right.

        known: [n] tokens that each may have by now. Later steps in flight may have drafts of the rows.
        """
        had = drafted > 0
        self.learn(rows[had], drafted[had], accepted[had])
        self.unread[rows] = self._newest[rows] > number
        self._next[rows[had & self.searches[rows]]] = 0
        self.searches[rows[had]] = False
        paused = (self._next[rows] > known) & ~self.searches[rows]  # by `worth`, meanwhile
        missed, at = rows[~had & ~paused], known[~had & ~paused]
        hoped = self._hoped[missed]
        self._looks_from[missed[hoped]] = at[hoped] + self._pause[missed[hoped]]
        self._pause[missed[hoped]] = np.minimum(2 * self._pause[missed[hoped]], LONGEST)
        self.searches[missed], self._next[missed] = True, at + LONGEST
        self._hoped[rows] = False

    def looks(self, row: int, known: int) -> bool:
        """Return whether the host looks for drafts of a row that has so many tokens, so that the device does again."""
        return bool(self.searches[row]) and known >= self._looks_from[row]

    def found_none(self, row: int, known: int) -> None:
        """Take in that the host found no draft of a row with so many tokens, and need not look at these again."""
        self._looks_from[row] = known + 1

    def resume(self, row: int, known: int) -> None:
        """Let the device draft for a row again from its `known` tokens on: the host has found a draft."""
        self.searches[row], self._hoped[row], self._next[row] = False, True, known

    def plan(self, rows: np.ndarray, known: np.ndarray, most: np.ndarray, others: int, left: int) -> None:
        """Choose how many drafts rows [n] get in their next step, while the device still runs the one before it.

        The arguments are those of `worth`, as they will be at most. Where the step has no room for `most`, it depends
        on what is proposed, and has to wait for that.
        """
        if len(rows) and most.sum() <= left:
            chosen = self.worth(rows, known, most, others, left)
            self._chosen[rows] = np.where(known < self._next[rows], -1, chosen)  # a row paused now is planned anew

    def planned(self, rows: np.ndarray) -> np.ndarray | None:
        """Return how many drafts these rows [n] get, [n], but only once; None if it was not planned for all of them."""
        chosen = self._chosen[rows]
        self._chosen[rows] = -1
        return None if (chosen < 0).any() else chosen

    def propose(self, asked: Sequence[Asked]) -> np.ndarray:
        """Return each request's drafts, [n, most] int32, as many as it can take; -1: none. Raises ProposerError."""
        for each in asked:
            each.tokens.flags.writeable = False
        begun = time.perf_counter()
        answer = self.proposer.propose(asked)
        if self.slow and asked:
            passed, ids = time.perf_counter() - begun, {each.request_id for each in asked}
            self._proposing += passed
            if ids <= self._caught_up:  # the first time, a request's prompt has to be read too
                self.costs.observe_drafting(len(asked), max(each.most for each in asked), passed)
            self._caught_up |= ids
        if len(answer) != len(asked):
            raise ProposerError(f"{self._name}.propose gave {len(answer)} lists for {len(asked)} requests")
        proposals = [list(tokens)[: each.most] for each, tokens in zip(asked, answer, strict=True)]
        lengths = np.array([len(tokens) for tokens in proposals])
        drafts = np.full((len(asked), int(lengths.max(initial=1))), -1, np.int32)
        together = list(chain.from_iterable(proposals))
        if together and not self._are_tokens(together):
            wrong = next(i for i, tokens in enumerate(proposals) if tokens and not self._are_tokens(tokens))
            raise ProposerError(
                f"{self._name}.propose drafted {proposals[wrong]} for {asked[wrong].request_id}; drafts are token ids "
                f"from 0 to {self.vocab_size - 1}"
            )
        drafts[np.arange(drafts.shape[1]) < lengths[:, None]] = together
        return drafts

    def _are_tokens(self, drafts: list[int]) -> bool:
        ids = np.asarray(drafts)
        return ids.ndim == 1 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < self.vocab_size

    def worth(self, rows: np.ndarray, known: np.ndarray, proposed: np.ndarray, others: int, left: int) -> np.ndarray:
        """Return how many of the drafts `proposed` [n] to run in a step, [n]. Pauses rows whose drafts are no gain.

        rows, known: [n] rows and their known tokens. others: rows of the step that get no drafts. left: drafts that
        the step has room for; the first rows get them.
        """
        self._take_in()
        resumed = (self._next[rows] > 0) & (self._right[rows] < self._tried[rows] / 2)
        self._right[rows[resumed]], self._tried[rows[resumed]] = 0.25, 0.5  # one try decides
        self._next[rows] = 0
        drafting = proposed > 0
        batch = others + len(rows)
        plain = self.costs.plain(batch)
        if plain is None:
            return np.zeros_like(proposed)
        p = np.clip(self._right[rows] / self._tried[rows], 0.01, 0.99)
        counts = np.minimum(np.log(np.minimum(NEEDED, 1))[:, None] // np.log(p), proposed).astype(np.int32)
        counts[0] = 0
        counts = np.minimum(counts, np.maximum(left + counts - counts.cumsum(axis=1), 0))
        gained = ((p - p ** (counts + 1.0)) / (1 - p)).sum(axis=1)  # tokens, apart from one for each row
        seconds = self.costs.drafted(batch + counts.sum(axis=1), batch, plain)
        if self.slow:
            seconds += counts.max(axis=1) * self.costs.drafting(len(rows))
        seconds[counts.sum(axis=1) == 0] = plain
        chosen = counts[int(((batch + gained) / seconds).argmax())]
        paused = drafting & (chosen == 0)
        self._next[rows[paused]] = known[paused] + self._pause[rows[paused]]
        self._pause[rows[paused]] = np.minimum(2 * self._pause[rows[paused]], LONGEST)
        return chosen

    def proposed(self, rows: np.ndarray, known: np.ndarray, counts: np.ndarray) -> None:
        """Take in how many drafts rows [n] were given, after `worth`. Rows that get none several times run ahead."""
        self._misses[rows] = np.where(counts > 0, 0, self._misses[rows] + 1)
        if self.runs_ahead and not counts.all():
            missing = self._misses[rows] >= MISSES
            self._next[rows[missing]] = known[missing] + FIRST
            self._misses[rows[missing]] = 0

    def learn(self, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Take in how many drafts rows [n] had in a step, and how many of them were right."""
        self.unread[rows] = False
        self._learned.append((rows, drafted, accepted))  # while the next step waits for the host

    def _take_in(self) -> None:
        for rows, drafted, accepted in self._learned:
            tried = accepted + (accepted < drafted)  # those after the first wrong one say nothing
            self._right[rows] = MEMORY * self._right[rows] + accepted
            self._tried[rows] = MEMORY * self._tried[rows] + tried
            self._pause[rows[accepted > 0]] = FIRST
            right = int(accepted.sum())
            self._all_right = 0.99 * self._all_right + right
            self._all_tried = 0.99 * self._all_tried + int(tried.sum())
            self.drafts += len(rows)
            self.draft_tokens += int(drafted.sum())
            self.accepted_tokens += right
        self._learned.clear()

    def timed(self, step: TimedStep, seconds: float) -> None:
        """Take in how long a step took. Those that run prompts are left out."""
        seconds, self._proposing = seconds - self._proposing, 0.0
        drafted, tokens = 0 if step.drafts is None else int(step.drafted.sum()), int(step.queries.sum())
        if tokens == len(step.rows) + drafted:
            self.costs.observe(drafted > 0, tokens, seconds)

    def forget(self, request_id: str) -> None:
        """Tell the proposer that a request has ended."""
        self._caught_up.discard(request_id)
        self.proposer.forget(request_id)

    def count_on_from(self, before: "Speculation") -> None:
        """Count on where another one, of the same engine, ended, with the times that it measured."""
        before._take_in()
        self.costs = before.costs
        self.drafts, self.draft_tokens = before.drafts, before.draft_tokens
        self.accepted_tokens = before.accepted_tokens

    def stats(self) -> dict[str, int]:
        """Count what happened so far, for `Engine.stats`."""
        self._take_in()
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    @property
    def _name(self) -> str:
        return getattr(self.proposer, "name", type(self.proposer).__name__)


@contextmanager
def every_draft_runs() -> Iterator[None]:
    """Let engines of this process run all drafts that their steps have room for, for measurements and lessons.

    They do not choose by the times of their steps then, which differ from run to run.
    """

    def worth(
        self: Speculation, rows: np.ndarray, known: np.ndarray, proposed: np.ndarray, others: int, left: int
    ) -> np.ndarray:
        return np.clip(left + proposed - proposed.cumsum(), 0, proposed)

    before, Speculation.worth = Speculation.worth, worth  # type: ignore[method-assign]
    try:
        yield
    finally:
        Speculation.worth = before  # type: ignore[method-assign]
