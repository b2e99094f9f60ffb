"""The protocols of all weights and of all storage formats.  Lesson 05."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from minillm.errors import ConfigError

from .activations import Activations


class Shard(NamedTuple):
    """The rows and columns of a checkpoint's matrix that a weight holds: one GPU's share of it."""

    rows: range
    columns: range

    def of(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Return the shard of a tensor. It is given and returned as slices of its first axis, in order."""
        if isinstance(pieces, Divisible):
            return pieces.part(self.rows, self.columns)
        return (piece[:, self.columns.start : self.columns.stop] for piece in self.rows_of(pieces))

    def rows_of(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the shard's rows of a tensor, with all columns."""
        if isinstance(pieces, Divisible):
            yield from pieces.part(self.rows)
            return
        start = 0
        for piece in pieces:
            first, end = max(self.rows.start - start, 0), min(self.rows.stop - start, len(piece))
            start += len(piece)
            if first < end:
                yield piece[first:end]


@runtime_checkable
class Divisible(Protocol):
    """A tensor of which a part can be read alone."""

    def part(self, rows: range, columns: range | None = None) -> Iterator[Tensor]:
        """Slices of these rows, with these columns; None: all."""
        ...


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

    def cut(self, shard: Shard) -> "Codes":
        """Return the codes of a shard. Raises ConfigError if its columns divide a group, or are stored in another
        order.
        """
        rows, columns = (slice(span.start, span.stop) for span in shard)
        zeros, order, divisor = self.zeros, self.order, self.global_scale
        scales = self.scales.expand(len(self.codes), -1)  # all rows of a checkpoint's tensor may share one
        inputs, groups = self.codes.shape[1], self.scales.shape[1]
        if len(shard.columns) < inputs:
            size = inputs // groups
            if groups > 1 and (columns.start % size or columns.stop % size):
                raise ConfigError(
                    f"inputs {columns.start} to {columns.stop - 1} do not begin and end with groups of {size} inputs, "
                    "which share a scale: divide the model between fewer GPUs, or quantize it with smaller groups"
                )
            if order is not None and not order.equal(torch.arange(inputs, device=order.device)):
                raise ConfigError(
                    "a matrix whose inputs are stored in another order (act-order, desc_act) cannot be divided "
                    "between GPUs by its inputs: quantize the model without it"
                )
            order = None
            if groups > 1:
                spans = slice(columns.start // size, columns.stop // size)
                scales, zeros = scales[:, spans], None if zeros is None else zeros[:, spans]
        return Codes(
            self.codes[rows, columns],
            scales[rows],
            None if zeros is None else zeros[rows],
            order,
            None if divisor is None else divisor[rows],
        )


class Weight(Protocol):
    """A matrix [out, in] and an optional bias [out]. Each storage format is a class in a file of its own.

    `ops.linear`, `ops.embedding` and `ops.lm_head` dispatch on the class; a format without an implementation of its own
    is dequantized. The loader passes the tensors of an unquantized checkpoint to a weight in pieces; codes from a
    quantized checkpoint or from a method are passed to `fill`. So no other code depends on the format. Projections with
    the same input are one weight: a tensor of a checkpoint then fills a range of its output rows.
    """

    bias: Tensor | None  # [out]
    input_scale: Tensor | None  # [1]: the scale of static activations
    format: "Format"

    @property
    def activations(self) -> Activations | None:
        """Return how the inputs of its product are quantized; None: they are not."""
        ...

    @property
    def shape(self) -> torch.Size:
        """(out, in)"""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations, of products, and of what `dequantize` returns."""
        ...

    def dequantize(self) -> Tensor:
        """Return the whole matrix [out, in], in `dtype`."""
        ...

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Dequantized output rows: [n] int64 -> [n, in]."""
        ...

    def stored(self) -> list[Tensor]:
        """Return all tensors that the weight consists of, including its bias."""
        ...

    def load(self, name: str, rows: range, pieces: Iterable[Tensor], shard: Shard | None = None) -> None:
        """Fill these output rows with a tensor of an unquantized checkpoint. pieces: slices of its first axis in order.

        name: "weight" or "bias". shard: what the rows hold of the tensor; None: all of it. It is quantized as the whole
        tensor would be. A bias belongs to the shard with the first column; for the others it is 0. Raises ConfigError
        if the format cannot divide its columns there.
        """
        ...

    def fill(self, rows: range, codes: Codes) -> None:
        """Fill these output rows with codes; an unquantized weight dequantizes them."""
        ...

    def read(self, rows: range) -> Codes | None:
        """Return what these output rows store; None for an unquantized weight."""
        ...

    def randomize(self, generator: torch.Generator) -> None:
        """Fill with random values that keep activations near 1, generated on the weight's device."""
        ...


class Format(Protocol):
    """A way to store weights: a class of weights with its parameters, such as the size of a group.  Lesson 05."""

    name: ClassVar[str]  # as in recipes
    simulated: ClassVar[str] = ""  # for a format that is only for measuring accuracy: why that is so

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Weight:
        """Return an uninitialized weight, to be filled by `load`, `fill` or `randomize`. dtype: of activations.

        Raises ConfigError if the format cannot store a matrix of this shape.
        """
        ...

    @property
    def activations(self) -> Activations | None:
        """Return how the inputs of products are quantized; None: they are not."""
        ...


def joined(pieces: Iterable[Tensor]) -> Tensor:
    """Slices of a tensor's first axis, each valid only until the next is read, as one tensor."""
    copies = [piece.clone() for piece in pieces]
    return torch.cat(copies) if copies else torch.empty(0)


def copy_pieces(to: Tensor, pieces: Iterable[Tensor]) -> None:
    """Fill a tensor from slices of its first axis, in order. They may have another dtype or device."""
    done = 0
    for piece in pieces:
        to[done : done + len(piece)].copy_(piece)
        done += len(piece)
