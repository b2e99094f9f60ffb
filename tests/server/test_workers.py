"""Worker processes share a port, crash without affecting anything else, and never outlive the engine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from minillm.engine.async_llm import AsyncLLM
from minillm.errors import MissingPackage
from minillm.server import running
from minillm.server.supervisor.fleet import Worker, Workers
from tests.server.processes import serving, started
from tests.waiting import TIMEOUT, idle, paused_steps, wait_until

BODY = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
ENDLESS = BODY | {"max_tokens": 240, "stream": True}
SMALL = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4}


def pids(server) -> list[int]:
    return [worker.child.process.pid for worker in server.workers.running]


def first_ready(server, other: int) -> int:
    """Wait until a worker other than this one accepts requests; its process id."""

    def ready() -> list[int]:
        running = list(server.workers.running)
        return [each.child.process.pid for each in running if each.ready and each.child.process.pid != other]

    wait_until(ready)
    return ready()[0]


def ask(server, **more):
    return httpx.post(server.url + "/v1/completions", json=BODY | more, timeout=TIMEOUT)


@pytest.fixture
def pair(engine):
    """A server of two workers."""
    with running(engine, workers=2) as server:
        yield server
        for pid in pids(server):
            os.kill(pid, signal.SIGCONT)


def test_all_workers_serve_one_port_and_each_reports_the_whole_servers_metrics(pair):
    first, second = pids(pair)
    answers = []
    for asleep, awake in ((first, second), (second, first)):
        os.kill(asleep, signal.SIGSTOP)
        answers.append(ask(pair).json()["choices"][0]["token_ids"])
        wait_until(lambda: sum(pair.workers.ledger._responses.values()) == 2 * len(answers) - 1)
        text = httpx.get(pair.url + "/metrics", timeout=TIMEOUT).text
        os.kill(asleep, signal.SIGCONT)
        assert awake != asleep
    assert answers[0] == answers[1]
    assert 'minillm_http_requests_total{status="200"} 3.0' in text.splitlines()  # with the first scrape
    assert "minillm_generated_tokens_total 12.0" in text.splitlines()


def test_what_a_worker_tells_reaches_all_others_and_what_it_moved_is_counted():
    class Heard(list):
        """A worker's child, whose control socket keeps what is sent."""

        def __init__(self):
            self.control, self.send, self.close = self, self.append, lambda: None
            self.reap = lambda: "killed"

    workers = [Worker(Heard(), slot, 0) for slot in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fleet = Workers(listener, 3, grace=1, hang_timeout=300)
        fleet.running = list(workers)
        fleet._heard(workers[1], {"op": "tell", "what": {"key": "value"}})
        fleet._heard(workers[1], {"op": "moved", "choices": 3})
        workers[1].why = "it is not started again"
        fleet._gone(workers[1])
        fleet.close()
    told = [{"op": "told", "key": "value", "worker": 1}, {"op": "left", "worker": 1}]
    assert [worker.child for worker in workers] == [told, [], told]
    (moved,) = (family for family in fleet.ledger.families() if family[0] == "minillm_choices_moved")
    assert moved[3] == [["minillm_choices_moved_total", {}, 3]]


def test_a_stuck_worker_does_not_block_the_engine(pair, engine):
    first, second = pids(pair)
    os.kill(first, signal.SIGSTOP)
    with httpx.stream("POST", pair.url + "/v1/completions", json=ENDLESS, timeout=TIMEOUT) as response:
        lines = response.iter_lines()  # a variable keeps the iterator, and so the stream, open
        next(lines)
        os.kill(second, signal.SIGSTOP)  # the worker that serves this stream
        os.kill(first, signal.SIGCONT)
        assert ask(pair).status_code == 200
    os.kill(second, signal.SIGCONT)
    wait_until(lambda: idle(engine))


def test_a_dead_worker_is_replaced_and_its_requests_are_aborted(engine, caplog):
    with paused_steps(free=6) as resume, running(engine) as server:
        (before,) = pids(server)
        assert httpx.get(server.url + "/version", timeout=TIMEOUT).status_code == 200
        with (
            pytest.raises(httpx.TransportError),
            httpx.stream("POST", server.url + "/v1/completions", json=ENDLESS, timeout=TIMEOUT) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            os.kill(before, signal.SIGKILL)
            list(lines)
        wait_until(lambda: pids(server) not in ([], [before]))
        resume.set()
        counted = server.hub.metrics.registry.get_sample_value
        ends = [("minillm_finished_total", {"reason": each}) for each in ("abort", "length")]
        wait_until(lambda: any(counted(*each) for each in ends) and idle(engine))
        assert [counted(*each) or 0 for each in ends] == [1, 0], "its request ran to the end"
        assert ask(server).status_code == 200
        assert pids(server) != [before]
        lines = httpx.get(server.url + "/metrics", timeout=TIMEOUT).text.splitlines()
    assert "minillm_worker_restarts_total 1.0" in lines
    assert 'minillm_http_requests_total{status="200"} 2.0' in lines, "the first worker's are lost"
    assert "an HTTP worker exited (killed by SIGKILL); replacing it" in caplog.text


def test_a_worker_whose_event_loop_is_stuck_is_replaced(engine, caplog):
    with running(engine) as server:
        (before,) = pids(server)
        (worker,) = server.workers.running
        heard = worker.heard
        wait_until(lambda: worker.heard > heard)
        os.kill(before, signal.SIGSTOP)
        with server.workers._lock:
            server.workers._look(worker.heard + 299)
            assert not caplog.messages
            server.workers._look(worker.heard + 301)
        wait_until(lambda: pids(server) not in ([], [before]))
        assert ask(server).status_code == 200
    assert "an HTTP worker has not reported for more than 300 s; ending it" in caplog.text


def test_a_worker_that_hangs_while_it_starts_is_replaced_unless_it_waits_for_an_engine(pair, caplog):
    first, second = pids(pair)
    with pair.workers._lock:
        for worker in pair.workers.running:
            worker.ready = False
        connect = pair.workers._connect
        pair.workers.engine_lost(1.0)
        pair.workers._look(max(worker.heard for worker in pair.workers.running) + 301)
        assert not caplog.messages
        pair.workers.engine_back(connect, 1.0)
        other, stuck = pair.workers.running
        other.ready = True
        other.heard += 1000
        pair.workers._look(stuck.heard + 301)
    wait_until(lambda: second not in pids(pair))
    assert first in pids(pair)
    assert caplog.messages[0] == "an HTTP worker has not reported for more than 300 s; ending it"


@pytest.mark.parametrize("error", [BlockingIOError(11, "no process is left"), ArithmeticError("a mistake")])
def test_the_other_workers_keep_working_when_one_cannot_be_replaced(pair, monkeypatch, caplog, error):
    """If the machine refuses, the server retries until a worker starts; a programming error affects no other worker."""
    (first, second), start, tried = pids(pair), pair.workers._start, []

    def fail(failures):
        tried.append(True)
        if len(tried) < 3:
            raise error
        return start(failures)

    monkeypatch.setattr("minillm.server.supervisor.fleet.RETRY", 0.05)
    monkeypatch.setattr(pair.workers, "_start", fail)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: tried)
    assert ask(pair).status_code == 200
    if isinstance(error, OSError):
        wait_until(lambda: len(pids(pair)) == 2)
        first_ready(pair, second)
        os.kill(second, signal.SIGSTOP)
        assert ask(pair).status_code == 200
        assert "cannot be started ([Errno 11] no process is left); trying again soon" in caplog.text


def dying(monkeypatch):
    """From now on, every new worker process exits at once."""
    monkeypatch.setattr("minillm.server.supervisor.fleet.RETRY", 0.05)
    monkeypatch.setattr("sys.executable", shutil.which("false"))


def test_a_worker_that_dies_on_startup_is_replaced_until_one_starts(pair, monkeypatch, caplog):
    """Each attempt waits longer than the one before."""
    (first, second), start, again, delays = pids(pair), pair.workers._start, sys.executable, []
    timer = threading.Timer

    def timed(seconds, *rest):
        delays.append(seconds)
        return timer(seconds, *rest)

    def started(failures):
        if len(delays) == 3:
            monkeypatch.setattr("sys.executable", again)
        return start(failures)

    monkeypatch.setattr("threading.Timer", timed)
    monkeypatch.setattr(pair.workers, "_start", started)
    dying(monkeypatch)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(delays) == 3 and len(pids(pair)) == 2)
    assert delays == [0.05, 0.1, 0.2]
    replacement = first_ready(pair, second)
    os.kill(second, signal.SIGSTOP)
    assert ask(pair).status_code == 200
    errors = caplog.text
    assert errors.count("died while starting: exit status 1; see its output on stderr; trying again") == 3
    # It started, so the delays for the next dead worker begin again.
    os.kill(second, signal.SIGCONT)
    os.kill(replacement, signal.SIGKILL)
    wait_until(lambda: len(pids(pair)) == 2 and replacement not in pids(pair))


def test_a_server_starts_although_its_first_worker_is_killed_on_startup(engine, monkeypatch):
    again, start = sys.executable, Workers._start

    def started(workers, failures):
        worker = start(workers, failures)
        monkeypatch.setattr("sys.executable", again)
        return worker

    monkeypatch.setattr(Workers, "_start", started)
    dying(monkeypatch)
    with running(engine) as server:
        assert ask(server).status_code == 200


def test_a_server_reports_when_all_workers_die_on_startup(engine, monkeypatch):
    dying(monkeypatch)
    monkeypatch.setattr("minillm.server.supervisor.fleet.RETRIES", 2)
    with pytest.raises(RuntimeError, match="died while starting: exit status 1"), running(engine, workers=2):
        pass


def test_serving_ends_when_the_last_worker_and_all_its_replacements_die(engine, monkeypatch):
    monkeypatch.setattr("minillm.server.supervisor.fleet.RETRIES", 2)
    with running(engine) as server:
        dying(monkeypatch)
        os.kill(pids(server)[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="no HTTP worker is left: .* died while starting: exit status 1"):
            server.workers.join()


def test_serving_ends_when_no_worker_can_be_started(engine, monkeypatch):
    monkeypatch.setattr("minillm.server.supervisor.fleet.RETRY", 0.05)
    monkeypatch.setattr("minillm.server.supervisor.fleet.RETRIES", 2)
    with running(engine) as server:

        def none(*arguments, **options):
            raise OSError(24, "too many open files")

        monkeypatch.setattr("subprocess.Popen", none)
        os.kill(pids(server)[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="no HTTP worker is left"):
            server.workers.join()


def test_a_worker_that_cannot_start_raises_in_the_caller(model_directory, tmp_path):
    """Its tokenizer file was deleted after the engine read it."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in model_directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    engine = AsyncLLM(copy, **SMALL)
    (copy / "tokenizer.json").unlink()
    with (
        pytest.raises(RuntimeError, match="died while starting: TokenizerError: there is no tokenizer.json"),
        running(engine),
    ):
        pass
    assert engine.alive
    engine.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"workers": "two"},
        {"max_queued": -1},
        {"max_wait": -1},
        {"max_wait": "long"},
        {"body_timeout": 0},
    ],
    ids=str,
)
def test_invalid_worker_counts_are_rejected_before_the_model_loads(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))), running("no/such/model", **wrong):
        pass


def test_a_missing_package_is_named_before_the_model_loads(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(MissingPackage, match="needs fastapi, which is not installed: make setup"),
        running("no/such/model"),
    ):
        pass


# A script without `if __name__ == "__main__"`, run from another folder, next to a file named like a standard module.
SCRIPT = """\
import sys
from minillm.server import running
from minillm.server.supervisor.fleet import Workers
manager = running(sys.argv[1], load_format="dummy", device="cpu", max_num_seqs=4, workers=2)
print(manager.__enter__().url, flush=True)
sys.stdin.read()
"""


def test_workers_exit_with_the_engine_process_however_it_dies(model_directory, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "json.py").write_text("raise ImportError('the folder of the script stands in for a module')")
    command = [sys.executable, "-P", "../script.py", str(model_directory)]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "asyncio.py").write_text("raise ImportError('the current folder stands in for a module')")
    root = os.pathsep.join(path for path in sys.path if path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started(command, cwd=folder, env=os.environ | {"PYTHONPATH": root}, **pipes) as process:
        url = process.stdout.readline().strip()
        assert httpx.post(url + "/v1/completions", json=BODY, timeout=TIMEOUT).status_code == 200
        process.kill()
        # The workers hold the other end of this pipe: it closes when the last of them exits.
        assert process.stdout.read() == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))


@pytest.mark.proof
@pytest.mark.parametrize("by", ["manager", "terminal"])
def test_serve_stops_on_ctrl_c_and_on_sigterm(model_directory, by):
    with serving(model_directory, "--workers", "2") as (process, url):
        body = ENDLESS | {"max_tokens": 20}  # finishes quickly, well within the grace period
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=TIMEOUT) as response:
            lines = response.iter_lines()
            next(lines)
            if by == "terminal":  # Ctrl-C reaches the whole foreground process group
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]", "the running request did not finish"
        output, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert "has stopped" in output
        assert "Traceback" not in errors
