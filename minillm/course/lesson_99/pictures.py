"""Lesson 99's pictures: one request's waits, gaps and their percentiles, what batching gains, arrivals, runs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from minillm.bench import plots

TOKEN, LONGEST, OTHER = "#4c78a8", "#e45756", "#f58518"
SHORTEST_MS = 0.1


def request(due: float, arrivals: Sequence[tuple[float, int]]) -> None:
    """One request from when it was due to its last token, with its waits named."""
    at = [(when - due) * 1e3 for when, _ in arrivals]
    _, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
    axis.plot([0, at[-1]], [0, 0], color="gray", lw=1)
    axis.plot(0, 0, "k>", markersize=9)
    axis.vlines(at, -0.25, 0.25, color=TOKEN, lw=2)
    _span(axis, 0, at[0], 0.45, "TTFT")
    widest = max(range(1, len(at)), key=lambda i: at[i] - at[i - 1])
    start, end = at[widest - 1], at[widest]
    axis.fill_between([start, end], -0.25, 0.25, color=LONGEST, alpha=0.3, lw=0)
    axis.annotate(
        f"the longest ITL: {end - start:.1f} ms",
        ((start + end) / 2, 0.25),
        (0, 24),
        textcoords="offset points",
        ha="center",
        color=LONGEST,
        arrowprops={"arrowstyle": "->", "color": LONGEST},
    )
    rate = sum(tokens for _, tokens in arrivals) / at[-1] * 1e3
    _span(axis, 0, at[-1], -0.75, f"end-to-end; throughput with this one user: {rate:.0f} tokens/s")
    axis.set(
        ylim=(-1, 1.1), yticks=[], xlabel="milliseconds since the request was due; tokens arrive at each blue line"
    )
    axis.spines[["top", "left", "right"]].set_visible(False)


def _span(axis: Any, start: float, end: float, height: float, text: str) -> None:
    arrow = {"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", (start, height), (end, height), arrowprops=arrow)
    axis.text((start + end) / 2, height + 0.08, text, ha="center")


def gaps(seconds: Sequence[float], marks: Mapping[str, float]) -> None:
    """A histogram of gaps on a logarithmic axis, with vertical lines at `marks`, which are in seconds too.

    Gaps below SHORTEST_MS, of tokens that arrived together, are drawn there.
    """
    ms = [max(SHORTEST_MS, 1e3 * each) for each in seconds]
    figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
    edges = np.geomspace(min(ms) * 0.99, max(ms) * 1.01, 61)
    axis.hist(ms, bins=edges.tolist(), color=TOKEN)
    for (name, value), color in zip(marks.items(), ("black", OTHER, LONGEST, "dimgray"), strict=False):
        style = ":" if name == "mean" else "-"
        axis.axvline(max(SHORTEST_MS, 1e3 * value), color=color, ls=style, label=f"{name}: {1e3 * value:.1f} ms")
    plots.log_scale(axis, "x")
    axis.set(xlabel="milliseconds between two tokens", ylabel="gaps")
    figure.legend(loc="outside upper center", ncols=len(marks), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def batching(loads: Sequence[Mapping[str, Any]]) -> None:
    """Closed loops with different numbers of clients: throughput, and the gaps between tokens."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
    clients = [row["concurrency"] for row in loads]
    speeds = [row["output_tokens_per_s"] for row in loads]
    left.plot(clients, speeds, "o-", color=TOKEN, label="measured")
    ideal = [speeds[0] * each for each in clients]
    left.plot(clients, ideal, ":", color="gray", label="clients × one client's")
    left.set(xlabel="clients", ylabel="output tokens/s", title="Throughput", ylim=(0, 1.4 * max(speeds)))
    for share, style, color in (("p50", "o-", "black"), ("p99", "s--", LONGEST)):
        waits = [row["itl_s"][share] * 1e3 for row in loads]
        right.plot(clients, waits, style, color=color, label=share)
    right.set(xlabel="clients", ylabel="milliseconds", title="Time between tokens", ylim=0)
    for axis in (left, right):
        axis.legend()
        axis.spines[["top", "right"]].set_visible(False)


def arrivals(due: Sequence[float], shown: int = 60) -> None:
    """Draw when the first requests arrive, and a histogram of all gaps between requests."""
    widths = (2, 1)
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 2.2), width_ratios=widths, layout="constrained")
    left.eventplot(due[:shown], colors=TOKEN)
    left.set(yticks=[], xlabel="seconds", title=f"The first {shown} requests")
    right.hist([late - early for early, late in pairwise(due)], bins=60, color=TOKEN)
    right.set(xlabel="seconds to the next request", ylabel="requests", title="All gaps")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)


def patterns(rows: Sequence[Mapping[str, Any]]) -> None:
    """Query patterns: what a request waits, median, in its two parts; and tokens per second, counted in two ways."""
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 2.8), layout="constrained")
    names = [row["workload"].split("_")[0] for row in rows]
    ttft, e2e = ([1e3 * row[wait]["p50"] for row in rows] for wait in ("ttft_s", "e2e_s"))
    left.barh(names, ttft, color=OTHER, label="to the first token")
    left.barh(names, [b - a for a, b in zip(ttft, e2e, strict=True)], left=ttft, color=TOKEN, label="the rest")
    left.set(xlabel="milliseconds, median", title="How long a request waits")
    places = np.arange(len(rows))
    output = [row["output_tokens_per_s"] for row in rows]
    everything = [row["output_tokens_per_s"] + row["input_tokens"] / row["seconds"] for row in rows]
    right.barh(places - 0.2, output, 0.4, color=TOKEN, label="output tokens")
    right.barh(places + 0.2, everything, 0.4, color="lightgray", label="all tokens")
    right.set_yticks(places, names)
    right.set(xlabel="tokens per second", title="Throughput")
    for axis in (left, right):
        axis.invert_yaxis()
        axis.legend()
        axis.spines[["top", "right"]].set_visible(False)


def knee(recorded: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> None:
    """Waits against the rate of arrivals, as a share of a closed loop's rate: of a record, and of this machine."""
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    for rows, name, line in ((recorded, "record", "-"), (live, "here", "")):
        share = [100 * row["share"] for row in rows]
        for p, marker, color in (("p50", "o", "black"), ("p99", "s", LONGEST)):
            waits = [1e3 * row["ttft_s"][p] for row in rows]
            filled = color if line else "none"
            left.plot(share, waits, marker + line, color=color, mfc=filled, label=f"{p}, {name}")
        gaps = [1e3 * row["itl_s"]["p50"] for row in rows]
        right.plot(share, gaps, "o" + line, color=TOKEN, mfc=TOKEN if line else "none", label=f"p50, {name}")
    plots.log_scale(left)
    left.set(ylabel="milliseconds", title="Time to the first token")
    right.set(ylim=0, ylabel="milliseconds", title="Time between tokens")
    for axis in (left, right):
        axis.axvline(100, color="gray", ls=":")
        axis.set_xlabel("arrivals, % of the closed loop's rate")
        axis.legend()
        axis.spines[["top", "right"]].set_visible(False)


def runs(records: Mapping[str, Mapping[str, Any]]) -> None:
    """The requests of serving records over time, side by side, with their number. records: title -> record."""
    figure, axes = plt.subplots(1, len(records), figsize=(11, 3.6), layout="constrained")
    for axis, (title, record) in zip(axes, records.items(), strict=True):
        plots.requests(record, axis)
        axis.set_title(f"{title}\n{len(record['results'][0]['each']):,} requests", fontsize=10)
        axis.get_legend().remove()
        axis.set_ylabel("")
    axes[0].set_ylabel("requests, in the order they were due")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


def lengths(visible: Sequence[int], keys: int) -> None:
    """Rows of a batch with the keys that each one's new token sees."""
    _, axis = plt.subplots(figsize=(5, 1.8), layout="constrained")
    axis.imshow(np.arange(keys) < np.array(visible)[:, None], cmap="Blues", vmax=2, aspect="auto")
    axis.set(xlabel="key", ylabel="row", yticks=range(len(visible)), title="Blue: visible keys; ?: leftovers")
    for row, length in enumerate(visible):
        for key in range(length, keys):
            axis.text(key, row, "?", ha="center", va="center", color="dimgray")


def comparison(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Offline records side by side: bars are medians, dots single runs. records: title -> record."""
    _, axes = plt.subplots(1, len(records), figsize=(10, 3.2), layout="constrained")
    for axis, (title, record) in zip(axes, records.items(), strict=True):
        plots.throughput(record, ax=axis)
        axis.set_title(title, fontsize=10)
