"""Lesson 11: its prose says what its records say, and it runs without Triton."""

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.bench import records
from minillm.course.shared.launches import five_launches, least_us, one_layer
from minillm.model.config import PRESETS

ROOT = Path(__file__).resolve().parents[3]
(SOURCE,) = (ROOT / "notebooks" / "source").glob("11_*.py")
PROSE = " ".join(re.sub(r"^# ?", "", line) for line in SOURCE.read_text("utf-8").splitlines() if line.startswith("#"))
GEMMA = PRESETS["gemma-2b"]
WITHOUT_TRITON = """
import runpy, sys
sys.modules["triton"] = None  # its import fails, as where it is not installed
runpy.run_path(sys.argv[1])
"""


@pytest.fixture(scope="module")
def speed():
    """(setting, requests) -> tokens/s of `minillm bench ablation`."""
    rows = records.read("h200/ablation")["results"]
    return {(row["name"], row["requests"]): row["output_tokens_per_s"] for row in rows}


@pytest.fixture(scope="module")
def tiles():
    """(rows, tile, warps) -> milliseconds of each run."""
    return {(row["rows"], row["tile"], row["warps"]): row["runs"] for row in records.read("h200/tiles")["results"]}


@pytest.fixture(scope="module")
def measured():
    return records.read("h200/build")["plan"]["measured"]


def test_the_solved_lesson_runs_where_there_is_no_triton():
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TRITON, str(SOURCE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Solved: all ") == 4


def test_the_table_of_launches_counts_what_the_figures_draw():
    for way, fused in (("torch, line by line", False), ("a kernel per operation", True)):
        many, one = (len(one_layer(GEMMA, rows, 1024, fused=fused)) for rows in (64, 1))
        assert f"| {way} | {many} | {one} |" in PROSE
        if fused:
            assert f'"layer": "{one} launches"' in SOURCE.read_text("utf-8")
    assert f"| five launches (section 5) | not possible | {len(five_launches(GEMMA, 256))} |" in PROSE


def test_what_section_2_says_about_tiles(tiles, measured, speed):
    assert f"3,000 rows make {3000 * GEMMA.intermediate_size // min(tile for _, tile, _ in tiles):,} programs" in PROSE
    runs = tiles[1, 256, 2]
    assert "A single run can take twice the median." in PROSE and max(runs) > 2 * statistics.median(runs)
    best, default = (statistics.median(tiles[3000, *launch]) for launch in ((4096, 16), (1024, 4)))
    assert "half a percent may be noise" in PROSE and 0.004 < 1 - best / default < 0.007
    step_us = 1e6 / speed["on", 1]
    assert f"about {round(step_us, -2):,.0f} µs (section 5), so 5 µs are {5 / step_us:.1%}" in PROSE
    (launch,) = records.read("h200/build")["plan"]["launches"]
    before, after = launch["microseconds"]
    assert f"makes prefill attention {1 - after / before:.0%} faster" in PROSE
    assert measured["problems"] == 3 and "Only three problems were tuned" in PROSE


def test_what_section_3_says_about_launches(speed):
    without, graphs = 1e3 / speed["off", 1], 1e3 / speed["a kernel an operation", 1]
    assert PROSE.count(f"{graphs:.1f} ms per token") == 2
    assert f"of the {without:.1f} ms without a graph, the GPU waits for more than 6" in PROSE
    assert 6 < without - graphs < 7


def test_what_section_4_says_about_padding(measured):
    ms = {rows: step for rows, _, step, _ in measured["steps_ms"]}
    assert f"A step of 16 rows takes only {ms[16] - ms[4]:.1f} ms longer than a step of 4" in PROSE
    assert f"rather than to 4 costs {ms[16] - ms[4]:.1f} ms." in PROSE
    assert f"rather than to 192 costs {ms[256] - ms[192]:.1f} ms." in PROSE
    assert ms[2] > ms[4]


def test_what_section_5_says_about_bounds(speed):
    """Half of the time that plain torch takes longer than five launches at best is in its own bound."""
    bytes_per_s = records.read("h200/roofline")["bytes_per_s"]
    shortest_us = 1e3 * min(row["ms"] for row in records.read("h200/kernels")["results"])
    ways = {
        "plain torch": one_layer(GEMMA, 1, 256, fused=False),
        "a kernel an operation": one_layer(GEMMA, 1, 256, fused=True),
        "five launches a layer": five_launches(GEMMA, 256),
    }
    head_us = 2e6 * GEMMA.vocab_size * GEMMA.hidden_size / bytes_per_s
    best = {name: sum(us for *_, us in least_us(layer, bytes_per_s, shortest_us)) for name, layer in ways.items()}
    took = {name: (1e6 / speed[name, 1] - head_us) / GEMMA.num_layers for name in ways}
    share = {name: speed[name, 1] * (GEMMA.num_layers * best[name] + head_us) for name in ways}
    assert share["a kernel an operation"] < share["plain torch"] < share["five launches a layer"]
    plain, five = "plain torch", "five launches a layer"
    assert 0.48 < (best[plain] - best[five]) / (took[plain] - best[five]) < 0.58
    lost = [took[name] - best[name] for name in ways]
    assert lost == sorted(lost, reverse=True)


def test_what_section_6_says_about_causes(speed):
    off, on = speed["off", 1], speed["on", 1]
    assert f"says {off:.0f} tokens/s without graphs and {on:.0f} with them" in PROSE
    assert f"graphs make decoding {on / off:.1f} times as fast" in PROSE
    assert 5.5 < on / off < 6.5 and 0.45 < speed["off", 256] / speed["on", 256] < 0.55
