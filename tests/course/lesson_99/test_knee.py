"""Lesson 99: open loops at several rates."""

import pytest

from minillm.course.lesson_99 import knee, serving


@pytest.fixture
def server(monkeypatch):
    """A load generator that answers each request at once, and what it was asked."""
    asked = []

    def run(url, due=None, concurrency=None, requests=None, **load):
        asked.append({"url": url, "due": due, "concurrency": concurrency, "requests": requests, **load})
        if due is None:
            return {"results": [{"requests_per_s": 10.0 + len(asked)}]}
        each = [{"due": when, "first_token": when + 0.5, "end": when + 1.0} for when in due]
        return {"results": [{"each": each, "requests": len(due)}]}

    monkeypatch.setattr(knee.serve, "run", run)
    return asked


def test_rates_are_shares_of_the_limit(server):
    found = knee.opened("url", lambda rate, count: [n / rate for n in range(count)], (0.5, 2.0), 8.0, int, scale=4)
    assert [each["rate"] for each in found] == [4.0, 16.0] and [each["share"] for each in found] == [0.5, 2.0]
    assert [len(each["due"]) for each in server] == [4, 16] and {each["scale"] for each in server} == {4}
    assert [each["most_at_once"] for each in found] == [4, 16], "each stays one second"


def test_the_capacity_is_the_best_of_the_runs(server):
    assert knee.capacity("url", 3, runs=4) == 14.0
    assert {(each["concurrency"], each["requests"]) for each in server} == {(3, 18)}


def test_a_row_has_medians_of_the_runs_and_each_runs_wait():
    def run(wait):
        waits = {name: dict.fromkeys(("p50", "p90", "p99", "mean"), wait) for name in ("ttft_s", "itl_s", "e2e_s")}
        same = {"engine": "e", "workload": "w", "scale": 1, "dtype": "float32", "share": 0.5, "requests": 9}
        rates = {"rate": wait, "seconds": wait, "requests_per_s": wait, "output_tokens_per_s": wait}
        return same | rates | waits | {"most_at_once": int(wait)}

    found = knee.row([run(3.0), run(1.0), run(20.0)])
    assert found["ttft_s"]["p99"] == found["rate"] == found["most_at_once"] == 3
    assert found["runs"] == [3.0, 1.0, 20.0]
    assert knee.table([found]).splitlines()[1].split() == ["50%", "3.0", "9", *["3000.0"] * 2, "3000.00", "3000.0", "3"]


def test_a_promise_needs_both_waits_and_an_answer():
    each = [
        {"due": 1.0, "first_token": 1.5, "end": 3.0},
        {"due": 1.0, "first_token": 1.6, "end": 3.0},  # its first token came late
        {"due": 1.0, "first_token": 1.5, "end": 3.1},  # its end
        {"due": 1.0, "first_token": None, "end": 1.0},  # refused
    ]
    assert knee.kept({"each": each}, 0.5, 2.0) == 0.25


def test_the_schedules_of_all_rates_are_one_schedule():
    numbers = serving.uniform_numbers(50)
    slow, fast = serving.poisson_arrivals(2.0, numbers), serving.poisson_arrivals(4.0, numbers)
    assert [2 * when for when in fast] == pytest.approx(slow)
