"""The table of angles that rotary embeddings look up.  Lesson 02."""

import torch
from torch import Tensor

from .config import ModelConfig


def rotary_table(config: ModelConfig, length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and signed sines of every position's angles: [length, 2, head_dim].  Lesson 02.

    Su et al. 2021, section 3.4.2, with the pairs (i, i + head_dim / 2). Angles are float32 for every dtype,
    as in transformers. The sines of the first half are negated: a rotated pair is (a cos - b sin, b cos + a sin).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.scaled(frequencies)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table.to(dtype=dtype, device=device)
