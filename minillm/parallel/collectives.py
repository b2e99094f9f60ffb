"""The collectives of ranks in processes of their own: NCCL between GPUs, gloo between CPUs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from minillm.errors import RankFailed
from minillm.kv_cache.split_pages import BlockShare
from minillm.model.parallel import Inboxes, Parallel
from minillm.model.replaceable import PARTS

if TYPE_CHECKING:
    from minillm.kernels.peers import Reducer

ROWS, WORDS = 2048, 4096  # of all ranks, in sums that kernels compute themselves; NCCL computes larger ones
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network interface between processes of one machine


class PeerLost(RankFailed):
    """A collective failed, because another rank has ended or left the order of calls."""


class Group(Parallel):
    """This process as one of the ranks, all of which share every layer.

    `entered` counts its collectives: a rank that hangs falls behind.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.number = rank  # among all ranks
        self.entered = 0
        self._dividing: dist.ProcessGroup | None = None  # the ranks that divide cache blocks with this one
        self.waiting = False  # whether it is in a collective now
        self.members: dist.ProcessGroup | None = None  # those that share its layers; None: all ranks
        self.reducer: Reducer | None = None  # the kernels' own sums of few rows, between GPUs that are connected

    @classmethod
    def join(cls, rank: int, size: int, meeting: str, device: torch.device) -> "Group":
        """Wait for the other ranks. meeting: a new file's path, which all of them are given."""
        store = dist.FileStore(meeting, size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
            group = cls(rank, size)
            if group._reach_each_other():
                from minillm.kernels.peers import Reducer

                rows = ROWS // size  # each of which goes to all ranks
                inbox, peers = group.shared(2, size, rows, WORDS)
                group.reducer = Reducer(rank, inbox, peers, torch.zeros(rows, dtype=torch.int32, device=device))
            return group
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return cls(rank, size)

    @property
    def connected(self) -> bool:
        return self.reducer is not None

    def _reach_each_other(self) -> bool:
        """Return whether all ranks' GPUs can write to each other's memory. A collective."""
        mine = torch.cuda.current_device()
        others = range(mine - self.rank, mine - self.rank + self.size)  # the GPUs of all ranks: see `executor.devices`
        here = all(torch.cuda.can_device_access_peer(mine, other) for other in others if other != mine)
        return bool(self.least(int(here)))

    def inboxes(self, sums: int, width: int) -> Inboxes:
        own, peers = self.shared(sums, self.size, width)
        return Inboxes(own, peers, torch.zeros(1, dtype=torch.int32, device=own.device))

    def shared(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Zeros int64 that all ranks can write to, and the addresses [ranks] int64 of all ranks'."""
        device = torch.device("cuda", torch.cuda.current_device())
        own = symmetric_memory.empty(*shape, dtype=torch.int64, device=device).zero_()
        memory = symmetric_memory.rendezvous(own, dist.group.WORLD)
        torch.cuda.synchronize()
        self.least(0)  # all are zeros before anything is sent
        return own, torch.tensor(memory.buffer_ptrs, dtype=torch.int64, device=device)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        if self.reducer is None or not self.reducer.takes(x):
            return None
        return self.reducer.add_rms_norm(x, residual, norm, eps)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        if self.reducer is not None and self.reducer.takes(x):
            return self.reducer.all_reduce(x)
        if x.is_cuda:
            with self._entered():
                dist.all_reduce(x, group=self.members)
            return x
        return PARTS.all_reduce(x, self)

    def all_gather(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        every = x.new_empty(self.size, *x.shape)
        with self._entered():
            dist.all_gather(list(every.unbind()), x.contiguous(), group=self.members)
        return every.movedim(0, -2).flatten(-2)

    def exchange(self, x: Tensor, to: int, source: int) -> Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        first = self.number - self.rank
        with self._entered():
            sending = dist.isend(x.contiguous(), first + to)
            dist.recv(received, first + source)
            if sending is not None:
                sending.wait()
        return received

    def least(self, number: int) -> int:
        smallest = torch.tensor(number, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        with self._entered():
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def split_pages(self, ranks: int) -> None:
        """Divide cache blocks between each `ranks` ranks that follow each other. A collective."""
        self.share = BlockShare(self.rank % ranks, ranks)
        for first in range(0, dist.get_world_size(), ranks) if ranks > 1 else ():
            members = dist.new_group([*range(first, first + ranks)])
            if first <= self.number < first + ranks:
                self._dividing = members

    def all_gather_pages(self, x: Tensor) -> Tensor:
        every = x.new_empty(self.share.of, *x.shape)
        with self._entered():
            dist.all_gather(list(every.unbind()), x.contiguous(), group=self._dividing)
        return every

    def exchange_pages(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        with self._entered():
            dist.all_to_all_single(received, x.contiguous(), group=self._dividing)
        return received

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self.entered += 1
        self.waiting = True
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"a collective failed: {str(error).splitlines()[0]}") from error
        finally:
            self.waiting = False
