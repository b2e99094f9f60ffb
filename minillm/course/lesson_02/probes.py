"""Look into a model on a CPU: similar tokens, counted operations, where the time of a step goes.  Lesson 02."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm.advice import sizing
from minillm.bench import roofline
from minillm.model.config import ModelConfig
from minillm.model.decoder import Model
from minillm.ops.reference import linear, lm_head, rotary_embedding
from minillm.tokenizer import Tokenizer


def neighbors(model: Model, tokenizer: Tokenizer, word: str, count: int = 5) -> list[str]:
    """The tokens whose embeddings have the smallest angles to that of `word`, a single token."""
    directions = F.normalize(model.embedding.dequantize(), dim=-1)
    (token,) = tokenizer.encode(word, add_special_tokens=False)
    nearest = (directions @ directions[token]).topk(count + 1).indices[1:]  # the first is the word itself
    return [tokenizer.decode([other]).strip() for other in nearest.tolist()]


def rotated_score(model: Model, q: Tensor, k: Tensor) -> Callable[[int, int], float]:
    """A function of two positions: the dot product of a query and a key [head_dim], rotated to them."""

    def score(query_at: int, key_at: int) -> float:
        rotated, _ = rotary_embedding(q[None, None], k[None, None], model.rotary[[query_at]])
        _, key = rotary_embedding(q[None, None], k[None, None], model.rotary[[key_at]])
        return (rotated * key).sum().item()

    return score


def requests_that_fit(config: ModelConfig, parameters: float, gpu_bytes: float, context: int) -> int:
    """The engine's calculator with the arguments of the exercise; it counts the parameters itself."""
    return sizing.fit(config, gpu_bytes, context).requests


# ---- counting


def multiply_adds(function: Callable, *given: Any) -> int:
    """The multiply-adds of all matrix products in a call, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        function(*given)
    return counter.get_total_flops() // 2  # torch counts a multiplication and an addition as two


def torch_operations(function: Callable, *given: Any) -> int:
    """Return how many torch operations a call starts: products, additions, copies, views."""
    with _Counter() as counter:
        function(*given)
    return counter.count


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def numbers_in_layers(model: Model) -> int:
    """Return how many numbers the matrices of all layers have."""
    return sum(math.prod(weight.shape) for weight in _matrices(model))


def _matrices(model: Model) -> list:
    return [w for layer in model.layers for w in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]


# ---- timing


def milliseconds(function: Callable, *given: Any, repeat: int = 3) -> float:
    """The fastest of several calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function(*given)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def floors_ms(model: Model, multiply_adds: int) -> tuple[float, float]:
    """The least milliseconds of a step on this CPU that does so many multiply-adds, and of one that does few.

    Both read all weights.
    """
    limits = roofline.limits("cpu", model.dtype, model.nbytes)
    reading, computing = model.nbytes / limits.bytes_per_s, 2 * multiply_adds / limits.operations_per_s
    return max(reading, computing) * 1e3, reading * 1e3


def matrix_products(model: Model, tokens: int) -> Callable[[], None]:
    """A function that multiplies `tokens` vectors with every matrix of the layers, and one with the head; no more."""
    weights = _matrices(model)
    vectors = [torch.randn(tokens, weight.shape[1], dtype=model.dtype) for weight in weights]
    last = torch.randn(1, model.config.hidden_size, dtype=model.dtype)

    def products() -> None:
        for x, weight in zip(vectors, weights, strict=True):
            linear(x, weight)
        lm_head(last, model.head)

    return products


def where_the_time_goes(
    model: Model,
    tokens: int,
    without_cache: Callable[[], object],
    with_cache: Callable[[], object],
    with_short_cache: Callable[[], object],
) -> None:
    """Print the parts of a step after `tokens` tokens: matrix products, other operations, keys and values.

    with_short_cache: the step with a single token in the cache.
    """
    naive = milliseconds(without_cache)
    long, short = milliseconds(with_cache, repeat=20), milliseconds(with_short_cache, repeat=20)
    many, one = (milliseconds(matrix_products(model, count), repeat=9) for count in (tokens, 1))
    others = torch_operations(with_short_cache) - len(_matrices(model)) - 1
    each = f"{(short - one) / others * 1e3:.1f} microseconds each"
    products = "the matrix products of the layers and the head"
    print(f"without a cache\n  {many:6.2f} ms  {products}\n  {naive - many:6.2f} ms  the rest")
    print(f"with a cache\n  {one:6.2f} ms  {products}")
    print(f"  {short - one:6.2f} ms  {others} other operations, with one token in the cache: {each}")
    print(f"  {long - short:6.2f} ms  {tokens - 2} more tokens in the cache")
