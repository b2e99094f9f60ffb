"""The measurements of a report, part by part. A part that fails is told in the record, and the others go on."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.advice.sizing import kv_bytes_per_token
from minillm.bench import offline, serve
from minillm.bench.figures import cost
from minillm.bench.load import other_load
from minillm.calibration.methods import MethodRecipe
from minillm.engine.llm import LLM
from minillm.errors import ConfigError, MinillmError, Unreachable
from minillm.evaluate.compare import (
    DEFAULT,
    Comparison,
    candidate,
    check,
    default_methods,
    in_float32,
    stored,
    stored_bytes,
)
from minillm.evaluate.tasks import Task, held_out
from minillm.model.loader import read_config, resolve_device, simulated
from minillm.request import SamplingParams
from minillm.server import running

from .settings import BF16, WORKLOADS, ReportSettings

log = logging.getLogger(__name__)
PROBE = 256  # tokens of the prompt that a model's speed is estimated with
REFERENCE = "float32"
AGAIN = "again"  # a part: the first version's speed, measured once more at the end
PARTS = ("quantize", "size", "quality", "offline", "serving", AGAIN)
SHORT = {"bfloat16": BF16, "float16": "fp16"}  # the unquantized version's name, by its dtype


@dataclass(frozen=True)
class Version:
    """A form of the model. chosen: how it is quantized, or the directory that holds it. options: of the engine."""

    name: str
    chosen: MethodRecipe | Path
    options: Mapping[str, Any]


@dataclass
class Measurements:
    """rows: results, each with its `part` and `version`. failures: what could not be measured, and why."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    other_cores: float | None = None  # processors that other programs kept busy while speed was measured

    def add(self, part: str, version: str, row: Mapping[str, Any]) -> None:
        self.rows.append({"part": part, "version": version, **row})

    @contextmanager
    def part(self, name: str, version: str) -> Iterator[None]:
        """Measure in the block: if that fails, the record says so, and what follows the block goes on."""
        try:
            yield
        except MinillmError as error:
            self.failed(name, version, str(error))
        except Exception as error:  # also a bug or a GPU without memory ends only this part: its traceback is printed
            log.exception("%s of %s failed", name, version)
            self.failed(name, version, f"{type(error).__name__}: {error}".splitlines()[0])

    def failed(self, part: str, version: str, why: str) -> None:
        self.failures.append({"part": part, "version": version, "error": why})


def versions_of(
    llm: LLM, source: Path, settings: ReportSettings, options: Mapping[str, Any], usual: bool = False
) -> tuple[list[Version], dict[str, str]]:
    """Return the unquantized version first, in the dtype that the engine computes in, then bf16, then those of the
    settings.

    llm: the unquantized one. usual: whether these are the defaults. Of those, methods that do not fit are left out, and
    the second result says why. Raises ConfigError for a name that is no method, no recipe file and no directory, for a
    directory of another model, and for a version to serve that is not measured.
    """
    dtype, cache = llm.engine.facts.dtype, llm.engine.facts.kv_cache_dtype
    name = SHORT.get(dtype, dtype)
    if options.get("kv_cache_dtype", "auto") != "auto":
        name = f"{name}, {cache} cache"  # its accuracy is not that of the reference, which has a cache in float32
    versions = [Version(name, source, options)]
    if dtype != "bfloat16":
        versions.append(Version(BF16, source, {**options, "dtype": "bfloat16"}))
    left_out: dict[str, str] = {}
    if settings.versions is None or usual:
        chosen, left_out = default_methods(llm.engine.model, settings.versions or DEFAULT)
    else:
        chosen = {name: candidate(name) for name in settings.versions if name not in (BF16, versions[0].name)}
    for name, each in chosen.items():
        if isinstance(each, Path):
            check(llm, each)
        versions.append(Version(name, each, options))
    names = [each.name for each in versions]
    if unknown := [name for name in settings.served or () if name not in names]:
        raise ConfigError(f"--serve {unknown[0]} is not measured: it must be one of {', '.join(names)}")
    return versions, left_out


def facts(llm: LLM, source: Path) -> dict[str, Any]:
    """Return what the model is, as fields of a record."""
    model, config = llm.engine.model, read_config(source)
    return {
        "parameters": model.num_parameters,
        "layers": config.num_layers,
        "vocabulary": config.vocab_size,
        "context": llm.engine.max_model_len,
        "stored_dtype": config.dtype,
        "dtype": llm.engine.facts.dtype,
        "device": model.device.type,
    }


def prompt_speed(llm: LLM) -> float:
    """Prompt tokens that the model reads per second, of a prompt that is read alone."""
    count = max(1, min(PROBE, llm.engine.max_model_len - 2))
    params, seconds = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), []
    for first in range(2):  # the first run also sets everything up; other tokens, so that none are cached
        begin = time.perf_counter()
        llm.generate([(first + index) % llm.model_config.vocab_size for index in range(count)], params)
        seconds.append(time.perf_counter() - begin)
    return count / min(seconds)


def measure(
    source: Path,
    versions: list[Version],
    settings: ReportSettings,
    options: Mapping[str, Any],
    say: Callable[[str], None] = lambda line: None,
) -> Measurements:
    """Return all parts of all versions. source: the unquantized model's directory. say: called before each version.

    Raises ConfigError for a task that does not exist.
    """
    taken, comparison = Measurements(), None
    try:
        questions = held_out(settings.task)
    except Unreachable as error:
        taken.failed("quality", REFERENCE, str(error))
    else:
        say(f"{REFERENCE}: the reference for accuracy")
        comparison = _reference(taken, source, questions, settings, options)
    served = settings.served or (versions[0].name,)
    device = resolve_device(str(options.get("device", "auto")))
    with other_load() as others:
        for version in versions:
            say(version.name)
            with ExitStack() as kept:
                directory = None
                with taken.part("quantize", version.name):
                    directory = kept.enter_context(stored(version.chosen, source, 0, device))
                if directory is None:
                    continue
                _size_and_quality(taken, version, directory, comparison)
                with taken.part("offline", version.name):
                    _offline(taken, "offline", version, directory, settings)
                if version.name in served:
                    say(f"{version.name}: serving")
                    with taken.part("serving", version.name):
                        _serving(taken, version, directory, settings)
        say(f"{versions[0].name} again, to see whether the machine's speed changed")
        with taken.part(AGAIN, versions[0].name):
            _offline(taken, AGAIN, versions[0], source, settings)
    taken.other_cores = None if others.cores is None else round(others.cores, 2)
    return taken


def _reference(
    taken: Measurements, source: Path, questions: Task, settings: ReportSettings, options: Mapping[str, Any]
) -> Comparison | None:
    """Return the model in float32 with its answers; None if they could not be had."""
    with taken.part("quality", REFERENCE), LLM(source, **in_float32(options)) as llm:
        comparison = Comparison(llm, source, questions, settings.limit, settings.tokens)
        taken.add("quality", REFERENCE, comparison.row)
        return comparison
    return None


def _size_and_quality(taken: Measurements, version: Version, directory: Path, comparison: Comparison | None) -> None:
    with taken.part("size", version.name), LLM(directory, **version.options) as llm:
        model = llm.engine.model
        spec = model.cache_spec.name
        row = {"bytes": stored_bytes(directory), "memory_bytes": model.nbytes}
        row["kv_bytes_per_token"] = kv_bytes_per_token(llm.model_config, spec)
        row["simulated"] = bool(simulated(model))
        taken.add("size", version.name, row)
        if comparison is not None and version.name != REFERENCE:
            with taken.part("quality", version.name):
                taken.add("quality", version.name, comparison.measure(version.name, llm, directory))


def _offline(taken: Measurements, part: str, version: Version, directory: Path, settings: ReportSettings) -> None:
    work = {"workload": WORKLOADS, "scale": settings.scale, "requests": settings.requests, "repeat": settings.repeat}
    for row in offline.run(directory, **{**version.options, **work}, quiet=True)["results"]:
        taken.add(part, version.name, _priced(row, settings) | {"model": version.name})


def _serving(taken: Measurements, version: Version, directory: Path, settings: ReportSettings) -> None:
    """The four query patterns against a server, whose engine runs in this process as `minillm serve` does in one."""
    with LLM(directory, **version.options) as llm:
        llm.warm_up()
        with running(llm, served_model_name=version.name) as server:
            results = serve.run(
                server.url,
                patterns=True,
                concurrency=settings.clients,
                warmup=settings.clients,
                scale=settings.scale,
                requests=settings.sent,
                quiet=True,
            )["results"]
    for row in comparable(results):
        taken.add("serving", version.name, _priced(row, settings) | {"url": "this machine"})


def comparable(served: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return rows of a server; without steady states unless all have one: whole runs compare only with whole runs."""
    if all(row.get("steady") for row in served):
        return served
    return [row | {"steady": None} for row in served]


def _priced(row: dict[str, Any], settings: ReportSettings) -> dict[str, Any]:
    return row if settings.price is None else row | {"cost": cost(row, settings.price)}
