"""Results of serving runs as text.  Lesson 99."""

from collections.abc import Mapping, Sequence

GENERATOR_BUSY = 0.7  # above this share of a run the load generator's own work distorts the measurement
BUSY = (
    "a load generator worked for {:.0%} of that time: the server is faster than this shows; give it more processes "
    "with --generators"
)
# Columns of a table of several results.
SHOWN = (("ttft_s", "p50"), ("ttft_s", "p99"), ("itl_s", "p50"), ("itl_s", "p99"), ("e2e_s", "p50"))


def arriving(result: Mapping) -> str:
    """Return how a result's requests arrived, in words."""
    if result["arrival"] == "poisson":
        return f"{result['rate']:g} a second"
    if result["arrival"] == "given":
        return "when due"
    if result["arrival"] == "trace":
        return f"as traced, {result['speed']:g} times as fast"
    if result["arrival"] == "static batches":
        return f"batches of {result['batch']}"
    return f"{result['concurrency']} at a time"


def generator_share(result: Mapping) -> float:
    """Return the share of a run's time that the load generator itself worked: close to 1, it was the bottleneck."""
    return result["generator_s"] / result["seconds"]


def table(result: Mapping) -> str:
    """Return one result as text: rates, then latencies in milliseconds."""
    lines = [
        f"{result['requests']} requests, {arriving(result)}: {result['requests_per_s']:.2f} requests/s,"
        f" {result['output_tokens_per_s']:,.0f} output tokens/s, {result['seconds']:.2f} s in all"
    ]
    if result["refused"]:
        lines.append(f"{result['refused']} refused ({result['refused_share']:.1%}): the server's queue was full")
    busy = generator_share(result)
    if busy > GENERATOR_BUSY:
        lines.append(BUSY.format(busy))
    lines += _more(result)
    lines.append(f"{'milliseconds':<22}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "mean")))
    labels = {"ttft_s": "time to first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
    if result["arrival"] != "closed loop":
        labels["late_s"] = "sent after due"
    for name, label in labels.items():
        values = result[name].values()
        lines.append(f"{label:<22}" + "".join(f"{'-' if v is None else format(v * 1e3, '.1f'):>10}" for v in values))
    return "\n".join(lines)


def _more(result: Mapping) -> list[str]:
    """Return lines about the steady state, an SLO and costs, where the result has them."""
    lines = []
    if steady := result.get("steady"):
        low, high = steady["interval95"]["output_tokens_per_s"]
        lines.append(
            f"steady from {steady['from_s']:.2f} to {steady['to_s']:.2f} s: {steady['output_tokens_per_s']:,.0f} output"
            f" tokens/s, 95% interval {low:,.0f} to {high:,.0f}; {_drift(steady)}"
        )
    if goodput := result.get("goodput"):
        limits = ", ".join(f"{name} {most:g} s" for name, most in goodput["slo"].items())
        lines.append(f"within {limits}: {goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%} of all")
    if (cost := result.get("cost")) and cost["per_million"] is not None:
        lines.append(
            f"${cost['per_million']:.4g} for a million tokens, ${cost['per_million_output']:.4g} counting output only"
        )
    return lines


def _drift(steady: Mapping) -> str:
    return "no tokens in its first half" if steady["drift"] is None else f"second half {steady['drift']:+.1%}"


def tables(results: Sequence[Mapping]) -> str:
    """Several results, one line each; of one result, its own table."""
    if len(results) == 1:
        return table(results[0])
    wide = max(len(result["engine"]) for result in results)
    lines = [
        f"{'engine':<{wide}}  {'workload':<22}{'load':>24}{'requests/s':>12}{'tokens/s':>10}"
        f"{'TTFT p50':>10}{'p99':>9}{'ITL p50':>9}{'p99':>9}{'e2e p50 (ms)':>14}"
        f"{'good':>7}{'$/million':>11}{'vs first':>10}"
    ]
    for result in results:
        times = [result.get(name, {}).get(p) for name, p in SHOWN]
        shown = "".join(f"{_ms(value):>{column}}" for value, column in zip(times, (10, 9, 9, 9, 14), strict=True))
        good = f"{result['goodput']['share']:.0%}" if "goodput" in result else ""
        dollars = result.get("cost", {}).get("per_million")
        ratio = result.get("times_first", {}).get("output_tokens_per_s")
        lines.append(
            f"{result['engine']:<{wide}}  {result['workload']:<22}{arriving(result):>24}"
            f"{result['requests_per_s']:>12.2f}{result['output_tokens_per_s']:>10,.0f}"
            f"{shown}{good:>7}{'' if dollars is None else format(dollars, '.4g'):>11}"
            f"{'' if ratio is None else format(ratio, '.2f'):>10}".rstrip()
        )
    busy = max((generator_share(result) for result in results if "generator_s" in result), default=0.0)
    if busy > GENERATOR_BUSY:
        lines.append(BUSY.format(busy))
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
