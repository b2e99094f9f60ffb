"""The loads of a serving run: which requests, and when they are sent.  Lesson 99.

A run has one load, or several: the query patterns, a grid of lengths, a sweep over the number of clients.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError

from . import workloads
from .serve_bench import ServeBench
from .workloads import BenchRequest, Workload

PATTERNS = ("chat", "silo", "liso", "lilo")  # short or long input, short or long output
CONCURRENCY = 8
SCALE = 8
REQUESTS = 64
EACH_CLIENT = 4  # requests in a sweep, so that most are sent to a full server


@dataclass(frozen=True)
class Load:
    """Requests and their arrival. facts: the arrival, as fields of a result; workload: None for a trace's own."""

    facts: dict[str, Any]
    workload: Workload | None
    scale: int
    requests: int | None
    trace: str | Path | None = None
    due: Sequence[float] | None = None

    @property
    def name(self) -> str:
        return self.workload.name if self.workload else f"trace_{Path(self.trace or '').stem}"

    @property
    def concurrency(self) -> int | None:
        return self.facts.get("concurrency")

    def make(self, vocabulary: int, seed: int) -> list[BenchRequest]:
        """Return the requests, with ids below `vocabulary`."""
        kept: dict[str, Any] = {"scale": self.scale, "requests": self.requests, "seed": seed}
        if self.workload is None:
            return workloads.replay(self.trace or "", vocabulary, speed=self.facts["speed"], **kept)
        made = workloads.make(self.workload, vocabulary, **kept)
        if self.due is not None:
            return [replace(request, due=when) for request, when in zip(made, self.due, strict=True)]
        return workloads.poisson(made, self.facts["rate"], seed=seed) if "rate" in self.facts else made


def plan(settings: ServeBench) -> list[Load]:
    """Return the loads that these settings describe. Raises ConfigError."""
    arrivals = _arrivals(settings)
    sweep, trace, due, scale = settings.sweep, settings.trace, settings.due, settings.scale
    count = settings.requests if due is None else len(due)
    if settings.input_len is None and settings.output_len is None:
        names = PATTERNS if settings.patterns else (settings.workload,)
        works = [workloads.find(name) for name in names]
        scale = SCALE if scale is None else scale
    else:
        works = _exact(settings, count or REQUESTS)
        scale = 1
    if settings.patterns and trace is not None:
        raise ConfigError("a trace brings its own requests: leave patterns out")
    return [
        Load(
            facts,
            None if trace is not None else _enough(work, facts, sweep),
            scale,
            count if sweep is None or count is None else max(count, EACH_CLIENT * facts["concurrency"]),
            trace,
            due,
        )
        for work, facts in itertools.product(works, arrivals)
    ]


def _enough(work: Workload, facts: dict[str, Any], sweep: Sequence[int] | None) -> Workload:
    """Return the workload, with as many requests as this point of a sweep sends."""
    return work if sweep is None else replace(work, requests=max(work.requests, EACH_CLIENT * facts["concurrency"]))


def _exact(settings: ServeBench, requests: int) -> list[Workload]:
    """Return a workload for each pair of lengths. Raises ConfigError."""
    if settings.input_len is None or settings.output_len is None:
        raise ConfigError("input_len and output_len go together: give both, or name a workload")
    for name in ("scale", "trace", "patterns"):
        if getattr(settings, name) not in (None, False):
            raise ConfigError(f"input_len and output_len are exact lengths: leave {name} out")
    inputs, outputs = ([each] if isinstance(each, int) else each for each in (settings.input_len, settings.output_len))
    return [workloads.exact(one, other, requests) for one, other in itertools.product(inputs, outputs)]


def _arrivals(settings: ServeBench) -> list[dict[str, Any]]:
    """Return how the requests of each load arrive, as fields of the record. Raises ConfigError."""
    concurrency, sweep, rate, trace = settings.concurrency, settings.sweep, settings.rate, settings.trace
    due, speed = settings.due, settings.speed
    ways = {"concurrency": concurrency, "sweep": sweep, "rate": rate, "trace": trace, "due": due}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"requests arrive in one way: choose one of {', '.join(chosen)}")
    if speed is not None and trace is None:
        raise ConfigError(f"speed {speed!r} plays a trace faster, and there is none: name one, or leave speed out")
    if rate is not None:
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"rate must be a number of requests a second above 0, not {rate!r}")
        return [{"arrival": "poisson", "rate": rate}]
    if trace is not None:
        return [{"arrival": "trace", "speed": workloads.check_speed(1.0 if speed is None else speed)}]
    if due is not None:
        if not len(due):
            raise ConfigError("due is empty: give one time for each request")
        if not all(math.isfinite(when) and when >= 0 for when in due):
            raise ConfigError("due has a time that is not a number of seconds from 0")
        return [{"arrival": "given"}]
    if sweep is not None:
        if not sweep:
            raise ConfigError("sweep is empty: give the numbers of clients")
        return [_closed(clients, "sweep") for clients in sweep]
    return [_closed(CONCURRENCY if concurrency is None else concurrency, "concurrency")]


def _closed(clients: int, name: str) -> dict[str, Any]:
    if not isinstance(clients, int) or clients < 1:
        raise ConfigError(f"{name} must be a whole number from 1, not {clients!r}")
    return {"arrival": "closed loop", "concurrency": clients}
