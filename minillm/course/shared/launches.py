"""Count what a torch function or a layer of the model launches, in bytes and least time.  Lessons 03 and 11.

Tensors on the device `meta` have a shape and no data, so launches of the full model can be counted on any machine.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.bench import records
from minillm.model.config import ModelConfig
from minillm.ops import reference

PRODUCT, ATTENTION = "matrix product", "attention"
BY_TORCH, FUSED = "torch, line by line", "one fused kernel"


class Launch(NamedTuple):
    """A kernel launch. kind: its color in a drawing."""

    kind: str
    name: str
    nbytes: int


class _Traffic(TorchDispatchMode):
    """Notes each operation that torch runs, with the bytes of all its inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:  # a view moves nothing
            tensors = [each for each in tree_leaves((args, kwargs, result)) if torch.is_tensor(each)]
            name = function.name().removeprefix("aten::").split(".")[0].strip("_")
            self.launches.append((name, sum(each.nbytes for each in tensors)))
        return result


def launches_of(function: Callable[..., Any], *given: Any) -> list[tuple[str, int]]:
    """(operation, bytes read and written) of each kernel that a torch function launches.  Lesson 03."""
    with _Traffic() as traffic:
        function(*given)
    return traffic.launches


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor with a shape and no data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def h200_times(operation: str, rows: tuple[int, ...] = (1, 512, 3000)) -> dict[int, tuple[float, float]]:
    """Microseconds that Gemma 2B's operation took on an H200: rows -> (line by line, in one kernel).  Lesson 03."""
    of = {(each["kernel"], each["rows"]): each for each in records.read("h200/kernels")["results"]}
    return {each: (1e3 * of[operation, each]["reference_ms"], 1e3 * of[operation, each]["ms"]) for each in rows}


def h200_us(nbytes: float) -> float:
    """Microseconds for an H200 to move so many bytes, at the bandwidth that was measured.  Lesson 03."""
    return 1e6 * nbytes / records.read("h200/roofline")["bytes_per_s"]


def one_layer(model: ModelConfig, rows: int, keys: int, *, fused: bool) -> list[Launch]:
    """The launches of one layer in a decode step of `rows` requests with `keys` cached tokens each.

    fused: one kernel per operation, which reads each input once and writes each output once; otherwise torch's
    kernels, line by line. Matrix products, attention and the cache write are the engine's in both. Attention has a
    second launch, which combines what the first one made of parts of the keys; its few bytes count as none. The
    engine's kernel that rotates and writes to the cache at once is in neither.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    dim, heads, kv_heads = model.head_dim, model.num_heads, model.num_kv_heads
    x, gate_up, weight = empty(rows, hidden), empty(rows, 2 * inner), empty(hidden, dtype=torch.float32)
    q, k, angles = empty(rows, heads, dim), empty(rows, kv_heads, dim), empty(rows, 2, dim)
    if fused:
        rotary = [Launch(FUSED, "", 2 * (2 * q.numel() + 2 * k.numel() + angles.numel()))]
        norm = [Launch(FUSED, "", 2 * 4 * x.numel())]
        gate = [Launch(FUSED, "", 2 * gate_up.numel() * 3 // 2)]
    else:
        rotary = _by_torch(reference.rotary_embedding, q, k, angles)
        norm = _by_torch(reference.add_rms_norm, x, x, weight, 1e-6)
        gate = _by_torch(reference.gated_activation, gate_up, "gelu_tanh")
    return [
        matrix_product("qkv", hidden, (heads + 2 * kv_heads) * dim, rows),
        *rotary,
        Launch(FUSED, "", 2 * 4 * k.numel()),  # keys and values are read and written
        Launch(ATTENTION, "attention", 2 * rows * (2 * keys * kv_heads + 2 * heads) * dim),
        Launch(ATTENTION, "", 0),
        matrix_product("out", heads * dim, hidden, rows),
        *norm,
        matrix_product("gate and up", hidden, 2 * inner, rows),
        *gate,
        matrix_product("down", inner, hidden, rows),
        *norm,
    ]


def five_launches(model: ModelConfig, keys: int) -> list[Launch]:
    """The launches of one layer in the fused step of one request (`kernels/single_row.py`).  Lesson 11."""
    hidden, inner = model.hidden_size, model.intermediate_size
    dim, heads, kv_heads = model.head_dim, model.num_heads, model.num_kv_heads
    return [
        matrix_product("norm, qkv", hidden, (heads + 2 * kv_heads) * dim, 1),
        Launch(ATTENTION, "", 2 * (2 * keys * kv_heads + 2 * heads) * dim),
        matrix_product("out", heads * dim, hidden, 1),
        matrix_product("sum, norm, gate and up, GeGLU", hidden, 2 * inner, 1),
        matrix_product("down", inner, hidden, 1),
    ]


def matrix_product(name: str, columns: int, out: int, rows: int) -> Launch:
    return Launch(PRODUCT, name, 2 * (columns * out + rows * (columns + out)))


def least_us(layer: list[Launch], bytes_per_s: float, shortest_us: float) -> list[tuple[str, str, float]]:
    """(kind, name, microseconds) of each launch: its bytes at full bandwidth, but at least `shortest_us`."""
    return [(kind, name, max(1e6 * nbytes / bytes_per_s, shortest_us)) for kind, name, nbytes in layer]


def _by_torch(function: Callable[..., Any], *given: Any) -> list[Launch]:
    return [Launch(BY_TORCH, "", nbytes) for _, nbytes in launches_of(function, *given)]
