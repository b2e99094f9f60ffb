"""Randomized tests draw the same examples in every run, whichever tests run before."""

import importlib.util
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chance import SEED


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
