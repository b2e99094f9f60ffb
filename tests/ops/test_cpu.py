"""The CPU's fast functions equal their references, and the references equal their formulas."""

from dataclasses import replace

import pytest
import torch

from minillm import ops
from minillm.kv_cache import LayerCache
from minillm.model.config import PRESETS
from minillm.model.rotary import rotary_table
from minillm.ops import AttentionOptions, Rows, cpu, reference
from minillm.ops.signatures import Truncation
from minillm.quantization import DenseWeight
from tests.chance import SEED
from tests.kernels.compare import released

pytestmark = [pytest.mark.explore, pytest.mark.key]

CONFIG = replace(PRESETS["gemma-2b"], head_dim=16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def assert_close(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[got.dtype])


def paged(lengths, *, kv_heads, head_dim=16, block_size=4, dtype=torch.float64, poison=float("nan"), seed=0):
    """A cache whose rows hold random keys in scattered blocks; everything else is poison."""
    torch.manual_seed(SEED + seed)
    needed = [-(-length // block_size) for length in lengths]
    cache = LayerCache(
        *(torch.full((sum(needed) + 3, block_size, kv_heads, head_dim), poison, dtype=dtype) for _ in "kv")
    )
    free = (torch.randperm(sum(needed)) + 3).tolist()  # unused table entries name block 0, so it stays poison
    table = torch.zeros(len(lengths), max([*needed, 1]), dtype=torch.int32)
    for row, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
        table[row, :blocks] = torch.tensor([free.pop() for _ in range(blocks)], dtype=torch.int32)
        for position in range(length):
            block, offset = table[row, position // block_size], position % block_size
            cache.k[block, offset] = torch.randn(kv_heads, head_dim, dtype=dtype)
            cache.v[block, offset] = torch.randn(kv_heads, head_dim, dtype=dtype)
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def naive_attention(q, k, v, query_at, scale, window, soft_cap):
    """Attention by its definition, one head and one query at a time. q: [queries, heads, d]; k, v: [keys, ...]."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for index, at in enumerate(query_at):
        for head in range(q.shape[1]):
            first = max(0, at + 1 - window) if window else 0
            keys, values = k[first : at + 1, head // group], v[first : at + 1, head // group]
            scores = keys @ q[index, head] * scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            out[index, head] = torch.softmax(scores, 0) @ values
    return out


def row_of(cache, table, row, length):
    k, v = (part[table[row].long()].flatten(0, 1)[:length] for part in (cache.k, cache.v))
    return k, v


SHAPES = [(4, 1), (4, 2), (3, 3)]  # heads, KV heads: multi-query, grouped, multi-head
LENGTHS = [[1], [7, 7, 7], [1, 4, 5, 8, 13, 16, 17], [3, 29], [600, 2, 3, 500, 1, 2, 2, 2, 90, 2, 2, 40]]


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS[:4])
def test_decode_attention_equals_its_definition(lengths, heads, kv_heads, window, soft_cap):
    cache, table, sizes = paged(lengths, kv_heads=kv_heads)
    q = torch.randn(len(lengths), 1, heads, 16, dtype=torch.float64)
    for function in (reference.decode_attention, cpu.decode_attention):
        got = function(q, cache, Rows.decoding(table, sizes), AttentionOptions(0.3, window, soft_cap))
        for row, length in enumerate(lengths):
            k, v = row_of(cache, table, row, length)
            assert_close(got[row], naive_attention(q[row], k, v, [length - 1], 0.3, window, soft_cap))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_fast_decode_attention_equals_the_reference(lengths, heads, kv_heads, window, queries, poison, dtype):
    lengths = [max(length, queries) for length in lengths]
    cache, table, sizes = paged(lengths, kv_heads=kv_heads, dtype=dtype, poison=poison)
    q = torch.randn(len(lengths), queries, heads, 16, dtype=dtype)
    want = reference.decode_attention(q, cache, Rows.decoding(table, sizes, queries), AttentionOptions(0.3, window))
    assert_close(
        cpu.decode_attention(q, cache, Rows.decoding(table, sizes, queries), AttentionOptions(0.3, window)), want
    )


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", [[7, 7, 7], [3, 29]])
def test_fast_decode_attention_caps_scores_by_itself(lengths, window, queries, monkeypatch):
    """What unused slots hold is finite here: at a NaN the reference would run instead."""
    cache, table, sizes = paged(lengths, kv_heads=2, poison=1e30)
    q = torch.randn(len(lengths), queries, 4, 16, dtype=torch.float64)
    want = reference.decode_attention(
        q, cache, Rows.decoding(table, sizes, queries), AttentionOptions(0.3, window, 1.5)
    )
    monkeypatch.setattr(reference, "decode_attention", None)
    assert_close(
        cpu.decode_attention(q, cache, Rows.decoding(table, sizes, queries), AttentionOptions(0.3, window, 1.5)), want
    )


@pytest.mark.parametrize("module", [reference, cpu])
@pytest.mark.parametrize("lengths", LENGTHS[1:])
def test_keys_stored_unrotated_are_rotated_by_their_place_in_the_row(lengths, module):
    cache, table, sizes = paged(lengths, kv_heads=2)
    rotary = rotary_table(CONFIG, table.shape[1] * 4, dtype=torch.float64, device="cpu")
    rotated = LayerCache(cache.k.clone(), cache.v)
    for row, length in enumerate(lengths):
        for at in range(length):
            key = rotated.k[table[row, at // 4], at % 4]
            first, second = key.clone().chunk(2, -1)
            cos, sin = rotary[at, 0, :8], rotary[at, 1, 8:]
            key[:] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    q = torch.randn(len(lengths), 1, 4, 16, dtype=torch.float64)
    plain = AttentionOptions(0.3, 9 if len(lengths) > 4 else None)
    rotating = replace(plain, rotary=rotary)
    want = reference.decode_attention(q, rotated, Rows.decoding(table, sizes), plain)
    assert_close(module.decode_attention(q, cache, Rows.decoding(table, sizes), rotating), want)
    queries = [min(length, 1 + row % 3) for row, length in enumerate(lengths)]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    q = torch.randn(sum(queries), 4, 16, dtype=torch.float64)
    want = reference.prefill_attention(q, rotated, Rows(table, sizes, starts, max(queries)), plain)
    assert_close(module.prefill_attention(q, cache, Rows(table, sizes, starts, max(queries)), rotating), want)


def test_operations_run_outside_an_engine_after_running_inside_one():
    """Buffers kept between calls and created in inference mode must be writable outside it."""
    cache, table, sizes = paged([700], kv_heads=2)
    q = torch.randn(1, 1, 4, 16, dtype=torch.float64)
    cpu._scratch.kept = None
    with torch.inference_mode():
        inside = cpu.decode_attention(q, cache, Rows.decoding(table, sizes), AttentionOptions(0.3))
    assert cpu._scratch.kept is not None, "the input is too small for a buffer to be kept"
    assert cpu.decode_attention(q, cache, Rows.decoding(table, sizes), AttentionOptions(0.3)).equal(inside)


def test_rows_of_very_different_length_are_split_to_limit_padding():
    lengths = (2000, *[20] * 63)
    buckets = cpu._buckets(lengths, 1, 1, 16, None)
    assert [len(bucket.hidden) for bucket in buckets] == [1, 63]
    assert sum(bucket.hidden.numel() for bucket in buckets) < 2 * sum(lengths)
    assert len(cpu._buckets((200, 150, 100), 1, 1, 16, None)) == 1


@pytest.mark.parametrize("function", [reference.decode_attention, cpu.decode_attention])
@pytest.mark.parametrize("lengths", [[0, 5], [0, 0]])
def test_a_row_without_keys_gives_zeros(function, lengths):
    cache, table, sizes = paged(lengths, kv_heads=1)
    q = torch.randn(2, 1, 4, 16, dtype=torch.float64)
    got = function(q, cache, Rows.decoding(table, sizes), AttentionOptions(1.0))
    assert not got[0].any() and got.isfinite().all()


CHUNKS = [  # (keys of a row, queries at its end)
    [(5, 5)],
    [(1, 1), (4, 4), (16, 16), (17, 17)],
    [(9, 1), (30, 7), (8, 4), (8, 8)],
]


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_prefill_attention_equals_its_definition(chunks, heads, kv_heads, window, soft_cap):
    lengths, queries = [keys for keys, _ in chunks], [count for _, count in chunks]
    cache, table, sizes = paged(lengths, kv_heads=kv_heads)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(queries), heads, 16, dtype=torch.float64)
    options = AttentionOptions(0.3, window, soft_cap)
    for function in (reference.prefill_attention, cpu.prefill_attention):
        got = function(q, cache, Rows(table, sizes, starts, max(queries)), options)
        for row, (length, count) in enumerate(chunks):
            part = slice(starts[row], starts[row + 1])
            k, v = row_of(cache, table, row, length)
            at = range(length - count, length)
            assert_close(got[part], naive_attention(q[part], k, v, at, 0.3, window, soft_cap))


@pytest.mark.parametrize("entries", ["kept", "reused"])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])  # blocks have 4 tokens
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("module", [reference, cpu])
def test_blocks_that_left_a_window_are_never_read(module, heads, kv_heads, window, soft_cap, entries):
    """They hold NaN or belong to another row; in decode of rows of unequal and equal length, and in prefill."""
    options = AttentionOptions(0.3, window, soft_cap)
    for lengths, chunks in ([23, 3, 16], [7, 3, 1]), ([17, 17], [1, 5]):
        cache, table, sizes = paged(lengths, kv_heads=kv_heads)
        for queries in (1, 3):
            q = torch.randn(len(lengths), queries, heads, 16, dtype=torch.float64)
            want = reference.decode_attention(q, cache, Rows.decoding(table, sizes, queries), options)
            left, rest = released(cache, table, sizes, queries, window, entries)
            assert_close(module.decode_attention(q, left, Rows.decoding(rest, sizes, queries), options), want)
        starts = torch.tensor([0, *chunks]).cumsum(0).int()
        q = torch.randn(sum(chunks), heads, 16, dtype=torch.float64)
        want = reference.prefill_attention(q, cache, Rows(table, sizes, starts, max(chunks)), options)
        left, rest = released(cache, table, sizes, torch.tensor(chunks), window, entries)
        assert_close(module.prefill_attention(q, left, Rows(rest, sizes, starts, max(chunks)), options), want)


def test_attention_in_half_precision_sums_in_float32():
    cache, table, sizes = paged([70, 33], kv_heads=1, dtype=torch.float32)
    q = torch.randn(2, 1, 4, 16)
    want = reference.decode_attention(q, cache, Rows.decoding(table, sizes), AttentionOptions(0.3))
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        half = LayerCache(cache.k.to(dtype), cache.v.to(dtype))
        got = cpu.decode_attention(q.to(dtype), half, Rows.decoding(table, sizes), AttentionOptions(0.3))
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("function", [reference.write_kv, cpu.write_kv])
def test_tokens_are_written_to_their_slots_and_nowhere_else(function):
    cache = LayerCache(torch.zeros(4, 4, 2, 3), torch.zeros(4, 4, 2, 3))
    k, v = torch.randn(2, 3, 2, 3).unbind(0)
    function(k, v, cache, torch.tensor([15, 4, 6]))
    for token, (block, offset) in enumerate([(3, 3), (1, 0), (1, 2)]):
        assert cache.k[block, offset].equal(k[token]) and cache.v[block, offset].equal(v[token])
    assert cache.k.any(-1).sum() == cache.v.any(-1).sum() == 3 * 2


def test_rms_norm_equals_its_formula_including_eps():
    for scale in (1.0, 1e-4, 1e4):
        x, weight = torch.randn(5, 48) * scale, torch.rand(48)
        want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        for function in (reference.rms_norm, cpu.rms_norm):
            torch.testing.assert_close(function(x, weight, 1e-6).double(), want, rtol=0, atol=3e-6)
    for module in (reference, cpu):
        normed, total = module.add_rms_norm(x, x + 1, weight, 1e-6)
        assert total.equal(x + (x + 1)) and normed.equal(module.rms_norm(total, weight, 1e-6))
    half = torch.randn(5, 48, dtype=torch.bfloat16)
    assert cpu.rms_norm(half, weight, 1e-6).equal(reference.rms_norm(half, weight, 1e-6))


def test_rotation_preserves_norms_and_scores_depend_only_on_distance():
    from minillm.model.config import PRESETS
    from minillm.model.rotary import rotary_table

    table = rotary_table(PRESETS["gemma-2b"], 64, dtype=torch.float64, device="cpu")
    q, k = torch.randn(2, 1, 1, 256, dtype=torch.float64).expand(2, 50, 1, 256)
    for module in (reference, cpu):
        rotated_q, rotated_k = module.rotary_embedding(q, k, table[:50])
        torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1))
        scores = torch.einsum("qhd,khd->qk", rotated_q, rotated_k)
        torch.testing.assert_close(scores[7, 3], scores[44, 40], rtol=0, atol=1e-4)
        assert abs(scores[7, 3] - scores[44, 39]) > 1e-2
        assert rotated_q[0].equal(q[0])
    for fast, plain in zip(cpu.rotary_embedding(q, k, table[:50]), (rotated_q, rotated_k), strict=True):
        assert_close(fast, plain)


def test_embedding_supports_a_transposed_matrix():
    weight, ids = torch.randn(30, 8), torch.tensor([3, 29, 3])
    for layout in (weight, weight.t().contiguous().t()):
        for module in (reference, cpu):
            got = module.embedding(ids, DenseWeight(layout), 2.5)
            assert got.is_contiguous() or module is reference
            assert got.equal(weight[ids] * 2.5)
    assert weight.equal(layout)


def test_the_gate_is_the_first_half():
    gate, up = torch.randn(2, 6, 10)
    packed = torch.cat((gate, up), -1)
    silu = gate / (1 + torch.exp(-gate)) * up
    gelu = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(reference.gated_activation(packed, "silu"), silu)
    torch.testing.assert_close(reference.gated_activation(packed, "gelu_tanh"), gelu)


def test_linear_and_head_add_the_bias_and_cap_the_logits():
    weight = DenseWeight(torch.randn(7, 5), torch.randn(7))
    x = torch.randn(3, 5)
    torch.testing.assert_close(reference.linear(x, weight), x @ weight.weight.t() + weight.bias)
    capped = reference.lm_head(x * 100, weight, soft_cap=30.0)
    assert capped.abs().max() <= 30 and capped.abs().max() > 29
    half = DenseWeight(weight.weight.bfloat16())
    assert reference.lm_head(x.bfloat16(), half).dtype == torch.float32


@pytest.mark.parametrize("module", [reference, cpu])
def test_one_random_number_per_row_samples_from_the_distribution(module):
    logits = torch.tensor([[0.0, -torch.inf, 2.0, 1.0, -torch.inf]]).repeat(4000, 1)
    uniform = (torch.arange(4000) + 0.5) / 4000
    for temperature in (0.5, 1.0, 3.0):
        ids = module.sample(logits, torch.full((4000,), temperature), uniform)
        want = (logits[0] / temperature).softmax(-1)
        torch.testing.assert_close(ids.bincount(minlength=5) / 4000, want, rtol=0, atol=1e-3)
    for edge in (0.0, 1 - 2**-24):
        drawn = module.sample(logits[:1], torch.ones(1), torch.tensor([edge]))
        assert drawn.item() == (0 if edge == 0.0 else 3)
    many = torch.randn(500, 40).index_fill_(1, torch.tensor([38, 39]), -torch.inf)
    drawn = module.sample(many, torch.ones(500), torch.full((500,), 1 - 2**-53, dtype=torch.float64))
    assert drawn.max() < 38, "the largest number below 1 must not select a token with probability 0"
    greedy = module.sample(logits[:2], torch.zeros(2), torch.tensor([0.1, 0.9]))
    assert greedy.tolist() == [2, 2] and greedy.dtype == torch.int64
    mixed = module.sample(logits[:2], torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
    assert mixed.tolist() == [2, 0]


def test_truncated_rows_sample_as_the_reference_next_to_any_others():
    rows, vocab = 3 * cpu.RANKED_AT_ONCE, 50
    logits = (torch.randn(rows, vocab) * 2).round()
    logits[5], logits[6, 3] = -torch.inf, torch.nan

    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,))]

    truncation = Truncation(column(0, 0, 0.2, 1), column(0, -1, 1, 7, vocab, 99).int(), column(1, 1, 0.9, 0.01))
    temperature, uniform = column(0, 0.5, 1), torch.rand(rows)
    wanted = reference.sample(logits, temperature, uniform, truncation)
    assert cpu.sample(logits, temperature, uniform, truncation).equal(wanted) and wanted[5] == wanted[6] == -1


def test_the_references_sampling_reads_nothing_back_to_the_host():
    """So a captured step may call it: on this device there is nothing to read."""
    logits, ones = torch.empty(2, 9, device="meta"), torch.empty(2, device="meta")
    assert reference.sample(logits, ones, ones, Truncation(ones, ones.int(), ones)).shape == (2,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [6, 48, 80, 256, 1536])  # some matrices are not symmetric; 6: blocks
def test_the_hadamard_product_equals_the_reference(size, dtype):
    x = torch.randn(5, size).to(dtype)
    for inverse in (False, True):
        wanted, found = reference.hadamard(x.double(), inverse), cpu.hadamard(x, inverse)
        assert found.dtype == dtype
        bound = {"atol": 0.05, "rtol": 0} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 0}
        torch.testing.assert_close(found.double(), wanted, **bound)
        assert not torch.allclose(wanted, x.double(), atol=0.1)


def test_the_cpu_runs_the_fast_function_if_there_is_one():
    running = {entry["name"]: entry["runs"] for entry in ops.table("cpu")}
    for name in ops.names():
        assert running[name] == ("cpu" if hasattr(cpu, name) else "reference")
