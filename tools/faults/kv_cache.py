"""Faults in the paged KV cache: reference counts, prefix keys, sliding windows, scales."""

from . import Fault

POOL, STREAMS = "minillm/kv_cache/block_pool.py", "minillm/kv_cache/attention_sinks.py"
STORAGE = "minillm/kv_cache/layer_cache.py"

FAULTS = (
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
        "hashlib.blake2b(repr(cache_key).encode(), digest_size=16)",
        'hashlib.blake2b(b"", digest_size=16)',
        "tests/engine/test_engine.py -k salts_isolate_tenants",
    ),
    Fault(
        "a shared block is freed with its first holder",
        POOL,
        "            self.references[block] -= 1\n            if self.references[block] == 0:",
        "            self.references[block] -= 1\n            if self.references[block] <= 1:",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "an evicted block is still found by its prefix",
        POOL,
        "del self._block_of[self._key_of.pop(block)]",
        "self._key_of.pop(block)",
        "tests/kv_cache/test_block_pool.py",
    ),
    Fault(
        "a stream releases its sinks",
        STREAMS,
        "first, last = self.stream.sinks, self.stream.max_blocks - 1",
        "first, last = 0, self.stream.max_blocks - 1",
        "tests/kv_cache/test_attention_sinks.py -k definition_under",
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
