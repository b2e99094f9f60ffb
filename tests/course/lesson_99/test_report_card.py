"""Lesson 99's report card: its numbers are those of the record and of the questions."""

import pytest

from minillm.bench import records
from minillm.course.lesson_99 import report_card, under_load
from minillm.course.lesson_99.report_card import PRECISIONS
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


def test_what_the_lesson_says_of_the_loads_in_between_holds():
    speeds = report_card.speeds(PRECISIONS)
    for count in (4, 8, 16):
        assert speeds["int4"][count] == pytest.approx(speeds["fp8"][count], rel=0.05), "about as much"
    assert speeds["int4"][64] < speeds["bf16"][64] < speeds["fp8"][64]


def test_the_cheapest_is_named_with_the_learners_choice():
    cost = {"bf16": {1: 2.0, 3000: 0.5}, "fp8": {1: 1.5, 3000: 0.55}, "int4": {1: 1.0, 3000: 0.6}}
    assert report_card.cheapest(cost, {1: "fp8", 3000: None}).split("\n") == [
        "1 request at once: int4 is cheapest; you chose fp8",
        "3,000 requests at once: bf16 is cheapest; no prediction",
    ]


@pytest.mark.parametrize("written", ["fp4", 4, "bfloat16", ["int4"]])
def test_a_choice_that_is_no_precision_is_answered_with_their_names(written):
    said = report_card.cheapest(dict.fromkeys(("bf16", "fp8", "int4"), {1: 2.0}), {1: written})
    assert said.endswith(f'; you chose {written} (write "bf16", "fp8" or "int4")')


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
    found = report_card.accuracies({name: report_card.Precision({"name": name}, "", "") for name in right}, 4)
    assert asked == [4, 4] and found["a"][0] == 0.75 and found["b"][0] == 0.25
    assert found["a"][1].points == 0 and found["b"][1].points == 50


def test_recorded_accuracies_are_those_of_all_questions():
    rows = {row["quantization"]: row for row in records.read("cpu/quantization")["results"]}
    found, kl = report_card.recorded_accuracies(PRECISIONS), report_card.divergences(PRECISIONS)
    for name, recorded in {"bf16": "float32", "fp8": "fp8", "int4": "int4"}.items():
        row = rows[recorded]
        assert found[name][0] == row["accuracy"] and kl[name] == row["kl"] and row["questions"] == 2160
        assert found[name][1] == Loss(row["loss_points"], *row["loss_interval"])


def test_what_the_lesson_says_of_accuracy_holds():
    found, kl = report_card.recorded_accuracies(PRECISIONS), report_card.divergences(PRECISIONS)
    assert f"{found['bf16'][0]:.1%}" == "88.8%"
    assert all(loss.low < 0 < loss.high for name, (_, loss) in found.items() if name != "bf16")
    assert kl["int4"] / kl["fp8"] == pytest.approx(10, rel=0.05), "about ten times as far"


def test_what_the_lesson_says_of_gptq_holds():
    (row,) = [row for row in records.read("cpu/quantization")["results"] if row["quantization"] == "gptq"]
    assert f"{row['accuracy']:.1%}" == "88.1%" and f"{row['kl']:.4f}" == "0.0025"


def test_the_distance_to_the_floor():
    floors = report_card.floors_ms(PRECISIONS)
    assert floors["bf16"][0] == pytest.approx(1.19, abs=0.005), "5.01 GB at 4.2 TB/s"
    assert {name: round(took - least, 1) for name, (least, took) in floors.items()} == {
        "bf16": 0.2,
        "fp8": 0.3,
        "int4": 0.3,
    }
    ratios = [took / least for least, took in floors.values()]
    assert ratios == sorted(ratios), "the fewer bytes, the farther from the floor"


def workload(name):
    return next(each for each in records.read(report_card.PARTS)["results"] if each["workload"].startswith(name))


@pytest.mark.parametrize("name", ["single", "chat"])
def test_the_parts_of_a_step_add_up_to_it(name):
    row = workload(name)
    *parts, (least, took, lost) = report_card.lost(row).values()
    assert took == pytest.approx(1e3 * row["seconds"] / row["steps"]) and lost == pytest.approx(took - least)
    for column, whole in enumerate((least, took, lost)):
        assert sum(each[column] for each in parts) == pytest.approx(whole, rel=0.01)


def test_the_table_of_parts_has_both_loads_side_by_side():
    head, names, *lines = report_card.parts_table().splitlines()
    assert head.split() == ["ms", "a", "step", "1", "request", "3,000", "requests"]
    assert names.split() == ["least", "took", "lost"] * 2
    alone, many = report_card.lost(workload("single")), report_card.lost(workload("chat"))
    assert [line[:18].strip() for line in lines] == list(alone) == list(many)
    for line in lines:
        part = line[:18].strip()
        assert line[18:].split() == [f"{number:.2f}" for number in (*alone[part], *many[part])]


def test_what_the_lesson_says_of_the_parts_holds():
    alone = {part: lost for part, (_, _, lost) in report_card.lost(workload("single")).items()}
    many = {part: lost for part, (_, _, lost) in report_card.lost(workload("chat")).items()}
    assert max(alone, key=lambda name: alone[name] * (name != "all")) == "attention"
    assert alone["attention"] == pytest.approx(alone["all"] / 2, rel=0.1) and alone["head and sampling"] < 0
    order = sorted(many, key=many.__getitem__, reverse=True)
    assert order[:4] == ["all", "matrix products", "other kernels", "GPU idle"]


def test_the_card_has_a_line_for_each_precision(capsys):
    speeds = report_card.speeds(PRECISIONS)
    quality = {name: (0.5, Loss(1.0, -2.0, 4.0)) for name in PRECISIONS}
    kl = dict.fromkeys(PRECISIONS, 0.0125)
    report_card.print_card(
        quality, kl, report_card.gigabytes(PRECISIONS), speeds, dict.fromkeys(PRECISIONS, {1: 0.5, 3000: 0.01})
    )
    lines = capsys.readouterr().out.splitlines()
    assert "tiny-gemma" in lines[0] and "NVIDIA H200" in lines[0], "whose figures these are"
    assert [line.split()[0] for line in lines[5:]] == list(PRECISIONS)
    assert "1.00 (-2.00 to 4.00)  0.0125" in lines[6]
    assert "(" not in lines[5] and "0.0125" not in lines[5], "the first has lost nothing against itself"
    fp8 = speeds["fp8"]
    assert lines[6].split()[-4:] == [f"{fp8[1]:,.0f}", f"{fp8[3000]:,.0f}", "0.50", "0.0100"]


def test_the_empty_card_has_the_same_shape_and_no_number(capsys):
    report_card.print_empty_card(PRECISIONS)
    empty = capsys.readouterr().out.splitlines()
    one = dict.fromkeys(PRECISIONS, 1.0)
    loads = {name: {1: 1.0, 3000: 1.0} for name in PRECISIONS}
    report_card.print_card({name: (1.0, Loss(0, 0, 0)) for name in PRECISIONS}, one, one, loads, loads)
    full = capsys.readouterr().out.splitlines()
    assert empty[:5] == full[:5] and [len(line) for line in empty] == [len(line) for line in full]
    assert [line.split() for line in empty[5:]] == [
        ["bf16", "?", "-", "-", *["?"] * 5],
        ["fp8", *["?"] * 8],
        ["int4", *["?"] * 8],
    ]


def test_what_was_measured_here_has_a_price_of_its_own():
    waits = {"ttft_s": {"p50": 0.25}, "itl_s": {"p50": 0.5, "p99": 0.75}}
    outcomes = {
        "the engine": under_load.Outcome([{"output_tokens_per_s": 1000.0, **waits}]),
        "yours": under_load.Outcome(problem="2 of 2 requests failed"),
    }
    head, engine, yours = report_card.measured_table(0.022, outcomes, dollars=0.36).splitlines()
    assert head.split()[:3] == ["GB", "$/million", "tokens/s"]
    assert engine.split() == ["the", "engine", "0.02", "0.1000", "1,000", "250.0", "500.00", "750.00"]
    assert yours.split() == ["yours", "2", "of", "2", "requests", "failed"]
