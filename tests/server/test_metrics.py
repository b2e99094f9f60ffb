"""What the server counts of an answer."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the server needs prometheus-client, which is not installed here")

from minillm.request import Completion
from minillm.server.metrics import Metrics, Tally

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def values_of(metrics, stats):
    lines = metrics.render(stats).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def completion(arrival, scheduled, first, finish, reason="stop"):
    done = Completion("r", [1, 2, 3], [4, 5], finish_reason=reason)
    done.arrival_time, done.scheduled_time, done.first_token_time, done.finish_time = arrival, scheduled, first, finish
    return done


def test_a_completions_times_count_from_its_arrival_and_its_tokens_apart():
    metrics = Metrics("m")
    metrics.observe(completion(10.0, 10.2, 10.5, 12.0))
    metrics.observe(completion(0.0, None, None, 1.0, "abort"))  # it never started
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
    metrics.observe(completion(0.0, 0.1, 0.2, 0.3))
    return metrics
