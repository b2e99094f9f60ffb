"""Products of 1 to 64 rows with int8, fp8 and int4 codes equal those with the dequantized matrix."""

import pytest
import torch

from tests.kernels.compare import COMPILED, assert_close, random_tensor
from tests.kernels.matrices import fp8_codes, fp8_matrix, int4_matrix, int8_matrix

few_rows = pytest.importorskip("minillm.kernels.few_rows", reason="triton is not installed here")
pytestmark = pytest.mark.explore
BF16 = torch.bfloat16
SHAPES = [(1, 70, 64), (5, 64, 160), (17, 130, 256), (64, 20, 96)]  # tokens, rows, columns
if COMPILED:
    SHAPES += [(8, 2560, 2048), (16, 2048, 16384), (33, 32768, 2048), (64, 2048, 2048), (3, 100, 5024)]


def matrix_of(kind: str, rows: int, columns: int, device):
    if kind in ("int8", "fp8"):
        return (int8_matrix if kind == "int8" else fp8_matrix)(rows, columns, device)
    group = next(size for size in (128, 32) if columns % size == 0)
    return int4_matrix(rows, columns, group, kind != "int4", BF16, device)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "int4 with zero points"])
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES)
def test_a_product_equals_that_with_the_dequantized_matrix(tokens, rows, columns, kind, device):
    x = random_tensor(tokens, columns, dtype=BF16, device=device)
    matrix, dense = matrix_of(kind, rows, columns, device)
    wanted = x.double() @ dense.T
    for _ in range(2):  # the second run finds the counters as the first left them
        assert_close(f"few_rows.product, {kind}", few_rows.product(x, matrix), wanted, BF16)
    assert not few_rows.finished(x.device).any()
    assert_close(f"few_rows.dequantized, {kind}", few_rows.dequantized(matrix), dense, BF16)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES)
def test_a_product_of_codes(tokens, rows, columns, kind, device):
    codes = torch.randint(-128, 128, (tokens, columns), dtype=torch.int8, device=device)
    if kind == "fp8":
        codes = fp8_codes(tokens, columns, device=device)
    scales = torch.rand(tokens, 1, device=device) + 0.1
    matrix, dense = matrix_of(kind, rows, columns, device)
    wanted = (codes.double() * scales.double()) @ dense.T
    assert_close(f"few_rows.product, {kind} inputs", few_rows.product(codes, matrix, scales), wanted, BF16)


def test_small_matrices_are_split_and_pieces_stay_within_a_group():
    launches = {
        name: few_rows.default_config(*sizes, 132)
        for name, sizes in {
            "qkv": (2560, 2048, 128, 16), "down": (2048, 16384, 128, 16), "gate_up": (32768, 2048, 128, 16),
            "many rows of x": (2560, 2048, 128, 64), "small groups": (2560, 2048, 96, 16),
        }.items()
    }  # fmt: skip
    assert {name: (launch.piece, launch.splits) for name, launch in launches.items()} == {
        "qkv": (128, 8), "down": (128, 16), "gate_up": (128, 1), "many rows of x": (128, 2), "small groups": (32, 8),
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [0, 65])
def test_too_many_rows_are_refused(tokens, device):
    matrix, _ = int8_matrix(2, 64, device)
    with pytest.raises(ValueError, match=f"x has {tokens} rows; this kernel takes 1 to 64"):
        few_rows.product(torch.zeros(tokens, 64, dtype=BF16, device=device), matrix)
