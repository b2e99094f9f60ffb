"""Small models for tests, in Hugging Face's format, whose output depends on every component."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
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
    "gemma2-multi-query": Gemma2Config(
        **SMALL, num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=20, sliding_window=7,
        attn_logit_softcapping=3.0, final_logit_softcapping=4.0,
    ),
    "gemma2-grouped-untied": Gemma2Config(
        **SMALL, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=8, sliding_window=5,
        attn_logit_softcapping=5.0, final_logit_softcapping=None, tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "gemma2-multi-head": Gemma2Config(
        **SMALL, num_key_value_heads=4, head_dim=8, query_pre_attn_scalar=12, sliding_window=3,
        attn_logit_softcapping=None, final_logit_softcapping=2.0,
    ),
    "gemma3-multi-query": Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 7}, num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=20,
        sliding_window=7,
    ),
    "gemma3-grouped-scaled": Gemma3TextConfig(
        **SMALL, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=4, sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma3-multi-head-untied": Gemma3TextConfig(
        **SMALL, num_key_value_heads=4, head_dim=12, query_pre_attn_scalar=30, sliding_window=9,
        sliding_window_pattern=2, tie_word_embeddings=False, final_logit_softcapping=3.0,
    ),
    "mistral-grouped": MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=7),
    "mistral-no-window": MistralConfig(**SMALL, num_key_value_heads=1, head_dim=16, sliding_window=None),
    "qwen2-grouped": Qwen2Config(**SMALL, num_key_value_heads=2),
    "qwen2-sliding-tied": Qwen2Config(
        **SMALL, num_key_value_heads=1, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3-grouped": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16),
    "qwen3-sliding-tied": Qwen3Config(
        **SMALL, num_key_value_heads=4, head_dim=32, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        tie_word_embeddings=True, attention_bias=True,
    ),
}  # fmt: skip


def make(name: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A float32 model with weights so large that attention, positions and every layer affect the next token.

    changes: fields of its configuration.
    """
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, _mean(name, key), 0.3)
        else:
            gain = 1.0 if "embed" in key or "lm_head" in key else 2.5
            torch.nn.init.normal_(parameter, 0.0, gain * parameter.shape[1] ** -0.5)
    return model


def directories(names: list[str]):
    """A fixture `directory`: the models of these names, one after another, each saved in a folder."""

    @pytest.fixture(scope="module", params=names)
    def directory(request, tmp_path_factory):
        place = tmp_path_factory.mktemp(request.param)
        make(request.param).save_pretrained(place)
        return place

    return directory


def _mean(name: str, key: str) -> float:
    """The mean of a norm's or bias's elements."""
    if name.startswith(("gemma2", "gemma3")) and "post_" in key:
        return 4.0  # after a norm, a layer's output scales with the norm's weights, not with its matrices
    return 1.0 if "norm" in key and not name.startswith("gemma") else 0.0


def reference(directory: str | Path, **options) -> PreTrainedModel:
    """A directory's model in transformers, with eager attention: others lack the soft cap, and some versions of
    transformers choose them for Gemma 2 all the same."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **options)


def keep_float64(monkeypatch) -> None:
    """Keep transformers' eager attention in float64: its softmax is float32 whatever the model's dtype."""
    own = torch.nn.functional.softmax

    def softmax(scores, dim, dtype=None):
        return own(scores, dim=dim, dtype=torch.float64 if scores.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


def generated(directory: str | Path, prompts: list[list[int]], count: int, likely: list[list[int]]) -> list[list[int]]:
    """What transformers generates in float64, one prompt at a time.

    likely: for each prompt, tokens that are taken if transformers has each of them after those before: one pass tells.
    """
    model = reference(directory, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        keep_float64(patch)
        found = []
        for prompt, tokens in zip(prompts, likely, strict=True):
            logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
            if len(tokens) == count and logits.argmax(-1).tolist() == tokens:
                found.append(tokens)
                continue
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
            found.append(out[0, len(prompt) :].tolist())
    return found
