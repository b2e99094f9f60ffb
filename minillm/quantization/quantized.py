"""The base of all quantized weights.  Lesson 05."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.kernels.arguments import CodeMatrix

from .activations import LARGEST, Activations
from .weight import Codes, Format, Shard, Weight, copy_pieces, joined

RANDOM_LARGEST = 8.0  # what static scales of random weights are made for; activations are near 1


@dataclass
class QuantizedWeight(Weight):
    """A matrix of codes; a format adds its tensors, and how its codes are read, written and rounded."""

    format: Format
    compute_dtype: torch.dtype  # of activations, and of the bias
    bias: Tensor | None
    input_scale: Tensor | None  # [1] float32, of static activations; until it is filled: 0

    @property
    def activations(self) -> Activations | None:
        return self.format.activations

    @property
    def dtype(self) -> torch.dtype:
        return self.compute_dtype

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @abstractmethod
    def tensors(self) -> list[Tensor | None]:
        """Return the tensors of codes, scales and zero points."""

    @abstractmethod
    def round(self, weight: Tensor) -> Codes:
        """weight [rows, in], in float32 or float64, rounded to the nearest codes."""

    @abstractmethod
    def rows(self, which: Tensor | slice) -> Codes:
        """Return the codes of these rows."""

    @cached_property
    def matrix(self) -> CodeMatrix | None:
        """Return the codes as kernels read them, in the order of columns; None for formats and shapes that they do not
        read.

        It has the weight's memory, which is filled in place, so it is made once.
        """
        return None

    @property
    def needs_whole_module(self) -> bool:
        """Return whether `round` needs all rows of a module at once."""
        return False

    def dequantize(self) -> Tensor:
        return self.rows(slice(None)).dequantize().to(self.dtype)

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.rows(rows).dequantize().to(self.dtype)

    def read(self, rows: range) -> Codes:
        return self.rows(slice(rows.start, rows.stop))

    def stored(self) -> list[Tensor]:
        return [tensor for tensor in (*self.tensors(), self.bias, self.input_scale) if tensor is not None]

    def load(self, name: str, rows: range, pieces: Iterable[Tensor], shard: Shard | None = None) -> None:
        """As `Weight.load`: quantizes `weight`, given in any floating-point dtype, by rounding to the nearest."""
        if name == "bias":
            return load_bias(self.bias, rows, pieces, shard)
        check_not_static(self.activations)
        if self.needs_whole_module:
            pieces = [joined(pieces)]
        elif shard is not None:
            pieces = shard.rows_of(pieces)
        start = rows.start
        for piece in pieces:
            codes = self.round(piece.to(self.stored()[0].device, torch.promote_types(self.dtype, torch.float32)))
            if shard is not None:  # only now: a scale may belong to more than the shard
                codes = codes.cut(shard if self.needs_whole_module else shard._replace(rows=range(len(piece))))
            count = len(codes.codes)
            self.fill(range(start, start + count), codes)
            start += count

    def randomize(self, generator: torch.Generator) -> None:
        self.randomize_codes(generator)
        if self.bias is not None:
            self.bias.normal_(0.0, self.shape[0] ** -0.5, generator=generator)
        fill_random_scale(self.input_scale, self.activations)

    @abstractmethod
    def randomize_codes(self, generator: torch.Generator) -> None:
        """Fill codes and scales with random values that keep activations near 1."""


@dataclass
class RowCodes(QuantizedWeight):
    """Codes [out, in] of eight bits, scales [out], and an optional bias [out]."""

    codes: Tensor  # int8, or float8_e4m3fn
    scales: Tensor  # [out]: float64 for activations in float64, else float32

    @classmethod
    def empty(
        cls,
        format: Format,
        code: torch.dtype,
        out: int,
        inputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """As `Format.empty`, with codes of the dtype `code`."""
        return cls(
            format=format,
            compute_dtype=dtype,
            bias=empty_bias(out, bias, dtype, device),
            input_scale=input_scale(format.activations, device),
            codes=torch.empty(out, inputs, dtype=code, device=device),
            scales=torch.empty(out, dtype=torch.promote_types(dtype, torch.float32), device=device),
        )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @cached_property
    def matrix(self) -> CodeMatrix | None:
        if self.shape[1] % 4 or self.scales.dtype != torch.float32:
            return None
        fp8 = self.codes.dtype == torch.float8_e4m3fn
        rounded = self.activations is not None and self.activations.kind == ("fp8" if fp8 else "int8")
        words = self.codes.view(torch.int32)
        return CodeMatrix(8, words, self.scales, fp8=fp8, rounded_inputs=rounded, input_scale=self.input_scale)

    def tensors(self) -> list[Tensor | None]:
        return [self.codes, self.scales]

    def rows(self, which: Tensor | slice) -> Codes:
        return Codes(self.codes[which], self.scales[which][:, None])

    def fill(self, rows: range, codes: Codes) -> None:
        check_no_zeros(codes, self.format.name)
        # Copied as bytes: torch has no indexed assignment of FP8 on every device.
        span = slice(rows.start, rows.stop)
        self.codes.view(torch.uint8)[span] = codes.codes.to(self.codes).contiguous().view(torch.uint8)
        self.scales[span] = codes.scales.to(self.scales).expand(len(rows), 1).squeeze(1)


def input_scale(activations: Activations | None, device: torch.device) -> Tensor | None:
    """Return the tensor of a static scale, not yet filled."""
    static = activations is not None and activations.static
    return torch.zeros(1, dtype=torch.float32, device=device) if static else None


def fill_random_scale(scale: Tensor | None, activations: Activations | None) -> None:
    """Fill the static scale, if there is one, of a weight with random values."""
    if scale is not None and activations is not None:
        scale.fill_(RANDOM_LARGEST / LARGEST[activations.kind])


def check_not_static(activations: Activations | None) -> None:
    """Raise ConfigError for static activations: an unquantized checkpoint has no scales for them."""
    if activations is not None and activations.static:
        raise ConfigError(
            f'activations "{activations.kind}-static" need scales from calibration, which an unquantized checkpoint '
            f'does not have: use `minillm quantize --static`, or choose activations "{activations.kind}"'
        )


def empty_bias(out: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return torch.empty(out, dtype=dtype, device=device) if bias else None


def load_bias(bias: Tensor | None, rows: range, pieces: Iterable[Tensor], shard: Shard | None) -> None:
    """As `Weight.load` for a bias."""
    assert bias is not None
    if shard is None or shard.columns.start == 0:
        copy_pieces(bias[rows.start : rows.stop], pieces if shard is None else shard.rows_of(pieces))
    else:
        bias[rows.start : rows.stop] = 0  # the sum over all shards has it once


def check_no_zeros(codes: Codes, format: str) -> None:
    """Raise ConfigError if codes have what only four-bit weights store: zero points, or another order of inputs."""
    if codes.zeros is not None or codes.order is not None:
        raise ConfigError(f"{format} weights have neither zero points nor an order of their inputs")
