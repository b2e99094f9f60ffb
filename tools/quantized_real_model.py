"""Measure what every quantization method costs a trained model, on English prose.

    minillm download smollm2-135m
    python tools/quantized_real_model.py smollm2-135m --record quantized-smollm2-135m

Perplexity and KL are measured on windows of the lessons' prose, in float32 arithmetic with the reference operations,
and compared with the model as it is stored. Methods are calibrated on other prose of the project. The ends of all
intervals are 1.96 standard errors of the mean over windows from it. On a GPU, formats that have kernels are then timed
in the engine. The record is written after each row, so a run that is cut short keeps what it has.

Rows named cache-... change only the keys and values; those in 4 and 2 bits are simulated, and "channel" means that keys
share a scale along each channel of a whole window. Weights of the packaged SmolLM2 were rounded to four bits before
minillm got them. So rows of four bits compare methods, and say too little of what rounding the original would cost.
"""

import argparse
import gc
import hashlib
import math
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from minillm import ops, pretrained, using  # noqa: E402
from minillm.bench import records, workloads  # noqa: E402
from minillm.bench.offline import Minillm  # noqa: E402
from minillm.calibration.names import named  # noqa: E402
from minillm.calibration.quantize import quantize  # noqa: E402
from minillm.course.lesson_08.small_caches import rounded  # noqa: E402
from minillm.evaluate.compare import Z_95, Reference  # noqa: E402
from minillm.kv_cache.layer_cache import LayerCache  # noqa: E402
from minillm.model import Model, load_model  # noqa: E402
from minillm.model.checkpoint import read_headers  # noqa: E402
from minillm.model.decoder import PROJECTIONS  # noqa: E402
from minillm.model.loader import resolve, simulated  # noqa: E402
from minillm.tokenizer import Tokenizer  # noqa: E402

METHODS = (
    *("int8", "int8+int8", "fp8", "fp8-tensor", "fp8-static", "fp8-tensor-static"),
    *("w8a8", "w8a8-static", "w8a8-rotate", "smoothquant", "smoothquant-static"),
    *("int4", "int4-g32", "int4-g32-zeros", "int4-rotate", "awq", "awq-g32", "gptq", "gptq-actorder", "gptq-g32"),
    *("w4a8", "w4a8-static", "nvfp4", "mxfp4", "sparse24", "pruned"),
)
CACHES = {"cache-int8": "int8", "cache-fp8": "fp8"}
SMALL_CACHES = {  # bits, and what shares a scale: of keys, of values
    "cache-4": (4, "token and head", "token and head"),
    "cache-4-channel": (4, "channel", "token and head"),
    "cache-2": (2, "token and head", "token and head"),
    "cache-2-channel": (2, "channel", "token and head"),
}
TIMED = ("int8", "int8+int8", "int4", "int4-g32", "gptq-actorder", "w8a8", "w8a8-rotate", "fp8", "w4a8")
WINDOW, WINDOWS = 512, 48
EVALUATION = ("notebooks/source/0[1-9]*.py", "notebooks/source/1*.py")
CALIBRATION = (
    *("docs/*.md", "README.md", "CONTRIBUTING.md", "data/README.md"),
    *("notebooks/source/00*.py", "notebooks/source/99*.py"),
)
SHORTEST = 25  # words of a paragraph that counts as prose
LAYERS = re.compile(r"\.layers\..*proj\.(?!weight_shape)")  # the tensors of products in a stored model
SCALES = re.compile(r"scale|zero_point|g_idx")
SPEEDS = (1, 16, 64)  # requests at once
ENGINE: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 64, "max_model_len": 512, "gpu_memory_utilization": 0.5}
REPEAT = 3
REFERENCE = {name: getattr(ops.reference, name) for name in ops.names()}


# ---- the texts


def prose(patterns: Sequence[str]) -> str:
    """The paragraphs of the project's pages and lessons: no code, tables, headings, lists or formulas."""
    found = []
    for file in sorted(each for pattern in patterns for each in ROOT.glob(pattern)):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            cells = re.findall(r"^# %% \[markdown\].*\n((?:#.*\n)*)", text, re.M)
            text = "\n\n".join(re.sub(r"^# ?", "", cell, flags=re.M) for cell in cells)
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        found += [plain for each in re.split(r"\n\s*\n", text) if (plain := _plain(each))]
    return "\n\n".join(found)


def _plain(paragraph: str) -> str:
    """A paragraph without Markdown's marks; "" if it is none."""
    if re.match(r"[#|!<>$*+-]|\d+\. ", paragraph.lstrip()) or "$" in paragraph or "|" in paragraph:
        return ""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    text = " ".join(re.sub(r"\*\*?|`", "", text).split())
    return text if len(text.split()) >= SHORTEST else ""


def spread(ids: Sequence[int], count: int) -> list[list[int]]:
    """So many windows that do not overlap, spread evenly over the text."""
    whole = len(ids) // WINDOW
    if whole < count:
        raise SystemExit(f"the text has {whole} windows of {WINDOW} tokens, and {count} were asked for")
    starts = [WINDOW * (index * whole // count) for index in range(count)]
    return [list(ids[start : start + WINDOW]) for start in starts]


# ---- quality


@dataclass(frozen=True)
class Found:
    """Each window's mean surprise and KL divergence from the stored model, in nats a token."""

    surprise: list[float]
    kl: list[float]


class Windows:
    """The stored model's predictions on each window, to compare versions with."""

    def __init__(self, model: Model, windows: Sequence[Sequence[int]], prefix: Sequence[int]):
        self.each = [Reference(model, ids, prefix) for ids in windows]
        self.first = self.measure(model)

    def measure(self, model: Model) -> Found:
        each = [reference.divergence(model) for reference in self.each]
        return Found([math.log(one.perplexity) for one in each], [one.kl for one in each])

    def row(self, found: Found) -> dict[str, Any]:
        """A version's figures: perplexity, by which share it rose, and KL, with intervals."""
        more = [now - before for now, before in zip(found.surprise, self.first.surprise, strict=True)]
        rise, low, high = interval(more)
        kl, least, most = interval(found.kl)
        return {
            "perplexity": round(math.exp(statistics.fmean(found.surprise)), 4),
            "perplexity_loss": _short(math.expm1(rise)),
            "perplexity_interval": [_short(math.expm1(low)), _short(math.expm1(high))],
            "kl": _short(kl),
            "kl_interval": [_short(least), _short(most)],
        }


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the ends of its 95% interval."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean, mean - Z_95 * error, mean + Z_95 * error


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def sizes(directory: Path, dense: int) -> dict[str, Any]:
    """Bytes of a stored model, of the codes and scales of its layers' products; bits of each of `dense` weights."""
    entries = read_headers(directory)
    layers = {name: entry.nbytes for name, entry in entries.items() if LAYERS.search(name)}
    scales = sum(nbytes for name, nbytes in layers.items() if SCALES.search(name))
    return {
        "bytes": sum(entry.nbytes for entry in entries.values()),
        "code_bytes": sum(layers.values()) - scales,
        "scale_bytes": scales,
        "bits_per_weight": round(8 * sum(layers.values()) / dense, 3),
    }


def layer_weights(model: Model) -> int:
    """The weights of all layers' products."""
    return sum(getattr(layer, name).shape.numel() for layer in model.layers for name in PROJECTIONS)


@contextmanager
def small_cache(bits: int, keys: str, values: str) -> Iterator[None]:
    """Keys and values are rounded to so few bits when they are written; each call writes one request."""

    def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        ops.reference.write_kv(rounded(k, bits, keys), rounded(v, bits, values), cache, slots)

    with using(write_kv=write_kv):
        yield


class Run:
    """One run: the stored model, its windows, and the rows so far."""

    def __init__(self, place: Path, device: str, windows: int, rows: int | None, save: Callable[[list[dict]], None]):
        self.place, self.device, self.rows, self.save = place, device, rows, save
        tokenizer = Tokenizer.from_pretrained(place)
        text = prose(EVALUATION)
        ids = tokenizer.encode(text, add_special_tokens=False)
        self.calibration = prose(CALIBRATION)
        self.results: list[dict] = []
        self.about = {
            "text": "prose of " + ", ".join(EVALUATION),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "text_tokens": len(ids),
            "window": WINDOW,
            "windows": windows,
            "calibration": "prose of " + ", ".join(CALIBRATION),
            "calibration_sha256": hashlib.sha256(self.calibration.encode()).hexdigest(),
        }
        self.model = self._load(place)
        self.dense = layer_weights(self.model)
        begin = time.perf_counter()
        self.windows = Windows(self.model, spread(ids, windows), tokenizer.prefix)
        self._add("stored", self.model, begin, self.windows.first, bytes=4 * self.model.num_parameters)

    def _load(self, directory: Path, cache: str = "auto") -> Model:
        return load_model(directory, dtype="float32", device=self.device, kv_cache_dtype=cache)

    def _add(self, name: str, model: Model, begin: float, found: Found | None = None, **more: Any) -> None:
        found = found or self.windows.measure(model)
        count = len(self.windows.each)
        self._row({
            "engine": "minillm", "workload": "quality", "quantization": name,
            "simulated": bool(simulated(model)), "kv_cache_dtype": model.cache_spec.name, "dtype": "float32",
            "requests": count, "input_tokens": sum(each.tokens for each in self.windows.each), "output_tokens": 0,
            "seconds": round(time.perf_counter() - begin, 2), "output_tokens_per_s": 0.0,
            **self.windows.row(found), **more,
        })  # fmt: skip

    def _row(self, row: dict) -> None:
        self.results.append(row)
        shown = ("perplexity", "kl", "bytes", "workload", "output_tokens_per_s", "seconds")
        print(row["quantization"], {name: row[name] for name in shown if name in row}, flush=True)
        self.save(self.results)

    def caches(self) -> None:
        """Rows of caches, with the stored weights."""
        for name, kind in CACHES.items():
            begin = time.perf_counter()
            self._add(name, self._load(self.place, kind), begin, **self._cache(kind))
        for name, (bits, keys, values) in SMALL_CACHES.items():
            begin = time.perf_counter()
            with small_cache(bits, keys, values):
                found = self.windows.measure(self.model)
            self._add(name, self.model, begin, found, simulated=True, kv_cache_dtype=f"{bits} bits")

    def _cache(self, kind: str) -> dict[str, Any]:
        spec = replace(self.model.cache_spec, dtype={"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind])
        return {"cache_bytes_per_token": len(self.model.layers) * spec.bytes_per_token}

    def bfloat16(self) -> None:
        """The row of weights rounded to bfloat16, which all versions have where they are not quantized."""
        begin, model = time.perf_counter(), self._load(self.place)
        with torch.inference_mode():
            for tensor in model.tensors():
                tensor.copy_(tensor.to(torch.bfloat16))
        spec = replace(model.cache_spec, dtype=torch.bfloat16)
        about: dict[str, Any] = {"bytes": 2 * model.num_parameters, "code_bytes": 2 * self.dense, "scale_bytes": 0}
        about |= {"bits_per_weight": 16.0, "cache_bytes_per_token": len(model.layers) * spec.bytes_per_token}
        self._add("bfloat16", model, begin, **about)

    def method(self, name: str, out: Path, text: Path) -> None:
        """Quantize, store and measure."""
        begin = time.perf_counter()
        done = quantize(self.place, named(name), out, text=text, rows=self.rows, device=self.device)
        seconds = {"quantize_seconds": done["seconds"], "calibration_rows": done["rows"]}
        self._add(name, self._load(out), begin, **sizes(out, self.dense), **seconds)

    def speed(self, name: str, directory: Path, **options: Any) -> None:
        """Rows of output tokens per second of a stored version."""
        engine = Minillm(directory, **(ENGINE | options))
        try:
            for requests in SPEEDS:
                single = workloads.find("single")
                load = replace(single, name=f"{single.name.removesuffix('_x1')}_x{requests}", requests=requests)
                work = workloads.make(load, engine.llm.model_config.vocab_size)
                engine.run(work, 1.0)  # captures graphs, compiles kernels
                runs = [engine.run(work, 1.0) for _ in range(REPEAT)]
                seconds, totals = statistics.median(runs), workloads.totals(work)
                self._row({
                    "engine": "minillm", "workload": load.name, "quantization": name,
                    "kv_cache_dtype": engine.formats()["kv_cache_dtype"], "dtype": "bfloat16", **totals,
                    "seconds": round(seconds, 5), "output_tokens_per_s": round(totals["output_tokens"] / seconds, 1),
                    "runs": [round(each, 5) for each in runs],
                })  # fmt: skip
        finally:
            engine.llm.close()
            del engine
            gc.collect()
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a name of `minillm models`, or a directory")
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--rows", type=int, help="calibration rows; default: as `minillm quantize` chooses")
    parser.add_argument("--quick", action="store_true", help="2 windows and 2 calibration rows")
    parser.add_argument("--only", action="append", help="only this method, without caches; repeatable")
    parser.add_argument("--speed-within", type=float, default=240, help="seconds after which no more speed is measured")
    options = parser.parse_args()
    if options.quick:
        options.windows, options.rows = 2, 2
    torch.set_float32_matmul_precision("highest")
    place, begun = Path(resolve(options.model)), records.begin(options.record)
    origin, device = pretrained.origin(place), "cuda" if torch.cuda.is_available() else "cpu"
    about: dict[str, Any] = {"model": pretrained.model_name(place), "rounded": origin.rounded if origin else ""}

    def save(results: list[dict]) -> None:
        if options.record:
            records.write(records.record(results, begun, **about), options.record)

    failed = list[str]()

    def attempt(name: str, measure: Callable[[], None]) -> None:
        try:
            measure()
        except Exception:  # the other rows are still worth measuring
            failed.append(name)
            traceback.print_exc()

    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        stored = Path(folder)
        with using(**REFERENCE):
            run = Run(place, device, options.windows, options.rows, save)
            about |= run.about
            text = stored / "calibration.txt"
            text.write_text(run.calibration, encoding="utf-8")
            run.bfloat16()
            for name in options.only or METHODS:
                attempt(name, partial(run.method, name, stored / name, text))
            if not options.only:
                attempt("caches", run.caches)
        if device == "cuda":
            del run.windows, run.model
            end = time.perf_counter() + options.speed_within
            plan: list[tuple[str, Path, dict]] = [("bfloat16", place, {})]
            plan += [(name, stored / name, {}) for name in TIMED if (stored / name).is_dir()]
            if not options.only:
                plan += [(name, place, {"kv_cache_dtype": kind}) for name, kind in CACHES.items()]
            for name, directory, more in [*plan, plan[0]]:
                if time.perf_counter() > end:
                    failed.append(f"speed of {name}")
                else:
                    attempt(f"speed of {name}", partial(run.speed, name, directory, **more))
    if failed:
        print("not measured:", ", ".join(failed), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
