"""The engine's options, with vLLM's names where vLLM has the option.  Lesson 00."""

import difflib
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from os import PathLike
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack, get_args

from minillm.errors import ConfigError
from minillm.values import as_float, as_int, as_tuple, shown

if TYPE_CHECKING:  # the command line reads options without waiting for torch
    import torch

PolicyName = Literal["fcfs", "priority", "shortest", "static", "whole"]
NAMES_WIDTH = 30  # of the column of names in the docstring


UNLIMITED = ("static", "whole")  # baselines: a limit of prompt tokens would change what they show
STREAMED = 768  # prompt tokens in a step of a GPU: more would hardly raise the throughput, and every stream waits
MOST_AHEAD = 31  # steps; captured ones leave their tokens in a ring of this size and one


def option(default: Any, help: str, **check: Any) -> Any:
    """Return a field with its help text, for `help(EngineConfig)` and the command line, and its allowed values.

    check: choices=, the strings allowed; least= and most=, of a whole number; or above= or from_=, of a number of
    seconds; switch= where None is allowed besides True and False. Other switches need none.
    """
    return field(default=default, metadata={"help": help, **check})


class Options:
    """Base of frozen dataclasses whose fields are made by `option`. Raises ConfigError for an invalid value."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # those derived from it are dataclasses
            self._check(each)

    def _check(self, option: Field) -> None:
        """Raise ConfigError unless an option is a choice, a whole number, seconds or a switch as its field says."""
        name, value, limits = option.name, getattr(self, option.name), option.metadata
        if "choices" in limits and value not in limits["choices"]:
            known = ", ".join(filter(None, limits["choices"]))
            raise ConfigError(f"{name} must be one of {known}, not {shown(value)}")
        if (isinstance(option.default, bool) or ("switch" in limits and value is not None)) and not isinstance(
            value, bool
        ):
            raise ConfigError(f"{name} must be True or False, not {shown(value)}")
        if value is None and (option.default is None or limits.get("or_none")):
            return
        if "above" in limits or "from_" in limits:
            self._check_seconds(name, value, **{key: limits[key] for key in ("above", "from_") if key in limits})
        if "least" not in limits:
            return
        low, high, whole = limits["least"], limits.get("most"), as_int(value)
        if whole is None or whole < low or (high is not None and whole > high):
            words = f"a whole number from {low}" + ("" if high is None else f" to {high}")
            if high is not None and high >= 2**63 - 1:
                words = "a 64-bit whole number"
            raise ConfigError(f"{name} must be {words}, not {shown(value)}")
        self._set(name, whole)

    def _check_seconds(self, name: str, value: object, above: float = -math.inf, from_: float = -math.inf) -> None:
        seconds = as_float(value)
        if seconds is None or not math.isfinite(seconds) or seconds <= above or seconds < from_:
            words = f"greater than {above:g}" if above > from_ else f"of at least {from_:g}"
            raise ConfigError(f"{name} must be a number of seconds {words}, not {shown(value)}")
        self._set(name, seconds)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: only while it is made


class Recorder(Protocol):
    """Records what an engine does: a `minillm.trace.Trace`."""

    def watch(self, scheduler: Any) -> None:
        """Record what this scheduler does from now on."""
        ...


class EngineOptions(TypedDict, total=False):
    """The keyword arguments that `LLM`, `AsyncLLM` and `Engine` take: the fields of `EngineConfig`.

    A field that `EngineConfig` stores as text may be given as what the text is of: a path, a torch.dtype.
    """

    dtype: "str | torch.dtype"
    device: "str | torch.device"
    load_format: str
    quantization: str | None
    quantized_head: str | None
    kv_cache_dtype: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_prefill_tokens: int | None
    block_size: int
    num_blocks: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    tensor_parallel_size: int
    decode_context_parallel_size: int
    pipeline_parallel_size: int
    cpu_threads: int | None
    attention_sinks: int | None
    attention_window: int | None
    adapters: Mapping[str, str | PathLike[str]] | tuple[tuple[str, str], ...]
    max_loras: int | None
    max_lora_rank: int | None
    enable_prefix_caching: bool
    policy: PolicyName
    run_ahead: int
    speculate: str | PathLike[str]
    speculate_head: str | PathLike[str] | None
    speculate_tokens: int
    speculate_ahead: bool | None
    exact: bool
    seed: int | None
    plan: str | PathLike[str] | None
    trace: str | PathLike[str] | Recorder | None


@dataclass(frozen=True)
class EngineConfig(Options):
    """The engine's options; None lets the engine choose by device.  Lesson 00."""

    dtype: str = option(
        "auto",
        '"auto" (float32 on CPU, else the file\'s), float64, float32, bfloat16 or float16',
        choices=("auto", "float64", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", '"auto", "cpu" or "cuda"')
    load_format: str = option(
        "auto",
        '"auto" reads safetensors; "dummy" makes random weights of the right shapes',
        choices=("auto", "dummy"),
    )
    quantization: str | None = option(
        None,
        "quantize the layers' weights while loading, to the nearest codes: int8, int4 (groups of 128), and with "
        "activations fp8, w8a8 (both int8) or w4a8 (int4 and fp8); auto: what should be fastest for max_num_seqs "
        "requests on this GPU and loses little, the head included (lesson 08); simulated, for accuracy and not for "
        "speed: nvfp4, mxfp4, sparse24 and pruned (half of each matrix); the other methods need calibration: see "
        "`minillm quantize`",
        choices=(None, "auto", "int8", "int4", "fp8", "w8a8", "w4a8", "nvfp4", "mxfp4", "sparse24", "pruned"),
    )
    quantized_head: str | None = option(
        None,
        "quantize the output head, and the embedding if they are tied: int8 or fp8",
        choices=(None, "int8", "fp8"),
    )
    kv_cache_dtype: str = option(
        "auto",
        'format of cached keys and values: "auto" (the model\'s dtype), or int8 or fp8 (e4m3) with a scale for each '
        "token and KV head, which holds nearly twice as many tokens as bfloat16 in the same memory (lesson 08)",
        choices=("auto", "int8", "fp8"),
    )
    max_model_len: int | None = option(
        None, "maximum tokens of prompt and output together; default: the model's own limit", least=2
    )
    max_num_seqs: int | None = option(
        None, "maximum requests in one step; default: 256 on CPU, 1,024 on a GPU", least=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum tokens in one step: the budget that prefill chunks and decodes share; default: 2,048 on CPU, 16,384 "
        "on a GPU",
        least=1,
    )
    max_prefill_tokens: int | None = option(
        None,
        "maximum prompt tokens in a step that has decodes (0: no limit but max_num_batched_tokens): short steps delay "
        "streams less; default: 768 on a GPU when serving (`AsyncLLM`), else 0",
        least=0,
    )
    block_size: int = option(16, "tokens a cache block holds", least=1)
    num_blocks: int | None = option(None, "cache blocks; default: what the memory allows", least=1)
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory that weights, workspace, CUDA graphs and cache may take"
    )
    enforce_eager: bool = option(False, "never use CUDA graphs")
    tensor_parallel_size: int = option(
        1,
        "GPUs of this machine that share every layer: each has a part of the heads, of the MLP and of the vocabulary; "
        "on a CPU, as many processes",
        least=1,
    )
    decode_context_parallel_size: int = option(
        1,
        "of a model with fewer KV heads than GPUs: how many GPUs with the same KV head divide its cache blocks, which "
        "then hold that many times as many tokens, at the price of two exchanges a layer; 1: each has all of them",
        least=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "stages, each with a part of the layers on GPUs of its own (as many as tensor_parallel_size says), and steps "
        "of different requests in each: for models that one GPU cannot hold; runs without CUDA graphs",
        least=1,
    )
    cpu_threads: int | None = option(
        None,
        "threads of a step on a CPU; default: as many as there are cores that no other program uses, which changes "
        "while the engine runs, and at most OMP_NUM_THREADS",
        least=1,
        most=1024,
    )
    attention_sinks: int | None = option(
        None, "streams (lesson 09): first tokens that a request keeps when it grows past max_model_len", least=0
    )
    attention_window: int | None = option(
        None,
        "streams: newest tokens that it keeps; both are rounded up to whole blocks and run without CUDA graphs",
        least=1,
    )
    adapters: tuple[tuple[str, str], ...] = option(
        (),
        "adapters (LoRA) and soft prompts that requests may name, as {NAME: DIRECTORY}: directories that PEFT wrote",
        flag="--adapter",
        given_as=list[str],
    )
    max_loras: int | None = option(
        None,
        "the most adapters in one step, for which memory is taken: requests with others wait; default: as many as are "
        "given, none without",
        least=1,
        most=1024,
    )
    max_lora_rank: int | None = option(
        None, "the greatest rank of an adapter; default: that of those given, or 16 without", least=1, most=512
    )
    enable_prefix_caching: bool = option(True, "share the blocks of equal prompt prefixes")
    policy: PolicyName = option(
        "fcfs",
        "the order of requests: fcfs (first come, first served), priority (lower RequestOptions.priority first), "
        "shortest (prompt first, but no request waits forever); and two baselines: static (whole batches, no in-flight "
        "batching), whole (each prompt in one step, no chunked prefill)",
        choices=get_args(PolicyName),
    )
    run_ahead: int = option(
        1, "steps launched before the first one's tokens are read (0: none)", least=0, most=MOST_AHEAD
    )
    speculate: str = option(
        "off",
        'draft tokens that one step checks: "ngram" looks up how the text so far went on after the same tokens, the '
        'directory of a smaller model with the same tokenizer runs that, and "off"; the output is the same',
    )
    speculate_head: str | None = option(
        None,
        "a file with a JSON list of the tokens that the draft model's head keeps; default: draft_head.json in its "
        "directory, if it has one, else all",
    )
    speculate_tokens: int = option(7, "most tokens drafted for a request in one step", least=1, most=63)
    speculate_ahead: bool | None = option(
        None,
        'with speculate="ngram", let the device look up the drafts, so that steps with drafts are launched ahead, too; '
        "default: on a GPU that shares the model with none",
        switch=True,
    )
    exact: bool = option(
        False,
        "give a token the same logits, bit for bit, whatever else its steps compute: other requests, drafts, its "
        "prompt in chunks or from the prefix cache; slower, and not with several GPUs, streams, adapters or operations "
        "of yours (vLLM: batch invariance)",
    )
    seed: int = option(
        0,
        "for requests that have no seed of their own; None: another one each time",
        least=-(2**63),
        most=2**63 - 1,
        or_none=True,
    )
    plan: str | None = option(
        None, "a file written by `minillm build`: options, CUDA graphs and kernel launches measured on this GPU"
    )
    trace: str | None = option(None, "a file to write events to, as JSON lines (or a `minillm.trace.Trace`)")

    def __post_init__(self) -> None:
        self._set("dtype", str(self.dtype).removeprefix("torch."))
        self._set("device", str(self.device))
        super().__post_init__()
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or a GPU as cuda:1, not {shown(self.device)}")
        if self.seed is None:
            self._set("seed", random.SystemRandom().randrange(2**31))
        share = as_float(self.gpu_memory_utilization)
        if share is None or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {shown(self.gpu_memory_utilization)}")
        self._set("gpu_memory_utilization", share)
        if (self.attention_sinks is None) != (self.attention_window is None):
            raise ConfigError("attention_sinks and attention_window go together: give both, or none (sinks may be 0)")
        if self.attention_sinks is not None and self.speculate != "off":
            raise ConfigError(
                f"speculate={self.speculate!r} and attention_sinks exclude each other: a stream's blocks move as its "
                "tokens are computed, and drafts that are wrong would have to move them back; leave one of them out"
            )
        if self.speculate_ahead and str(self.speculate) != "ngram":
            raise ConfigError(
                f"speculate_ahead is for speculate='ngram', which the device can look up itself, and speculate="
                f"{str(self.speculate)!r} is not that; leave speculate_ahead out"
            )
        if self.plan is not None and self.ranks > 1:
            name = "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"
            raise ConfigError(
                f"plan and {name}={getattr(self, name)} exclude each other: a plan is measured on one GPU with the "
                "whole model; leave one of them out"
            )
        split = self.decode_context_parallel_size
        if self.tensor_parallel_size % split:
            raise ConfigError(
                f"decode_context_parallel_size={split} must divide tensor_parallel_size={self.tensor_parallel_size}: "
                "it divides the cache between some of the GPUs that share every layer"
            )
        if self.block_size % split:
            raise ConfigError(
                f"block_size={self.block_size} cannot be divided between decode_context_parallel_size={split} GPUs: "
                f"block_size={-(-self.block_size // split) * split} would work"
            )
        if self.max_prefill_tokens and self.policy in UNLIMITED:
            raise ConfigError(f"policy={self.policy!r} is a baseline without max_prefill_tokens: leave one of them out")
        for name in ("plan", "trace", "speculate", "speculate_head"):
            value = getattr(self, name)
            recorder = name == "trace" and hasattr(value, "watch")
            if not (value is None or isinstance(value, (str, PathLike)) or recorder):
                raise ConfigError(f"{name} must be a file's path, not {shown(value)}")
        self._set("adapters", tuple(_named_directories(self.adapters)))
        self._check_exact()
        self._set("speculate", str(self.speculate))
        if self.speculate_head is not None:
            self._set("speculate_head", str(self.speculate_head))

    @property
    def adapter_slots(self) -> int:
        """Return how many adapters a step may have."""
        return self.max_loras or len(self.adapters)

    @property
    def ranks(self) -> int:
        """Return how many processes share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def most_in_flight(self) -> int:
        """Return how many steps may be in flight when the oldest is read: with a pipeline, one in each stage."""
        return max(self.run_ahead + 1, self.pipeline_parallel_size)

    def _check_exact(self) -> None:
        """Raise ConfigError if `exact` cannot hold with the other options."""
        excluded = {
            f"tensor_parallel_size={self.tensor_parallel_size}": self.tensor_parallel_size > 1
            and "the order in which GPUs sum their parts may depend on the size of the step",
            f"pipeline_parallel_size={self.pipeline_parallel_size}": self.pipeline_parallel_size > 1
            and "it is measured on one device alone",
            "attention_sinks": self.attention_sinks is not None
            and "what a stream still sees depends on how its prompt was divided into steps",
            "adapters": self.adapter_slots > 0 and "their products are summed in an order that depends on the batch",
        }
        for name, why in excluded.items():
            if self.exact and why:
                raise ConfigError(f"exact and {name} exclude each other: {why}; leave one of them out")

    @classmethod
    def of(cls, **options: Unpack[EngineOptions]) -> "EngineConfig":
        """Return the options, checked. Raises ConfigError, also for a name that is no option."""
        known = [each.name for each in fields(cls)]
        if unknown := sorted(options.keys() - known):
            raise ConfigError(
                f"{', '.join(unknown)}: no such option{_nearest(unknown, known)}; the engine's options are: "
                f"{', '.join(known)} (minillm.from_vllm translates vLLM's)"
            )
        values: dict[str, Any] = {**options}
        return cls(**values)

    def on(self, device: str) -> "DeviceConfig":
        """Return the same options, with the defaults that depend on the device filled in."""
        rows, tokens = (1024, 16384) if device.startswith("cuda") else (256, 2048)
        options = {each.name: getattr(self, each.name) for each in fields(self)} | {
            "device": device,
            "max_num_seqs": self.max_num_seqs or rows,
            "max_num_batched_tokens": self.max_num_batched_tokens or tokens,
        }
        if self.speculate_ahead is None:
            options["speculate_ahead"] = device.startswith("cuda") and self.speculate == "ngram" and self.ranks == 1
        return DeviceConfig(**options)


class DeviceConfig(EngineConfig):
    """Options for one device: every default that depends on the device is filled in."""

    max_num_seqs: int
    max_num_batched_tokens: int
    speculate_ahead: bool

    def for_streams(self) -> "DeviceConfig":
        """Return the same for an engine whose clients wait for every token: if no limit for prompts was given, with
        one.
        """
        if self.max_prefill_tokens is not None:
            return self
        limited = self.device.startswith("cuda") and self.policy not in UNLIMITED
        return replace(self, max_prefill_tokens=STREAMED if limited else 0)


@dataclass(frozen=True)
class Traffic:
    """A number of requests at once, and the tokens of each one's prompt and output.  Lessons 08 and 11."""

    concurrency: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        for each in fields(self):
            value = as_int(getattr(self, each.name))
            if value is None or value < 1:
                raise ConfigError(f"{each.name} must be a whole number from 1, not {shown(getattr(self, each.name))}")
            object.__setattr__(self, each.name, value)

    @property
    def context(self) -> int:
        """Return tokens of a request at its end."""
        return self.input_len + self.output_len


def _named_directories(given: object) -> Iterator[tuple[str, str]]:
    """Yield names and directories from a mapping, or from texts NAME=DIR or pairs. Raises ConfigError."""
    several = tuple(given.items()) if isinstance(given, Mapping) else as_tuple(given)
    if several is None:
        raise ConfigError(f"adapters must be names and directories, as {{'pirate': 'DIR'}}, not {shown(given)}")
    seen = set()
    for each in several:
        name, directory = each.partition("=")[::2] if isinstance(each, str) else each
        if not (isinstance(name, str) and name and isinstance(directory, (str, PathLike)) and str(directory)):
            raise ConfigError(f"an adapter is a name and a directory, NAME=DIR, not {shown(each)}")
        if name in seen:
            raise ConfigError(f"adapter {shown(name)} is given twice: name each one once")
        seen.add(name)
        yield name, str(directory)


def _nearest(names: Sequence[str], known: Sequence[str]) -> str:
    """Return ", the nearest is " and the known names that the unknown ones resemble; "" if there is none."""
    found = [near for name in names for near in difflib.get_close_matches(name, known, 1)]
    return f", the nearest is {', '.join(found)}" if found else ""


def with_field_help(docstring: str | None, config: type[Options]) -> str:
    """Return the docstring, and below it a line of help for each option."""
    lines = [docstring or "", ""]
    for each in fields(config):  # type: ignore[arg-type]  # those derived from it are dataclasses
        lines += wrap(f"{each.name:<{NAMES_WIDTH}}{each.metadata['help']}", 112, subsequent_indent=" " * NAMES_WIDTH)
    return "\n".join(lines)


EngineConfig.__doc__ = with_field_help(EngineConfig.__doc__, EngineConfig)
