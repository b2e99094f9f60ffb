"""Measure what replicas on Ray cost: one replica behind Ray against one engine's own server, and a replica's end.

    python tools/replicas.py --pairs 3 --record replicas

Needs Ray: `pip install '.[ray]'`. Each row is written as soon as it is measured, so a part that fails, or takes more
than PART seconds, takes no other's rows with it. The parts:

* `added`: both servers have one HTTP worker and one engine, whose steps only sleep (`tools/sleeping_engine.py`). They
  are loaded in turn, by as many clients. `ray_choose_s` is what Ray takes to reserve a place on an empty replica, which
  no request waits for.
* `bursts`: the same servers, but all clients send one request at once, and then none until no places are kept.
* `proxy`: a replica behind `minillm serve --replicas` against one behind Ray's own proxy, as `serve run
  minillm.deploy:application` has it, both with sleeping engines.
* `throughput`: one engine's own server and one replica again, with the embedded model for real.
* `killed`: two replicas of the embedded model answer sampled requests with seeds; one replica is killed with SIGKILL.
  Every answer must be the same as without the fault.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402
import psutil  # noqa: E402

from minillm.bench import records, serve  # noqa: E402
from minillm.deploy.places import KEEP  # noqa: E402
from minillm.deploy.ports import free_ports  # noqa: E402

LENGTH = 128
CLIENTS = (1, 8, 32)
REQUESTS = {1: 24, 8: 96, 32: 192}
ENGINE, REPLICA, PROXY = "one engine", "one replica", "Ray's proxy"
SEEDS = 64  # requests of the part `killed`
PART = 480  # seconds for a part
STOP = 60  # seconds for a server to stop
OWN = ("--device", "cpu", "--workers", "1", "--log-level", "error")


class Server:
    """A server of its own processes. url: without a trailing slash."""

    def __init__(self, process: subprocess.Popen, url: str):
        self.process, self.url = process, url

    def family(self) -> list[psutil.Process]:
        """Return its processes."""
        mine = psutil.Process(self.process.pid)
        return [mine, *mine.children(recursive=True)]

    def cpu(self) -> dict[int, float]:
        """Return the processor seconds of each process so far."""
        found = {}
        for each in self.family():
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                found[each.pid] = times.user + times.system
        return found

    def spent(self, before: dict[int, float]) -> float:
        """Return the processor seconds since `before`."""
        return sum(seconds - before.get(pid, 0.0) for pid, seconds in self.cpu().items())


def serving(*options: str, sleeping: bool = False):
    """Run a server until the block ends."""
    program = [str(ROOT / "tools" / "sleeping_engine.py")] if sleeping else ["-m", "minillm.cli"]
    return _running([sys.executable, *program, "serve", "--port", "0", *OWN, *options])


@contextmanager
def _running(command: list[str]) -> Iterator[Server]:
    """Run a command that prints a URL until the block ends."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            found = (re.search(r"(http://\S+)/v1", line) for line in process.stdout)
            url = next(filter(None, found), None)
            if url is None:
                raise SystemExit("the server did not start")
            yield Server(process, url[1])
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP)
            finally:
                process.kill()  # its own processes end with it


def load(server: Server, clients: int, requests: int, seed: int, warmup: int | None = None) -> dict:
    """Load a server once. Returns what was measured, with the processor time of its processes."""
    warmup = clients if warmup is None else warmup
    before = server.cpu()
    content = serve.run(
        server.url,
        concurrency=clients,
        input_len=LENGTH,
        output_len=LENGTH,
        requests=requests,
        warmup=warmup,
        seed=seed,
        quiet=True,
    )
    (found,) = content["results"]
    tokens = (requests + warmup) * LENGTH  # those of the warm-up, too: they have taken processor time
    return {
        "ttft_p50_s": found["ttft_s"]["p50"],
        "ttft_p99_s": found["ttft_s"]["p99"],
        "output_tokens_per_s": found["output_tokens_per_s"],
        "cpu_us_per_token": 1e6 * server.spent(before) / tokens,
    }


def in_turn(servers: dict[str, Server], clients: int, requests: int, pairs: int) -> dict[str, list[dict]]:
    """Load two servers by turns. Returns each one's runs."""
    found: dict[str, list[dict]] = {name: [] for name in servers}
    for pair in range(pairs):
        for name in list(servers)[:: -1 if pair % 2 else 1]:
            found[name].append(load(servers[name], clients, requests, seed=100 * clients + pair))
    return found


def row(part: str, clients: int, runs: dict[str, list[dict]], **more: object) -> dict:
    """Return a row of the record. Differences and ratios are those of the second server, as medians over pairs."""
    pairs = list(zip(*runs.values(), strict=True))

    def median(difference) -> float:
        return statistics.median(difference(*pair) for pair in pairs)

    made = {
        "part": part,
        "clients": clients,
        "added_ttft_p50_s": median(lambda one, ours: ours["ttft_p50_s"] - one["ttft_p50_s"]),
        "added_cpu_us_per_token": median(lambda one, ours: ours["cpu_us_per_token"] - one["cpu_us_per_token"]),
        "throughput_ratio": median(lambda one, ours: ours["output_tokens_per_s"] / one["output_tokens_per_s"]),
        **more,
        "runs": runs,
    }
    shown = {name: value for name, value in made.items() if name != "runs"}
    for name in runs:
        shown[name] = {key: round(statistics.median(run[key] for run in runs[name]), 5) for key in runs[name][0]}
    print(json.dumps(shown), flush=True)
    return made


def idle(server: Server, seconds: float = 5.0) -> float:
    """Return the share of a core that a server takes while it has no requests."""
    before, begun = server.cpu(), time.perf_counter()
    time.sleep(seconds)
    return server.spent(before) / (time.perf_counter() - begun)


@contextmanager
def sleeping_servers() -> Iterator[dict[str, Server]]:
    """Run both servers with engines whose steps sleep."""
    with ExitStack() as stack:
        yield {
            ENGINE: stack.enter_context(serving(sleeping=True)),
            REPLICA: stack.enter_context(serving("--replicas", "1", "--replica-cpus", "0.1", sleeping=True)),
        }


def bursts(pairs: int) -> Iterator[dict]:
    """Measure requests that find no places that were kept."""
    with sleeping_servers() as servers:
        for clients in CLIENTS[1:]:
            runs: dict[str, list[dict]] = {name: [] for name in servers}
            for each in range(2 * pairs):
                for name in list(servers)[:: -1 if each % 2 else 1]:
                    time.sleep(2 * KEEP)
                    runs[name].append(load(servers[name], clients, clients, seed=1000 * clients + each, warmup=0))
            yield row("bursts", clients, runs)


def added(pairs: int) -> Iterator[dict]:
    """Measure what Ray adds to an engine whose steps sleep."""
    floor = choosing()
    with sleeping_servers() as servers:
        resting = {name: idle(server) for name, server in servers.items()}
        for clients in CLIENTS:
            runs = in_turn(servers, clients, REQUESTS[clients], pairs)
            yield row("added", clients, runs, idle_cores=resting, ray_choose_s=floor[clients])


def throughput(pairs: int) -> Iterator[dict]:
    """Measure the embedded model for real, with one thread behind either server."""
    with ExitStack() as stack:
        options = ("--model", str(ROOT / "data" / "tiny-gemma"), "--cpu-threads", "1")
        servers = {
            ENGINE: stack.enter_context(serving(*options)),
            REPLICA: stack.enter_context(serving(*options, "--replicas", "1", "--replica-cpus", "0.1")),
        }
        for clients in CLIENTS[1:]:
            yield row("throughput", clients, in_turn(servers, clients, 3 * clients, pairs))


APPLICATION = """
import signal, sys, tempfile
from minillm.deploy import head, replica
head.environment(True)
replica.ENGINE = "tools.sleeping_engine"
from minillm.deploy import application, ray_serve
from ray import serve
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
with tempfile.TemporaryDirectory() as folder:
    node = ray_serve.start_head(2, folder)
    try:
        ray_serve.join(node.gcs_address)
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        model = {"name": "tiny-gemma", "model": None, "cpus": 0.1, "options": {"device": "cpu"}}
        serve.run(application({"models": [model], "log_level": "error"}), name="application")
        print(f"http://127.0.0.1:{sys.argv[1]}/v1", flush=True)
        signal.pause()
    finally:
        ray_serve.leave()
        node.kill_all_processes(check_alive=False, allow_graceful=True)
"""


def proxy(pairs: int) -> Iterator[dict]:
    """Measure what Ray's own proxy adds to replicas behind our workers."""
    (port,) = free_ports(1)
    with ExitStack() as stack:
        ours = serving("--replicas", "1", "--replica-cpus", "0.1", sleeping=True)
        servers = {REPLICA: stack.enter_context(ours)}
        servers[PROXY] = stack.enter_context(_running([sys.executable, "-c", APPLICATION, str(port)]))
        for clients in CLIENTS:
            yield row("proxy", clients, in_turn(servers, clients, REQUESTS[clients], pairs))


# ---- Ray's floor

FLOOR = """
import asyncio, json, statistics, sys, tempfile, time
from minillm.deploy import head
head.environment(True)
from minillm.deploy import ray_serve
from ray import serve
from ray.serve.config import RequestRouterConfig

class Empty:
    def record_replica_metadata(self):
        return {"host": "", "port": 0}

async def measure(handle, clients, count):
    times = []
    async def one():
        for _ in range(count):
            begun = time.perf_counter()
            async with handle.choose_replica(""):
                times.append(time.perf_counter() - begun)
                await asyncio.sleep(SECONDS)
    await asyncio.gather(*(one() for _ in range(clients)))
    return statistics.median(times)

SECONDS = 0.25  # as long as a request of the other part takes, about
with tempfile.TemporaryDirectory() as folder:
    node = ray_serve.start_head(2, folder)
    ray_serve.join(node.gcs_address)
    serve.start(proxy_location="Disabled")
    routing = RequestRouterConfig(request_router_class="minillm.deploy.ray_serve.NamedRouter")
    empty = serve.deployment(Empty, name="empty", num_replicas=1, max_ongoing_requests=1000,
                             ray_actor_options={"num_cpus": 0.1}, request_router_config=routing)
    handle = serve.run(empty.bind(), name="floor", route_prefix=None)
    asyncio.run(measure(handle, 1, 5))
    print(json.dumps({n: asyncio.run(measure(handle, n, 20)) for n in map(int, sys.argv[1:])}), flush=True)
    ray_serve.leave()
    node.kill_all_processes(check_alive=False, allow_graceful=True)
"""


def choosing() -> dict[int, float]:
    """Return the median seconds that Ray takes to reserve a place on an empty replica, by number of clients."""
    command = [sys.executable, "-c", FLOOR, *map(str, CLIENTS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return {int(clients): seconds for clients, seconds in json.loads(done.stdout.splitlines()[-1]).items()}


# ---- a replica is killed


async def answers(url: str, begun: asyncio.Event | None = None) -> list[list[int] | str]:
    """Return the tokens of all requests' streams, or their errors. begun: set once a quarter of them have tokens."""
    streaming: set[int] = set()

    async def one(session: aiohttp.ClientSession, seed: int) -> list[int] | str:
        body = {"prompt": f"The keeper of lighthouse {seed} said", "max_tokens": LENGTH, "seed": seed, "stream": True}
        body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
        tokens: list[int] = []
        try:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    return f"{answer.status}: {await answer.text()}"
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return str(event["error"])
                        tokens += event["choices"][0]["token_ids"]
                        streaming.add(seed)
                        if begun is not None and len(streaming) >= SEEDS // 4:
                            begun.set()
        except aiohttp.ClientError as error:
            return repr(error)
        return tokens

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(one(session, seed) for seed in range(SEEDS)))


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""

    async def text() -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
            return await answer.text()

    lines = asyncio.run(text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line))


def killed(rounds: int) -> Iterator[dict]:
    """Kill one of two replicas while it has streams and requests that wait."""
    options = ("--model", str(ROOT / "data" / "tiny-gemma"), "--cpu-threads", "1", "--max-num-seqs", "16")
    with serving(*options, "--replicas", "2", "--replica-cpus", "0.1") as server:
        wanted = asyncio.run(answers(server.url))
        assert all(len(each) == LENGTH for each in wanted), wanted

        def replicas() -> list[psutil.Process]:
            return [each for each in server.family() if "ServeReplica" in " ".join(each.cmdline())]

        async def with_a_fault() -> list[list[int] | str]:
            begun = asyncio.Event()
            running = asyncio.ensure_future(answers(server.url, begun))
            await begun.wait()
            os.kill(replicas()[0].pid, signal.SIGKILL)
            return await running

        for place in range(rounds):
            moved, at = metric(server.url, "minillm_choices_moved_total"), time.perf_counter()
            found = asyncio.run(with_a_fault())
            taken = time.perf_counter() - at
            moved = metric(server.url, "minillm_choices_moved_total") - moved
            while metric(server.url, "minillm_replicas_up") < 2:
                time.sleep(0.2)
            errors = [each for each in found if isinstance(each, str)]
            pairs = zip(found, wanted, strict=True)
            made = {
                "part": "killed",
                "round": place,
                "requests": SEEDS,
                "lost": len(errors),
                "wrong": sum(one != other for one, other in pairs if not isinstance(one, str)),
                "moved": moved,
                "seconds": taken,
                "whole_again_after_s": time.perf_counter() - at,
            }
            print(json.dumps(made), errors[:1], flush=True)
            yield made


PARTS = {"added": added, "bursts": bursts, "proxy": proxy, "throughput": throughput, "killed": killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each server under each load; kills of a replica")
    parser.add_argument("--record", metavar="NAME", help="write data/results/<device>/NAME.json")
    options = parser.parse_args()
    begun, started = records.begin(options.record), time.monotonic()
    rows: list[dict] = []
    failed = [part for part in options.part or PARTS if not measured(part, options, rows, begun)]
    print(f"all parts: {time.monotonic() - started:.0f} s")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the record has the rows of the others")


def measured(part: str, options: argparse.Namespace, rows: list[dict], begun: dict) -> bool:
    """Measure a part, and write its rows one by one. Returns whether it did not fail."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"{part} took more than {PART} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PART)
    at = time.monotonic()
    try:
        for each in PARTS[part](options.pairs):
            rows.append(each)
            records.publish(records.record(rows, begun), options.record, quiet=True)
    except (Exception, SystemExit):
        traceback.print_exc()
        return False
    finally:
        signal.alarm(0)
        print(f"{part}: {time.monotonic() - at:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    main()
