"""What the server counts of an answer."""

import itertools
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the server needs prometheus-client, which is not installed here")

from prometheus_client.parser import text_string_to_metric_families

from minillm.request import Completion
from minillm.server.engine_side.metrics import EVENTS, Metrics, Tally
from minillm.server.ledger import Ledger
from minillm.server.worker.scrape import text_of

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def values_of(metrics, stats):
    lines = text_of(metrics.counted(stats) + metrics.gauges(stats)).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def completion(arrival, scheduled, first, finish, reason="stop"):
    done = Completion("r", [1, 2, 3], [4, 5], finish_reason=reason)
    done.arrival_time, done.scheduled_time, done.first_token_time, done.finish_time = arrival, scheduled, first, finish
    return done


def test_a_completions_times_count_from_its_arrival_and_its_tokens_apart():
    metrics = Metrics("m")
    metrics.observe(completion(10.0, 10.2, 10.5, 12.0), 40)
    metrics.observe(completion(0.0, None, None, 1.0, "abort"), 16)  # it never started
    values = values_of(metrics, {"running": 7})
    wanted = {
        "minillm_prompt_tokens_total": 6,
        "minillm_generated_tokens_total": 4,
        'minillm_finished_total{reason="stop"}': 1,
        "minillm_ttft_seconds_sum": 0.5,
        "minillm_e2e_seconds_sum": 3.0,
        "minillm_engine_running": 7,
        'vllm:prompt_tokens_total{model_name="m"}': 6,
        'vllm:generation_tokens_total{model_name="m"}': 4,
        'vllm:request_success_total{finished_reason="abort",model_name="m"}': 1,
        'vllm:time_to_first_token_seconds_sum{model_name="m"}': 0.5,
        'vllm:e2e_request_latency_seconds_sum{model_name="m"}': 3.0,
        'vllm:request_queue_time_seconds_count{model_name="m"}': 1,
        'vllm:request_queue_time_seconds_sum{model_name="m"}': 0.2,
        'vllm:request_prefill_time_seconds_sum{model_name="m"}': 0.3,
        'vllm:request_decode_time_seconds_sum{model_name="m"}': 1.5,
        'vllm:request_inference_time_seconds_count{model_name="m"}': 1,
        'vllm:request_inference_time_seconds_sum{model_name="m"}': 1.8,
        'vllm:request_prompt_tokens_sum{model_name="m"}': 6,
        'vllm:request_generation_tokens_sum{model_name="m"}': 4,
        'vllm:request_generation_tokens_bucket{le="1.0",model_name="m"}': 0,
        'vllm:request_generation_tokens_bucket{le="2.0",model_name="m"}': 2,
        'vllm:request_params_max_tokens_sum{model_name="m"}': 56,
    }
    assert {name: round(values[name], 6) for name in wanted} == wanted


def test_the_engines_numbers_have_vllms_names_too():
    stats = {
        "running": 3, "waiting": 2, "blocks": 40, "blocks_available": 10, "preemptions": 5,
        "prefix_query_tokens": 100, "prefix_hit_tokens": 64,
    }  # fmt: skip
    values = values_of(Metrics("m"), stats)
    wanted = {
        "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.75, "num_preemptions_total": 5,
        "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 64,
    }  # fmt: skip
    assert {name: values[f'vllm:{name}{{model_name="m"}}'] for name in wanted} == wanted


def test_what_only_rises_is_a_counter_and_the_rest_a_gauge(engine):
    stats = engine.stats()
    metrics = Metrics("m", 300, {"block_size": 16})
    text = text_of(metrics.counted(stats) + metrics.gauges(stats)).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {name: found[f"minillm_engine_{name}"].type for name in stats}
    assert kinds == {name: "counter" if name in EVENTS else "gauge" for name in stats}
    assert {"steps", "preemptions"} < set(EVENTS) < set(stats)
    (info,) = found["vllm:cache_config_info"].samples
    assert info.value == 1 and info.labels == {
        "model_name": "m",
        "block_size": "16",
        "num_gpu_blocks": str(stats["blocks"]),
    }
    assert "_created" not in text
    counted = {family[0] for family in metrics.counted(stats)}
    rising = {family.name for family in found.values() if family.type in ("counter", "histogram")}
    assert counted == rising, "only these are kept after the engine's end"
    bounds = [sample.labels["le"] for sample in found["vllm:request_prompt_tokens"].samples if "le" in sample.labels]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]


def test_no_count_falls_when_an_engine_follows_another():
    """The first has counted a finish reason that the second has not."""
    ledger, scrapes = Ledger(), []

    def engine(*reasons):
        metrics = Metrics("m")
        for reason in reasons:
            metrics.observe(completion(0.0, 0.1, 0.2, 0.3, reason), 2)
        metrics.between.add(0.1, len(reasons))
        return metrics.counted({"steps": 10 * len(reasons)})

    def scrape():
        text = text_of(ledger.families()).decode()
        scrapes.append({
            (sample.name, *sample.labels.items()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        })  # fmt: skip

    for counted in (engine("abort", "stop"), engine(), engine("stop", "stop", "stop")):
        ledger.report([])
        ledger.report(counted)
        ledger.answered(503)
        scrape()
        ledger.engine_ended()
        ledger.restarted("engine")
        scrape()
    for before, after in itertools.pairwise(scrapes):
        assert all(after[name] >= value for name, value in before.items())
    last = scrapes[-1]
    assert last["minillm_finished_total", ("reason", "abort")] == 1
    assert last["minillm_finished_total", ("reason", "stop")] == 4
    assert last["minillm_engine_steps_total",] == 50
    assert last["vllm:time_to_first_token_seconds_bucket", ("le", "0.25"), ("model_name", "m")] == 5
    assert last["vllm:inter_token_latency_seconds_count", ("model_name", "m")] == 5
    assert last["minillm_http_requests_total", ("status", "503")] == 3
    assert (last["minillm_engine_restarts_total",], last["minillm_worker_restarts_total",]) == (3, 0)


def test_a_tally_counts_many_equal_values_at_once():
    metrics = Metrics("m")
    metrics.between = tally = Tally((0.1, 0.5))
    tally.add(0.1, 3)
    tally.add(0.2)
    tally.add(9.0, 2)
    name, values = "vllm:inter_token_latency_seconds", values_of(metrics, {})
    buckets = {bound: values[f'{name}_bucket{{le="{bound}",model_name="m"}}'] for bound in ("0.1", "0.5", "+Inf")}
    assert buckets == {"0.1": 3, "0.5": 4, "+Inf": 6}
    assert values[f'{name}_count{{model_name="m"}}'] == 6
    assert round(values[f'{name}_sum{{model_name="m"}}'], 6) == 18.5


def test_the_dashboard_asks_for_metrics_that_are_there():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in shown for name in re.findall(r"vllm:\w+", expression)}
    there = {name.split("{")[0] for name in values_of(metrics_with_one_request(), {"running": 1})}
    assert asked <= there and len(asked) >= 14
    assert all(name in there for expression in shown for name in re.findall(r"[\w:]+(?=\{)", expression))
    assert all('model_name=~"$model"' in expression for expression in shown)


def metrics_with_one_request():
    metrics = Metrics("m")
    metrics.observe(completion(0.0, 0.1, 0.2, 0.3), 2)
    return metrics
