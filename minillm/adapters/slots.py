"""The adapters that the device holds: one table of factors for each weight, with a slot for each adapter.

All tables are views of one buffer, in which a slot is one row. So an adapter is made ready once, on the host, and comes
into a slot with one copy, which the steps launched before it do not see.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from minillm.config import DeviceConfig
from minillm.errors import ConfigError
from minillm.model import Model
from minillm.model.modules import Module, modules, shard
from minillm.ops.signatures import Adapted, LowRank
from minillm.quantization import Shard
from minillm.scheduler.step import NewRow

from .peft import Adapter, read_adapter


class AdapterSlots:
    """Slots for adapters of one model, and the slot that each row's request uses.

    rows: the most requests at once. slots: the most adapters in one step. rank: the greatest of a factor. Raises
    ConfigError for a model whose matrices no adapter fits, and if the device has too little memory.
    """

    def __init__(self, model: Model, rows: int, slots: int, rank: int):
        if model.config.rotations:
            raise ConfigError(
                "adapters do not fit a model that was quantized with --rotate: its matrices have rotated inputs; "
                "quantize the model without it"
            )
        self.rank, self.device, self.dtype = rank, model.device, model.dtype
        self._ranks = model.parallel.rank, model.parallel.size
        weights = {address: weight for address, weight in model.addressed().items() if "." in address}
        self._modules = {address: parts for address, parts in modules(model.config).items() if address in weights}
        sizes = [
            (len(self._modules[name]) * rank * each.shape[1], each.shape[0] * rank) for name, each in weights.items()
        ]
        self.size = sum(map(sum, sizes))
        try:
            self._buffer = torch.zeros(slots + 1, self.size, dtype=self.dtype, device=self.device)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"max_loras={slots} adapters of max_lora_rank={rank} need "
                f"{(slots + 1) * self.size * self.dtype.itemsize / 2**30:.2f} GiB, more than {self.device} has free: "
                "lower one of them"
            ) from error
        self.factors: dict[int, LowRank] = {}
        at = 0
        for (address, weight), (downs, ups) in zip(weights.items(), sizes, strict=True):
            down, up = self._buffer[:, at : at + downs], self._buffer[:, at + downs : at + downs + ups]
            at += downs + ups
            ends = np.cumsum([len(self._shard(part).rows) for part in self._modules[address]]).tolist()
            down, up = down.unflatten(1, (-1, weight.shape[1])), up.unflatten(1, (-1, rank))
            self.factors[id(weight)] = LowRank(down, up, tuple(ends))
        self._held = [0] * (slots + 1)  # the load in each slot
        self._ready: dict[int, Tensor] = {}  # of each load, what its slot's row will be, on the host
        self.of_row = np.zeros(rows + 1, np.int64)  # slots; the last row is for padding
        self._of_row = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)
        self._all_used = False

    def add(self, load: int, adapter: Adapter) -> None:
        """Read an adapter's factors, for rows whose requests name this load.

        Raises ConfigError if its rank is too great, before any is read, and if it is damaged. Safe while another thread
        runs steps, none of which has a row with this load yet.
        """
        if adapter.rank > self.rank:
            raise ConfigError(
                f"adapter {adapter.directory} has rank {adapter.rank}, and max_lora_rank={self.rank}: raise it"
            )
        row = torch.zeros(self.size, dtype=self.dtype)
        at = 0
        for parts in self._modules.values():
            shards = [self._shard(part) for part in parts]
            inputs, outputs = len(shards[0].columns), sum(len(each.rows) for each in shards)
            down = row[at : at + len(parts) * self.rank * inputs].view(len(parts), self.rank, inputs)
            at += down.numel()
            ups = row[at : at + outputs * self.rank].view(outputs, self.rank).split([len(each.rows) for each in shards])
            at += outputs * self.rank
            for index, (part, held) in enumerate(zip(parts, shards, strict=True)):
                if part.name in adapter.parts:
                    a, b = adapter.parts[part.name].read()
                    down[index, : len(a)] = a[:, held.columns.start : held.columns.stop]
                    ups[index][:, : len(a)] = b[held.rows.start : held.rows.stop]
        self._ready[load] = row.pin_memory() if self.device.type == "cuda" else row

    def remove(self, load: int) -> None:
        """Forget an adapter that no request uses or will use."""
        self._ready.pop(load, None)

    def occupy(self, new_rows: Sequence[NewRow]) -> None:
        """Note the slots of rows that requests have just got, and bring their adapters there."""
        changed = [new for new in new_rows if self.of_row[new.row] != new.adapter[1] or new.adapter[1]]
        for new in changed:
            load, slot = new.adapter
            self.of_row[new.row] = slot
            if slot and self._held[slot] != load:
                self._buffer[slot].copy_(self._ready[load], non_blocking=True)
                self._held[slot] = load
        if changed:
            rows = np.array([new.row for new in changed])
            sent = torch.from_numpy(np.stack([rows, self.of_row[rows]]))
            if self.device.type == "cuda":
                sent = sent.pin_memory().to(self.device, non_blocking=True)
            self._of_row[sent[0]] = sent[1]

    def used_by(self, rows: np.ndarray) -> bool:
        """Return whether any of these rows has an adapter."""
        return self._all_used or bool(self.of_row[rows].any())

    @contextmanager
    def as_if_used(self) -> Iterator[None]:
        """Have all rows count as ones with an adapter inside the block: steps then take the memory that these take."""
        self._all_used = True
        try:
            yield
        finally:
            self._all_used = False

    def of_tokens(self, rows: Tensor) -> Adapted:
        """Return the adapters of tokens, from their rows [tokens] int64."""
        return Adapted(self._of_row[rows], self.factors)

    def _shard(self, part: Module) -> Shard:
        return shard(part, *self._ranks)


def loaded(model: Model, config: DeviceConfig) -> AdapterSlots | None:
    """Slots with the adapters that the options name, whose loads are 1, 2 and so on; None: there are to be none.

    Raises ConfigError.
    """
    if not config.adapter_slots:
        return None
    adapters = [read_adapter(directory, model.config) for _, directory in config.adapters]
    rank = config.max_lora_rank or max((each.rank for each in adapters), default=16)
    slots = AdapterSlots(model, config.max_num_seqs, config.adapter_slots, rank)
    for load, adapter in enumerate(adapters, 1):
        slots.add(load, adapter)
    return slots
