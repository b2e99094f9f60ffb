"""The registry of references: what each exercise's solution is compared with in `test_solutions.py`."""

from collections.abc import Callable

REFERENCES: dict[str, tuple[Callable, int]] = {}


def against(exercise: str, cases: int = 20) -> Callable:
    """Register a function(solution, rng) that draws one case and compares."""

    def register(compare: Callable) -> Callable:
        REFERENCES[exercise] = compare, cases
        return compare

    return register
