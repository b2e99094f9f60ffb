"""The committed record of kernel and engine tests on an H200 is complete, and failures are detected."""

import copy
import signal
import subprocess
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


REPORT = """<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0" time="3">
<testcase classname="a" name="fails"><failure>why</failure></testcase><testcase classname="a" name="passes"/>
</testsuite></testsuites>"""


@pytest.mark.parametrize("reports", [True, False])
def test_a_run_that_takes_too_long_says_what_failed_until_then(reports, tmp_path, monkeypatch):
    class Endless:
        """A pytest that would never end; interrupted, it writes its report, if it reports at all."""

        def __init__(self, command, **options):
            self.report = next(word.split("=")[1] for word in command if word.startswith("--junitxml="))
            self.sent = []

        def __enter__(self):
            return self

        def __exit__(self, *error):
            assert self.sent == [signal.SIGINT] + ([] if reports else ["killed"])

        def communicate(self, timeout=None):
            if not self.sent or (not reports and len(self.sent) < 2):
                raise subprocess.TimeoutExpired("pytest", timeout)
            return "some output", ""

        def send_signal(self, number):
            self.sent.append(number)
            if reports:
                Path(self.report).write_text(REPORT)

        def kill(self):
            self.sent.append("killed")

    monkeypatch.setattr(subprocess, "Popen", Endless)
    found = record.pytest(["tests/kernels"], tmp_path / "notes.jsonl", seed=0, within=140)
    assert found["timed_out"] == 140 and not record.clean({"runs": [found]})
    assert found.get("failed") == (["a::fails"] if reports else None)
