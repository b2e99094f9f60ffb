"""Wrong solutions (mutants) of the exercises: each is plausible and fails exactly the one property that it names."""

from collections.abc import Callable
from typing import NamedTuple


class Mutant(NamedTuple):
    exercise: str
    fails: str
    candidate: Callable


MUTANTS: list[Mutant] = []


def wrong(exercise: str, fails: str) -> Callable:
    """Register a function or class as a wrong solution of `exercise` that fails the property `fails`."""

    def register(candidate: Callable) -> Callable:
        MUTANTS.append(Mutant(exercise, fails, candidate))
        return candidate

    return register
