"""Replicas without processes and without Ray: several hubs of one engine, each behind a port of its own."""

import socket
import threading
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress

from minillm.deploy import handshake
from minillm.deploy.replicas import ReplicatedEngine
from minillm.server.config import ServerConfig
from minillm.server.engine_side.hub import Hub
from minillm.server.worker.choice import Prompt
from tests.waiting import async_wait_until


class LocalReplica:
    """A hub of an engine, and the port that leads to it."""

    def __init__(self, engine, name: str, **options):
        self.name, self.hub = name, Hub(engine, "m", ServerConfig(log_level="critical", **options))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = handshake.Address(*self._listener.getsockname(), handshake.new_secret())
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with suppress(OSError, handshake.Stranger):
                    self.hub.connect(handshake.accept(sock, self.address.secret, self.name)[0])

    def kill(self):
        """End the replica as if its process were killed: its connections and its port close."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()  # a connection that it has just let in would stay open
        if self.hub.alive:
            self.hub.close()


class LocalRay:
    """What Ray is for a worker: it knows which replicas there are, and counts the places that are held on each."""

    def __init__(self, *replicas: LocalReplica):
        self.replicas = {each.name: each for each in replicas}
        self.held = Counter()

    @asynccontextmanager
    async def reserve(self, name, worker):
        name = name if name in self.replicas else next(iter(self.replicas), name)
        self.held[name] += 1
        try:
            yield name
        finally:
            self.held[name] -= 1

    @property
    def addresses(self):
        return {name: each.address for name, each in self.replicas.items()}


@contextmanager
def local_replicas(engine, count: int = 2, **options):
    """A `LocalRay` with so many replicas, named a, b, c; options: fields of `ServerConfig`."""
    made = [LocalReplica(engine, "abc"[place], **options) for place in range(count)]
    try:
        yield LocalRay(*made)
    finally:
        for each in made:
            each.kill()


@asynccontextmanager
async def connected(ray: LocalRay, **options):
    """An engine of all replicas, once it is connected to each of them; options: arguments of `ReplicatedEngine`."""
    replicated = ReplicatedEngine(ray.reserve, **options)
    replicated.listed(ray.addresses)
    await async_wait_until(lambda: len(replicated._replicas) == len(ray.replicas))
    try:
        yield replicated
        await async_wait_until(lambda: not homes(replicated))
        assert not replicated._requests
    finally:
        replicated.close()
    await async_wait_until(lambda: not replicated._tasks and not any(ray.held.values()))


def homes(replicated) -> list[str]:
    """The replicas that run requests, once for each."""
    return [name for name, each in replicated._replicas.items() for _ in each.requests]


async def collect(replicated, prompts, params, n=1, options=None, seen=lambda choice, delta: None, partly=False):
    """The completions of a request, by index; seen: called with each choice and delta."""
    ended = {}
    more = {} if options is None else {"options": options}
    async for choice, delta in replicated.stream(
        [each if isinstance(each, Prompt) else Prompt(list(each)) for each in prompts], params, n, partly=partly, **more
    ):
        seen(choice, delta)
        if delta.completion is not None:
            ended[choice.index] = delta.completion
    return ended
