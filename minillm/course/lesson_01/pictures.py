"""Lesson 01's pictures: tokens as colored boxes, counts, times, and vocabulary sizes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

PADDING, GAP = 0.7, 0.25  # a box is this much wider than its text, and this far from the next, in characters
CHARACTER, LINE = 0.098, 0.19  # inches


def draw_tokens(
    rows: dict[str, Sequence[str]],
    below: Sequence | None = None,
    red: Callable[[str, str], bool] = lambda before, token: False,
    wide: int = 100,
) -> None:
    """Draw each row (label -> tokens) as a line of boxes, broken after `wide` characters; a newline is drawn as ⏎.

    below: one text for each token, written under its box. red: which tokens are red, from (token before, token).
    """
    import matplotlib.pyplot as plt

    palette = plt.colormaps["Pastel1"](range(1, 9))
    boxes, labels, x, y = [], [], 0.0, 0.0
    line = 1.4 if below is None else 2.4
    for label, tokens in rows.items():
        labels.append((y, label))
        for count, (before, token) in enumerate(pairwise(["", *tokens])):
            shown, under = token.replace("\n", "⏎"), "" if below is None else str(below[count])
            width = max(len(shown), len(under)) + PADDING
            if x + width > wide:
                x, y = 0.0, y - line
            boxes.append((x, y, width, shown, under, "tomato" if red(before, token) else palette[count % len(palette)]))
            x += width + GAP
        x, y = 0.0, y - line
    reach = max((left + width for left, _, width, *_ in boxes), default=0)
    _, axis = plt.subplots(figsize=(CHARACTER * (reach + 14), LINE * (0.9 - y)))
    for top, label in labels:
        axis.text(-1, top, label, ha="right", va="center", fontsize=9)
    for left, top, width, shown, under, color in boxes:
        middle = left + width / 2
        axis.add_patch(plt.Rectangle((left, top - 0.58), width, 1.16, color=color))
        axis.text(middle, top, shown, ha="center", va="center", family="monospace", fontsize=9)
        axis.text(middle, top - 1.15, under, ha="center", va="center", fontsize=8, color="dimgray")
    axis.set(xlim=(-13, reach + 1), ylim=(y + line - (0.8 if below is None else 1.8), 0.8))
    axis.axis("off")


def counts(rows: Mapping[str, Mapping[str, int]]) -> None:
    """A group of bars for each text. rows: text -> unit -> how many."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    units = list(next(iter(rows.values())))
    for offset, unit in enumerate(units):
        places = [place + 0.27 * (offset - 1) for place in range(len(rows))]
        axis.bar_label(axis.bar(places, [row[unit] for row in rows.values()], 0.25, label=unit), fontsize=8)
    axis.set_xticks(range(len(rows)), rows)
    axis.margins(y=0.12)
    axis.set(ylabel="how many", title="Five short texts, measured in three units")
    axis.legend()


def times(rows: Mapping[str, Mapping[int, float]]) -> None:
    """A line per method. rows: method -> length of a word -> seconds."""
    import matplotlib.pyplot as plt

    _, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for (name, row), style in zip(rows.items(), ("o-", "s-"), strict=True):
        axis.loglog(list(row), [1e3 * each for each in row.values()], style, label=name)
    axis.set_xticks(list(row), [f"{length:,}" for length in row])
    axis.minorticks_off()
    axis.set(xlabel="letters without a space", ylabel="milliseconds", title="Time to merge one word")
    axis.legend()


def vocabularies(sizes: Sequence[int], covered: Sequence[float], costs: Mapping[str, Sequence[float]]) -> None:
    """Left: characters per token by vocabulary size. Right: weights read per character, relative to the least."""
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    left.semilogx(sizes, covered, "o-")
    left.set(ylabel="characters per token", title="The gain from more tokens", ylim=(0, None))
    for name, cost in costs.items():
        right.semilogx(sizes, [each / min(cost) for each in cost], "o-", label=name)
    right.set(ylabel="times the minimum", title="Weights read per character", ylim=(0.9, 3))
    right.legend()
    for axis in (left, right):
        axis.set_xticks([300, 1000, 3000, 10000, 30000], ["300", "1,000", "3,000", "10,000", "30,000"])
        axis.minorticks_off()
        axis.set_xlabel("tokens in the vocabulary")
