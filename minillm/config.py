"""Every knob of a model and of the engine, with its unit and default.  Lesson 00.

`ModelConfig` is read off a model's `config.json`, all families normalised into one vocabulary; `EngineConfig` is
what the user chooses, under vLLM's names where it has them. Both are frozen, and checked once when they are made.
"""

import json
from dataclasses import dataclass
from pathlib import Path


class ConfigError(ValueError):
    """A model directory or an option that cannot work; the message says what would."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Llama 3 herd paper 2024, section 3.4.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps, in the checkpoint's dtype."""
        size = 4 if self.dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size


@dataclass(frozen=True)
class EngineConfig:
    """The engine's options; None lets the engine choose by device.

    dtype                   "auto" (float32 on CPU, the checkpoint's on a GPU) or "float64|float32|bfloat16|float16"
    device                  "auto", "cpu" or "cuda"
    load_format             "auto" reads safetensors; "dummy" makes random weights of the right shapes
    max_model_len           most tokens of prompt and output together; default: the model's own limit
    max_num_seqs            most requests in one step
    max_num_batched_tokens  most tokens in one step: the budget that prefill chunks and decodes share
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
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
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
            if value is None and name in ("max_model_len", "num_blocks"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be a whole number from {low}, not {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization!r}")


def read_json(path: Path) -> dict:
    with path.open(encoding="utf-8") as file:
        return json.load(file)
