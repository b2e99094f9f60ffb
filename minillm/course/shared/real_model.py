"""Tell what quantization costs SmolLM2-135M, next to tiny-gemma, from committed records.  Lessons 05 to 08."""

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


def unquantized_perplexities() -> tuple[float, float]:
    """Perplexity of SmolLM2, as it is stored, and of tiny-gemma, each on the text of its record."""
    tiny = {row["quantization"]: row for row in records.read(TINY[0])["results"]}
    return quality()["stored"]["perplexity"], tiny["float32"]["perplexity"]


def tiny_kl() -> dict[str, float]:
    """The KL divergences of tiny-gemma, in nats, by the names that SmolLM2's record has for the same format."""
    found = {row["quantization"]: row["kl"] for name in TINY for row in records.read(name)["results"]}
    del found["w4a8"]  # which it has in groups of 128 only
    return found | {name: found[f"{name}-g64"] for name in GROUPED}


def report(names: Iterable[str], labels: Mapping[str, str] | None = None) -> None:
    """Print what each method costs SmolLM2, and tiny-gemma where it was measured. Says which rows to read with care.

    labels: of rows that are printed under another name than the record's.
    """
    labels = labels or {}
    rows, tiny = quality(), tiny_kl()
    names = list(names)
    weights = any("bits_per_weight" in rows[name] for name in names)
    columns = ["bits a weight"] * weights + ["KL, millinats", "95% of KL", "perplexity rises"]
    columns += ["tiny-gemma's KL"] * any(name in tiny for name in names)
    widths = [len(column) + 3 if column != "95% of KL" else 19 for column in columns]

    def show(*cells: str) -> None:
        padded = (cell.rjust(width) for cell, width in zip(cells[1:], widths, strict=True))
        print("".join([cells[0].ljust(20), *padded]).rstrip())

    show("", *columns)
    for name in names:
        row = rows[name]
        low, high = (f"{1000 * end:.1f}" for end in row["kl_interval"])
        cells = [f"{row['bits_per_weight']:.2f}" if "bits_per_weight" in row else ""] * weights
        cells += [f"{1000 * row['kl']:.1f}", f"{low} to {high}", f"{round(100 * row['perplexity_loss'], 1) + 0.0:.1f}%"]
        cells += [f"{1000 * tiny[name]:.2f}" if name in tiny else ""] * (len(columns) - len(cells))
        show(labels.get(name, name), *cells)
    if any(rows[name].get("bits_per_weight", 16) < FEW_BITS for name in names):
        print("\nThese weights had been rounded before: to 4 bits with an offset in groups of 32, the embedding to 8.")
        print(f"Below {FEW_BITS} bits, compare methods with each other, and not with the original model.")


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
