"""The pictures of lesson 02 that are diagrams: a decoder, heads that share keys, masks, weights of attention."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np

QUERY, KEY, PLAIN, CACHED = "#4c78a8", "#f58518", "#e8e8e8", "#54a24b"


def decoder(config, tokens: int) -> None:
    """One pass of `tokens` tokens, left to right, with the shape of what flows between the boxes."""
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
    """Query heads above, KV heads below, and who reads whom. kinds: title -> number of KV heads."""
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
    """What queries see. pictures: title -> (queries, length, capacity); a query is a row, a key a column."""
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
