"""Lesson 00's pictures: probabilities of the next token, steps, batches, and rooflines."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from minillm.bench.roofline import PeakRates, Point

PREFILL, DECODE, FLOOR = "tab:orange", "tab:blue", "dimgray"


def probabilities(found: Mapping[str, float], title: str) -> None:
    """A bar per token, the most likely first, labeled with its probability."""
    _, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
    bars = axis.barh(list(found), list(found.values()), color=DECODE)
    axis.bar_label(bars, [f"{each:.1%}" if each >= 0.001 else "<0.1%" for each in found.values()], padding=3)
    axis.invert_yaxis()
    axis.set(xlim=(0, 1.1 * max(found.values())), xlabel="probability", title=title)


def steps(milliseconds: Sequence[float], computed: Sequence[int]) -> None:
    """Draw how long each step of a request took, and how many tokens a second it computed. The first is the prefill."""
    _, axes = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    rates = [1e3 * tokens / each for tokens, each in zip(computed, milliseconds, strict=True)]
    later = range(1, len(rates))
    axes[0].bar([0], milliseconds[:1], color=PREFILL)
    axes[0].bar(later, milliseconds[1:], color=DECODE)
    axes[1].plot([0], rates[:1], "o", color=PREFILL, label="prefill")
    axes[1].plot(later, rates[1:], "o", color=DECODE, label="decode")
    axes[0].set(xlabel="step", ylabel="milliseconds", title="Time per step")
    axes[1].set(xlabel="step", ylabel="tokens per second", yscale="log", title="Tokens computed per second")
    axes[1].legend()


def tokens(seconds: Mapping[int, float], numbers: int, size: int, limits: PeakRates) -> None:
    """Time to send tokens through `numbers` weights of `size` bytes, by number of tokens, with both limits."""
    _, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    counts, several = list(seconds), [count for count in seconds if count > 1]
    each_token = seconds[several[0]] / several[0]  # a single token has a routine of its own
    reading = numbers * size / limits.bytes_per_s
    axis.axhline(reading * 1e3, color=FLOOR, linestyle="--", label="floor: reading the weights once")
    computing = [2 * numbers * count / limits.operations_per_s * 1e3 for count in counts]
    axis.plot(counts, computing, color="tab:red", linestyle="--", label="floor: the arithmetic")
    proportional = [each_token * count * 1e3 for count in several]
    axis.plot(several, proportional, ":", color=DECODE, label="proportional to the tokens")
    axis.plot(counts, [each * 1e3 for each in seconds.values()], "o-", color=PREFILL, label="measured")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
    axis.set_ylim(bottom=min(reading, *seconds.values()) * 1e3 / 3)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_title(f"More and more tokens through {numbers * size / 1e6:,.0f} MB of weights")
    axis.legend(fontsize=9)


def time_of_a_step(parts: Mapping[str, float], floor: float) -> None:
    """The parts of a step's seconds as one bar; a line marks the floor."""
    _, axis = plt.subplots(figsize=(9, 1.9), layout="constrained")
    begin = 0.0
    for (name, seconds), color in zip(parts.items(), (DECODE, PREFILL, "lightgray"), strict=True):
        axis.barh([0], [seconds * 1e3], left=begin * 1e3, color=color, label=name)
        begin += seconds
    axis.axvline(floor * 1e3, color="black", linestyle="--", label="floor")
    axis.set(yticks=[], xlabel="milliseconds", title="A decode step of tiny-gemma on this CPU")
    axis.legend(fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.45))


def roofs(panels: Mapping[str, tuple[PeakRates, Sequence[Point]]]) -> None:
    """A roofline per panel: title -> (limits, steps)."""
    _, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), layout="constrained")
    for axis, (title, (limits, points)) in zip(axes, panels.items(), strict=True):
        _roof(axis, limits, points)
        axis.set_title(title)


def _roof(axis: Axes, limits: PeakRates, points: Sequence[Point]) -> None:
    xs = [0.2, limits.ridge, 12 * max(limits.ridge, *(point.intensity for point in points))]
    heights = [min(x * limits.bytes_per_s, limits.operations_per_s) / 1e9 for x in xs]
    axis.plot(xs, heights, color="gray", label="limit of the machine")
    for kind, color in (("decode", DECODE), ("prefill", PREFILL)):
        chosen = [point for point in points if point.name.startswith(kind)]
        axis.plot([p.intensity for p in chosen], [p.rate / 1e9 for p in chosen], "o", color=color, label=kind)
    densest = max((point for point in points if point.name.startswith("decode")), key=lambda point: point.intensity)
    for point in points:
        label = point.name.removeprefix("decode, ").removesuffix(" at once").removeprefix("prefill of ")
        if point.name.startswith("prefill"):
            offset = (0, -14)
        elif point.intensity < limits.ridge:
            offset = (9, -9)
        else:  # above the ridge, points are close to each other
            offset = (13, -3) if point is densest else (-13, -4)
        at = (point.intensity, point.rate / 1e9)
        axis.annotate(label, at, offset, textcoords="offset points", fontsize=8, ha="center", va="baseline")
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="billion operations per second")
    axis.margins(y=0.12)
    axis.legend(fontsize=8, loc="lower right")
