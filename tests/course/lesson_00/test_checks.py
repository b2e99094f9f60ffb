"""Lesson 00's checker of the free batch has hints that fit the mistake."""

import math

from minillm.course.lesson_00.checks import free_batch


def test_rounding_up_is_not_told_to_search_further():
    def rounds_up(numbers, bytes_per_number, bytes_per_s, operations_per_s):
        return math.ceil(bytes_per_number * operations_per_s / (2 * bytes_per_s))

    failed = {result.name: result.problem for result in free_batch.examine(rounds_up) if result.problem}
    assert list(failed) == ["only whole tokens", "slow arithmetic leaves no room"]
    assert "round down" in failed["only whole tokens"]
