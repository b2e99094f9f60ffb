"""How much faster quantized weights made the engine, from the committed record of an H200.  Lessons 05 and 07."""

from collections.abc import Iterable

from minillm.bench import records

RECORD = "h200/quantization"
BF16, FP8 = "h200/gemma-2b-bf16", "h200/gemma-2b-fp8"  # the same workloads and settings


def report(methods: Iterable[str]) -> None:
    """Print the tokens per second of each method, as multiples of bfloat16's in the same run, by requests at once.

    All with a cache in bfloat16.
    """
    results = records.read(RECORD)["results"]
    loads = {row["workload"]: row["requests"] for row in results}
    print("requests at once".ljust(22), "".join(f"{count:>8,}" for count in loads.values()))
    for method in methods:
        rows = [row for row in results if (row["quantization"], row["kv_cache_dtype"]) == (method, "bfloat16")]
        gains = {row["workload"]: row["times_bf16"] for row in rows}
        print(method.ljust(22), "".join(f"{gains[load]:8.2f}" for load in loads))


def report_fp8() -> None:
    """Print the tokens per second with FP8 weights and an FP8 head, as multiples of bfloat16's, by workload."""
    dense = {row["workload"]: row["output_tokens_per_s"] for row in records.read(BF16)["results"]}
    for row in records.read(FP8)["results"]:
        times = row["output_tokens_per_s"] / dense[row["workload"]]
        print(f"{row['workload']:22} {row['requests']:>6,} requests at once {times:8.2f}")
