"""Pictures of kernels: tiles and masks, bytes moved, launches in time, a tuning table.  Lessons 03 and 11.

What a chart shows is computed in the lesson's cells, or comes from a record. Each function leaves its figure current,
for `describe`.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#c29b2b", "#9d755d", "#4a9b96", "#d6494a", "#7f7f7f")
MORE_COLORS = ("#1f3f66", "#8a3b12", "#2b5d27")


def tiles(rows: int, columns: int, tile: int) -> None:
    """Draw which program computes which element of a matrix, by (row, tile) or by row; hatched: masked elements."""
    across = -(-columns // tile)
    colors = (*COLORS, *MORE_COLORS)
    _, axis = plt.subplots(figsize=(11, 0.55 * rows + 1.0), layout="constrained")
    for row in range(rows):
        for piece in range(across):
            program = row * across + piece
            for lane in range(tile):
                column = piece * tile + lane
                inside = column < columns
                axis.add_patch(
                    plt.Rectangle(
                        (column, row),
                        1,
                        1,
                        facecolor=colors[program % len(colors)] if inside else "white",
                        edgecolor="white" if inside else "silver",
                        hatch=None if inside else "xxx",
                        linewidth=0.8,
                    )
                )
            middle = (piece * tile + min((piece + 1) * tile, columns)) / 2
            name = f"({row}, {piece})" if across > 1 else f"program {row}"
            axis.text(middle, row + 0.5, name, ha="center", va="center", color="white", fontsize=10)
    axis.plot([columns, columns], [0, rows], color="black", linewidth=2)
    axis.text(columns + 0.1, -0.08, f"the rows end here: {columns} columns", fontsize=8, va="bottom")
    axis.set(xlim=(0, across * tile), ylim=(rows, -0.5))
    starts = range(0, across * tile, tile)
    axis.set_xticks([each + 0.5 for each in starts], [str(each) for each in starts])
    axis.set_yticks([row + 0.5 for row in range(rows)], [f"row {row}" for row in range(rows)])
    axis.spines[:].set_visible(False)


def product_tiles(rows: int, out: int, pieces: int, program: tuple[int, int]) -> None:
    """A matrix product by tiles: which bands of x and of the weight one program reads, piece by piece.

    rows, out: tiles of x's and of the weight's rows; pieces: tiles of their columns; program: the tile of the result.
    """
    row, column = program
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), width_ratios=(pieces, pieces, out), layout="constrained")
    shown = {"x [ROWS, IN]": (rows, pieces, row), "weight [OUT, IN]": (out, pieces, column), "out [ROWS, OUT]": None}
    for axis, (title, band) in zip(axes, shown.items(), strict=True):
        height, width, chosen = band or (rows, out, None)
        for down in range(height):
            for across in range(width):
                here = down == chosen if band else (down, across) == program
                color = (COLORS[across % len(COLORS)] if band else COLORS[8]) if here else "white"
                axis.add_patch(plt.Rectangle((across, down), 1, 1, facecolor=color, edgecolor="silver"))
                if here:
                    label = str(across) if band else str(program)
                    axis.text(across + 0.5, down + 0.5, label, ha="center", va="center", color="white", fontsize=9)
        axis.set(
            xlim=(0, width), ylim=(max(rows, out), 0), title=title, xticks=[], yticks=[], aspect="equal", anchor="N"
        )
        axis.spines[:].set_visible(False)
    figure.suptitle(f"Program {program}: pieces 0 to {pieces - 1}, one after the other, added to one tile of out")


def bytes_moved(bars: Mapping[str, Sequence[tuple[str, float]]]) -> None:
    """A bar of bytes for each implementation, a segment per launch. bars: title -> (operation, bytes), in order."""
    _, axis = plt.subplots(figsize=(11, 0.55 * len(bars) + 0.9), layout="constrained")
    longest = max(sum(nbytes for _, nbytes in launches) for launches in bars.values())
    for place, launches in enumerate(bars.values()):
        left = 0.0
        for count, (name, nbytes) in enumerate(launches):
            axis.barh(place, nbytes / 1e6, left=left / 1e6, color=COLORS[count % len(COLORS)], edgecolor="white")
            if nbytes > 0.05 * longest:
                axis.text((left + nbytes / 2) / 1e6, place, name, ha="center", va="center", color="white", fontsize=8)
            left += nbytes
        said = f" {left / 1e6:,.1f} MB in {len(launches)} launch{'es' if len(launches) > 1 else ''}"
        axis.text(left / 1e6, place, said, va="center", fontsize=9)
    axis.set_yticks(range(len(bars)), bars)
    axis.set(xlabel="MB read and written", xlim=(0, 1.25 * longest / 1e6))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def timeline(lanes: Mapping[str, Sequence[tuple[str, str, float]]], title: str) -> None:
    """Launches one after the other. lanes: label -> (kind, name, microseconds); a kind has a color."""
    kinds = list(dict.fromkeys(kind for launches in lanes.values() for kind, _, _ in launches))
    _, axis = plt.subplots(figsize=(11, 0.62 * len(lanes) + 1.3), layout="constrained")
    longest = max(sum(time for *_, time in launches) for launches in lanes.values())
    for place, launches in enumerate(lanes.values()):
        left = 0.0
        for kind, name, time in launches:
            color = COLORS[kinds.index(kind)]
            axis.barh(place, time, left=left, color=color, edgecolor="white", linewidth=0.7)
            if time > 0.035 * longest and name:
                axis.text(left + time / 2, place, name, ha="center", va="center", color="white", fontsize=7)
            left += time
        axis.text(left, place, f" {len(launches)} launches,\n {left:.0f} µs", va="center", fontsize=8)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set(xlabel="microseconds", xlim=(0, 1.13 * longest), title=title)
    axis.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[at]) for at in range(len(kinds))]
    axis.legend(handles, kinds, fontsize=8, ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.35))
    axis.spines[["top", "right"]].set_visible(False)


def tuning(
    tables: Mapping[str, np.ndarray], tile_sizes: Sequence[int], warps: Sequence[int], unit: str, margin: float
) -> None:
    """Heat maps of measurements, [tiles, warps] each; framed: all values within `margin` of the best."""
    _, axes = plt.subplots(1, len(tables), figsize=(5.2 * len(tables), 3.4), layout="constrained")
    for axis, (title, values) in zip(np.atleast_1d(axes), tables.items(), strict=True):
        axis.imshow(values, cmap="viridis", aspect="auto")
        middle, best = (np.nanmin(values) + np.nanmax(values)) / 2, np.nanmax(values)
        for at, value in np.ndenumerate(values):
            color = "black" if value > middle else "white"
            axis.text(at[1], at[0], f"{value:,.0f}", ha="center", va="center", fontsize=9, color=color)
            if value >= (1 - margin) * best:
                corner = (at[1] - 0.46, at[0] - 0.46)
                axis.add_patch(plt.Rectangle(corner, 0.92, 0.92, fill=False, edgecolor="red", linewidth=2))
        axis.set_xticks(range(len(warps)), warps)
        axis.set_yticks(range(len(tile_sizes)), tile_sizes)
        axis.set(xlabel="warps", ylabel="columns of a tile", title=f"{title}: {unit}\nred: within {margin:.0%} of best")


def graph_sizes(totals: Mapping[int, float], engines: tuple[int, float], alone: float, label: str) -> None:
    """Milliseconds of a workload's steps by the number of captured sizes.

    totals: may be empty; engines: (sizes, milliseconds); alone: milliseconds with the largest size only. The vertical
    axis shows the range of the values, which is a small part of them.
    """
    _, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axis.axhline(alone, color="silver", linestyle="--", label="the largest size alone")
    if totals:
        axis.plot(list(totals), list(totals.values()), "o-", color=COLORS[0], label=label)
    axis.plot(*engines, "s", color=COLORS[1], markersize=8, label="the engine's list of sizes")
    low, high = (of([*totals.values(), engines[1], alone]) for of in (min, max))
    margin = 0.1 * (high - low)
    axis.set(xlabel="captured batch sizes", xlim=(0, engines[0] + 1), ylim=(low - margin, high + margin))
    axis.set(ylabel="ms of all steps (not from 0)")
    axis.legend(fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def lanes(title: str, rows: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw when each row works. rows: label -> (begin, length) in microseconds.

    Neighbors on the GPU differ in shade: an edge around each would look like a gap, and hide the shortest kernels.
    """
    _, axis = plt.subplots(figsize=(11, 0.45 * len(rows) + 1.0), layout="constrained")
    for place, (label, spans) in enumerate(rows.items()):
        shades = COLORS[:1] if "CPU" in label else (COLORS[1], MORE_COLORS[1])
        axis.broken_barh(spans, (place - 0.35, 0.7), facecolors=shades, linewidth=0)
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="microseconds", xlim=(0, None), ylim=(len(rows) - 0.5, -0.5), title=title)
    axis.spines[["top", "right"]].set_visible(False)
