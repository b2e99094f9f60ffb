"""Replicas of two models on Ray: what clients see, and what becomes of their requests when processes are killed.

Starting Ray takes most of the time, so all tests share one server. What waits for processes to start again is a proof.
"""

import asyncio
import base64
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest

from minillm.deploy.handshake import MAGIC
from minillm.deploy.serving import ReplicatedModel, ServerFailed, placement, serve_replicas
from minillm.server.config import ServerConfig
from tests.deploy.gated_engine import GATE, given
from tests.parallel.test_processes import ranks_of
from tests.waiting import TIMEOUT, wait_until

pytest.importorskip("ray", reason="Ray is not installed: make test installs it")
pytestmark = pytest.mark.timeout(2 * TIMEOUT)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "data" / "tiny-gemma"
PROMPTS = [f"{name} keeps the lighthouse of" for name in ("Ana", "Bo", "Cy", "Dee", "Eve", "Flo")]


class Server:
    """A server, its processes, and the gate of its engines."""

    def __init__(self, process: subprocess.Popen, url: str, gate: Path):
        self.process, self.url, self.gate = process, url, gate
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT, max_retries=0)

    def processes(self, words: str, parents: str = "") -> list[psutil.Process]:
        """The server's processes that have these words in their command, and those in their parent's."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ends now
                if words in " ".join(each.cmdline()) and parents in " ".join(psutil.Process(each.ppid()).cmdline()):
                    found.append(each)
        return found

    def engines(self, model: str) -> list[psutil.Process]:
        """The processes of a model's engines. Their parents are Ray's, which are the replicas."""
        return self.processes("gated_engine", f"minillm:{model}:")

    def metric(self, name: str, model: str = "") -> float:
        """The sum of a metric's samples, or of those of one model."""
        lines = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT).text.splitlines()
        ours = (line for line in lines if re.match(rf"{name}[{{ ]", line) and f'"{model}"' in (line if model else '""'))
        return sum(float(line.split()[-1]) for line in ours)

    def busy(self, model: str) -> int:
        """How many of a model's replicas run requests."""
        lines = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT).text.splitlines()
        ours = (line for line in lines if line.startswith("minillm_replica_requests{") and f'"{model}"' in line)
        return sum(float(line.split()[-1]) > 0 for line in ours)

    def replicas(self, model: str) -> set[str]:
        """The names of a model's replicas, those that are about to end too."""
        lines = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT).text.splitlines()
        ours = (line for line in lines if line.startswith("minillm_replica_requests{") and f'"{model}"' in line)
        return {re.search('replica="(.*?)"', line)[1] for line in ours}

    def answers(self) -> bool:
        """Whether it can be reached, and is well."""
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=TIMEOUT).status_code == 200
        return False

    @property
    def is_whole(self) -> bool:
        return self.metric("minillm_replicas_up") == 3

    @contextmanager
    def held(self, steps: int):
        """Let each engine take so many steps, and no more until the block ends."""
        name = time.monotonic_ns()

        def let(steps: int) -> None:
            """Let each engine take so many since the block began."""
            new = self.gate.with_suffix(".new")
            new.write_text(f"{name}:{steps}")
            new.replace(self.gate)

        let(steps)
        try:
            yield let
        finally:
            self.gate.unlink()

    def complete(self, prompt: str, **more):
        more = {"model": "one", "max_tokens": 40, "temperature": 1.0, "seed": 7} | more
        extra = {"ignore_eos": True, "return_token_ids": True}
        return self.client.completions.create(prompt=prompt, extra_body=extra, **more)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray", numbered=True)
    gate = folder / "gate"
    command = [sys.executable, "-m", "tests.deploy.served", "serve", "--port", "0", "--replicas", "2"]
    command += ["--set", "two:replicas=1,max_num_seqs=4,tensor_parallel_size=2"]
    command += ["--replica-cpus", "0.1", "--device", "cpu", "--max-num-seqs", "8", "--shutdown-grace", "1"]
    command += ["--keep-alive-timeout", str(TIMEOUT)]  # no connection ends while a client is about to use it again
    command += ["--model", f"one={TINY}", "--model", f"two={TINY}"]
    environment = os.environ | {GATE: str(gate), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            found = (re.search(r"(http://\S+)/v1", line) for line in process.stdout)
            yield Server(process, next(filter(None, found))[1], gate)
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT)
            finally:
                process.kill()


@pytest.fixture
def whole(server):
    """The server, with all of its replicas."""
    wait_until(lambda: server.is_whole)
    return server


@pytest.mark.proof
def test_two_models_answer_the_openai_client(whole):
    assert [each.id for each in whole.client.models.list()] == ["one", "two"]
    question = [{"role": "user", "content": "Who are you?"}]
    for name in ("one", "two"):
        answer = whole.client.chat.completions.create(model=name, messages=question, max_tokens=8, temperature=0)
        assert answer.model == name and answer.choices[0].message.content
    facts = httpx.get(f"{whole.url}/v1/models", timeout=TIMEOUT).json()["data"]
    assert [each["max_num_seqs"] for each in facts] == [8, 4]
    assert [whole.metric("minillm_replicas_up", name) for name in ("one", "two")] == [2, 1]
    with pytest.raises(openai.NotFoundError, match="this server serves 'one', 'two'"):
        whole.client.completions.create(model="three", prompt="The river")
    assert httpx.get(f"{whole.url}/health", timeout=TIMEOUT).status_code == 200


@pytest.mark.proof
def test_a_model_that_two_ranks_share_gives_the_tokens_of_one_device(whole):
    (engine,) = whole.engines("two")
    assert len(ranks_of(engine.pid)) == 2
    one, two = (whole.complete(PROMPTS[0], model=each).choices[0].token_ids for each in ("one", "two"))
    assert one == two


@pytest.mark.proof
def test_a_conversation_finds_its_prefix(whole):
    said = "Once upon a time " * 8
    first = whole.complete(said)
    second = whole.complete(said + first.choices[0].text + " And then", max_tokens=4)
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


@pytest.mark.proof
def test_a_replica_killed_in_the_middle_of_streams_changes_no_token(whole):
    wanted = [whole.complete(each).choices[0].token_ids for each in PROMPTS]
    moved = whole.metric("minillm_choices_moved_total")

    def read(prompt: str, tokens: list[int]) -> None:
        for chunk in whole.complete(prompt, stream=True):
            tokens += chunk.choices[0].token_ids

    tokens, before = [[] for _ in PROMPTS], given(whole.gate)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        with whole.held(1) as let:
            streams = [pool.submit(read, *each) for each in zip(PROMPTS, tokens, strict=True)]
            wait_until(lambda: given(whole.gate) == before + len(PROMPTS))
            let(6)  # the others begin in the engines' next step, whose tokens are sent once there is another one
            wait_until(lambda: all(tokens) and whole.busy("one") == 2)
            assert max(map(len, tokens)) < 40, "a stream was complete before"
            whole.engines("one")[0].parent().kill()
        for each in streams:
            each.result(TIMEOUT)
    assert tokens == wanted
    assert whole.metric("minillm_choices_moved_total") > moved


@pytest.mark.proof
def test_requests_that_wait_on_a_killed_engine_run_elsewhere(whole):
    wanted = {each: whole.complete(each).choices[0].token_ids for each in PROMPTS}
    moved = whole.metric("minillm_choices_moved_total")
    with ThreadPoolExecutor(4 * len(PROMPTS)) as pool:
        with whole.held(0):
            answers = [(each, pool.submit(whole.complete, each)) for each in 4 * PROMPTS]
            wait_until(lambda: whole.busy("one") == 2)
            whole.engines("one")[0].kill()
            wait_until(lambda: whole.metric("minillm_choices_moved_total") > moved)
        assert all(answer.result(TIMEOUT).choices[0].token_ids == wanted[prompt] for prompt, answer in answers)


@pytest.mark.proof
def test_a_killed_replica_is_replaced(whole):
    replaced = whole.metric("minillm_engine_restarts_total")
    whole.engines("one")[0].parent().kill()
    wait_until(lambda: whole.metric("minillm_engine_restarts_total") > replaced and whole.is_whole)


@pytest.mark.proof
def test_a_killed_rank_changes_no_token_of_a_stream_which_waits_for_another_replica(whole):
    wanted = whole.complete(PROMPTS[0], model="two").choices[0].token_ids
    replaced, (before,) = whole.metric("minillm_engine_restarts_total"), whole.engines("two")
    lost, tokens = ranks_of(before.pid), []

    def read() -> None:
        for chunk in whole.complete(PROMPTS[0], model="two", stream=True):
            tokens.extend(chunk.choices[0].token_ids)

    with ThreadPoolExecutor(1) as pool:
        with whole.held(8):
            stream = pool.submit(read)
            wait_until(lambda: tokens)
            os.kill(lost[1], signal.SIGKILL)
        stream.result(TIMEOUT)
    assert tokens == wanted
    wait_until(lambda: whole.metric("minillm_engine_restarts_total") > replaced and whole.is_whole)
    (after,) = whole.engines("two")
    assert len(ranks_of(after.pid)) == 2 and not any(map(psutil.pid_exists, lost))


@pytest.mark.proof
def test_a_killed_http_worker_is_replaced(whole):
    (worker,) = whole.processes("minillm.deploy.worker")
    worker.kill()
    wait_until(whole.answers)
    assert whole.processes("minillm.deploy.worker") != [worker]
    assert whole.complete("The river", max_tokens=2).choices[0].text
    assert whole.metric("minillm_worker_restarts_total") == 1


@pytest.mark.proof
def test_ports_are_open_on_this_machine_only_and_strangers_get_nothing(server):
    """But for those of Ray Serve's replicas, where Ray asks for its token."""
    for process in server.processes(""):
        with suppress(psutil.NoSuchProcess):
            listening = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            others = [each for each in listening if each.ip not in ("127.0.0.1", "::ffff:127.0.0.1")]
            assert not others or process.name().startswith("ray::ServeRepli"), (process.name(), others)
    # An engine's connections are from HTTP workers, and came in by its replica's door.
    engines = server.engines("one") + server.engines("two")
    doors = {each.laddr for engine in engines for each in engine.net_connections("tcp")}
    assert len(doors) >= 2
    for door in doors:
        with socket.create_connection(door, TIMEOUT) as sock:
            sock.settimeout(TIMEOUT)
            assert sock.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
            sock.sendall(bytes(200))
            got = b""
            with suppress(ConnectionResetError):  # what it has not read is lost with the connection
                while data := sock.recv(1 << 16):
                    got += data
            assert len(got) <= 32, "a stranger got more than the challenge"


def test_places_of_workers_that_are_gone_are_given_back():
    from minillm.deploy.ray_serve import Slots

    class Served:
        """What Serve runs in a replica's process, as far as places go."""

        def __init__(self):
            self._reserved_slots = set()

        async def reserve_slot(self, metadata, place):
            self._reserved_slots.add(place)
            return True, len(self._reserved_slots)

        def release_slot(self, place):
            self._reserved_slots.discard(place)

    async def work():
        served = Served()
        slots = Slots(served)
        slots.keep({"a"})
        for place, worker in ("1a", "a"), ("2b", "b"), ("3b", "b"), ("4", ""):
            assert (await served.reserve_slot(SimpleNamespace(session_id=worker), place))[0]
        served.release_slot("3b")
        await asyncio.to_thread(slots.keep, {"a", "b"})
        await asyncio.sleep(0)
        assert served._reserved_slots == {"1a", "2b", "4"} and set(slots._holders) == {"1a", "2b"}
        await asyncio.to_thread(slots.keep, {"a"})
        await asyncio.sleep(0)
        assert served._reserved_slots == {"1a", "4"}, "whose worker is not known, is not touched"
        slots.keep(())
        await asyncio.sleep(0)
        assert served._reserved_slots == {"4"} and not slots._holders

    asyncio.run(work())


def test_an_application_is_made_before_ray_is_connected(monkeypatch):
    """As `serve run` does it."""
    import ray

    from minillm.deploy import application

    monkeypatch.chdir(TINY.parent)
    made = application({"models": f"one={TINY},two={TINY.name}", "replicas": "2", "cpus": "0.5", "gpus": "0"})
    assert not ray.is_initialized()
    placements = [each._bound_deployment.init_args[0] for each in made._bound_deployment.init_args[3:]]
    assert [(each.name, each.replicas, each.cpus, each.gpus) for each in placements] == [
        ("one", 2, 0.5, 0.0),
        ("two", 2, 0.5, 0.0),
    ]
    options = [pickle.loads(base64.b64decode(each.options)) for each in placements]
    assert [each["model"] for each in options] == [str(TINY), str(TINY)], "replicas run in other directories"
    assert application({})


def test_a_replica_of_two_ranks_gets_two_gpus_of_one_machine(monkeypatch):
    from minillm.deploy import ray_serve

    monkeypatch.setattr(ray_serve, "resources", lambda: {"GPU": 8.0})
    model = ReplicatedModel("a", str(TINY), replicas=3, options={"tensor_parallel_size": 2})
    made = ray_serve.bound(placement(model, ServerConfig()))._bound_deployment
    assert (made.num_replicas, made.ray_actor_options["num_gpus"]) == (3, 2.0)
    assert made._replica_config.placement_group_bundles == [{"CPU": 1.0, "GPU": 2.0}]


def test_replicas_find_adapters_that_are_named_from_here(monkeypatch):
    from minillm.deploy import ray_serve

    monkeypatch.setattr(ray_serve, "resources", dict)
    made = placement(ReplicatedModel("a", str(TINY), options={"adapters": ["pirate=here/pirate"]}), ServerConfig())
    options = pickle.loads(base64.b64decode(made.options))["engine"]
    assert options["adapters"] == {"pirate": str(Path("here/pirate").resolve())}


def test_a_cluster_that_is_not_there_is_named_at_once(dead_url):
    address = dead_url.removeprefix("http://")
    with pytest.raises(ServerFailed, match=f"no Ray cluster answers at {address} .*refused"):
        serve_replicas(None, port=0, ray_address=address)


def test_why_replicas_could_not_start_is_found_in_what_ray_reports(monkeypatch):
    from minillm.deploy import ray_serve

    def application(*messages: str) -> SimpleNamespace:
        return SimpleNamespace(deployments={each: SimpleNamespace(message=each) for each in messages})

    report = "failed to start:\n  File x, line 3\nminillm.deploy.replica.ReplicaFailed: no model at /x: give y\n"
    applications = {"one": application(report, "fine"), "two": application(report)}
    monkeypatch.setattr(ray_serve.serve, "status", lambda: SimpleNamespace(applications=applications))
    monkeypatch.setattr(ray_serve.serve, "start", lambda **options: None)

    def fail(targets: list) -> None:
        raise RuntimeError("Failed to update the deployments")

    monkeypatch.setattr(ray_serve.serve, "run_many", fail)
    with pytest.raises(RuntimeError, match="^no model at /x: give y$"):
        ray_serve.deploy([])
    applications.clear()
    with pytest.raises(RuntimeError, match="^Failed to update"):
        ray_serve.deploy([])


@pytest.mark.proof
def test_it_ends_with_all_of_its_processes_and_leaves_no_files(server):
    family = [server.process.pid, *(each.pid for each in server.processes(""))]
    before = set(Path(tempfile.gettempdir()).glob("minillm-ray-*"))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(TIMEOUT) == 0
    wait_until(lambda: not any(map(psutil.pid_exists, family)))
    assert len(before - set(Path(tempfile.gettempdir()).glob("minillm-ray-*"))) >= 1
