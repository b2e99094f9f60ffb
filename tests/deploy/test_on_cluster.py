"""Replicas on a Ray cluster of two nodes: more of them while tokens wait, and what becomes of streams when one ends.

All are proofs: they wait for processes to start.
"""

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from minillm.deploy import head
from minillm.deploy.handshake import new_secret
from minillm.deploy.ports import free_ports
from tests.deploy.gated_engine import GATE
from tests.deploy.test_on_ray import TINY, Server
from tests.waiting import TIMEOUT, wait_until

pytest.importorskip("ray", reason="Ray is not installed: make proofs installs it")
pytestmark = [pytest.mark.proof, pytest.mark.timeout(4 * TIMEOUT)]

ROOT = Path(__file__).parents[2]
# Ray's proxy has 5 seconds to start and 10 to answer, its dashboard has 60 to start: too few on a busy machine.
SLOW = ("SERVE_PROXY_READY_CHECK_TIMEOUT_S", "SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "DASHBOARD_STARTUP_TIMEOUT_S")
PATIENT = {f"RAY_{name}": str(TIMEOUT) for name in SLOW}
# Proxies of two nodes would share one port, and connections to one that ends, as its node has no replicas, would break.
PROXIES = "HeadOnly"
LONG = {"max_tokens": 60, "stream": True}


class Cluster:
    """The process of `cluster`, and what Ray's processes need to talk to it."""

    def __init__(self, process: subprocess.Popen, environment: dict[str, str], gate: Path, dashboard: str):
        self.process, self.environment, self.gate, self.dashboard = process, environment, gate, dashboard
        (self.port,) = free_ports(1)  # of Ray's proxy
        self.address = self._read()

    def _read(self) -> str:
        found = (re.match("cluster: (.*)", line) for line in self.process.stdout)
        return next(filter(None, found))[1]

    def tell(self, command: str) -> str:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self._read()
        assert answer.startswith("done "), answer
        return answer.removeprefix("done ")


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
    environment = os.environ | head.LOCAL | head.PATIENT | head.QUIET | PATIENT
    environment |= {"RAY_AUTH_TOKEN": new_secret(), GATE: str(gate), "PYTHONPATH": str(ROOT)}
    (dashboard,) = free_ports(1)
    command = [sys.executable, "-m", "tests.deploy.cluster", str(dashboard)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield Cluster(process, environment, gate, f"http://127.0.0.1:{dashboard}")
        process.stdin.close()
        process.wait(TIMEOUT)


@contextmanager
def serving(cluster, *options: str):
    """Run `minillm serve` in the cluster until the block ends."""
    command = [sys.executable, "-m", "tests.deploy.served", "serve", "--port", "0", "--ray-address", cluster.address]
    command += ["--router", "tests.deploy.policies:by_parity", "--keep-alive-timeout", str(TIMEOUT), *options]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=cluster.environment) as process,
        ended(process),
    ):
        found = (re.search(r"(http://\S+)/v1", line) for line in process.stdout)
        yield Server(process, next(filter(None, found))[1], cluster.gate)


@pytest.fixture(scope="module")
def server(cluster):
    options = ["--device", "cpu", "--max-num-seqs", "4", "--shutdown-grace", str(TIMEOUT)]
    options += ["--model", f"one={TINY}", "--model", f"two={TINY}"]
    options += ["--set", "one:replicas=1,max_replicas=2,waiting_tokens=50,cpus=0.1", "--set", "two:replicas=2,cpus=1.5"]
    with serving(cluster, *options) as running:
        yield running


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


def behind_rays_proxy(cluster) -> Server:
    return Server(cluster.process, f"http://127.0.0.1:{cluster.port}", cluster.gate)


def test_the_config_file_of_the_docs_and_serve_run_answer_the_openai_client(cluster, tmp_path):
    """Before the server, which starts Ray Serve without a proxy."""
    import yaml

    config = yaml.safe_load((ROOT / "docs" / "replicas.yaml").read_text(encoding="utf-8"))
    small, large = config["applications"][0]["args"]["models"]
    config["http_options"]["port"] = cluster.port
    config["proxy_location"] = PROXIES
    small["options"]["device"] = "cpu"
    large |= {"model": str(TINY), "options": {"device": "cpu"}}  # the other one would have to be downloaded
    file = tmp_path / "replicas.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    tool = [sys.executable, "-m", "ray.serve.scripts"]
    with ended(
        subprocess.Popen([*tool, "deploy", str(file), "-a", cluster.dashboard], env=cluster.environment)
    ) as done:
        assert done.wait(TIMEOUT) == 0
    ours = behind_rays_proxy(cluster)
    wait_until(ours.answers)
    wanted = ours.complete(PAIR[0], model="small").choices[0].token_ids
    assert ours.complete(PAIR[0], model="large").choices[0].token_ids == wanted
    wait_until(lambda: (up(ours, "small"), up(ours, "large")) == (2, 1))
    cluster.tell("delete minillm")
    wait_until(lambda: not ours.answers())

    words = f"minillm.deploy:application models=small={TINY} replicas=2 cpus=0.1 --address {cluster.address}"
    with ended(subprocess.Popen([*tool, "run", *words.split()], env=cluster.environment)):
        wait_until(ours.answers)
        assert ours.complete(PAIR[0], model="small").choices[0].token_ids == wanted
    cluster.tell("delete default")


def test_an_application_answers_and_an_update_ends_no_stream(cluster):
    """Before the server, too."""
    key = "another-secret"

    def run(rows: int, **more: str) -> None:
        options = {"device": "cpu", "max_num_seqs": rows}
        model = {"name": "three", "model": str(TINY), "replicas": 1, "cpus": 0.1, "options": options}
        proxy = {"proxy_location": PROXIES, "http_options": {"host": "127.0.0.1", "port": cluster.port}}
        arguments = {"models": [model], "shutdown_grace": TIMEOUT} | more
        cluster.tell("run " + json.dumps({"proxy": proxy, "arguments": arguments}))

    run(2)
    ours = behind_rays_proxy(cluster)
    wanted = ours.complete(PAIR[0], model="three", max_tokens=60).choices[0].token_ids
    with ThreadPoolExecutor(2) as pool:
        tokens = []
        with ours.held(20):
            stream = pool.submit(read, ours, "three", PAIR[0], tokens)
            wait_until(lambda: tokens)
            before = ours.replicas("three")
            update = pool.submit(run, 3, api_key=key)
            wait_until(lambda: update.done() or ours.replicas("three") - before)
            assert not stream.done()
        stream.result(TIMEOUT)
        update.result(TIMEOUT)
    assert tokens == wanted
    with pytest.raises(openai.AuthenticationError):
        ours.client.models.list()
    ours.client = ours.client.with_options(api_key=key)
    wait_until(lambda: ours.client.models.list().data[0].max_num_seqs == 3)
    assert ours.complete(PAIR[1], model="three", max_tokens=4).choices[0].text
    cluster.tell("delete ours")


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


def test_more_http_workers_join_and_leave_without_harm_to_replicas(server, cluster):
    wanted = {each: server.complete(PAIR[0], model=each).choices[0].token_ids for each in ("one", "two")}
    with serving(cluster, "--join") as joined:
        assert sorted(each.id for each in joined.client.models.list()) == ["one", "two"]
        for name, tokens in wanted.items():
            assert joined.complete(PAIR[0], model=name).choices[0].token_ids == tokens
        wait_until(lambda: joined.metric("minillm_engine_steps_total") > 0)
    wait_until(lambda: len(server.replicas("two")) == 2)
    before = server.replicas("two")
    assert server.complete(PAIR[0], model="two").choices[0].token_ids == wanted["two"]
    wait_until(lambda: server.replicas("two") == before)  # one that is slow to answer is left out


def test_streams_of_a_killed_http_worker_break_and_their_places_are_given_back(server, cluster):
    wait_until(lambda: up(server, "two") == 2)
    (worker,) = server.processes("minillm.deploy.worker")
    with ThreadPoolExecutor(2) as pool:
        with server.held(20):
            tokens, both = streams(pool, server, "two")
            wait_until(lambda: all(tokens) and cluster.tell("places minillm:two") == "2")
            worker.kill()
            wait_until(lambda: cluster.tell("places minillm:two") == "0")
        for each in both:
            with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
                each.result(TIMEOUT)
    wait_until(server.answers)
    assert server.complete(PAIR[0], model="two", max_tokens=4).choices[0].text
    assert server.metric("minillm_worker_restarts_total") == 1


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
