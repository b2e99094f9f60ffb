"""The sections of a report's page: what each shows, its tables and pictures, and what they say."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.bench.figures import cost
from minillm.bench.plots import machine_of

from . import findings, pictures
from .findings import rows, size
from .measure import REFERENCE
from .pictures import Picture

PERCENTS = ("p50", "p99")
MINUS = "\N{MINUS SIGN}"
LED_BY = {"accuracy": 2, "speed": 2}  # sentences of a section that the summary repeats; one of any other
Record = Mapping[str, Any]
TASKS = {
    "isles": "the embedded questions about an invented world, which have the form of MMLU's, without examples",
    "mmlu": "MMLU's questions, each after five answered examples",
}


@dataclass(frozen=True)
class Table:
    """lines: the cells of each row; the first cell is its name. A row of two cells has a reason instead of figures."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """about: what the section shows. says: what the figures mean. failed: what could not be measured, and why."""

    key: str
    title: str
    about: str
    says: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    failed: Sequence[str] = ()


def sections(record: Record) -> list[Section]:
    """Return all sections after the summary, in order. A section without figures still says why it has none."""
    return [_model(record), _accuracy(record), _sizes(record), _speed(record), _serving(record), _cost(record)]


def summary(record: Record, every: Iterable[Section]) -> list[str]:
    """Return the first sentences of each section, what makes speeds doubtful, and how much could not be measured."""
    says = [sentence for section in every for sentence in section.says[: LED_BY.get(section.key, 1)]]
    says += findings.origin(record) + findings.cautions(record)
    failed = len(record["failures"])
    if failed:
        parts = "one part" if failed == 1 else f"{failed} parts"
        says.append(f"Not everything could be measured: {parts} of this report failed, and the sections say which.")
    return says


def _model(record: Record) -> Section:
    facts, settings = record["facts"], record["settings"]
    lines = [
        ("model", record["model"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("layers", f"{facts['layers']}"),
        ("vocabulary", f"{facts['vocabulary']:,} tokens"),
        ("context used here", f"{facts['context']:,} tokens"),
        ("stored in", facts["stored_dtype"]),
        ("computed in", facts["dtype"]),
        ("machine", f"{machine_of(record)}, {record['machine']['memory_gib']} GiB of main memory"),
    ]
    about = (
        "A version is the model with its weights stored in another way: quantized, that is, rounded to few bits. "
        f"{findings.base(record)} is the unquantized model as minillm runs it on this machine, and the other versions "
        "are compared with it."
    )
    says = ["This is a quick report: few questions and short runs. Its figures are rougher than those of a full one."]
    says = says if settings["quick"] else []
    says += [f"{name} is left out: {why}." for name, why in record.get("left_out", {}).items()]
    return Section("model", "The model and the machine", about, says, [Table((), lines)])


def _accuracy(record: Record) -> Section:
    task, count = record["settings"]["task"], next((row["questions"] for row in rows(record, "quality")), 0)
    about = (
        f"How often each version picks the right one of four answers, and how far its predictions moved. Asked: "
        f"{count:,} of {TASKS.get(task, task)}. A point is one question in a hundred. The interval shows how large the "
        "loss may really be: if it contains 0, there may be no loss."
    )

    def line(row: Mapping[str, Any]) -> list[str]:
        low, high = row["loss_interval"]
        lost = (
            ["-", "-"]
            if row["version"] == REFERENCE
            else [f"{row['loss_points']:.2f}", f"{low:.2f} to {high:.2f}".replace("-", MINUS)]
        )
        return [f"{row['accuracy']:.1%}", *lost, f"{row['kl']:.2g}", f"{row['perplexity']:.3f}"]

    names = [REFERENCE, *(name for name in record["compared"] if name != REFERENCE)]
    head = ("version", "right", "points lost", "95% interval", "KL divergence", "perplexity")
    table = Table(head, _lines(record, names, ("quality", "size"), lambda name: _first(record, "quality", name, line)))
    return _section(
        record,
        "accuracy",
        "Accuracy",
        about,
        findings.accuracy(record),
        [table],
        pictures.losses(record),
        parts=("quality",),
    )


def _sizes(record: Record) -> Section:
    about = (
        "How many bytes the weights of each version take, in its file and in memory while it runs, and how many a "
        "token of a running request adds. What fits into memory decides which machine you need."
    )
    first = next((row for row in rows(record, "size") if row["version"] == findings.base(record)), None)

    def line(row: Mapping[str, Any]) -> list[str]:
        share = f"{row['bytes'] / first['bytes']:.0%}" if first else "-"
        return [size(row["bytes"]), share, size(row["memory_bytes"]), f"{row['kv_bytes_per_token']:,}"]

    head = ("version", "file", "of the unquantized file", "in memory", "cache bytes a token")
    table = Table(head, _lines(record, record["compared"], ("size",), lambda name: _first(record, "size", name, line)))
    return _section(record, "size", "Size", about, findings.sizes(record), [table], (), parts=("size",))


def _speed(record: Record) -> Section:
    settings = record["settings"]
    scaled = f" Lengths are divided by {settings['scale']}." if settings["scale"] > 1 else ""
    about = (
        "How many tokens per second the engine generates without a server: for one request (128 tokens in, 256 out), "
        "and for many that are submitted at once (100 to 1,024 tokens in, as many out)."
        f"{scaled} Figures are medians of {settings['repeat']} runs. Versions ran one after the other, so a difference "
        "is stated only if all runs of one version are faster than all runs of the other."
    )

    def cells(name: str) -> list[str]:
        texts = []
        for workload in ("single", "mixed"):
            row, ratio = findings.offline(record, name, workload), findings.clear_ratio(record, name, workload)
            if row is None:
                return []
            texts += [f"{row['output_tokens_per_s']:,.1f}"]
            shown = f"{ratio:.2f}" if ratio else "1.00" if name == findings.base(record) else "not clear"
            texts += ["simulated" if name in findings.simulated(record) else shown]
        return texts

    many = next((row["requests"] for row in rows(record, "offline") if row["workload"].startswith("mixed")), "many")
    times = f"times {findings.base(record)}"
    head = ("version", "tokens/s, 1 request", times, f"tokens/s, {many} requests", times)
    table = Table(head, _lines(record, record["compared"], ("offline",), cells))
    says, drawn = findings.speeds(record), pictures.speeds(record)
    return _section(record, "speed", "Speed", about, says, [table], drawn, parts=("offline", "again"))


def _serving(record: Record) -> Section:
    settings = record["settings"]
    about = (
        f"What users wait for when minillm serves over HTTP and {settings['clients']} clients send one request after "
        "another, in four patterns: short or long prompts with short or long answers. Half of all waits are at most "
        "the median; one in a hundred is at least the 99th percentile. The first token of an answer comes after its "
        "prompt is read; the gap between tokens is how fast the text appears after that."
    )
    head = ("pattern", "tokens in", "out", "first token, median ms", "99th", "gap, median ms", "99th")
    rates = ("whole answer, median s", "output tokens/s", "all tokens/s")
    tables = []
    for name in dict.fromkeys(row["version"] for row in rows(record, "serving")):
        own = rows(record, "serving", name)
        tables.append(Table((f"{head[0]}: {name}", *head[1:], *rates), [_pattern(row) for row in own]))
    drawn = pictures.serving(record)
    return _section(
        record, "serving", "Serving", about, findings.serving(record), tables, drawn, parts=("serving", "quantize")
    )


def _pattern(row: Mapping[str, Any]) -> list[str]:
    inputs, outputs = (f"{row[name] / row['requests']:,.0f}" for name in ("input_tokens", "output_tokens"))
    waits = [
        "-" if row[name][p] is None else f"{1e3 * row[name][p]:.1f}" for name in ("ttft_s", "itl_s") for p in PERCENTS
    ]
    every = row["output_tokens_per_s"] + row["input_tokens"] / row["seconds"]
    rates = [f"{row['output_tokens_per_s']:,.0f}", f"{every:,.0f}"]
    return [row["workload"].split("_")[0], inputs, outputs, *waits, f"{row['e2e_s']['p50']:.2f}", *rates]


def _cost(record: Record) -> Section:
    price = record["settings"]["price"]
    known = "" if price is None else f" at ${price:g} an hour"
    about = (
        f"What a million tokens cost{known}: the price of an hour, divided by the tokens generated in it. In the first "
        "column of dollars only generated tokens count, in the second the prompt's too."
    )
    says = findings.costs(record)
    if price is None:
        about = (
            "How many tokens an hour of this machine generates. With --gpu-price DOLLARS, the price of an hour, the "
            "report also says what a million tokens cost."
        )
    if any(row.get("steady") for row in rows(record, "serving")):
        about += " A server's rates are those while all clients were busy, without its first and last seconds."
    lines = []
    for row in [*rows(record, "offline"), *rows(record, "serving")]:
        if row["version"] in findings.simulated(record):
            continue
        name = row["workload"].split("_")[0]
        load = {"single": "1 request", "mixed": f"{row['requests']:,} at once"}.get(name, f"server, {name}")
        rate = (row.get("steady") or row)["output_tokens_per_s"]
        cells = [row["version"], load, f"{rate * 3600 / 1e6:,.3f}"]
        if price is not None:
            dollars = cost(row, price)
            cells += [
                "-" if dollars[each] is None else f"${short(dollars[each])}"
                for each in ("per_million_output", "per_million")
            ]
        lines.append(cells)
    head = ("version", "load", "million output tokens an hour", "$ a million generated", "$ a million of all")
    table = Table(head if price is not None else head[:3], lines)
    return _section(
        record, "cost", "Cost", about, says, [table] if lines else [], (), parts=("offline", "serving", "quantize")
    )


def short(number: float) -> str:
    """With four significant digits, and never in powers of ten: 301.9, 1.802, 0.01594."""
    decimals = 3 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{number:,.{max(0, decimals)}f}"


def _section(
    record: Record,
    key: str,
    title: str,
    about: str,
    says: Sequence[str],
    tables: Sequence[Table],
    drawn: Sequence[Picture],
    parts: Sequence[str],
) -> Section:
    """Return a section with the failures of its parts that are in no row of its tables."""
    told = {line[0] for table in tables for line in table.lines if len(line) == 2}
    failed = [
        f"{each['version']}: {each['error']}"
        for each in record["failures"]
        if each["part"] in parts and each["version"] not in told
    ]
    return Section(key, title, about, says, tables, drawn, list(dict.fromkeys(failed)))


def _lines(
    record: Record, names: Iterable[str], parts: Sequence[str], cells: Callable[[str], list[str]]
) -> list[list[str]]:
    """Return a row for each version: its cells, or why there are none."""
    lines = []
    for name in names:
        own = cells(name)
        if not own:
            why = [each for each in record["failures"] if each["version"] == name]
            why = [each["error"] for each in why if each["part"] in ("quantize", *parts)]
            missing = "there is nothing to compare with" if "quality" in parts else "no figures"
            own = [f"not measured: {why[0] if why else missing}"]
        lines.append([name, *own])
    return lines


def _first(record: Record, part: str, name: str, line: Callable[[Mapping[str, Any]], list[str]]) -> list[str]:
    own = rows(record, part, name)
    return line(own[0]) if own else []
