"""A weight as the checkpoint holds it: one number a parameter.  Lesson 05 starts from here."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DenseWeight:
    """An unquantised matrix [out, in] with an optional bias [out]."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def empty(cls, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: str) -> "DenseWeight":
        if torch.device(device).type == "cpu" and dtype == torch.float32 and out >= inputs:
            # One row times a wide matrix streams memory twice as fast along the outputs: 52 instead of 167
            # microseconds for 1536 x 256 out of cold caches. With many rows the order does not matter.
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
