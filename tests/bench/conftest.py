"""A small random Gemma without a tokenizer: benchmarks use token ids."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "ids-only"
    folder.mkdir()
    config = {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
