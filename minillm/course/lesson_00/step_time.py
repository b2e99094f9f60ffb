"""A step's work, counted, and where its time goes on a CPU.  Lesson 00."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.bench import records, roofline
from minillm.engine.engine import Engine
from minillm.engine.llm import LLM
from minillm.model.config import PRESETS, ModelConfig
from minillm.request import SamplingParams
from minillm.runner.executor import WatchedExecutor
from minillm.runner.launched import StepInFlight
from minillm.scheduler.step import Step

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


@contextmanager
def tokens_of_steps(engine: Engine) -> Iterator[list[int]]:
    """A list that gets the number of tokens of each step that the engine launches in the block."""
    tokens: list[int] = []

    class Counting(WatchedExecutor):
        def launch(self, step: Step) -> StepInFlight:
            tokens.append(int(step.queries.sum()))
            return super().launch(step)

    with engine.running_on(Counting(engine.executor)):
        yield tokens


def without_idle(point: roofline.Point, config: ModelConfig) -> roofline.Point:
    """A prefill's point without the last layer's MLP for all tokens but the last: the engine drops them before it."""
    if not point.name.startswith("prefill"):
        return point
    mlp = 3 * config.hidden_size * config.intermediate_size
    return replace(point, operations=point.operations - 2 * (point.tokens - 1) * mlp)


def recorded(name: str) -> tuple[roofline.PeakRates, list[roofline.Point]]:
    """The limits and the steps of a committed record of `minillm bench roofline`."""
    found = records.read(name)
    points = [without_idle(roofline.Point(**each), PRESETS[found["model"]]) for each in found["results"]]
    return roofline.PeakRates(found["bytes_per_s"], found["operations_per_s"]), points


@dataclass
class StepTime:
    """A decode step, in seconds (medians).

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
    def overhead(self) -> float:
        """The seconds of everything but the matrix products."""
        return max(0.0, self.step - self.products)

    @property
    def parts(self) -> dict[str, float]:
        """The step's seconds, split: products, calls of other operations at the price of the smallest, the rest."""
        calling = min(self.others * self.smallest, self.overhead)
        return {
            f"{self.calls['aten::linear']} matrix products": self.products,
            f"{self.others} other torch operations, each as if on one number": calling,
            "the rest: the engine's Python, and what those operations compute": self.overhead - calling,
        }


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def step_time(requests: int = 1) -> StepTime:
    """Measure a decode step of the embedded model, for this many requests at once, on this machine's CPU."""
    with LLM(device="cpu", run_ahead=0, enable_prefix_caching=False) as llm:
        engine = llm.engine
        params = SamplingParams(max_tokens=2 * STEPS, temperature=0, ignore_eos=True)
        for seed in range(requests):
            engine.submit(engine.prepare(list(range(10 + seed, 10 + seed + CONTEXT)), params))
        while engine.scheduler.waiting:
            engine.step()
        for _ in range(10):
            engine.step()
        step = _median(engine.step, STEPS)
        with _Counting() as counting:
            engine.step()
        weights = _weights(llm)
        inputs = [torch.ones(requests, weight.shape[1]) for weight in weights]
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
