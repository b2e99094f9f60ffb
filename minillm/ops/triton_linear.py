"""`linear` and `embedding` on a GPU, by the format of the weight and the number of rows.  Lessons 05 and 07.

Few rows take the time of reading the matrix, so the kernels read its codes. Many rows take the time of the arithmetic:
then the matrix is dequantized once and the library multiplies, unless the inputs are quantized too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, bfloat16, float8_e4m3fn, float16

from minillm.kernels import few_rows
from minillm.kernels.embedding import code_embedding
from minillm.kernels.quantized_inputs import fp8_product, has_fp8, int8_product, quantize_rows
from minillm.quantization import Fp8Weight, Int4Weight, Int8Weight, QuantizedActivations, Weight
from minillm.quantization.activations import DTYPES

from . import reference
from .by_weight import ByWeight
from .code_matrix import code_matrix

linear = ByWeight(reference.linear)
embedding = ByWeight(reference.embedding)


@embedding.register(Int8Weight)
@embedding.register(Fp8Weight)
def _(ids: Tensor, weight: Int8Weight | Fp8Weight, scale: float) -> Tensor:
    if weight.dtype not in (bfloat16, float16):
        return reference.embedding(ids, weight, scale)
    return code_embedding(ids, weight.codes, weight.scales, scale, weight.dtype)


class Rounding(NamedTuple):
    """How a kernel quantizes the inputs of a product."""

    dtype: torch.dtype  # of the codes
    scale: Tensor | None  # [1], if it is static


@dataclass(frozen=True)
class LinearOnCodes:
    """`linear` for a format that can quantize its inputs: it quantizes rows, then multiplies their codes.

    Kernels that compute the rows may do the first half (`Rounding`), and call `product` with the codes.
    """

    takes: Callable[[Any], bool]  # whether `product` takes codes for this weight, which quantizes its inputs
    product: Callable[[QuantizedActivations, Any], Tensor]  # codes [..., in] with scales -> [..., out], with the bias
    unquantized: Callable[[Tensor, Any], Tensor] = reference.linear  # for weights that do not quantize their inputs

    def rounding(self, x: Tensor, weight: Weight) -> Rounding | None:
        """How to quantize rows like x for `product`; None: this format or these rows have no kernel for that."""
        if weight.activations is None or x.dtype != weight.dtype or not x.numel() or not self.takes(weight):
            return None
        dtype = DTYPES[weight.activations.kind]
        if dtype == float8_e4m3fn and not has_fp8(x.device):
            return None
        return Rounding(dtype, weight.input_scale)

    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        rounding = self.rounding(x, weight)
        if rounding is None:
            return (self.unquantized if weight.activations is None else reference.linear)(x, weight)
        codes, scales = quantize_rows(x.reshape(-1, x.shape[-1]), *rounding)
        return self.product(QuantizedActivations(codes.view(x.shape), scales.view(*x.shape[:-1], 1)), weight)


def on_codes(x: Tensor, weight: Weight) -> tuple[Callable[[QuantizedActivations, Weight], Tensor], Rounding] | None:
    """The product that `linear` would compute from codes of x, and how x is quantized; None if it takes no codes."""
    version = linear.versions.get(type(weight))
    if not isinstance(version, LinearOnCodes):
        return None
    rounding = version.rounding(x, weight)
    return None if rounding is None else (version.product, rounding)


def _int8_takes(weight: Int8Weight) -> bool:
    return weight.dtype in (bfloat16, float16) and _kind(weight) == "int8" and code_matrix(weight) is not None


def _int8_product(x: QuantizedActivations, weight: Int8Weight) -> Tensor:
    """On integer tensor cores."""
    codes, scales, matrix = *_rows(x), code_matrix(weight)
    if len(codes) <= few_rows.MOST_ROWS and weight.dtype == bfloat16:
        assert matrix is not None
        out = few_rows.product(codes, matrix, scales)
    else:
        out = int8_product(codes, scales, weight.codes, weight.scales, weight.dtype)
    return _with_bias(out, weight, x.codes)


def _int4_takes(weight: Int4Weight) -> bool:
    matrix = code_matrix(weight)
    return weight.dtype == bfloat16 and matrix is not None and few_rows.takes(matrix)


def _int4_product(x: QuantizedActivations, weight: Int4Weight) -> Tensor:
    """Of what the codes stand for, in bf16."""
    return _weight_only(x.dequantize(weight.dtype), weight)


def _fp8_takes(weight: Fp8Weight) -> bool:
    return weight.dtype == bfloat16 and _kind(weight) == "fp8" and all(size % 16 == 0 for size in weight.shape)


def _fp8_product(x: QuantizedActivations, weight: Fp8Weight) -> Tensor:
    """On FP8 tensor cores, which multiply codes; the scales are applied to the sums."""
    codes, scales, matrix = *_rows(x), code_matrix(weight)
    if len(codes) <= few_rows.MOST_ROWS:
        assert matrix is not None
        out = few_rows.product(codes, matrix, scales)
    else:
        out = fp8_product(codes, scales, weight.codes, weight.scales, weight.dtype)
    return _with_bias(out, weight, x.codes)


def _kind(weight: Weight) -> str:
    return "" if weight.activations is None else weight.activations.kind


def _rows(x: QuantizedActivations) -> tuple[Tensor, Tensor]:
    """Codes [rows, in] and scales [rows, 1]."""
    return x.codes.reshape(-1, x.codes.shape[-1]), x.scales.reshape(-1, 1)


def _weight_only(x: Tensor, weight: Int8Weight | Int4Weight | Fp8Weight) -> Tensor:
    """The product with a matrix of codes, whose format's quantization of inputs is not considered here."""
    matrix, rows = code_matrix(weight), x.reshape(-1, x.shape[-1])
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


linear.register(Int8Weight)(LinearOnCodes(_int8_takes, _int8_product, unquantized=_weight_only))
linear.register(Int4Weight)(LinearOnCodes(_int4_takes, _int4_product, unquantized=_weight_only))
linear.register(Fp8Weight)(LinearOnCodes(_fp8_takes, _fp8_product, unquantized=_weight_only))
