"""Small models for tests, saved as Hugging Face saves them, whose output depends on every part of them."""

import copy

import torch
from transformers import GemmaConfig, LlamaConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "gemma-multi-query": GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=32),
    "gemma-grouped": GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8, rope_parameters={"rope_theta": 500.0}),
    "gemma-multi-head-untied": GemmaConfig(
        **SMALL, num_key_value_heads=4, head_dim=16, tie_word_embeddings=False, rms_norm_eps=1e-3
    ),
    "llama2-multi-head": LlamaConfig(**SMALL),
    "llama2-linear-scaling": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama3-grouped": LlamaConfig(**SMALL, num_key_value_heads=2, rope_parameters=LLAMA3),
    "llama3-tied-head-dim": LlamaConfig(
        **SMALL, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "llama-biases": LlamaConfig(**SMALL, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model with weights so large that attention, positions and every layer decide the next token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    for key, parameter in model.named_parameters():
        one = 1.0 if name.startswith("llama") and "norm" in key else 0.0
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, one, 0.3)
        else:
            gain = 1.0 if "embed" in key or "lm_head" in key else 2.5
            torch.nn.init.normal_(parameter, 0.0, gain * parameter.shape[1] ** -0.5)
    return model
