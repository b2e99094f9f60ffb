"""Trace overhead: how it is measured, and that the committed records stay within budget."""

import itertools
import math
import random
import time

import pytest

from minillm.bench import records
from minillm.scheduler import Scheduler
from tools import trace_overhead


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_recorded_trace_overhead_is_within_budget(device):
    record = records.read(f"{device}/trace-overhead")
    rows = [row for row in record["results"] if row["trace"] != "none"]
    assert {row["trace"] for row in rows} == {"memory", "file"} and record["budget"] == 0.02
    assert bool(record["machine"]["gpu"]) == (device != "cpu")
    for row in rows:
        assert trace_overhead.cost(record, row) <= record["budget"], row["trace"]


def test_traced_runs_are_divided_by_their_untraced_neighbors_so_drift_cancels():
    """A machine that slows down by 0.1 s per run; a trace costs 1% in memory and 3% in a file."""
    costs, order = {"none": 1.0, "memory": 1.01, "file": 1.03}, []

    def run(kind):
        order.append(kind)
        return {"seconds": (10 + 0.1 * len(order)) * costs[kind], "events": 7}

    none, memory, file = trace_overhead.paired(run, 5)
    assert order == ["none", "memory", "none", "file"] * 5 + ["none"]
    assert (len(none["runs"]), len(memory["runs"]), len(file["pairs"])) == (11, 5, 5)
    assert (memory["times_without"], file["times_without"]) == (1.01, 1.03)
    assert memory["interval_90"] == [1.01, 1.01] and memory["events"] == 7


def test_one_slow_run_does_not_change_the_result():
    seconds = itertools.chain([1.0] * 5, [3.0], itertools.repeat(1.0))
    _, memory, file = trace_overhead.paired(lambda kind: {"seconds": next(seconds)}, 10)
    assert max(memory["pairs"]) == 3 and memory["times_without"] == file["times_without"] == 1
    assert memory["interval_90"] == [1, 1]


@pytest.mark.parametrize("count", [5, 8, 10, 21])
def test_the_interval_is_the_narrowest_with_at_least_90_percent_coverage(count):
    rng, inside, narrower = random.Random(0), 0, 0
    for _ in range(4000):
        values = [rng.expovariate(1) for _ in range(count)]
        low, high = trace_overhead.interval(values)
        ordered, median = sorted(values), math.log(2)
        inside += low <= median <= high
        at = ordered.index(low) + 1
        narrower += ordered[at] <= median <= ordered[-1 - at]
    assert inside / 4000 > 0.89 and narrower / 4000 < 0.91


def test_the_clock_of_the_hooks_counts_each_call_once(tmp_path, monkeypatch):
    """Uses a clock that advances by one at each reading."""
    trace = trace_overhead.Timed(tmp_path / "trace.jsonl")
    trace.watch(Scheduler(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, block_size=4, num_blocks=2))
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    trace.arrived(0)
    assert trace.seconds == 1
    trace._written = -2.0  # long ago
    trace.write_in_time()  # reads the clock, and again in its flush, which is also a hook
    assert trace.seconds == 1 + 3
    trace.close()


def test_too_few_pairs_give_no_interval():
    with pytest.raises(ValueError, match="4 values give no 90% interval of a median; at least 5 are needed"):
        trace_overhead.interval([1.0] * 4)
