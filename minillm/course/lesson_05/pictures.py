"""Lesson 05's pictures: grids of levels, rounding, groups, nibbles, quality against bits.

Each function leaves its figure open: the cell's `describe` shows it.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from .weight_formats import Found

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
INK, LEVEL = "dimgray", "#9a9a9a"
ARROW = {"arrowstyle": "->", "color": COLORS[0]}


def number_lines(lines: Mapping[str, Sequence[float]]) -> None:
    """The numbers that each format has, as ticks on lines of one scale."""
    _, axis = plt.subplots(figsize=(11, 0.55 * len(lines) + 0.7), layout="constrained")
    for row, (color, numbers) in enumerate(zip(COLORS, lines.values(), strict=False)):
        axis.axhline(row, color="#dddddd", linewidth=1, zorder=0)
        axis.plot(list(numbers), [row] * len(numbers), "|", color=color, markersize=18, markeredgewidth=1.6)
    axis.set_yticks(range(len(lines)), list(lines))
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)


def rounding(weights: Sequence[float], grids: Mapping[str, Sequence[float]]) -> None:
    """Weights above a line of levels, an arrow from each to its nearest level; a line for each grid."""
    _, axes = plt.subplots(len(grids), 1, figsize=(11, 1.35 * len(grids) + 0.3), layout="constrained", squeeze=False)
    low = min(min(weights), *(min(levels) for levels in grids.values()))
    high = max(max(weights), *(max(levels) for levels in grids.values()))
    for axis, (name, given) in zip(axes[:, 0], grids.items(), strict=True):
        levels = np.array(given)
        axis.plot(levels, np.zeros(len(levels)), "|", color=LEVEL, markersize=22, markeredgewidth=1.6, label="levels")
        for weight in weights:
            nearest = levels[np.abs(levels - weight).argmin()]
            arrow = {"arrowstyle": "->", "color": COLORS[1], "shrinkA": 3, "shrinkB": 0}
            axis.annotate("", (nearest, 0.05), (weight, 0.62), arrowprops=arrow)
        axis.plot(list(weights), [0.62] * len(weights), "o", color=COLORS[0], markersize=6, label="weights")
        last, height = -np.inf, 0.78
        for weight in sorted(weights):  # labels of close weights at two heights
            height = 1.0 if weight - last < 0.05 * (high - low) and height < 1 else 0.78
            axis.text(weight, height, f"{weight:g}", ha="center", fontsize=9, color=COLORS[0])
            last = weight
        axis.set(xlim=(low - 0.05 * (high - low), high + 0.05 * (high - low)), ylim=(-0.35, 1.25), yticks=[])
        axis.set_title(name, fontsize=10, loc="left")
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0, 0].legend(fontsize=8, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.3), frameon=False)


def histogram(values: Sequence[float] | np.ndarray, bits: Sequence[int]) -> None:
    """A histogram of weights, as shares of their row's largest, over the levels of grids of so many bits.

    Colored: what rounds to 0.
    """
    _, axes = plt.subplots(1, len(bits), figsize=(11, 2.6), layout="constrained", sharey=True)
    edges = np.linspace(-1, 1, 121)
    counts = 100 * np.histogram(values, edges)[0] / len(values)
    middles = (edges[1:] + edges[:-1]) / 2
    for axis, each in zip(axes, bits, strict=True):
        top = 2 ** (each - 1) - 1
        zero = np.abs(middles) < 0.5 / top
        axis.bar(middles[~zero], counts[~zero], edges[1] - edges[0], color=COLORS[0], label="other levels")
        axis.bar(middles[zero], counts[zero], edges[1] - edges[0], color=COLORS[4], label="rounds to 0")
        for level in range(-top, top + 1):
            label = "levels" if level == 0 else None
            axis.axvline(level / top, color=INK, linewidth=0.8, linestyle="--", label=label)
        share = np.mean(np.abs(np.asarray(values)) * top < 0.5)
        axis.set(title=f"{each} bits: {share:.0%} round to 0", xlabel="weight / largest of its row")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("% of the weights")
    axes[0].legend(fontsize=8, loc="upper left")


def row_in_groups(weights: Sequence[float], group_size: int, top: int) -> None:
    """Each weight of a row and the level that it gets: one scale for all, and a scale for each group.

    The axis reaches a little beyond the second-largest weight; the largest is written at the edge.
    """
    _, axes = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained", sharey=True)
    high = 1.8 * sorted(map(abs, weights))[-2]
    for axis, size in zip(axes, (len(weights), group_size), strict=True):
        squares = 0.0
        for start in range(0, len(weights), size):
            part = np.array(weights[start : start + size])
            step = np.abs(part).max() / top
            for level in range(-top, top + 1):
                axis.hlines(level * step, start - 0.45, start + size - 0.55, color=LEVEL, linewidth=0.8, zorder=1)
            rounded = np.clip(np.round(part / step), -top, top) * step
            squares += float(((rounded - part) ** 2).sum())
            for place, (weight, level) in enumerate(zip(part, rounded, strict=True), start):
                if abs(weight) > high:
                    axis.annotate(f"{weight:g}", (place, high), (place, 0.8 * high), ha="center", arrowprops=ARROW)
                    continue
                axis.plot([place - 0.15, place + 0.15], [weight, level], color=COLORS[4], linewidth=2, zorder=2)
                axis.plot(place - 0.15, weight, "o", color=COLORS[0], zorder=3)
                axis.plot(place + 0.15, level, "D", color=COLORS[1], zorder=3, markersize=5)
        name = "one scale for the row" if size == len(weights) else f"a scale for each group of {size}"
        axis.set_title(f"{name}: squared errors add up to {squares:.2g}", fontsize=10)
        axis.set(xlabel="input", xticks=range(len(weights)), ylim=(-high, high))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("weight; lines: levels")
    marks = {"weight": ("o", COLORS[0]), "rounded": ("D", COLORS[1]), "error": ("_", COLORS[4])}
    for label, (mark, color) in marks.items():
        axes[0].plot([], [], mark, color=color, label=label)
    axes[0].legend(fontsize=8, loc="lower left", ncols=3)


def clipping(shares: Sequence[float], errors: Mapping[int, Sequence[float]]) -> None:
    """The squared error by the share of each row's range that the levels cover, for numbers of bits; o: the least."""
    _, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    for color, (bits, values) in zip(COLORS, errors.items(), strict=False):
        axis.plot(shares, values, color=color, label=f"{bits} bits")
        best = int(np.argmin(values))
        axis.plot(shares[best], values[best], "o", color=color)
    axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axis.set(xlabel="levels reach to this share of the row's largest weight", ylim=(0, 2))
    axis.set_ylabel("squared error /\nthat without clipping")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)


def nibbles(codes: Sequence[int]) -> None:
    """Pairs of four-bit codes, and the byte that holds each pair."""
    _, axis = plt.subplots(figsize=(11, 2.3), layout="constrained")
    for byte in range(len(codes) // 2):
        pair = codes[2 * byte : 2 * byte + 2]
        value = (pair[0] + 8) | (pair[1] + 8) << 4
        left = byte * 9.5
        axis.text(left + 4, 2.75, f"byte {byte} = {value}", ha="center", fontsize=10)
        for half, (code, color) in enumerate(zip(reversed(pair), (COLORS[1], COLORS[0]), strict=True)):
            column = 2 * byte + 1 - half
            for bit, digit in enumerate(f"{code + 8:04b}"):
                at = left + 4 * half + bit
                axis.add_patch(Rectangle((at, 1.5), 1, 0.9, facecolor=color, alpha=0.45, edgecolor="white"))
                axis.text(at + 0.5, 1.95, digit, ha="center", va="center", fontsize=10)
            words = f"{'high' if half == 0 else 'low'} half\ncode {column}: {code}\n+ 8 = {code + 8}"
            axis.text(left + 4 * half + 2, 1.35, words, ha="center", va="top", fontsize=9, color=INK)
    axis.set(xlim=(-0.3, len(codes) // 2 * 9.5 - 1), ylim=(0, 3.1))
    axis.axis("off")


def ladder(measured: Mapping[int, Found], before: float) -> None:
    """Perplexity and KL divergence by the bits of a weight, both on logarithmic axes. before: its perplexity."""
    bits, each = list(measured), measured.values()
    divergences = [found.divergence for found in each]
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3), layout="constrained")
    left.plot(bits, [found.perplexity for found in each], "o-", color=COLORS[0], label="quantized")
    left.axhline(before, color=INK, linestyle="--", linewidth=1, label="unquantized")
    left.set(ylabel="perplexity", yscale="log")
    errors = [found.error for found in each]
    right.errorbar(bits, divergences, errors, fmt="o-", color=COLORS[1], capsize=3, label="quantized")
    first = divergences[0]
    guide = [first * 4.0 ** (bits[0] - count) for count in bits]
    right.plot(bits, guide, color=INK, linestyle=":", linewidth=1, label="4 times for each bit less")
    right.set(ylabel="KL divergence, nats", yscale="log")
    for axis in (left, right):
        _bits_axis(axis)
        axis.set_xticks(bits)
        axis.invert_xaxis()


def frontier(lines: Mapping[str, Mapping[float, Found]]) -> None:
    """KL divergence and its standard error against bits per weight, by the name of each line."""
    _, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    for color, mark, (name, points) in zip(COLORS, "osD^v", lines.items(), strict=False):
        values, errors = ([getattr(each, what) for each in points.values()] for what in ("divergence", "error"))
        axis.errorbar(list(points), values, errors, fmt=f"{mark}-", color=color, markersize=5, capsize=3, label=name)
    axis.set(yscale="log", ylabel="KL divergence, nats")
    _bits_axis(axis)


def _bits_axis(axis: Axes) -> None:
    axis.set_xlabel("bits per weight")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)


def step_floors(
    rows: Sequence[float], floors: Mapping[str, Sequence[float]], measured: Mapping[int, float], label: str
) -> None:
    """The least time of a step's products by its number of rows, a line for each format; dots: measured."""
    _, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for color, style, (name, times) in zip(COLORS, ("-", "--", "-."), floors.items(), strict=False):
        axis.plot(rows, [each * 1e3 for each in times], style, color=color, label=f"{name}: floor")
    axis.plot(list(measured), list(measured.values()), "o", color=INK, markersize=4, label=label)
    axis.set(xscale="log", yscale="log", xlabel="rows (requests that decode together)", ylabel="ms")
    axis.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
    axis.set_xticks([], minor=True)
    axis.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axis.set_yticks([], minor=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
