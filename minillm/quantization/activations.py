"""Activations in eight bits: a scale for each token, or one for all of them.  Lesson 07.

A product of two quantized matrices runs on integer or FP8 tensor cores, and its scales are applied to the result:

    x ~ codes_x * s_x,   w ~ codes_w * s_w,   x w^T ~ (codes_x codes_w^T) * s_x s_w

Per-token scales: Yao et al. 2022, "ZeroQuant", section 4.1. FP8 formats: Micikevicius et al. 2022, section 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.values import shown

# The largest value in units of the scale; 127.5 rounds to 128 and is clipped.
LARGEST = {"int8": 127.5, "fp8": 448.0}
BOUNDS = {"int8": (-128.0, 127.0), "fp8": (-448.0, 448.0)}
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class QuantizedActivations:
    """Codes with their scales, as they travel from one operation to the next."""

    codes: Tensor  # [..., in] int8 or float8_e4m3fn
    scales: Tensor  # [..., 1] float32 (float64 for a float64 model)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.to(self.scales.dtype) * self.scales).to(dtype)


@dataclass(frozen=True)
class Activations:
    """Says how a product's inputs are quantized.

    kind    "int8" or "fp8" (e4m3)
    static  False: each token's scale follows from its own largest value. True: all tokens share the scale that
            calibration found, which the weight stores; larger values are clipped
    """

    kind: str
    static: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in LARGEST:
            raise ConfigError(f"activations must be one of {', '.join(LARGEST)}, not {shown(self.kind)}")

    def quantize(self, x: Tensor, scale: Tensor | None = None) -> QuantizedActivations:
        """x [..., in], floating point; scale: of static activations, one number."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        largest = LARGEST[self.kind]
        if scale is None:
            most = wide.abs().amax(-1, keepdim=True)
            scales = torch.where(most > 0, most / largest, torch.ones_like(most))
        else:
            scales = scale.to(wide.dtype).expand(*x.shape[:-1], 1)
        return QuantizedActivations(to_codes(wide / scales, self.kind), scales)


def to_codes(x: Tensor, kind: str) -> Tensor:
    """Round to the nearest code of "int8" (-128 to 127) or "fp8" (e4m3); values out of range are clipped."""
    return (x.round() if kind == "int8" else x).clamp(*BOUNDS[kind]).to(DTYPES[kind])
