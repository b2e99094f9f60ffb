"""The unquantized format: one floating-point number per parameter.  Lesson 05."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .activations import Activations
from .quantized import check_not_static, empty_bias, fill_random_scale, input_scale, load_bias
from .weight import Codes, Format, Shard, Weight, copy_pieces


@dataclass(frozen=True)
class Dense(Format):
    """One number of the activations' dtype per parameter.

    activations: None, or how inputs are quantized, to compare a quantized weight with its dense twin.
    """

    name: ClassVar[str] = "dense"
    activations: Activations | None = None

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> "DenseWeight":
        if device.type == "cpu" and dtype == torch.float32 and out >= inputs:
            # Stored transposed: one row times a wide matrix streams memory faster along the outputs. With many rows
            # the layout does not matter.
            weight = torch.empty(inputs, out, dtype=dtype, device=device).t()
        else:
            weight = torch.empty(out, inputs, dtype=dtype, device=device)
        return DenseWeight(
            weight, empty_bias(out, bias, dtype, device), input_scale(self.activations, device), format=self
        )


@dataclass
class DenseWeight(Weight):
    """An unquantized matrix [out, in] with an optional bias [out]."""

    weight: Tensor
    bias: Tensor | None = None
    input_scale: Tensor | None = None
    format: Format = Dense()

    @property
    def activations(self) -> Activations | None:
        return self.format.activations

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
        return [each for each in (self.weight, self.bias, self.input_scale) if each is not None]

    def load(self, name: str, rows: range, pieces: Iterable[Tensor], shard: Shard | None = None) -> None:
        if name == "bias":
            return load_bias(self.bias, rows, pieces, shard)
        check_not_static(self.activations)
        if shard is not None:
            pieces = shard.of(pieces)
        copy_pieces(self.weight[rows.start : rows.stop], pieces)

    def fill(self, rows: range, codes: Codes) -> None:
        scales = codes.scales.to(torch.promote_types(self.weight.dtype, torch.float32))  # files have them in half
        self.weight[rows.start : rows.stop] = replace(codes, scales=scales).dequantize().to(self.weight)

    def read(self, rows: range) -> None:
        return None

    def randomize(self, generator: torch.Generator) -> None:
        for tensor in (self.weight, self.bias):
            if tensor is not None:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
        fill_random_scale(self.input_scale, self.activations)
