"""Lesson 06 says whose functions made a result: those that ran, whatever was solved since."""

import types

import pytest
import torch

from minillm.course.lesson_06 import calibrated
from minillm.course.making import build, lesson
from tests.course.conftest import code_cells

(SOURCE,) = build.sources(["06"])
ENGINES = "the engine's (yours was not solved yet)"


def cell(start: str) -> str:
    (found,) = [each for each in code_cells(SOURCE, lesson.LEARNER) if start in each]
    return found


def test_gptq_slowly_takes_the_step_that_was_solved_after_its_cell_ran(defined):
    names, calls = defined(SOURCE, lesson.LEARNER), []

    def mine(*given):
        calls.append(given)
        return calibrated.compensate(*given)

    slowly, grid = names["gptq_slowly"], calibrated.Grid(2)
    weight, moment = torch.tensor([[1.4, 0.4]]).double(), torch.tensor([[6.0, 7.0], [7.0, 9.0]]).double()
    slowly(weight, moment, grid)
    assert not calls
    names["compensate"] = mine
    slowly(weight, moment, grid)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("parts", "said"),
    [(["yours"], "yours"), ([ENGINES], ENGINES), (["yours", ENGINES], ENGINES), ([ENGINES, "yours"], ENGINES)],
)
def test_the_verdict_names_whose_functions_were_measured(capsys, parts, said):
    """Not whose they are now, when the names of the exercises are not even looked up."""
    names = ("nearest", "AWQ's scales", "GPTQ", "scales, GPTQ")
    results = {f"{name}{model}": types.SimpleNamespace(mean=0.001) for name in names for model in ("", ", outliers")}
    space = {
        "results": results,
        "parts_of": dict.fromkeys(results, parts),
        "draw": types.SimpleNamespace(bars=lambda bars: None),
        "describe": lambda words: None,
    }
    exec(cell("TARGETS = "), space)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.endswith(f": reached, {said}") for line in lines)


def test_a_measurement_keeps_whose_functions_it_used():
    space = {
        "held_out": types.SimpleNamespace(measure=lambda *_: types.SimpleNamespace(mean=0, error=0, perplexity=1)),
        "calibrated": types.SimpleNamespace(quantized=lambda *_: (None, {})),
        "Method": lambda name: name,
    }
    exec(cell("def measure("), space)
    space["measure"]("mine", "gptq", parts=["yours"])
    assert space["parts_of"] == {"nearest": (), "mine": ["yours"]}


@pytest.mark.parametrize(
    ("measured", "parts"),
    [
        ('measure("AWQ\'s scales, outliers"', "[search_is]"),
        ('measure("GPTQ", Method("gptq"), statistics', "[gptq_is]"),
        ('measure("scales, GPTQ, outliers"', "[search_is, gptq_is]"),
    ],
)
def test_each_target_is_measured_with_its_parts(measured, parts):
    (line,) = [each for each in cell(measured).splitlines() if measured in each]
    assert line.endswith(f"parts={parts})")


def test_the_command_says_which_gptq_ran():
    assert "GPTQ is {gptq_is}" in cell("quantize(None, MethodRecipe") and "whose(" not in cell("quantize(None, Method")
