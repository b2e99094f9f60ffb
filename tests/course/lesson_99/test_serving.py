"""Lesson 99: its tables say what records say, and its text what the tables say."""

import pytest

from minillm.bench import records
from minillm.course.lesson_99 import serving


def test_query_patterns_count_output_tokens_and_all_tokens():
    waits = {"p50": 0.002, "p99": 0.003}
    row = {"workload": "liso_2048_128_x512", "requests": 4, "input_tokens": 800, "output_tokens": 40, "seconds": 2.0}
    row |= {"output_tokens_per_s": 20.0, "ttft_s": waits, "itl_s": waits, "e2e_s": waits}
    line = serving.patterns_table([row]).splitlines()[1]
    assert line.split() == ["liso", "200", "10", "2.0", "2.00", "3.00", "0.00", "20", "420"]


def test_what_the_lesson_says_of_the_recorded_patterns_holds():
    lines = [line.split() for line in serving.recorded_patterns().splitlines()[1:]]
    assert [line[0] for line in lines] == ["chat", "silo", "liso", "lilo"]
    speeds = {line[0]: float(line[4].replace(",", "")) for line in lines}
    everything = {line[0]: float(line[5].replace(",", "")) for line in lines}
    assert round(max(speeds.values()) / min(speeds.values())) == 8 and min(speeds, key=speeds.__getitem__) == "liso"
    assert min(everything, key=everything.__getitem__) == "silo" and max(everything, key=everything.get) == "liso"
    shares = [int(line[6].rstrip("%")) for line in lines]
    assert max(shares) - min(shares) <= 3, "equally close to the floor in all four"


def test_what_the_lesson_says_of_dynamic_batching_holds():
    record = records.read("cpu/triton")
    lines = serving.batching_table(record).splitlines()[1:]
    assert [line.split()[-6] for line in lines] == ["1.00", "1.78", "1.98"]
    dynamic, in_flight, _ = record["results"]
    gain = in_flight["output_tokens_per_s"] / dynamic["output_tokens_per_s"]
    static, best = serving.steps_needed(record["lengths"] * 8, record["rows"])
    assert gain < static / best, "the throughput grows less than the number of steps shrinks"
    assert dynamic["short_answers_median_s"] / in_flight["short_answers_median_s"] > 3 * gain


def test_a_plan_gained_nothing_to_speak_of():
    lines = serving.build_gain().splitlines()
    assert len(lines) == 2 and all(line.endswith(("(+0.0%)", "(+0.1%)")) for line in lines)


def test_what_the_lesson_says_of_the_knee_holds():
    record = records.read("cpu/open-loop")
    rows = {round(100 * row["share"]): row for row in record["results"]}
    assert record["rows"] == 16 and all(row["requests"] == 400 and len(row["runs"]) == 5 for row in rows.values())
    ttft = {share: 1e3 * row["ttft_s"]["p50"] for share, row in rows.items()}
    itl = {share: 1e3 * row["itl_s"]["p50"] for share, row in rows.items()}
    assert [round(ttft[share]) for share in (30, 90, 100, 125)] == [16, 31, 141, 406]
    assert ttft[200] == pytest.approx(950, abs=50), "almost a second"
    assert itl[90] / itl[30] == pytest.approx(2.15, abs=0.05) and itl[200] < itl[125] < itl[100] < 1.1 * itl[90]
    late = {share: row["ttft_s"]["p99"] for share, row in rows.items()}
    assert late[90] > 2 * late[70] and ttft[90] == pytest.approx(1.5 * ttft[70], rel=0.03)
