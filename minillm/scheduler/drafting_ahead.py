"""Launch steps with drafts ahead of the results of earlier ones: the device finds the drafts.  Lesson 13.

Prompt lookup needs a row's tokens alone, and these are on the device. So the device looks the drafts up, counts those
that are right, and starts the next step after them (`runner.device_drafts`). The host learns the lengths when it reads
a step. Until then it counts every draft as right: `known` and `computed` are the most tokens that a row may have, the
row has blocks for all of them, and they never exceed the request's limit. `reject_ahead` subtracts the wrong ones.
Later steps may already be in flight. The device started them after the right drafts only, so the counts are then right
for these steps as well.

A step in which the device looks takes as long as one with drafts, even if it finds none. So after a miss the row goes
on without, and the host searches the text that it has read until something repeats. The search takes microseconds a
step, because a long prompt is learned at most MOST_LEARNED tokens at a time; and a repeated passage is usually long, so
little is lost by finding it a few tokens late.
"""

from typing import TYPE_CHECKING

import numpy as np

from minillm.config import MOST_AHEAD
from minillm.request import Request
from minillm.speculation.ngram import NgramProposer

from .drafting import Drafts, asked
from .policies import FirstComeFirstServed, Priority, ShortestPromptFirst
from .step import Step

if TYPE_CHECKING:
    from .scheduler import Scheduler


# They keep nothing between two steps, so it makes no difference how often they are asked.
STATELESS = FirstComeFirstServed, Priority, ShortestPromptFirst

MOST_LOOKED_UP = 16  # rows that the host looks at before a step; with more, they take turns
MOST_LEARNED = 256  # tokens that it learns before a step, for all rows together


def combines(self: "Scheduler") -> bool:
    """Return whether the device can draft for the next step. This is the rule; all other steps are `drafting`'s.

    * The drafts are the engine's own prompt lookup, on one device, and the option is on: `Speculation.on_device`.
    * No row's request needs the host between two tokens: `needs_no_host`.
    * The policy keeps nothing between steps: others are asked once for each step, whether requests may join, too.
    * No layer has a window: blocks that the most tokens would hide may come into sight again.
    * No request can join: none waits, or no row is free. A step with prompts needs to know the lengths.
    """
    speculation = self.speculation
    if speculation is None or not speculation.on_device or self.tables.slides or type(self.policy) not in STATELESS:
        return False
    return not (self.waiting and self._free_rows) and bool(speculation.follows[self.order].all())


def needs_no_host(request: Request) -> bool:
    """Return whether steps of a request can run on before the host has read its tokens.

    A grammar's mask follows from the last token. Logits that are adjusted are sampled again after a captured step, and
    log-probabilities are collected there, at positions that the host has to know.
    """
    return not request.params.adjusts_logits and request.params.logprobs is None


def look_again(self: "Scheduler") -> None:
    """Let the device draft again for rows whose text, as far as it is read, goes on like an earlier place."""
    speculation = self.speculation
    assert speculation is not None, "without it there are no drafts"
    proposer, left = speculation.proposer, MOST_LEARNED
    index = proposer if isinstance(proposer, NgramProposer) else None
    rows = self.order[speculation.searches[self.order]]
    turns = max(-(-len(rows) // MOST_LOOKED_UP), 1)
    for row in rows[self.newest % turns :: turns].tolist():
        count = int(self.confirmed[row])
        if speculation.looks(row, count):
            each = asked(self, row, count, 1)
            behind = 0 if index is None else index.behind(each)
            if index is not None and behind > left:
                index.catch_up(each, left)
                left = 0
                continue
            left -= behind
            if proposer.propose([each])[0]:
                speculation.resume(row, count)
            else:
                speculation.found_none(row, count)


def draft_ahead(self: "Scheduler") -> Step | None:
    """Return the next step if the device can draft for it and a row is worth it; None: the host decides what runs."""
    speculation = self.speculation
    if speculation is None or not speculation.on_device:
        return None
    look_again(self)
    rows = self.order
    if speculation.newest_ahead <= self.read and not speculation.drafts_now(rows, self.known[rows]).any():
        return None  # as in most steps of a text that repeats nothing
    if not combines(self):
        return None
    rows, queries, _ = self._share_budget(self._runnable())
    known = self.known[rows]
    if not len(rows) or (known - self.computed[rows] != 1).any() or (known <= self.prompt[rows]).any():
        return None  # a prompt has tokens left to run
    unread = speculation.unread_ahead(rows, self.read)
    if (unread != speculation.unread[rows]).any():
        return None  # a step in flight has drafts of the host's, which the device does not count
    # Captured steps leave their tokens in a ring, until these are read.
    room = MOST_AHEAD - (known - self.confirmed[rows])
    if (room < 0).any():
        return None
    most = np.minimum(np.minimum(speculation.most, self.limit[rows] - known - 1), room)
    drafting = np.flatnonzero((most > 0) & speculation.drafts_now(rows, known))
    counts = np.zeros(len(rows), np.int32)
    if len(drafting):
        others = len(rows) - len(drafting)
        left = min(self.max_num_batched_tokens, speculation.most_yielded) - len(rows)
        counts[drafting] = speculation.worth(rows[drafting], known[drafting], most[drafting], others, left)
    if not (counts.any() or unread.any()) or not self._grow(rows, queries + counts):
        return None
    counted = unread | ((self.last_step[rows] == self.newest) & (speculation.newest_ahead == self.newest))
    self.known[rows] += counts
    drafts = np.where(np.arange(counts.max()) < counts[:, None], np.int32(0), np.int32(-1))  # a 0 in place of each
    step = self._launch(rows, queries + counts, Drafts(rows, drafts, counts, {}, 1 + int(np.bincount(counts).argmax())))
    given = np.zeros(self.max_num_seqs, bool)
    given[rows] = ~counted
    step.lookup = given[step.rows]
    speculation.launched_ahead(step.number, rows[counts > 0])
    return step


def reject_ahead(self: "Scheduler", step: Step, accepted: np.ndarray, looked_up: np.ndarray) -> None:
    """Take back what was counted for drafts that were wrong or not found: it is neither known nor computed.

    accepted: [n] tokens that the step's rows gained; looked_up: [n] drafts that they had.
    """
    speculation = self.speculation
    assert speculation is not None, "without it there are no drafts"
    going = (self.confirmed[step.rows] > 0) & (step.drafted > 0)
    rows, right = step.rows[going], accepted[going] - 1
    wrong = step.drafted[going] - right
    self.known[rows] -= wrong
    self.computed[rows] -= wrong
    self.trace.reject(rows, wrong)
    speculation.learn_ahead(step.number, rows, self.known[rows], looked_up[going], right)
