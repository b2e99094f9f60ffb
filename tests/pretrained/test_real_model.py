"""Trained models that are on this machine compute and write what transformers does. `minillm download` gets one.

These are proofs: a model of 135 million parameters takes minutes, and tests/model compares small ones of its family.
"""

import pytest

from minillm.pretrained import CATALOG, downloaded
from tools import real_model

PARTS = [name for name in real_model.PARTS if name != "bfloat16"]  # that one only measures
HERE = [name for name, offer in CATALOG.items() if downloaded(offer)]


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize(("pair", "part"), [(n, p) for n in HERE for p in PARTS], indirect=["pair"])


@pytest.fixture(scope="module")
def pair(request):
    return real_model.Pair(downloaded(CATALOG[request.param]))


if HERE:  # without a model there is nothing to collect

    @pytest.mark.proof
    @pytest.mark.real_model
    def test_the_model_does_what_transformers_does(pair, part):
        found = real_model.PARTS[part](pair)
        assert found["differences"] == 0, found
