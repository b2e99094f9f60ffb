"""The committed record of kernel and engine tests on an H200 is complete, and failures are detected."""

import copy
from pathlib import Path

import pytest

from minillm.bench import records
from tools import kernel_tests as record


def test_the_record_covers_all_tests_on_an_h200_and_every_kernel_keeps_its_bound():
    committed = records.read("h200/kernel-tests")
    assert "H200" in committed["machine"]["gpu"] and len(set(committed["seeds"])) == 3
    ran = {Path(path).name for run in committed["runs"] for path in run["of"]}
    assert ran >= {Path(path).name for path in ("tests/kernels", *record.ENGINE, *record.ALONE, *record.STRESS)}
    assert record.clean(committed), "a test failed"
    assert committed["compute_sanitizer"]["summary"] == ["ERROR SUMMARY: 0 errors"]
    kernels = {row["kernel"].split(",")[0] for row in committed["results"]}
    assert kernels >= {"decode_attention", "prefill_attention", "rms_norm", "sample", "truncate", "small model"}
    assert all(row["largest_error"] <= row["bound"] for row in committed["results"])


@pytest.mark.parametrize("damage", ["failures", "errors", "timed_out", "sanitizer"])
def test_a_failure_in_any_part_is_detected(damage):
    clean = {"runs": [{"failures": 0, "errors": 0}] * 2, "compute_sanitizer": {"ran": False}}
    assert record.clean(clean)
    damaged = copy.deepcopy(clean)
    if damage == "sanitizer":
        damaged["compute_sanitizer"] = {"ran": True, "summary": ["ERROR SUMMARY: 2 errors"]}
    else:
        damaged["runs"][1] = damaged["runs"][1] | {damage: 1}
    assert not record.clean(damaged)
