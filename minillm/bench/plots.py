"""Plots of records: throughput, latencies, requests over time, memory, precisions.  Lessons 08 to 10 and 99.

Each takes a record (from `records.read` or a benchmark), draws it on `ax` or on a figure of its own, and returns the
axes. Nothing is measured here: a plot can be redrawn from its record at any time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError

from . import records
from .reports import arriving

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
    ax = ax or new_axes()
    labels = [row["engine"] + (f"\nbatch {row['batch']}" if "batch" in row else "") for row in rows]
    colors = [OURS if row["engine"].startswith("minillm") else THEIRS for row in rows]
    ax.bar(labels, [row["output_tokens_per_s"] for row in rows], color=colors)
    for index, row in enumerate(rows):
        _runs(ax, index, row)
    scaled = f", lengths / {rows[0]['scale']}" if rows[0].get("scale", 1) != 1 else ""
    ax.set_title(f"{workload}{scaled}, {rows[0]['dtype']}, {machine_of(record)}", fontsize=9)
    ax.set_ylabel("output tokens / s")
    ax.margins(y=0.12)
    return plain(ax)


def latency(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """TTFT, ITL and end to end of a serving record: bars to p50, p90 and p99, in milliseconds, on a log axis."""
    result = record["results"][0]
    ax = ax or new_axes()
    shown = [name for name in LATENCIES if result[name]["p50"] is not None]
    for offset, (percentile, color) in enumerate(zip(("p50", "p90", "p99"), ("#a9d6e5", OURS, "#013a63"), strict=True)):
        positions = [i + (offset - 1) * 0.27 for i in range(len(shown))]
        heights = [result[name][percentile] * 1e3 for name in shown]
        bars = ax.bar(positions, heights, 0.25, color=color, label=percentile)
        ax.bar_label(bars, fmt="{:.3g}", padding=1, fontsize=8)
    ax.set_xticks(range(len(shown)), [LATENCIES[name] for name in shown])
    log_scale(ax)
    ax.set_ylabel("milliseconds")
    how, rate = arriving(result), result["output_tokens_per_s"]
    ax.set_title(f"{how}, {rate:,.0f} output tokens/s, {machine_of(record)}", fontsize=9)
    ax.legend(frameon=False)
    ax.margins(y=0.12)
    return plain(ax)


def requests(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Return every request of a serving record as a bar: from when it was due through its first token to its last."""
    result = record["results"][0]
    ax = ax or new_axes()
    answered = [(index, each) for index, each in enumerate(result["each"]) if each["first_token"] is not None]
    refused = [(index, each) for index, each in enumerate(result["each"]) if each["first_token"] is None]
    positions = [index for index, _ in answered]
    due, first, end = ([each[name] for _, each in answered] for name in ("due", "first_token", "end"))
    waits = [late - early for early, late in zip(due, first, strict=True)]
    height = 0.8 if len(result["each"]) < 100 else 1.0  # gaps of less than a pixel look like missing requests
    ax.barh(positions, waits, height, left=due, color=WAITING, label="waits for its first token")
    ax.barh(
        positions,
        [late - early for early, late in zip(first, end, strict=True)],
        height,
        left=first,
        color=OURS,
        label="tokens arrive",
    )
    if refused:
        ax.plot(
            [each["due"] for _, each in refused], [index for index, _ in refused], "x", color="black", label="refused"
        )
    ax.set(xlabel="seconds", ylabel="requests, as they were due", yticks=[])
    ax.set_title(f"{arriving(result)}, {machine_of(record)}", fontsize=9)
    ax.invert_yaxis()
    ax.legend(frameon=False)
    return plain(ax)


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
    positions: dict[tuple[str, str], float] = {}
    position = 0.0
    for row in rows:
        bar = row["group"], row["name"]
        if bar not in positions:
            position += 1.6 if positions and row["group"] != list(positions)[-1][0] else 1  # a gap between groups
            positions[bar] = position
    height = 0.8 / len(works)
    ax = ax or new_axes(height=0.6 + 0.34 * position)
    for number, (work, color) in enumerate(zip(works, (OURS, "#a9d6e5", THEIRS, "#013a63"), strict=False)):
        shown = [row for row in rows if (row["workload"], row["requests"]) == work]
        best = {row["group"]: 0.0 for row in shown}
        for row in shown:
            best[row["group"]] = max(best[row["group"]], row["output_tokens_per_s"])
        at = [positions[row["group"], row["name"]] + (number + 0.5) * height - 0.4 for row in shown]
        shares = [row["output_tokens_per_s"] / best[row["group"]] for row in shown]
        bars = ax.barh(at, shares, height, color=color, label=f"{work[1]} request" + ("s" if work[1] > 1 else ""))
        ax.bar_label(bars, [f"{row['output_tokens_per_s']:,.0f}" for row in shown], padding=2, fontsize=7)
    ax.set_yticks(list(positions.values()), [": ".join(bar) for bar in positions])
    ax.invert_yaxis()
    ax.set(xlabel="output tokens / s, as a share of the group's best", xlim=(0, 1.2))
    ax.set_title(_where(record, ", "), fontsize=9)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return plain(ax)


def batching(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Static and in-flight batching, from a batching record: bars are medians, dots single runs."""
    rows = [row for row in record["results"] if row["part"] == "throughput"]
    ax = ax or new_axes()
    labels = [f"{row['batching']}\n{row['steps']:,} steps" for row in rows]
    ax.bar(labels, [row["output_tokens_per_s"] for row in rows], color=[THEIRS, OURS], width=0.6)
    for index, row in enumerate(rows):
        _runs(ax, index, row)
    ax.set_ylabel("output tokens / s")
    ax.set_title(f"{rows[0]['requests']} requests at once in {record['rows']} rows\n{_where(record)}", fontsize=9)
    ax.margins(y=0.12)
    return plain(ax)


def chunking(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """TTFT and ITL with whole and with chunked prompts, from a batching record, in ms on a log axis."""
    rows = {row["prefill"]: row for row in record["results"] if row["part"] == "latency"}
    ax = ax or new_axes()
    shown = [(name, p) for name in ("ttft_s", "itl_s") for p in ("p50", "p90", "p99")]
    positions = [i + 0.6 * (i > 2) for i in range(len(shown))]  # a gap between both latencies
    for offset, (prefill, color) in zip((-0.2, 0.2), (("whole", THEIRS), ("chunked", OURS)), strict=True):
        row = rows[prefill]
        heights = [row[name][p] * 1e3 for name, p in shown]
        label = f"{prefill} prompts" if prefill == "whole" else f"chunks, {row['budget']} tokens a step"
        bars = ax.bar([position + offset for position in positions], heights, 0.38, color=color, label=label)
        ax.bar_label(bars, [short(height) for height in heights], padding=1, fontsize=7)
    ax.set_xticks(positions, [f"{p}\n{LATENCIES[name]}" if p == "p90" else p for name, p in shown])
    log_scale(ax)
    ax.set_ylabel("milliseconds")
    ax.set_title(f"{row['requests']} requests, {row['requests_per_s']:g} a second\n{_where(record)}", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    ax.margins(y=0.15)
    return plain(ax)


def prefix(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Prompt tokens that prefill computes with the prefix cache, as shares of those without, from a batching record."""
    rows = [row for row in record["results"] if row["part"] == "prefix"]
    ax = ax or new_axes(height=0.9 + 0.5 * len(rows))
    labels = [f"{row['traffic']}, {row['requests']} requests" for row in rows]
    ax.barh(labels, [1.0] * len(rows), color=WAITING, label="found in the cache")
    bars = ax.barh(labels, [1 - row["saved"] for row in rows], color=OURS, label="computed")
    ax.bar_label(bars, [f"{row['computed_with']:,} of {row['computed_without']:,}" for row in rows], padding=3)
    ax.invert_yaxis()
    ax.set(xlabel="share of prompt tokens", xlim=(0, 1))
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=2, fontsize=8)
    return plain(ax)


SHARES = {
    "used": ("used: keys and values", OURS),
    "reserved": ("reserved for later", "#a9d6e5"),
    "internal": ("never used (internal fragmentation)", THEIRS),
    "external": ("free (external fragmentation)", WAITING),
}


def memory(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Draw how the cache's memory is used, contiguous and in blocks, in a batching record: means while requests wait.

    Kwon et al. 2023, figure 2.
    """
    rows = [row for row in record["results"] if row["part"] == "memory"]
    ax = ax or new_axes()
    labels = [row["cache"].replace(": ", ":\n").replace(", ", ",\n") for row in rows]
    left = [0.0] * len(rows)
    for name, (label, color) in SHARES.items():
        widths = [row[name] for row in rows]
        bars = ax.barh(labels, widths, left=left, color=color, label=label)
        ax.bar_label(bars, [f"{w:.0%}" if w > 0.04 else "" for w in widths], label_type="center", fontsize=8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for index, row in enumerate(rows):
        ax.text(1.01, index, f"{row['running']:.0f} at once", va="center", fontsize=8)
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelsize=8)
    ax.set(xlabel="share of the cache's memory", xlim=(0, 1))
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, 1.2), ncols=2, fontsize=8)
    return plain(ax)


def losses(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Draw each method's loss against the bytes of its weights, from a record of `minillm eval --compare`.

    The loss is the KL divergence from the unquantized model, on a log axis. Lesson 08.
    """
    ax = ax or new_axes(height=4.2)
    dense, *rows = record["results"]
    positions = {row["quantization"]: (row["bytes"] / 1e6, row["kl"]) for row in rows}
    simulated = [row["quantization"] for row in rows if row["simulated"]]
    real = [position for name, position in positions.items() if name not in simulated]
    ax.plot(*zip(*real, strict=True), "o", color=OURS, markersize=5)
    if simulated:
        hollow = [positions[name] for name in simulated]
        ax.plot(*zip(*hollow, strict=True), "o", color=OURS, markerfacecolor="white", markersize=5, label="simulated")
        ax.legend(frameon=True, loc="upper left", fontsize=8, handletextpad=0.1)
    ax.set_yscale("log")
    ax.margins(x=0.35, y=0.12)
    ax.set(xlabel="MB of weights", ylabel="loss: KL from the unquantized model, nats a token")
    size = f"unquantized, in 16 bits: {dense['bytes'] / 1e6:.1f} MB"
    ax.set_title(f"{records.model_of(record)}, trained; {size}", fontsize=10)
    label_points(ax, positions)
    return plain(ax)


def precisions(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Output tokens per second of each precision for the fewest and the most requests of a record.  Lesson 08."""
    ax = ax or new_axes(height=4.2)
    loads = sorted({row["requests"] for row in record["results"]})
    speeds: dict[str, dict[int, float]] = {}
    for row in record["results"]:
        speeds.setdefault(precision(row).replace(" g128", ""), {}).setdefault(
            row["requests"], row["output_tokens_per_s"]
        )
    positions = {name: (each[loads[0]], each[loads[-1]]) for name, each in speeds.items()}
    for name, position in positions.items():
        ax.plot(*position, "o", color=THEIRS if name == "bf16" else OURS, markersize=5)
    ax.margins(x=0.3, y=0.12)
    for axis, load in ((ax.xaxis, loads[0]), (ax.yaxis, loads[-1])):
        axis.set_label_text(f"output tokens / s, {load:,} request" + ("s at once" if load > 1 else ""))
        axis.set_major_formatter("{x:,.0f}")
    ax.set_title(f"Gemma 2B's shape, random weights, {machine_of(record)}", fontsize=10)
    label_points(ax, positions)
    return plain(ax)


def precision(row: Mapping[str, Any]) -> str:
    """Return the weights' quantization in a row of a record, and the cache's if it has any."""
    cache = row["kv_cache_dtype"]
    return row["quantization"] if cache in ("auto", "bfloat16") else f"{row['quantization']}, cache {cache}"


def label_points(ax: "Axes", points: Mapping[str, tuple[float, float]], size: float = 8) -> None:
    """Write each point's name to its right, or to its left where it would cover something.

    Names of points that lie close together stand in a column, from which lines lead to the points. points: name -> (x,
    y) in the axes' own numbers. Call it last: limits and scales must not change afterwards.
    """
    ax.figure.canvas.figure.draw_without_rendering()  # sets the layout
    unit = ax.figure.dpi / 72  # pixels of a typographic point
    spots = {name: tuple(ax.transData.transform(point) / unit) for name, point in points.items()}
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in spots.values()]
    for group in _close_together(spots, 3 * size, 1.3 * size):
        heights = _spread([spots[name][1] for name in group], 1.3 * size)
        far = 6 if len(group) == 1 else 14
        for side in (1, -1):
            edge = max(side * spots[name][0] for name in group) * side + side * far
            boxes = [_box(name, edge, height, side, size) for name, height in zip(group, heights, strict=True)]
            if not any(_overlap(box, other) for box in boxes for other in taken):
                break
        taken += boxes
        for name, height in zip(group, heights, strict=True):
            x, y = spots[name]
            line = {"arrowstyle": "-", "lw": 0.5, "color": "gray", "shrinkA": 1, "shrinkB": 2}
            ax.annotate(
                name, points[name], xytext=(edge - x, height - y), textcoords="offset points", fontsize=size,
                ha="left" if side > 0 else "right", va="center", in_layout=False,
                arrowprops=line | {"relpos": (0.0 if side > 0 else 1.0, 0.5)} if len(group) > 1 else None,
            )  # fmt: skip


def _close_together(spots: Mapping[str, tuple[float, float]], width: float, height: float) -> list[list[str]]:
    """Return the names in groups, each from top to bottom: a point joins a group if one of its points is this near."""
    groups: list[list[str]] = []
    for name, (x, y) in sorted(spots.items(), key=lambda each: (-each[1][1], each[1][0], each[0])):
        near = [
            group
            for group in groups
            if any(abs(x - spots[other][0]) < width and abs(y - spots[other][1]) < height for other in group)
        ]
        groups = [group for group in groups if group not in near]
        groups.append(sorted([*sum(near, []), name], key=lambda each: -spots[each][1]))
    return groups


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Falling heights, moved as little as it takes to be `gap` apart."""
    placed: list[float] = []
    for height in heights:
        placed.append(min(height, placed[-1] - gap) if placed else height)
    shift = sum(height - position for height, position in zip(heights, placed, strict=True)) / len(placed)
    return [position + shift for position in placed]


def _box(name: str, edge: float, height: float, side: int, size: float) -> tuple[float, float, float, float]:
    """About where a name stands: left, bottom, right, top."""
    other = edge + side * 0.56 * size * len(name)
    return min(edge, other), height - 0.6 * size, max(edge, other), height + 0.6 * size


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def check_format(path: str | Path) -> None:
    """Check that `save` can write such a file. Raises ConfigError for its suffix, ImportError without matplotlib."""
    import matplotlib  # noqa: F401  drawing needs it: fail here, before the load

    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"a plot is saved as {', '.join(FORMATS)}, not as {str(path)!r}")


def new_axes(height: float = 3.6) -> "Axes":
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6.4, height), layout="constrained")[1]


def _runs(ax: "Axes", index: int, row: Mapping[str, Any]) -> None:
    """Draw a bar's runs as dots, and its median as a label above them."""
    median, speeds = row["output_tokens_per_s"], [row["output_tokens"] / each for each in row["runs"]]
    ax.plot([index] * len(speeds), speeds, ".k", markersize=4)
    top = (index, max(median, *speeds))
    ax.annotate(f"{median:,.0f}", top, xytext=(0, 4), textcoords="offset points", ha="center")


def log_scale(ax: "Axes", name: str = "y") -> None:
    """Make the axis called `name` logarithmic, with plain numbers as ticks: 1, 2, 5, 10."""
    from matplotlib.ticker import LogLocator, NullLocator

    ax.set(**{f"{name}scale": "log"})
    axis = ax.xaxis if name == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def short(value: float) -> str:
    """Return a number as a label: one decimal below 10, none above."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def plain(ax: "Axes") -> "Axes":
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _where(record: Mapping[str, Any], gap: str = "\n") -> str:
    """Return what ran, and on what."""
    return f"{records.model_of(record)}{gap}{record['dtype']}, {machine_of(record)}"


def machine_of(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
