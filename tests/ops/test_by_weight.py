"""Operations are dispatched on the weight's class."""

import pytest
import torch

from minillm.ops import reference
from minillm.ops.by_weight import ByWeight
from minillm.quantization import DenseWeight

pytestmark = pytest.mark.key


class Doubled(DenseWeight):
    """A format without a registered implementation."""


def test_the_implementation_of_the_weights_class_runs_or_the_default():
    linear = ByWeight(reference.linear)

    @linear.register(DenseWeight)
    def _(x, weight):
        return "dense"

    x, matrix = torch.randn(2, 3), torch.randn(4, 3)
    assert linear(x, DenseWeight(matrix)) == "dense"
    assert linear(x, Doubled(matrix)).equal(x @ matrix.t())
