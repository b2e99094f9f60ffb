"""Lesson 99: the engine's own versions of its exercises, and the tables that it prints."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from minillm import LLM
from minillm.bench import offline, records, roofline, serve, traffic

from ..shared import checks
from ..shared.stubs import solved


def timings(due: float, arrivals: list[tuple[float, int]]) -> tuple[float, list[float], float]:
    """(TTFT, gaps, end-to-end) of one request, as the load generator computes them."""
    seen = serve.RequestTimes(due=due, arrivals=arrivals, end=arrivals[-1][0])
    return seen.ttft, list(seen.gaps), seen.e2e


def pooled_percentile(gaps_of_each: Sequence[Sequence[float]], p: float) -> float:
    """The percentile of all gaps of all requests, by nearest rank, as the load generator computes it."""
    ranked = sorted(gap for gaps in gaps_of_each for gap in gaps)
    return ranked[math.ceil(p * len(ranked) / 100) - 1]


def poisson_arrivals(rate: float, uniform: Sequence[float]) -> list[float]:
    """Return when requests are due in a Poisson process, as `workloads.poisson` computes it from the same numbers."""
    clock, due = 0.0, []
    for u in uniform:
        clock -= math.log1p(-u) / rate
        due.append(clock)
    return due


def right(function: Callable[..., Any]) -> bool:
    """Return whether a function is written and has every property of its exercise."""
    return solved(function) and not any(each.problem for each in checks.find(function.__name__).examine(function))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The learner's function if it is right, else the one of the same name from this module."""
    return function if right(function) else globals()[function.__name__]


def agree(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Return whether two results of `timings` are the same, up to rounding."""
    (ttft, gaps, e2e), (ttft_too, gaps_too, e2e_too) = found, wanted
    pairs = zip([ttft, e2e, *gaps], [ttft_too, e2e_too, *gaps_too], strict=False)
    return len(gaps) == len(gaps_too) and all(math.isclose(a, b, abs_tol=1e-9) for a, b in pairs)


def uniform_numbers(count: int, seed: int = 16325) -> list[float]:
    """Numbers from [0, 1), the same ones every time.

    With this seed a schedule keeps its rate within 7% from 20 requests on; with most, short ones are further off.
    """
    made = random.Random(seed)
    return [made.random() for _ in range(count)]


def random_prompt(tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Random token ids from 10 up: the first ids of the vocabulary are special."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab_size, (tokens,), generator=made).tolist()


def floors_ms(llm: LLM, limits: roofline.PeakRates, prompt: int) -> tuple[float, float]:
    """The least (ITL, TTFT) of a lone request, in milliseconds: reading the weights; a prefill of `prompt` tokens."""
    nbytes, operations = roofline.step_work(llm, prompt, 1)
    prefill = max(nbytes / limits.bytes_per_s, operations / limits.operations_per_s)
    return 1e3 * llm.engine.model.nbytes / limits.bytes_per_s, 1e3 * prefill


def recorded_decode_step(name: str) -> str:
    """A lone request's decode step and its floor, from the committed roofline record `<device>/<name>`."""
    record = records.read(name)
    step = next(each for each in record["results"] if each["name"] == "decode, 1 at once")
    took, floor = 1e3 * step["seconds"], 1e3 * step["bytes"] / record["bytes_per_s"]
    where = f"{records.model_of(record)}, {record['machine']['gpu']}"
    return f"{where}: {took:.2f} ms, {took / floor:.2f} times its floor of {floor:.2f} ms"


def steps_needed(outputs: Sequence[int], rows: int) -> tuple[int, int]:
    """Steps until all answers are complete (in static batches, in flight). outputs: the answers' lengths, in order."""
    static = sum(max(outputs[first : first + rows]) for first in range(0, len(outputs), rows))
    busy_until = [0] * rows
    for length in outputs:
        busy_until[busy_until.index(min(busy_until))] += length
    return static, max(busy_until)


def most_at_once(result: Mapping[str, Any]) -> int:
    """The largest number of requests that were due and not finished at the same time."""
    changes = [(each["due"], 1) for each in result["each"]] + [(each["end"], -1) for each in result["each"]]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def loads_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Closed loops with different numbers of clients, one line each."""
    lines = ["clients  requests/s  tokens/s   TTFT p50   ITL p50   ITL p99 (ms)  generator busy"]
    for row in rows:
        waits = [row["ttft_s"]["p50"], row["itl_s"]["p50"], row["itl_s"]["p99"]]
        rates = f"{row['requests_per_s']:10.1f}{row['output_tokens_per_s']:10,.0f} "
        shown = "".join(f"{wait * 1e3:10.2f}" for wait in waits)
        lines.append(f"{row['concurrency']:7}  {rates}{shown}{serve.generator_share(dict(row)):20.0%}")
    return "\n".join(lines)


def patterns_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Query patterns, one line each: mean lengths, rates, and what clients waited."""
    lines = ["pattern   in  out   TTFT p50   ITL p50   ITL p99 (ms)  whole answer (s)   output tokens/s   all tokens/s"]
    for row in rows:
        inputs, outputs = (row[name] // row["requests"] for name in ("input_tokens", "output_tokens"))
        waits = [1e3 * each for each in (row["ttft_s"]["p50"], row["itl_s"]["p50"], row["itl_s"]["p99"])]
        everything = row["output_tokens_per_s"] + row["input_tokens"] / row["seconds"]
        lines.append(
            f"{row['workload'].split('_')[0]:<8}{inputs:4}{outputs:5}{waits[0]:11.1f}{waits[1]:10.2f}{waits[2]:10.2f}"
            f"{row['e2e_s']['p50']:18.2f}{row['output_tokens_per_s']:18,.0f}{everything:15,.0f}"
        )
    return "\n".join(lines)


def recorded_patterns() -> str:
    """The same patterns in full size, all requests at once, from the committed record of Gemma 2B on an H200."""
    lines = ["pattern    in    out  requests   output tokens/s   all tokens/s   of the floor's"]
    for row in records.read("h200/roofline-workloads")["results"]:
        name = row["workload"].split("_")[0]
        if name in traffic.PATTERNS:
            inputs, outputs = (row[f"{each}_tokens"] // row["requests"] for each in ("input", "output"))
            everything = (row["input_tokens"] + row["output_tokens"]) / row["seconds"]
            speed = row["output_tokens_per_s"]
            lines.append(
                f"{name:<7}{inputs:6,}{outputs:7,}{row['requests']:10,}{speed:18,.0f}{everything:15,.0f}"
                f"{row['of_floor']:17.0%}"
            )
    return "\n".join(lines)


def batching_table(record: Mapping[str, Any]) -> str:
    """Servers that batch in different ways, from the record of `tools/triton_server.py`, one line each."""
    rows = record["results"]
    lines = [f"{'':<28}tokens/s   times   median wait for a short answer   runs (s)"]
    for row in rows:
        gain = row["output_tokens_per_s"] / rows[0]["output_tokens_per_s"]
        runs = f"{min(row['runs']):.2f} to {max(row['runs']):.2f}"
        lines.append(
            f"{row['engine']:<28}{row['output_tokens_per_s']:8,.0f}{gain:8.2f}{row['short_answers_median_s']:31.2f} s"
            f"   {runs}"
        )
    return "\n".join(lines)


def build_gain() -> str:
    """Return what the plan of `minillm build` gained over the defaults, from the committed record, a line a load."""
    record = records.read("h200/build")
    speed = {(row["engine"], row["requests"]): row["output_tokens_per_s"] for row in record["results"]}
    lines = []
    for requests in sorted({count for _, count in speed}):
        before, after = (speed[engine, requests] for engine in ("default", "planned"))
        gain = after / before - 1
        lines.append(f"{requests:3} at once: {before:,.0f} tokens/s, with the plan {after:,.0f} ({gain:+.1%})")
    return "\n".join(lines)


def comparison_table(*records: dict) -> str:
    """Offline comparisons in one table, with how to read it, and a warning for each whose runs differ too much."""
    lines = [
        "A workload's name gives its full size. Here its lengths are divided by the number after",
        "the slash, and the column `requests` says how many ran; runs: the seconds of each.",
        offline.table([row for record in records for row in record["results"]]),
    ]
    return "\n".join(lines + [warning for record in records if (warning := offline.caveat(record))])
