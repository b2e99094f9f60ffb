"""A step's work, counted, and where its time goes on a CPU.  Lesson 00."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.bench import roofline
from minillm.engine.llm import LLM
from minillm.request import SamplingParams

STEPS, CONTEXT = 40, 64


def step_work(matrices: Sequence[tuple[int, int, int]], bytes_per_number: int) -> tuple[int, int]:
    """(bytes read, operations) of multiplying each matrix of (rows, columns) with its number of tokens."""
    used = [(rows, columns, tokens) for rows, columns, tokens in matrices if tokens]
    work = [roofline.matrix_work([(rows, columns)], tokens, bytes_per_number) for rows, columns, tokens in used]
    return sum(nbytes for nbytes, _ in work), sum(operations for _, operations in work)


def free_batch(numbers: int, bytes_per_number: int, bytes_per_s: float, operations_per_s: float) -> int:
    """The most tokens whose arithmetic takes no longer than reading the weights once, by doubling and halving."""

    def is_free(tokens: int) -> bool:
        nbytes, operations = roofline.matrix_work([(numbers, 1)], tokens, bytes_per_number)
        return operations / operations_per_s <= nbytes / bytes_per_s

    step = 1
    while is_free(step):
        step *= 2
    tokens = 0
    while step := step // 2:
        tokens += step * is_free(tokens + step)
    return tokens


@dataclass
class StepTime:
    """A decode step of one request, in seconds (medians).

    products: its matrix products alone, in a loop. calls: how many torch operations it calls, views included, besides
    the products. nbytes: of the weights. smallest: the seconds of one operation on one number.
    """

    step: float
    products: float
    nbytes: int
    calls: Counter[str] = field(default_factory=Counter)
    smallest: float = 0.0

    @property
    def others(self) -> int:
        return self.calls.total() - self.calls["aten::linear"]

    @property
    def parts(self) -> dict[str, float]:
        """The step's seconds, split: products, calls of other operations at the price of the smallest, the rest."""
        calling = min(self.others * self.smallest, max(0.0, self.step - self.products))
        return {
            f"{self.calls['aten::linear']} matrix products": self.products,
            f"{self.others} other torch operations, each as if on one number": calling,
            "the rest: the engine's Python, and what those operations compute": max(
                0.0, self.step - self.products - calling
            ),
        }


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def step_time() -> StepTime:
    """Measure a decode step of the embedded model on this machine's CPU."""
    with LLM(device="cpu", run_ahead=0, enable_prefix_caching=False) as llm:
        engine = llm.engine
        params = SamplingParams(max_tokens=2 * STEPS, temperature=0, ignore_eos=True)
        engine.submit(engine.prepare(list(range(10, 10 + CONTEXT)), params))
        for _ in range(10):
            engine.step()
        step = _median(engine.step, STEPS)
        with _Counting() as counting:
            engine.step()
        weights = _weights(llm)
        inputs = [torch.ones(1, weight.shape[1]) for weight in weights]
        one = torch.ones(1)

        def products() -> None:
            for x, weight in zip(inputs, weights, strict=True):
                F.linear(x, weight)

        def small() -> None:
            for _ in range(100):
                one.mul_(1.0)

        with torch.inference_mode():
            nbytes, smallest = llm.engine.model.nbytes, _median(small, STEPS) / 100
            return StepTime(step, _median(products, STEPS), nbytes, counting.calls, smallest)


def _weights(llm: LLM) -> list[torch.Tensor]:
    model = llm.engine.model
    layers = [weight for each in model.layers for weight in (each.qkv, each.attention_out, each.gate_up, each.down)]
    return [weight.dequantize() for weight in (*layers, model.head)]


def _median(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
