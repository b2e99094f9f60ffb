"""Log-probabilities for the requests that ask for them.  Lesson 02."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from minillm.model import Model
from minillm.request import TokenLogprobs
from minillm.scheduler.step import Step

from .state import RowState

LOGITS_AT_ONCE = 256  # rows of logits to compute at a time when a whole prompt is scored


@dataclass
class _TopLogprobs:
    ids: Tensor  # [n, k + 1]: the token itself, then the k most likely
    values: Tensor  # [n, k + 1]

    def to_host(self) -> Self:
        """Start an asynchronous copy to the host."""
        ids, values = (each.to("cpu", non_blocking=True) for each in (self.ids, self.values))
        return replace(self, ids=ids, values=values)


@dataclass
class Scores(_TopLogprobs):
    """Log-probabilities of sampled tokens."""

    rows: np.ndarray  # [n]


@dataclass
class ArrivedScores:
    """Log-probabilities of sampled tokens, which a captured step writes to the host itself."""

    state: RowState
    rows: np.ndarray  # [n]
    positions: np.ndarray  # [n]
    count: int  # of each row

    def to_host(self) -> Self:
        return self

    @property
    def ids(self) -> np.ndarray:
        """[n, count]; once the step has run"""
        return self.state.read_scores(self.rows, self.positions, self.count)[0]

    @property
    def values(self) -> np.ndarray:
        """[n, count]; once the step has run"""
        return self.state.read_scores(self.rows, self.positions, self.count)[1]


@dataclass
class PromptScores(_TopLogprobs):
    """Log-probabilities of consecutive prompt tokens of one row."""

    row: int
    position: int  # of the first token


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen token and the k most likely ones: (ids, values), each [n, k + 1], chosen first.

    They are computed from the model's logits, before penalties, temperature and truncation.
    """
    logprobs = widened(logits).log_softmax(dim=-1)
    values, ids = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, chosen[:, None])
    return torch.cat([chosen[:, None], ids], dim=1), torch.cat([own, values], dim=1)


def widened(logits: Tensor, *, copy: bool = False) -> Tensor:
    """Convert half-precision logits to float32; leave others as they are, or copy them."""
    half = logits.dtype in (torch.bfloat16, torch.float16)
    return logits.to(torch.float32 if half else logits.dtype, copy=copy)


def of_sampled(
    state: RowState,
    logits: Tensor,
    indices: np.ndarray,
    rows: np.ndarray,
    sampled: Tensor,
    some: np.ndarray | bool = True,
) -> list[Scores]:
    """Scores for those rows [n] that ask for them, grouped by the number they ask for. indices: [n] into logits.

    some: of the rows, those that are scored here [n]. Scores of rows without a token (-1) are meaningless.
    """
    wanted = np.where(some, state.logprobs[rows], -1)
    scores = []
    for k in np.unique(wanted[wanted >= 0]):
        chosen = np.nonzero(wanted == k)[0]
        at, index = state.send(indices[chosen], chosen)
        scores.append(Scores(*top_logprobs(logits[at], sampled[index].clamp(min=0), int(k)), rows[chosen]))
    return scores


def arrived(state: RowState, rows: np.ndarray, positions: np.ndarray, vocab: int) -> list[ArrivedScores]:
    """Return the same for rows [n] that a captured step scores, of tokens at these positions [n]."""
    wanted = state.logprobs[rows]
    return [
        ArrivedScores(state, rows[wanted == k], positions[wanted == k], min(int(k), vocab) + 1)
        for k in np.unique(wanted[wanted >= 0])
    ]


def rows_wanting_prompts(state: RowState, step: Step) -> list[int]:
    """Indices in the step of the rows that want prompt scores and run tokens with a successor in the prompt."""
    wanting = state.prompt_logprobs[step.rows] >= 0
    if not wanting.any():
        return []
    return np.nonzero(wanting & (step.starts < state.prompt_length[step.rows] - 1))[0].tolist()


def of_prompt(model: Model, state: RowState, step: Step, index: int, hidden: Tensor) -> PromptScores:
    """Scores of the prompt tokens that come after those run by the row at `index` in the step.

    hidden: [queries, hidden], the final hidden states of the tokens that run.
    """
    row, start = int(step.rows[index]), int(step.starts[index])
    end = min(start + int(step.queries[index]), int(state.prompt_length[row]) - 1)
    targets = state.tokens[row, start + 1 : end + 1].long()
    k = int(state.prompt_logprobs[row])
    pieces = [
        top_logprobs(model.logits(hidden[at : at + len(chosen)]), chosen, k)
        for at, chosen in zip(range(0, end - start, LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
    ]
    ids, values = (torch.cat(column) for column in zip(*pieces, strict=True))
    return PromptScores(ids, values, row, start + 1)


def by_row(
    scores: Sequence[Scores | ArrivedScores], step: Step, accepted: np.ndarray
) -> dict[int, list[TokenLogprobs]]:
    """Collect the log-probabilities of each row's new tokens, without those of rejected drafts."""
    entries: dict[int, list[TokenLogprobs]] = {}
    for each in scores:
        for row, entry in zip(each.rows.tolist(), as_dicts(each.ids, each.values), strict=True):
            entries.setdefault(row, []).append(entry)
    if entries and step.drafts is not None:
        for row, kept in zip(step.sampling_rows.tolist(), accepted.tolist(), strict=True):
            del entries.get(row, [])[kept:]
    return entries


def as_dicts(ids: Tensor | np.ndarray, values: Tensor | np.ndarray) -> list[TokenLogprobs]:
    # Without a loop in Python: there is one dict a token, and a step has up to a thousand.
    return list(map(dict, map(zip, ids.tolist(), values.tolist())))
