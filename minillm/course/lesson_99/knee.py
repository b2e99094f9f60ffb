"""Open loops at several rates: where the waits of a server bend upward.  Lesson 99.

    python -m minillm.course.lesson_99.knee --json open-loop

measures the embedded model on a CPU and writes a record; the lesson runs a few rates live and shows the record.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minillm import LLM
from minillm.bench import records, serve
from minillm.bench.figures import percentiles
from minillm.server import running

from . import serving

ROWS, REQUESTS, ROUNDS = 16, 400, 5
CHAT: dict[str, Any] = {"workload": "chat", "scale": 8, "quiet": True}  # 16 tokens in, 16 out
SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of the closed loop's rate
Schedule = Callable[[float, int], Sequence[float]]


def capacity(url: str, rows: int, runs: int = 1, **load: Any) -> float:
    """Requests per second of a closed loop with a client for each row of the batch: the best of some runs."""
    found = [serve.run(url, concurrency=rows, requests=6 * rows, **load) for _ in range(runs)]
    return max(each["results"][0]["requests_per_s"] for each in found)


def opened(
    url: str, schedule: Schedule, shares: Sequence[float], limit: float, requests: Callable[[float], int], **load: Any
) -> list[dict[str, Any]]:
    """An open loop at each share of `limit` requests per second.

    schedule(rate, count): when requests are due. requests(rate): how many. Each result has `share`, `rate` and
    `most_at_once` besides what `serve.run` reports.
    """
    found = []
    for share in shares:
        rate = share * limit
        record = serve.run(url, due=list(schedule(rate, requests(rate))), **load)
        result = record["results"][0]
        found.append(result | {"share": share, "rate": rate, "most_at_once": serving.most_at_once(result)})
    return found


def row(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line of the record from runs at the same share: medians of what the runs say, and the TTFTs of each run."""

    def middle(wait: str, p: str) -> float:
        return statistics.median(each[wait][p] for each in runs)

    waits = {wait: {name: middle(wait, name) for name in percentiles([0.0])} for wait in ("ttft_s", "itl_s", "e2e_s")}
    return {
        "engine": runs[0]["engine"],
        "workload": runs[0]["workload"],
        "scale": runs[0]["scale"],
        "dtype": runs[0]["dtype"],
        "share": runs[0]["share"],
        "rate": round(statistics.median(each["rate"] for each in runs), 2),
        "requests": runs[0]["requests"],
        **{name: statistics.median(each[name] for each in runs) for name in ("seconds", "requests_per_s")},
        "output_tokens_per_s": statistics.median(each["output_tokens_per_s"] for each in runs),
        **waits,
        "most_at_once": statistics.median_high(each["most_at_once"] for each in runs),
        "runs": [each["ttft_s"]["p50"] for each in runs],
    }


def kept(result: Mapping[str, Any], ttft: float, e2e: float) -> float:
    """The share of requests whose first token and whole answer came within so many seconds of when they were due."""
    good = sum(
        each["first_token"] is not None
        and each["first_token"] - each["due"] <= ttft
        and each["end"] - each["due"] <= e2e
        for each in result["each"]
    )
    return good / len(result["each"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each rate, waits in milliseconds."""
    lines = ["  share  arriving/s  requests   TTFT p50   TTFT p99   ITL p50   end-to-end p50  most at once"]
    for each in rows:
        waits = [each["ttft_s"]["p50"], each["ttft_s"]["p99"], each["itl_s"]["p50"], each["e2e_s"]["p50"]]
        first, last, gap, whole = (1e3 * wait for wait in waits)
        lines.append(
            f"{each['share']:7.0%}{each['rate']:12.1f}{each['requests']:10}{first:11.1f}{last:11.1f}{gap:10.2f}"
            f"{whole:17.1f}{each['most_at_once']:14}"
        )
    return "\n".join(lines)


def measure() -> tuple[list[dict[str, Any]], float]:
    """The rows of the record, and the closed loop's requests per second, of which its shares are."""
    torch.set_num_threads(1)

    def schedule(rate: float, count: int) -> list[float]:
        return serving.poisson_arrivals(rate, serving.uniform_numbers(count))

    with LLM(device="cpu", max_num_seqs=ROWS, enable_prefix_caching=False) as llm, running(llm) as server:
        limits, rounds = [], []
        for _ in range(ROUNDS):
            limits.append(capacity(server.url, ROWS, runs=3, **CHAT))
            rounds.append(opened(server.url, schedule, SHARES, limits[-1], lambda _: REQUESTS, **CHAT))
    return [row(runs) for runs in zip(*rounds, strict=True)], statistics.median(limits)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.lesson_99.knee", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the record there; a name without suffix: to data/results/")
    options = parser.parse_args(arguments)
    begun = records.begin(options.json)
    rows, limit = measure()
    print(table(rows))
    if options.json is not None:
        content = records.record(rows, begun, model="tiny-gemma", rows=ROWS, closed_requests_per_s=limit)
        records.write(content, options.json)


if __name__ == "__main__":
    main()
