"""The unquantized format: one floating-point number per parameter.  Lesson 05."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .weight import Weight, copy_pieces


@dataclass
class DenseWeight(Weight):
    """An unquantized matrix [out, in] with an optional bias [out]."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def empty(cls, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Self:
        if device.type == "cpu" and dtype == torch.float32 and out >= inputs:
            # Stored transposed: one row times a wide matrix streams memory faster along the outputs. With many rows
            # the layout does not matter.
            weight = torch.empty(inputs, out, dtype=dtype, device=device).t()
        else:
            weight = torch.empty(out, inputs, dtype=dtype, device=device)
        return cls(weight, torch.empty(out, dtype=dtype, device=device) if bias else None)

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def dequantize(self) -> Tensor:
        return self.weight

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.weight[rows]

    def stored(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def expects(self, rows: range) -> dict[str, tuple[int, ...]]:
        expected: dict[str, tuple[int, ...]] = {"weight": (len(rows), self.shape[1])}
        return expected if self.bias is None else expected | {"bias": (len(rows),)}

    def load(self, name: str, rows: range, pieces: Iterable[Tensor]) -> None:
        copy_pieces(getattr(self, name)[rows.start : rows.stop], pieces)

    def randomize(self, generator: torch.Generator) -> None:
        for tensor in self.stored():
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
