"""An engine's process and its door: who is let in, and what becomes of it when the process ends."""

import asyncio
import os
import signal
import socket
from contextlib import suppress

import pytest

from minillm.deploy import handshake
from minillm.deploy.replica import AT_ONCE, EngineDoor, ReplicaFailed
from minillm.deploy.scaling import ReplicaLoad
from minillm.request import SamplingParams
from minillm.server.config import ServerConfig
from minillm.server.engine_side.engine_process import packed
from minillm.server.worker.choice import Prompt
from minillm.server.worker.link import RemoteEngine
from tests.waiting import TIMEOUT, wait_until

pytestmark = pytest.mark.timeout(TIMEOUT)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def options(model, **more):
    engine = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4} | more
    config = ServerConfig(log_level="critical")
    return packed({"model": str(model), "profile": None, "name": "m", "engine": engine, "config": config})


@pytest.fixture(scope="module")
def door(model_directory):
    door = EngineDoor(options(model_directory), "a", "127.0.0.1")
    yield door
    door.close()


ME = handshake.new_worker()


def generate(door):
    async def work():
        sock = handshake.connect(door.address, "a", ME)
        sock.setblocking(False)
        engine = RemoteEngine()
        await engine.connect(sock)
        await engine.connected
        tokens = []
        async for _, delta in engine.stream([Prompt([5, 6, 7])], GREEDY):
            tokens += delta.token_ids
        return engine.facts, tokens

    return asyncio.run(work())


def test_a_worker_that_knows_the_secret_talks_to_the_engines_process(door, engine):
    facts, tokens = generate(door)
    assert (facts.name, facts.block_size) == ("m", 16) and facts.prefix_blocks > 0
    assert tokens == asyncio.run(engine.generate([5, 6, 7], GREEDY)).token_ids
    door.check()
    wait_until(lambda: any(family[0] == "minillm_generated_tokens" for family in door.counted))
    wait_until(lambda: door.stats)
    assert ReplicaLoad.of(door.stats, door.stats["rows"]) == ReplicaLoad(0, 0, 0)


def test_it_listens_only_where_it_is_told(door):
    assert door.address[0] == "127.0.0.1"


def test_strangers_neither_get_in_nor_keep_others_out(door):
    silent = [socket.create_connection(door.address[:2]) for _ in range(AT_ONCE - 1)]
    with pytest.raises((OSError, handshake.Stranger)):
        handshake.connect(door.address._replace(secret=handshake.new_secret()), "a", ME)
    assert generate(door)[1]
    for each in silent:
        each.close()
    assert generate(door)[1]


def test_more_strangers_than_that_have_to_leave_in_time(door, monkeypatch):
    monkeypatch.setattr(handshake, "SECONDS", 0.2)
    silent = [socket.create_connection(door.address[:2]) for _ in range(2 * AT_ONCE)]

    def let_in():
        with suppress(OSError):  # not in time: as workers do, it tries again
            return generate(door)[1]

    wait_until(let_in)
    for each in silent:
        each.close()


def test_it_knows_which_workers_are_connected(door):
    one, other = handshake.new_worker(), handshake.new_worker()
    first, again, another = (handshake.connect(door.address, "a", each) for each in (one, one, other))
    wait_until(lambda: door.workers >= {one, other})
    first.close()
    wait_until(lambda: door._connections[one] == 1)
    assert door.workers >= {one, other}
    another.close()
    wait_until(lambda: other not in door.workers)
    assert one in door.workers
    again.close()
    wait_until(lambda: one not in door.workers)


def test_an_engine_that_cannot_load_says_why(model_directory):
    with pytest.raises(ReplicaFailed, match="max_num_seqs"):
        EngineDoor(options(model_directory, max_num_seqs=0), "a", "127.0.0.1")


def test_an_engine_that_is_stuck_or_has_ended_is_noticed(model_directory):
    class Deaf(EngineDoor):
        """Hears no beat but the test's."""

        def _told(self, message):
            if message["op"] != "beat":
                super()._told(message)

    door = Deaf(options(model_directory), "a", "127.0.0.1", hang_timeout=1000)
    door.check()
    door._heard -= 2000
    with pytest.raises(ReplicaFailed, match="has been stuck for 2"):
        door.check()
    EngineDoor._told(door, {"op": "beat", "working": 2000.0, "counted": []})
    with pytest.raises(ReplicaFailed, match="stuck for 2000 s"):
        door.check()
    sock = handshake.connect(door.address, "a", ME)
    os.kill(door._child.process.pid, signal.SIGKILL)
    with sock:
        while sock.recv(1 << 16):  # after its first message, the connection ends
            pass
    wait_until(door._ended.is_set)
    with pytest.raises(ReplicaFailed, match="has ended"):
        door.check()
    door.close()
    with pytest.raises(OSError):
        socket.create_connection(door.address[:2]).close()
