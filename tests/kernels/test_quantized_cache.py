"""Kernels that write and read caches in int8 and fp8: exact codes, and attention over what they stand for."""

import pytest
import torch

from minillm.kv_cache import LayerCache
from minillm.kv_cache.layer_cache import CacheSpec, quantize, widened
from minillm.ops import AttentionOptions, Rows, reference
from tests.kernels.compare import COMPILED, assert_close, random_tensor, rotations
from tests.proofs import pairwise
from tests.rounded_cache import rounded

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from minillm.kernels import cache_codes, paged_attention, rope_cache  # noqa: E402
from minillm.kernels.cache_codes import to_codes, to_numbers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
FORMATS = ["int8", "fp8"]
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
# heads, kv_heads, head_dim, block_size, dtype, window, soft_cap
LAYOUTS = {
    "mqa 256 bf16": (8, 1, 256, 16, BF16, None, None),
    "gqa 64 window cap": (4, 2, 64, 5, F32, 9, 5.0),
    "mha 16": (3, 3, 16, 16, F32, None, None),
    "mqa 32 f16 cap": (4, 1, 32, 8, F16, None, 30.0),
}
if COMPILED:
    LAYOUTS |= {
        "gqa 128 bf16": (32, 8, 128, 16, BF16, None, None),
        "gqa 256 bf16 window cap": (8, 4, 256, 16, BF16, 300, 50.0),
        "mha 128 f16": (4, 4, 128, 32, F16, None, None),
    }
LAYOUT = "heads, kv_heads, dim, block_size, dtype, window, soft_cap"
formats = pytest.mark.parametrize("name", FORMATS)
LENGTHS = [1, 300, 517, 64, 2000] if COMPILED else [1, 33, 19]


@triton.jit
def numbers_kernel(codes_ptr, out_ptr, KIND: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, to_numbers(tl.load(codes_ptr + at), KIND).to(tl.float32))


@triton.jit
def codes_kernel(x_ptr, codes_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)[None, :]
    tl.store(codes_ptr + at, to_codes(tl.load(x_ptr + at), tl.full([1], 1.0, tl.float32), codes_ptr.dtype.element_ty))


@pytest.mark.parametrize("kind", ["float32", *(["float16"] if COMPILED else [])])
def test_every_code_is_converted_exactly(kind, device):
    every = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, device=device)
    numbers_kernel[(1,)](every.view(torch.int8), out, KIND=getattr(tl, kind))
    assert out.equal(every.view(torch.int8).float())
    numbers_kernel[(1,)](every, out, KIND=getattr(tl, kind))
    wanted = every.view(torch.float8_e4m3fn).float()
    real = ~wanted.isnan()  # two codes, 0x7F and 0xFF, which a cache never holds
    assert out[real].equal(wanted[real]) and widened(every.cpu().view(torch.float8_e4m3fn))[real.cpu()].equal(
        wanted[real].cpu()
    )


@formats
def test_numbers_are_rounded_as_torch_rounds_them_ties_included(name, device):
    values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:-1]
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), values / 3])
    if name == "int8":
        near = torch.cat([torch.arange(127) + each for each in (0, 0.5, 0.4999, 0.5001)])
    near = torch.cat([near, -near])
    near = torch.nn.functional.pad(near, (0, triton.next_power_of_2(len(near)) - len(near))).to(device)
    dtype = torch.int8 if name == "int8" else torch.float8_e4m3fn
    found = torch.empty(len(near), dtype=torch.int8 if name == "int8" else torch.uint8, device=device)
    codes_kernel[(1,)](near, found, COUNT=len(near))
    wanted = (near.round() if name == "int8" else near).to(dtype)
    assert found.view(torch.uint8).equal(wanted.view(torch.uint8))


@formats
def test_quantize_gives_the_nearest_codes_by_definition(name):
    x = torch.randn(40, 3, 32) * torch.logspace(-4, 4, 40)[:, None, None]
    codes, scales = quantize(x, CacheSpec.of(name, 1, 32, F32).dtype)
    assert (codes.float() * scales[..., None]).equal(rounded(x, name))


def same(found: LayerCache, wanted: LayerCache) -> bool:
    parts = zip(
        (found.k, found.v, found.k_scale, found.v_scale), (wanted.k, wanted.v, wanted.k_scale, wanted.v_scale),
        strict=True,
    )  # fmt: skip
    return all(a is b is None or a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in parts)


def drawn(kv_heads, heads, dim, dtype, device):
    """q, k, v of nine tokens with very different ranges, as slices of one product; a head of zeros; and the angles."""
    qkv = random_tensor(9, heads + 2 * kv_heads, dim, dtype=F32, device=device)
    qkv = (qkv * torch.logspace(-3, 2, 9, device=device)[:, None, None]).to(dtype)
    qkv[3] = 0
    return *qkv.split((heads, kv_heads, kv_heads), 1), rotations(9, dim, device).to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(1, 256, 16), (3, 32, 5)])
@formats
def test_the_write_kernel_stores_the_references_codes_and_scales(name, kv_heads, dim, block_size, dtype, device):
    spec = CacheSpec.of(name, kv_heads, dim, dtype)
    found, wanted = (spec.allocate(3, block_size, torch.device(device)) for _ in "fw")
    _, k, v, _ = drawn(kv_heads, 4, dim, dtype, device)
    slots = torch.randperm(3 * block_size, device=device)[:9]
    reference.write_kv(k[1:], v[1:], wanted, slots[1:])
    kernels.write_kv(k, v, found, torch.cat([torch.tensor([-1], device=device), slots[1:]]))  # the first is skipped
    assert same(found, wanted)


@pytest.mark.parametrize(("dtype", "dim"), [(BF16, 24), (torch.float64, 32)])
@formats
def test_heads_without_a_kernel_are_written_and_padding_skipped(name, dtype, dim, device):
    """The reference would write slot -1, the last of the cache."""
    found, wanted = (CacheSpec.of(name, 3, dim, dtype).allocate(3, 5, torch.device(device)) for _ in "fw")
    _, k, v, _ = drawn(3, 4, dim, dtype, device)
    slots = torch.tensor([3, -1, 0, 13, 7, -1, 4, 9, 10], device=device)
    reference.write_kv(k[slots >= 0], v[slots >= 0], wanted, slots[slots >= 0])
    kernels.write_kv(k, v, found, slots)
    assert same(found, wanted)


@formats
def test_a_padding_token_changes_nothing_not_even_before_the_cache(name, device):
    whole = CacheSpec.of(name, 2, 32, F32).allocate(3, 5, torch.device(device))
    parts = [whole.k, whole.v, whole.k_scale, whole.v_scale]
    before = [part.clone() for part in parts]
    q, k, v, cos_sin = drawn(2, 4, 32, F32, device)
    given = LayerCache(*(part[1:] for part in parts)), torch.full((9,), -1, device=device)
    kernels.write_kv(k, v, *given)
    kernels.rotary_write(q, k, v, cos_sin, *given, True, False)
    assert all(part.view(torch.uint8).equal(old.view(torch.uint8)) for part, old in zip(parts, before, strict=True))


@pairwise({"name": ["auto", *FORMATS], "dtype": [F32, BF16], "rotate_keys": [True, False]})
def test_rotary_embedding_and_write_in_one_launch_equal_the_two_operations(name, dtype, rotate_keys, device):
    spec = CacheSpec.of(name, 2, 64, dtype)
    found, wanted = (spec.allocate(3, 5, torch.device(device)) for _ in "fw")
    q, k, v, cos_sin = drawn(2, 6, 64, dtype, device)
    slots = torch.tensor([3, -1, 0, 14, 7, 5, 4, 9, 10], device=device)
    got, kept = rope_cache.rotary_write(q, k, v, cos_sin, found, slots, rotate_keys, True)
    rotated, keys = kernels.rotary_embedding(q, k, cos_sin)
    kernels.write_kv(keys if rotate_keys else k, v, wanted, slots)
    own = keys if rotate_keys else k
    if COMPILED and rotate_keys and dtype == F32:  # the two kernels' last bits differ, which bfloat16 rounds away
        assert_close("rotary_write", got, rotated.double(), dtype)
        assert_close("rotary_write", kept, own.double(), dtype)
        every = torch.arange(3, device=device)[None]
        for one, other in zip(found.read(every), wanted.read(every), strict=True):
            if name == "auto":
                assert_close("rotary_write", one, other.double(), dtype)
            else:  # and a code may be the next one
                assert_close("rotary_write", one.float(), other.double(), F32, times=2e3)
    else:
        assert got.equal(rotated) and kept.equal(own)
        assert same(found, wanted)


def test_scales_must_be_contiguous_and_heads_adjacent(device):
    cache = CacheSpec.of("int8", 2, 32, F32).allocate(3, 8, torch.device(device))
    part = LayerCache(cache.k[:, :, :1], cache.v[:, :, :1], cache.k_scale[:, :, :1], cache.v_scale[:, :, :1])
    k = torch.zeros(1, 1, 32, device=device)
    with pytest.raises(ValueError, match="scales of a quantized cache must be contiguous"):
        rope_cache.write_kv(k, k, part, torch.zeros(1, dtype=torch.int64, device=device))


def written(name, lengths, kv_heads, dim, block_size, dtype, device):
    """A quantized cache of random rows; slots that no row owns hold the largest codes, and NaN as their scale."""
    blocks = [-(-length // block_size) for length in lengths]
    cache = CacheSpec.of(name, kv_heads, dim, dtype).allocate(sum(blocks) + 2, block_size, torch.device(device))
    for codes, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        codes.view(torch.uint8).fill_(126)
        if scales is not None:
            scales.fill_(torch.nan)
    free = torch.randperm(sum(blocks) + 2)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[row, :count], free = free[:count], free[count:]
        k, v = (random_tensor(length, kv_heads, dim, dtype=dtype, device=device) for _ in "kv")
        at = torch.arange(length)
        slots = table[row, at // block_size].long() * block_size + at % block_size
        cache.write(k * 3, v * torch.logspace(-2, 1, length, device=device)[:, None, None], slots.to(device))
    return cache, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


@pairwise({"name": FORMATS, LAYOUT: LAYOUTS, "splits": [1, 4]})
def test_decode_attention(name, heads, kv_heads, dim, block_size, dtype, window, soft_cap, splits, device, monkeypatch):
    monkeypatch.setattr(paged_attention, "decode_splits", lambda *_: splits)
    cache, table, lengths = written(name, LENGTHS, kv_heads, dim, block_size, dtype, device)
    q = random_tensor(len(LENGTHS), 1, heads, dim, dtype=dtype, device=device)
    for options in (
        AttentionOptions(dim**-0.5, window, soft_cap),
        AttentionOptions(dim**-0.5, rotary=rotations(table.shape[1] * block_size, dim, device).to(dtype)),
    ):
        wanted = reference.decode_attention(q.double(), cache, Rows.decoding(table, lengths), options)
        assert_close(
            "decode_attention",
            kernels.decode_attention(q, cache, Rows.decoding(table, lengths), options),
            wanted,
            dtype,
        )


@pairwise({"name": FORMATS, LAYOUT: LAYOUTS, "first": {"gathered first": True, "in registers": False}})
def test_prefill_attention(name, heads, kv_heads, dim, block_size, dtype, window, soft_cap, first, device, monkeypatch):
    monkeypatch.setattr(paged_attention, "gathers", lambda *_: first)
    cache, table, lengths = written(name, LENGTHS, kv_heads, dim, block_size, dtype, device)
    queries = [1, 200, 90, 64, 700] if COMPILED else [1, 9, 19]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    q = random_tensor(sum(queries), heads, dim, dtype=dtype, device=device)
    for options in (
        AttentionOptions(dim**-0.5, window, soft_cap),
        AttentionOptions(dim**-0.5, rotary=rotations(table.shape[1] * block_size, dim, device).to(dtype)),
    ):
        given = cache, Rows(table, lengths, starts, max(queries)), options
        wanted = reference.prefill_attention(q.double(), *given)
        # gathered, keys and values are rounded once more
        assert_close("prefill_attention", kernels.prefill_attention(q, *given), wanted, dtype, times=1 + first)


@pairwise(
    {
        "name": FORMATS,
        "heads, kv_heads, dim, dtype": [(8 if COMPILED else 4, 1, 64, BF16), (4, 2, 32, F32), (2, 1, 256, BF16)],
        "length": [1, 2, 17, 128, 300, *([129, 1025, 2777] if COMPILED else [])],
    }
)
def test_one_rows_attention_reads_codes_and_writes_the_new_token(name, heads, kv_heads, dim, dtype, length, device):
    single_row = pytest.importorskip("minillm.kernels.single_row")
    cache, table, lengths = written(name, [length], kv_heads, dim, 16, dtype, device)
    wanted_cache = LayerCache(*(part.clone() for part in (cache.k, cache.v, cache.k_scale, cache.v_scale)))
    qkv, rotary = (
        random_tensor(1, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device),
        rotations(length, dim, device),
    )
    rotary = rotary.to(dtype)
    q, k, v = qkv.view(1, -1, dim).split((heads, kv_heads, kv_heads), 1)
    q, k = kernels.rotary_embedding(q, k, rotary[-1:])
    slot = table[0, (length - 1) // 16].long() * 16 + (length - 1) % 16
    reference.write_kv(k, v, wanted_cache, slot[None])
    for scales in (cache.k_scale, cache.v_scale):
        scales.view(-1, kv_heads)[slot] = torch.nan  # it must not be read before it is written
    wanted = reference.decode_attention(
        q[:, None].double(), wanted_cache, Rows.decoding(table, lengths), AttentionOptions(0.2)
    )[:, 0]
    attend = single_row.RowAttention(heads, kv_heads, dim, torch.device(device))
    for _ in range(2):  # the second run uses the workspace as the first left it
        out = attend(qkv, rotary, cache, table, lengths, AttentionOptions(0.2))
        assert_close("single_row.RowAttention, codes", out.view(1, heads, dim), wanted, dtype, times=2)
    assert same(cache, wanted_cache) or COMPILED  # compiled, the rotation of the two kernels may differ in a last bit
    found, expected = (each.read(table.long()) for each in (cache, wanted_cache))
    for one, other in zip(found, expected, strict=True):
        assert_close("single_row.RowAttention, cache", one[:, :length], other[:, :length].double(), F32, times=1e3)


@pytest.mark.parametrize("name", ["auto", *FORMATS])
def test_gathered_keys_are_followed_by_zeros_without_what_was_in_memory(name, device, monkeypatch):
    monkeypatch.setattr(paged_attention, "gathers", lambda *_: True)
    cache, table, lengths = written(name, [19, 1], 1, 32, 8, F32, device)
    q = random_tensor(20, 2, 32, dtype=F32, device=device)
    starts = torch.tensor([0, 19, 20], dtype=torch.int32, device=device)
    given = cache, Rows(table, lengths, starts, 19), AttentionOptions(0.2)
    wanted = reference.prefill_attention(q.double(), *given)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nothing was written to is then NaN
    try:
        assert fill and torch.empty(1, device=device).isnan()
        found = kernels.prefill_attention(q, *given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close("prefill_attention", found, wanted, F32)


@pytest.mark.parametrize("gathered", [True, False])
def test_a_rows_nan_stays_its_own(gathered, device, monkeypatch):
    monkeypatch.setattr(paged_attention, "gathers", lambda *_: gathered)
    cache, table, lengths = written("auto", [16, 16], 1, 32, 8, F32, device)
    cache.v[table[1].long()] = torch.nan
    q = random_tensor(32, 2, 32, dtype=F32, device=device)
    starts = torch.tensor([0, 16, 32], dtype=torch.int32, device=device)
    found = kernels.prefill_attention(q, cache, Rows(table, lengths, starts, 16), AttentionOptions(0.2))
    assert found[:16].isfinite().all() and found[16:].isnan().all()


@triton.jit
def float16_numbers(codes, kind: tl.constexpr):
    return to_numbers(codes, tl.float32).to(kind)


@triton.jit
def float16_of_words(words, kind: tl.constexpr, codes: tl.constexpr):
    a, b, c, d = cache_codes.of_words(words, tl.float32, codes)
    return a.to(kind), b.to(kind), c.to(kind), d.to(kind)


@pytest.fixture
def float16_products(monkeypatch):
    """Attention over codes multiplies float16 numbers as it does on a GPU; without one, without the instructions."""
    if not COMPILED:
        monkeypatch.setattr(paged_attention, "product_type", lambda *_: tl.float16)
        monkeypatch.setattr(paged_attention, "to_numbers", float16_numbers)
        monkeypatch.setattr(paged_attention, "of_words", float16_of_words)


@pairwise(
    {
        "name": FORMATS,
        "scales": [(1, 1, 1), (1e5, 1e3, 1e-12), (1e-5, 1e-3, 1e6), (30, 1e-9, 1e12)],
        "splits": [1, 4],
        "rotated": [False, True],
    }
)
def test_products_in_float16_stay_in_its_range(name, scales, splits, rotated, float16_products, device, monkeypatch):
    """scales: of queries, keys and values, which also range over twelve orders of magnitude, and some are zero."""
    monkeypatch.setattr(paged_attention, "decode_splits", lambda *_: splits)
    q, k, v = (torch.randn(70, 2, 32, device=device) * scale for scale in scales)
    v *= torch.logspace(-9, 3, 70, device=device)[torch.randperm(70), None, None]
    k[3] = v[5] = q[0, 0] = 0
    cache = CacheSpec.of(name, 2, 32, BF16).allocate(14, 5, torch.device(device))
    cache.write(k, v, torch.arange(70, device=device))
    table = torch.arange(14, dtype=torch.int32, device=device)[None]
    rotary = rotations(70, 32, device).to(BF16) if rotated else None
    options = AttentionOptions(1 / scales[0] / scales[1], rotary=rotary)
    for queries in (1, 3):
        few = q[:queries, :, None].expand(-1, -1, 2, -1).reshape(1, queries, 4, 32).to(BF16)
        rows = Rows.decoding(table, torch.tensor([70], dtype=torch.int32, device=device), queries)
        given = cache, rows, options
        wanted = reference.decode_attention(few.double(), *given)
        assert_close("decode_attention", kernels.decode_attention(few, *given), wanted, BF16)


@pytest.mark.parametrize(
    ("tiles", "keys", "queries", "quantized", "wanted"),
    [
        (32, 8192, 65536, False, True),
        (16, 8192, 65536, False, False),
        (16, 8192, 65536, True, True),
        (1, 8192, 65536, True, False),
        (32, 40000, 65536, True, False),
    ],
)
def test_keys_of_long_prompts_are_gathered_if_the_buffer_is_small(tiles, keys, queries, quantized, wanted):
    assert paged_attention.gathers(tiles, keys, queries, quantized) == wanted


def test_kernels_and_cache_agree_on_the_largest_codes():
    from minillm.kv_cache import layer_cache

    assert cache_codes.LARGEST == layer_cache.LARGEST
