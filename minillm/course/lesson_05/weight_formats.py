"""Lesson 05's set-ups: the engine on weights that a learner's functions round, pack and multiply; how good it is then.

with weight_formats.weights(llm, {"layers.*": RoundedBy(Int8(), mine)}):
    llm.generate(...)
"""

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.calibration.folding import NORMS
from minillm.calibration.outliers import plant_outliers
from minillm.engine import LLM
from minillm.evaluate import load_text
from minillm.model import load_model
from minillm.model.decoder import PROJECTIONS, Model
from minillm.model.modules import modules
from minillm.ops import reference
from minillm.quantization import (
    Activations,
    Codes,
    Dense,
    DenseWeight,
    Format,
    Int4,
    Int4Weight,
    Recipe,
    Weight,
    int4,
)

from ..shared import held_out

STEP_ROWS = 4  # rows of text that `Quality` reads at once: larger tensors are new memory in every step

# ---- what lessons fall back to until an exercise is solved


def quantize_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """weight [rows, in] -> codes [rows, in] int8, scales [rows, 1]: `int8.quantize` for any number of bits up to 8."""
    top = 2 ** (bits - 1) - 1
    scales = weight.abs().amax(1, keepdim=True) / top
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (weight / scales).round().to(torch.int8), scales


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight [rows, in] -> codes [rows, in] int8, scales [rows, groups], zeros [rows, groups] int8; four bits."""
    grouped = weight.view(len(weight), -1, group_size)
    scales, zeros = int4.scales_of(grouped, Int4(group_size, symmetric=False))
    assert zeros is not None
    return int4.round_to_int4(grouped, scales, zeros).view_as(weight), scales, zeros


def rows_with_all_levels(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """As `quantize_rows`, with all 2 ** bits levels, like `Int4`: the largest weight is half a step beyond the last."""
    half = 2 ** (bits - 1)
    scales = weight.abs().amax(1, keepdim=True) / (half - 0.5)
    return (weight / scales).round().clamp(-half, half - 1).to(torch.int8), scales


def packed_linear(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """x [tokens, in], packed [out, in / 2], scales and zeros [out, groups] -> [tokens, out]."""
    return x @ Codes(int4.unpack(packed), scales, zeros).dequantize().to(x.dtype).t()


# ---- the engine on other weights


@dataclass(frozen=True)
class RoundedBy:
    """A format of the engine's whose weights are rounded by another function: weight [rows, in] -> Codes."""

    format: Format
    round: Callable[[Tensor], Codes]
    name: str = "rounded by a function"

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Weight:
        weight: Any = self.format.empty(out, inputs, bias, dtype=dtype, device=device)
        weight.round = self.round  # `load` calls it
        return weight

    @property
    def activations(self) -> Activations | None:
        return self.format.activations


def rows_by(quantize: Callable, bits: int) -> Callable[[Tensor], Codes]:
    """A function of exercise 1's form, for `RoundedBy`."""
    return lambda weight: Codes(*quantize(weight, bits))


def groups_by(quantize: Callable, group_size: int) -> Callable[[Tensor], Codes]:
    """A function of exercise 2's form, for `RoundedBy`."""
    return lambda weight: Codes(*quantize(weight, group_size))


@dataclass(frozen=True)
class PackedBy:
    """Int4 with zero points, whose codes another function packs: codes [rows, in] int8 -> [rows, in / 2] uint8."""

    format: Int4
    pack: Callable[[Tensor], Tensor]
    name: str = "packed by a function"

    def empty(self, out: int, inputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> Weight:
        weight, pack = self.format.empty(out, inputs, bias, dtype=dtype, device=device), self.pack

        def fill(rows: range, codes: Codes) -> None:
            Int4Weight.fill(weight, rows, codes)
            weight.packed[rows.start : rows.stop] = pack(codes.codes)

        setattr(weight, "fill", fill)  # noqa: B010 - of this object only
        return weight

    @property
    def activations(self) -> Activations | None:
        return self.format.activations


@contextmanager
def weights(llm: LLM, rules: Mapping[str, Any]) -> Iterator[Model]:
    """Run the engine on weights in other formats until the block ends. rules: as those of a `Recipe`.

    The engine must be idle, and must not cache prefixes: keys of other weights would be found.
    """
    model, recipe = llm.engine.model, Recipe(rules)
    before = model.addressed()
    try:
        for address, parts in modules(model.config).items():
            old, format = before[address], recipe.format(address)
            if format.name == "dense":
                continue
            matrix = old.dequantize()
            out, inputs = matrix.shape
            new = format.empty(out, inputs, old.bias is not None, dtype=model.dtype, device=model.device)
            for part in parts:
                new.load("weight", part.rows, iter([matrix[part.rows.start : part.rows.stop].contiguous()]))
            new.bias = old.bias
            _place(model, address, new)
        yield model
    finally:
        for address, old in before.items():
            _place(model, address, old)


def _place(model: Model, address: str, weight: Weight) -> None:
    if address.startswith("layers."):
        _, index, name = address.split(".")
        setattr(model.layers[int(index)], name, weight)
        return
    if address == "head" and model.head is model.embedding:
        model.embedding = weight
    setattr(model, address, weight)


def bytes_of(model: Model) -> int:
    """Bytes of the layers' matrices; numbers of more than 16 bits count as the 16 that a served model stores."""
    found = (tensor for name, weight in model.addressed().items() if name != "head" for tensor in weight.stored())
    return sum(tensor.numel() * min(2, tensor.itemsize) for tensor in found)


@contextmanager
def planted_outliers(llm: LLM, columns: int = 4, times: float = 10.0, seed: int = 0) -> Iterator[Model]:
    """Multiply some columns of two matrices in each layer, and divide what makes their inputs.

    columns: as many of each matrix; they must divide hidden_size.
    The model computes the same; only rounding its weights shows the difference.
    """
    model, share = llm.engine.model, llm.engine.model.config.hidden_size // columns
    before = []
    for layer in model.layers:
        for name, norm in NORMS.items():
            weight = getattr(layer, name)
            assert isinstance(weight, DenseWeight)
            before += [(tensor, tensor.clone()) for tensor in (weight.weight, getattr(layer, norm))]
    try:
        with torch.inference_mode():
            plant_outliers(model, tuple(NORMS), larger=1 / times, share=share, seed=seed)
        yield model
    finally:
        with torch.inference_mode():
            for tensor, saved in before:
                tensor.copy_(saved)


def linear_by(multiply: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Weight], Tensor]:
    """The engine's `linear`, with the products of packed weights computed by a function of exercise 4's form."""

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if isinstance(weight, Int4Weight) and weight.zeros is not None:
            return multiply(x, weight.packed, weight.scales, weight.zeros)
        return reference.linear(x, weight)

    return linear


# ---- numbers


def small_floats() -> list[float]:
    """0, and the numbers from 1/512 to 1.75, of both signs, of a floating-point format with 2 bits of mantissa."""
    sizes = [2.0**power * (1 + part / 4) for power in range(-9, 1) for part in range(4)]
    return [*(-size for size in sizes), 0.0, *sizes]


def clipping_error(matrix: Tensor, bits: int, share: float) -> float:
    """The squared error of a matrix whose levels reach only to a share of each row's largest weight.

    As a multiple of the error without clipping (share 1).
    """
    top = 2 ** (bits - 1) - 1
    largest = matrix.abs().amax(1, keepdim=True)

    def error(reach: float) -> Tensor:
        scales = reach * largest / top
        return ((matrix / scales).round().clamp(-top, top) * scales - matrix).square().sum()

    return (error(share) / error(1.0)).item()


def zero_points_gain(model: Model, group_size: int) -> tuple[float, float]:
    """Measure what zero points change in the layers' matrices, all of which have 16 levels in each group.

    Returns the mean of (step with zero points / symmetric step), and the symmetric squared error / that with zero
    points. Steps are the distances between levels.
    """
    symmetric = zeros = 0.0
    steps = []
    for address, weight in model.addressed().items():
        if address.startswith("layers."):
            grouped = weight.dequantize().unflatten(1, (-1, group_size))
            both = [scales_and_error(grouped, Int4(group_size, kind)) for kind in (True, False)]
            steps.append((both[1][0] / both[0][0]).flatten())
            symmetric, zeros = symmetric + both[0][1], zeros + both[1][1]
    return torch.cat(steps).mean().item(), symmetric / zeros


def scales_and_error(grouped: Tensor, format: Int4) -> tuple[Tensor, float]:
    """grouped [rows, groups, size] -> scales [rows, groups], and the sum of the squared errors of rounding."""
    scales, zeros = int4.scales_of(grouped, format)
    codes = int4.round_to_int4(grouped, scales, zeros).to(grouped.dtype)
    offset = torch.zeros_like(scales) if zeros is None else zeros.to(grouped.dtype)
    return scales, ((codes - offset[..., None]) * scales[..., None] - grouped).square().sum().item()


# ---- how good it is


@dataclass(frozen=True)
class Found:
    """A model's quality on rows of text, compared with the model before.

    perplexity   of the text
    rows         [rows] mean over each row's positions of KL(before || now), in nats
    agreement    share of positions with the same most likely token
    """

    perplexity: float
    rows: Tensor
    agreement: float

    @property
    def divergence(self) -> float:
        """The mean over all rows."""
        return self.rows.mean().item()

    @property
    def error(self) -> float:
        """The standard error of that mean."""
        return held_out.mean(self.rows)[1]

    def over(self, other: "Found") -> tuple[float, float]:
        """The ratio of this divergence to the other's, and its standard error: see `held_out.ratio`."""
        return held_out.ratio(self.rows, other.rows)


def report(rows: Mapping[str, Found]) -> None:
    """Print a table: a line for each measurement."""
    wide = max(24, *map(len, rows))
    print(f"{'':{wide}} perplexity           KL, nats  same top")
    for name, each in rows.items():
        divergence = f"{each.divergence:.5f} ± {each.error:.5f}"
        print(f"{name:{wide}} {each.perplexity:10.3f} {divergence:>18} {each.agreement:9.1%}")


class Quality:
    """Measure the embedded model on stretches of the held-out text, against what it was when this object was made.

    The engine's weights are read as they are, in float64 in the lesson, and the text is read in float32, which is
    faster: float32 changes the KL divergence by far less than the last digit of a report.
    """

    def __init__(self, llm: LLM, rows: int = 24, length: int = 256):
        tokenizer, self.model = llm.tokenizer, llm.engine.model
        assert tokenizer is not None
        ids = tokenizer.encode(load_text(), add_special_tokens=False)
        starts = torch.linspace(0, len(ids) - length, rows).long().tolist()
        stretches = [[*tokenizer.prefix, *ids[start:]][:length] for start in starts]
        self.single = load_model(dtype="float32", device="cpu")
        self.parts = [held_out.HeldOut(self._in_float32(), part) for part in torch.tensor(stretches).split(STEP_ROWS)]

    def measure(self) -> Found:
        """Measure how good the engine's model is now."""
        now = self._in_float32()
        found = [part.predictions(now) for part in self.parts]
        divergence = torch.cat([each.divergence for each in found])[:, :-1].mean(1).clamp(min=0)
        nats = sum(math.log(each.perplexity) * len(each.same_top) for each in found) / len(divergence)
        agreement = torch.cat([each.same_top for each in found])[:, :-1].double().mean().item()
        return Found(math.exp(nats), divergence, agreement)

    def _in_float32(self) -> Model:
        """The engine's model as it is now."""
        for to, layer in zip(self.single.layers, self.model.layers, strict=True):
            to.attention_norm, to.mlp_norm = layer.attention_norm, layer.mlp_norm
            for name in PROJECTIONS:
                setattr(to, name, _dense(getattr(layer, name)))
        self.single.head = self.single.embedding = _dense(self.model.head)
        return self.single


def _dense(weight: Weight) -> Weight:
    """A weight's values in float32."""
    out, inputs = weight.shape
    found = Dense().empty(out, inputs, False, dtype=torch.float32, device=torch.device("cpu"))
    found.fill(range(out), Codes(weight.dequantize(), torch.ones(out, 1)))
    return found


class _Made(TorchDispatchMode):
    """Remembers the largest tensor that an operation has made, and the most elements that were kept at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = self.kept = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor) and not _is_old(func):
                self.largest = max(self.largest, each.numel())
                self.kept += each.numel()
                self.most = max(self.most, self.kept)
                weakref.finalize(each, self._freed, each.numel())
        return out

    def _freed(self, numel: int) -> None:
        self.kept -= numel


def _is_old(func: Any) -> bool:
    """Return whether an operation's result is a view, or a tensor that it has changed."""
    return any(each.alias_info is not None for each in func._schema.returns)


def tensors_made(function: Callable, *given: Any) -> tuple[int, int]:
    """Elements of the largest tensor that a call makes, and the most that it keeps at a time, without views."""
    with _Made() as seen:
        function(*given)
    return seen.largest, seen.most


def largest_tensor(function: Callable, *given: Any) -> int:
    """Elements of the largest tensor that a call makes; views of what was there do not count."""
    return tensors_made(function, *given)[0]


def seconds(function: Callable[[], Any], runs: int = 3) -> float:
    """The shortest time of a few calls."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)
