"""A step's work, counted, and where its time goes on a CPU.  Lesson 00."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from minillm.runner.executor import LocalExecutor, WatchedExecutor
from minillm.runner.launched import StepInFlight
from minillm.scheduler.step import Step

ROUNDS, STEPS, CONTEXT = 7, 8, 64
UNSTEADY = 1.5  # a typical round may take this many times as long as the fastest


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
    """A decode step, in seconds: of each round of measurements the median, and of these the least.

    products: its matrix products alone, in a loop. calls: how many torch operations it calls, views included, besides
    the products. nbytes: of the weights. smallest: the seconds of one operation on one number. rounds: the seconds of
    a step and of its products in each round.
    """

    nbytes: int
    calls: Counter[str] = field(default_factory=Counter)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    smallest: float = math.inf

    @property
    def step(self) -> float:
        return min(step for step, _ in self.rounds)

    @property
    def products(self) -> float:
        return min(products for _, products in self.rounds)

    @property
    def steady(self) -> bool:
        """Return whether most rounds were about as fast as the fastest: if not, other programs may have run in all."""
        typical = [statistics.median(each) for each in zip(*self.rounds, strict=True)]
        return self.products < self.step and typical[0] < UNSTEADY * self.step and typical[1] < UNSTEADY * self.products

    @property
    def others(self) -> int:
        return self.calls.total() - self.calls["aten::linear"]

    @property
    def overhead(self) -> float:
        """The seconds of everything but the matrix products; above 0 if the measurement is `steady`."""
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


def step_times(*batches: int) -> list[StepTime]:
    """Measure decode steps of the embedded model on this machine's CPU, one for each number of requests.

    They take turns, so that a program that runs for a while disturbs a round of all, and not all rounds of one.
    """
    with ExitStack() as open_engines:
        decodes = [open_engines.enter_context(_decoding(requests)) for requests in batches]
        for _ in range(ROUNDS):
            for decode in decodes:
                decode.measure()
        return [decode.found for decode in decodes]


@contextmanager
def _decoding(requests: int) -> Iterator["_Decode"]:
    """The embedded model on the CPU, with this many requests whose prompts have been computed."""
    with LLM(device="cpu", run_ahead=0, enable_prefix_caching=False) as llm:
        engine = llm.engine
        params = SamplingParams(max_tokens=2 * ROUNDS * STEPS, temperature=0, ignore_eos=True)
        for seed in range(requests):
            engine.submit(engine.prepare(list(range(10 + seed, 10 + seed + CONTEXT)), params))
        while engine.stats()["waiting"]:
            engine.step()
        for _ in range(10):
            engine.step()
        yield _Decode(llm, requests)


class _Decode:
    """Measures a decode step of an engine that has this many requests, in rounds."""

    def __init__(self, llm: LLM, requests: int) -> None:
        self.engine = llm.engine
        self.found = StepTime(llm.engine.model.nbytes)
        self._weights = _weights(llm)
        self._inputs = [torch.ones(requests, weight.shape[1]) for weight in self._weights]
        self._one = torch.ones(1)

    @torch.inference_mode()
    def measure(self) -> None:
        """Add a round: steps, their products alone, and small operations, all with as many threads as a step uses."""
        step = _median(self.engine.step, STEPS)
        if not self.found.calls:
            with _Counting() as counting:
                self.engine.step()
            self.found.calls = counting.calls
        executor = self.engine.executor
        assert isinstance(executor, LocalExecutor) and executor.threads is not None
        with executor.threads.chosen():
            self.found.rounds.append((step, _median(self._products, STEPS)))
            self.found.smallest = min(self.found.smallest, _median(self._small, STEPS) / 100)

    def _products(self) -> None:
        for x, weight in zip(self._inputs, self._weights, strict=True):
            F.linear(x, weight)

    def _small(self) -> None:
        for _ in range(100):
            self._one.mul_(1.0)


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
