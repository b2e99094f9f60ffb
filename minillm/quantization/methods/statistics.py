"""Record statistics about the inputs of one product, for calibration.  Lesson 06."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

SAMPLES = 256  # rows of the inputs that are kept, over all steps


@dataclass
class InputStatistics:
    """Sums over all input rows x of a product, so that memory does not grow with the calibration text.

    second_moment    sum of x x^T [in, in]. The squared error that replacing W by W + D makes in the outputs is the
                     trace of D second_moment D^T, exactly
    """

    inputs: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    rows: int = 0
    second_moment: Tensor = field(init=False)  # [in, in]
    magnitude: Tensor = field(init=False)  # [in]: sum of |x|
    largest: Tensor = field(init=False)  # [in]: max of |x|
    samples: list[Tensor] = field(default_factory=list)  # rows chosen at random, [n, in] each

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.second_moment = torch.zeros(self.inputs, self.inputs, dtype=self.dtype, device=self.device)
        self.magnitude = torch.zeros(self.inputs, dtype=self.dtype, device=self.device)
        self.largest = torch.zeros(self.inputs, dtype=self.dtype, device=self.device)

    def add(self, x: Tensor, keep: int = 16) -> None:
        """x [rows, in]: inputs of one step; `keep` of them, chosen at random, are kept as samples.

        Evenly spaced rows would not do: a step is a number of rows of text of equal length, so they could all be at one
        position, such as the first, whose activations are unlike all others.
        """
        x = x.reshape(-1, self.inputs).to(self.dtype)
        self.rows += len(x)
        self.second_moment.addmm_(x.t(), x)
        sizes = x.abs()
        self.magnitude += sizes.sum(0)
        self.largest = torch.maximum(self.largest, sizes.amax(0))
        chosen = torch.randperm(len(x), generator=self._generator)[:keep]
        self.samples.append(x[chosen.to(x.device)])

    @property
    def mean_magnitude(self) -> Tensor:
        """[in]: mean of |x|."""
        return self.magnitude / max(1, self.rows)

    def scaled(self, scales: Tensor) -> "InputStatistics":
        """Return the statistics of x / scales, scales [in]."""
        scaled = InputStatistics(self.inputs, self.device, self.dtype, self.rows)
        scaled.second_moment = self.second_moment / scales[:, None] / scales
        scaled.magnitude, scaled.largest = self.magnitude / scales, self.largest / scales
        scaled.samples = [rows / scales for rows in self.samples]
        return scaled


def output_error(difference: Tensor, second_moment: Tensor) -> Tensor:
    """Return the squared error of a product's outputs, summed over all rows: difference [rows, in] of the weight."""
    return (difference @ second_moment * difference).sum()
