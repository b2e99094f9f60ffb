"""Embeddings as a tensor of the caller's own: what is accepted, and what to do about any other."""

import numpy as np
import torch
from torch import Tensor

from minillm.errors import InvalidRequest
from minillm.values import shown

from .embeddings import check_shape, checked


def is_embeddings(part: object) -> bool:
    """Return whether a part of a prompt is meant as embeddings: an array or a tensor with rows, or one of floats."""
    return isinstance(part, (Tensor, np.ndarray)) and (part.ndim > 1 or torch.as_tensor(part).is_floating_point())


def read_tensor(given: object, hidden_size: int, dtype: str, most: int) -> np.ndarray:
    """Return the embeddings in a tensor or an array, [n, hidden], at most `most` of them. Raises InvalidRequest.

    hidden_size, dtype: of the model. The tensor may be on any device; it is copied.
    """
    if isinstance(given, np.ndarray) and given.dtype.kind == "f" and given.dtype != np.longdouble:
        given = torch.from_numpy(np.ascontiguousarray(given, dtype=given.dtype.newbyteorder("=")))
    if not isinstance(given, Tensor):
        raise InvalidRequest(f"prompt_embeds must be a tensor [tokens, {hidden_size}], not {shown(given)}")
    if given.is_quantized or given.layout != torch.strided:
        raise InvalidRequest(
            f"prompt_embeds must be a dense tensor of floats, not {given.layout} of {given.dtype}: call to_dense() or "
            "dequantize()"
        )
    check_shape(tuple(given.shape), str(given.dtype).removeprefix("torch."), hidden_size, most)
    # float32 holds all values of shorter types, and numpy has no bfloat16.
    wide = given.detach().to("cpu", torch.float64 if given.dtype == torch.float64 else torch.float32, copy=True)
    return checked(wide.numpy(), dtype)
