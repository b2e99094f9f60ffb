"""`rope_cache.rotary_write` of a product to which adapters add.  Lessons 02, 08 and 15.

    q, k, v = the parts of y,   y[t] = x[t] + B[slots[t]] h[t]

h as in `low_rank`, from the same product as x. `low_rank.add_grouped` would read and write x before the rotation reads
it again; here it is one launch. y is rounded to the dtype of x, as with two launches.

Tiling: one program for each query head of a token, and one for each of its KV heads, key and value. So the rows of B
that a token needs are read by many processors at once, and before the product is there.
"""

import torch
import triton
import triton.language as tl

from .arguments import CacheArguments
from .cache_codes import LARGEST, stored
from .low_rank import Term, added_to_token, b_of_slot
from .rope_cache import check_slots, write_head
from .single_row_parts import dependent_launch, wait_for_inputs


@triton.jit
def _b_of_head(up_ptr, stride, slot, head, wanted, RANK: tl.constexpr, RANK_TILE: tl.constexpr, HALF: tl.constexpr):
    """B for the two halves of a head of the product: [1, HALF, RANK_TILE] each."""
    rows = head * (2 * HALF) + tl.arange(0, HALF)[None, :]
    first = b_of_slot(up_ptr, stride, slot, rows, wanted & (rows >= 0), RANK, RANK_TILE)
    return first, b_of_slot(up_ptr, stride, slot, rows + HALF, wanted & (rows >= 0), RANK, RANK_TILE)


@triton.jit
def _adapted_head(
    x_ptr, head, inner_ptr, token_stride, inner_stride, slot, token, part, b1, b2,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The two halves of a head of a token's product, with what its adapter adds: [1, HALF] each, rounded."""
    kind = x_ptr.dtype.element_ty
    at = x_ptr + head * (2 * HALF) + tl.arange(0, HALF)[None, :]
    first, second = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    first += added_to_token(inner_ptr, token_stride, inner_stride, slot, token, part, b1, RANK, RANK_TILE)
    second += added_to_token(inner_ptr, token_stride, inner_stride, slot, token, part, b2, RANK, RANK_TILE)
    return first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)


@triton.jit
def adapted_rotary_write_kernel(
    x_ptr, q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, cos_sin_ptr, cache_slots_ptr,
    x_stride, block_stride, cache_stride, slots_ptr, inner_ptr, token_stride, inner_stride, up_ptr, slot_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROTATE_KEYS: tl.constexpr, LARGEST: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """cache_slots_ptr: the tokens' slots in the cache; slots_ptr: those of their adapters."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)  # of queries, then of keys
    slot, at = tl.load(slots_ptr + token), tl.arange(0, HALF)[None, :]
    of_keys = head >= HEADS
    b1, b2 = _b_of_head(up_ptr, slot_stride, slot, head, True, RANK, RANK_TILE, HALF)
    v_b1, v_b2 = _b_of_head(up_ptr, slot_stride, slot, head + KV_HEADS, of_keys, RANK, RANK_TILE, HALF)
    angles = cos_sin_ptr + token * (4 * HALF) + at
    cos, sin = tl.load(angles).to(tl.float32), tl.load(angles + 3 * HALF).to(tl.float32)
    to = tl.load(cache_slots_ptr + token).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    x_ptr += token * x_stride
    kind = x_ptr.dtype.element_ty
    a, b = _adapted_head(
        x_ptr, head, inner_ptr, token_stride, inner_stride, slot, token, of_keys.to(tl.int32), b1, b2,
        RANK, RANK_TILE, HALF,
    )  # fmt: skip
    first, second = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    if of_keys:
        index = head - HEADS
        if ROTATE_KEYS:
            a, b = first.to(tl.float32), second.to(tl.float32)
        v1, v2 = _adapted_head(
            x_ptr, head + KV_HEADS, inner_ptr, token_stride, inner_stride, slot, token, 2, v_b1, v_b2,
            RANK, RANK_TILE, HALF,
        )  # fmt: skip
        if k_out_ptr is not None:
            out = k_out_ptr + (token * KV_HEADS + index) * (2 * HALF) + at
            tl.store(out, a.to(kind))
            tl.store(out + HALF, b.to(kind))
            out = x_ptr + (head + KV_HEADS) * (2 * HALF) + at
            tl.store(out, v1.to(kind))
            tl.store(out + HALF, v2.to(kind))
        held = (to // BLOCK_SIZE) * block_stride + (to % BLOCK_SIZE) * cache_stride + index * (2 * HALF) + at
        wanted = (at >= 0) & (to >= 0)
        if k_scale_ptr is not None:
            k_scale_ptr += to * KV_HEADS + index
            v_scale_ptr += to * KV_HEADS + index
        write_head(a, b, k_cache_ptr, k_scale_ptr, held, wanted, 1, 1, HALF, LARGEST)
        write_head(v1, v2, v_cache_ptr, v_scale_ptr, held, wanted, 1, 1, HALF, LARGEST)
    else:
        out = q_out_ptr + (token * HEADS + head) * (2 * HALF) + at
        tl.store(out, first)
        tl.store(out + HALF, second)


def adapted_rotary_write(
    x: torch.Tensor,
    heads: int,
    cos_sin: torch.Tensor,
    cache: CacheArguments,
    slots: torch.Tensor,
    rotate_keys: bool,
    keep: bool,
    term: Term,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope_cache.rotary_write` of x [tokens, (heads + 2 * kv_heads) * d] and the term of its three parts.  Lesson 15.

    keep: whether keys are returned as written; then values in x are overwritten with their sum. Else the second result
    is the keys of x. d is a power of two. All but x and its h is read before the last launch has ended. Raises
    ValueError as `write_kv`.
    """
    tokens, dim = len(x), cos_sin.shape[2]
    kv_heads = (x.shape[1] // dim - heads) // 2
    check_slots(cache, dim)
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    keys = x[:, heads * dim : (heads + kv_heads) * dim].unflatten(1, (kv_heads, dim))
    written = torch.empty(keys.shape, dtype=x.dtype, device=x.device) if keep else None
    held_k, held_v = stored(cache)
    if tokens:
        adapted_rotary_write_kernel[(tokens, heads + kv_heads)](
            x, out, written, held_k, held_v, cache.k_scale, cache.v_scale, cos_sin.contiguous(), slots,
            x.stride(0), *held_k.stride()[:2], *term.arguments,
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK_SIZE=cache.k.shape[1], ROTATE_KEYS=rotate_keys,
            LARGEST=LARGEST.get(cache.k.dtype, 1.0), **term.sizes, num_warps=4, **dependent_launch(x.device),
        )  # fmt: skip
    return out, keys if written is None else written
