"""Choose how many replicas a model needs: by the tokens that wait, not by the requests that run.

A replica runs many requests at once, of very different lengths, so their number says little. What waits says that there
are too few replicas; that nothing waits does not say that there are too many, so that is decided by what runs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .router import ANSWER

WAITING = 4096.0  # tokens that may wait on each replica, as a default
ROOM = 0.7  # share of itself that a replica is to use when there is one less
UP, DOWN = 5.0, 60.0  # seconds for which more, or fewer, replicas must be needed
EVERY, LOOK_BACK = 2.0, 5.0  # seconds between reports; over which they are averaged


class ReplicaLoad(NamedTuple):
    """A replica's report. prompts: tokens of the prompts that wait. busy: share of its rows or blocks in use."""

    waiting: float
    prompts: float
    busy: float

    @classmethod
    def of(cls, stats: Mapping[str, float], rows: int) -> "ReplicaLoad":
        """Return the load of an engine that runs `rows` requests at once. stats: the engine's numbers."""
        used = 1 - stats["blocks_available"] / stats["blocks"] if stats["blocks"] else 0.0
        return cls(stats["waiting"], stats["waiting_tokens"], max(stats["running"] / rows, used))

    @property
    def tokens(self) -> float:
        """Return the tokens that wait, of prompts and, by estimate, of answers."""
        return self.prompts + ANSWER * self.waiting


def needed(loads: Sequence[ReplicaLoad], target: float = WAITING) -> int:
    """Return how many replicas there should be. loads: of those that there are. target: tokens to wait on each."""
    tokens = sum(each.tokens for each in loads)
    if tokens > target * len(loads):
        return math.ceil(tokens / target)
    if tokens == 0:
        return min(len(loads), max(math.ceil(sum(each.busy for each in loads) / ROOM), 1))
    return len(loads)


class ByTokens:
    """Ray Serve's autoscaling policy for a model. Serve keeps the bounds and the delays. target: see `needed`.

    Ray copies this module into its controller by value.
    """

    def __init__(self, target: float = WAITING):
        self.target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        first, *more = (metrics.get(name, {}) for name in ReplicaLoad._fields)
        known = [replica for replica in first if all(replica in each for each in more)]
        loads = [ReplicaLoad(first[replica], *(each[replica] for each in more)) for replica in known]
        if not loads or len(loads) < context.current_num_replicas:  # one that has not reported yet may be full
            return max(context.target_num_replicas, needed(loads, self.target) if loads else 0), {}
        return needed(loads, self.target), {}
