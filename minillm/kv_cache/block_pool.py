"""The block pool of the paged KV cache: reference counts and prefix sharing.  Lesson 09.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from minillm.errors import MinillmError
from minillm.prompts import Embeddings


class BlockPoolError(MinillmError, RuntimeError):
    """A block pool returned something inconsistent."""


class OutOfBlocks(BlockPoolError):
    """More blocks were requested than are available. The scheduler checks first, so this is a bug."""


class BlockPool:
    """Allocates blocks and counts references to them. Only full blocks are shared, so none has two writers.  Lesson 09.

    A block is in one of three states: used (it has references), cached (it has none, but still holds the keys and
    values of a known token prefix) or free. `allocate` takes free blocks first, then cached ones, least recently used
    first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: recently used memory is reused first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._on_evict: Callable[[int], None] | None = None

    @property
    def available(self) -> int:
        """Return the number of blocks that `allocate` can return now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Return the number of cached blocks."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each. Raises OutOfBlocks, and takes none, if there are too few."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} of {self.num_blocks} available")
        blocks = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            if self._on_evict is not None:
                self._on_evict(block)
            blocks.append(block)
        for block in blocks:
            self.references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these used or cached blocks."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. Later blocks become evictable first, so prefixes outlive their suffixes."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of these keys. Adds no references."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes) -> None:
        """Register a full, used block as holding the prefix `key`. The first block with a key keeps it."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def watch_evictions(self, callback: Callable[[int], None] | None) -> None:
        """Call `callback` with each cached block that `allocate` evicts; None: stop."""
        self._on_evict = callback

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        """Drop blocks from the prefix index: cached ones become free, used ones can no longer be found. None: all."""
        for block in [*self._cached, *self._key_of] if blocks is None else blocks:
            if (key := self._key_of.pop(block, None)) is not None:
                del self._block_of[key]
                if block in self._cached:
                    del self._cached[block]
                    self._free.append(block)

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """Count those of these blocks that are cached: sharing them reduces `available` by that many."""
        return sum(self.references[block] == 0 for block in blocks)

    def are_cached(self, blocks: Iterable[int]) -> list[bool]:
        """Return whether each of these blocks is cached."""
        return [block in self._cached for block in blocks]

    def check(self, holders: Iterable[int]) -> None:
        """Raise AssertionError unless all counts are consistent. holders: every held block, once for each holder."""
        counts = Counter(holders)
        used = {block for block, count in enumerate(self.references) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (used & free or used & cached or free & cached), "a block is in two states"
        assert len(used) + len(free) + len(cached) == self.num_blocks, "free + used + cached is not the total"
        assert {b: self.references[b] for b in used} == counts, "reference counts differ from the holders"
        assert all(self._key_of[block] == key for key, block in self._block_of.items()), "a prefix key is stale"
        assert cached <= self._key_of.keys() and len(self._key_of) == len(self._block_of), "a prefix key is lost"


def prefix_keys(
    tokens: np.ndarray,
    block_size: int,
    cache_key: tuple = (),
    known: Sequence[bytes] = (),
    embeddings: Embeddings | None = None,
) -> list[bytes]:
    """Return a key for each full block of `tokens`: a hash of its tokens and all tokens before it.  Lesson 09.

    Equal keys mean equal prefixes, and so equal keys and values in the cache. cache_key: what else must be equal
    (`Request.cache_key`), which separates tenants and adapters. known: keys already computed for the first blocks.
    embeddings: those that some positions have instead of tokens, which are hashed with their block.
    """
    keys = list(known)
    parent = keys[-1] if keys else hashlib.blake2b(repr(cache_key).encode(), digest_size=16).digest()
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        content = tokens[start : start + block_size].tobytes()
        if embeddings is not None:
            content += embeddings.digest(start, start + block_size)
        parent = hashlib.blake2b(parent + content, digest_size=16).digest()
        keys.append(parent)
    return keys
