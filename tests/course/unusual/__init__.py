"""Right solutions of the exercises that look unlike the lessons': no checker may refuse one of them."""

from collections.abc import Callable
from typing import NamedTuple


class Unusual(NamedTuple):
    exercise: str
    candidate: Callable


UNUSUAL: list[Unusual] = []


def right(exercise: str) -> Callable:
    """Register a function or class as a right solution of `exercise`."""

    def register(candidate: Callable) -> Callable:
        UNUSUAL.append(Unusual(exercise, candidate))
        return candidate

    return register
