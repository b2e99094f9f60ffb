"""Faults in the paged KV cache: reference counts, prefix keys, sliding windows, scales."""

from . import Fault

POOL, STREAMS = "minillm/kv_cache/block_pool.py", "minillm/kv_cache/attention_sinks.py"
TABLES, STORAGE = "minillm/kv_cache/block_tables.py", "minillm/kv_cache/layer_cache.py"

FAULTS = (
    Fault(
        "a stream's evicted blocks count as held",
        STREAMS,
        "np.int32), self.held[:, rows] - self.gone[:, rows]",
        "np.int32), self.held[:, rows]",
        "tests/server/test_engine_room.py -k holdings",
    ),
    Fault(
        "a graph cannot capture how a cache is quantized",
        STORAGE,
        "values.new_full((1,), LARGEST[dtype])",
        "values.new_tensor([LARGEST[dtype]])",
        "tests/kv_cache/test_layer_cache.py -k from_the_host",
    ),
    Fault(
        "prefix keys have no salt",
        POOL,
        "hashlib.blake2b(cache_key.encode(), digest_size=16)",
        'hashlib.blake2b(b"", digest_size=16)',
        "tests/engine/test_engine.py -k salts_isolate_tenants",
    ),
    Fault(
        "a block's key ignores the blocks before it",
        POOL,
        "hashlib.blake2b(parent + tokens[start",
        "hashlib.blake2b(tokens[start",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "a shared block is freed with its first holder",
        POOL,
        "            self.references[block] -= 1\n            if self.references[block] == 0:",
        "            self.references[block] -= 1\n            if self.references[block] <= 1:",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "sharing a used block does not increase its reference count",
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
        "a prefix is evicted from its beginning",
        POOL,
        "for block in reversed(blocks):",
        "for block in blocks:",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "a window's block is released one token too early",
        TABLES,
        "np.maximum(computed + 1 - self._reach, 0)",
        "np.maximum(computed + 2 - self._reach, 0)",
        "tests/kv_cache/test_windows.py -k hidden_blocks",
    ),
    Fault(
        "a prefix hit for a local group may lack one block",
        TABLES,
        "if len(back) < count - first:",
        "if len(back) < count - first - 1:",
        "tests/kv_cache/test_windows.py -k hit",
    ),
    Fault(
        "the block count of a request with windows is too small by one",
        "minillm/kv_cache/layer_groups.py",
        "(window + chunk + 2 * block_size - 3) // block_size",
        "(window + chunk + block_size - 3) // block_size",
        "tests/kv_cache/test_windows.py -k blocks_held_range",
    ),
    Fault(
        "a stream releases its sinks",
        STREAMS,
        "first, last = self.stream.sinks, self.stream.max_blocks - 1",
        "first, last = 0, self.stream.max_blocks - 1",
        "tests/kv_cache/test_attention_sinks.py -k definition_under",
    ),
    Fault(
        "a stream's blocks stay shareable after it drops earlier tokens",
        STREAMS,
        "return 0 if self.gone[0, row] else full",
        "return full",
        "tests/kv_cache/test_attention_sinks.py -k shares_only_blocks",
    ),
    Fault(
        "values are dequantized with the scales of keys",
        STORAGE,
        "pairs = ((self.k, self.k_scale), (self.v, self.v_scale))",
        "pairs = ((self.k, self.k_scale), (self.v, self.k_scale))",
        "tests/kv_cache/test_layer_cache.py",
    ),
    Fault(
        "the bytes per token leave out the scales",
        STORAGE,
        "self.scale_dtype.itemsize",
        "0",
        "tests/kv_cache/test_layer_cache.py -k bytes_per_token",
    ),
)
