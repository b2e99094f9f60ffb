"""`minillm bench batching`: the gains of in-flight batching, chunked prefill, prefix reuse and paging.  Lessons 09, 10.

One engine on one traffic trace, in four parts:

throughput  all requests at once: in-flight batching compared with static batches, with the same rows and blocks
latency     requests arrive as in the trace: chunked prefill compared with whole prompts, TTFT and ITL
prefix      tokens that prefill computes with and without the prefix cache
memory      memory that contiguous caches waste, compared with blocks (`waste`; no model runs)
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minillm.config import PolicyName
from minillm.engine.engine import Engine
from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.model.loader import resolve_device
from minillm.request import Delta, SamplingParams
from minillm.scheduler.settings import scheduled

from . import figures, offline, records, waste, workloads
from .clients import RequestTimes
from .workloads import BenchRequest


@dataclass(frozen=True)
class BatchingLoad:
    """The size of the benchmark."""

    rows: int  # most requests in a step
    scale: int  # divides lengths in the part "throughput"
    speed: float  # factor by which the trace is sped up
    chunk: int  # tokens in a step of chunked prefill
    arriving: int  # requests of the trace in the parts "latency" and "prefix"


DEFAULTS = {
    "cpu": BatchingLoad(rows=64, scale=8, speed=1.0, chunk=128, arriving=96),
    "cuda": BatchingLoad(rows=128, scale=1, speed=12.0, chunk=512, arriving=400),
}
PARTS = ("throughput", "latency", "prefix", "memory")
TRACE = "conversation"
BUDGET = 4096  # tokens in a step, except in the part "latency"
SLOTS = 16_384  # tokens of memory in the part "memory"
LONGEST = 2048  # the longest request in that part: tiny-gemma's context


def run(
    model: str | Path | None = None,
    *,
    traffic: str | Path = TRACE,
    rows: int | None = None,
    scale: int | None = None,
    speed: float | None = None,
    chunk: int | None = None,
    arriving: int | None = None,
    repeat: int = 3,
    json_path: str | Path | None = None,
    quiet: bool = False,
    **engine_options: Any,
) -> dict:
    """Measure all four parts and return the record. Prints tables, then the record as one line of JSON.

    traffic: a traffic trace's name, or a file. rows, scale, speed, chunk, arriving: see `BatchingLoad`; default: those
    of the device in DEFAULTS. repeat: timed runs of each setting, alternating; the record has the medians and all runs.
    json_path, quiet: as `records.publish`. engine_options: as `LLM`. Raises ConfigError.
    """
    if repeat < 1:
        raise ConfigError(f"repeat must be a whole number from 1, not {repeat!r}")
    begun = records.begin(json_path)
    device = resolve_device(str(engine_options.get("device", "auto"))).split(":")[0]
    usual = DEFAULTS[device]
    load = BatchingLoad(
        rows=usual.rows if rows is None else rows,
        scale=usual.scale if scale is None else scale,
        speed=usual.speed if speed is None else speed,
        chunk=usual.chunk if chunk is None else chunk,
        arriving=usual.arriving if arriving is None else arriving,
    )
    if {"max_num_seqs", "max_num_batched_tokens", "policy"} & engine_options.keys():
        raise ConfigError("this benchmark sets rows, token budgets and policies itself: choose --rows and --chunk")
    budget = max(BUDGET, load.chunk)
    with LLM(model, max_num_seqs=load.rows, max_num_batched_tokens=budget, **engine_options) as llm:
        vocab = llm.model_config.vocab_size
        # First, so that a trace that does not fit the memory fails before the long runs.
        wasted = memory(workloads.replay(traffic, vocab), llm.config.block_size)
        results = throughput(llm, workloads.replay(traffic, vocab, scale=load.scale), load.scale, repeat)
        arrivals = workloads.replay(traffic, vocab, requests=load.arriving, speed=load.speed)
        results += latency(llm, arrivals, load.chunk, repeat)
        results += prefix(llm, arrivals)
        settings: dict[str, Any] = asdict(load) | {"dtype": llm.engine.facts.dtype}
        settings |= {"device": device, "threads": torch.get_num_threads()}
        random_weights = engine_options.get("load_format") == "dummy"
        settings |= {"model": records.model_name(llm.engine.name, random_weights=random_weights)}
        settings |= {"blocks": llm.stats()["blocks"], "block_size": llm.config.block_size}
    content = records.record(results + wasted, begun, traffic=Path(traffic).stem, **settings)
    return records.publish(content, json_path, table(content), quiet=quiet)


# ---- the four parts


def throughput(llm: LLM, work: Sequence[BenchRequest], scale: int, repeat: int) -> list[dict]:
    """All requests wait from the beginning: output tokens per second with static and with in-flight batching."""
    kinds: dict[str, PolicyName] = {"static": "static", "in-flight": "fcfs"}
    runs: dict[str, list[float]] = {name: [] for name in kinds}
    steps = {}
    for round_number in range(repeat + 1):
        for name, policy in kinds.items():
            with scheduled(llm.engine.scheduler, policy=policy, budget=BUDGET, caching=False) as scheduler:
                before = scheduler.newest
                seconds = offline.timed(llm, work, temperature=1.0)
                steps[name] = scheduler.newest - before
            if round_number > 0:  # the first warms up
                runs[name].append(round(seconds, 4))
    totals = workloads.totals(work)
    rows: list[dict[str, Any]] = []
    for name, timed in runs.items():
        median = statistics.median(timed)
        speed = {"seconds": round(median, 4), "output_tokens_per_s": round(totals["output_tokens"] / median, 1)}
        facts = {"part": "throughput", "scale": scale, **totals}
        rows.append({**facts, "batching": name, **speed, "steps": steps[name], "runs": timed})
    rows[1]["times_static"] = round(rows[0]["seconds"] / rows[1]["seconds"], 3)
    return rows


def latency(llm: LLM, work: Sequence[BenchRequest], chunk: int, repeat: int) -> list[dict]:
    """Requests arrive when they are due: time to first token, and between tokens, with chunked and whole prompts.

    Whole prompts need a token budget as long as the longest prompt: the context's length.
    """
    longest = min(llm.engine.max_model_len, LONGEST)
    kinds: dict[str, tuple[PolicyName, int]] = {"chunked": ("fcfs", chunk), "whole": ("whole", longest)}
    runs: dict[str, list[dict]] = {name: [] for name in kinds}
    for round_number in range(repeat + 1):
        for name, (policy, budget) in kinds.items():
            with scheduled(llm.engine.scheduler, policy=policy, budget=budget, caching=False):
                seen = figures.summary(work, play(llm.engine, work))
            if round_number > 0:  # the first warms up: it meets every shape that the others will
                runs[name].append({key: seen[key] for key in ("seconds", "ttft_s", "itl_s", "e2e_s", "late_s")})
    facts = {"part": "latency", **workloads.totals(work), "requests_per_s": round(len(work) / work[-1].due, 2)}
    rows = []
    for name, summaries in runs.items():
        medians = {
            key: {p: round(statistics.median(each[key][p] for each in summaries), 6) for p in summaries[0][key]}
            for key in ("ttft_s", "itl_s", "e2e_s")
        }
        rows.append({**facts, "prefill": name, "policy": kinds[name][0], "budget": kinds[name][1], **medians})
        rows[-1]["runs"] = summaries
    return rows


def prefix(llm: LLM, arrivals: Sequence[BenchRequest]) -> list[dict]:
    """Prompt tokens that are computed with and without the prefix cache, on three kinds of traffic."""
    vocab = llm.model_config.vocab_size
    short = [BenchRequest(each.prompt, min(each.output_tokens, 16)) for each in arrivals]
    traffic = {"trace": [short], "conversations": conversations(vocab), "at once": [together(vocab)]}
    rows = []
    for name, rounds in traffic.items():
        computed = {}
        for cached in (False, True):
            with scheduled(llm.engine.scheduler, budget=BUDGET, caching=cached) as scheduler:
                hits, preemptions = scheduler.prefix_hits, scheduler.preemptions
                prompts = ask(llm, rounds)
                computed[cached] = prompts - (scheduler.prefix_hits - hits)
                if scheduler.preemptions > preemptions:
                    blocks = scheduler.pool.num_blocks
                    raise ConfigError(f"requests were preempted and computed twice with num_blocks={blocks}: raise it")
        facts = {"part": "prefix", "traffic": name, "requests": sum(map(len, rounds)), "prompt_tokens": prompts}
        counted = {"computed_without": computed[False], "computed_with": computed[True]}
        rows.append({**facts, **counted, "saved": round(1 - computed[True] / computed[False], 4)})
    return rows


def memory(work: Sequence[BenchRequest], block_size: int) -> list[dict]:
    """Shares of the memory that are used and wasted, for the whole trace at its full lengths."""
    shares = waste.compare(work, slots=SLOTS, block_size=block_size, max_model_len=LONGEST)
    return [{"part": "memory", **workloads.totals(work), "max_model_len": LONGEST, **each} for each in shares]


# ---- traffic


def conversations(vocab: int, chats: int = 16, turns: int = 4, system: int = 192, answer: int = 32) -> list[list]:
    """Rounds of user messages: the first has a system prompt that all chats share; later ones follow the answers."""
    rng = random.Random(workloads.SEED)

    def words(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    beginning = words(system)
    said = [[words(rng.randint(16, 64)) for _ in range(chats)] for _ in range(turns)]
    return [
        [BenchRequest((beginning if turn == 0 else []) + each, answer) for each in said[turn]] for turn in range(turns)
    ]


def together(vocab: int, count: int = 64, prefix: int = 512, most: int = 64) -> list[BenchRequest]:
    """Requests that arrive at once and share a prefix."""
    rng = random.Random(workloads.SEED)
    beginning = [rng.randrange(vocab) for _ in range(prefix)]
    own = ([rng.randrange(vocab) for _ in range(rng.randint(1, most))] for _ in range(count))
    return [BenchRequest(beginning + each, 4) for each in own]


def ask(llm: LLM, rounds: Sequence[Sequence[BenchRequest]]) -> int:
    """Send the rounds in order, each message after its chat's history; return how many prompt tokens were sent."""
    seen: list[list[int]] = [[] for _ in rounds[0]]
    total = 0
    for said in rounds:
        prompts = [before + each.prompt for before, each in zip(seen, said, strict=True)]
        params = [SamplingParams(max_tokens=each.output_tokens, temperature=0, ignore_eos=True) for each in said]
        total += sum(map(len, prompts))
        seen = [done.prompt_token_ids + done.token_ids for done in llm.generate(prompts, params)]
    return total


def play(engine: Engine, work: Sequence[BenchRequest]) -> list[RequestTimes]:
    """Submit each request when it is due, regardless of what still runs, and record when its tokens arrive."""
    measured = [RequestTimes(each.due) for each in work]
    begun = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - begun

    def listener(seen: RequestTimes) -> Callable:
        def hear(delta: Delta) -> None:
            if delta.token_ids:
                seen.arrivals.append((now(), len(delta.token_ids)))
            seen.end = now()

        return hear

    params = [SamplingParams(max_tokens=each.output_tokens, ignore_eos=True) for each in work]
    prepared = [
        engine.prepare(each.prompt, wanted, listener=listener(seen), wants_text=False)
        for each, wanted, seen in zip(work, params, measured, strict=True)
    ]
    begun, sent = time.perf_counter(), 0
    while sent < len(work) or engine.has_work:
        while sent < len(work) and work[sent].due <= now():
            measured[sent].sent = now()
            engine.submit(prepared[sent])
            sent += 1
        if engine.has_work:
            engine.step()
        else:
            time.sleep(max(0.0, work[sent].due - now()))
    return measured


def of(record: dict, part: str) -> list[dict]:
    """Return the results of one part."""
    return [row for row in record["results"] if row["part"] == part]


def table(record: dict) -> str:
    """Return the record as text."""
    lines = [f"{record['model']}, {record['dtype']}, {record['device']}, trace {record['traffic']}", ""]
    for row in of(record, "throughput"):
        runs = " ".join(f"{each:.3g}" for each in row["runs"])
        times = f"{row['times_static']:.2f} times static" if "times_static" in row else ""
        lines.append(
            f"{row['batching']:<12}{row['output_tokens_per_s']:>10,.0f} tokens/s{row['steps']:>7} steps  "
            f"runs {runs} s  {times}"
        )
    for row in of(record, "latency"):
        lines.append("")
        lines.append(f"{row['prefill']} prefill, budget {row['budget']}, {row['requests_per_s']} requests/s")
        for name, what in (("ttft_s", "to the first token"), ("itl_s", "between tokens")):
            values = "  ".join(f"p{p} {row[name][f'p{p}'] * 1e3:8.1f} ms" for p in figures.PERCENTILES)
            lines.append(f"  {what:<20}{values}")
    lines.append("")
    for row in of(record, "prefix"):
        lines.append(
            f"prefix reuse, {row['traffic']:<15}{row['computed_without']:>8,} -> {row['computed_with']:>7,} "
            f"prefill tokens: {row['saved']:.1%} saved"
        )
    lines.append("")
    for row in of(record, "memory"):
        shares = "  ".join(f"{name} {row[name]:6.1%}" for name in waste.SHARES)
        lines.append(f"{row['cache']:<40}{shares}  {row['running']:6.1f} requests at once")
    return "\n".join(lines)
