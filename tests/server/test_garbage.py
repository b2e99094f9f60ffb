"""A server's long-lived objects are left out of garbage collections, and come back to them at its end."""

import asyncio
import gc
import weakref
from contextlib import contextmanager

import pytest

from minillm.server import garbage
from minillm.server.serving import running
from tests.server.in_process import worker_here


@pytest.fixture(autouse=True)
def frozen_as_before():
    """What conftest.py has frozen stays so: collections in other tests would visit all tests."""
    before = gc.get_freeze_count()
    yield
    if before and not gc.get_freeze_count():
        gc.freeze()


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_before_and_inside_but_what_stays_is_not_visited():
    before, kept = weakref.ref(Ring()), Ring()
    with garbage.frozen():
        assert before() is None and gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
        inside = weakref.ref(Ring())
        gc.collect()
        assert inside() is None
    assert any(each is kept for each in gc.get_objects())


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
