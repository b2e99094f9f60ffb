"""The committed record of the kernel and engine tests on an H200 tells of no failure, and could."""

import copy

import pytest

from minillm.bench import records
from tests.kernels import record


@pytest.fixture
def committed() -> dict:
    return records.read("h200/kernel-tests")


def test_on_record_no_test_failed_on_an_h200(committed):
    assert record.clean(committed), [run.get("failed", run) for run in committed["runs"]]
    ran = {path for run in committed["runs"] for path in run["of"]}
    assert ran >= {"tests/kernels", *record.ENGINE, *record.ALONE, *record.STRESS}
    assert committed["compute_sanitizer"]["ran"] and committed["results"]
    assert all(row["largest_error"] <= row["bound"] for row in committed["results"])


@pytest.mark.parametrize("spoil", ["failures", "errors", "timed_out", "sanitizer"])
def test_a_failure_anywhere_is_seen(spoil):
    clean = {"runs": [{"failures": 0, "errors": 0}] * 2, "compute_sanitizer": {"ran": False}}
    assert record.clean(clean)
    spoilt = copy.deepcopy(clean)
    if spoil == "sanitizer":
        spoilt["compute_sanitizer"] = {"ran": True, "summary": ["ERROR SUMMARY: 2 errors"]}
    else:
        spoilt["runs"][1] = spoilt["runs"][1] | {spoil: 1}
    assert not record.clean(spoilt)
