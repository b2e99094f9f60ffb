"""Lesson 15's pictures: the ranks of changes, a batch with several adapters, and what three ways read.

Each draws the current matplotlib figure, which `minillm.course.describe` shows.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from . import adapting

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
INK, EMPTY = "#404040", "#e4e4e4"


def spectra(named: Mapping[str, Tensor]) -> None:
    """Draw the share of a matrix's squares that its nearest matrix of each rank keeps, a line for each matrix."""
    _, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for (label, matrix), color in zip(named.items(), COLORS, strict=False):
        squares = torch.linalg.svdvals(matrix.double()).square()
        share = np.concatenate(([0.0], (squares.cumsum(0) / squares.sum()).tolist()))
        axis.plot(np.arange(len(share)), 100 * share, color=color, label=label)
    axis.set(xlim=(0, 64), ylim=(0, 100), xlabel="rank", ylabel="% of the squares kept")
    axis.legend(frameon=False, loc="lower right")
    _bare(axis)


def recorded_ranks() -> None:
    """Draw the loss of held-out answers by rank, from the record: changes cut afterwards, and adapters trained so."""
    _, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for kind, color, label in (
        ("cut", COLORS[0], "trained whole, then cut to the rank"),
        ("trained", COLORS[1], "trained at the rank"),
    ):
        rows = {rank: each for rank, each in adapting.recorded(kind).items() if rank}
        losses = np.array([[row["loss"] for row in each] for each in rows.values()])
        low, mid, high = losses.min(1), np.median(losses, 1), losses.max(1)
        axis.errorbar(list(rows), mid, (mid - low, high - mid), color=color, marker="o", capsize=3, label=label)
    axis.set(xscale="log", xlabel="rank", ylabel="loss of held-out answers")
    ticks = [rank for rank in adapting.recorded("cut") if rank]
    axis.set_xticks(ticks, [str(rank) for rank in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    _bare(axis)


def batch(slots: Sequence[int], names: Sequence[str]) -> None:
    """Draw how each token of a batch takes the matrix, and its own adapter's two factors. names: of the slots."""
    _, axis = plt.subplots(figsize=(10, 3.6), layout="constrained")
    rows = len(slots)
    for row, slot in enumerate(slots):
        color = COLORS[slot - 1] if slot else EMPTY
        y = rows - 1 - row
        axis.add_patch(plt.Rectangle((0, y + 0.1), 1.6, 0.8, facecolor=color, edgecolor="white"))
        label = names[slot] if slot else "no adapter"
        axis.text(0.8, y + 0.5, label, ha="center", va="center", fontsize=9, color="white" if slot else INK)
    axis.add_patch(plt.Rectangle((3.0, rows - 2.2), 4.6, 2.1, facecolor=EMPTY, edgecolor="white"))
    axis.text(5.3, rows - 1.15, "W x, for all tokens at once", ha="center", va="center", fontsize=10, color=INK)
    used = sorted(set(slots) - {0})
    for at, slot in enumerate(used):
        low, color = rows - 3.4 - 1.3 * at, COLORS[slot - 1]
        count = list(slots).count(slot)
        axis.add_patch(plt.Rectangle((3.0, low), 2.6, 0.5, facecolor=color, edgecolor="white"))
        axis.text(4.3, low - 0.08, f"down of {names[slot]}", ha="center", va="top", fontsize=8, color=INK)
        axis.add_patch(plt.Rectangle((6.3, low - 0.3), 0.5, 1.0, facecolor=color, edgecolor="white"))
        axis.text(
            6.95, low + 0.2, f"up, for {count} token{'s' if count > 1 else ''}", va="center", fontsize=8, color=INK
        )
    axis.text(2.3, rows / 2, "→", ha="center", va="center", fontsize=18, color=INK)
    axis.text(9.2, rows / 2, "→", ha="center", va="center", fontsize=18, color=INK)
    for row, slot in enumerate(slots):
        y = rows - 1 - row
        axis.add_patch(plt.Rectangle((9.7, y + 0.1), 0.9, 0.8, facecolor=EMPTY, edgecolor="white"))
        if slot:
            axis.add_patch(plt.Rectangle((10.7, y + 0.1), 0.5, 0.8, facecolor=COLORS[slot - 1], edgecolor="white"))
            axis.text(10.65, y + 0.5, "+", ha="center", va="center", fontsize=9, color=INK)
    axis.set(xlim=(-0.2, 11.4), ylim=(-0.2, rows + 0.1))
    axis.set_axis_off()


def gigabytes(counts: Sequence[int], read: Mapping[str, Sequence[float]]) -> None:
    """Draw the GB that a step reads over the number of adapters in its batch, a line for each way."""
    _, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for (way, numbers), color in zip(read.items(), COLORS, strict=False):
        axis.plot(counts, numbers, color=color, marker="o", markersize=4, label=way)
    axis.set(xscale="log", yscale="log", xlabel="adapters in a batch of 64 tokens", ylabel="GB read in a step")
    axis.set_xticks(list(counts), [str(count) for count in counts])
    axis.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
    axis.minorticks_off()
    axis.legend(frameon=False)
    _bare(axis)


def _bare(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
