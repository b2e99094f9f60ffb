"""config.json is read as transformers reads it, in old and new formats, or rejected with the reason."""

import json
import re

import pytest

from minillm.errors import ConfigError
from minillm.model.config import ModelConfig
from minillm.model.rope_scaling import RopeScaling
from tests import models

pytestmark = pytest.mark.key


def test_old_and_new_formats_of_a_config_read_the_same():
    new = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": models.LLAMA3,
        "dtype": "bfloat16",
        "eos_token_id": 5,
    }
    scaling = {key: value for key, value in models.LLAMA3.items() if key != "rope_theta"}
    old = new | {"rope_theta": 1000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16", "eos_token_id": [5]}
    del old["rope_parameters"], old["dtype"]
    assert ModelConfig.from_dict(new) == ModelConfig.from_dict(old)
    assert ModelConfig.from_dict(new).rope_theta == 1000.0
    assert ModelConfig.from_dict(new).head_dim == 16
    more = ModelConfig.from_dict(new, {"eos_token_id": [5, 7]})
    assert more.eos_token_ids == (5, 7)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_a_config_as_transformers_4_wrote_it_reads_the_same(name, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_dict(in_old_spelling(name, raw)) == ModelConfig.from_dict(raw)


def in_old_spelling(name: str, raw: dict) -> dict:
    """The older format: separate rotary fields, and no layer_types where the family implies them."""
    old = {key: value for key, value in raw.items() if key not in ("rope_parameters", "dtype")}
    rope = raw["rope_parameters"]
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old |= {"rope_theta": rope["rope_theta"], "torch_dtype": raw["dtype"]}
    old["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
    if name not in ("gemma2-grouped-untied", "gemma3-grouped-scaled"):
        old.pop("layer_types", None)
    if name == "gemma3-multi-head-untied":
        old["sliding_window_pattern"] = 2
    return old


SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "raw, expected",
    [
        (
            {"architectures": ["Gemma2ForCausalLM"]},
            {
                "head_dim": 256,
                "windows": (4096, None, 4096, None, 4096, None, 4096),
                "attention_scale": 1 / 16,
                "attention_soft_cap": 50.0,
                "final_soft_cap": 30.0,
                "tie_word_embeddings": True,
                "activation": "gelu_tanh",
            },
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"attention_soft_cap": None, "final_soft_cap": None},
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "rope_scaling": None},
            {
                "windows": (512,) * 5 + (None, 512),
                "rope_theta": 1e6,
                "local_rope_theta": 1e4,
                "rope_scaling": None,
                "final_soft_cap": None,
            },
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"rope_scaling": RopeScaling("linear", 8.0), "local_rope_theta": 1e4},
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, {"windows": (4096,) * 7}),  # v0.1
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"windows": ()}),  # v0.2 and v0.3
        ({"architectures": ["MistralForCausalLM"]}, {"windows": (4096,) * 7}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 2},
            {"windows": (), "qkv_bias": True, "attention_bias": False},
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 5}
            | {"use_sliding_window": True},
            {"windows": (None,) * 5 + (32, 32)},
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"windows": (), "head_dim": 128, "qkv_bias": False}),
    ],
    ids=lambda value: value.get("architectures", [None])[0],
)
def test_omitted_fields_have_the_familys_defaults(raw, expected):
    config = ModelConfig.from_dict(SHAPE | raw)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "raw, message",
    [
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "'Gemma3ForConditionalGeneration' is not supported: it reads images too.*use .* Gemma3ForCausalLM",
        ),
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "layer_types": ["full_attention", "chunked_attention"] * 3 + ["x"],
            },
            "layer_types names 'chunked_attention', 'x'; supported are: full_attention, sliding_attention",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 6},
            "layer_types has 6 entries for num_hidden_layers = 7",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 7},
            "some layers are sliding_attention, but sliding_window is missing or null",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "sliding_window": None},
            "some layers are sliding_attention, but sliding_window is missing",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "layer_types": ["sliding_attention", "full_attention"] * 3 + ["x"],
            },
            "MistralForCausalLM has its sliding_window in every layer",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window must be a whole number from 1 to .*, not 0",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 0},
            "sliding_window_pattern must be a whole number from 1 to .*, not 0",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 0},
            "query_pre_attn_scalar must be a number above 0, not 0",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1.0},
            "attn_logit_softcapping must be a number above 0, not -1.0",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention makes an encoder",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "rope scaling of sliding_attention layers is not supported",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}},
            },
            "rope scaling 'yarn' is not supported",
        ),
    ],
)
def test_an_invalid_family_config_is_rejected_with_the_reason(raw, message):
    ModelConfig.from_dict(SHAPE | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(SHAPE | raw)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [["LlamaForCausalLM"]], {"text": "LlamaForCausalLM"}, 7])
def test_an_invalid_architectures_field_is_quoted_in_the_error(names):
    message = f"architectures must be a list of names, as ['GemmaForCausalLM'], not {names!r}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        ModelConfig.from_dict(SHAPE | {"architectures": names})


def test_early_gemma_configs_use_the_tanh_gelu_and_a_tied_head():
    raw = {
        "architectures": ["GemmaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    config = ModelConfig.from_dict(raw)
    assert config.activation == "gelu_tanh" and config.tie_word_embeddings
    assert config.norm_offset == 1.0 and config.embedding_scale == 8.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; supported are: GemmaForCausalLM, Gemma2"),
        ({"architectures": None}, "None is not supported"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to .*, not 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number from 1 to .*, not 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
    ],
)
def test_an_invalid_config_is_rejected_with_the_reason(change, message):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    ModelConfig.from_dict(raw)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(raw | change)
