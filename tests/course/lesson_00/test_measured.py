"""The times in lesson 00's committed notebooks fit its text and each other, as they do not if the machine was busy.

Only ratios are held: times differ between machines.
"""

import pytest

from tests.course.lesson import KINDS, Lesson

MEASURED = r".* measured ([\d,.]+) "


@pytest.fixture(params=KINDS)
def lesson(request):
    return Lesson("00", request.param)


def milliseconds(lesson, step: str) -> float:
    return lesson.number(rf"^{step}: {MEASURED}ms ")


def test_nothing_says_that_other_programs_ran(lesson):
    assert "Other programs" not in lesson.printed and "close other programs" not in lesson.printed


def test_a_prefill_of_400_tokens_takes_nowhere_near_400_steps_in_both_sections(lesson):
    lesson.says("takes nowhere near 400 times as long")
    prefill = lesson.number(rf"^the prefill:{MEASURED}decode steps$")
    again = milliseconds(lesson, "prefill of 400") / milliseconds(lesson, "decode, 1 at once")
    assert 6 < prefill < 30 and prefill / again == pytest.approx(1, abs=0.5)


def test_32_tokens_stay_far_below_16_times_two(lesson):
    lesson.says("32 tokens need 16 times the arithmetic of two.", "The measured times stay far below it.")
    times = lesson.number(rf"^32 tokens:{MEASURED}times two tokens$")
    two, many = (lesson.number(rf"^batch of +{tokens}: +([\d.]+) ms$") for tokens in (2, 32))
    assert times == pytest.approx(many / two, rel=0.02) and 1 < times < 8


def test_more_tokens_cost_more_time_beyond_the_free_batch_only(lesson):
    lesson.says("Right of it, the arithmetic takes longer than the reading, so more tokens cost more time.")
    of = {tokens: lesson.number(rf"^batch of +{tokens}: +([\d.]+) ms$") for tokens in (2, 8, 32, 128)}
    assert of[8] < 1.6 * of[2] and of[128] > 1.8 * of[32]
    assert 2 < lesson.number(r": on this machine (\d+) tokens$") < 32


def test_one_request_is_far_above_its_floor_and_more_take_longer(lesson):
    lesson.says("On a CPU, the step for one request is far above its floor.")
    above = lesson.number(r"^decode, 1 at once: .* \(([\d.]+) times the floor\)$")
    assert 2 < above < 40
    one, some, many = (milliseconds(lesson, f"decode, {requests} at once") for requests in (1, 8, 64))
    assert one < some < many < 64 * one


def test_the_overhead_of_64_requests_is_far_from_64_times_that_of_one(lesson):
    lesson.says("it grows far less than 64-fold when the requests do", "the products that use them are only a part")
    one, many = lesson.numbers(r"^overhead: ([\d.]+) ms; of 64 requests ([\d.]+) ms$")
    times = lesson.number(rf"^overhead of 64:{MEASURED}times one$")
    assert times == pytest.approx(many / one, rel=0.02) and 2 < times < 12
    step = lesson.number(r"^a decode step of one request: ([\d.]+) ms, of which$")
    assert one > step / 3, "most of the step is no product"
    assert step / milliseconds(lesson, "decode, 1 at once") == pytest.approx(1, abs=0.4)
