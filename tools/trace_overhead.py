"""Measure what a trace costs: the share of time spent in its hooks, and the slowdown against untraced runs.

    python tools/trace_overhead.py --record trace-overhead

On a CPU the verdict is the share of time in the hooks: the engine computes nothing while they run, and run-to-run noise
is larger than their cost. The share is measured in separate runs whose hooks read the clock (except the eviction hook,
which only appends to a list). On a GPU the verdict is the slowdown, because hooks run while the device computes: each
traced run is divided by the mean of the untraced runs before and after it, so drift cancels, and the median of these
pairs counts. The prefix cache is on: with hits there is less to compute and more to record. The model has
Gemma 2B's shape and random weights on a GPU; on a CPU it is the embedded model.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm.bench import records, workloads  # noqa: E402
from minillm.bench.offline import Minillm  # noqa: E402
from minillm.trace.record import NO_TRACE, Trace  # noqa: E402

HOOKS = ("submit", "admit", "grow", "register", "release", "preempt", "finish", "launch", "arrived")
HOOKS += ("reset", "flush", "write_in_time")
FEWEST_PAIRS = 5  # the minimum and maximum of 5 values enclose the median in 15 of 16 cases


class Timed(Trace):
    """A trace that measures the time spent in its hooks."""

    def __init__(self, path: Path | None):
        super().__init__(path)
        self.seconds, self._inside = 0.0, False
        for name in HOOKS:  # on the instance, so attribute lookups inside a hook take no longer than untimed
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, hook):
        def run(*arguments):
            if self._inside:
                return hook(*arguments)
            begun = time.perf_counter()
            self._inside = True
            try:
                return hook(*arguments)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - begun

        return run


def measure(engine: Minillm, work: list, pairs: int, timed: int, folder: Path) -> list[dict]:
    """Rows without a trace, with one in memory, with one in a file. timed: runs of each kind with timed hooks."""
    scheduler, file = engine.llm.engine.scheduler, folder / "trace.jsonl"
    traces = {
        "none": lambda: NO_TRACE,
        "memory": Trace,
        "file": lambda: Trace(file),
        "memory, timed": lambda: Timed(None),
        "file, timed": lambda: Timed(file),
    }

    def run(kind: str) -> dict:
        engine.llm.engine.trace = trace = traces[kind]()
        trace.watch(scheduler)
        begun = time.perf_counter()
        seconds = engine.run(work, 1.0)
        if trace is NO_TRACE:
            return {"seconds": seconds}
        trace.close()
        scheduler.trace = NO_TRACE
        scheduler.pool.watch_evictions(None)
        facts = {"seconds": seconds, "events": len(trace.events)}
        if isinstance(trace, Timed):
            assert time.perf_counter() - begun >= trace.seconds > 0
            facts["share"] = trace.seconds / seconds
        return facts | ({"bytes": trace.path.stat().st_size} if trace.path else {})

    run("none")
    rows = paired(run, pairs)
    shares: dict[str, list[float]] = {row["trace"]: [] for row in rows[1:]}
    for _ in range(timed):
        for kind, found in shares.items():
            found.append(round(run(f"{kind}, timed")["share"], 5))
    for row in rows[1:]:
        found = shares[row["trace"]]
        row |= {"share_of_time": round(statistics.median(found), 5), "shares": found}
    return rows


def paired(run: Callable[[str], dict], pairs: int) -> list[dict]:
    """Runs in the order none, memory, none, file, none, ...; returns one row per kind."""
    untraced, seconds = [run("none")["seconds"]], {"memory": [], "file": []}
    times: dict[str, list[float]] = {kind: [] for kind in seconds}
    last = {}
    for kind in [*seconds] * pairs:
        last[kind] = run(kind)
        untraced.append(run("none")["seconds"])
        seconds[kind].append(last[kind]["seconds"])
        times[kind].append(round(seconds[kind][-1] / statistics.mean(untraced[-2:]), 5))
    rows = []
    for kind, found in {"none": untraced, **seconds}.items():
        rows.append(
            {"trace": kind, "seconds": round(statistics.median(found), 4), "runs": [round(s, 4) for s in found]}
        )
    for row in rows[1:]:
        each, facts = times[row["trace"]], last[row["trace"]]
        row |= {"times_without": round(statistics.median(each), 5), "interval_90": interval(each), "pairs": each}
        row |= {name: facts[name] for name in ("events", "bytes") if name in facts}
    return rows


def interval(values: Sequence[float]) -> list[float]:
    """The narrowest pair of values that encloses the true median with a probability of at least 90%.

    Each value is equally likely to be above or below the median, so the number below it is binomial.
    """
    count = len(values)
    if count < FEWEST_PAIRS:
        raise ValueError(f"{count} values give no 90% interval of a median; at least {FEWEST_PAIRS} are needed")
    outside, cut = 1, 0  # of 2**count outcomes, those with the median below value number `cut`, from 0
    while 2 * (outside + math.comb(count, cut + 1)) <= 0.1 * 2**count:
        cut += 1
        outside += math.comb(count, cut)
    ordered = sorted(values)
    return [ordered[cut], ordered[-1 - cut]]


def cost(record: dict, row: dict) -> float:
    """The cost to compare with the budget: extra time on a GPU, the hooks' share of the time on a CPU."""
    return row["times_without"] - 1 if record["machine"]["gpu"] else row["share_of_time"]


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument(
        "--pairs", type=int, default=10 if gpu else 5, help="traced runs of each kind, each between two untraced ones"
    )
    parser.add_argument("--timed", type=int, default=2 if gpu else 5, help="runs of each kind with timed hooks")
    parser.add_argument("--requests", type=int, default=3000 if gpu else 64)
    parser.add_argument("--scale", type=int, default=1 if gpu else 2, help="divide the chat workload's lengths by this")
    parser.add_argument("--budget", type=float, default=0.02, help="the largest share of time that a trace may cost")
    options = parser.parse_args()
    if options.pairs < FEWEST_PAIRS or options.timed < 1:
        parser.error(f"--pairs must be at least {FEWEST_PAIRS}, or there is no 90% interval; --timed at least 1")
    begun, results = records.begin(options.record), []
    model = {"model": "gemma-2b", "load_format": "dummy", "max_num_seqs": 3000} if gpu else {}
    engine = Minillm(**model, enable_prefix_caching=True)
    try:
        vocab = engine.llm.model_config.vocab_size
        work = workloads.make("chat", vocab, scale=options.scale, requests=options.requests)
        facts = {"workload": "chat", "scale": options.scale, **workloads.totals(work)}
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(engine, work, options.pairs, options.timed, Path(folder)):
                results.append(facts | row)
                print(json.dumps(row), flush=True)
    finally:
        engine.llm.close()
    about = {"model": "gemma-2b, random weights" if gpu else "tiny-gemma", "budget": options.budget}
    content = records.record(results, begun, **about)
    if options.record:
        records.write(content, options.record)
    for row in results[1:]:
        low, high = (edge - 1 for edge in row["interval_90"])
        time_more, hooks = row["times_without"] - 1, row["share_of_time"]
        between = f"90% interval {low:+.2%} to {high:+.2%}"
        print(f"a trace in {row['trace']}: {time_more:+.2%} time ({between}), hooks {hooks:.2%}")
    most = max(cost(content, row) for row in results[1:])
    print(f"verdict by {'time' if gpu else 'hooks'}: {most:.2%}; the limit is {options.budget:.0%}")
    sys.exit(most > options.budget)


if __name__ == "__main__":
    main()
