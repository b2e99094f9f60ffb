"""Prefill attention as a share of cuDNN's speed, by shape; needs a GPU.

    python tools/prefill_speed.py --record prefill-attention

cuDNN's is the fastest backend of torch's `scaled_dot_product_attention` here. It reads contiguous keys and has no soft
cap; ours reads the paged cache, in blocks of 16 tokens ("cache"), or, as in a prompt's first chunk, the keys and values
that have just been computed ("new"). Timed as in `kernel_speed.py`: replays of a CUDA graph with
calls on distinct inputs. Operations are those of the pairs of a query and a key that it sees.
"""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))

from kernel_speed import graph_runs, write_table  # noqa: E402

from minillm.kernels import paged_attention  # noqa: E402
from minillm.kv_cache import LayerCache  # noqa: E402
from minillm.ops import AttentionOptions, Rows, reference  # noqa: E402

SHAPES = {  # heads, KV heads, head_dim, soft cap
    "Gemma 2B": (8, 1, 256, None),
    "Qwen3 0.6B": (16, 8, 128, None),
    "Llama 3.1 8B": (32, 8, 128, None),
    "SmolLM2 135M": (9, 3, 64, None),
    "Gemma 2 2B": (8, 4, 256, 50.0),
}
PROMPTS = ((16, 512), (1, 2048), (4, 2048), (1, 8192))
BLOCK = 16
CALLS, SETS, REPLAYS = 6, 3, 6


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def cudnn_ms(heads: int, kv_heads: int, dim: int, rows: int, tokens: int) -> float:
    q = normal(rows, heads, tokens, dim)
    k, v = (normal(rows, kv_heads, tokens, dim).repeat_interleave(heads // kv_heads, 1) for _ in "kv")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        runs = graph_runs([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)] * CALLS, REPLAYS)
    return statistics.median(runs)


def paged(heads: int, kv_heads: int, dim: int, rows: int, tokens: int) -> tuple:
    """Prompts whose keys are in shuffled blocks: (q, cache, rows, the keys and values, which q's product has too)."""
    each = tokens // BLOCK
    table = torch.randperm(rows * each, device="cuda").int().view(rows, each)
    starts = (torch.arange(rows + 1, device="cuda") * tokens).int()
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device="cuda")
    q, k, v = normal(rows * tokens, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
    held = [torch.empty(rows * each, BLOCK, kv_heads, dim, dtype=q.dtype, device="cuda") for _ in "kv"]
    for blocks, new in zip(held, (k, v), strict=True):
        blocks[table.flatten().long()] = new.unflatten(0, (-1, BLOCK))
    return q.contiguous(), LayerCache(*held), Rows(table, lengths, starts, tokens, rows), (k.contiguous(), v)


def error(inputs: tuple, options: AttentionOptions, new: tuple | None) -> float:
    """Relative error of the last row's last queries, against float64."""
    q, cache, rows, _ = inputs
    few, length = q[-64:].double(), rows.lengths[-1:]
    held = LayerCache(cache.k.double(), cache.v.double())
    ends = torch.tensor([0, 64], device="cuda").int()
    wanted = reference.prefill_attention(few, held, Rows(rows.block_table[-1:], length, ends, 64), options)
    found = paged_attention.prefill_attention(q, cache, rows, options, new)[-64:].double()
    return ((found - wanted).norm() / wanted.norm()).item()


def measured(name: str, rows: int, tokens: int) -> Iterator[dict]:
    heads, kv_heads, dim, cap = SHAPES[name]
    options = AttentionOptions(dim**-0.5, None, cap)
    operations = 4 * dim * heads * rows * tokens * (tokens + 1) // 2
    result = {
        "shape": name,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "soft_cap": cap,
        "dtype": "bfloat16",
    }
    result |= {"prompts": rows, "tokens": tokens, "cudnn_ms": cudnn_ms(heads, kv_heads, dim, rows, tokens)}
    result["cudnn_tflops"] = operations / result["cudnn_ms"] / 1e9
    inputs = [paged(heads, kv_heads, dim, rows, tokens) for _ in range(SETS)]
    for keys in ("cache", "new"):
        given = [(*each[:3], options, each[3] if keys == "new" else None) for each in inputs]
        calls = [lambda each=each: paged_attention.prefill_attention(*each) for each in given]
        ms = statistics.median(graph_runs(calls * (CALLS // SETS), REPLAYS))
        speed = {"ms": ms, "tflops": operations / ms / 1e9, "share_of_cudnn": result["cudnn_ms"] / ms}
        yield result | {"keys": keys} | speed | {"relative_error": error(inputs[0], options, given[0][4])}


def table() -> Iterator[dict]:
    for name in SHAPES:
        for rows, tokens in PROMPTS:
            yield from measured(name, rows, tokens)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    write_table(__doc__, table())
