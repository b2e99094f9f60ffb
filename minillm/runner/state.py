"""The state of running requests, one row per request.  Lesson 10.

On the device, a row holds a request's tokens, its block table and the inputs of captured steps. Therefore a step can be
launched before the previous step's tokens are read, and the same code runs prefills, chunks, decodes and resumed
requests. On the host, a row holds what launching a step needs to know about the request.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.adapters.slots import AdapterSlots
from minillm.config import MOST_AHEAD
from minillm.kv_cache.attention_sinks import missing
from minillm.request_values import MAX_LOGPROBS
from minillm.scheduler.step import NewRow, Step

from .embedded_rows import EmbeddedRows
from .sampling_columns import SamplingColumns

NEUTRAL = np.array([0, 0, 0, 1, 0], np.float32)  # greedy, without truncation and log-probabilities


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
        self.seed = column(rows + 1, dtype=torch.int64)
        self.parameters = column(rows + 1, 5, dtype=torch.float32)  # temperature, min_p, top_k, top_p, scored
        self.lengths = column(rows + 1)  # tokens that the device has counted, where it drafts itself
        self.padding = rows
        self.adapters: AdapterSlots | None = None  # those that rows may have
        # On the host: captured steps write each row's newest tokens here, at their positions modulo the ring's size,
        # and their log-probabilities (see `kernels.sampling.scored_sample`).
        self.arrived = self._on_host(rows + 1, MOST_AHEAD + 1, dtype=torch.int32)
        self.accepted = self._on_host(rows + 1, MOST_AHEAD + 1, dtype=torch.int32)  # see `device_drafts`
        scores = rows + 1, MOST_AHEAD + 1, MAX_LOGPROBS + 1
        self.arrived_ids = self._on_host(*scores, dtype=torch.int32)
        self.arrived_scores = self._on_host(*scores, dtype=torch.float32)

        self.sampling = SamplingColumns(rows)
        self.embedded = EmbeddedRows()
        self.prompt_length = np.zeros(rows, np.int64)
        self.logprobs = np.full(rows, -1, np.int32)  # how many the request asks for; -1: none
        self.prompt_logprobs = np.full(rows, -1, np.int32)

    @property
    def longest(self) -> int:
        """Return the most tokens of a request that a row has room for."""
        return self.tokens.shape[1] - 1

    def update(self, step: Step) -> None:
        """Apply the changes since the last step: new requests and block table entries."""
        if step.new_rows:
            self.fill(step.new_rows)
            if self.adapters is not None:
                self.adapters.occupy(step.new_rows)
        for row, masks in step.masks.items():
            self.sampling.masks[row] = masks
        if step.masks:
            self.sampling.masked_from[step.rows] = step.ends - step.drafted
        if step.table_changes is not None:
            *entries, blocks = step.table_changes
            rows, columns, sent = self.send(*entries, blocks.ravel())
            self.block_table[:, rows, columns] = sent.view(blocks.shape).int()

    def store_drafts(self, step: Step) -> None:
        """Write the step's drafts, if it has any, to their positions in its rows."""
        if step.drafts is not None:
            i, order = np.nonzero(step.drafts >= 0)
            self.store(step.rows[i], (step.ends - step.drafted)[i] + order, self.to_device(step.drafts[i, order]))

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
            self.embedded.fill(new)
        seeds = np.array([new.seed for new in new_rows])
        rows, seeds_sent = self.send(np.array([new.row for new in new_rows]), seeds)
        self.seed[rows] = seeds_sent
        self.parameters[rows] = self.to_device(self._parameters([new.row for new in new_rows]))

    def _parameters(self, rows: Sequence[int]) -> np.ndarray:
        """Return the columns of `parameters` for these rows: [n, 5] float32.

        Rows whose logits are adjusted get no token from a captured step: they have the neutral values.
        """
        at = np.array(rows)
        values = np.concatenate([self.sampling.of(rows), self.logprobs[at, None] + 1], axis=1, dtype=np.float32)
        return np.where(self.sampling.general[at, None], NEUTRAL, values)

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
        """Return tokens [n] int64 that a captured step wrote to these positions of the rows; on a GPU, after it has
        run.
        """
        return self.arrived.numpy()[rows, positions % self.arrived.shape[1]].astype(np.int64)

    def read_scores(self, rows: np.ndarray, positions: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and log-probabilities, [n, count], that a captured step wrote with these tokens."""
        at = positions % self.arrived.shape[1]
        return self.arrived_ids.numpy()[rows, at, :count], self.arrived_scores.numpy()[rows, at, :count]

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
