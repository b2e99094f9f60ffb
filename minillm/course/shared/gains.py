"""Tell how much faster quantized weights made the engine, from the committed record of an H200.  Lessons 05 to 07."""

from collections.abc import Iterable

from minillm.bench import records

from .shapes import SHAPES

RECORD, PRODUCTS = "h200/quantization", "h200/quantized-kernels"
LAYERS = SHAPES["Gemma 2B"].num_layers


def report(methods: Iterable[str]) -> None:
    """Print the tokens per second of each method, as multiples of bfloat16's in the same run, by requests at once.

    All with a cache in bfloat16.
    """
    results = records.read(RECORD)["results"]
    loads = {row["workload"]: row["requests"] for row in results}
    methods = list(methods)
    wide = max(22, *map(len, methods))
    print("requests at once".ljust(wide), "".join(f"{count:>8,}" for count in loads.values()))
    for method in methods:
        rows = [row for row in results if (row["quantization"], row["kv_cache_dtype"]) == (method, "bfloat16")]
        gains = {row["workload"]: row["times_bf16"] for row in rows}
        print(method.ljust(wide), "".join(f"{gains[load]:8.2f}" for load in loads))


def milliseconds(method: str, requests: int) -> float:
    """The time per token of each of so many requests at once, from 1 to 64, in the same record."""
    rates = [
        row["output_tokens_per_s"]
        for row in records.read(RECORD)["results"]
        if (row["quantization"], row["kv_cache_dtype"], row["requests"]) == (method, "bfloat16", requests)
    ]
    return 1e3 * requests * len(rates) / sum(rates)  # bfloat16 was measured twice


def products(method: str, rows: int) -> float:
    """Milliseconds of all matrix products of Gemma 2B's step, each measured alone, for so many rows.

    method: "bf16", with torch's products, or one of the same record's. Its head is in int8.
    """
    layers, column = ("int8", "bf16_ms") if method == "bf16" else (method.partition(",")[0], "ms")
    return sum(
        row[column] * (1 if row["matrix"] == "head" else LAYERS)
        for row in records.read(PRODUCTS)["results"]
        if row.get("rows") == rows and row["quantization"] == ("int8" if row["matrix"] == "head" else layers)
    )


def unfused() -> float:
    """Milliseconds that a token of one request takes longer, in bfloat16, without the fused step."""
    took = {
        row["name"]: 1e3 / row["output_tokens_per_s"]
        for row in records.read("h200/ablation")["results"]
        if (row["group"], row["requests"]) == ("fusion", 1)
    }
    return took["a kernel an operation"] - took["five launches a layer"]
