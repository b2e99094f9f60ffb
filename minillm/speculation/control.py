"""How many tokens to draft for each row, and what became of them.  Lesson 13.

A draft at place j of a row is needed with the probability p^j, where p is how often the row's drafts were right lately.
So k drafts yield 1 + p + ... + p^k tokens on average. They are worth their time if that many tokens for the time of the
step with drafts are more than one token for the time of the step without; both times are measured. A row whose drafts
are not worth it gets none for a while, and runs ahead like any other; the while doubles each time.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from minillm.config import DeviceConfig

from .costs import Costs
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
        self._runs_ahead = on_gpu and config.run_ahead > 0  # a CPU computes a step while it is launched
        self.slow = bool(getattr(proposer, "slow", False))
        self.costs, self._proposing = Costs(), 0.0  # seconds since a step was timed
        self._caught_up: set[str] = set()  # requests that a slow proposer was asked for before
        self.unread = np.zeros(rows, bool)  # whether a step in flight has drafts of the row
        self._next = np.full(rows, NEVER, np.int32)  # known tokens from which the row takes drafts
        self._pause = np.zeros(rows, np.int32)  # tokens without drafts, the next time that they are not worth it
        self._right, self._tried = np.zeros(rows), np.zeros(rows)  # drafts, older ones counting less
        self._misses = np.zeros(rows, np.int32)
        self._all_right, self._all_tried = 1.0, 2.0  # of all rows, with which a new one begins
        # So far: rows of steps that had drafts, their drafts, and those that were right.
        self.drafts = self.draft_tokens = self.accepted_tokens = 0

    def occupy(self, row: int, wanted: bool) -> None:
        """Begin with a row's new request, and with drafts for it if they are `wanted`."""
        self._next[row] = 0 if wanted else NEVER
        self._right[row], self._tried[row] = self._all_right / self._all_tried, 1.0
        self._pause[row], self._misses[row], self.unread[row] = FIRST, 0, False

    def waits(self, rows: np.ndarray, known: np.ndarray) -> np.ndarray:
        """[n] bool: whether rows with `known` [n] tokens run only once all are read, because they may get drafts."""
        return (known >= self._next[rows]) | self.unread[rows]

    def propose(self, asked: Sequence[Asked]) -> list[np.ndarray]:
        """Each request's drafts, int32, as many as it can take. Raises ProposerError."""
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
        return [self._checked(each, list(tokens)[: each.most]) for each, tokens in zip(asked, answer, strict=True)]

    def _checked(self, asked: Asked, tokens: list[int]) -> np.ndarray:
        if not tokens:
            return np.zeros(0, np.int32)
        drafts = np.asarray(tokens)
        if drafts.ndim != 1 or drafts.dtype.kind not in "iu" or drafts.min() < 0 or drafts.max() >= self.vocab_size:
            raise ProposerError(
                f"{self._name}.propose drafted {tokens} for {asked.request_id}; drafts are token ids from 0 to "
                f"{self.vocab_size - 1}"
            )
        return drafts.astype(np.int32)

    def worth(self, rows: np.ndarray, known: np.ndarray, proposed: np.ndarray, others: int) -> np.ndarray:
        """How many of the drafts `proposed` [n] to run in a step: [n]. It pauses rows whose drafts are not worth it.

        rows, known: [n] rows and their known tokens. others: rows of the step that get no drafts.
        """
        resumed = (self._next[rows] > 0) & (self._right[rows] < self._tried[rows] / 2)
        self._right[rows[resumed]], self._tried[rows[resumed]] = 0.25, 0.5  # one try decides
        self._next[rows] = 0
        if not self.slow:
            self.proposed(rows, known, proposed)
        drafting = proposed > 0
        batch = others + len(rows)
        plain = self.costs.plain(batch)
        if plain is None:
            return np.zeros_like(proposed)
        p = np.clip(self._right[rows] / self._tried[rows], 0.01, 0.99)
        counts = np.minimum(np.log(np.minimum(NEEDED, 1))[:, None] // np.log(p), proposed).astype(np.int32)
        counts[0] = 0
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
        """Take in how many drafts rows [n] were given. Rows that get none several times in a row run ahead for a while.

        `worth` calls it, unless the proposer is slow: then `worth` is asked before anything is drafted.
        """
        self._misses[rows] = np.where(counts > 0, 0, self._misses[rows] + 1)
        if self._runs_ahead:
            missing = self._misses[rows] >= MISSES
            self._next[rows[missing]] = known[missing] + FIRST
            self._misses[rows[missing]] = 0

    def learn(self, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Take in how many drafts rows [n] had in a step, and how many of them were right."""
        self.unread[rows] = False
        tried = accepted + (accepted < drafted)  # those after the first wrong one say nothing
        self._right[rows] = MEMORY * self._right[rows] + accepted
        self._tried[rows] = MEMORY * self._tried[rows] + tried
        self._pause[rows[accepted > 0]] = FIRST
        self._all_right = 0.99 * self._all_right + int(accepted.sum())
        self._all_tried = 0.99 * self._all_tried + int(tried.sum())
        self.drafts += len(rows)
        self.draft_tokens += int(drafted.sum())
        self.accepted_tokens += int(accepted.sum())

    def timed(self, step: TimedStep, seconds: float) -> None:
        """Take in how long a step took. Those that run prompts are left out."""
        seconds, self._proposing = seconds - self._proposing, 0.0
        drafted, tokens = int(step.drafted.sum()), int(step.queries.sum())
        if tokens == len(step.rows) + drafted:
            self.costs.observe(drafted > 0, tokens, seconds)

    def forget(self, request_id: str) -> None:
        """Tell the proposer that a request has ended."""
        self._caught_up.discard(request_id)
        self.proposer.forget(request_id)

    def count_on_from(self, before: "Speculation") -> None:
        """Count on where another one, of the same engine, ended, with the times that it measured."""
        self.costs = before.costs
        self.drafts, self.draft_tokens = before.drafts, before.draft_tokens
        self.accepted_tokens = before.accepted_tokens

    def stats(self) -> dict[str, int]:
        """What happened so far, for `Engine.stats`."""
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    @property
    def _name(self) -> str:
        return getattr(self.proposer, "name", type(self.proposer).__name__)
