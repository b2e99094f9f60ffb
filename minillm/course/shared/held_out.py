"""Rows of text, and how far a model's predictions on them are from those of the model before.  Lessons 05 to 08."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.calibration.forward import hidden_states
from minillm.calibration.quantize import TEXT, calibration_rows
from minillm.evaluate import load_text
from minillm.model import Model
from minillm.model.loader import EMBEDDED
from minillm.tokenizer import Tokenizer

SEED = 7  # of the held-out rows
STEP_ROWS = 16  # of one forward pass


def calibration_text(rows: int = 16, length: int = 256, seed: int = 0) -> Tensor:
    """Token ids [rows, length] of stretches of the embedded calibration text, each after <bos>."""
    return _rows_of(TEXT.read_text(encoding="utf-8"), rows, length, seed)


def held_out_text(rows: int, length: int = 256) -> Tensor:
    """Token ids [rows, length] of stretches of a text that neither training nor calibration reads, each after <bos>."""
    return _rows_of(load_text(), rows, length, SEED)


def _rows_of(text: str, rows: int, length: int, seed: int) -> Tensor:
    tokenizer = Tokenizer.from_pretrained(EMBEDDED)
    return calibration_rows(tokenizer, text, rows, length, seed)


def log_probabilities(model: Model, ids: Tensor) -> Tensor:
    """Of all tokens at each position of rows of token ids: [rows, length, vocabulary]."""
    with torch.inference_mode():
        found = [model.logits(hidden_states(model, part)).log_softmax(-1) for part in ids.split(STEP_ROWS)]
    return torch.cat(found).view(*ids.shape, -1)


@dataclass(frozen=True)
class Predictions:
    """A model's predictions on rows of text, compared with those of the model before.

    divergence  [rows, length] float64: KL(before || now) of each position's next token, in nats
    same_top    [rows, length] bool: whether the most likely next token is the same
    perplexity  of the text
    """

    divergence: Tensor
    same_top: Tensor
    perplexity: float

    @property
    def millinats(self) -> Tensor:
        """[rows]: the mean divergence of each row of text, in 1/1000 nat per token."""
        return 1000 * self.divergence.mean(1)


def mean(rows: Tensor) -> tuple[float, float]:
    """Of a number for each row of text, and its standard error: rows differ."""
    return rows.mean().item(), _standard_error(rows)


def ratio(rows: Tensor, base: Tensor) -> tuple[float, float]:
    """The mean of rows / that of base, and its standard error (to first order: the delta method).

    Rows are compared in pairs: what makes a row of text hard for one model makes it hard for the other. So the error is
    that of the mean of `rows - ratio * base`, divided by base's mean: 0 if each row has the same ratio.
    """
    times = (rows.mean() / base.mean()).item()
    return times, _standard_error(rows - times * base) / base.mean().item()


def _standard_error(values: Tensor) -> float:
    return (values.std() / len(values) ** 0.5).item()


class HeldOut:
    """Rows of text, ids [rows, length], and a model's predictions on them at the time this object is made."""

    def __init__(self, model: Model, ids: Tensor):
        self.ids = ids
        self.before = log_probabilities(model, ids)
        self.probabilities, self.top = self.before.exp(), self.before.argmax(-1)

    def predictions(self, model: Model | None = None) -> Predictions:
        """Those of a model; None: of the one before, whose divergence is 0."""
        now = self.before if model is None else log_probabilities(model, self.ids)
        divergence = (self.probabilities * (self.before - now)).sum(-1).double()
        nats = -now[:, :-1].gather(-1, self.ids[:, 1:, None]).double().mean()
        return Predictions(divergence, now.argmax(-1) == self.top, nats.exp().item())
