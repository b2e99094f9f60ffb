"""Compute from a `ModelConfig` how much memory a model takes, and how many requests fit on a GPU.  Lesson 02.

    weights              bytes = parameters x bytes of a number (2 for bfloat16)
    KV cache             bytes a token = 2 x layers x kv_heads x (head_dim x bytes of a number + bytes of its scale)
    requests that fit    (GPU x utilization - weights - workspace) // bytes of one request's KV cache

The two rules of thumb are NVIDIA's: "Mastering LLM Techniques: Inference Optimization" (developer blog,
2023), sections "Key-value caching" and "LLM memory requirement". No torch is needed here.

    from minillm.model.config import PRESETS
    from minillm.advice.sizing import fit
    print(fit(PRESETS["gemma-2b"], gpu_bytes=80e9, context=4096))
"""

from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import blocks_held
from minillm.model.config import ModelConfig
from minillm.model.families import ARCHITECTURES

BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
CACHE_SCALE_BYTES = {"int8": 4, "fp8": 4}  # each token and KV head of a quantized cache has a float32 scale


@dataclass(frozen=True)
class Sizing:
    """The division of one GPU's memory. In bytes, unless the name says otherwise; `print` it for a table."""

    parameters: int  # count
    weight_bytes: int
    kv_bytes_per_token: int
    context: int  # tokens of each request
    request_bytes: int  # of one request's KV cache, in whole blocks
    workspace_bytes: int
    graph_bytes: int
    usable_bytes: int  # limit of weights, workspace, graphs and cache together
    gpu_bytes: int
    memory: str = "GPU"  # name of the divided memory

    @property
    def cache_bytes(self) -> int:
        """Return bytes left for keys and values; 0 if the weights alone are too large."""
        return max(0, self.usable_bytes - self.weight_bytes - self.workspace_bytes - self.graph_bytes)

    @property
    def requests(self) -> int:
        """Return how many requests of `context` tokens the cache holds at once."""
        return self.cache_bytes // self.request_bytes

    def __str__(self) -> str:
        rows = [
            ("parameters", f"{self.parameters:,}", ""),
            ("weights", *_gb(self.weight_bytes)),
            *[("workspace of a step", *_gb(self.workspace_bytes))][: self.workspace_bytes],
            *[("CUDA graphs", *_gb(self.graph_bytes))][: self.graph_bytes],
            ("KV cache of a token", *_gb(self.kv_bytes_per_token)),
            (f"KV cache of {self.context:,} tokens", *_gb(self.request_bytes)),
            (self.memory, *_gb(self.gpu_bytes)),
            *[("usable", *_gb(self.usable_bytes))][: self.gpu_bytes - self.usable_bytes],
            ("left for the KV cache", *_gb(self.cache_bytes)),
            ("requests that fit", f"{self.requests:,}", ""),
        ]
        names, numbers = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{name:<{names}}  {number:>{numbers}} {unit}".rstrip() for name, number, unit in rows)


def fit(
    config: ModelConfig,
    gpu_bytes: float,
    context: int,
    *,
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    utilization: float = 0.9,
    workspace_bytes: float = 0,
    graph_bytes: float = 0,
    memory: str = "GPU",
) -> Sizing:
    """Divide a GPU of `gpu_bytes` (80e9, 141e9) among a model's weights and requests of `context` tokens.  Lesson 02.

    dtype            of the weights, a key of BITS
    kv_cache_dtype   of keys and values, a key of BITS; "auto": `dtype`. int8 and fp8 include their scales (lesson 08)
    block_size       tokens in a cache block
    utilization      share of the GPU that may be used, in (0, 1]
    workspace_bytes  memory of a step besides weights and cache; `minillm build` measures it
    graph_bytes      memory of captured CUDA graphs; measured likewise
    memory           name of the divided memory, for the table

    Raises ConfigError.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"utilization is a share of the GPU in (0, 1], not {utilization!r}")
    if gpu_bytes <= 0:
        raise ConfigError(f"gpu_bytes must be above 0, not {gpu_bytes!r}")
    held = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    return Sizing(
        parameters=parameters(config),
        weight_bytes=weight_bytes(config, dtype),
        kv_bytes_per_token=kv_bytes_per_token(config, held),
        context=context,
        request_bytes=kv_bytes(config, context, held, block_size=block_size),
        workspace_bytes=int(workspace_bytes),
        graph_bytes=int(graph_bytes),
        usable_bytes=int(gpu_bytes * utilization),
        gpu_bytes=int(gpu_bytes),
        memory=memory,
    )


def parameters(config: ModelConfig) -> int:
    """Return the exact number of trained parameters; a tied head counts once, as the embedding."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    mlp = 3 * hidden * inner
    biases = 0
    if config.attention_bias or config.qkv_bias:
        biases += queries + 2 * keys
    if config.attention_bias:
        biases += hidden
    if config.mlp_bias:
        biases += 2 * inner + hidden
    names = ARCHITECTURES[config.architecture].norms
    norms = sum(config.head_dim if name in ("q_norm", "k_norm") else hidden for name in names)
    matrices = 1 if config.tie_word_embeddings else 2
    return matrices * config.vocab_size * hidden + config.num_layers * (attention + mlp + biases + norms) + hidden


def weight_bytes(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """Return bytes of all parameters. Formats below 16 bits also store scales, which are not counted (lesson 05)."""
    return parameters(config) * _bits(dtype) // 8


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """Return bytes of one token in the cache: a key and a value in each layer and KV head, with the scales of int8 and
    fp8.
    """
    return config.num_layers * _layer_bytes(config, dtype)


def kv_bytes(config: ModelConfig, context: int, dtype: str = "bfloat16", *, block_size: int = 1) -> int:
    """Return bytes of keys and values of one decoding request of `context` tokens, in whole blocks of `block_size`
    tokens.

    Layers with a window keep the blocks that hold the window at its worst alignment; a chunk of a prompt needs its own
    blocks in addition while it runs. A block has room for a full layer group, so an incomplete group costs as much.
    """
    if context < 1 or block_size < 1:
        raise ConfigError(f"context and block_size are tokens, from 1, not {context!r} and {block_size!r}")
    groups = config.groups()
    return blocks_held(context, groups.windows, block_size) * block_size * groups.size * _layer_bytes(config, dtype)


def _layer_bytes(config: ModelConfig, dtype: str) -> int:
    return 2 * config.num_kv_heads * (config.head_dim * _bits(dtype) // 8 + CACHE_SCALE_BYTES.get(dtype, 0))


def _bits(dtype: str) -> int:
    if dtype not in BITS:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(BITS)}")
    return BITS[dtype]


def _gb(count: int) -> tuple[str, str]:
    """Return a number of bytes in a readable unit of powers of 1000: (number, unit)."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.2f}", unit
    return str(count), "B"
