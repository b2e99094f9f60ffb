"""A stopping server refuses new requests, lets running ones finish, and tells clients whose requests it aborts."""

import asyncio
import json
import signal
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

import minillm
from minillm.server import running
from minillm.server.supervisor.fleet import Workers
from minillm.server.worker.body import BodyReader
from minillm.server.worker.connections import Connection
from minillm.tokenizer import Tokenizer
from tests.proofs import only_in_proofs
from tests.server.in_process import worker_here
from tests.server.processes import serving
from tests.waiting import async_wait_until, paused_steps

BODY = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 240}
TIMEOUT = 60  # seconds until a test gives up
SOON = 0.1  # grace period in seconds, in tests that wait for its end


@contextmanager
def stuck_after(steps: int):
    """The engine stops responding after some steps."""
    taken, go_on = [], threading.Event()

    def embedding(ids, weight, scale):
        taken.append(True)
        if len(taken) > steps:
            assert go_on.wait(TIMEOUT)
        return weight[ids] * scale

    with minillm.using(embedding=embedding):
        try:
            yield
        finally:
            go_on.set()


def refuses(port: int) -> bool:
    """Whether new connections are refused."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT).close()
    except ConnectionError:
        return True
    return False


def assert_aborted_stream(text: str) -> None:
    """Check how an aborted stream ends."""
    *_, error, done = [line for line in text.splitlines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert done == "data: [DONE]"


def assert_aborted_response(answer: httpx.Response) -> None:
    """Check the response to an aborted request."""
    assert answer.status_code == 503 and answer.headers["connection"] == "close"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "shutting_down") and "stopping" in error["message"]


def test_running_requests_finish_while_new_connections_are_refused(engine):
    manager = running(engine, shutdown_grace=10 * TIMEOUT)

    async def clients(resume):
        server = await asyncio.to_thread(manager.__enter__)
        port = int(server.url.rsplit(":", 1)[1])
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
            bodies = [BODY, BODY | {"stream": True}]
            asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            await async_wait_until(lambda: server.hub.running == 2)
            stopped = asyncio.create_task(asyncio.to_thread(manager.__exit__, None, None, None))
            await async_wait_until(lambda: refuses(port))
            assert not any(each.done() for each in [*asked, stopped])
            resume.set()
            whole, stream = await asyncio.gather(*asked)
        await stopped
        assert whole.json()["usage"]["completion_tokens"] == 6
        assert stream.text.endswith("data: [DONE]\n\n") and "error" not in stream.text

    with paused_steps() as resume:
        asyncio.run(clients(resume))


def test_after_the_grace_period_every_client_gets_an_error_and_nothing_is_logged(engine, monkeypatch, capfd):
    """One client streams, one waits for its response, one's prompt is being tokenized, one still sends its body."""
    encode, encoding, go_on = Tokenizer.encode, threading.Event(), threading.Event()
    receive, received = BodyReader._receive, []

    def slow(tokenizer, text, add_special_tokens=True):
        if text.startswith("long"):
            encoding.set()
            go_on.wait(TIMEOUT)
        return encode(tokenizer, text, add_special_tokens)

    def receiving(*arguments):
        received.append(True)
        return receive(*arguments)

    async def everything():
        monkeypatch.setattr(Tokenizer, "encode", slow)
        monkeypatch.setattr(BodyReader, "_receive", receiving)
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            async with worker_here(engine, shutdown_grace=SOON) as (port, hub):
                url = f"http://127.0.0.1:{port}/v1/completions"

                def ask(**more):
                    return asyncio.create_task(client.post(url, json=LONG | more))

                request = client.build_request("POST", url, json=LONG | {"stream": True})
                stream = await client.send(request, stream=True)  # its response has started
                whole, long = ask(n=2), ask(prompt="long " * 4000)
                half_reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                writer.write(head + b"content-length: 100\r\n\r\n{")
                await async_wait_until(lambda: hub.running == 3 and encoding.is_set() and len(received) == 4)
            assert_aborted_stream((await stream.aread()).decode())
            assert_aborted_response(await whole)
            assert_aborted_response(await long)
            half = await half_reader.read()
            assert half.startswith(b"HTTP/1.1 503") and b'"code": "shutting_down"' in half
            go_on.set()

    with stuck_after(3):
        asyncio.run(everything())
    assert capfd.readouterr().err == ""


def test_a_client_that_does_not_read_does_not_delay_shutdown(engine, monkeypatch, capfd):
    made, connect = [], Connection.connection_made

    def connected(connection, transport):
        made.append(connection)
        connect(connection, transport)

    async def everything():
        monkeypatch.setattr(Connection, "connection_made", connected)
        monkeypatch.setattr("minillm.server.worker.worker.FLUSH", SOON)
        async with worker_here(engine, shutdown_grace=SOON) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            content = json.dumps(LONG | {"stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(content) + content)
            await reader.readuntil(b"data: ")
            made[0].pause_writing()  # as the transport does when a client does not read
        assert b"[DONE]" not in await reader.read()

    with stuck_after(3):
        asyncio.run(everything())
    assert "Traceback" not in capfd.readouterr().err


def test_a_second_signal_at_any_point_of_stopping_ends_the_grace():
    """Here it arrives as early as possible, before a worker has heard of the first."""

    class Listener:
        shut = 0

        def shutdown(self, how):
            self.shut += 1
            if self.shut == 1:
                raise KeyboardInterrupt

    sent = []
    workers = Workers(Listener(), 1, grace=100_000, hang_timeout=300)
    control = SimpleNamespace(send=sent.append)
    workers.running = [SimpleNamespace(child=SimpleNamespace(control=control, end=lambda seconds: None))]
    with pytest.raises(KeyboardInterrupt):
        workers.stop()
    assert sent == [{"op": "stop", "grace": 0}]


def test_closing_waits_for_the_thread_that_watches_the_workers(monkeypatch):
    ended = []

    def watch(workers):
        workers._closed.wait()
        time.sleep(0.1)
        ended.append(True)

    monkeypatch.setattr(Workers, "_watch", watch)
    workers = Workers(None, 0, grace=0, hang_timeout=300)
    workers.start(connect=lambda sock: None)
    assert not ended
    workers.close()
    assert ended


@pytest.mark.parametrize("sign", ["SIGTERM", *only_in_proofs("SIGINT")])
def test_a_second_signal_stops_at_once_and_tells_the_clients(model_directory, sign):
    """The grace period is longer than the test's timeout, and the stream is endless."""
    streams = ("--max-model-len", "64", "--attention-sinks", "4", "--attention-window", "32")
    with serving(model_directory, "--shutdown-grace", "100000", *streams) as (process, url):
        endless = BODY | {"max_tokens": 10**6, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=endless, timeout=TIMEOUT) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.Signals[sign])
            port, deadline = int(url.rsplit(":", 1)[1]), time.monotonic() + TIMEOUT
            while not refuses(port):
                assert time.monotonic() < deadline, "it still accepts connections"
            assert next(line for line in lines if line).startswith('data: {"id"'), "running requests were aborted"
            process.send_signal(signal.Signals[sign])
            assert_aborted_stream("\n".join(lines))
        output, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert "has stopped" in output and "Traceback" not in errors
