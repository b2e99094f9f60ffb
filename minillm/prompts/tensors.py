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


def read_tensor(tensor: object, hidden_size: int, dtype: str, most: int) -> np.ndarray:
    """Return the embeddings in a tensor or an array, [n, hidden], at most `most` of them. Raises InvalidRequest.

    hidden_size, dtype: of the model. The tensor may be on any device; it is copied.
    """
    if isinstance(tensor, np.ndarray) and tensor.dtype.kind == "f" and tensor.dtype != np.longdouble:
        tensor = torch.from_numpy(np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("=")))
    if not isinstance(tensor, Tensor):
        raise InvalidRequest(f"prompt_embeds must be a tensor [tokens, {hidden_size}], not {shown(tensor)}")
    if tensor.is_quantized or tensor.layout != torch.strided:
        raise InvalidRequest(
            f"prompt_embeds must be a dense tensor of floats, not {tensor.layout} of {tensor.dtype}: call to_dense() "
            "or dequantize()"
        )
    check_shape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), hidden_size, most)
    # float32 holds all values of shorter types, and numpy has no bfloat16.
    wide = tensor.detach().to("cpu", torch.float64 if tensor.dtype == torch.float64 else torch.float32, copy=True)
    return checked(wide.numpy(), dtype)
