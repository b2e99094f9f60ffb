"""Four bits per parameter as tiny floating-point numbers (e2m1), in blocks with a scale.  Lesson 08.

    weight ~ value * scale of the block,   value: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, or the negative of one

    NVFP4   blocks of 16; scales in e4m3, divided by one float32 number for the module
            NVIDIA 2025, "Introducing NVFP4 for efficient and accurate low-precision inference" (developer blog)
    MXFP4   blocks of 32; scales are powers of two, stored as their exponent (e8m0)
            Open Compute Project 2023, "OCP Microscaling formats (MX) specification v1.0", sections 5.3.3, 5.4.1 and 6.3

Simulated: for accuracy. This engine has no FP4 product, so it multiplies with the dequantized matrix, which is slower
than a dense one. GPUs from Blackwell on multiply these formats on tensor cores. Two codes share a byte: the first is
its low half. A code is a sign, two bits of exponent and one of mantissa.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.errors import ConfigError

from .activations import Activations
from .quantized import QuantizedWeight, check_no_zeros, empty_bias
from .weight import Codes, Format

LARGEST = 6.0  # of e2m1
LARGEST_SCALE = 448.0  # of e4m3
MEAN_SQUARE = 8.5625  # of the sixteen values


@dataclass(frozen=True)
class Fp4(Format):
    """The base of both formats."""

    group_size: ClassVar[int]
    scale_dtype: ClassVar[torch.dtype]  # as scales are stored
    simulated: ClassVar[str] = "this engine has no FP4 product, so each product dequantizes its weights"

    @property
    def activations(self) -> Activations | None:
        return None

    @property
    def has_global_scale(self) -> bool:
        return self.scale_dtype == torch.float8_e4m3fn

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> "Fp4Weight":
        if inputs % self.group_size:
            raise ConfigError(
                f"{self.name} has blocks of {self.group_size}, which do not divide the {inputs} inputs of this "
                "model's matrices, or of a GPU's part: choose another format for them in a recipe, such as int8"
            )
        wide = torch.promote_types(dtype, torch.float32)
        return Fp4Weight(
            format=self,
            compute_dtype=dtype,
            bias=empty_bias(out, bias, dtype, device),
            input_scale=None,
            packed=torch.empty(out, inputs // 2, dtype=torch.uint8, device=device),
            scales=torch.empty(out, inputs // self.group_size, dtype=self.scale_dtype, device=device),
            global_scale=torch.empty(out, dtype=wide, device=device) if self.has_global_scale else None,
        )


@dataclass(frozen=True)
class Nvfp4(Fp4):
    """Blocks of 16 with a scale in e4m3, and one float32 number for a module. Simulated: for accuracy."""

    name: ClassVar[str] = "nvfp4"
    group_size: ClassVar[int] = 16
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn


@dataclass(frozen=True)
class Mxfp4(Fp4):
    """Blocks of 32 with a power of two as scale. Simulated: for accuracy."""

    name: ClassVar[str] = "mxfp4"
    group_size: ClassVar[int] = 32
    scale_dtype: ClassVar[torch.dtype] = torch.uint8


@dataclass
class Fp4Weight(QuantizedWeight):
    """Packed codes [out, in / 2] uint8, scales [out, blocks], and an optional bias [out]."""

    packed: Tensor
    scales: Tensor  # [out, blocks] float8_e4m3fn, or uint8: exponent plus 127
    global_scale: Tensor | None  # [out]: what scales are divided by; a module's one number for each of its rows

    @property
    def block_format(self) -> Fp4:
        assert isinstance(self.format, Fp4)
        return self.format

    @property
    def needs_whole_module(self) -> bool:
        return self.global_scale is not None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], 2 * self.packed.shape[1]))

    def tensors(self) -> list[Tensor | None]:
        return [self.packed, self.scales, self.global_scale]

    def rows(self, which: Tensor | slice) -> Codes:
        scales = self.scales.view(torch.uint8)[which]  # as bytes: torch cannot index FP8 on every device
        wide = torch.promote_types(self.dtype, torch.float32)
        wider = scales.view(torch.float8_e4m3fn).to(wide) if self.needs_whole_module else from_exponents(scales, wide)
        divisor = None if self.global_scale is None else self.global_scale[which][:, None]
        return Codes(unpack(self.packed[which]), wider, global_scale=divisor)

    def fill(self, rows: range, codes: Codes) -> None:
        check_no_zeros(codes, self.format.name)
        span = slice(rows.start, rows.stop)
        self.packed[span] = pack(codes.codes.to(self.packed.device))
        self.scales.view(torch.uint8)[span] = stored_scales(codes.scales, self.block_format).view(torch.uint8)
        if self.global_scale is not None and codes.global_scale is not None:
            self.global_scale[span] = codes.global_scale.to(self.global_scale).expand(len(rows), 1).squeeze(1)

    def round(self, weight: Tensor) -> Codes:
        return quantize(weight, self.block_format)

    def randomize_codes(self, generator: torch.Generator) -> None:
        self.packed.random_(0, 256, generator=generator)
        wanted = torch.tensor((self.shape[1] * MEAN_SQUARE) ** -0.5)
        if self.global_scale is None:
            self.scales.copy_(to_exponents(torch.exp2(wanted.log2().round())))
        else:
            self.scales.view(torch.uint8).fill_(0x38)  # 1
            self.global_scale.fill_(1 / wanted.item())


def quantize(weight: Tensor, format: Fp4) -> Codes:
    """weight [rows, in], a whole module in floating point -> codes with scales for each block.  Lesson 08.

    NVFP4: the module's number is 448 * 6 / max |weight|, so that the largest scale is e4m3's largest value. Scales are
    max |weight| of the block / 6, times that number, rounded to e4m3; a scale of 0 becomes 1/8.

    MXFP4: the scale is the power of two that puts the block's largest weight between 4 and 8; if it would round to 8,
    beyond the largest value, it is the next one, as compressed-tensors chooses it. (The specification's conversion,
    section 6.3, takes the first in every case and clips what does not fit. Files do not say which was used.)
    """
    blocks = weight.unflatten(-1, (-1, format.group_size))
    largest = blocks.abs().amax(-1).float()
    divisor = None
    if format.has_global_scale:
        tiny = torch.finfo(torch.float32).tiny
        divisor = LARGEST_SCALE * LARGEST / largest.amax().clamp(min=tiny)
        divisor = divisor.nan_to_num(nan=1.0, posinf=1.0)  # weights that are all 0, or nearly
        scales = (divisor * (largest / LARGEST)).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float()
        scales = torch.where(scales == 0, 0.125, scales)
        divisor = divisor.view(1, 1).expand(len(weight), 1)
    else:
        scales = power_of_two(largest)
    by = scales if divisor is None else scales / divisor
    codes = to_e2m1(blocks / by[..., None].to(blocks.dtype)).flatten(-2)
    return Codes(codes, scales, global_scale=divisor)


def power_of_two(largest: Tensor) -> Tensor:
    """Return the scale of blocks with these largest weights, float32: the power of two that puts them between 3.5 and
    7.
    """
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - 3 + (mantissa >= 0.875).int()
    exponent = torch.where(largest == 0, -127, exponent).clamp(-127, 127)
    return from_exponents((exponent + 127).to(torch.uint8), torch.float32)


def from_exponents(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """e8m0, an exponent plus 127 in uint8 -> the power of two; 255 is NaN."""
    return stored.view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)


def to_exponents(scales: Tensor) -> Tensor:
    """Return the inverse of `from_exponents`, for powers of two."""
    return scales.to(torch.float32).to(torch.float8_e8m0fnu).view(torch.uint8)


def stored_scales(scales: Tensor, format: Fp4) -> Tensor:
    """Scales as the format stores them, given values that it has."""
    return scales.to(torch.float8_e4m3fn) if format.has_global_scale else to_exponents(scales)


def to_e2m1(x: Tensor) -> Tensor:
    """Return the nearest value of e2m1, as float8_e4m3fn; larger numbers are clipped to 6.

    Of two that are as near, the one whose mantissa bit is 0, as the specification says (6.3: roundTiesToEven). A
    negative number too small for 0.5 becomes -0.
    """
    size = x.abs().clamp(max=LARGEST)
    step = torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5)).to(size.dtype)
    size = (size / step).round() * step
    return torch.where(x < 0, -size, size).to(torch.float8_e4m3fn)


def pack(values: Tensor) -> Tensor:
    """Values of e2m1 [rows, in] float8_e4m3fn -> [rows, in / 2] uint8.  Lesson 08.

    From 1 on, e4m3 has the bits of e2m1 with two more of mantissa, which are 0, and 6 more in its exponent.
    """
    bits = values.contiguous().view(torch.uint8)
    size = bits & 0x7F
    codes = torch.where(size >= 0x38, (size >> 2) - 12, (size != 0).to(torch.uint8)) | (bits >> 7 << 3)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`: [rows, in / 2] uint8 -> [rows, in] float8_e4m3fn."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    size = codes & 7
    bits = torch.where(size >= 2, (size + 12) << 2, size * 0x30) | (codes >> 3 << 7)
    return bits.view(torch.float8_e4m3fn)
