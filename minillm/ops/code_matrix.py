"""Quantized weights as the kernels read their codes.  Lesson 05."""

import torch

from minillm.kernels.arguments import CodeMatrix
from minillm.quantization import Fp8Weight, Int4Weight, Int8Weight, Weight


def code_matrix(weight: Weight) -> CodeMatrix | None:
    """The codes of an int8, fp8 or int4 weight, in the order of its columns; None for other weights and uneven rows."""
    if isinstance(weight, (Int8Weight, Fp8Weight)):
        if weight.shape[1] % 4 or weight.scales.dtype != torch.float32:
            return None
        fp8 = isinstance(weight, Fp8Weight)
        rounded = weight.activations is not None and weight.activations.kind == ("fp8" if fp8 else "int8")
        words = weight.codes.view(torch.int32)
        return CodeMatrix(8, words, weight.scales, fp8=fp8, rounded_inputs=rounded, input_scale=weight.input_scale)
    if isinstance(weight, Int4Weight) and weight.shape[1] % 8 == 0:
        return CodeMatrix(4, weight.packed.view(torch.int32), weight.scales, weight.zeros)
    return None
