"""Measure what each quantization method loses against the same model in float32.  Lessons 05 to 07.

    KL = mean over positions of sum_token p(token) log(p(token) / q(token)),   p: float32, q: quantized

Perplexity judges a model by one token a position, the text's; KL by its whole distribution, so it shows losses that
perplexity hides because as many tokens became more likely as less likely.
"""

import copy
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.calibration.forward import hidden_states
from minillm.calibration.methods import METHODS, MethodRecipe
from minillm.calibration.names import named
from minillm.calibration.quantize import check_finite, check_methods, fitted, quantize
from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.model import Model
from minillm.model.checkpoint import checkpoint_files, read_headers
from minillm.model.loader import read_config, resolve, simulated
from minillm.quantization import Fp4, Int4
from minillm.quantization.checkpoints import read_layout
from minillm.tokenizer import Tokenizer

from .accuracy import Answers, answers
from .prompts import tokenizer_of
from .sources import load_text
from .tasks import Task, held_out

log = logging.getLogger(__name__)
WINDOW = 1024  # tokens that are read at once, if the context holds as many
POSITIONS = 256  # whose distributions over the vocabulary are compared at once
NOT_FOR_COMPARING = ("quantization", "quantized_head", "load_format")
DEFAULT = tuple(name for each in METHODS for name in ([each, "w8a8-rotate"] if each == "w8a8" else [each]))
BITS = {"int8": 8, "fp8": 8, "int4": 4, "nvfp4": 4, "mxfp4": 4}  # of a format; a dense weight has those of its dtype
Z_95 = 1.959964  # 95% of a normal distribution lie within so many standard deviations


@dataclass(frozen=True)
class Loss:
    """Points of accuracy (hundredths of all questions) that were lost, with a 95% confidence interval."""

    points: float
    low: float
    high: float


def paired_loss(before: Sequence[bool], after: Sequence[bool]) -> Loss:
    """Return the loss of accuracy between two models' answers to the same questions.

    Only questions that exactly one model answers correctly say anything, so the interval is far narrower than the
    difference of two independent accuracies would have. It is Wald's for matched pairs with half a question added to
    each of the four outcomes (Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions", section 3), which also holds where few or no answers change.
    """
    count = len(before)
    if count == 0 or len(after) != count:
        raise ConfigError(f"{count} and {len(after)} answers cannot be paired: ask both models the same questions")
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    won = sum(new and not old for old, new in zip(before, after, strict=True))
    b, c, n = lost + 0.5, won + 0.5, count + 2
    middle, error = (b - c) / n, math.sqrt(b + c - (b - c) ** 2 / n) / n
    return Loss(100 * (lost - won) / count, 100 * (middle - Z_95 * error), 100 * (middle + Z_95 * error))


@dataclass(frozen=True)
class Divergence:
    """A model's figures on a text. kl: from the reference, in nats a token."""

    perplexity: float
    kl: float


class Reference:
    """A model's predictions on a text, to compare another model's with.

    The text is cut into windows that do not overlap, each after `prefix`: what the tokenizer puts before a text.
    Kept as final hidden states, [tokens, hidden] in all: distributions over the vocabulary would be far larger.
    """

    def __init__(self, model: Model, ids: Sequence[int], prefix: Sequence[int]):
        window = min(WINDOW, model.max_model_len - len(prefix))
        self.rows = [torch.tensor([[*prefix, *ids[i : i + window]]]) for i in range(0, len(ids), window)]
        self.rows = [row.to(model.device) for row in self.rows if row.shape[1] > 1]
        if not self.rows:
            raise ConfigError("the text is too short: nothing is left to score")
        self.head = copy.copy(model)
        self.head.layers = []
        self.hidden = [hidden_states(model, row)[:-1] for row in self.rows]
        self.tokens = sum(len(hidden) for hidden in self.hidden)

    def divergence(self, model: Model) -> Divergence:
        """Return how far another model's predictions, or this one's own, are from these."""
        surprise = divergence = 0.0
        with torch.inference_mode():
            for row, kept in zip(self.rows, self.hidden, strict=True):
                own, targets = hidden_states(model, row)[:-1], row[0, 1:]
                for part in torch.arange(len(targets), device=model.device).split(POSITIONS):
                    found = _log_probabilities(model, own[part])
                    wanted = _log_probabilities(self.head, kept[part])
                    surprise -= found.gather(1, targets[part, None]).sum().item()
                    divergence += (wanted.exp() * (wanted - found)).sum().item()
        return Divergence(math.exp(surprise / self.tokens), divergence / self.tokens)


def _log_probabilities(model: Model, hidden: Tensor) -> Tensor:
    return model.logits(hidden).double().log_softmax(-1)


class Comparison:
    """A model in float32 with which its versions are compared, on held-out text and a task's questions.

    llm: that model, which may be closed afterward. directory: where it is stored. limit: ask at most this many of the
    workload's questions, evenly spread. tokens: read only so many of the text. `row` is its own result, in the form of
    a record's results. Raises ConfigError for a model without a tokenizer.
    """

    def __init__(
        self, llm: LLM, directory: Path, workload: Task, limit: int | None = None, tokens: int | None = None
    ) -> None:
        begin, tokenizer = time.perf_counter(), tokenizer_of(llm)
        ids = tokenizer.encode(load_text())[len(tokenizer.prefix) :][:tokens]
        self.workload, self.limit = workload, limit
        self.reference = Reference(llm.engine.model, ids, tokenizer.prefix)
        self.first = self.reference.divergence(llm.engine.model)
        self.answers = self._answers(llm)
        self.row = self._row("float32", llm, directory, [self.first], self.first, self.answers, begin)

    def divergence(self, llm: LLM) -> Divergence:
        """Return how far a version's predictions on the text are from the model's."""
        return self.reference.divergence(llm.engine.model)

    def measure(
        self,
        name: str,
        llm: LLM,
        directory: Path,
        calibrations: Sequence[Divergence] = (),
        chosen: Divergence | None = None,
        begin: float | None = None,
    ) -> dict[str, Any]:
        """Return the result of a version, which llm runs and directory holds.

        calibrations: divergences of all its calibrations, of which `chosen` is this one; default: measured now.
        begin: when the work on it began, by `time.perf_counter`; default: now.
        """
        begin = time.perf_counter() if begin is None else begin
        chosen = chosen or self.divergence(llm)
        row = self._row(name, llm, directory, calibrations or [chosen], chosen, self._answers(llm), begin)
        return row | {"perplexity_loss": round(chosen.perplexity / self.first.perplexity - 1, 5)}

    def _answers(self, llm: LLM) -> Answers:
        work = self.workload
        return answers(llm, work.questions, work.examples, shots=work.shots, limit=self.limit)

    def _row(
        self,
        name: str,
        llm: LLM,
        directory: Path,
        calibrations: Sequence[Divergence],
        chosen: Divergence,
        own: Answers,
        begin: float,
    ) -> dict[str, Any]:
        first = own is self.answers
        loss = Loss(0.0, 0.0, 0.0) if first else paired_loss(self.answers.correct, own.correct)
        model = llm.engine.model
        return {
            "engine": "minillm",
            "workload": "compare",
            "quantization": name,
            **_stored(model),
            "kv_cache_dtype": model.cache_spec.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "requests": len(own.correct),
            "input_tokens": own.input_tokens,
            "output_tokens": 0,
            "seconds": round(time.perf_counter() - begin, 2),
            "output_tokens_per_s": 0.0,
            "bytes": stored_bytes(directory),
            "perplexity": round(chosen.perplexity, 5),
            "kl": float(f"{chosen.kl:.5g}"),
            "kl_of_seeds": [float(f"{each.kl:.5g}") for each in calibrations],
            "accuracy": round(own.accuracy, 4),
            "questions": len(own.correct),
            "shots": own.shots,
            "loss_points": round(loss.points, 3),
            "loss_interval": [round(loss.low, 3), round(loss.high, 3)],
        }


def stored_bytes(directory: Path) -> int:
    """Return bytes of all tensors in a model's files."""
    return sum(entry.nbytes for entry in read_headers(directory).values())


def unquantized(model: str | Path | None) -> Path:
    """Return the directory of a model that can be compared with. Raises ConfigError."""
    source = resolve(model)
    if isinstance(source, str) or read_layout(source) is not None:
        raise ConfigError(f"{source} is no unquantized model to compare with: name the directory of one")
    return source


def in_float32(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's options for the model that versions are compared with."""
    return {**options, "dtype": "float32", "kv_cache_dtype": "auto"}


def compare(
    names: Sequence[str] = (),
    model: str | Path | None = None,
    *,
    task: str = "isles",
    limit: int | None = None,
    seeds: int = 1,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield one result for the model in float32 and one for each name, in the form of a record's results.

    names    methods ("int8", "awq-g64", "int4-g32-zeros+int8", "w8a8-rotate": see `calibration.names`), recipe files,
             or directories of models that were quantized from this one; default: `default_methods`
    model    a directory, or None for the embedded model
    task     whose questions are asked: "isles" (with no examples), "mmlu" (with five) or another of `tasks`
    limit    ask at most this many questions, evenly spread
    seeds    quantize so many times, each time calibrated on other stretches of the calibration text and rotated with
             other signs; the result is that with the median KL
    options  of the engine; the model in float32 has a cache in float32 whatever `kv_cache_dtype` says

    All names are checked before anything is measured. Raises ConfigError; Unreachable, if the task's questions cannot
    be downloaded.
    """
    check_options(options)
    source = unquantized(model)
    candidates = {name: candidate(name) for name in names}
    workload = held_out(task)
    with LLM(source, **in_float32(options)) as llm:
        if not candidates:
            candidates, left_out = default_methods(llm.engine.model)
            for name, why in left_out.items():
                log.warning("%s is left out: %s", name, why)
        for chosen in candidates.values():
            check(llm, chosen)
        comparison = Comparison(llm, source, workload, limit)
        yield comparison.row
    for name, chosen in candidates.items():
        begin = time.perf_counter()
        repeat = seeds if isinstance(chosen, MethodRecipe) and chosen.seeded else 1
        with ExitStack() as kept:
            found: list[tuple[Divergence, Path]] = []
            for seed in range(repeat):
                directory = kept.enter_context(stored(chosen, source, seed, options.get("device", "auto")))
                with LLM(directory, **options) as llm:
                    found.append((comparison.divergence(llm), directory))
            middle, directory = sorted(found, key=lambda each: each[0].kl)[(len(found) - 1) // 2]
            with LLM(directory, **options) as llm:
                each = [divergence for divergence, _ in found]
                yield comparison.measure(name, llm, directory, each, middle, begin)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an engine's option that a comparison sets itself."""
    if refused := [name for name in NOT_FOR_COMPARING if name in options]:
        raise ConfigError(f"a comparison sets {', '.join(refused)} itself: name the methods to compare instead")


def check(llm: LLM, chosen: MethodRecipe | Path) -> None:
    """Raise ConfigError unless a model can be quantized so, or a directory holds a version of it."""
    if isinstance(chosen, MethodRecipe):
        check_methods(llm.engine.model, chosen)
    else:
        _check_same_tokens(llm, chosen)


def default_methods(
    model: Model, names: Sequence[str] = DEFAULT
) -> tuple[dict[str, MethodRecipe | Path], dict[str, str]]:
    """Return what is compared by default: all methods with their defaults, and w8a8 rotated, if they fit the model.

    And for each method that does not fit, why. Raises ConfigError if none does, or for a broken model.
    """
    check_finite(model)
    found: dict[str, MethodRecipe | Path] = {}
    left_out = {}
    for name in names:
        try:
            fitted(model, named(name))
        except ConfigError as error:
            left_out[name] = str(error)
        else:
            found[name] = named(name)
    if not found:
        raise ConfigError("no method fits this model: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return found, left_out


def candidate(name: str) -> MethodRecipe | Path:
    """Return what a name stands for. Raises ConfigError."""
    if not Path(name).is_dir():
        return named(name)
    checkpoint_files(Path(name))
    return Path(name)


def _check_same_tokens(llm: LLM, directory: Path) -> None:
    """Raise ConfigError unless a directory's model reads the same token ids as this one."""
    text = load_text()[:2000]
    if Tokenizer.from_pretrained(directory).encode(text) != tokenizer_of(llm).encode(text):
        raise ConfigError(f"{directory} has another tokenizer, so it was not made from the model it is compared with")
    if (size := read_config(directory).vocab_size) != llm.model_config.vocab_size:
        raise ConfigError(f"{directory} has {size} tokens, and the model {llm.model_config.vocab_size}")


@contextmanager
def stored(chosen: MethodRecipe | Path, source: Path, seed: int, device: str) -> Iterator[Path]:
    """Yield the directory of a quantized model, made for the moment if it is not there."""
    if isinstance(chosen, Path):
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        quantize(source, chosen, Path(folder) / "model", seed=seed, device=device)
        yield Path(folder) / "model"


def _stored(model: Model) -> dict[str, Any]:
    """Return the bits, group sizes and head of a model's weights; a list where layers differ. simulated: see
    `loader`.
    """
    layers = [weight for address, weight in model.addressed().items() if address.startswith("layers.")]
    bits = sorted({BITS.get(weight.format.name, 8 * weight.dtype.itemsize) for weight in layers})
    groups = sorted({weight.format.group_size for weight in layers if isinstance(weight.format, (Int4, Fp4))})
    return {
        "bits": bits if len(bits) > 1 else bits[0],
        "group_size": groups if len(groups) > 1 else next(iter(groups), None),
        "head": model.head.format.name,
        "simulated": bool(simulated(model)),
    }
