"""What lesson 00 says about an H200, and what its cells print of tiny-gemma."""

import pytest

from minillm.course.lesson_00 import step_time
from tests.course.lesson import solved

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


def test_sizes_and_calls_of_tiny_gemma():
    lesson.says(
        "The weights are 22 MB",
        "Now it runs inside the engine, once in each of 40 steps.",
        "In `tiny-gemma` that is 6 layers × 39 decode steps, and 6 layers × 1 prefill.",
    )
    assert round(lesson.number(r"^([\d.]+) MB in memory")) == 22
    assert lesson.number(r"^calls of your rms_norm: \{'rms_norm': (\d+)\}$") == 40
    assert lesson.numbers(r"'decode_attention': (\d+), 'prefill_attention': (\d+)") == (6 * 39, 6)
