"""Logits to tokens.  Lesson 02.

The fast path (greedy, temperature) is the operation `sample`, which needs one random number a row. Rows that ask for
more (penalties, bias, truncation) have their logits reshaped first, on the device; their history is read from the
device's own token rows, so a resumed request needs nothing restored.
"""

import numpy as np
import torch
from torch import Tensor

from .ops import OperationSet
from .request import SamplingParams

GENERAL_AT_ONCE = 256  # rows reshaped at a time: sorting Gemma's vocabulary takes some 10 MB a row


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position): a counter-based generator (SplitMix64, Steele et al. 2014).

    seeds [n] int64, positions [n] int. The number depends on nothing else, so a seeded request draws the same
    tokens alone, in any batch, and after preemption. 24 bits, all that float32 holds.
    """
    return _draws(_mix(seeds.astype(np.uint64)), positions)


def _draws(mixed: np.ndarray, positions: np.ndarray) -> np.ndarray:
    z = _mix(mixed + positions.astype(np.uint64)) >> np.uint64(40)
    return (z.astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function; arrays of uint64 wrap without a warning."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Sampling parameters in columns, one entry a row of the engine's device state."""

    def __init__(self, rows: int, device: torch.device, operations: OperationSet):
        self.ops = operations
        self.device = device
        self.params: list[SamplingParams | None] = [None] * rows
        self.stop_ids: list[tuple[int, ...]] = [()] * rows
        self.prompt_length = np.zeros(rows, np.int64)
        self.mixed_seed = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.general = np.zeros(rows, bool)  # rows that need more than the fast path

    def admit(self, row: int, params: SamplingParams, seed: int, prompt_length: int, stop_ids: tuple[int, ...]) -> None:
        self.params[row] = params
        self.stop_ids[row] = stop_ids
        self.prompt_length[row] = prompt_length
        self.mixed_seed[row] = _mix(np.array([seed]).astype(np.uint64))[0]
        self.temperature[row] = params.temperature
        self.general[row] = params.needs_general_path

    def __call__(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor) -> Tensor:
        """The next token of each row.

        logits: [n, vocab]; rows: [n]; lengths: [n] tokens each row has; tokens: [all rows, max length] the rows'
        tokens on the device. Returns [n] int64.
        """
        general = np.nonzero(self.general[rows])[0]
        if len(general) == 0:
            return self._draw(logits, rows, lengths)
        if len(general) == len(rows):
            sampled = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        else:
            sampled = self._draw(logits, rows, lengths)
        for start in range(0, len(general), GENERAL_AT_ONCE):
            piece = general[start : start + GENERAL_AT_ONCE]
            at = self._tensor(piece)
            shaped = self._reshape(_widened(logits[at]), rows[piece], lengths[piece], tokens)
            sampled[at] = self._draw(shaped, rows[piece], lengths[piece], divided=True)
        return sampled

    def _draw(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, divided: bool = False) -> Tensor:
        """One token a row; divided: the logits have their temperature already, so it is 1, or 0 where it was."""
        temperature = self.temperature[rows]
        if not temperature.any():
            return logits.argmax(dim=-1)
        if divided:
            temperature = (temperature > 0).astype(np.float32)
        draws = self._tensor(_draws(self.mixed_seed[rows], lengths))
        return self.ops.sample(logits, self._tensor(temperature), draws)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _reshape(self, shaped: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor) -> Tensor:
        """Logits [n, vocab] of general rows -> what these rows ask for, divided by their temperature."""
        params = [self.params[row] for row in rows]
        temperature = self.temperature[rows]
        generated = lengths - self.prompt_length[rows]

        bias = [(i, token, value) for i, p in enumerate(params) for token, value in (p.logit_bias or {}).items()]
        if bias:
            i, token, value = (torch.tensor(column, device=self.device) for column in zip(*bias, strict=True))
            shaped.index_put_((i, token), value.to(shaped.dtype), accumulate=True)
        if any(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in params):
            history, prompt = tokens[self._tensor(rows.astype(np.int64))], self.prompt_length[rows]
            shaped = penalise(shaped, history, self._tensor(lengths), self._tensor(prompt), params)
        early = [(i, s) for i, p in enumerate(params) if generated[i] < p.min_tokens for s in self.stop_ids[rows[i]]]
        if early:
            i, token = (torch.tensor(column, device=self.device) for column in zip(*early, strict=True))
            shaped.index_put_((i, token), torch.tensor(-torch.inf, dtype=shaped.dtype, device=self.device))

        shaped = shaped / self._tensor(np.where(temperature > 0, temperature, 1)).to(shaped.dtype)[:, None]
        return truncate(shaped, params)


def _widened(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def penalise(logits: Tensor, history: Tensor, known: Tensor, prompt: Tensor, params: list[SamplingParams]) -> Tensor:
    """Repetition, presence and frequency penalties.  Lesson 02.

    logits [n, vocab]; history [n, longest] token ids; known, prompt [n]: tokens of all, and of the prompt.
    """
    n, vocab = logits.shape

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=logits.dtype, device=logits.device)[:, None]

    place = torch.arange(history.shape[1], device=logits.device)
    seen = (place < known[:, None]).to(logits.dtype)
    output = seen * (place >= prompt[:, None])
    zeros = logits.new_zeros(n, vocab)
    ids = history.long()
    counted = zeros.scatter_add(1, ids, output)
    seen = zeros.scatter_add(1, ids, seen) > 0
    repetition = column("repetition_penalty")
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - column("frequency_penalty") * counted
    return logits - column("presence_penalty") * (counted > 0)


def truncate(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """min_p, then top_k, then top_p: tokens outside get -inf. logits: [n, vocab], temperature already applied."""

    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    if any(p.min_p > 0 for p in params):
        log_share = torch.log(column([p.min_p for p in params], logits.dtype))
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + log_share, -torch.inf)
    vocab = logits.shape[-1]
    if not any(p.top_k > 0 or p.top_p < 1 for p in params):
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = column([p.top_k if p.top_k > 0 else vocab for p in params], torch.int64)
    outside = torch.arange(vocab, device=logits.device) >= top_k
    ranked = ranked.masked_fill(outside, -torch.inf)
    probabilities = ranked.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = column([p.top_p for p in params], logits.dtype)
    ranked = ranked.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the k likeliest tokens and of the chosen one: (ids, values), each [n, k + 1], chosen first.

    They are the model's own: before penalties, temperature and truncation.
    """
    logprobs = _widened(logits).log_softmax(dim=-1)
    values, ids = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, chosen[:, None])
    return torch.cat([chosen[:, None], ids], dim=1), torch.cat([own, values], dim=1)


def derived_seed(seed: int, count: int) -> int:
    """The seed of the `count`-th request of an engine seeded with `seed`, for requests that name none."""
    mixed = _mix(_mix(np.array([seed]).astype(np.uint64)) + np.uint64(count))
    return int(mixed.astype(np.int64)[0])
