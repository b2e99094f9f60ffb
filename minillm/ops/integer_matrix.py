"""Quantized weights as the integer kernels read them.  Lesson 05."""

import torch

from minillm.kernels.arguments import IntegerMatrix
from minillm.quantization import Int4Weight, Int8Weight, Weight


def integer_matrix(weight: Weight) -> IntegerMatrix | None:
    """The codes of an int8 or int4 weight, in the order of its columns; None for other weights and uneven rows."""
    if isinstance(weight, Int8Weight) and weight.shape[1] % 4 == 0 and weight.scales.dtype == torch.float32:
        return IntegerMatrix(8, weight.codes.view(torch.int32), weight.scales)
    if isinstance(weight, Int4Weight) and weight.shape[1] % 8 == 0:
        return IntegerMatrix(4, weight.packed.view(torch.int32), weight.scales, weight.zeros)
    return None
