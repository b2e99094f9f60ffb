"""Attention where the ranks that hold the same KV head divide its blocks between them.

Each rank has some of the keys and some of the query heads, and every head has to see all keys. Keys are many and
queries are few, so the queries travel: a rank gets those of all heads that share the KV head, attends to its own keys
with them, and sends each result, with its log-sum-exp, to the rank that the head belongs to, which merges them. Keys
never travel: all of these ranks compute those of a step, and each stores its own (see `minillm.kv_cache.split_pages`).
"""

from typing import cast

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.kv_cache.layer_cache import LayerCache
from minillm.kv_cache.split_pages import SplitCache
from minillm.ops.compositions import Compositions
from minillm.ops.signatures import AttentionOptions
from minillm.ops.split_keys import merged, partial_attention

from .batch import Batch
from .config import ModelConfig
from .parallel import Parallel


def split_attention(
    parallel: Parallel,
    run: Compositions,
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    group: int,
    options: AttentionOptions,
) -> Tensor:
    """Attention of a step's tokens to keys that several ranks hold: q [tokens, heads, d] -> like q.

    q: of this rank's heads, rotated. group: the layer's, in `batch`. Every rank calls it with its own heads.
    """
    heads, held = q.shape[1], cast(SplitCache, cache)
    q_all = parallel.all_gather_pages(q).movedim(0, 1).flatten(1, 2)  # [tokens, ranks * heads, d]
    parts, decodes = [], 0
    if batch.decode:
        rows = batch.decode[group]
        decodes = rows.lengths.shape[0] * rows.max_queries
        parts.append(partial_attention(run, q_all[:decodes], held, rows, options, decode=True))
    if batch.prefill:
        parts.append(partial_attention(run, q_all[decodes:], held, batch.prefill[group], options, decode=False))
    outs, log_sums = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
    sent = torch.cat([outs, log_sums[..., None]], -1).unflatten(1, (-1, heads)).movedim(1, 0)
    received = parallel.exchange_pages(sent)  # [ranks, tokens, heads, d + 1]
    return merged(run, received[..., :-1], received[..., -1], q.dtype)


def check_split(config: ModelConfig, ranks: int, split: int) -> None:
    """Raise ConfigError unless `split` of the `ranks` that hold a model can divide the blocks of each KV head."""
    if split == 1:
        return
    copies = ranks // config.num_kv_heads
    if copies % split or copies < split:
        ways = [str(size) for size in range(2, copies + 1) if copies % size == 0]
        raise ConfigError(
            f"decode_context_parallel_size={split} needs as many ranks with the same KV head, and "
            f"tensor_parallel_size={ranks} has {max(copies, 1)} for each of this model's {config.num_kv_heads}: "
            + (f"{' or '.join(ways)} would work" if ways else "leave it out")
        )
    odd = sorted({window for window in config.windows if window and window % split})
    if odd:
        raise ConfigError(
            f"decode_context_parallel_size={split} needs sliding windows of a multiple of {split} tokens, and this "
            f"model has {', '.join(map(str, odd))}: leave it out"
        )
