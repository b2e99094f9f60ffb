"""Take snapshots of the engine, and show them as JSON for the page.  Lesson 99.

However many pages ask, the engine is copied at most once in PERIOD seconds, and less often if a copy takes long: copies
have at most 1 / PATIENCE of the engine's time. While nobody asks, nothing is copied.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future

from minillm.engine.async_llm import AsyncLLM
from minillm.engine.snapshot import CACHED, Snapshot

from ..engine_side.metrics import DRAFTED, Metrics

PERIOD = 0.2  # seconds
PATIENCE = 100
CELLS = 2048  # most cells in the map of blocks
LISTED = 64  # most rows of the batch
SHOWN = 24  # characters of a request's id
PERCENTILES = (50, 95, 99)


class EngineRoom:
    """Shows one server on the page. soon: runs a function on the hub's thread."""

    def __init__(self, engine: AsyncLLM, metrics: Metrics, soon: Callable[[Callable[[], None]], None]):
        self.engine, self.metrics, self._soon = engine, metrics, soon
        self._state: Future[str] | None = None  # the newest one, which may still be under way
        self._renew_at = 0.0  # on the clock of time.monotonic

    def state(self) -> Future[str]:
        """Return the engine's state as JSON, at most PERIOD seconds old when the step that runs has ended.

        Call it on the hub's thread, where the future gets its result. Raises EngineClosed.
        """
        if self._state is None or (self._state.done() and time.monotonic() >= self._renew_at):
            copied = self.engine.snapshot(CELLS, LISTED)
            state = self._state = Future()
            copied.add_done_callback(lambda _: self._soon(lambda: self._write(copied, state)))
        return self._state

    def _write(self, copied: Future[Snapshot], state: Future[str]) -> None:
        self._renew_at = time.monotonic() + PERIOD
        try:
            snapshot = copied.result()
            self._renew_at += max(0, PATIENCE * snapshot.took - PERIOD)
            text = json.dumps(self.describe(snapshot), separators=(",", ":"))
        except Exception as error:
            state.set_exception(error)
        else:
            state.set_result(text)

    def describe(self, snapshot: Snapshot) -> dict:
        """Return a snapshot and the newest latencies as an object. Times are in seconds.

        blocks.cells: the map, a number a cell: a row of the batch, or what `minillm.engine.snapshot` calls FREE (-1),
        CACHED (-2), SHARED (-3) and LEAVING (-4); blocks.filled: how many of a cell's `per_cell` blocks are used;
        blocks.first: the first block in the map; blocks.more: how many are free and cached outside of it.
        """
        stats, latency = snapshot.stats, (self.engine.engine.first_waits, self.metrics.between.recent)
        cells, filled = snapshot.cells()
        per_cell = snapshot.drawn.step
        more = max(0, stats["blocks"] - per_cell * len(cells))
        more_cached = stats["blocks_cached"] - cells.count(CACHED) if more else 0
        return {
            "model": self.metrics.model_name,
            "at": snapshot.at,
            "running": stats["running"],
            "waiting": stats["waiting"],
            "max_running": self.engine.config.max_num_seqs,
            "totals": {
                "steps": stats["steps"],
                "generated_tokens": snapshot.generated,
                "computed_tokens": snapshot.tokens_run,
                "preemptions": stats["preemptions"],
                "prefix_query_tokens": stats["prefix_query_tokens"],
                "prefix_hit_tokens": stats["prefix_hit_tokens"],
                **{name: stats[name] for name in DRAFTED if name in stats},
            },
            "blocks": {
                "total": stats["blocks"],
                "size": snapshot.block_size,
                "used": stats["blocks"] - stats["blocks_available"],
                "cached": stats["blocks_cached"],
                "free": stats["blocks_available"] - stats["blocks_cached"],
                "first": snapshot.drawn.start,
                "per_cell": per_cell,
                "cells": cells,
                "filled": filled if per_cell > 1 else None,
                "more": {"free": more - more_cached, "cached": more_cached},
            },
            "rows": _rows(snapshot),
            "latency": {
                name: recent.percentiles(*PERCENTILES)
                for name, recent in zip(("first_token", "between_tokens"), latency, strict=True)
            },
        }


def _rows(snapshot: Snapshot) -> list[dict]:
    columns = (snapshot.rows, snapshot.computed, snapshot.confirmed, snapshot.prompt, snapshot.limit)
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    entries = zip(snapshot.ids, snapshot.phases(), snapshot.blocks_held(), numbers, strict=True)
    return [
        {
            "id": name if len(name) <= SHOWN else name[: SHOWN - 1] + "…",
            "row": row,
            "phase": phase,
            "computed": min(computed, tokens),  # a step in flight may compute a token that has not been read
            "tokens": tokens,
            "prompt": prompt,
            "limit": limit,
            "blocks": blocks,
        }
        for name, phase, blocks, (row, computed, tokens, prompt, limit) in entries
    ]
