"""`minillm serve` replaces an engine that dies or is stuck; workers stay, and clients are told."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minillm.engine.async_llm import AsyncLLM
from minillm.server.config import ServerConfig
from minillm.server.control import Control
from minillm.server.engine_side import engine_process
from minillm.server.engine_side.engine_process import run
from minillm.server.ledger import Ledger
from minillm.server.supervisor import supervisor
from minillm.server.supervisor.fleet import ServerFailed
from minillm.server.supervisor.supervisor import Supervisor
from tests.server.processes import commands_below, serving
from tests.waiting import TIMEOUT, paused_steps, wait_until

BODY = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = BODY | {"max_tokens": 10**6, "stream": True}
UNBOUNDED = ("--max-model-len", "64", "--attention-sinks", "4", "--attention-window", "32")


def children(process) -> dict[int, str]:
    """The process ids of a server's processes, and what each runs."""
    return {pid: words[-1] for pid, words in commands_below(process.pid).items()}


def engine_of(process) -> int | None:
    return next((pid for pid, command in children(process).items() if command.endswith("engine_process")), None)


def workers_of(process) -> set[int]:
    return {pid for pid, command in children(process).items() if command.endswith("server.worker.worker")}


def status(url: str, path: str = "/v1/health/ready") -> int:
    return httpx.get(url + path, timeout=TIMEOUT).status_code


RISING = ("_total", "_count", "_sum")


def scrape(url: str) -> dict[tuple[str, str | None], float]:
    """The samples of /metrics by name and by what they are distinguished, without buckets."""
    families = text_string_to_metric_families(httpx.get(url + "/metrics", timeout=TIMEOUT).text)
    return {
        (sample.name, sample.labels.get("status") or sample.labels.get("reason")): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


@pytest.fixture
def own_model(model_directory, tmp_path):
    return shutil.copytree(model_directory, tmp_path / "model")


def test_a_killed_engine_is_replaced_and_clients_are_told(own_model):
    """While the model's files are away, the new engine cannot start."""
    with serving(own_model, "--workers", "2", *UNBOUNDED) as (process, url):
        before, engine = workers_of(process), engine_of(process)
        assert httpx.post(url + "/v1/completions", json=BODY, timeout=TIMEOUT).status_code == 200
        wait_until(lambda: scrape(url).get(("minillm_finished_total", "length")) == 1)  # the supervisor has heard of it
        working = scrape(url)
        with httpx.stream("POST", url + "/v1/completions", json=ENDLESS, timeout=TIMEOUT) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            (own_model / "config.json").rename(own_model / "away")
            os.kill(engine, signal.SIGKILL)
            *_, error, end = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_restarting"
        assert end == "data: [DONE]"
        refused = httpx.post(url + "/v1/completions", json=BODY, timeout=TIMEOUT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        paths = ("/v1/health/ready", "/v1/health/live", "/metrics", "/v1/metrics")
        assert [status(url, path) for path in paths] == [503, 200, 200, 200]
        # The stream that broke, the request that was refused, and the look at the engine's health.
        wait_until(lambda: scrape(url).get(("minillm_http_requests_total", "503")) == 3)
        down = scrape(url)
        (own_model / "away").rename(own_model / "config.json")
        wait_until(lambda: status(url) == 200)
        after = scrape(url)
        assert [each["minillm_engine_up", None] for each in (working, down, after)] == [1, 0, 1]
        assert [each["minillm_engine_restarts_total", None] for each in (working, down, after)] == [0, 1, 1]
        assert ("minillm_http_requests_total", "503") not in working
        for earlier, later in ((working, down), (down, after)):
            fell = [name for name, value in earlier.items() if name[0].endswith(RISING) and later[name] < value]
            assert not fell and later["minillm_finished_total", "length"] == 1
        assert "vllm:num_requests_running" not in {name for name, _ in down}, "nobody knows"
        # Each worker has a connection to the new engine.
        for asleep in before:
            os.kill(asleep, signal.SIGSTOP)
            answer = httpx.post(url + "/v1/completions", json=BODY, timeout=TIMEOUT)
            os.kill(asleep, signal.SIGCONT)
            assert answer.status_code == 200
        assert workers_of(process) == before and engine_of(process) != engine
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert "the engine's process has ended (killed by SIGKILL); starting another one" in errors
    assert "the engine is back" in errors


@pytest.mark.proof
def test_a_stuck_engine_is_replaced_and_all_processes_end_with_their_owner(model_directory):
    with serving(model_directory, "--hang-timeout", "5", *UNBOUNDED) as (process, url):
        before, engine = workers_of(process), engine_of(process)
        with httpx.stream("POST", url + "/v1/completions", json=ENDLESS, timeout=TIMEOUT) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            os.kill(engine, signal.SIGSTOP)
            *_, error, _ = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_restarting"
        wait_until(lambda: status(url) == 200)
        assert workers_of(process) == before and engine_of(process) != engine
        left = children(process)
        process.kill()
        process.communicate(timeout=TIMEOUT)  # the pipes close when the last of them has exited
    assert len(left) == 2


def test_an_engine_that_cannot_start_ends_the_server_with_its_message(model_directory):
    command = ["serve", "--port", "0", "--device", "cpu", "--model", str(model_directory), "--max-num-seqs", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "minillm.cli", *command], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 2
    assert "max_num_seqs" in done.stderr and "Traceback" not in done.stderr


# ---- the supervisor, with engines that the test plays


class Played:
    """An engine's process whose reports the test makes."""

    made: list["Played"]

    def __init__(self, module, given):
        self.made.append(self)
        self.sent, self.control = [], self
        self.process = SimpleNamespace(kill=lambda: self.sent.append("kill"))

    def listen(self, on_message, on_close):
        self.report, self.close = on_message, on_close

    def reap(self):
        return "exit status 1"


class NoWorkers:
    def __init__(self):
        self.heard, self.ledger = [], Ledger()
        self.waits = []  # seconds until there is an engine, as clients are told

    def start(self, connect, reload):
        self.heard.append("start")

    def engine_lost(self, seconds):
        self.heard.append("lost")
        self.waits.append(seconds)

    def engine_back(self, connect, reload):
        self.heard.append("back")

    def join(self):
        threading.Event().wait()


@pytest.fixture
def played(monkeypatch):
    """A supervisor that has started; its engines are `Played.made`."""
    Played.made, delays = [], []

    class Timer:
        daemon = False

        def __init__(self, seconds, function):
            delays.append(seconds)
            self.start = function

    monkeypatch.setattr(supervisor, "Child", Played)
    monkeypatch.setattr(supervisor.threading, "Timer", Timer)
    monkeypatch.setattr(supervisor, "TICK", TIMEOUT)  # no wall clock: these tests make every report themselves
    workers = NoWorkers()
    found = Supervisor(workers, "", hang_timeout=5, load_timeout=60)
    thread = threading.Thread(target=found.start)
    thread.start()
    wait_until(lambda: Played.made and hasattr(Played.made[0], "report"))
    Played.made[0].report({"op": "ready", "model": "m"})
    thread.join()
    yield SimpleNamespace(supervisor=found, workers=workers, engines=Played.made, delays=delays)
    found._over.set()  # ends its thread


def test_an_engine_that_is_long_in_one_step_is_killed(played):
    (engine,) = played.engines
    engine.report({"op": "beat", "working": 4.0})
    assert engine.sent == []
    engine.report({"op": "beat", "working": 6.0})
    assert engine.sent == ["kill"]
    engine.close()
    played.engines[1].report({"op": "ready", "model": "m"})
    assert played.workers.heard == ["start", "lost", "back"]


def test_an_engine_that_loads_for_too_long_is_killed(played):
    look = played.supervisor._look
    played.engines[0].close()
    began = played.supervisor._began
    look(began + 59)
    assert played.engines[1].sent == [], "a silence means nothing while it loads"
    look(began + 61)
    assert played.engines[1].sent == ["kill"]
    played.engines[1].close()
    assert played.delays == [1]
    played.engines[2].report({"op": "ready", "model": "m"})
    played.supervisor._began -= 100
    look(played.supervisor._heard + 4)
    assert played.engines[2].sent == [], "it is ready"
    look(played.supervisor._heard + 6)
    assert played.engines[2].sent == ["kill"], "it is silent"


def test_an_engine_that_does_not_start_again_is_retried_with_growing_delays_then_given_up(played):
    def close_latest():
        played.engines[-1].close()

    close_latest()  # it ran: another one is started at once
    assert (len(played.engines), played.delays) == (2, [])
    while len(played.engines) < 7:
        close_latest()
    assert played.delays == [1, 2, 4, 8, 16]
    loading = played.supervisor._loading
    assert played.workers.waits[-1] == 16 + loading, "clients are told to wait for the retry too"
    close_latest()
    with pytest.raises(ServerFailed, match="the engine could not be started: exit status 1"):
        played.supervisor.join()
    assert len(played.engines) == 7


def test_retries_begin_again_after_an_engine_was_ready(played, monkeypatch):
    monkeypatch.setattr(supervisor, "STEADY", 0)
    for _ in range(2):
        played.engines[-1].close()
    played.engines[-1].report({"op": "ready", "model": "m"})
    for _ in range(2):
        played.engines[-1].close()
    assert played.delays == [1, 1]


def test_engines_that_end_soon_after_they_were_ready_are_replaced_later_and_later_then_given_up(played):
    for count in range(1, 6):
        played.engines[-1].close()
        assert len(played.engines) == count + 1
        played.engines[-1].report({"op": "ready", "model": "m"})
    assert played.delays == [1, 2, 4, 8]
    played.engines[-1].close()
    with pytest.raises(ServerFailed, match="6 engines in a row have ended within 30 s, the last one .exit status 1"):
        played.supervisor.join()
    assert len(played.engines) == 6


# ---- the engine's process


class NoMailbox:
    def deliver(self, items): ...


def test_the_engine_tells_how_long_a_step_takes_and_how_many_have_failed(model_directory, monkeypatch):
    engine = AsyncLLM(model_directory, load_format="dummy", device="cpu", max_num_seqs=4)
    wait_until(lambda: engine.working == 0)
    with paused_steps() as resume:
        mailbox = NoMailbox()
        engine.submit([engine.prepare([5, 6], None, mailbox, 1)])
        wait_until(lambda: engine.working > 0.01)
        resume.set()
    wait_until(lambda: engine.working == 0)
    assert engine.failed_steps == 0

    def fail():
        raise ArithmeticError("a mistake")

    monkeypatch.setattr(engine.engine, "step", fail)
    for count in (1, 2):
        engine.submit([engine.prepare([5, 6], None, mailbox, 1)])
        wait_until(lambda count=count: engine.failed_steps >= count)
    engine.close()


class Failing:
    """An engine of which so many steps have failed, and whose thread ends some beats later."""

    name, working, failure = "m", 0.0, None
    config, stats = SimpleNamespace(max_num_seqs=4), dict

    def __init__(self, failed_steps, beats):
        self.failed_steps, self.beats = failed_steps, beats

    @property
    def alive(self):
        self.beats -= 1
        return self.beats >= 0


@pytest.mark.parametrize(
    "engine, why", [(Failing(0, 0), "thread has ended"), (Failing(3, 9), "3 steps in a row have failed")]
)
def test_a_failed_engine_ends_its_process(monkeypatch, engine, why, caplog):
    loader = SimpleNamespace(restore=lambda changes: None)
    hub = SimpleNamespace(connect=None, close=lambda: None, alive=True, counted=list, loader=loader)
    monkeypatch.setattr("minillm.engine.async_llm.AsyncLLM", lambda model, **options: engine)
    monkeypatch.setattr("minillm.server.engine_side.hub.Hub", lambda engine, name, config, changed: hub)
    monkeypatch.setattr(engine_process, "BEAT", 0.001)
    exited = threading.Event()
    monkeypatch.setattr("os._exit", lambda code: exited.set())
    ours, theirs = socket.socketpair()
    with pytest.raises(SystemExit, match="1"):
        run(Control(theirs), model=None, profile=None, name=None, engine={}, config=ServerConfig())
    assert [json.loads(line)["op"] for line in ours.recv(4096).splitlines()] == ["ready", "beat"]
    ours.close()
    assert exited.wait(TIMEOUT), "it outlives its owner"
    assert why in caplog.text
