"""Measure the gated activation kernel with every tile size and warp count; needs a GPU. Lesson 11 plots the result.

    python tools/kernel_tiles.py --record tiles

Timed as in `kernel_speed.py`: replays of a CUDA graph with many calls on distinct inputs.
"""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))

from kernel_speed import FFN, calls_over, graph_runs, random_tensor, write_table  # noqa: E402

from minillm.kernels.activation import gated_activation_kernel  # noqa: E402

ROWS, TILES, WARPS = (1, 3000), (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16)


def gate(gate_up: torch.Tensor, out: torch.Tensor, tile: int, warps: int) -> None:
    grid = (len(out), triton.cdiv(FFN, tile))
    gated_activation_kernel[grid](gate_up, out, None, None, 2 * FFN, SIZE=FFN, GELU=True, TILE=tile, num_warps=warps)


def measured(rows: int, tile: int, warps: int) -> dict:
    nbytes = 3 * rows * FFN * 2
    calls = calls_over(
        lambda *inputs: gate(*inputs, tile, warps),
        lambda: (random_tensor(rows, 2 * FFN), torch.empty(rows, FFN, dtype=torch.bfloat16, device="cuda")),
        nbytes,
    )
    runs = graph_runs(calls)
    ms = statistics.median(runs)
    return {"kernel": "gated_activation", "shape": f"[{rows}, {2 * FFN}]", "dtype": "bfloat16", "rows": rows} | {
        "tile": tile, "warps": warps, "ms": ms, "gb_per_s": nbytes / ms / 1e6, "runs": runs
    }  # fmt: skip


def table() -> Iterator[dict]:
    for rows in ROWS:
        for tile in TILES:
            for warps in WARPS:
                yield measured(rows, tile, warps)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    write_table(__doc__, table())
