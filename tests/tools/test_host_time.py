"""The tool that measures the host's time between drafted steps: drafts run, and every gap between them is counted."""

import pytest
import torch

pytest.importorskip("triton", reason="graphs need triton, which is not installed here")

from tools import host_time as tool


@pytest.mark.parametrize("streams", [False, True])
def test_gaps_are_those_between_steps_with_drafts(streams, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    found = tool.measured(2, streams, drafts=3, output=40)
    assert 1 < found["acceptance_length"] <= 4, "of the text's tokens, one in six cannot be known"
    assert 40 / 4 <= found["steps"] < 40
    assert 0 < found["gap_cpu_us"] < found["step_us"] and found["ahead"] == 0


def test_steps_are_launched_ahead_where_the_device_drafts(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    found = tool.measured(2, False, drafts=3, output=60, ahead=True)
    assert 1 < found["acceptance_length"] <= 4 and 60 / 4 <= found["steps"] < 60
    assert found["ahead"] > 0.5 and found["gap_us"] == 0
