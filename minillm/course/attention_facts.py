"""Numbers that lesson 04 shows: an H200's records, a running engine's block tables, decode attention on this GPU."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minillm.bench import records
from minillm.kv_cache import LayerCache
from minillm.model import sizing
from minillm.model.config import PRESETS
from minillm.ops import AttentionOptions
from minillm.request import SamplingParams

if TYPE_CHECKING:
    from minillm import LLM

GEMMA = PRESETS["gemma-2b"]
OPTIONS = AttentionOptions(GEMMA.head_dim**-0.5)


class Limits(NamedTuple):
    """Of a GPU, as measured."""

    bytes_per_s: float
    operations_per_s: float


def h200_limits() -> Limits:
    """From the record: how fast an H200 copies memory, and multiplies Gemma 2B's matrices by 2,048 rows in bfloat16."""
    record = records.read("h200/ceiling-h200")
    ms = next(row["step_ms"] for row in record["matrix_products"] if (row["rows"], row["dtype"]) == (2048, "bf16"))
    return Limits(record["copy_TB_per_s"] * 1e12, 2 * 2048 * sizing.parameters(GEMMA) / (ms / 1e3))


def h200_kernel(kernel: str, rows: int) -> dict:
    """The line of the record of kernels for one of them with so many rows."""
    lines = records.read("h200/kernels")["results"]
    return next(line for line in lines if (line["kernel"], line["rows"]) == (kernel, rows))


def h200_shortest_us() -> float:
    """Microseconds of the quickest kernel in the same record."""
    return 1e3 * min(line["ms"] for line in records.read("h200/kernels")["results"])


def h200_speeds() -> dict[str, dict[int, float]]:
    """Tokens a second by number of requests: the engine, one kernel per operation, and with one thing taken away."""
    whole, speeds = ("decode attention", "Triton"), {}
    parts = {
        "the engine": whole,
        "torch's attention": ("decode attention", "torch"),
        "no graphs": ("CUDA graphs", "off"),
    }
    for line in records.read("h200/ablation")["results"]:
        for name, setting in parts.items():
            if setting == (line["group"], line["name"]):
                speeds.setdefault(name, {})[line["requests"]] = line["output_tokens_per_s"]
    return speeds


def two_block_tables(llm: "LLM") -> dict[str, tuple[list[int], int]]:
    """Run two requests, and abort a third: {name: (block table, tokens in the cache)} at the end of it."""
    engine = llm.engine

    def submit(length: int, seed: int) -> Any:
        ids = torch.randint(10, 4000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        tracked = engine.prepare(ids, SamplingParams(max_tokens=80, temperature=0, ignore_eos=True))
        engine.submit(tracked)
        return tracked.request

    def run(steps: int) -> None:
        for _ in range(steps):
            engine.step()

    aborted = submit(40, seed=1)
    run(2)
    first = submit(40, seed=2)
    run(20)
    second = submit(10, seed=3)
    engine.abort(aborted.request_id)
    run(30)
    tables = {}
    # The newest token's key is written in the next step.
    for name, request, length in (("first", first, 40 + 50 - 1), ("second", second, 10 + 30 - 1)):
        row = engine.executor.runner.state.block_table[0, request.row]
        tables[name] = row[: -(-length // 16)].tolist(), length
        engine.abort(request.request_id)
    run(2)
    return tables


def time_decode(ways: Mapping[str, Callable], shapes: Mapping[int, int]) -> None:
    """Print what each way takes on this GPU, and reading the keys at the speed that this GPU copies memory.

    ways: functions of (q, cache, block_table, lengths, options). shapes: rows -> keys of each.
    """
    from triton.testing import do_bench

    def took(function: Callable) -> float:
        return do_bench(function, return_mode="median")

    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    bytes_per_ms = 2 * big.nbytes / took(big.clone)
    for rows, keys in shapes.items():
        shape = (rows * keys // 16, 16, GEMMA.num_kv_heads, GEMMA.head_dim)
        cache = LayerCache(*(torch.randn(shape, device="cuda").bfloat16() for _ in "kv"))
        table = torch.randperm(shape[0], device="cuda").int().view(rows, -1)
        q = torch.randn(rows, 1, GEMMA.num_heads, GEMMA.head_dim, device="cuda").bfloat16()
        lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
        print(f"{rows} rows of {keys} keys; reading them: {2 * cache.k.nbytes / bytes_per_ms:.3f} ms")
        for name, way in ways.items():
            print(f"  {name:28} {took(functools.partial(way, q, cache, table, lengths, OPTIONS)):8.3f} ms")


def decode_with_one_share(*given: Any) -> torch.Tensor:
    """The engine's decode attention with one program for each row and KV head, without a split of the keys."""
    from minillm.kernels import paged_attention

    splits, paged_attention.decode_splits = paged_attention.decode_splits, lambda *_: 1
    try:
        return paged_attention.decode_attention(*given)
    finally:
        paged_attention.decode_splits = splits
