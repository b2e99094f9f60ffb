"""The interface of a checkpoint's layout of quantized tensors.  Lesson 06."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm.quantization.weight import Codes, Format

ANY = -1  # a length that only the file says
NUMBERS = (torch.float8_e4m3fn, torch.int64, torch.int32, torch.int8, torch.uint8)  # of zero points; also SCALES
SCALES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes that scales may have


@dataclass(frozen=True)
class Stored:
    """A tensor that a module must have in a checkpoint, or may have."""

    shape: tuple[int, ...] | None  # None: any
    dtypes: tuple[torch.dtype, ...]
    required: bool = True


class Layout(Protocol):
    """One kind of checkpoint's way to store quantized matrices. A module is one, as "model.layers.0.mlp.up_proj"."""

    def format(self, module: str, inputs: int) -> Format:
        """Return a module's format; `Dense()` if it is not quantized. Raises ConfigError for a format without
        support.
        """
        ...

    def tensors(self, module: str, rows: int, inputs: int) -> dict[str, Stored]:
        """Return the tensors of a quantized module [rows, inputs]: last part of the name -> what is stored."""
        ...

    def codes(self, module: str, inputs: int, tensors: Mapping[str, Tensor]) -> Codes:
        """Convert the tensors of a quantized module [rows, inputs]. Raises ConfigError for values it cannot have."""
        ...

    def input_scale(self, module: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the scale of static activations."""
        return None

    def input_factors(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """[in]: what the module multiplies its inputs by, before they are quantized; None: nothing."""
        return None
