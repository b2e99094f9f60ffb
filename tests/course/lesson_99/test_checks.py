"""Lesson 99's checker of attention accepts new tensors that are made elsewhere and then moved to q's device."""

import pytest
import torch

from minillm.course.lesson_99.checks_attention import batched_attention
from tests.course.mutants.lesson_99_attention import attend, repeated


@pytest.mark.parametrize("target", ["device", "tensor", "device and dtype", "keyword"])
def test_a_tensor_may_be_moved_to_the_device_of_q(target):
    def moves(q, k, v, lengths, scale):
        to = {
            "device": lambda made: made.to(q.device),
            "tensor": lambda made: made.to(lengths),
            "device and dtype": lambda made: made.to(q.device, torch.int32),
            "keyword": lambda made: made.to(device=q.device),
        }[target]
        return attend(q, *repeated(q, k, v), to(torch.arange(k.shape[1])) >= lengths[:, None], scale)

    assert [result.problem for result in batched_attention.examine(moves) if result.problem is not None] == []
