"""Blocks that several devices share: each holds some of a block's tokens.

With fewer KV heads than GPUs, several GPUs need the keys and values of the same head. If each stores all of them, the
cache of two GPUs holds no more tokens than that of one. So they may divide every block instead: two GPUs hold the
tokens at even and at odd positions.

A block is then half as large on each, and twice as many fit. Nothing else changes for what counts blocks: a
block is still one number, the same on all devices, and has all of its tokens, so the pool, prefix sharing, sliding
windows and streams need no code for it. And each row's keys are divided evenly, however few it has, so that no device
waits for another. (vLLM calls this decode context parallelism with interleaved tokens.) What is left to do is to attend
to the keys of several devices: see `minillm.model.split_attention`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .layer_cache import CacheSpec, LayerCache


class BlockShare(NamedTuple):
    """The tokens of each block that a device holds."""

    first: int  # the first token of a block that this device holds
    of: int  # devices: it holds every so many tokens from there

    def spec(self, whole: CacheSpec) -> CacheSpec:
        """Return the format of the device's part of a cache."""
        return whole if self.of == 1 else SplitSpec(whole.kv_heads, whole.head_dim, whole.dtype, self)

    def slots(self, slots: Tensor) -> Tensor:
        """Slots in whole blocks, int64 -> slots of the device's part; -1: it does not hold the token."""
        if self.of == 1:
            return slots
        return torch.where((slots >= 0) & (slots % self.of == self.first), slots // self.of, -1)

    def held(self, tokens: Tensor) -> Tensor:
        """Return how many of a row's first `tokens` tokens the device holds."""
        return (tokens - self.first + self.of - 1) // self.of


@dataclass(frozen=True)
class SplitSpec(CacheSpec):
    """The format of a device's part of a layer's cache."""

    share: BlockShare

    @property
    def bytes_per_token(self) -> int:
        """Return bytes that a token takes here: its own bytes, divided by the devices."""
        return -(-super().bytes_per_token // self.share.of)

    def allocate(self, blocks: int, block_size: int, device: torch.device) -> "SplitCache":
        """Return an empty part of `blocks` blocks. block_size: of a whole block, a multiple of the number of
        devices.
        """
        own = super().allocate(blocks, block_size // self.share.of, device)
        return SplitCache(own.k, own.v, own.k_scale, own.v_scale, self.share)


@dataclass
class SplitCache(LayerCache):
    """A device's part of a layer's cache: in each block, the tokens of its share."""

    share: BlockShare = BlockShare(0, 1)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """As `LayerCache.write`, without the tokens whose slot is -1."""
        own = slots >= 0
        super().write(k[own], v[own], slots[own])
