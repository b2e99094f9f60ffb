"""Put a report's figures into sentences, each written only where the figures make it true.

Each function takes a record of `minillm report` and returns sentences, the most important first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minillm.bench.reports import GENERATOR_BUSY, generator_share
from minillm.evaluate.compare import Z_95

from .measure import AGAIN, REFERENCE
from .settings import WORKLOADS

CHANCE = 0.25  # of a right guess among four answers
CLEAR = 0.05  # the least difference of speeds that is stated
UNSTEADY = 2.0  # the factor of a machine's own change of speed from which on no speeds of versions are compared
OTHERS = 0.15  # processors that other programs may keep busy before a report warns
GENERATOR = "Caution: the clients themselves worked for {:.0%} of the time, so the server is faster than this shows."
Record = Mapping[str, Any]
Row = Mapping[str, Any]
PATTERNS = {
    "chat": "short prompts and short answers",
    "silo": "short prompts and long answers",
    "liso": "long prompts and short answers",
    "lilo": "long prompts and long answers",
}


def rows(record: Record, part: str, version: str | None = None) -> list[Row]:
    """Return the results of a part, of all versions or of one."""
    return [row for row in record["results"] if row["part"] == part and version in (None, row["version"])]


def base(record: Record) -> str:
    """Return the unquantized version that speeds are compared with."""
    return record["compared"][0]


def simulated(record: Record) -> set[str]:
    """Versions in a format that this engine simulates: their accuracy is real, their speed and cost are not."""
    return {row["version"] for row in rows(record, "size") if row["simulated"]}


def offline(record: Record, version: str, workload: str, part: str = "offline") -> Row | None:
    """Return a version's row of an offline workload, named by its first word; None also if its speed is rounded to
    0.
    """
    matching = [row for row in rows(record, part, version) if row["workload"].split("_")[0] == workload]
    return matching[0] if matching and matching[0]["output_tokens_per_s"] else None


def listed(words: Sequence[str], last: str = "and") -> str:
    """ "a, b and c" """
    return " ".join([", ".join(words[:-1]), last, words[-1]]) if len(words) > 1 else "".join(words)


def size(count: float) -> str:
    """Return bytes in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def times(ratio: float) -> str:
    """Return a ratio with two or three digits: 0.62, 1.4, 31."""
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}" if ratio >= 1 else f"{ratio:.2f}"


def interval(share: float, count: int) -> tuple[float, float]:
    """Return a 95% confidence interval of a share of `count` answers (Wilson's, which holds close to 0 and 1 too)."""
    z = Z_95**2 / count
    middle = (share + z / 2) / (1 + z)
    half = math.sqrt(z * share * (1 - share) + z * z / 4) / (1 + z)
    return middle - half, middle + half


def accuracy(record: Record) -> list[str]:
    """About what the versions lose."""
    measured = rows(record, "quality")
    if not measured or measured[0]["version"] != REFERENCE:
        return []
    first, others = measured[0], measured[1:]
    count, share = first["questions"], first["accuracy"]
    low, high = interval(share, count)
    sentences = [
        f"Unquantized, in float32, the model answers {share:.1%} of {count:,} questions correctly; with 95% "
        f"confidence it would answer {low:.1%} to {high:.1%} of all such questions."
    ]
    if low <= CHANCE <= high:
        sentences.append(
            "Guessing gives 25%, because every question has four answers, so these answers are no better than "
            "guesses. Accuracy then cannot show what quantization loses; the KL divergence can."
        )
        if record["settings"]["task"] == "isles" and not record["embedded"]:
            sentences.append(
                "The questions are about an invented world that only the embedded model was trained on. With "
                "--tasks mmlu the report asks real ones."
            )
    worse = [row for row in others if row["loss_interval"][0] > 0]
    better = [row for row in others if row["loss_interval"][1] < 0]
    unclear = [row for row in others if row not in worse and row not in better]
    if worse:
        losses = [
            f"{row['version']} loses {row['loss_points']:.1f} points ({row['loss_interval'][0]:.1f} to "
            f"{row['loss_interval'][1]:.1f})"
            for row in sorted(worse, key=lambda row: -row["loss_points"])
        ]
        sentences.append(f"Worse, with 95% confidence: {listed(losses)}.")
    if better:
        sentences.append(f"Better, with 95% confidence: {listed([row['version'] for row in better])}.")
    if unclear:
        names = listed([row["version"] for row in unclear])
        sentences.append(f"{count:,} questions are too few to tell the loss of {names} from 0.")
    return sentences + origin(record) + _divergences(first, others)


def origin(record: Record) -> list[str]:
    """Return what the model itself had lost before anything was measured."""
    remark = record.get("remark", "")
    return [f"Caution: {remark}. All losses here are compared with it, not with the original."] if remark else []


def _divergences(first: Row, others: Sequence[Row]) -> list[str]:
    sentences = []
    ranked = sorted((row for row in others if row["kl"] > 0), key=lambda row: row["kl"])
    if len(ranked) > 1:
        near, far = ranked[0], ranked[-1]
        sentences.append(
            f"By the KL divergence, the predictions of {near['version']} are the closest to the original's, and those "
            f"of {far['version']} are {times(far['kl'] / near['kl'])} times as far away."
        )
    pairs = [
        (large["bytes"] / small["bytes"], small, large)
        for small in ranked
        for large in ranked
        if small["dtype"] == large["dtype"]
        and small["bytes"] < 0.95 * large["bytes"]
        and small["kl"] < 0.9 * large["kl"]
    ]
    if pairs:
        _, small, large = max(pairs, key=lambda each: each[0])
        sentences.append(
            f"Surprising: {small['version']} is smaller than {large['version']} ({size(small['bytes'])}, not "
            f"{size(large['bytes'])}), and yet closer to the original: how the bits are used matters too."
        )
    if lower := [row for row in others if row["perplexity"] < first["perplexity"] and row["kl"] > 1e-4]:
        names = listed([row["version"] for row in lower])
        sentences.append(
            f"Surprising: the perplexity of {names} is lower than the original's. That does not mean a better model: "
            "some tokens of the text became more likely and others less, and the KL divergence counts both as changes."
        )
    return sentences


def sizes(record: Record) -> list[str]:
    """About bytes, in files and in memory."""
    measured = rows(record, "size")
    first = next((row for row in measured if row["version"] == base(record)), None)
    if first is None:
        return []
    sentences, facts = [], record["facts"]
    smallest = min(measured, key=lambda row: row["bytes"])
    if smallest["bytes"] < first["bytes"]:
        share = smallest["bytes"] / first["bytes"]
        sentences.append(
            f"The smallest file is that of {smallest['version']}: {size(smallest['bytes'])}, {share:.0%} of the "
            "unquantized one's."
        )
        quality = {row["version"]: row for row in rows(record, "quality")}.get(smallest["version"], {})
        if quality.get("bits") == 4 and quality.get("head") == "dense" and facts["stored_dtype"] == "bfloat16":
            sentences.append(
                "A 4-bit weight is a quarter of a 16-bit one. The file is larger than a quarter, because groups of "
                "weights also store scales, and the table of token embeddings stays in 16 bits."
            )
    if facts["dtype"] == "float32" and facts["stored_dtype"] in ("bfloat16", "float16"):
        ratio = first["memory_bytes"] / first["bytes"]
        sentences.append(
            f"In memory the unquantized model takes {times(ratio)} times its file, because it is computed in float32 "
            f"here, and stored in {facts['stored_dtype']}."
        )
    tokens = first["memory_bytes"] / first["kv_bytes_per_token"]
    sentences.append(
        f"Every token of every running request takes {first['kv_bytes_per_token']:,} bytes of cache: {tokens:,.0f} "
        f"tokens take as much memory as the weights of {first['version']}."
    )
    return sentences


def drift(record: Record) -> float:
    """Return by which factor the first version's speed rose or fell during the report; at least 1."""
    largest = 1.0
    for workload in WORKLOADS:
        early, late = (offline(record, base(record), workload, part) for part in ("offline", AGAIN))
        if early and late:
            ratio = late["output_tokens_per_s"] / early["output_tokens_per_s"]
            largest = max(largest, ratio, 1 / ratio)
    return largest


def clear_ratio(record: Record, version: str, workload: str) -> float | None:
    """Return how many times as fast as the unquantized version one is; None if the runs do not show a difference.

    They show one if all runs of one are faster than all of the other, and the medians differ by more than the machine's
    own speed did during the report. On a machine that changed as much as UNSTEADY, they never do: its speed was
    measured at the beginning and at the end only, and may have changed more in between.
    """
    own, first = offline(record, version, workload), offline(record, base(record), workload)
    if own is None or first is None or version == base(record) or drift(record) >= UNSTEADY:
        return None
    apart = max(own["runs"]) < min(first["runs"]) or min(own["runs"]) > max(first["runs"])
    ratio = own["output_tokens_per_s"] / first["output_tokens_per_s"]
    return ratio if apart and max(ratio, 1 / ratio) > max(1 + CLEAR, drift(record)) else None


def speeds(record: Record) -> list[str]:
    """About all requests at once, without a server."""
    sentences, kinds = [], {"single": "For one request", "mixed": "For many requests at once"}
    versions = [name for name in record["compared"][1:] if rows(record, "offline", name)]
    unreal = simulated(record)
    ratios = {work: {name: clear_ratio(record, name, work) for name in versions} for work in WORKLOADS}
    for work, words in kinds.items():
        known = {name: ratio for name, ratio in ratios[work].items() if ratio is not None and name not in unreal}
        ranked = sorted(known.items(), key=lambda each: -each[1])
        if quicker := [f"{name} is {ratio:.2f} times as fast" for name, ratio in ranked if ratio > 1]:
            sentences.append(f"{words}, {listed(quicker)} as {base(record)}.")
        if slower := [f"{name} ({ratio:.2f} times as fast)" for name, ratio in ranked if ratio < 1]:
            sentences.append(f"{words}, these are slower than {base(record)}: {listed(slower)}.")
        compared = [name for name in versions if name not in unreal and offline(record, name, work)]
        if compared and not known and drift(record) < UNSTEADY:
            sentences.append(f"{words}, the runs show no difference in speed between the versions.")
    sentences += _surprises(record, {name for name in versions if name not in unreal}, ratios["single"])
    one, many = (offline(record, base(record), work) for work in WORKLOADS)
    least = max(1 + CLEAR, drift(record))
    if one and many and (gain := many["output_tokens_per_s"] / one["output_tokens_per_s"]) > least:
        sentences.append(
            f"{many['requests']:,} requests at once generate {times(gain)} times as many tokens per second as one: a "
            "step reads the weights once for all of them."
        )
    if unreal and versions:
        sentences.append(
            f"{listed(sorted(unreal))}: the format is simulated here, so the speed says nothing about hardware that "
            "computes in it."
        )
    return sentences + cautions(record)


def _surprises(record: Record, versions: set[str], ratios: Mapping[str, float | None]) -> list[str]:
    bytes_of = {row["version"]: row["bytes"] for row in rows(record, "size")}
    first = bytes_of.get(base(record))
    slow = [name for name in versions if (ratio := ratios[name]) is not None and ratio < 1 and name in bytes_of]
    slow = [name for name in slow if first is not None and bytes_of[name] < 0.9 * first]
    if first is None or not slow:
        return []
    name = min(slow, key=lambda each: bytes_of[each])
    cpu = record["facts"]["device"] == "cpu"
    why = " Without a GPU, minillm runs plain torch, without kernels for quantized weights." if cpu else ""
    return [
        f"Surprising: {name} has {bytes_of[name] / first:.0%} of the bytes, and still one request is slower with it. "
        f"The extra work of its format outweighs the bytes that need not be read.{why}"
    ]


def others_busy(record: Record) -> float:
    """Return how many processors other programs kept busy; 0 if too few to matter, or unknown."""
    cores = record.get("other_programs_cores") or 0.0
    return cores if cores > OTHERS else 0.0


def cautions(record: Record) -> list[str]:
    """Return what makes the report's speeds doubtful."""
    sentences = []
    if (factor := drift(record)) > 1 + CLEAR:
        omitted = "Smaller differences between versions are not stated."
        if factor >= UNSTEADY:
            omitted = "That is too much to compare the versions' speeds."
        sentences.append(
            f"Caution: the machine's own speed changed by a factor of {factor:.2f} between the beginning and the end "
            f"of the report. {omitted}"
        )
    if cores := others_busy(record):
        sentences.append(
            f"Caution: other programs kept {cores:.1f} of {record['machine']['cores']} processors busy during the "
            "measurement. Repeat the report on a quiet machine before you rely on its speeds."
        )
    return sentences


def serving(record: Record) -> list[str]:
    """About the four query patterns."""
    every = {row["workload"].split("_")[0]: row for row in rows(record, "serving", served(record))}
    measured = {name: row for name, row in every.items() if row["output_tokens_per_s"]}  # some round to 0
    sentences = []
    if len(measured) > 1:
        fast = max(measured, key=lambda name: measured[name]["output_tokens_per_s"])
        slow = min(measured, key=lambda name: measured[name]["output_tokens_per_s"])
        ratio = measured[fast]["output_tokens_per_s"] / measured[slow]["output_tokens_per_s"]
        if ratio > 1 + CLEAR:
            sentence = (
                f"With {PATTERNS[fast]} the server generates {times(ratio)} times as many tokens per second as with "
                f"{PATTERNS[slow]}."
            )
            shares = {name: row["input_tokens"] / row["output_tokens"] for name, row in measured.items()}
            if shares[slow] > shares[fast]:
                sentence += " Only generated tokens are counted, and reading prompts takes time too."
            sentences.append(sentence)
    if "chat" in measured and "liso" in measured:
        short, long = (measured[name]["ttft_s"]["p50"] for name in ("chat", "liso"))
        if short and long and long / short > 1.2:
            sentences.append(
                f"A long prompt makes users wait {times(long / short)} times as long for the first token: "
                f"{1e3 * long:,.0f} instead of {1e3 * short:,.0f} ms."
            )
    uneven = {name: row["itl_s"]["p99"] / row["itl_s"]["p50"] for name, row in measured.items() if row["itl_s"]["p50"]}
    if uneven and max(uneven.values()) > 2:
        name = max(uneven, key=lambda each: uneven[each])
        why = "" if others_busy(record) else " The likely reason: another request's prompt was read in that step."
        sentences.append(
            f"With {PATTERNS[name]}, one gap between tokens in a hundred is at least {times(uneven[name])} times as "
            f"long as the median gap.{why}"
        )
    busy = max((generator_share(row) for row in measured.values()), default=0.0)
    return sentences + ([GENERATOR.format(busy)] if busy > GENERATOR_BUSY else [])


def served(record: Record) -> str | None:
    """Return the first version that was served."""
    return next((row["version"] for row in rows(record, "serving")), None)


def costs(record: Record) -> list[str]:
    """About dollars for a million tokens; nothing without a price."""
    sentences = []
    one, many = (offline(record, base(record), work) for work in WORKLOADS)
    least = max(1 + CLEAR, drift(record))
    if one and many and (cheap := _dollars(many)) and (dear := _dollars(one)) and dear / cheap > least:
        sentences.append(
            f"A token costs {times(dear / cheap)} times as much if requests come one at a time as if "
            f"{many['requests']:,} come at once: the price of an hour is divided by the tokens of that hour."
        )
    measured = {row["workload"].split("_")[0]: _dollars(row) for row in rows(record, "serving", served(record))}
    known = {name: dollars for name, dollars in measured.items() if dollars}
    if len(known) > 1:
        cheap, dear = (choose(known, key=lambda name: known[name]) for choose in (min, max))
        if known[dear] / known[cheap] > 1 + CLEAR:
            sentences.append(
                f"Generated tokens are cheapest with {PATTERNS[cheap]} (${known[cheap]:.4g} a million) and most "
                f"expensive with {PATTERNS[dear]} (${known[dear]:.4g})."
            )
    return sentences


def _dollars(row: Row) -> float | None:
    return row.get("cost", {}).get("per_million_output")
