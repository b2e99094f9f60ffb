"""Lesson 14's pictures: two matrices on two ranks, what a reduce may cost, and a pipeline.

Each draws the current matplotlib figure, which `minillm.course.describe` shows.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from . import dividing

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
INK, EMPTY = "#404040", "#e4e4e4"


def two_matrices() -> None:
    """Draw a product with a matrix divided by rows, and the next with one divided by columns, on two ranks."""
    _, axis = plt.subplots(figsize=(11, 3.4), layout="constrained")
    _box(axis, 0.0, 1.2, 0.5, 1.6, [EMPTY], "x\nwhole")
    _box(axis, 1.3, 0.4, 1.6, 3.2, COLORS[:2], "first matrix\nby rows", across=False)
    _box(axis, 3.7, 0.4, 0.5, 3.2, COLORS[:2], "inner\nvalues", across=False)
    _box(axis, 5.0, 1.2, 3.2, 1.6, COLORS[:2], "second matrix\nby columns", across=True)
    for at, color in enumerate(COLORS[:2]):
        _box(axis, 9.0 + 0.8 * at, 1.2, 0.5, 1.6, [color], "partial\nsum")
    _box(axis, 11.2, 1.2, 0.5, 1.6, [EMPTY], "y\nwhole")
    for x, sign in ((0.9, "→"), (3.3, "→"), (4.6, "→"), (8.6, "→"), (9.65, "+"), (10.75, "=")):
        axis.text(x, 2.0, sign, ha="center", va="center", fontsize=16, color=INK)
    for at, color in enumerate(COLORS[:2]):
        axis.text(5.0 + 3.4 * at, 3.9, f"rank {at}", ha="left", va="center", fontsize=11, color=color)
    axis.set(xlim=(-0.2, 12.0), ylim=(-0.6, 4.2))
    axis.set_axis_off()


def _box(
    axis: Axes, x: float, y: float, width: float, height: float, colors: Sequence[str], label: str, across: bool = False
) -> None:
    count = len(colors)
    for at, color in enumerate(colors):
        corner = (x + at * width / count, y) if across else (x, y + height - (at + 1) * height / count)
        size = (width / count, height) if across else (width, height / count)
        axis.add_patch(plt.Rectangle(corner, *size, facecolor=color, edgecolor="white", linewidth=2))
    axis.text(x + width / 2, y - 0.12, label, ha="center", va="top", fontsize=9, color=INK)


def gains(one_ms: float, count: int) -> None:
    """Draw how many times as fast a step is at best on several ranks, over the time of one reduce."""
    _, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    reduce_us = np.logspace(0, 2, 200)
    for ranks, color in zip((2, 4, 8), COLORS, strict=False):
        axis.plot(reduce_us, [dividing.gain(one_ms, count, each, ranks) for each in reduce_us], color=color)
        axis.text(1.04, dividing.gain(one_ms, count, 1, ranks) + 0.1, f"{ranks} GPUs", color=color, fontsize=10)
    axis.axhline(1, color=INK, linewidth=1, linestyle="--")
    axis.set(xscale="log", xlim=(1, 100), ylim=(0, 7), xlabel="microseconds of one reduce")
    axis.set_ylabel("times as fast as one GPU, at best")
    axis.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axis.spines[["top", "right"]].set_visible(False)


def pipelines(runs: Sequence[tuple[str, Sequence[Sequence[Sequence[float]]]]], stage_ms: Sequence[float]) -> None:
    """Draw when each stage runs which batch. runs: (title, begin[step][batch][stage]) of each row of the picture."""
    _, axes = plt.subplots(len(runs), 1, figsize=(11, 1.9 * len(runs)), layout="constrained", squeeze=False)
    for axis, (title, begin) in zip(axes[:, 0], runs, strict=True):
        for step, batches in enumerate(begin):
            for batch, starts in enumerate(batches):
                for stage, start in enumerate(starts):
                    color = COLORS[batch % len(COLORS)]
                    bar = plt.Rectangle((start, -stage - 0.4), stage_ms[stage], 0.8, facecolor=color, edgecolor="white")
                    axis.add_patch(bar)
                    place = (start + stage_ms[stage] / 2, -stage)
                    axis.text(*place, f"{step + 1}", ha="center", va="center", color="white", fontsize=9)
        axis.set(xlim=(0, 19.2), ylim=(-len(stage_ms) + 0.5, 0.5))
        axis.set_yticks(range(0, -len(stage_ms), -1), [f"stage {stage}" for stage in range(len(stage_ms))], fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("milliseconds")
