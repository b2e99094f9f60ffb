"""The worker processes: they share a port, die without taking anything along, and never outlive the engine."""

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
from minillm.server.serving import Workers
from tests.waiting import PATIENCE, gate, idle, until

BODY = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
ENDLESS = BODY | {"max_tokens": 240, "stream": True}
SMALL = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4}


def pids(server) -> list[int]:
    return [process.pid for process in server.workers.processes.values()]


def ask(server, **more):
    return httpx.post(server.url + "/v1/completions", json=BODY | more, timeout=PATIENCE)


@pytest.fixture
def pair(engine):
    """A server of two workers."""
    with running(engine, workers=2) as server:
        yield server
        for pid in pids(server):
            os.kill(pid, signal.SIGCONT)


def test_each_worker_serves_the_same_port_and_any_of_them_tells_the_whole_servers_numbers(pair):
    first, second = pids(pair)
    answers = []
    for asleep, awake in ((first, second), (second, first)):
        os.kill(asleep, signal.SIGSTOP)
        answers.append(ask(pair).json()["choices"][0]["token_ids"])
        text = httpx.get(pair.url + "/metrics", timeout=PATIENCE).text
        os.kill(asleep, signal.SIGCONT)
        assert awake != asleep
    assert answers[0] == answers[1]
    assert 'minillm_http_requests_total{status="200"} 2.0' in text.splitlines()
    assert "minillm_generated_tokens_total 12.0" in text.splitlines()


def test_a_worker_that_is_stuck_does_not_hold_up_the_engine(pair, engine):
    first, second = pids(pair)
    os.kill(first, signal.SIGSTOP)
    with httpx.stream("POST", pair.url + "/v1/completions", json=ENDLESS, timeout=PATIENCE) as response:
        lines = response.iter_lines()  # without a name it would be closed at once, and the stream with it
        next(lines)
        os.kill(second, signal.SIGSTOP)  # which serves this stream
        os.kill(first, signal.SIGCONT)
        assert ask(pair).status_code == 200
    os.kill(second, signal.SIGCONT)
    until(lambda: idle(engine))


def test_a_worker_that_dies_is_replaced_and_what_it_ran_is_aborted(engine, caplog):
    with gate(free=6) as opened, running(engine) as server:
        (before,) = pids(server)
        with (
            pytest.raises(httpx.TransportError),
            httpx.stream("POST", server.url + "/v1/completions", json=ENDLESS, timeout=PATIENCE) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            os.kill(before, signal.SIGKILL)
            list(lines)
        until(lambda: pids(server) not in ([], [before]))
        opened.set()
        until(lambda: idle(engine))
        counted = server.workers.hub.metrics.registry.get_sample_value
        assert counted("minillm_finished_total", {"reason": "abort"}) == 1, "it ran on to its end"
        assert ask(server).status_code == 200
        assert pids(server) != [before]
    assert "an HTTP worker ended (killed by SIGKILL); another takes its place" in caplog.text


@pytest.mark.parametrize("error", [BlockingIOError(11, "no process is left"), ArithmeticError("a mistake")])
def test_a_worker_that_cannot_be_replaced_leaves_the_others_at_work(pair, monkeypatch, caplog, error):
    """What the machine refuses is tried again, until there is a worker more; a mistake ends nobody else."""
    (first, second), launch, tried = pids(pair), pair.workers._launch, []

    def fail():
        tried.append(True)
        if len(tried) < 3:
            raise error
        return launch()

    monkeypatch.setattr("minillm.server.serving.RETRY", 0.05)
    monkeypatch.setattr(pair.workers, "_launch", fail)
    os.kill(first, signal.SIGKILL)
    until(lambda: tried)
    assert ask(pair).status_code == 200
    if isinstance(error, OSError):
        until(lambda: len(pids(pair)) == 2)
        line = next(line for line, process in pair.workers.processes.items() if process.pid != second)
        line.ready.result(PATIENCE)
        os.kill(second, signal.SIGSTOP)
        assert ask(pair).status_code == 200
        assert "cannot be started ([Errno 11] no process is left); trying again soon" in caplog.text


def dying(monkeypatch):
    """From now on, what is started as a worker ends at once."""
    monkeypatch.setattr("minillm.server.serving.RETRY", 0.05)
    monkeypatch.setattr("sys.executable", shutil.which("false"))


def test_a_worker_that_dies_while_it_starts_is_replaced_until_one_comes_up(pair, monkeypatch, caplog):
    """Each time later than the time before."""
    (first, second), launch, again, delays = pids(pair), pair.workers._launch, sys.executable, []
    timer = threading.Timer

    def timed(seconds, *rest):
        delays.append(seconds)
        return timer(seconds, *rest)

    def launched():
        if len(delays) == 3:
            monkeypatch.setattr("sys.executable", again)
        return launch()

    monkeypatch.setattr("threading.Timer", timed)
    monkeypatch.setattr(pair.workers, "_launch", launched)
    dying(monkeypatch)
    os.kill(first, signal.SIGKILL)
    until(lambda: len(delays) == 3 and len(pids(pair)) == 2)
    assert delays == [0.05, 0.1, 0.2]
    line = next(line for line, process in pair.workers.processes.items() if process.pid != second)
    line.ready.result(PATIENCE)
    os.kill(second, signal.SIGSTOP)
    assert ask(pair).status_code == 200
    assert (
        caplog.text.count("died while starting: exit status 1; what it wrote to stderr may say why; trying again") == 3
    )
    # It came up: the next worker that dies is replaced as patiently.
    os.kill(second, signal.SIGCONT)
    os.kill(line_pid := pair.workers.processes[line].pid, signal.SIGKILL)
    until(lambda: len(pids(pair)) == 2 and line_pid not in pids(pair))


def test_a_server_whose_first_worker_is_killed_while_it_starts_comes_up(engine, monkeypatch):
    again, launch = sys.executable, Workers._launch

    def launched(workers):
        line = launch(workers)
        monkeypatch.setattr("sys.executable", again)
        return line

    monkeypatch.setattr(Workers, "_launch", launched)
    dying(monkeypatch)
    with running(engine) as server:
        assert ask(server).status_code == 200


def test_a_server_whose_workers_all_die_while_they_start_says_so(engine, monkeypatch):
    dying(monkeypatch)
    monkeypatch.setattr("minillm.server.serving.RETRIES", 2)
    with pytest.raises(RuntimeError, match="died while starting: exit status 1"), running(engine, workers=2):
        pass


def test_when_the_last_worker_dies_and_its_successors_die_while_they_start_serving_ends(engine, monkeypatch):
    monkeypatch.setattr("minillm.server.serving.RETRIES", 2)
    with running(engine) as server:
        dying(monkeypatch)
        os.kill(pids(server)[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="no HTTP worker is left: .* died while starting: exit status 1"):
            server.workers.join()


def test_when_no_worker_can_be_started_any_more_serving_ends(engine, monkeypatch):
    monkeypatch.setattr("minillm.server.serving.RETRY", 0.05)
    monkeypatch.setattr("minillm.server.serving.RETRIES", 2)
    with running(engine) as server:

        def none(*arguments, **options):
            raise OSError(24, "too many open files")

        monkeypatch.setattr("subprocess.Popen", none)
        os.kill(pids(server)[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="no HTTP worker is left"):
            server.workers.join()


def test_a_worker_that_cannot_start_is_the_callers_error(model_directory, tmp_path):
    """Its tokenizer is gone since the engine read it."""
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
    "wrong", [{"workers": 0}, {"workers": "two"}, {"max_queued": -1}, {"body_timeout": 0}], ids=str
)
def test_counts_that_make_no_sense_are_refused_before_the_model_loads(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))), running("no/such/model", **wrong):
        pass


def test_a_missing_package_is_named_before_the_model_loads(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="'fastapi'.*minillm\\[serve\\]"), running("no/such/model"):
        pass


# A script without `if __name__ == "__main__"`, run from another folder, with a name of Python's own beside it.
SCRIPT = """\
import sys
from minillm.server import running
from minillm.server.serving import Workers
manager = running(sys.argv[1], load_format="dummy", device="cpu", max_num_seqs=4, workers=2)
print(manager.__enter__().url, flush=True)
sys.stdin.read()
"""


def test_workers_end_with_the_engines_process_however_it_dies(model_directory, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "json.py").write_text("raise ImportError('the folder of the script stands in for a module')")
    command = [sys.executable, "-P", "../script.py", str(model_directory)]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "asyncio.py").write_text("raise ImportError('the current folder stands in for a module')")
    root = os.pathsep.join(path for path in sys.path if path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": root}, **pipes) as process:
        url = process.stdout.readline().strip()
        assert httpx.post(url + "/v1/completions", json=BODY, timeout=PATIENCE).status_code == 200
        process.kill()
        # The workers hold the other end of this pipe: it ends when the last of them has.
        assert process.stdout.read() == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))


@pytest.mark.parametrize("by", ["terminal", "manager"])
def test_serve_stops_on_ctrl_c_and_on_sigterm(model_directory, by):
    command = [sys.executable, "-m", "minillm.cli", "serve", "--port", "0", "--model", str(model_directory)]
    command += ["--load-format", "dummy", "--device", "cpu", "--max-num-seqs", "4", "--workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        line = process.stdout.readline()
        url = line.split()[4].removesuffix("/v1")
        body = ENDLESS | {"max_tokens": 20}  # soon done, with little of the workers' grace
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            if by == "terminal":  # Ctrl-C reaches the whole foreground process group
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]", "what was in flight did not finish"
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "has stopped" in output
        assert "Traceback" not in errors
