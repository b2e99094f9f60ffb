"""Let waiting requests join the running ones in the next step.  Lesson 10."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minillm.request import Request

if TYPE_CHECKING:
    from .scheduler import Scheduler


@dataclass(frozen=True, eq=False)
class Refusal:
    """The reason why the first waiting request does not join."""

    by: str  # "admits" or "share", which are the policy's, "blocks", or "adapters", whose slots are all in use
    lacking: tuple[Request | None, int] = (None, 0)  # a request that lacks blocks, and how many it needs


def admit(self: "Scheduler", budget: int) -> tuple[list[tuple[int, int]], Refusal | None]:
    """Move waiting requests into rows while budget, rows and blocks last.

    Returns (row, tokens to run) of each, and why the next one was kept out, None if none was.
    """
    admitted: list[tuple[int, int]] = []
    if not self.policy.admits(len(self.order)):
        return admitted, Refusal("admits")
    most = -(-len(self.waiting) // self.stages)  # the next steps admit the others: see `turns`
    while self.waiting and budget > 0 and self._free_rows and len(admitted) < most:
        request = self.waiting[0]
        if not self.slots.has_slot_for(request.load):
            return admitted, Refusal("adapters")
        # Rows take a block every block_size steps: leave what they are expected to take in the next one.
        reserve = -(-len(self.order) // self.block_size) * self.tables.groups
        if request is self._lacking[0] and self._lacking[1] + reserve > self.pool.available:
            return admitted, Refusal("blocks", self._lacking)  # a prefix lookup costs more than a step of decodes
        known, shared = len(request.known), self._find_prefix(request)
        start = len(shared[0]) * self.block_size
        computed, all_known = np.array([[start], [known]], np.int32)
        count = int(self.policy.share(self.tables.pending(computed, all_known), budget)[0])
        if count == 0:
            return admitted, Refusal("share")
        cached = [block for blocks in shared for block in blocks if block >= 0]
        held, needed = self.tables.needed(known, shared, count)
        needed += self.pool.unreferenced(cached)
        if needed + reserve > self.pool.available:
            return admitted, Refusal("blocks", (request, needed))
        self.pool.share(cached)
        del self.waiting[0]
        row = self._occupy(request, start)
        blocks = self.tables.occupy(row, shared, held, self.pool)
        self.trace.admit(self, request, blocks)
        self.prefix_hits += start
        self.prefix_queries += known if self._shares(request) else 0
        budget -= count
        admitted.append((row, count))
        # The next to be admitted may share what this step is going to write.
        self._register(request, start + count)
    return admitted, None
