"""What a scheduler finds out about itself: whether its books are in order, and why nothing runs.  Lesson 10."""

from typing import TYPE_CHECKING

from minillm.kv_cache.block_pool import BlockPoolError

from .policies import PolicyError

if TYPE_CHECKING:
    from .admission import Refusal
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


def stuck(self: "Scheduler", refusal: "Refusal | None") -> Exception:
    """Return the error to raise if work waits, nothing is in flight, and nothing may run."""
    refused_by = refusal.by if refusal is not None and len(self._runnable()) == 0 else "share"
    counts = f"{len(self.order)} requests have a row, {len(self.waiting)} wait"
    if refused_by == "blocks":
        return BlockPoolError(
            f"{_name(self.pool)} has lost blocks: nothing is in flight, {counts}, and only "
            f"{self.pool.available} of {self.pool.num_blocks} blocks are available"
        )
    return PolicyError(f"policy {_name(self.policy)}: {refused_by} lets nothing run; nothing is in flight, {counts}")


def _name(part: object) -> str:
    """A user-supplied part is known by its own class's name, not its wrapper's."""
    return getattr(part, "name", type(part).__name__)
