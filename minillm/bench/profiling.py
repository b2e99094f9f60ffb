"""A run of the engine from outside: when each step finished, and which kernels ran in slices of it.  Lesson 99.

Kernels are grouped by name. A product belongs to the head if sampling follows it.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from minillm.engine.engine import Engine
from minillm.runner.executor import Executor, WatchedExecutor
from minillm.runner.launched import Results, StepInFlight
from minillm.scheduler.step import Step

GROUPS = ("matrix products", "attention", "head and sampling", "other kernels")
NAMES = (
    (
        "attention",
        re.compile(r"^(decode_kernel|combine_kernel|prefill_kernel|row_attention_kernel)|fmha|flash|attention"),
    ),
    ("head and sampling", re.compile(r"^(chunk_mass_kernel|choose_kernel|soft_cap_kernel)|ArgMax|argmax")),
    (
        "matrix products",
        re.compile(
            r"^(nvjet|whole_rows_kernel|long_rows_kernel|integer_rows_kernel)|gemm|gemv|xmma|cutlass|splitKreduce"
        ),
    ),
)
SLICES, STEPS = 10, 4  # slices of a run that are profiled, steps in each


@dataclass
class Recording:
    """A run's steps and, by `time.perf_counter`, when it began and when each step's tokens were on the host."""

    began: float
    steps: list[Step] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    waited: float = 0.0  # seconds that the host only waited for the device

    def seconds(self, first: int, after: int) -> float:
        """Return how long the steps from `first` up to, not including, `after` took together."""
        return self.done[after - 1] - (self.done[first - 1] if first else self.began)


class _Recorder(WatchedExecutor):
    """Adds each step to a recording."""

    def __init__(self, executor: Executor, recording: Recording):
        super().__init__(executor)
        self.recording = recording

    def launch(self, step: Step) -> StepInFlight:
        in_flight = super().launch(step)
        self.recording.steps.append(step)
        return _Timed(in_flight, self.recording)


class _Timed:
    """A step in flight that notes how long the host waits for it."""

    def __init__(self, in_flight: StepInFlight, recording: Recording):
        self.step, self.in_flight, self.recording = in_flight.step, in_flight, recording

    def wait(self) -> Results:
        start = time.perf_counter()
        results = self.in_flight.wait()
        self.recording.done.append(time.perf_counter())
        self.recording.waited += self.recording.done[-1] - start
        return results


@contextmanager
def recording(engine: Engine) -> Iterator[Recording]:
    """Record every step that the engine runs in the block, at a cost of microseconds per step."""
    recorded = Recording(time.perf_counter())
    with engine.running_on(_Recorder(engine.executor, recorded)):
        yield recorded


def slices(done: Sequence[float], began: float) -> list[int]:
    """Return the first step of each of up to SLICES slices, spread evenly over a run's time, without overlap."""
    middles = began + (np.arange(SLICES) + 0.5) / SLICES * (done[-1] - began)
    chosen: list[int] = []
    for first in np.searchsorted(done, middles):
        first = max(min(int(first), len(done) - STEPS), 0)
        if not chosen or first >= chosen[-1] + STEPS:
            chosen.append(first)
    return chosen


class _Profiler(WatchedExecutor):
    """Profiles STEPS steps from each of `starts` on. The device is idle at both ends of such a slice."""

    def __init__(self, executor: Executor, starts: Sequence[int]):
        super().__init__(executor)
        self.starts, self.count = starts, 0
        self.done: list[torch.profiler.profile] = []
        self.running: torch.profiler.profile | None = None

    def launch(self, step: Step) -> StepInFlight:
        if self.count in self.starts:
            self.running = _begin_profile()
        in_flight = super().launch(step)
        self.count += 1
        if self.count - STEPS in self.starts:
            self.end_slice()
        return in_flight

    def end_slice(self) -> None:
        if self.running is not None:
            torch.cuda.synchronize()
            self.running.stop()
            self.done.append(self.running)
            self.running = None


def _begin_profile() -> torch.profiler.profile:
    torch.cuda.synchronize()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    profile.start()
    return profile


@contextmanager
def profiled(engine: Engine, starts: Sequence[int]) -> Iterator[list[list[tuple[str, float, float]]]]:
    """Profile STEPS steps from each of `starts` on; after the block, each slice's (kernel, begin, end) in seconds."""
    slices_kernels: list[list[tuple[str, float, float]]] = []
    _begin_profile().stop()  # the first one loads the profiler
    profiler = _Profiler(engine.executor, starts)
    with engine.running_on(profiler):
        yield slices_kernels
        profiler.end_slice()
        slices_kernels += [_kernels(profile) for profile in profiler.done]


def _kernels(profile: torch.profiler.profile) -> list[tuple[str, float, float]]:
    spans = [
        (event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(spans, key=lambda span: span[1])


def seconds_by_group(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return seconds of each of GROUPS. kernels: (name, begin, end), in the order in which they begin.

    If kernels overlap (the next one starts early and waits), their common time counts for the earlier one.
    """
    by_group = dict.fromkeys(GROUPS, 0.0)
    free, products = float("-inf"), 0.0  # when the device is free; seconds since the last product began
    for name, begin, end in kernels:
        group = next((group for group, pattern in NAMES if pattern.search(name)), "other kernels")
        seconds = max(0.0, end - max(begin, free))
        free = max(free, end)
        if group == "matrix products":
            products = products + seconds if "splitKreduce" in name else seconds
        elif group == "head and sampling":
            by_group["matrix products"] -= products
            by_group[group] += products
            products = 0.0
        by_group[group] += seconds
    return by_group
