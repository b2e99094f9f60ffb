"""The paged KV cache: the block pool, block tables, and each layer's keys and values.  Lesson 09.

Which blocks exist, who holds them, and what is in them belongs here. Who gets the next ones does not (`scheduler`).
"""

from typing import TYPE_CHECKING

from minillm.lazy_imports import exports

if TYPE_CHECKING:
    from .block_pool import BlockPool, BlockPoolError, OutOfBlocks, prefix_keys
    from .layer_cache import LayerCache

__all__ = ["BlockPool", "BlockPoolError", "LayerCache", "OutOfBlocks", "prefix_keys"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "BlockPool": "block_pool",
        "BlockPoolError": "block_pool",
        "LayerCache": "layer_cache",
        "OutOfBlocks": "block_pool",
        "prefix_keys": "block_pool",
    },
)
