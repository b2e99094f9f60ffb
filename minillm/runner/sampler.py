"""Logits to tokens.  Lesson 02.

The fast path (greedy, temperature) is the operation `sample`, which needs one random number a row. Rows that ask for
more (penalties, bias, truncation) have their logits reshaped first, on the device; their history is read from the
device's own token rows, so a resumed request needs nothing restored.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.ops import OperationSet
from minillm.request import SamplingParams

GENERAL_AT_ONCE = 256  # rows reshaped at a time: with Gemma's vocabulary each takes some MB


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


# What reshapes a row's logits, and the value that asks for nothing.
REPETITION = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
TRUNCATION = {"top_k": 0, "top_p": 1}
MIN_P = {"min_p": 0}


class Sampler:
    """Sampling parameters in columns, one entry a row of the engine's device state.

    What a step needs of them is sent to the device as it is launched, and nothing is read back: the host never waits.
    """

    def __init__(self, rows: int, device: torch.device, operations: OperationSet):
        self.ops = operations
        self.device = device
        self.stop_ids = [np.zeros(0, np.int64)] * rows
        self.bias = [(np.zeros(0, np.int64), np.zeros(0))] * rows  # token ids, and what is added to their logits
        self.prompt_length = np.zeros(rows, np.int64)
        self.mixed_seed = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.min_tokens = np.zeros(rows, np.int64)
        self.biased = np.zeros(rows, bool)
        self.general = np.zeros(rows, bool)  # rows that need more than the fast path
        self.wishes = {name: np.zeros(rows) for name in REPETITION | TRUNCATION | MIN_P}

    def admit(self, row: int, params: SamplingParams, seed: int, prompt_length: int, stop_ids: tuple[int, ...]) -> None:
        bias = params.logit_bias or {}
        self.stop_ids[row] = np.array(stop_ids, np.int64)
        self.bias[row] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float64)
        self.prompt_length[row] = prompt_length
        self.mixed_seed[row] = _mix(np.array([seed]).astype(np.uint64))[0]
        self.temperature[row] = params.temperature
        self.min_tokens[row] = params.min_tokens
        self.biased[row] = bool(bias)
        self.general[row] = params.needs_general_path
        for name, column in self.wishes.items():
            column[row] = getattr(params, name)

    def __call__(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor) -> Tensor:
        """The next token of each row.

        logits: [n, vocab]; rows: [n]; lengths: [n] tokens each row has; tokens: [all rows, max length] the rows'
        tokens on the device. Returns [n] int64.
        """
        if self.general[rows].all():
            sampled = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        else:
            sampled = self._draw(logits, rows, lengths)
        self.correct(sampled, logits, np.arange(len(rows)), rows, lengths, tokens)
        return sampled

    def correct(
        self,
        sampled: Tensor,
        logits: Tensor,
        places: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        tokens: Tensor,
    ) -> bool:
        """Put into `sampled` [n] the tokens of those rows that ask for more than the fast path; whether there are any.

        places: [n] where each row's logits are; the rest as above.
        """
        general = np.nonzero(self.general[rows])[0]
        for start in range(0, len(general), GENERAL_AT_ONCE):
            piece = general[start : start + GENERAL_AT_ONCE]
            chosen = logits[self._tensor(places[piece])]
            shaped = self.reshape(_widened(chosen), rows[piece], lengths[piece], tokens)
            sampled[self._tensor(piece)] = self._draw(shaped, rows[piece], lengths[piece], divided=True)
        return len(general) > 0

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
        """On the device; from a GPU nobody waits for it."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _asked(self, neutral: dict[str, float], rows: np.ndarray, dtype: torch.dtype) -> list[Tensor] | None:
        """A column [n, 1] of each of these parameters; None where no row asks for any of them."""
        values = np.stack([self.wishes[name][rows] for name in neutral])
        if (values == np.array(list(neutral.values()))[:, None]).all():
            return None
        return list(self._tensor(values).to(dtype)[..., None])

    def _places(self, rows: np.ndarray, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Where in [n, vocab] each of these rows has its ids."""
        return self._tensor(np.repeat(rows, [len(each) for each in ids])), self._tensor(np.concatenate(ids))

    def reshape(self, shaped: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor) -> Tensor:
        """Logits [n, vocab] of general rows -> what these rows ask for, divided by their temperature; in place."""
        temperature = self.temperature[rows]
        generated = lengths - self.prompt_length[rows]
        dtype = shaped.dtype

        biased = np.nonzero(self.biased[rows])[0]
        if len(biased):
            ids, values = zip(*(self.bias[row] for row in rows[biased]), strict=True)
            values = self._tensor(np.concatenate(values)).to(dtype)
            shaped.index_put_(self._places(biased, ids), values, accumulate=True)
        if penalties := self._asked(REPETITION, rows, dtype):
            history = tokens[self._tensor(rows.astype(np.int64)), : int(lengths.max())]
            prompt = self.prompt_length[rows]
            shaped = penalise(shaped, history, self._tensor(lengths), self._tensor(prompt), *penalties)
        early = np.nonzero(generated < self.min_tokens[rows])[0]
        if len(early):
            places = self._places(early, [self.stop_ids[row] for row in rows[early]])
            shaped.index_put_(places, shaped.new_full((), -torch.inf))

        # The largest is 0 before the division, or a temperature near 0 would make others infinite too.
        top = shaped.amax(-1, keepdim=True)
        shaped -= torch.where(top.isfinite(), top, 0)
        shaped /= self._tensor(np.where(temperature > 0, temperature, 1)).to(dtype)[:, None]
        if min_p := self._asked(MIN_P, rows, dtype):
            shaped.masked_fill_(shaped < torch.log(min_p[0]), -torch.inf)  # the largest is 0
        if truncation := self._asked(TRUNCATION, rows, torch.float64):
            top_k, top_p = truncation
            shaped = self.ops.truncate(shaped, top_k[:, 0].long(), top_p[:, 0].to(dtype))
        return shaped


def _widened(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def penalise(
    logits: Tensor,
    history: Tensor,
    known: Tensor,
    prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Repetition, presence and frequency penalties, in place.  Lesson 02.

    logits [n, vocab]; history [n, longest] token ids; known, prompt [n]: tokens of all, and of the prompt; the
    penalties [n, 1].
    """
    place = torch.arange(history.shape[1], device=logits.device)
    ids = torch.where(place < known[:, None], history, history[:, :1]).long()  # what lies behind counts as the first
    output = ((place >= prompt[:, None]) & (place < known[:, None])).to(logits.dtype)
    count = torch.zeros_like(logits).scatter_add_(1, ids, output).gather(1, ids)
    seen = logits.gather(1, ids)
    seen = torch.where(seen > 0, seen / repetition, seen * repetition) - frequency * count - presence * (count > 0)
    return logits.scatter_(1, ids, seen)


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
