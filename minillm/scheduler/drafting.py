"""Choose the rows of a step that get drafts, and the drafts.  Lesson 13.

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
    """Return whether a row that may get drafts, or has some, has tokens that are not read yet.

    Then the device is at work, and what can be decided without these tokens is decided now.
    """
    speculation = self.speculation
    assert speculation is not None, "without it there are no drafts"
    rows, known = self.order, self.known[self.order]
    waits = speculation.waits(rows, known)
    if not (waits & (known != self.confirmed[rows])).any():
        return False
    if speculation.planned_after != self.newest:
        speculation.planned_after = self.newest
        most = np.minimum(speculation.most, self.limit[rows] - self.confirmed[rows] - 2)
        drafting = waits & (most > 0)
        left = min(self.max_num_batched_tokens, speculation.most_yielded) - len(rows)
        count = len(rows) - int(drafting.sum())
        speculation.plan(rows[drafting], known[drafting], most[drafting], count, left)
    return True


def continues_at_once(self: "Scheduler") -> bool:
    """Return whether the next step should be launched before requests get the tokens of the one just read.

    Without drafts one is in flight then. A grammar needs the tokens first. A CPU computes a step while it is launched.
    """
    return self.speculation is not None and self.speculation.runs_ahead and not self.matchers


def draft(self: "Scheduler", rows: np.ndarray, queries: np.ndarray) -> Drafts | None:
    """Ask the proposer for the rows that run their newest token, all others being known. None: there are no drafts.

    queries: [n] tokens that the rows run in this step.
    """
    speculation = self.speculation
    assert speculation is not None, "without it there are no drafts"
    known = self.known[rows]
    waits = speculation.waits(rows, known)
    if not waits.any():
        return None
    most = np.minimum(speculation.most, self.limit[rows] - known - 1)
    most[~waits | (queries != 1) | (known != self.confirmed[rows]) | (known - self.computed[rows] != 1)] = 0
    most[known <= self.prompt[rows]] = 0
    indices = np.flatnonzero(most > 0)
    left = min(self.max_num_batched_tokens - int(queries.sum()), speculation.most_yielded - len(rows))
    chosen = speculation.planned(rows[indices])
    if chosen is None and speculation.slow:
        chosen = speculation.worth(rows[indices], known[indices], most[indices], len(rows) - len(indices), left)
    if chosen is not None:
        most[indices] = np.minimum(most[indices], chosen)
        indices = np.flatnonzero(most > 0)
    if not len(indices):
        return None
    drafts = speculation.propose([asked(self, rows[i], known[i], most[i]) for i in indices.tolist()])
    # The token after an end is never needed. -1, no token, pads the ends too.
    ends = (drafts[:, :, None] == self.stop_ids[rows[indices], None]).any(axis=2)
    counts = proposed = np.where(ends.any(axis=1), ends.argmax(axis=1), drafts.shape[1]).astype(np.int32)
    if chosen is None and counts.any():
        counts = speculation.worth(rows[indices], known[indices], counts, len(rows) - len(indices), left)
    elif counts.sum() > left:
        counts = np.clip(left + counts - counts.cumsum(), 0, counts)
    speculation.proposed(rows[indices], known[indices], proposed)
    return _with_blocks(self, rows, queries, indices, drafts, counts) if counts.any() else None


def asked(self: "Scheduler", row: int, count: int, most: int) -> Asked:
    """Return a row's request and its first `count` tokens, for up to `most` drafts."""
    request = self.requests[row]
    assert request is not None, "a row that runs has a request"
    sampled = request.params, request.seed, int(self.prompt[row]), request.stop_ids
    return Asked(request.request_id, self.tokens[row, :count], int(most), *sampled)


def _with_blocks(
    self: "Scheduler", rows: np.ndarray, queries: np.ndarray, indices: np.ndarray, drafts: np.ndarray, few: np.ndarray
) -> Drafts | None:
    """Give blocks to the first `few` [m] drafts [m, most] of the rows at `indices` [m].

    Drafts that get none or that a grammar forbids are cut.
    """
    speculation = self.speculation
    assert speculation is not None, "without it there are no drafts"
    counts, masks = np.zeros(len(rows), np.int32), {}
    counts[indices] = few
    if self.matchers:
        for i, row, tokens in zip(indices.tolist(), rows[indices].tolist(), drafts.tolist(), strict=True):
            if counts[i] and (matcher := self.matchers.get(row)) is not None:
                masks[row] = _allowed(matcher, tokens[: counts[i]])
                counts[i] = len(masks[row]) - 1
    if not self._grow(rows, queries + counts):
        counts = np.minimum(counts, np.maximum(self.tables.covered[rows] - self.computed[rows] - queries, 0))
    most = int(counts.max())
    if most == 0:
        return None
    tokens = np.full((len(rows), most), -1, np.int32)
    tokens[indices] = drafts[:, :most]
    tokens[np.arange(most) >= counts[:, None]] = -1
    if masks:
        masks = {int(row): masks[row][: count + 1] for row, count in zip(rows, counts, strict=True) if row in masks}
    per_decode = 1 + int(np.bincount(counts[queries == 1]).argmax())
    speculation.unread[rows] = counts > 0
    return Drafts(rows, tokens, counts, masks, per_decode)


def _allowed(matcher: Matcher, drafts: Sequence[int]) -> np.ndarray:
    """Return the masks before each draft that a grammar allows after those before it, and after the last one."""
    masks, ahead = [matcher.mask], matcher.copy()
    for token in drafts:
        if not masks[-1][token >> 3] >> (token & 7) & 1 or ahead.advance([token]) is not None:
            break
        masks.append(ahead.mask)
    return np.stack(masks)
