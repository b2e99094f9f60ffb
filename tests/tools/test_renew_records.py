"""Every committed record of ours has a command that exists today, and says that no file differed from its commit."""

import shlex

import pytest

from minillm.bench import records
from tools import renew_records

# Measured with another engine, with another commit's checkout, by training, or by docs/draw.py; the state machines' run
# of a million steps, by a tool that was renamed since.
OTHERS = {
    *("h200/ceiling-h200", "h200/transformers-h200", "h200/vllm-h200", "h200/vllm-fp8kv-and-families-h200"),
    *("h200/vllm-server-h200", "h200/before-after", "h200/before-after-long", "h200/tiny-gemma-training"),
    *("h100/before-after", "h100/before-after-long", "h100/before-after-silo", "h100/before-after-fp8"),
    *("h200/before-after-fp8-chat", "cpu/before-after-engine"),
    *("cpu/offline", "cpu/timeline", "cpu/state-machine"),
}
# Modules that moved after a record was made: a record keeps the command that made it.
MOVED = {"minillm.course.knee": "minillm.course.lesson_99.knee", "minillm.course.run": "minillm.course.making.run"}
OURS = [(device, name) for device, known in renew_records.RECORDS.items() for name in known]


def test_every_record_can_be_renewed():
    committed = {str(path.relative_to(records.RESULTS).with_suffix("")) for path in records.RESULTS.glob("*/*.json")}
    assert committed == OTHERS | {f"{device}/{name}" for device, name in OURS}


@pytest.mark.parametrize(("device", "name"), OURS, ids=map("/".join, OURS))
def test_a_record_was_made_by_todays_command_on_an_unchanged_checkout(device, name):
    words, record = renew_records.command(device, name), records.read(f"{device}/{name}")
    script = words[1] if words[:2] != ["python", "-m"] else words[2].replace(".", "/") + ".py"
    assert words[0] == "minillm" or (renew_records.ROOT / script).is_file()
    assert ([MOVED.get(word, word) for word in shlex.split(record["command"])], record["dirty"]) == (words, False)


def test_a_failing_command_is_reported_and_leaves_the_record(monkeypatch, capsys, tmp_path):
    ran = []

    def failing(words, **options):
        ran.append(words[1:])
        return type("Done", (), {"returncode": len(ran) - 1})

    monkeypatch.setattr(renew_records.records, "folder", lambda: tmp_path / "cpu")
    monkeypatch.setattr(renew_records.subprocess, "run", failing)
    monkeypatch.setattr("sys.argv", ["renew_records.py", "streaming", "trace-overhead"])
    assert renew_records.main() == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("cpu/streaming") and first.endswith("ok") and second.endswith("FAILED")
    assert ran[0][:2] == ["-m", "minillm.cli"] and ran[1] == renew_records.command("cpu", "trace-overhead")[1:]


def test_an_unknown_record_is_refused_with_the_known_ones(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(renew_records.records, "folder", lambda: tmp_path / "h200")
    monkeypatch.setattr("sys.argv", ["renew_records.py", "starts"])
    with pytest.raises(SystemExit):
        renew_records.main()
    assert "no command for starts on h200; known: ablation, batching" in capsys.readouterr().err
