"""Kernels on random shapes: a few interpreted, hundreds compiled, up to Gemma 2B's sizes."""

import random
import zlib

import pytest
import torch

from minillm.kv_cache import LayerCache
from minillm.ops import AttentionOptions, Rows, reference
from minillm.ops.signatures import Truncation
from tests.chance import SEED
from tests.kernels.compare import (
    COMPILED,
    TOLERANCE,
    assert_close,
    assert_sampled,
    double,
    note,
    paged_cache,
    random_tensor,
    rotations,
)

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
pytestmark = [
    pytest.mark.explore,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # the interpreter's numpy: 1 / inf is 0
]

DRAWS = 6 if COMPILED else 1
LONGEST, MOST_ROWS = (3000, 40) if COMPILED else (70, 3)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# heads, kv_heads, head_dim, block_size, dtype, window, soft_cap
LAYOUTS = {
    "mqa 256 bf16": (8, 1, 256, 16, BF16, None, None),
    "gqa 256 bf16 window cap": (8, 4, 256, 16, BF16, 300, 50.0),
    "mha 256 f32": (4, 4, 256, 16, F32, None, None),
    "mqa 256 f32": (8, 1, 256, 16, F32, None, None),
    "gqa 128 bf16": (32, 8, 128, 16, BF16, None, None),
    "mha 128 f16 cap": (4, 4, 128, 32, F16, None, 30.0),
    "gqa 128 f32 window": (6, 2, 128, 8, F32, 40, None),
    "mqa 64 f16": (4, 1, 64, 16, F16, None, None),
    "mha 64 bf16 window": (3, 3, 64, 16, BF16, 65, None),
    "gqa 64 f32 window cap": (4, 2, 64, 5, F32, 17, 5.0),
    "mqa 16 f32": (20, 1, 16, 16, F32, None, None),
}
layouts = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype", "window", "soft_cap"), LAYOUTS.values(), ids=LAYOUTS
)
draws = pytest.mark.parametrize("draw", range(DRAWS))


@pytest.fixture
def rng(request) -> random.Random:
    return random.Random(zlib.crc32(f"{SEED} {request.node.name}".encode()))


def ragged(rng: random.Random, count: int, longest: int, block_size: int) -> list[int]:
    """Lengths from 1: half of them anywhere, half within one token of a block or tile boundary."""
    lengths = []
    for _ in range(count):
        length = rng.randint(1, longest)
        if rng.random() < 0.5:
            border = rng.choice([block_size, 32, 64, 128, 512])
            length = round(length / border) * border + rng.choice([-1, 0, 1])
        lengths.append(min(max(length, 1), longest))
    return lengths


@draws
@layouts
def test_decode_attention_of_ragged_rows(heads, kv_heads, dim, block_size, dtype, window, soft_cap, draw, rng, device):
    queries = rng.choice([1, 1, 2, 5])
    rows = 1 if draw == 0 else rng.randint(1, MOST_ROWS)  # a single long row is split the most
    lengths = [max(length, queries) for length in ragged(rng, rows, LONGEST, block_size)]
    cache, table, lengths = paged_cache(lengths, kv_heads, dim, block_size, dtype, device)
    q = random_tensor(len(lengths), queries, heads, dim, dtype=dtype, device=device)
    options = AttentionOptions(dim**-0.5, window, soft_cap)
    wanted = reference.decode_attention(q.double(), double(cache), Rows.decoding(table, lengths, queries), options)
    assert_close(
        "decode_attention",
        kernels.decode_attention(q, cache, Rows.decoding(table, lengths, queries), options),
        wanted,
        dtype,
    )


@draws
@layouts
def test_prefill_attention_of_ragged_chunks(
    heads, kv_heads, dim, block_size, dtype, window, soft_cap, draw, rng, device
):
    queries = ragged(rng, rng.randint(1, 6 if COMPILED else 2), 700 if COMPILED else 40, block_size)
    before = [rng.choice([0, length]) for length in ragged(rng, len(queries), LONGEST // 4, block_size)]
    lengths = [a + b for a, b in zip(queries, before, strict=True)]
    cache, table, lengths = paged_cache(lengths, kv_heads, dim, block_size, dtype, device)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    q = random_tensor(sum(queries), heads, dim, dtype=dtype, device=device)
    options = AttentionOptions(dim**-0.5, window, soft_cap)
    wanted = reference.prefill_attention(q.double(), double(cache), Rows(table, lengths, starts, max(queries)), options)
    got = kernels.prefill_attention(q, cache, Rows(table, lengths, starts, max(queries)), options)
    assert_close("prefill_attention", got, wanted, dtype)


@draws
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norms_and_activations(dtype, draw, rng, device):
    rows, dim = rng.randint(1, 300 if COMPILED else 3), rng.choice([rng.randint(1, 4096), 2048, 256, 1152])
    x, residual = (random_tensor(rows, dim, dtype=dtype, device=device, scale=4) for _ in range(2))
    weight = torch.randn(dim, device=device)
    wanted = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert_close("rms_norm", kernels.rms_norm(x, weight, 1e-6), wanted, dtype)
    wanted = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-6)
    for got, want in zip(kernels.add_rms_norm(x, residual, weight, 1e-6), wanted, strict=True):
        assert_close("add_rms_norm", got, want, dtype)
    gate_up = torch.cat((x, residual), -1)
    for activation in ("gelu_tanh", "silu"):
        wanted = reference.gated_activation(gate_up.double(), activation)
        assert_close("gated_activation", kernels.gated_activation(gate_up, activation), wanted, dtype)


@draws
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotary_embedding_and_cache_writes(dtype, draw, rng, device):
    kv_heads, dim, block_size = rng.choice([1, 2, 5]), rng.choice([64, 128, 256]), rng.choice([5, 16])
    heads, tokens = kv_heads * rng.randint(1, 8), rng.randint(1, 500 if COMPILED else 4)
    qkv = random_tensor(tokens, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    cos_sin = rotations(tokens, dim, device)
    wanted = reference.rotary_embedding(q.double(), k.double(), cos_sin.double())
    for got, want in zip(kernels.rotary_embedding(q, k, cos_sin), wanted, strict=True):
        assert_close("rotary_embedding", got, want, dtype)
    blocks = -(-tokens // block_size) + 2
    cache = LayerCache(
        *(torch.full((blocks, block_size, kv_heads, dim), 7.0, dtype=dtype, device=device) for _ in "kv")
    )
    want = LayerCache(cache.k.clone(), cache.v.clone())
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]
    kernels.write_kv(k, v, cache, slots)
    reference.write_kv(k, v, want, slots)
    assert torch.equal(cache.k, want.k) and torch.equal(cache.v, want.v)
    note("write_kv", dtype, 0.0, 0.0)


@draws
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_samples_match_the_cumulative_distribution(dtype, draw, rng, device):
    """The probability mass before the token is at most the random number; including the token, at least."""
    rows, vocab = rng.randint(1, 40 if COMPILED else 3), rng.choice([256_000 if COMPILED else 9_000, 4096, 5000])
    logits = random_tensor(rows, vocab, dtype=dtype, device=device, scale=rng.choice([0.1, 3.0]))
    temperature = torch.tensor([rng.choice([1.0, 0.7, 1.3, 0.0]) for _ in range(rows)], device=device)
    uniform = torch.rand(rows, device=device)
    ids = kernels.sample(logits, temperature, uniform)
    greedy = temperature == 0
    assert torch.equal(ids[greedy], logits[greedy].argmax(-1))
    divisor = torch.where(greedy, 1.0, temperature).double()[:, None]
    chances = (logits.double() / divisor).softmax(-1)
    upper = chances.cumsum(-1).gather(1, ids[:, None])[:, 0]
    lower = upper - chances.gather(1, ids[:, None])[:, 0]
    outside = torch.maximum(lower - uniform, uniform - upper)[~greedy].clamp(min=0)
    error = outside.max().item() if len(outside) else 0.0
    note("sample, probability mass", dtype, error, 1e-5)
    assert error <= 1e-5


@draws
def test_truncated_samples_match_the_distribution_of_what_is_kept(draw, rng, device):
    rows, vocab = rng.randint(1, 40 if COMPILED else 3), rng.choice([256_000 if COMPILED else 20_000, 4096, 1500])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    logits = random_tensor(rows, vocab, dtype=dtype, device=device, scale=rng.choice([0.01, 1.0, 5.0]))

    def column(choose, dtype=torch.float32) -> torch.Tensor:
        return torch.tensor([choose() for _ in range(rows)], dtype=dtype, device=device)

    truncation = Truncation(
        column(lambda: rng.choice([0.0, 0.0, rng.random()])),
        column(lambda: rng.choice([0, 1, 64, rng.randint(1, vocab)]), torch.int32),
        column(lambda: rng.choice([1.0, 0.95, rng.uniform(0.01, 1)])),
    )
    temperature, uniform = column(lambda: rng.choice([1.0, 0.7, 1.3, 0.0])), torch.rand(rows, device=device)
    ids = kernels.sample(logits, temperature, uniform, truncation)
    assert_sampled(ids, logits, temperature, uniform, truncation)


@pytest.mark.gpu  # two caches of more than 2**31 elements need 9 GB
def test_blocks_beyond_2_gi_elements_are_addressed_correctly(device):
    blocks, block_size, dim = 2**31 // (16 * 256) + 64, 16, 256
    cache = LayerCache(*(torch.zeros(blocks, block_size, 1, dim, dtype=BF16, device=device) for _ in "kv"))
    table = torch.tensor([[blocks - 1, 3, blocks - 40]], dtype=torch.int32, device=device)
    lengths = torch.tensor([45], dtype=torch.int32, device=device)
    k, v = (random_tensor(45, 1, dim, dtype=BF16, device=device) for _ in "kv")
    at = torch.arange(45, device=device)
    kernels.write_kv(k, v, cache, table[0, at // 16].long() * 16 + at % 16)
    small = LayerCache(*(torch.zeros(3, block_size, 1, dim, dtype=BF16, device=device) for _ in "kv"))
    reference.write_kv(k, v, small, at)
    q = random_tensor(45, 8, dim, dtype=BF16, device=device)
    small_table = torch.arange(3, dtype=torch.int32, device=device)[None]
    options = AttentionOptions(0.1)
    wanted = reference.decode_attention(
        q[None, -1:].double(), double(small), Rows.decoding(small_table, lengths), options
    )
    got = kernels.decode_attention(q[None, -1:], cache, Rows.decoding(table, lengths), options)
    assert_close("decode_attention", got, wanted, BF16)
    starts = torch.tensor([0, 45], dtype=torch.int32, device=device)
    wanted = reference.prefill_attention(q.double(), double(small), Rows(small_table, lengths, starts, 45), options)
    got = kernels.prefill_attention(q, cache, Rows(table, lengths, starts, 45), options)
    assert_close("prefill_attention", got, wanted, BF16)
