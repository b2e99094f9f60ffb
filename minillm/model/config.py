"""A model's shape, read from `config.json`: one set of fields for all model families.  Lesson 02.

A model family is an entry of `ARCHITECTURES`: the defaults of its config.json, its norms' names in the checkpoint, and
a function that converts its other fields to those of `ModelConfig`. A family with a part that no other has adds a
field to `ModelConfig` and a line to `decoder.py`. The README adds one as an example.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import LayerGroups
from minillm.values import as_float, as_int, shown

from .config_file import check_fields, read_json


def _is_size(value: Any) -> bool:
    return (whole := as_int(value)) is not None and whole >= 1


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled for contexts longer than the trained one.  Lesson 02.

    "linear" divides all frequencies by `factor` (Chen et al. 2023, section 3.2); "llama3" only the low ones (Meta's
    reference code for Llama 3.1, `apply_scaling`), which the other three numbers delimit.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope scaling needs a high_freq_factor above low_freq_factor={self.low_freq_factor}, not "
                f"{self.high_freq_factor}"
            )


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
        """Which layers share a block table if no request is longer than `max_model_len` (default: the model's own).

        A window of at least that many tokens counts as none.
        """
        longest = max_model_len or self.max_model_len
        windows = self.windows or (None,) * self.num_layers
        return LayerGroups.of([window if window and window < longest else None for window in windows])

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json`, and the EOS tokens of `generation_config.json` if there is one. Raises ConfigError."""
        path = directory / "config.json"
        if not path.is_file():
            raise ConfigError(f"{directory} has no config.json: it is not a model in Hugging Face's layout")
        raw = read_json(path)
        generation = directory / "generation_config.json"
        more = read_json(generation) if generation.is_file() else {}
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
        if raw.get("quantization_config"):
            raise ConfigError("quantized checkpoints cannot be loaded yet; use the unquantized model")
        if raw.get("use_bidirectional_attention"):
            raise ConfigError("use_bidirectional_attention makes an encoder, which cannot generate text")
        family = ARCHITECTURES[architecture]
        raw = family.defaults | {
            key: value for key, value in raw.items() if value is not None or key in NULL_MEANS_NONE
        }
        try:
            hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
            theta, scaling = _rope(raw)
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
            }
            return cls(**common, **family.read(raw))
        except KeyError as error:
            raise ConfigError(f"{error.args[0]} is missing") from None


ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# A Layer's norms -> their names in the checkpoint, after "model.layers.N.".
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "after_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}
QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the others: everything that a new one has to define.  Lesson 02.

    defaults     values for fields that its config.json may leave out
    norms        the norms of a `decoder.Layer` -> their names in the checkpoint; all other tensors have the same names
                 in every family
    read         config.json with the defaults filled in -> the fields of `ModelConfig` that not every family has
    activations  their names in config.json -> their names in `ModelConfig.activation`
    """

    defaults: dict[str, Any]
    norms: dict[str, str]
    read: Callable[[dict[str, Any]], dict[str, Any]]
    activations: dict[str, str] = field(default_factory=ACTIVATIONS.copy)


def _gemma(raw: dict[str, Any]) -> dict[str, Any]:
    return {"norm_offset": 1.0, "embedding_scale": raw["hidden_size"] ** 0.5}


def _gemma2(raw: dict[str, Any]) -> dict[str, Any]:
    return _gemma(raw) | {
        "attention_scale": _attention_scale(raw),
        "attention_soft_cap": raw["attn_logit_softcapping"],
        "final_soft_cap": raw["final_logit_softcapping"],
        "windows": layer_windows(raw, raw["sliding_window"], slides=lambda layer: layer % 2 == 0),
    }


def _gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    local_theta, local_scaling = _rope(raw, "sliding_attention", theta="rope_local_base_freq")
    if local_scaling:
        raise ConfigError("rope scaling of sliding_attention layers is not supported: Gemma 3 scales only the others")
    pattern = raw["sliding_window_pattern"]
    # attn_logit_softcapping is ignored, as in transformers: no Gemma 3 has one.
    return _gemma(raw) | {
        "attention_scale": _attention_scale(raw),
        "final_soft_cap": raw["final_logit_softcapping"],
        "windows": layer_windows(raw, raw["sliding_window"], slides=lambda layer: (layer + 1) % pattern != 0),
        "local_rope_theta": local_theta,
    }


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    return {"mlp_bias": raw.get("mlp_bias", False)}


def _mistral(raw: dict[str, Any]) -> dict[str, Any]:
    window = raw["sliding_window"]
    if window is not None and "full_attention" in raw.get("layer_types", ()):
        raise ConfigError("MistralForCausalLM has its sliding_window in every layer, but layer_types has others")
    return {"windows": layer_windows(raw, window, slides=lambda layer: window is not None)}


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    return _qwen3(raw) | {"qkv_bias": True}


def _qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    first = raw["max_window_layers"]
    return {"windows": layer_windows(raw, window, slides=lambda layer: window is not None and layer >= first)}


GEMMA = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256}
GEMMA2 = GEMMA | {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = GEMMA | {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
LLAMA = {"tie_word_embeddings": False, "hidden_act": "silu"}
QWEN = LLAMA | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

ARCHITECTURES = {
    # The first releases write "gelu" and mean its tanh form.
    "GemmaForCausalLM": Family(GEMMA, NORMS, _gemma, ACTIVATIONS | {"gelu": "gelu_tanh"}),
    "Gemma2ForCausalLM": Family(GEMMA2, FOUR_NORMS, _gemma2),
    "Gemma3ForCausalLM": Family(GEMMA3, FOUR_NORMS | QK_NORMS, _gemma3),
    "LlamaForCausalLM": Family(LLAMA, NORMS, _llama),
    "MistralForCausalLM": Family(LLAMA | {"sliding_window": 4096}, NORMS, _mistral),
    "Qwen2ForCausalLM": Family(QWEN, NORMS, _qwen2),
    "Qwen3ForCausalLM": Family(QWEN | {"head_dim": 128}, NORMS | QK_NORMS, _qwen3),
}
REFUSED = {
    "Gemma3ForConditionalGeneration": "it reads images too, and minillm reads only text; use a directory whose "
    "architecture is Gemma3ForCausalLM",
}
# If absent, these have their family's default; null turns them off. For all other keys, null means absent.
NULL_MEANS_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

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


def _activation(raw: dict[str, Any], known: dict[str, str]) -> str:
    name = raw.get("hidden_activation", raw["hidden_act"])
    if name not in known:
        raise ConfigError(f"activation {name!r} is not supported; supported are: {', '.join(known)}")
    return known[name]


def _attention_scale(raw: dict[str, Any]) -> float:
    return raw["query_pre_attn_scalar"] ** -0.5


def _rope(
    raw: dict[str, Any], layers: str = "full_attention", theta: str = "rope_theta"
) -> tuple[float, RopeScaling | None]:
    """Base and scaling. transformers 5 writes both to `rope_parameters`; 4 wrote them to two fields.

    Gemma 3 has a pair for each kind of layer; transformers 4 wrote the local base to a third field, without scaling.
    """
    rope = raw.get("rope_parameters") or {}
    if "sliding_attention" in rope or "full_attention" in rope:
        rope = rope.get(layers) or {}
    elif layers == "full_attention":
        rope = rope or raw.get("rope_scaling") or {}
    rope = {name: value for name, value in rope.items() if value is not None}
    base = float(rope.get("rope_theta", raw.get(theta, 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported are: default, linear, llama3")
    factor = float(rope["factor"])
    if kind == "linear":
        return base, RopeScaling(kind, factor)
    trained = rope.get("original_max_position_embeddings", raw["max_position_embeddings"])
    return base, RopeScaling(kind, factor, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), trained)


def layer_windows(raw: dict[str, Any], window: int | None, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Each layer's window, from the config's `layer_types`; without those, layer i has a window if `slides(i)`.

    An empty tuple if no layer has one. Raises ConfigError.
    """
    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides(layer) else "full_attention" for layer in range(layers)]
    if len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries for num_hidden_layers = {layers}")
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"layer_types names {', '.join(sorted(map(repr, unknown)))};"
            " supported are: full_attention, sliding_attention"
        )
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise ConfigError("some layers are sliding_attention, but sliding_window is missing or null")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
