"""Lesson 08's caches: a learner's functions in the engine's quantized cache, and coarser roundings to compare.

with using(**small_caches.operations(mine, my_attention)):
    text.predictions(model)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.advice import sizing
from minillm.bench import records
from minillm.calibration.forward import hidden_states
from minillm.kv_cache.layer_cache import LayerCache, indexable
from minillm.model import Model, ModelConfig, load_model
from minillm.ops import AttentionOptions, Rows, reference
from minillm.overrides import using

from ..shared import batching
from ..shared.held_out import HeldOut, Predictions

Quantize = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
SHARED = {
    "tensor": (0, 1, 2),
    "channel": (0,),
    "token and head": (2,),
}  # axes of [tokens, kv_heads, d] that share a scale
BLOCK = 16

# ---- the learner's functions in the engine


def write_by(function: Quantize) -> Callable[..., None]:
    """The engine's `write_kv`, with codes and scales from a function of exercise 1's form."""

    def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        for values, held, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
            if scales is None:
                return reference.write_kv(k, v, cache, slots)
            codes, found = function(values, held.dtype)
            scales.flatten(0, 1)[slots] = found
            indexable(held).flatten(0, 1)[slots] = indexable(codes)
        return None

    return write_kv


def attention_by(function: Callable[..., Tensor]) -> dict[str, Callable]:
    """Both attention operations on a quantized cache, by a function of exercise 2's form, for one KV head at a time.

    The engine's own run on other caches, and in models with windows or soft caps.
    """

    def one_row(q: Tensor, cache: LayerCache, blocks: Tensor, length: int, scale: float) -> Tensor:
        """q [queries, heads, d], the newest of `length` tokens."""
        parts = [_tokens(part, blocks, length) for part in (cache.k, cache.k_scale, cache.v, cache.v_scale)]
        k, k_scale, v, v_scale = parts
        group = q.shape[1] // k.shape[1]
        query_at = torch.arange(length - len(q), length, device=q.device)
        hidden = ~reference.visible(query_at[None], length, None)[0].repeat_interleave(group, 0)
        out = torch.empty_like(q)
        for head in range(k.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            given = k[:, head], k_scale[:, head].to(q.dtype), v[:, head], v_scale[:, head].to(q.dtype)
            found = function(q[:, mine].flatten(0, 1), *given, hidden, scale)
            out[:, mine] = found.view(len(q), group, -1)
        return out

    def prefill_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
        if cache.k_scale is None or options.keywords().keys() != {"scale"}:
            return reference.prefill_attention(q, cache, rows, options)
        out, starts = torch.zeros_like(q), rows.query_start.tolist()
        for row, length in enumerate(rows.lengths.tolist()):
            mine = slice(starts[row], starts[row + 1])
            if length and mine.start < mine.stop:
                out[mine] = one_row(q[mine], cache, rows.block_table[row], length, options.scale)
        return out

    def decode_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
        return prefill_attention(q.flatten(0, 1), cache, rows, options).view(q.shape)

    return {"decode_attention": decode_attention, "prefill_attention": prefill_attention}


def _tokens(held: Tensor | None, blocks: Tensor, length: int) -> Tensor:
    """A request's codes or scales, one after another: [length, kv_heads, ...]."""
    assert held is not None
    return indexable(held)[blocks[: -(-length // held.shape[1])]].view(held.dtype).flatten(0, 1)[:length]


def operations(quantize: Quantize, attend: Callable[..., Tensor]) -> dict[str, Callable]:
    """All that exercises 1 and 2 replace: `using(**operations(...))`."""
    return {"write_kv": write_by(quantize), **attention_by(attend)}


# ---- measurements


def model_with(kv_cache_dtype: str = "auto") -> Model:
    """The embedded model in float32, with a cache of this format."""
    return load_model(dtype="float32", device="cpu", kv_cache_dtype=kv_cache_dtype)


def keys_and_values(model: Model, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return what each layer writes into the cache for rows of token ids: keys and values [tokens, kv_heads, d]."""
    found = []

    def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        found.append((k.clone(), v.clone()))
        reference.write_kv(k, v, cache, slots)

    with using(write_kv=write_kv), torch.inference_mode():
        hidden_states(model, ids)
    return found


def rounded(x: Tensor, bits: int, shared: str) -> Tensor:
    """x [tokens, kv_heads, d] of one request on a symmetric grid; shared: what a scale is for, a key of SHARED."""
    top = 2 ** (bits - 1) - 1
    scales = x.abs().amax(SHARED[shared], keepdim=True) / top
    scales = torch.where(scales > 0, scales, 1.0)
    return (x / scales).round() * scales


def predictions_rounded(text: HeldOut, model: Model, bits: int, keys: str | None, values: str | None) -> Predictions:
    """A model's predictions with rounded keys and values in an unquantized cache; None: not rounded.

    Each row of the text is a request with scales of its own. The scale of a channel, and that of a tensor, are known
    here before the first token is written, as no engine knows them.
    """
    length = text.ids.shape[1]

    def each(x: Tensor, shared: str | None) -> Tensor:
        return x if shared is None else torch.cat([rounded(row, bits, shared) for row in x.split(length)])

    def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        reference.write_kv(each(k, keys), each(v, values), cache, slots)

    with using(write_kv=write_kv):
        return text.predictions(model)


def kv_at_once(kind: str, cache_bytes: int, requests: int = 48, prompt: int = 90, output: int = 6) -> int:
    """The most requests that the engine ran in one step, with `cache_bytes` for its cache. kind: `kv_cache_dtype`.

    The embedded model in bfloat16; each request has `prompt` and `output` tokens.
    """
    model = load_model(dtype="bfloat16", device="cpu", kv_cache_dtype=kind)
    block = BLOCK * len(model.layers) * model.cache_spec.bytes_per_token
    given = {str(number): (prompt, output) for number in range(requests)}
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_dtype": kind,
        "num_blocks": cache_bytes // block,
        "block_size": BLOCK,
    }
    return max(len(step.request) for step in batching.run(given, **options).steps)


def requests_of_weights(config: ModelConfig, tokens: int, kv_cache_dtype: str = "bfloat16") -> float:
    """Return how many requests of so many tokens have a cache as large as the model's weights in bfloat16."""
    return sizing.weight_bytes(config) / sizing.kv_bytes(config, tokens, kv_cache_dtype)


def speeds(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
    """Print tokens per second after / before, for rows of two records with the same workloads."""
    known = {row["workload"]: row for row in before}
    print("requests   tokens of a prompt   of an output   times as fast")
    for row in after:
        count = row["requests"]
        prompt, output = row["input_tokens"] / count, row["output_tokens"] / count
        times = row["output_tokens_per_s"] / known[row["workload"]]["output_tokens_per_s"]
        print(f"{count:8,} {prompt:20,.0f} {output:14,.0f} {times:15.2f}")


def committed() -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Rows of an H200 with FP8 weights, Gemma 2B's shape: with a cache in bfloat16, and with one in FP8."""
    return records.read("h200/gemma-2b-fp8")["results"], records.read("h200/gemma-2b-fp8-cache")["results"]
