"""The embeddings of running requests' prompts, and which of them a step reads.  Lesson 10."""

import numpy as np

from minillm.prompts import Embeddings
from minillm.scheduler.step import NewRow, Step


class EmbeddedRows:
    """The embeddings of each row, on the host until a step runs them.

    A chunk of a prompt takes its own ones only, so they need no memory on the device besides a step's. A row's are kept
    until the last of them has run. If its request is preempted, it brings them again with its next row.
    """

    def __init__(self) -> None:
        self._of: dict[int, Embeddings] = {}

    def fill(self, new: NewRow) -> None:
        """Take the embeddings of a request that has just got a row, if it has any."""
        self._of.pop(new.row, None)
        if new.embeddings is not None:
            self._of[new.row] = new.embeddings

    def take(self, step: Step) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the tokens of a step that have embeddings: their indices in the batch [m], and these [m, hidden].

        None: it has no such tokens.
        """
        if not self._of:
            return None
        found = []
        first = np.cumsum(step.queries) - step.queries
        for row, begin, start, end in zip(
            step.rows.tolist(), first.tolist(), step.starts.tolist(), step.ends.tolist(), strict=True
        ):
            if (embeddings := self._of.get(row)) is not None:
                positions, values = embeddings.between(start, end)
                if len(positions):
                    found.append((positions + (begin - start), values))
                if end > embeddings.positions[-1]:
                    del self._of[row]
        if not found:
            return None
        return np.concatenate([at for at, _ in found]), np.concatenate([values for _, values in found])
