"""Faults in the paged cache: who holds a block, what a prefix is called, which blocks a window needs."""

from . import Fault

POOL, STREAMS = "minillm/kv_cache/block_pool.py", "minillm/kv_cache/attention_sinks.py"
TABLES, STORAGE = "minillm/kv_cache/block_tables.py", "minillm/kv_cache/layer_cache.py"

FAULTS = (
    Fault(
        "prefix keys have no salt",
        POOL,
        "hashlib.blake2b(cache_key.encode(), digest_size=16)",
        'hashlib.blake2b(b"", digest_size=16)',
        "tests/engine/test_engine.py -k salts_isolate_tenants",
    ),
    Fault(
        "a block's key forgets the blocks before it",
        POOL,
        "hashlib.blake2b(parent + tokens[start",
        "hashlib.blake2b(tokens[start",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "a shared block is free when its first holder ends",
        POOL,
        "            self.references[block] -= 1\n            if self.references[block] == 0:",
        "            self.references[block] -= 1\n            if self.references[block] <= 1:",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "a share of a used block is not counted",
        POOL,
        "                del self._cached[block]\n            self.references[block] += 1",
        "                del self._cached[block]\n            self.references[block] = 1",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "the most recently used block is evicted first",
        POOL,
        "self._cached.popitem(last=False)",
        "self._cached.popitem(last=True)",
        "tests/kv_cache/test_block_pool.py -k least_recently_used",
    ),
    Fault(
        "an evicted block is still found by its prefix",
        POOL,
        "del self._block_of[self._key_of.pop(block)]",
        "self._key_of.pop(block)",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "a prefix is evicted before its ends",
        POOL,
        "for block in reversed(blocks):",
        "for block in blocks:",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "a window's block is released a token early",
        TABLES,
        "np.maximum(computed + 1 - self._reach, 0)",
        "np.maximum(computed + 2 - self._reach, 0)",
        "tests/kv_cache/test_windows.py -k hidden_blocks",
    ),
    Fault(
        "a local group's blocks are found up to a missing one",
        TABLES,
        "if len(back) < count - first:",
        "if len(back) < count - first - 1:",
        "tests/kv_cache/test_windows.py -k hit",
    ),
    Fault(
        "a request with windows is reckoned a block too small",
        "minillm/kv_cache/layer_groups.py",
        "(window + chunk + 2 * block_size - 3) // block_size",
        "(window + chunk + block_size - 3) // block_size",
        "tests/kv_cache/test_windows.py -k blocks_held_range",
    ),
    Fault(
        "a stream releases its sinks",
        STREAMS,
        "first, last = self.stream.sinks, self.stream.room - 1",
        "first, last = 0, self.stream.room - 1",
        "tests/kv_cache/test_attention_sinks.py -k definition_under",
    ),
    Fault(
        "others find a stream's block that saw less than a prefix does",
        STREAMS,
        "return 0 if self.gone[0, row] else full",
        "return full",
        "tests/kv_cache/test_attention_sinks.py -k shares_only_blocks",
    ),
    Fault(
        "values are read with the scales of keys",
        STORAGE,
        "pairs = ((self.k, self.k_scale), (self.v, self.v_scale))",
        "pairs = ((self.k, self.k_scale), (self.v, self.k_scale))",
        "tests/kv_cache/test_layer_cache.py",
    ),
    Fault(
        "a token's bytes leave out its scales",
        STORAGE,
        "self.scale_dtype.itemsize",
        "0",
        "tests/kv_cache/test_layer_cache.py -k bytes_per_token",
    ),
)
