"""The load generator's processes share the clients, the clock and the end of their parent."""

import asyncio
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm.bench import generators, serve
from minillm.bench.clients import Target
from minillm.bench.generators import LoadError, Share
from minillm.bench.serve_bench import ServeBench
from minillm.bench.workloads import BenchRequest
from minillm.errors import ConfigError
from tests.bench.fake import at_once, faked, only_when_all_have_come
from tests.waiting import TIMEOUT, wait_until


@pytest.mark.parametrize(
    "requests, count, concurrency", [(10, 3, None), (10, 3, 7), (10, 3, 3), (64, 4, 10), (1, 1, 8)]
)
def test_every_request_belongs_to_one_process_and_its_client(requests, count, concurrency):
    places = generators.divide(requests, count, concurrency)
    assert sorted(sum(places, [])) == list(range(requests))
    for process, mine in enumerate(places):
        clients = {place % (concurrency or count) for place in mine}
        assert all(client % count == process for client in clients), "a client is in one process"


def work(count: int) -> list[BenchRequest]:
    return [BenchRequest([place], place % 3 + 1, due=place / 1000) for place in range(count)]


@pytest.mark.parametrize("concurrency", [5, None])
def test_several_processes_send_all_requests_at_once_and_report_them_in_order(concurrency):
    """The server waits for all five clients, so three processes that ran one after the other would hang."""
    requests = work(5)
    with faked(only_when_all_have_come(5)) as (url, fake):
        measured, busy = generators.run(
            Target(url, "m"), requests, concurrency, generators=3, warmup=[BenchRequest([7], 1)], timeout=TIMEOUT
        )
    assert [each.error for each in measured] == [None] * 5
    assert [each.output_tokens for each in measured] == [each.output_tokens for each in requests]
    assert len(busy) == 3 and min(busy) > 0
    assert fake.bodies[0]["prompt"] == [7] and sorted(body["prompt"] for body in fake.bodies[1:]) == [
        [i] for i in range(5)
    ]
    assert all(0 <= each.sent <= each.end for each in measured), "all processes read one clock"
    last = max(each.sent for each in measured)
    assert all(each.arrivals[0][0] >= last for each in measured), "and began together"


def test_no_more_processes_run_than_there_are_clients_or_requests():
    with faked(at_once) as (url, _):
        for count, concurrency, wanted in ((4, 2, 2), (1, 8, 1), (2, None, 2)):
            assert len(generators.run(Target(url, "m"), work(count), concurrency, generators=3)[1]) == wanted


def test_a_process_that_dies_is_an_error(monkeypatch):
    begun = generators._start
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert begun().wait() != 0
    with pytest.raises(LoadError, match="ended early"):
        generators.run(Target("http://127.0.0.1:1", "m"), work(2), 1)


def test_processes_end_with_the_one_that_started_them():
    with faked(only_when_all_have_come(9)) as (url, fake):
        process = generators._start()
        pickle.dump(Share(Target(url, "m"), work(1), 1, [BenchRequest([7], 1)]), process.stdin)
        process.stdin.flush()
        assert process.stdout.readline() == generators.READY
        process.stdin.write(f"{time.monotonic()!r}\n".encode())
        process.stdin.flush()
        wait_until(lambda: fake.at_work == 1)  # it waits for an answer that does not come
        process.stdin.close()
        assert process.wait(TIMEOUT) == 1
        process.stdout.close()


def test_a_process_imports_no_torch_and_no_package_that_reads_http():
    code = "import minillm.bench.generators, sys; print({'torch', 'aiohttp', 'numpy'} & {*sys.modules})"
    root = Path(generators.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("wrong", [0, -1, 1.5, None])
def test_a_number_of_processes_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="generators must be a whole number"):
        ServeBench(generators=wrong)


def test_the_busiest_process_is_the_one_reported(monkeypatch, capsys):
    real = generators.run

    def run(*args, **kwargs):
        measured, busy = real(*args, **kwargs)
        assert len(busy) == 2
        seconds = max(each.end for each in measured)
        return measured, [0.1 * seconds, 0.8 * seconds]

    monkeypatch.setattr(generators, "run", run)

    async def after_a_while(fake, before, body):
        await asyncio.sleep(0.05 * (before > 0))  # so that rounding the seconds does not change the share
        return 200

    with faked(after_a_while) as (url, _):
        result = serve.run(url, workload="chat", requests=2, concurrency=2, generators=2)["results"][0]
    assert result["generators"] == 2
    assert serve.generator_share(result) == pytest.approx(0.8, abs=0.01)
    assert "a load generator worked for 80% of that" in capsys.readouterr().out
    assert "load generator" not in serve.table(result | {"generator_s": 0.5 * result["seconds"]})
