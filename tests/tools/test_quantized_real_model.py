"""tools/quantized_real_model.py measures every method on the embedded model, on a few windows."""

import json
import math

import pytest
import torch

from minillm.bench.workloads import Workload
from minillm.calibration.names import named
from minillm.folders import DATA
from tools import quantized_real_model


def test_prose_has_paragraphs_and_nothing_else(tmp_path, monkeypatch):
    words = "word " * 30
    lesson = f"# %% [markdown]\n# ## Heading\n#\n# A **bold** [link](there) `x` {words}\n#\n# | a | {words} |\n"
    (tmp_path / "a.py").write_text(lesson + f"\n# %%\nx = 1  # {words}\n", encoding="utf-8")
    (tmp_path / "b.md").write_text(f"```\n{words}\n```\n\n* {words}\n\nShort.\n\nB {words}$x$\n\nC {words}", "utf-8")
    monkeypatch.setattr(quantized_real_model, "ROOT", tmp_path)
    plain = words.strip()
    assert quantized_real_model.prose(["*.py", "*.md"]) == f"A bold link x {plain}\n\nC {plain}"


def test_the_two_texts_have_no_file_in_common():
    texts = (quantized_real_model.EVALUATION, quantized_real_model.CALIBRATION)
    first, second = ({each for one in text for each in quantized_real_model.ROOT.glob(one)} for text in texts)
    assert first and second and not first & second


def test_windows_are_spread_and_do_not_overlap():
    ids = list(range(quantized_real_model.WINDOW * 7 + 3))
    windows = quantized_real_model.spread(ids, 3)
    assert [window[0] // quantized_real_model.WINDOW for window in windows] == [0, 2, 4]
    assert all(window == list(range(window[0], window[0] + quantized_real_model.WINDOW)) for window in windows)
    with pytest.raises(SystemExit, match="7 windows"):
        quantized_real_model.spread(ids, 8)


def test_the_interval_is_that_of_the_mean():
    mean, low, high = quantized_real_model.interval([1.0, 2.0, 3.0, 6.0])
    half = 1.959964 * math.sqrt(14 / 3) / 2  # squared distances from 3: 4 + 1 + 0 + 9, over 3
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - half, 3.0 + half))


def test_every_name_is_a_method_and_every_timed_one_is_measured():
    for name in quantized_real_model.METHODS:
        named(name)
    assert set(quantized_real_model.TIMED) <= set(quantized_real_model.METHODS)


def test_it_measures_methods_and_caches_and_writes_a_record(tmp_path, monkeypatch):
    chosen = ("int8", "int4-g32", "gptq", "w8a8-static")
    monkeypatch.setattr(quantized_real_model, "METHODS", chosen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(quantized_real_model, "WINDOW", 128)
    record = tmp_path / "record.json"
    words = ["quantized_real_model.py", str(DATA / "tiny-gemma"), "--quick", "--record", str(record)]
    monkeypatch.setattr("sys.argv", words)
    assert quantized_real_model.main() == 0
    found = json.loads(record.read_text(encoding="utf-8"))
    rows = {row["quantization"]: row for row in found["results"]}
    caches = (*quantized_real_model.CACHES, *quantized_real_model.SMALL_CACHES)
    assert list(rows) == ["stored", "bfloat16", *chosen, *caches]
    assert rows["stored"]["kl"] == rows["stored"]["perplexity_loss"] == 0
    assert 0 < rows["bfloat16"]["kl"] < rows["int8"]["kl"] < rows["int4-g32"]["kl"]
    assert rows["cache-int8"]["kl"] < rows["cache-4"]["kl"] < rows["cache-2"]["kl"]
    assert [rows[name]["simulated"] for name in ("gptq", "cache-int8", "cache-4")] == [False, False, True]
    for row in rows.values():
        low, high = row["kl_interval"]
        assert low <= row["kl"] <= high and row["requests"] == found["windows"] == 2
    assert rows["int4-g32"]["bits_per_weight"] == 4.5  # a code, and 16 bits for each 32
    assert rows["int4-g32"]["code_bytes"] == 8 * rows["int4-g32"]["scale_bytes"]
    assert (rows["gptq"]["calibration_rows"], rows["int8"]["calibration_rows"]) == (2, 0)
    assert found["rounded"] == "" and found["text_sha256"] != found["calibration_sha256"]


def test_a_method_that_fails_leaves_the_other_rows(tmp_path, monkeypatch, capsys):
    record = tmp_path / "record.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(quantized_real_model, "WINDOW", 128)
    words = [str(DATA / "tiny-gemma"), "--quick", "--only", "int4-g48", "--only", "int8", "--record", str(record)]
    monkeypatch.setattr("sys.argv", ["quantized_real_model.py", *words])
    assert quantized_real_model.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not measured: int4-g48"
    rows = json.loads(record.read_text(encoding="utf-8"))["results"]
    assert [row["quantization"] for row in rows] == ["stored", "bfloat16", "int8"]


def test_speed_is_measured_in_the_engine(monkeypatch):
    monkeypatch.setattr(quantized_real_model, "SPEEDS", (2,))
    monkeypatch.setattr(quantized_real_model, "REPEAT", 1)
    short = Workload("single_2_3_x1", 1, (2, 2), (3, 3))
    monkeypatch.setattr(quantized_real_model.workloads, "WORKLOADS", {short.name: short})
    run = quantized_real_model.Run.__new__(quantized_real_model.Run)
    run.results, run.save = [], lambda results: None
    run.speed("cache-int8", DATA / "tiny-gemma", kv_cache_dtype="int8", device="cpu")
    (row,) = run.results
    assert (row["requests"], row["output_tokens"], row["kv_cache_dtype"]) == (2, 6, "int8")
    assert row["output_tokens_per_s"] == pytest.approx(6 / row["runs"][0], rel=0.05)
