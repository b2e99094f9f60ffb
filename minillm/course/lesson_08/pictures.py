"""Lesson 08's pictures: keys and values, where scales are applied, KIVI's groups, a gradient, choices.

Each function leaves its figure open: the cell's `describe` shows it.
"""

from collections.abc import Collection, Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#72b7b2", "#9d755d", "#303030")
INK, CODE = "dimgray", "#d9d9d9"
AREA = 3e4  # bytes of weights for each square point of a dot


def keys_and_values(k: Tensor, v: Tensor) -> None:
    """|k| and |v| [tokens, d] of one head, a panel each: tokens down, channels across."""
    _, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for axis, (name, x) in zip(axes, {"keys": k, "values": v}.items(), strict=True):
        image = axis.imshow(x.abs().numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set(title=f"|{name}|", xlabel="channel", ylabel="token")
        plt.colorbar(image, ax=axis)


def folded(keys: int = 6, dim: int = 6) -> None:
    """Products of codes, with one scale for each key: the keys' on the scores, the values' on the weights."""
    _, axis = plt.subplots(figsize=(12.5, 2.9), layout="constrained")
    x = 0.0

    def cells(columns: int, rows: int, color: str, name: str) -> None:
        nonlocal x
        top = (keys - rows) / 4
        for row in range(rows):
            for column in range(columns):
                place = (x + column * 0.5, top + row * 0.5)
                axis.add_patch(Rectangle(place, 0.46, 0.46, facecolor=color, edgecolor="white"))
        axis.text(x + columns / 4, top - 0.2, name, ha="center", va="bottom", fontsize=10, color=INK)
        x += columns / 2

    def sign(text: str, width: float, size: int = 16) -> None:
        nonlocal x
        axis.text(x + width / 2, keys / 4, text, ha="center", va="center", fontsize=size, color=INK)
        x += width

    cells(dim, keys, CODE, "codes of keys")
    sign("· q =", 1.5)
    cells(1, keys, COLORS[0], "sums")
    sign("×", 0.9)
    cells(1, keys, COLORS[1], "k scales")
    sign("× scale,\nsoftmax\n→", 1.8, 12)
    cells(1, keys, COLORS[0], "weights")
    sign("×", 0.9)
    cells(1, keys, COLORS[1], "v scales")
    sign("·", 0.9)
    cells(dim, keys, CODE, "codes of values")
    sign("=", 0.9)
    cells(dim, 1, COLORS[0], "result")
    axis.set(xlim=(-0.1, x + 0.1), ylim=(keys / 2 + 0.1, -0.7), aspect="equal")
    axis.axis("off")


def kivi(tokens: int = 14, dim: int = 12, group: int = 4) -> None:
    """Draw which keys and which values share a scale in KIVI, and the newest tokens, which are not quantized yet."""
    _, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    whole = tokens // group * group
    for axis, name in zip(axes, ("keys", "values"), strict=True):
        for token in range(tokens):
            for channel in range(dim):
                number = channel + token // group if name == "keys" else token + channel // group
                color = CODE if token >= whole else COLORS[number % 7]
                axis.add_patch(Rectangle((channel, token), 0.92, 0.92, facecolor=color))
        wide, high = (1, group) if name == "keys" else (group, 1)
        for token in range(0, whole, high):
            for channel in range(0, dim, wide):
                box = Rectangle(
                    (channel - 0.04, token - 0.04), wide, high, fill=False, edgecolor="black", linewidth=0.8
                )
                axis.add_patch(box)
        axis.text(dim / 2, (whole + tokens) / 2, "newest tokens: 16 bits", ha="center", va="center", fontsize=10)
        axis.set(title=name, xlim=(-0.2, dim + 0.1), ylim=(tokens + 0.1, -0.2), xticks=[], yticks=[])
        axis.set(xlabel="channel", ylabel="token")
        axis.spines[:].set_visible(False)


def straight_through() -> None:
    """Left: a weight and its rounded value. Right: the derivative, and what the estimator takes for it."""
    _, axes = plt.subplots(1, 2, figsize=(11, 2.8), layout="constrained")
    x = np.linspace(-2.5, 2.5, 1001)
    axes[0].plot(x, x, "--", color=INK, linewidth=1, label="weight")
    axes[0].plot(x, np.round(x), color=COLORS[0], label="rounded")
    axes[0].set(title="forward", xlabel="weight / scale")
    axes[1].plot(x, np.zeros_like(x), color=COLORS[0], label="derivative of rounding")
    axes[1].plot(x, np.ones_like(x), color=COLORS[1], label="straight-through estimator")
    axes[1].set(title="backward", xlabel="weight / scale", ylim=(-0.2, 1.4))
    for axis in axes:
        axis.legend(fontsize=8)
        _plain(axis)


def pareto(
    panels: Mapping[str, Mapping[str, tuple[float, float, float]]], fronts: Mapping[str, Collection[str]]
) -> None:
    """A panel for each load: {method: (KL in millinats, bytes, times as fast)}; methods on the front are filled.

    The size of a dot is the size of the weights. All panels have the same axes, so that they can be compared.
    """
    axes = plt.subplots(
        1, len(panels), figsize=(11.5, 4.2), layout="constrained", sharex=True, sharey=True, squeeze=False
    )[1]
    for axis, (title, points) in zip(axes[0], panels.items(), strict=True):
        for color, (name, (kl, nbytes, speed)) in zip(COLORS, points.items(), strict=False):
            filled = name in fronts[title]
            face = color if filled else "none"
            axis.scatter(kl, speed, s=nbytes / AREA, facecolor=face, edgecolor=color, linewidth=1.5, label=name)
        axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="KL divergence, millinats per token (tiny-gemma)")
        _plain(axis)
    shared = axes[0, 0]  # of all panels
    shared.set_xscale("symlog", linthresh=0.01)
    shared.set_xlim(-0.003, 2 * max(kl for points in panels.values() for kl, _, _ in points.values()))
    low, high = shared.get_ylim()
    shared.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    shared.set_ylabel("times as fast as bfloat16\n(Gemma 2B's shape, H200)")
    marks = [
        plt.Line2D([], [], marker="o", linestyle="", color=color) for color, _ in zip(COLORS, points, strict=False)
    ]
    names = list(points)
    for face, words in ((INK, "filled: on the front"), ("none", "hollow: beaten by another")):
        marks.append(plt.Line2D([], [], marker="o", linestyle="", color=INK, markerfacecolor=face))
        names.append(words)
    for size in sorted({nbytes for _, nbytes, _ in points.values()}):
        dot = (size / AREA) ** 0.5
        marks.append(plt.Line2D([], [], marker="o", linestyle="", color=INK, markerfacecolor="none", markersize=dot))
        names.append(f"this size: {size / 1e6:.1f} MB of weights")
    plt.gcf().legend(marks, names, fontsize=8, ncols=4, loc="outside lower center")


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
