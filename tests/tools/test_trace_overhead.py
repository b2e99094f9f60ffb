"""What a trace costs: how it is measured, and that the committed measurements keep to its budget."""

import itertools
import math
import random
import time

import pytest

from minillm.bench import records
from minillm.scheduler import Scheduler
from tools import trace_overhead


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_a_trace_costs_no_more_than_its_budget_on_record(device):
    record = records.read(f"{device}/trace-overhead")
    rows = [row for row in record["results"] if row["trace"] != "none"]
    assert {row["trace"] for row in rows} == {"memory", "file"} and record["budget"] == 0.02
    assert bool(record["machine"]["gpu"]) == (device != "cpu")
    for row in rows:
        assert trace_overhead.cost(record, row) <= record["budget"], row["trace"]


def test_each_traced_run_is_divided_by_its_untraced_neighbours_so_that_drift_cancels():
    """A machine that slows down by a tenth of a second a run; traces cost 1 % in memory and 3 % in a file."""
    costs, order = {"none": 1.0, "memory": 1.01, "file": 1.03}, []

    def run(kind):
        order.append(kind)
        return {"seconds": (10 + 0.1 * len(order)) * costs[kind], "events": 7}

    none, memory, file = trace_overhead.paired(run, 5)
    assert order == ["none", "memory", "none", "file"] * 5 + ["none"]
    assert (len(none["runs"]), len(memory["runs"]), len(file["pairs"])) == (11, 5, 5)
    assert (memory["times_without"], file["times_without"]) == (1.01, 1.03)
    assert memory["interval_90"] == [1.01, 1.01] and memory["events"] == 7


def test_one_slow_run_is_not_the_verdict():
    seconds = itertools.chain([1.0] * 5, [3.0], itertools.repeat(1.0))
    _, memory, file = trace_overhead.paired(lambda kind: {"seconds": next(seconds)}, 10)
    assert max(memory["pairs"]) == 3 and memory["times_without"] == file["times_without"] == 1
    assert memory["interval_90"] == [1, 1]


@pytest.mark.parametrize("count", [5, 8, 10, 21])
def test_the_interval_has_the_median_in_at_least_nine_of_ten_cases_and_is_no_wider_than_that_takes(count):
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
    """A clock that goes on by one whenever it is read."""
    trace = trace_overhead.Timed(tmp_path / "trace.jsonl")
    trace.watch(Scheduler(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, block_size=4, num_blocks=2))
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    trace.arrived(0)
    assert trace.seconds == 1
    trace._written = -2.0  # long ago
    trace.write_in_time()  # reads the clock, and once more in its flush, which is a hook too
    assert trace.seconds == 1 + 3
    trace.close()


def test_too_few_pairs_give_no_interval():
    with pytest.raises(ValueError, match="4 values give no 90 % interval of a median; at least 5 are needed"):
        trace_overhead.interval([1.0] * 4)
