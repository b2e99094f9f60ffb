"""Lesson 09's pictures: memory slot by slot, waste in caches, what windows and streams keep.

Each function leaves its figure open: the cell's `describe` shows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from minillm.trace.record import Trace
from minillm.trace.replay import tables

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
FREE, CACHED, INK = "#f2f2f2", "#c4c4c4", "dimgray"
SHARES = {
    "used": ("#54a24b", "keys and values"),
    "reserved": ("#eeca3b", "reserved: used later"),
    "internal": ("#e45756", "internal fragmentation: never used"),
    "external": (FREE, "free, but the next request does not fit"),
}
CACHES = {"longest": "#e45756", "power": "#eeca3b", "exact": "#9d755d", "shared": "#54a24b", "blocks": "#4c78a8"}


def contiguous(pieces: Mapping[str, tuple[int, int, Sequence[str], int]], slots: int) -> None:
    """A contiguous piece of memory per request. pieces: name -> (first slot, slots reserved, tokens, later tokens)."""
    _, axis = plt.subplots(figsize=(11, 1.9), layout="constrained")
    for slot in range(slots):
        _slot(axis, slot, FREE)
    for color, (name, (first, reserved, tokens, later)) in zip(COLORS, pieces.items(), strict=False):
        for at in range(reserved):
            kind = "used" if at < len(tokens) else "reserved" if at < len(tokens) + later else "internal"
            _slot(axis, first + at, color if kind == "used" else SHARES[kind][0], alpha=0.45)
        for at, token in enumerate(tokens):
            _word(axis, first + at + 0.5, 0.5, token)
        axis.plot([first, first + reserved], [1.12, 1.12], color=color, linewidth=3, solid_capstyle="butt")
        axis.text(first, 1.25, f"{name}: {reserved} slots reserved", color=color, fontsize=9)
    handles = [Rectangle((0, 0), 1, 1, color=SHARES[kind][0], alpha=0.45) for kind in ("reserved", "internal")]
    labels = [SHARES[kind][1] for kind in ("reserved", "internal")]
    axis.legend(handles, labels, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, -0.3), frameon=False)
    _number(axis, range(0, slots, 4))
    _frame(axis, slots, (-0.6, 1.7))


def paged(
    requests: Mapping[str, tuple[Sequence[int], Sequence[str]]],
    num_blocks: int,
    block_size: int = 4,
    cached: Mapping[int, Sequence[str]] | None = None,
) -> None:
    """Block tables above, memory below. requests: name -> (block table, tokens); cached: block -> its old tokens.

    A number under a block says how many tables name it.
    """
    slots = num_blocks * block_size
    _, axis = plt.subplots(figsize=(11, 3), layout="constrained")
    colors = dict(zip(requests, COLORS, strict=False))
    holders = {block: [n for n, (table, _) in requests.items() if block in table] for block in range(num_blocks)}
    for block, names in holders.items():
        tokens = (cached or {}).get(block, ())
        for name in names:
            table, words = requests[name]
            at = list(table).index(block) * block_size
            tokens = max(tokens, words[at : at + block_size], key=len)
        for offset in range(block_size):
            slot, filled = block * block_size + offset, offset < len(tokens)
            _slot(axis, slot, CACHED if filled and not names else FREE)
            for level, name in enumerate(names if filled else ()):
                part, line = 1 / len(names), int(len(names) == 1)  # no line through a word
                _slot(axis, slot, colors[name], level * part, part, alpha=0.45, line=line)
            if filled:
                _word(axis, slot + 0.5, 0.5, tokens[offset])
        axis.add_patch(Rectangle((block * block_size, 0), block_size, 1, fill=False, edgecolor=INK))
        middle, first = (block + 0.5) * block_size, block * block_size
        held = f"held by {len(names)}" if names else "cached" if tokens else "free"
        axis.text(middle, -0.1, f"block {block}\nslots {first} to {first + block_size - 1}\n{held}", **_SMALL)
    _tables(axis, {name: list(table) for name, (table, _) in requests.items()}, colors, block_size, slots)
    _frame(axis, slots, (-0.9, 3.1))


def _tables(
    axis: Axes, tables: Mapping[str, list[int]], colors: Mapping[str, str], block_size: int, slots: int
) -> None:
    """Tables in a line above the memory, and an arrow from each entry to its block."""
    wide, place = 1.3, 0.0
    gap = (slots - sum(6 + wide * len(table) for table in tables.values())) / max(len(tables), 1)
    for name, table in tables.items():
        axis.text(place, 2.65, f"{name}'s table", color=colors[name], fontsize=9, va="center")
        left = place + 3.2
        for entry, block in enumerate(table):
            box = (left + entry * wide, 2.35)
            axis.add_patch(Rectangle(box, wide * 0.92, 0.6, facecolor=colors[name], alpha=0.45, edgecolor=INK))
            axis.text(box[0] + wide * 0.46, 2.65, str(block), ha="center", va="center", fontsize=9)
            arrow = {"arrowstyle": "->", "color": colors[name]}
            axis.annotate("", ((block + 0.5) * block_size, 1.03), (box[0] + wide * 0.46, 2.33), arrowprops=arrow)
        place += 6 + wide * len(table) + gap


_SMALL: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8, "color": INK}


def _slot(
    axis: Axes, at: float, color: str, bottom: float = 0.0, height: float = 1.0, alpha: float = 1.0, line: int = 1
) -> None:
    axis.add_patch(Rectangle((at, bottom), 1, height, facecolor=color, alpha=alpha, edgecolor="white", linewidth=line))


def _word(axis: Axes, x: float, y: float, word: str) -> None:
    axis.text(x, y, word, ha="center", va="center", rotation=90, fontsize=9)


def _number(axis: Axes, slots: Sequence[int]) -> None:
    for slot in slots:
        axis.text(slot + 0.5, -0.08, str(slot), **_SMALL)
    axis.text(-0.2, -0.08, "slot", ha="right", va="top", fontsize=8, color=INK)


def _frame(axis: Axes, slots: int, height: tuple[float, float]) -> None:
    axis.set(xlim=(-1.2, slots + 0.2), ylim=height)
    axis.axis("off")


def shares(results: Sequence[Mapping]) -> None:
    """Bars of the memory's parts, mean over the steps in which requests waited. results: `bench.waste.compare`'s."""
    _, axis = plt.subplots(figsize=(10, 0.9 + 0.45 * len(results)), layout="constrained")
    names = [result["cache"] for result in results]
    left = np.zeros(len(results))
    for kind, (color, label) in SHARES.items():
        values = np.array([100 * result[kind] for result in results])
        axis.barh(names, values, left=left, color=color, label=label, edgecolor="white")
        for row, value in enumerate(values):
            if value >= 4:
                axis.text(left[row] + value / 2, row, f"{value:.0f}", ha="center", va="center", fontsize=9)
        left += values
    axis.set(xlabel="% of the memory", xlim=(0, 100))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.35, 1.0))


def batches(results: Sequence[Mapping]) -> None:
    """Requests that run together, over the steps. results: `bench.waste.compare`'s, with timelines."""
    _, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    for result in results:
        running = result["timeline"]["running"]
        color = next(color for word, color in CACHES.items() if word in result["cache"])
        axis.plot(np.linspace(0, result["steps"], len(running)), running, color=color, label=result["cache"])
    axis.set(xlabel="step", ylabel="running requests")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)


def lines(curves: Mapping[str, Mapping[float, float]], *, x: str, y: str, log: bool = False) -> None:
    """A line for each name -> {x: y}."""
    _, axis = plt.subplots(figsize=(7.5, 3), layout="constrained")
    for color, (name, points) in zip(COLORS, curves.items(), strict=False):
        axis.plot(list(points), list(points.values()), "o-", markersize=4, color=color, label=name)
    axis.set(xlabel=x, ylabel=y)
    if log:
        ticks = sorted({at for points in curves.values() for at in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{at:,}" for at in ticks])
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)


def over_time(trace: Trace | Iterable[dict]) -> None:
    """Draw which request holds each block: a row per block, a column per step."""
    steps = list(tables(trace))
    requests = dict.fromkeys(name for step in steps for name, _ in step.rows.values())
    names = [f"request {name.rpartition('-')[-1]}" for name in requests]
    free, cached, shared, first = range(4)
    states = np.full((len(steps[0].states), len(steps)), free)
    for column, step in enumerate(steps):
        states[[state == "cached" for state in step.states], column] = cached
        for name, blocks in [(name, table[0]) for name, table in step.rows.values()] + step.leaving:
            states[[block for block in blocks if block >= 0], column] = first + list(requests).index(name)
        states[[count > 1 for count in step.holders], column] = shared
    colors = [FREE, CACHED, "#333333", *(COLORS[at % len(COLORS)] for at in range(len(names)))]
    _, axis = plt.subplots(figsize=(10, 1.2 + 0.12 * len(states)), layout="constrained")
    axis.pcolormesh(states, cmap=ListedColormap(colors), vmin=0, vmax=len(colors) - 1)
    axis.hlines(range(1, len(states)), 0, len(steps), color="white", linewidth=1.2)
    if len(steps) <= 100:
        axis.vlines(range(1, len(steps)), 0, len(states), color="white", linewidth=0.5)
    axis.set(xlabel="step", ylabel="block")
    axis.invert_yaxis()
    axis.spines[:].set_visible(False)
    there = [kind for kind in range(len(colors)) if (states == kind).any()]
    labels = ["free", "cached", "held by several", *names]
    handles = [Rectangle((0, 0), 1, 1, color=colors[kind]) for kind in there]
    axis.legend(handles, [labels[kind] for kind in there], fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def held(trace: Trace | Iterable[dict], names: Sequence[str], block_size: int) -> None:
    """Draw which tokens of its only request each layer group holds, step by step. names: titles, one for each group."""
    steps = [table for step in tables(trace) for _, table in step.rows.values()]
    entries = max(len(table[0]) for table in steps)
    white, evicted, kept = range(3)
    _, axes = plt.subplots(
        1, len(names), figsize=(5.2 * len(names), 3.2), layout="constrained", sharey=True, squeeze=False
    )
    for group, (axis, name) in enumerate(zip(axes[0], names, strict=True)):
        states = np.full((entries, len(steps)), white)
        for column, table in enumerate(steps):
            states[: len(table[group]), column] = [kept if block >= 0 else evicted for block in table[group]]
        axis.pcolormesh(states, cmap=ListedColormap(["white", CACHED, COLORS[group]]), vmin=white, vmax=kept)
        axis.hlines(range(1, entries), 0, len(steps), color="white", linewidth=1.2)
        axis.set_title(f"{name}: at most {(states == kept).sum(axis=0).max()} blocks held", fontsize=10)
        axis.set_yticks(range(0, entries + 1, 2), [f"{at * block_size}" for at in range(0, entries + 1, 2)])
        axis.set(xlabel="step", ylabel="position in the text" if group == 0 else "")
        axis.invert_yaxis() if group == 0 else None
        axis.spines[["top", "right"]].set_visible(False)
        there = {"held": COLORS[group], "released": CACHED}
        handles = [Rectangle((0, 0), 1, 1, color=color) for color in there.values()]
        axis.legend(handles, list(there), fontsize=9, loc="lower left")
