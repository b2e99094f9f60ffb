"""A server's long-lived objects are left out of garbage collections, and come back to them at its end."""

import gc
import weakref

from minillm.server import garbage
from minillm.server.serving import running


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
