"""The workloads every figure of the project is measured on, by name.  Lesson 99.

Prompts are random token ids, every request generates exactly its output length, and the same name gives the
same requests on every machine (`random.Random(0)`). On a small machine `scale` divides the lengths and
`requests` keeps the first few: the lengths keep their proportions, and a record says both.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

SEED = 0


class UnknownWorkload(ValueError):
    """No workload has this name; the message lists those there are."""


@dataclass(frozen=True)
class Workload:
    """Requests and the ranges (least, most; both included) their lengths in tokens are drawn from, evenly."""

    name: str
    requests: int
    input_range: tuple[int, int]
    output_range: tuple[int, int]


@dataclass(frozen=True)
class BenchRequest:
    """A prompt of token ids, and how many tokens to generate after it."""

    prompt: list[int]
    output_tokens: int


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
    """A workload by its name or the word the name begins with ("mixed"). Raises UnknownWorkload."""
    for workload in WORKLOADS.values():
        if name in (workload.name, workload.name.split("_")[0]):
            return workload
    raise UnknownWorkload(f"no workload is called {name!r}; there are: {', '.join(WORKLOADS)}")


def make(name: str, vocab_size: int, *, scale: int = 1, requests: int | None = None) -> list[BenchRequest]:
    """The requests of a workload, its lengths divided by `scale`, the first `requests` of them.

    Lengths are drawn before ids and for the full workload: a scaled one has the same requests, smaller.
    """
    workload = find(name)
    if scale < 1 or (requests is not None and requests < 1):
        raise ValueError(f"scale and requests must be whole numbers from 1, not {scale!r} and {requests!r}")
    rng = random.Random(SEED)
    lengths = [
        (rng.randint(*workload.input_range), rng.randint(*workload.output_range)) for _ in range(workload.requests)
    ]
    ids = random.Random(SEED)
    return [
        BenchRequest([ids.randrange(vocab_size) for _ in range(max(1, inputs // scale))], max(1, outputs // scale))
        for inputs, outputs in lengths[:requests]
    ]


def totals(requests: Sequence[BenchRequest]) -> dict[str, int]:
    """How many requests, input and output tokens: the first fields of every result."""
    return {
        "requests": len(requests),
        "input_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
    }
