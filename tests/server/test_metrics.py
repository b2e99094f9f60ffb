"""What the server counts of an answer."""

import pytest

pytest.importorskip("prometheus_client", reason="the server needs prometheus-client, which is not installed here")

from minillm.request import Completion
from minillm.server.metrics import Metrics


def test_a_completions_times_count_from_its_arrival_and_its_tokens_apart():
    metrics = Metrics()
    done = Completion("r", [1, 2, 3], [4, 5], finish_reason="stop")
    done.arrival_time, done.first_token_time, done.finish_time = 10.0, 10.5, 12.0
    metrics.observe(done)
    lines = metrics.render({"running": 7}).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    wanted = {
        "minillm_prompt_tokens_total": 3,
        "minillm_generated_tokens_total": 2,
        'minillm_finished_total{reason="stop"}': 1,
        "minillm_ttft_seconds_sum": 0.5,
        "minillm_e2e_seconds_sum": 2.0,
        "minillm_engine_running": 7,
    }
    assert {name: float(values[name]) for name in wanted} == wanted
