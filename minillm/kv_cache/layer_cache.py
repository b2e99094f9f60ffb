"""Storage of one layer's cache: keys and values in blocks, with scales if quantized.  Lessons 08 and 09."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minillm.errors import ConfigError

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # `kv_cache_dtype` -> the dtype of codes
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code of each


@dataclass(frozen=True)
class CacheSpec:
    """The format of one layer's cache: a key and a value for each token and KV head.

    A cache in int8 or float8_e4m3fn also stores a scale for each token and KV head. So each token is quantized by its
    own range, without calibration.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, kv_cache_dtype: str, kv_heads: int, head_dim: int, dtype: torch.dtype) -> "CacheSpec":
        """Return the format that the engine's option names; "auto" is the model's `dtype`. Raises ConfigError."""
        if kv_cache_dtype != "auto" and kv_cache_dtype not in DTYPES:
            raise ConfigError(f"kv_cache_dtype must be one of auto, {', '.join(DTYPES)}, not {kv_cache_dtype!r}")
        return cls(kv_heads, head_dim, DTYPES.get(kv_cache_dtype, dtype))

    @property
    def name(self) -> str:
        """Return the format's name in records: "bfloat16", "int8", "fp8"."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        return names.get(self.dtype, str(self.dtype).removeprefix("torch."))

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Return the dtype of scales; None if the cache is not quantized."""
        return torch.float32 if self.dtype in LARGEST else None

    @property
    def bytes_per_token(self) -> int:
        """Return bytes of a token's key and value in one layer, with their scales."""
        scale = 0 if self.scale_dtype is None else self.scale_dtype.itemsize
        return 2 * self.kv_heads * (self.head_dim * self.dtype.itemsize + scale)

    def allocate(self, blocks: int, block_size: int, device: torch.device) -> "LayerCache":
        """Return an empty cache of `blocks` blocks of `block_size` tokens."""
        # Zeros, because attention may multiply stale values by a probability of 0, and 0 * NaN is NaN.
        slots = (blocks, block_size, self.kv_heads)
        k, v = (_zeros((*slots, self.head_dim), self.dtype, device) for _ in "kv")
        if self.scale_dtype is None:
            return LayerCache(k, v)
        return LayerCache(k, v, *(_zeros(slots, self.scale_dtype, device) for _ in "kv"))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU the system provides each page of memory, zeroed, only when it is first
    used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write all pages now: a large cache would take its memory, and a second, before the first token.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


@dataclass
class LayerCache:
    """One layer's keys and values in all blocks.

    In a quantized cache, `k` and `v` are codes; a value is its code times its scale. Scales are indexed by the same
    blocks, so paging, sharing, windows and eviction need no code for them.
    """

    k: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    v: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    k_scale: Tensor | None = None  # [num_blocks, block_size, kv_heads] of a quantized cache
    v_scale: Tensor | None = None

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store each token's k and v [tokens, kv_heads, d] in slots [tokens] int64, quantized if the cache is."""
        for values, held, scales in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if scales is not None:
                values, scale = quantize(values, held.dtype)
                scales.flatten(0, 1)[slots] = scale
            indexable(held).flatten(0, 1)[slots] = indexable(values.to(held.dtype))

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """blocks [rows, n] -> their keys and values, dequantized: [rows, n * block_size, kv_heads, d] each."""
        pairs = ((self.k, self.k_scale), (self.v, self.v_scale))
        k, v = (_read(held, scales, blocks) for held, scales in pairs)
        return k, v

    def randomize(self) -> None:
        """Fill it with random numbers, as measurements need."""
        for held, scales in ((self.k, self.k_scale), (self.v, self.v_scale)):
            if scales is None:
                held.normal_()
            else:
                indexable(held).view(torch.uint8).random_(0, 120)  # positive codes of either format
                scales.fill_(1 / LARGEST[held.dtype])


def _read(held: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    values = indexable(held)[blocks].view(held.dtype).flatten(1, 2)
    return values if scales is None else widened(values).mul_(scales[blocks].flatten(1, 2)[..., None])


def widened(codes: Tensor) -> Tensor:
    """Codes in float32, exactly."""
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.float()
    # torch converts fp8 one by one. Moved up to a float16's exponent and mantissa, its bits mean 2^-8 of the value.
    bits = codes.view(torch.int8).to(torch.int16) << 7  # keeps the sign
    return (bits & ~0x4000).view(torch.float16).float().mul_(256.0)


def quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """values [tokens, kv_heads, d] -> codes of that shape in `dtype`, float32 scales [tokens, kv_heads].  Lesson 08.

    scale = max |value| of the token and head / the largest code. A head of zeros gets scale 0.
    """
    values = values.float()
    # On a GPU, torch multiplies by a number's reciprocal instead, which is not exact. A graph can capture `new_full`.
    scale = values.abs().amax(-1) / values.new_full((1,), LARGEST[dtype])
    codes = values / torch.where(scale > 0, scale, 1.0)[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def indexable(tensor: Tensor) -> Tensor:
    """Return the tensor, or its bytes for the 8-bit dtypes that torch cannot index."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
