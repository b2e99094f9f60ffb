"""Every kernel, compared with its float64 reference on random inputs: interpreted on a CPU, compiled on a GPU."""

import copy
import inspect
import json
import math
from dataclasses import replace

import pytest
import torch

from minillm import ops
from minillm.kv_cache import LayerCache
from minillm.model.batch import Batch
from minillm.model.families import ARCHITECTURES
from minillm.model.loader import load_model
from minillm.ops import AttentionOptions, Rows, reference
from minillm.ops.signatures import Truncation
from minillm.quantization import DenseWeight
from tests.kernels.compare import DTYPES, assert_close, assert_sampled, double, paged_cache, random_tensor, rotations
from tests.proofs import only_in_proofs, pairwise

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
from minillm.kernels import paged_attention, sampling  # noqa: E402  need triton

pytestmark = [
    pytest.mark.explore,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # the interpreter's numpy: 1 / inf is 0
]


def test_the_operations_have_the_signatures_of_their_references():
    names = [name for name in ops.names() if hasattr(kernels, name)]
    assert len(names) >= 8
    for name in names:
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(reference, name)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,dim", [(3, 64), (2, 96), (1, 2048), (5, 1)])
def test_rms_norm(rows, dim, dtype, device):
    x = random_tensor(rows, dim, dtype=dtype, device=device, scale=30)
    weight = torch.randn(dim, device=device)
    assert_close(
        "rms_norm", kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6), dtype
    )


def test_rms_norm_of_strided_heads(device):
    x = random_tensor(3, 6, 64, dtype=torch.float32, device=device)[:, 1:4]
    weight = torch.randn(64, device=device)
    assert_close(
        "rms_norm", kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6), x.dtype
    )


def test_queries_and_keys_are_normalized_as_slices_of_the_qkv_product(device):
    """Per head, without a copy: slices of [tokens, heads + 2 * kv_heads, d]."""
    qkv = random_tensor(3, 8, 64, dtype=torch.bfloat16, device=device, scale=5)
    weight = torch.randn(64, device=device)
    for part in qkv.split([4, 2, 2], 1):
        got = kernels.rms_norm(part, weight, 1e-6)
        assert_close("rms_norm", got, reference.rms_norm(part.double(), weight.double(), 1e-6), part.dtype)
        assert got.is_contiguous()


def test_rms_norm_of_a_zero_row_is_zero_and_huge_values_do_not_overflow(device):
    x = torch.tensor([[0.0] * 64, [1e15] * 64], device=device)
    out = kernels.rms_norm(x, torch.ones(64, device=device), 1e-6)
    assert (out[0] == 0).all() and torch.allclose(out[1], torch.ones_like(out[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,dim", [(3, 96), (2, 256)])
def test_add_rms_norm(rows, dim, dtype, device):
    weight = torch.randn(dim, device=device)  # first: the kernel may read it before the last launch has ended
    x, residual = (random_tensor(rows, dim, dtype=dtype, device=device) for _ in range(2))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    wanted = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-6)
    assert_close("add_rms_norm", normed, wanted[0], dtype)
    assert_close("add_rms_norm", total, wanted[1], dtype)


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens,size", [(2, 96), (1, 1030)])
def test_gated_activation(tokens, size, dtype, activation, device):
    gate_up = random_tensor(tokens, 2 * size, dtype=dtype, device=device, scale=4)
    assert_close(
        "gated_activation",
        kernels.gated_activation(gate_up, activation),
        reference.gated_activation(gate_up.double(), activation),
        dtype,
    )


def test_gated_activation_of_large_gates_stays_finite(device):
    gate_up = torch.tensor([[100.0, -100.0, 1e4, -1e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    for activation in ("gelu_tanh", "silu"):
        out = kernels.gated_activation(gate_up, activation)
        assert torch.allclose(out.cpu(), torch.tensor([[100.0, 0.0, 1e4, 0.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,kv_heads,dim", [(8, 1, 256), (3, 3, 64), (6, 2, 128)])
def test_rotary_embedding(heads, kv_heads, dim, dtype, device):
    qkv = random_tensor(4, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    q, k, _ = qkv.split([heads, kv_heads, kv_heads], 1)  # slices: tokens are not contiguous
    cos_sin = rotations(4, dim, device)
    wanted = reference.rotary_embedding(q.double(), k.double(), cos_sin.double())
    for got, want in zip(kernels.rotary_embedding(q, k, cos_sin), wanted, strict=True):
        assert_close("rotary_embedding", got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads,dim,block_size", [(1, 256, 16), (3, 64, 5)])
def test_keys_are_written_to_their_slots_and_nowhere_else(kv_heads, dim, block_size, dtype, device):
    cache = LayerCache(*(torch.full((4, block_size, kv_heads, dim), 7.0, dtype=dtype, device=device) for _ in "kv"))
    wanted = LayerCache(cache.k.clone(), cache.v.clone())
    kv = random_tensor(5, 2 * kv_heads, dim, dtype=dtype, device=device)
    k, v = kv.split(kv_heads, 1)
    slots = [block_size - 1, 3 * block_size, 2 * block_size + 1, 0, 4 * block_size - 1]  # the first and the last too
    slots = torch.tensor(slots, device=device)
    kernels.write_kv(k, v, cache, slots)
    reference.write_kv(k, v, wanted, slots)
    assert torch.equal(cache.k, wanted.k) and torch.equal(cache.v, wanted.v)


def test_a_negative_slot_is_skipped(device):
    cache = LayerCache(torch.zeros(2, 4, 1, 64, device=device), torch.zeros(2, 4, 1, 64, device=device))
    k = torch.ones(2, 1, 64, device=device)
    kernels.write_kv(k, k, cache, torch.tensor([-1, 5], device=device))
    assert cache.k.sum() == 64 and (cache.k[1, 1] == 1).all()


# heads, kv_heads, head_dim, block_size, dtype, window, soft_cap
LAYOUTS = {
    "mqa_256": (8, 1, 256, 16, torch.float32, None, None),
    "gqa_128": (6, 2, 128, 16, torch.float32, None, None),
    "mha_64": (2, 2, 64, 16, torch.float32, None, None),
    "odd_blocks": (4, 1, 64, 5, torch.float32, None, None),
    "soft_cap": (4, 2, 64, 16, torch.float32, None, 5.0),
    "window": (4, 1, 64, 8, torch.float32, 7, None),
    "window_and_cap": (2, 1, 128, 16, torch.float32, 19, 30.0),
    "bfloat16": (8, 1, 256, 16, torch.bfloat16, None, None),
}
layouts = pytest.mark.parametrize("heads,kv_heads,dim,block_size,dtype,window,soft_cap", LAYOUTS.values(), ids=LAYOUTS)
STREAMS = [LAYOUTS[name] for name in ("odd_blocks", "gqa_128", "bfloat16")]


@pytest.mark.key
@pytest.mark.parametrize("queries", [1, 3])
@layouts
def test_decode_attention(heads, kv_heads, dim, block_size, dtype, window, soft_cap, queries, device):
    lengths = [3, block_size, 2 * block_size + 1]
    cache, table, lengths = paged_cache(lengths, kv_heads, dim, block_size, dtype, device)
    q = random_tensor(3, queries, heads, dim, dtype=dtype, device=device)
    options = AttentionOptions(dim**-0.5, window, soft_cap)
    got = kernels.decode_attention(q, cache, Rows.decoding(table, lengths, queries), options)
    wanted = reference.decode_attention(q.double(), double(cache), Rows.decoding(table, lengths, queries), options)
    assert_close("decode_attention", got, wanted, dtype)


@pytest.mark.parametrize("window", [None, 100])
def test_long_rows_are_split_and_combined(window, device, monkeypatch):

    lengths = [260, 1, 129]  # the last splits of the shorter rows are empty
    cache, table, lengths = paged_cache(lengths, 1, 64, 16, torch.float32, device)
    q = random_tensor(3, 1, 4, 64, dtype=torch.float32, device=device)
    combined = []
    kernel = paged_attention.combine_kernel

    class Seen:
        def __getitem__(self, grid):
            combined.append(grid)
            return kernel[grid]

    monkeypatch.setattr(paged_attention, "combine_kernel", Seen())
    if window:  # a window is too short to be split on its own
        monkeypatch.setattr(paged_attention, "decode_splits", lambda *_: 4)
    got = kernels.decode_attention(q, cache, Rows.decoding(table, lengths), AttentionOptions(0.3, window))
    wanted = reference.decode_attention(
        q.double(), double(cache), Rows.decoding(table, lengths), AttentionOptions(0.3, window)
    )
    assert combined, "no row was split"
    assert_close("decode_attention", got, wanted, torch.float32)


def test_large_scores_do_not_overflow(device):
    cache, table, lengths = paged_cache([40], 1, 64, 16, torch.float32, device)
    q = random_tensor(1, 1, 2, 64, dtype=torch.float32, device=device, scale=1e3)
    got = kernels.decode_attention(q, cache, Rows.decoding(table, lengths), AttentionOptions(1.0))
    wanted = reference.decode_attention(q.double(), double(cache), Rows.decoding(table, lengths), AttentionOptions(1.0))
    assert_close(
        "decode_attention, large scores", got, wanted, torch.float32, times=100
    )  # the scores are in the thousands, so their rounding error is larger


def test_a_row_of_length_0_gets_zeros_and_affects_no_other_row(device):
    cache, table, lengths = paged_cache([0, 9], 1, 64, 16, torch.float32, device)
    q = random_tensor(2, 1, 2, 64, dtype=torch.float32, device=device)
    got = kernels.decode_attention(q, cache, Rows.decoding(table, lengths), AttentionOptions(0.1))
    assert (got[0] == 0).all() and not got.isnan().any()


@pytest.mark.key
@layouts
def test_prefill_attention(heads, kv_heads, dim, block_size, dtype, window, soft_cap, device):
    queries, before = (
        [block_size + 1, 1, 5],
        [0, block_size, block_size - 2],
    )  # earlier tokens of each row are already cached
    lengths = [a + b for a, b in zip(queries, before, strict=True)]
    cache, table, lengths = paged_cache(lengths, kv_heads, dim, block_size, dtype, device)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    q = random_tensor(sum(queries), heads, dim, dtype=dtype, device=device)
    options = AttentionOptions(dim**-0.5, window, soft_cap)
    got = kernels.prefill_attention(q, cache, Rows(table, lengths, starts, max(queries)), options)
    wanted = reference.prefill_attention(q.double(), double(cache), Rows(table, lengths, starts, max(queries)), options)
    assert_close("prefill_attention", got, wanted, dtype)


# Windows that begin in the first tile or after it; another dtype changes the rounding only.
TILES = [(None, torch.bfloat16), (40, torch.float32), (100, torch.float32)]
MORE_TILES = [(None, torch.float32), (40, torch.bfloat16), (100, torch.bfloat16)]


@pytest.mark.parametrize("window, dtype", [*TILES, *only_in_proofs(*MORE_TILES)], ids=str)
def test_tiles_of_keys_that_all_queries_see_and_others(window, dtype, device):
    """In prompts and a later chunk."""
    queries, before = [150, 1, 70], [0, 64, 126]
    lengths = [a + b for a, b in zip(queries, before, strict=True)]
    cache, table, lengths = paged_cache(lengths, 2, 32, 16, dtype, device)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    q = random_tensor(sum(queries), 4, 32, dtype=dtype, device=device)
    rows, options = Rows(table, lengths, starts, max(queries)), AttentionOptions(0.2, window)
    got = kernels.prefill_attention(q, cache, rows, options)
    assert_close("prefill_attention", got, reference.prefill_attention(q.double(), double(cache), rows, options), dtype)


@pytest.mark.parametrize(
    "whole, window, dtype",
    [
        *((whole, *case) for whole, case in zip((3, 2, 3), TILES, strict=True)),
        *only_in_proofs(*((whole, *case) for whole, case in zip((2, 3, 2), MORE_TILES, strict=True))),
    ],
    ids=str,
)
def test_rows_without_earlier_keys_read_the_new_ones(window, dtype, whole, device):
    """Their blocks hold NaN. Another row's keys follow theirs in the last tile, of which one value is NaN."""
    queries, before = [1, 150, 1, 70], [130, 0 if whole == 3 else 7, 0, 0]
    lengths = [a + b for a, b in zip(queries, before, strict=True)]
    cache, table, lengths = paged_cache(lengths, 2, 32, 16, dtype, device)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    q = random_tensor(sum(queries), 4, 32, dtype=dtype, device=device)
    k, v = torch.zeros(sum(queries), 8, 32, dtype=dtype, device=device).split((4, 2, 2), 1)[1:]  # as of a product
    for row, (count, length) in enumerate(zip(queries, lengths.tolist(), strict=True)):
        at = torch.arange(length - count, length, device=device)
        blocks, new = (table[row, at // 16].long(), at % 16), slice(int(starts[row]), int(starts[row + 1]))
        k[new], v[new] = cache.k[blocks], cache.v[blocks]
    rows, options = Rows(table, lengths, starts, max(queries), whole), AttentionOptions(0.2, window)
    wanted = reference.prefill_attention(q.double(), double(cache), rows, options)
    for row in range(4 - whole, 4):
        for part in (cache.k, cache.v):
            part[table[row, : -(-int(lengths[row]) // 16)].long()] = torch.nan
    got = paged_attention.prefill_attention(q, cache, rows, options, (k.contiguous(), v))
    assert_close("prefill_attention, new keys", got, wanted, dtype)
    v[-70] = torch.nan
    again = paged_attention.prefill_attention(q, cache, rows, options, (k.contiguous(), v))
    assert again[:-70].equal(got[:-70]) and again[-70].isnan().all()


@pytest.mark.parametrize(
    "large, rows_last", [(True, True), *only_in_proofs((True, False), (False, True), (False, False))]
)
def test_neither_the_order_of_programs_nor_the_width_of_offsets_changes_a_result(large, rows_last, device, monkeypatch):
    queries = [40, 3, 75]
    cache, table, lengths = paged_cache(queries, 2, 32, 16, torch.float32, device)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    q = random_tensor(sum(queries), 4, 32, dtype=torch.float32, device=device)
    given = q, cache, Rows(table, lengths, starts, max(queries)), AttentionOptions(0.2)
    wanted = kernels.prefill_attention(*given)
    there = paged_attention._device(q.device)
    monkeypatch.setattr(paged_attention, "_device", lambda _: there._replace(l2=0 if rows_last else 1 << 30))
    monkeypatch.setattr(paged_attention, "_is_large", lambda _: large)
    assert kernels.prefill_attention(*given).equal(wanted)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_padding_of_a_captured_step_gets_zeros_and_changes_nothing(dtype, window, device):
    """Rows without queries, a last row without keys that owns the padding, and unused capacity."""
    queries, padding = [5, 1], 11
    cache, table, lengths = paged_cache([9, 4, 0, 0, 0], 1, 64, 4, dtype, device)
    starts = torch.tensor([0, 5, 6, 6, 6, 6 + padding], dtype=torch.int32, device=device)
    q = random_tensor(6 + padding, 4, 64, dtype=dtype, device=device)
    options = AttentionOptions(0.125, window)
    got = kernels.prefill_attention(q, cache, Rows(table, lengths, starts, 40), options)
    alone = kernels.prefill_attention(
        q[:6].contiguous(), cache, Rows(table[:2], lengths[:2], starts[:3], max(queries)), options
    )
    assert got[:6].equal(alone) and not got[6:].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype", "window"),
    [
        *((*layout[:5], window) for layout, window in zip(STREAMS, (None, 100, None), strict=True)),
        *only_in_proofs(*((*layout[:5], window) for layout, window in zip(STREAMS, (100, None, 100), strict=True))),
    ],
)
def test_keys_stored_unrotated_are_rotated_when_read(heads, kv_heads, dim, block_size, dtype, window, device):
    """Compared with keys rotated beforehand, in decode (some rows split) and in prefill."""
    queries = [block_size + 1, 1, 5]
    cache, table, lengths = paged_cache([block_size + 2, 1, 400], kv_heads, dim, block_size, dtype, device)
    rotary = rotations(table.shape[1] * block_size, dim, device)
    rotated_cache = double(cache)
    for row, length in enumerate(lengths.tolist()):
        for at in range(length):
            slot = table[row, at // block_size], at % block_size
            rotated_cache.k[slot] = reference.rotary_embedding(
                rotated_cache.k[slot][None], rotated_cache.k[:0], rotary[at : at + 1]
            )[0][0]
    q = random_tensor(sum(queries), heads, dim, dtype=dtype, device=device)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    plain = AttentionOptions(dim**-0.5, window)
    rotating = replace(plain, rotary=rotary)
    got = kernels.decode_attention(q[:3, None], cache, Rows.decoding(table, lengths), rotating)
    wanted = reference.decode_attention(q[:3, None].double(), rotated_cache, Rows.decoding(table, lengths), plain)
    assert_close("decode_attention, keys rotated on read", got, wanted, dtype)
    got = kernels.prefill_attention(q, cache, Rows(table, lengths, starts, max(queries)), rotating)
    wanted = reference.prefill_attention(q.double(), rotated_cache, Rows(table, lengths, starts, max(queries)), plain)
    assert_close("prefill_attention, keys rotated on read", got, wanted, dtype)


def test_decode_of_several_layer_groups_reads_its_own_table(device):
    cache, table, lengths = paged_cache([20, 5], 1, 64, 16, torch.float32, device)
    wide = torch.zeros(2, 2, table.shape[1] + 3, dtype=torch.int32, device=device)
    wide[1, :, : table.shape[1]] = table
    q = random_tensor(2, 1, 2, 64, dtype=torch.float32, device=device)
    got = kernels.decode_attention(
        q, cache, Rows.decoding(wide[1][:, : table.shape[1]], lengths), AttentionOptions(0.1)
    )
    wanted = reference.decode_attention(q.double(), double(cache), Rows.decoding(table, lengths), AttentionOptions(0.1))
    assert_close("decode_attention", got, wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_soft_capped_in_place(dtype, device):
    logits = random_tensor(3, 5001, dtype=dtype, device=device, scale=40)
    logits[0, 0], logits[2, 5000] = 1e4, -1e4
    wanted = 30 * torch.tanh(logits.double() / 30)
    got = sampling.soft_cap(logits, 30.0)
    assert got is logits and logits.abs().max() == 30
    assert_close("soft_cap", got, wanted, dtype)
    with pytest.raises(ValueError, match="contiguous"):
        sampling.soft_cap(logits[:, 1:], 30.0)


def test_half_precision_logits_keep_their_dtype_with_and_without_a_cap(device):
    hidden = random_tensor(3, 64, dtype=torch.bfloat16, device=device, scale=9)
    weight = DenseWeight(random_tensor(500, 64, dtype=torch.bfloat16, device=device))
    for cap in (None, 20.0):
        wanted = reference.lm_head(hidden.double(), DenseWeight(weight.weight.double()), cap)
        assert_close("lm_head", kernels.lm_head(hidden, weight, cap), wanted, torch.bfloat16)


def test_temperature_0_takes_the_first_largest_logit(device):
    logits = torch.randn(3, 5000, device=device)
    logits[0, [17, 4500]] = 9.0
    logits[1, 4999] = 9.0
    zeros = torch.zeros(3, device=device)
    assert torch.equal(kernels.sample(logits, zeros, zeros + 0.7), logits.argmax(-1))


@pytest.mark.parametrize("vocab", [100, 5000])
def test_a_sample_is_where_the_cumulative_distribution_exceeds_the_random_number(vocab, device):
    rows = 8
    logits = torch.randn(rows, vocab, device=device) * 3
    temperature = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.0, 1e-3, 1.0, 0.7], device=device)
    uniform = torch.rand(rows, device=device)
    uniform[0], uniform[1] = 0.0, 1.0 - 2**-24
    ids = kernels.sample(logits, temperature, uniform).cpu()
    divisor = torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    chances = (logits.double() / divisor).softmax(-1).cpu()
    for row, token in enumerate(ids.tolist()):
        if temperature[row] == 0:
            assert token == logits[row].argmax()
            continue
        upper = chances[row, : token + 1].sum()
        u = uniform[row].item()
        assert upper - chances[row, token] - 1e-5 <= u <= upper + 1e-5 and chances[row, token] > 0


@pairwise({
    "vocab": (1, 700, 20_000),  # in the last, not every search fits in registers
    "scale": {"flat": 0.01, "steep": 4.0},
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
})  # fmt: skip
def test_a_sample_is_from_what_truncation_keeps(vocab, scale, dtype, device):
    """Every option alone and with others, at, below and above the size of a vocabulary."""
    min_p = torch.tensor([0, 0, 0, 0, 0, 0, 0.05, 0.5, 1, 0.01], device=device)
    top_k = torch.tensor([0, -1, 1, 50, 0, 3000, 0, vocab - 1, 5, vocab], device=device)  # 0 and -1: all
    top_p = torch.tensor([0.9, 1, 1, 0.5, 0.01, 1, 1, 0.7, 1, 0.95], device=device)
    truncation = Truncation(min_p, top_k.int(), top_p)
    logits = (torch.randn(10, vocab, device=device) * scale).to(dtype)
    if dtype == torch.float32:
        logits[5:] = (logits[5:] * 2 / scale).round() * scale / 2  # many are equal
    temperature, uniform = (
        torch.tensor([1.0, 0.7, 1.5, 1.0, 0.9], device=device).repeat(2),
        torch.rand(10, device=device),
    )
    temperature[6], uniform[0], uniform[1], uniform[9] = 0.0, 0.0, 1.0 - 2**-24, 1.0 - 2**-24
    for module in (kernels, *([reference] if vocab < 1000 else [])):
        ids = module.sample(logits, temperature, uniform, truncation)
        assert_sampled(ids, logits, temperature, uniform, truncation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *only_in_proofs(torch.float32)], ids=str)
def test_the_limit_of_a_large_vocabulary_is_first_looked_for_in_a_sample(dtype, device):
    """And is found where the sample is unlike the rest: here the likely tokens are in other chunks than those."""
    logits = (torch.randn(3, 70_000, device=device)).to(dtype)
    logits[1, :3000] += 9
    logits[2, 12_000:13_000] -= 60
    ones, uniform = torch.ones(3, device=device), torch.rand(3, device=device)
    truncation = Truncation(ones * 0, (ones * 0).int(), ones * 0.9)
    assert_sampled(kernels.sample(logits, ones, uniform, truncation), logits, ones, uniform, truncation)


def test_truncation_handles_forbidden_tokens_and_both_zeros(device):
    """Which tokens occur, with random numbers that fall on each that is kept."""
    logits = torch.full((5, 2000), -torch.inf, device=device)
    logits[:, [5, 1500, 1999]] = torch.tensor([0.0, -0.0, 1.0], device=device)
    logits[4] = -torch.inf
    top_k = torch.tensor([2, 1500, 0, 0, 3], dtype=torch.int32, device=device)
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.9, 0.5], device=device)
    found = [
        kernels.sample(logits, top_p * 0 + 1, top_p * 0 + uniform, Truncation(top_p * 0, top_k, top_p)).tolist()
        for uniform in (0.1, 0.3, 0.9)
    ]
    assert [set(each) for each in zip(*found, strict=True)] == [
        {5, 1999}, {5, 1500, 1999}, {1999}, {5, 1500, 1999}, {-1},
    ]  # fmt: skip


def test_strided_rows_of_a_wider_array_are_supported(device):
    wide = torch.randn(3, 500, device=device)
    ones, uniform = torch.ones(3, device=device), torch.rand(3, device=device)
    truncation = Truncation(ones * 0, torch.tensor([3, 3, 0], dtype=torch.int32, device=device), ones)
    before = wide.clone()
    ids = kernels.sample(wide[:, :400], ones, uniform, truncation)
    assert_sampled(ids, wide[:, :400], ones, uniform, truncation)
    assert torch.equal(wide, before)


def test_a_forbidden_token_is_never_sampled(device):
    logits = torch.full((4, 5000), -torch.inf, device=device)
    logits[:, 4700] = 0.0
    logits[:, 4800] = -3.0
    uniform = torch.tensor([0.0, 0.3, 0.999, 1.0 - 2**-24], device=device)
    ids = kernels.sample(logits, torch.ones(4, device=device), uniform)
    assert ids.tolist() == [4700, 4700, 4800, 4800]


@pytest.mark.parametrize("forbidden", [-torch.inf, -1e3], ids=["a mask", "no weight"])
def test_truncation_that_keeps_more_than_is_possible_draws_only_what_is(forbidden, device):
    """Sums are rounded, so the largest random number may be beyond the sum of all weights."""
    logits = torch.full((6, 3000), forbidden, device=device)
    logits[:, :40] = torch.randn(6, 40, device=device)
    uniform, ones = torch.full((6,), 1.0 - 2**-24, device=device), torch.ones(6, device=device)
    truncation = Truncation(ones * 0, (ones * 1000).int(), ones)
    assert kernels.sample(logits, ones, uniform, truncation).max() < 40


@pytest.mark.parametrize("vocab", [100, *only_in_proofs(20_000)])
def test_of_equal_logits_as_many_are_kept_as_asked(vocab, device):
    """In several groups of chunks, too. Both zeros are equal, in rows of one of them and of both."""
    kept = vocab // 4
    uniform = torch.tensor([0.1234, 0.8, 1.0 - 2**-24], device=device)
    logits, ones = torch.zeros(3, vocab, device=device), torch.ones(3, device=device)
    logits[1], logits[2, ::3] = -0.0, -0.0
    wanted = (uniform * kept).long()
    for top_k, top_p in ((kept, 1.0), (0, 0.25), (2 * kept, 0.5)):
        truncation = Truncation(ones * 0, (ones * top_k).int(), ones * top_p)
        assert kernels.sample(logits, ones, uniform, truncation).equal(wanted), (top_k, top_p)


@pytest.mark.parametrize(("kept", "likely"), [(20_000, 69_999), (2_000, 16_383)])
def test_equal_logits_beyond_those_kept_are_not_counted_in_any_chunk(kept, likely, device):
    logits, ones = torch.zeros(2, 70_000, device=device), torch.ones(2, device=device)
    logits[:, likely] = math.log(kept)  # as likely as all others that are kept
    uniform, truncation = torch.tensor([0.45, 0.55], device=device), Truncation(ones * 0, (ones * kept).int() + 1, ones)
    below, beyond = kernels.sample(logits, ones, uniform, truncation).tolist()
    assert abs(below - 0.9 * kept) < 10 and beyond == likely


def test_a_limit_between_equal_logits_and_one_that_keeps_all(device):
    """Few likely tokens among many equal ones, in more spans than are held in registers."""
    vocab, kept = 20_000, 3
    logits = torch.zeros(4, vocab, device=device)
    logits[:, [100, 19_000]] = 1.0
    ones, top_k = (
        torch.ones(4, device=device),
        torch.tensor([kept, kept, 0, vocab + 5], dtype=torch.int32, device=device),
    )
    uniform = torch.tensor([0.0, 0.999, 0.6, 0.6], device=device)
    all_but_nothing = torch.tensor([1.0, 1.0, 1.0 - 2**-24, 1.0 - 2**-24], device=device)
    ids = kernels.sample(logits, ones, uniform, Truncation(ones * 0, top_k, all_but_nothing))
    assert ids[:2].tolist() == [0, 19_000], "the first of those that are equal, and a likely one"
    assert_sampled(ids, logits, ones, uniform, Truncation(ones * 0, top_k, all_but_nothing))


@pytest.mark.parametrize(
    "vocab, dtype",
    [
        (1, torch.float32), (96, torch.float32), (9000, torch.bfloat16),
        *only_in_proofs((1, torch.bfloat16), (96, torch.bfloat16), (9000, torch.float32)),
    ],
    ids=str,
)  # fmt: skip
def test_log_probabilities_are_of_the_token_and_of_the_likeliest(vocab, dtype, device):
    """Equal ones by their ids, forbidden ones last, and nothing for a row without a token."""
    logits = (torch.randn(5, vocab, device=device) * 2).to(dtype)
    logits[0] = 0.5
    if vocab > 1:
        logits[1] = -torch.inf
        logits[1, [2, 3, vocab - 1]] = torch.tensor([0.0, 1.0, -0.0], dtype=dtype, device=device)
    logits[2, vocab // 2] = torch.nan
    count = torch.tensor([21, 21, 6, 0, 6], dtype=torch.int32, device=device)
    temperature, ones = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.0], device=device), torch.ones(5, device=device)
    truncation = Truncation(ones * 0, torch.tensor([0, 0, 0, 0, 3], device=device).int(), ones * 0.9)
    tokens, ids, scores = kernels.scored_sample(logits, temperature, ones * 0.7, truncation, count)
    assert tokens.equal(kernels.sample(logits, temperature, ones * 0.7, truncation)) and tokens[2] == -1
    assert (ids[2:4] < 0).all() and scores[2:4].isnan().all(), "nothing is written"
    for row in (0, 1, 4):
        some = min(int(count[row]), vocab + 1)
        ranked = logits[row].double().sort(descending=True, stable=True).indices[: some - 1]
        wanted = logits[row].double().log_softmax(-1)
        assert ids[row, :some].tolist() == [tokens[row].item(), *ranked.tolist()]
        assert torch.allclose(scores[row, :some].double(), wanted[ids[row, :some].long()], atol=1e-5)
        assert (ids[row, some:] < 0).all() and scores[row, some:].isnan().all()


def test_parameters_may_be_columns_of_one_array(device):
    parameters = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.1]], device=device)
    temperature, min_p, top_p = parameters.unbind(1)
    logits, uniform = torch.zeros(3, 100, device=device), torch.full((1,), 0.995, device=device).expand(3)
    logits[:, 7] = 1e-3
    ids = kernels.sample(logits, temperature, uniform, Truncation(min_p, torch.zeros_like(min_p).int(), top_p))
    assert ids.tolist() == [99, 7, 9]


SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
FAMILIES = {
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": {"sliding_window": 4, "sliding_window_pattern": 2},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 4},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3ForCausalLM": {},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_small_model_gives_the_same_logits_on_kernels(architecture, tmp_path, device, monkeypatch):
    config = {"architectures": [architecture], **SMALL, **FAMILIES[architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, load_format="dummy", dtype="float32", device=device)
    for norm in model.norms():
        norm.normal_(1.0, 0.3)
    on_kernels = copy.copy(model.ops)
    for name in ops.names():
        monkeypatch.setattr(model.ops, name, getattr(reference, name))
        setattr(on_kernels, name, getattr(kernels, name, getattr(reference, name)))
    wanted = logits_of(model, device)
    model.ops = on_kernels
    assert_close("small model", logits_of(model, device), wanted, torch.float32, times=3)


def test_every_family_is_tested_on_kernels():
    assert list(FAMILIES) == list(ARCHITECTURES)


def logits_of(model, device):
    """Two decode rows (after 5 and 9 tokens) together with a chunk of 6 tokens that follows 3."""
    torch.manual_seed(0)
    ints = {"dtype": torch.int32, "device": device}
    groups = len(model.groups.windows)  # each layer has its own cache, so all can share one block table
    table = torch.tensor([[[3, 0, 0], [1, 5, 0], [2, 4, 6]]], **ints).expand(groups, -1, -1)
    caches = [LayerCache(*(torch.randn(8, 8, 1, 64, device=device) for _ in "kv")) for _ in model.layers]
    positions = torch.tensor([5, 9, *range(3, 9)], device=device)
    rows = torch.tensor([0, 1, *[2] * 6], device=device)
    slots = table[0][rows, positions // 8].long() * 8 + positions % 8
    batch = Batch(
        torch.randint(96, (8,)).to(device),
        positions,
        slots.expand(groups, -1),
        Rows.of_groups(table[:, :2], torch.tensor([6, 10], **ints), torch.tensor([0, 1, 2], **ints), 1),
        Rows.of_groups(table[:, 2:], torch.tensor([9], **ints), torch.tensor([0, 6], **ints), 6),
        None,
    )
    with torch.inference_mode():
        return model.logits(model.forward(batch, caches))
