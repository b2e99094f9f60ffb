"""The server's log: a line of JSON for each message and each request, and a reader that is stuck holds no one."""

import io
import json
import logging
import os
import signal
import socket
import sys
import threading

import httpx
import pytest

from minillm.server import logs
from minillm.server.access import Access
from minillm.server.logs import HELD, JsonLines, Unhurried
from tests.server.processes import serving
from tests.server.test_supervisor import engine_of
from tests.waiting import TIMEOUT, wait_until

SECRET = "The lighthouse keeper"
BODY = {"prompt": SECRET, "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def quiet():
    """The root logger and minillm's are as they were afterward."""
    loggers = [logging.getLogger(name) for name in (None, "minillm", "minillm.server.access", "asyncio")]
    before = [(each.level, each.handlers) for each in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


def test_a_served_request_is_a_line_of_json_without_its_text(model_directory):
    """Whatever the server's processes write is JSON: its own messages, uvicorn's, and one line for each request."""
    options = ("--log-format", "json", "--log-level", "info")
    command = [*options, "--max-per-client", "3"]
    with serving(model_directory, *command, announced="stderr") as (process, url):
        with httpx.Client(base_url=url, timeout=TIMEOUT) as client:

            def ask(name: str, path: str = "/v1/completions", **more) -> None:
                client.post(path, json=BODY | more, headers={"x-request-id": name})

            ask("whole", n=2)
            ask("streamed", stream=True)
            ask("many", n=4)
            ask("two", prompt=[[5, 6, 7], [8, 9]], n=1)
            ask("wrong", max_tokens=0)
            ask("nowhere", "/nothing")
            client.get("/health")
            client.get("/metrics")
        engine = engine_of(process)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: engine_of(process) != engine)
        wait_until(lambda: httpx.get(url + "/health", timeout=TIMEOUT).status_code == 200)
        process.terminate()
        output, errors = process.communicate(timeout=TIMEOUT)
    lines = [json.loads(line) for line in (output + errors).splitlines()]
    assert SECRET not in errors and all(line["time"].endswith("Z") and line["pid"] for line in lines)
    requests = {line["request_id"]: line for line in lines if "request_id" in line}
    assert {"whole", "streamed", "many", "wrong", "nowhere"} <= requests.keys()
    assert all(line["path"] not in ("/health", "/metrics") or line["status"] == 503 for line in requests.values())
    whole, streamed = requests["whole"], requests["streamed"]
    assert (whole["method"], whole["path"], whole["status"]) == ("POST", "/v1/completions", 200)
    assert (whole["client"], whole["level"]) == ("127.0.0.1", "info")
    assert (whole["output_tokens"], whole["finish_reasons"]) == (10, {"length": 2})
    assert (streamed["output_tokens"], streamed["finish_reasons"]) == (5, {"length": 1})
    assert 0 < whole["prompt_tokens"] == streamed["prompt_tokens"] < 30
    assert (requests["two"]["prompt_tokens"], requests["two"]["output_tokens"]) == (3 + 2, 5 + 5)
    assert all(0 < line["first_token_seconds"] <= line["seconds"] for line in (whole, streamed))
    assert [(requests[name]["status"], requests[name].get("error")) for name in ("many", "wrong", "nowhere")] == [
        (429, "server_busy"),
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
    ]
    assert any("the engine's process has ended" in line["message"] and line["level"] == "warning" for line in lines)
    assert len({line["pid"] for line in lines}) > 1


@pytest.mark.parametrize(
    ("form", "level", "seen"),
    [("text", "info", False), ("text", "debug", True), ("json", "info", True), ("json", "warning", False)],
)
def test_requests_are_shown_as_json_or_when_debugging(quiet, form, level, seen):
    output = io.StringIO()
    handler = logs.set_up(form, level, output)
    Access("an-id", "10.0.0.1", "GET", "/v1/models", status=200).write()
    wait_until(lambda: not handler._waiting.unfinished_tasks)
    assert ("/v1/models" in output.getvalue()) == seen


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_path_cannot_begin_a_line_of_its_own(quiet, form):
    output = io.StringIO()
    handler = logs.set_up(form, "debug", output)
    Access("an-id", "10.0.0.1", "GET", "/v1\nminillm: all is well\u2028", status=404).write()
    wait_until(lambda: not handler._waiting.unfinished_tasks)
    assert len(output.getvalue().splitlines()) == 1 and "all is well" in output.getvalue()


def test_an_exception_is_part_of_its_line():
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a.logger", logging.ERROR, "a.py", 1, "it broke: %s", ("here",), info)
    record.created, record.msecs = 0.25, 250.0
    line = JsonLines().format(record)
    found = json.loads(line)
    assert "\n" not in line and "ValueError: first\nsecond" in found["exception"]
    assert (found["time"], found["level"], found["message"]) == ("1970-01-01T00:00:00.250Z", "error", "it broke: here")


class Stuck(logging.Handler):
    """Waits until the test lets it go on, like a pipe that is full."""

    def __init__(self):
        super().__init__()
        self.free, self.seen = threading.Event(), []

    def emit(self, record):
        assert self.free.wait(TIMEOUT)
        self.seen.append(record.getMessage())


def test_a_log_that_nobody_reads_holds_no_one_and_drops_what_finds_no_room():
    stuck = Stuck()
    waiting = Unhurried(stuck)
    for number in range(HELD + 10):
        waiting.emit(logging.LogRecord("a", logging.INFO, "a.py", 1, str(number), (), None))
    stuck.free.set()
    wait_until(lambda: not waiting._waiting.unfinished_tasks)
    assert stuck.seen[:3] == ["0", "1", "2"] and HELD <= len(stuck.seen) <= HELD + 1


def test_an_output_that_fails_loses_the_message_and_no_later_one(monkeypatch, capsys):
    class Full(io.StringIO):
        full = True

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    output = Full()
    handler = Unhurried(logging.StreamHandler(output))
    for text in ("lost", "kept"):
        handler.emit(logging.LogRecord("a", logging.INFO, "a.py", 1, text, (), None))
        wait_until(lambda: not handler._waiting.unfinished_tasks)
        output.full = False
    assert output.getvalue() == "kept\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can make a pipe small")
@pytest.mark.proof
@pytest.mark.parametrize("form, announced", [("json", "stderr"), ("text", "stdout")])
def test_a_server_whose_log_nobody_reads_goes_on_and_stops(model_directory, form, announced):
    """All of its processes write to pipes that are full."""
    fcntl = pytest.importorskip("fcntl")
    with serving(model_directory, "--log-format", form, announced=announced) as (process, url):
        for pipe in (process.stdout, process.stderr):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", httpx.URL(url).port), TIMEOUT) as client:
                client.sendall(b"HELLO\r\n\r\n")
                assert client.recv(1000).startswith(b"HTTP/1.1 400")  # and a line of the log
        assert httpx.get(url + "/health", timeout=TIMEOUT).status_code == 200
        process.terminate()
        assert process.wait(TIMEOUT) == 0
