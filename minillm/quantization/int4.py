"""Four bits per parameter, and a scale for each group of inputs.  Lesson 05.

    code = round(weight / scale) + zero,   weight ~ (code - zero) * scale

Sixteen levels are few for a row of thousands of weights, so each group of 32 to 128 neighbors has its own scale, and,
if the format is not symmetric, its own zero point (Jacob et al. 2018, section 2.1; groups: Frantar et al. 2022,
"GPTQ"). Two codes share a byte: the first is its low half.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.kernels.arguments import CodeMatrix
from minillm.values import as_int, shown

from .activations import Activations
from .quantized import QuantizedWeight, empty_bias, input_scale
from .weight import Codes, Format

LOWEST, HIGHEST = -8, 7
GROUP_SIZES = (128, 64, 32)  # that are chosen by default


def fitting_group_size(inputs: Iterable[int]) -> int:
    """Return the largest of GROUP_SIZES that divides all these numbers of inputs; the smallest if none does."""
    inputs = set(inputs)
    return next((size for size in GROUP_SIZES if not any(count % size for count in inputs)), GROUP_SIZES[-1])


@dataclass(frozen=True)
class Int4(Format):
    """Four bits per parameter.

    group_size   inputs that share a scale; a matrix's inputs must be a multiple of it
    symmetric    True: levels are -8 to 7 times the scale. False: each group has a zero point, so its levels span
                 exactly its weights
    act_order    whether the groups may consist of inputs that are not neighbors, as GPTQ's act-order makes them
    activations  None, or how the inputs of products are quantized
    scale_dtype  precision that scales are rounded to before weights are; default: that of the activations
    """

    name: ClassVar[str] = "int4"
    group_size: int = 128
    symmetric: bool = True
    act_order: bool = False
    activations: Activations | None = None
    scale_dtype: torch.dtype | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        size = as_int(self.group_size)
        if size is None or size < 2 or size % 2:
            raise ConfigError(f"group_size must be an even whole number from 2, not {shown(self.group_size)}")
        for name in ("symmetric", "act_order"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {shown(value)}")

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> "Int4Weight":
        if inputs % self.group_size:
            divisors = ", ".join(str(size) for size in (128, 64, 32, 16) if inputs % size == 0) or "none of 16 to 128"
            raise ConfigError(
                f"group_size={self.group_size} does not divide the {inputs} inputs of this model's matrices, "
                f"or of a GPU's part; powers of two that do: {divisors}. Quantize the model with one of "
                "them (`minillm quantize --group-size`), or give it in a recipe"
            )
        groups = inputs // self.group_size
        return Int4Weight(
            format=self,
            compute_dtype=dtype,
            bias=empty_bias(out, bias, dtype, device),
            input_scale=input_scale(self.activations, device),
            packed=torch.empty(out, inputs // 2, dtype=torch.uint8, device=device),
            scales=torch.empty(out, groups, dtype=dtype, device=device),
            zeros=None if self.symmetric else torch.empty(out, groups, dtype=torch.int8, device=device),
            order=torch.arange(inputs, device=device) if self.act_order else None,
        )


@dataclass
class Int4Weight(QuantizedWeight):
    """Packed codes [out, in / 2] uint8, scales [out, groups], and optionally zeros, order and bias.

    The low half of byte j is column 2 j's code plus 8, the high half that of column 2 j + 1.
    """

    packed: Tensor
    scales: Tensor  # [out, groups], in the dtype of activations: half precision halves what they add to each weight
    zeros: Tensor | None  # [out, groups] int8, from -8 to 7
    order: Tensor | None  # [in] int64: the input that each column multiplies
    ordered: bool = False  # whether `order` was filled

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], 2 * self.packed.shape[1]))

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @cached_property
    def matrix(self) -> CodeMatrix | None:
        if self.shape[1] % 8:
            return None
        return CodeMatrix(4, self.packed.view(torch.int32), self.scales, self.zeros)

    def tensors(self) -> list[Tensor | None]:
        return [self.packed, self.scales, self.zeros, self.order]

    def rows(self, which: Tensor | slice) -> Codes:
        zeros = None if self.zeros is None else self.zeros[which]
        return Codes(unpack(self.packed[which]), self.scales[which], zeros, self.order)

    def fill(self, rows: range, codes: Codes) -> None:
        span = slice(rows.start, rows.stop)
        if (codes.zeros is None) != (self.zeros is None):
            raise ConfigError("a weight's zero points must be given exactly if its format is not symmetric")
        self._use_order(codes.order, all_rows=len(rows) == self.shape[0])
        self.packed[span] = pack(codes.codes.to(self.packed.device))
        self.scales[span] = codes.scales.to(self.scales)
        if self.zeros is not None and codes.zeros is not None:
            self.zeros[span] = codes.zeros.to(self.zeros)

    def _use_order(self, order: Tensor | None, all_rows: bool) -> None:
        """All rows have one order: the first modules that are filled, in whatever position, determine it."""
        if self.order is None:
            if order is not None:
                raise ConfigError("these codes have their inputs in another order; the format needs act_order=True")
            return
        order = torch.arange(self.shape[1], device=self.order.device) if order is None else order.to(self.order)
        if self.ordered and not all_rows and not self.order.equal(order):
            raise ConfigError(
                "projections that share an input are quantized with their inputs in different orders, which is not "
                "supported: quantize the model again, with one order for them or without act-order (desc_act)"
            )
        self.order.copy_(order)
        self.ordered = True

    def round(self, weight: Tensor) -> Codes:
        grouped = weight.view(len(weight), -1, self.group_size)
        assert isinstance(self.format, Int4)
        scale_dtype = self.format.scale_dtype or self.scales.dtype  # those that are saved, or else those stored here
        scales, zeros = scales_of(grouped, replace(self.format, scale_dtype=scale_dtype))
        return Codes(round_to_int4(grouped, scales, zeros).view_as(weight), scales, zeros)

    def randomize_codes(self, generator: torch.Generator) -> None:
        self.packed.random_(0, 256, generator=generator)
        self.scales.fill_((self.shape[1] * 21.5) ** -0.5)  # codes -8 to 7 have mean square 21.5
        if self.zeros is not None:
            self.zeros.random_(-2, 3, generator=generator)


def scales_of(grouped: Tensor, format: Int4, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor | None]:
    """grouped [rows, groups, size] -> scales [rows, groups] and zeros [rows, groups] int8 (None if symmetric).

    shrink: multiplies the range of each group.

    Symmetric: the largest weight is 7.5 steps from zero, half a step beyond the last level. Else the levels span the
    group's weights and zero, so that a weight of 0 stays 0. A group of zeros, or of weights so small that their scale
    would be stored as 0, gets scale 1.
    """
    low, high = grouped.amin(-1).clamp(max=0) * shrink, grouped.amax(-1).clamp(min=0) * shrink
    steps = torch.maximum(-low, high) / 7.5 if format.symmetric else (high - low) / (HIGHEST - LOWEST)
    if format.scale_dtype is not None:
        steps = steps.to(format.scale_dtype).to(grouped.dtype)  # as they will be stored
    scales = torch.where(steps > 0, steps, torch.ones_like(steps))
    return scales, None if format.symmetric else (LOWEST - low / scales).round().clamp(LOWEST, HIGHEST).to(torch.int8)


def round_to_int4(grouped: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """grouped [rows, groups, size], scales and zeros [rows, groups] -> the nearest codes, int8 from -8 to 7."""
    steps = (grouped / scales[..., None]).round()
    if zeros is not None:
        steps = steps + zeros.to(steps.dtype)[..., None]
    return steps.clamp(LOWEST, HIGHEST).to(torch.int8)


def pack(codes: Tensor) -> Tensor:
    """codes [rows, in] int8 from -8 to 7 -> [rows, in / 2] uint8.  Lesson 05."""
    unsigned = (codes - LOWEST).to(torch.uint8)
    return unsigned[:, 0::2] | unsigned[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`: [rows, in / 2] uint8 -> [rows, in] int8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1).to(torch.int8) + LOWEST
