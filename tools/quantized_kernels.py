"""Measure products with quantized weights at Gemma 2B's shapes, next to torch's and the bf16 product; needs a GPU.

    python tools/quantized_kernels.py --record quantized-kernels

Timed as in `kernel_speed.py`: replays of a CUDA graph with calls on distinct matrices. `share_of_copy` is the bytes of
the matrix (codes and scales) per second, divided by the bytes per second that a large copy reads and writes.
`bf16_ms` is torch's product with a bf16 matrix of the same shape, `tinygemm_ms` torch's int4 product, which torchao
uses. Inputs of "w8a8" and fp8 are quantized beforehand (`quantize_ms`); only the kernel for one row quantizes them
itself. `scaled_mm_ms` is torch's product of the same fp8 codes with a scale for each row and column; for many rows,
with exact and with fast accumulation, and with the relative errors of both next to what rounding to fp8 loses.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

import kernel_speed as speed  # noqa: E402

from minillm.kernels import few_rows, fp8_rows, integer_rows  # noqa: E402
from minillm.kernels.arguments import CodeMatrix  # noqa: E402
from minillm.kernels.quantized_inputs import fp8_product, int8_product, quantize_rows  # noqa: E402

MATRICES = {"qkv": (2560, 2048), "attention_out": (2048, 2048), "gate_up": (32768, 2048), "down": (2048, 16384)}
HEAD = {"head": (256000, 2048)}
GROUP = 128
E4M3 = torch.float8_e4m3fn


def median_ms(call: Callable, matrices: list) -> float:
    calls = [lambda matrix=matrix: call(matrix) for matrix in matrices]
    return statistics.median(speed.graph_runs(calls, 9))


@cache
def copy_gb_per_s() -> float:
    """Bytes read and written by a kernel that copies 2 GB."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    ms = statistics.median(speed.graph_runs([lambda: torch.neg(source, out=target)], 9))
    return 2 * source.nbytes / ms / 1e6


def copies(nbytes: int) -> int:
    return max(2, min(64, speed.COLD // nbytes + 1))


def code_matrix(rows: int, columns: int, kind: str) -> CodeMatrix:
    if kind == "fp8":
        codes = torch.randint(0, 120, (rows, columns), dtype=torch.uint8, device="cuda")  # no NaN
        scales = torch.rand(rows, device="cuda") + 0.5
        return CodeMatrix(8, codes.view(torch.int32), scales, fp8=True, rounded_inputs=True)
    bits = int(kind.removeprefix("int"))
    words = torch.randint(-(2**31), 2**31 - 1, (rows, columns * bits // 32), dtype=torch.int32, device="cuda")
    if bits == 8:
        return CodeMatrix(8, words, torch.rand(rows, device="cuda") + 0.5)
    return CodeMatrix(4, words, (torch.rand(rows, columns // GROUP, device="cuda") + 0.5).bfloat16())


def scaled_mm(codes: torch.Tensor, scales: torch.Tensor, matrix: CodeMatrix) -> torch.Tensor:
    weight = matrix.bytes.view(torch.float8_e4m3fn)
    return torch._scaled_mm(codes, weight.t(), scales, matrix.scales[None], out_dtype=torch.bfloat16)


def tinygemm_ms(rows: int, columns: int, x: torch.Tensor) -> float | None:
    """torch's int4 product, or None where it does not run."""
    try:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
        packed = [torch._convert_weight_to_int4pack(codes, 8) for _ in range(copies(codes.nbytes))]
        scales = torch.rand(columns // GROUP, rows, 2, device="cuda").bfloat16()
        return median_ms(lambda weight: torch._weight_int4pack_mm(x, weight, GROUP, scales), packed)
    except (RuntimeError, AttributeError):
        return None


def dense_ms(rows: int, columns: int, x: torch.Tensor) -> float:
    weights = [speed.random_tensor(rows, columns) for _ in range(copies(2 * rows * columns))]
    return median_ms(lambda weight: F.linear(x, weight), weights)


def few(name: str, rows: int, columns: int, tokens: int) -> Iterator[dict]:
    x = speed.random_tensor(tokens, columns)
    codes, scales = quantize_rows(x, E4M3)
    calls = {
        "integer_rows": lambda matrix: integer_rows.product(x, matrix),
        "fp8_rows": lambda matrix: fp8_rows.product(x, matrix),
        "few_rows": lambda matrix: few_rows.product(*((codes, matrix, scales) if matrix.fp8 else (x, matrix))),
    }
    common = {"matrix": name, "shape": f"[{rows}, {columns}]", "rows": tokens}
    bf16 = dense_ms(rows, columns, x)
    for kind in ("int8", "fp8", "int4"):
        nbytes = rows * columns // 2 + rows * columns // GROUP * 2 if kind == "int4" else rows * columns
        matrices = [code_matrix(rows, columns, kind) for _ in range(copies(nbytes))]
        kernel = "few_rows" if tokens > 1 else "fp8_rows" if kind == "fp8" else "integer_rows"
        ms = median_ms(calls[kernel], matrices)
        found = {"kernel": kernel, "quantization": kind + (f" g{GROUP}" if kind == "int4" else "")} | common
        gb_per_s = nbytes / ms / 1e6
        found |= {"ms": ms, "gb_per_s": gb_per_s, "share_of_copy": gb_per_s / copy_gb_per_s(), "bf16_ms": bf16}
        if kind == "int4":
            found["tinygemm_ms"] = tinygemm_ms(rows, columns, x)
        if kind == "fp8":
            found["scaled_mm_ms"] = median_ms(lambda matrix: scaled_mm(codes, scales, matrix), matrices)
            found["quantize_ms"] = median_ms(lambda _: quantize_rows(x, torch.float8_e4m3fn), [0] * 4)
        yield found


def many(name: str, rows: int, columns: int, tokens: int) -> Iterator[dict]:
    """Codes on both sides: int8 on integer tensor cores, and fp8 by the library."""
    x, dense = speed.random_tensor(tokens, columns), speed.random_tensor(rows, columns)
    bf16 = dense_ms(rows, columns, x)
    for dtype in (torch.int8, E4M3):
        yield {"matrix": name, "shape": f"[{rows}, {columns}]", "rows": tokens, "bf16_ms": bf16} | on_codes(
            dtype, x, dense
        )


def on_codes(dtype: torch.dtype, x: torch.Tensor, dense: torch.Tensor) -> dict:
    integer = dtype == torch.int8
    product = int8_product if integer else fp8_product
    (codes, x_scales), (weight, scales) = quantize_rows(x, dtype), quantize_rows(dense, dtype)
    scales = scales.flatten()
    matrices = [weight.clone() for _ in range(copies(weight.nbytes))]
    ms = median_ms(lambda weight: product(codes, x_scales, weight, scales, torch.bfloat16), matrices)
    found = {
        "kernel": product.__name__, "quantization": "w8a8" if integer else "fp8", "ms": ms,
        "tflops": 2 * x.numel() * len(dense) / ms / 1e9,
        "quantize_ms": median_ms(lambda _: quantize_rows(x, dtype), [0] * 4),
    }  # fmt: skip
    if integer:
        return found | {"torch_int_mm_ms": median_ms(lambda weight: torch._int_mm(codes, weight.t()), matrices)}
    return found | accumulated(codes, x_scales, matrices, scales, dense, x)


def accumulated(
    codes: torch.Tensor, x_scales: torch.Tensor, matrices: list, scales: torch.Tensor, dense: torch.Tensor,
    x: torch.Tensor,
) -> dict:  # fmt: skip
    """Times of the library's product with and without fast accumulation, and what each loses, next to rounding."""
    found: dict = {}
    numbers = (matrices[0].float() * scales[:, None])[:2048]
    wanted = (codes.double() * x_scales.double())[:512] @ numbers.double().T
    for name, fast in (("exact", False), ("fast", True)):

        def call(weight: torch.Tensor, fast: bool = fast) -> torch.Tensor:
            return torch._scaled_mm(
                codes, weight.t(), x_scales, scales[None], out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        got = call(matrices[0])[:512, :2048].double()
        found[f"scaled_mm_{name}_ms"] = median_ms(call, matrices)
        found[f"{name}_relative_error"] = ((got - wanted).norm() / wanted.norm()).item()
    exact = x[:512].double() @ dense[:2048].double().T
    return found | {"rounding_relative_error": ((wanted - exact).norm() / exact.norm()).item()}


def table() -> Iterator[dict]:
    yield {"kernel": "copy", "gb_per_s": copy_gb_per_s()}
    for name, (rows, columns) in (MATRICES | HEAD).items():
        for tokens in (1, 4, 8, 16, 64):
            yield from few(name, rows, columns, tokens)
        torch.cuda.empty_cache()
    for name, (rows, columns) in MATRICES.items():
        for tokens in (128, 512, 2048, 8192):
            yield from many(name, rows, columns, tokens)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    speed.write_table(__doc__, table())
