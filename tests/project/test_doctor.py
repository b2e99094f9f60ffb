"""`minillm doctor` says what runs here and how to fix what does not."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from minillm import folders
from minillm.course import doctor
from minillm.course.doctor import Finding

EVERYTHING = [
    Finding("Python", "3.11"),
    Finding("triton", "3.7.1"),
    Finding("GPU", "a GPU"),
    Finding("Gemma 2B", "somewhere"),
]


def without(name: str, state: str = "missing") -> list[Finding]:
    return [Finding(f.name, f.found, state, "do this") if f.name == name else f for f in EVERYTHING]


@pytest.mark.parametrize(
    ("findings", "tier"),
    [
        (EVERYTHING, "weights"),
        (without("Gemma 2B"), "gpu"),
        (without("GPU"), "cpu"),
        (without("triton"), "cpu"),
        (without("Python", "FAIL"), "none"),
    ],
)
def test_the_tier_is_the_highest_one_that_runs(findings, tier):
    assert doctor.tier(findings) == tier


def test_each_missing_component_is_listed_with_its_fix():
    report = doctor.report(without("Gemma 2B"))
    assert "Gemma 2B: do this" in report
    assert report.endswith(doctor.TIERS["gpu"])


def test_missing_optional_components_are_not_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: without("GPU"))
    assert doctor.main() == 0
    monkeypatch.setattr(doctor, "examine", lambda: without("Python", "FAIL"))
    assert doctor.main() == 1
    assert "To fix" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("total", "available", "used", "state"),
    [
        (2, 2, 0.1, "ok"),
        (2, 2, 0.3, "busy"),
        (1, 1, 0.5, "busy"),
        (16, 16, 2.0, "ok"),  # steps with 14 threads are hardly slower
        (16, 16, 6.0, "busy"),
        (64, 2, 30.0, "ok"),  # a container on a large machine: two cores are all that it may use
        (64, 2, 63.5, "busy"),
    ],
)
def test_a_machine_is_busy_if_steps_are_slower_than_alone(total, available, used, state, monkeypatch):
    class Others:
        def measure(self):
            return used

    monkeypatch.setattr(doctor, "LOAD_SECONDS", 0)
    monkeypatch.setattr(doctor, "OtherPrograms", Others)
    monkeypatch.setattr(doctor.cores, "allowed", lambda: set(range(total)))
    monkeypatch.setattr(doctor.cores, "available", lambda: available)
    found = doctor._load()
    assert (found.state, found.found) == (state, f"other programs use {used:.1f} of {total} cores")


def pretend_version(monkeypatch, package: str, version: str | None):
    real = metadata.version

    def pretend(name):
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", pretend)


@pytest.mark.parametrize("version", [None, "2.4.0", "3.0.0"])
def test_a_missing_or_unsupported_torch_fails_with_a_fix(monkeypatch, version):
    pretend_version(monkeypatch, "torch", version)
    finding = next(each for each in doctor.examine() if each.name == "torch")
    assert finding.state == "FAIL"
    assert finding.fix


def test_a_torch_that_cannot_be_imported_fails_with_the_reason(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", broken)
    findings = {each.name: each for each in doctor.examine()}
    assert findings["torch"].state == "FAIL"
    assert "libcudart" in findings["torch"].found
    assert findings["GPU"].state == "missing"


def test_a_missing_optional_package_names_the_extra_that_brings_it(monkeypatch):
    pretend_version(monkeypatch, "fastapi", None)
    monkeypatch.setattr(folders, "PACKAGE", Path("/nowhere/minillm"))
    finding = next(each for each in doctor.examine() if each.name == "serve")
    assert finding.state == "missing"
    assert "fastapi" in finding.found
    assert finding.fix == "pip install 'minillm[serve]'"


def test_an_uninstalled_checkout_reads_pyproject(monkeypatch):
    installed = [str(line.name) for line in doctor.declared()], [line.name for line in doctor.declared("serve")]

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert ([line.name for line in doctor.declared()], [line.name for line in doctor.declared("serve")]) == installed


def test_gemma_is_found_in_the_cache_or_at_minillm_gemma(monkeypatch, tmp_path):
    monkeypatch.delenv("MINILLM_GEMMA", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert doctor.gemma_directory() is None
    snapshot = tmp_path / "models--google--gemma-2b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert doctor.gemma_directory() is None, "a snapshot without weights is an interrupted download"
    (snapshot / "model.safetensors").write_bytes(b"")
    assert doctor.gemma_directory() == snapshot
    monkeypatch.setenv("MINILLM_GEMMA", str(tmp_path / "elsewhere"))
    assert doctor.gemma_directory() is None


@pytest.mark.parametrize(("gpu", "triton"), [("ok", "ok"), ("missing", "ok"), ("ok", "missing")])
def test_gemma_is_recommended_only_where_lessons_would_run_it(monkeypatch, tmp_path, gpu, triton):
    monkeypatch.delenv("MINILLM_GEMMA", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "_cuda", lambda: Finding("GPU", "a GPU", gpu))
    monkeypatch.setattr(doctor, "_triton", lambda: Finding("triton", "a version", triton))
    (finding,) = (each for each in doctor.examine() if each.name == "Gemma 2B")
    assert finding.state == "missing"
    if gpu == triton == "ok":
        assert re.search("license.*`hf auth login`.*`hf download google/gemma-2b-it`", finding.fix)
    else:
        assert not finding.fix and "on a GPU only" in finding.found
    monkeypatch.setenv("MINILLM_GEMMA", str(tmp_path / "elsewhere"))
    (finding,) = (each for each in doctor.examine() if each.name == "Gemma 2B")
    assert "config.json" in finding.fix


def test_this_machine_meets_the_minimum():
    findings = doctor.examine()
    assert doctor.tier(findings) != "none", doctor.report(findings)


def test_a_checkout_is_installed_by_its_own_command(monkeypatch, tmp_path):
    """pip would take another project called minillm from its index."""
    assert folders.how_to_install("minillm[serve]") == "make setup"
    monkeypatch.setattr(folders, "PACKAGE", tmp_path / "minillm")
    assert folders.how_to_install("minillm[serve]", "torch") == "pip install 'minillm[serve]' 'torch'"
