"""Eight bits per parameter, and a scale for each output channel.  Lesson 05.

    code = round(weight / scale),   scale = max |weight| of the row / 127,   weight ~ code * scale

Symmetric round-to-nearest (Jacob et al. 2018, section 2.1, without a zero point). -128 is not used, so that the range
is symmetric. Rows are independent, so a checkpoint is quantized while it is read.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .activations import Activations
from .quantized import RowCodes
from .weight import Codes, Format

HIGHEST = 127


@dataclass(frozen=True)
class Int8(Format):
    """Eight bits per parameter. activations: None, or how the inputs of products are quantized."""

    name: ClassVar[str] = "int8"
    activations: Activations | None = None

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> "Int8Weight":
        return Int8Weight.empty(self, torch.int8, out, inputs, bias, dtype, device)


@dataclass
class Int8Weight(RowCodes):
    """Codes [out, in] int8, scales [out], and an optional bias [out]."""

    def round(self, weight: Tensor) -> Codes:
        return quantize(weight)

    def randomize_codes(self, generator: torch.Generator) -> None:
        self.codes.random_(-HIGHEST, HIGHEST + 1, generator=generator)
        self.scales.fill_(self.shape[1] ** -0.5 / HIGHEST * 3**0.5)  # gives uniform codes the variance of dense weights


def quantize(weight: Tensor) -> Codes:
    """weight [rows, in], floating point -> codes from -127 to 127 with a scale for each row.  Lesson 05.

    A row of zeros, or of numbers so small that their scale would be 0, gets scale 1.
    """
    steps = weight.abs().amax(dim=1, keepdim=True) / HIGHEST
    scales = torch.where(steps > 0, steps, torch.ones_like(steps))
    return Codes((weight / scales).round().clamp(-HIGHEST, HIGHEST).to(torch.int8), scales)
