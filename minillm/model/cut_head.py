"""A head with the rows of some tokens only: a draft model needs no others.

Zhao et al. 2025, "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling".
"""

from torch import Tensor

from minillm.quantization import Dense

from .decoder import Model


def cut_head(model: Model, tokens: Tensor) -> None:
    """Leave only the head's rows of these tokens [n] int64. All others have the logit minus infinity from now on.

    The rows have the model's dtype. The embedding stays whole.
    """
    rows = model.head[tokens].to(model.dtype)
    count, width = rows.shape
    model.head = Dense().empty(count, width, False, dtype=model.dtype, device=model.device)
    model.head.dequantize().copy_(rows)
    model.head_tokens = tokens
