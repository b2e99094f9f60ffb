"""Weights that know their own storage: one file a method, one `linear` for all of them.  Lessons 05 to 07."""

from typing import Protocol

import torch
from torch import Tensor

from .dense import DenseWeight


class Weight(Protocol):
    """For `linear` and `lm_head`: a matrix [out, in], however stored, and maybe a bias [out]."""

    bias: Tensor | None

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def dequantize(self) -> Tensor: ...


__all__ = ["DenseWeight", "Weight"]
