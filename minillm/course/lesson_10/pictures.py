"""Lesson 10's pictures: requests in rows, timelines, a padded batch, tokens that chase tokens, a trade, two lanes.

Each draws the current matplotlib figure, which `minillm.course.describe` shows. Steps are `minillm.trace.StepRows`,
read from an engine's trace. Rows have the colors of `draw_timeline` everywhere: orange runs a prompt, blue decodes,
gray rows are empty.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minillm.bench import plots
from minillm.trace.record import Trace
from minillm.trace.replay import StepRows, replay

from .timeline import COLORS as STATES
from .timeline import draw_timeline

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
IDLE, WAITS, PREFILL, DECODE = STATES


def rows_in_use(pictures: Mapping[str, Sequence], rows: int) -> None:
    """Draw which request has which row in each step; of a prompt also how many tokens run.

    pictures: title -> the steps of one run. Below each column stands what the step runs in all.
    """
    longest = max(len(steps) for steps in pictures.values())
    height = 0.75 + (rows + 1) * 0.38
    size = (11, height * len(pictures) + 0.4)
    figure, axes = plt.subplots(len(pictures), 1, figsize=size, layout="constrained", squeeze=False)
    shown = set()
    for axis, (title, steps) in zip(axes[:, 0], pictures.items(), strict=True):
        for at, step in enumerate(steps):
            used = dict(zip(step.row, zip(step.request, step.count, step.kind, strict=True), strict=True))
            for row in range(rows):
                name, count, kind = used.get(row, (None, 0, None))
                if name is not None:
                    shade, text = (PREFILL, f"{name}  {count}") if kind == "prefill" else (DECODE, name)
                elif stands := _between(steps, at, row):
                    shade, text = WAITS, f"{stands} waits"
                else:
                    shade, text = IDLE, "idle"
                axis.add_patch(plt.Rectangle((at, row), 0.94, 0.9, color=shade))
                shown.add(shade)
                style = {"color": "#404040"} if name is None else {"color": "white", "weight": "bold"}
                axis.text(at + 0.47, row + 0.48, text, ha="center", va="center", fontsize=9, **style)
            axis.text(at + 0.47, rows + 0.4, sum(step.count), ha="center", va="center", fontsize=9, color="dimgray")
        busy = sum(len(step.row) for step in steps) / (rows * len(steps))
        axis.set_title(f"{title}: {len(steps)} steps, {1 - busy:.0%} of the cells idle", fontsize=10, loc="left", pad=8)
        axis.set(xlim=(-0.05, longest), ylim=(rows + 0.8, -0.1))
        axis.xaxis.tick_top()
        axis.set_xticks([at + 0.47 for at in range(len(steps))], range(len(steps)), fontsize=9, color="dimgray")
        axis.text(-0.1, -0.33, "step", ha="right", fontsize=9)
        labels = [*(f"row {row}" for row in range(rows)), "tokens in the step"]
        axis.set_yticks([row + 0.45 for row in range(rows + 1)], labels, fontsize=9)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    names = {PREFILL: "prompt: name and tokens", DECODE: "decode: one token", WAITS: "waits", IDLE: "idle"}
    _legend(figure, {label: shade for shade, label in names.items() if shade in shown})


def _legend(figure: Figure, shades: Mapping[str, str], **style: Any) -> None:
    """Name colors below a figure. shades: label -> color."""
    handles = [Patch(facecolor=shade, label=label, **style.get(label, {})) for label, shade in shades.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)


def _between(steps: Sequence, at: int, row: int) -> str | None:
    """The request that the row ran last before step `at`, if it is also the first that it runs after it."""
    before = [s.request[s.row.index(row)] for s in steps[:at] if row in s.row]
    after = [s.request[s.row.index(row)] for s in steps[at:] if row in s.row]
    return before[-1] if before and after and before[-1] == after[0] else None


def timelines(traces: Mapping[str, Trace], rows: int, x: str = "steps") -> None:
    """Timelines one below the other, on the same axis; with x="time" a thin white line begins each step."""
    size = (11, 0.6 + (0.5 + 0.24 * rows) * len(traces))
    _, axes = plt.subplots(len(traces), 1, sharex=True, squeeze=False, figsize=size, layout="constrained")
    for axis, (title, trace) in zip(axes[:, 0], traces.items(), strict=True):
        last = axis is axes[-1, 0]
        draw_timeline(trace, axis, rows=rows, x=x, legend=last)
        axis.set_title(title, fontsize=10, loc="left")
        if x == "time":
            edges = [step.launched for step in replay(trace)]
            axis.vlines(edges, -0.5, rows - 0.5, color="white", linewidth=0.5)
        axis.set_xlabel(axis.get_xlabel() if last else "")
    axes[0, 0].set_xlim(0, max(axis.dataLim.x1 for axis in axes[:, 0]))


def padded(step: StepRows) -> None:
    """One step's tokens twice, on one scale: padded to a rectangle, and packed."""
    counts = step.count
    longest, starts = max(counts), np.cumsum([0, *counts]).tolist()
    size, ratios = (11, 1.9 + 0.24 * len(counts)), (len(counts), 1)
    figure, axes = plt.subplots(2, 1, sharex=True, height_ratios=ratios, figsize=size, layout="constrained")
    for row, (count, start) in enumerate(zip(counts, starts[:-1], strict=True)):
        shade = PREFILL if step.kind[row] == "prefill" else DECODE
        axes[0].barh(row, longest - count, left=count, height=0.86, color=IDLE, hatch="///", edgecolor=WAITS)
        axes[0].barh(row, count, height=0.86, color=shade)
        axes[1].barh(0, count, left=start, height=0.86, color=shade)
        if row:
            axes[1].axvline(start, color="white", linewidth=1.5)
    places = f"padded: {len(counts)} rows x {longest} = {len(counts) * longest} positions"
    axes[0].set_title(places, fontsize=10, loc="left")
    axes[0].set(ylim=(len(counts) - 0.5, -0.5))
    axes[0].set_yticks(range(len(counts)), [f"row {row}" for row in range(len(counts))], fontsize=9)
    axes[1].set_title(
        f"packed, one after the other: {starts[-1]} positions; query_start = {', '.join(map(str, starts))}",
        fontsize=10,
        loc="left",
    )
    axes[1].set(xlim=(0, starts[-1]), yticks=[], xlabel="tokens")
    for axis in axes:
        axis.tick_params(axis="y", length=0)
        axis.spines[:].set_visible(False)
    axes[0].tick_params(axis="x", length=0)
    shades = {"prompt": PREFILL, "decode": DECODE, "padding": IDLE}
    _legend(figure, shades, padding={"hatch": "///", "edgecolor": WAITS})


def chase(pictures: Mapping[str, tuple[Sequence, str, int]]) -> None:
    """One request's known and computed tokens until it is done. pictures: title -> (steps, its name, prompt)."""
    _, axes = plt.subplots(1, len(pictures), figsize=(11, 2.8), sharex=True, sharey=True, layout="constrained")
    for axis, (title, (steps, name, prompt)) in zip(axes, pictures.items(), strict=True):
        known, computed, have, newest = [prompt], [0], 0, 0
        for number, step in enumerate(steps):
            if name in step.request:
                at = step.request.index(name)
                if step.start[at] < have:  # preempted since: its cache is gone
                    computed[newest + 1 :] = [step.start[at]] * (number - newest)
                newest = number + 1
                have = step.start[at] + step.count[at]
                known.append(known[-1] + step.samples[at])
            else:
                known.append(known[-1])
            computed.append(have)
        ends, known, computed = np.arange(newest + 1), known[: newest + 1], computed[: newest + 1]
        axis.fill_between(ends, computed, known, step="post", color=WAITS, label="pending")
        axis.step(ends, known, where="post", color="black", label="known")
        axis.step(ends, computed, where="post", color=COLORS[2], label="computed")
        axis.plot(newest, known[-1], "o", color="black", markersize=5, label="done")
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(0, max(known) + 1, 3))
        axis.set_xlabel("steps so far")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"tokens of {name}")
    axes[0].legend(fontsize=9, loc="lower right")


def trade(budgets: Sequence[int], lines: Mapping[str, Sequence[float]], unit: str = "milliseconds") -> None:
    """Waits against the token budget of a step, both axes by doublings. lines: what is waited for -> one a budget."""
    _, axis = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for color, (name, values) in zip((PREFILL, DECODE), lines.items(), strict=False):
        axis.plot(budgets, values, "o-", color=color, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    plots.log_scale(axis)
    axis.set(xlabel="token budget of a step", ylabel=unit)
    axis.legend(fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def waits(policies: Mapping[str, Sequence[tuple[int, int, bool]]]) -> None:
    """Draw how long each request waited for its first token. policies: title -> (arrival, wait, is long) of each."""
    _, axes = plt.subplots(1, len(policies), figsize=(11, 2.9), sharey=True, layout="constrained")
    for axis, (title, points) in zip(axes, policies.items(), strict=True):
        for long, color, label in ((False, COLORS[5], "short prompts"), (True, COLORS[4], "long prompts")):
            mine = [(came, wait) for came, wait, is_long in points if is_long == long]
            axis.vlines(*zip(*((came, 0, wait) for came, wait in mine), strict=True), color=color, linewidth=1)
            axis.plot(*zip(*mine, strict=True), "o", color=color, markersize=4, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("arrived before step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("steps to the first token")
    axes[0].legend(fontsize=9)


def worth(found: Sequence[Mapping[str, Any]]) -> None:
    """Batching records, one below the other: static and in-flight batching, whole and chunked prompts."""
    _, axes = plt.subplots(len(found), 2, figsize=(11, 3.7 * len(found)), layout="constrained", squeeze=False)
    for record, (left, right) in zip(found, axes, strict=True):
        plots.batching(record, left)
        plots.chunking(record, right)


def ablation(record: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Settings of an ablation record, group by group."""
    plots.ablation(record, groups=groups)


def lanes(pictures: Mapping[str, int], python: float, device: float, steps: int = 5) -> None:
    """Python prepares steps, the device runs them. pictures: title -> how many steps are launched ahead.

    python, device: milliseconds that each needs for a step.
    """
    _, axes = plt.subplots(
        len(pictures), 1, figsize=(10, 1.35 * len(pictures) + 0.3), sharex=True, layout="constrained"
    )
    for axis, (title, ahead) in zip(axes, pictures.items(), strict=True):
        ready = 0.0
        ends: list[float] = []
        for step in range(steps):
            read = ends[step - 1 - ahead] if step > ahead else 0.0  # Python waits for this step's tokens
            begin = max(ready, read)
            ready = begin + python
            start = max(ready, ends[-1] if ends else 0.0)
            ends.append(start + device)
            shade = COLORS[step % len(COLORS)]
            axis.barh(0, python, left=begin, height=0.8, color=shade, alpha=0.45)
            axis.barh(1, device, left=start, height=0.8, color=shade)
            axis.text(start + device / 2, 1, f"step {step}", ha="center", va="center", fontsize=9, color="white")
        axis.axvline(ends[-1], color="black", linewidth=1)
        axis.set_yticks([0, 1], ["Python", "device"])
        axis.invert_yaxis()
        axis.set_title(f"{title}: {ends[-1]:.1f} ms for {steps} steps", fontsize=10, loc="left")
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds")
