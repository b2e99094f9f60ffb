"""Lesson 99: what a choice of precision means, in accuracy, memory, speed, and cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm import LLM
from minillm.bench import records
from minillm.evaluate.accuracy import answers
from minillm.evaluate.compare import Loss, paired_loss

from . import under_load

RECORD = "h200/quantization"  # speeds and sizes
QUALITY = "cpu/quantization"
PARTS = "h200/roofline-workloads"
FEW, MANY = 1, 3000  # requests at once on the card


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


def floors_table(precisions: Mapping[str, Precision]) -> str:
    """A lone request's time between two tokens, its floor, and how many times the floor it takes: a line each."""
    return "\n".join(
        f"{name:6}{took:5.2f} ms between tokens, {took / least:.2f} times its floor of {least:.2f} ms"
        for name, (least, took) in floors_ms(precisions).items()
    )


def parts_table() -> str:
    """Return where the time of a step goes, and the least each part needs, with one request and with 3,000.

    Of Gemma 2B's shape in bf16 on an H200.
    """
    rows = [_workload(name) for name in ("single", "chat")]
    heads = [f"{row['requests']:,} request{'s' if row['requests'] > 1 else ''}" for row in rows]
    lines = ["ms a step".ljust(18) + "".join(f"{head:^24}" for head in heads).rstrip()]
    lines.append(" " * 18 + "".join(f"{name:>8}" for name in ("least", "took", "lost") * 2))
    losses = [lost(row) for row in rows]
    for part in losses[0]:
        numbers = [number for found in losses for number in found[part]]
        lines.append(f"{part:<18}" + "".join(f"{number:8.2f}" for number in numbers))
    return "\n".join(lines)


def _workload(name: str) -> dict[str, Any]:
    """The row of a workload, named by the first letters of its name, in the record of `PARTS`."""
    return next(each for each in records.read(PARTS)["results"] if each["workload"].startswith(name))


def lost(row: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """{part: (least, took, lost)} in milliseconds a step; the last part is "all". row: of the record of `PARTS`."""
    ms = 1e3 / row["steps"]
    least = {part: ms * row["floor_seconds"].get(part, 0.0) for part in row["shares"]}
    took = {part: ms * share * row["seconds"] for part, share in row["shares"].items()}
    least["all"], took["all"] = ms * sum(row["floor_seconds"].values()), ms * row["seconds"]
    return {part: (least[part], took[part], took[part] - least[part]) for part in took}


def print_card(
    quality: Mapping[str, tuple[float, Loss]],
    kl: Mapping[str, float],
    size: Mapping[str, float],
    speed: Mapping[str, Mapping[int, float]],
    cost: Mapping[str, Mapping[int, float]],
) -> None:
    """kl: nats a token. size: GB. cost: dollars for a million output tokens."""
    rows = {}
    for name, (right, loss) in quality.items():
        rows[name] = [
            f"{right:.1%}",
            f"{loss.points:.2f} ({loss.low:.2f} to {loss.high:.2f})",
            f"{kl[name]:.4f}",
            f"{size[name]:.2f}",
            *(f"{speed[name][count]:,.0f}" for count in (FEW, MANY)),
            f"{cost[name][FEW]:.2f}",
            f"{cost[name][MANY]:.4f}",
        ]
    _print(rows)


def print_empty_card(precisions: Mapping[str, Precision]) -> None:
    """The card before anything is known."""
    _print({name: ["?"] * 8 for name in precisions})


def _print(rows: Mapping[str, Sequence[str]]) -> None:
    print("Right answers and KL: tiny-gemma. GB, tokens/s and $: Gemma 2B's shape on one NVIDIA H200, as recorded.")
    print(f"{FEW:,} and {MANY:,}: requests at once. Tokens are output tokens.\n")
    heads = f"{'right':>7}{'points lost (95%)':>23}{'KL':>8}{'GB':>6}{'tokens/s with':>18}{'$/million with':>19}"
    print(f"{'':5}{heads}\n{'':49}{FEW:>9,}{MANY:>9,}{FEW:>10,}{MANY:>9,}")
    for name, cells in rows.items():
        if name == next(iter(rows)):
            cells = [cells[0], "-", "-", *cells[3:]]  # it is what the others lose against
        widths = (7, 23, 8, 6, 9, 9, 10, 9)
        print(f"{name:5}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def cheapest(cost: Mapping[str, Mapping[int, float]], choices: Mapping[int, Any]) -> str:
    """Name the cheapest precision for each number of requests at once, and what the learner chose, if it is one."""
    names = [f'"{name}"' for name in cost]
    lines = []
    for count, chosen in choices.items():
        best = min(cost, key=lambda name: cost[name][count])
        said = f"you chose {chosen}" if chosen else "no prediction"
        if chosen and chosen not in list(cost):
            said += f" (write {', '.join(names[:-1])} or {names[-1]})"
        lines.append(f"{count:,} request{'s' * (count > 1)} at once: {best} is cheapest; {said}")
    return "\n".join(lines)


def measured_table(gigabytes: float, outcomes: Mapping[str, under_load.Outcome], dollars: float) -> str:
    """The card's rows for what was measured on this machine. gigabytes: of weights; dollars: for an hour of it."""
    columns = {
        "GB": lambda _: f"{gigabytes:.2f}",
        "$/million": lambda outcome: f"{dollars / 3600 / outcome.tokens_per_s * 1e6:.4f}",
    }
    return under_load.table(outcomes, columns)
