"""What a checker says of two results that differ."""

import math

import pytest
import torch

from minillm.course.shared.differences import apart, assert_near, difference


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        ([3.0], [3.0], ""),
        ([3.0], [3.5], "expected 3, got 3.5"),
        ([1.0], [1.00000001], "expected 1, got 1.00000001"),
        ([1.0, 2, 4], [1.0, 2.5, 9], "expected [1, 2, 4], got [1, 2.5, 9]"),
        ([[1.0, 2]], [[1.0, math.nan]], "expected [1, 2], got [1, nan]"),
        ([math.nan, math.inf], [math.nan, math.inf], ""),
        ([math.inf, 1.0], [-math.inf, 1.0], "expected [inf, 1], got [-inf, 1]"),
        ([math.inf, 1.0], [5.0, 1.0], "expected [inf, 1], got [5, 1]"),
        ([5.0, 1.0], [math.inf, 1.0], "expected [5, 1], got [inf, 1]"),
    ],
)
def test_a_difference_is_shown_with_its_position_and_enough_digits(expected, found, said):
    got = difference(*(torch.tensor(each, dtype=torch.float64) for each in (found, expected)))
    assert got == said


def test_of_many_numbers_the_one_that_differs_most_is_shown():
    expected = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    found = expected.clone()
    found[1, 2] += 2.0**-20  # both round to 6
    found[2, 3] += 2.0**-22
    said = "expected 6 at [1, 2], got 6.000001 (2 of 12 numbers differ, this one most)"
    assert difference(found, expected) == said
    assert difference(found, expected, absolute=2.0**-21).endswith("(1 of 12 numbers differ)")
    assert difference(found, expected, absolute=2.0**-20) == ""


def test_the_largest_difference_is_measured_in_what_is_allowed():
    expected, found = torch.tensor([1000.0, *[1.0] * 7]), torch.tensor([1001.0, *[1.0] * 6, 1.5])
    relative = difference(found, expected, relative=1e-4)
    assert "at [7]" in relative and relative.endswith(
        "(2 of 8 numbers differ; this is the largest relative difference)"
    )
    absolute = difference(found, expected, absolute=1e-4)
    assert "at [0]" in absolute and absolute.endswith("(2 of 8 numbers differ, this one most)")
    assert difference(found, expected, relative=0.6) == ""


@pytest.mark.parametrize("off", [1.0, math.nan])
def test_none_of_equal_differences_is_called_the_largest(off):
    expected = torch.zeros(8)
    assert difference(expected + off, expected, absolute=0.5).endswith("(8 of 8 numbers differ)")
    assert difference(expected + off, expected, absolute=0.5, relative=0.5).endswith("(8 of 8 numbers differ)")


@pytest.mark.parametrize("other", [1 + 2.0**-52, 1.1, -1.0, math.nan, math.inf])
def test_two_numbers_are_told_apart(other):
    one, another = apart(1.0, other)
    assert one != another and (float(another) == other or math.isnan(other))


def test_equal_numbers_have_few_digits():
    assert apart(1 / 3, 1 / 3) == ("0.333333", "0.333333")


def test_the_message_begins_with_what_was_computed():
    with pytest.raises(AssertionError, match=r"^the sum: expected 1, got 2$"):
        assert_near(torch.tensor(2.0), torch.tensor(1.0), "the sum", relative=0.1)
