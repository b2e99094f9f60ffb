"""Lesson 99: what a choice of precision means, in accuracy, memory, speed, and cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm import LLM
from minillm.bench import records
from minillm.evaluate.accuracy import answers
from minillm.evaluate.compare import Loss, paired_loss

RECORD = "h200/quantization"


@dataclass(frozen=True)
class Precision:
    """A row of the card. options: of the engine; recorded: its name in the record of speeds."""

    options: Mapping[str, Any]
    recorded: str


PRECISIONS = {
    "bf16": Precision({}, "bf16"),
    "fp8": Precision({"quantization": "fp8", "quantized_head": "fp8"}, "fp8, head fp8"),
    "int4": Precision({"quantization": "int4", "quantized_head": "int8"}, "int4 g128, head int8"),
}


def accuracies(precisions: Mapping[str, Precision], questions: int) -> dict[str, tuple[float, Loss]]:
    """{name: (share of answers that are right, what was lost against the first)}, of tiny-gemma on a CPU.

    Computed in float32; the questions are spread evenly over all embedded ones.
    """
    found = {}
    for name, precision in precisions.items():
        with LLM(device="cpu", **precision.options) as llm:
            found[name] = answers(llm, limit=questions)
    first = next(iter(found.values()))
    return {name: (each.accuracy, paired_loss(first.correct, each.correct)) for name, each in found.items()}


def speeds(precisions: Mapping[str, Precision]) -> dict[str, dict[int, float]]:
    """{name: {requests at once: output tokens per second}}, of Gemma 2B's shape on an H200."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in precisions}
    for row in records.read(RECORD)["results"]:
        for name, precision in precisions.items():
            if row["quantization"] == precision.recorded and row["kv_cache_dtype"] == "bfloat16":
                runs = found[name].setdefault(row["requests"], [])
                runs.append(row["output_tokens_per_s"])
    return {name: {count: sum(runs) / len(runs) for count, runs in each.items()} for name, each in found.items()}


def gigabytes(precisions: Mapping[str, Precision]) -> dict[str, float]:
    """Weights of Gemma 2B, head included."""
    rows = {row["quantization"]: row["weight_bytes"] / 1e9 for row in records.read(RECORD)["results"]}
    return {name: rows[precision.recorded] for name, precision in precisions.items()}


def print_card(
    quality: Mapping[str, tuple[float, Loss]],
    size: Mapping[str, float],
    speed: Mapping[str, Mapping[int, float]],
    cost: Mapping[str, Mapping[int, float]],
) -> None:
    """cost: dollars for a million output tokens."""
    few, many = min(next(iter(speed.values()))), max(next(iter(speed.values())))
    print(f"{'':6}{'right':>7}{'points lost (95 %)':>23}{'GB':>6}{'tokens/s with':>19}{'$ a million with':>19}")
    print(f"{'':42}{few:>10,}{many:>9,}{few:>10,}{many:>9,}")
    for name, (right, loss) in quality.items():
        first = name == next(iter(quality))
        lost = "-" if first else f"{loss.points:.1f} ({loss.low:.1f} to {loss.high:.1f})"
        print(
            f"{name:6}{right:7.0%}{lost:>23}{size[name]:6.2f}{speed[name][few]:10,.0f}{speed[name][many]:9,.0f}"
            f"{cost[name][few]:10.2f}{cost[name][many]:9.4f}"
        )
