"""Requests that would wait too long are refused, and told after how long to try again."""

import asyncio
import heapq
import itertools
import math
import random
import time
from collections import deque

import httpx
import pytest

from minillm.server import running
from minillm.server.engine_side.admission import Capacity
from minillm.server.engine_side.waiting import FEWEST, RECENT, REFRESH, Pace, Seen
from minillm.server.limits import MAX_RETRY_AFTER, retry_after
from tests.waiting import TIMEOUT, async_wait_until, idle, paused_steps, wait_until

BODY = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}

# ---- a server in simulated time, which knows how long each answer becomes

STEP, PREFILL = 0.05, 0.3  # seconds for a token, and until the first one
MEAN = 400  # tokens of an answer
HELD = PREFILL + STEP * (MEAN - 1)  # seconds for which an answer holds its row


def exponential(chance):
    return 4000, min(1 + int(chance.expovariate(1 / MEAN)), 4000), False


def of_three_lengths(chance):
    return (*[chance.choice((50, 150, 1000))] * 2, True)


# (limit, tokens, whether only the limit can end it) of each answer; standard deviation of the tokens over their mean
LENGTHS = {
    "equal, ended by the model": (lambda chance: (1000, MEAN, False), 0),
    "equal, at the limit": (lambda chance: (MEAN, MEAN, False), 0),
    "equal, at a limit that is known to be the end": (lambda chance: (MEAN, MEAN, True), 0),
    "uniform": (lambda chance: (2000, chance.randint(1, 2 * MEAN - 1), False), 1 / math.sqrt(3)),
    "exponential": (exponential, 1),
    "three lengths, each known": (of_three_lengths, 1.07),
}


class Simulated:
    """Rows that answers hold from their start to their end, first come, first served."""

    def __init__(self, rows: int, lengths: str, max_wait: float | None = None, seed: int = 0):
        self.rows, self.now, self.chance = rows, 1.0, random.Random(seed)
        self.make, self.spread = LENGTHS[lengths]
        self.known = self.make(self.chance)[2]
        self.running: dict[int, tuple[tuple, float]] = {}
        self.waiting: deque[tuple] = deque()
        self.ends: list[tuple[float, int]] = []
        self.numbers = itertools.count()
        self.pace = Pace(rows, self.look, lambda: self.now)
        self.capacity = Capacity(rows, 10**9, max_wait, self.pace)

    def seen(self, answer: tuple, begun: float) -> Seen:
        limit, tokens, certain = answer
        first = begun + PREFILL
        if self.now < first - 1e-9:
            return Seen(limit, certain, 0, begun)
        return Seen(limit, certain, min(1 + int((self.now - first) / STEP + 1e-6), tokens), begun, first)

    def look(self):
        yield from (self.seen(*each) for each in self.running.values())
        yield from (Seen(limit, certain) for limit, _, certain in self.waiting)

    @staticmethod
    def held(answer: tuple) -> float:
        return PREFILL + STEP * (answer[1] - 1)

    def go_to(self, when: float) -> None:
        while self.ends and self.ends[0][0] <= when:
            self.now, number = heapq.heappop(self.ends)
            answer, begun = self.running.pop(number)
            self.pace.ended(self.seen(answer, begun), answer[1] < answer[0])
            if self.waiting:
                self._begin(self.waiting.popleft())
        self.now = when

    def _begin(self, answer: tuple) -> None:
        number = next(self.numbers)
        self.running[number] = answer, self.now
        heapq.heappush(self.ends, (self.now + self.held(answer), number))

    def submit(self, answer: tuple | None = None) -> None:
        answer = answer or self.make(self.chance)
        if len(self.running) < self.rows:
            self._begin(answer)
        else:
            self.waiting.append(answer)

    @property
    def count(self) -> int:
        """The ends after which a request that came now would begin."""
        return len(self.running) + len(self.waiting) + 1 - self.rows

    def wait(self, count: int) -> float:
        """Seconds until so many have ended, of those that run or wait."""
        if count <= 0:
            return 0.0
        left = [end - self.now for end, _ in self.ends]
        heapq.heapify(left)
        for answer in itertools.islice(self.waiting, count - 1):
            heapq.heapreplace(left, left[0] + self.held(answer))
        return left[0]

    def bound(self, count: int, wait: float) -> float:
        """How far an estimate may be off: four standard deviations, and what may change until the next look.

        One is that of the time until answers of unknown length have ended; the other that of a mean of the latest ones.
        Where lengths are known, only those are not that have come since the last look, of every eight one at most.
        """
        unknown, recent = (max(count, 1), max(RECENT, self.rows)) if not self.known else (count / 8 + 1, math.inf)
        deviation = self.spread * (HELD * math.sqrt(unknown) / self.rows + wait / math.sqrt(recent))
        return 4 * deviation + 2 * REFRESH + 0.02 * wait


def keep(server: Simulated, queue: int, seconds: float) -> None:
    """Let so much time pass in which the queue is always this long."""
    end = server.now + seconds
    while server.now < end:
        while len(server.waiting) < queue:
            server.submit()
        server.go_to(min(server.now + 0.4, end))


def check(server: Simulated, *counts: int) -> None:
    for count in counts:
        found, true = server.pace.seconds(count), server.wait(count)
        assert found == pytest.approx(true, abs=server.bound(count, true)), (server.now, count)


@pytest.mark.parametrize("rows", [8, 256, 1024])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_wait_is_known_once_answers_have_ended(lengths, rows):
    """Equal answers end together, and none in between."""
    server = Simulated(rows, lengths)
    keep(server, 2 * rows, 3 * HELD)
    for _ in range(8):
        keep(server, 2 * rows, 0.17 * HELD)
        check(server, 1, max(rows // 8, 1), rows, 2 * rows + 1)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_wait_is_known_within_a_burst_after_others(lengths):
    server = Simulated(64, lengths)
    for burst in range(4):
        for _ in range(5 * 64):
            server.go_to(server.now + 1e-4)
            if burst and server.count > 0:
                check(server, server.count)
            server.submit()
        server.go_to(server.now + 3.4 * HELD)  # most have ended, and some rows may be free
        if burst:
            check(server, *range(1, server.count + 1, 16))


@pytest.mark.parametrize("rows", [8, 1024])
def test_answers_that_only_their_limit_can_end_need_no_others_to_have_ended(rows):
    server = Simulated(rows, "three lengths, each known")
    for _ in range(2 * rows):
        server.submit()
    server.go_to(server.now + PREFILL + STEP / 2)
    assert server.pace.seconds(1) is None, "there is no second token yet, so nobody knows how long one takes"
    for _ in range(20):
        server.go_to(server.now + REFRESH)
        check(server, 1, server.count // 2, server.count)


@pytest.mark.parametrize("rows", [8, 256])
@pytest.mark.parametrize("tokens", [0, 1])
def test_the_wait_is_known_where_no_answer_has_a_second_token(rows, tokens):
    """Prompts that are scored or sorted into classes."""
    server = Simulated(rows, "three lengths, each known", max_wait=5 * PREFILL)
    server.make = lambda chance: (tokens, tokens, True)
    server.held = lambda answer: PREFILL
    for _ in range(10 * rows):
        server.submit()
    assert server.pace.seconds(1) is None
    for _ in range(4):
        server.go_to(server.now + PREFILL)
        for count in (1, rows + 1, server.count):
            assert server.pace.seconds(count) == pytest.approx(server.wait(count), abs=PREFILL / 10)
    assert server.capacity.refusal(10 * rows, 1) and not server.capacity.refusal(4 * rows, 1)


def test_before_enough_have_ended_no_wait_is_assumed():
    server = Simulated(8, "uniform")
    for _ in range(8 + FEWEST):
        server.submit()
    assert server.pace.seconds(1) is None
    server.go_to(2.0)
    assert server.pace.seconds(1) == 0, "any answer may end with the next token"
    keep(server, 8, 3 * HELD)
    assert server.pace.seconds(1) > 0


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_wait_follows_a_load_that_changes(lengths):
    """Answers five times as long, and then as before."""
    server = Simulated(256, lengths)
    make = server.make
    for factor in (1, 5, 1):
        server.make = lambda chance, factor=factor: (*(factor * each for each in make(chance)[:2]), make(chance)[2])
        keep(server, 512, 3 * HELD * max(factor, 5))  # until those of before have ended
        for _ in range(3):
            keep(server, 512, 0.3 * factor * HELD)
            for count in (1, 256, 513):
                found, true = server.pace.seconds(count), server.wait(count)
                assert found == pytest.approx(true, abs=factor * server.bound(count, true / factor)), (factor, count)


def test_the_wait_grows_while_nothing_ends():
    """The engine stands still."""
    server = Simulated(8, "exponential")
    keep(server, 16, 3 * HELD)
    server.ends = [(end + 1000, number) for end, number in server.ends]
    seen, waits = list(server.look()), []
    server.pace._look = lambda: seen
    for _ in range(4):
        server.now += 3 * HELD
        waits.append(server.pace.seconds(17))
    assert all(later > before + HELD for before, later in itertools.pairwise(waits))


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_who_would_wait_too_long_is_refused_until_the_queue_is_shorter(lengths, rows):
    """Twice as many come as can be served. Each one's true wait is known here, with what is known of the others."""
    limit = 1.5 * HELD
    server, waits, arrivals = Simulated(rows, lengths, max_wait=limit), [], random.Random(1)
    while server.now < 8 * HELD:
        server.go_to(server.now + arrivals.expovariate(2 * rows / HELD))
        wait = server.wait(server.count)
        refused = server.capacity.refusal(len(server.running) + len(server.waiting), 1)
        if refused is None:
            server.submit()
        if server.now < 3 * HELD:  # enough have ended, and those have begun that came before
            continue
        bound = server.bound(server.count, wait)
        if refused is None:
            waits.append(wait)
            assert wait <= limit + bound
        else:
            assert wait >= limit - bound
            assert refused.retry_after == pytest.approx(wait - limit, abs=bound + 1)
            assert 1 <= refused.retry_after <= MAX_RETRY_AFTER
    assert max(waits) >= limit - server.bound(2 * rows, limit), "it refuses too many"


def test_equal_answers_that_came_at_once_are_refused_after_the_first_batch():
    """512 answers in 256 rows; when the first ones are through, 512 more."""
    server = Simulated(256, "equal, at a limit that is known to be the end", max_wait=5)
    for _ in range(512):
        assert server.capacity.refusal(len(server.running) + len(server.waiting), 1) is None
        server.submit()
    server.go_to(server.now + HELD + STEP)
    for _ in range(512):
        refused = server.capacity.refusal(len(server.running) + len(server.waiting), 1)
        assert refused.retry_after == math.ceil(HELD - STEP - 5)
    server.go_to(server.now + HELD - 5)
    assert server.capacity.refusal(len(server.running) + len(server.waiting), 1) is None


def test_what_ends_between_two_looks_at_the_queue_shortens_the_wait():
    """Between them, only time and ends are counted."""
    server = Simulated(8, "three lengths, each known")
    for length in (100, 200, 300, 400, 500, 600, 700, 800, 900, 1000):
        server.submit((length, length, True))
    server.go_to(server.now + PREFILL + 98.5 * STEP)
    check(server, 1, 2, 3)
    server.pace._look = None  # it would fail
    server.go_to(server.now + STEP)
    assert len(server.waiting) == 1
    check(server, 1, 2)


def test_no_queue_no_wait():
    server = Simulated(8, "uniform")
    assert [server.pace.seconds(count) for count in (-3, 0, 1)] == [0, 0, None]


def test_a_header_has_whole_seconds_within_bounds():
    assert [retry_after(each) for each in (None, 0.0, 0.2, 3.1, 1e9)] == [1, 1, 1, 4, MAX_RETRY_AFTER]


# ---- a server


@pytest.fixture(scope="module")
def narrow(model_directory):
    """A server in which two requests run, and two may wait, for up to 30 seconds."""
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 2, "max_queued": 2, "max_wait": 30}
    with running(model_directory, **options) as server:
        yield server


@pytest.fixture
def ends(narrow, monkeypatch) -> list[tuple[Seen, bool]]:
    """The ends of which the server's `Pace` hears."""
    found: list[tuple[Seen, bool]] = []
    monkeypatch.setattr(narrow.hub.admission.pace, "ended", lambda seen, stopped: found.append((seen, stopped)))
    return found


def complete(server, **more) -> dict:
    return httpx.post(server.url + "/v1/completions", json=BODY | more, timeout=TIMEOUT).json()["choices"][0]


def statuses(server, seconds_each: float | None, monkeypatch, **body: object) -> tuple[int, list[httpx.Response]]:
    """How many requests were accepted while none ends, and the answers to those that were refused."""
    hub, pace = server.hub, server.hub.admission.pace
    monkeypatch.setattr(pace, "seconds", lambda count: seconds_each and max(count, 0) * seconds_each)

    async def everything(resume) -> tuple[int, list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
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


def test_all_that_ends_is_counted_with_how_it_ended(narrow, ends):
    """A stop string is found by the worker, which then tells the engine: both know of this end."""
    text = complete(narrow)["text"]
    with paused_steps(free=3) as resume:
        assert complete(narrow, stop=[text[:1]], max_tokens=200)["finish_reason"] == "stop"
        wait_until(lambda: narrow.hub.running == 0)
        resume.set()
        wait_until(lambda: idle(narrow.engine))
    assert complete(narrow, stop=["no such text"])["finish_reason"] == "length"
    assert complete(narrow, n=2, ignore_eos=False, max_tokens=2)["finish_reason"] == "length"
    wait_until(lambda: idle(narrow.engine) and len(ends) == 5)
    assert [(seen.limit, seen.certain, stopped) for seen, stopped in ends] == [
        (4, True, False),
        (200, False, True),
        (4, False, False),
        (2, False, False),
        (2, False, False),
    ]
    assert [seen.tokens for seen, stopped in ends if not stopped] == [4, 4, 2, 2]
    assert all(0 < seen.begun <= seen.first <= time.perf_counter() for seen, _ in ends)


def test_rows_that_stand_still_let_nobody_wait_for_them(narrow, monkeypatch):
    """The time that a token takes is that of the answers that run: here, a thousand seconds have passed for them."""

    async def everything(resume) -> None:
        async with httpx.AsyncClient(base_url=narrow.url, timeout=TIMEOUT) as client:
            body = BODY | {"max_tokens": 200}
            taken = [asyncio.create_task(client.post("/v1/completions", json=body | {"n": 2}))]  # they begin together
            seen = narrow.hub.admission._seen
            await async_wait_until(lambda: [each.tokens > 1 for each in seen()] == [True, True])
            taken.append(asyncio.create_task(client.post("/v1/completions", json=body | {"stop": ["no such text"]})))
            await async_wait_until(lambda: narrow.hub.running == 3)
            assert [(each.limit, each.certain, math.isnan(each.begun)) for each in seen()] == [
                (200, True, False),
                (200, True, False),
                (200, False, True),
            ]
            monkeypatch.setattr(narrow.hub.admission.pace, "_clock", lambda: time.perf_counter() + 1000)
            refused = await client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, str(MAX_RETRY_AFTER))
            monkeypatch.undo()
            resume.set()
            assert [each.status_code for each in await asyncio.gather(*taken)] == [200] * 2

    with paused_steps(free=9) as resume:
        asyncio.run(everything(resume))


def test_those_that_leave_the_queue_do_not_count_as_ends(narrow, ends, monkeypatch):
    """They free no row: if many leave at once, others do not begin any sooner."""
    left, abort = [], narrow.engine.abort
    monkeypatch.setattr(narrow.engine, "abort", lambda request: (left.append(request), abort(request)))

    async def everything(resume) -> None:
        async with httpx.AsyncClient(base_url=narrow.url, timeout=TIMEOUT) as client:
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
