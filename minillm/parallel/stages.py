"""The ranks of a pipeline: collectives within a stage, messages from stage to stage."""

from collections import deque

import torch.distributed as dist
from torch import Tensor

from minillm.model.parallel import PipelineStage

from .collectives import Group


class StageGroup(Group):
    """This process as one of the ranks of one stage. world: all ranks, those of the first stage first.

    `rank` and `size` are those in the stage. Making one is a collective of all ranks. Between GPUs, sums within a stage
    are NCCL's.
    """

    def __init__(self, world: Group, stages: int):
        size = world.size // stages
        super().__init__(world.rank % size, size)
        self.stage, self.number, self.entered = PipelineStage(world.rank // size, stages), world.rank, world.entered
        members = [dist.new_group(range(first, first + size)) for first in range(0, world.size, size)]
        self.members = members[self.stage.index]
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, x: Tensor) -> None:
        """As `Parallel.send`. It waits for the next stage if that has not yet taken as many as there are stages."""
        to = self.number + self.size
        with self._entered():
            if x.is_cuda:
                dist.send(x, to)
                return
            while len(self._sent) >= self.stage.count:
                self._sent.popleft()[1].wait()
            work = dist.isend(x, to)
            assert work is not None, "this process is one of the ranks"
            self._sent.append((x, work))  # its memory is read until it has been sent

    def receive(self, into: Tensor) -> Tensor:
        with self._entered():
            dist.recv(into, self.number - self.size)
        return into
