"""What a report measures unless it is told: less if quick, more with a GPU, never more than the context holds."""

from pathlib import Path

import pytest

from minillm import folders
from minillm.errors import ConfigError, MissingPackage
from minillm.evaluate import tasks
from minillm.model.loader import EMBEDDED
from minillm.report import settings
from minillm.report.settings import check_packages, settle


@pytest.fixture(autouse=True)
def no_mmlu(monkeypatch):
    monkeypatch.setattr(tasks, "mmlu_is_here", lambda: False)


def test_a_quick_report_measures_less():
    for gpu in (True, False):
        quick, whole = (settle(EMBEDDED, 4096, gpu=gpu, quick=each) for each in (True, False))
        assert quick.limit == 100 and quick.tokens and whole.limit is whole.tokens is None
        assert quick.requests < whole.requests and quick.sent < whole.sent and quick.repeat < whole.repeat
        assert quick.scale >= whole.scale and len(quick.versions) == 3 and whole.versions is None


def test_a_quick_report_of_a_slow_model_measures_less_but_never_next_to_nothing():
    def amounts(speed, **given):
        found = settle(EMBEDDED, 4096, gpu=False, quick=True, speed=speed, **given)
        return found.limit, found.tokens, found.requests, found.sent

    assert amounts(None) == amounts(2000.0) == amounts(1e6) == (100, 4096, 16, 12)
    assert amounts(1000.0) == (50, 2048, 8, 6)
    assert amounts(1.0) == (20, 512, 4, 4)
    assert amounts(1.0, limit=70, requests=9) == (70, 512, 9, 9)
    assert settle(EMBEDDED, 4096, gpu=False, speed=1.0) == settle(EMBEDDED, 4096, gpu=False)


def test_what_is_given_replaces_the_default():
    found = settle(
        EMBEDDED, 2048, gpu=False, quick=True, versions=["int4", "int4"], task="mmlu_law", limit=7, scale=9,
        requests=5, served=["int4"], price=0.0,
    )  # fmt: skip
    assert (found.versions, found.served, found.task) == (("int4",), ("int4",), "mmlu_law")
    assert (found.limit, found.scale, found.requests, found.sent, found.price) == (7, 9, 5, 5, 0.0)


def test_requests_fit_into_a_short_context():
    assert settle(EMBEDDED, 256, gpu=True).scale == 11
    assert settle(EMBEDDED, 8192, gpu=True).scale == 1
    with pytest.raises(ConfigError, match="--scale 10 makes requests of 256 tokens, and the context has 256: give 11"):
        settle(EMBEDDED, 256, gpu=True, scale=10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"price": -1.0}, "--gpu-price must be"),
        ({"price": float("nan")}, "--gpu-price must be"),
        ({"requests": 0}, "--requests must be a whole number from 1, not 0"),
    ],
)
def test_wrong_values_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        settle(EMBEDDED, 2048, gpu=False, **given)


def test_mmlu_is_asked_if_it_is_here_and_the_model_is_not_the_embedded_one(monkeypatch):
    assert settle(Path("other"), 2048, gpu=False).task == "isles"
    monkeypatch.setattr(tasks, "mmlu_is_here", lambda: True)
    assert settle(Path("other"), 2048, gpu=False).task == "mmlu"
    assert settle(EMBEDDED, 2048, gpu=False).task == "isles"


def test_missing_packages_are_all_named_with_the_extra_that_has_them(monkeypatch):
    check_packages()
    monkeypatch.setattr(
        settings.importlib.util, "find_spec", lambda name: None if name in ("aiohttp", "datasets") else 1
    )
    monkeypatch.setattr(folders, "PACKAGE", Path("/nowhere/minillm"))
    with pytest.raises(
        MissingPackage, match=r"datasets \(questions\), aiohttp \(the load generator\).*pip install 'minillm\[report\]'"
    ):
        check_packages()
