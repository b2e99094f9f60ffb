"""Lesson 99: Gemma 2B's shape runs on a CPU only where there is room for it."""

import json

import pytest
import torch

from minillm.advice.sizing import parameters
from minillm.course.lesson_99 import large_model
from minillm.errors import ConfigError
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED


@pytest.mark.parametrize(("free", "fits"), [(11.9e9, False), (12e9, True), (None, True)])
def test_it_needs_twelve_gigabytes(monkeypatch, free, fits):
    monkeypatch.setattr(large_model, "free_memory", lambda: free)
    assert (large_model.problem() is None) == fits


def test_too_little_memory_is_refused_before_anything_is_measured_or_loaded(monkeypatch):
    monkeypatch.setattr(large_model, "free_memory", lambda: 3.25e9)
    monkeypatch.setattr(large_model, "LLM", None)
    monkeypatch.setattr(large_model.roofline, "limits", None)
    with pytest.raises(ConfigError, match="needs 12 GB of free memory, and 3.2 GB are free: close other programs"):
        large_model.decode_step()


def test_a_step_of_a_small_model_has_its_work_and_leaves_the_threads_as_they_were(monkeypatch):
    monkeypatch.setattr(large_model, "free_memory", lambda: 12e9)
    monkeypatch.setattr(large_model, "READ", 1 << 20)
    monkeypatch.setattr(large_model.cores, "available", lambda: 2)
    real, seen = large_model.roofline.limits, []

    def limits(*args):
        seen.append(torch.get_num_threads())
        return real(*args)

    monkeypatch.setattr(large_model.roofline, "limits", limits)
    before = torch.get_num_threads()
    step, found = large_model.decode_step(str(EMBEDDED))
    assert seen == [2] and torch.get_num_threads() == before
    assert step.tokens == 1 and step.seconds > 0 and step.floor(found) > 0
    assert 22.2e6 < step.bytes < 22.4e6, "22.3 MB of weights in float32, and few keys and values"


def test_what_the_lesson_says_of_its_size_holds():
    count = parameters(PRESETS["gemma-2b"])
    assert round(4 * count / 1e9) == large_model.WEIGHTS_GB and round(count / 1e9, 1) == 2.5


def test_the_record_can_be_read_as_what_was_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(large_model, "free_memory", lambda: 12e9)
    monkeypatch.setattr(large_model, "READ", 1 << 20)
    monkeypatch.setattr(large_model.decode_step, "__defaults__", (str(EMBEDDED),))
    path = tmp_path / "large-model.json"
    large_model.main(["--json", str(path)])
    record = json.loads(path.read_text())
    monkeypatch.setattr(large_model.records, "read", lambda name: record)
    step, limits = large_model.recorded()
    assert step.name == "decode, 1 at once" and limits.bytes_per_s == record["bytes_per_s"]
    assert record["dtype"] == "float32" and str(record["machine"]["cores"]) in large_model.where()
    said = f"{large_model.line((step, limits))}; took {step.seconds:.2f} s"
    assert said.startswith("0.0 GB at") and said in capsys.readouterr().out
