"""Check that a scheduler's rows and blocks add up, and say why nothing may run.  Lesson 10."""

from typing import TYPE_CHECKING

from minillm.kv_cache.block_pool import BlockPoolError

from .admission import Refusal
from .policies import PolicyError

if TYPE_CHECKING:
    from .scheduler import Scheduler


def check(self: "Scheduler") -> None:
    """Raise AssertionError unless every block and every row is accounted for."""
    running = [request for request in self.requests if request is not None]
    assert sorted(self.order.tolist()) == sorted(request.row for request in running), "order lost a row"
    tables = [self.tables.of(request.row).tolist() for request in running]
    self.pool.check(block for blocks in [*tables, self.fence.blocks] for block in blocks)
    rows = [r.row for r in running] + self.fence.rows + self._free_rows
    assert sorted(rows) == list(range(len(self.requests))), "a row is lost or counted twice"
    for request in running:
        row = request.row
        assert self.computed[row] <= self.known[row], f"row {row}: tokens out of order"
        assert self.confirmed[row] <= self.known[row] <= self.limit[row], f"row {row}: too many tokens"
        self.tables.check(row, int(self.computed[row]))
    assert all(request.row == -1 for request in self.waiting), "a waiting request holds a row"


def count_on_from(self: "Scheduler", before: "Scheduler") -> None:
    """Number steps and count events where another scheduler, of the same engine, ended."""
    self.newest = self.read = before.newest
    self.tokens_run, self.generated, self.preemptions = before.tokens_run, before.generated, before.preemptions
    self.prefix_queries, self.prefix_hits = before.prefix_queries, before.prefix_hits
    self.corrupted = before.corrupted
    if self.speculation is not None and before.speculation is not None:
        self.speculation.count_on_from(before.speculation)


def stuck(self: "Scheduler", refusal: Refusal | None) -> Exception:
    """Return the error to raise if work waits, nothing is in flight, and nothing may run."""
    refused_by = refusal.by if refusal is not None and len(self._runnable()) == 0 else "share"
    counts = f"nothing is in flight, {len(self.order)} requests have a row, {len(self.waiting)} wait"
    if refused_by == "blocks":
        return BlockPoolError(
            f"{_name(self.pool)} has lost blocks: {counts}, and only "
            f"{self.pool.available} of {self.pool.num_blocks} blocks are available"
        )
    return PolicyError(f"policy {_name(self.policy)}: {refused_by} lets nothing run; {counts}")


def _name(part: object) -> str:
    """Return a part's class name; for a user-supplied part not the wrapper's, but its own."""
    return getattr(part, "name", type(part).__name__)
