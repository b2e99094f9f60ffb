"""A model's shape, read from `config.json`: one set of fields for all model families.  Lesson 02."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import LayerGroups
from minillm.values import as_float, as_int, read_json, shown

from .config_file import check_fields
from .families import ARCHITECTURES, NULL_MEANS_NONE, REFUSED
from .rope_scaling import RopeScaling, read_rope

# Hadamard rotations that a model makes while it runs, since they cannot be folded into its weights (see
# `calibration.rotation`), by what is rotated.
ROTATIONS = {
    "residual": "the residual stream, after the embedding, and back before the final norm",
    "down": "the inputs of down projections",
}
# What a request gets for `generation_config.json`'s fields: where transformers has another default (top_k), also that.
SAMPLING: dict[str, tuple] = {
    "temperature": (1,),
    "top_k": (0, -1, 50),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
}


def _is_size(value: Any) -> bool:
    return (whole := as_int(value)) is not None and whole >= 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Sizes are in elements, `max_model_len` in tokens.  Lesson 02.

    Raises ConfigError for values that no decoder can have.
    """

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
    activation: str = "silu"  # of the gated MLP: "silu" or "gelu_tanh"
    norm_offset: float = 0.0  # Gemma's norms multiply by 1 + weight
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden_size)
    attention_bias: bool = False  # of all four projections
    qkv_bias: bool = False  # of queries, keys and values only (Qwen 2)
    mlp_bias: bool = False
    attention_scale: float | None = None  # scores are q k^T times this; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2)
    final_soft_cap: float | None = None  # the same for logits
    windows: tuple[int | None, ...] = ()  # tokens that each layer's queries see; None, or an empty tuple: all
    local_rope_theta: float | None = None  # of layers with a window, without rope_scaling (Gemma 3); None: rope_theta
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rotations: tuple[str, ...] = ()  # made online, by names in ROTATIONS; others are folded into the weights

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_model_len"):
            if not _is_size(getattr(self, name)):
                raise ConfigError(f"{name} must be a whole number from 1, not {shown(getattr(self, name))}")
        if len(self.windows) not in (0, self.num_layers):
            raise ConfigError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
        for window in self.windows:
            if window is not None and not _is_size(window):
                raise ConfigError(f"sliding_window must be a whole number from 1, not {shown(window)}")
        for name in ("attention_scale", "attention_soft_cap", "final_soft_cap", "local_rope_theta"):
            if getattr(self, name) is not None:
                self._check_positive(name)
        for name in ("rms_norm_eps", "rope_theta", "embedding_scale"):
            self._check_positive(name)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if unknown := [name for name in self.rotations if name not in ROTATIONS]:
            raise ConfigError(f"rotations has {', '.join(map(shown, unknown))}; supported are: {', '.join(ROTATIONS)}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.dtype not in ("float64", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype {shown(self.dtype)} is not one of float64, float32, bfloat16, float16")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        number = as_float(value)
        if number is None or number <= 0:
            raise ConfigError(f"{name} must be a number above 0, not {shown(value)}")

    def groups(self, max_model_len: int | None = None) -> LayerGroups:
        """Group layers that share a block table. max_model_len: of the longest request; default: the model's own.

        A window of at least that many tokens counts as none.
        """
        longest = max_model_len or self.max_model_len
        windows = self.windows or (None,) * self.num_layers
        return LayerGroups.of([window if window and window < longest else None for window in windows])

    def shard(self, size: int) -> "ModelConfig":
        """The shape of what each of `size` GPUs holds: its heads, inner columns and vocabulary. Raises ConfigError.

        With fewer KV heads than GPUs, several GPUs hold the same one.
        """
        sizes = {name: getattr(self, name) for name in ("num_heads", "intermediate_size", "vocab_size")}
        uneven = [f"{name}={count}" for name, count in sizes.items() if count % size]
        if self.num_kv_heads % size and size % self.num_kv_heads:
            uneven.append(f"num_kv_heads={self.num_kv_heads}")
        if uneven:
            raise ConfigError(f"{size} GPUs cannot share this model evenly: {', '.join(uneven)}")
        if size > 1 and "down" in self.rotations:
            raise ConfigError("a model whose inputs of down projections are rotated cannot be divided between GPUs")
        kv_heads = max(1, self.num_kv_heads // size)
        return replace(self, num_kv_heads=kv_heads, **{name: count // size for name, count in sizes.items()})

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json`, and the EOS tokens of `generation_config.json` if there is one. Raises ConfigError."""
        path = directory / "config.json"
        if not path.is_file():
            raise ConfigError(f"{directory} has no config.json: it is not a model in Hugging Face's layout")
        raw = read_json(path, ConfigError)
        generation = directory / "generation_config.json"
        more = read_json(generation, ConfigError) if generation.is_file() else {}
        try:
            check_fields(more)
        except ConfigError as error:
            raise ConfigError(f"{generation}: {error}") from None
        try:
            return cls.from_dict(raw, more)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """Convert a config.json, written by transformers 4 or 5, into these fields. Raises ConfigError."""
        names = raw.get("architectures") or [None]
        if not isinstance(names, list) or not isinstance(names[0], (str, type(None))):
            raise ConfigError(f"architectures must be a list of names, as ['GemmaForCausalLM'], not {shown(names)}")
        architecture = names[0]
        if architecture in REFUSED:
            raise ConfigError(f"architecture {architecture!r} is not supported: {REFUSED[architecture]}")
        if architecture not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ConfigError(f"architecture {architecture!r} is not supported; supported are: {supported}")
        check_fields(raw)
        if raw.get("use_bidirectional_attention"):
            raise ConfigError("use_bidirectional_attention makes an encoder, which cannot generate text")
        family = ARCHITECTURES[architecture]
        raw = family.defaults | {
            key: value for key, value in raw.items() if value is not None or key in NULL_MEANS_NONE
        }
        try:
            hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
            theta, scaling = read_rope(raw)
            eos = [*_ids(raw.get("eos_token_id")), *_ids((generation or {}).get("eos_token_id"))]
            common = {
                "architecture": architecture,
                "vocab_size": raw["vocab_size"],
                "hidden_size": hidden,
                "intermediate_size": raw["intermediate_size"],
                "num_layers": raw["num_hidden_layers"],
                "num_heads": heads,
                "num_kv_heads": raw.get("num_key_value_heads", heads),
                "head_dim": raw.get("head_dim", hidden // heads),
                "max_model_len": raw["max_position_embeddings"],
                "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
                "rope_theta": theta,
                "rope_scaling": scaling,
                "activation": _activation(raw, family.activations),
                "attention_bias": raw.get("attention_bias", False),
                "tie_word_embeddings": raw["tie_word_embeddings"],
                "dtype": str(raw.get("dtype", raw.get("torch_dtype", "float32"))).removeprefix("torch."),
                "bos_token_id": raw.get("bos_token_id"),
                "eos_token_ids": tuple(dict.fromkeys(eos)),
                "rotations": tuple(raw.get("rotations", ())),
            }
            return cls(**common, **family.read(raw))
        except KeyError as error:
            raise ConfigError(f"{error.args[0]} is missing") from None


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
    "gemma-2-2b": ModelConfig(
        architecture="Gemma2ForCausalLM",
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_model_len=8192,
        activation="gelu_tanh",
        norm_offset=1.0,
        embedding_scale=2304**0.5,
        attention_scale=256**-0.5,
        attention_soft_cap=50.0,
        final_soft_cap=30.0,
        windows=(4096, None) * 13,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1,),
    ),
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    ),
    "llama-3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=131072,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=RopeScaling("llama3", 8.0),
        bos_token_id=128000,
        eos_token_ids=(128001,),
    ),
}


def sampling_defaults(directory: Path) -> dict[str, float]:
    """Return what generation_config.json advises for sampling, if it differs from the defaults. Raises ConfigError."""
    path = directory / "generation_config.json"
    raw = read_json(path, ConfigError) if path.is_file() else {}
    return {name: raw[name] for name, usual in SAMPLING.items() if raw.get(name) not in (None, *usual)}


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _activation(raw: dict[str, Any], known: dict[str, str]) -> str:
    name = raw.get("hidden_activation", raw["hidden_act"])
    if name not in known:
        raise ConfigError(f"activation {name!r} is not supported; supported are: {', '.join(known)}")
    return known[name]
