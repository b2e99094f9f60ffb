"""The collectives of ranks in processes of their own: NCCL between GPUs, gloo between CPUs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.errors import RankFailed
from minillm.model.parallel import Parallel

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network interface between processes of one machine


class PeerLost(RankFailed):
    """A collective failed, because another rank has ended or left the order of calls."""


class Group(Parallel):
    """This process's place among the ranks. `entered` counts its collectives: a rank that hangs falls behind."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.entered = 0

    @classmethod
    def join(cls, rank: int, size: int, meeting: str, device: torch.device) -> "Group":
        """Wait for the other ranks. meeting: a new file's path, which all of them are given."""
        store = dist.FileStore(meeting, size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return cls(rank, size)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            with self._entered():
                dist.all_reduce(x)
            return x
        # Added in the order of ranks: the sum of an element does not depend on where in the tensor it is.
        dtype = torch.promote_types(x.dtype, torch.float32)
        first, *others = self._gathered(x)
        found = first.to(dtype, copy=True)
        for other in others:
            found += other
        return found.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gathered(x).movedim(0, -2).flatten(-2)

    def least(self, number: int) -> int:
        found = torch.tensor(number, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        with self._entered():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def _gathered(self, x: Tensor) -> Tensor:
        """All ranks' x: [size, *x.shape]."""
        found = x.new_empty(self.size, *x.shape)
        with self._entered():
            dist.all_gather(list(found.unbind()), x.contiguous())
        return found

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self.entered += 1
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"a collective failed: {str(error).splitlines()[0]}") from error
