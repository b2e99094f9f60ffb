"""Quantized weights as the integer kernels read them.  Lesson 05."""

import torch

from minillm.kernels.arguments import CodeMatrix
from minillm.quantization import Int4Weight, Int8Weight, Weight


def code_matrix(weight: Weight) -> CodeMatrix | None:
    """The codes of an int8 or int4 weight, in the order of its columns; None for other weights and uneven rows."""
    rounded_inputs = weight.activations is not None and weight.activations.kind == "int8"
    if isinstance(weight, Int8Weight) and weight.shape[1] % 4 == 0 and weight.scales.dtype == torch.float32:
        words = weight.codes.view(torch.int32)
        return CodeMatrix(8, words, weight.scales, rounded_inputs=rounded_inputs, input_scale=weight.input_scale)
    if isinstance(weight, Int4Weight) and weight.shape[1] % 8 == 0:
        return CodeMatrix(4, weight.packed.view(torch.int32), weight.scales, weight.zeros)
    return None
