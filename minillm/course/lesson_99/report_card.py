"""Lesson 99: what a choice of precision means, in accuracy, memory, speed, and cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm import LLM
from minillm.bench import records
from minillm.evaluate.accuracy import answers
from minillm.evaluate.compare import Loss, paired_loss

RECORD = "h200/quantization"  # speeds and sizes
QUALITY = "cpu/quantization"
PARTS = "h200/roofline-workloads"


@dataclass(frozen=True)
class Precision:
    """A row of the card. options: of the engine; recorded: its name in the record of speeds; compared: of quality."""

    options: Mapping[str, Any]
    recorded: str
    compared: str


PRECISIONS = {
    "bf16": Precision({}, "bf16", "float32"),
    "fp8": Precision({"quantization": "fp8", "quantized_head": "fp8"}, "fp8, head fp8", "fp8"),
    "int4": Precision({"quantization": "int4", "quantized_head": "int8"}, "int4 g128, head int8", "int4"),
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


def recorded_accuracies(precisions: Mapping[str, Precision]) -> dict[str, tuple[float, Loss]]:
    """The same of all 2,160 questions, from the committed record; there the head is not quantized."""
    rows = {row["quantization"]: row for row in records.read(QUALITY)["results"]}
    found = {}
    for name, precision in precisions.items():
        row = rows[precision.compared]
        found[name] = (row["accuracy"], Loss(row["loss_points"], *row["loss_interval"]))
    return found


def divergences(precisions: Mapping[str, Precision]) -> dict[str, float]:
    """{name: mean KL divergence from the float32 model, in nats a token}, from the same record."""
    rows = {row["quantization"]: row["kl"] for row in records.read(QUALITY)["results"]}
    return {name: rows[precision.compared] for name, precision in precisions.items()}


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


def floors_ms(precisions: Mapping[str, Precision]) -> dict[str, tuple[float, float]]:
    """{name: (least, measured)}: milliseconds a token of a lone request, on an H200. Least: to read the weights."""
    bytes_per_s = records.read(PARTS)["bytes_per_s"]
    speed, size = speeds(precisions), gigabytes(precisions)
    return {name: (1e12 * size[name] / bytes_per_s, 1e3 / speed[name][1]) for name in precisions}


def parts_table(workload: str) -> str:
    """Where the time of a workload went, and the least each part needs: Gemma 2B in bf16 on an H200."""
    row = next(each for each in records.read(PARTS)["results"] if each["workload"].startswith(workload))
    steps, seconds = row["steps"], row["seconds"]
    counted = f"{row['requests']:,} request{'s' if row['requests'] > 1 else ''}"
    lines = [f"{counted}, {steps:,} steps; ms a step", f"{'':20}{'least':>8}{'took':>8}{'lost':>8}"]
    for part, share in row["shares"].items():
        took, least = 1e3 * share * seconds / steps, 1e3 * row["floor_seconds"].get(part, 0.0) / steps
        lines.append(f"{part:<20}{least:8.2f}{took:8.2f}{took - least:8.2f}")
    took, least = 1e3 * seconds / steps, 1e3 * sum(row["floor_seconds"].values()) / steps
    return "\n".join([*lines, f"{'all':<20}{least:8.2f}{took:8.2f}{took - least:8.2f}"])


def print_card(
    quality: Mapping[str, tuple[float, Loss]],
    kl: Mapping[str, float],
    size: Mapping[str, float],
    speed: Mapping[str, Mapping[int, float]],
    cost: Mapping[str, Mapping[int, float]],
) -> None:
    """kl: nats a token. size: GB. cost: dollars for a million output tokens."""
    print("Right answers and KL: tiny-gemma. GB, tokens/s and $: Gemma 2B's shape on one NVIDIA H200, as recorded.")
    few, many = min(next(iter(speed.values()))), max(next(iter(speed.values())))
    print(f"{few:,} and {many:,}: requests at once. Tokens are output tokens.\n")
    heads = f"{'right':>7}{'points lost (95%)':>23}{'KL':>8}{'GB':>6}{'tokens/s with':>18}{'$/million with':>19}"
    print(f"{'':5}{heads}\n{'':49}{few:>9,}{many:>9,}{few:>10,}{many:>9,}")
    for name, (right, loss) in quality.items():
        first = name == next(iter(quality))
        lost = "-" if first else f"{loss.points:.2f} ({loss.low:.2f} to {loss.high:.2f})"
        away = "-" if first else f"{kl[name]:.4f}"
        print(
            f"{name:5}{right:7.1%}{lost:>23}{away:>8}{size[name]:6.2f}{speed[name][few]:9,.0f}{speed[name][many]:9,.0f}"
            f"{cost[name][few]:10.2f}{cost[name][many]:9.4f}"
        )


def cheapest_table(cost: Mapping[str, Mapping[int, float]], choices: Mapping[int, str | None]) -> str:
    """For each number of requests at once, dollars for a million output tokens, and the cheapest precision.

    choices: {requests at once: what the learner chose}.
    """
    lines = [f"{'at once':>7}" + "".join(f"{name:>9}" for name in cost)]
    for count in sorted(next(iter(cost.values()))):
        cheapest = min(cost, key=lambda name: cost[name][count])
        prices = "".join(f"{cost[name][count]:9.{4 if count > 16 else 3}f}" for name in cost)
        chosen = (f"; you chose {choices[count]}" if choices[count] else "; no prediction") if count in choices else ""
        lines.append(f"{count:7,}{prices}  {cheapest} is cheapest{chosen}")
    return "\n".join(lines)
