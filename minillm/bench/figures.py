"""Summarize a serving run: rates, percentiles, the steady state, intervals, goodput and cost.  Lesson 99.

Everything is computed from `RequestTimes` requests after the run, by numpy only where it draws samples.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from minillm.errors import ConfigError

from . import workloads
from .clients import RequestTimes
from .workloads import BenchRequest

PERCENTILES = (50, 90, 99)
BATCHES = 10  # of a steady state, for the interval of its rate
STUDENT = 2.2622  # 97.5% of Student's distribution with BATCHES - 1 degrees of freedom lies below
ROUNDS = 500  # of the bootstrap
DRAWN = 1_000_000  # most values that it draws at once, so that it needs little memory
POSITIONS = 64  # points of the latency by position
LIMITS = ("ttft", "itl", "e2e")


def summary(work: Sequence[BenchRequest], measured: Sequence[RequestTimes]) -> dict:
    """Rates, and percentiles of what the clients of answered requests saw; `each` has the requests one by one.

    tokens_per_event: how many tokens an event of a stream brought on average. late_s: how late requests were sent. It
    is part of their latency; if it is not a small part, the load generator was the bottleneck.
    """
    answered = [each for each in measured if not each.refused]
    seconds = max(each.end for each in measured)
    output_tokens = sum(each.output_tokens for each in answered)
    events = sum(len(each.arrivals) for each in answered)
    refused = len(measured) - len(answered)
    inputs = [seen.input_tokens or len(asked.prompt) for asked, seen in zip(work, measured, strict=True)]
    return {
        **workloads.totals(work),
        "input_tokens": sum(inputs),
        "output_tokens": output_tokens,
        "refused": refused,
        "refused_share": round(refused / len(measured), 4),
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(answered) / seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "tokens_per_event": round(output_tokens / events, 4) if events else None,
        **latencies(answered),
        "late_s": percentiles([each.sent - each.due for each in measured]),
        "each": [_one(each, tokens) for each, tokens in zip(measured, inputs, strict=True)],
    }


def latencies(answered: Sequence[RequestTimes]) -> dict[str, dict[str, float | None]]:
    """Percentiles of the time to the first token, between tokens, and of whole answers."""
    return {
        "ttft_s": percentiles([each.ttft for each in answered]),
        "itl_s": percentiles([gap for each in answered for gap in each.gaps]),
        "e2e_s": percentiles([each.e2e for each in answered]),
    }


def _one(seen: RequestTimes, input_tokens: int) -> dict:
    first = None if seen.refused else round(seen.arrivals[0][0], 5)
    times = {"due": round(seen.due, 5), "first_token": first, "end": round(seen.end, 5)}
    return times | {"input_tokens": input_tokens, "output_tokens": seen.output_tokens}


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 (nearest rank: each is a value that was seen) and the mean; None without values."""
    if not values:
        return dict.fromkeys([*(f"p{p}" for p in PERCENTILES), "mean"])
    ranked = sorted(values)
    result: dict[str, float | None] = {f"p{p}": round(ranked[-(-p * len(ranked) // 100) - 1], 6) for p in PERCENTILES}
    return result | {"mean": round(statistics.fmean(values), 6)}


def steady(measured: Sequence[RequestTimes], seed: int = 0) -> dict | None:
    """Rates and latencies while the server is full; None if it is full for less time than its median answer takes.

    It fills until the first answer is complete, and empties once the last request is sent: the time between counts. In
    a closed loop all clients wait for answers in it. Its rates count the tokens that arrive in it and the answers that
    end in it, its latencies the requests that are sent in it. drift: by how much the second half's rate of tokens
    exceeds the first's; if it is large, the state was not steady.
    """
    answered = [each for each in measured if not each.refused]
    begin = min((each.end for each in answered), default=math.inf)
    end = max(each.sent for each in measured)
    inside = [each for each in answered if begin <= each.sent <= end]
    if not inside or end - begin < statistics.median(each.e2e for each in answered):  # too short for a rate
        return None
    counts = [0] * BATCHES
    for each in answered:
        for when, tokens in each.arrivals:
            if begin <= when < end:
                counts[min(BATCHES - 1, int((when - begin) / (end - begin) * BATCHES))] += tokens
    seconds, total = end - begin, sum(counts)
    early, late = sum(counts[: BATCHES // 2]), sum(counts[BATCHES // 2 :])
    rates = [count * BATCHES / seconds for count in counts]
    return {
        "from_s": round(begin, 4),
        "to_s": round(end, 4),
        "requests": len(inside),
        "requests_per_s": round(sum(begin <= each.end < end for each in answered) / seconds, 3),
        "output_tokens_per_s": round(total / seconds, 1),
        "drift": round((late - early) / early, 4) if early else None,
        **latencies(inside),
        "interval95": {"output_tokens_per_s": batch_means(rates), **intervals(inside, seed)},
    }


def batch_means(rates: Sequence[float]) -> list[float]:
    """Return a 95% confidence interval of the mean of BATCHES rates, from equal and successive stretches of time."""
    mean, half = statistics.fmean(rates), STUDENT * statistics.stdev(rates) / math.sqrt(len(rates))
    return [round(mean - half, 1), round(mean + half, 1)]


def intervals(answered: Sequence[RequestTimes], seed: int = 0) -> dict[str, dict[str, list[float]]]:
    """95% confidence intervals of latencies, by drawing the requests again and again with replacement (bootstrap).

    The gaps of one request are not independent, so that of `itl_s` is of the requests' mean gaps.
    """
    if not answered:
        return {}
    values = {
        "ttft_s": [each.ttft for each in answered],
        "itl_s": [gap for each in answered if (gap := mean_gap(each)) is not None],
        "e2e_s": [each.e2e for each in answered],
    }
    return {name: _bootstrap(each, seed) for name, each in values.items() if each}


def _bootstrap(values: Sequence[float], seed: int) -> dict[str, list[float]]:
    import numpy as np

    draw = np.random.default_rng(seed)
    seen, count = np.asarray(values), len(values)
    ranks = {"p50": -(-50 * count // 100) - 1, "p99": -(-99 * count // 100) - 1}
    drawn: dict[str, list[float]] = {"p50": [], "p99": [], "mean": []}
    together = max(1, DRAWN // count)
    for first in range(0, ROUNDS, together):
        again = np.sort(seen[draw.integers(0, count, (min(together, ROUNDS - first), count))], axis=1)
        drawn["mean"] += again.mean(axis=1).tolist()
        for name, rank in ranks.items():
            drawn[name] += again[:, rank].tolist()
    return {name: [round(float(v), 6) for v in np.percentile(each, (2.5, 97.5))] for name, each in drawn.items()}


def mean_gap(seen: RequestTimes) -> float | None:
    """Mean seconds between the tokens of one request; None with a single token."""
    if seen.output_tokens < 2:
        return None
    return (seen.arrivals[-1][0] - seen.arrivals[0][0]) / (seen.output_tokens - 1)


def by_position(answered: Sequence[RequestTimes]) -> list[dict]:
    """Percentiles of the gap before the second token, the third, and so on: at most POSITIONS points.

    Longer answers have several neighboring positions in a point; `position` is the first of them.
    """
    gaps: list[list[float]] = []
    for each in answered:
        for index, gap in enumerate(each.gaps):
            if index == len(gaps):
                gaps.append([])
            gaps[index].append(gap)
    width = max(1, math.ceil(len(gaps) / POSITIONS))
    return [
        {"position": first + 2, **percentiles(sum(gaps[first : first + width], []))}
        for first in range(0, len(gaps), width)
    ]


def parse_slo(text: str) -> dict[str, float]:
    """Read "ttft=0.5,itl=0.05,e2e=10": the most seconds that a request may take. Raises ConfigError."""
    limits: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
    return check_slo(limits)


def check_slo(slo: Mapping[str, float]) -> dict[str, float]:
    """Return the limits. Raises ConfigError for an unknown name or a time that is not above 0."""
    if not slo or set(slo) - set(LIMITS) or not all(math.isfinite(most) and most > 0 for most in slo.values()):
        raise ConfigError(f"an SLO has seconds above 0 for {', '.join(LIMITS)}, as in ttft=0.5,itl=0.05: not {slo!r}")
    return dict(slo)


def goodput(measured: Sequence[RequestTimes], slo: Mapping[str, float]) -> dict:
    """Return how many requests meet all limits of an SLO: each second, and which share. A refused request meets none.

    slo: most seconds to the first token (ttft), between tokens on average (itl), and for the whole answer (e2e).
    """
    good = sum(_meets(each, slo) for each in measured)
    seconds = max(each.end for each in measured)
    return {"slo": dict(slo), "requests_per_s": round(good / seconds, 3), "share": round(good / len(measured), 4)}


def _meets(seen: RequestTimes, slo: Mapping[str, float]) -> bool:
    if seen.refused:
        return False
    took = {"ttft": seen.ttft, "itl": mean_gap(seen) or 0.0, "e2e": seen.e2e}
    return all(took[name] <= most for name, most in slo.items())


def cost(result: Mapping, gpu_price: float, gpus: int = 1) -> dict:
    """Dollars for a million tokens at a result's rate: the steady state's, where it has one.

    gpu_price: dollars for a GPU and hour. per_million_output: if only generated tokens count; per_million: of all.
    """
    rate = (result.get("steady") or result)["output_tokens_per_s"]
    if not rate:
        return {"gpu_price": gpu_price, "gpus": gpus, "per_million_output": None, "per_million": None}
    output = gpu_price * gpus / 3600 / rate * 1e6
    both = result["input_tokens"] + result["output_tokens"]
    return {
        "gpu_price": gpu_price,
        "gpus": gpus,
        "per_million_output": round(output, 4),
        "per_million": round(output * result["output_tokens"] / both, 4),
    }
