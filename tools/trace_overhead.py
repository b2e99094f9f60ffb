"""What a trace costs: the share of an engine's time in its hooks, and each run with one beside two without.

    python tools/trace_overhead.py --record trace-overhead

On a CPU the share is what counts: the engine computes nothing meanwhile, and runs with and without a trace differ by
more than it costs. It comes from runs of their own, whose hooks read the clock (but for evictions: theirs is a list's
append). On a GPU the time counts: hooks run while the device computes. Each traced run is divided by the mean of the
untraced ones before and after it, so that a machine which slows down meanwhile is in both, and the median of these
pairs is judged. The prefix cache is on: hits leave less to compute and more to tell. On a GPU Gemma 2B's shape with
random weights, on a CPU the embedded model.
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
from minillm.trace import Trace  # noqa: E402

HOOKS = ("submit", "admit", "grow", "register", "release", "preempt", "finish", "launch", "arrived")
HOOKS += ("reset", "flush", "write_in_time")
FEWEST_PAIRS = 5  # the least and the most of 5 have the median between them in 15 of 16 cases


class Timed(Trace):
    """A trace that knows how long its engine spent in it."""

    def __init__(self, path: Path | None):
        super().__init__(path)
        self.seconds, self._inside = 0.0, False
        for name in HOOKS:  # in the instance, so that what a hook looks up takes no longer than untimed
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
    """A row without a trace, one with it in memory, one in a file. timed: runs of each that are timed by hooks."""
    scheduler, file = engine.llm.engine.scheduler, folder / "trace.jsonl"
    traces = {
        "none": lambda: None,
        "memory": Trace,
        "file": lambda: Trace(file),
        "memory, timed": lambda: Timed(None),
        "file, timed": lambda: Timed(file),
    }

    def run(kind: str) -> dict:
        engine.llm.engine.trace = trace = traces[kind]()
        if trace is not None:
            trace.watch(scheduler)
        begun = time.perf_counter()
        seconds = engine.run(work, 1.0)
        if trace is None:
            return {"seconds": seconds}
        trace.close()
        scheduler.trace = None
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
    """Runs in the order none, memory, none, file, none, ...; returns a row a kind."""
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
    """Two of the values, the nearest to the middle, that have the true median between them 9 times in 10 or more.

    Each value is as likely above the median as below, so how many are below is a toss of as many coins.
    """
    count = len(values)
    if count < FEWEST_PAIRS:
        raise ValueError(f"{count} values are no 90 % interval of a median; it takes {FEWEST_PAIRS}")
    outside, cut = 1, 0  # tosses of 2**count that leave the median below the value number `cut`, counted from 0
    while 2 * (outside + math.comb(count, cut + 1)) <= 0.1 * 2**count:
        cut += 1
        outside += math.comb(count, cut)
    ordered = sorted(values)
    return [ordered[cut], ordered[-1 - cut]]


def cost(record: dict, row: dict) -> float:
    """What counts of a row: extra time on a GPU, share of the time on a CPU."""
    return row["times_without"] - 1 if record["machine"]["gpu"] else row["share_of_time"]


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument("--pairs", type=int, default=10 if gpu else 5, help="traced runs of each kind beside others")
    parser.add_argument("--timed", type=int, default=2 if gpu else 5, help="runs of each kind with timed hooks")
    parser.add_argument("--requests", type=int, default=3000 if gpu else 64)
    parser.add_argument("--scale", type=int, default=1 if gpu else 2, help="divide the chat workload's lengths by this")
    parser.add_argument("--budget", type=float, default=0.02, help="the share of time that a trace may cost")
    options = parser.parse_args()
    if options.pairs < FEWEST_PAIRS or options.timed < 1:
        parser.error(f"--pairs must be at least {FEWEST_PAIRS}, or there is no 90 % interval; --timed at least 1")
    begun, results = records.begin(), []
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
        between = f"90 % interval {low:+.2%} to {high:+.2%}"
        print(f"a trace in {row['trace']}: {time_more:+.2%} time ({between}), hooks {hooks:.2%}")
    most = max(cost(content, row) for row in results[1:])
    print(f"what counts here is {'time' if gpu else 'hooks'}: {most:.2%}; allowed are {options.budget:.0%}")
    sys.exit(most > options.budget)


if __name__ == "__main__":
    main()
