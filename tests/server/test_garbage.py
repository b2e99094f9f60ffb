"""A server's long-lived objects are left out of garbage collections, and come back to them at its end."""

import asyncio
import gc
import weakref
from contextlib import contextmanager

from minillm.server.serving import running
from tests.server.in_process import worker_here
from tests.test_garbage import Ring, frozen_as_before  # noqa: F401  a fixture


def test_a_server_in_the_users_process_leaves_the_users_garbage_to_the_collector(engine):
    frozen, before = gc.get_freeze_count(), weakref.ref(Ring())
    with running(engine):
        gc.collect()
        assert before() is None and gc.get_freeze_count() <= frozen


def test_a_worker_freezes_its_objects_before_it_is_ready_and_until_it_ends(engine):
    events = []

    @contextmanager
    def noted():
        events.append("frozen")
        yield
        events.append("thawed")

    async def serve():
        async with worker_here(engine, frozen=noted):
            assert events == ["frozen"]

    asyncio.run(serve())
    assert events == ["frozen", "thawed"]
