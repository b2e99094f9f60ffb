"""A machine's two limits, and how close the engine's steps come to them.  Lesson 00.

Williams, Waterman and Patterson 2009, "Roofline": a computation takes at least the time to move its bytes and at least
the time to do its operations. Which of the two is longer depends on its operations per byte.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillm.engine.llm import LLM
from minillm.request import SamplingParams

from . import records

SQUARE = {"cpu": 1024, "cuda": 8192}  # rows of the matrices multiplied to find the most operations a second
CALLS = 20


@dataclass(frozen=True)
class PeakRates:
    """A device's measured peak rates: bytes per second read from memory, and operations per second."""

    bytes_per_s: float
    operations_per_s: float

    @property
    def ridge(self) -> float:
        """Return the operations per byte above which arithmetic takes longer than reading."""
        return self.operations_per_s / self.bytes_per_s


@dataclass(frozen=True)
class Point:
    """One kind of step: the least work that it needs, and the seconds that it took (median)."""

    name: str
    tokens: int
    bytes: int
    operations: int
    seconds: float

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes

    def floor(self, limits: PeakRates) -> float:
        """Return the minimum time, in seconds, that a machine with these limits needs for it."""
        return floor_seconds(self.bytes, self.operations, limits.bytes_per_s, limits.operations_per_s)

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.operations / self.seconds


def matrix_work(shapes: Sequence[tuple[int, int]], tokens: int, bytes_per_number: int) -> tuple[int, int]:
    """(bytes read, operations) of multiplying `tokens` tokens together with matrices of these shapes.  Lesson 00.

    Every number is read once, and multiplied and added once per token.
    """
    numbers = sum(rows * columns for rows, columns in shapes)
    return bytes_per_number * numbers, 2 * tokens * numbers


def floor_seconds(nbytes: float, operations: float, bytes_per_s: float, operations_per_s: float) -> float:
    """Return the minimum time, in seconds, for this much work at these rates: reading and computing overlap.  Lesson
    00.
    """
    return max(nbytes / bytes_per_s, operations / operations_per_s)


def limits(device: str, dtype: torch.dtype, nbytes: int) -> PeakRates:
    """Measure a device by reading `nbytes` of memory and multiplying two large square matrices: best of several calls.

    nbytes: the model's own, since data that fits into a cache is read faster. It is read by a sum and by a product of
    a matrix and a vector: which of the two is faster depends on the machine.
    """
    numbers = torch.ones(nbytes // 4, device=device)
    width = min(2048, len(numbers))
    matrix = numbers[: len(numbers) // width * width].view(-1, width)
    vector = torch.ones(width, device=device)
    side = SQUARE[torch.device(device).type]
    square = torch.randn(side, side, dtype=dtype, device=device)  # equal numbers take less power, and so less time
    summing = nbytes / min(_seconds(lambda: numbers.sum(), device))
    reading = 4 * matrix.numel() / min(_seconds(lambda: matrix @ vector, device))
    multiplying = _seconds(lambda: square @ square, device)
    return PeakRates(max(summing, reading), 2 * side**3 / min(multiplying))


def _seconds(work: Callable[[], object], device: str) -> list[float]:
    times = []
    for _ in range(CALLS + 3):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return times[3:]


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def decode(llm: LLM, requests: int, context: int = 64, steps: int = 24, *, temperature: float = 1.0) -> Point:
    """Steps that generate one token for each of `requests` requests, after `context` tokens or a few more."""
    engine = llm.engine
    params = SamplingParams(max_tokens=steps + 8, temperature=temperature, ignore_eos=True)
    batch = [engine.prepare(_ids(llm, context, seed), params) for seed in range(requests)]
    for tracked in batch:
        engine.submit(tracked)
    while engine.stats()["waiting"] or any(tracked.completion.first_token_time is None for tracked in batch):
        engine.step()
    engine.step()
    _wait(llm.config.device)
    begin = last = time.perf_counter()
    times = []
    for _ in range(steps):
        engine.step()  # returns once the oldest step's tokens are read: one step per call on average
        times.append(time.perf_counter() - last)
        last += times[-1]
    seconds = (last - begin) / steps if llm.config.device != "cpu" else statistics.median(times)
    while engine.has_work:
        engine.step()
    nbytes, operations = step_work(llm, requests, requests)
    nbytes += requests * (context + steps // 2) * _kv_bytes(llm)
    return Point(f"decode, {requests} at once", requests, nbytes, operations, seconds)


def prefill(llm: LLM, tokens: int, repeat: int = 5) -> Point:
    """Return a step that computes a prompt of `tokens` tokens and samples its next one."""
    times = []
    for seed in range(repeat + 1):
        completion = llm.generate([_ids(llm, tokens, 1000 + seed)], SamplingParams(max_tokens=1, ignore_eos=True))[0]
        assert completion.finish_time is not None  # set when a request ends
        times.append(completion.finish_time - completion.arrival_time)
    nbytes, operations = step_work(llm, tokens, 1)
    return Point(f"prefill of {tokens}", tokens, nbytes, operations, statistics.median(times[1:]))


def step_work(llm: LLM, tokens: int, samples: int) -> tuple[int, int]:
    """Return the least (bytes, operations) of a step of `tokens` tokens, `samples` of which go through the head.

    Every weight is read once, and multiplied and added once per token. Attention's own operations are left out: they
    are few at the lengths measured here.
    """
    model = llm.engine.model
    head = model.config.vocab_size * model.config.hidden_size
    body = model.num_parameters - head * (1 if model.config.tie_word_embeddings else 2)
    size = torch.empty(0, dtype=model.dtype).element_size()
    return (body + head) * size, 2 * (body * tokens + head * samples)


def run(
    model: str | Path | None = None,
    *,
    batches: Sequence[int] = (1, 8, 64, 256),
    prompts: Sequence[int] = (400, 1600),
    json_path: str | Path | None = None,
    quiet: bool = False,
    **engine_options: Any,
) -> dict:
    """Measure the machine and the engine's steps on it and return the record. Prints a table, then one JSON line.

    batches: numbers of requests in a decode step. prompts: tokens in a prefill step. json_path, quiet: as
    `records.publish`. engine_options: as `LLM`.
    """
    begun = records.begin(json_path)
    with LLM(model, enable_prefix_caching=False, **engine_options) as llm:
        limit = limits(llm.config.device, llm.engine.model.dtype, llm.engine.model.nbytes)
        points = [*(decode(llm, each) for each in batches), *(prefill(llm, each) for each in prompts)]
        content = records.record([asdict(each) for each in points], begun, model=llm.engine.name, **asdict(limit))
    return records.publish(content, json_path, table(points, limit), quiet=quiet)


def table(points: Sequence[Point], limits: PeakRates) -> str:
    """Return the limits, then for each step its floor, its measured time, and their ratio."""
    lines = [
        f"reads {limits.bytes_per_s / 1e9:,.1f} GB/s, computes {limits.operations_per_s / 1e12:,.2f} T operations/s,"
        f" ridge at {limits.ridge:.1f} operations a byte",
        f"{'step':<22}{'floor ms':>10}{'measured ms':>13}{'times':>8}{'operations a byte':>20}",
    ]
    for point in points:
        floor = point.floor(limits)
        lines.append(
            f"{point.name:<22}{floor * 1e3:>10.3f}{point.seconds * 1e3:>13.3f}{point.seconds / floor:>8.2f}"
            f"{point.intensity:>20.1f}"
        )
    return "\n".join(lines)


def _kv_bytes(llm: LLM) -> int:
    return llm.engine.model.cache_spec.bytes_per_token * len(llm.engine.model.layers)


def _ids(llm: LLM, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, llm.model_config.vocab_size, count).tolist()
