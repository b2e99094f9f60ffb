"""Lesson 07's pictures: outliers, strengths, a Hadamard transform's steps, FP8's bits and errors, floors of a step.

Each function leaves its figure open: the cell's `describe` shows it.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from minillm.quantization.activations import LARGEST, to_codes

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2")
INK = "dimgray"


def tokens(largest: Mapping[str, Tensor], covered: Mapping[str, float]) -> None:
    """A panel for each product: the largest |x| of each token of a text, in order; covered: by the static scale."""
    figure, axes = plt.subplots(1, len(largest), figsize=(12, 3.1), layout="constrained", squeeze=False)
    for axis, (name, values) in zip(axes[0], largest.items(), strict=True):
        axis.vlines(range(len(values)), 0, values.tolist(), color=COLORS[0], linewidth=1)
        axis.plot([0], values[:1].tolist(), "o", color=COLORS[3], markersize=5, label="<bos>")
        axis.axhline(covered[name], linestyle="--", color=COLORS[1], label="largest in the calibration text")
        axis.set(title=f"inputs of {name}", xlabel="position of the token")
        _plain(axis)
    axes[0, 0].set_ylabel("largest |x| of the token")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)


def channels(rows: Mapping[str, Tensor], first: int = 0) -> None:
    """A panel for each model: |x| of a few tokens [tokens, in] by channel, as lines on one axis.

    first: the position of the first of these tokens in its text.
    """
    _, axes = plt.subplots(1, len(rows), figsize=(11, 2.9), layout="constrained", squeeze=False, sharey=True)
    for axis, (name, x) in zip(axes[0], rows.items(), strict=True):
        for color, (number, token) in zip(COLORS, enumerate(x.abs().tolist(), first), strict=False):
            axis.plot(token, color=color, linewidth=1, label=f"token {number}")
        axis.set(title=name, xlabel="channel")
        _plain(axis)
    axes[0, 0].set_ylabel("|x|")
    axes[0, 0].legend(fontsize=8)


def strengths(lines: Mapping[str, Mapping[float, float]], levels: Mapping[str, float]) -> None:
    """KL divergence in millinats by SmoothQuant's strength, a line for each model; levels: dashed lines."""
    _, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for color, (name, points) in zip(COLORS, lines.items(), strict=False):
        axis.plot(list(points), list(points.values()), "o-", color=color, markersize=4, label=name)
    for color, (name, value) in zip(COLORS[2:], levels.items(), strict=False):
        axis.axhline(value, linestyle="--", color=color, label=name)
    axis.set(yscale="log", xlabel="strength", ylabel="KL divergence, millinats")
    axis.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    axis.set_yticks([], minor=True)
    axis.set_xticks(sorted({strength for points in lines.values() for strength in points}))
    axis.legend(fontsize=8, loc="center", bbox_to_anchor=(0.5, 0.7))
    _plain(axis)


def butterfly(size: int = 8) -> None:
    """The steps of a Hadamard transform: which numbers are added (both lines) and subtracted (dashed)."""
    _, axis = plt.subplots(figsize=(9, 3.3), layout="constrained")
    steps = size.bit_length() - 1
    for step in range(steps):
        distance = 1 << step
        for place in range(size):
            partner = place ^ distance
            lower = bool(place & distance)
            color = COLORS[step % len(COLORS)]
            axis.plot([step, step + 1], [partner, place], color=color, linewidth=1)
            axis.plot([step, step + 1], [place, place], color=color, linewidth=1.2, linestyle="--" if lower else "-")
        axis.text(step + 0.5, -0.9, f"distance {distance}", ha="center", fontsize=9, color=INK)
    for step in range(steps + 1):
        axis.plot([step] * size, range(size), "o", color=INK, markersize=4)
    axis.set(ylim=(size - 0.5, -1.3), yticks=range(size), xticks=[])
    axis.set_ylabel("channel")
    axis.plot([], [], color=INK, label="added")
    axis.plot([], [], color=INK, linestyle="--", label="subtracted")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.spines[:].set_visible(False)


def spread(lines: Mapping[str, Tensor]) -> None:
    """The largest |x| of each channel, sorted from the largest down, a line for each model."""
    _, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    for color, (name, values) in zip(COLORS, lines.items(), strict=False):
        axis.plot(values.sort(descending=True).values.tolist(), color=color, label=name)
    axis.set(yscale="log", xlabel="channels, largest first", ylabel="largest |x|")
    axis.legend(fontsize=8)
    _plain(axis)


def fp8_bits(codes: Sequence[int]) -> None:
    """Bytes of e4m3, bit by bit, with the numbers that they mean."""
    _, axis = plt.subplots(figsize=(11, 0.75 * len(codes) + 0.4), layout="constrained")
    for row, code in enumerate(codes):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        for bit, digit in enumerate(f"{code:08b}"):
            color = COLORS[3] if bit == 0 else COLORS[1] if bit < 5 else COLORS[0]
            axis.add_patch(Rectangle((bit, row), 0.94, 0.7, facecolor=color, alpha=0.45))
            axis.text(bit + 0.47, row + 0.35, digit, ha="center", va="center", fontsize=11)
        value = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
        first, power = (f"1 + {mantissa}/8", exponent - 7) if exponent else (f"0 + {mantissa}/8", -6)
        words = f"{'-' if sign else '+'} ({first}) · $2^{{{power}}}$ = {value:.10g}"
        axis.text(8.3, row + 0.35, words if value == value else "not a number", va="center", fontsize=11)
    for at, (name, color) in {
        0.5: ("sign", COLORS[3]),
        3: ("exponent", COLORS[1]),
        6.5: ("mantissa", COLORS[0]),
    }.items():
        axis.text(at, -0.2, name, ha="center", fontsize=10, color=color)
    axis.set(xlim=(-0.2, 14), ylim=(len(codes), -0.6))
    axis.axis("off")


def rounding_errors() -> None:
    """The largest relative error of eight-bit rounding by the size of a number, as a share of the largest one."""
    _, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for color, kind in zip(COLORS, ("int8", "fp8"), strict=False):
        edges = torch.arange(-20, 0.01, 0.25, dtype=torch.float64)
        worst = []
        for low in edges[:-1]:
            share = 2 ** torch.linspace(low, low + 0.25, 400, dtype=torch.float64)
            scaled = share * LARGEST[kind]
            worst.append(((to_codes(scaled, kind).double() - scaled).abs() / scaled).max().item())
        places = 2 ** (edges[:-1] + 0.125).numpy()
        axis.plot(places, 100 * np.array(worst), color=color, label={"int8": "int8", "fp8": "FP8 (e4m3)"}[kind])
    axis.set(
        xscale="log", yscale="log", xlabel="|x| / the largest that the scale covers", ylabel="largest error, % of |x|"
    )
    axis.set_xscale("log", base=2)
    axis.legend(fontsize=8)
    _plain(axis)


def step_floors(
    rows: Sequence[float], floors: Mapping[str, Sequence[float]], measured: Mapping[str, Mapping[int, float]]
) -> None:
    """The least time of a step's products by its rows, a line for each format; dots: measured, ms."""
    _, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for color, style, (name, times) in zip(COLORS, ("-", "--", "-.", ":"), floors.items(), strict=False):
        axis.plot(rows, list(times), style, color=color, label=f"{name}: floor")
    for color, mark, (name, points) in zip((COLORS[0], COLORS[1]), "os", measured.items(), strict=False):
        axis.plot(list(points), list(points.values()), mark, color=color, markersize=4, label=f"{name}: measured")
    axis.set(xscale="log", yscale="log", xlabel="rows (tokens of one step)", ylabel="ms")
    axis.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
    axis.set_xticks([], minor=True)
    axis.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axis.set_yticks([], minor=True)
    axis.legend(fontsize=8)
    _plain(axis)


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
