"""Every exercise's checker accepts the solution and rejects each mutant for exactly one property."""

import copy
import pkgutil
from collections import Counter
from collections.abc import Iterator
from importlib import import_module

import pytest
from _pytest.mark import ParameterSet

from minillm.course import check
from minillm.course.making import build, lesson
from minillm.course.shared import checks
from tests.course import mutants, unusual

checks.every()
for package in (mutants, unusual):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)

WRITTEN = {f"lesson_{source.stem[:2]}": source for source in build.sources([])}
EXERCISES = [  # of the modules lesson_09.checks, lesson_09.checks_keys, ...
    pytest.param(exercise, WRITTEN[exercise.properties[0].holds.__module__.split(".")[2]], id=exercise.name)
    for exercise in checks.EXERCISES.values()
]

# Their checks run kernels in the interpreter, which takes up to seconds for each mutant.
SLOW = ("add_row_norm", "geglu", "paged_decode", "tiled_linear", "transpose")


def each_mutant() -> Iterator[ParameterSet]:
    """Every mutant; those of slow exercises are proofs, and so are all but the first of a property."""
    seen: Counter[tuple[str, str]] = Counter()
    for mutant in mutants.MUTANTS:
        property = (mutant.exercise, mutant.fails)
        marks = pytest.mark.proof if mutant.exercise in SLOW or seen[property] else ()
        yield pytest.param(mutant, id=f"{mutant.exercise}: {mutant.fails} {seen[property]}", marks=marks)
        seen[property] += 1


def one_for_each_property() -> Iterator[ParameterSet]:
    """The first mutant that fails each property of the slow exercises."""
    first = {(mutant.exercise, mutant.fails): mutant for mutant in reversed(mutants.MUTANTS)}
    for (name, fails), mutant in first.items():
        if name in SLOW:
            yield pytest.param(mutant, id=f"{name}: {fails}")


def problems(exercise: checks.Exercise, candidate) -> dict[str, str]:
    return {result.name: result.problem for result in exercise.examine(candidate) if result.problem is not None}


@pytest.mark.parametrize(("exercise", "source"), EXERCISES)
def test_the_lessons_solution_has_every_property(exercise, source, defined):
    assert problems(exercise, defined(source, lesson.SOLUTION)[exercise.name]) == {}


@pytest.mark.parametrize(("exercise", "source"), EXERCISES)
def test_the_stub_is_reported_as_unsolved(exercise, source, defined, capsys):
    check(defined(source, lesson.LEARNER)[exercise.name])
    assert capsys.readouterr().out.startswith(f"{exercise.name}: not solved yet")


@pytest.mark.parametrize("mutant", list(each_mutant()))
def test_a_mutant_fails_exactly_the_property_it_names(mutant):
    exercise = checks.find(mutant.exercise)
    assert exercise.properties[0].name == "the example"
    found = problems(exercise, mutant.candidate)
    if "it was stopped" in found.get(mutant.fails, ""):  # an endless loop ends the whole check
        assert next(iter(found)) == mutant.fails and len(set(found.values())) == 1, found
    else:
        assert list(found) == [mutant.fails], found
    assert "it raised" not in found[mutant.fails]


@pytest.mark.parametrize("mutant", list(one_for_each_property()))
def test_a_mutant_of_a_slow_exercise_fails_its_property(mutant):
    """And has the example. That it has all other properties is a proof."""
    exercise = copy.copy(checks.find(mutant.exercise))
    example, *others = exercise.properties
    exercise.properties = [example, *(each for each in others if each.name == mutant.fails)]
    assert list(problems(exercise, mutant.candidate)) == [mutant.fails]


@pytest.mark.parametrize("solution", unusual.UNUSUAL, ids=lambda each: f"{each.exercise}: {each.candidate.__name__}")
def test_a_right_but_unusual_solution_is_accepted(solution):
    assert problems(checks.find(solution.exercise), solution.candidate) == {}


def test_every_exercise_has_at_least_three_mutants_and_every_property_at_least_one():
    counts = Counter(mutant.exercise for mutant in mutants.MUTANTS)
    assert counts.keys() == checks.EXERCISES.keys()
    assert {name: count for name, count in counts.items() if count < 3} == {}
    needed = {(mutant.exercise, mutant.fails) for mutant in mutants.MUTANTS}
    every = {(exercise.name, prop.name) for exercise in checks.EXERCISES.values() for prop in exercise.properties[1:]}
    assert every == needed


@pytest.mark.parametrize("source", WRITTEN.values(), ids=lambda path: path.stem)
def test_a_lesson_checks_three_to_five_exercises(source):
    here = [e.values[0].name for e in EXERCISES if e.values[1] == source]
    assert 3 <= len(here) <= 5
    text = source.read_text(encoding="utf-8")
    assert [name for name in here if f"check({name})" not in text] == []
