"""The server starts, shares its engine, survives client and engine errors, and stops."""

import asyncio
import socket
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import minillm
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError
from minillm.kv_cache import BlockPool
from minillm.scheduler.policies import FirstComeFirstServed
from minillm.server import PortTaken, running, serve
from tests.waiting import TIMEOUT, async_wait_until, idle, paused_steps, wait_until


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        yield client


def test_health_and_metrics_report_the_servers_work(http):
    assert http.get("/health").json() == {"status": "ok"}

    def read(name):
        lines = http.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)

    tokens, answered = "minillm_generated_tokens_total", 'minillm_http_requests_total{status="200"}'
    before = read(tokens), read(answered), read("minillm_ttft_seconds_count")
    body = {"prompt": "The river", "max_tokens": 5, "ignore_eos": True}
    http.post("/v1/completions", json=body)
    http.post("/v1/completions", json=body | {"stream": True})
    after = read(tokens), read(answered), read("minillm_ttft_seconds_count")
    assert [b - a for a, b in zip(before, after, strict=True)] == [10, 2 + 3, 2]  # and three scrapes
    assert read("minillm_engine_blocks") > 0


def test_a_scrape_finds_vllms_names_with_the_times_of_every_token(http):
    """Under the path that NIM has, read as Prometheus reads it."""
    model = http.get("/v1/models").json()["data"][0]["id"]

    def scrape():
        families = text_string_to_metric_families(http.get("/v1/metrics").text)
        return {
            (sample.name, sample.labels.get("finished_reason")): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("model_name") == model and "le" not in sample.labels
        }

    before = scrape()
    for stream in (True, False):
        body = {"prompt": "The river", "max_tokens": 5, "ignore_eos": True, "stream": stream}
        assert http.post("/v1/completions", json=body).status_code == 200
    after = scrape()
    more = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert more["vllm:generation_tokens_total", None] == 10
    assert more["vllm:request_success_total", "length"] == 2
    assert more["vllm:inter_token_latency_seconds_count", None] == 8  # between five tokens, twice
    parts = [f"vllm:request_{part}_time_seconds" for part in ("queue", "prefill", "decode")]
    assert all(more[f"{part}_count", None] == 2 for part in parts)
    whole = more["vllm:e2e_request_latency_seconds_sum", None]
    assert sum(more[f"{part}_sum", None] for part in parts) == pytest.approx(whole)
    assert 0 < more["vllm:inter_token_latency_seconds_sum", None] < whole
    assert after["vllm:num_requests_running", None] == 0 and 0 <= after["vllm:kv_cache_usage_perc", None] < 1


@pytest.mark.parametrize("path", ["/metrics", "/v1/metrics"])
def test_every_metric_says_what_it_is(http, path):
    families = list(text_string_to_metric_families(http.get(path).text))
    assert len(families) > 30
    assert [each.name for each in families if each.type == "unknown" or not each.documentation] == []


def test_health_has_nims_paths(http):
    assert [http.get(f"/v1/health/{each}").status_code for each in ("live", "ready")] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
def test_no_step_runs_for_a_client_that_has_disconnected(server, stream, monkeypatch):
    body = {"prompt": ["The river", "A stone"], "max_tokens": 200, "ignore_eos": True, "stream": stream}
    engine, aborted, steps = server.engine, [], []
    held, go_on = threading.Event(), threading.Event()

    def embedding(ids, weight, scale):
        steps.append(len(ids))
        if len(steps) == 6:
            held.set()
            assert go_on.wait(TIMEOUT)
        return weight[ids] * scale

    def abort(request_id):
        original_abort(request_id)
        aborted.append(request_id)

    original_abort = engine.abort
    monkeypatch.setattr(engine, "abort", abort)

    async def hang_up():
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await async_wait_until(held.is_set)  # in the middle of a step
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await async_wait_until(lambda: len(aborted) == 2)

    try:
        with minillm.using(embedding=embedding):
            asyncio.run(hang_up())
            go_on.set()
            wait_until(lambda: idle(engine))
            assert len(steps) == 6
    finally:
        go_on.set()


def test_a_user_supplied_operation_serves_http_requests(http):
    body = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask():
        return http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

    def nothing(hidden, weight, soft_cap=None):
        return hidden.new_zeros(hidden.shape[0], weight.shape[0])

    before = ask()
    with minillm.using(lm_head=nothing) as used:
        assert ask() == [0] * 6 != before
    assert used.calls["lm_head"] > 0
    assert ask() == before


def test_a_port_in_use_is_reported_before_the_model_loads():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is in use.*another port"):
            serve("no/such/model", port=port)
        with pytest.raises(PortTaken), running("no/such/model", port=port):
            pass


def test_an_existing_llm_can_be_served_and_stays_usable(model_directory):
    with minillm.LLM(model_directory, load_format="dummy", device="cpu", max_num_seqs=4) as llm:
        with running(llm) as server:
            body = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            said = httpx.post(server.url + "/v1/completions", json=body, timeout=TIMEOUT).json()["choices"][0]["text"]
        params = minillm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert llm.generate("The river", params)[0].text == said


def test_health_is_503_once_the_engine_is_closed(model_directory):
    engine = AsyncLLM(model_directory, load_format="dummy", device="cpu", max_num_seqs=4)
    with running(engine) as server:
        engine.close()
        assert httpx.get(server.url + "/health", timeout=TIMEOUT).status_code == 503
        refused = httpx.get(server.url + "/v2/health/ready", timeout=TIMEOUT)
        assert refused.status_code == 503 and refused.json() == {"error": "the engine is not running"}
        assert httpx.get(server.url + "/v2/health/live", timeout=TIMEOUT).status_code == 200
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "a"}, timeout=TIMEOUT)
        assert refused.status_code == 500 and "closed" in refused.json()["error"]["message"]


def test_leaving_the_block_frees_the_port_the_threads_and_the_engine(model_directory):
    before = set(threading.enumerate())
    with running(model_directory, load_format="dummy", device="cpu", max_num_seqs=4) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
            assert client.get("/health").status_code == 200
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("minillm")}, left
    assert not server.engine.alive
    socket.create_server(("127.0.0.1", port)).close()


def test_a_borrowed_engine_stays_open(engine):
    with running(engine) as second:
        assert httpx.get(second.url + "/v1/models", timeout=TIMEOUT).json()["data"][0]["id"] == engine.name
    assert asyncio.run(engine.generate("The river")).finish_reason is not None
    with pytest.raises(ConfigError, match="max_num_seqs"), running(engine, max_num_seqs=3):
        pass


def test_stopping_does_not_wait_for_an_endless_stream(model_directory):
    engine = AsyncLLM(model_directory, load_format="dummy", device="cpu", max_num_seqs=4)
    body = {"prompt": "The river", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with paused_steps(free=6) as resume, httpx.Client(timeout=TIMEOUT) as client:
        with running(engine, shutdown_grace=0.2) as server:
            response = client.send(client.build_request("POST", server.url + "/v1/completions", json=body), stream=True)
            lines = response.iter_lines()  # a variable keeps the iterator, and so the stream, open
            next(lines)
        assert engine.stats()["running"] == 1, "the stream ended by itself"
        resume.set()
        wait_until(lambda: idle(engine))
    engine.close()


def test_a_failing_operation_is_reported_to_the_client_and_the_server_keeps_running(http):
    def broken(x, weight):
        raise ArithmeticError("my linear is wrong")

    with minillm.using(linear=broken):
        response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert response.status_code == 500
    assert "my linear is wrong" in response.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200


def test_a_user_supplied_policy_and_block_pool_serve_http_requests(http):
    body = {"prompt": ["The river", "Once", "A long day"], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True

    def ask():
        return [each["token_ids"] for each in http.post("/v1/completions", json=body).json()["choices"]]

    class LastFirst(FirstComeFirstServed):
        def key(self, request):
            return -request.arrival

    class Mine(BlockPool):
        def allocate(self, count):
            return super().allocate(count)[::-1]

    before = ask()
    with minillm.using(policy=LastFirst, block_pool=Mine) as used:
        assert ask() == before
    assert used.calls["policy"] > 3 and used.calls["block_pool"] > 3
    assert ask() == before


def test_a_policy_that_admits_no_request_is_reported_to_the_client_and_the_server_keeps_running(http):
    class Closed(FirstComeFirstServed):
        def admits(self, running):
            return False

    with minillm.using(policy=Closed):
        response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert response.status_code == 500
    assert "policy Closed: admits lets nothing run" in response.json()["error"]["message"]

    class NoKey(FirstComeFirstServed):
        def key(self, request):
            return None

    with minillm.using(policy=NoKey):
        response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert response.status_code == 500
    assert "policy NoKey: key must give a number" in response.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
