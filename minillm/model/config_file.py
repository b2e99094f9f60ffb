"""Read a model's JSON files and check the type of every field that is used.  Lesson 00."""

from collections.abc import Callable
from typing import Any

from minillm.errors import ConfigError
from minillm.values import as_float, as_int, shown


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: (whole := as_int(value)) is not None and low <= whole <= high


def _is_number(value: Any) -> bool:
    return (number := as_float(value)) is not None and number > 0


def _are_tokens(value: Any) -> bool:
    return all(map(_whole(0, 2**31 - 1), value if isinstance(value, list) else [value]))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# kind -> its description, and a test
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a whole number from 1 to 2147483647", _whole(1, 2**31 - 1)),
    "layers": ("a whole number from 1 to 4096", _whole(1, 4096)),
    "layer": ("a whole number from 0 to 4096", _whole(0, 4096)),
    "number": ("a number above 0", _is_number),
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "name": ("a string", lambda value: isinstance(value, str)),
    "names": ("a list of strings", _are_names),
    "tokens": ("a token id or a list of them", _are_tokens),
    "token": ("a token id", _whole(0, 2**31 - 1)),
    "object": ("an object", lambda value: isinstance(value, dict)),
}
FIELDS = {
    "size": (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "original_max_position_embeddings", "sliding_window", "sliding_window_pattern"),
    ),
    "layers": ("num_hidden_layers",),
    "layer": ("max_window_layers",),
    "number": (
        *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping"),
        *("final_logit_softcapping", "factor", "low_freq_factor", "high_freq_factor"),
    ),
    "switch": (
        *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_bidirectional_attention"),
    ),
    "name": ("hidden_act", "hidden_activation", "dtype", "torch_dtype", "rope_type", "type"),
    "names": ("layer_types", "rotations"),
    "tokens": ("eos_token_id",),
    "token": ("bos_token_id",),
    "object": ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention"),
}
KIND_OF = {name: kind for kind, names in FIELDS.items() for name in names}


def check_fields(raw: dict[str, Any], inside: str = "") -> None:
    """Raise ConfigError, which names the field, unless every known field has its type; null counts as absent.

    inside: a prefix for names in messages, such as "rope_parameters."
    """
    for name in KIND_OF.keys() & raw.keys():
        value, (words, holds) = raw[name], KINDS[KIND_OF[name]]
        if value is None:
            continue
        if not holds(value):
            raise ConfigError(f"{inside}{name} must be {words}, not {shown(value)}")
        if isinstance(value, dict):
            check_fields(value, f"{inside}{name}.")
