"""Server metrics in the Prometheus text format.  Lesson 99."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minillm.request import Completion

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server, in their own registry: two servers in a process do not share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind, name, text, **more):
            return kind(f"minillm_{name}", text, registry=self.registry, **more)

        self.requests = make(Counter, "http_requests", "Generation requests by HTTP status", labelnames=["status"])
        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens of finished choices")
        self.generated_tokens = make(Counter, "generated_tokens", "Generated tokens of finished choices")
        self.finished = make(Counter, "finished", "Finished choices by finish reason", labelnames=["reason"])
        self.ttft = make(Histogram, "ttft_seconds", "Time from arrival to first token", buckets=SECONDS)
        self.e2e = make(Histogram, "e2e_seconds", "Time from arrival to last token", buckets=SECONDS)
        self.engine: dict[str, Gauge] = {}

    def observe(self, done: Completion) -> None:
        self.prompt_tokens.inc(len(done.prompt_token_ids))
        self.generated_tokens.inc(len(done.token_ids))
        self.finished.labels(done.finish_reason).inc()
        if done.first_token_time is not None:
            self.ttft.observe(done.first_token_time - done.arrival_time)
        self.e2e.observe((done.finish_time or time.perf_counter()) - done.arrival_time)

    def render(self, stats: dict) -> bytes:
        """Return all metrics as text. stats: the engine's own numbers, exported as gauges named minillm_engine_*."""
        for name, value in stats.items():
            if isinstance(value, (int, float)):
                if name not in self.engine:
                    text = f"The engine's {name.replace('_', ' ')}"
                    self.engine[name] = Gauge(f"minillm_engine_{name}", text, registry=self.registry)
                self.engine[name].set(value)
        return generate_latest(self.registry)
