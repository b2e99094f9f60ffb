"""Show records of two H200s of one machine: sums, a model that they share, replicas, and caches.  Lesson 14."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minillm.bench import records
from minillm.model.config import PRESETS

from . import dividing

SUMS = "h200/reduce"
WAYS = {  # those that exist are shown
    "Gemma 2B": "h200/several-gpus",
    "Llama 3.1 8B": "h200/several-gpus-llama-3.1-8b",
}
CACHES = "h200/several-gpus-cache"


class Sum(NamedTuple):
    """Microseconds that a sum over two GPUs adds to the norm that follows it."""

    own: float  # in the norm's launch
    nccl: float


class Way(NamedTuple):
    """Output tokens/s of a model: on one GPU, divided between two, and the sum of two replicas."""

    model: str
    requests: int  # at once; of each replica
    one: float
    shared: float
    replicas: float


class Cache(NamedTuple):
    """The tokens that an engine's cache holds, and its output tokens/s."""

    way: str
    tokens: int
    speed: float


def there(names: Mapping[str, str]) -> dict[str, str]:
    """Those of these records that exist."""
    return {key: name for key, name in names.items() if (records.RESULTS / f"{name}.json").is_file()}


def sums(hidden: int) -> dict[int, Sum]:
    """{rows: what a sum adds}, of rows of so many numbers in bfloat16."""
    rows = [each for each in records.read(SUMS)["results"] if each["hidden"] == hidden]
    return {
        row["rows"]: Sum(row["fused_us"] - row["norm_us"], row["nccl_us"] - row["norm_us"])
        for row in sorted(rows, key=lambda each: each["rows"])
    }


def ways(*models: str) -> list[Way]:
    """A row for each number of requests, of these models; of all that have a record if none is named."""
    found = []
    for model, name in there({each: WAYS[each] for each in models or WAYS}).items():
        results = records.read(name)["results"]
        for requests in dict.fromkeys(row["requests"] for row in results):
            rows = [row for row in results if row["requests"] == requests]
            (one,) = [row for row in rows if "tensor_parallel" not in row and "replicas" not in row]
            (shared,) = [row for row in rows if "tensor_parallel" in row]
            (replicas,) = [row for row in rows if "replicas" in row]
            speeds = (row["output_tokens_per_s"] for row in (one, shared, replicas))
            found.append(Way(model, requests, *speeds))
    return found


def caches() -> list[Cache]:
    """One GPU, two that divide the model, and two that divide cache blocks too; empty if there is no record."""
    if not there({"": CACHES}):
        return []
    found = []
    for row in records.read(CACHES)["results"]:
        way = "one GPU" if "tensor_parallel" not in row else "divided between two"
        way += ", with its blocks" if "decode_context_parallel" in row else ""
        found.append(Cache(way, row["cache_tokens"], row["output_tokens_per_s"]))
    return found


def costs_table() -> str:
    """Show what the second GPU saves of a decode step of Gemma 2B, what the sums take, and how fast it is at best."""
    steps, config = dividing.step_ms(), PRESETS["gemma-2b"]
    count, each = dividing.reduces(config), sums(config.hidden_size)
    lines = [
        f"{'':8}{'a step, in microseconds':>33}{f'{count} sums add':>19}{'at best, times':>20}",
        f"{'tokens':8}{'on one GPU':>14}{'half is saved':>19}{'own':>11}{'NCCL':>8}{'own':>12}{'NCCL':>8}",
    ]
    for tokens, ms in steps.items():
        add = each[tokens]
        own, nccl = (dividing.gain(ms, count, us, ranks=2) for us in add)
        lines.append(
            f"{tokens:6}{1e3 * ms:16,.0f}{500 * ms:19,.0f}{count * add.own:11,.0f}{count * add.nccl:8,.0f}"
            f"{own:12.2f}{nccl:8.2f}"
        )
    return "\n".join(lines)


def ways_table(ways: Sequence[Way]) -> str:
    """Output tokens/s of one GPU, of two that share a model, and of two replicas, in brackets as multiples of one.

    A last line says that each replica has all requests of its row.
    """
    lines = [f"{'output tokens/s':14}{'requests':>12}{'one GPU':>10}{'two share it':>18}{'two replicas*':>19}"]
    for way in ways:
        both = "".join(f"{f'{speed:,.0f} ({speed / way.one:.2f})':>18}" for speed in (way.shared, way.replicas))
        lines.append(f"{way.model:15}{way.requests:12}{way.one:10,.0f}{both}")
    return "\n".join([*lines, "* each with so many requests: twice as many in all"])
