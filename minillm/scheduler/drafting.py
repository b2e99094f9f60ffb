"""Which rows of a step get drafts, and which tokens.  Lesson 13.

Drafts take what the step has left: its token budget, and blocks that are available. They never delay or preempt a
request. A row gets some only if all its tokens are known. While a row waits for that, no step is launched ahead: the
other rows would run without it, and then it without them, which takes two steps for the tokens of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minillm.grammar import Matcher
from minillm.speculation.proposer import Asked

from .step import Step

if TYPE_CHECKING:
    from .scheduler import Scheduler


@dataclass(frozen=True, eq=False)
class Drafts:
    """The drafts of a step's rows, before the step is put in order."""

    rows: np.ndarray  # [n] int32
    tokens: np.ndarray  # [n, most] int32: each row's; -1: none
    counts: np.ndarray  # [n] int32: how many each row has
    masks: dict[int, np.ndarray]  # row -> [count + 1, bytes]: what its grammar allows before, between and after them
    queries_per_decode: int  # what most decoding rows run

    def put_into(self, step: Step) -> None:
        """Give the step its drafts, in the order of its rows."""
        order = np.argsort(self.rows)[np.argsort(np.argsort(step.rows))]
        step.drafts = self.tokens[order]
        step.masks |= self.masks


def waiting_for_drafts(self: "Scheduler") -> bool:
    """Whether a row that may get drafts, or has some, has tokens that are not read yet."""
    assert self.speculation is not None, "without it there are no drafts"
    known = self.known[self.order]
    return bool((self.speculation.waits(self.order, known) & (known != self.confirmed[self.order])).any())


def draft(self: "Scheduler", rows: np.ndarray, queries: np.ndarray) -> Drafts | None:
    """Ask the proposer for the rows that run their newest token, all others being known. None: there are no drafts.

    queries: [n] tokens that the rows run in this step.
    """
    speculation = self.speculation
    assert speculation is not None, "without it there are no drafts"
    known = self.known[rows]
    most = np.minimum(speculation.most, self.limit[rows] - known - 1)
    most[~speculation.waits(rows, known)] = 0
    most[(queries != 1) | (known != self.confirmed[rows]) | (known - self.computed[rows] != 1)] = 0
    most[known <= self.prompt[rows]] = 0
    places = np.flatnonzero(most > 0)
    if speculation.slow and len(places):
        most[places] = speculation.worth(rows[places], known[places], most[places], len(rows) - len(places))
        places = np.flatnonzero(most > 0)
    if not len(places):
        return None
    asked = []
    for i in places.tolist():
        request = self.requests[rows[i]]
        assert request is not None, "a row that runs has a request"
        tokens, prompt = self.tokens[rows[i], : known[i]], int(self.prompt[rows[i]])
        sampled = request.params, request.seed, prompt, request.stop_ids
        asked.append(Asked(request.request_id, tokens, int(most[i]), *sampled))
    left = min(self.max_num_batched_tokens - int(queries.sum()), speculation.most_yielded - len(rows))
    found: dict[int, np.ndarray] = {}
    proposals = speculation.propose(asked)
    for i, drafts in enumerate(proposals):  # the token after an end is never needed
        ends = np.isin(drafts, self.stop_ids[rows[places[i]]])
        proposals[i] = drafts[: int(ends.argmax())] if ends.any() else drafts
    lengths = np.array([len(drafts) for drafts in proposals], np.int32)
    worth = lengths
    if speculation.slow:
        speculation.proposed(rows[places], known[places], lengths)
    else:
        worth = speculation.worth(rows[places], known[places], lengths, len(rows) - len(places))
    for i, drafts, count in zip(places.tolist(), proposals, worth.tolist(), strict=True):
        if drafts := drafts[: min(left, count)].tolist():
            found[i], left = np.array(drafts, np.int32), left - len(drafts)
    return _with_blocks(self, rows, queries, found) if found else None


def _with_blocks(
    self: "Scheduler", rows: np.ndarray, queries: np.ndarray, found: dict[int, np.ndarray]
) -> Drafts | None:
    """Give blocks to the drafts, and cut those that get none or that a grammar forbids. found: place -> its drafts."""
    speculation = self.speculation
    assert speculation is not None, "without it there are no drafts"
    masks: dict[int, np.ndarray] = {}
    for i, drafts in found.items():
        if (matcher := self.matchers.get(int(rows[i]))) is not None:
            masks[int(rows[i])] = allowed = _allowed(matcher, drafts.tolist())
            found[i] = drafts[: len(allowed) - 1]
    counts = np.zeros(len(rows), np.int32)
    counts[list(found)] = [len(drafts) for drafts in found.values()]
    if not self._grow(rows, queries + counts):
        counts = np.minimum(counts, np.maximum(self.tables.covered[rows] - self.computed[rows] - queries, 0))
    if not counts.any():
        return None
    tokens = np.full((len(rows), int(counts.max())), -1, np.int32)
    for i, drafts in found.items():
        tokens[i, : counts[i]] = drafts[: counts[i]]
    cut = {int(rows[i]): int(counts[i]) + 1 for i in found}
    masks = {row: each[: cut[row]] for row, each in masks.items()}
    per_decode = 1 + int(np.bincount(counts[queries == 1]).argmax())
    speculation.unread[rows] = counts > 0
    return Drafts(rows, tokens, counts, masks, per_decode)


def _allowed(matcher: Matcher, drafts: Sequence[int]) -> np.ndarray:
    """The masks before each draft that a grammar allows after those before it, and after the last one."""
    masks, ahead = [matcher.mask], matcher.copy()
    for token in drafts:
        if not masks[-1][token >> 3] >> (token & 7) & 1 or ahead.advance([token]) is not None:
            break
        masks.append(ahead.mask)
    return np.stack(masks)
