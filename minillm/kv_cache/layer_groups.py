"""Layer groups: layers that keep the keys and values of the same tokens share block tables.  Lesson 09.

A layer with a sliding window frees blocks that a layer without one keeps, so they cannot share a table. Layers are
divided into groups with one table each, and a block belongs to one group at a time. All groups have the same number of
layers, and a block has room for that many, so any group can use any block of the pool and no memory is reserved for one
group. vLLM's hybrid KV cache manager works the same way.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGroups:
    """Groups of layers that share a block table.

    The least frequent kind of layer forms one group. The others are split into groups of that size; a remainder forms a
    group that uses only a part of its blocks. Gemma 3 1B's 4 global layers form one group and its 22 local layers six,
    one of them with 2 layers, so room for 2 of 28 layers is unused. Layers of a single kind form one group.
    """

    windows: tuple[int | None, ...]  # for each group: tokens that its layers' queries see; None: all
    size: int  # layers that a block has room for
    of_layer: tuple[tuple[int, int], ...]  # for each layer: its group, and its index in the group's blocks

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> "LayerGroups":
        """Return the groups of layers with these windows."""
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(windows):
            kinds.setdefault(window, []).append(layer)
        size = min(len(layers) for layers in kinds.values())
        of_group: list[int | None] = []
        of_layer = [(0, 0)] * len(windows)
        for window, layers in kinds.items():
            for at, layer in enumerate(layers):
                of_layer[layer] = len(of_group) + at // size, at % size
            of_group += [window] * -(-len(layers) // size)
        return cls(tuple(of_group), size, tuple(of_layer))


def blocks_held(tokens: int, windows: Sequence[int | None], block_size: int, chunk: int = 1) -> int:
    """Return the most blocks that a request of `tokens` tokens holds at one time in groups with these windows.

    chunk: the most of its tokens that run in one step. From the first key that the first of them sees to the last that
    is written are `window - 1 + chunk` tokens, which may start and end anywhere in a block.
    """
    whole = -(-tokens // block_size)
    spans = (whole if window is None else (window + chunk + 2 * block_size - 3) // block_size for window in windows)
    return sum(min(whole, span) for span in spans)


def longest_held(blocks: int, windows: Sequence[int | None], block_size: int, chunk: int = 1) -> int:
    """Return the most tokens, in whole blocks, of a request that holds at most `blocks` of them, if there is such a
    limit.
    """
    fitting = range(1, blocks + 2)
    whole = bisect_right(fitting, blocks, key=lambda count: blocks_held(count * block_size, windows, block_size, chunk))
    return whole * block_size
