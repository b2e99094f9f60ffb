"""Every knob of a model and of the engine, with its unit and default.  Lesson 00.

`ModelConfig` is read off a model's `config.json`, all families normalised into one vocabulary; `EngineConfig`
is what the user chooses, under vLLM's names where it has them. Both are frozen, and checked once when they
are made.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A model directory or an option that cannot work; the message says what would."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies stretch to reach beyond the trained context.  Lesson 02.

    "linear" divides all of them by `factor` (Chen et al. 2023, section 3.2); "llama3" only the slow ones
    (Meta's reference code for Llama 3.1, `apply_scaling`), which the other three numbers tell apart.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Sizes are in elements, `max_model_len` in tokens.  Lesson 02."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: str = "silu"  # "silu" or "gelu_tanh", gating the MLP
    norm_offset: float = 0.0  # Gemma's norms multiply by 1 + weight
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden_size)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_model_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number from 1, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.dtype not in ("float64", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype {self.dtype!r} is not one of float64, float32, bfloat16, float16")

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json`, and the end tokens that `generation_config.json` adds when it is there."""
        path = directory / "config.json"
        if not path.is_file():
            raise ConfigError(f"{directory} has no config.json: it is not a model in Hugging Face's layout")
        try:
            raw = read_json(path)
            generation = directory / "generation_config.json"
            more = read_json(generation) if generation.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{directory}: config.json or generation_config.json is not JSON: {error}") from None
        try:
            return cls.from_dict(raw, more)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """Normalise a config.json, written by transformers 4 or 5, into these fields. Raises ConfigError."""
        architecture = (raw.get("architectures") or [None])[0]
        if architecture not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ConfigError(f"architecture {architecture!r} is not supported; supported are: {supported}")
        if raw.get("quantization_config"):
            raise ConfigError("quantised checkpoints cannot be loaded yet; use the unquantised model")
        family = ARCHITECTURES[architecture]
        raw = family.defaults | {key: value for key, value in raw.items() if value is not None}
        try:
            hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
            theta, scaling = _rope(raw)
            eos = [*_ids(raw.get("eos_token_id")), *_ids((generation or {}).get("eos_token_id"))]
            return cls(
                architecture=architecture,
                vocab_size=raw["vocab_size"],
                hidden_size=hidden,
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads", heads),
                head_dim=raw.get("head_dim", hidden // heads),
                max_model_len=raw["max_position_embeddings"],
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=theta,
                rope_scaling=scaling,
                attention_bias=raw.get("attention_bias", False),
                mlp_bias=raw.get("mlp_bias", False),
                tie_word_embeddings=raw["tie_word_embeddings"],
                dtype=str(raw.get("dtype", raw.get("torch_dtype", "float32"))).removeprefix("torch."),
                bos_token_id=raw.get("bos_token_id"),
                eos_token_ids=tuple(dict.fromkeys(eos)),
                **family.read(raw),
            )
        except KeyError as error:
            raise ConfigError(f"{error.args[0]} is missing") from None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps, in the checkpoint's dtype."""
        size = 4 if self.dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size


@dataclass(frozen=True)
class Family:
    """What sets one architecture apart: what its config.json may leave out, and how to read the rest."""

    defaults: dict[str, Any]
    read: Callable[[dict[str, Any]], dict[str, Any]]


def _gemma(raw: dict[str, Any]) -> dict[str, Any]:
    # The first releases say "gelu" and mean its tanh form.
    activation = _activation(raw, gelu="gelu_tanh")
    return {"activation": activation, "norm_offset": 1.0, "embedding_scale": raw["hidden_size"] ** 0.5}


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    return {"activation": _activation(raw)}


ARCHITECTURES = {
    "GemmaForCausalLM": Family({"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}, _gemma),
    "LlamaForCausalLM": Family({"tie_word_embeddings": False, "hidden_act": "silu"}, _llama),
}

PRESETS = {
    "gemma-2b": ModelConfig(
        architecture="GemmaForCausalLM",
        vocab_size=256000,
        hidden_size=2048,
        intermediate_size=16384,
        num_layers=18,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        max_model_len=8192,
        activation="gelu_tanh",
        norm_offset=1.0,
        embedding_scale=2048**0.5,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1,),
    ),
}


def _activation(raw: dict[str, Any], **more: str) -> str:
    name = raw.get("hidden_activation", raw["hidden_act"])
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", **more}
    if name not in known:
        raise ConfigError(f"activation {name!r} is not supported; supported are: {', '.join(known)}")
    return known[name]


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 5 keeps both in `rope_parameters`, 4 kept them apart."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported are: default, linear, llama3")
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {name: float(rope[name]) for name in needed}
    if kind == "llama3":
        trained = rope.get("original_max_position_embeddings", raw["max_position_embeddings"])
        numbers["original_max_position_embeddings"] = trained
    return theta, RopeScaling(kind, **numbers)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


@dataclass(frozen=True)
class EngineConfig:
    """The engine's options; None lets the engine choose by device.

    dtype                   "auto" (float32 on CPU, else the file's), float64, float32, bfloat16 or float16
    device                  "auto", "cpu" or "cuda"
    load_format             "auto" reads safetensors; "dummy" makes random weights of the right shapes
    max_model_len           most tokens of prompt and output together; default: the model's own limit
    max_num_seqs            most requests in one step; default: 256 on CPU, 1,024 on a GPU
    max_num_batched_tokens  most tokens in one step: the budget that prefill chunks and decodes share; default: 2,048
                            on CPU, 16,384 on a GPU
    block_size              tokens a cache block holds
    num_blocks              cache blocks; default: what the memory allows
    gpu_memory_utilization  share of the GPU's memory that weights, workspace and cache may take
    enforce_eager           never use CUDA graphs
    enable_prefix_caching   share the blocks of equal prompt beginnings
    run_ahead               steps launched before the first one's tokens are read (0: none)
    seed                    of every request that names none
    """

    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    run_ahead: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "dtype": ("auto", "float64", "float32", "bfloat16", "float16"),
            "load_format": ("auto", "dummy"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.device != "auto" and self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu or cuda, not {self.device!r}")
        minimum = {
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "block_size": 1,
            "num_blocks": 1,
            "run_ahead": 0,
        }
        for name, low in minimum.items():
            value = getattr(self, name)
            if value is None and name not in ("block_size", "run_ahead"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be a whole number from {low}, not {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization!r}")

    def on(self, device: str) -> "EngineConfig":
        """The same options with what the device decides filled in."""
        rows, tokens = (1024, 16384) if device.startswith("cuda") else (256, 2048)
        return replace(
            self,
            device=device,
            max_num_seqs=self.max_num_seqs or rows,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
        )


def read_json(path: Path) -> dict:
    with path.open(encoding="utf-8") as file:
        return json.load(file)
