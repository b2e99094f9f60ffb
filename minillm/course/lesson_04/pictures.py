"""Lesson 04's pictures: memories, a running softmax, tiles, a paged walk, shares on processors, rooflines."""

import heapq
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

WHOLE, PARTLY, SKIPPED = "#54a24b", "#b7dfb0", "#f2f2f2"
ROWS = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b", "#54a24b")


H200_MEMORIES = {  # bytes, from NVIDIA's documents
    "registers of a processor": 256 * 1024,
    "shared memory of a processor": 228 * 1024,
    "L2 cache of the whole chip": 50 * 1024**2,
    "GPU memory (HBM)": 141e9,
}


def memories(things: Mapping[str, float], sizes: Mapping[str, float] = H200_MEMORIES) -> None:
    """Memories' sizes as bars of bytes on a log axis; what could be kept in them as dashed lines."""
    _, axis = plt.subplots(figsize=(10, 2.8), layout="constrained")
    axis.barh(list(sizes), list(sizes.values()), color=ROWS[0], height=0.55)
    for row, size in enumerate(sizes.values()):
        axis.text(size / 1.15, row, _bytes(size), va="center", ha="right", fontsize=9, color="white")
    for count, (name, size) in enumerate(things.items()):
        axis.axvline(size, color=ROWS[1], linestyle="--", linewidth=1.2, zorder=0)
        height = len(sizes) - 0.25 + 0.38 * (count % 2)
        axis.text(size * 1.1, height, f"{name}: {_bytes(size)}", color=ROWS[1], fontsize=8, backgroundcolor="white")
    axis.set(xscale="log", xlim=(1e3, 5e12), ylim=(-0.5, len(sizes) + 0.5), xlabel="bytes")
    axis.spines[["top", "right"]].set_visible(False)


def running(scores: np.ndarray, values: np.ndarray, tile: int) -> None:
    """One query's scores, and after each tile: the largest score, the sum of weights, the output so far."""
    maxima, totals, outs = [], [], []
    for seen in range(tile, len(scores) + 1, tile):
        weights = np.exp(scores[:seen] - scores[:seen].max())
        maxima.append(scores[:seen].max())
        totals.append(weights.sum())
        outs.append(weights @ values[:seen] / weights.sum())
    _, (top, bottom, last) = plt.subplots(
        3, 1, figsize=(10, 4.6), sharex=True, height_ratios=(2, 1, 1), layout="constrained"
    )
    edges = np.arange(0, len(scores) + 1, tile)
    top.plot(np.arange(len(scores)) + 0.5, scores, ".", color="gray")
    top.stairs(maxima, edges, color=ROWS[1], baseline=None, label="largest so far")
    top.set(ylabel="score")
    top.legend(fontsize=8, loc="lower right")
    bottom.stairs(totals, edges, color=ROWS[0], fill=True, alpha=0.5)
    bottom.set(ylabel="sum of\nweights")
    last.stairs(outs, edges, color=ROWS[7], baseline=None)
    last.axhline(outs[-1], color="gray", linestyle=":")
    last.set(ylabel="output", xlabel="key")
    for axis in (top, bottom, last):
        for edge in edges:
            axis.axvline(edge, color="lightgray", linewidth=0.6, zorder=0)


def tiles(visit: Callable, pictures: Mapping[str, tuple[int, int, int | None]], tile: int) -> None:
    """Draw which tiles of `tile` queries by `tile` keys are computed, and which of those need a mask.

    visit(first, last, keys, window): the key tiles of a query tile. pictures: title -> (newest queries, all keys,
    window).
    """
    grids = {title: _grid(visit, *sizes, tile) for title, sizes in pictures.items()}
    colors = plt.matplotlib.colors.ListedColormap([SKIPPED, PARTLY, WHOLE])
    widths = [grid.shape[1] for grid in grids.values()]
    _, axes = plt.subplots(1, len(grids), figsize=(11, 3), width_ratios=widths, layout="constrained")
    for axis, (title, grid) in zip(axes, grids.items(), strict=True):
        axis.pcolormesh(grid, cmap=colors, vmin=0, vmax=2, edgecolors="white", linewidth=2)
        visited = np.count_nonzero(grid)
        axis.set_title(f"{title}:\n{visited} of {grid.size} tiles", fontsize=9)
        axis.set(xlabel=f"tiles of {tile} keys", ylabel=f"tiles of {tile} queries", aspect="equal")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (WHOLE, PARTLY, SKIPPED)]
    axes[-1].figure.legend(
        handles, ["visited, all seen", "visited, mask needed", "skipped"], loc="outside right center", fontsize=8
    )


def _grid(visit: Callable, queries: int, length: int, window: int | None, tile: int) -> np.ndarray:
    """[query tiles, key tiles]: 2 where every query sees every key, 1 where a mask is needed, 0 where not visited."""
    kinds = np.zeros((-(-queries // tile), -(-length // tile)), dtype=int)
    key = np.arange(length)
    for number in range(len(kinds)):
        first = length - queries + number * tile
        position = np.arange(first, min(first + tile, length))[:, None]
        sees = (key <= position) & (key > position - (window or length))
        for visited in visit(first, int(position[-1, 0]), tile, window):
            if 0 <= visited < kinds.shape[1]:  # a wrong range may go beyond
                kinds[number, visited] = 1 + sees[:, visited * tile : (visited + 1) * tile].all()
    return kinds


def paged_walk(requests: Mapping[str, tuple[Sequence[int], int]], block_size: int) -> None:
    """Block tables above, the cache's memory below, and for each entry an arrow to its block.

    requests: name -> (block table, tokens).
    """
    tables = {name: table for name, (table, _) in requests.items()}
    lengths = {name: length for name, (_, length) in requests.items()}
    first, end = min(map(min, tables.values())), max(map(max, tables.values())) + 1
    widest = max(len(table) for table in tables.values())
    _, axis = plt.subplots(figsize=(11, 3.4), layout="constrained")
    scale = (end - first) / (widest * len(tables) + len(tables) - 1)
    place = 0.0
    for block in range(first, end):
        axis.add_patch(plt.Rectangle((block - first, 0), 1, 1, facecolor=SKIPPED, edgecolor="white"))
        axis.text(block - first + 0.5, -0.3, str(block), ha="center", fontsize=7, color="dimgray")
    for color, (name, table), length in zip(ROWS, tables.items(), lengths.values(), strict=False):
        axis.text(place, 4.3, f"{name}: {length} tokens", fontsize=9, color=color)
        for entry, block in enumerate(table):
            left = place + entry * scale
            filled = min(length - entry * block_size, block_size) / block_size
            axis.add_patch(plt.Rectangle((left, 3), scale * 0.94, 1, facecolor=color, alpha=0.25, edgecolor=color))
            axis.text(left + scale * 0.47, 3.5, str(block), ha="center", va="center", fontsize=9)
            axis.add_patch(plt.Rectangle((block - first, 0), filled, 1, facecolor=color, alpha=0.8))
            arrow = {"arrowstyle": "->", "color": color, "alpha": 0.7}
            axis.plot([block - first + 1] * 2, [0, 1], color="white", linewidth=2)
            axis.annotate("", (block - first + 0.5, 1.03), (left + scale * 0.47, 2.97), arrowprops=arrow)
        place += (widest + 1) * scale
    axis.text(-0.2, 3.5, "block tables", ha="right", va="center", fontsize=9)
    axis.text(-0.2, 0.5, "the cache", ha="right", va="center", fontsize=9)
    axis.set(xlim=(-0.16 * (end - first), end - first), ylim=(-0.6, 4.8))
    axis.axis("off")


def roofs(bytes_per_s: float, operations_per_s: float, lines: Mapping[str, float], points: Mapping[str, tuple]) -> None:
    """A roofline. lines: name -> intensity; points: name -> (operations per byte, operations per second)."""
    _, axis = plt.subplots(figsize=(9, 3.9), layout="constrained")
    xs = np.array([0.5, operations_per_s / bytes_per_s, 3000])
    axis.plot(xs, np.minimum(xs * bytes_per_s, operations_per_s) / 1e12, color="gray")
    for name, intensity in lines.items():
        roof = min(intensity * bytes_per_s, operations_per_s) / 1e12
        axis.plot([intensity] * 2, [0.02, roof], color=ROWS[0], linestyle=":", zorder=0)
        axis.text(intensity * 1.12, 0.025, name, rotation=90, fontsize=8, color=ROWS[0], va="bottom")
    for color, (name, (intensity, rate)) in zip(ROWS[1:], points.items(), strict=False):
        axis.plot(intensity, rate / 1e12, "o", color=color, label=f"{name}: {rate / 1e12:,.1f}")
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="T operations/s", ylim=(0.02, 1500))
    axis.legend(title="measured, T operations/s", fontsize=8, title_fontsize=8, loc="upper left")


def schedules(row_keys: Sequence[int], shares: Mapping[str, int], processors: int, tile: int = 64) -> None:
    """A model of programs on processors, in which time is keys read. shares: title -> programs per row."""
    _, axes = plt.subplots(len(shares), 1, figsize=(10, 4), sharex=True, layout="constrained")
    for axis, (title, count) in zip(axes, shares.items(), strict=True):
        programs = _scheduled(row_keys, count, processors, tile)
        for processor, start, length, row in programs:
            axis.barh(processor, length, 0.9, start, color=ROWS[row % len(ROWS)], edgecolor="white", linewidth=0.4)
        end = max(start + length for _, start, length, _ in programs)
        busy = sum(row_keys) / (end * processors)
        axis.axvline(end, color="black", linewidth=1)
        axis.set_title(f"{title}: done after {end:,.0f} keys, processors busy {busy:.0%}", fontsize=9)
        axis.set(ylabel=f"{processors} processors", yticks=[], ylim=(-0.6, processors - 0.4))
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color, _ in zip(ROWS, row_keys, strict=False)]
    names = [f"a row of {length:,} keys" for length in row_keys]
    axes[-1].legend(handles, names, fontsize=8, loc="lower right")
    axes[-1].set(xlabel="a model, not a measurement: time, in keys that one processor reads")


def _scheduled(row_keys: Sequence[int], shares: int, processors: int, tile: int) -> list[tuple[int, int, int, int]]:
    """(processor, start, length, row) of every program; each goes to the first processor that is free."""
    free = [(0, number) for number in range(processors)]
    programs = []
    for share in range(shares):
        for row, length in enumerate(row_keys):
            most = -(-length // (shares * tile)) * tile  # full tiles
            mine = min(most, length - share * most)
            if mine > 0:
                start, processor = heapq.heappop(free)
                heapq.heappush(free, (start + mine, processor))
                programs.append((processor, start, mine, row))
    return programs


def splits(lines: Mapping[str, Mapping[int, Mapping]]) -> None:
    """Time by number of shares. lines: name -> {shares: a line of the record}; a ring marks the engine's choice."""
    _, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for color, (name, by_shares) in zip(ROWS, lines.items(), strict=False):
        us = [1e3 * line["ms"] for line in by_shares.values()]
        axis.plot(list(by_shares), us, ".-", color=color, label=name)
        chosen = next(shares for shares, line in by_shares.items() if line["chosen"])
        axis.plot(chosen, 1e3 * by_shares[chosen]["ms"], "o", color=color, markersize=11, fillstyle="none")
    axis.plot([], [], "o", color="gray", markersize=11, fillstyle="none", label="what the engine takes")
    axis.set(xscale="log", yscale="log", xlabel="shares per row", ylabel="microseconds")
    axis.set_xticks(list(by_shares), list(map(str, by_shares)))
    axis.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
    axis.minorticks_off()
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axis.spines[["top", "right"]].set_visible(False)


def against(rows: Mapping[str, Mapping[str, float]], unit: str, log: bool = True) -> None:
    """Bars next to each other, one group for each of `rows`: name -> {label: value}."""
    _, axis = plt.subplots(figsize=(9, 0.7 + 0.75 * len(rows)), layout="constrained")
    whos = list(dict.fromkeys(who for bars in rows.values() for who in bars))
    height = 0.8 / len(whos)
    for place, bars in enumerate(rows.values()):
        for who, value in bars.items():
            at = place + (whos.index(who) - (len(whos) - 1) / 2) * height
            label = who if place == 0 else None
            bar = axis.barh(at, value, height * 0.92, color=ROWS[whos.index(who)], label=label)
            axis.bar_label(bar, fmt="{:,.3g}", padding=2, fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=9)
    axis.set(xscale="log" if log else "linear", xlabel=unit)
    axis.margins(x=0.2)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.3g} {unit}"
    return f"{count:.0f} B"
