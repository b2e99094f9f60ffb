"""Server metrics in the Prometheus text format, under our names and under vLLM's.  Lesson 99.

vLLM's names (`vllm:...`, with the label `model_name`) are those that dashboards and autoscalers know; they count the
same events. `docs/grafana.json` is a dashboard that shows them.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from minillm.engine.recent import Recent
from minillm.request import Completion

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # seconds


class Metrics:
    """The metrics of one server, in their own registry: two servers in a process do not share counters."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()

        def ours(kind, name, text, **more):
            return kind(f"minillm_{name}", text, registry=self.registry, **more)

        def theirs(kind, name, text, *labels, **more):
            made = kind(f"vllm:{name}", text, ["model_name", *labels], registry=self.registry, **more)
            return made if labels else made.labels(model_name)

        def times(name, text):
            return theirs(Histogram, name, text, buckets=SECONDS)

        self.requests = ours(Counter, "http_requests", "Requests with a body by HTTP status", labelnames=["status"])
        self.prompt_tokens = (
            ours(Counter, "prompt_tokens", "Prompt tokens of finished choices"),
            theirs(Counter, "prompt_tokens", "Prompt tokens of finished requests"),
        )
        self.generated_tokens = (
            ours(Counter, "generated_tokens", "Generated tokens of finished choices"),
            theirs(Counter, "generation_tokens", "Generated tokens of finished requests"),
        )
        self.finished = ours(Counter, "finished", "Finished choices by finish reason", labelnames=["reason"])
        self.success = theirs(Counter, "request_success", "Finished requests by reason", "finished_reason")
        self.ttft = (
            ours(Histogram, "ttft_seconds", "Time from arrival to first token", buckets=SECONDS),
            times("time_to_first_token_seconds", "Time from arrival to first token"),
        )
        self.e2e = (
            ours(Histogram, "e2e_seconds", "Time from arrival to last token", buckets=SECONDS),
            times("e2e_request_latency_seconds", "Time from arrival to last token"),
        )
        self.queued = times("request_queue_time_seconds", "Time from arrival until the engine starts on the request")
        self.prefill = times("request_prefill_time_seconds", "Time from this start to the first token")
        self.decode = times("request_decode_time_seconds", "Time from first to last token")
        self.between = Tally(BETWEEN_TOKENS)
        self.stats: Mapping[str, int | float] = {}
        self.engine: dict[str, Gauge] = {}
        self.registry.register(self)

    def observe(self, done: Completion) -> None:
        """Count a finished choice."""
        end = done.finish_time or time.perf_counter()
        for counter in self.prompt_tokens:
            counter.inc(len(done.prompt_token_ids))
        for counter in self.generated_tokens:
            counter.inc(len(done.token_ids))
        self.finished.labels(done.finish_reason).inc()
        self.success.labels(self.model_name, done.finish_reason).inc()
        for histogram in self.e2e:
            histogram.observe(end - done.arrival_time)
        if done.scheduled_time is not None:
            self.queued.observe(done.scheduled_time - done.arrival_time)
        if done.first_token_time is not None:
            for histogram in self.ttft:
                histogram.observe(done.first_token_time - done.arrival_time)
            self.prefill.observe(done.first_token_time - (done.scheduled_time or done.arrival_time))
            self.decode.observe(end - done.first_token_time)

    def collect(self) -> Iterator[Metric]:
        """What is not counted at a choice's end, under vLLM's names: the engine's numbers, and times between tokens."""
        label, model = ["model_name"], [self.model_name]
        stats = self.stats
        blocks = stats.get("blocks", 0)
        gauges = {
            "num_requests_running": ("Requests in the batch", stats.get("running", 0)),
            "num_requests_waiting": ("Requests in the queue", stats.get("waiting", 0)),
            "kv_cache_usage_perc": (
                "Share of the cache's blocks that requests hold, from 0 to 1",
                1 - stats.get("blocks_available", 0) / blocks if blocks else 0.0,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=label)
            gauge.add_metric(model, value)
            yield gauge
        counters = {
            "num_preemptions": ("Requests that gave their blocks to others", stats.get("preemptions", 0)),
            "corrupted_requests": (
                "Requests that ended because the model's logits were not numbers",
                stats.get("corrupted", 0),
            ),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache", stats.get("prefix_query_tokens", 0)),
            "prefix_cache_hits": ("Tokens found there", stats.get("prefix_hit_tokens", 0)),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=label)
            counter.add_metric(model, value)
            yield counter
        between = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Time between tokens", labels=label)
        between.add_metric(model, self.between.cumulative(), self.between.sum)
        yield between

    def render(self, stats: Mapping[str, int | float]) -> bytes:
        """Return all metrics as text. stats: the engine's numbers, which are gauges named minillm_engine_* too."""
        self.stats = stats
        for name, value in stats.items():
            if isinstance(value, (int, float)):
                if name not in self.engine:
                    text = f"The engine's {name.replace('_', ' ')}"
                    self.engine[name] = Gauge(f"minillm_engine_{name}", text, registry=self.registry)
                self.engine[name].set(value)
        return generate_latest(self.registry)


class Tally:
    """A histogram that counts many equal values at once: after a step, most requests waited equally long."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0
        self.recent = Recent()

    def add(self, value: float, count: int = 1) -> None:
        self.recent.add(value, count)
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus wants them."""
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))
