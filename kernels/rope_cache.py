"""Rotary embedding of queries and keys, and writing keys and values to the cache.  Lessons 02 and 09.

Rotary embedding (Su et al. 2021, "RoFormer"), in the half-split convention of GPT-NeoX and Hugging Face: element i
of the first half and element i of the second half form a point in the plane, which is rotated by the angle
position * frequency_i.

    first'  = first * cos - second * sin
    second' = second * cos + first * sin

Tiling: one program per token rotates all its query and key heads, so the token's cosines and sines are read once. The
model's table has them for all of head_dim: the two halves of the cosines are equal and the first half of the sines is
negated, so the kernel reads one half of each.

Writing to the cache is a copy: one program per token copies all KV heads to the token's slot (block * block_size +
offset). It skips negative slots, which stand for the padding of a batch.
"""

import torch
import triton
import triton.language as tl

from .arguments import Cache, check_strides


@triton.jit
def _rotate(x_ptr, out_ptr, cos, sin, HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, HALF: tl.constexpr):
    heads = tl.arange(0, HEADS_TILE)[:, None]
    first = heads * (2 * HALF) + tl.arange(0, HALF)[None, :]
    real = (heads < HEADS) & (first >= 0)
    a = tl.load(x_ptr + first, mask=real, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + first + HALF, mask=real, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + first, (a * cos - b * sin).to(kind), mask=real)
    tl.store(out_ptr + first + HALF, (b * cos + a * sin).to(kind), mask=real)


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


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
    """Store k, v [tokens, kv_heads, d] in slots [tokens] int64 of a layer's cache; -1: skip the token.  Lesson 09.

    Raises ValueError unless K and V have equal strides and a token's heads are adjacent.
    """
    tokens, kv_heads, dim = k.shape
    check_strides(cache)
    if cache.k.stride(2) != dim:
        raise ValueError("a token's heads must be adjacent in the cache")
    k, v = _dense_tokens(k), _dense_tokens(v)
    if tokens:
        size = kv_heads * dim
        write_kv_kernel[(tokens,)](
            k, v, cache.k, cache.v, slots, k.stride(0), v.stride(0), *cache.k.stride()[:2],
            BLOCK_SIZE=cache.k.shape[1], SIZE=size, TILE=triton.next_power_of_2(size),
            num_warps=1 if size <= 512 else 4,
        )  # fmt: skip


def _dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless each token's heads are contiguous; tokens may have any stride, as slices of a QKV product do."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
