"""Measure decode attention with 1 to 64 programs sharing a row's keys; needs a GPU. Lesson 04 plots the result.

    python tools/kernel_splits.py --record splits

Timed as in `kernel_speed.py`: replays of a CUDA graph with many calls on distinct inputs. `chosen` marks the number of
splits that the engine takes for this shape.
"""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))

import kernel_speed as speed  # noqa: E402

from minillm.kernels import paged_attention  # noqa: E402
from minillm.ops import triton as kernels  # noqa: E402

ROWS, KEYS, SPLITS = (1, 8, 64), (512, 2048, 8192), (1, 2, 4, 8, 16, 32, 64)


def measured(rows: int, keys: int, splits: int) -> dict:
    """One shape with a fixed number of splits: Gemma 2B's heads, `rows` requests of `keys` keys each."""
    nbytes = (2 * rows * keys * speed.KV_HEADS + 2 * rows * speed.HEADS) * speed.DIM * speed.DTYPE.itemsize
    chosen = paged_attention.decode_splits(
        rows * speed.KV_HEADS, keys, paged_attention._device(torch.device("cuda", 0))
    )
    with mock.patch.object(paged_attention, "decode_splits", lambda *_: splits):
        calls = speed.calls_over(
            speed.attend(kernels.decode_attention),
            lambda: (speed.random_tensor(rows, 1, speed.HEADS, speed.DIM), *speed.paged_rows([keys] * rows)),
            nbytes,
        )
        runs = speed.graph_runs(calls)
    ms = statistics.median(runs)
    return {"kernel": "decode_attention", "rows": rows, "keys": keys, "splits": splits, "chosen": splits == chosen} | {
        "ms": ms, "gb_per_s": nbytes / ms / 1e6, "runs": runs
    }  # fmt: skip


def table() -> Iterator[dict]:
    for rows in ROWS:
        for keys in KEYS:
            for splits in SPLITS:
                yield measured(rows, keys, splits)


if __name__ == "__main__":
    speed.write_table(__doc__, table())
