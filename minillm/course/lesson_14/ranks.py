"""Ranks that are threads of this process, with the exchanges of the engine's ranks.  Lesson 14."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Stuck(AssertionError):
    """All ranks wait for messages that none of them will send."""


class Network:
    """The messages between ranks. A rank that waits in vain ends all of them."""

    def __init__(self, size: int):
        self.size = size
        self._sent: dict[tuple[int, int], deque[Tensor]] = {}
        self._waiting: dict[int, int] = {}  # rank -> the rank whose message it waits for
        self._running = size
        self._changed = threading.Condition()
        self._problem: str | None = None

    def send(self, x: Tensor, source: int, to: int) -> None:
        with self._changed:
            self._sent.setdefault((source, to), deque()).append(x.clone())
            self._changed.notify_all()

    def receive(self, source: int, to: int) -> Tensor:
        with self._changed:
            self._waiting[to] = source
            while not self._sent.get((source, to)):
                self._find_stuck()
                if self._problem is not None:
                    raise Stuck(self._problem)
                self._changed.wait()
            del self._waiting[to]
            return self._sent[source, to].popleft()

    def leave(self) -> None:
        """A rank has ended."""
        with self._changed:
            self._running -= 1
            self._find_stuck()

    @property
    def unread(self) -> int:
        """Return how many messages were sent and never received."""
        return sum(map(len, self._sent.values()))

    def _find_stuck(self) -> None:
        in_vain = {to: source for to, source in self._waiting.items() if not self._sent.get((source, to))}
        if in_vain and len(in_vain) == self._running:
            to, source = min(in_vain.items())
            self._problem = f"rank {to} of {self.size} waits for a message from rank {source}, which sends it none"
            self._changed.notify_all()


class ThreadRank:
    """One of several ranks: what the engine gives to `all_reduce` and `sharded_argmax`.

    sent: numbers that it has sent to others. rounds: messages that it has waited for, one after the other.
    """

    def __init__(self, rank: int, network: Network):
        self.rank, self.size, self._network = rank, network.size, network
        self.sent = self.rounds = 0

    def exchange(self, x: Tensor, to: int, source: int) -> Tensor:
        """Send x to rank `to`, and return what rank `source` sends to this one. Both are other ranks."""
        for each in (to, source):
            if not 0 <= each < self.size:
                raise AssertionError(f"there is no rank {each}: {self.size} ranks are 0 to {self.size - 1}")
            if each == self.rank:
                raise AssertionError(
                    f"rank {each} of {self.size} exchanges with itself: it has its own x already, so begin with the "
                    "next rank, at step 1"
                )
        self.sent += x.numel()
        self.rounds += 1
        self._network.send(x, self.rank, to)
        return self._network.receive(source, self.rank)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x [..., n], in the order of ranks: [..., size * n]."""
        found = {self.rank: x}
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            found[source] = self.exchange(x, (self.rank + step) % self.size, source)
        return torch.cat([found[rank] for rank in range(self.size)], -1)


class Together(NamedTuple):
    """The results of ranks, in their order, and the ranks."""

    results: list[Any]
    ranks: list[ThreadRank]
    unread: int


def together(function: Callable[[Any, ThreadRank], Any], inputs: Sequence[Any]) -> Together:
    """Call function(x, rank) on a rank for each of these inputs, all at once. Raises what the first of them raises."""
    network = Network(len(inputs))
    ranks = [ThreadRank(number, network) for number in range(len(inputs))]
    results: list[Any] = [None] * len(ranks)
    errors: dict[int, BaseException] = {}

    def run(rank: ThreadRank) -> None:
        try:
            results[rank.rank] = function(inputs[rank.rank], rank)
        except BaseException as error:
            errors[rank.rank] = error
        finally:
            network.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [errors[rank] for rank in sorted(errors)]
    for error in [each for each in raised if not isinstance(each, Stuck)] or raised:
        raise error
    return Together(results, ranks, network.unread)
