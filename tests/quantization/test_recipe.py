"""Recipes: the first pattern that matches a weight's address determines its format."""

import pytest

from minillm.errors import ConfigError
from minillm.quantization import DenseWeight, Int8Weight, Recipe


def test_the_first_matching_pattern_decides_and_unmatched_weights_are_dense():
    recipe = Recipe({"layers.0.*": "dense", "layers.*.down": "dense", "layers.*": "int8"})
    assert recipe.format("layers.0.qkv") is DenseWeight
    assert recipe.format("layers.1.qkv") is Int8Weight
    assert recipe.format("layers.10.gate_up") is Int8Weight
    assert recipe.format("layers.10.down") is DenseWeight
    assert recipe.format("head") is DenseWeight
    assert Recipe().format("layers.3.qkv") is DenseWeight


def test_an_unknown_format_is_rejected_with_the_available_ones():
    with pytest.raises(ConfigError, match="'layers.*' has the unknown format 'int3'; formats are: dense, int8"):
        Recipe({"layers.*": "int3"})
