"""The collectives that connect the shards of a model on several GPUs; on one GPU they do nothing.

Every GPU (rank) holds some of the heads, of the MLP's inner columns and of the vocabulary, and computes with them what
`Model` computes for the whole model. A matrix that is split by rows gives complete results. `attention_out` and `down`
are split by columns, that is by their inputs, and give partial sums (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from typing import Protocol

from torch import Tensor


class Parallel(Protocol):
    """The ranks that hold the shards of one model. They call the same collectives in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x. It may be computed in place."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x [..., n], in the order of ranks: [..., size * n]."""
        ...

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        ...


class OneDevice(Parallel):
    """The whole model is here."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def least(self, number: int) -> int:
        return number
