"""Checkers of exercises: each names the property that fails and hints at the likely mistake.  Lesson 00.

A lesson's exercises are in files of its folder whose names begin with `checks`. `tests/course/mutants/` has the wrong
solutions that each checker must detect.
"""

import functools
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType

from minillm.errors import ConfigError
from minillm.overrides import NotSolvedYet

from .stubs import solved
from .time_limit import TookTooLong, time_limit


@dataclass(frozen=True)
class Property:
    """A property of all correct solutions. `holds` gets a candidate; it returns False or raises AssertionError.

    slow: what a candidate may do that ends, but too late.
    """

    name: str
    hint: str
    holds: Callable[[Callable], bool | None]
    slow: str = ""


class Explained(AssertionError):
    """Says all that is wrong with a result: no hint follows.

    Raised from an exception of the candidate, it is the hint about that one.
    """


@dataclass(frozen=True)
class Result:
    """The check of one property on one candidate.

    problem: None if it holds. needs: the stub that it could not be checked without, as `Class.method`.
    """

    name: str
    problem: str | None
    needs: str | None = None


class Exercise:
    """The properties that a learner's function or class of this name must have, in the order shown.

    returns: whether the function has a result; a solution that returns None is then told of its missing `return`.
    instead: what the lesson uses until the exercise is written, if the text does not say it.
    seconds: the CPU time that the check of one property may use; a candidate that takes longer is assumed never to end.
    """

    def __init__(self, name: str, *, returns: bool = True, instead: str = "", seconds: float = 120.0):
        if name in EXERCISES:
            raise ConfigError(f"there are two exercises called {name!r}: choose another name for one")
        self.name, self.returns, self.instead, self.seconds = name, returns, instead, seconds
        self.properties: list[Property] = []
        EXERCISES[name] = self

    def example(self, holds: Callable) -> Callable:
        """A decorator that adds the notebook's own example as a property, which wrong solutions may pass."""
        return self.property("the example", "compare with the example above")(holds)

    def property(self, name: str, hint: str, slow: str = "") -> Callable:
        """A decorator that adds a property; hint: shown if it does not hold. slow: as in `Property`."""

        def add(holds: Callable) -> Callable:
            self.properties.append(Property(name, hint, holds, slow))
            return holds

        return add

    def examine(self, candidate: Callable) -> list[Result]:
        """Check all properties. Raises NotSolvedYet for a stub.

        Of a class with some methods left to write, the properties that need none of these are checked; if there are
        none, the class raises NotSolvedYet too. After a property that takes too long the others are not checked.
        """
        results, too_long = [], ""
        for each in self.properties:
            if too_long:
                results.append(Result(each.name, too_long))
                continue
            returned: list = []
            watched = _watched(candidate, returned) if self.returns else candidate
            try:
                with time_limit(self.seconds):
                    problem = _problem(each, watched, candidate)
            except TookTooLong:
                cause = f"either a loop does not end, or {each.slow}" if each.slow else "does each of its loops end?"
                problem = too_long = f"{STOPPED} after {self.seconds:g} seconds: {cause}"
            except NotSolvedYet as stub:
                if not isinstance(candidate, type):
                    raise
                results.append(Result(each.name, "not checked yet", needs=str(stub) or candidate.__name__))
                continue
            if problem is not None and returned and all(value is None for value in returned):
                problem = "it returned None: does every path through it end in `return`?"
            results.append(Result(each.name, problem))
        if results and all(result.needs for result in results):
            raise NotSolvedYet(results[0].needs)
        return results


EXERCISES: dict[str, Exercise] = {}
COURSE = Path(__file__).resolve().parents[1]
STOPPED = "it was stopped"  # begins the problem of a candidate that takes too long


def every() -> dict[str, Exercise]:
    """The exercises of all lessons by name, in the order of their lessons."""
    for path in sorted(COURSE.glob("lesson_*/checks*.py")):
        import_module(f"minillm.course.{path.parent.name}.{path.stem}")
    return EXERCISES


def find(name: str) -> Exercise:
    """The exercise of this name, from any lesson. Raises ConfigError."""
    if name not in EXERCISES and name not in every():
        raise ConfigError(f"no exercise is called {name!r}; there are: {', '.join(sorted(EXERCISES))}")
    return EXERCISES[name]


def check(candidate: Callable) -> None:
    """Print which properties of its exercise `candidate` has, and explain the first failure.  Lesson 00.

    One mistake often breaks several properties, and their hints are about others, so these are only named.
    """
    name = getattr(candidate, "__name__", repr(candidate))
    try:
        exercise = find(name)
    except ConfigError:  # such as `solution = specification`
        print(f"{name} is not the name of an exercise: write yours with `def`, under the name that its cell gives it.")
        return
    try:
        results = exercise.examine(candidate)
    except NotSolvedYet:
        meanwhile = f"; until then {exercise.instead} is used" if exercise.instead else ""
        print(f"{name}: not solved yet. Write it above and run both cells{meanwhile}.")
        return
    print(name)
    failed = [result for result in results if result.problem and not result.needs]
    held = sum(result.problem is None for result in results)
    for result in results:
        if result.needs:
            print(f"  – {result.name} (needs {result.needs})")
            continue
        print(f"  {'✓' if result.problem is None else '✗'} {result.name}")
        if result in failed[:1]:
            print(*(f"      {line}" for line in str(result.problem).splitlines()), sep="\n")
    if held == len(results) and not solved(candidate):  # the line is there, but never reached
        print(f"All {held} hold. Now delete the line `raise NotSolvedYet`: as long as it is there, this is not solved.")
    elif held == len(results):
        print(f"Solved: all {held} hold.")
    elif left := dict.fromkeys(result.needs for result in results if result.needs):
        print(f"{held} of {len(results)} hold so far. Still to write: {', '.join(map(str, left))}.")
    else:
        more = " Start with the first ✗: the others may have the same cause." if len(results) - held > 1 else ""
        print(f"{held} of {len(results)} hold.{more}")


def a_type(value) -> str:
    """The name of a value's type after "a" or "an", for messages."""
    name = type(value).__name__
    return f"{'an' if name.lower().startswith((*'aeio', 'nd')) else 'a'} {name}"


def assert_int(found, given: str) -> None:
    """Raise Explained unless a count has an integer type, NumPy's included, as its exercise says."""
    if not isinstance(found, Integral):
        way_out = ": wrap it in `int()`" if isinstance(found, Real) and float(found).is_integer() else ""
        raise Explained(f"{given}: expected an int, got {found!r}, {a_type(found)}{way_out}")


def assert_list(found, of: str) -> None:
    """Raise Explained unless a result is a list, as its exercise says. of: what it is a list of."""
    if not isinstance(found, list):
        way_out = ": `.tolist()` makes a list of it" if hasattr(found, "tolist") else ""
        raise Explained(f"expected a list of {of}, got {a_type(found)}{way_out}")


def _watched(candidate: Callable, returned: list) -> Callable:
    """The candidate; if it is a function, its results are appended to `returned`."""
    if not isinstance(candidate, FunctionType):
        return candidate

    @functools.wraps(candidate)
    def watched(*args, **kwargs):
        returned.append(candidate(*args, **kwargs))
        return returned[-1]

    return watched


def _problem(prop: Property, watched: Callable, candidate: Callable) -> str | None:
    try:
        return prop.hint if prop.holds(watched) is False else None
    except NotSolvedYet:
        raise
    except Explained as error:
        cause = error.__cause__
        return f"{_raised(cause, candidate)}\n{error}" if cause else str(error)
    except AssertionError as error:
        if _raised_by(candidate, error, prop):
            return f"{_raised(error, candidate)}\n{prop.hint}"
        said = str(error).strip().split("\n")[0]
        # The first line of torch.testing's messages only says that it failed.
        return prop.hint if not said or said.startswith(("Tensor-likes", "Scalars")) else f"{said}\n{prop.hint}"
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "InterpreterError" and isinstance(error.__cause__, Exception):
            return _raised(_innermost(error), candidate)  # inside a Triton kernel: no property's hint is about it
        return f"{_raised(error, candidate)}\n{prop.hint}"


def _raised(error: BaseException, candidate: Callable) -> str:
    return f"it raised {type(error).__name__}: {error}{_line_of(error, candidate)}"


def _raised_by(candidate: Callable, error: Exception, checker: Property) -> bool:
    """Return whether the candidate's own code raised an error, and not its checker or what that passed in."""
    return traceback.extract_tb(error.__traceback__)[-1].filename in _files(candidate) - _files(checker.holds)


def _files(candidate: Callable) -> set[str]:
    """The files of a function's code, or of a class's methods and properties; a cell of a notebook counts as one."""
    parts = vars(candidate).values() if isinstance(candidate, type) else [inspect.unwrap(candidate)]
    inner = (getattr(part, "fget", None) or getattr(part, "__func__", None) or part for part in parts)
    return {code.co_filename for part in inner if (code := getattr(part, "__code__", None))}


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _line_of(error: BaseException, candidate: Callable) -> str:
    """The line of the candidate's source that raised an error, in words, or nothing."""
    files = _files(candidate)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f" (line {lines[-1]} of its cell)" if lines else ""
