"""Measure attention over caches in int8 and fp8 next to one in bf16, at Gemma 2B's shapes; needs a GPU.

    python tools/cache_speed.py --record cache-speed

Each row is one number of requests with one length: a decode step, or prompts of which a step takes at most MOST tokens.
The three caches alternate, in RUNS runs; a time is the median over them of a CUDA graph's calls, which rotate over
distinct caches, so that the L2 cache holds none of them. `times_bf16` is bf16's time divided by this one's. Rows named
rotary_write measure the kernel that rotates keys and writes them to the cache.
"""

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import kernel_speed as speed  # noqa: E402

from minillm.kernels import rope_cache  # noqa: E402
from minillm.kv_cache import LayerCache  # noqa: E402
from minillm.kv_cache.layer_cache import CacheSpec  # noqa: E402
from minillm.ops import Rows  # noqa: E402
from minillm.ops import triton as kernels  # noqa: E402

FORMATS = ("auto", "int8", "fp8")
ROWS, KEYS = (1, 16, 64, 512), (128, 512, 2048, 8192)
RUNS = 5
MOST = 16384  # tokens of prompts in a step
COLD = 192 << 20  # bytes of distinct caches


def filled(name: str, tokens: int) -> LayerCache:
    spec = CacheSpec.of(name, speed.KV_HEADS, speed.DIM, speed.DTYPE)
    cache = spec.allocate(tokens // speed.BLOCK, speed.BLOCK, torch.device("cuda"))
    cache.randomize()
    return cache


def caches(name: str, rows: int, keys: int, queries: int, most: int) -> list[tuple[LayerCache, Rows]]:
    """Distinct caches of `rows` rows with `keys` keys and `queries` queries each."""
    blocks = rows * keys // speed.BLOCK
    nbytes = rows * keys * CacheSpec.of(name, speed.KV_HEADS, speed.DIM, speed.DTYPE).bytes_per_token
    lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * queries
    return [
        (
            filled(name, rows * keys),
            Rows(torch.randperm(blocks, device="cuda").int().view(rows, -1), lengths.clone(), starts, queries),
        )
        for _ in range(max(1, min(most, COLD // nbytes + 1)))
    ]


def rotating(sets: list, most: int, call: Callable) -> list[Callable]:
    return [lambda one=one: call(*one) for _, one in zip(range(max(most, len(sets))), itertools.cycle(sets))]


def alternating(variants: dict[str, list[Callable]]) -> dict[str, list[float]]:
    """Milliseconds per call in RUNS rounds, in which each variant runs once."""
    graphs = {}
    for name, calls in variants.items():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
    runs: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(RUNS + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if round_:  # the first replay loads the graph
                runs[name].append(start.elapsed_time(end) / len(variants[name]))
    return runs


def rows_of(kernel: str, requests: int, tokens: int, variants: dict[str, list[Callable]]) -> Iterator[dict]:
    runs = alternating(variants)
    medians = {name: statistics.median(each) for name, each in runs.items()}
    for name, ms in medians.items():
        yield {
            "kernel": kernel, "model": "gemma-2b", "kv_cache_dtype": "bfloat16" if name == "auto" else name,
            "requests": requests, "tokens": tokens, "ms": ms, "times_bf16": medians["auto"] / ms, "runs": runs[name],
        }  # fmt: skip


def decode(requests: int, tokens: int) -> Iterator[dict]:
    q = speed.random_tensor(requests, 1, speed.HEADS, speed.DIM)
    yield from rows_of("decode_attention", requests, tokens, {
        name: rotating(
            caches(name, requests, tokens, 1, 16), 16, lambda *held: kernels.decode_attention(q, *held, speed.OPTIONS)
        )
        for name in FORMATS
    })  # fmt: skip


def prefill(requests: int, tokens: int) -> Iterator[dict]:
    q = speed.random_tensor(requests * tokens, speed.HEADS, speed.DIM)

    def attend(*held):
        return kernels.prefill_attention(q, *held, speed.OPTIONS)

    yield from rows_of("prefill_attention", requests, tokens, {
        name: rotating(caches(name, requests, tokens, tokens, 6), 6, attend) for name in FORMATS
    })  # fmt: skip


def rotary_write(tokens: int) -> Iterator[dict]:
    qkv = speed.random_tensor(tokens, speed.HEADS + 2 * speed.KV_HEADS, speed.DIM)
    q, k, v = qkv.split((speed.HEADS, speed.KV_HEADS, speed.KV_HEADS), 1)
    angles, room = speed.rotations(tokens).to(speed.DTYPE), max(tokens, 4096)
    slots = torch.randperm(room, device="cuda")[:tokens]
    yield from rows_of("rotary_write", tokens, 1, {
        name: rotating(
            [(filled(name, room),) for _ in range(4)], 16,
            lambda cache: rope_cache.rotary_write(q, k, v, angles, cache, slots),
        )
        for name in FORMATS
    })  # fmt: skip


def table() -> Iterator[dict]:
    for requests, tokens in itertools.product(ROWS, KEYS):
        yield from decode(requests, tokens)
        torch.cuda.empty_cache()
    for requests, tokens in itertools.product(ROWS, KEYS):
        if requests * tokens <= MOST:
            yield from prefill(requests, tokens)
    torch.cuda.empty_cache()
    for tokens in (1, 16, 64, 512, 8192):
        yield from rotary_write(tokens)


if __name__ == "__main__":
    with torch.inference_mode():
        speed.write_table(__doc__, table())
