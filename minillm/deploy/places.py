"""The places that Ray Serve counts: one on a replica for each request that runs there.

Serve learns from them how busy a replica is, and waits for them before it ends one. A place takes Ray milliseconds to
reserve, so no request waits for it: it is reserved DELAY seconds after the request was submitted, if that still runs.
A place that its request does not need any more is kept for the next one, for KEEP seconds at most. So under steady load
hardly any is reserved.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from minillm.server.worker.tasks import Tasks

log = logging.getLogger(__name__)
DELAY = 0.05  # seconds: first tokens that come sooner have the processor for themselves
KEEP = 1.0  # seconds
ATTEMPT = 10.0  # seconds for a replica to answer
AT_ONCE = 4  # reservations on a replica

# Reserves a place on a replica for a worker, by its id, for as long as the block lasts. Gives the name of the one that
# the place is on, which is another one if that replica takes no requests any more.
Reserve = Callable[[str, str], AbstractAsyncContextManager[str]]


class _Replica:
    """The places on a replica. requests: how many run there; reserving: places that are asked for."""

    def __init__(self) -> None:
        self.requests, self.reserving = 0, 0
        self.at_once = asyncio.Semaphore(AT_ONCE)
        self.held: list[AsyncExitStack] = []
        self.spare: deque[tuple[float, AsyncExitStack]] = deque()  # until when each is kept; the first goes first

    @property
    def missing(self) -> int:
        return self.requests - len(self.held) - self.reserving


class HeldPlaces:
    """The places of one HTTP worker on the replicas of a model.

    worker: its id, by which a replica gives its places back if it is killed. silent: called with a replica that does
    not answer.
    """

    def __init__(self, reserve: Reserve, worker: str, silent: Callable[[str], object] = lambda replica: None):
        self._reserve, self._worker, self._silent = reserve, worker, silent
        self._replicas: defaultdict[str, _Replica] = defaultdict(_Replica)
        self._listed: Collection[str] = ()
        self._tasks = Tasks()

    def listed(self, names: Collection[str]) -> None:
        """Take note of all replicas that take requests from here. No place is kept on others.

        Those are about to end, or have given the places back, as this worker's connection to them broke.
        """
        self._listed = set(names)
        for name in list(self._replicas):
            self._settle(name)

    def take(self, name: str) -> None:
        """Count one more request on a replica."""
        replica = self._replicas[name]
        replica.requests += 1
        if replica.spare:
            replica.held.append(replica.spare.pop()[1])
        elif replica.missing > 0:
            asyncio.get_running_loop().call_later(DELAY, self._fill, name)

    def give(self, name: str) -> None:
        """Count one request less."""
        self._replicas[name].requests -= 1
        self._settle(name)

    def _fill(self, name: str) -> None:
        """Reserve what is missing."""
        for _ in range(self._replicas[name].missing if name in self._replicas else 0):
            replica = self._replicas[name]
            replica.reserving += 1
            self._tasks.start(self._enter(name))

    async def _enter(self, name: str) -> None:
        replica, place = self._replicas[name], AsyncExitStack()
        try:
            async with replica.at_once:
                if replica.requests > len(replica.held):
                    async with asyncio.timeout(ATTEMPT):
                        taken_on = await place.enter_async_context(self._reserve(name, self._worker))
                    if taken_on == name:
                        replica.held.append(place.pop_all())
        except TimeoutError:
            self._silent(name)
        except Exception as error:
            log.info("no place on replica %s was reserved: %s", name, error)
        finally:
            replica.reserving -= 1
            self._settle(name)
            await place.aclose()  # it is on another replica

    def _settle(self, name: str) -> None:
        """Keep the places that are not needed, and give back those that were kept long enough."""
        if (replica := self._replicas.get(name)) is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        while len(replica.held) > replica.requests:
            replica.spare.append((now + KEEP, replica.held.pop()))
            loop.call_later(KEEP, self._settle, name)
        while replica.spare and (replica.spare[0][0] <= now or name not in self._listed):
            self._tasks.start(replica.spare.popleft()[1].aclose())
        if not (replica.requests or replica.reserving or replica.held or replica.spare):
            del self._replicas[name]
