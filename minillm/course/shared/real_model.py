"""What quantization costs SmolLM2-135M, next to tiny-gemma, from committed records.  Lessons 05 to 08."""

from collections.abc import Iterable, Mapping
from typing import Any

from minillm.bench import records

RECORD = "h100/quantized-smollm2-135m"
TINY = ("cpu/quantization", "cpu/quantization-seeds")
GROUPED = ("int4", "awq", "gptq")  # without a group size: groups of 64 in SmolLM2, whose width 128 does not divide
FEW_BITS = 5  # rows below it compare methods only: the weights had been rounded to four bits before


def quality() -> dict[str, Mapping[str, Any]]:
    """The rows of SmolLM2's record with perplexity and KL, by the method's name."""
    return {row["quantization"]: row for row in records.read(RECORD)["results"] if row["workload"] == "quality"}


def tiny_kl() -> dict[str, float]:
    """The KL divergences of tiny-gemma, in nats, by the names that SmolLM2's record has for the same format."""
    found = {row["quantization"]: row["kl"] for name in TINY for row in records.read(name)["results"]}
    return found | {name: found[f"{name}-g64"] for name in GROUPED}


def report(names: Iterable[str]) -> None:
    """Print what each method costs SmolLM2, and tiny-gemma where it was measured. Says which rows to read with care."""
    rows, tiny = quality(), tiny_kl()
    names = list(names)
    print(
        f"{'':20}{'bits a weight':>14}{'KL in millinats':>17}{'95% interval':>17}{'perplexity':>12}{'tiny-gemma':>12}"
    )
    for name in names:
        row = rows[name]
        bits = f"{row['bits_per_weight']:.2f}" if "bits_per_weight" in row else ""
        low, high = (f"{1000 * end:.1f}" for end in row["kl_interval"])
        rise = f"{100 * row['perplexity_loss']:+.1f}%"
        other = f"{1000 * tiny[name]:.2f}" if name in tiny else ""
        print(f"{name:20}{bits:>14}{1000 * row['kl']:17.1f}{f'{low} to {high}':>17}{rise:>12}{other:>12}")
    if any(rows[name].get("bits_per_weight", 16) < FEW_BITS for name in names):
        before = records.read(RECORD)["rounded"]
        print(f"\nThese weights had been rounded before ({before}): below {FEW_BITS} bits, compare methods with")
        print("each other, and not with the original model.")


def gains() -> dict[str, dict[int, float]]:
    """Tokens per second as multiples of bfloat16's, by the method's name and the number of requests at once."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in records.read(RECORD)["results"]:
        if row["workload"] != "quality":
            rates = found.setdefault(row["quantization"], {})
            rates.setdefault(row["requests"], []).append(row["output_tokens_per_s"])
    mean = {name: {count: sum(each) / len(each) for count, each in rates.items()} for name, rates in found.items()}
    dense = mean["bfloat16"]  # measured first and last
    return {name: {count: rate / dense[count] for count, rate in rates.items()} for name, rates in mean.items()}
