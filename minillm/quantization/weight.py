"""The protocols of all weights and of all storage formats.  Lesson 05."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .activations import Activations


@dataclass(frozen=True)
class Codes:
    """Quantized rows as methods produce them and as checkpoints are converted to.  Lesson 05.

        weight = (codes - zeros) * scales / global_scale,   one scale and one zero point for each group of inputs

    Codes are signed: int4 has -8 to 7, whatever a file adds to them. Those of FP4 are its values.
    """

    codes: Tensor  # [rows, in]: int8, or float8_e4m3fn
    scales: Tensor  # [rows, groups]; one group: the whole row
    zeros: Tensor | None = None  # [rows, groups] int8; None: all are 0
    order: Tensor | None = None  # [in] int64: the input that each column multiplies; None: column i has input i
    global_scale: Tensor | None = None  # [rows, 1], what NVFP4's scales are divided by; None: 1

    def dequantize(self) -> Tensor:
        """[rows, in], in the dtype of the scales, its columns in the order of the inputs."""
        rows, inputs = self.codes.shape
        scales = self.scales if self.global_scale is None else self.scales / self.global_scale.to(self.scales)
        grouped = self.codes.to(scales.dtype).view(rows, scales.shape[1], -1)
        if self.zeros is not None:
            grouped = grouped - self.zeros.to(grouped.dtype)[..., None]
        weight = (grouped * scales[..., None]).view(rows, inputs)
        return weight if self.order is None else weight[:, self.order.argsort()]


class Weight(Protocol):
    """A matrix [out, in] and an optional bias [out]. Each storage format is a class in a file of its own.

    `ops.linear`, `ops.embedding` and `ops.lm_head` dispatch on the class; a format without an implementation of its own
    is dequantized. The loader asks a weight which tensors of an unquantized checkpoint it expects, and passes them to
    it in pieces; codes from a quantized checkpoint or from a method are passed to `fill`. So no other code depends on
    the format. Projections with the same input are one weight: a tensor of a checkpoint then fills a range of its
    output rows.
    """

    bias: Tensor | None  # [out]
    input_scale: Tensor | None  # [1]: the scale of static activations
    format: "Format"

    @property
    def activations(self) -> Activations | None:
        """How the inputs of its product are quantized; None: they are not."""
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
        """The tensors of an unquantized checkpoint that fill these output rows: last part of the name -> shape."""
        ...

    def load(self, name: str, rows: range, pieces: Iterable[Tensor]) -> None:
        """Fill these output rows from one of those tensors. pieces: slices of its first axis, in order."""
        ...

    def fill(self, rows: range, codes: Codes) -> None:
        """Fill these output rows with codes; an unquantized weight dequantizes them."""
        ...

    def read(self, rows: range) -> Codes | None:
        """What these output rows store; None for an unquantized weight."""
        ...

    def randomize(self, generator: torch.Generator) -> None:
        """Fill with random values that keep activations near 1, generated on the weight's device."""
        ...


class Format(Protocol):
    """How weights are stored: a class of weights with its parameters, such as the size of a group.  Lesson 05."""

    name: ClassVar[str]  # as in recipes
    simulated: ClassVar[str] = ""  # for a format that is only for measuring accuracy: why that is so

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Weight:
        """An uninitialized weight, to be filled by `load`, `fill` or `randomize`. dtype: of activations.

        Raises ConfigError if the format cannot store a matrix of this shape.
        """
        ...

    @property
    def activations(self) -> Activations | None:
        """How the inputs of products are quantized; None: they are not."""
        ...


def joined(pieces: Iterable[Tensor]) -> Tensor:
    """Slices of a tensor's first axis, each valid only until the next is read, as one tensor."""
    found = [piece.clone() for piece in pieces]
    return torch.cat(found) if found else torch.empty(0)


def copy_pieces(to: Tensor, pieces: Iterable[Tensor]) -> None:
    """Fill a tensor from slices of its first axis, in order. They may have another dtype or device."""
    done = 0
    for piece in pieces:
        to[done : done + len(piece)].copy_(piece)
        done += len(piece)
