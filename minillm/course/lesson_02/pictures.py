"""Lesson 02's pictures: its diagrams (a decoder, shared heads, masks, weights) and its charts.

What a chart shows is computed in the lesson's cells. A figure is left open for `describe`.
"""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

from minillm.advice import sizing
from minillm.model.config import ModelConfig
from minillm.model.decoder import Model

from . import probes

QUERY, KEY, PLAIN, CACHED = "#4c78a8", "#f58518", "#e8e8e8", "#54a24b"


def decoder(config: ModelConfig, tokens: int) -> None:
    """One pass of `tokens` tokens: a layer's two branches leave the residual stream and are added to it again."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads, config.num_kv_heads
    _, axis = plt.subplots(figsize=(11, 3.6), layout="constrained")

    def box(x: float, y: float, text: str, color: str = PLAIN) -> None:
        style = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "gray"}
        axis.text(x, y, text, ha="center", va="center", bbox=style, fontsize=11, zorder=3)

    def arrow(start: tuple[float, float], end: tuple[float, float], color: str = "gray") -> None:
        axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.5}, zorder=1)

    axis.plot([0.2, 11.4], [0, 0], color=QUERY, linewidth=5, zorder=0)
    axis.text(6.1, 0.16, f"residual stream: [{tokens}, {hidden}]", ha="center", va="bottom", fontsize=11, color=QUERY)
    frame = plt.Rectangle((1.05, -1.95), 9.75, 2.5, facecolor="#f6f6f6", edgecolor="silver", zorder=-1)
    axis.add_patch(frame)
    axis.text(6.1, 0.65, f"one layer; there are {config.num_layers}, one after the other", ha="center", fontsize=11)
    axis.text(0.2, 0.33, f"token ids\n[{tokens}]", ha="center", va="bottom", fontsize=10, color="dimgray")
    box(0.2, 0, "embed-\nding")
    attention = [(1.6, "norm"), (2.75, "q, k, v"), (3.95, "rotary"), (5.2, "attention"), (6.45, "output\nmatrix")]
    mlp = [(7.65, "norm"), (8.85, "gated\nMLP")]
    for steps, end in ((attention, 7.05), (mlp, 10.2)):
        first = steps[0][0]
        arrow((first - 0.15, 0), (first - 0.15, -0.85))
        for (left, _), (right, name) in itertools.pairwise(steps):
            half_width = 0.1 + 0.045 * max(map(len, name.split("\n")))
            arrow((left, -1.1), (right - half_width, -1.1))
        for x, name in steps:
            box(x, -1.1, name, KEY if name == "attention" else PLAIN)
        arrow((steps[-1][0], -1.1), (end, -1.1))
        arrow((end, -1.1), (end, -0.13))
        axis.text(end, 0, "+", ha="center", va="center", fontsize=15, zorder=4)
        axis.scatter([end], [0], s=330, facecolor="white", edgecolor=QUERY, linewidth=2, zorder=3)
    shapes = {
        2.75: f"q [{tokens}, {queries}, {head_dim}]\nk, v [{tokens}, {keys}, {head_dim}]",
        5.2: f"[{tokens}, {queries}, {head_dim}]",
        8.85: f"[{tokens}, {hidden}]",
    }
    for x, shape in shapes.items():
        axis.text(x, -1.5, shape, ha="center", va="top", fontsize=10, color="dimgray")
    box(11.4, 0, "norm")
    box(12.6, 0, "output\nhead")
    arrow((11.75, 0), (12.25, 0))
    axis.text(12.6, 0.36, f"logits\n[{config.vocab_size}]", ha="center", va="bottom", fontsize=10, color="dimgray")
    axis.set(xlim=(-0.4, 13.1), ylim=(-2.05, 0.95))
    axis.axis("off")


def shared_heads(heads: int, kinds: dict[str, int]) -> None:
    """Query heads above, KV heads below, and which reads which. kinds: title -> number of KV heads."""
    _, axes = plt.subplots(1, len(kinds), figsize=(11, 2.3), layout="constrained")
    for axis, (title, kv_heads) in zip(axes, kinds.items(), strict=True):
        group = heads // kv_heads
        below = [(head + 0.5) * group - 0.5 for head in range(kv_heads)]
        for head in range(heads):
            axis.plot([head, below[head // group]], [1, 0], color="lightgray", zorder=0)
        axis.scatter(range(heads), [1] * heads, s=130, color=QUERY)
        axis.scatter(below, [0] * kv_heads, s=130, marker="s", color=KEY)
        axis.set(ylim=(-0.45, 1.45), title=f"{title}: {kv_heads} KV head{'s' if kv_heads > 1 else ''}")
        axis.axis("off")
    dots = [plt.Line2D([], [], marker="o", linestyle="", markersize=10, color=QUERY, label="query head")]
    dots += [plt.Line2D([], [], marker="s", linestyle="", markersize=10, color=KEY, label="KV head")]
    axes[0].figure.legend(handles=dots, loc="outside lower center", ncols=2, fontsize=10)


def masks(pictures: dict[str, tuple[int, int, int]]) -> None:
    """Draw which keys queries see. pictures: title -> (queries, length, capacity); a query is a row, a key a column."""
    widths = [capacity for _, _, capacity in pictures.values()]
    width = 11 if len(pictures) > 1 else 5
    figure, axes = plt.subplots(1, len(pictures), figsize=(width, 3), width_ratios=widths, layout="constrained")
    patch = plt.matplotlib.patches.Patch
    legend = [patch(color=CACHED, label="visible"), patch(color=PLAIN, label="hidden")]
    if any(capacity > length for _, length, capacity in pictures.values()):
        legend.append(patch(facecolor="white", edgecolor="silver", hatch="xxx", label="free slot"))
    for axis, (title, (queries, length, capacity)) in zip(np.atleast_1d(axes), pictures.items(), strict=True):
        position = (length - queries + np.arange(queries))[:, None]
        key = np.arange(capacity)
        seen = np.where(key >= length, 2, np.where(key <= position, 1, 0))
        colors = plt.matplotlib.colors.ListedColormap([PLAIN, CACHED, "white"])
        axis.pcolormesh(seen, cmap=colors, vmin=0, vmax=2, edgecolors="white", linewidth=1)
        for slot in range(length, capacity):
            axis.fill_between(
                [slot, slot + 1], 0, queries, facecolor="none", edgecolor="silver", hatch="xx", linewidth=0
            )
        axis.set_yticks(np.arange(queries) + 0.5, [f"query at {at}" for at in position[:, 0]], fontsize=9)
        axis.set_xticks(np.arange(capacity) + 0.5, key, fontsize=9)
        axis.set(title=title, xlabel="key")
        axis.set_aspect("equal")
        axis.invert_yaxis()
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=9)


def attention_weights(pieces: Sequence[str], weights: np.ndarray, title: str) -> None:
    """One token's attention weights [heads, keys] over a text's pieces, as a table colored by weight."""
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    picture = axis.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for head, key in np.ndindex(weights.shape):
        color = "white" if weights[head, key] > 0.5 else "black"
        axis.text(key, head, f"{weights[head, key]:.2f}", ha="center", va="center", fontsize=9, color=color)
    axis.set_xticks(range(len(pieces)), [repr(piece) for piece in pieces], fontsize=10)
    axis.set_yticks(range(len(weights)), [f"head {head}" for head in range(len(weights))])
    axis.set(title=title, xlabel="key of")
    figure.colorbar(picture, label="weight")


def work(model: Model, counted: Mapping[str, Mapping[int, int]]) -> None:
    """Multiply-adds of each step, and of all up to it, by the formula. counted: with or without -> {step: counted}."""
    steps = np.arange(1, 513)
    per_key = 2 * model.config.num_heads * model.config.head_dim * model.config.num_layers
    per_token, once = probes.numbers_in_layers(model), model.config.vocab_size * model.config.hidden_size
    _, (one, all_of_them) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for color, (name, points), queries in zip(("C1", "C2"), counted.items(), (steps, np.ones_like(steps)), strict=True):
        curve = queries * (per_token + steps * per_key) + once
        one.plot(steps, curve / 1e9, color=color, label=name)
        one.plot(list(points), [count / 1e9 for count in points.values()], "o", color=color)
        all_of_them.plot(steps, curve.cumsum() / 1e9, color=color, label=name)
    one.set(title="one more token", xlabel="tokens of context", ylabel="billion multiply-adds (log)", yscale="log")
    one.text(30, 0.04, "dots: counted\nlines: the formula", fontsize=9, color="dimgray")
    one.legend(loc="center right")
    all_of_them.set(title="all tokens so far, together", xlabel="tokens", ylabel="billion multiply-adds")
    all_of_them.legend()


def kept_per_token(models: Mapping[str, ModelConfig]) -> None:
    """Bars of kB of cache per token: with a model's KV heads, and with one for every query head."""
    actual = [sizing.kv_bytes_per_token(config) / 1e3 for config in models.values()]
    more = [config.num_heads / config.num_kv_heads for config in models.values()]
    as_mha = [each * factor for each, factor in zip(actual, more, strict=True)]
    _, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
    axis.barh(
        list(models),
        as_mha,
        facecolor="none",
        edgecolor="gray",
        linestyle="--",
        label="with a KV head for every query head (MHA)",
    )
    axis.barh(list(models), actual, color="C0", label="with its own KV heads")
    for row, (one, other) in enumerate(zip(actual, as_mha, strict=True)):
        instead = f" instead of {other:,.0f}" if other > one else ""
        axis.text(other + 20, row, f"{one:,.0f} kB{instead}", va="center")
    axis.invert_yaxis()
    axis.set(xlabel="kB of keys and values per token, bfloat16", xlim=(0, 1.4 * max(as_mha)))
    axis.legend(loc="upper right")


def gpus(pairs: Mapping[str, tuple[ModelConfig, float]], context: int) -> None:
    """GPUs divided for requests of `context` tokens, and how many longer and shorter ones fit.

    pairs: "model, GPU" -> (config, bytes of the GPU). Labels of the same model share a color.
    """
    divided = {label: sizing.fit(config, nbytes, context) for label, (config, nbytes) in pairs.items()}
    fitting: dict[str, dict[int, int]] = {}
    for label, (config, nbytes) in pairs.items():
        lengths = [1 << power for power in range(9, 18) if 1 << power <= config.max_model_len]
        requests = {tokens: sizing.fit(config, nbytes, tokens).requests for tokens in lengths}
        fitting |= {label: requests} if any(requests.values()) else {}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1.2, 1), layout="constrained")
    for row, size in enumerate(divided.values()):
        fits = size.weight_bytes <= size.usable_bytes
        parts = (size.weight_bytes, size.cache_bytes, size.gpu_bytes - size.usable_bytes) if fits else ()
        for i, part in enumerate(parts):
            color = ("C0", "C2", "lightgray")[i]
            left.barh(row, part / 1e9, left=sum(parts[:i]) / 1e9, color=color)
        note = f"{size.requests:,} requests" if fits else f"weights of {size.weight_bytes / 1e9:.0f} GB do not fit"
        left.text(sum(parts) / 1e9 + 2, row, note, va="center", fontsize=9)
    left.set_yticks(range(len(divided)), divided, fontsize=9)
    left.set(ylim=(len(divided) - 0.4, -0.6))
    left.set(xlabel="GB", xlim=(0, 190))
    patch = plt.matplotlib.patches.Patch
    names = {"C0": "weights", "C2": "KV cache", "lightgray": "not used"}
    left.legend(handles=[patch(color=color, label=name) for color, name in names.items()], fontsize=9)
    left.set_title(f"requests of {size.context:,} tokens")
    models = list(dict.fromkeys(label.split(",")[0] for label in fitting))
    devices = list(dict.fromkeys(label.split(", ")[1] for label in fitting))
    for label, points in fitting.items():
        model, device = label.split(", ")
        style = ("-", "--")[devices.index(device)]
        color = ("C0", "C1", "C3")[models.index(model)]
        right.plot(points.keys(), points.values(), style, color=color, label=label)
    ticks = sorted({tokens for points in fitting.values() for tokens in points})[::2]
    right.set(xlabel="tokens of a request", ylabel="requests that fit", xscale="log", yscale="log")
    right.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    right.set_title("longer requests, fewer fit")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize=9)


def intensities(requests: Sequence[int], curves: dict[str, Sequence[float]], ridge: float, cache_alone: float) -> None:
    """Operations per byte of decode steps by the number of requests; curves: label -> as many values as fit."""
    figure, axis = plt.subplots(figsize=(10, 3.2), layout="constrained")
    for label, values in curves.items():
        axis.plot(requests[: len(values)], values, "o-", markersize=3, label=label)
    axis.axhline(ridge, color="gray", label="ridge of an H200: above it, arithmetic is the limit")
    axis.axhline(cache_alone, color="gray", linestyle=":", label="the cache alone")
    axis.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="operations per byte")
    figure.legend(loc="outside right upper", fontsize=9)


def rotations(config: ModelConfig, pairs: Sequence[int], scores: Sequence[float]) -> None:
    """Rotary embedding: pairs of numbers rotated to positions 0 to 4, and a score by distance."""
    names = "".join(chr(ord("A") + i) for i in range(len(pairs))) + "S"
    _, axes = plt.subplot_mosaic(
        [list(names)], figsize=(11, 2.5), width_ratios=[1] * len(pairs) + [2.2], layout="constrained"
    )
    for name, pair in zip(names, pairs, strict=False):
        axis = axes[name]
        for position in range(5):
            angle = position * config.rope_theta ** (-2 * pair / config.head_dim)
            axis.annotate("", (np.cos(angle), np.sin(angle)), (0, 0), arrowprops={"arrowstyle": "->", "color": QUERY})
            axis.text(1.15 * np.cos(angle), 1.15 * np.sin(angle), str(position), ha="center", va="center", fontsize=9)
        axis.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", title=f"pair {pair}")
        axis.axis("off")
    axes["S"].plot(scores, color=KEY)
    axes["S"].set(
        xlabel="distance between key and query", ylabel="q · k", title="the same query and key, farther apart"
    )
