"""Pictures of a trace show what each row did at each step.  Lessons 09 and 10."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from minillm.errors import ConfigError
from minillm.trace.record import Trace, TraceError
from minillm.trace.replay import StepRows, replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDLE, WAITS, PREFILL, DECODE = range(4)
NOTHING = 255  # between two steps: left white
STATES = ("idle", "waits", "prefill", "decode")
COLORS = ("#eeeeee", "#bab0ac", "#f58518", "#4c78a8")


def row_states(trace: Trace | Iterable[dict]) -> tuple[np.ndarray, list[StepRows]]:
    """Return what each row did in each step: IDLE (no request), WAITS (no token of its request ran), PREFILL or DECODE.

    Returns states [rows, steps] uint8, up to the last row ever used, and the steps.
    """
    events = trace.events if isinstance(trace, Trace) else list(trace)
    steps = list(replay(events))
    rows = 1 + max((row for step in steps for row in step.row), default=-1)
    states = np.zeros((rows, len(steps)), np.uint8)
    held: dict[int, int] = {}  # row -> the first step that its request may run in
    launched, spans = 0, []
    for event in events:
        kind, row = event["event"], event.get("row", -1)
        if kind == "launch":
            launched += 1
        elif kind == "admit":
            held[row] = launched
        elif kind in ("preempt", "finish") and row >= 0:
            spans.append((row, held.pop(row), launched))
    for row, first, end in [*spans, *((row, first, launched) for row, first in held.items())]:
        states[row : row + 1, first:end] = WAITS
    for column, step in enumerate(steps):
        states[step.row, column] = [PREFILL if kind == "prefill" else DECODE for kind in step.kind]
    return states, steps


def draw_timeline(
    trace: Trace | Iterable[dict],
    axis: "Axes | None" = None,
    *,
    x: str = "steps",
    rows: int | None = None,
    steps: range | None = None,
    title: str = "",
    labels: bool = True,
    legend: bool = True,
) -> None:
    """Draw the request in each row: a line per row, a column per step; x="time": as wide as the step took, in seconds.

    axis: one of several, to show traces side by side; default: a figure of its own. rows: how many, to give several
    the same height. steps: only these columns. labels: the requests' names (what follows the last "-") where they
    have room. A white line begins each request; white is also the time between two steps.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import AutoLocator

    if x not in ("steps", "time"):
        raise ConfigError(f"x must be 'steps' or 'time', not {x!r}")
    states, shown = row_states(trace)
    columns = range(len(shown)) if steps is None else steps[: len(shown) - steps.start]
    if not len(columns):
        raise TraceError("the trace has no such step to draw")
    height = max(len(states), rows or 0)
    states = np.pad(states, ((0, height - len(states)), (0, 0)))
    begins, ends = _times(shown) if x == "time" else (np.arange(len(shown)), np.arange(len(shown)) + 1)
    # Columns that meet share an edge; between others nothing ran.
    edges, filled = [begins[columns[0]]], []
    for column in columns:
        if begins[column] > edges[-1]:
            edges.append(begins[column])
            filled.append(np.full(height, NOTHING, np.uint8))
        edges.append(max(ends[column], edges[-1]))
        filled.append(states[:, column])
    own = axis is None
    if axis is None:
        _, axis = plt.subplots(figsize=(10, min(1.2 + 0.22 * height, 6)), layout="constrained")
    style: dict[str, Any] = {"cmap": ListedColormap(COLORS), "vmin": 0, "vmax": len(COLORS) - 1, "rasterized": True}
    drawn = np.ma.masked_equal(np.array(filled).T, NOTHING)
    axis.pcolormesh(edges, np.arange(height + 1) - 0.5, drawn, **style)
    if height <= 64:
        axis.hlines(np.arange(1, height) - 0.5, edges[0], edges[-1], color="white", linewidth=0.8)
    figure, cell = axis.get_figure(root=True), axis.get_subplotspec()
    assert figure is not None and cell is not None  # `axis` comes from `subplots`
    per_character = 0.012 * (edges[-1] - edges[0]) * 10 / figure.get_figwidth()
    per_character /= axis.get_position().width if own else cell.get_position(figure).width
    for row, name, first, last in _stays(shown, columns):
        axis.vlines(begins[first], row - 0.5, row + 0.5, color="white", linewidth=1.5)
        short = name.rpartition("-")[-1]
        if labels and height <= 32 and ends[last] - begins[first] > per_character * (len(short) + 0.7):
            place = (begins[first] + per_character / 3, row)
            axis.annotate(short, place, va="center", fontsize=7, color="white", fontweight="bold")
    axis.set(xlim=(edges[0], edges[-1]), ylim=(height - 0.5, -0.5), title=title, ylabel="row")
    axis.set_xlabel("step" if x == "steps" else "seconds")
    whole_numbers = AutoLocator()
    whole_numbers.set_params(integer=True)
    axis.yaxis.set_major_locator(whole_numbers)
    axis.spines[:].set_visible(False)
    if legend:
        there = [state for state in range(len(STATES)) if (states[:, columns.start : columns.stop] == state).any()]
        handles = [Patch(color=COLORS[state], label=STATES[state]) for state in there]
        axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=4, fontsize=8, frameon=False)
    if own:
        plt.show()


def _times(steps: list[StepRows]) -> tuple[np.ndarray, np.ndarray]:
    """Return when each step began and ended: they run in order, so one launched ahead begins when the last one ends."""
    begins, ends, free = [], [], 0.0
    for step in steps:
        begins.append(max(step.launched, free))
        free = begins[-1] if step.read is None else max(step.read, begins[-1])
        ends.append(free)
    return np.array(begins), np.array(ends)


def _stays(steps: list[StepRows], columns: range) -> list[tuple[int, str, int, int]]:
    """(row, request, first step, last step) of each request's time in a row, among `columns`."""
    stays: list[list] = []
    newest: dict[int, list] = {}
    for column in columns:
        for row, name in zip(steps[column].row, steps[column].request, strict=True):
            if row not in newest or newest[row][1] != name:
                newest[row] = [row, name, column, column]
                stays.append(newest[row])
            newest[row][3] = column
    return [tuple(stay) for stay in stays]
