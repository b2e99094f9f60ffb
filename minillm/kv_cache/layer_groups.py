"""Layer groups: layers that need the same tokens' keys and values share block tables.  Lesson 09.

A layer with a sliding window lets go of blocks that a layer without one keeps, so they cannot follow one table. Layers
are divided into groups with a table each, and a block belongs to one group at a time: it has room for as many layers as
a group has. All groups have the same number of layers, so that any block of the pool serves any group and memory moves
to whoever needs it (vLLM's hybrid KV cache manager does it likewise).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGroups:
    """Which layers share a block table.

    The kind of layer that is least frequent makes one group; the others are split into groups of that size, and a
    remainder is a group that uses a part of its blocks only: Gemma 3 1B's 22 local layers beside 4 global ones make 6
    groups, the last of 2 layers, so 2 of 28 places hold nothing. Layers of one kind only are one group.
    """

    windows: tuple[int | None, ...]  # of each group: tokens that its layers' queries see; None: all
    size: int  # layers that a block has room for
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in the group's blocks

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> "LayerGroups":
        """Groups for layers with these windows."""
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(windows):
            kinds.setdefault(window, []).append(layer)
        size = min(len(layers) for layers in kinds.values())
        of_group: list[int | None] = []
        places = [(0, 0)] * len(windows)
        for window, layers in kinds.items():
            for at, layer in enumerate(layers):
                places[layer] = len(of_group) + at // size, at % size
            of_group += [window] * -(-len(layers) // size)
        return cls(tuple(of_group), size, tuple(places))


def blocks_held(tokens: int, windows: Sequence[int | None], block_size: int, chunk: int = 1) -> int:
    """The most blocks that a request of `tokens` tokens holds at a time in groups with these windows.

    chunk: the most of its tokens that run in one step. Where the first of them looks back over its window and the last
    is written, with a block's boundary in the worst place, lie `window - 1 + chunk` tokens.
    """
    whole = -(-tokens // block_size)
    spans = (whole if window is None else (window + chunk + 2 * block_size - 3) // block_size for window in windows)
    return sum(min(whole, span) for span in spans)
