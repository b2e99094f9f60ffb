"""The tool that compares engines with and without drafts: drafts are as right as it says, and the tokens the same."""

import numpy as np

from minillm.speculation import Asked
from tools import speculation_speed as tool


def options(*words: str):
    return tool.parse(["--device", "cpu", "--rounds", "1", "--output-len", "24", "--batches", "1", "2", *words])


def test_drafts_are_as_right_as_asked():
    outputs = [[*range(8), *range(50, 80)], [*range(1, 9), *range(60, 90)]]
    asked = [Asked(str(i), np.array(each[:12], np.int32), 4) for i, each in enumerate(outputs)]
    assert tool.Known(outputs, 1.0, 100).propose(asked) == [[54, 55, 56, 57], [64, 65, 66, 67]]
    assert tool.Known(outputs, 0.0, 100).propose(asked) == [[55, 56, 57, 58], [65, 66, 67, 68]]
    half = tool.Known(outputs, 0.5, 100)
    right = [a == b for _ in range(400) for a, b in zip(half.propose(asked)[0], (54, 55, 56, 57), strict=True)]
    assert 0.45 < np.mean(right) < 0.55


def test_rows_say_what_ran():
    (alone, both) = tool.worst(options())
    assert (alone["requests"], both["requests"], both["output_tokens"]) == (1, 2, 48)
    for row in (alone, both):
        assert row["accepted_tokens"] == 0 and row["same_tokens"] and len(row["speedups"]) == 1
    one, two = tool.synthetic(options("--right", "1"))
    for row in (one, two):
        assert row["synthetic_acceptance"] and row["same_tokens"] and row["steps_with"] < row["steps_without"] / 4
        assert row["acceptance_length"] > 6 and row["accepted_tokens"] == row["draft_tokens"]
    assert not list(tool.draft(options())), "there is no draft model"
