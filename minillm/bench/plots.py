"""Plots of records: throughput, latencies as percentiles, requests over time, memory.  Lessons 09, 10 and 99.

Each takes a record (from `records.read` or a benchmark), draws it on `ax` or on a figure of its own, and returns the
axes. Nothing is measured here: a plot can be redrawn from its record at any time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError

from . import records, serve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCIES = {"ttft_s": "time to\nfirst token", "itl_s": "between\ntokens", "e2e_s": "whole\nanswer"}
FORMATS = (".svg", ".png", ".pdf")
OURS, THEIRS, WAITING = "#2a6f97", "#c9ada7", "#d9d9d9"


def throughput(record: Mapping[str, Any], workload: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Output tokens per second of each engine in an offline record, for one workload (default: its first).

    A bar is the median, a dot one run. Raises ConfigError when the record has no such workload.
    """
    names = list(dict.fromkeys(row["workload"] for row in record["results"]))
    if workload is None:
        workload = names[0]
    rows = [row for row in record["results"] if row["workload"] == workload]
    if not rows:
        raise ConfigError(f"the record has no workload {workload!r}; it has: {', '.join(names)}")
    ax = ax or _axes()
    labels = [row["engine"] + (f"\nbatch {row['batch']}" if "batch" in row else "") for row in rows]
    colors = [OURS if row["engine"].startswith("minillm") else THEIRS for row in rows]
    ax.bar(labels, [row["output_tokens_per_s"] for row in rows], color=colors)
    for place, row in enumerate(rows):
        _runs(ax, place, row)
    scaled = f", lengths / {rows[0]['scale']}" if rows[0].get("scale", 1) != 1 else ""
    ax.set_title(f"{workload}{scaled}, {rows[0]['dtype']}, {_machine(record)}", fontsize=9)
    ax.set_ylabel("output tokens / s")
    ax.margins(y=0.12)
    return _plain(ax)


def latency(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """TTFT, ITL and end to end of a serving record: bars to p50, p90 and p99, in milliseconds, on a log axis."""
    result = record["results"][0]
    ax = ax or _axes()
    shown = [name for name in LATENCIES if result[name]["p50"] is not None]
    for offset, (percentile, color) in enumerate(zip(("p50", "p90", "p99"), ("#a9d6e5", OURS, "#013a63"), strict=True)):
        places = [i + (offset - 1) * 0.27 for i in range(len(shown))]
        bars = ax.bar(places, [result[name][percentile] * 1e3 for name in shown], 0.25, color=color, label=percentile)
        ax.bar_label(bars, fmt="{:.3g}", padding=1, fontsize=8)
    ax.set_xticks(range(len(shown)), [LATENCIES[name] for name in shown])
    log_scale(ax)
    ax.set_ylabel("milliseconds")
    how, rate = serve.arriving(result), result["output_tokens_per_s"]
    ax.set_title(f"{how}, {rate:,.0f} output tokens/s, {_machine(record)}", fontsize=9)
    ax.legend(frameon=False)
    ax.margins(y=0.12)
    return _plain(ax)


def requests(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Every request of a serving record as a bar: from when it was due through its first token to its last."""
    result = record["results"][0]
    ax = ax or _axes()
    answered = [(place, each) for place, each in enumerate(result["each"]) if each["first_token"] is not None]
    refused = [(place, each) for place, each in enumerate(result["each"]) if each["first_token"] is None]
    places = [place for place, _ in answered]
    due, first, end = ([each[name] for _, each in answered] for name in ("due", "first_token", "end"))
    waits = [late - early for early, late in zip(due, first, strict=True)]
    ax.barh(places, waits, left=due, color=WAITING, label="waits for its first token")
    ax.barh(
        places,
        [late - early for early, late in zip(first, end, strict=True)],
        left=first,
        color=OURS,
        label="tokens arrive",
    )
    if refused:
        ax.plot(
            [each["due"] for _, each in refused], [place for place, _ in refused], "x", color="black", label="refused"
        )
    ax.set(xlabel="seconds", ylabel="requests, as they were due", yticks=[])
    ax.set_title(f"{serve.arriving(result)}, {_machine(record)}", fontsize=9)
    ax.invert_yaxis()
    ax.legend(frameon=False)
    return _plain(ax)


def ablation(record: Mapping[str, Any], ax: "Axes | None" = None, groups: Sequence[str] | None = None) -> "Axes":
    """Settings of an ablation record as horizontal bars, group by group: speed as a share of the group's best.

    A bar's color is its workload, the label at its end its output tokens per second. groups: those to show, in this
    order (default: all). Raises ConfigError when the record has no such group.
    """
    there = list(dict.fromkeys(row["group"] for row in record["results"]))
    if unknown := set(groups or ()) - set(there):
        raise ConfigError(f"the record has no group {', '.join(sorted(unknown))}; it has: {', '.join(there)}")
    rows = [row for group in groups or there for row in record["results"] if row["group"] == group]
    works = list(dict.fromkeys((row["workload"], row["requests"]) for row in record["results"]))
    places: dict[tuple[str, str], float] = {}
    place = 0.0
    for row in rows:
        bar = row["group"], row["name"]
        if bar not in places:
            place += 1.6 if places and row["group"] != list(places)[-1][0] else 1  # a gap between groups
            places[bar] = place
    height = 0.8 / len(works)
    ax = ax or _axes(height=0.6 + 0.34 * place)
    for number, (work, color) in enumerate(zip(works, (OURS, "#a9d6e5", THEIRS, "#013a63"), strict=False)):
        shown = [row for row in rows if (row["workload"], row["requests"]) == work]
        best = {row["group"]: 0.0 for row in shown}
        for row in shown:
            best[row["group"]] = max(best[row["group"]], row["output_tokens_per_s"])
        at = [places[row["group"], row["name"]] + (number + 0.5) * height - 0.4 for row in shown]
        shares = [row["output_tokens_per_s"] / best[row["group"]] for row in shown]
        bars = ax.barh(at, shares, height, color=color, label=f"{work[1]} request" + ("s" if work[1] > 1 else ""))
        ax.bar_label(bars, [f"{row['output_tokens_per_s']:,.0f}" for row in shown], padding=2, fontsize=7)
    ax.set_yticks(list(places.values()), [": ".join(bar) for bar in places])
    ax.invert_yaxis()
    ax.set(xlabel="output tokens / s, as a share of the group's best", xlim=(0, 1.2))
    ax.set_title(_where(record, ", "), fontsize=9)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return _plain(ax)


def batching(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Static and in-flight batching, from a batching record: bars are medians, dots single runs."""
    rows = [row for row in record["results"] if row["part"] == "throughput"]
    ax = ax or _axes()
    labels = [f"{row['batching']}\n{row['steps']:,} steps" for row in rows]
    ax.bar(labels, [row["output_tokens_per_s"] for row in rows], color=[THEIRS, OURS], width=0.6)
    for place, row in enumerate(rows):
        _runs(ax, place, row)
    ax.set_ylabel("output tokens / s")
    ax.set_title(f"{rows[0]['requests']} requests at once in {record['rows']} rows\n{_where(record)}", fontsize=9)
    ax.margins(y=0.12)
    return _plain(ax)


def chunking(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """TTFT and ITL with whole and with chunked prompts, from a batching record, in ms on a log axis."""
    rows = {row["prefill"]: row for row in record["results"] if row["part"] == "latency"}
    ax = ax or _axes()
    shown = [(name, p) for name in ("ttft_s", "itl_s") for p in ("p50", "p90", "p99")]
    places = [i + 0.6 * (i > 2) for i in range(len(shown))]  # a gap between both latencies
    for offset, (prefill, color) in zip((-0.2, 0.2), (("whole", THEIRS), ("chunked", OURS)), strict=True):
        row = rows[prefill]
        heights = [row[name][p] * 1e3 for name, p in shown]
        label = f"{prefill} prompts" if prefill == "whole" else f"chunks, {row['budget']} tokens a step"
        bars = ax.bar([place + offset for place in places], heights, 0.38, color=color, label=label)
        ax.bar_label(bars, [short(height) for height in heights], padding=1, fontsize=7)
    ax.set_xticks(places, [f"{p}\n{LATENCIES[name]}" if p == "p90" else p for name, p in shown])
    log_scale(ax)
    ax.set_ylabel("milliseconds")
    ax.set_title(f"{row['requests']} requests, {row['requests_per_s']:g} a second\n{_where(record)}", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    ax.margins(y=0.15)
    return _plain(ax)


def prefix(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Prompt tokens that prefill computes with the prefix cache, as shares of those without, from a batching record."""
    rows = [row for row in record["results"] if row["part"] == "prefix"]
    ax = ax or _axes(height=0.9 + 0.5 * len(rows))
    labels = [f"{row['traffic']}, {row['requests']} requests" for row in rows]
    ax.barh(labels, [1.0] * len(rows), color=WAITING, label="found in the cache")
    bars = ax.barh(labels, [1 - row["saved"] for row in rows], color=OURS, label="computed")
    ax.bar_label(bars, [f"{row['computed_with']:,} of {row['computed_without']:,}" for row in rows], padding=3)
    ax.invert_yaxis()
    ax.set(xlabel="share of prompt tokens", xlim=(0, 1))
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=2, fontsize=8)
    return _plain(ax)


SHARES = {
    "used": ("used: keys and values", OURS),
    "reserved": ("reserved for later", "#a9d6e5"),
    "internal": ("never used (internal fragmentation)", THEIRS),
    "external": ("free (external fragmentation)", WAITING),
}


def memory(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """How the cache's memory is used, contiguous and in blocks, from a batching record: means while requests wait.

    Kwon et al. 2023, figure 2.
    """
    rows = [row for row in record["results"] if row["part"] == "memory"]
    ax = ax or _axes()
    labels = [row["cache"].replace(": ", ":\n").replace(", ", ",\n") for row in rows]
    left = [0.0] * len(rows)
    for name, (label, color) in SHARES.items():
        widths = [row[name] for row in rows]
        bars = ax.barh(labels, widths, left=left, color=color, label=label)
        ax.bar_label(bars, [f"{w:.0%}" if w > 0.04 else "" for w in widths], label_type="center", fontsize=8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        ax.text(1.01, place, f"{row['running']:.0f} at once", va="center", fontsize=8)
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelsize=8)
    ax.set(xlabel="share of the cache's memory", xlim=(0, 1))
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, 1.2), ncols=2, fontsize=8)
    return _plain(ax)


def memory_over_time(record: Mapping[str, Any], cache: int = 0, ax: "Axes | None" = None) -> "Axes":
    """The same shares over the steps of a run, for one of a batching record's caches (by its index)."""
    row = [row for row in record["results"] if row["part"] == "memory"][cache]
    ax = ax or _axes()
    points = len(row["timeline"]["used"])
    steps = [place * (row["steps"] - 1) / max(1, points - 1) for place in range(points)]
    series = [row["timeline"][name] for name in SHARES]
    ax.stackplot(steps, series, labels=[label for label, _ in SHARES.values()], colors=[c for _, c in SHARES.values()])
    ax.set(xlabel="step", ylabel="share of the cache's memory", xlim=(0, steps[-1]), ylim=(0, 1), title=row["cache"])
    return _plain(ax)


def check_format(path: str | Path) -> None:
    """Check that `save` can write such a file. Raises ConfigError for its suffix, ImportError without matplotlib."""
    import matplotlib  # noqa: F401  drawing needs it: fail here, before the load

    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"a plot is saved as {', '.join(FORMATS)}, not as {str(path)!r}")


def save(record: Mapping[str, Any], path: str | Path) -> None:
    """Save both plots of a serving record, side by side, in the format that the file's suffix names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    latency(record, left)
    requests(record, right)
    figure.savefig(path, facecolor="white")


def _axes(height: float = 3.6) -> "Axes":
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6.4, height), layout="constrained")[1]


def _runs(ax: "Axes", place: int, row: Mapping[str, Any]) -> None:
    """A bar's runs as dots, and its median as a label above them."""
    median, speeds = row["output_tokens_per_s"], [row["output_tokens"] / each for each in row["runs"]]
    ax.plot([place] * len(speeds), speeds, ".k", markersize=4)
    top = (place, max(median, *speeds))
    ax.annotate(f"{median:,.0f}", top, xytext=(0, 4), textcoords="offset points", ha="center")


def log_scale(ax: "Axes") -> None:
    """Make the y axis logarithmic, with plain numbers as ticks: 1, 2, 5, 10."""
    from matplotlib.ticker import LogLocator, NullLocator

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_locator(NullLocator())


def short(value: float) -> str:
    """A number as a label: one decimal below 10, none above."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _plain(ax: "Axes") -> "Axes":
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _where(record: Mapping[str, Any], gap: str = "\n") -> str:
    """What ran, and on what."""
    return f"{records.model_of(record)}{gap}{record['dtype']}, {_machine(record)}"


def _machine(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
