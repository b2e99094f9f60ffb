"""Requests that would wait too long are refused, and told after how long to try again."""

import asyncio

import httpx
import pytest

from minillm.server import running
from minillm.server.waiting import FEWEST, LONGEST, RECENT, Pace, retry_after
from tests.waiting import async_wait_until, idle, paused_steps, wait_until

BODY = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(gap: float, ends: int, waiting: int = 5) -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(ends):
        pace.ended(waiting)
        clock.now += gap
    clock.now -= gap
    return pace, clock


def test_the_wait_is_that_of_the_ends_before_it_at_their_pace():
    pace, _ = paced(0.5, FEWEST)
    assert [pace.seconds(count) for count in (-3, 0, 1, 7)] == [0, 0, 0.5, 3.5]


def test_the_pace_is_that_of_the_newest_ends():
    pace, clock = paced(5, 100)
    for _ in range(RECENT):
        clock.now += 0.25
        pace.ended(1)
    assert pace.seconds(4) == pytest.approx(1.0)


def test_a_few_ends_are_no_pace_and_neither_are_those_without_a_queue():
    assert paced(1, FEWEST - 1)[0].seconds(1) is None
    pace, _ = paced(1, 50)
    pace.ended(0)
    assert pace.seconds(1) is None
    assert paced(1, 50, waiting=0)[0].seconds(1) is None


def test_the_wait_grows_while_nothing_ends():
    pace, clock = paced(1, 11)
    clock.now += 90
    assert pace.seconds(1) == 10


def test_a_header_has_whole_seconds_within_bounds():
    assert [retry_after(each) for each in (None, 0.0, 0.2, 3.1, 1e9)] == [1, 1, 1, 4, LONGEST]


@pytest.fixture(scope="module")
def narrow(model_directory):
    """A server in which two requests run, and two may wait, for up to 30 seconds."""
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 2, "max_queued": 2, "max_wait": 30}
    with running(model_directory, **options) as server:
        yield server


@pytest.fixture
def ends(narrow, monkeypatch) -> list[int]:
    """How many requests waited at each end that counts toward the pace."""
    found: list[int] = []
    monkeypatch.setattr(narrow.hub.pace, "ended", found.append)
    return found


def statuses(server, seconds_each: float | None, monkeypatch, **body: object) -> tuple[int, list[httpx.Response]]:
    """How many requests were accepted while none ends, and the answers to those that were refused."""
    hub = server.hub
    monkeypatch.setattr(
        hub.pace, "seconds", lambda count: seconds_each if seconds_each is None else max(count, 0) * seconds_each
    )

    async def everything(resume) -> tuple[int, list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            taken, refused = [], []
            for count in range(1, 6):
                one = asyncio.create_task(client.post("/v1/completions", json=BODY | body))
                await async_wait_until(lambda one=one, count=count: one.done() or hub.running == count - len(refused))
                if one.done():
                    refused.append(one.result())
                else:
                    taken.append(one)
            resume.set()
            assert [each.status_code for each in await asyncio.gather(*taken)] == [200] * len(taken)
            return len(taken), refused

    with paused_steps() as resume:
        return asyncio.run(everything(resume))


def test_one_that_would_wait_too_long_is_refused_with_the_time_to_try_again(narrow, monkeypatch):
    accepted, refused = statuses(narrow, 20.0, monkeypatch)
    assert accepted == 3, "two run, the third would wait 20 s, the fourth 40 s"
    assert {each.status_code for each in refused} == {429} and len(refused) == 2
    assert {each.headers["retry-after"] for each in refused} == {"10"}
    error = refused[0].json()["error"]
    assert error["code"] == "server_busy"
    assert "would wait about 40 s, and the limit is 30 s; try again in 10 s" in error["message"]


def test_a_full_queue_says_when_there_is_room(narrow, monkeypatch):
    accepted, refused = statuses(narrow, 7.0, monkeypatch)
    assert accepted == 4 and [each.headers["retry-after"] for each in refused] == ["7"]
    assert "4 of at most 4 choices are running or waiting; try again in 7 s" in refused[0].json()["error"]["message"]


def test_without_a_pace_only_the_queue_is_bounded(narrow, monkeypatch):
    accepted, refused = statuses(narrow, None, monkeypatch)
    assert accepted == 4 and [each.headers["retry-after"] for each in refused] == ["1"]


def test_the_pace_counts_what_ended_while_others_waited(narrow):
    async def everything() -> None:
        async with httpx.AsyncClient(base_url=narrow.url, timeout=600) as client:
            done = 0
            while done < 3 * FEWEST:  # the last ones of each round end without a queue, which forgets the pace
                answers = await asyncio.gather(*(client.post("/v1/completions", json=BODY) for _ in range(4)))
                done += sum(each.status_code == 200 for each in answers)
            assert len(narrow.hub.pace._ends) == 0

    asyncio.run(everything())


def test_an_end_by_a_stop_string_counts_once(narrow, ends):
    """The worker finds it, and tells the engine: both know that the choice has ended."""
    every = httpx.post(narrow.url + "/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    for count in (2, 3):
        answer = httpx.post(narrow.url + "/v1/completions", json=BODY | {"stop": [every[:1]]}, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        wait_until(lambda: idle(narrow.engine))
        assert len(ends) == count


def test_those_that_leave_the_queue_do_not_count_as_ends(narrow, ends, monkeypatch):
    """They free no row: if many leave at once, others do not begin any sooner."""
    left, abort = [], narrow.engine.abort
    monkeypatch.setattr(narrow.engine, "abort", lambda request: (left.append(request), abort(request)))

    async def everything(resume) -> None:
        async with httpx.AsyncClient(base_url=narrow.url, timeout=60) as client:
            four = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(2)]
            await async_wait_until(lambda: narrow.hub.running == 2)
            four += [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(2)]
            await async_wait_until(lambda: narrow.hub.running == 4)
            for each in four[2:]:
                each.cancel()
            await async_wait_until(lambda: len(left) == 2)
            resume.set()
            assert [each.status_code for each in await asyncio.gather(*four[:2])] == [200, 200]
        await async_wait_until(lambda: narrow.hub.running == 0 and idle(narrow.engine))

    with paused_steps() as resume:
        asyncio.run(everything(resume))
    assert len(ends) == 2
