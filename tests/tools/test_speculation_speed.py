"""The tool that compares engines with and without drafts: drafts are as right as it says, and the tokens the same."""

import numpy as np

from minillm.scheduler import Step
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


def test_a_coin_accepts_drafts_whatever_the_model_samples():
    ones = np.ones(2, np.int32)
    step = Step(1, np.arange(2), 9 * ones, np.array([4, 2]), ones > 0, 1, 4)
    step.drafts = np.array([[5, 6, 7], [5, -1, -1]], np.int32)
    sampled = np.arange(10, 16)  # all others than the drafts
    for right, accepted in ((1.0, [4, 2]), (0.0, [1, 1])):
        results = tool.by_coin(right)(step, sampled)
        assert results.accepted.tolist() == accepted
        assert results.tokens.tolist() == [[10, 11, 12, 13], [14, 15, -1, -1]]
    third = [tool.by_coin(1 / 3)] * 600
    accepted = np.array([each(step, sampled).accepted for each in third])
    assert abs((accepted[:, 0] > 1).mean() - 1 / 3) < 0.06 and abs((accepted[:, 0] > 2).mean() - 1 / 9) < 0.05


def test_exact_engines_are_compared_with_others():
    (alone, both) = tool.exact(options("--parts", "exact"))
    assert (alone["requests"], both["requests"], both["dtype"]) == (1, 2, "float32")
    assert both["ratios"] == [both["times_as_long"]] and len(both["seconds_with"]) == 1


def test_rows_say_what_ran():
    (alone, both) = tool.worst(options())
    assert (alone["requests"], both["requests"], both["output_tokens"]) == (1, 2, 48)
    for row in (alone, both):
        assert row["accepted_tokens"] == 0 and row["same_tokens"] and len(row["speedups"]) == 1
    rows = list(tool.synthetic(options("--right", "1", "--drafts", "7", "3")))
    assert [(row["requests"], row["drafts"]) for row in rows] == [(1, 7), (1, 3), (2, 7), (2, 3)]
    for row in rows:
        assert row["synthetic_acceptance"] and row["same_tokens"] and not row["accepted_by_coin"]
        assert row["accepted_tokens"] == row["draft_tokens"] and row["steps_with"] < row["steps_without"] / 2
        assert row["drafts"] - 1 < row["acceptance_length"] <= row["drafts"] + 1
    assert not list(tool.draft(options())), "there is no draft model"
