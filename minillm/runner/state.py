"""The state of running requests, one row per request.  Lesson 10.

On the device, a row holds a request's tokens, its block table and the inputs of captured steps. Therefore a step can be
launched before the previous step's tokens are read, and the same code runs prefills, chunks, decodes and resumed
requests. On the host, a row holds what launching a step needs to know about the request.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.config import MOST_AHEAD
from minillm.kv_cache.attention_sinks import missing
from minillm.request import MAX_LOGPROBS
from minillm.scheduler.step import NewRow, Step

# Parameters of sampling, with their neutral values.
PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
TRUNCATION = {"min_p": 0, "top_k": 0, "top_p": 1}
NEUTRAL = np.array([0, 0, 0, 1, 0], np.float32)  # greedy, without truncation and log-probabilities
MOST_K = 1 << 24  # the largest top_k; float32 holds all whole numbers up to it


class RowState:
    """The columns of all rows, on the device and on the host. The device has one more row, for padding.

    rows: the most requests at once. longest: the most tokens of a request, prompt and output. groups, blocks: the size
    of a row's block table.
    """

    def __init__(self, rows: int, longest: int, groups: int, blocks: int, block_size: int, device: torch.device):
        self.device, self.block_size = device, block_size

        def column(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = column(rows + 1, longest + 1)
        self.block_table = column(groups, rows + 1, blocks)
        self.position = column(rows + 1)  # of the token that a captured step runs next
        self.seed = column(rows + 1, dtype=torch.int64)
        self.parameters = column(rows + 1, 5, dtype=torch.float32)  # temperature, min_p, top_k, top_p, scored
        self.padding = rows
        # On the host: captured steps write each row's newest tokens here, at their positions modulo the ring's size,
        # and their log-probabilities (see `kernels.sampling.scored_sample`).
        self.arrived = self._on_host(rows + 1, MOST_AHEAD + 1, dtype=torch.int32)
        scores = rows + 1, MOST_AHEAD + 1, MAX_LOGPROBS + 1
        self.arrived_ids = self._on_host(*scores, dtype=torch.int32)
        self.arrived_scores = self._on_host(*scores, dtype=torch.float32)

        self.sampling = SamplingColumns(rows)
        self.prompt_length = np.zeros(rows, np.int64)
        self.logprobs = np.full(rows, -1, np.int32)  # how many the request asks for; -1: none
        self.prompt_logprobs = np.full(rows, -1, np.int32)

    @property
    def longest(self) -> int:
        """The most tokens of a request that a row has room for."""
        return self.tokens.shape[1] - 1

    def update(self, step: Step) -> None:
        """Apply the changes since the last step: new requests and block table entries."""
        if step.new_rows:
            self.fill(step.new_rows)
        for row, masks in step.masks.items():
            self.sampling.masks[row] = masks
        if step.masks:
            self.sampling.masked_from[step.rows] = step.ends - step.drafted
        if step.table_changes is not None:
            *entries, blocks = step.table_changes
            rows, columns, sent = self.send(*entries, blocks.ravel())
            self.block_table[:, rows, columns] = sent.view(blocks.shape).int()
        if step.drafts is not None:
            places, order = np.nonzero(step.drafts >= 0)
            positions = (step.ends - step.drafted)[places] + order
            self.store(step.rows[places], positions, self.to_device(step.drafts[places, order]))

    def fill(self, new_rows: Sequence[NewRow]) -> None:
        """Set the columns of rows that requests have just got."""
        for new in new_rows:
            row, count, params = new.row, len(new.tokens), new.params
            self.keep_tokens(count)
            self.tokens[row, :count] = torch.from_numpy(new.tokens).to(self.device, non_blocking=True)
            self.prompt_length[row] = new.prompt_length
            self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
            self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
            self.sampling.fill(new)
        seeds = np.array([new.seed for new in new_rows])
        rows, seeds_sent = self.send(np.array([new.row for new in new_rows]), seeds)
        self.seed[rows] = seeds_sent
        self.parameters[rows] = self.to_device(self._parameters([new.row for new in new_rows]))

    def _parameters(self, rows: Sequence[int]) -> np.ndarray:
        """The columns of `parameters` for these rows: [n, 5] float32.

        Rows whose logits are adjusted get no token from a captured step: they have the neutral values.
        """
        at = np.array(rows)
        found = np.concatenate([self.sampling.of(rows), self.logprobs[at, None] + 1], axis=1, dtype=np.float32)
        return np.where(self.sampling.general[at, None], NEUTRAL, found)

    def _on_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host that kernels can write to."""
        made = torch.zeros(shape, dtype=dtype)
        return made.pin_memory() if self.device.type == "cuda" else made

    def store(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> Tensor:
        """Write each row's new token [n] to its position in the row. Returns them as the next step's inputs.

        A missing token (-1) is stored as 0: its request is about to end, but steps that run ahead still look it up.
        """
        tokens = tokens.clamp(min=0)
        if len(rows):
            self.keep_tokens(int(positions.max()))
            self.tokens[self.send(rows, positions)] = tokens.to(torch.int32)
        return tokens

    def read(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Tokens [n] int64 that a captured step wrote to these positions of the rows; on a GPU, after it has run."""
        return self.arrived.numpy()[rows, positions % self.arrived.shape[1]].astype(np.int64)

    def read_scores(self, rows: np.ndarray, positions: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and log-probabilities, [n, count], that a captured step wrote with these tokens."""
        places = positions % self.arrived.shape[1]
        return self.arrived_ids.numpy()[rows, places, :count], self.arrived_scores.numpy()[rows, places, :count]

    def keep_tokens(self, count: int) -> None:
        """Make room for one token after the first `count` tokens of a row. Only streams outgrow a row."""
        if more := missing(self.tokens.shape[1], count):
            self.tokens = torch.nn.functional.pad(self.tokens, (0, more))

    def send(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Send index arrays to the device as int64, in one copy."""
        if self.device.type == "cpu":
            return tuple(torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays)
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False)).pin_memory()
        return packed.to(self.device, non_blocking=True).split([len(array) for array in arrays])

    def to_device(self, array: np.ndarray) -> Tensor:
        """Send an array to the device without waiting for the copy."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


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
        """The temperature, min_p, top_k and top_p of each row: [n, 4] float32."""
        columns = np.stack([self.temperature, *(self.shaping[name] for name in TRUNCATION)], axis=1)
        return columns[np.array(rows)].astype(np.float32)


def mix(z: Any) -> Any:
    """SplitMix64's output function (Steele et al. 2014); arrays of uint64 wrap without a warning."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
