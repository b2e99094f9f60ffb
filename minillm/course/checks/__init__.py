"""Checkers of exercises: they name the property that fails and hint at the likely mistake.  Lesson 00.

Each lesson's exercises are in a file of their own here. The wrong solutions that a checker must tell apart are kept in
`tests/course/mutants/`.
"""

import inspect
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from minillm.errors import ConfigError
from minillm.overrides import NotSolvedYet


@dataclass(frozen=True)
class Property:
    """Something every right solution does. `holds` gets the candidate; it raises AssertionError or returns False."""

    name: str
    hint: str
    holds: Callable[[Callable], bool | None]


@dataclass(frozen=True)
class Result:
    """One property of one candidate: `problem` is None where it holds."""

    name: str
    problem: str | None


class Exercise:
    """The properties that the learner's function (or class) of this name must have, in the order shown."""

    def __init__(self, name: str):
        if name in EXERCISES:
            raise ConfigError(f"there are two exercises called {name!r}: choose another name for one")
        self.name = name
        self.properties: list[Property] = []
        EXERCISES[name] = self

    def example(self, holds: Callable) -> Callable:
        """What the notebook shows itself; the mistakes worth finding pass it."""
        return self.property("the example", "compare with the example above")(holds)

    def property(self, name: str, hint: str) -> Callable:
        def add(holds: Callable) -> Callable:
            self.properties.append(Property(name, hint, holds))
            return holds

        return add

    def examine(self, candidate: Callable) -> list[Result]:
        """One result for each property. Raises NotSolvedYet for a stub."""
        return [Result(each.name, _problem(each, candidate)) for each in self.properties]


EXERCISES: dict[str, Exercise] = {}


def find(name: str) -> Exercise:
    """The exercise of this name, in whatever lesson. Raises ConfigError."""
    if name not in EXERCISES:
        for module in pkgutil.iter_modules(__path__):
            import_module(f".{module.name}", __name__)
    if name not in EXERCISES:
        raise ConfigError(f"no exercise is called {name!r}; there are: {', '.join(sorted(EXERCISES))}")
    return EXERCISES[name]


def check(candidate: Callable) -> None:
    """Print which properties of the exercise `candidate` has, and a hint for each that it has not."""
    name = candidate.__name__
    exercise = find(name)
    try:
        results = exercise.examine(candidate)
    except NotSolvedYet:
        print(f"{name}: not solved yet. Write it above and run both cells; until then the engine's own is used.")
        return
    print(name)
    for result in results:
        print(f"  {'✓' if result.problem is None else '✗'} {result.name}")
        if result.problem is not None:
            print(*(f"      {line}" for line in result.problem.splitlines()), sep="\n")
    held = sum(result.problem is None for result in results)
    solved = held == len(results)
    print(f"Solved: all {held} hold." if solved else f"{held} of {len(results)} hold.")


def _problem(prop: Property, candidate: Callable) -> str | None:
    try:
        return prop.hint if prop.holds(candidate) is False else None
    except NotSolvedYet:
        raise
    except AssertionError as error:
        said = str(error).strip().split("\n")[0]
        # torch.testing's own first line says no more than that it failed.
        return prop.hint if not said or said.startswith(("Tensor-likes", "Scalars")) else f"{said}\n{prop.hint}"
    except Exception as error:
        place = _line_of(error, candidate)
        return f"it raised {type(error).__name__}: {error}{place}\n{prop.hint}"


def _line_of(error: Exception, candidate: Callable) -> str:
    """Where in the candidate's own source an error arose, if there."""
    try:
        file = inspect.getsourcefile(candidate)
    except TypeError:
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of its cell)" if lines else ""
