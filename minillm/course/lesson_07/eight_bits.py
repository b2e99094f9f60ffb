"""The embedded model with quantized activations, with planted outliers, smoothed, rotated.  Lessons 07 and 08.

model = eight_bits.quantized(eight_bits.dense(outliers=True), Int8(Activations("int8")))
with using(linear=eight_bits.linear_by(mine)):
    text.divergence(model)
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minillm.calibration import rotation
from minillm.calibration.folding import allowed_scales, fold
from minillm.calibration.forward import hidden_states
from minillm.calibration.outliers import plant_outliers
from minillm.engine import LLM
from minillm.model import Model, load_model
from minillm.model.decoder import PROJECTIONS
from minillm.model.modules import modules
from minillm.ops import reference
from minillm.overrides import using
from minillm.quantization import Activations, Format, Int8Weight, QuantizedActivations, Weight
from minillm.quantization.activations import BOUNDS, LARGEST
from minillm.quantization.methods.hadamard import largest_order, transform

from ..shared import held_out

Linear = Callable[[Tensor, Weight], Tensor]

# ---- what the lesson falls back to until an exercise is solved


def int8_linear(x: Tensor, codes: Tensor, scales: Tensor, input_scale: Tensor | None = None) -> Tensor:
    """x [tokens, in], codes [out, in] int8, scales [out] -> [tokens, out], with x quantized to eight bits first."""
    found = Activations("int8", static=input_scale is not None).quantize(x, input_scale)
    sums = found.codes.double() @ codes.double().t()
    return (sums * found.scales.double() * scales.double()).to(x.dtype)


def smooth_scales(largest: Tensor, weight: Tensor, strength: float) -> Tensor:
    """largest [in] of |x|, weight [out, in] -> scales [in], as `smoothquant.scales_for`."""
    weights = weight.abs().amax(0)
    scales = largest.clamp(min=1e-8) ** strength / weights.clamp(min=1e-8) ** (1 - strength)
    return torch.where((largest > 0) & (weights > 0), scales, torch.ones_like(scales))


def round_to_e4m3(x: Tensor) -> Tensor:
    """The nearest numbers of e4m3, in the dtype of x; larger ones become 448."""
    return x.clamp(*BOUNDS["fp8"]).to(torch.float8_e4m3fn).to(x.dtype)


# ---- models


def dense(outliers: bool = False) -> Model:
    """The embedded model in float32; outliers: some channels of all products' inputs are 32 times larger."""
    model = load_model(dtype="float32", device="cpu")
    if outliers:
        with torch.inference_mode():
            plant_outliers(model)
    return model


def quantized(model: Model, format: Format, static: Mapping[str, Tensor] | None = None) -> Model:
    """A copy whose layers' weights are rounded to the nearest codes of a format; the given model stays as it is.

    static: the largest |x| of each channel of each product's inputs, by address (`largest_inputs`), for a format with
    static activations.
    """
    found = copy.copy(model)
    found.layers = [copy.copy(layer) for layer in model.layers]
    for address, parts in modules(model.config).items():
        if not address.startswith("layers."):
            continue
        _, index, name = address.split(".")
        matrix = getattr(model.layers[int(index)], name).dequantize()
        out, count = matrix.shape
        weight = format.empty(out, count, False, dtype=model.dtype, device=model.device)
        for part in parts:
            rows = matrix[part.rows.start : part.rows.stop].contiguous()
            weight.fill(part.rows, weight.round(rows))  # type: ignore[attr-defined]
        if static is not None and format.activations is not None:
            weight.input_scale = (static[address].max() / LARGEST[format.activations.kind]).view(1)
        setattr(found.layers[int(index)], name, weight)
    return found


def smoothed(model: Model, scales: Callable[[Tensor, Tensor], Tensor], largest: Mapping[str, Tensor]) -> Model:
    """A copy of a dense model with the inputs of all products divided by scales(largest [in], weight [out, in]).

    largest: of each channel, by address (`largest_inputs`). The engine's `fold` multiplies the weights, and divides
    what makes their inputs, so the copy computes what the model does.
    """
    found = copied(model)
    with torch.inference_mode():
        for index, layer in enumerate(found.layers):
            # Scales of these inputs also scale rows of qkv and gate_up, so those come after them.
            for name in ("attention_out", "down", "qkv", "gate_up"):
                wanted = scales(largest[f"layers.{index}.{name}"], getattr(layer, name).dequantize())
                fold(found, layer, name, allowed_scales(found, layer, name, wanted, found.dtype), found.dtype)
    return found


def rotated(model: Model, down: bool = True) -> Model:
    """A copy of a dense model that the engine's `rotate` has rotated; down: the inputs of `down` too."""
    found = copied(model)
    with torch.inference_mode():
        rotation.rotate(found, found.dtype, down=down)
    return found


def with_part(model: Model, other: Model, name: str) -> Model:
    """A copy of a model in which the products called `name`, one in each layer, are those of another model."""
    found = copy.copy(model)
    found.layers = [copy.copy(layer) for layer in model.layers]
    for layer, theirs in zip(found.layers, other.layers, strict=True):
        setattr(layer, name, getattr(theirs, name))
    return found


def copied(model: Model) -> Model:
    """A copy of a dense model that can be changed in place."""
    found = copy.copy(model)
    found.layers = [
        replace(layer, **{name: copy.deepcopy(getattr(layer, name)) for name in (*PROJECTIONS, *model.layer_norms)})
        for layer in model.layers
    ]
    found.head = copy.deepcopy(model.head)
    found.embedding = found.head if model.embedding is model.head else copy.deepcopy(model.embedding)
    found.final_norm = model.final_norm.clone()
    return found


@contextmanager
def running(llm: LLM, model: Model) -> Iterator[None]:
    """The engine on the layers of another model of the same shape, until the block ends.

    It must be idle, and must not cache prefixes: keys of other weights would be found.
    """
    own, before = llm.engine.model, llm.engine.model.layers
    own.layers = model.layers
    try:
        yield
    finally:
        own.layers = before


# ---- the learner's functions in the engine


def linear_by(function: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]) -> Linear:
    """The engine's `linear`, with the products of int8 weights and int8 activations computed by `int8_linear`."""

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if isinstance(weight, Int8Weight) and weight.activations is not None:
            return function(x, weight.codes, weight.scales, weight.input_scale)
        return reference.linear(x, weight)

    return linear


def hadamard_by(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The engine's operation `hadamard`, by a function for powers of 2.

    The matrix of another size is the Kronecker product of a power of 2 and a smaller matrix (of 768: 64 and 12), so the
    function transforms each group of channels that are 12 apart, and the engine each 12 neighbors. Sylvester's matrices
    are symmetric, so a rotation by one is its own inverse.
    """

    def hadamard(x: Tensor, inverse: bool = False) -> Tensor:
        power = _power_of_2(x.shape[-1])
        grid = x.unflatten(-1, (power, -1))
        mixed = function(grid.transpose(-1, -2)).transpose(-1, -2)
        return transform(mixed.contiguous(), inverse).flatten(-2)

    return hadamard


def _power_of_2(size: int) -> int:
    """The largest power of 2 that divides a size, and leaves one that has a Hadamard matrix; 1 if none does."""
    powers = [1 << bits for bits in range(size.bit_length(), -1, -1) if size % (1 << bits) == 0]
    return next((each for each in powers if largest_order(size // each) == size // each), 1)


@dataclass(frozen=True)
class RoundedBy(Activations):
    """FP8 activations, rounded by another function: x / scale -> the nearest numbers of e4m3."""

    kind: str = "fp8"
    function: Callable[[Tensor], Tensor] = field(default=round_to_e4m3)

    def quantize(self, x: Tensor, scale: Tensor | None = None) -> QuantizedActivations:
        scales = super().quantize(x, scale).scales
        return QuantizedActivations(self.function(x.to(scales.dtype) / scales), scales)


# ---- measurements


class HeldOut(held_out.HeldOut):
    """Text that neither training nor calibration has seen, and the embedded model's predictions on it."""

    def __init__(self, rows: int = 24, length: int = 256):
        super().__init__(dense(), held_out.held_out_text(rows, length))

    def divergence(self, model: Model) -> float:
        """Mean KL divergence of a model's predictions from those of the embedded model, in nats per token."""
        return max(0.0, self.predictions(model).divergence.mean().item())


def inputs_of(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """The inputs [tokens, in] of every product in the layers, by address, over rows of token ids."""
    addresses = {
        id(getattr(layer, name)): f"layers.{i}.{name}" for i, layer in enumerate(model.layers) for name in PROJECTIONS
    }
    found: dict[str, Tensor] = {}

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if id(weight) in addresses:
            found[addresses[id(weight)]] = x.clone()
        return reference.linear(x, weight)

    with using(linear=linear), torch.inference_mode():
        hidden_states(model, ids)
    return found


def largest_inputs(model: Model, rows: int = 8, length: int = 256) -> dict[str, Tensor]:
    """The largest |x| of each channel [in] of every product's inputs, by address, on the calibration text."""
    inputs = inputs_of(model, held_out.calibration_text(rows, length))
    return {address: x.abs().amax(0) for address, x in inputs.items()}


def zeros(x: Tensor, scales: float | None = None) -> float:
    """The share of int8 codes of x [tokens, in] that are 0; scales: a static one, None: of each token."""
    found = Activations("int8", scales is not None).quantize(x, None if scales is None else torch.tensor([scales]))
    return (found.codes == 0).double().mean().item()


def same_codes(model: Model, function: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Return how many weights of the layers a function rounds as the engine does, and how many there are.

    A row's largest weight becomes 448.
    """
    same = count = 0
    for layer in model.layers:
        for name in PROJECTIONS:
            matrix = getattr(layer, name).dequantize()
            scaled = matrix / (matrix.abs().amax(1, keepdim=True) / LARGEST["fp8"])
            same += int((function(scaled) == round_to_e4m3(scaled)).sum())
            count += matrix.numel()
    return same, count


def bytes_of(model: Model) -> int:
    """Bytes of the layers' matrices; numbers of more than 16 bits count as the 16 that a served model stores."""
    stored = (tensor for layer in model.layers for name in PROJECTIONS for tensor in getattr(layer, name).stored())
    return sum(tensor.numel() * min(2, tensor.itemsize) for tensor in stored)
