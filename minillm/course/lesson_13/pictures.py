"""Lesson 13's pictures: drafts and the target's own tokens, a cache with stale keys, what drafts gain, p and q.

Each draws the current matplotlib figure, which `minillm.course.describe` shows.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

RIGHT, OWN, WRONG, UNUSED = "#54a24b", "#4c78a8", "#e45756", "#e4e4e4"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")


def one_step(newest: str, drafts: Sequence[str], sampled: Sequence[str]) -> None:
    """Draw what one step runs, and the target's own token after each; as text."""
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    _, axis = plt.subplots(figsize=(11, 2.2), layout="constrained")
    for at, text in enumerate([newest, *drafts]):
        color = OWN if at == 0 else RIGHT if at <= right else WRONG if at == right + 1 else UNUSED
        _cell(axis, at, 1, text, color)
    for at, text in enumerate(sampled):
        _cell(axis, at, 0, text, RIGHT if at < right else OWN if at == right else UNUSED)
    axis.set(xlim=(-0.02, len(sampled)), ylim=(-0.1, 2.0), xticks=[])
    axis.set_yticks([0.42, 1.42], ["target's own\nnext token", "tokens in\nthe step"], fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    shades = {"draft, accepted": RIGHT, "first wrong draft": WRONG, "known, or the target's own": OWN}
    shades["says nothing"] = UNUSED
    _legend(axis, shades)


def _cell(axis: Axes, x: float, y: float, text: str, color: str) -> None:
    axis.add_patch(plt.Rectangle((x, y), 0.94, 0.84, color=color))
    ink = "#404040" if color == UNUSED else "white"
    axis.text(x + 0.47, y + 0.42, text, ha="center", va="center", fontsize=9, color=ink)


def _legend(axis: Axes, shades: Mapping[str, str]) -> None:
    handles = [Patch(facecolor=color, label=label) for label, color in shades.items()]
    axis.legend(
        handles=handles, ncols=len(handles), fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.02)
    )


def cache(before: int, drafts: int, right: int) -> None:
    """The slots of one request's cache around a step with drafts: before it, after it, and after the next one begins.

    before: tokens in the cache, of which the last few are drawn. drafts, right: of the step.
    """
    shown, after = 4, before + 1 + right
    last = before + 1 + drafts
    rows = {
        "before the step": dict.fromkeys(range(before), OWN),
        "after it": dict.fromkeys(range(after), OWN) | dict.fromkeys(range(after, last), WRONG),
        "the next token": dict.fromkeys(range(after), OWN)
        | {after: RIGHT}
        | dict.fromkeys(range(after + 1, last), WRONG),
    }
    _, axis = plt.subplots(figsize=(11, 2.4), layout="constrained")
    first = before - shown
    for line, colors in enumerate(rows.values()):
        for at in range(first, last + 2):
            _cell(axis, at - first, 2 - line, str(at), colors.get(at, UNUSED))
    for line, length in ((2, before), (1, after), (0, after + 1)):
        axis.plot([length - first - 0.03] * 2, [line - 0.05, line + 0.9], color="black", linewidth=2.5)
    axis.set(xlim=(-0.05, last + 2 - first), ylim=(-0.15, 3.0), xticks=[])
    axis.set_yticks([2.42, 1.42, 0.42], list(rows), fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    _legend(axis, {"keys that count": OWN, "stale: of rejected drafts": WRONG, "written over": RIGHT, "empty": UNUSED})


def steps(runs: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None:
    """Draw what became of each step's drafts. runs: title -> (tokens that steps ran, tokens that the text gained)."""
    _, axes = plt.subplots(len(runs), 1, figsize=(11, 1.9 * len(runs)), sharex=True, sharey=True, layout="constrained")
    for axis, (title, (sizes, gained)) in zip(axes, runs.items(), strict=True):
        places, ran, own = np.arange(len(sizes)), np.array(sizes), np.array(gained)
        axis.bar(places, own - 1, bottom=1, color=RIGHT, label="drafts, accepted")
        axis.bar(places, ran - own, bottom=own, color=WRONG, label="drafts, rejected")
        axis.bar(places, np.ones(len(ran)), color=OWN, label="the newest token")
        axis.set_title(title, fontsize=10, loc="left")
        axis.set(ylabel="tokens", yticks=[0, 4, 8])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=9, loc="center right", bbox_to_anchor=(1.0, 0.5))
    axes[-1].set_xlabel("step after the prompt's")


def gains(lines: Mapping[str, tuple[int, float]]) -> None:
    """Times the speed without drafts, by the chance of a draft to be right.

    lines: label -> (drafts of a request, how many times as long its step takes as one without).
    """
    p = np.linspace(0, 1, 101)
    _, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for color, (label, (drafts, longer)) in zip(COLORS, lines.items(), strict=False):
        axis.plot(p, expected(p, drafts) / longer, color=color, label=label)
    axis.axhline(1, color="dimgray", linestyle="--", linewidth=1)
    axis.set(xlabel="chance of each draft to be right, p", ylabel="times the speed without drafts", ylim=(0, 6))
    axis.legend(fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def expected(p: np.ndarray, drafts: int) -> np.ndarray:
    """Mean tokens of a step with so many drafts: 1 + p + p^2 + ..."""
    return np.sum([p**power for power in range(drafts + 1)], axis=0)


def overlap(p: np.ndarray, q: np.ndarray) -> None:
    """Two distributions, what they share, and what is left of p, divided by its sum."""
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.0), layout="constrained")
    places, shared = np.arange(len(p)), np.minimum(p, q)
    left.bar(places - 0.2, p, width=0.38, color=OWN, label="p, the target's")
    left.bar(places + 0.2, q, width=0.38, color=COLORS[1], label="q, the drafter's")
    for shift in (-0.2, 0.2):
        style = {"hatch": "///", "facecolor": "none", "edgecolor": "white", "linewidth": 0}
        left.bar(places + shift, shared, width=0.38, label="shared: min(p, q)" if shift > 0 else None, **style)
    left.set_title(f"shared: {shared.sum():.2f} of each", fontsize=10)
    left.set_ylim(0, 0.55)
    left.legend(fontsize=9, facecolor="lightgray", ncols=3, loc="upper center")
    rest = np.maximum(p - q, 0)
    right.bar(places, rest / rest.sum(), width=0.5, color=RIGHT)
    right.set_title("what is left of p, divided by its sum", fontsize=10)
    for axis in (left, right):
        axis.set(xlabel="token", ylabel="probability", xticks=places)
        axis.spines[["top", "right"]].set_visible(False)
