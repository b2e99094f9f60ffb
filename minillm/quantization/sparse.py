"""Pruned weights: the smallest are 0, and only the others are stored.  Lesson 08.

    sparse24   2:4: of four neighbors along the inputs, the two largest magnitudes stay
               (Mishra et al. 2021, "Accelerating sparse deep neural networks", section 3)
    pruned     unstructured: a share of each matrix is 0, its smallest magnitudes wherever they are
               (Han et al. 2015, "Learning both weights and connections for efficient neural networks", section 3)

A checkpoint holds the values that stay and where they are: 2:4 two values and four bits for four weights, half of a
16-bit matrix plus one bit a weight; unstructured a bit for each weight.

What hardware gains: GPUs from Ampere on have tensor cores for 2:4, which pay for products of many rows (at batch 1,280
and more on an H100, pytorch/ao#1460), since few rows wait for memory. Nothing reads unstructured zeros faster at these
shares. Here both are simulated: a file is smaller, but the loaded matrix holds its zeros, and products take as long.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.values import as_float, shown

from .activations import Activations
from .quantized import QuantizedWeight, check_no_zeros, empty_bias
from .weight import Codes, Format

KEPT, OF = 2, 4  # of 2:4 sparsity


@dataclass(frozen=True)
class Sparse(Format):
    """The base of both formats."""

    simulated: ClassVar[str] = "files are smaller, but loaded weights hold their zeros, and products take as long"

    @property
    def activations(self) -> Activations | None:
        return None

    @abstractmethod
    def kept(self, matrix: Tensor) -> Tensor:
        """matrix [rows, in], a whole module -> which of its weights stay, [rows, in] bool. Of equal ones: the first."""

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> "SparseWeight":
        values = torch.empty(out, inputs, dtype=dtype, device=device)
        return SparseWeight(self, dtype, empty_bias(out, bias, dtype, device), None, values)


@dataclass(frozen=True)
class Sparse24(Sparse):
    """Two of four neighbors are 0. Simulated: for accuracy, and the size of files."""

    name: ClassVar[str] = "sparse24"

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> "SparseWeight":
        if inputs % OF:
            raise ConfigError(
                f"sparse24 prunes groups of {OF} inputs, which do not divide this model's matrices of {inputs}: "
                "use pruned for them in a recipe"
            )
        return super().empty(out, inputs, bias, dtype=dtype, device=device)

    def kept(self, matrix: Tensor) -> Tensor:
        sizes = matrix.abs().unflatten(-1, (-1, OF))
        largest = sizes.argsort(dim=-1, descending=True, stable=True)[..., :KEPT]
        return torch.zeros_like(sizes, dtype=torch.bool).scatter_(-1, largest, True).flatten(-2)


@dataclass(frozen=True)
class Pruned(Sparse):
    """A share of each matrix is 0. Simulated: for accuracy, and the size of files.

    sparsity  the share of weights that become 0, between 0 and 1
    """

    name: ClassVar[str] = "pruned"
    sparsity: float = 0.5

    def __post_init__(self) -> None:
        share = as_float(self.sparsity)
        if share is None or not 0 < share < 1:
            raise ConfigError(f"sparsity must be a number between 0 and 1, not {shown(self.sparsity)}")

    def kept(self, matrix: Tensor) -> Tensor:
        count = matrix.numel() - round(self.sparsity * matrix.numel())
        largest = matrix.abs().flatten().argsort(dim=0, descending=True, stable=True)[:count]
        kept = torch.zeros(matrix.numel(), dtype=torch.bool, device=matrix.device)
        return kept.index_fill_(0, largest, True).view_as(matrix)


@dataclass
class SparseWeight(QuantizedWeight):
    """A matrix [out, in] with many zeros, which are held like its other values, and an optional bias [out]."""

    values: Tensor

    @property
    def needs_whole_module(self) -> bool:
        return True

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def tensors(self) -> list[Tensor | None]:
        return [self.values]

    def dequantize(self) -> Tensor:
        return self.values

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.values[rows]

    def rows(self, which: Tensor | slice) -> Codes:
        return of_values(self.values[which])

    def fill(self, rows: range, codes: Codes) -> None:
        check_no_zeros(codes, self.format.name)
        self.values[rows.start : rows.stop] = codes.dequantize().to(self.values)

    def round(self, weight: Tensor) -> Codes:
        assert isinstance(self.format, Sparse)
        return of_values(weight.masked_fill(~self.format.kept(weight), 0))

    def randomize_codes(self, generator: torch.Generator) -> None:
        self.values.normal_(0.0, self.shape[1] ** -0.5, generator=generator)
        self.values.copy_(self.round(self.values).codes)


def of_values(values: Tensor) -> Codes:
    """Unquantized rows [rows, in] as codes whose scale is 1."""
    return Codes(values, values.new_ones(len(values), 1))
