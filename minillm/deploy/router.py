"""Choose a replica for each request: the one with the fewest tokens left to compute.

A router knows which prefix keys each replica should have in its cache, because it has seen which requests went where.
The keys are the engine's own (`prefix_keys`): equal keys mean equal tokens from the start, equal salts and adapters.

It needs no clock and no network, so `simulation` runs it in simulated time, next to the engine's scheduler.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LOAD = 0.25  # weight of a token that a replica computes for other requests
ANSWER = 128.0  # tokens that an answer is assumed to have until some have ended
RECENT = 64  # the mean length of answers follows that of about so many


class ReplicaState(NamedTuple):
    """A replica that may take a request, as a policy sees it. Tokens are the router's estimates."""

    replica: str
    load: float  # tokens to compute for the requests that run or wait there
    cached: int  # tokens of the prompt in its prefix cache
    prompt: int  # tokens of the prompt


# Returns the candidates, the best one first. It may leave out some.
Policy = Callable[[Sequence[ReplicaState]], Sequence[ReplicaState]]


def by_prefix_and_load(candidates: Sequence[ReplicaState]) -> list[ReplicaState]:
    """Prefer the fewest tokens to compute: the prompt's that are not cached, and those of other requests times LOAD.

    So a cached prefix attracts a request only while the replica's load exceeds the lowest one by less than 1 / LOAD
    times the tokens that the cache saves. A prefix in high demand cannot keep all of its requests on one replica: the
    others compute it too, and then share them.
    """
    return sorted(candidates, key=lambda each: (each.prompt - each.cached + LOAD * each.load, each.load))


def by_load(candidates: Sequence[ReplicaState]) -> list[ReplicaState]:
    """Prefer the lowest load, whatever is cached."""
    return sorted(candidates, key=lambda each: each.load)


@dataclass(frozen=True, eq=False)
class Routed:
    """A request on a replica. work: tokens that it adds to the replica's load."""

    replica: str
    work: float


class _Estimate:
    """A router's assumptions about a replica, whose cache has so many blocks."""

    def __init__(self, blocks: int):
        self.load, self.requests = 0.0, 0
        self.total = 0.0  # tokens of all requests that it ever got
        self._blocks = blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys of cached blocks; the first is evicted first

    def cached(self, keys: Iterable[bytes]) -> int:
        """Return how many of a prompt's blocks are cached, counted from its beginning."""
        count = 0
        for key in keys:
            if key not in self._known:
                break
            count += 1
        return count

    def drop(self, routed: Routed) -> None:
        """Take a request off the load."""
        self.requests -= 1
        self.load = self.load - routed.work if self.requests else 0.0  # no rest of rounding

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks are used. A prefix outlives what follows it, as in `BlockPool`."""
        for key in reversed(keys):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)


class Router:
    """Routes the requests for one model to its replicas.

    block_size: tokens in a block of the prefix cache. policy: puts the candidates in order.
    """

    def __init__(self, block_size: int, policy: Policy = by_prefix_and_load):
        self.block_size, self.policy = block_size, policy
        self._replicas: dict[str, _Estimate] = {}
        self._answer = ANSWER  # mean tokens of an answer

    def join(self, replica: str, blocks: int) -> None:
        """Add a replica with an empty prefix cache of so many blocks."""
        self._replicas[replica] = joined = _Estimate(blocks)
        joined.total = max((each.total for each in self._replicas.values()), default=0.0)

    def leave(self, replica: str) -> None:
        """Forget a replica."""
        self._replicas.pop(replica, None)

    def order(
        self,
        prompt: int,
        keys: Sequence[bytes] | Mapping[str, Sequence[bytes]],
        among: Collection[str],
        running: Mapping[str, int] = {},
    ) -> list[str]:
        """Return the replicas that may take a request, the best one first.

        prompt: its tokens; keys: those of its full blocks, or of each replica those that it has for them. among: the
        replicas to choose from; one that has not joined is left out. running: all requests on a replica, if others
        route some of them.
        """
        known = [(name, self._replicas[name]) for name in among if name in self._replicas]
        states = []
        for name, replica in sorted(known, key=lambda pair: pair[1].total):  # so that idle replicas take turns
            others = max(running.get(name, 0) - replica.requests, 0)
            load = replica.load + others * self._answer
            own = keys[name] if isinstance(keys, Mapping) else keys
            states.append(ReplicaState(name, load, self._cached(replica, prompt, own), prompt))
        return [each.replica for each in self.policy(states)]

    def begin(self, replica: str, prompt: int, keys: Sequence[bytes]) -> Routed:
        """Note that a request goes to a replica. The other arguments are those of `order`."""
        known = self._replicas[replica]
        routed = Routed(replica, prompt - self._cached(known, prompt, keys) + self._answer)
        known.load += routed.work
        known.total += routed.work
        known.requests += 1
        known.use(keys)
        return routed

    def end(self, routed: Routed, answer: int, keys: Sequence[bytes] = ()) -> None:
        """Note that a request has ended. answer: tokens that it generated; keys: those of prompt and answer."""
        self._answer += (answer - self._answer) / RECENT
        if (replica := self._replicas.get(routed.replica)) is not None:
            replica.drop(routed)
            replica.use(keys)

    def learn(self, replica: str, keys: Sequence[bytes]) -> None:
        """Note that another router has sent a request with these keys to a replica."""
        if (known := self._replicas.get(replica)) is not None:
            known.use(keys)

    def _cached(self, replica: _Estimate, prompt: int, keys: Sequence[bytes]) -> int:
        return min(replica.cached(keys) * self.block_size, prompt - 1)  # the engine computes at least one token
