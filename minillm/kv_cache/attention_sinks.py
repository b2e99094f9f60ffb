"""Streams: requests that run past the model's context in constant memory.  Lesson 09.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2. A row keeps the blocks of its
first tokens, the attention sinks, and of its newest tokens. When it has no room for another block, the oldest block
after the sinks is evicted, and the columns after it move up by one. Because keys move, they are cached before their
rotary embedding, and attention rotates them by their position in the row. So positions count tokens in the cache, and
never reach the end of the context.

When the token at position p is computed, max(0, p // block_size + 1 - max_blocks) blocks have been evicted. This
depends only on the position, so a stream has the same keys and values whether it runs at once, in chunks, or again
after preemption. The cost: after the first `max_blocks` blocks, no step computes tokens of a row, prompts included,
beyond the end of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.errors import ConfigError

from .block_pool import BlockPool
from .block_tables import BlockTables

# The most tokens of a stream, prompt and output. Host and device store the tokens of all rows, 4 bytes each, in arrays
# as wide as the longest row: 1 GiB for 256 rows if one of them has this many.
STREAM_TOKENS = 1 << 20


def missing(width: int, count: int) -> int:
    """Return how many columns to add to arrays of `width` columns to hold `count` + 1 tokens; at least double."""
    return 0 if count < width else max(width, count + 1 - width)


@dataclass(frozen=True)
class Stream:
    """The blocks that a row of a stream keeps."""

    sinks: int  # first blocks
    window: int  # newest full blocks

    @property
    def max_blocks(self) -> int:
        """Return the most blocks that a row holds: those, and the block that is being filled."""
        return self.sinks + self.window + 1

    @classmethod
    def of(
        cls,
        attention_sinks: int | None,
        attention_window: int | None,
        block_size: int,
        max_model_len: int,
        windows: Sequence[int | None],
    ) -> "Stream | None":
        """Round an engine's options, in tokens, up to blocks. None: its requests are no streams.

        windows: of the model's layers. Raises ConfigError if the model or its context does not allow the stream.
        """
        if attention_sinks is None or attention_window is None:
            return None
        if any(windows):
            raise ConfigError(
                "attention_sinks and attention_window are for models whose layers all see the whole context, and this "
                "one has layers with a sliding window; leave both out"
            )
        stream = cls(-(-attention_sinks // block_size), -(-attention_window // block_size))
        if stream.max_blocks * block_size > max_model_len:
            fitting = (max_model_len // block_size - 1 - stream.sinks) * block_size
            way = f"attention_window={fitting} would fit" if fitting > 0 else "lower attention_sinks or block_size"
            raise ConfigError(
                f"attention_sinks={attention_sinks} and attention_window={attention_window} are "
                f"{stream.max_blocks} blocks of {block_size} tokens with the one being filled, more than max_model_len="
                f"{max_model_len}; {way}"
            )
        return stream


class StreamTables(BlockTables):
    """Block tables whose columns move up when a row evicts a block: its `gone` evicted blocks have no columns."""

    def __init__(self, rows: int, stream: Stream, block_size: int):
        super().__init__(rows, stream.max_blocks * block_size, block_size, (None,), 1)
        self.stream = stream
        self.slides = True
        self._moved: list[tuple[np.ndarray, np.ndarray]] = []

    def most(self, tokens: int) -> int:
        return min(self.count(tokens), self.stream.max_blocks)

    def hidden(self, computed: np.ndarray) -> np.ndarray:
        return np.maximum(computed // self.block_size + 1 - self.stream.max_blocks, 0)[None]

    def pending(self, computed: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Stop at the next eviction, because each key of a row must keep its position within a step."""
        end = np.maximum(computed // self.block_size + 1, self.stream.max_blocks) * self.block_size
        return np.minimum(known, end) - computed

    def moved(self, rows: np.ndarray) -> np.ndarray:
        return self.gone[0, rows]

    def findable(self, row: int, full: int) -> int:
        """Return 0 after an eviction: the columns no longer hold the prefix, and their tokens saw fewer keys."""
        return 0 if self.gone[0, row] else full

    def of(self, row: int) -> np.ndarray:
        return self.blocks[0, row, : self.held[0, row] - self.gone[0, row]]

    def _columns(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((1, len(rows)), np.int32), self.held[:, rows] - self.gone[:, rows]

    def find_prefix(self, pool: BlockPool, keys: Sequence[bytes]) -> list[list[int]]:
        """As the base class, but leaves at least one block of a full row to compute, so that it has a column."""
        return super().find_prefix(pool, keys[: self.stream.max_blocks - 1])

    def needed(self, known: int, shared: list[list[int]], count: int) -> tuple[np.ndarray, int]:
        held = self.most(known)
        return np.array([held]), held - len(shared[0])

    def expire(self, rows: np.ndarray, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, last = self.stream.sinks, self.stream.max_blocks - 1
        assert (self.hidden(computed)[0] == self.gone[0, rows] + 1).all(), "a row ran past a block's end"
        dropped = self.blocks[0, rows, first]
        self.blocks[:, rows, first:last] = self.blocks[:, rows, first + 1 :]
        self._moved.append((np.repeat(rows, last - first), np.tile(np.arange(first, last, dtype=np.int32), len(rows))))
        self.gone[:, rows] += 1
        return rows, dropped

    def _enter(self, rows: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> None:
        columns = columns - self.gone[0, rows]
        self.blocks[:, rows, columns] = blocks
        self._moved.append((rows, columns))

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """As the base class, with the current entries: a column may have changed more than once."""
        if not self._moved:
            return None
        rows, columns = (np.concatenate(each) for each in zip(*self._moved, strict=True))
        self._moved = []
        return rows, columns, self.blocks[:, rows, columns]

    def check(self, row: int, computed: int) -> None:
        held, gone = int(self.held[0, row]), int(self.gone[0, row])
        assert computed <= self.covered[row] == held * self.block_size, f"row {row}: tokens without a block"
        assert held - gone <= self.stream.max_blocks, f"row {row}: more blocks than a stream keeps"
        assert gone <= self.hidden(np.array([computed]))[0, 0], f"row {row}: a block was evicted too early"
