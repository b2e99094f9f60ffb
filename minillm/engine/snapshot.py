"""The state of an engine at one moment: rows, queue, blocks and counts, for those who watch it.  Lesson 99.

Taking a snapshot copies arrays and looks at a bounded number of blocks one by one; what costs more is computed from the
copies later, in another thread. It contains ids and counts, never a prompt's text or tokens.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .engine import Engine

FREE, CACHED, SHARED, LEAVING = -1, -2, -3, -4  # what a cell holds, if not the blocks of one row
_AFTER_ROWS = 1 << 32  # sorts what is no row after all rows
_LINE = 128  # blocks by which a map of a part of the pool grows, so that it does not change size with every block
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Copies of an engine's state between two steps."""

    at: float  # seconds, on the clock of time.perf_counter
    took: float  # seconds that the copy took
    stats: dict[str, int]  # `Engine.stats`
    generated: int  # tokens that requests got
    tokens_run: int  # tokens of prompts and outputs that were computed
    block_size: int
    ids: list[str]  # of the requests in the batch, oldest first; only the first `listed` have an entry, also below
    rows: np.ndarray  # [listed] the row of each
    computed: np.ndarray  # [listed] tokens in the cache
    confirmed: np.ndarray  # [listed] tokens of prompt and output so far
    prompt: np.ndarray  # [listed] tokens in the prompt
    limit: np.ndarray  # [listed] most tokens, prompt and output
    holders: np.ndarray  # [m] rows, and in `blocks` a block that each holds; all rows, listed or not
    blocks: np.ndarray  # [m]
    leaving: np.ndarray  # [k] blocks of ended requests that steps in flight may still use
    drawn: range  # the first block of each cell of the map; its step is the number of blocks in a cell
    cached: np.ndarray  # [cells] whether the first block of each cell is cached

    @classmethod
    def of(cls, engine: "Engine", cells: int, listed: int) -> "Snapshot":
        """Copy an engine's state; call it with the engine's lock held. cells: most cells in the map of blocks.

        A pool with more blocks than that is drawn in part, one block a cell, if the used ones are close together.
        Otherwise a cell stands for several blocks.
        """
        begun = time.perf_counter()
        scheduler = engine.scheduler
        rows, pool = scheduler.order[:listed], scheduler.pool
        holders, blocks = scheduler.tables.holdings(scheduler.order)
        leaving = np.array(scheduler.fence.blocks, np.int64)
        drawn = _drawn(np.concatenate([blocks, leaving]), pool.num_blocks, cells)
        ids = [request.request_id for row in rows if (request := scheduler.requests[row]) is not None]
        return cls(
            at=begun,
            stats=engine.stats(),
            generated=scheduler.generated,
            tokens_run=scheduler.tokens_run,
            block_size=scheduler.block_size,
            ids=ids,
            rows=rows.copy(),
            computed=scheduler.computed[rows],
            confirmed=scheduler.confirmed[rows],
            prompt=scheduler.prompt[rows],
            limit=scheduler.limit[rows],
            holders=holders,
            blocks=blocks,
            leaving=leaving,
            drawn=drawn,
            cached=np.array(pool.are_cached(drawn), bool),
            took=time.perf_counter() - begun,
        )

    def phases(self) -> list[str]:
        """PREFILL or DECODE of each listed row. A preempted request is in prefill until its tokens are cached again."""
        begins = (self.confirmed == self.prompt) | (self.computed < self.confirmed - 1)
        return [PREFILL if each else DECODE for each in begins]

    def blocks_held(self) -> list[int]:
        """Return how many blocks each listed row holds, in all layer groups."""
        counts = np.bincount(self.holders, minlength=int(self.rows.max(initial=0)) + 1)
        return counts[self.rows].tolist()

    def cells(self) -> tuple[list[int], list[int]]:
        """Return the map of blocks: what each cell holds, and how many of its blocks are used.

        A cell with used blocks holds its lowest row's number, or SHARED or LEAVING if no row alone holds a block in it.
        A cell without used blocks is FREE or CACHED, as its first block is. If a part of the pool is drawn, the map
        ends after the last block of that part that is not free.
        """
        start, per_cell = self.drawn.start, self.drawn.step
        owner = np.full(len(self.drawn) * per_cell, np.iinfo(np.int64).max)
        owner[self.leaving - start] = _AFTER_ROWS + LEAVING
        owner[self.blocks - start] = self.holders
        owner[np.bincount(self.blocks - start, minlength=len(owner)) > 1] = _AFTER_ROWS + SHARED
        by_cell = owner.reshape(-1, per_cell)
        used = (by_cell <= _AFTER_ROWS).sum(axis=1)
        first = by_cell.min(axis=1)
        held = np.where(first < _AFTER_ROWS + LEAVING, first, first - _AFTER_ROWS)
        unused = np.where(self.cached, CACHED, FREE)
        count = len(self.drawn)
        if count * per_cell < self.stats["blocks"]:
            taken = np.flatnonzero((used > 0) | self.cached)
            count = -(-(int(taken.max(initial=0)) + 1) // _LINE) * _LINE
        return np.where(used > 0, held, unused)[:count].tolist(), used[:count].tolist()


def _drawn(used: np.ndarray, total: int, cells: int) -> range:
    """Return the first block of each cell of a map with at most so many cells, of a pool with `total` blocks.

    used: blocks that have to be in it.
    """
    if total > cells:
        last = int(used.max(initial=0))
        start = 0 if last < cells else int(used.min()) // _LINE * _LINE
        if last < start + cells:
            return range(start, min(start + cells, total))
    return range(0, total, max(1, -(-total // cells)))
