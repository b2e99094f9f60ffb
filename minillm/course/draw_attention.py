"""Lesson 02's pictures: its diagrams (a decoder, shared heads, masks, weights) and its charts.

What a chart shows is computed in the lesson's cells.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

from minillm.model.config import ModelConfig

QUERY, KEY, PLAIN, CACHED = "#4c78a8", "#f58518", "#e8e8e8", "#54a24b"


def decoder(config: ModelConfig, tokens: int) -> None:
    """One pass of `tokens` tokens, left to right, with the shapes of the tensors between the boxes."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads, config.num_kv_heads
    flow = [
        ("token\nids", f"[{tokens}]", PLAIN),
        ("embedding", f"[{tokens}, {hidden}]", PLAIN),
        ("norm", f"[{tokens}, {hidden}]", PLAIN),
        ("q, k, v", f"q [{tokens}, {queries}, {head_dim}]\nk, v [{tokens}, {keys}, {head_dim}]", PLAIN),
        ("rotary", "the same", PLAIN),
        ("attention", f"[{tokens}, {queries}, {head_dim}]", KEY),
        ("out, +", f"[{tokens}, {hidden}]", PLAIN),
        ("norm", f"[{tokens}, {hidden}]", PLAIN),
        ("gated\nMLP, +", f"[{tokens}, {hidden}]", PLAIN),
        ("norm", f"[{hidden}]", PLAIN),
        ("head", f"logits\n[{config.vocab_size}]", PLAIN),
    ]
    _, axis = plt.subplots(figsize=(11, 2.4), layout="constrained")
    for at, (name, shape, color) in enumerate(flow):
        box = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "gray"}
        axis.text(at, 0, name, ha="center", va="center", bbox=box, fontsize=9)
        axis.text(at, -0.62, shape, ha="center", va="top", fontsize=7, color="dimgray")
        if at:
            axis.annotate("", (at - 0.38, 0), (at - 0.62, 0), arrowprops={"arrowstyle": "->", "color": "gray"})
    axis.plot([1.55, 1.55, 8.45, 8.45], [0.5, 0.75, 0.75, 0.5], color="gray")
    axis.text(5, 0.85, f"one layer, {config.num_layers} times", ha="center", fontsize=9)
    axis.set(xlim=(-0.5, len(flow) - 0.5), ylim=(-1.2, 1.1))
    axis.axis("off")
    plt.show()


def shared_heads(heads: int, kinds: dict[str, int]) -> None:
    """Query heads above, KV heads below, and which reads which. kinds: title -> number of KV heads."""
    _, axes = plt.subplots(1, len(kinds), figsize=(11, 2), layout="constrained")
    for axis, (title, kv_heads) in zip(axes, kinds.items(), strict=True):
        group = heads // kv_heads
        below = [(head + 0.5) * group - 0.5 for head in range(kv_heads)]
        for head in range(heads):
            axis.plot([head, below[head // group]], [1, 0], color="lightgray", zorder=0)
        axis.scatter(range(heads), [1] * heads, s=130, color=QUERY)
        axis.scatter(below, [0] * kv_heads, s=130, marker="s", color=KEY)
        axis.set(ylim=(-0.45, 1.45), title=f"{title}: {kv_heads} KV head{'s' if kv_heads > 1 else ''}")
        axis.axis("off")
    axes[0].text(-0.6, 1.3, "query heads", fontsize=8, color=QUERY)
    axes[0].text(-0.6, -0.4, "KV heads", fontsize=8, color=KEY)
    plt.show()


def masks(pictures: dict[str, tuple[int, int, int]]) -> None:
    """Which keys queries see. pictures: title -> (queries, length, capacity); a query is a row, a key a column."""
    widths = [capacity for _, _, capacity in pictures.values()]
    _, axes = plt.subplots(1, len(pictures), figsize=(11, 2.6), width_ratios=widths, layout="constrained")
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
        axis.set_yticks(np.arange(queries) + 0.5, [f"position {at}" for at in position[:, 0]], fontsize=8)
        axis.set_xticks(np.arange(capacity) + 0.5, key, fontsize=8)
        axis.set(title=title, xlabel="key")
        axis.set_aspect("equal")
        axis.invert_yaxis()
    plt.show()


def attention_weights(pieces: Sequence[str], heads: dict[str, np.ndarray]) -> None:
    """Heat maps of weights [queries, keys] over a text's pieces. heads: title -> weights."""
    shown = [piece.replace(" ", "·") or "<bos>" for piece in pieces]
    _, axes = plt.subplots(1, len(heads), figsize=(4.3 * len(heads), 4), layout="constrained")
    for axis, (title, weights) in zip(np.atleast_1d(axes), heads.items(), strict=True):
        picture = axis.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axis.set_xticks(range(len(shown)), shown, rotation=60)
        axis.set_yticks(range(len(shown)), shown)
        axis.set(title=title, xlabel="looks at", ylabel="token")
    plt.colorbar(picture, ax=axes, shrink=0.7, label="weight")
    plt.show()


def work(steps: Sequence[int], curves: Mapping[str, np.ndarray], counted: Mapping[str, Mapping[int, int]]) -> None:
    """Multiply-adds of each step, and of all up to it. curves: name -> a value per step; counted: name -> {step: n}."""
    _, (one, all_of_them) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for color, (name, curve) in zip(("C1", "C2"), curves.items(), strict=True):
        one.plot(steps, curve / 1e9, color=color, label=name)
        one.plot(list(counted[name]), [count / 1e9 for count in counted[name].values()], "o", color=color)
        all_of_them.plot(steps, curve.cumsum(0) / 1e9, color=color, label=name)
    one.set(title="one more token", xlabel="tokens so far", ylabel="billion multiply-adds", yscale="log")
    one.text(30, 0.04, "dots: counted\nlines: the formula", fontsize=8, color="dimgray")
    all_of_them.set(title="all tokens up to there", xlabel="tokens", ylabel="billion multiply-adds")
    all_of_them.legend()
    plt.show()


def times(measured: dict[str, dict[int, float]], floor: float) -> None:
    """Milliseconds of one more token. measured: name -> {tokens so far: ms}."""
    _, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    for color, (name, points) in zip(("C1", "C2"), measured.items(), strict=True):
        axis.plot(list(points), list(points.values()), "o-", color=color, label=name)
    axis.axhline(floor, linestyle=":", color="gray", label="reading the weights once")
    axis.set(xlabel="tokens so far", ylabel="milliseconds for one more", yscale="log")
    axis.legend(fontsize=8)
    plt.show()


def kept_per_token(models: dict[str, tuple[float, float]]) -> None:
    """Bars of kB per token. models: name -> (as it is, with a KV head for every query head)."""
    actual, as_mha = zip(*models.values(), strict=True)
    _, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
    axis.barh(list(models), as_mha, facecolor="none", edgecolor="gray", linestyle="--", label="with all heads (MHA)")
    axis.barh(list(models), actual, color="C0", label="as it is")
    for row, (one, other) in enumerate(models.values()):
        more = f" in place of {other:,.0f}" if other > one else ""
        axis.text(other + 20, row, f"{one:,.0f} kB{more}", va="center")
    axis.invert_yaxis()
    axis.set(xlabel="kB of keys and values a token, bfloat16", xlim=(0, 1.4 * max(as_mha)))
    axis.legend(loc="upper right")
    plt.show()


def gpus(divided: dict, fitting: dict) -> None:
    """GPUs divided, and requests that fit. divided: label -> Sizing; fitting: label -> {tokens of a request: requests}.

    Labels of a model are "model, GPU"; those of the same model share a color.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1.2, 1), layout="constrained")
    for row, size in enumerate(divided.values()):
        fits = size.weight_bytes <= size.usable_bytes
        parts = (size.weight_bytes, size.cache_bytes, size.gpu_bytes - size.usable_bytes) if fits else ()
        for i, part in enumerate(parts):
            color = ("C0", "C2", "lightgray")[i]
            left.barh(row, part / 1e9, left=sum(parts[:i]) / 1e9, color=color)
        note = f"{size.requests:,} requests" if fits else f"weights of {size.weight_bytes / 1e9:.0f} GB do not fit"
        left.text(sum(parts) / 1e9 + 2, row, note, va="center", fontsize=8)
    left.set_yticks(range(len(divided)), divided, fontsize=8)
    left.set(ylim=(len(divided) - 0.4, -0.6))
    left.set(xlabel="GB: weights (blue), KV cache (green), left alone (gray)", xlim=(0, 190))
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
    right.set_title("up to each model's own limit")
    right.legend(fontsize=7)
    plt.show()


def intensities(requests: Sequence[int], curves: dict[str, Sequence[float]], ridge: float, keys_alone: float) -> None:
    """Operations per byte of decode steps by the number of requests; curves: label -> values."""
    _, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for label, values in curves.items():
        axis.plot(requests, values, "o-", markersize=3, label=label)
    axis.axhline(ridge, color="gray", label="an H200's ridge: above it, operations are the limit")
    axis.axhline(keys_alone, color="gray", linestyle=":", label="reading keys alone")
    axis.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="operations a byte")
    axis.legend(fontsize=7)
    plt.show()


def turning(angles: dict[str, Sequence[float]], scores: Sequence[float]) -> None:
    """Rotary embedding: pairs rotated by position, and a score by distance. angles: title -> an angle per position."""
    names = "".join(chr(ord("A") + i) for i in range(len(angles))) + "S"
    _, axes = plt.subplot_mosaic(
        [list(names)], figsize=(11, 2.3), width_ratios=[1] * len(angles) + [2.2], layout="constrained"
    )
    for name, (title, rotations) in zip(names, angles.items(), strict=False):
        axis = axes[name]
        for position, angle in enumerate(rotations):
            axis.annotate("", (np.cos(angle), np.sin(angle)), (0, 0), arrowprops={"arrowstyle": "->", "color": QUERY})
            axis.text(1.15 * np.cos(angle), 1.15 * np.sin(angle), str(position), ha="center", va="center", fontsize=7)
        axis.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", title=title)
        axis.axis("off")
    axes["S"].plot(scores, color=KEY)
    axes["S"].set(xlabel="distance of key and query", ylabel="score", title="the same query and key, further apart")
    plt.show()
