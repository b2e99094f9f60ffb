"""Replicas on a Ray cluster of two nodes: more of them while tokens wait, and what becomes of streams when one ends.

All are proofs: they wait for processes to start.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from minillm.deploy import head
from minillm.deploy.handshake import new_secret
from tests.deploy.gated_engine import GATE
from tests.deploy.test_on_ray import TINY, Server
from tests.waiting import TIMEOUT, wait_until

pytest.importorskip("ray", reason="Ray is not installed: make proofs installs it")
pytestmark = [pytest.mark.proof, pytest.mark.timeout(4 * TIMEOUT)]

ROOT = Path(__file__).parents[2]
# Ray's proxy has 5 seconds to start and 10 to answer, too few on a busy machine.
PROXY = dict.fromkeys(("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"), str(TIMEOUT))
LONG = {"max_tokens": 60, "stream": True}


class Cluster:
    """The process of `cluster`, and what Ray's processes need to talk to it."""

    def __init__(self, process: subprocess.Popen, environment: dict[str, str], gate: Path):
        self.process, self.environment, self.gate = process, environment, gate
        self.address = self._read()

    def _read(self) -> str:
        found = (re.match("cluster: (.*)", line) for line in self.process.stdout)
        return next(filter(None, found))[1]

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert (answer := self._read()) == "done", answer


@contextmanager
def ended(process: subprocess.Popen):
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    gate = tmp_path_factory.mktemp("cluster", numbered=True) / "gate"
    environment = os.environ | head.LOCAL | head.PATIENT | head.QUIET | PROXY
    environment |= {"RAY_AUTH_TOKEN": new_secret(), GATE: str(gate), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.deploy.cluster"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield Cluster(process, environment, gate)
        process.stdin.close()
        process.wait(TIMEOUT)


@pytest.fixture(scope="module")
def server(cluster):
    command = [sys.executable, "-m", "tests.deploy.served", "serve", "--port", "0", "--ray-address", cluster.address]
    command += ["--device", "cpu", "--max-num-seqs", "4", "--shutdown-grace", str(TIMEOUT)]
    command += ["--router", "tests.deploy.policies:by_parity", "--model", f"one={TINY}", "--model", f"two={TINY}"]
    command += ["--set", "one:replicas=1,max_replicas=2,waiting_tokens=50,cpus=0.1", "--set", "two:replicas=2,cpus=1.5"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=cluster.environment) as process,
        ended(process),
    ):
        found = (re.search(r"(http://\S+)/v1", line) for line in process.stdout)
        yield Server(process, next(filter(None, found))[1], cluster.gate)


def read(server: Server, model: str, prompt: str, tokens: list[int]) -> None:
    for chunk in server.complete(prompt, model=model, **LONG):
        tokens += chunk.choices[0].token_ids


PAIR = ("The keeper", "The keeper of")  # one of them has an odd number of tokens


def up(server: Server, model: str) -> float:
    return server.metric("minillm_replicas_up", model)


def streams(pool: ThreadPoolExecutor, server: Server, model: str):
    """Two streams, which go to different replicas if there are two; their tokens, and what ends with each."""
    tokens = [[], []]
    return tokens, [pool.submit(read, server, model, *each) for each in zip(PAIR, tokens, strict=True)]


def test_an_application_of_serve_run_answers_and_an_update_ends_no_stream(cluster):
    """Before the server, which starts Ray Serve without a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def run(rows: int) -> None:
        options = {"device": "cpu", "max_num_seqs": rows}
        model = {"name": "three", "model": str(TINY), "replicas": 1, "cpus": 0.1, "options": options}
        cluster.tell("run " + json.dumps({"port": port, "models": [model], "shutdown_grace": TIMEOUT}))

    run(2)
    ours = Server(cluster.process, f"http://127.0.0.1:{port}", cluster.gate)
    wanted = ours.complete(PAIR[0], model="three", max_tokens=60).choices[0].token_ids
    with ThreadPoolExecutor(2) as pool:
        tokens = []
        with ours.held(20):
            stream = pool.submit(read, ours, "three", PAIR[0], tokens)
            wait_until(lambda: tokens)
            before = ours.replicas("three")
            update = pool.submit(run, 3)
            wait_until(lambda: ours.replicas("three") - before)
            assert not stream.done()
        stream.result(TIMEOUT)
        update.result(TIMEOUT)
    assert tokens == wanted
    assert ours.complete(PAIR[1], model="three", max_tokens=4).choices[0].text
    cluster.tell("delete")


def test_waiting_tokens_start_a_replica_which_ends_without_harm_to_streams(server):
    """Streams run all the time, on both replicas, while the number of replicas changes."""
    wanted = {each: server.complete(each, max_tokens=60).choices[0].token_ids for each in PAIR}
    moved = server.metric("minillm_choices_moved_total")

    def keep_busy(clients: int, replicas: int) -> None:
        over = threading.Event()

        def ask(prompt: str) -> None:
            while not over.is_set():
                tokens = []
                read(server, "one", prompt, tokens)
                assert tokens == wanted[prompt]

        with ThreadPoolExecutor(clients) as pool:
            asking = [pool.submit(ask, PAIR[place % 2]) for place in range(clients)]
            try:
                wait_until(lambda: up(server, "one") == replicas or any(each.done() for each in asking))
            finally:
                over.set()
            for each in asking:
                each.result(TIMEOUT)

    keep_busy(8, replicas=2)  # an engine runs four at a time
    keep_busy(2, replicas=1)
    assert server.metric("minillm_choices_moved_total") == moved, "the streams ended where they began"
    wait_until(lambda: len(server.replicas("one")) == 1)


def test_a_killed_node_changes_no_stream_and_is_replaced_by_another(server, cluster):
    wait_until(lambda: up(server, "two") == 2)
    wanted = [server.complete(each, model="two", max_tokens=60).choices[0].token_ids for each in PAIR]
    moved = server.metric("minillm_choices_moved_total")
    with ThreadPoolExecutor(2) as pool:
        with server.held(20):
            tokens, both = streams(pool, server, "two")
            wait_until(lambda: all(tokens) and server.busy("two") == 2)
            cluster.tell("kill")
            wait_until(lambda: server.metric("minillm_choices_moved_total") > moved)
        for each in both:
            each.result(TIMEOUT)
    assert tokens == wanted
    cluster.tell("add")
    wait_until(lambda: up(server, "two") == 2)
