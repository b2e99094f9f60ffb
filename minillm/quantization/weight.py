"""What every weight can do, however it is stored.  Lesson 05."""

from collections.abc import Iterable
from typing import Protocol, Self

import torch
from torch import Tensor


class Weight(Protocol):
    """A matrix [out, in] and maybe a bias [out]. Each storage format is a class of its own, one file each.

    `ops.linear`, `ops.embedding` and `ops.lm_head` look at the class: a format without a faster version of its own is
    dequantized. The loader asks a weight what it expects of a checkpoint and hands it that piece by piece, so nothing
    else knows the format. Projections that read the same input are one weight: a checkpoint's tensor fills a range of
    its output rows.
    """

    bias: Tensor | None  # [out]

    @classmethod
    def empty(cls, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Self:
        """A weight to be filled by `load` or `randomize`; dtype: of activations."""
        ...

    @property
    def shape(self) -> torch.Size:
        """(out, in)"""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """That of activations: `dequantize` gives it, and products have it."""
        ...

    def dequantize(self) -> Tensor:
        """The whole matrix."""
        ...

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Some output rows, dequantized: [n] int64 -> [n, in]."""
        ...

    def stored(self) -> list[Tensor]:
        """The tensors that hold it, the bias among them."""
        ...

    def expects(self, rows: range) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint that fill these output rows: the last part of the name -> shape."""
        ...

    def load(self, name: str, rows: range, pieces: Iterable[Tensor]) -> None:
        """Fill these output rows from one of those tensors, given in order in pieces of its first axis."""
        ...

    def randomize(self, generator: torch.Generator) -> None:
        """Random values that keep activations near 1, made where the weight lies."""
        ...


def copy_pieces(to: Tensor, pieces: Iterable[Tensor]) -> None:
    """Fill a tensor from pieces of its first axis, in order; they may have another dtype or lie elsewhere."""
    done = 0
    for piece in pieces:
        to[done : done + len(piece)].copy_(piece)
        done += len(piece)
