"""Quantize the embedded model with recorded statistics, and measure what that changes.  Lesson 06.

The engine calibrates each layer on the outputs of the quantized layers before it (`minillm quantize`). Here the inputs
of all products are recorded once, in the unquantized model, so that many methods can be tried on them in seconds; and
in float64, so that every machine rounds each weight alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.calibration.folding import NORMS
from minillm.calibration.forward import hidden_states
from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.outliers import outlier_scales, plant_outliers
from minillm.calibration.quantize import quantize_calibrated
from minillm.model import Model, load_model
from minillm.model.decoder import PROJECTIONS
from minillm.ops import reference
from minillm.overrides import using
from minillm.quantization import Codes, Int4, Weight
from minillm.quantization.int4 import round_to_int4, scales_of
from minillm.quantization.methods import awq, gptq
from minillm.quantization.methods.statistics import InputStatistics, output_error

from ..shared import held_out
from ..shared.held_out import calibration_text as calibration_text  # for the lesson
from ..shared.held_out import log_probabilities as log_probabilities

SAVED = torch.bfloat16  # precision of the embedded model's files, so also of scales
CPU = torch.device("cpu")
# Outliers: 8 channels of each norm, 16 times larger
PLANTED: dict[str, Any] = {"products": tuple(NORMS), "larger": 16.0, "share": 32, "seed": 3}


def dense(dtype: str = "float64") -> Model:
    """The embedded model, unquantized, on the CPU."""
    return load_model(dtype=dtype, device="cpu")


def products(model: Model) -> dict[str, Weight]:
    """The weights of all layers, by address: "layers.0.qkv" and so on."""
    return {
        f"layers.{index}.{name}": getattr(layer, name)
        for index, layer in enumerate(model.layers)
        for name in PROJECTIONS
    }


class Statistics:
    """Records what the engine does about a product's inputs, with the methods of the exercise."""

    def __init__(self, inputs: int):
        self.own = InputStatistics(inputs, CPU, torch.float64)

    def add(self, x: Tensor) -> None:
        """x [rows, in]: inputs of one step."""
        self.own.add(x)

    def mean_magnitude(self) -> Tensor:
        """[in]: mean of |x|."""
        return self.own.mean_magnitude

    def error(self, difference: Tensor) -> Tensor:
        """difference [out, in] of the weight -> the squared error of each output, summed over all rows: [out]."""
        return (difference @ self.own.second_moment * difference).sum(1)


def record(model: Model, ids: Tensor, make: Callable[[int], Any]) -> dict[str, Any]:
    """Run the model on rows of token ids, and record the inputs of each product, by address, with `make(inputs)`."""
    found = {address: make(weight.shape[1]) for address, weight in products(model).items()}
    recorders = {id(weight): found[address] for address, weight in products(model).items()}

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if id(weight) in recorders:
            recorders[id(weight)].add(x)
        return reference.linear(x, weight)

    with using(linear=linear), torch.inference_mode():
        for part in ids.split(8):
            hidden_states(model, part)
    return found


def statistics(recorded: Mapping[str, Any]) -> dict[str, InputStatistics]:
    """Return what the exercise's objects recorded, in the engine's form, without samples, which AWQ and GPTQ ignore."""
    return {address: _engines_form(each) for address, each in recorded.items()}


def _engines_form(recorded: Any) -> InputStatistics:
    if isinstance(recorded, Statistics):
        return recorded.own
    found = InputStatistics(len(recorded.magnitude), CPU, torch.float64, recorded.rows)
    found.second_moment, found.magnitude = recorded.second_moment, recorded.magnitude
    return found


def inputs_of(model: Model, ids: Tensor, address: str) -> Tensor:
    """All inputs of one product over rows of token ids: [tokens, in]."""
    return torch.cat(record(model, ids, lambda _: _Kept())[address].rows)


class _Kept:
    """Keeps the inputs themselves."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        self.rows.append(x.clone())


def quantized(
    methods: Method | MethodRecipe, found: Mapping[str, InputStatistics], outliers: bool = False
) -> tuple[Model, dict[str, float | None]]:
    """The embedded model in float32, with its layers quantized in float64, and AWQ's strengths by address.

    found: `statistics` of the same model. outliers: the model of `with_outliers`.
    """
    recipe = methods if isinstance(methods, MethodRecipe) else MethodRecipe.of(methods)
    wide, model = with_outliers() if outliers else dense(), dense("float32")
    strengths: dict[str, float | None] = {}
    with torch.inference_mode(), one_thread():
        for index, layer in enumerate(wide.layers):
            addresses = {name: f"layers.{index}.{name}" for name in PROJECTIONS}
            seen = {name: found[at] for name, at in addresses.items() if recipe.at(at).calibrated}
            strengths |= quantize_calibrated(wide, index, recipe, seen, SAVED)
            to = model.layers[index]
            to.attention_norm, to.mlp_norm = layer.attention_norm, layer.mlp_norm
            for name in PROJECTIONS:
                setattr(to, name, _single(getattr(layer, name)))
    return model, strengths


@contextmanager
def one_thread() -> Iterator[None]:
    """GPTQ runs thousands of small operations, which wait for each other if each is spread over busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _single(weight: Weight) -> Weight:
    """The same weight for activations in float32."""
    out, inputs = weight.shape
    found = weight.format.empty(out, inputs, False, dtype=torch.float32, device=CPU)
    codes = weight.read(range(out))
    found.fill(range(out), Codes(weight.dequantize(), torch.ones(out, 1)) if codes is None else codes)
    return found


def with_outliers() -> Model:
    """The embedded model, in which some channels of each norm are larger, and the weights that read them smaller.

    The model computes the same; its activations have outliers, as those of large models do.
    """
    model = dense()
    plant_outliers(model, **PLANTED)
    return model


def add_outliers(model: Model, found: Mapping[str, InputStatistics]) -> dict[str, InputStatistics]:
    """The embedded model's statistics, as they would have been recorded in that of `with_outliers`."""
    changed = outlier_scales(model, **PLANTED)
    return {address: each.scaled(changed[address]) if address in changed else each for address, each in found.items()}


def awq_part(function: Callable) -> Callable:
    """An exercise's `awq_scales`, with the arguments of the engine's.

    The lesson combines the same scales with several roundings, so the search for a matrix is run once.
    """
    known: dict[int, tuple[InputStatistics, Tensor, tuple[Tensor, float]]] = {}

    def awq_scales(
        weight: Tensor, inputs: InputStatistics, format: Int4, *, allowed: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, float]:
        if id(inputs) in known and known[id(inputs)][1].equal(weight):
            return known[id(inputs)][2]
        rounded = partial(_dequantized, format=format)
        moment = inputs.second_moment.to(weight)
        found = function(weight, inputs.mean_magnitude.to(weight), moment, rounded, allowed)
        known[id(inputs)] = inputs, weight.clone(), found  # the inputs are kept, so that no others get their id
        return found

    return awq_scales


def _dequantized(weight: Tensor, format: Int4) -> Tensor:
    return awq.rounded_to_nearest(weight, format).dequantize()


def without_clipping(weight: Tensor, inputs: InputStatistics, format: Int4) -> Codes:
    """In place of AWQ's search for clipping: every group keeps its whole range."""
    return awq.rounded_to_nearest(weight, format)


def without_scales(weight: Tensor, inputs: InputStatistics, format: Int4, **_: Any) -> tuple[Tensor, float]:
    """In place of AWQ's search for scales: they are 1."""
    return torch.ones_like(weight[0]), 0.0


def engines_scales(strengths: Sequence[float]) -> Callable:
    """The engine's search with the arguments of the exercise, over these strengths."""

    def awq_scales(
        weight: Tensor, magnitude: Tensor, moment: Tensor, rounded: Callable, allowed: Callable
    ) -> tuple[Tensor, float]:
        tried = {}
        for strength in strengths:
            scales = allowed(awq.scales_for(magnitude, strength))
            error = output_error(rounded(weight * scales) / scales - weight, moment).item()
            tried[error] = scales, strength
        return tried[min(tried)]

    return awq_scales


def gptq_part(function: Callable) -> Callable:
    """An exercise's `gptq`, with the arguments of the engine's. It rounds in order, so not with act-order."""

    def quantize(weight: Tensor, compensation: gptq.Compensation, format: Int4) -> Codes:
        if compensation.act_order:
            return gptq.quantize(weight, compensation, format)
        work = weight.masked_fill(compensation.unused, 0.0)
        codes, scales = function(work, compensation.factor.to(weight), Grid(format.group_size, format.scale_dtype))
        return Codes(codes.to(torch.int8), scales)

    return quantize


def from_moment(function: Callable) -> Callable:
    """A GPTQ that takes the second moment, as one that takes the factor."""

    def gptq(weight: Tensor, factor: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return function(weight, torch.cholesky_inverse(factor, upper=True), grid)

    return gptq


def gptq_after_scales(quantize: Callable) -> Callable:
    """GPTQ in place of AWQ's search for clipping: it rounds what the scales have scaled."""

    def rounded(weight: Tensor, inputs: InputStatistics, format: Int4) -> Codes:
        return quantize(weight, gptq.Compensation.of(inputs), format)

    return rounded


def rounded(weight: Tensor, group_size: int = 128) -> Tensor:
    """A matrix rounded to the nearest levels."""
    return _dequantized(weight, Int4(group_size, scale_dtype=SAVED))


def damped(second_moment: Tensor) -> Tensor:
    """With a share of the mean of its diagonal added to it, as GPTQ does."""
    return second_moment + gptq.DAMPING * second_moment.diagonal().mean() * torch.eye(len(second_moment))


def compensate(weights: Tensor, at: int, value: Tensor, moment: Tensor) -> Tensor:
    """The weights [out, n] with column `at` set to value [out], and the others adjusted for the least output error."""
    rest = [each for each in range(len(moment)) if each != at]
    found = weights.clone()
    found[:, at] = value
    change = (value - weights[:, at])[:, None]
    found[:, rest] -= change * torch.linalg.solve(moment[rest][:, rest], moment[rest, at])
    return found


def errors_by_strength(model: Model, address: str, found: Mapping[str, InputStatistics]) -> dict[float, float]:
    """A matrix's output error with the scales of each strength, not yet restricted to those that can be folded."""
    weight, inputs = products(model)[address].dequantize(), found[address]
    errors = {}
    for strength in awq.STRENGTHS:
        scales = awq.scales_for(inputs.mean_magnitude, strength)
        errors[strength] = output_error(rounded(weight * scales) / scales - weight, inputs.second_moment).item()
    return errors


def engines_gptq(weight: Tensor, factor: Tensor, grid: "Grid") -> tuple[Tensor, Tensor]:
    """The engine's GPTQ with the arguments of the exercise: codes [out, in] and scales [out, groups]."""
    order, unused = torch.arange(len(factor)), torch.zeros(len(factor), dtype=torch.bool)
    codes = gptq.quantize(weight, gptq.Compensation(factor, order, unused, False), grid.format)
    return codes.codes, codes.scales


@dataclass(frozen=True)
class Distance:
    """The distance of a quantized model's predictions from the original's: the KL divergence, in nats per token."""

    rows: Tensor  # [rows]: the mean over the tokens of each row of text
    perplexity: float

    @property
    def mean(self) -> float:
        """Over all rows."""
        return self.rows.mean().item()

    @property
    def error(self) -> float:
        """The standard error of the mean: rows of text differ."""
        return held_out.mean(self.rows)[1]

    def removed(self, base: "Distance") -> tuple[float, float]:
        """% of the base's divergence that is gone, and the standard error of that: see `held_out.ratio`."""
        kept, error = held_out.ratio(self.rows, base.rows)
        return 100 * (1 - kept), 100 * error


class HeldOut(held_out.HeldOut):
    """Text that no calibration reads, and the original's predictions on it."""

    def __init__(self, rows: int = 10, length: int = 256):
        super().__init__(dense("float32"), held_out.held_out_text(rows, length))

    def measure(self, model: Model | None = None) -> Distance:
        """A model's distance; None: the original's, which is 0."""
        now = self.predictions(model)
        return Distance(now.divergence.mean(1), now.perplexity)


class Grid:
    """Four-bit codes for a group of weights, symmetric, as in lesson 05."""

    def __init__(self, group_size: int, scale_dtype: torch.dtype | None = SAVED):
        self.group_size = group_size
        self.format = Int4(group_size, scale_dtype=scale_dtype)

    def scale(self, weights: Tensor) -> Tensor:
        """weights [out, group_size] of a group -> its scale for each row, [out]."""
        return scales_of(weights[:, None], self.format)[0][:, 0]

    def codes(self, column: Tensor, scale: Tensor) -> Tensor:
        """column [out] of weights, scale [out] -> the nearest codes, [out] int8 from -8 to 7."""
        return round_to_int4(column[:, None, None], scale[:, None], None)[:, 0, 0]
