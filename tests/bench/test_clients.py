"""Clients read streamed answers in every form that HTTP/1.1 allows, and keep their number and their schedule."""

import asyncio
import json
import time

import pytest

from minillm.bench import clients, serve
from minillm.bench.clients import BrokenAnswer, Client, ClientConnection, RequestTimes, StreamedAnswer, Target
from minillm.bench.workloads import BenchRequest
from tests.bench.fake import at_once, faked

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


class Wire(asyncio.Transport):
    """A transport that keeps what was written and carries nothing."""

    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def abort(self):
        self.closed = True


def event(*ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": ids}]}).encode() + b"\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


STREAM = event(5), event(6, 7), b": still there\n\n", event(), b"data: [DONE]\n\n"
WHOLE = b"".join(STREAM)
FORMS = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*STREAM),
    "events across chunks": HEAD
    + b"transfer-encoding: chunked\r\n\r\n"
    + chunked(WHOLE[:40], WHOLE[40:41], WHOLE[41:]),
    "with extensions": HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(WHOLE).replace(b"\r\n", b";a=b\r\n", 1),
    "with a trailer": HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(WHOLE)[:-2] + b"Spent: 1\r\n\r\n",
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
    "until close": HEAD + b"\r\n" + WHOLE,
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
    "carriage returns": HEAD + b"\r\n" + WHOLE.replace(b"\n", b"\r\n"),
}


def exchange(data: bytes, size: int, *, closes: bool = False) -> tuple[RequestTimes, StreamedAnswer, ClientConnection]:
    """What a client makes of an answer that comes in pieces of `size` bytes."""
    seen = RequestTimes(due=0.0)
    answer = StreamedAnswer(seen, time.monotonic())

    async def play():
        connection = ClientConnection()
        connection.connection_made(Wire())
        asked = asyncio.create_task(connection.ask(b"request", answer))
        await asyncio.sleep(0)
        assert connection.transport.written == b"request"
        for first in range(0, len(data), size):
            connection.data_received(data[first : first + size])
        if closes:
            connection.connection_lost(None)
        await asked
        return connection

    connection = asyncio.run(play())
    answer.finish(3)
    return seen, answer, connection


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_read_however_its_bytes_are_framed_and_cut(form, size):
    ends = form in ("until close", "carriage returns")
    seen, answer, connection = exchange(FORMS[form], size, closes=ends)
    assert seen.error is None and answer.complete
    assert [tokens for _, tokens in seen.arrivals] == [1, 2]
    assert connection.reusable != ends


def test_a_connection_that_the_server_ends_is_not_used_again():
    data = FORMS["length"].replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    assert not exchange(data, 10_000)[2].reusable
    assert not exchange(FORMS["length"].replace(b"HTTP/1.1", b"HTTP/1.0", 1), 10_000)[2].reusable


@pytest.mark.parametrize(
    "data, message",
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 fine\r\n\r\n", "not HTTP"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * clients.HEADERS_LIMIT, "headers exceed 65536 bytes"),
        (HEAD + b"\r\ndata: [1, 2]\n\n", "not a completion's chunk"),
        (HEAD + b"\r\ndata: {\n\n", "not a completion's chunk"),
        (HEAD + b"Content-Length: 100\r\n\r\n" + event(5), "closed the connection before"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(data, message):
    with pytest.raises(BrokenAnswer, match=message):
        exchange(data, 10_000, closes=True)


@pytest.mark.parametrize(
    "body, message",
    [
        (event(1, 2, 3), "without"),
        (event(1) + b"data: [DONE]\n\n", "1 tokens came where the request has 3"),
        (event(1) + b'data: {"error": {"message": "no memory"}}\n\n', "no memory"),
    ],
)
def test_an_answer_that_lacks_something_is_noted(body, message):
    assert message in exchange(HEAD + b"\r\n" + body, 10_000, closes=True)[0].error


def test_an_error_that_the_server_explains_is_quoted():
    data = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 8\r\n\r\ntoo long"
    assert exchange(data, 3)[0].error == "status 400: too long"


def served(handle):
    """Run a client against a handler of connections; return what it measured of three requests in turn."""

    async def play():
        listener = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = Client(Target(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", "m"))
        work = [BenchRequest([5], 3)] * 3
        client.prepare(work)
        try:
            return [await client.ask(request, 0.0) for request in work]
        finally:
            client.close()
            listener.close()

    return asyncio.run(play())


def test_a_connection_is_kept_for_the_next_request():
    connections = []

    async def handle(reader, writer):
        connections.append(writer)
        while await reader.readline():
            await reader.readuntil(b"}")
            writer.write(FORMS["chunked"])

    assert [seen.error for seen in served(handle)] == [None] * 3
    assert len(connections) == 1


def test_an_idle_connection_that_the_server_closed_is_replaced():
    """The server closes without a word when the second request comes on a connection."""
    connections = []

    async def handle(reader, writer):
        connections.append(writer)
        await reader.readuntil(b"}")
        writer.write(FORMS["chunked"])
        await reader.readuntil(b"}")
        writer.close()

    assert [seen.error for seen in served(handle)] == [None] * 3
    assert len(connections) == 3


def test_a_server_that_only_hangs_up_is_an_error_of_the_request():
    async def handle(reader, writer):
        writer.close()

    assert all("closed the connection" in seen.error or "reset" in seen.error for seen in served(handle))


def test_headers_and_a_path_before_v1_reach_the_server():
    message = Target("http://127.0.0.1:80/base", "m", headers={"Authorization": "Bearer key"}).message(
        BenchRequest([5], 3)
    )
    head, _, body = message.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: 127.0.0.1:80\r\n")
    assert b"\r\nAuthorization: Bearer key" in head and b"\r\nContent-Length: %d\r\n" % len(body) in head
    assert json.loads(body)["prompt"] == [5]


def test_prepared_messages_are_those_of_their_requests():
    with faked(at_once) as (url, fake):

        async def play():
            client = Client(Target(url, "m"))
            work = [BenchRequest([place], 1) for place in range(5)]
            client.prepare(work)
            return await clients.closed_loop(client, work, 1)

        assert [seen.error for seen in asyncio.run(play())] == [None] * 5
    assert [body["prompt"] for body in fake.bodies] == [[place] for place in range(5)]


def test_a_closed_loop_never_exceeds_its_number_of_clients():
    class Counting:
        at_work = most = 0

        def now(self):
            return 0.0

        async def ask(self, request, due):
            self.at_work += 1
            self.most = max(self.most, self.at_work)
            await asyncio.sleep(0)
            self.at_work -= 1
            return RequestTimes(due)

    client = Counting()
    assert len(asyncio.run(clients.closed_loop(client, [BenchRequest([5], 1)] * 9, 3))) == 9
    assert client.most == 3


def test_the_latency_of_a_late_request_starts_when_it_was_due():
    """The clock reads 5 s when requests due at 1 s and 2 s are sent."""

    class Late:
        def now(self):
            return 5.0

        async def ask(self, request, due):
            return RequestTimes(due, sent=self.now(), arrivals=[(6.0, 1)], end=6.0)

    work = [BenchRequest([5], 1, due=due) for due in (1.0, 2.0)]
    measured = asyncio.run(clients.open_loop(Late(), work))
    assert [each.ttft for each in measured] == [5.0, 4.0]
    assert serve.summary(work, measured)["late_s"]["p99"] == 4.0
