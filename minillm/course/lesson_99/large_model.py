"""Gemma 2B's shape, with random weights, on a CPU: its steps mostly read the weights.  Lesson 99.

    python -m minillm.course.lesson_99.large_model --json large-model

writes the record that the lesson shows where the model is not run.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from minillm import LLM, cores
from minillm.bench import records, roofline
from minillm.errors import ConfigError

from ..doctor import free_memory

MODEL, RECORD = "gemma-2b", "cpu/large-model"
GB = 10**9
WEIGHTS_GB, NEEDED_GB = 10, 12  # in float32; with a step and what Python takes
READ = GB // 2  # bytes read to measure the memory: too many for a processor's caches
CONTEXT, STEPS = 8, 4
Measured = tuple[roofline.Point, roofline.PeakRates]


def problem() -> str | None:
    """Return why this machine cannot run the model; None if it can, or if its free memory is not known."""
    free = free_memory()
    if free is None or free >= NEEDED_GB * GB:
        return None
    return (
        f"Gemma 2B takes {WEIGHTS_GB} GB in float32, so it needs {NEEDED_GB} GB of free memory, and {free / GB:.1f} GB "
        "are free: close other programs, or go on without it"
    )


def decode_step(model: str = MODEL) -> Measured:
    """A decode step of one request, on all cores that this process may use, and the limits of these cores.

    Raises ConfigError if there is too little free memory.
    """
    if found := problem():
        raise ConfigError(found)
    with _threads(cores.available()):
        limits = roofline.limits("cpu", torch.float32, READ)
        with LLM(model, load_format="dummy", device="cpu", dtype="float32", max_num_seqs=1, num_blocks=4) as llm:
            return roofline.decode(llm, 1, context=CONTEXT, steps=STEPS), limits


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recorded() -> Measured:
    """The same from the committed record."""
    record = records.read(RECORD)
    return roofline.Point(**record["results"][0]), roofline.PeakRates(record["bytes_per_s"], record["operations_per_s"])


def where() -> str:
    """The machine of the committed record."""
    machine = records.read(RECORD)["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores"


def line(measured: Measured) -> str:
    """Return what a step reads, how fast this could be read, and so the step's floor."""
    step, limits = measured
    return f"{step.bytes / GB:.1f} GB at {limits.bytes_per_s / GB:.1f} GB/s: at least {step.floor(limits):.2f} s a step"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.lesson_99.large_model", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the record there; a name without suffix: to data/results/")
    options = parser.parse_args(arguments)
    begun = records.begin(options.json)
    step, limits = decode_step()
    print(f"{line((step, limits))}; took {step.seconds:.2f} s")
    if options.json is not None:
        content = records.record([asdict(step)], begun, model=MODEL, dtype="float32", **asdict(limits))
        records.write(content, options.json)


if __name__ == "__main__":
    main()
