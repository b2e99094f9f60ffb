"""`linear` and `embedding` on a GPU, by the format of the weight and the number of rows.  Lessons 05 and 07.

Few rows take the time of reading the matrix, so the kernels read its codes. Many rows take the time of the arithmetic:
then the matrix is dequantized once and the library multiplies, unless the inputs are quantized too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, bfloat16, float16

from minillm.kernels import few_rows
from minillm.kernels.embedding import int8_embedding
from minillm.kernels.quantized_inputs import int8_product, quantize_rows
from minillm.quantization import Fp8Weight, Int4Weight, Int8Weight, Weight
from minillm.quantization.activations import DTYPES

from . import reference
from .by_weight import ByWeight
from .integer_matrix import integer_matrix

linear = ByWeight(reference.linear)
embedding = ByWeight(reference.embedding)


@embedding.register(Int8Weight)
def _(ids: Tensor, weight: Int8Weight, scale: float) -> Tensor:
    if weight.dtype not in (bfloat16, float16):
        return reference.embedding(ids, weight, scale)
    return int8_embedding(ids, weight.codes, weight.scales, scale, weight.dtype)


@linear.register(Int8Weight)
def _(x: Tensor, weight: Int8Weight) -> Tensor:
    """As the reference; if the inputs are quantized too, on integer tensor cores."""
    if weight.activations is None:
        return _weight_only(x, weight)
    matrix, rows = integer_matrix(weight), x.reshape(-1, x.shape[-1])
    if x.dtype not in (bfloat16, float16) or matrix is None or weight.activations.kind != "int8" or not len(rows):
        return reference.linear(x, weight)
    codes, scales = quantize_rows(rows, torch.int8, weight.input_scale)
    if len(rows) <= few_rows.MOST_ROWS and x.dtype == bfloat16:
        return _with_bias(few_rows.product(codes, matrix, scales), weight, x)
    return _with_bias(int8_product(codes, scales, weight.codes, weight.scales, x.dtype), weight, x)


@linear.register(Int4Weight)
def _(x: Tensor, weight: Int4Weight) -> Tensor:
    if weight.activations is not None and x.dtype == bfloat16:
        codes, scales = quantize_rows(x.reshape(-1, x.shape[-1]), DTYPES[weight.activations.kind], weight.input_scale)
        x = (codes.to(scales.dtype) * scales).to(bfloat16).view(x.shape)
    elif weight.activations is not None:
        return reference.linear(x, weight)
    return _weight_only(x, weight)


@linear.register(Fp8Weight)
def _(x: Tensor, weight: Fp8Weight) -> Tensor:
    """As the reference, on FP8 tensor cores, which multiply codes; the scales are applied to the sums."""
    rows = x.reshape(-1, x.shape[-1])
    quantized = weight.activations is not None and weight.activations.kind == "fp8"
    if not quantized or x.dtype != bfloat16 or any(size % 16 for size in weight.shape) or not len(rows):
        return reference.linear(x, weight)
    codes, scales = quantize_rows(rows, torch.float8_e4m3fn, weight.input_scale)
    out = torch._scaled_mm(codes, weight.codes.t(), scales, weight.scales[None], out_dtype=x.dtype)
    return _with_bias(out, weight, x)


def _weight_only(x: Tensor, weight: Int8Weight | Int4Weight) -> Tensor:
    """The product with a matrix of codes, whose format's quantization of inputs is not considered here."""
    matrix, rows = integer_matrix(weight), x.reshape(-1, x.shape[-1])
    if x.dtype != bfloat16 or matrix is None or not few_rows.takes(matrix) or not len(rows):
        return reference.linear(x, weight)
    if isinstance(weight, Int4Weight) and weight.order is not None:
        rows = rows[:, weight.order]
    few = len(rows) <= few_rows.MOST_ROWS
    out = few_rows.product(rows, matrix) if few else F.linear(rows, few_rows.dequantized(matrix))
    return _with_bias(out, weight, x)


def _with_bias(out: Tensor, weight: Weight, x: Tensor) -> Tensor:
    if weight.bias is not None:
        out += weight.bias
    return out.view(*x.shape[:-1], -1)
