"""Adapt a lesson's attention, over one request's plain tensors, to the engine's signatures, and vice versa.  Lesson 02.

The engine's attention reads the keys and values of many requests from a paged cache (lesson 09). A learner's attention
takes those of one request, contiguous. `gathered` adapts the learner's to the engine's signatures; `attention` and
`cached_attention` are the engine's with the learner's signatures, for stubs to fall back to.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.kv_cache.layer_cache import LayerCache
from minillm.ops import AttentionOptions, Rows, reference


def gathered(attention: Callable[..., Tensor]) -> dict[str, Callable]:
    """Both attention operations, computed by a function for a single request: `using(**gathered(mine))`.

    attention(q, k, v, length, scale=...) -> [queries, heads, d] is called once for each request. q: its newest queries,
    [queries, heads, d]. k, v: its blocks, concatenated, [capacity, kv_heads, d]; slots from `length` on are stale.
    Models with a `window` or `soft_cap` pass them as keywords. Exceptions, including `NotSolvedYet`, propagate.
    """

    def decode_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
        out = torch.zeros_like(q)
        for row, length in enumerate(rows.lengths.tolist()):
            if length:
                keys = _contiguous(cache, rows.block_table[row], length)
                out[row] = attention(q[row], *keys, length, **options.keywords())
        return out

    def prefill_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
        out, starts = torch.empty_like(q), rows.query_start.tolist()
        for row, length in enumerate(rows.lengths.tolist()):
            mine = slice(starts[row], starts[row + 1])
            if mine.start < mine.stop:
                keys = _contiguous(cache, rows.block_table[row], length)
                out[mine] = attention(q[mine], *keys, length, **options.keywords())
        return out

    return {"decode_attention": decode_attention, "prefill_attention": prefill_attention}


def gathered_prompts(attention: Callable[..., Tensor]) -> dict[str, Callable]:
    """The prefill operation, computed by an attention over whole sequences: attention(q, k, v, scale=...).

    It takes no earlier keys: a prompt with a cached prefix, or in chunks, raises ConfigError.
    """

    def whole(q: Tensor, k: Tensor, v: Tensor, length: int, **options: Any) -> Tensor:
        if len(q) != length:
            raise ConfigError(
                f"{len(q)} queries over {length} keys: this attention takes whole prompts; open the engine with "
                "enable_prefix_caching=False and let a prompt fit max_num_batched_tokens"
            )
        return attention(q, k[:length], v[:length], **options)

    return {"prefill_attention": gathered(whole)["prefill_attention"]}


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The engine's causal attention of a whole sequence. q: [tokens, heads, d]; k, v: [tokens, kv_heads, d]."""
    return cached_attention(q, k, v, len(k), scale=scale)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, length: int, *, scale: float) -> Tensor:
    """The engine's attention of the newest queries [queries, heads, d] to the first `length` slots of k and v."""
    one_block = LayerCache(k[None, :length], v[None, :length])
    table = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
    lengths = torch.tensor([length], dtype=torch.int32, device=q.device)
    rows = Rows.decoding(table, lengths, len(q))
    return reference.decode_attention(q[None], one_block, rows, AttentionOptions(scale))[0]


class GrowingCache(Protocol):
    """The cache of lesson 02: k and v [capacity, kv_heads, d], of which the first `length` tokens are in use."""

    k: Tensor
    v: Tensor
    length: int


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """The slots of the tokens at positions start to end - 1 of a request whose blocks are `table`.  Lesson 09."""
    return [table[at // block_size] * block_size + at % block_size for at in range(start, end)]


def append(cache: GrowingCache, k: Tensor, v: Tensor) -> None:
    """Append k and v [tokens, kv_heads, d] to the `cache.length` tokens of a cache. Raises ValueError if it is full."""
    end = cache.length + len(k)
    if end > len(cache.k):
        raise ValueError(f"{len(k)} tokens after {cache.length} do not fit a cache of {len(cache.k)}")
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = end


def _contiguous(cache: LayerCache, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copies of the blocks that `length` tokens fill, concatenated: k and v, each [capacity, kv_heads, d]."""
    used = blocks[: -(-length // cache.k.shape[1])]
    k, v = cache.read(used[None])
    return k[0], v[0]
