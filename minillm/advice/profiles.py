"""Profiles: engine options that suit the hardware found, each for one purpose, and why.  Lesson 99.

    exact        the model's own weights, nothing rounded
    latency      the fastest precision for one request at a time that hardly loses quality
    throughput   the same for as many requests as a step takes
    compact      the smallest weights that hardly lose quality, and an 8-bit cache
    given        a quantized checkpoint, or a format that was set: there is nothing to choose

`auto` is `given`; or `exact`, if its weights leave room for a request of full length; or else `compact`. Speeds and
losses are those of `minillm.advice.choosing`. NVIDIA NIM lists and chooses profiles of a model in the same way.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast

import torch

from minillm.advice import choosing, sizing
from minillm.advice.choosing import METHODS, Candidate
from minillm.config import EngineConfig, EngineOptions
from minillm.errors import ConfigError
from minillm.model.config import ModelConfig
from minillm.model.loader import read_config, resolve, resolve_device
from minillm.quantization.checkpoints import read_layout
from minillm.runner.memory import CPU_CACHE_BYTES

from .precision import reason_against, recommended, usual_traffic

log = logging.getLogger(__name__)
PURPOSES = {
    "given": "as it is",
    "exact": "nothing rounded",
    "latency": "one request at a time",
    "throughput": "as many requests as a step takes",
    "compact": "least memory",
}
COLUMNS = ("dtype", "weights", "head", "cache", "GPU used", "size", "requests", "speed", "for")
LOW = ("none", "low")  # losses of quality that a profile may have


@dataclass(frozen=True)
class Profile:
    """Engine options for one purpose, and what to expect of them.

    options       device, dtype, quantization, quantized_head, kv_cache_dtype; on a GPU gpu_memory_utilization too
    weight_bytes  of the model with these options
    requests      of max_model_len tokens that the cache holds at once; 0: not one
    speed         output tokens per second by estimate, divided by those of bf16; None if there is no estimate
    """

    name: str
    options: dict[str, Any]
    weight_bytes: int
    requests: int
    speed: float | None

    def cells(self) -> tuple[str, ...]:
        """Return its row of the table, below COLUMNS."""
        option = self.options.get
        share = option("gpu_memory_utilization")
        return (
            option("dtype", ""),
            option("quantization") or "-",
            option("quantized_head") or "-",
            "-" if option("kv_cache_dtype") == "auto" else option("kv_cache_dtype", ""),
            "-" if share is None else f"{share:.0%}",
            f"{self.weight_bytes / 1e9:.2f} GB",
            f"{self.requests:,}",
            "-" if self.speed is None else f"{self.speed:.2f}",
            PURPOSES[self.name],
        )


@dataclass(frozen=True)
class ProfileChoice:
    """All profiles of a model on this hardware, the one that `auto` takes, and why; `print` it for a table."""

    profiles: tuple[Profile, ...]
    chosen: Profile
    reasons: tuple[str, ...]

    def named(self, name: str) -> Profile:
        """Return a profile by its name or "auto". Raises ConfigError."""
        by_name = {each.name: each for each in self.profiles} | {"auto": self.chosen}
        if name not in by_name:
            why = f"; {self.reasons[1]}" if name in PURPOSES else ""
            raise ConfigError(f"there is no profile {name!r} here; choose from {', '.join(by_name)}{why}")
        return by_name[name]

    def __str__(self) -> str:
        marks = {True: "> ", False: "  "}
        rows = [("", *COLUMNS), *((marks[each is self.chosen] + each.name, *each.cells()) for each in self.profiles)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self.reasons])


def find(model: str | Path | None = None, **engine_options: Unpack[EngineOptions]) -> ProfileChoice:
    """Return the profiles of a model, as `LLM` takes it, on this machine. Raises ConfigError."""
    config = EngineConfig.of(**engine_options)
    return choose(config, resolve(model), resolve_device(config.device))


def apply(model: str | Path | None, name: str, engine_options: EngineOptions) -> EngineOptions:
    """Return the options of a profile ("auto": the first) for this hardware; those that are given win."""
    chosen = find(model, **engine_options).named(name)
    log.info("profile %s: %s", chosen.name, ", ".join(f"{key}={value}" for key, value in chosen.options.items()))
    return cast(EngineOptions, chosen.options | {**engine_options})


def choose(config: EngineConfig, source: Path | str, device: str) -> ProfileChoice:
    """Return the profiles of a model on this device; options that are set in `config` stay in all of them.

    source   what `minillm.model.loader.resolve` returned

    Raises ConfigError.
    """
    here = _Here(config, read_config(source), device)
    nbytes = _bytes_given(config, source, here.dtype)
    if nbytes is not None:
        given = here.profile("given", nbytes)
        return ProfileChoice(
            (given,), given, (here.hardware, "The weights have a format already, so there is one profile.")
        )
    exact = here.profile("exact", sizing.weight_bytes(here.shape, here.dtype))
    if why := reason_against(config, source, device):
        return ProfileChoice((exact,), exact, (here.hardware, f"There is one profile: {why}."))
    any_cache, most = config.kv_cache_dtype == "auto", config.on(device).max_num_seqs
    alone, many = (
        recommended(config, source, device, usual_traffic(config, source, rows), any_cache=any_cache)
        for rows in (1, most)
    )
    fitting = [each for each in alone.candidates if each.requests and not each.method.calibrated]
    smallest = min(
        (each for each in fitting if each.method.loss in LOW),
        key=lambda each: (each.weight_bytes, each.kv_cache_dtype == "auto"),
    )
    choices = {"latency": alone.best, "throughput": many.best, "compact": smallest}
    profiles = (exact, *(here.of(name, each) for name, each in choices.items()))
    why = "exact fits and loses nothing, so auto takes it; the others are faster or smaller."
    if not exact.requests:
        why = f"exact leaves no room for a request of {here.context:,} tokens, so auto takes compact."
    about = "Speeds are estimates, times bf16's; requests are those of max_model_len tokens that fit at once."
    return ProfileChoice(profiles, exact if exact.requests else profiles[-1], (here.hardware, why, about))


def _bytes_given(config: EngineConfig, source: Path | str, dtype: str) -> int | None:
    """Return bytes of weights whose format is not to be chosen; None if it is."""
    if isinstance(source, Path) and read_layout(source) is not None:
        return sum(each.stat().st_size for each in source.glob("*.safetensors"))
    if config.quantization in (None, "auto") and config.quantized_head is None:
        return None
    shape, methods = read_config(source), {each.name: each for each in METHODS}
    method = methods.get(config.quantization or "")
    if method is None:  # simulated, or only the head: the weights keep their dtype
        return sizing.weight_bytes(shape, dtype)
    return choosing.weight_bytes(shape, method, config.quantized_head)


class _Here:
    """A model's shape and this hardware; makes profiles."""

    def __init__(self, config: EngineConfig, shape: ModelConfig, device: str):
        self.config, self.shape = config, shape
        self.context = config.max_model_len or shape.max_model_len
        on_gpu = device.startswith("cuda")
        self.dtype = config.dtype
        if self.dtype == "auto":
            self.dtype = shape.dtype if on_gpu else "float32"
        self.options: dict[str, Any] = {
            "device": device,
            "dtype": self.dtype,
            "quantization": None if config.quantization == "auto" else config.quantization,
            "quantized_head": config.quantized_head,
            "kv_cache_dtype": config.kv_cache_dtype,
        }
        if on_gpu:
            total, share = torch.cuda.get_device_properties(device).total_memory, config.gpu_memory_utilization
            self.options["gpu_memory_utilization"] = share
            self.budget = int(total * share)
            self.hardware = (
                f"Found {torch.cuda.get_device_name(device)} with {total / 1e9:.0f} GB, of which weights, steps and "
                f"cache may take {share:.0%}."
            )
        else:
            self.budget = CPU_CACHE_BYTES
            self.hardware = f"Found no GPU: the cache takes up to {CPU_CACHE_BYTES / 2**30:.0f} GiB of memory."
        self.on_gpu = on_gpu

    def profile(self, name: str, nbytes: int, speed: float | None = None, **options: Any) -> Profile:
        taken = self.options | options
        held = self.dtype if taken["kv_cache_dtype"] == "auto" else taken["kv_cache_dtype"]
        request = sizing.kv_bytes(self.shape, self.context, held, block_size=self.config.block_size)
        left = max(self.budget - nbytes, 0) if self.on_gpu else self.budget
        return Profile(name, taken, nbytes, left // request, speed)

    def of(self, name: str, best: Candidate) -> Profile:
        return self.profile(
            name,
            best.weight_bytes,
            best.speed,
            quantization=None if best.method is choosing.BF16 else best.method.name,
            quantized_head=best.quantized_head,
            kv_cache_dtype=best.kv_cache_dtype,
        )
