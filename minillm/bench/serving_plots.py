"""Plots of serving records: the load's shape, latencies by length and position, throughput against latency.  Lesson 99.

Each takes a record of `minillm bench serve`, draws it on `ax` or on a figure of its own, and returns the axes. Where a
record has several servers, all but `load_curve` show the first one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plots
from .reports import arriving

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (plots.OURS, "#bc4749", "#6a994e", "#f2a541", "#7b2d8b", "#5c677d", "#a9d6e5", "#013a63")
AXES = {"ttft_s": "to the first token", "itl_s": "between tokens", "e2e_s": "of a whole answer"}


def heat_map(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Output tokens per second by the mean lengths of input and output, at the record's highest load."""
    rows = _rows(record)
    most = max(row.get("concurrency", 0) for row in rows)
    speeds = {_lengths(row): row["output_tokens_per_s"] for row in rows if row.get("concurrency", 0) == most}
    inputs, outputs = sorted({one for one, _ in speeds}), sorted({other for _, other in speeds})
    ax = ax or plots.new_axes()
    grid = [[speeds.get((one, other), float("nan")) for one in inputs] for other in outputs]
    ax.imshow(grid, cmap="Blues", aspect="auto", origin="lower", vmin=0, vmax=1.2 * max(speeds.values()))
    for (one, other), speed in speeds.items():
        color = "white" if speed > 0.6 * max(speeds.values()) else "black"  # on dark blue, and on light
        position = inputs.index(one), outputs.index(other)
        ax.text(*position, f"{speed:,.0f}", ha="center", va="center", fontsize=9, color=color)
    ax.set_xticks(range(len(inputs)), [f"{each:,}" for each in inputs])
    ax.set_yticks(range(len(outputs)), [f"{each:,}" for each in outputs])
    ax.set(xlabel="input tokens", ylabel="output tokens")
    ax.set_title(f"output tokens / s{f', {most} at a time' if most else ''}, {plots.machine_of(record)}", fontsize=9)
    return ax


def ttft_by_input(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Time to first token of every answered request against the tokens of its prompt, a color for each load."""
    ax = ax or plots.new_axes()
    for name, rows in _groups(record).items():
        seen = [each for row in rows for each in row["each"] if each["first_token"] is not None]
        waits = [1e3 * (each["first_token"] - each["due"]) for each in seen]
        color = COLORS[len(ax.lines) % len(COLORS)]
        ax.plot([each["input_tokens"] for each in seen], waits, ".", color=color, alpha=0.6, label=name)
    plots.log_scale(ax)
    ax.set(xlabel="input tokens", ylabel="ms to the first token")
    return _finished(ax, record)


def itl_by_position(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Time between tokens against the token's position in the answer: median, and p99 as a thin line, for each load.

    Of more loads than there are colors, only those with the most clients.
    """
    ax = ax or plots.new_axes()
    for index, row in enumerate(_shown(record)):
        points, color = row["itl_by_position"], COLORS[index % len(COLORS)]
        at = [point["position"] for point in points]
        ax.plot(at, [1e3 * point["p50"] for point in points], color=color, label=_label(row))
        ax.plot(at, [1e3 * point["p99"] for point in points], color=color, lw=0.6, alpha=0.7)
    ax.set(xlabel="token of the answer", ylabel="ms since the token before: p50, thin p99")
    ax.set_ylim(bottom=0)
    return _finished(ax, record)


def answer_times(record: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Return the spread of end-to-end times: the share of requests that were answered within a time, for each load.

    Of more loads than there are colors, only those with the most clients.
    """
    ax = ax or plots.new_axes()
    for index, row in enumerate(_shown(record)):
        took = sorted(each["end"] - each["due"] for each in row["each"] if each["first_token"] is not None)
        shares = [(rank + 1) / len(row["each"]) for rank in range(len(took))]
        ax.step([0.0, *took], [0.0, *shares], where="post", color=COLORS[index % len(COLORS)], label=_label(row))
    ax.set(xlabel="seconds from due to the last token", ylabel="share of requests", ylim=(0, 1.02))
    return _finished(ax, record)


def load_curve(record: Mapping[str, Any], latency: str = "e2e_s", ax: "Axes | None" = None) -> "Axes":
    """Throughput against median latency as load rises, one line for each server and workload; points name the load.

    latency: which one: ttft_s, itl_s, e2e_s.
    """
    ax = ax or plots.new_axes()
    lines: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in record["results"]:
        if row.get("concurrency") and row.get(latency, {}).get("p50") is not None:
            lines.setdefault((row["engine"], row["url"], row["workload"]), []).append(row)
    for index, ((engine, _, workload), rows) in enumerate(lines.items()):
        rows = sorted(rows, key=lambda row: row["concurrency"])
        at = [(row["output_tokens_per_s"], 1e3 * row[latency]["p50"]) for row in rows]
        ax.plot(*zip(*at, strict=True), "o-", color=COLORS[index % len(COLORS)], ms=4, label=f"{engine}, {workload}")
        for row, point in zip(rows, at, strict=True):
            ax.annotate(f"{row['concurrency']}", point, xytext=(3, 4), textcoords="offset points", fontsize=7)
    plots.log_scale(ax)
    ax.set(xlabel="output tokens / s", ylabel=f"ms {AXES[latency]}, median")
    return _finished(ax, record)


def save(record: Mapping[str, Any], path: str | Path) -> None:
    """Save the plots that a record has data for, in the format that the file's suffix names."""
    from matplotlib.figure import Figure

    drawn = panels(record)
    columns = min(3, len(drawn)) if len(drawn) != 4 else 2
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(6 * columns, 4 * rows), layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False).flat
    for cell, draw in zip(cells, [*drawn, *[None] * (rows * columns - len(drawn))], strict=True):
        cell.set_axis_off() if draw is None else draw(record, ax=cell)
    figure.savefig(path, facecolor="white")


def panels(record: Mapping[str, Any]) -> list[Callable[..., "Axes"]]:
    """Return the plots that say something about a record: those by length or load need more than one of them."""
    rows = _rows(record)
    lengths = {each["input_tokens"] for row in rows for each in row["each"]}
    drawn: list[Callable[..., Axes]] = []
    if len(rows) == 1:
        drawn += [plots.requests]
        drawn += [plots.latency] if rows[0]["ttft_s"]["p50"] is not None else []
    else:
        drawn += [heat_map] if len({_lengths(row) for row in rows}) > 1 else []
        drawn += [load_curve] if len({row.get("concurrency") for row in rows}) > 1 else []
    drawn += [ttft_by_input] if len(lengths) > 1 else []
    drawn += [itl_by_position] if all(row["itl_by_position"] for row in rows) else []
    return [*drawn, answer_times]


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results of the record's first server."""
    first = record["results"][0]["url"]
    return [row for row in record["results"] if row.get("url") == first]


def _shown(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = _rows(record)
    if len(rows) < len(COLORS):
        return rows
    most = max(row.get("concurrency", 0) for row in rows)
    return [row for row in rows if row.get("concurrency", 0) == most]


def _groups(record: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the first server's results by load."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in _rows(record):
        groups.setdefault(arriving(row), []).append(row)
    return groups


def _lengths(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return a result's mean input and output tokens for each request."""
    answered = max(1, row["requests"] - row["refused"])
    return round(row["input_tokens"] / row["requests"]), round(row["output_tokens"] / answered)


def _label(row: Mapping[str, Any]) -> str:
    one, other = _lengths(row)
    return f"{one:,} in, {other:,} out, {arriving(row)}"


def _finished(ax: "Axes", record: Mapping[str, Any]) -> "Axes":
    """Title, a legend that leaves room for the data, and no frame."""
    ax.set_title(plots.machine_of(record), fontsize=9)
    ax.legend(framealpha=0.7, edgecolor="none", fontsize=7)
    return plots.plain(ax)
