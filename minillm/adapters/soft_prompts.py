"""Read a soft prompt from the files that PEFT writes: trained embeddings, which go before the prompt of a request.

Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning" (PROMPT_TUNING), and Liu et al. 2021,
"GPT Understands, Too" (P_TUNING), whose encoder makes the embeddings while they are trained, and no later. Both leave
one tensor, "prompt_embeddings" [num_virtual_tokens, hidden]. A soft prompt is named like an adapter and needs no slot
on the device: its request is one whose prompt begins with embeddings, and their content is in the keys of its blocks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minillm.errors import ConfigError, InvalidRequest
from minillm.model.checkpoint import FILE_DTYPES, FLOATING, is_consistent
from minillm.model.config import ModelConfig
from minillm.prompts.embeddings import check_shape
from minillm.prompts.tensors import read_tensor
from minillm.values import as_int, shown

from .peft import CONFIG, FACTORS, read_description, read_entries, read_matrix

KINDS, TENSOR = ("PROMPT_TUNING", "P_TUNING"), "prompt_embeddings"
# Fields that say how it was trained, or repeat the tensor's shape.
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "num_attention_heads", "num_layers", "peft_type"),
    *("peft_version", "prompt_tuning_init", "prompt_tuning_init_text", "revision", "task_type", "token_dim"),
    *("tokenizer_kwargs", "tokenizer_name_or_path", "num_virtual_tokens", "num_transformer_submodules"),
    *("encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout"),
}


def is_soft_prompt(directory: str | Path) -> bool:
    """Return whether a directory that PEFT wrote has a soft prompt. Raises ConfigError if it has no readable config."""
    directory = Path(directory)
    return (directory / CONFIG).is_file() and read_description(directory).get("peft_type") in KINDS


def read_soft_prompt(directory: str | Path, config: ModelConfig, dtype: str, most: int) -> np.ndarray:
    """Return the embeddings of a soft prompt, [n, hidden], at most `most` of them.

    config, dtype: of the model. Raises ConfigError, which names what cannot be read and why.
    """
    directory = Path(directory)
    described = read_description(directory)
    try:
        _check_fields(described)
        entries = read_entries(directory)
        if list(entries) != [TENSOR]:
            raise ConfigError(f"{FACTORS} must have the tensor {TENSOR} alone, not {shown(list(entries))}")
        entry = entries[TENSOR]
        if FILE_DTYPES.get(entry.dtype) not in FLOATING or len(entry.shape) != 2 or not is_consistent(entry):
            raise ConfigError(f"{TENSOR} must be a matrix of floating-point numbers, not {entry.dtype}")
        count = as_int(described.get("num_virtual_tokens"))
        if count != entry.shape[0]:
            raise ConfigError(f"it has {entry.shape[0]} embeddings, but num_virtual_tokens is {shown(count)}")
        check_shape(entry.shape, "float32", config.hidden_size, most)  # before anything is read
        return read_tensor(read_matrix(entry), config.hidden_size, dtype, most)
    except InvalidRequest as error:
        reason = str(error).replace("prompt_embeds", TENSOR)
        raise ConfigError(
            f"soft prompt {directory}: {reason}; it was trained on another model, or is damaged"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"soft prompt {directory}: {error}") from None


def _check_fields(described: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that changes more than what stands before a prompt."""
    if described.get("num_transformer_submodules") not in (None, 1):
        raise ConfigError("num_transformer_submodules must be 1: models here have no encoder")
    for name, value in described.items():
        if name not in HARMLESS and value not in (None, False, "", [], {}):
            raise ConfigError(f"{name}={shown(value)}: this field is not known here, and may change what is computed")
