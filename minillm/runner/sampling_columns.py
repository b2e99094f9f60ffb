"""Keep the sampling parameters of running requests on the host, as launching a step needs them.  Lesson 10."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minillm.scheduler.step import NewRow

# Parameters of sampling, with their neutral values.
PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
TRUNCATION = {"min_p": 0, "top_k": 0, "top_p": 1}
MOST_K = 1 << 24  # the largest top_k; float32 holds all whole numbers up to it


class SamplingColumns:
    """The sampling parameters of all rows, one column per parameter, on the host."""

    def __init__(self, rows: int):
        self.mixed_seed = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.min_tokens = np.zeros(rows, np.int64)
        self.stop_ids = [np.zeros(0, np.int64)] * rows
        self.bias = [(np.zeros(0, np.int64), np.zeros(0))] * rows  # token ids, and the values to add to their logits
        self.biased = np.zeros(rows, bool)
        self.masked = np.zeros(rows, bool)  # rows with a grammar
        self.masks = [np.zeros((0, 0), np.uint8)] * rows  # the tokens that it allows next, and after each draft
        self.masked_from = np.zeros(rows, np.int64)  # the position of the token that the first of these masks is for
        self.general = np.zeros(rows, bool)  # rows whose logits are adjusted before they are sampled
        self.hides = np.zeros(rows, bool)  # those in which tokens may be forbidden
        self.shaping = {name: np.zeros(rows) for name in PENALTIES | TRUNCATION}

    def fill(self, new: NewRow) -> None:
        """Set the columns of a row that a request has just got."""
        row, params = new.row, new.params
        bias = params.logit_bias or {}
        self.mixed_seed[row] = mix(np.array([new.seed]).astype(np.uint64))[0]
        self.temperature[row] = params.temperature
        self.min_tokens[row] = params.min_tokens
        self.stop_ids[row] = np.array(new.stop_ids, np.int64)
        self.bias[row] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float64)
        self.biased[row] = bool(bias)
        self.masked[row] = params.grammar is not None
        self.general[row] = params.adjusts_logits
        self.hides[row] = params.grammar is not None or params.min_tokens > 0
        greedy = TRUNCATION if params.temperature == 0 else {}  # truncation leaves the likeliest token
        for name, column in self.shaping.items():
            column[row] = greedy.get(name, min(getattr(params, name), MOST_K))
        self.shaping["top_k"][row] = max(self.shaping["top_k"][row], 0)  # -1 means none, too

    def of(self, rows: Sequence[int]) -> np.ndarray:
        """Return the temperature, min_p, top_k and top_p of each row: [n, 4] float32."""
        columns = np.stack([self.temperature, *(self.shaping[name] for name in TRUNCATION)], axis=1)
        return columns[np.array(rows)].astype(np.float32)


def mix(z: Any) -> Any:
    """SplitMix64's output function (Steele et al. 2014); arrays of uint64 wrap without a warning."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derived_seed(seed: int, count: int) -> int:
    """Return the seed of request number `count`, if it sets none, in an engine seeded with `seed`."""
    mixed = mix(mix(np.array([seed]).astype(np.uint64)) + np.uint64(count))
    return int(mixed.astype(np.int64)[0])
