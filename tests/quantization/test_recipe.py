"""Recipes: the first pattern that matches a weight's address determines its format."""

import pytest

from minillm.errors import ConfigError
from minillm.quantization import Activations, Dense, Int8, Recipe


def test_the_first_matching_pattern_decides_and_unmatched_weights_are_dense():
    recipe = Recipe({"layers.0.*": "dense", "layers.*.down": "dense", "layers.*": "int8"})
    assert recipe.format("layers.0.qkv") == Dense()
    assert recipe.format("layers.1.qkv") == Int8()
    assert recipe.format("layers.10.gate_up") == Int8()
    assert recipe.format("layers.10.down") == Dense()
    assert recipe.format("head") == Dense()
    assert Recipe().format("layers.3.qkv") == Dense()


def test_an_unknown_format_is_rejected_with_the_available_ones():
    with pytest.raises(ConfigError, match="'layers.*' has the unknown format 'int3'; formats are: dense, int8"):
        Recipe({"layers.*": "int3"})


def test_activations_are_named_or_given_as_an_object():
    static = Activations("fp8", static=True)
    for given in ("fp8-static", static):
        assert Recipe({"*": {"format": "int8", "activations": given}}).format("head") == Int8(static)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"format": ["int8"]}, r"unknown format \['int8'\]"),
        ({}, "unknown format None"),
        (None, "must have a format, its name, or a dictionary .* not None"),
        (3, "must have a format, .* not 3"),
        (Int8, "must have a format"),
        ({"format": "int8", "activations": 8}, "has activations 8; they can be: int8, int8-static, fp8, fp8-static"),
        ({"format": "int8", "activations": "int8-"}, "has activations 'int8-'"),
        ({"format": "int8", "activations": ["int8"]}, "has activations"),
        ({"format": "int4", "symmetric": "no"}, "symmetric must be True or False, not 'no'"),
        ({"format": "int4", "group_size": "64"}, "group_size must be an even whole number"),
        ({"format": "int4", "scale_dtype": "float16"}, "int4 has no scale_dtype; it has: group_size.*activations$"),
        ({"format": "fp8", "scales": ["channel"]}, "scales must be one of"),
    ],
)
def test_a_rule_that_is_no_format_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Recipe({"*": given})


@pytest.mark.parametrize("rules", [None, 3, ["int8"], {3: "int8"}])
def test_rules_must_map_patterns_to_formats(rules):
    with pytest.raises(ConfigError, match="a recipe must map patterns"):
        Recipe(rules)


def test_activations_have_a_known_kind():
    with pytest.raises(ConfigError, match="activations must be one of int8, fp8, not 'int4'"):
        Activations("int4")
