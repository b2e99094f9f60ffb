"""Steps whose drafts the device finds and checks itself, so that they can be launched ahead.  Lesson 13.

The device keeps how many tokens each row has. A step looks up drafts among these tokens, runs them, compares them with
what it samples, and adds what it accepted. So the next step needs nothing from the host, which reads the lengths one
step or more later; `scheduler.drafting_ahead` says how it counts until then.

On a GPU, captured steps do this with the kernels of `kernels.prompt_lookup`; here are the same operations in PyTorch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minillm.model.batch import Batch
from minillm.ops import Rows
from minillm.ops.signatures import Truncation
from minillm.scheduler.step import Step
from minillm.speculation.ngram import SIZES

from .launched import LaunchedStep, Results
from .state import RowState

if TYPE_CHECKING:
    from .runner import Runner

FOUND = 256  # as in `kernels.prompt_lookup`
AT_ONCE = 1 << 20  # tokens in which `look_up` searches at once, with some 40 bytes for each


class DeviceDrafts:
    """Runs such steps, and follows the lengths of rows as the host reads them."""

    def __init__(self, state: RowState):
        self.state = state
        self._read = np.zeros(state.padding, np.int64)  # of each row, after the newest step that was read

    def run(self, runner: "Runner", step: Step) -> LaunchedStep:
        """Run a step whose drafts the device finds. On a GPU it returns without waiting."""
        replayed = None if runner.graphs is None else runner.graphs.replay(step)
        if replayed is not None:
            return LookupStep(step, replayed.sampled, self, self.arrived)
        return self._run(runner, step)

    def _run(self, runner: "Runner", step: Step) -> LaunchedStep:
        """Launch a step kernel by kernel. Each token is a row of its own, as in captured steps."""
        state, model, counts, adapters = self.state, runner.model, step.drafted, self.state.adapters
        assert step.lookup is not None, "the host's drafts run elsewhere"
        ends, most = np.cumsum(step.queries), int(counts.max(initial=0))
        offsets = np.arange(ends[-1]) - np.repeat(ends - step.queries, step.queries)
        host_lengths = np.where(step.lookup, step.starts + 1, -1)
        rows, counted, entries, after, sent_lengths = state.send(
            step.rows, counts, np.repeat(np.arange(len(step.rows)), step.queries), offsets, host_lengths
        )
        lengths = torch.where(sent_lengths >= 0, sent_lengths, state.lengths[rows].long())
        drafts = self._drafts(rows, int(step.ends.max()), lengths, counted, most)

        token_rows, positions = rows[entries], lengths[entries] - 1 + after
        drafted = torch.nn.functional.pad(drafts, (1, 0))[entries, after].clamp(min=0)  # one that is missing runs as 0
        ids = torch.where(after == 0, state.tokens[token_rows, positions].long(), drafted)
        width = -(-int(step.ends.max()) // state.block_size)
        blocks = state.block_table[:, token_rows, positions // state.block_size].long()
        batch = Batch(
            token_ids=ids,
            positions=positions,
            slots=blocks * state.block_size + positions % state.block_size,
            decode=Rows.of_groups(
                state.block_table[:, token_rows, :width],
                (positions + 1).int(),
                torch.arange(len(ids) + 1, dtype=torch.int32, device=state.device),
                1,
            ),
            prefill=(),
            logits_index=None,
            adapted=None if adapters is None else adapters.of_tokens(token_rows, adapters.reach(step.rows)),
        )
        logits = model.logits(model.forward(batch, runner.caches))
        temperature, min_p, top_k, top_p, _ = state.parameters[token_rows].unbind(1)
        draws = uniforms(state.seed[token_rows], positions + 1)
        sampled = model.ops.sample(logits, temperature, draws, Truncation(min_p, top_k.int(), top_p))
        state.tokens[token_rows, positions + 1] = sampled.clamp(min=0).int()

        tokens = torch.full((len(rows), most + 1), -1, dtype=torch.int64, device=state.device)
        tokens[entries, after] = sampled
        accepted = accept(drafts, tokens)
        state.lengths[rows] = (lengths + accepted).int()
        found = (drafts >= 0).sum(1)
        return LookupStep(step, torch.cat([tokens, (FOUND * found + accepted)[:, None]], 1), self, None)

    def _drafts(self, rows: Tensor, longest: int, lengths: Tensor, counts: Tensor, most: int) -> Tensor:
        """Return what `look_up` finds, of so many rows at a time that little memory is needed."""
        at_once = max(1, AT_ONCE // longest)
        parts = zip(*(each.split(at_once) for each in (rows, lengths, counts)), strict=True)
        return torch.cat(
            [look_up(self.state.tokens[each, :longest], length, count, most) for each, length, count in parts]
        )

    def read(self, step: Step, code: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take in the step's lengths: (the rows' tokens before it, accepted tokens, drafts that were found), [n] each.

        code: [n], FOUND times the drafts plus the tokens; None: captured steps have written it to `accepted`. Steps are
        read in the order in which they were launched.
        """
        assert step.lookup is not None, "the host's drafts are read elsewhere"
        before = np.where(step.lookup, step.starts + 1, self._read[step.rows])
        if code is None:
            code = self.state.accepted.numpy()[step.rows, before % self.state.accepted.shape[1]].astype(np.int64)
        found, accepted = np.divmod(code, FOUND)
        self._read[step.rows] = before + accepted
        return before, accepted, found

    def arrived(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return tokens [n] that a captured step has written to these positions of the rows."""
        return self.state.read(rows, positions)


class LookupStep(LaunchedStep):
    """A step whose drafts the device has found.

    tokens: on the device; if `arrived` is None, [n, most + 2] int64: those that each row yields, and its code, as
    `DeviceDrafts.read` takes it. Else `arrived` returns those that the step has written to the host's memory.
    """

    def __init__(
        self,
        step: Step,
        tokens: Tensor,
        drafts: DeviceDrafts,
        arrived: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
    ):
        super().__init__(step, tokens, [], read=None if arrived is None else lambda: np.zeros(0, np.int64))
        self._drafts, self._arrived = drafts, arrived

    def wait(self) -> Results:
        """Block until the results are on the host, and return them."""
        self.finish()
        values, order = self._read(), np.arange(int(self.step.drafted.max(initial=0)) + 1)
        before, accepted, found = self._drafts.read(self.step, None if self._arrived else values[:, -1])
        mine = order < accepted[:, None]
        if self._arrived is None:
            tokens = np.where(mine, values[:, :-1], -1)
        else:
            tokens = np.full(mine.shape, -1, np.int64)
            at, which = np.nonzero(mine)
            tokens[mine] = self._arrived(self.step.rows[at], before[at] + which)
        return Results(tokens, accepted, looked_up=found)


def look_up(tokens: Tensor, lengths: Tensor, counts: Tensor, most: int) -> Tensor:
    """Return the drafts of rows [n, most] int64, -1 for none, as `speculation.NgramProposer` drafts them.

    tokens: [n, longest], of which the first lengths [n] are the row's. counts: [n] drafts that each may have.
    """
    last, ends = lengths[:, None] - 1, torch.arange(tokens.shape[1], device=tokens.device)
    matches = ends < last
    size = torch.zeros_like(tokens)
    for back in range(SIZES[0]):
        here = tokens.roll(back, 1)
        matches = matches & (ends >= back) & (here == tokens.gather(1, (last - back).clamp(min=0)))
        size += matches
    level = torch.stack([size >= each for each in SIZES]).long().sum(0)
    best = torch.where(level > 0, level * tokens.shape[1] + ends, -1).amax(1, keepdim=True)
    first = best % tokens.shape[1] + 1
    each = torch.arange(most, device=tokens.device)
    drafts = tokens.gather(1, (first + each % (last + 1 - first).clamp(min=1)).clamp(max=tokens.shape[1] - 1)).long()
    right = (best >= 0) & (each < counts[:, None]) & (drafts >= 0)
    return torch.where(right.long().cumprod(1) > 0, drafts, -1)


def accept(drafts: Tensor, sampled: Tensor) -> Tensor:
    """Count the sampled tokens [n, most + 1] that each row keeps, [n]: one, and one for each right draft [n, most]."""
    return 1 + ((drafts >= 0) & (drafts == sampled[:, :-1])).long().cumprod(1).sum(1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the numbers that `sampler.uniforms` has for these seeds and positions [n] int64, on the device."""
    return (_shifted(_mix(_mix(seeds) + positions), 40).double() * 2.0**-24).float()


def _mix(z: Tensor) -> Tensor:
    """SplitMix64 (Steele et al. 2014) on int64, which wraps as uint64 does."""
    z = z + (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left, as unsigned numbers do."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
