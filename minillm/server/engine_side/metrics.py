"""Count and measure in the engine's process, for Prometheus, under our names and under vLLM's.  Lesson 99.

vLLM's names (`vllm:...`, with the label `model_name`) are those that dashboards and autoscalers know; they count the
same events. `docs/grafana.json` is a dashboard that shows them. Responses are counted elsewhere: see `ledger`.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from minillm.engine.async_llm import AsyncLLM
from minillm.engine.recent import Recent
from minillm.request import Completion

from ..ledger import Families

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # seconds
CHOICES = (1, 2, 5, 10, 20)
# Of the engine's numbers: they only rise.
EVENTS = ("steps", "preemptions", "corrupted", "prefix_query_tokens", "prefix_hit_tokens")
DRAFTED = ("drafts", "draft_tokens", "accepted_tokens")  # events of an engine that speculates

Made = TypeVar("Made", Counter, Histogram)


class Metrics:
    """The metrics of one engine, in their own registry: two servers in a process do not share counters.

    longest: most tokens in the context. cache: facts about the KV cache.
    """

    def __init__(self, model_name: str, longest: int = 8192, cache: Mapping[str, object] = {}) -> None:
        self.model_name, self.cache = model_name, cache
        self.registry = CollectorRegistry()

        def ours(kind: type[Made], name: str, text: str, **more: Any) -> Made:
            return kind(f"minillm_{name}", text, registry=self.registry, **more)

        def theirs(kind: type[Made], name: str, text: str, *labels: str, **more: Any) -> Made:
            made = kind(f"vllm:{name}", text, ["model_name", *labels], registry=self.registry, **more)
            return made if labels else made.labels(model_name)

        def times(name: str, text: str) -> Histogram:
            return theirs(Histogram, name, text, buckets=SECONDS)

        def tokens(name: str, text: str) -> Histogram:
            return theirs(Histogram, name, text, buckets=_round_numbers(longest))

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
        self.inference = times("request_inference_time_seconds", "Time from the start to the last token")
        self.prompts = tokens("request_prompt_tokens", "Prompt tokens of a request")
        self.answers = tokens("request_generation_tokens", "Generated tokens of a request")
        self.limits = tokens("request_params_max_tokens", "Most tokens that a request may generate")
        self.choices = theirs(Histogram, "request_params_n", "Choices of a prompt", buckets=CHOICES)
        self.between = Tally(BETWEEN_TOKENS)

    def observe(self, done: Completion, limit: int) -> None:
        """Count a finished choice. limit: most tokens that it might have generated."""
        end = done.finish_time or time.perf_counter()
        for counter in self.prompt_tokens:
            counter.inc(len(done.prompt_token_ids))
        for counter in self.generated_tokens:
            counter.inc(len(done.token_ids))
        self.finished.labels(done.finish_reason).inc()
        self.success.labels(self.model_name, done.finish_reason).inc()
        self.prompts.observe(len(done.prompt_token_ids))
        self.answers.observe(len(done.token_ids))
        self.limits.observe(limit)
        for histogram in self.e2e:
            histogram.observe(end - done.arrival_time)
        if done.scheduled_time is not None:
            self.queued.observe(done.scheduled_time - done.arrival_time)
            self.inference.observe(end - done.scheduled_time)
        if done.first_token_time is not None:
            for histogram in self.ttft:
                histogram.observe(done.first_token_time - done.arrival_time)
            self.prefill.observe(done.first_token_time - (done.scheduled_time or done.arrival_time))
            self.decode.observe(end - done.first_token_time)

    def counted(self, stats: Mapping[str, int]) -> Families:
        """Return all counters and histograms. stats: the engine's numbers."""
        return _families([*self.registry.collect(), *self._events(stats)])

    def gauges(self, stats: Mapping[str, int]) -> Families:
        """Return all that may rise and fall. stats: the engine's numbers."""
        return _families(self._levels(stats))

    def _events(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        """Yield what is not counted at a choice's end: the engine's events, and times between tokens."""
        label, model = ["model_name"], [self.model_name]
        for name in (*EVENTS, *(name for name in DRAFTED if name in stats)):
            yield CounterMetricFamily(f"minillm_engine_{name}", _text(name), value=stats.get(name, 0))
        counters = {
            "num_preemptions": ("Requests that gave their blocks to others", "preemptions"),
            "corrupted_requests": ("Requests that ended because the model's logits were not numbers", "corrupted"),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache", "prefix_query_tokens"),
            "prefix_cache_hits": ("Tokens found there", "prefix_hit_tokens"),
        }
        if "drafts" in stats:
            counters |= {
                "spec_decode_num_drafts": ("Steps of a request that had drafted tokens", "drafts"),
                "spec_decode_num_draft_tokens": ("Tokens drafted", "draft_tokens"),
                "spec_decode_num_accepted_tokens": ("Drafted tokens that the model sampled itself", "accepted_tokens"),
            }
        for name, (text, event) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=label)
            counter.add_metric(model, stats.get(event, 0))
            yield counter
        between = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Time between tokens", labels=label)
        between.add_metric(model, self.between.cumulative(), self.between.sum)
        yield between

    def _levels(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        for name, level in stats.items():
            if name not in EVENTS + DRAFTED:
                yield GaugeMetricFamily(f"minillm_engine_{name}", _text(name), value=level)
        blocks = stats.get("blocks", 0)
        used = 1 - stats.get("blocks_available", 0) / blocks if blocks else 0.0
        gauges: dict[str, tuple[str, float]] = {
            "num_requests_running": ("Requests in the batch", stats.get("running", 0)),
            "num_requests_waiting": ("Requests in the queue", stats.get("waiting", 0)),
            "kv_cache_usage_perc": ("Share of the cache's blocks that requests hold, from 0 to 1", used),
        }
        for name, (text, share) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self.model_name], share)
            yield gauge
        facts = {name: str(value) for name, value in self.cache.items()} | {"num_gpu_blocks": str(blocks)}
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, as labels", labels=["model_name", *facts])
        info.add_metric([self.model_name, *facts.values()], 1)
        yield info


def cache_facts(engine: AsyncLLM) -> dict[str, object]:
    """Return what vLLM calls the cache's configuration, without the number of blocks."""
    config = engine.config
    return {
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
    }


def _families(metrics: Iterable[Metric]) -> Families:
    """Return metrics as JSON. When a counter was made is left out: that of a sum would be a sum of dates."""
    return [
        [each.name, each.type, each.documentation, [
            [sample.name, sample.labels, sample.value]
            for sample in each.samples
            if not sample.name.endswith("_created")
        ]]
        for each in metrics
    ]  # fmt: skip


def _text(name: str) -> str:
    return f"The engine's {name.replace('_', ' ')}"


def _round_numbers(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20 and so on, up to `most`."""
    numbers = (each * 10**exponent for exponent in range(len(str(most))) for each in (1, 2, 5))
    return [number for number in numbers if number <= most]


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
        """Return pairs (upper bound, values up to it), as Prometheus wants them."""
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))
