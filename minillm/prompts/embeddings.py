"""Embeddings as a part of a prompt: where they are, what they are, and what identifies them.

A position of a prompt has a token or an embedding, which is what the model's first layer reads there: what
transformers calls `inputs_embeds`, already scaled in families that scale. A position with an embedding has the id
EMBEDDED, which is no token: it has no text, no penalty applies to it, and nothing drafts from it.

Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", put trained embeddings before a prompt.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.errors import InvalidRequest

EMBEDDED = -1
DTYPES = ("float16", "bfloat16", "float32", "float64")  # of tensors with embeddings
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The embeddings of a prompt."""

    positions: np.ndarray  # [n] int64, ascending
    values: np.ndarray  # [n, hidden] float32, or float64 for a model in float64

    def between(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions [m] from `start` on and before `end`, and their embeddings [m, hidden]."""
        first, after = np.searchsorted(self.positions, (start, end))
        return self.positions[first:after], self.values[first:after]

    def digest(self, start: int, end: int) -> bytes:
        """Return a hash of the embeddings between two positions; b"" if there are none.

        The ids tell which positions have them, so with the ids it identifies what a model reads there.
        """
        values = self.between(start, end)[1]
        return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).digest() if len(values) else b""


@dataclass(frozen=True, eq=False)
class EmbeddedPrompt:
    """A prompt with embeddings, which have been checked."""

    ids: np.ndarray  # [tokens] int32: EMBEDDED where it has an embedding
    values: np.ndarray  # [n, hidden]: the embeddings, in their order

    @classmethod
    def of(cls, parts: Sequence["np.ndarray | EmbeddedPrompt"]) -> "EmbeddedPrompt":
        """Join parts: ids [n], embeddings [n, hidden], or both; at least one has to have embeddings."""
        ids, values = [], []
        for part in parts:
            if isinstance(part, EmbeddedPrompt):
                ids.append(part.ids)
                values.append(part.values)
            else:
                ids.append(np.full(len(part), EMBEDDED) if part.ndim == 2 else part)
                values += [part] if part.ndim == 2 else []
        return cls(np.concatenate(ids).astype(np.int32), np.concatenate(values))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def embeddings(self) -> Embeddings:
        """Return its embeddings with their positions."""
        return Embeddings(np.flatnonzero(self.ids == EMBEDDED), self.values)


def precision(dtype: str) -> type[np.floating]:
    """Return the dtype in which embeddings of a model are kept and hashed: float32 holds all values of shorter ones."""
    return np.float64 if dtype == "float64" else np.float32


def check_shape(shape: tuple[int, ...], dtype: str, hidden_size: int, most: int) -> None:
    """Raise InvalidRequest unless this is the shape and the dtype of at most `most` embeddings."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"prompt_embeds must be of a dtype of floats, as float32 or bfloat16, not {dtype}")
    if len(shape) != 2 or shape[1] != hidden_size:
        way = "; squeeze(0) removes the first dimension" if len(shape) == 3 and shape[0] == 1 else ""
        raise InvalidRequest(
            f"prompt_embeds must have the shape [tokens, {hidden_size}], as this model's embeddings have, not "
            f"{list(shape)}{way}"
        )
    if not 0 < shape[0] <= most:
        raise InvalidRequest(f"prompt_embeds has {shape[0]:,} rows, but a prompt here has from 1 to {most:,} tokens")


def checked(values: np.ndarray, dtype: str, name: str = "prompt_embeds") -> np.ndarray:
    """Return embeddings [n, hidden] as a model with activations of this dtype takes them. Raises InvalidRequest.

    One that is not a number, or too large for the dtype, would make the logits of its request no numbers.
    """
    largest = np.float64(LARGEST.get(dtype, sys.float_info.max))
    # Two reductions, and no array of their size: NaN fails both comparisons.
    if not (values.min() >= -largest and values.max() <= largest):
        wrong = np.argwhere(~(np.abs(values) <= largest))[0].tolist()
        raise InvalidRequest(
            f"{name} has {values[tuple(wrong)]} at {wrong}, but its numbers must be finite, and at most {largest:.6g} "
            f"for a model in {dtype}"
        )
    return np.ascontiguousarray(values, dtype=precision(dtype))
