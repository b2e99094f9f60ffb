"""Operations for CPUs whose result for a token has the same bits whatever else a step computes.  Lesson 13.

A sum of floating-point numbers depends on its order, and libraries choose the order by the shape of the whole batch. So
a token's logits differ a little between a step of one row and one of eight, and where two logits tie within that
difference, so does the greedy token. Here the order depends on the token's position alone, and on nothing else.

What depends on the number of rows was found by comparing bits (torch 2.13 on an AMD EPYC: MKL for float32 and float64,
oneDNN for bfloat16), with 1 to 256 rows, 1 to 32 threads, and every index of the row in the batch:

    products     float32 and float64: 1, 2 and 3 rows are summed in other orders than 4 and more; threads divide the
                 rows, so the last few of 5 or 9 are too. In products of one shape every row is summed alike
    activations  silu, gelu and sigmoid: where a thread's share ends between two vectors, the last numbers are computed
                 one by one, with another formula. exp and tanh are not: they give the same bits anywhere
    no others    sums, norms, softmax and running sums along a row; what IEEE 754 rounds: + - * / and square roots

So a product multiplies TILE rows at a time, the last ones filled up with zeros. Attention multiplies tiles of that many
(query, head) pairs with chunks of KEYS keys that begin at multiples of KEYS. The chunks are added up one after the
other, so those that a query does not see add zeros, which change no bit. The number of threads must not change (see
`Threads`), because some libraries divide a sum among many threads.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache
from minillm.quantization import Weight
from minillm.quantization.methods.hadamard import largest_order
from minillm.quantization.methods.hadamard import matrix as hadamard_matrix

from . import cpu
from .cpu import embedding as embedding
from .cpu import rotary_embedding as rotary_embedding
from .cpu import sample as sample
from .cpu import write_kv as write_kv
from .signatures import AttentionOptions, Rows

TILE = 8  # rows of a product: a request's newest token and seven drafts are one tile
KEYS = 64  # in a chunk


def linear(x: Tensor, weight: Weight) -> Tensor:
    """As the reference, `TILE` rows at a time. A quantized matrix is dequantized first, in every step."""
    if weight.activations is not None:
        x = weight.activations.quantize(x, weight.input_scale).dequantize(x.dtype)
    return in_tiles(x, weight.dequantize(), weight.bias)


def in_tiles(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times matrix [out, in], plus a bias [out]: [..., out], by products of one shape.

    The rows are copied, so that each tile begins where memory is aligned.
    """
    rows = x.reshape(-1, x.shape[-1])
    tiles = x.new_zeros(max(1, -(-len(rows) // TILE)), TILE, x.shape[-1])
    tiles.flatten(0, 1)[: len(rows)] = rows
    parts = [F.linear(tile, matrix, bias) for tile in tiles]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[: len(rows)].view(*x.shape[:-1], len(matrix))


def lm_head(hidden: Tensor, weight: Weight, soft_cap: float | None = None) -> Tensor:
    """As the reference."""
    logits = linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference. Heads that are part of a longer row are copied, so that their numbers are adjacent."""
    return cpu.rms_norm(x.contiguous(), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the reference."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """As the reference, from exp and tanh, which do not depend on where in memory a number is."""
    gate, up = gate_up.chunk(2, -1)
    x = gate.to(_wide(gate.dtype))
    if activation == "silu":
        gated = x / (1 + torch.exp(-x))
    else:
        gated = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * (x * x * x))))
    return gated.to(gate.dtype) * up


def hadamard(x: Tensor, inverse: bool = False) -> Tensor:
    """As the reference."""
    order = largest_order(x.shape[-1])
    matrix = (hadamard_matrix(order) / order**0.5).to(x)
    return in_tiles(x.unflatten(-1, (-1, order)), matrix if inverse else matrix.t()).flatten(-2)


def decode_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """As the reference, by the same sums as `prefill_attention`."""
    return prefill_attention(q.flatten(0, 1), cache, rows, options).view(q.shape)


def prefill_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """As the reference. Rows with equally many queries and chunks of keys are computed together."""
    out = torch.zeros_like(q)
    alike: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    starts = rows.query_start.tolist()
    for row, (length, start, end) in enumerate(zip(rows.lengths.tolist(), starts, starts[1:], strict=False)):
        if length and end > start:
            earliest = max(0, length - (end - start) - options.window + 1) if options.window else 0
            chunks = -(-length // KEYS) - earliest // KEYS
            alike[end - start, chunks].append((row, length, start, earliest))
    for (queries, chunks), members in alike.items():
        which, lengths, begin, since = torch.tensor(members).unbind(1)
        keys = (since // KEYS * KEYS)[:, None] + torch.arange(chunks * KEYS)
        # Outside of what the queries see, the cache may hold anything: read what they do see, which is masked there.
        present = keys.clamp(min=since[:, None], max=lengths[:, None] - 1)
        k, v = _chunks(cache, rows.block_table[which], present)
        at = begin[:, None] + torch.arange(queries)
        query_at = (lengths - queries)[:, None] + torch.arange(queries)
        out[at] = _attend(q[at], query_at, k, v, keys.view(len(members), chunks, KEYS), options)
    return out


def _chunks(cache: LayerCache, table: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at positions `keys` [rows, chunks * KEYS] of rows with these blocks.

    k [chunks, rows, kv_heads, d, KEYS] and v [chunks, rows, kv_heads, KEYS, d], float32 or float64.
    """
    size = cache.k.shape[1]
    slots = table.gather(1, keys // size).long() * size + keys % size
    parts = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    by_slot = LayerCache(*(None if part is None else part.flatten(0, 1)[:, None] for part in parts))  # type: ignore[arg-type]
    k, v = (part.unflatten(1, (-1, KEYS)).to(_wide(part.dtype)) for part in by_slot.read(slots))
    return k.permute(1, 0, 3, 4, 2).contiguous(), v.permute(1, 0, 3, 2, 4).contiguous()


def _attend(q: Tensor, query_at: Tensor, k: Tensor, v: Tensor, key_at: Tensor, options: AttentionOptions) -> Tensor:
    """q [rows, queries, heads, d] at positions query_at [rows, queries]; keys are at key_at [rows, chunks, KEYS].

    A tile of queries leaves out the chunks that none of its queries in any of the rows sees.
    """
    rows, queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    group, window = heads // kv_heads, options.window
    pairs = q.to(k.dtype).unflatten(2, (kv_heads, group)).transpose(1, 2).flatten(2, 3)  # [rows, kv_heads, pairs, d]
    padding = -pairs.shape[2] % TILE
    pairs = F.pad(pairs, (0, 0, 0, padding))
    pair_at = F.pad(query_at.repeat_interleave(group, 1), (0, padding), value=-1)
    chunk_at = key_at[:, :, 0]
    done = []
    for tile, at in zip(pairs.split(TILE, 2), pair_at.split(TILE, 1), strict=True):
        needed = chunk_at <= at.amax(1, keepdim=True)
        if window:
            earliest = torch.where(at < 0, at.amax(1, keepdim=True), at).amin(1, keepdim=True) - window
            needed &= chunk_at + KEYS - 1 > earliest
        which = needed.any(0).nonzero()[:, 0].tolist()
        part = slice(which[0], which[-1] + 1)
        distance = at[None, :, :, None] - key_at.transpose(0, 1)[part, :, None]  # [chunks, rows, TILE, KEYS]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        scores = torch.matmul(tile, k[part]).mul_(options.scale)
        if cap := options.soft_cap:
            scores = torch.tanh(scores.div_(cap)).mul_(cap)
        scores.masked_fill_(hidden[:, :, None], -torch.inf)
        largest = scores.amax((0, -1))  # no sum: it does not depend on the order
        weights = torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest)[..., None])
        total = _in_order(weights.sum(-1))  # 0 for padding alone
        done.append(_in_order(torch.matmul(weights, v[part])) / torch.where(total == 0, 1.0, total)[..., None])
    attended = torch.cat(done, 2)[:, :, : queries * group].unflatten(2, (queries, group))
    return attended.transpose(1, 2).reshape(q.shape).to(q.dtype)


def _in_order(chunks: Tensor) -> Tensor:
    """Return the sum along the first axis, one after the other."""
    return reduce(torch.add, chunks.unbind())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def uneven(matrices: Iterable[Tensor]) -> Tensor | None:
    """Return a matrix whose products with equal rows differ within a tile, on this machine; None: there is none."""
    tried = set()
    for matrix in matrices:
        kind = (matrix.shape, matrix.stride(), matrix.dtype)
        if kind not in tried:
            tried.add(kind)
            row = torch.linspace(-1, 1, matrix.shape[1], dtype=torch.float64).sin().to(matrix.dtype)
            product = F.linear(row.expand(TILE, -1).contiguous(), matrix)
            if not (product == product[0]).all():
                return matrix
    return None
