"""Count and time what a lesson's own Python forward pass does on a CPU.  Lesson 02."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm.model.decoder import Model
from minillm.ops.reference import linear, lm_head


def multiply_adds(function: Callable, *given: Any) -> int:
    """The multiply-adds of all matrix products in a call, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        function(*given)
    return counter.get_total_flops() // 2  # torch counts a multiplication and an addition as two


def torch_operations(function: Callable, *given: Any) -> int:
    """How many torch operations a call starts: products, additions, copies, views."""
    with _Counter() as counter:
        function(*given)
    return counter.count


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def milliseconds(function: Callable, *given: Any, repeat: int = 3) -> float:
    """The fastest of several calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function(*given)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def matrix_products(model: Model, tokens: int) -> Callable[[], None]:
    """A function that multiplies `tokens` vectors with every matrix of the layers, and one with the head; no more."""
    weights = [w for layer in model.layers for w in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]
    vectors = [torch.randn(tokens, weight.shape[1], dtype=model.dtype) for weight in weights]
    last = torch.randn(1, model.config.hidden_size, dtype=model.dtype)

    def products() -> None:
        for x, weight in zip(vectors, weights, strict=True):
            linear(x, weight)
        lm_head(last, model.head)

    return products
