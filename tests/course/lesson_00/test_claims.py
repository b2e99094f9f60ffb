"""What lesson 00 says about an H200, and what its cells print of tiny-gemma."""

import re

import pytest

from minillm.course.lesson_00 import step_time
from minillm.course.making import build
from minillm.course.making.lesson import convert
from minillm.model.config import PRESETS, ModelConfig
from minillm.model.loader import EMBEDDED
from tests.course.lesson import KINDS, Lesson, solved
from tests.course.mutants.lesson_00 import writes_into_the_prompt

lesson = solved("00")


def test_64_requests_take_hardly_longer_than_one_on_an_h200():
    lesson.says(
        "There, a step of 64 requests takes 1.5 times as long as a step of one. Its floor is only 1.02 times as high",
        "a step of 512 takes 1.7 times as long as one of 256",
    )
    there, points = step_time.recorded("h200/roofline")
    of = {point.tokens: point for point in points if point.name.startswith("decode")}
    assert of[64].seconds / of[1].seconds == pytest.approx(1.5, abs=0.05)
    assert of[64].floor(there) / of[1].floor(there) == pytest.approx(1.02, abs=0.005)
    assert of[512].seconds / of[256].seconds == pytest.approx(1.7, abs=0.05)


def test_the_requests_of_that_step_have_short_texts():
    lesson.says(
        "a server can decode for 64 users with short texts at one and a half times the cost of one",
        "With 2,000 each, reading the caches would add almost half of the weights' bytes to a step.",
        "each request has only 76 tokens in its cache",
    )
    _, points = step_time.recorded("h200/roofline")
    (many,) = (point for point in points if point.name == "decode, 64 at once")
    (prompt, *_) = (point for point in points if point.name.startswith("prefill"))
    gemma = PRESETS["gemma-2b"]
    weights, of_token = prompt.bytes, 2 * gemma.num_layers * gemma.num_kv_heads * gemma.head_dim * 2
    assert many.bytes - weights == 64 * 76 * of_token
    assert 0.45 < 64 * 2000 * of_token / weights < 0.5


def test_attention_would_add_a_sixth_to_the_operations_of_a_prefill():
    lesson.says("in the prefill of `tiny-gemma`, it would add about a sixth to the operations")
    tiny = ModelConfig.from_directory(EMBEDDED)
    pairs = 400 * 401 // 2  # a token attends to itself and to those before it
    # A product of queries and keys, and one of weights and values: a multiplication and an addition each.
    attention = 2 * 2 * pairs * tiny.num_heads * tiny.head_dim * tiny.num_layers
    counted = 1e6 * lesson.number(r"^prefill of 400 +[\d.]+ MB +([\d,.]+) million operations")
    assert attention / counted == pytest.approx(1 / 6, abs=0.015)


def test_the_first_read_rate_is_that_of_a_smaller_buffer_and_a_cpu_has_one_rate_of_arithmetic():
    lesson.says("the first of the two read rates", "with the read rate measured on a buffer of the model's size")
    reads = re.findall(r"^reads ([\d,]+) MB repeatedly", lesson.printed, re.MULTILINE)
    assert reads == ["22", "537"] and lesson.printed.count("billion operations/s in float32") == 1


def test_a_faster_read_leaves_room_for_fewer_tokens():
    lesson.says("with 4 bytes per number and 200 billion operations/s, 12 at 33 GB/s and 3 at 130 GB/s")
    assert [step_time.free_batch(10**6, 4, rate, 200e9) for rate in (33e9, 130e9)] == [12, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_products_alone_take_several_times_the_floor(kind):
    printed = Lesson("00", kind)
    printed.says("On their own, they can also take several times the floor", "each of the 25 products")
    products = printed.number(r"^ *([\d.]+) ms  25 matrix products$")
    assert products > 3 * printed.number(r"^decode, 1 at once +at least +([\d.]+) ms$")


def test_the_floors_use_the_first_of_two_measurements_of_the_arithmetic():
    lesson.says("the line shows the second, and the floors in section 5 use the first, which may differ slightly")
    shown = lesson.number(r"^computes ([\d.]+) billion operations/s")
    operations = lesson.number(r"^decode, 64 at once +[\d.]+ MB +([\d,.]+) million operations")
    used = operations / lesson.number(r"^decode, 64 at once +at least +([\d.]+) ms$")
    assert used == pytest.approx(shown, rel=0.05)


def test_reading_the_weights_takes_most_of_a_step_there():
    lesson.says("reading 5 GB takes most of the time")
    there, points = step_time.recorded("h200/roofline")
    assert points[0].tokens == 1 and points[0].bytes == pytest.approx(5e9, rel=0.02)
    assert points[0].bytes / there.bytes_per_s > 0.75 * points[0].seconds


def test_the_largest_steps_come_nearest_to_the_flat_part():
    lesson.says("decode points climb the slope as more requests share a step, and the largest steps come nearest")
    there, points = step_time.recorded("h200/roofline")
    rates = [point.rate for point in points if point.name.startswith("decode")]
    assert rates == sorted(rates) and max(points, key=lambda point: point.rate).tokens >= 512


def test_a_loop_that_writes_into_the_prompt_gets_a_copy_of_it(monkeypatch, capsys):
    """So its second run has the prompt of the first."""
    monkeypatch.setenv("MINILLM_TIER", "cpu")
    (source,) = build.sources(["00"])
    codes = [cell.source for cell in convert(source).cells if cell.cell_type == "code"]
    names: dict = {"continue_text": writes_into_the_prompt}
    for begin in ("import math", "here = tier()", "def greedy", "def piece", "def next_token", "def engines_loop"):
        (code,) = (each for each in codes if each.startswith(begin))
        exec(code.split("\n\n\nbeginning = ")[0], names)  # without the picture
    names["llm"].close()
    assert "the same tokens as the engine: True" in capsys.readouterr().out
    assert len(names["ids"]) == len(names["completion"].prompt_token_ids) == 8


def test_sizes_and_calls_of_tiny_gemma():
    lesson.says(
        "The weights are 22 MB",
        "Now it runs inside the engine, once in each of 40 steps.",
        "In `tiny-gemma` that is 6 layers × 39 decode steps, and 6 layers × 1 prefill.",
    )
    assert round(lesson.number(r"^([\d.]+) MB in memory")) == 22
    assert lesson.number(r"^calls of your rms_norm: \{'rms_norm': (\d+)\}$") == 40
    assert lesson.numbers(r"'decode_attention': (\d+), 'prefill_attention': (\d+)") == (6 * 39, 6)
