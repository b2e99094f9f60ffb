"""What a trace costs: the share of an engine's time in its hooks, and runs with and without it in turn.

    python tests/trace_overhead.py --record trace-overhead

On a CPU the share is what counts: the engine computes nothing meanwhile, and runs with and without a trace differ by
more than it costs. It comes from runs of their own, whose hooks read the clock. On a GPU the time counts: hooks run
while the device computes. The prefix cache is on: hits leave less to compute and more to tell. On a GPU Gemma 2B's
shape with random weights, on a CPU the embedded model.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm.bench import records, workloads  # noqa: E402
from minillm.bench.offline import Minillm  # noqa: E402
from minillm.trace import Trace  # noqa: E402

HOOKS = ("submit", "admit", "grow", "register", "evict", "release", "preempt", "finish", "launch", "arrived")
HOOKS += ("abandon", "flush", "write_in_time")


class Timed(Trace):
    """A trace that knows how long its engine spent in it."""

    def __init__(self, path: Path | None):
        super().__init__(path)
        self.seconds, self._inside = 0.0, False

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        return self._timed(found) if name in HOOKS and not self._inside else found

    def _timed(self, hook):
        def run(*arguments):
            begun = time.perf_counter()
            self._inside = True
            try:
                return hook(*arguments)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - begun

        return run


def measure(engine: Minillm, work: list, repeat: int, folder: Path) -> list[dict]:
    """Runs with no trace, one in memory and one in a file; these two also timed by hooks. In turn, after a warm-up."""
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
        scheduler.trace = scheduler.pool.on_evict = None
        facts = {"seconds": seconds, "events": len(trace.events)}
        if isinstance(trace, Timed):
            assert time.perf_counter() - begun >= trace.seconds > 0
            facts["share"] = trace.seconds / seconds
        return facts | ({"bytes": trace.path.stat().st_size} if trace.path else {})

    kinds = tuple(traces)
    runs: dict[str, list[dict]] = {kind: [] for kind in kinds}
    run("none")
    for count in range(repeat):
        turn = count % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:
            runs[kind].append(run(kind))

    def seconds(kind: str) -> list[float]:
        return [each["seconds"] for each in runs[kind]]

    results = []
    for kind in ("none", "memory", "file"):
        row = {"trace": kind, "seconds": round(statistics.median(seconds(kind)), 4)}
        row |= {"runs": [round(s, 4) for s in seconds(kind)]}
        if kind != "none":
            shares = [each["share"] for each in runs[f"{kind}, timed"]]
            row |= {"share_of_time": round(statistics.median(shares), 5), "shares": [round(s, 5) for s in shares]}
            row |= {"times_without": round(statistics.median(seconds(kind)) / statistics.median(seconds("none")), 4)}
            row |= {name: runs[kind][-1][name] for name in ("events", "bytes") if name in runs[kind][-1]}
        results.append(row)
    return results


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument("--repeat", type=int, default=3 if gpu else 5, help="runs of each kind")
    parser.add_argument("--requests", type=int, default=3000 if gpu else 64)
    parser.add_argument("--scale", type=int, default=1 if gpu else 2, help="divide the chat workload's lengths by this")
    parser.add_argument("--budget", type=float, default=0.02, help="the share of time that a trace may cost")
    options = parser.parse_args()
    begun, results = records.begin(), []
    model = {"model": "gemma-2b", "load_format": "dummy", "max_num_seqs": 3000} if gpu else {}
    engine = Minillm(**model, enable_prefix_caching=True)
    try:
        vocab = engine.llm.model_config.vocab_size
        work = workloads.make("chat", vocab, scale=options.scale, requests=options.requests)
        facts = {"workload": "chat", "scale": options.scale, **workloads.totals(work)}
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(engine, work, options.repeat, Path(folder)):
                results.append(facts | row)
                print(json.dumps(row), flush=True)
    finally:
        engine.llm.close()
    about = {"model": "gemma-2b, random weights" if gpu else "tiny-gemma", "budget": options.budget}
    content = records.record(results, begun, **about)
    if options.record:
        records.write(content, options.record)
    cost = max(row["times_without"] - 1 if gpu else row["share_of_time"] for row in results[1:])
    print(f"a trace costs {cost:.2%} of the time (median of the runs); allowed are {options.budget:.0%}")
    sys.exit(cost > options.budget)


if __name__ == "__main__":
    main()
