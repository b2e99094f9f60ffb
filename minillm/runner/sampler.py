"""Sample tokens from logits.  Lesson 02.

The fast path is the operation `sample`: greedy choice, or a temperature and truncation, with one random number per row.
If a row uses more options (bias, penalties, grammars), its logits go through `Sampler.STAGES` on the device first.
Penalties read the history from the token rows on the device, so a resumed request has no sampler state to restore.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.model.parallel import Parallel
from minillm.ops import Operations
from minillm.ops.reference import likeliest
from minillm.ops.signatures import Truncation

from . import sharded_sampling
from .adjusted_logits import forbid, penalize
from .logprobs import widened
from .sampling_columns import PENALTIES, TRUNCATION, mix
from .state import RowState

GENERAL_AT_ONCE = 256  # rows adjusted at a time: with Gemma's vocabulary each takes a few MB


def uniforms(mixed_seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) for each (seed, position): a counter-based generator (SplitMix64, Steele et al.
    2014).

    mixed_seeds: [n] uint64, what `mix` makes of the seeds; positions: [n] int. The number depends on nothing else, so a
    seeded request draws the same numbers alone, in any batch, and after preemption. Numbers have 24 bits, the precision
    of float32.
    """
    z = mix(mixed_seeds + positions.astype(np.uint64)) >> np.uint64(40)
    return (z.astype(np.float64) * 2.0**-24).astype(np.float32)


class Sampler:
    """Samples the next token of each row with its request's parameters.

    Parameters are sent to the device at launch, and nothing is read back, so the host never waits.
    """

    def __init__(self, state: RowState, operations: Operations):
        self.state, self.ops = state, operations

    def __call__(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Sample the next token of each row.

        logits: [n, vocab]; rows: [n]; lengths: [n] tokens that each row has. Returns [n] int64; -1 for a row whose
        logits give no probabilities, because one is NaN or infinity or all are minus infinity.
        """
        if self.state.sampling.general[rows].all():
            sampled = torch.empty(len(rows), dtype=torch.int64, device=self.state.device)
        else:
            sampled = self._draw(logits, rows, lengths)
        self.correct(sampled, logits, np.arange(len(rows)), rows, lengths)
        return sampled

    def samples_in_shards(self, rows: np.ndarray) -> bool:
        """Return whether each rank samples from its own logits, for rows that need nothing but a temperature.

        GPUs gather the logits: the operations on shards read and write numbers of eight bytes ten times over, which are
        more bytes than half of the logits are.
        """
        gathers = self.state.device.type != "cpu" or (self.state.logprobs[rows] >= 0).any()
        return not (gathers or self.state.sampling.general[rows].any() or self._asked(TRUNCATION, rows, torch.float32))

    def of_shards(self, parallel: Parallel, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
        """As `__call__`, for plain rows, from this rank's part of the logits."""
        temperature = self.state.sampling.temperature[rows]
        if not temperature.any():
            return sharded_sampling.sample(parallel, logits)
        draws = self._tensor(uniforms(self.state.sampling.mixed_seed[rows], lengths))
        return sharded_sampling.sample(parallel, logits, self._tensor(temperature), draws)

    def correct(
        self, sampled: Tensor, logits: Tensor, indices: np.ndarray, rows: np.ndarray, lengths: np.ndarray
    ) -> bool:
        """Replace in `sampled` [n] the tokens of rows that need more than the fast path. Returns whether there are any.

        indices: [n] indices of the rows' logits; the other arguments are as in `__call__`.
        """
        general = np.nonzero(self.state.sampling.general[rows])[0]
        for start in range(0, len(general), GENERAL_AT_ONCE):
            piece = general[start : start + GENERAL_AT_ONCE]
            chosen = self._copied(logits, indices[piece])
            finite = None
            if self.state.sampling.hides[rows[piece]].any():  # what is no number would be hidden, too
                finite = chosen.amax(-1).abs() < torch.inf
            for stage in self.STAGES:
                chosen = stage(self, chosen, rows[piece], lengths[piece])
            drawn = self._draw(chosen, rows[piece], lengths[piece])
            sampled[self._tensor(piece)] = drawn if finite is None else torch.where(finite, drawn, -1)
        return len(general) > 0

    def _copied(self, logits: Tensor, indices: np.ndarray) -> Tensor:
        """Return a copy of some rows of the logits, at least in float32."""
        first, count = int(indices[0]), len(indices)
        if np.array_equal(indices, np.arange(first, first + count)):
            return widened(logits[first : first + count], copy=True)
        return widened(logits[self._tensor(indices)])

    # ---- the stages, in the order in which they run: logits [n, vocab], rows [n], lengths [n] -> logits

    def logit_bias(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Add to the logits of each row's biased tokens, in place."""
        columns = self.state.sampling
        biased = np.nonzero(columns.biased[rows])[0]
        if len(biased):
            ids, values = zip(*(columns.bias[row] for row in rows[biased]), strict=True)
            added = self._tensor(np.concatenate(values)).to(logits.dtype)
            logits.index_put_(self._entries(biased, ids), added, accumulate=True)
        return logits

    def penalties(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Apply repetition, presence and frequency penalties."""
        if penalties := self._asked(PENALTIES, rows, logits.dtype):
            history = self.state.tokens[self._tensor(rows.astype(np.int64)), : int(lengths.max())]
            prompt = self._tensor(self.state.prompt_length[rows])
            return penalize(logits, history, self._tensor(lengths), prompt, *penalties)
        return logits

    def min_tokens(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Forbid stop tokens in rows that have generated too few tokens, in place."""
        columns, prompt = self.state.sampling, self.state.prompt_length[rows]
        early = np.nonzero(lengths - prompt < columns.min_tokens[rows])[0]
        if len(early):
            indices = self._entries(early, [columns.stop_ids[row] for row in rows[early]])
            logits.index_put_(indices, logits.new_full((), -torch.inf))
        return logits

    def grammar(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Forbid the tokens that the rows' grammars do not allow next."""
        columns = self.state.sampling
        masked = np.nonzero(columns.masked[rows])[0]
        if not len(masked):
            return logits
        which = lengths[masked] - columns.masked_from[rows[masked]]
        masks = self._tensor(np.stack([columns.masks[row][i] for row, i in zip(rows[masked], which, strict=True)]))
        return forbid(logits, self._tensor(masked), masks)

    STAGES = (logit_bias, penalties, min_tokens, grammar)

    def _draw(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Draw one token per row."""
        temperature = self.state.sampling.temperature[rows]
        if not temperature.any():
            return likeliest(logits)
        draws = self._tensor(uniforms(self.state.sampling.mixed_seed[rows], lengths))
        truncation = None
        if asked := self._asked(TRUNCATION, rows, torch.float32):
            min_p, top_k, top_p = (each[:, 0] for each in asked)
            truncation = Truncation(min_p, top_k.int(), top_p)
        return self.ops.sample(logits, self._tensor(temperature), draws, truncation)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return self.state.to_device(array)

    def _asked(self, neutral: Mapping[str, float], rows: np.ndarray, dtype: torch.dtype) -> list[Tensor] | None:
        """Return a column [n, 1] of each of these parameters; None if all rows have the neutral values."""
        values = np.stack([self.state.sampling.shaping[name][rows] for name in neutral])
        if (values == np.array(list(neutral.values()))[:, None]).all():
            return None
        return list(self._tensor(values).to(dtype)[..., None])

    def _entries(self, rows: np.ndarray, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Indices into [n, vocab] for the given rows and their token ids."""
        return self._tensor(np.repeat(rows, [len(each) for each in ids])), self._tensor(np.concatenate(ids))
