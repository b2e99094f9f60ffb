"""Products of one row with int8 and int4 codes equal those with the dequantized matrix."""

import pytest
import torch

from minillm.ops import reference
from minillm.quantization import Activations
from tests.kernels.compare import COMPILED, DTYPES, assert_close, random_tensor
from tests.kernels.matrices import int4_matrix, int8_matrix
from tests.proofs import pairwise

integer_rows = pytest.importorskip("minillm.kernels.integer_rows", reason="triton is not installed here")
pytestmark = pytest.mark.explore
SHAPES = [  # rows, columns, what is fused
    (23, 64, ()),
    (9, 96, ("norm",)),
    (23, 160, ("norm", "residual")),
    (14, 64, ("norm", "residual", "gelu_tanh")),
    (5, 96, ("silu",)),
]
if COMPILED:
    SHAPES += [
        (2560, 2048, ("norm", "residual")),
        (2048, 2048, ()),
        (16384, 2048, ("norm", "residual", "gelu_tanh")),
        (2048, 16384, ()),
        (40001, 2048, ("norm", "residual")),
        (77, 5024, ()),
    ]


@pairwise({
    "rows, columns, options": SHAPES, "kind": ["int8", "int4", "int4 with zero points"], "dtype": DTYPES,
})  # fmt: skip
def test_a_product_equals_that_with_the_dequantized_matrix(rows, columns, options, kind, dtype, device):
    x, residual = (random_tensor(1, columns, dtype=dtype, device=device, scale=2.0) for _ in range(2))
    x[0, 3] = 300.0  # an outlier
    norm = 1 + torch.rand(columns, device=device) if "norm" in options else None
    activation = next((each for each in options if each in ("gelu_tanh", "silu")), None)
    count = rows * (2 if activation else 1)
    if kind == "int8":
        matrix, dense = int8_matrix(count, columns, device)
    else:
        group = 64 if columns % 64 == 0 else 32
        matrix, dense = int4_matrix(count, columns, group, kind != "int4", dtype, device)
    out, total = integer_rows.product(
        x, matrix, norm=norm, eps=1e-3, residual=residual if "residual" in options else None, activation=activation
    )
    inputs = x + residual if "residual" in options else x
    if norm is not None:
        inputs = reference.rms_norm(inputs.double(), norm, 1e-3)
    wanted = inputs.double() @ dense.T
    if activation:
        wanted = reference.gated_activation(wanted, activation)
    assert_close(f"integer_rows.product, {kind}", out, wanted, dtype)
    if "residual" in options:
        assert_close(f"integer_rows.product, {kind}", total, x + residual, dtype)
    else:
        assert total is None


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "options"), SHAPES)
def test_inputs_are_rounded_to_int8_if_the_matrix_says_so(rows, columns, options, dtype, static, device):
    x, residual = (random_tensor(1, columns, dtype=dtype, device=device, scale=2.0) for _ in range(2))
    norm = 1 + torch.rand(columns, device=device) if "norm" in options else None
    activation = next((each for each in options if each in ("gelu_tanh", "silu")), None)
    matrix, dense = int8_matrix(rows * (2 if activation else 1), columns, device)
    scale = torch.tensor([0.03], device=device) if static else None  # some inputs are clipped
    out, _ = integer_rows.product(
        x, matrix._replace(rounded_inputs=True, input_scale=scale), norm=norm, eps=1e-3,
        residual=residual if "residual" in options else None, activation=activation,
    )  # fmt: skip
    inputs = x + residual if "residual" in options else x
    if norm is not None:
        inputs = reference.rms_norm(inputs, norm, 1e-3)
    rounded = Activations("int8", static).quantize(inputs, scale).dequantize(torch.float64)
    wanted = rounded @ dense.T
    if activation:
        wanted = reference.gated_activation(wanted, activation)
    # An input next to a half may be rounded to either side: one step of one input, less than rounding does to all.
    assert_close("integer_rows.product, int8 inputs", out, wanted, dtype, times=300 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_fixed_point_follows_the_size_of_the_inputs(size, dtype, device):
    matrix, dense = int8_matrix(7, 64, device)
    x = (random_tensor(1, 64, dtype=torch.float32, device=device) * size).to(dtype)
    x[0, :16] = 0.0  # a group of zeros
    out, _ = integer_rows.product(x, matrix)
    assert_close("integer_rows.product, scaled", out, x.double() @ dense.T, dtype)


def test_a_matrix_must_have_whole_words_and_groups_of_whole_quads():
    assert [integer_rows.takes(columns, 8, columns) for columns in (64, 36, 34)] == [True, True, False]
    assert [integer_rows.takes(*sizes) for sizes in ((128, 4, 64), (96, 4, 32), (96, 4, 48), (64, 4, 16))] == [
        True, True, False, False,
    ]  # fmt: skip
