"""Lesson 08's weights of four bits and fewer: blocks of FP4 rounded by a learner's function, and training for rounding.

student = four_bits.Student(model, lambda weight: fake_quantize(weight, 3, 128))
four_bits.distill(student, rows, rate=2e-4)
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from minillm.calibration.forward import hidden_states
from minillm.model import Model
from minillm.model.decoder import PROJECTIONS
from minillm.ops import reference
from minillm.overrides import using
from minillm.quantization import Codes, Format, Fp4, Mxfp4, Nvfp4, Weight, fp4
from minillm.quantization.fp4 import LARGEST, LARGEST_SCALE
from minillm.quantization.methods.straight_through import fake_quantize as fake_quantize  # for the lesson

from ..lesson_05.weight_formats import RoundedBy
from ..shared import held_out

Round = Callable[[Tensor, int, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]

# ---- FP4


def to_power_of_two(wanted: Tensor) -> Tensor:
    """MXFP4's scales: the power of two from 6/7 of what is wanted up to 12/7, so that nothing rounds to 8."""
    return fp4.power_of_two(LARGEST * wanted.float()).to(wanted.dtype)


def to_e4m3(wanted: Tensor) -> Tensor:
    """NVFP4's scales: one number for all blocks makes the largest 448, and all are rounded to e4m3; 0 becomes 1/8."""
    number = LARGEST_SCALE / wanted.max().clamp(min=torch.finfo(torch.float32).tiny)
    stored = (wanted * number).to(torch.float8_e4m3fn).to(wanted.dtype)
    return torch.where(stored == 0, 0.125, stored) / number


def quantize_fp4(weight: Tensor, block_size: int, round_scales: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """weight [rows, in] -> values of e2m1 [rows, in] and scales [rows, in / block_size], in the weight's dtype."""
    blocks = weight.unflatten(-1, (-1, block_size))
    scales = round_scales(blocks.abs().amax(-1) / LARGEST)
    return fp4.to_e2m1(blocks / scales[..., None]).to(weight.dtype).flatten(-2), scales


def fp4_by(function: Round, format: Fp4) -> Any:
    """A format of FP4 whose weights are rounded by a function of exercise 4's form."""
    round_scales = to_e4m3 if format.has_global_scale else to_power_of_two

    def rounded(weight: Tensor) -> Codes:
        values, scales = function(weight, format.group_size, round_scales)
        divisor = None
        if format.has_global_scale:
            divisor = (LARGEST_SCALE / scales.max()).view(1, 1).expand(len(weight), 1)
            scales = scales * divisor
        return Codes(values.to(torch.float8_e4m3fn), scales.float(), global_scale=divisor)

    return RoundedBy(format, rounded)


def formats(function: Round) -> dict[str, Format]:
    """Both formats of FP4, rounded by a function of exercise 4's form."""
    return {"NVFP4": fp4_by(function, Nvfp4()), "MXFP4": fp4_by(function, Mxfp4())}


# ---- training for rounding


@dataclass
class Trained:
    """A dense matrix whose products see what a function makes of it; gradients reach the matrix."""

    matrix: Tensor
    rounded: Callable[[Tensor], Tensor]
    own: Weight
    bias: None = None
    input_scale: None = None
    activations: None = None

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def format(self) -> Format:
        return self.own.format

    def dequantize(self) -> Tensor:
        return self.rounded(self.matrix)


class Student:
    """A copy of a dense model whose layers' matrices are trained; its products see their rounded values.

    rounded: weight [out, in] -> the same shape, with the gradient of exercise 5
    """

    def __init__(self, model: Model, rounded: Callable[[Tensor], Tensor]):
        self.teacher, self.model = model, copy.copy(model)
        self.model.layers = [copy.copy(layer) for layer in model.layers]
        self.weights: list[Tensor] = []
        for layer in self.model.layers:
            for name in PROJECTIONS:
                own = getattr(layer, name)
                matrix = own.dequantize().clone().requires_grad_()
                self.weights.append(matrix)
                setattr(layer, name, cast(Weight, Trained(matrix, rounded, own)))

    def loss(self, ids: Tensor) -> Tensor:
        """KL(p || q) on rows of token ids, in nats per token: p: the teacher's predictions, q: the student's."""
        with differentiable():
            with torch.no_grad():
                p = _log_probabilities(self.teacher, ids)
            q = _log_probabilities(self.model, ids)
        return kl_div(q, p, reduction="batchmean", log_target=True)


def _log_probabilities(model: Model, ids: Tensor) -> Tensor:
    return model.logits(hidden_states(model, ids)).log_softmax(-1)


def differentiable() -> Any:
    """The engine on its references, which are plain torch, so autograd follows them."""
    names = ("embedding", "linear", "rms_norm", "add_rms_norm", "rotary_embedding", "gated_activation", "write_kv")
    return using(**{name: getattr(reference, name) for name in (*names, "prefill_attention", "lm_head")})


def distill(student: Student, batches: Sequence[Tensor], rate: float) -> list[float]:
    """One step of AdamW for each batch of token ids [rows, length]; the losses before each step, in nats per token.

    The learning rate rises for three steps and then falls along a cosine.
    """
    optimizer = torch.optim.AdamW(student.weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step, ids in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / len(batches)))
        loss = student.loss(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def training_rows(steps: int, rows: int = 2, length: int = 256) -> Sequence[Tensor]:
    """Batches of the calibration text, token ids [rows, length] each."""
    return held_out.calibration_text(steps * rows, length, seed=3).split(rows)
