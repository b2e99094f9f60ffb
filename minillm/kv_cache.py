"""The paged KV cache: fixed blocks, who holds them, and what may be shared.  Lesson 09.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the pool is plain bookkeeping: it runs without torch
    from torch import Tensor


@dataclass
class LayerCache:
    """One layer's keys and values for every block.  Lesson 08 fills the scales."""

    k: "Tensor"  # [num_blocks, block_size, kv_heads, head_dim]
    v: "Tensor"  # [num_blocks, block_size, kv_heads, head_dim]
    k_scale: "Tensor | None" = None  # [num_blocks, block_size, kv_heads] of a quantised cache
    v_scale: "Tensor | None" = None
