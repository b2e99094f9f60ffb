"""A report's pictures, as SVG in data URIs: they need no file and no network."""

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from minillm.bench import plots, serving_plots

from . import findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """uri: the SVG. alt: what it shows, for people who cannot see it."""

    uri: str
    alt: str


def picture(draw: Callable[["Axes"], Any], alt: str, height: float = 3.2) -> Picture:
    """Draw on new axes. height: inches, of 4.8 in width, so that text can be read on a phone."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, height), layout="constrained")
    draw(figure.subplots())
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "minillm", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata=NO_METADATA, facecolor="white")
    return Picture("data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode(), alt)


def losses(record: Record) -> list[Picture]:
    """Lost points with their intervals, and KL divergence against bytes."""
    measured = findings.rows(record, "quality")
    others = measured[1:]
    if not others:
        return []
    alt = "Points of accuracy lost, with 95% intervals: " + "; ".join(
        f"{row['version']} {row['loss_points']:.1f} ({row['loss_interval'][0]:.1f} to {row['loss_interval'][1]:.1f})"
        for row in others
    )
    drawn = [picture(lambda ax: _intervals(others, ax), alt, 0.9 + 0.26 * len(others))]
    far = [row for row in others if row["kl"] > 0]
    if len(far) > 1:
        shown = {**record, "results": [measured[0], *far]}

        def by_size(ax: "Axes") -> None:
            plots.losses(shown, ax).set_title("Better is down and left: small, and close to the original", fontsize=9)

        text = ", ".join(f"{row['version']} {findings.size(row['bytes'])}, KL {row['kl']:.2g}" for row in far)
        drawn.append(picture(by_size, f"KL divergence against the size of the weights: {text}", 4.2))
    return drawn


def _intervals(others: list[Mapping[str, Any]], ax: "Axes") -> None:
    for index, row in enumerate(others):
        ax.plot(row["loss_interval"], [index, index], color=plots.OURS, linewidth=2)
        ax.plot([row["loss_points"]], [index], "o", color=plots.OURS, markersize=5)
    ax.axvline(0, color="black", linewidth=0.6)
    ax.set_yticks(range(len(others)), [row["version"] for row in others])
    ax.invert_yaxis()
    ax.set_xlabel("points of accuracy lost, with 95% intervals")
    plots.plain(ax)


def speeds(record: Record) -> list[Picture]:
    """Output tokens per second of each version, for one request and for many."""
    drawn = []
    for workload, title in (("single", "one request"), ("mixed", "many requests at once")):
        rows = [row for name in record["compared"] if (row := findings.offline(record, name, workload))]
        if rows:
            values = ", ".join(f"{row['version']} {row['output_tokens_per_s']:,.0f}" for row in rows)
            alt = f"Output tokens per second, {title}: {values}"
            drawn.append(picture(partial(_bars, rows, title), alt, 1 + 0.26 * len(rows)))
    return drawn


def _bars(rows: list[Mapping[str, Any]], title: str, ax: "Axes") -> None:
    names = [row["version"] for row in rows]
    ax.barh(names, [row["output_tokens_per_s"] for row in rows], color=plots.OURS, height=0.7)
    for index, row in enumerate(rows):
        runs = [row["output_tokens"] / each for each in row["runs"]]
        ax.plot(runs, [index] * len(runs), ".k", markersize=4)
        text, at = f"{row['output_tokens_per_s']:,.0f}", (max(runs), index)
        ax.annotate(text, at, xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set(xlabel="output tokens per second: medians; dots are runs", title=title)
    plots.plain(ax)


def serving(record: Record) -> list[Picture]:
    """Speed by the lengths of prompts and answers, and how long whole answers took."""
    name = findings.served(record)
    rows = findings.rows(record, "serving", name)
    if not rows:
        return []
    shown = {**record, "results": rows}
    speeds = [f"{row['workload'].split('_')[0]} {row['output_tokens_per_s']:,.0f}" for row in rows]
    waits = [f"{row['workload'].split('_')[0]} {row['e2e_s']['p50']:.2f} s" for row in rows]
    return [
        picture(
            lambda ax: serving_plots.heat_map(shown, ax).set_title(f"{name}: output tokens per second"),
            f"Output tokens per second by the lengths of prompts and answers: {', '.join(speeds)}",
        ),
        picture(
            lambda ax: serving_plots.answer_times(shown, ax=ax).set_title(f"{name}: how long answers took"),
            f"Share of requests answered within a time; medians: {', '.join(waits)}",
        ),
    ]
