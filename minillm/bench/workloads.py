"""The workloads that every figure of the project is measured on, by name.  Lesson 99.

Prompts are random token ids, every request generates exactly its output length, and a name gives the same requests on
every machine (`random.Random(0)`). On a small machine `scale` divides the lengths, which keeps their proportions, and
`requests` takes the first few; a record has both. Arrival times are drawn (`poisson`) or come from a traffic trace
(`replay`).
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minillm.errors import ConfigError
from minillm.folders import DATA

SEED = 0
TRACES = DATA / "traces"


@dataclass(frozen=True)
class Workload:
    """A number of requests, and the ranges of their lengths in tokens (both ends included), drawn uniformly."""

    name: str
    requests: int
    input_range: tuple[int, int]
    output_range: tuple[int, int]


@dataclass(frozen=True)
class BenchRequest:
    """A prompt of token ids, how many tokens to generate after it, and when to send it in an open loop."""

    prompt: list[int]
    output_tokens: int
    due: float = 0.0  # seconds after the run began


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single_128_256_x1", 1, (128, 128), (256, 256)),
        Workload("chat_128_128_x3000", 3000, (128, 128), (128, 128)),
        Workload("mixed_100-1024_x1024", 1024, (100, 1024), (100, 1024)),
        Workload("silo_128_2048_x512", 512, (128, 128), (2048, 2048)),
        Workload("liso_2048_128_x512", 512, (2048, 2048), (128, 128)),
        Workload("lilo_2048_512_x256", 256, (2048, 2048), (512, 512)),
    )
}


def find(name: str) -> Workload:
    """Return a workload by its name or the first word of its name ("mixed"). Raises ConfigError."""
    for workload in WORKLOADS.values():
        if name in (workload.name, workload.name.split("_")[0]):
            return workload
    raise ConfigError(f"no workload is called {name!r}; there are: {', '.join(WORKLOADS)}")


def exact(input_len: int, output_len: int, requests: int) -> Workload:
    """Return a workload in which every request has exactly these lengths in tokens. Raises ConfigError."""
    if input_len < 1 or output_len < 1:
        raise ConfigError(f"lengths must be whole numbers of tokens from 1, not {input_len!r} and {output_len!r}")
    return Workload(f"exact_{input_len}_{output_len}", requests, (input_len, input_len), (output_len, output_len))


def make(
    workload: str | Workload, vocab_size: int, *, scale: int = 1, requests: int | None = None, seed: int = SEED
) -> list[BenchRequest]:
    """Return the first `requests` requests of a workload (or of the one of this name), with lengths divided by `scale`.

    Lengths are drawn for the full workload, before the ids, so a scaled one has the same requests, only shorter.
    `seed` changes only the ids. Raises ConfigError.
    """
    workload = workload if isinstance(workload, Workload) else find(workload)
    _check(scale, requests)
    rng = random.Random(SEED)
    lengths = [
        (rng.randint(*workload.input_range), rng.randint(*workload.output_range)) for _ in range(workload.requests)
    ]
    ids = random.Random(seed)
    return [
        BenchRequest(_draw(ids, vocab_size, max(1, inputs // scale)), max(1, outputs // scale))
        for inputs, outputs in lengths[:requests]
    ]


def poisson(requests: Sequence[BenchRequest], rate: float, *, seed: int = SEED) -> list[BenchRequest]:
    """Return the same requests, due as a Poisson process of `rate` requests per second: gaps are drawn from exp(rate).

    With the same seed, twice the rate gives the same schedule in half the time.
    """
    rng, due, scheduled = random.Random(seed), 0.0, []
    for request in requests:
        due += rng.expovariate(rate)
        scheduled.append(replace(request, due=due))
    return scheduled


def replay(
    trace: str | Path,
    vocab_size: int,
    *,
    scale: int = 1,
    requests: int | None = None,
    speed: float = 1.0,
    seed: int = SEED,
) -> list[BenchRequest]:
    """Return the requests of a traffic trace, with times divided by `speed` and lengths divided by `scale`.

    trace: a file, or the name of a committed one ("conversation"). Each request is a line of JSON, with `arrival` in
    seconds, `input_tokens`, `output_tokens` and, if its prompt shares a prefix, `prefix_id` and `prefix_tokens`. Token
    ids are drawn; only lengths, times and shared prefixes come from the trace. Raises ConfigError.
    """
    _check(scale, requests)
    check_speed(speed)
    rows = [json.loads(line) for line in _find_trace(trace).read_text(encoding="utf-8").splitlines()]
    ids = random.Random(seed)
    scheduled = []
    for row in rows[:requests]:
        length, shared = max(1, row["input_tokens"] // scale), row["prefix_tokens"] // scale
        prefix = _draw(random.Random(f"{seed}/prefix/{row['prefix_id']}"), vocab_size, shared)
        prompt = (prefix + _draw(ids, vocab_size, max(0, length - shared)))[:length]
        scheduled.append(BenchRequest(prompt, max(1, row["output_tokens"] // scale), row["arrival"] / speed))
    return scheduled


def check_speed(speed: float) -> float:
    """Return the factor by which a trace is sped up. Raises ConfigError unless it is a number above 0."""
    if not (math.isfinite(speed) and speed > 0):
        raise ConfigError(f"speed must be a number above 0, not {speed!r}: 2 plays the trace twice as fast")
    return speed


def _find_trace(trace: str | Path) -> Path:
    path = Path(trace)
    chosen = path if path.is_file() else TRACES / f"{path}.jsonl"
    if not chosen.is_file():
        there = ", ".join(sorted(each.stem for each in TRACES.glob("*.jsonl")))
        raise ConfigError(f"no trace {path}; committed ones: {there or 'none'}")
    return chosen


def _draw(ids: random.Random, vocab_size: int, count: int) -> list[int]:
    return [ids.randrange(vocab_size) for _ in range(count)]


def _check(scale: int, requests: int | None) -> None:
    if scale < 1 or (requests is not None and requests < 1):
        raise ConfigError(f"scale and requests must be whole numbers from 1, not {scale!r} and {requests!r}")


def totals(requests: Sequence[BenchRequest]) -> dict[str, int]:
    """Return the numbers of requests, input and output tokens: the first fields of every result."""
    return {
        "requests": len(requests),
        "input_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
    }
