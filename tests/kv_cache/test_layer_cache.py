"""Quantized and dense layer caches: scales are written, read and counted, and attention uses dequantized values."""

import resource
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.kv_cache.layer_cache import CacheSpec, LayerCache, quantize
from minillm.ops import AttentionOptions, Rows, cpu, on, reference

BLOCKS, BLOCK, KV_HEADS, DIM = 7, 4, 2, 16
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MODULES = {"reference": reference, "cpu": cpu}


def filled(dtype, tokens=BLOCKS * BLOCK):
    """A cache written in shuffled slot order, with its keys and values [slots, kv_heads, d]."""
    rng = torch.Generator().manual_seed(0)
    cache = CacheSpec(KV_HEADS, DIM, dtype).allocate(BLOCKS, BLOCK, torch.device("cpu"))
    k, v = (torch.randn(tokens, KV_HEADS, DIM, generator=rng, dtype=torch.float64) for _ in "kv")
    k[:, 0] *= 100  # ranges differ between heads and tokens
    v *= torch.logspace(-3, 3, tokens, dtype=torch.float64)[:, None, None]
    slots = torch.randperm(tokens, generator=rng)
    reference.write_kv(k[slots], v[slots], cache, slots)
    return cache, k, v


def dequantized(cache):
    every = torch.arange(BLOCKS)[None]
    return LayerCache(*(each[0].double().unflatten(0, (BLOCKS, BLOCK)) for each in cache.read(every)))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use as Linux tells it")
def test_a_cpu_cache_takes_memory_only_where_it_is_used():
    def in_use() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = in_use()
    cache = CacheSpec(1, 64, torch.bfloat16).allocate(1 << 16, 16, torch.device("cpu"))
    assert cache.k.nbytes + cache.v.nbytes == 1 << 28 and in_use() - before < 1 << 26
    assert not cache.v[-1].any()
    cache.v[:, 0] = 1
    assert cache.v[:, :2].sum() == (1 << 16) * 64 and in_use() - before > 1 << 26


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_quantization_error_is_at_most_half_a_step_of_each_tokens_range(name, bound):
    cache, *written = filled(QUANTIZED[name])
    for found, wanted in zip(cache.read(torch.arange(BLOCKS)[None]), written, strict=True):
        largest = wanted.abs().amax(-1, keepdim=True)
        assert ((found[0].double() - wanted).abs() <= bound * largest * 1.0001).all()


@pytest.mark.parametrize("dtype", QUANTIZED.values())
def test_quantizing_copies_no_number_from_the_host_so_that_a_graph_can_capture_it(dtype):
    called = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), options=None):
            called.append(function.__name__)
            return function(*given, **(options or {}))

    with Listening():
        quantize(torch.ones(2, 1, 4), dtype)
    assert "amax.default" in called and not any(name.startswith("lift_fresh") for name in called)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_unquantized_cache_stores_values_exactly(dtype):
    cache, k, v = filled(dtype)
    assert cache.k_scale is None and cache.v_scale is None
    found = cache.read(torch.arange(BLOCKS)[None])
    assert found[0][0].equal(k.to(dtype)) and found[1][0].equal(v.to(dtype))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("module", MODULES)
def test_every_write_operation_quantizes_for_a_quantized_cache(module, name):
    wanted, k, v = filled(QUANTIZED[name])
    cache = CacheSpec(KV_HEADS, DIM, QUANTIZED[name]).allocate(BLOCKS, BLOCK, torch.device("cpu"))
    MODULES[module].write_kv(k, v, cache, torch.arange(len(k)))
    assert cache.k.view(torch.uint8).equal(wanted.k.view(torch.uint8)) and cache.k_scale.equal(wanted.k_scale)
    assert cache.v.view(torch.uint8).equal(wanted.v.view(torch.uint8)) and cache.v_scale.equal(wanted.v_scale)


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_are_read_as_zeros_and_other_slots_do_not_change(name):
    cache, *_ = filled(QUANTIZED[name])
    before = cache.read(torch.arange(BLOCKS)[None])[0].clone()
    zeros = torch.zeros(1, KV_HEADS, DIM)
    cache.write(zeros, zeros, torch.tensor([5]))
    after = cache.read(torch.arange(BLOCKS)[None])[0]
    assert after[0, 5].eq(0).all()
    before[0, 5] = 0
    assert after.equal(before)


@pytest.mark.parametrize("options", [AttentionOptions(0.2), AttentionOptions(0.2, window=5, soft_cap=2.0)])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("module", MODULES)
def test_attention_over_codes_equals_attention_over_their_values(module, name, options):
    cache, *_ = filled(QUANTIZED[name])
    twin, run = dequantized(cache), MODULES[module]
    table = torch.tensor([[3, 1, 6], [0, 5, 0]], dtype=torch.int32)
    lengths = torch.tensor([11, 6], dtype=torch.int32)
    q = torch.randn(2, 1, 6, DIM, dtype=torch.float64)
    wanted = reference.decode_attention(q, twin, Rows.decoding(table, lengths), options)
    torch.testing.assert_close(
        run.decode_attention(q, cache, Rows.decoding(table, lengths), options), wanted, rtol=1e-6, atol=1e-9
    )
    starts, q = torch.tensor([0, 7, 9], dtype=torch.int32), torch.randn(9, 6, DIM, dtype=torch.float64)
    wanted = reference.prefill_attention(q, twin, Rows(table, lengths, starts, 7), options)
    found = run.prefill_attention(q, cache, Rows(table, lengths, starts, 7), options)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_attention_reads_both_scales(which):
    cache, *_ = filled(torch.int8)
    rows = Rows.decoding(torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    given = rows, AttentionOptions(0.2)
    q = torch.randn(1, 1, 4, DIM)
    before = on("cpu").decode_attention(q, cache, *given)
    getattr(cache, which).mul_(0.01)
    assert not torch.allclose(on("cpu").decode_attention(q, cache, *given), before, rtol=0.1)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, 2 * 256 * 2), (torch.float32, 2 * 256 * 4), (torch.int8, 2 * (256 + 4)), (torch.float64, 4096)],
)
def test_bytes_per_token_include_the_scales(dtype, expected):
    spec = CacheSpec(kv_heads=1, head_dim=256, dtype=dtype)
    cache = spec.allocate(3, 16, torch.device("cpu"))
    parts = [each for each in (cache.k, cache.v, cache.k_scale, cache.v_scale) if each is not None]
    assert spec.bytes_per_token == expected == sum(each.nbytes for each in parts) / 48
