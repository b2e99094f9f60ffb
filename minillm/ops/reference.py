"""Every operation in plain torch, short and obvious: faster implementations are tested against it.  Lessons 02 to 08.

These are executable specifications. They run on any device in float64, float32, bfloat16 and float16, with sums in
float32 (in attention, in float64 for float64 inputs). `cpu.py` and `triton.py` have faster functions with the same
names.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache
from minillm.quantization import Weight
from minillm.quantization.methods.hadamard import largest_order
from minillm.quantization.methods.hadamard import matrix as hadamard_matrix

from .signatures import AttentionOptions, LowRank, Rows, Truncation


def embedding(ids: Tensor, weight: Weight, scale: float) -> Tensor:
    """Return rows of `weight` [vocab, hidden] for `ids` [tokens], times `scale`: [tokens, hidden].  Lesson 01."""
    return weight[ids] * scale


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`x` [..., in] times a typed weight [out, in], plus its bias: [..., out].  Lessons 02, 05 and 07.

    If the weight says so, x is quantized first: the product is then that of both dequantized matrices.
    """
    if weight.activations is not None:
        x = weight.activations.quantize(x, weight.input_scale).dequantize(x.dtype)
    return F.linear(x, weight.dequantize(), weight.bias)


def add_low_rank(out: Tensor, x: Tensor, slots: Tensor, factors: LowRank) -> Tensor:
    """Add what adapters change of a product: out[t] + B A x[t], with the factors of token t's slot.  Lesson 15.

    out [tokens, out] is W x, and is written to; x: [tokens, in]; slots: [tokens] int64, 0 for tokens without an
    adapter. Hu et al. 2021, "LoRA", section 4.1. A x is not rounded between the products.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for slot in filter(None, slots.unique().tolist()):
        tokens = (slots == slot).nonzero()[:, 0]
        inner = F.linear(x[tokens].to(wide), factors.down[slot].to(wide)).chunk(len(factors.ends), dim=1)
        ups = factors.up[slot].to(wide).tensor_split(factors.ends[:-1])
        added = torch.cat([F.linear(each, up) for each, up in zip(inner, ups, strict=True)], dim=1)
        out.index_add_(0, tokens, added.to(out.dtype))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, section 4).  Lesson 00.

    x: [..., dim]; weight: [dim]. Computed in float32, as in transformers' Gemma, even for a float64 model.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the residual sum and its norm in one step: (rms_norm(x + residual), x + residual).  Lesson 03."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary_embedding(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate every pair (x[i], x[i + d/2]) by its position's angle (Su et al. 2021; GPT-NeoX's pairs).  Lesson 02.

    q: [tokens, heads, d]; k: [tokens, kv_heads, d]; cos_sin: [tokens, 2, d], the rows of `decoder.rotary_table` at the
    tokens' positions: the cosines, then the sines, negated in the first half. Returns the rotated q and k.
    """
    cos, sin = cos_sin[:, None].unbind(2)
    half = q.shape[-1] // 2
    return q * cos + q.roll(half, -1) * sin, k * cos + k.roll(half, -1) * sin


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, for gate_up [tokens, 2 * I], gate first: [tokens, I] (Shazeer 2020).  Lesson 03.

    activation: "silu" (SwiGLU: Llama) or "gelu_tanh" (GeGLU: Gemma).
    """
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def hadamard(x: Tensor, inverse: bool = False) -> Tensor:
    """x [tokens, dim] times a Hadamard matrix that keeps its length, or the inverse: like x.  Lesson 07.

    Blocks of the largest order that divides dim and has a matrix (see `quantization.methods.hadamard`).
    """
    order = largest_order(x.shape[-1])
    matrix = (hadamard_matrix(order) / order**0.5).to(x)
    blocks = x.unflatten(-1, (-1, order))
    return (blocks @ (matrix.t() if inverse else matrix)).flatten(-2)


def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Store each token's k and v [tokens, kv_heads, d] in its slot: block * block_size + offset.  Lessons 08 and 09."""
    cache.write(k, v, slots)


def decode_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """Return each row's newest queries attend to its cached keys (Kwon et al. 2023, section 4.1).  Lessons 04, 09.

    q: [rows, queries, heads, d]. Query i of n is at position `length - n + i` of its row and sees the keys up to there,
    limited by `options`. A row of length 0 gives zeros; the contents of unused slots never matter. Returns the shape
    of q.
    """
    queries = q.shape[1]
    k, v = cache.read(rows.block_table)  # [rows, keys, kv_heads, d]
    if options.rotary is not None:
        k, _ = rotary_embedding(k, k[:0], options.rotary[: k.shape[1]])
    query_at = (rows.lengths - queries)[:, None] + torch.arange(queries, device=q.device)
    return _attend(q, k, v, visible(query_at, k.shape[1], options.window), options.scale, options.soft_cap)


def prefill_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """Causal attention of packed chunks of prompts over their cached keys.  Lessons 04 and 10.

    q: [tokens, heads, d], of which each row has its part (see `Rows`). Queries see their row's keys as in
    `decode_attention`; the chunk's own keys are already in the cache. Returns the shape of q.
    """
    out = torch.empty_like(q)
    starts = rows.query_start.tolist()
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        one = Rows.decoding(rows.block_table[row, None], rows.lengths[row, None], end - start)
        out[start:end] = decode_attention(q[None, start:end], cache, one, options)[0]
    return out


def visible(query_at: Tensor, keys: int, window: int | None) -> Tensor:
    """Return which of `keys` keys the queries at positions `query_at` [rows, queries] see: [rows, queries, keys]."""
    distance = query_at[..., None] - torch.arange(keys, device=query_at.device)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """q: [rows, queries, heads, d]; k, v: [rows, keys, kv_heads, d]; a group of heads shares a KV head."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.unflatten(2, (k.shape[2], -1)).to(dtype)  # [rows, queries, kv_heads, heads of the group, d]
    scores = torch.einsum("rqhgd,rkhd->rhgqk", grouped, k.to(dtype)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    mask = ~visible[:, None, None]
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1).masked_fill(mask, 0)
    # A value that no query sees may be NaN, and 0 * NaN is NaN: replace it by 0.
    v = v.to(dtype).masked_fill(~visible.any(1)[..., None, None], 0)
    return torch.einsum("rhgqk,rkhd->rqhgd", weights, v).flatten(2, 3).to(q.dtype)


def lm_head(hidden: Tensor, weight: Weight, soft_cap: float | None = None) -> Tensor:
    """Logits of every token: hidden [samples, hidden], weight [vocab, hidden] -> [samples, vocab].  Lesson 02.

    In float32, or float64 for a float64 model. soft_cap: logits become soft_cap * tanh(logits / soft_cap).
    """
    logits = linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def truncate(scores: Tensor, truncation: Truncation) -> Tensor:
    """Shift each row's largest score to 0, write -inf to those that its truncation leaves out, return them.  Lesson 02.

    scores: [rows, vocab], logits divided by the temperature, overwritten. Of equal scores the lower ids come first.
    Nothing is read back to the host, so that captured steps may call it.
    """
    min_p, top_k, top_p = (each[:, None] for each in truncation)
    scores -= scores.amax(-1, keepdim=True)
    scores.masked_fill_(scores < min_p.to(scores.dtype).log(), -torch.inf)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    ranked.masked_fill_((ranks >= top_k) & (top_k > 0), -torch.inf)
    probabilities = ranked.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ranked.masked_fill_((before >= top_p) & (before > 0) & (top_p < 1), -torch.inf)  # the first stays
    return scores.scatter_(1, order, ranked)


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Truncation | None = None) -> Tensor:
    """Sample one token per row with one random number per row: [rows] int64.  Lesson 02.

    logits: [rows, vocab]; temperature, uniform: [rows]. Temperature 0 takes the most likely token; otherwise the first
    token at which the cumulative sum of softmax(logits / temperature) exceeds `uniform`, which is in [0, 1). With
    `truncation`, the sum is over the tokens that it leaves. A row that has no probabilities gets -1: one of its logits
    is NaN or infinity, or all are minus infinity.
    """
    divisor = torch.where(temperature > 0, temperature, 1.0).double()
    scores = logits.double() / divisor[:, None]
    cumulative = (scores if truncation is None else truncate(scores, truncation)).softmax(-1).cumsum(-1)
    # In float64, uniform < 1 keeps the target below the total, so a token of probability 0 is never drawn.
    target = uniform.double() * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    greedy = likeliest(logits)
    return torch.where((temperature > 0) & (greedy >= 0), drawn, greedy)


def likeliest(logits: Tensor) -> Tensor:
    """Return each row's most likely token [rows] int64; -1 as `sample` gives it. logits: [rows, vocab]."""
    largest, token = logits.max(dim=-1)  # NaN if one of them is
    return torch.where(largest.abs() < torch.inf, token, -1)
