"""`minillm bench roofline --workload`: how near a workload comes to the chip's limits, and where the rest goes.

The floor of a step has three parts. Each needs the results of the one before, so their times add up:

    layers' matrices  every weight is read once, and multiplied and added once per token. After the last layer's keys
                      and values, only tokens to be sampled from are computed
    attention         the keys and values that a row sees are read or written once in every layer; a query is
                      multiplied with each key and each value that it sees
    head              the head's weights are read once, and multiplied and added once per sampled token

A part takes at least the longer of its reading and its arithmetic, at the rates measured in the same run
(`roofline.limits`). The floor of a run is the sum over the steps that the engine ran. It leaves out launches, sampling,
norms and activations, and limits of single products.

A second run shows where the time goes: slices spread evenly over it are profiled, and their kernels' seconds divided
by the seconds that the same steps took in the run without a profiler. The rest is the GPU's idle time.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.request import SamplingParams
from minillm.scheduler.step import Step

from . import offline, profiling, records, roofline, workloads
from .roofline import PeakRates, floor_seconds

PARTS = ("matrix products", "attention", "head and sampling")


def step_floor(llm: LLM, step: Step, limits: PeakRates) -> dict[str, float]:
    """Return the minimum time of a step on a chip with these limits, in seconds by PARTS (see the module's
    docstring).
    """
    tokens, samples = int(step.queries.sum()), int(step.samples.sum())
    work = {
        "matrix products": _layers_work(llm, tokens, samples),
        "attention": attention_work(llm, step),
        "head and sampling": _head_work(llm, samples),
    }
    rates = limits.bytes_per_s, limits.operations_per_s
    return {part: floor_seconds(*each, *rates) for part, each in work.items()}


def _layers_work(llm: LLM, tokens: int, samples: int) -> tuple[int, int]:
    model = llm.engine.model
    last, query_rows = model.layers[-1], model.config.num_heads * model.config.head_dim
    nbytes, operations = roofline.step_work(llm, tokens, 0)
    after_keys = query_rows * model.config.hidden_size
    after_keys += sum(math.prod(weight.shape) for weight in (last.attention_out, last.gate_up, last.down))
    return nbytes - _head_work(llm, 1)[0], operations - 2 * after_keys * (tokens - samples)


def _head_work(llm: LLM, samples: int) -> tuple[int, int]:
    model = llm.engine.model
    numbers = model.config.vocab_size * model.config.hidden_size
    size = torch.empty(0, dtype=model.dtype).element_size()
    return (numbers * size if samples else 0), 2 * numbers * samples


def attention_work(llm: LLM, step: Step) -> tuple[int, int]:
    """(bytes, operations) of a step's attention in all layers; a layer with a window sees no further.

    All queries of the last layer count, even if no token is sampled from them: they are few compared with the rest.
    """
    model = llm.engine.model
    token_bytes = model.cache_spec.bytes_per_token
    starts, ends = step.starts.astype(np.int64), step.ends.astype(np.int64)
    nbytes = operations = 0
    for window, layers in Counter(layer.attention.window or int(ends.max()) for layer in model.layers).items():
        seen = _sum_to(ends, window) - _sum_to(starts, window)
        nbytes += int((ends - np.maximum(starts - window + 1, 0)).sum()) * token_bytes * layers
        operations += 4 * model.config.num_heads * model.config.head_dim * int(seen.sum()) * layers
    return nbytes, operations


def _sum_to(count: np.ndarray, window: int) -> np.ndarray:
    """min(1, window) + min(2, window) + ... + min(count, window): the keys that the first `count` queries see."""
    short = np.minimum(count, window)
    return short * (short + 1) // 2 + (count - short) * window


def run(
    model: str | Path | None = None,
    *,
    workload: Sequence[str],
    requests: int | None = None,
    scale: int = 1,
    repeat: int = 1,
    json_path: str | Path | None = None,
    quiet: bool = False,
    **engine_options: Any,
) -> dict:
    """Measure the chip and the workloads on it and return the record. Prints a table, then the record as one JSON line.

    workload: names from `workloads.WORKLOADS`, with lengths divided by `scale`, the first `requests` of each. repeat:
    timed runs of each, after one that warms up; on a GPU one more is profiled. json_path, quiet: as `records.publish`.
    engine_options: as `LLM`. Raises ConfigError.
    """
    if repeat < 1:
        raise ConfigError(f"repeat must be a whole number from 1, not {repeat!r}")
    chosen = [workloads.find(name).name for name in workload]
    begun = records.begin(json_path)
    engine = offline.Minillm(model, **engine_options)
    try:
        llm = engine.llm
        limits = roofline.limits(llm.config.device, llm.engine.model.dtype, llm.engine.model.nbytes)
        results = []
        for name in chosen:
            work = workloads.make(name, llm.model_config.vocab_size, scale=scale, requests=requests)
            facts = {"workload": name, **workloads.totals(work), "scale": scale}
            results.append(facts | measure(llm, work, limits, repeat))
            if not quiet:
                print(table(results[-1:], limits if len(results) == 1 else None), flush=True)
        dtype = llm.engine.facts.dtype
        content = records.record(results, begun, model=llm.engine.name, dtype=dtype, **asdict(limits))
    finally:
        engine.llm.close()
    return records.publish(content, json_path, quiet=quiet)


def measure(llm: LLM, work: Sequence[workloads.BenchRequest], limits: PeakRates, repeat: int) -> dict:
    """Return one workload's floor, rate, shares of time, and host time per step."""
    generate(llm, work)  # captures graphs, compiles kernels
    runs = []
    for _ in range(repeat):
        with profiling.recording(llm.engine) as recording:
            begin = time.perf_counter()
            generate(llm, work)
            runs.append((time.perf_counter() - begin, recording))
    seconds, recording = sorted(runs, key=lambda each: each[0])[len(runs) // 2]  # the median
    shares = _shares(llm, work, recording) if llm.config.device.startswith("cuda") else None
    floors = [step_floor(llm, step, limits) for step in recording.steps]
    parts = {part: sum(each[part] for each in floors) for part in PARTS}
    tokens = sum(request.output_tokens for request in work)
    return {
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "runs": [round(each, 4) for each, _ in runs],
        "floor_seconds": {part: round(each, 4) for part, each in parts.items()},
        "floor_tokens_per_s": round(tokens / sum(parts.values()), 1),
        "of_floor": round(sum(parts.values()) / seconds, 4),
        "shares": shares,
        "steps": len(recording.steps),
        "cpu_ms_per_step": round((seconds - recording.waited) / len(recording.steps) * 1e3, 4),
    }


def generate(llm: LLM, work: Sequence[workloads.BenchRequest]) -> None:
    """Run all requests at once, to their exact lengths, at temperature 1."""
    params = [SamplingParams(max_tokens=each.output_tokens, temperature=1.0, ignore_eos=True) for each in work]
    llm.generate([each.prompt for each in work], params)


def _shares(llm: LLM, work: Sequence[workloads.BenchRequest], timed: profiling.Recording) -> dict[str, float]:
    """Return the share of a run's time that each of `profiling.GROUPS` takes, and the GPU's idle time."""
    starts = profiling.slices(timed.done, timed.began)
    with profiling.profiled(llm.engine, starts) as kernels_of:
        generate(llm, work)
    each = []
    for first, kernels in zip(starts, kernels_of, strict=True):
        seconds = timed.seconds(first, min(first + profiling.STEPS, len(timed.done)))
        each.append({group: busy / seconds for group, busy in profiling.seconds_by_group(kernels).items()})
    shares = {group: round(statistics.fmean(slice[group] for slice in each), 4) for group in profiling.GROUPS}
    return shares | {"GPU idle": round(max(0.0, 1 - sum(shares.values())), 4)}


def table(results: Sequence[dict], limits: PeakRates | None = None) -> str:
    """Return one line per workload, below the limits and the table's head unless `limits` is None."""
    lines = []
    columns = (*profiling.GROUPS, "GPU idle")
    if limits is not None:
        rates = f"{limits.bytes_per_s / 1e9:,.1f} GB/s", f"{limits.operations_per_s / 1e12:,.2f} T operations/s"
        lines = [
            f"reads {rates[0]}, computes {rates[1]}",
            f"{'workload':<22}{'floor':>9}{'measured':>10}{'ratio':>7} "
            + "".join(f"{column:>19}" for column in columns)
            + f"{'CPU ms a step':>15}",
        ]
    for row in results:
        shares = row["shares"] or {}
        cells = (f"{shares[column]:>18.1%} " if column in shares else f"{'-':>19}" for column in columns)
        lines.append(
            f"{row['workload']:<22}{row['floor_tokens_per_s']:>9,.0f}{row['output_tokens_per_s']:>10,.0f}"
            f"{row['of_floor']:>7.2f} {''.join(cells)}{row['cpu_ms_per_step']:>15.3f}"
        )
    return "\n".join(lines)
