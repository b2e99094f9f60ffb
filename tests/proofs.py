"""Long tests: what `make test` runs of a matrix of cases, and what only `make proofs` runs."""

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest


def only_in_proofs(*cases: Any) -> list:
    """Further values of a parametrized test, or tuples of several, that only `make proofs` runs."""
    params = [each if isinstance(each, tuple) else (each,) for each in cases]
    return [pytest.param(*values, marks=pytest.mark.proof) for values in params]


def pairwise(axes: Mapping[str, Iterable | Mapping[str, Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by every combination of these values; `make test` runs so many that all pairs occur.

    axes: the values of each argument, or of several ("rows, columns") as tuples; a mapping names them. A fault that
    two arguments show together is noticed without the other combinations, which have the marker `proof`.
    """
    named = [each if isinstance(each, Mapping) else {_name(value): value for value in each} for each in axes.values()]
    cases = list(product(*named))
    left = {pair for case in cases for pair in _pairs(case)}
    chosen = set()
    while left:
        chosen.add(best := max(cases, key=lambda case: len(left & _pairs(case))))
        left -= _pairs(best)
    params = []
    for case in cases:
        values = []
        for names, known, name in zip(axes, named, case, strict=True):
            values += known[name] if "," in names else [known[name]]
        params.append(pytest.param(*values, id="-".join(case), marks=() if case in chosen else pytest.mark.proof))
    return pytest.mark.parametrize(", ".join(axes), params)


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _pairs(case: tuple[str, ...]) -> set:
    return set(combinations(enumerate(case), 2))
