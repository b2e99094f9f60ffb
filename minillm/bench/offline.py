"""`minillm bench offline`: all requests at once, minillm and others alternating in one process.  Lesson 99."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

from minillm.cores import FREE
from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.model.loader import resolve_device
from minillm.request import SamplingParams
from minillm.values import shown

from . import records, workloads
from .load import other_load
from .peers import PEERS, Peer, batch_sizes
from .workloads import BenchRequest

STEADY = 0.15  # runs of the same work may differ by this share of their median
AGAINST = {"transformers": "against_batch"}  # a peer's best batch size, in the row of minillm
PATIENCE = 4  # a comparison that is not steady ends after this many times `repeat` rounds
WARM_UPS = 2  # rounds of a comparison that are not counted: an engine's second run may still be slower than its third


class Minillm:
    """The engine as the benchmark runs it: token ids in, exact output lengths, no prefix cache.

    The prefix cache is off because each repetition sends the same prompts: with it, only the first would prefill them.
    """

    name = "minillm"

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.llm = LLM(model, **({"enable_prefix_caching": False} | options))

    def run(
        self, requests: Sequence[BenchRequest], temperature: float, extra: Sequence[Mapping[str, Any]] = ()
    ) -> float:
        """As `timed`."""
        return timed(self.llm, requests, temperature, extra)

    def formats(self) -> dict[str, Any]:
        """Return the model, the formats of its weights and cache, and the tokens that fit, for a record's row."""
        engine = self.llm.engine
        formats: dict[str, Any] = {
            "model": engine.name,
            "quantization": engine.config.quantization,
            "quantized_head": engine.config.quantized_head,
            "kv_cache_dtype": engine.facts.kv_cache_dtype,
            "cache_tokens": engine.facts.num_blocks * engine.config.block_size // len(engine.facts.windows),
        }
        kinds = ("tensor_parallel", "pipeline_parallel", "decode_context_parallel")
        sizes = {kind: getattr(engine.config, f"{kind}_size") for kind in kinds}
        return formats | {kind: size for kind, size in sizes.items() if size > 1}


def timed(
    llm: LLM, requests: Sequence[BenchRequest], temperature: float, extra: Sequence[Mapping[str, Any]] = ()
) -> float:
    """Return seconds for all requests, submitted at once.

    extra: more sampling parameters, one mapping for each of the first requests. Raises RuntimeError if an output does
    not have its request's length.
    """
    prompts = [request.prompt for request in requests]
    params = [
        SamplingParams(max_tokens=request.output_tokens, temperature=temperature, ignore_eos=True, **more)
        for request, more in zip(requests, chain(extra, repeat({})), strict=False)
    ]
    start = time.perf_counter()
    completions = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    for request, completion in zip(requests, completions, strict=True):
        if len(completion.token_ids) != request.output_tokens:
            got = len(completion.token_ids)
            raise RuntimeError(f"minillm generated {got} tokens where the request has {request.output_tokens}")
    return seconds


def run(
    model: str | Path | None = None,
    *,
    workload: str | Sequence[str] = ("single", "mixed"),
    scale: int = 1,
    requests: int | None = None,
    repeat: int = 3,
    compare: str | Sequence[str] = (),
    batches: Sequence[int] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    load_format: str = "auto",
    temperature: float = 1.0,
    threads: int | None = None,
    patience: int = PATIENCE,
    json_path: str | Path | None = None,
    quiet: bool = False,
    **engine_options: Any,
) -> dict:
    """Measure workloads and return the record. Prints a table, then the record as one JSON line.

    model, dtype, device, load_format and engine_options are `LLM`'s. workload: names from `workloads.WORKLOADS` or
    their first words. scale divides the lengths, requests takes the first so many. repeat: timed runs of each, after
    one that warms up; the record has the median and all runs. compare: names of `peers.PEERS`, or one. batches:
    their static batch sizes (default: those of `batch_sizes`). threads: for each engine. patience: a comparison whose
    runs differ too much goes on for up to this many times `repeat` rounds. json_path: also write the record there
    (`records.write`). quiet: print nothing. Raises ConfigError.
    """
    names = [workload] if isinstance(workload, str) else list(workload)
    chosen = [workloads.find(name).name for name in names]
    if repeat < 1:
        raise ConfigError(f"repeat must be a whole number from 1, not {repeat!r}")
    compared = [compare] if isinstance(compare, str) else list(compare)
    if unknown := [name for name in compared if name not in PEERS]:
        raise ConfigError(f"compare must be of {', '.join(PEERS)}, not {shown(unknown[0])}")
    if threads is not None:
        torch.set_num_threads(threads)
    begun = records.begin(json_path)
    engine = Minillm(model, dtype=dtype, device=device, load_format=load_format, **engine_options)
    config = engine.llm.model_config
    ran: dict[str, Any] = {"dtype": engine.llm.engine.facts.dtype, "device": resolve_device(str(device))}
    peers = [PEERS[name](model, **ran, load_format=load_format) for name in compared]
    common = ran | {"threads": torch.get_num_threads(), "scale": scale, "temperature": temperature}
    results = []
    try:
        for name in chosen:
            work = workloads.make(name, config.vocab_size, scale=scale, requests=requests)
            facts = {"workload": name, **workloads.totals(work), **common}
            rows = _alternate(engine, peers, work, facts, repeat, temperature, batches, patience)
            rows[0] |= engine.formats()
            results += rows
            if not quiet:
                print(table(rows), flush=True)
    finally:
        engine.llm.close()
    content = records.record(results, begun)
    return records.publish(content, json_path, caveat(content), quiet=quiet)


def _alternate(
    engine: Minillm,
    peers: Sequence[Peer],
    work: list[BenchRequest],
    facts: dict[str, Any],
    repeat: int,
    temperature: float,
    batches: Sequence[int] | None = None,
    patience: int = PATIENCE,
) -> list[dict[str, Any]]:
    """Run all contenders in rotation, `repeat` times after warming up, so that disturbances hit all alike.

    A comparison goes on until the last `repeat` runs of each are close together, or until patience ends. Those runs are
    reported; if they are not steady, the row says so.
    """
    contenders: dict[tuple[str, int | None], Callable[[], float]] = {
        (engine.name, None): lambda: engine.run(work, temperature)
    }
    for peer in peers:
        for batch in batches or batch_sizes(len(work)):
            contenders[peer.name, batch] = partial(peer.run, work, batch, temperature)
    runs: dict[tuple[str, int | None], list[float]] = {key: [] for key in contenders}
    for _ in range(WARM_UPS if peers else 1):
        for contender in contenders.values():
            contender()
    with other_load() as others:
        for done in range(1, repeat * (patience if peers else 1) + 1):
            for key, contender in contenders.items():
                runs[key].append(contender())
            spread = max(_spread(each[-repeat:]) for each in runs.values())
            if done >= repeat and spread <= STEADY:
                break
    rows = [_row(key, seconds[-repeat:], facts) for key, seconds in runs.items()]
    if len(rows) > 1:
        seen = {"spread": round(spread, 3), "other_programs_cores": others.cores and round(others.cores, 2)}
        for row, each in zip(rows, runs.values(), strict=True):
            row |= seen | {"unsteady_runs": [round(seconds, 4) for seconds in each[:-repeat]]}
    for peer in peers:
        best = min((row for row in rows if row["engine"] == peer.name), key=lambda row: row["seconds"])
        rows[0][f"times_{peer.name}"] = round(best["seconds"] / rows[0]["seconds"], 3)
        rows[0][AGAINST.get(peer.name, f"against_{peer.name}_batch")] = best["batch"]
    return rows


def _row(key: tuple[str, int | None], runs: list[float], facts: dict) -> dict:
    name, batch = key
    seconds = statistics.median(runs)
    row = {"engine": name} | ({} if batch is None else {"batch": batch}) | facts
    return row | {
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(facts["output_tokens"] / seconds, 1),
        "runs": [round(each, 4) for each in runs],
    }


def _spread(runs: list[float]) -> float:
    """Return the difference between the slowest and the fastest run, as a share of their median."""
    return (max(runs) - min(runs)) / statistics.median(runs)


def caveat(record: dict) -> str:
    """Return the warning to print with a comparison whose runs differ too much, or an empty string."""
    rows = [row for row in record["results"] if row.get("spread", 0) > STEADY]
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row["spread"])
    differ, cores = f"runs of the same work differ by {worst['spread']:.0%}", worst["other_programs_cores"]
    if cores is not None and cores < FREE:
        return f"{differ.capitalize()}, though no other program was busy. Do not compare speeds by this run; repeat it."
    others = "" if cores is None else f", and other programs took {cores:.1f} of {record['machine']['cores']} cores"
    return f"This machine was busy: {differ}{others}. Do not compare speeds by this run; repeat it on a quiet machine."


def table(results: Sequence[dict]) -> str:
    """Return the results as text, one line each; seconds are the median of the runs listed at the end."""
    counted = ("requests", "tokens in", "tokens out")
    lines: list[tuple[str, ...]] = [("engine", "workload", "dtype", *counted, "seconds", "tokens/s", "times", "runs")]
    for row in results:
        engine = row["engine"] + (f" batch {row['batch']}" if "batch" in row else "")
        workload = row["workload"] + (f" /{row['scale']}" if row.get("scale", 1) != 1 else "")
        ratios = (f"{value:.2f}" for key, value in row.items() if key.startswith("times_"))
        times = " / ".join(ratios)
        runs = " ".join(f"{each:.3g}" for each in row["runs"])
        counts = [str(row[name]) for name in ("requests", "input_tokens", "output_tokens")]
        speed = [f"{row['seconds']:.3f}", f"{row['output_tokens_per_s']:,.0f}"]
        lines.append((engine, workload, row["dtype"], *counts, *speed, times, runs))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {0, 1, 2, 9}
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
