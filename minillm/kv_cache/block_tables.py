"""Block tables: the blocks that each row holds in each layer group.  Lesson 09.

A group whose layers have a sliding window gets blocks as its tokens are computed, and frees a block as soon as no later
query can see it: the query at position p sees the keys from p - window + 1 on. The table keeps its entries of freed
blocks. Attention masks whatever those blocks hold by then, as it masks the unused end of the last block.
"""

from collections.abc import Sequence

import numpy as np

from .block_pool import BlockPool
from .layer_groups import blocks_held


class BlockTables:
    """Every row's table in every group, as numpy arrays. `take_changes` keeps the device's copy up to date.

    windows: for each group, the tokens that its queries see; None: all. chunk: most tokens of a row in one step.
    """

    def __init__(
        self, rows: int, max_model_len: int, block_size: int, windows: tuple[int | None, ...], chunk: int
    ) -> None:
        self.block_size, self.windows, self.chunk = block_size, windows, chunk
        self.groups = len(windows)
        self.slides = any(windows)
        self.blocks = np.zeros((self.groups, rows, self.count(max_model_len)), np.int32)
        self.held = np.zeros((self.groups, rows), np.int32)  # columns allocated so far
        self.gone = np.zeros((self.groups, rows), np.int32)  # how many of them, from the first, were freed
        self.covered = np.zeros(rows, np.int32)  # tokens that have a block in every group
        # Groups without a window get one that hides nothing, so that one formula serves all.
        self._reach = np.array([window or max_model_len + 1 for window in windows], np.int32)[:, None]
        self._changes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    # ---- arithmetic

    def count(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill in one group."""
        return -(-tokens // self.block_size)

    def most(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` tokens holds at one time, in all groups."""
        return blocks_held(tokens, self.windows, self.block_size, self.chunk)

    def hidden(self, computed: np.ndarray) -> np.ndarray:
        """Return how many of a row's first blocks no query from position `computed` [n] on can see: [groups, n]."""
        return np.maximum(computed + 1 - self._reach, 0) // self.block_size

    def pending(self, computed: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return the most tokens of rows [n] that may run in one step."""
        return known - computed

    def moved(self, rows: np.ndarray) -> np.ndarray | None:
        """Return by how many columns the blocks of these rows have moved up; None if blocks never move."""
        return None

    def findable(self, row: int, full: int) -> int:
        """Return how many of a row's first `full` blocks, all full, may be registered for prefix sharing."""
        return full

    def of(self, row: int) -> np.ndarray:
        """Return the blocks that a row holds, in all groups, in the order of their tokens."""
        if not self.slides:
            return self.blocks[:, row, : self.held[0, row]].T.ravel()
        columns = np.arange(self.held[:, row].max())[:, None]
        mine = (columns >= self.gone[:, row]) & (columns < self.held[:, row])
        return self.blocks[:, row, : len(columns)].T[mine]

    def holdings(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """List the blocks that these rows [n] hold: (rows [m], blocks [m]), a pair for each block of each row."""
        first, after = self._columns(rows)
        at, columns = _spans(first.ravel(), after.ravel())
        groups, indices = np.divmod(at, len(rows))
        holders = rows[indices]
        return holders, self.blocks[groups, holders, columns]

    def _columns(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns of the blocks that rows [n] hold: (first, one after the last), both [groups, n]."""
        return self.gone[:, rows], self.held[:, rows]

    # ---- rows come and go

    def find_prefix(self, pool: BlockPool, keys: Sequence[bytes]) -> list[list[int]]:
        """Return the blocks of the longest cached prefix that a row can continue from: [groups][blocks].

        A group with a window needs only the blocks that the next query sees; -1 stands for those before them.
        """
        cached: list[list[int]] = [[] for _ in self.windows]
        count = len(keys)
        for group, window in enumerate(self.windows):
            if window is None:
                cached[group] = pool.lookup(group_key(key, group) for key in keys[:count])
                count = len(cached[group])
        hidden = self.hidden(np.arange(count + 1) * self.block_size).tolist()
        group = 0
        while group < self.groups:
            if self.windows[group] is not None:
                first = hidden[group][count]
                back = pool.lookup(group_key(key, group) for key in reversed(keys[first:count]))
                if len(back) < count - first:  # a prefix must end at least a window after the missing block
                    count, group = count - len(back) - 1, 0
                    continue
                cached[group] = [-1] * first + back[::-1]
            group += 1
        return [blocks[:count] for blocks in cached]

    def blocks_of(self, pool: BlockPool, key: bytes) -> list[int]:
        """Return the cached or used blocks, of all groups, that hold the last block of the prefix `key`."""
        return [block for group in range(self.groups) for block in pool.lookup([group_key(key, group)])]

    def needed(self, known: int, shared: list[list[int]], count: int) -> tuple[np.ndarray, int]:
        """Compute what a request of `known` tokens needs if `count` of them run after those in `shared`.

        Returns the columns of each group's table [groups], and how many new blocks must be available: those for now and
        those that it will need later.

        A group without a window gets blocks for all known tokens, one with a window for the tokens of this step.
        """
        start, whole = len(shared[0]), self.count(known)
        if not self.slides:
            return np.full(self.groups, whole), (whole - start) * self.groups
        now = self.count(start * self.block_size + count)
        held = np.array([whole if window is None else now for window in self.windows])
        sharing = sum(block >= 0 for blocks in shared for block in blocks)
        return held, max(int(held.sum()) - start * self.groups, self.most(known) - sharing)

    def occupy(self, row: int, shared: list[list[int]], held: np.ndarray, pool: BlockPool) -> np.ndarray:
        """Give a new row its first blocks: those in `shared`, and new ones up to `held` [groups].

        Returns the row's blocks [groups, columns]; -1: none.
        """
        start, width = len(shared[0]), int(held.max())
        columns = np.arange(width, dtype=np.int32)
        blocks = np.full((self.groups, width), -1, np.int32)
        if start:
            blocks[:, :start] = shared
        if self.slides:
            fresh = (columns >= start) & (columns < held[:, None])
            blocks[fresh] = pool.allocate(int(fresh.sum()))
        else:
            new = pool.allocate(self.groups * (width - start))
            blocks[:, start:] = np.array(new, np.int32).reshape(self.groups, -1)
        self._enter(np.full(width, row, np.int32), columns, blocks)
        self.held[:, row], self.covered[row] = held, int(held.min()) * self.block_size
        if self.slides:
            self.gone[:, row] = (blocks[:, :start] < 0).sum(axis=1)
        return blocks

    def grow(
        self, rows: np.ndarray, ends: np.ndarray, pool: BlockPool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Allocate the blocks that rows [n] lack for their first `ends` [n] tokens.

        Returns (rows [m], columns [m], blocks [groups, m], with -1 if a group already has the block), or None, without
        allocating any, if there are too few.
        """
        columns, held = -(-ends // self.block_size), self.held[:, rows]
        if (held + 1 == columns).all():  # decoding: one block each, in every group
            if held.size > pool.available:
                return None
            blocks = np.array(pool.allocate(held.size), np.int32).reshape(held.shape)
            self._enter(rows, columns - 1, blocks)
            self.held[:, rows] += 1
            self.covered[rows] += self.block_size
            return rows, columns - 1, blocks
        at, span = _spans(held.min(axis=0), columns)
        new = span >= held[:, at]
        needed = int(new.sum())
        if needed > pool.available:
            return None
        blocks = np.full(new.shape, -1, np.int32)
        blocks[new] = pool.allocate(needed)
        self._enter(rows[at], span, blocks)
        self.held[:, rows] = held = np.maximum(held, columns)
        self.covered[rows] = held.min(axis=0) * self.block_size
        return rows[at], span, blocks

    def expire(self, rows: np.ndarray, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Remove the blocks that rows [n], with `computed` [n] tokens in the cache, no longer need.

        Returns (rows [m], blocks [m]); the caller releases the blocks.
        """
        gone = self.gone[:, rows]
        hidden = np.maximum(self.hidden(computed), gone)
        groups, at = np.nonzero(hidden > gone)
        span, columns = _spans(gone[groups, at], hidden[groups, at])
        self.gone[:, rows] = hidden
        holders = rows[at[span]]
        return holders, self.blocks[groups[span], holders, columns]

    def vacate(self, row: int) -> list[int]:
        """Clear a row's tables and return the blocks that it held; the caller releases them."""
        blocks = self.of(row).tolist()
        self.held[:, row] = self.gone[:, row] = self.covered[row] = 0
        return blocks

    # ---- the device's copy

    def _enter(self, rows: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> None:
        if self.slides:  # an entry that is not passed on is never read, or has its block already
            blocks = np.where(blocks < 0, self.blocks[:, rows, columns], blocks)
        self.blocks[:, rows, columns] = blocks
        self._changes.append((rows, columns, blocks))

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the entries that changed since the last call: rows [m], columns [m], blocks [groups, m]; None:
        none.
        """
        if not self._changes:
            return None
        rows, columns, blocks = zip(*self._changes, strict=True)
        self._changes = []
        return np.concatenate(rows), np.concatenate(columns), np.concatenate(blocks, axis=1)

    def check(self, row: int, computed: int) -> None:
        """Raise AssertionError unless a row holds all blocks that its `computed` tokens and its next query need."""
        assert computed <= self.covered[row] == self.held[:, row].min() * self.block_size, (
            f"row {row}: tokens without a block"
        )
        seen = self.hidden(np.array([computed]))[:, 0]
        assert (self.gone[:, row] <= seen).all(), f"row {row}: a block that its next query sees was freed"


def group_key(prefix: bytes, group: int) -> bytes:
    """Return a prefix's key in the pool, which has a block of its own for each group."""
    return prefix + bytes([group])


def _spans(first: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(i of each number, numbers): the ranges first[i] .. after[i] - 1 of all i, concatenated."""
    counts = after - first
    at = np.repeat(np.arange(len(first)), counts)
    return at, np.arange(len(at)) - (np.cumsum(counts) - counts - first)[at]
