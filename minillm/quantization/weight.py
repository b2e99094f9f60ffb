"""The protocol of all weights, independent of their format.  Lesson 05."""

from collections.abc import Iterable
from typing import Protocol, Self

import torch
from torch import Tensor


class Weight(Protocol):
    """A matrix [out, in] and an optional bias [out]. Each storage format is a class in a file of its own.

    `ops.linear`, `ops.embedding` and `ops.lm_head` dispatch on the class; a format without an implementation of its own
    is dequantized. The loader asks a weight which tensors of a checkpoint it expects, and passes them to it in pieces,
    so no other code depends on the format. Projections with the same input are one weight: a tensor of a checkpoint
    then fills a range of its output rows.
    """

    bias: Tensor | None  # [out]

    @classmethod
    def empty(cls, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Self:
        """An uninitialized weight, to be filled by `load` or `randomize`. dtype: of activations."""
        ...

    @property
    def shape(self) -> torch.Size:
        """(out, in)"""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, of products, and of what `dequantize` returns."""
        ...

    def dequantize(self) -> Tensor:
        """The whole matrix [out, in], in `dtype`."""
        ...

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Dequantized output rows: [n] int64 -> [n, in]."""
        ...

    def stored(self) -> list[Tensor]:
        """All tensors that the weight consists of, including its bias."""
        ...

    def expects(self, rows: range) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint that fill these output rows: last part of the name -> shape."""
        ...

    def load(self, name: str, rows: range, pieces: Iterable[Tensor]) -> None:
        """Fill these output rows from one of those tensors. pieces: slices of its first axis, in order."""
        ...

    def randomize(self, generator: torch.Generator) -> None:
        """Fill with random values that keep activations near 1, generated on the weight's device."""
        ...


def copy_pieces(to: Tensor, pieces: Iterable[Tensor]) -> None:
    """Fill a tensor from slices of its first axis, in order. They may have another dtype or device."""
    done = 0
    for piece in pieces:
        to[done : done + len(piece)].copy_(piece)
        done += len(piece)
