"""Lesson 11: its words agree with its records, and it runs without Triton."""

import os
import statistics
import subprocess
import sys

import pytest

from minillm.bench import records
from minillm.course.lesson_11 import ablation
from minillm.course.making import build
from minillm.course.shared.launches import ATTENTION, PRODUCT, five_launches, least_us, one_layer
from minillm.model.config import PRESETS
from tests.course.lesson import solved

(SOURCE,) = build.sources(["11"])
GEMMA = PRESETS["gemma-2b"]
WITHOUT_TRITON = """
import runpy, sys
sys.modules["triton"] = None  # its import fails, as where it is not installed
runpy.run_path(sys.argv[1])
"""


@pytest.fixture(scope="module")
def speed():
    """(setting, requests) -> tokens/s of `minillm bench ablation`."""
    rows = ablation.read("h200/ablation")["results"]
    return {(row["name"], row["requests"]): row["output_tokens_per_s"] for row in rows}


@pytest.fixture(scope="module")
def tiles():
    """(rows, tile, warps) -> milliseconds of each run."""
    return {(row["rows"], row["tile"], row["warps"]): row["runs"] for row in records.read("h200/tiles")["results"]}


@pytest.fixture(scope="module")
def kernels():
    """(kernel, rows) -> microseconds."""
    rows = records.read("h200/kernels")["results"]
    return {(row["kernel"], row["rows"]): 1e3 * row["ms"] for row in rows}


@pytest.fixture(scope="module")
def torchs():
    """Matrix -> microseconds of torch's product with one row."""
    rows = records.read("h200/quantized-kernels")["results"]
    return {row["matrix"]: 1e3 * row["bf16_ms"] for row in rows if row.get("rows") == 1}


@pytest.fixture(scope="module")
def measured():
    return records.read("h200/build")["plan"]["measured"]


@pytest.mark.proof
def test_the_solved_lesson_runs_where_there_is_no_triton():
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(build.ROOT)}
    command = [sys.executable, "-c", WITHOUT_TRITON, str(SOURCE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Solved: all ") == 4


def test_the_table_of_launches_counts_what_the_figures_draw():
    lesson = solved("11")
    for way, fused in (("torch, line by line", False), ("a kernel per operation", True)):
        many, one = (one_layer(GEMMA, rows, 1024, fused=fused) for rows in (64, 1))
        lesson.says(f"| {way} | {len(many)} | {len(one)} |")
        short = sum(launch.kind not in (PRODUCT, ATTENTION) for launch in many)
        lesson.says("only five remain" if fused else f"{short} short kernels run between them")
        assert short == 5 or not fused
        assert len(one) == 6 + short  # four products and two launches of attention
    lesson.says("Eleven launches remain: four matrix products, two for attention, and five short ones")
    lesson.says(f"| five launches (section 5) | not possible | {len(five_launches(GEMMA, 256))} |")
    assert f'"layer": "{len(one)} launches"' in SOURCE.read_text("utf-8")


def test_the_estimate_of_section_1_is_no_limit(kernels, tiles):
    assert len({name for name, _ in kernels}) == 8
    shortest = 1e3 * min(statistics.median(runs) for runs in tiles.values())
    solved("11").says("the times of eight of the engine's kernels", f"a kernel that takes {shortest:.2f} µs")
    assert shortest < min(kernels.values())


def test_what_section_2_says_about_tiles(tiles, measured, speed):
    lesson = solved("11")
    programs = 3000 * GEMMA.intermediate_size // min(tile for _, tile, _ in tiles)
    lesson.says(f"tiles of 256 columns, the top row, make {programs:,} programs of 3,000 rows")
    lesson.says("A single run can take two or three times the median.", "half a percent may be noise")
    assert 3 < max(max(runs) / statistics.median(runs) for runs in tiles.values()) < 3.5
    assert max(tiles[1, 256, 2]) > 2 * statistics.median(tiles[1, 256, 2])
    best, default = (statistics.median(tiles[3000, *launch]) for launch in ((4096, 16), (1024, 4)))
    assert 0.004 < 1 - best / default < 0.007
    step_us = 1e6 / speed["on", 1]
    lesson.says(f"about {round(step_us, -2):,.0f} µs (section 5), so 5 µs are {5 / step_us:.1%}")
    (launch,) = records.read("h200/build")["plan"]["launches"]
    before, after = launch["microseconds"]
    lesson.says(f"makes prefill attention {1 - after / before:.0%} faster", "Only three problems were tuned")
    assert measured["problems"] == 3


def test_what_section_3_says_about_launches(speed):
    without, graphs = 1e3 / speed["off", 1], 1e3 / speed["a kernel per operation", 1]
    solved("11").says(
        f"The measured speed with graphs means {graphs:.1f} ms per token",
        f"the same kernels need at most {graphs:.1f} ms per token",
        f"of the {without:.1f} ms without a graph, the GPU waits for more than 6",
        "With decode steps in graphs, a token took less than a quarter of the time",
    )
    assert 6 < without - graphs < 7 and 4 * graphs < without < 5 * graphs


def test_what_section_4_says_about_padding(measured):
    ms = {rows: step for rows, _, step, _ in measured["steps_ms"]}
    solved("11").says(
        f"A step of 16 rows takes only {ms[16] - ms[4]:.1f} ms longer than a step of 4",
        f"rather than to 4 costs {ms[16] - ms[4]:.1f} ms.",
        f"rather than to 192 costs {ms[256] - ms[192]:.1f} ms.",
        "2 rows were measured slower than 4",
    )
    assert ms[2] > ms[4]


def test_what_section_5_says_about_bounds(speed, kernels, torchs):
    """And about what is lost: the names of kernels are those of the records."""
    bytes_per_s = records.read("h200/roofline")["bytes_per_s"]
    shortest_us = min(kernels.values())
    plain, single, five = "plain torch", "a kernel per operation", "five launches per layer"
    ways = {
        plain: one_layer(GEMMA, 1, 256, fused=False),
        single: one_layer(GEMMA, 1, 256, fused=True),
        five: five_launches(GEMMA, 256),
    }
    head_us = 2e6 * GEMMA.vocab_size * GEMMA.hidden_size / bytes_per_s
    best = {name: sum(us for *_, us in least_us(layer, bytes_per_s, shortest_us)) for name, layer in ways.items()}
    took = {name: (1e6 / speed[name, 1] - head_us) / GEMMA.num_layers for name in ways}
    share = {name: speed[name, 1] * (GEMMA.num_layers * best[name] + head_us) for name in ways}
    solved("11").says(
        "Plain torch reaches about the same share of its own bound as one kernel per operation",
        "make it 0.2 µs shorter, and the order flips",
        f"of the {took[plain] - best[five]:.0f} µs that plain torch takes beyond the bound of five launches, "
        f"{best[plain] - best[five]:.0f} are in its own bound already",
    )
    assert share[single] < share[plain] < min(share[five], share[single] + 0.03e6)
    less = {name: sum(us for *_, us in least_us(layer, bytes_per_s, shortest_us - 0.2)) for name, layer in ways.items()}
    shares = [speed[name, 1] * (GEMMA.num_layers * less[name] + head_us) for name in (plain, single)]
    assert shares == sorted(shares)
    lost = {name: took[name] - best[name] for name in ways}
    assert lost[plain] > lost[single] > 2 * lost[five]
    products = sum(us for kind, _, us in least_us(ways[five], bytes_per_s, shortest_us) if kind == PRODUCT)
    head = torchs["head"] - head_us
    layer = sum(torchs.values()) - torchs["head"]
    attention = kernels["decode_attention", 1] - 2 * shortest_us
    short = ("rotary_embedding", "write_kv", "add_rms_norm", "gated_activation", "add_rms_norm")
    solved("11").says(
        f"they account for about {layer - products:.0f} of the {lost[single]:.0f} µs that a layer loses",
        f"Attention accounts for about {attention:.0f}, the output head for {head / GEMMA.num_layers:.1f}",
        f"its {head:.0f} µs are spread over {GEMMA.num_layers} layers",
        "the five short kernels for less than 1",
        "loses less than half as much",
        f"torch's four products ({layer:.1f} µs) take longer than the whole layer does in five launches "
        f"({took[five]:.1f} µs, section 5)",
    )
    assert 0 < sum(kernels[name, 1] - shortest_us for name in short) < 1
    assert layer > took[five]


def test_what_section_6_says_about_causes(speed):
    off, on = speed["off", 1], speed["on", 1]
    solved("11").says(
        f"does {speed['five launches per layer', 1] / speed['a kernel per operation', 1]:.2f} tell",
        f"says {off:.0f} tokens/s without graphs and {on:.0f} with them",
        f"graphs make decoding {on / off:.1f} times as fast",
        "Without graphs one request reaches about a sixth and 256 requests about half",
    )
    assert 5.5 < on / off < 6.5 and 0.45 < speed["off", 256] / speed["on", 256] < 0.55
