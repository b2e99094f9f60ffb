"""The model families: how each architecture's `config.json` and checkpoint differ from the others.  Lesson 02.

A family is an entry of `ARCHITECTURES`: the defaults of its config.json, its norms' names in the checkpoint, and a
function that converts its other fields to those of `ModelConfig`. A family with a part that no other has adds a field
to `ModelConfig` and a line to `decoder.py`. docs/extending.md adds one as an example.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import ConfigError

from .rope_scaling import read_rope

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
    """Says how one architecture differs from the others: everything that a new one has to define.  Lesson 02.

    defaults     values for fields that its config.json may leave out
    norms        the norms of a `decoder.Layer` -> their names in the checkpoint; all other tensors have the same names
                 in every family
    read         config.json with the defaults filled in -> the fields of `ModelConfig` that not every family has
    activations  their names in config.json -> their names in `ModelConfig.activation`
    overflows    whether known models of it compute numbers beyond float16's largest, 65,504
    """

    defaults: dict[str, Any]
    norms: dict[str, str]
    read: Callable[[dict[str, Any]], dict[str, Any]]
    activations: dict[str, str] = field(default_factory=ACTIVATIONS.copy)
    overflows: bool = False


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
    local_theta, local_scaling = read_rope(raw, "sliding_attention", theta="rope_local_base_freq")
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


def _attention_scale(raw: dict[str, Any]) -> float:
    return raw["query_pre_attn_scalar"] ** -0.5


def layer_windows(raw: dict[str, Any], window: int | None, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return each layer's window, from the config's `layer_types`; without those, layer i has a window if `slides(i)`.

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
    "GemmaForCausalLM": Family(GEMMA, NORMS, _gemma, ACTIVATIONS | {"gelu": "gelu_tanh"}, overflows=True),
    "Gemma2ForCausalLM": Family(GEMMA2, FOUR_NORMS, _gemma2, overflows=True),
    "Gemma3ForCausalLM": Family(GEMMA3, FOUR_NORMS | QK_NORMS, _gemma3, overflows=True),
    "LlamaForCausalLM": Family(LLAMA, NORMS, _llama),
    "MistralForCausalLM": Family(LLAMA | {"sliding_window": 4096}, NORMS, _mistral),
    "Qwen2ForCausalLM": Family(QWEN, NORMS, _qwen2, overflows=True),
    "Qwen3ForCausalLM": Family(QWEN | {"head_dim": 128}, NORMS | QK_NORMS, _qwen3),
}
REFUSED = {
    "Gemma3ForConditionalGeneration": "it reads images too, and minillm reads only text; use a directory whose "
    "architecture is Gemma3ForCausalLM",
}
# If absent, these have their family's default; null turns them off. For all other keys, null means absent.
NULL_MEANS_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
