"""Eight bits per parameter as small floating-point numbers: 4 bits of exponent, 3 of mantissa.  Lesson 07.

    code = e4m3(weight / scale),   scale = max |weight| / 448,   weight ~ code * scale

Micikevicius et al. 2022, "FP8 formats for deep learning", section 3. The scale belongs to a row or to a whole module.
Small weights keep their relative precision, which integers lose, so one scale for a module is often enough.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.values import shown

from .activations import LARGEST, Activations, to_codes
from .quantized import RowCodes
from .weight import Codes, Format

SCALES = ("channel", "tensor")


@dataclass(frozen=True)
class Fp8(Format):
    """Eight bits per parameter, in e4m3.

    scales       "channel": one for each output row; "tensor": one for each module of the checkpoint
    activations  None, or how the inputs of products are quantized
    """

    name: ClassVar[str] = "fp8"
    scales: str = "channel"
    activations: Activations | None = None

    def __post_init__(self) -> None:
        if self.scales not in SCALES:
            raise ConfigError(f"scales must be one of {', '.join(SCALES)}, not {shown(self.scales)}")

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> "Fp8Weight":
        return Fp8Weight.empty(self, torch.float8_e4m3fn, out, inputs, bias, dtype, device)


@dataclass
class Fp8Weight(RowCodes):
    """Codes [out, in] float8_e4m3fn, scales [out], and an optional bias [out].

    A module's one scale is stored for each of its rows, so modules with different scales can share a weight.
    """

    @property
    def needs_whole_module(self) -> bool:
        return isinstance(self.format, Fp8) and self.format.scales == "tensor"

    def round(self, weight: Tensor) -> Codes:
        return quantize(weight, per_row=not self.needs_whole_module)

    def randomize_codes(self, generator: torch.Generator) -> None:
        rows = max(1, (1 << 24) // self.shape[1])
        for start in range(0, self.shape[0], rows):
            part = self.codes[start : start + rows]
            normal = torch.randn(part.shape, generator=generator, device=part.device)
            part.view(torch.uint8).copy_(to_codes(normal * 64, "fp8").view(torch.uint8))
        self.scales.fill_(self.shape[1] ** -0.5 / 64)


def quantize(weight: Tensor, per_row: bool = True) -> Codes:
    """weight [rows, in], floating point -> FP8 codes with a scale for each row, or one for all.  Lesson 07.

    Rows of zeros, or of numbers so small that their scale would be 0, get scale 1.
    """
    largest = weight.abs().amax(dim=1, keepdim=True)
    if not per_row:
        largest = largest.amax().expand_as(largest)
    steps = largest / LARGEST["fp8"]
    scales = torch.where(steps > 0, steps, torch.ones_like(steps))
    return Codes(to_codes(weight / scales, "fp8"), scales)
