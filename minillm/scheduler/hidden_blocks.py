"""Free the blocks that a sliding window has left behind.  Lesson 09."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .scheduler import Scheduler


def release_hidden(self: "Scheduler", rows: np.ndarray) -> None:
    """Free the blocks that no later query of these rows can see, once the steps in flight have been read."""
    if not self.tables.slides:
        return
    if self.speculation is not None:
        # What a row's drafts hide comes back into sight if they are wrong.
        rows = rows[~self.speculation.unread[rows]]
    rows = rows[(self.tables.hidden(self.computed[rows]) > self.tables.gone[:, rows]).any(axis=0)]
    for row in rows:
        self._register(self.requests[row], int(self.computed[row]))  # what others may still find
    holders, blocks = self.tables.expire(rows, self.computed[rows])
    if len(blocks):
        self.fence.hold(self.newest, blocks.tolist())
        self.trace.release(holders, blocks, self.newest)
        self._open_fence()
