"""Fields of the wrong type in a model's JSON files are rejected with the names of the file and the field."""

import json
import math
from typing import get_args, get_origin, get_type_hints

import pytest

from minillm.errors import ConfigError
from minillm.model.config import ModelConfig
from minillm.model.config_file import KIND_OF
from minillm.model.families import ARCHITECTURES
from minillm.model.rope_scaling import RopeScaling
from minillm.values import shown

pytestmark = pytest.mark.key

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VALUES = ("x", "", 5, 0, -1, 1.5, True, False, [], {}, [[1]], ["x"], {"x": 1}, math.nan, -math.inf, 10**400, None)
TYPES = {
    kind: {name: hint for name, hint in get_type_hints(kind).items() if not name.startswith("_")}
    for kind in (ModelConfig, RopeScaling)
}


def fits(value: object, hint: type) -> bool:
    """Whether a value has a field's type; floats must be finite."""
    if isinstance(value, RopeScaling):
        return all(fits(getattr(value, name), each) for name, each in TYPES[RopeScaling].items())
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(each, get_args(hint)[0]) for each in value)
    if kinds := get_args(hint):
        return any(fits(value, kind) for kind in kinds)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def read(directory, raw: dict) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_directory(directory)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_field_of_the_wrong_type_is_rejected_by_name(architecture, tmp_path):
    raw = SHAPE | {"architectures": [architecture]}
    read(tmp_path, raw)
    refused = set()
    for name in KIND_OF:
        for value in VALUES:
            try:
                config = read(tmp_path, raw | {name: value})
            except ConfigError as error:
                assert str(error).startswith(f"{tmp_path / 'config.json'}: "), error
                assert len(str(error)) < 400 + len(str(tmp_path))
                refused.add(name)
                continue
            wrong = [each for each, hint in TYPES[ModelConfig].items() if not fits(getattr(config, each), hint)]
            assert not wrong, f"{name}: {shown(value)} loads as {wrong}"
    assert refused == set(KIND_OF)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", [*ROPE, "rope_theta", "original_max_position_embeddings"])
def test_a_rotary_field_of_the_wrong_type_is_rejected_by_name(place, name, tmp_path):
    raw = SHAPE | {"architectures": ["LlamaForCausalLM"]}
    assert read(tmp_path, raw | {place: ROPE}).rope_scaling.factor == 2.0
    for value in VALUES:
        try:
            config = read(tmp_path, raw | {place: ROPE | {name: value}})
        except ConfigError as error:
            assert name in str(error) or "rope scaling" in str(error), error
        else:
            assert all(fits(getattr(config, each), hint) for each, hint in TYPES[ModelConfig].items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number above 0, not 'x'"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, not 'x'"),
        ({"eos_token_id": [1, None]}, r"eos_token_id must be a token id or a list of them, not \[1, None\]"),
        ({"rope_parameters": 5}, "rope_parameters must be an object, not 5"),
        ({"rope_parameters": {"factor": "x"}}, "rope_parameters.factor must be a number above 0, not 'x'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 4096, not 1000000000"),
        ({"layer_types": [["x"]]}, r"layer_types must be a list of strings, not \[\['x'\]\]"),
        ({"rope_scaling": ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor above low_freq_factor=1.0, not 1.0"),
    ],
)
def test_the_error_quotes_the_wrong_value(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(SHAPE | {"architectures": ["LlamaForCausalLM"]} | change)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "[1, 2]", r"config.json must hold an object of fields, not \[1, 2\]"),
        ("config.json", "5", "config.json must hold an object of fields, not 5"),
        ("config.json", "[" * 100_000, "config.json is not JSON"),
        ("config.json", "\xff", "config.json is not JSON"),
        ("generation_config.json", "[]", r"generation_config.json must hold an object of fields, not \[\]"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id must be"),
        (
            "generation_config.json",
            '{"eos_token_id": [[1]]}',
            "generation_config.json: eos_token_id must be",
        ),
    ],
)
def test_the_error_names_a_damaged_file(tmp_path, file, text, message):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"architectures": ["LlamaForCausalLM"]}))
    ModelConfig.from_directory(tmp_path)
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "embedding_scale", "attention_scale", "final_soft_cap"])
@pytest.mark.parametrize("value", ["x", 0, True, math.nan, 10**400], ids=shown)
def test_a_model_config_built_in_code_is_checked_too(name, value):
    config = ModelConfig.from_dict(SHAPE | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match=f"{name} must be a number above 0"):
        ModelConfig(**config.__dict__ | {name: value})
