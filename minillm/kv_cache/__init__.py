"""The paged KV cache: the block pool, block tables and storage.  Lesson 09."""

from typing import TYPE_CHECKING

from minillm.lazy_imports import exports

if TYPE_CHECKING:
    from .block_pool import BlockPool, BlockPoolError, OutOfBlocks, prefix_keys
    from .storage import LayerCache

__all__ = ["BlockPool", "BlockPoolError", "LayerCache", "OutOfBlocks", "prefix_keys"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "BlockPool": "block_pool",
        "BlockPoolError": "block_pool",
        "LayerCache": "storage",
        "OutOfBlocks": "block_pool",
        "prefix_keys": "block_pool",
    },
)
