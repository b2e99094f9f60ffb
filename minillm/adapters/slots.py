"""The adapters that the device holds: one table of factors for each weight, with a slot for each adapter.

On one GPU, A of up to FAR slots lies beneath its dense weight, in the same memory, so that one product yields both. All
other tables are views of one buffer, in which a slot is one row. An adapter is made ready once, on the host, and comes
into a slot with a copy for each table beneath a weight and one for the buffer, which the steps launched before them do
not see.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minillm.config import DeviceConfig
from minillm.errors import ConfigError
from minillm.model import Model
from minillm.model.modules import Module, modules, shard
from minillm.ops.signatures import Adapted, LowRank
from minillm.quantization import DenseWeight, Shard, Weight
from minillm.scheduler.step import NewRow

from .peft import Adapter, read_adapter

NEAR, FAR = 16, 64  # slots that a product with few tokens reaches; with more slots, A is multiplied on its own
# Of A beneath a weight that a product reads: more take longer than a launch that reads what it needs.
MOST_BYTES = 32 << 20


class AdapterSlots:
    """Slots for adapters of one model, and the slot that each row's request uses.

    rows: the most requests at once. slots: the most adapters in one step. rank: the highest of any adapter. beneath:
    whether A lies beneath weights, which then move to other memory; None: on a GPU, with up to FAR slots. Quantized
    weights, and those that are divided between ranks, stay. Raises ConfigError for a model whose matrices no adapter
    fits, and if the device has too little memory.
    """

    def __init__(self, model: Model, rows: int, slots: int, rank: int, beneath: bool | None = None):
        if model.config.rotations:
            raise ConfigError(
                "adapters do not fit a model that was quantized with --rotate: its matrices have rotated inputs; "
                "quantize the model without it"
            )
        self.rank, self.device, self.dtype = rank, model.device, model.dtype
        self._ranks = model.parallel.rank, model.parallel.size
        weights = {address: weight for address, weight in model.addressed().items() if "." in address}
        self._modules = {address: parts for address, parts in modules(model.config).items() if address in weights}
        sizes = {name: len(parts) * rank for name, parts in self._modules.items()}  # rows of A
        if beneath is None:
            on_gpu = self.device.type == "cuda" and not model.ops.exact and self.dtype != torch.float64
            beneath = on_gpu and slots <= FAR and model.parallel.size == 1
        reaches = sorted({min(NEAR, slots), slots})
        grown = {
            name: weight
            for name, weight in weights.items()
            if beneath and isinstance(weight, DenseWeight) and _has_room(weight, sizes[name], reaches[0])
        }
        lengths = {("down", name): sizes[name] * each.shape[1] for name, each in grown.items()}
        lengths |= {("down", name): sizes[name] * each.shape[1] for name, each in weights.items()}
        lengths |= {("up", name): each.shape[0] * rank for name, each in weights.items()}
        ends = np.cumsum([0, *lengths.values()]).tolist()
        self.size, first = ends[-1], ends[len(grown)]
        self._spans = {each: slice(*span) for each, span in zip(lengths, pairwise(ends), strict=True)}
        self.reaches = tuple(reaches) if grown else (slots,)
        self._beneath: dict[int, dict[int, Weight]] = {reach: {} for reach in self.reaches}
        try:
            buffer = torch.zeros(slots + 1, self.size - first, dtype=self.dtype, device=self.device)
            downs = {name: self._grow(weight, slots, sizes[name]) for name, weight in grown.items()}
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"max_loras={slots} adapters of max_lora_rank={rank} need "
                f"{(slots + 1) * self.size * self.dtype.itemsize / 2**30:.2f} GiB, more than {self.device} has free: "
                "lower one of them"
            ) from error
        # Each table [slots + 1, n], and the part of `_ready` that comes into a slot of it.
        self._tables = [(down.flatten(1), self._spans["down", name]) for name, down in downs.items()]
        self._tables.append((buffer, slice(first, self.size)))
        self.factors: dict[int, LowRank] = {}
        for name, weight in weights.items():
            ends = np.cumsum([len(self._shard(part).rows) for part in self._modules[name]]).tolist()
            down, up = (
                buffer[:, span.start - first : span.stop - first] if span.start >= first else downs[name].flatten(1)
                for span in (self._spans["down", name], self._spans["up", name])
            )
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
        for name, parts in self._modules.items():
            shards = [self._shard(part) for part in parts]
            down = row[self._spans["down", name]].view(len(parts), self.rank, -1)
            ups = row[self._spans["up", name]].view(-1, self.rank).split([len(each.rows) for each in shards])
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
                for table, span in self._tables:
                    table[slot].copy_(self._ready[load][span], non_blocking=True)
                self._held[slot] = load
        if changed:
            rows = np.array([new.row for new in changed])
            sent = torch.from_numpy(np.stack([rows, self.of_row[rows]]))
            if self.device.type == "cuda":
                sent = sent.pin_memory().to(self.device, non_blocking=True)
            self._of_row[sent[0]] = sent[1]

    def reach(self, rows: np.ndarray) -> int:
        """Return which of `reaches` has the slots of all these rows; 0: no row has an adapter."""
        highest = self.reaches[-1] if self._all_used else int(self.of_row[rows].max(initial=0))
        return next(each for each in self.reaches if each >= highest) if highest else 0

    @contextmanager
    def as_if_used(self) -> Iterator[None]:
        """Have all rows count as ones with an adapter inside the block: steps then take the memory that these take."""
        self._all_used = True
        try:
            yield
        finally:
            self._all_used = False

    def of_tokens(self, rows: Tensor, reach: int) -> Adapted | None:
        """Return the adapters of tokens, from their rows [tokens] int64 and what `reach` says of them; None: none."""
        return Adapted(self._of_row[rows], self.factors, self._beneath[reach]) if reach else None

    def _grow(self, weight: DenseWeight, slots: int, size: int) -> Tensor:
        """Move a weight to memory with room beneath it; return A of all slots, [slots + 1, size, in].

        Slot 0, which is not read, is the weight's last rows.
        """
        rows, columns = weight.shape
        both = torch.zeros(rows + slots * size, columns, dtype=weight.dtype, device=self.device)
        both[:rows] = weight.weight
        weight.weight, bias = both[:rows], None
        if weight.bias is not None:
            bias = torch.cat((weight.bias, weight.bias.new_zeros(slots * size)))
        for reach, weights in self._beneath.items():
            if _has_room(weight, size, reach):
                some = slice(rows + reach * size)
                weights[id(weight)] = DenseWeight(both[some], None if bias is None else bias[some])
        return both[rows - size :].unflatten(0, (-1, size))

    def _shard(self, part: Module) -> Shard:
        return shard(part, *self._ranks)


def _has_room(weight: DenseWeight, size: int, slots: int) -> bool:
    """Return whether a product can read `size` rows of A for each slot beneath the weight.

    The weight needs as many rows, too: its last ones stand in for slot 0.
    """
    few = slots * size * weight.weight[0].nbytes <= MOST_BYTES
    return few and weight.activations is None and len(weight.weight) >= size


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
