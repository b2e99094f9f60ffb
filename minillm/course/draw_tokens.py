"""Tokens as colored boxes.  Lesson 01."""

from collections.abc import Callable, Sequence
from itertools import pairwise

PADDING, GAP = 0.7, 0.25  # a box is this much wider than its text, and this far from the next, in characters
CHARACTER, LINE = 0.098, 0.19  # inches


def draw_tokens(
    rows: dict[str, Sequence[str]],
    below: Sequence | None = None,
    red: Callable[[str, str], bool] = lambda before, token: False,
    wide: int = 100,
) -> None:
    """Show each row (label -> tokens) as a line of boxes, broken after `wide` characters; a newline is drawn as ⏎.

    below: one text for each token, written under its box. red: which tokens to paint red, from (token before, token).
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
        axis.text(middle, top - 1.15, under, ha="center", va="center", fontsize=7, color="dimgray")
    axis.set(xlim=(-13, reach + 1), ylim=(y + line - (0.8 if below is None else 1.8), 0.8))
    axis.axis("off")
    plt.show()
