"""Products of one row with fp8 codes equal those with the dequantized matrix."""

import pytest
import torch

from minillm.ops import reference
from minillm.quantization import Activations
from tests.kernels.compare import COMPILED, DTYPES, assert_close, random_tensor
from tests.kernels.matrices import fp8_matrix

fp8_rows = pytest.importorskip("minillm.kernels.fp8_rows", reason="triton is not installed here")
from minillm.kernels.quantized_inputs import quantize_rows  # noqa: E402  needs triton

pytestmark = pytest.mark.explore
SHAPES = [  # rows, columns, what is fused
    (23, 64, ()),
    (9, 100, ("norm",)),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16] if COMPILED else DTYPES)  # compiled, `takes` refuses float32
@pytest.mark.parametrize("inputs", [None, "dynamic", "static"])
@pytest.mark.parametrize(("rows", "columns", "options"), SHAPES)
def test_a_product_equals_that_with_the_dequantized_matrix(rows, columns, options, inputs, dtype, device):
    x, residual = (random_tensor(1, columns, dtype=dtype, device=device, scale=2.0) for _ in range(2))
    x[0, 3], x[0, 5:9] = 300.0, 0.001  # an outlier, and numbers that become small codes
    norm = 1 + torch.rand(columns, device=device) if "norm" in options else None
    activation = next((each for each in options if each in ("gelu_tanh", "silu")), None)
    matrix, dense = fp8_matrix(rows * (2 if activation else 1), columns, device)
    scale = torch.tensor([0.005], device=device) if inputs == "static" else None  # some inputs are clipped
    matrix = matrix._replace(rounded_inputs=inputs is not None, input_scale=scale)
    out, total = fp8_rows.product(
        x, matrix, norm=norm, eps=1e-3, residual=residual if "residual" in options else None, activation=activation
    )
    summed = x + residual if "residual" in options else x
    wanted = summed.double()
    if norm is not None:
        wanted = reference.rms_norm(summed if inputs else wanted, norm, 1e-3)
    if inputs:
        wanted = Activations("fp8", inputs == "static").quantize(wanted.to(dtype), scale).dequantize(torch.float64)
    wanted = wanted.double() @ dense.T
    if activation:
        wanted = reference.gated_activation(wanted, activation)
    # An input next to the middle of two codes may become either: one step of one input, less than rounding does to all.
    # The interpreter cuts bfloat16 numbers off, so more inputs do.
    times = (300 if dtype == torch.float32 else 2 if COMPILED else 4) if inputs else 1
    assert_close("fp8_rows.product" + (f", {inputs} inputs" if inputs else ""), out, wanted, dtype, times=times)
    if "residual" in options:
        assert_close("fp8_rows.product", total, summed, dtype)
    else:
        assert total is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_zero_give_zeros(dtype, device):
    matrix, _ = fp8_matrix(7, 64, device)
    out, _ = fp8_rows.product(torch.zeros(1, 64, dtype=dtype, device=device), matrix._replace(rounded_inputs=True))
    assert out.equal(torch.zeros_like(out))


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_clipped_to_the_largest_code(wrong, rounded, device):
    matrix, _ = fp8_matrix(7, 64, device)
    x = torch.ones(1, 64, device=device)
    x[0, 5] = wrong
    if COMPILED:  # the interpreter has no e4m3
        codes, _ = quantize_rows(x, torch.float8_e4m3fn)
        assert codes.float()[0, 5].isnan() and not codes.float()[0, :5].isnan().any()
    out, _ = fp8_rows.product(x, matrix._replace(rounded_inputs=rounded))
    assert out.isnan().all()


def test_inputs_are_rounded_to_the_nearest_code_halves_to_even(device):
    """A matrix of ones and zeros shows each rounded input."""
    codes = torch.eye(16, 16, device=device).to(torch.float8_e4m3fn)
    matrix = fp8_matrix(16, 16, device)[0]._replace(
        words=codes.view(torch.int32), scales=torch.ones(16, device=device), rounded_inputs=True,
        input_scale=torch.ones(1, device=device),
    )  # fmt: skip
    ties, clipped = [17, 18, 19, -17, -19, 2**-10], [1e9, -449]
    numbers = [*ties, *clipped, 0.002, 0.0009, 5 * 2**-10, 0, 447, 1, 2, 3]
    x = torch.tensor([numbers], device=device)
    out, _ = fp8_rows.product(x, matrix)
    assert out.equal(Activations("fp8").quantize(x, matrix.input_scale).dequantize(torch.float32))


def test_a_matrix_must_have_whole_words_and_a_gpu_fp8(monkeypatch):
    gpu, dtype = torch.device("cuda"), torch.bfloat16
    assert [fp8_rows.takes(columns, dtype, torch.device("cpu")) for columns in (64, 36, 34)] == [True, True, False]
    for capability, has_fp8 in (((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert [fp8_rows.takes(columns, dtype, gpu) for columns in (64, 34)] == [has_fp8, False]
    assert not fp8_rows.takes(64, torch.float32, gpu), "a GPU adds up products in float16"
