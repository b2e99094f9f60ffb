"""Lesson 06's pictures: errors of roundings, sizes of activations, strengths, methods compared.

Each function leaves its figure open: the cell's `describe` shows it.
"""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from torch import Tensor

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
INK, PALE = "dimgray", "#e6e6e6"


def output_errors(weights: Tensor, second_moment: Tensor, points: Mapping[str, tuple[float, float]]) -> None:
    """Lines of equal output error around two weights, the grid of whole numbers, and some of its points by name."""
    _, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    across, up = np.meshgrid(np.linspace(-0.7, 3.4, 200), np.linspace(-1.7, 2.5, 200))
    moved = np.stack([across - weights[0].item(), up - weights[1].item()], -1)
    error = np.einsum("...i,ij,...j->...", moved, second_moment.numpy(), moved)
    lines = axis.contour(across, up, error, levels=[0.24, 0.84, 2, 4.64, 10, 20], colors="#b8b8b8", linewidths=1)
    axis.clabel(lines, fontsize=8, fmt=lambda level: f"{level:g}", colors=INK)
    grid = [(x, y) for x in range(4) for y in range(-1, 3)]
    axis.plot(*zip(*grid, strict=True), "o", color=INK, markersize=3)
    axis.plot(*weights.tolist(), "x", color="black", markersize=9, markeredgewidth=2, label="the weights")
    for color, (name, point) in zip(COLORS, points.items(), strict=False):
        axis.plot(*point, "o", color=color, markersize=10, label=name)
    axis.set(xlabel="weight 0", ylabel="weight 1", aspect="equal")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))


def magnitudes(curves: Mapping[str, Tensor]) -> None:
    """Each product's mean |x|, largest first, relative to the median."""
    _, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for color, (name, values) in zip(COLORS, curves.items(), strict=False):
        ordered = (values / values.median()).sort(descending=True).values
        share = 100 * (np.arange(len(ordered)) + 0.5) / len(ordered)
        axis.plot(share, ordered.numpy(), color=color, label=name)
    axis.set(xlabel="% of the inputs, largest first", ylabel="mean |x| / median", yscale="log")
    axis.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)


def strengths(curves: Mapping[str, Mapping[float, float]]) -> None:
    """The output error by strength, in % of that of strength 0; the smallest is marked."""
    _, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for color, (name, points) in zip(COLORS, curves.items(), strict=False):
        relative = {strength: 100 * error / points[0] for strength, error in points.items()}
        axis.plot(list(relative), list(relative.values()), color=color, label=name)
        best = min(relative, key=lambda strength: relative[strength])
        axis.plot(best, relative[best], "o", color=color)
    axis.set(xlabel="strength", ylabel="output error, % of nearest", ylim=(0, 200))
    axis.axhline(100, color=INK, linewidth=0.8, linestyle=":")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)


def columns(done: int, count: int, rows: int = 4) -> None:
    """A matrix whose first columns are rounded; the error of the next one goes into those that follow."""
    _, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    for column in range(count):
        color = COLORS[0] if column < done else COLORS[4] if column == done else PALE
        for row in range(rows):
            axis.add_patch(Rectangle((column, row), 1, 1, facecolor=color, alpha=0.75, edgecolor="white"))
    for column in range(done + 1, count):
        arrow = {"arrowstyle": "->", "color": COLORS[4], "connectionstyle": "arc3,rad=-0.25"}
        axis.annotate("", (column + 0.5, rows + 0.05), (done + 0.5, rows + 0.05), arrowprops=arrow)
    texts = {done / 2: "rounded: fixed", done + 0.5: "now", (done + 1 + count) / 2: "still free: make up for the error"}
    for x, text in texts.items():
        axis.text(x, -0.15, text, ha="center", va="top", fontsize=9)
    axis.set(xlim=(-0.1, count + 0.1), ylim=(-0.9, rows + 1.9))
    axis.axis("off")


def removed_by_rows(shares: Mapping[int, tuple[float, float]]) -> None:
    """The share of KL divergence that is removed, in %, and its standard error, by rows of calibration text."""
    _, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    values, errors = zip(*shares.values(), strict=True)
    axis.errorbar(list(shares), values, errors, fmt="o-", color=COLORS[0], capsize=3)
    axis.axhline(0, color=INK, linewidth=0.8, linestyle=":")
    axis.set(xscale="log", xlabel="rows of calibration text, 256 tokens each", ylabel="% of the KL removed")
    axis.set_xticks(list(shares), [str(rows) for rows in shares])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)


def bars(groups: Mapping[str, Mapping[str, float]]) -> None:
    """A panel for each group -> {method: KL divergence}, all with the same axis."""
    height = 1.0 + 0.32 * max(len(values) for values in groups.values())
    longest = max(value for values in groups.values() for value in values.values())
    _, axes = plt.subplots(1, len(groups), figsize=(5.2 * len(groups), height), layout="constrained", squeeze=False)
    for axis, (title, values) in zip(axes[0], groups.items(), strict=True):
        names = list(values)
        axis.barh(names, list(values.values()), color=[COLORS[at % len(COLORS)] for at in range(len(names))])
        for row, value in enumerate(values.values()):
            axis.text(value, row, f" {value:.4f}", va="center", fontsize=8)
        axis.invert_yaxis()
        axis.set(title=title, xlabel="KL divergence, nats per token", xlim=(0, 1.2 * longest))
        axis.spines[["top", "right"]].set_visible(False)
