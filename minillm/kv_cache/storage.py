"""What a layer's cache is made of.  Lessons 08 and 09."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LayerCache:
    """One layer's keys and values for every block.  Lesson 08 fills the scales."""

    k: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    v: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    k_scale: Tensor | None = None  # [num_blocks, block_size, kv_heads] of a quantised cache
    v_scale: Tensor | None = None
