"""Rotary embedding of queries and keys, and writing keys and values to the cache.  Lessons 02, 08 and 09.

Rotary embedding (Su et al. 2021, "RoFormer"), in the half-split convention of GPT-NeoX and Hugging Face: element i
of the first half and element i of the second half form a point in the plane, which is rotated by the angle
position * frequency_i.

    first'  = first * cos - second * sin
    second' = second * cos + first * sin

Tiling: one program per token rotates all its query and key heads, so the token's cosines and sines are read once. The
model's table has them for all of head_dim: the two halves of the cosines are equal and the first half of the sines is
negated, so the kernel reads one half of each.

Writing to the cache is a copy: one program per token copies all KV heads to the token's slot (block * block_size +
offset). It skips negative slots, which stand for the padding of a batch. Both in one launch, rotated keys go from
registers to the cache, and a quantized cache takes codes and scales from there: a head's largest value is known as soon
as the head is.
"""

import torch
import triton
import triton.language as tl

from .arguments import CacheArguments, check_strides
from .cache_codes import LARGEST, stored, to_codes
from .quantized_inputs import magnitude


@triton.jit
def _halves(x_ptr, HEADS: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr):
    """(offsets [TILE, HALF] of the first halves, which of them are real, first halves, second halves)."""
    heads = tl.arange(0, TILE)[:, None]
    at = heads * (2 * HALF) + tl.arange(0, HALF)[None, :]
    real = (heads < HEADS) & (at >= 0)
    first = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=real, other=0.0).to(tl.float32)
    return at, real, first, second


@triton.jit
def _rotate(x_ptr, out_ptr, cos, sin, HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, HALF: tl.constexpr):
    at, real, a, b = _halves(x_ptr, HEADS, HEADS_TILE, HALF)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (a * cos - b * sin).to(kind), mask=real)
    tl.store(out_ptr + at + HALF, (b * cos + a * sin).to(kind), mask=real)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_sin_ptr, q_stride, k_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, KV_HEADS_TILE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angles = cos_sin_ptr + token * (4 * HALF) + tl.arange(0, HALF)
    cos = tl.load(angles).to(tl.float32)[None, :]
    sin = tl.load(angles + 3 * HALF).to(tl.float32)[None, :]
    _rotate(q_ptr + token * q_stride, q_out_ptr + token * (2 * HALF * HEADS), cos, sin, HEADS, HEADS_TILE, HALF)
    _rotate(
        k_ptr + token * k_stride, k_out_ptr + token * (2 * HALF * KV_HEADS), cos, sin,
        KV_HEADS, KV_HEADS_TILE, HALF,
    )  # fmt: skip


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_stride, v_stride, block_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    columns = tl.arange(0, TILE)
    wanted = (columns < SIZE) & (slot >= 0)
    to = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + columns
    k = tl.load(k_ptr + token * k_stride + columns, mask=wanted, other=0.0)
    v = tl.load(v_ptr + token * v_stride + columns, mask=wanted, other=0.0)
    tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=wanted)
    tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def write_head(
    first, second, cache_ptr, scale_ptr, at, wanted,
    KV_HEADS: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store both halves of a token's heads in its slot, as codes if there are scales."""
    kind = cache_ptr.dtype.element_ty
    if scale_ptr is not None:
        heads = tl.arange(0, TILE)
        most = tl.maximum(tl.max(magnitude(first), 1), tl.max(magnitude(second), 1))
        scale = tl.div_rn(most, tl.full([TILE], LARGEST, tl.float32))
        first, second = to_codes(first, scale, kind), to_codes(second, scale, kind)
        tl.store(scale_ptr + heads, scale, mask=(heads < KV_HEADS) & (tl.max(wanted.to(tl.int32), 1) > 0))
    tl.store(cache_ptr + at, first.to(kind), mask=wanted)
    tl.store(cache_ptr + at + HALF, second.to(kind), mask=wanted)


@triton.jit
def rotary_write_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, cos_sin_ptr,
    slots_ptr, q_stride, k_stride, v_stride, block_stride, slot_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, KV_HEADS_TILE: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTATE_KEYS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Rotary embedding of q and k, and the cache write, in one launch. Without q: only the write."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at, real, k1, k2 = _halves(k_ptr + token * k_stride, KV_HEADS, KV_HEADS_TILE, HALF)
    _, _, v1, v2 = _halves(v_ptr + token * v_stride, KV_HEADS, KV_HEADS_TILE, HALF)
    if q_ptr is not None:
        angles = cos_sin_ptr + token * (4 * HALF) + tl.arange(0, HALF)
        cos = tl.load(angles).to(tl.float32)[None, :]
        sin = tl.load(angles + 3 * HALF).to(tl.float32)[None, :]
        _rotate(q_ptr + token * q_stride, q_out_ptr + token * (2 * HALF * HEADS), cos, sin, HEADS, HEADS_TILE, HALF)
        if ROTATE_KEYS:
            kind = k_ptr.dtype.element_ty  # rounded like the rotary kernel's output
            k1, k2 = (k1 * cos - k2 * sin).to(kind).to(tl.float32), (k2 * cos + k1 * sin).to(kind).to(tl.float32)
    if k_out_ptr is not None:
        to = k_out_ptr + token * (2 * HALF * KV_HEADS) + at
        tl.store(to, k1.to(k_out_ptr.dtype.element_ty), mask=real)
        tl.store(to + HALF, k2.to(k_out_ptr.dtype.element_ty), mask=real)
    wanted = real & (slot >= 0)
    at += (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    if k_scale_ptr is not None:
        k_scale_ptr += slot * KV_HEADS
        v_scale_ptr += slot * KV_HEADS
    write_head(k1, k2, k_cache_ptr, k_scale_ptr, at, wanted, KV_HEADS, KV_HEADS_TILE, HALF, LARGEST)
    write_head(v1, v2, v_cache_ptr, v_scale_ptr, at, wanted, KV_HEADS, KV_HEADS_TILE, HALF, LARGEST)


def rotary_embedding(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [tokens, heads, d] and k [tokens, kv_heads, d] by their positions' angles -> new q and k.  Lesson 02.

    cos_sin [tokens, 2, d]: each token's cosines and signed sines. d is a power of two.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    q, k = _dense_tokens(q), _dense_tokens(k)
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, kv_heads, dim), dtype=k.dtype, device=k.device)
    if tokens:
        rotary_kernel[(tokens,)](
            q, k, q_out, k_out, cos_sin.contiguous(), q.stride(0), k.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, HEADS_TILE=triton.next_power_of_2(heads),
            KV_HEADS_TILE=triton.next_power_of_2(kv_heads), HALF=dim // 2, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: CacheArguments, slots: torch.Tensor) -> None:
    """Store k, v [tokens, kv_heads, d] in slots [tokens] int64 of a layer's cache; -1: skip the token.  Lessons 08, 09.

    For a quantized cache, d is a power of two. Raises ValueError unless K and V have equal strides and a token's heads
    are adjacent.
    """
    tokens, kv_heads, dim = k.shape
    if cache.k_scale is not None:
        _rotate_and_write(None, k, v, None, cache, slots, False)
        return
    check_slots(cache, dim)
    k, v = _dense_tokens(k), _dense_tokens(v)
    if tokens:
        size = kv_heads * dim
        write_kv_kernel[(tokens,)](
            k, v, cache.k, cache.v, slots, k.stride(0), v.stride(0), *cache.k.stride()[:2],
            BLOCK_SIZE=cache.k.shape[1], SIZE=size, TILE=triton.next_power_of_2(size),
            num_warps=1 if size <= 512 else 4,
        )  # fmt: skip


def rotary_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: CacheArguments,
    slots: torch.Tensor,
    rotate_keys: bool = True,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_embedding` and `write_kv` in one launch; returns the rotated q, and k.  Lessons 08 and 11.

    rotate_keys: whether k is rotated before it is written. keep: whether it is returned as written. d is a power of
    two. Raises ValueError as `write_kv`.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    written = torch.empty(k.shape, dtype=k.dtype, device=k.device) if keep else None
    _rotate_and_write((_dense_tokens(q), out, written), k, v, cos_sin.contiguous(), cache, slots, rotate_keys)
    return out, k if written is None else written


def _rotate_and_write(
    queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor | None,
    cache: CacheArguments,
    slots: torch.Tensor,
    rotate_keys: bool,
) -> None:
    """queries: q, where its rotation is written, and where k is written besides the cache, if it is."""
    tokens, kv_heads, dim = k.shape
    check_slots(cache, dim)
    k, v = _dense_tokens(k), _dense_tokens(v)
    q, out, copy = queries or (None, None, None)
    heads = 1 if q is None else q.shape[1]
    held_k, held_v = stored(cache)
    if tokens:
        rotary_write_kernel[(tokens,)](
            q, k, v, out, copy, held_k, held_v, cache.k_scale, cache.v_scale, cos_sin, slots,
            0 if q is None else q.stride(0), k.stride(0), v.stride(0), *held_k.stride()[:2],
            HEADS=heads, KV_HEADS=kv_heads, HEADS_TILE=triton.next_power_of_2(heads),
            KV_HEADS_TILE=triton.next_power_of_2(kv_heads), HALF=dim // 2, BLOCK_SIZE=cache.k.shape[1],
            ROTATE_KEYS=rotate_keys, LARGEST=LARGEST.get(cache.k.dtype, 1.0), num_warps=4,
        )  # fmt: skip


def check_slots(cache: CacheArguments, dim: int) -> None:
    check_strides(cache)
    if cache.k.stride(2) != dim:
        raise ValueError("a token's heads must be adjacent in the cache")


def _dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless each token's heads are contiguous; tokens may have any stride, as slices of a QKV product do."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
