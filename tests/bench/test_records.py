"""A record states what was measured, on which machine, at which commit and by which command."""

import json
import shutil
import subprocess
from functools import partial

import pytest

from minillm.errors import ConfigError

pytest.importorskip("fastapi", reason="a record of the load generator needs the server, which needs fastapi")

from minillm.bench import ablation, batching, breakdown, offline, records, roofline, serve
from minillm.server import running
from minillm.tuning import build


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    return tmp_path


def test_a_record_states_its_origin():
    content = records.record([{"engine": "minillm"}], records.begin(), command="minillm bench offline")
    assert content["command"] == "minillm bench offline"
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["cpu"] and content["machine"]["python"].startswith("3.")
    assert content["versions"]["torch"]
    assert content["date"].endswith("+00:00")
    assert json.loads(json.dumps(content)) == content


MEASUREMENTS = {
    "offline": offline.run,
    "batching": batching.run,
    "ablation": ablation.run,
    "roofline": roofline.run,
    "breakdown": partial(breakdown.run, workload=["single"]),
    "build": build.run,
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_an_unwritable_record_is_reported_before_the_measurement(name, tmp_path, monkeypatch):
    def starts(*_, **__):
        raise AssertionError("it measures already")

    monkeypatch.setattr("minillm.engine.llm.LLM.__init__", starts)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="results.json cannot be written"):
        MEASUREMENTS[name](json_path=tmp_path / "file" / "results.json")


def test_an_unwritable_plan_is_reported_before_the_measurement(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"my.plan cannot be written"):
        build.run(out=tmp_path / "file" / "my.plan")


def test_the_commit_is_the_one_in_the_environment_or_the_checkouts(monkeypatch):
    monkeypatch.delenv("MINILLM_COMMIT", raising=False)
    found = records.commit()
    git = shutil.which("git") and ["git", "-C", records.PACKAGE, "rev-parse", "HEAD"]
    known = git and subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert found["commit"] == (known or None) and found["dirty"] in ((True, False) if known else (None,))
    monkeypatch.setenv("MINILLM_COMMIT", "abc")
    assert records.commit() == {"commit": "abc", "dirty": False}
    monkeypatch.setenv("MINILLM_COMMIT", "abc+")
    assert records.commit() == {"commit": "abc", "dirty": True}
    monkeypatch.delenv("MINILLM_COMMIT")
    monkeypatch.setattr(records, "_output", lambda *command: None)
    assert records.commit() == {"commit": None, "dirty": None}


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["{root}/tools/kernel_tests.py", "--record", "/tmp/a.json"], "python tools/kernel_tests.py --record a.json"),
        (["{root}/minillm/cli/__main__.py", "bench", "offline"], "minillm bench offline"),
        (["{root}/minillm/__main__.py", "report"], "minillm report"),
        (["/usr/bin/minillm", "eval"], "minillm eval"),
    ],
)
def test_a_recorded_command_can_be_run_from_the_projects_root(words, command, monkeypatch):
    monkeypatch.setattr("sys.argv", [word.format(root=records.PACKAGE.parent) for word in words])
    assert records.record([], records.begin())["command"] == command


def test_uncommitted_changes_are_recorded(monkeypatch):
    answers = {"rev-parse": "a" * 40, "status": " M minillm/engine/engine.py"}
    monkeypatch.setattr(records, "_output", lambda *command: answers[command[3]])
    assert records.commit() == {"commit": "a" * 40, "dirty": True}


@pytest.mark.parametrize("command", ["offline", "serve"])
def test_a_commit_during_a_run_does_not_change_its_record(monkeypatch, model_directory, command):
    """The code that ran is the code at the start."""
    monkeypatch.setattr(records, "commit", lambda: {"commit": "a" * 40, "dirty": False})
    options = {"workload": "single", "scale": 32, "quiet": True}
    measured = serve.summary if command == "serve" else offline._alternate

    def while_others_commit(*args):
        monkeypatch.setattr(records, "commit", lambda: {"commit": "b" * 40, "dirty": True})
        return measured(*args)

    if command == "offline":
        monkeypatch.setattr(offline, "_alternate", while_others_commit)
        content = offline.run(model_directory, repeat=1, load_format="dummy", device="cpu", **options)
    else:
        monkeypatch.setattr(serve, "summary", while_others_commit)
        with running(model_directory, load_format="dummy", device="cpu") as server:
            content = serve.run(server.url, **options)
    assert (content["commit"], content["dirty"]) == ("a" * 40, False)


def test_a_bare_name_is_saved_with_the_committed_records(results, monkeypatch):
    for gpu, device in ((None, "cpu"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")):
        monkeypatch.setattr(records, "machine", lambda gpu=gpu: {"gpu": gpu})
        path = records.write({"results": [gpu]}, "offline")
        assert path == results / device / "offline.json"
        assert records.read(f"{device}/offline") == records.read(path) == {"results": [gpu]}


def test_a_missing_record_error_lists_the_existing_ones(results):
    (results / "cpu").mkdir()
    (results / "cpu" / "offline.json").write_text("{}")
    with pytest.raises(ConfigError, match="no record cpu/offlin; committed ones: cpu/offline"):
        records.read("cpu/offlin")


def test_random_weights_are_reported_even_if_only_the_command_shows_them():
    assert records.model_of(records.read("h200/batching")) == "gemma-2b, random weights"
    assert records.model_of(records.read("h200/start")) == "gemma-2b, random weights"
    assert records.model_of(records.read("cpu/batching")) == "tiny-gemma"
    for given in ("--load-format=dummy", "--load-format dummy"):
        record = {"model": records.model_name("m", random_weights=True), "command": f"minillm bench batching {given}"}
        assert records.model_of(record) == records.model_of(record | {"model": "m"}) == "m, random weights"
