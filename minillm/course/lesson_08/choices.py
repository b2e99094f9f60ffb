"""NVIDIA's table "how to choose a precision", with what committed records say about this engine.  Lesson 08.

What is NVIDIA's: TensorRT-LLM's documentation, "Speed up inference with SOTA quantization techniques in TRT-LLM",
section "Best practices to choose the right quantization methods".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minillm.bench import records
from minillm.model import load_model
from minillm.quantization import Activations, Format, Fp8, Int4, Int8

from ..lesson_07 import eight_bits

SPEED, QUALITY = "h200/quantization", "cpu/quantization"
STEPS = ((1.05, "Low"), (1.5, "Medium"))  # a gain below the first is low, below the second medium: this course's choice


@dataclass(frozen=True)
class MethodRow:
    """A row of the table. few, many, accuracy, time: NVIDIA's words; the others are names in our two records."""

    few: str  # faster at batch sizes up to 4
    many: str  # from 16 on
    accuracy: str  # impact on it
    time: str  # of calibration
    quality: str
    speed: str
    weights: Format


METHODS = {
    "FP8 (W8A8)": MethodRow(
        "Medium", "Medium", "Very low", "minutes", "fp8", "fp8", Fp8(activations=Activations("fp8"))
    ),
    "INT8 SmoothQuant (W8A8)": MethodRow(
        "Medium", "Medium", "Medium", "minutes", "smoothquant", "w8a8 (smoothquant)", Int8(Activations("int8"))
    ),
    "INT8 weight-only (W8A16)": MethodRow("Medium", "Low", "Low", "none", "int8", "int8", Int8()),
    "INT4 weight-only (W4A16)": MethodRow("High", "Low", "High", "none", "int4", "int4 g128 (awq, gptq)", Int4(128)),
    "INT4 AWQ (W4A16)": MethodRow("High", "Low", "Low", "tens of minutes", "awq", "int4 g128 (awq, gptq)", Int4(128)),
    "INT4 GPTQ (W4A16)": MethodRow("High", "Low", "Low", "tens of minutes", "gptq", "int4 g128 (awq, gptq)", Int4(128)),
    "INT4-FP8 AWQ (W4A8)": MethodRow(
        "High",
        "Medium",
        "Low",
        "tens of minutes",
        "w4a8",
        "w4a8 g128, head int8",
        Int4(128, activations=Activations("fp8")),
    ),
}


@dataclass(frozen=True)
class Measured:
    """Our records of a method.

    gains: {requests at once: tokens per second / bfloat16's}, Gemma 2B's shape on an H200. kl: in millinats per token,
    points: of accuracy lost, with a 95% interval, bytes: of all weights and their scales, seconds: of quantizing and
    measuring together; all of tiny-gemma.
    """

    gains: Mapping[int, float]
    kl: float
    points: float
    interval: tuple[float, float]
    bytes: int
    seconds: float


def measured(methods: Mapping[str, MethodRow] = METHODS) -> dict[str, Measured]:
    """Of each method. Speeds are those with a cache in bfloat16."""
    speed = [row for row in records.read(SPEED)["results"] if row["kv_cache_dtype"] == "bfloat16"]
    quality = {row["quantization"]: row for row in records.read(QUALITY)["results"]}
    model = load_model(dtype="float32", device="cpu")
    rest = dense_bytes() - eight_bits.bytes_of(model)
    found = {}
    for name, method in methods.items():
        row = quality[method.quality]
        gains = {each["requests"]: each["times_bf16"] for each in speed if each["quantization"] == method.speed}
        low, high = row["loss_interval"]
        size = rest + eight_bits.bytes_of(eight_bits.quantized(model, method.weights))
        found[name] = Measured(gains, 1000 * row["kl"], row["loss_points"], (low, high), size, row["seconds"])
    return found


def word(gain: float) -> str:
    """A gain in NVIDIA's words, by this course's limits."""
    return next((name for limit, name in STEPS if gain < limit), "High")


def judgments(
    found: Mapping[str, Measured], few: int = 4, many: int = 3000
) -> dict[tuple[str, str], tuple[str, str, int]]:
    """{(method, "few" or "many"): (NVIDIA's word, the record's, requests)}.

    few, many: the requests at once that stand for NVIDIA's two columns.
    """
    return {
        (name, which): (getattr(METHODS[name], which), word(each.gains[requests]), requests)
        for name, each in found.items()
        for which, requests in (("few", few), ("many", many))
    }


def confirmed(found: Mapping[str, Measured], few: int = 4, many: int = 3000) -> int:
    """Return how many of NVIDIA's speed ratings the record confirms."""
    return sum(theirs == ours for theirs, ours, _ in judgments(found, few, many).values())


def print_nvidias() -> None:
    print(f"{'':26}{'batch <= 4':>11}{'batch >= 16':>13}{'accuracy impact':>17}{'calibration':>18}")
    for name, row in METHODS.items():
        print(f"{name:26}{row.few:>11}{row.many:>13}{row.accuracy:>17}{row.time:>18}")


def print_ours(found: Mapping[str, Measured], requests: Iterable[int] = (1, 4, 16, 64, 3000)) -> None:
    requests = tuple(requests)
    head = "".join(f"{count:>7,}" for count in requests)
    print(f"{'times as fast as bf16 with':26}{head}{'KL':>8}{'points lost':>13}{'(95%)':>15}{'seconds':>9}")
    for name, row in found.items():
        gains = "".join(f"{row.gains[count]:7.2f}" for count in requests)
        interval = f"{row.interval[0]:.2f} to {row.interval[1]:.2f}"
        print(f"{name:26}{gains}{row.kl:8.3f}{row.points:13.2f}{interval:>15}{row.seconds:9.0f}")


# ---- what the lesson falls back to until an exercise is solved


def pareto_front(points: Mapping[str, tuple[float, ...]]) -> list[str]:
    """The names of points that no other beats, in their order; in every number, less is better."""

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return [name for name, mine in points.items() if not any(beats(each, mine) for each in points.values())]


def distillation() -> dict[str, Mapping[str, Any]]:
    """The rows of the record of distillation, by name."""
    return {row["quantization"]: row for row in records.read("cpu/distillation")["results"]}


def dense_bytes() -> int:
    """Bytes of tiny-gemma's weights in 16 bits."""
    return 2 * sum(tensor.numel() for tensor in load_model(dtype="float32", device="cpu").tensors())
