"""Between a lesson's small signatures and the engine's: attention over one request's plain tensors.  Lesson 02.

The engine's attention serves many requests at once out of a paged cache (lesson 09). A learner's serves one request
whose keys and values lie one behind the other. `gathered` puts the second where the first is expected;
`attention` and `cached_attention` are the first under the second's signature, to fall back to.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.kv_cache.storage import LayerCache
from minillm.ops import AttentionOptions, reference


def gathered(attention: Callable[..., Tensor]) -> dict[str, Callable]:
    """Both of the engine's attentions, done by one that knows a single request: `using(**gathered(mine))`.

    attention(q, k, v, length, scale=...) -> [queries, heads, d], called once a request, with
    q: [queries, heads, d], its newest queries; k, v: [capacity, kv_heads, d], its blocks put together, whole
    ones: slots from `length` on hold leftovers. `window` and `soft_cap` are passed on only by models that have
    them. What it raises, `NotSolvedYet` too, goes through.
    """

    def decode_attention(q, cache, block_table, lengths, options):
        out = torch.zeros_like(q)
        for row, length in enumerate(lengths.tolist()):
            if length:
                keys = _contiguous(cache, block_table[row], length)
                out[row] = attention(q[row], *keys, length, **options.given())
        return out

    def prefill_attention(q, cache, block_table, lengths, query_start, max_queries, options):
        out, starts = torch.empty_like(q), query_start.tolist()
        for row, length in enumerate(lengths.tolist()):
            mine = slice(starts[row], starts[row + 1])
            if mine.start < mine.stop:
                keys = _contiguous(cache, block_table[row], length)
                out[mine] = attention(q[mine], *keys, length, **options.given())
        return out

    return {"decode_attention": decode_attention, "prefill_attention": prefill_attention}


def gathered_prompts(attention: Callable[..., Tensor]) -> dict[str, Callable]:
    """The engine's prefill, done by an attention of whole sequences: attention(q, k, v, scale=...).

    It knows no earlier keys: a prompt that begins with cached blocks, or comes in chunks, raises ConfigError.
    """

    def whole(q, k, v, length, **options):
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
    return reference.decode_attention(q[None], one_block, table, lengths, AttentionOptions(scale))[0]


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """The slots of the tokens at positions start to end - 1 of a request whose blocks are `table`.  Lesson 09."""
    return [table[at // block_size] * block_size + at % block_size for at in range(start, end)]


def append(cache, k: Tensor, v: Tensor) -> None:
    """Put k and v [tokens, kv_heads, d] behind the `cache.length` tokens of `cache`; ValueError if they do not fit."""
    end = cache.length + len(k)
    if end > len(cache.k):
        raise ValueError(f"{len(k)} tokens behind {cache.length} do not fit a cache of {len(cache.k)}")
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = end


def _contiguous(cache: LayerCache, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copies of the blocks that `length` tokens fill, one behind the other: two [capacity, kv_heads, d]."""
    used = blocks[: -(-length // cache.k.shape[1])]
    return cache.k[used].flatten(0, 1), cache.v[used].flatten(0, 1)
