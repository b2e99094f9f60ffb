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
from minillm.kernels.quantized_inputs import fp8_product, has_fp8, has_int8, int8_product, quantize_rows
from minillm.quantization import Fp8Weight, Int4Weight, Int8Weight, QuantizedActivations, Weight
from minillm.quantization.activations import DTYPES

from . import reference
from .by_weight import ByWeight

linear = ByWeight(reference.linear)
embedding = ByWeight(reference.embedding)


@embedding.register(Int8Weight)
@embedding.register(Fp8Weight)
def _(ids: Tensor, weight: Int8Weight | Fp8Weight, scale: float) -> Tensor:
    if weight.dtype not in (bfloat16, float16):
        return reference.embedding(ids, weight, scale)
    return code_embedding(ids, weight.codes, weight.scales, scale, weight.dtype)


Product = Callable[[QuantizedActivations], Tensor]  # codes [..., in] with scales -> [..., out], with the bias


class Rounding(NamedTuple):
    """Says how a kernel quantizes the inputs of a product."""

    dtype: torch.dtype  # of the codes
    scale: Tensor | None  # [1], if it is static


@dataclass(frozen=True)
class LinearOnCodes:
    """`linear` for a format that can quantize its inputs: it quantizes rows, then multiplies their codes.

    Kernels that compute the rows may do the first half (`Rounding`), and call the product with the codes.
    """

    product: Callable[[Any], Product | None]  # of a weight that quantizes its inputs; None: it has no kernel for them
    unquantized: Callable[[Tensor, Any], Tensor] = reference.linear  # for weights that do not quantize their inputs

    def on_codes(self, x: Tensor, weight: Weight) -> tuple[Product, Rounding] | None:
        """Return the product with codes of rows like x, and how to quantize them; None: there is no kernel for that."""
        if weight.activations is None or x.dtype != weight.dtype or not x.numel():
            return None
        dtype = DTYPES[weight.activations.kind]
        if not (has_fp8 if dtype == float8_e4m3fn else has_int8)(x.device):
            return None
        product = self.product(weight)
        return None if product is None else (product, Rounding(dtype, weight.input_scale))

    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        version = self.on_codes(x, weight)
        if version is None:
            return (self.unquantized if weight.activations is None else reference.linear)(x, weight)
        product, rounding = version
        codes, scales = quantize_rows(x.reshape(-1, x.shape[-1]), *rounding)
        return product(QuantizedActivations(codes.view(x.shape), scales.view(*x.shape[:-1], 1)))


def on_codes(x: Tensor, weight: Weight) -> tuple[Product, Rounding] | None:
    """Return the product that `linear` would compute from codes of x, and how x is quantized; None if it takes no
    codes.
    """
    version = linear.versions.get(type(weight))
    return version.on_codes(x, weight) if isinstance(version, LinearOnCodes) else None


def _of_rows(weight: Int8Weight | Fp8Weight, many: Callable[..., Tensor], few: bool) -> Product | None:
    """Multiply codes on tensor cores; the scales are applied to the sums.

    few: whether products of few rows have a kernel of their own; `many` computes all others.
    """
    matrix = weight.matrix
    if matrix is None or not matrix.rounded_inputs:
        return None

    def product(x: QuantizedActivations) -> Tensor:
        codes, scales = x.codes.reshape(-1, x.codes.shape[-1]), x.scales.reshape(-1, 1)
        if few and len(codes) <= few_rows.MOST_ROWS:
            out = few_rows.product(codes, matrix, scales)
        else:
            out = many(codes, scales, weight.codes, weight.scales, weight.dtype)
        return _with_bias(out, weight, x.codes)

    return product


def _int8(weight: Int8Weight) -> Product | None:
    if weight.dtype not in (bfloat16, float16):
        return None
    return _of_rows(weight, int8_product, few=weight.dtype == bfloat16)


def _fp8(weight: Fp8Weight) -> Product | None:
    if weight.dtype != bfloat16 or any(size % 16 for size in weight.shape):
        return None
    return _of_rows(weight, fp8_product, few=True)


def _int4(weight: Int4Weight) -> Product | None:
    """Multiply in bf16, after the inputs' codes are dequantized."""
    if weight.dtype != bfloat16 or weight.matrix is None or not few_rows.takes(weight.matrix):
        return None
    return lambda x: _weight_only(x.dequantize(weight.dtype), weight)


def _weight_only(x: Tensor, weight: Int8Weight | Int4Weight | Fp8Weight) -> Tensor:
    """Multiply by a quantized matrix; the inputs stay unquantized."""
    matrix, rows = weight.matrix, x.reshape(-1, x.shape[-1])
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


linear.register(Int8Weight)(LinearOnCodes(_int8, unquantized=_weight_only))
linear.register(Int4Weight)(LinearOnCodes(_int4, unquantized=_weight_only))
linear.register(Fp8Weight)(LinearOnCodes(_fp8, unquantized=_weight_only))
