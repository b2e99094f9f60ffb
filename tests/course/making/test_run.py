"""Lessons run as scripts: a failing lesson is reported and fails the whole run."""

import json

import pytest

from minillm.course.making import run


@pytest.mark.parametrize(("second", "status"), [("print('well')", 0), ("raise SystemExit('a mistake')", 1)])
def test_a_run_of_lessons_fails_if_one_of_them_does(second, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "SOURCES", tmp_path)
    (tmp_path / "00_first.py").write_text("print('begun')", encoding="utf-8")
    (tmp_path / "01_second.py").write_text(second, encoding="utf-8")
    record = tmp_path / "record.json"
    assert run.main(["--json", str(record)]) == status
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    assert [each["lesson"] for each in results] == ["00_first", "01_second"]
    assert [each["ok"] for each in results] == [True, status == 0] and results[0]["output"] == ["begun"]
    assert ("FAILED\na mistake" in capsys.readouterr().out) == (status == 1)


def test_a_lesson_runs_where_the_other_lessons_solutions_are(tmp_path):
    script = tmp_path / "99_where.py"
    script.write_text("import os; print(os.listdir())", encoding="utf-8")
    (listed,) = run.run(script)["output"]
    assert "'99_serve_and_benchmark.ipynb'" in listed and run.SOLUTIONS.name == "solutions"


def test_a_run_without_lessons_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SOURCES", tmp_path)
    assert run.main(["00"]) == 1
