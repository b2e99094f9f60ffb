"""Methods by short names: "awq-g64", "int4-g32-zeros+int8", "w8a8-rotate"."""

import json

import pytest

from minillm.calibration.methods import METHODS, Method, MethodRecipe
from minillm.calibration.names import named
from minillm.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        *((name, {"layers.*": Method(name)}) for name in METHODS),
        ("awq-g64", {"layers.*": Method("awq", group_size=64)}),
        ("int4-g32-zeros+int8", {"layers.*": Method("int4", 32, symmetric=False), "head": Method("int8")}),
        ("pruned-s70", {"layers.*": Method("pruned", sparsity=0.7)}),
        ("gptq-actorder", {"layers.*": Method("gptq", act_order=True)}),
        ("fp8-static-tensor+fp8", {"layers.*": Method("fp8", scales="tensor", static=True), "head": Method("fp8")}),
    ],
)
def test_a_name_is_a_method_with_its_parameters(name, rules):
    assert named(name) == MethodRecipe(rules)


@pytest.mark.parametrize("name", ["int4-g32-rotate+int8", "int4-rotate-g32+int8"])
def test_a_name_says_that_the_model_is_rotated_first(name):
    rules = {"layers.*": Method("int4", group_size=32), "head": Method("int8")}
    assert named(name) == MethodRecipe(rules, rotate=True)


def test_a_recipe_file_is_a_name_too(tmp_path):
    file = tmp_path / "mixed.json"
    file.write_text(json.dumps({"layers.0.*": "int8", "layers.*": "awq"}))
    assert named(str(file)).rules == {"layers.0.*": Method("int8"), "layers.*": Method("awq")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int3", "int3 is neither a method nor a directory nor a recipe file.*; methods: int8, int4"),
        (
            "awq-64",
            "awq-64: unknown part -64; a method may have -g64, -s50 and -zeros, -actorder, -tensor, -static, -rotate",
        ),
        ("w8a8-rotated", "w8a8-rotated: unknown part -rotated;"),
        ("awq-g", "awq-g: unknown part -g;"),
        ("awq-actorder", "awq-actorder: awq takes no act_order"),
        ("pruned-s0", "pruned-s0: sparsity must be a number between 0 and 1, not 0.0"),
        ("int4-s70", "int4-s70: int4 takes no sparsity"),
        ("int8-g64", "int8-g64: int8 takes no group_size"),
        ("awq-g7", "awq-g7: group_size must be an even whole number"),
        ("int8+int4", "int8.int4: head must be one of int8, fp8"),
    ],
)
def test_a_wrong_name_is_refused_by_name(name, message):
    with pytest.raises(ConfigError, match=message):
        named(name)
