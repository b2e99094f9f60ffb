"""The committed record of kernel and engine tests on an H200: all of them ran, and what a failure would look like."""

import copy
from pathlib import Path

import pytest

from minillm.bench import records
from tools import kernel_tests as record


def test_on_record_everything_ran_on_an_h200_and_every_kernel_keeps_its_bound():
    committed = records.read("h200/kernel-tests")
    assert "H200" in committed["machine"]["gpu"] and len(set(committed["seeds"])) == 3
    ran = {Path(path).name for run in committed["runs"] for path in run["of"]}
    assert ran >= {Path(path).name for path in ("tests/kernels", *record.ENGINE, *record.ALONE, *record.STRESS)}
    assert committed["compute_sanitizer"]["summary"] == ["ERROR SUMMARY: 0 errors"]
    kernels = {row["kernel"].split(",")[0] for row in committed["results"]}
    assert kernels >= {"decode_attention", "prefill_attention", "rms_norm", "sample", "truncate", "small model"}
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
