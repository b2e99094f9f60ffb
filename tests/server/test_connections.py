"""Idle connections are closed and surplus connections wait, while the others are served."""

import asyncio
import errno
import json

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from minillm.server import limits
from minillm.server.config import ServerConfig
from minillm.server.worker.connections import Connection
from tests.server.in_process import worker_here
from tests.waiting import TIMEOUT, async_wait_until, paused_steps

SOON = 0.1  # seconds: a deadline short enough to wait for in a test
BODY = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def answer(reader) -> tuple[int, dict, bytes]:
    """Status, content and headers of a response."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    return int(head.split()[1]), json.loads(await reader.readexactly(length)), head


def serving(engine, work, **options):
    """Run `work(port)` against a worker."""

    async def everything():
        async with worker_here(engine, **options) as (port, _), asyncio.timeout(TIMEOUT):
            await work(port)

    asyncio.run(everything())


def late(status, content, head, field) -> None:
    """Check a 408 response, after which the connection accepts no more requests."""
    assert status == 408
    assert content["error"]["code"] == "request_timeout"
    assert f"{field} did not arrive within" in content["error"]["message"]
    assert b"connection: close" in head.lower()


async def healthy(reader, writer) -> None:
    writer.write(HEALTH)
    assert (await answer(reader))[0] == 200


@pytest.fixture
def made(monkeypatch) -> list[Connection]:
    """The worker's side of each connection."""
    found, connect = [], Connection.connection_made

    def connected(connection, transport):
        found.append(connection)
        connect(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", connected)
    return found


# ---- deadlines


async def half_a_head(made, connection, half) -> None:
    """Send part of a request's headers and wait until they have arrived; then their deadline passes."""
    _, writer = connection
    writer.write(half)
    await async_wait_until(lambda: made and made[-1].conn.trailing_data[0] == half)
    assert made[-1]._awaited == "headers"
    made[-1]._expire()


def test_late_headers_are_answered_with_408(engine, made):
    async def work(port):
        reader, writer = connection = await asyncio.open_connection("127.0.0.1", port)
        await half_a_head(made, connection, HEAD)
        late(*await answer(reader), "the headers")
        assert await reader.read() == b""

    serving(engine, work, header_timeout=60)


def test_a_trickle_of_headers_does_not_extend_the_deadline(engine, made):
    async def work(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await async_wait_until(lambda: made)
        deadline = made[0]._deadline.when()
        for count in range(1, 4):
            writer.write(b"GET / HTTP/1.1\r\n"[:count])
            await async_wait_until(lambda count=count: len(made[0].conn.trailing_data[0]) >= count)
            assert made[0]._deadline.when() == deadline and not made[0]._deadline.cancelled()

    serving(engine, work, header_timeout=60)


def test_a_connection_that_sends_nothing_is_closed_without_a_response(engine):
    async def work(port):
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""

    serving(engine, work, header_timeout=SOON)


def test_an_idle_connection_is_closed(engine):
    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await healthy(reader, writer)
        assert await reader.read() == b""

    serving(engine, work, keep_alive_timeout=SOON)


def test_the_headers_of_the_next_request_have_a_deadline_too(engine, made):
    async def work(port):
        reader, writer = connection = await asyncio.open_connection("127.0.0.1", port)
        await healthy(reader, writer)
        assert made[0]._deadline is None, "the keep-alive timeout applied instead"
        await half_a_head(made, connection, b"GET /health HT")
        late(*await answer(reader), "the headers")
        assert await reader.read() == b""

    serving(engine, work, header_timeout=60, keep_alive_timeout=60)


def test_a_late_body_is_answered_with_408_and_counted(engine):
    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 100\r\n\r\n" + b'{"prompt"')
        late(*await answer(reader), "the body")
        assert await reader.read() == b""
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        assert 'minillm_http_requests_total{status="408"} 1.0' in text

    serving(engine, work, body_timeout=SOON)


def test_the_body_of_an_already_answered_request_has_a_deadline_too(engine):
    async def work(port):
        for path in (b"/v1/nothing", b"/v1/completions"):  # the second has no content type
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            assert (await answer(reader))[0] in (400, 404)
            assert await reader.read() == b""

    serving(engine, work, body_timeout=SOON, keep_alive_timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_no_deadline_runs_while_a_response_is_generated(engine, made, stream):
    async def everything():
        async with worker_here(engine) as (port, hub), httpx.AsyncClient(timeout=600) as client:
            body = BODY | {"stream": stream}
            asked = asyncio.create_task(client.post(f"http://127.0.0.1:{port}/v1/completions", json=body))
            await async_wait_until(lambda: hub.running)
            (connection,) = made
            assert connection._deadline is None and connection.timeout_keep_alive_task is None
            resume.set()
            assert (await asked).status_code == 200

    with paused_steps() as resume:
        asyncio.run(everything())


def test_a_second_request_on_the_same_connection_is_served(engine):
    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        content = json.dumps(BODY).encode()
        for _ in range(3):
            writer.write(HEALTH + HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
            assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]

    serving(engine, work)


@pytest.mark.parametrize("wrong", [{"header_timeout": 0}, {"body_timeout": "1"}, {"shutdown_grace": -1}], ids=str)
def test_invalid_timeouts_are_rejected(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerConfig(**wrong)
    assert ServerConfig(shutdown_grace=0).shutdown_grace == 0


# ---- file descriptors


def test_connections_beyond_the_file_descriptor_limit_wait_while_open_ones_are_served(engine, caplog):
    async def work(port):
        first = await asyncio.open_connection("127.0.0.1", port)
        await healthy(*first)
        _, second = await asyncio.open_connection("127.0.0.1", port)
        late = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in late:
            writer.write(HEALTH)
        answers = [asyncio.create_task(answer(reader)) for reader, _ in late]
        await async_wait_until(lambda: caplog.messages)
        for _ in range(30):
            await healthy(*first)
        assert not any(each.done() for each in answers)
        (line,) = caplog.messages
        assert line == "all 2 connections are in use; new connections must wait"
        second.close()
        assert (await answers[0])[0] == 200
        assert not answers[1].done()
        for (_, writer), each in zip(late, answers, strict=True):
            assert (await each)[0] == 200
            writer.close()

    serving(engine, work, most=2, header_timeout=60, keep_alive_timeout=60)


def test_a_worker_out_of_file_descriptors_neither_spins_nor_floods_its_log(engine, caplog, monkeypatch):
    """It retries when a connection ends, or after a delay, which never elapses here."""
    tried = []

    async def work(port):
        loop = asyncio.get_running_loop()
        first = await asyncio.open_connection("127.0.0.1", port)
        await healthy(*first)
        second = await asyncio.open_connection("127.0.0.1", port)
        await healthy(*second)
        accept = loop.sock_accept

        async def refused(listener):
            tried.append(True)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(loop, "sock_accept", refused)
        third = await asyncio.open_connection("127.0.0.1", port)  # for the accept call that is already waiting
        await healthy(*third)
        await async_wait_until(lambda: tried)
        for _ in range(30):
            await healthy(*first)
        assert len(tried) == 1
        await async_wait_until(lambda: caplog.messages)
        (line,) = caplog.messages
        assert "cannot accept connections ([Errno 24] Too many open files)" in line
        monkeypatch.setattr(loop, "sock_accept", accept)
        last = await asyncio.open_connection("127.0.0.1", port)
        second[1].close()
        await healthy(*last)
        assert len(caplog.messages) == 1

    monkeypatch.setattr(limits, "ACCEPT_RETRY", 10**6)
    serving(engine, work, header_timeout=60, keep_alive_timeout=60)


def test_a_failed_accept_is_retried_and_logged_once(engine, caplog, monkeypatch):
    tried = []

    async def work(port):
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def refused(listener):
            tried.append(True)
            if len(tried) < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", refused)
        first = await asyncio.open_connection("127.0.0.1", port)  # for the accept call that is already waiting
        second = await asyncio.open_connection("127.0.0.1", port)
        for each in (first, second):
            await healthy(*each)
        assert len(tried) >= 4 and len(caplog.messages) == 1

    monkeypatch.setattr(limits, "ACCEPT_RETRY", 0.01)
    serving(engine, work, header_timeout=60)


def test_only_a_little_input_is_parsed_at_a_time(engine, monkeypatch):
    """Small chunks are slow to parse, so other connections get a turn between two reads."""
    sizes, receive = [], H11Protocol.data_received
    monkeypatch.setattr(H11Protocol, "data_received", lambda self, data: sizes.append(len(data)) or receive(self, data))

    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 40_000 + b"0\r\n\r\n")
        assert (await answer(reader))[0] == 400
        assert sum(sizes) > 240_000 and max(sizes) <= limits.READ

    serving(engine, work)


# ---- clients that send no more


def request(**more) -> bytes:
    body = json.dumps(BODY | more).encode()
    return HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer_and_then_the_end(engine, made, monkeypatch, stream):
    monkeypatch.setattr(limits, "FIRST_PROBE", 0.001)
    monkeypatch.setattr(limits, "PROBE", 0.001)

    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with paused_steps() as resume:
            writer.write(request(stream=stream))
            writer.write_eof()
            await async_wait_until(lambda: made and made[0]._half_closed)
            for _ in range(3):
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            resume.set()
        rest = (await reader.read()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else json.loads(rest.partition(b"\r\n\r\n")[2])

    serving(engine, work, keep_alive_timeout=600)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_left_is_noticed_before_its_answer_begins(engine, made, stream):
    async def everything():
        async with worker_here(engine) as (port, hub), asyncio.timeout(TIMEOUT):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            with paused_steps() as resume:
                writer.write(request(stream=stream))
                await async_wait_until(lambda: hub.running == 1)
                writer.close()
                await async_wait_until(lambda: made[0].transport.is_closing())
                resume.set()
            await async_wait_until(lambda: hub.running == 0)

    asyncio.run(everything())


def test_a_half_closed_client_gets_the_answers_to_all_it_asked(engine):
    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with paused_steps() as resume:
            writer.write(3 * request())
            writer.write_eof()
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            resume.set()
        assert (await reader.read()).count(b"HTTP/1.1 200 OK\r\n") == 3

    serving(engine, work, keep_alive_timeout=600)


def test_half_a_request_is_no_reason_to_wait(engine):
    async def work(port):
        for half in (HEAD, request()[:-1], b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(half)
            writer.write_eof()
            assert await reader.read() == b""

    serving(engine, work, header_timeout=600, body_timeout=600)


# ---- what is not HTTP

CHUNKED = b"host: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"HELLO\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no host
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + CHUNKED[17:] + b"zz\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"zz\r\n",  # whose answer would not wait for the body
        b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"2\r\n{}\r\nzz\r\n",
    ],
    ids=str,
)
def test_what_is_not_http_is_refused_in_openais_form_and_without_a_traceback(engine, caplog, sent):
    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        status, content, _ = await answer(reader)
        assert (status, content["error"]["code"]) == (400, "invalid_http")
        assert await reader.read() == b""

    serving(engine, work)
    assert not any(record.exc_info for record in caplog.records)


def test_a_body_that_breaks_off_after_its_answer_ends_the_connection(engine, caplog):
    async def work(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED)  # no content type
        assert (await answer(reader))[0] == 400
        writer.write(b"zz\r\n")
        assert await reader.read() == b""

    serving(engine, work)
    assert not any(record.exc_info for record in caplog.records)
