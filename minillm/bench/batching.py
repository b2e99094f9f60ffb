"""`minillm bench batching`: what in-flight batching, chunked prefill, prefix reuse and blocks bring.  Lessons 09, 10.

One engine on one traffic trace, in four parts:

throughput  all requests at once: in-flight batching beside static batches, same rows, same blocks
latency     requests arrive as in the trace: prompts in chunks beside whole prompts, time to first token and between
prefix      tokens that prefill computes with and without the prefix cache
memory      what contiguous caches waste beside blocks (`waste`; no model runs)
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from minillm.engine.engine import Engine
from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.request import SamplingParams
from minillm.scheduler.policies import POLICIES

from . import offline, records, serve, waste, workloads
from .workloads import BenchRequest

# What suits a device: rows; what lengths are divided by and the speed that the trace is played at; tokens in a step of
# chunks; how many requests arrive.
DEFAULTS = {
    "cpu": {"rows": 64, "scale": 8, "speed": 1.0, "chunk": 128, "arriving": 96},
    "cuda": {"rows": 128, "scale": 1, "speed": 12.0, "chunk": 512, "arriving": 400},
}
PARTS = ("throughput", "latency", "prefix", "memory")
TRACE = "conversation"
BUDGET = 4096  # tokens in a step, but for the latencies
SLOTS = 16_384  # tokens of memory in the part "memory"
LONGEST = 2048  # the longest request that part allows: tiny-gemma's context


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
    **engine_options,
) -> dict:
    """Measure all four parts; returns the record. Prints tables and, last, the record as one line of JSON.

    traffic: a traffic trace's name, or a file. rows: most requests in a step. scale divides the lengths in the part
    "throughput". speed: the trace is played so many times as fast, its first `arriving` requests. chunk: tokens in a
    step of the chunked latencies. None: what suits the device. repeat: timed runs each, in turns; medians are
    reported, all are listed. More: as `LLM`.
    Raises ConfigError.
    """
    if repeat < 1:
        raise ConfigError(f"repeat must be a whole number from 1, not {repeat!r}")
    given = {"rows": rows, "scale": scale, "speed": speed, "chunk": chunk, "arriving": arriving}
    begun = records.begin()
    device = engine_options.get("device", "auto")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device.split(":")[0]
    chosen = DEFAULTS[device] | {name: value for name, value in given.items() if value is not None}
    if {"max_num_seqs", "max_num_batched_tokens", "policy"} & engine_options.keys():
        raise ConfigError("rows, budgets and policies are what is compared here: choose --rows and --chunk")
    budget = max(BUDGET, chosen["chunk"])
    with LLM(model, max_num_seqs=chosen["rows"], max_num_batched_tokens=budget, **engine_options) as llm:
        vocab = llm.model_config.vocab_size
        # First, so that a trace which it cannot hold is told before the long runs.
        wasted = memory(workloads.replay(traffic, vocab), llm.config.block_size)
        results = throughput(llm, workloads.replay(traffic, vocab, scale=chosen["scale"]), chosen["scale"], repeat)
        arrivals = workloads.replay(traffic, vocab, requests=chosen["arriving"], speed=chosen["speed"])
        results += latency(llm, arrivals, chosen["chunk"], repeat)
        results += prefix(llm, arrivals)
        settings = chosen | {"dtype": str(llm.engine.model.dtype).removeprefix("torch.")}
        settings |= {"device": device, "threads": torch.get_num_threads()}
        random_weights = engine_options.get("load_format") == "dummy"
        settings |= {"model": records.model_name(llm.engine.name, random_weights=random_weights)}
        settings |= {"blocks": llm.stats()["blocks"], "block_size": llm.config.block_size}
    content = records.record(results + wasted, begun, traffic=Path(traffic).stem, **settings)
    return records.publish(content, json_path, table(content), quiet=quiet)


# ---- the four parts


def throughput(llm: LLM, work: Sequence[BenchRequest], scale: int, repeat: int) -> list[dict]:
    """Everybody waits from the beginning: output tokens a second of both kinds of batching."""
    kinds = {"static": "static", "in-flight": "fcfs"}
    runs: dict[str, list[float]] = {name: [] for name in kinds}
    steps = {}
    for round_number in range(repeat + 1):
        for name, policy in kinds.items():
            with scheduled(llm.engine, policy=policy) as scheduler:
                before = scheduler.launched
                seconds = offline.timed(llm, work, temperature=1.0)
                steps[name] = scheduler.launched - before
            if round_number > 0:  # the first warms up
                runs[name].append(round(seconds, 4))
    facts = {"part": "throughput", "scale": scale, **workloads.totals(work)}
    rows = []
    for name, seconds in runs.items():
        middle = statistics.median(seconds)
        speed = {"seconds": round(middle, 4), "output_tokens_per_s": round(facts["output_tokens"] / middle, 1)}
        rows.append({**facts, "batching": name, **speed, "steps": steps[name], "runs": seconds})
    rows[1]["times_static"] = round(rows[0]["seconds"] / rows[1]["seconds"], 3)
    return rows


def latency(llm: LLM, work: Sequence[BenchRequest], chunk: int, repeat: int) -> list[dict]:
    """Requests arrive when they are due; what each waits for its first token, and between tokens.

    Whole prompts need a budget that the longest fits in: the context's length.
    """
    longest = min(llm.engine.max_model_len, LONGEST)
    kinds = {"chunked": ("fcfs", chunk), "whole": ("whole", longest)}
    runs: dict[str, list[dict]] = {name: [] for name in kinds}
    for round_number in range(repeat + 1):
        for name, (policy, budget) in kinds.items():
            with scheduled(llm.engine, policy=policy, budget=budget):
                seen = serve.summary(work, play(llm.engine, work))
            if round_number > 0:  # the first warms up: it meets every shape that the others will
                runs[name].append({key: seen[key] for key in ("seconds", "ttft_s", "itl_s", "e2e_s", "late_s")})
    facts = {"part": "latency", **workloads.totals(work), "requests_per_s": round(len(work) / work[-1].due, 2)}
    rows = []
    for name, found in runs.items():
        medians = {
            key: {p: round(statistics.median(each[key][p] for each in found), 6) for p in found[0][key]}
            for key in ("ttft_s", "itl_s", "e2e_s")
        }
        rows.append({**facts, "prefill": name, "policy": kinds[name][0], "budget": kinds[name][1], **medians})
        rows[-1]["runs"] = found
    return rows


def prefix(llm: LLM, arrivals: Sequence[BenchRequest]) -> list[dict]:
    """Tokens of prompts that are computed, with and without the prefix cache, on three kinds of traffic."""
    vocab = llm.model_config.vocab_size
    short = [BenchRequest(each.prompt, min(each.output_tokens, 16)) for each in arrivals]
    traffic = {"trace": [short], "conversations": conversations(vocab), "at once": [together(vocab)]}
    rows = []
    for name, rounds in traffic.items():
        found = {}
        for cached in (False, True):
            with scheduled(llm.engine, caching=cached) as scheduler:
                hits, preemptions = scheduler.prefix_hits, scheduler.preemptions
                prompts = ask(llm, rounds)
                found[cached] = prompts - (scheduler.prefix_hits - hits)
                if scheduler.preemptions > preemptions:
                    blocks = scheduler.pool.num_blocks
                    raise ConfigError(f"num_blocks={blocks} had requests preempted and computed twice; give more")
        facts = {"part": "prefix", "traffic": name, "requests": sum(map(len, rounds)), "prompt_tokens": prompts}
        counted = {"computed_without": found[False], "computed_with": found[True]}
        rows.append({**facts, **counted, "saved": round(1 - found[True] / found[False], 4)})
    return rows


def memory(work: Sequence[BenchRequest], block_size: int) -> list[dict]:
    """Shares of the memory that are used and wasted, on the whole trace at its full lengths."""
    found = waste.compare(work, slots=SLOTS, block_size=block_size, max_model_len=LONGEST)
    return [{"part": "memory", **workloads.totals(work), "max_model_len": LONGEST, **each} for each in found]


# ---- traffic


def conversations(vocab: int, chats: int = 16, turns: int = 4, system: int = 192, answer: int = 32) -> list[list]:
    """Rounds of what users say: the first with a system prompt that all chats share; later ones follow the answers."""
    rng = random.Random(workloads.SEED)

    def words(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    beginning = words(system)
    said = [[words(rng.randint(16, 64)) for _ in range(chats)] for _ in range(turns)]
    return [
        [BenchRequest((beginning if turn == 0 else []) + each, answer) for each in said[turn]] for turn in range(turns)
    ]


def together(vocab: int, count: int = 64, prefix: int = 512, most: int = 64) -> list[BenchRequest]:
    """Requests that come at once and begin alike."""
    rng = random.Random(workloads.SEED)
    beginning = [rng.randrange(vocab) for _ in range(prefix)]
    own = ([rng.randrange(vocab) for _ in range(rng.randint(1, most))] for _ in range(count))
    return [BenchRequest(beginning + each, 4) for each in own]


def ask(llm: LLM, rounds: Sequence[Sequence[BenchRequest]]) -> int:
    """Send round after round, each request behind all that its chat has seen so far; returns the prompts' tokens."""
    seen: list[list[int]] = [[] for _ in rounds[0]]
    total = 0
    for said in rounds:
        prompts = [before + each.prompt for before, each in zip(seen, said, strict=True)]
        params = [SamplingParams(max_tokens=each.output_tokens, temperature=0, ignore_eos=True) for each in said]
        total += sum(map(len, prompts))
        seen = [done.prompt_token_ids + done.token_ids for done in llm.generate(prompts, params)]
    return total


def play(engine: Engine, work: Sequence[BenchRequest]) -> list[serve.Measured]:
    """Submit each request when it is due, whatever still runs, and note when its tokens come."""
    measured = [serve.Measured(each.due) for each in work]
    begun = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - begun

    def listener(seen: serve.Measured) -> Callable:
        def hear(delta) -> None:
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


@contextmanager
def scheduled(engine: Engine, *, policy: str = "fcfs", budget: int = BUDGET, caching: bool = False) -> Iterator:
    """An idle engine's scheduler with these settings, its prefix cache empty, until the block ends."""
    scheduler = engine.scheduler
    before = scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching
    scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching = POLICIES[policy](), budget, caching
    scheduler.pool.forget()
    try:
        yield scheduler
    finally:
        scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching = before
        scheduler.pool.forget()


def of(record: dict, part: str) -> list[dict]:
    """The results of one part."""
    return [row for row in record["results"] if row["part"] == part]


def table(record: dict) -> str:
    """The record as text."""
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
            values = "  ".join(f"p{p} {row[name][f'p{p}'] * 1e3:8.1f} ms" for p in serve.PERCENTILES)
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
