"""Randomized tests draw the same examples in every run, whichever tests run before."""

import importlib.util
import random
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chance import SEED
from tests.proofs import pairwise


def drawn() -> list:
    """The examples that Hypothesis tries outside `make explore`."""
    seen = []

    @settings(settings.get_profile("fixed"), max_examples=300)
    @given(st.integers(), st.text())
    def collect(number, text):
        seen.append((number, text))

    collect()
    return seen


def test_examples_do_not_depend_on_the_modules_imported_so_far(tmp_path, monkeypatch):
    before = drawn()
    path = tmp_path / "constants.py"
    path.write_text(f"NUMBERS = {[n * 7919 for n in range(1000, 1300)]}\nWORDS = {[f'word {n}' for n in range(300)]}\n")
    spec = importlib.util.spec_from_file_location("constants", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "constants", module)
    assert drawn() == before
    assert len(set(before)) > 100


@pytest.mark.parametrize("time", ["first", "second"])
def test_each_test_starts_from_the_same_random_state(time):
    random_numbers = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(SEED), np.random.seed(SEED), torch.manual_seed(SEED)
    assert random_numbers == (random.random(), np.random.rand(), torch.rand(()).item())


def test_of_a_matrix_all_pairs_of_values_occur_outside_the_proofs():
    axes = {"a": range(4), "b, c": [(1, 2), (3, 4)], "d": {"one": 1.0, "two": 2.0}, "e": [5, 6]}
    cases = pairwise(axes).args[1]
    assert len(cases) == len({case.values for case in cases}) == 4 * 2 * 2 * 2
    chosen = [case.values for case in cases if not case.marks]
    assert 8 <= len(chosen) <= 10
    columns = list(zip(*((a, (b, c), d, e) for a, b, c, d, e in chosen), strict=True))
    for one, other in combinations(columns, 2):
        assert len(set(zip(one, other, strict=True))) == len(set(one)) * len(set(other))
    assert [len(set(column)) for column in columns] == [4, 2, 2, 2]
