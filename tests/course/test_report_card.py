"""Lesson 99's report card: its numbers are those of the record and of the questions."""

import pytest

from minillm.bench import records
from minillm.course import report_card
from minillm.course.report_card import PRECISIONS
from minillm.evaluate.compare import Loss

ROWS = records.read(report_card.RECORD)["results"]


def test_speeds_and_sizes_are_those_of_the_record():
    speeds, sizes = report_card.speeds(PRECISIONS), report_card.gigabytes(PRECISIONS)
    assert list(speeds) == list(sizes) == list(PRECISIONS)
    for name, precision in PRECISIONS.items():
        rows = [row for row in ROWS if row["quantization"] == precision.recorded]
        assert {row["requests"] for row in rows} == speeds[name].keys() and {1, 3000} <= speeds[name].keys()
        for count, speed in speeds[name].items():
            runs = [row["output_tokens_per_s"] for row in rows if row["requests"] == count]
            assert min(runs) <= speed <= max(runs)
        assert {row["weight_bytes"] / 1e9 for row in rows} == {sizes[name]}


def test_what_the_lesson_says_of_the_speeds_holds():
    speeds = report_card.speeds(PRECISIONS)
    assert max(speeds, key=lambda name: speeds[name][1]) == "int4"
    assert max(speeds, key=lambda name: speeds[name][3000]) == "fp8"
    assert speeds["int4"][3000] == pytest.approx(speeds["bf16"][3000], rel=0.03), "it gains next to nothing"
    rows = max(each[3000] for each in speeds.values()) / min(each[3000] for each in speeds.values())
    assert speeds["bf16"][3000] / speeds["bf16"][1] > 10 * rows, "batching saves more than any precision"


def test_losses_are_against_the_first(monkeypatch):
    right = {"a": [True, True, False, True], "b": [True, False, False, False]}
    asked = []

    class Engine:
        def __init__(self, device, name):
            self.name = name

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def answers(llm, limit):
        asked.append(limit)
        correct = right[llm.name]
        return type("Answers", (), {"correct": correct, "accuracy": sum(correct) / len(correct)})

    monkeypatch.setattr(report_card, "LLM", Engine)
    monkeypatch.setattr(report_card, "answers", answers)
    found = report_card.accuracies({name: report_card.Precision({"name": name}, "") for name in right}, 4)
    assert asked == [4, 4] and found["a"][0] == 0.75 and found["b"][0] == 0.25
    assert found["a"][1].points == 0 and found["b"][1].points == 50


def test_the_card_has_a_line_for_each_precision(capsys):
    speeds = report_card.speeds(PRECISIONS)
    quality = {name: (0.5, Loss(1.0, -2.0, 4.0)) for name in PRECISIONS}
    report_card.print_card(quality, report_card.gigabytes(PRECISIONS), speeds, speeds)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(PRECISIONS)
    assert "1.0 (-2.0 to 4.0)" in lines[3] and "(" not in lines[2], "the first has lost nothing against itself"
