"""Quantizing rows, products of int8 rows, and gathering int8 rows equal what plain torch computes."""

import pytest
import torch

from minillm.quantization import Activations
from minillm.quantization.activations import DTYPES
from tests.kernels.compare import COMPILED, assert_close, random_tensor

quantized_inputs = pytest.importorskip("minillm.kernels.quantized_inputs", reason="triton is not installed here")
from minillm.kernels import activation, normalization  # noqa: E402  needs triton
from minillm.kernels.embedding import code_embedding  # noqa: E402  needs triton

pytestmark = pytest.mark.explore
BF16 = torch.bfloat16


@pytest.mark.parametrize("static", [False, True])
# The interpreter cuts FP8 numbers off instead of rounding them.
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (5, 100), *([(700, 2048), (70, 16384)] if COMPILED else [])])
def test_rows_are_quantized_as_the_reference_does(tokens, columns, kind, static, device):
    x = random_tensor(tokens, columns, dtype=BF16, device=device, scale=3.0)
    x[0] = 0.0
    scale = torch.tensor([0.02], device=device) if static else None  # some values are clipped
    codes, scales = quantized_inputs.quantize_rows(x, DTYPES[kind], scale)
    wanted = Activations(kind, static).quantize(x, scale)
    torch.testing.assert_close(scales, wanted.scales, rtol=1e-6, atol=0)
    # A quotient next to a half may be rounded to either side.
    found, exact = codes.double(), (x.double() / wanted.scales.double()).clamp(-448, 448)
    step = 1.0 if kind == "int8" else 32.0
    assert (found - wanted.codes.double()).abs().max() <= step
    assert (codes != wanted.codes).float().mean() <= 1e-3 and (found - exact.clamp(*_bounds(kind))).abs().max() <= step


def _bounds(kind):
    return (-128, 127) if kind == "int8" else (-448, 448)


def test_halves_are_rounded_to_even(device):
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5]], device=device)
    codes, _ = quantized_inputs.quantize_rows(x, torch.int8, torch.ones(1, device=device))
    assert codes.tolist() == [[0, 2, 2, 0, -2, -2, 126, 127]]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "columns"),
    [(3, 64), (2, 100), (0, 64), *([(700, 2048), (70, 4096), (70, 16384), (9, 32768)] if COMPILED else [])],
)
def test_kernels_that_compute_rows_quantize_them_as_quantize_rows_does(tokens, columns, dtype, kind, static, device):
    """Bit by bit: the codes are of the rows in the model's dtype, with the scales of those."""
    weight = torch.rand(columns, device=device) + 0.5  # first: kernels may read it before the last launch has ended
    x, residual = (random_tensor(tokens, columns + 8, dtype=dtype, device=device)[:, :columns] for _ in "xr")
    gate_up = random_tensor(tokens, 3 * columns, dtype=dtype, device=device, scale=2.0)[:, : 2 * columns]  # not dense
    x[:1], residual[:1], gate_up[:1] = 0.0, 0.0, 0.0
    scale = torch.tensor([0.02], device=device) if static else None
    rounding = DTYPES[kind], scale
    *added, total = normalization.add_rms_norm_codes(x, residual, weight, 1e-6, *rounding)
    normed, wanted_total = normalization.add_rms_norm(x, residual, weight, 1e-6)
    assert total.equal(wanted_total)
    results = [(normed, added)]
    normed = normalization.rms_norm(x, weight, 1e-6)
    results.append((normed, normalization.rms_norm_codes(x, weight, 1e-6, *rounding)))
    for name in ("gelu_tanh", "silu"):
        results.append(
            (activation.gated_activation(gate_up, name), activation.gated_activation_codes(gate_up, name, *rounding))
        )
    for computed, (codes, scales) in results:
        wanted, wanted_scales = quantized_inputs.quantize_rows(computed, *rounding)
        assert codes.dtype == wanted.dtype and codes.float().equal(wanted.float())
        assert scales.equal(wanted_scales) and scales.shape == (tokens, 1)


def test_rows_too_long_to_hold_are_refused(device):
    gate_up = torch.zeros(1, 2 * activation.MOST_COLUMNS + 2, dtype=BF16, device=device)
    with pytest.raises(ValueError, match="a row has 32769 columns; this kernel holds up to 32768"):
        activation.gated_activation_codes(gate_up, "silu", torch.int8)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(70, 66, 160), *([(513, 2560, 2048), (2048, 2048, 16384)] if COMPILED else [])]
)
def test_a_product_of_int8_rows(tokens, rows, columns, device):
    x, weight = (torch.randint(-128, 128, (n, columns), dtype=torch.int8, device=device) for n in (tokens, rows))
    x_scales, scales = torch.rand(tokens, 1, device=device) + 0.1, torch.rand(rows, device=device) + 0.1
    wanted = (x.double() * x_scales.double()) @ (weight.double() * scales.double()[:, None]).T
    found = quantized_inputs.int8_product(x, x_scales, weight, scales, BF16)
    assert_close("quantized_inputs.int8_product", found, wanted, BF16)


def test_large_tiles_need_about_as_many_as_processors():
    tiles = [quantized_inputs.default_config(*sizes, 132).tile for sizes in ((2048, 2560), (512, 2048), (128, 32768))]
    assert tiles == [128, 64, 128]


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_rows_of_a_table_of_codes(kind, device):
    codes = torch.randint(-120, 120, (50, 96), device=device).to(kind)
    scales, ids = torch.rand(50, device=device), torch.tensor([3, 49, 0, 3], device=device)
    wanted = (codes.float() * scales[:, None]).bfloat16()[ids] * 7.0
    found = code_embedding(ids, codes, scales, 7.0, BF16)
    assert found.dtype == BF16
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (5, 40), *([(300, 2048), (3, 5000)] if COMPILED else [])])
def test_results_are_multiplied_by_the_scales_of_their_rows_and_columns(tokens, rows, device):
    x = random_tensor(tokens, rows, dtype=BF16, device=device)
    x_scales, scales = torch.rand(tokens, 1, device=device), torch.rand(rows, device=device)
    wanted = x.double() * x_scales.double() * scales.double()
    found = quantized_inputs.scaled(x, x_scales, scales)
    assert found is x
    assert_close("scaled", found, wanted, BF16)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "afterwards"),
    [
        (100, 2048, 16384, True), (640, 2048, 16384, True), (768, 2048, 16384, False), (3000, 2048, 16384, False),
        (384, 2560, 2048, True), (512, 2560, 2048, False), (65, 32768, 2048, False),
    ],
)  # fmt: skip
def test_scales_are_applied_afterwards_while_processors_would_idle(tokens, rows, columns, afterwards):
    """Gemma 2B on an H200: down has 5 tiles of tokens times 16 of rows, 61% of 132, or 6 times 16, 73%."""
    assert quantized_inputs.scales_afterwards(tokens, rows, columns, 132) == afterwards


@pytest.mark.gpu  # the library multiplies FP8 numbers there only
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(70, 48, 64), (200, 2048, 16384), (3000, 256, 4096)])
def test_fp8_products_of_many_rows_equal_those_of_the_numbers(tokens, rows, columns, device):
    x, weight = (
        random_tensor(n, columns, dtype=torch.float32, device=device).to(torch.float8_e4m3fn) for n in (tokens, rows)
    )
    x_scales, scales = torch.rand(tokens, 1, device=device), torch.rand(rows, device=device)
    wanted = (x.double() * x_scales.double()) @ (weight.double() * scales.double()[:, None]).T
    found = quantized_inputs.fp8_product(x, x_scales, weight, scales, BF16)
    assert_close("fp8_product", found, wanted, BF16, times=2)
