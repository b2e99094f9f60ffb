"""Eight bits per parameter, and a scale for each output channel.  Lesson 05.

    code = round(weight / scale),   scale = max |weight| of the row / 127,   weight ~ code * scale

Symmetric round-to-nearest (Jacob et al. 2018, section 2.1, without a zero point). -128 is not used, so that the range
is symmetric. Rows are independent, so a checkpoint is quantized while it is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .weight import Weight, copy_pieces

LARGEST = 127


@dataclass
class Int8Weight(Weight):
    """Codes [out, in] int8, scales [out], and an optional bias [out]."""

    codes: Tensor
    scales: Tensor  # [out]: float64 for activations in float64, else float32
    compute_dtype: torch.dtype  # of activations, and of the bias
    bias: Tensor | None = None

    @classmethod
    def empty(cls, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Self:
        codes = torch.empty(out, inputs, dtype=torch.int8, device=device)
        scales = torch.empty(out, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return cls(codes, scales, dtype, torch.empty(out, dtype=dtype, device=device) if bias else None)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.compute_dtype

    def dequantize(self) -> Tensor:
        return (self.codes.to(self.scales.dtype) * self.scales[:, None]).to(self.dtype)

    def __getitem__(self, rows: Tensor) -> Tensor:
        scales = self.scales[rows]
        return (self.codes[rows].to(scales.dtype) * scales[:, None]).to(self.dtype)

    def stored(self) -> list[Tensor]:
        return [self.codes, self.scales] if self.bias is None else [self.codes, self.scales, self.bias]

    def expects(self, rows: range) -> dict[str, tuple[int, ...]]:
        expected: dict[str, tuple[int, ...]] = {"weight": (len(rows), self.shape[1])}
        return expected if self.bias is None else expected | {"bias": (len(rows),)}

    def load(self, name: str, rows: range, pieces: Iterable[Tensor]) -> None:
        """As `Weight.load`: quantizes `weight`, given in any floating-point dtype."""
        if name == "bias":
            assert self.bias is not None
            copy_pieces(self.bias[rows.start : rows.stop], pieces)
            return
        start = rows.start
        for piece in pieces:
            end = start + len(piece)
            self.codes[start:end], self.scales[start:end] = quantize(piece.to(self.codes.device, self.scales.dtype))
            start = end

    def randomize(self, generator: torch.Generator) -> None:
        self.codes.random_(-LARGEST, LARGEST + 1, generator=generator)
        self.scales.fill_(self.shape[1] ** -0.5 / LARGEST * 3**0.5)  # gives uniform codes the variance of dense weights
        if self.bias is not None:
            self.bias.normal_(0.0, self.shape[0] ** -0.5, generator=generator)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [rows, in], floating point -> codes [rows, in] int8, scales [rows].  Lesson 05.

    A row of zeros gets scale 1.
    """
    largest = weight.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return (weight / scales[:, None]).round().to(torch.int8), scales
