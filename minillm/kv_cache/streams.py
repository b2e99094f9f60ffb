"""Streams: requests that run past the model's context in constant memory.  Lesson 09.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2. A row keeps the blocks of the
first tokens, the sinks, and those of the newest; when it outgrows its room the oldest block behind the sinks is let go,
and the columns after it move up by one. So that a key may move, it is cached unturned, before its rotary embedding,
and attention turns it by its place in the row: positions are those in the cache, and never reach the context's end.

A token at position p is computed when max(0, p // block_size + 1 - room) blocks are gone. This depends on its position
alone, so a stream has the same keys and values whether it runs at once, in chunks, or again after preemption. The
price: behind the first `room` blocks a step takes a row no further than the end of a block, prompts included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.config import EngineConfig
from minillm.errors import ConfigError

from .block_pool import BlockPool
from .block_tables import BlockTables

# Most tokens of a stream, prompt and output. Rows keep their tokens, on host and device, 4 bytes each, and all rows
# have room for as many as the longest has: 1 GiB for 256 rows, once one of them is as long as this.
STREAM_TOKENS = 1 << 20


def missing(width: int, count: int) -> int:
    """How many columns to add to rows `width` tokens wide, for `count` tokens and one more; they double at least."""
    return 0 if count < width else max(width, count + 1 - width)


@dataclass(frozen=True)
class Stream:
    """What a row keeps, in blocks."""

    sinks: int  # the first
    window: int  # the newest full ones

    @property
    def room(self) -> int:
        """Most blocks that a row holds: those, and the one that is being filled."""
        return self.sinks + self.window + 1

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int, windows: Sequence[int | None]) -> "Stream | None":
        """What the options ask for; None: nothing. windows: of the model's layers. Raises ConfigError."""
        if config.attention_window is None or config.attention_sinks is None:
            return None
        if any(windows):
            raise ConfigError(
                "attention_sinks and attention_window are for models whose layers all see the whole context, and this "
                "one has layers with a sliding window; leave both out"
            )
        size = config.block_size
        stream = cls(-(-config.attention_sinks // size), -(-config.attention_window // size))
        if stream.room * size > max_model_len:
            fitting = (max_model_len // size - 1 - stream.sinks) * size
            way = f"attention_window={fitting} would fit" if fitting > 0 else "lower attention_sinks or block_size"
            raise ConfigError(
                f"attention_sinks={config.attention_sinks} and attention_window={config.attention_window} are "
                f"{stream.room} blocks of {size} tokens with the one being filled, more than max_model_len="
                f"{max_model_len}; {way}"
            )
        return stream


class StreamTables(BlockTables):
    """Block tables whose rows move up when they let go of a block: `gone` blocks behind the sinks have no column."""

    def __init__(self, rows: int, stream: Stream, block_size: int):
        super().__init__(rows, stream.room * block_size, block_size, (None,), 1)
        self.stream = stream
        self.slides = True
        self._moved: list[tuple[np.ndarray, np.ndarray]] = []

    def most(self, tokens: int) -> int:
        return min(self.count(tokens), self.stream.room)

    def hidden(self, computed: np.ndarray) -> np.ndarray:
        return np.maximum(computed // self.block_size + 1 - self.stream.room, 0)[None]

    def pending(self, computed: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Up to where the next block will be let go: within a step every key of a row has one place."""
        end = np.maximum(computed // self.block_size + 1, self.stream.room) * self.block_size
        return np.minimum(known, end) - computed

    def moved(self, rows: np.ndarray) -> np.ndarray:
        return self.gone[0, rows]

    def findable(self, row: int, full: int) -> int:
        """None any more once a block is gone: columns are not the prefix's blocks then, and see less than it did."""
        return 0 if self.gone[0, row] else full

    def of(self, row: int) -> np.ndarray:
        return self.blocks[0, row, : self.held[0, row] - self.gone[0, row]]

    def find_prefix(self, pool: BlockPool, keys: Sequence[bytes]) -> list[list[int]]:
        """As the base, and at least one block of a full row is left to compute, so that it has its place there."""
        return super().find_prefix(pool, keys[: self.stream.room - 1])

    def needed(self, known: int, shared: list[list[int]], count: int) -> tuple[np.ndarray, int]:
        held = self.most(known)
        return np.array([held]), held - len(shared[0])

    def let_go(self, rows: np.ndarray, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, last = self.stream.sinks, self.stream.room - 1
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
        """As they are now: a column may have changed more than once."""
        if not self._moved:
            return None
        rows, columns = (np.concatenate(each) for each in zip(*self._moved, strict=True))
        self._moved = []
        return rows, columns, self.blocks[:, rows, columns]

    def check(self, row: int, computed: int) -> None:
        held, gone = int(self.held[0, row]), int(self.gone[0, row])
        assert computed <= self.covered[row] == held * self.block_size, f"row {row}: tokens without a block"
        assert held - gone <= self.stream.room, f"row {row}: more blocks than a stream keeps"
        assert gone <= self.hidden(np.array([computed]))[0, 0], f"row {row}: a block went too early"
