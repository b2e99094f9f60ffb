"""Places in Ray's counts: as many as there are requests, without a request that waits for one."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from minillm.deploy import places
from minillm.deploy.places import HeldPlaces
from tests.waiting import TIMEOUT, async_wait_until

pytestmark = pytest.mark.timeout(TIMEOUT)


class Ray:
    """Counts the places on replicas. asked: how many were reserved; gone: replicas that take no requests any more."""

    def __init__(self):
        self.held, self.asked, self.gone, self.at_once = Counter(), 0, set(), 0
        self.free = asyncio.Event()  # until then, no replica answers
        self.free.set()
        self._waiting = 0

    @asynccontextmanager
    async def reserve(self, name, worker):
        assert worker == "me"
        self.asked += 1
        self._waiting += 1
        self.at_once = max(self.at_once, self._waiting)
        try:
            await self.free.wait()
        finally:
            self._waiting -= 1
        name = "other" if name in self.gone else name
        self.held[name] += 1
        try:
            yield name
        finally:
            self.held[name] -= 1


def run(work, monkeypatch, delay=0.0, keep=1000.0):
    monkeypatch.setattr(places, "DELAY", delay)
    monkeypatch.setattr(places, "KEEP", keep)

    async def everything():
        ray, silent = Ray(), []
        mine = HeldPlaces(ray.reserve, "me", silent.append)
        mine.listed(["a", "b"])
        await work(mine, ray, silent)
        mine.listed([])
        await async_wait_until(lambda: not mine._tasks)
        assert not mine._replicas and not any(ray.held.values())

    asyncio.run(everything())


def test_each_request_has_a_place_which_the_next_one_uses(monkeypatch):
    async def work(mine, ray, silent):
        for name in "aab":
            mine.take(name)
        await async_wait_until(lambda: ray.held == {"a": 2, "b": 1})
        mine.give("a")
        mine.take("a")
        mine.give("b")
        assert ray.held == {"a": 2, "b": 1}
        mine.take("a")
        await async_wait_until(lambda: ray.held["a"] == 3)
        assert ray.asked == 4
        for name in "aaa":
            mine.give(name)

    run(work, monkeypatch)


def test_places_that_nothing_needs_are_given_back(monkeypatch):
    async def work(mine, ray, silent):
        for name in "aa":
            mine.take(name)
        await async_wait_until(lambda: ray.held["a"] == 2)
        for left in (1, 0):
            mine.give("a")
            await asyncio.sleep(places.KEEP)  # which began later, so it ends later than the place's time
            await async_wait_until(lambda: not mine._tasks)
            assert ray.held["a"] == left

    run(work, monkeypatch, keep=0.01)


def test_a_request_that_has_ended_before_takes_no_place(monkeypatch):
    async def work(mine, ray, silent):
        mine.take("a")
        mine.give("a")
        await asyncio.sleep(0)
        mine.take("b")
        await async_wait_until(lambda: ray.held["b"] == 1)
        assert ray.asked == 1
        ray.free.clear()
        mine.take("b")
        await async_wait_until(lambda: ray.asked == 2)
        for _ in range(2):
            mine.give("b")
        ray.free.set()  # too late: it is kept for the next one

    run(work, monkeypatch)


def test_a_replica_that_is_about_to_end_keeps_only_the_places_of_its_requests(monkeypatch):
    async def work(mine, ray, silent):
        for name in "aa":
            mine.take(name)
        await async_wait_until(lambda: ray.held["a"] == 2)
        mine.give("a")
        assert ray.held["a"] == 2
        mine.listed(["b"])
        await async_wait_until(lambda: not mine._tasks)
        assert ray.held["a"] == 1
        mine.give("a")
        await async_wait_until(lambda: not mine._tasks)
        assert ray.held["a"] == 0

    run(work, monkeypatch)


def test_a_place_on_another_replica_is_given_back_at_once(monkeypatch):
    async def work(mine, ray, silent):
        ray.gone.add("a")
        mine.take("a")
        await async_wait_until(lambda: ray.asked == 1 and not mine._tasks)
        assert not any(ray.held.values())
        ray.gone.clear()
        mine.take("a")
        await async_wait_until(lambda: ray.held["a"] == 2)
        for _ in range(2):
            mine.give("a")

    run(work, monkeypatch)


def test_a_burst_reserves_few_places_at_a_time(monkeypatch):
    async def work(mine, ray, silent):
        for _ in range(40):
            mine.take("a")
        await async_wait_until(lambda: ray.held["a"] == 40)
        assert ray.at_once <= places.AT_ONCE
        for _ in range(40):
            mine.give("a")

    run(work, monkeypatch)


def test_a_replica_that_does_not_answer_is_reported_and_harms_no_other(monkeypatch):
    monkeypatch.setattr(places, "ATTEMPT", 0.02)

    async def work(mine, ray, silent):
        ray.free.clear()
        mine.take("a")
        await async_wait_until(lambda: silent == ["a"])
        ray.free.set()
        mine.take("b")
        await async_wait_until(lambda: ray.held["b"] == 1)
        for name in "ab":
            mine.give(name)

    run(work, monkeypatch)
