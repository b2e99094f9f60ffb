"""The operations that run as Triton kernels on a GPU; the others run in torch.  Lessons 03 and 04.

Kernels compute in float32: for float64 the reference runs. The last functions are compositions (see
`compositions.py`): their kernels quantize what a product reads, write what they have rotated to the cache, or share
what depends on a step's tokens alone.
Importing this module fails if triton is not installed; the table then keeps the references.
"""

import triton  # noqa: F401  so that an ImportError names triton, which the kernels need
from torch import Tensor, bfloat16, dtype, float16, float64

from minillm.kernels import activation as gated
from minillm.kernels import normalization, paged_attention, rope_cache, sampling
from minillm.kernels import partial_attention as over_parts
from minillm.kv_cache.layer_cache import LayerCache, indexable, quantize
from minillm.kv_cache.split_pages import SplitCache
from minillm.quantization import QuantizedActivations, Weight
from minillm.quantization.methods.hadamard import transform as hadamard  # noqa: F401  in two small products

from . import reference
from .signatures import AttentionOptions, Rows, Truncation, Unadded
from .triton_adapted import adapted_gate as adapted_gate
from .triton_adapted import add_adapted as add_adapted
from .triton_adapted import add_low_rank as add_low_rank
from .triton_adapted import added as added
from .triton_adapted import fits_a_token as fits_a_token
from .triton_adapted import normed as normed
from .triton_adapted import product_with_inner as product_with_inner
from .triton_adapted import rotary_write as adapted_rotary_write
from .triton_linear import embedding as embedding
from .triton_linear import linear, on_codes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == float64:
        return reference.rms_norm(x, weight, eps)
    return normalization.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype == float64:
        return reference.add_rms_norm(x, residual, weight, eps)
    return normalization.add_rms_norm(x, residual, weight, eps)


def rotary_embedding(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.dtype == float64 or not _power_of_two(q.shape[-1]):
        return reference.rotary_embedding(q, k, cos_sin)
    return rope_cache.rotary_embedding(q, k, cos_sin)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    if gate_up.dtype == float64:
        return reference.gated_activation(gate_up, activation)
    return gated.gated_activation(gate_up, activation)


def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    if cache.k_scale is None or cache.v_scale is None or (k.dtype != float64 and _power_of_two(k.shape[-1])):
        return rope_cache.write_kv(k, v, cache, slots)
    # The kernel copies codes and scales: it skips the padding of captured steps, which the reference would write.
    (k, k_scale), (v, v_scale) = quantize(k, cache.k.dtype), quantize(v, cache.v.dtype)
    codes = LayerCache(indexable(cache.k), indexable(cache.v))
    rope_cache.write_kv(indexable(k), indexable(v), codes, slots)
    scales = LayerCache(cache.k_scale[..., None], cache.v_scale[..., None])
    rope_cache.write_kv(k_scale[..., None], v_scale[..., None], scales, slots)


def decode_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    if not _attention_has_kernel(q, cache):
        return reference.decode_attention(q, cache, rows, options)
    return paged_attention.decode_attention(q, cache, rows, options)


def prefill_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    if not _attention_has_kernel(q, cache):
        return reference.prefill_attention(q, cache, rows, options)
    return paged_attention.prefill_attention(q, cache, rows, options)


def lm_head(hidden: Tensor, weight: Weight, soft_cap: float | None = None) -> Tensor:
    """As the reference, but logits stay in half precision: sampling converts them as it reads.

    For 3,000 rows of Gemma's 256,000 logits, a float32 copy would take 3 GB, written once and read twice.
    """
    if hidden.dtype not in (bfloat16, float16):
        return reference.lm_head(hidden, weight, soft_cap)
    logits = linear(hidden, weight)
    return sampling.soft_cap(logits, soft_cap) if soft_cap else logits


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Truncation | None = None) -> Tensor:
    if logits.dtype == float64:
        return reference.sample(logits, temperature, uniform, truncation)
    return sampling.sample(logits, temperature, uniform, truncation)


scored_sample = sampling.scored_sample  # captured steps, the only ones that call it, are never in float64


def normed_linear(
    x: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Weight
) -> tuple[Tensor, Tensor] | None:
    """As `Compositions.normed_linear`; None unless the product takes codes."""
    if (version := on_codes(residual, weight)) is None:
        return None
    product, rounding = version
    if x is None:
        codes, scales = normalization.rms_norm_codes(residual, norm, eps, *rounding)
        total = residual
    else:
        codes, scales, total = normalization.add_rms_norm_codes(x, residual, norm, eps, *rounding)
    return product(QuantizedActivations(codes, scales)), total


def gated_linear(gate_up: Tensor, activation: str, weight: Weight) -> Tensor | None:
    """As `Compositions.gated_linear`; None unless the product takes codes and its kernel can hold a row."""
    version = on_codes(gate_up, weight)
    if version is None or weight.shape[1] > gated.MOST_COLUMNS:
        return None
    product, rounding = version
    codes, scales = gated.gated_activation_codes(gate_up, activation, *rounding)
    return product(QuantizedActivations(codes, scales))


def rotary_write(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: LayerCache, slots: Tensor, rotate_keys: bool, keep: bool,
    unadded: Unadded | None = None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """As `Compositions.rotary_write`; None for float64 and heads whose size is no power of two."""
    if q.dtype == float64 or not _power_of_two(q.shape[-1]):
        return None
    if unadded is not None:
        return adapted_rotary_write(unadded, q.shape[1], cos_sin, cache, slots, rotate_keys, keep)
    return rope_cache.rotary_write(q, k, v, cos_sin, cache, slots, rotate_keys, keep)


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions
) -> Tensor:
    """As `Compositions.prompt_attention`. A quantized cache is read, so that chunks of any length give the same."""
    if not _attention_has_kernel(q, cache) or cache.k_scale is not None:
        return prefill_attention(q, cache, rows, options)
    return paged_attention.prefill_attention(q, cache, rows, options, (k, v))


def partial_attention(
    q: Tensor, cache: SplitCache, rows: Rows, options: AttentionOptions, decode: bool
) -> tuple[Tensor, Tensor] | None:
    """As `split_keys.partial_attention`; None for float64 and heads that no kernel takes."""
    if not _attention_has_kernel(q, cache):
        return None
    return over_parts.partial_attention(q, cache, rows, options, cache.share, decode)


def merged(outs: Tensor, log_sums: Tensor, dtype: dtype) -> Tensor | None:
    """As `split_keys.merged`; None for float64 and heads that no kernel takes."""
    if outs.dtype == float64 or not _power_of_two(outs.shape[-1]):
        return None
    parts = over_parts.merged(outs.flatten(1, -2), log_sums.flatten(1), dtype)
    return parts.view(outs.shape[1:])


def _attention_has_kernel(q: Tensor, cache: LayerCache) -> bool:
    return q.dtype != float64 and paged_attention.takes(q.shape[-1])


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
