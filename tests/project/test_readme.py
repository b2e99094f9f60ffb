"""The README and docs/: the commands come first, figures come from records, and links work."""

import importlib.util
import re
from pathlib import Path

import pytest

from minillm.bench import records
from minillm.course.lesson_14 import measured
from minillm.course.making import build
from minillm.kernels.quantized_inputs import FAST
from tools import lesson_minutes

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASUREMENTS = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_screen_has_the_picture_and_the_commands_the_learners_first():
    screen = "\n".join(README.splitlines()[:20])
    assert "(docs/at_work.svg)" in screen
    assert re.findall(r"^make (\w+) ", screen, re.MULTILINE) == ["lab", "demo", "test"]
    assert re.search(r"^```\ngit clone \w+ minillm && cd minillm .*\nmake lab ", screen, re.MULTILINE)


def test_the_hours_of_the_course_are_those_of_its_lessons():
    """To half an hour; optional sections apart."""
    lessons = [lesson_minutes.stated(source) for source in build.sources([])]
    headings = "\n".join(source.read_text(encoding="utf-8") for source in build.sources([]))
    optional = re.findall(r"^# ## .*optional.* (\d+) min$", headings, re.MULTILINE | re.IGNORECASE)
    (count, hours, more) = map(int, re.search(r"(\d+)\s+lessons take (\d+) hours, and (\d+) more", README).groups())
    assert count == len(lessons)
    assert abs(hours - sum(lessons) / 60) <= 0.5
    assert abs(more - sum(map(int, optional)) / 60) <= 0.5
    low, high = map(int, re.search(r"Each takes (\d+) to (\d+) minutes", README).groups())
    assert low <= min(lessons) < low + 10 and high - 10 < max(lessons) <= high


def test_the_figures_equal_the_records(draw):
    for page in draw.PAGES:
        assert draw.filled(page) == page.read_text(encoding="utf-8"), "run python docs/draw.py"


def test_fp8_is_as_fast_as_the_limits_say():
    one, other = records.read("h200/gemma-2b-fp8")["results"], records.read("h200/gemma-2b-bf16")["results"]
    assert [row["workload"] for row in one] == [row["workload"] for row in other] and len(one) == 6
    assert all(a["output_tokens_per_s"] > b["output_tokens_per_s"] for a, b in zip(one, other, strict=True))
    assert "faster\n  than bfloat16 in all six workloads" in README


def test_fast_accumulation_has_cost_tiny_gemma_nothing():
    """Neither in perplexity nor, up to the limit, more than a tenth of what rounding the inputs costs a product."""
    quality, *widths = records.read("h200/fast-accumulation")["results"]
    low, high = quality["interval"]
    assert low <= 0 <= high and quality["tokens"] > 30_000
    assert "the difference is not distinguishable from zero" in MEASUREMENTS
    used = [row for row in widths if row["columns"] <= FAST]
    assert len(used) > 2 and f"{FAST:,}" in MEASUREMENTS
    for row in used:
        assert (row["fast"] ** 2 - row["output"] ** 2) ** 0.5 < row["rounding"] / 10


def test_the_texts_about_drafts_state_the_settings_of_their_records():
    """The tool's prompts have 32 tokens unless its command says otherwise."""
    names = "h200/speculation", "h200/speculation-ahead", "h200/speculation-exact"
    tokens = {name: records.read(name)["command"].split("--output-len ")[1].split()[0] for name in names}
    assert list(tokens.values()) == ["256", "256", "128"]
    assert not any("--input-len" in records.read(name)["command"] for name in names)
    text = " ".join(MEASUREMENTS.split())
    assert "prompts of 32 tokens, 256 tokens out, greedy" in text
    assert "(Gemma 2B's shape with random weights, 128 tokens out)" in text
    assert {row["model"] for row in records.read("h200/speculation-exact")["results"]} == {"gemma-2b"}
    assert "those of the second run" in text
    times = [row["times_as_long"] for row in records.read("h200/speculation-exact")["results"]]
    assert f"takes {min(times):.1f} to {max(times):.1f} times as long, for 1 to 64 requests" in OPERATING
    assert {len(row["speedups"]) for name in names[:2] for row in records.read(name)["results"]} == {2}


def test_replicas_win_throughput_and_two_gpus_that_share_a_model_win_latency():
    assert "replicas win throughput" in MEASUREMENTS
    assert "Sharing a model makes single answers faster, two replicas serve more" in " ".join(README.split())
    for way in measured.ways():
        assert way.one < way.shared < way.replicas
        if way.requests == 1:
            assert way.shared > 1.3 * way.one
    commit = records.read(measured.WAYS["Gemma 2B"])["commit"]  # a newer one has longer sums of the kernels' own
    assert ("own sums ended at 64 rows" in MEASUREMENTS) == commit.startswith("d8cb5c2b")
    assert "it gains less with many requests" in " ".join(MEASUREMENTS.split())
    single, many = measured.ways("Gemma 2B")
    assert many.shared / many.one < single.shared / single.one


def test_the_batching_table_states_the_settings_in_which_its_columns_differ():
    """It also says that weights were random and how far the runs are apart."""
    block = MEASUREMENTS.split("<!-- batching:")[1].split("<!-- end of batching -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("| ")]
    for place, name in enumerate(("cpu/batching", "h200/batching"), 1):
        record = records.read(name)
        column = {row[0].strip("*"): row[place] for row in rows if len(row) == 3}
        assert column[""].startswith(records.model_of(record)) and record["dtype"] in column[""]
        static, chunked = (
            next(row for row in record["results"] if row["part"] == part) for part in ("throughput", "latency")
        )
        assert f"{static['requests']} in {record['rows']} rows" in column["requests at once"]
        assert ("divided" in column["requests at once"]) == (static["scale"] > 1)
        arriving = column["arriving requests; chunk size"]
        assert f"{chunked['requests']}, " in arriving and f"{chunked['budget']} tokens" in arriving
        assert ("times as fast" in arriving) == (record["speed"] > 1)
        spread = [round(1e3 * run["ttft_s"]["p99"]) for run in chunked["runs"]]
        assert f"({min(spread):,} to {max(spread):,})" in column["time to first token, p99, whole prompts -> chunks"]


def test_the_pictures_match_the_records(draw, tmp_path, monkeypatch):
    for name in ("PICTURE", "BATCHING_PICTURE", "QUANTIZATION_PICTURE"):
        monkeypatch.setattr(draw, name, tmp_path / getattr(draw, name).name)
    draw.draw()
    for picture in ("at_work.svg", "batching.svg", "quantization.svg"):
        assert (tmp_path / picture).read_bytes() == (ROOT / "docs" / picture).read_bytes(), "run python docs/draw.py"


def test_the_record_holds_medians_of_five_alternating_runs_with_equal_settings(draw):
    for ours, best in draw.pairs():
        for row in (ours, best):
            assert len(row["runs"]) == 5
            assert row["seconds"] == pytest.approx(sorted(row["runs"])[2], abs=1e-3)
        assert ours["times_transformers"] == pytest.approx(best["seconds"] / ours["seconds"], abs=0.02)
        assert (ours["dtype"], ours["threads"], ours["output_tokens"]) == (
            best["dtype"],
            best["threads"],
            best["output_tokens"],
        )


def test_every_link_points_to_an_existing_file():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "data").glob("*.md")):
        targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
        assert not missing, page


def test_the_file_tree_lists_every_module():
    tree = README.split("## Where things are")[1].split("```")[1]
    lines = [line.split(maxsplit=1) for line in tree.strip().splitlines()]
    names = {name.rstrip("/") for name, *_ in lines}
    there = {path.name for path in (ROOT / "minillm").iterdir() if path.name not in ("__pycache__", "__init__.py")}
    assert there - {"kernels", "data"} <= names
    assert all(len(words[0].split()) <= 6 for _, *words in lines if words), "at most six words per file"


def test_no_package_registry_is_named():
    pages = [README, *(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))]
    assert not any(re.search(r"pypi\.|anaconda\.org|conda\.io", page) for page in pages)
