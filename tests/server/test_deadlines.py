"""Requests that wait or run for too long are ended with an error, and so are clients that do not read."""

import asyncio
import json
import socket
import threading
import time
from collections import deque
from types import SimpleNamespace

import httpx
import pytest

from minillm.request import SamplingParams
from minillm.server import running
from minillm.server.config import ServerConfig
from minillm.server.engine_side.admission import Admission
from minillm.server.engine_side.hub import Hub
from minillm.server.worker.connections import Connection
from minillm.server.worker.link import EngineClient, PastDeadline, Prompt, RemoteEngine
from tests.server.in_process import worker_here
from tests.waiting import TIMEOUT, async_wait_until, idle, paused_steps

BODY = {"prompt": "The river", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
HOUR = 3600.0


@pytest.fixture
def clocks(monkeypatch) -> list[asyncio.TimerHandle]:
    """The deadlines of the requests that are submitted; a test lets one pass with `_run`."""
    found: list[asyncio.TimerHandle] = []
    begin = EngineClient._set_deadlines

    def begun(self, choices, queue):
        found.extend(handles := begin(self, choices, queue))
        return handles

    monkeypatch.setattr(EngineClient, "_set_deadlines", begun)
    return found


def serve_here(engine, work, **options) -> None:
    """Run a client against a worker in this event loop; then nothing may be left in the engine."""

    async def everything():
        async with worker_here(engine, **options) as (port, hub):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
                await work(client, hub)
            await async_wait_until(lambda: hub.running == 0 and idle(engine))

    asyncio.run(everything())


@pytest.mark.parametrize("name", ["first_token_timeout", "request_timeout"])
def test_a_request_past_its_deadline_is_aborted_with_504(engine, clocks, name):
    async def work(client, hub):
        with paused_steps() as resume:
            late = asyncio.create_task(client.post("/v1/completions", json=BODY | {"n": 3}))
            await async_wait_until(lambda: hub.running == 3)
            assert len(clocks) == 1 and 0 < clocks[0].when() - asyncio.get_running_loop().time() <= HOUR
            clocks[0]._run()
            answer = await late
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, name)
            assert f"within 3600 s ({name})" in answer.json()["error"]["message"]
            resume.set()

    serve_here(engine, work, **{name: HOUR})


async def lines_of(client, clocks, passes: bool) -> list[dict]:
    """What a stream sends after its first event, if a deadline passes then."""
    with paused_steps(free=4) as resume:
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            lines = (line.removeprefix("data: ") async for line in stream.aiter_lines() if line)
            first = json.loads(await anext(lines))
            assert first["choices"][0]["text"] and len(clocks) == 1
            clocks[0]._run()
            if not passes:
                resume.set()
            *found, end = [line async for line in lines]
            assert end == "[DONE]"
        resume.set()
    return [json.loads(line) for line in found]


def test_a_stream_past_its_deadline_ends_with_an_error_and_its_tokens_are_logged(engine, clocks, caplog):
    async def work(client, hub):
        *_, last = await lines_of(client, clocks, passes=True)
        assert last["error"]["code"] == "request_timeout"

    with caplog.at_level("INFO", "minillm.server.access"):
        serve_here(engine, work, request_timeout=HOUR)
    (logged,) = [each.fields for each in caplog.records if hasattr(each, "fields")]
    assert logged["prompt_tokens"] == len(engine.tokenizer.encode(BODY["prompt"]))
    assert 0 < logged["output_tokens"] < BODY["max_tokens"] and "finish_reasons" not in logged


def test_a_request_that_is_not_read_is_aborted_at_its_deadline_too(engine, clocks):
    async def everything():
        ours, theirs = socket.socketpair()
        hub = Hub(engine, "here", ServerConfig(log_level="critical", request_timeout=HOUR))
        hub.connect(ours)
        remote = RemoteEngine()
        await remote.connect(theirs)
        await remote.connected
        stream = remote.stream([Prompt([5, 6])], SamplingParams(max_tokens=100, ignore_eos=True))
        with paused_steps(free=4) as resume:
            await anext(stream)
            (job,) = [job for line in hub.lines for job in line.jobs.values()]
            clocks[0]._run()
            resume.set()
        await async_wait_until(lambda: hub.running == 0 and idle(engine))
        assert job.prepared.tracked.completion.finish_reason == "abort"
        with pytest.raises(PastDeadline, match="request_timeout"):
            [delta async for delta in stream]
        hub.close()

    asyncio.run(everything())


def test_the_first_tokens_deadline_means_nothing_once_there_is_one(engine, clocks):
    async def work(client, hub):
        *_, last = await lines_of(client, clocks, passes=False)
        assert last["choices"][0]["finish_reason"] == "length"

    serve_here(engine, work, first_token_timeout=HOUR)


def test_the_clocks_of_a_request_stop_with_it(engine, clocks):
    async def work(client, hub):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(clocks) == 2 and all(clock.cancelled() for clock in clocks)

    serve_here(engine, work, first_token_timeout=HOUR, request_timeout=HOUR)


def test_one_that_waits_longer_than_the_queue_timeout_is_refused_and_those_that_run_are_not(model_directory):
    async def clients(server, resume) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:

            def ask(**more):
                return asyncio.create_task(client.post("/v1/completions", json=BODY | more))

            taken = ask()
            await async_wait_until(lambda: server.hub.running == 1)
            (job,) = [job for line in server.hub.lines for job in line.jobs.values()]
            await async_wait_until(lambda: job.prepared.tracked.completion.scheduled_time is not None)
            waits = ask(n=2)
            await async_wait_until(lambda: server.hub.running == 3)
            assert len(server.hub.admission.waiting) == 2 and not waits.done()

            def pass_all() -> None:
                admission = server.hub.admission
                admission.waiting = deque((0.0, line, keys) for _, line, keys in admission.waiting)

            server.hub.soon(pass_all)
            refused = await waits
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            error = refused.json()["error"]
            assert error["code"] == "server_busy" and "waited for 3600 s (queue_timeout)" in error["message"]
            resume.set()
            assert (await taken).status_code == 200
            assert server.hub.running == 0 and not server.hub.admission.waiting

    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 1, "queue_timeout": HOUR}
    with running(model_directory, **options) as server, paused_steps() as resume:
        asyncio.run(clients(server, resume))


def test_requests_that_no_longer_wait_are_forgotten_long_before_their_deadline(engine):
    """Those that ended, or began, would otherwise stay until then: with a long timeout, hundreds of thousands."""

    async def work(client, hub):
        for _ in range(5):
            asked = [client.post("/v1/completions", json=BODY | {"max_tokens": 1}) for _ in range(20)]
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
            assert len(hub.admission.waiting) <= 2 * hub.admission.capacity.choices == 64
        hub.admission.waiting.clear()
        line = SimpleNamespace(waits=lambda keys: keys.start % 4 == 0, refuse_unless_begun=lambda keys: None)
        for key in range(65):
            hub.admission.waits(line, range(key, key + 1))
        assert [keys.start for _, _, keys in hub.admission.waiting] == [*range(0, 64, 4), 64]
        hub.admission.waiting.clear()

    serve_here(engine, work, queue_timeout=HOUR, max_queued=0)


def test_the_hub_looks_again_when_the_next_deadline_has_come():
    refused: list[range] = []
    line = SimpleNamespace(refuse_unless_begun=refused.append)
    admission = Admission(1, ServerConfig(queue_timeout=HOUR), [line])
    assert admission.refuse_the_overdue() is None, "nothing waits"
    admission.waits(line, range(1))
    admission.waits(line, range(1, 3))
    assert 0 < admission.refuse_the_overdue() <= HOUR and not refused
    admission.waiting[0] = 0.0, line, range(1)
    assert 0 < admission.refuse_the_overdue() <= HOUR and refused == [range(1)]


def test_the_queue_timeout_counts_while_a_grammar_compiles(engine, monkeypatch):
    may_go_on, check = threading.Event(), engine.check_params
    monkeypatch.setattr(engine, "check_params", lambda params: (may_go_on.wait(TIMEOUT), check(params)))

    async def work(client, hub):
        body = BODY | {"response_format": {"type": "json_object"}, "ignore_eos": False}
        waits = asyncio.create_task(client.post("/v1/completions", json=body))
        await async_wait_until(lambda: hub.running == 1)

        def pass_all() -> None:
            soon = time.monotonic() + 0.05  # when nothing else wakes the hub
            hub.admission.waiting = deque((soon, line, keys) for _, line, keys in hub.admission.waiting)

        hub.soon(pass_all)
        refused = await waits
        assert refused.status_code == 429 and "queue_timeout" in refused.json()["error"]["message"]
        assert hub.running == 0
        may_go_on.set()

    serve_here(engine, work, queue_timeout=HOUR)


def test_a_client_that_does_not_read_is_disconnected(engine, monkeypatch):
    made: list[Connection] = []
    connect = Connection.connection_made
    monkeypatch.setattr(Connection, "connection_made", lambda self, to: (made.append(self), connect(self, to))[1])

    async def work(client, hub):
        with paused_steps(free=4) as resume:
            async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                made[0].pause_writing()  # the system takes no more for this client
                clock = made[0]._unread
                assert 0 < clock.when() - asyncio.get_running_loop().time() <= HOUR
                made[0].resume_writing()
                assert clock.cancelled()
                made[0].pause_writing()
                left = iter((1000, 999, 999))
                monkeypatch.setattr(made[0].transport, "get_write_buffer_size", lambda: next(left), raising=False)
                made[0]._check_reading(1001)  # it has read a little
                assert not made[0].transport.is_closing()
                made[0]._unread._run()  # and nothing since
                with pytest.raises(httpx.HTTPError):
                    async for _ in lines:
                        pass
            resume.set()

    serve_here(engine, work, write_timeout=HOUR)


@pytest.mark.parametrize("name", ["queue_timeout", "first_token_timeout", "request_timeout", "write_timeout"])
@pytest.mark.parametrize("wrong", [0, -1, "soon", float("nan"), float("inf"), True])
def test_invalid_deadlines_are_rejected(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds greater than 0"):
        ServerConfig(**{name: wrong})
