"""Connections are spread over workers: one that has more lets the others accept first."""

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx
import pytest

from minillm.server import limits, running
from minillm.server.shares import Shares
from minillm.server.worker.connections import Acceptor
from tests.waiting import TIMEOUT, async_wait_until


@pytest.fixture
def shares():
    made = Shares.create(3)
    yield made
    made.close()


def test_a_worker_is_ahead_if_another_that_runs_has_fewer(shares):
    shares.set(0, 2)
    assert not shares.ahead(0), "the others do not run"
    shares.set(1, 2)
    assert not shares.ahead(0)
    shares.set(1, 1)
    assert shares.ahead(0) and not shares.ahead(1)
    shares.leave(1)
    assert not shares.ahead(0)


def test_the_memory_is_that_of_the_descriptor(shares):
    other = Shares(shares.file, 3)
    other.set(2, 7)
    shares.set(1, 9)
    assert shares.ahead(1) and not other.ahead(2)
    other._open.release()
    other._memory.close()


@asynccontextmanager
async def acceptors(shares: Shares, count: int):
    """Acceptors of one listener in this event loop, and the connections of each."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    taken: list[list[asyncio.Transport]] = [[] for _ in range(count)]

    class Counted(asyncio.Protocol):
        def __init__(self, slot: int):
            self.slot = slot

        def connection_made(self, transport):
            taken[self.slot].append(transport)

        def connection_lost(self, error):
            made[self.slot].freed()

    made = [
        Acceptor(listener.dup(), lambda slot=slot: Counted(slot), None, (shares, slot))  # type: ignore[misc]
        for slot in range(count)
    ]
    try:
        yield listener.getsockname()[1], made, taken
    finally:
        for each in made:
            each.close()
        for transports in taken:
            for transport in transports:
                transport.abort()
        listener.close()
        await asyncio.sleep(0)


def test_a_burst_is_spread_evenly(shares, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_START", 10**9)  # one that is ahead accepts nothing

    async def everything() -> None:
        async with acceptors(shares, 3) as (port, _, taken), asyncio.timeout(TIMEOUT):
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
            await async_wait_until(lambda: sum(map(len, taken)) >= 28)
            assert max(map(len, taken)) - min(map(len, taken)) <= 1
            for _, writer in clients:
                writer.close()

    asyncio.run(everything())


def test_one_that_is_ahead_accepts_if_the_others_do_not(shares):
    shares.set(2, 0)  # a worker that hangs

    async def everything() -> None:
        async with acceptors(shares, 2) as (port, _, taken), asyncio.timeout(TIMEOUT):
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
            await async_wait_until(lambda: sum(map(len, taken)) == 6)
            for _, writer in clients:
                writer.close()

    asyncio.run(everything())


def test_a_closed_acceptor_and_lost_connections_count_no_more(shares):
    async def everything() -> None:
        async with acceptors(shares, 2) as (port, made, taken), asyncio.timeout(TIMEOUT):
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            await async_wait_until(lambda: sum(map(len, taken)) == 4)
            made[0].close()
            assert not shares.ahead(1), "the other accepts no more"
            for _, writer in clients:
                writer.close()
            await async_wait_until(lambda: shares._open.tolist() == [-1, 0, -1])

    asyncio.run(everything())


def test_the_workers_of_a_server_count_their_connections(engine):
    with (
        running(engine, workers=2, keep_alive_timeout=TIMEOUT) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as one,
    ):
        fleet = server.workers
        assert fleet._shares is not None
        clients = [httpx.Client(base_url=server.url, timeout=TIMEOUT) for _ in range(9)]
        try:
            for each in [one, *clients]:
                assert each.get("/health").status_code == 200
            counts = fleet._shares._open.tolist()
            assert sum(counts) == 10 and min(counts) >= 0, counts
        finally:
            for each in clients:
                each.close()
