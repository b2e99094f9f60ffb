"""Lesson 99: its words agree with its records and its own settings."""

import re
import statistics

import pytest

from minillm.advice.sizing import parameters
from minillm.bench import records, workloads
from minillm.course.lesson_99 import large_model, report_card, serving, under_load
from minillm.course.lesson_99.report_card import PRECISIONS
from minillm.course.making import build
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED, read_config
from tests.course.lesson import KINDS, LEARNER, Lesson, solved

(SOURCE,) = build.sources(["99"])
TEXT = SOURCE.read_text("utf-8")
GEMMA = PRESETS["gemma-2b"]
WEIGHTS = parameters(GEMMA)


@pytest.fixture
def lesson():
    return solved("99")


@pytest.fixture(scope="module")
def knee():
    """percent of the closed loop's rate -> row of the committed open loops."""
    return {round(100 * row["share"]): row for row in records.read("cpu/open-loop")["results"]}


def step_of(name: str) -> dict:
    return next(row for row in records.read(report_card.PARTS)["results"] if row["workload"].startswith(name))


def test_what_section_1_gives_to_compute_with(lesson):
    limits = records.read(report_card.PARTS)
    lesson.says(f"Gemma 2B has {WEIGHTS / 1e9:.1f} billion weights")
    lesson.says("A fifth of them are the embedding table")
    assert GEMMA.vocab_size * GEMMA.hidden_size / WEIGHTS == pytest.approx(1 / 5, rel=0.05)
    lesson.says(f"An H200 reads about {limits['bytes_per_s'] / 1e12:.1f} TB/s (measured)")
    lesson.says(f"at most {limits['operations_per_s'] / 1e12:.0f} trillion a second in bf16 (measured)")
    share = report_card.recorded_accuracies(PRECISIONS)["bf16"][0]
    lesson.says(f"answers {share:.1%} of its multiple-choice questions")
    loads = {row["requests"]: row["workload"] for row in records.read(report_card.RECORD)["results"]}
    assert loads[1].startswith("single_128_256") and loads[3000].startswith("chat_128_128")
    lesson.says("128 tokens in and 128 out; the lone one has 128 in and 256 out")


def test_what_section_5_says_about_its_own_requests(lesson):
    lengths = [int(word) for word in re.search(r"^lengths = \[(.*)\]$", TEXT, re.MULTILINE)[1].split(", ")]
    gaps = sum(length - 1 for length in lengths)
    assert "random_prompt(16 * n, seed=n), n)" in TEXT
    lesson.says(f"The eight prompts have {16 * sum(lengths):,} tokens together")
    rank = serving.pooled_percentile([list(range(gaps))], 99) + 1
    lesson.says(f"of {gaps} gaps, it is the second largest")
    assert gaps - rank == 1
    lesson.says(f"{1 - 0.99**100:.0%} of answers with 100 gaps")


def test_what_section_7_says_about_counting_all_tokens(lesson):
    lines = {line.split()[0]: line.split() for line in serving.recorded_patterns().splitlines()[1:]}
    silo, liso = (int(lines[name][5].replace(",", "")) for name in ("silo", "liso"))
    lesson.says("silo computes half as many tokens a second as liso")
    assert silo / liso == pytest.approx(0.5, abs=0.05)


def test_what_section_8_says_about_the_knee(lesson, knee):
    ttft = {share: 1e3 * row["ttft_s"]["p50"] for share, row in knee.items()}
    runs = [1e3 * run for run in knee[100]["runs"]]
    assert statistics.median(runs) == pytest.approx(ttft[100])
    lesson.says(f"So does the typical TTFT, from {ttft[30]:.0f} to {ttft[90]:.0f} ms")
    late = [1e3 * run for run in knee[125]["runs"]]
    lesson.says(
        f"the typical TTFT is {ttft[100]:.0f} ms at the closed loop's rate "
        f"({min(runs):.0f} to {max(runs):.0f} in the five rounds), "
        f"{ttft[125]:.0f} at 125% ({min(late):.0f} to {max(late):.0f}), and almost a second at twice the rate"
    )
    lesson.says("in the first round, waits were already the longest at 50% to 80%")
    assert all(row["runs"][0] == max(row["runs"]) for share, row in knee.items() if share in (50, 70, 80))
    low, high = knee[30], knee[90]
    lesson.says("the time between tokens doubles", "its p99 triples", "p50 doubles and p99 triples up to nine tenths")
    assert high["itl_s"]["p50"] / low["itl_s"]["p50"] == pytest.approx(2, abs=0.2)
    assert ttft[90] / ttft[30] == pytest.approx(2, abs=0.1)
    assert high["ttft_s"]["p99"] / low["ttft_s"]["p99"] == pytest.approx(3, abs=0.2)
    lesson.says("with 16 rows on two CPU cores, 400 requests at each of ten rates")
    assert len(knee) == 10 and {row["requests"] for row in knee.values()} == {400}
    record = records.read("cpu/open-loop")
    assert (record["rows"], record["machine"]["cores"]) == (16, 2)


def test_what_section_13_says_about_dynamic_batching(lesson):
    record = records.read("cpu/triton")
    lesson.says("32 requests come at once, for eight rows; one answer in four has 160 tokens, the others have 8")
    assert ({row["requests"] for row in record["results"]}, record["rows"]) == ({32}, 8)
    assert record["lengths"] == [8, 8, 8, 160] and "serving.steps_needed([8, 8, 8, 160] * 8, 8)" in TEXT
    lesson.says("shared two cores")
    assert record["machine"]["cores"] == 2


def test_what_section_14_says_about_floors(lesson):
    rows = [row for row in records.read("h200/quantized-kernels")["results"] if row.get("rows") == 1]
    speeds = {}
    for row in rows:
        height, width = map(int, row["shape"].strip("[]").split(", "))
        speeds[row["matrix"]] = 2 * height * width / row["bf16_ms"] / 1e9
    small, large = (sum(map(speeds.get, names)) for names in (("qkv", "attention_out"), ("gate_up", "down")))
    lesson.says("two small matrices at less than half the speed of its two large ones")
    assert small < large / 2
    floors = report_card.floors_ms(PRECISIONS)
    ratios = {name: took / least for name, (least, took) in floors.items()}
    lesson.says(f"bf16 takes {ratios['bf16']:.2f} times its floor, int4 {ratios['int4']:.2f} times")
    lost = {name: took - least for name, (least, took) in floors.items()}
    lesson.says(f"it is {lost['bf16']:.2f} ms in bf16, {lost['fp8']:.2f} in fp8 and {lost['int4']:.2f} in int4")
    printed = {name: lesson.number(rf"^{name} .* ms between tokens, ([\d.]+) times its floor") for name in ratios}
    assert printed == {name: round(ratio, 2) for name, ratio in ratios.items()}
    least, took, _ = report_card.lost(step_of("chat"))["matrix products"]
    lesson.says(f"**Products** reach {least / took:.0%} of the limit")
    lesson.says(f"writes {GEMMA.vocab_size:,} scores for each row")
    lesson.says("the plan that it made gains less than 0.2%")
    rates = {
        (row["engine"], row["requests"]): row["output_tokens_per_s"] for row in records.read("h200/build")["results"]
    }
    gains = [rates["planned", count] / rates["default", count] - 1 for _, count in rates]
    assert 0.001 < max(gains) < 0.002


def test_what_section_15_says_about_a_large_model(lesson):
    embedded = read_config(EMBEDDED)
    gb, small_mb = round(4 * WEIGHTS / 1e9), round(4 * parameters(embedded) / 1e6)
    lesson.says(f"{WEIGHTS / 1e9:.1f} billion weights, at 4 bytes each on a CPU, so {gb} GB")
    lesson.says(f"with the {small_mb} MB of the embedded model")
    lesson.says(f"Does that hold for {gb} GB")
    lesson.says(f"three times as many calls ({GEMMA.num_layers} layers instead of {embedded.num_layers})")
    assert GEMMA.num_layers == 3 * embedded.num_layers
    lesson.says(f"that needs {large_model.NEEDED_GB} GB of free memory")
    step, limits = large_model.recorded()
    lesson.says("The floor is much nearer than with the embedded model.")
    itl = lesson.number(r"^ITL: .* \(([\d.]+) times the floor\)$")
    lesson.says("On a CPU the ITL is about ten times its floor.", "a step on your CPU took about ten times its floor")
    assert 7 < itl < 14
    assert step.seconds / step.floor(limits) < itl / 2
    assert step.bytes == pytest.approx(4 * WEIGHTS, rel=0.001), "the record is of this model"


def test_what_section_18_says_about_the_price_of_a_token(lesson):
    speeds, few, many = report_card.speeds(PRECISIONS)["bf16"], step_of("single"), step_of("chat")
    one, step = (1e3 * row["seconds"] / row["steps"] for row in (few, many))
    lesson.says(f"Why {speeds[3000] / speeds[1]:.0f} times cheaper, not 3,000?")
    lesson.says(f"a step takes longer, by a factor of {step / one:.0f}")
    tokens = many["output_tokens"] / many["steps"]
    lesson.says(f"a step yields {round(tokens, -2):,.0f} tokens on average")
    gptq = next(r for r in records.read(report_card.QUALITY)["results"] if r["quantization"] == "gptq")
    lesson.says(f"in the same record it has {gptq['accuracy']:.1%} and a KL of {gptq['kl']:.4f}")
    quality = records.read(report_card.QUALITY)["results"]
    assert {row["questions"] for row in quality if row["quantization"] in ("float32", "fp8", "int4")} == {2160}
    count = parameters(read_config(EMBEDDED))
    lesson.says(f"A model of {count / 1e6:.1f} million parameters")
    lesson.says("a model 1/450 of the size")
    assert WEIGHTS / count == pytest.approx(450, rel=0.02)
    dollars = float(re.search(r"^DOLLARS = (\S+)", TEXT, re.MULTILINE)[1])
    here = float(re.search(r"^PER_HOUR = .* else (\S+)", TEXT, re.MULTILINE)[1])
    lesson.says("costs 1/35 as much")
    assert dollars / here == pytest.approx(35)


def test_the_loads_are_as_long_as_the_lesson_says(lesson):
    scale = {"cpu": 8, "gpu": 1}
    assert 'scale = {"cpu": 8, "gpu": 1}[here.name]' in TEXT
    chat = workloads.find("chat")
    assert chat.input_range == chat.output_range == (128, 128)
    cpu, gpu = (128 // scale[name] for name in ("cpu", "gpu"))
    lesson.says(f"On a CPU a request has {cpu} tokens in and {cpu} out, on a GPU {gpu} and {gpu}")
    lesson.says("On a CPU, lengths are divided by 16")
    assert '"cpu": {"scale": 16,' in TEXT


def test_the_course_ends_with_the_learners_own_numbers(lesson):
    """After the recorded card come the rows of this machine, then the learner's predictions, and nothing else."""
    _, end = lesson.printed.split("requests at once: fp8 is cheapest")
    engine, yours = (re.search(rf"^{name} +(.*)$", end, re.MULTILINE) for name in ("the engine", "yours"))
    assert engine.start() < yours.start() < end.index("predicted   measured")
    assert all(len(row[1].split()) == 6 for row in (engine, yours)), "GB, price, tokens/s and three waits"
    assert "did not run" not in lesson.printed and "requests failed" not in lesson.printed
    learners = Lesson("99", LEARNER).printed
    assert "yours: no part is solved yet\nwith all your parts: no prediction, not measured\n" in learners


def test_the_engines_speed_is_the_mean_of_its_two_runs(lesson):
    """On the card, and in the lines of section 17, whose first and last are on two sides of 1."""
    lesson.says("All lines are divided by the mean of its two runs.", "The engine's is again the mean of its two runs,")
    names = (under_load.ENGINE, under_load.AGAIN)
    speeds = [lesson.number(rf"^{name}: ([\d,]+) tokens/s$") for name in names]
    assert lesson.numbers(r"^the engine's runs: ([\d,]+) and ([\d,]+) tokens/s$") == tuple(speeds)
    first, last = (lesson.number(rf"^{name} +([\d.]+)$") for name in (under_load.ENGINE, under_load.AGAIN))
    assert (first + last) / 2 == pytest.approx(1, abs=0.006)


def test_the_caption_of_the_gaps_names_its_axis(lesson):
    lesson.says("A histogram of all gaps between tokens of eight clients, on a logarithmic axis")


def test_gemma_is_loaded_only_if_the_learner_says_so():
    for kind in KINDS:
        assert "not run: RUN_GEMMA is False\nrecorded on " in Lesson("99", kind).printed
