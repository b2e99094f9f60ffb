"""The load generator measures what a client sees, on this machine only."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="the load generator is tested against the server, which needs fastapi")

from minillm.bench import load, plots
from minillm.bench.load import Measured
from minillm.server import running


@pytest.fixture(scope="module")
def server(model_directory):
    with running(model_directory, load_format="dummy", device="cpu", max_num_seqs=8) as server:
        yield server


def test_every_request_is_answered_in_full_and_counted(server, capsys, tmp_path):
    path = tmp_path / "load.json"
    record = load.run(server.url, workload="mixed", scale=16, requests=12, concurrency=4, json_path=path)
    lines = capsys.readouterr().out.strip().splitlines()
    assert json.loads(lines[-1]) == record == json.loads(path.read_text())
    result = record["results"][0]
    assert result["requests"] == 12 and result["concurrency"] == 4
    assert result["output_tokens_per_s"] == pytest.approx(result["output_tokens"] / result["seconds"], rel=0.01)
    for name in ("ttft_s", "itl_s", "e2e_s"):
        assert 0 <= result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert result["ttft_s"]["p50"] < result["e2e_s"]["p50"] <= result["seconds"]


def test_no_more_clients_than_asked_for_are_at_work(server, monkeypatch):
    at_work, most, asked = 0, 0, load._ask

    async def counted(*args):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        try:
            return await asked(*args)
        finally:
            at_work -= 1

    monkeypatch.setattr(load, "_ask", counted)
    load.run(server.url, workload="chat", scale=16, requests=9, concurrency=3, quiet=True)
    assert most == 3


def test_it_runs_where_an_event_loop_runs_already(server):
    async def notebook_cell():
        return load.run(server.url, workload="single", scale=32, concurrency=1, quiet=True)

    assert asyncio.run(notebook_cell())["results"][0]["requests"] == 1


def test_gaps_are_counted_for_each_token_but_the_first():
    seen = Measured(arrivals=[(1.0, 1), (1.5, 2), (1.75, 1)])
    assert seen.ttft == 1.0
    assert list(seen.gaps) == [0.5, 0.0, 0.25]


def test_percentiles_are_values_that_were_seen():
    values = [float(i) for i in range(1, 101)]
    assert load.percentiles(values) == {"p50": 50, "p90": 90, "p99": 99, "mean": 50.5}
    assert load.percentiles([3.0]) == {"p50": 3, "p90": 3, "p99": 3, "mean": 3}
    assert load.percentiles([]) == {"p50": None, "p90": None, "p99": None, "mean": None}


@pytest.mark.parametrize("url", ["http://example.com", "https://127.0.0.1:1", "http://10.0.0.1", "http://", "nonsense"])
def test_another_machine_is_never_loaded(url):
    with pytest.raises(ValueError, match="only loads this machine"):
        load.run(url)


def test_a_server_that_is_not_there_is_a_clear_error():
    with pytest.raises(ConnectionError, match="minillm serve"):
        load.run("http://127.0.0.1:9", quiet=True)


def test_a_refused_request_fails_the_measurement(server):
    with pytest.raises(RuntimeError, match="context"):
        load.run(server.url, workload="lilo", scale=1, requests=1, quiet=True)


def test_a_records_latencies_can_be_drawn(server):
    record = load.run(server.url, workload="chat", scale=16, requests=4, concurrency=2, quiet=True)
    ax = plots.latency(record)
    assert [label.get_text() for label in ax.get_legend().get_texts()] == ["p50", "p90", "p99"]
    heights = [bar.get_height() for bar in ax.containers[0]]
    assert heights[0] == pytest.approx(record["results"][0]["ttft_s"]["p50"] * 1e3)
