"""The gated activation of a product to which adapters add, without writing what they add.  Lessons 03 and 15.

    gate, up = gate_up[t, :I] + B_gate[slots[t]] h_gate[t], gate_up[t, I:] + B_up[slots[t]] h_up[t]
    out[t]   = activation(gate) * up

h as in `low_rank`. The product of gate and up is the widest of a layer; `low_rank.add_grouped` would read and write it
before the activation reads it again. Here it is read once, and what adapters add to it stays in registers, in float32
(h is rounded first if B is bfloat16).

Tiling: programs go through the tiles of tokens that `token_tiles` made, those without an adapter, too, and for each
tile through blocks of columns. Tensor cores multiply the rows of B of a block by the tile's h. A step of few tokens is
over when a program has had what it reads, so it asks for all of that before it uses any: gate and up, h, and both parts
of B. Its tiles are small, because in a larger one most threads would have no token where adapters have few.
"""

import torch
import triton
import triton.language as tl

from .low_rank import FEW_TOKENS, MANY, Inner, b_times, h_of_tile, load_tile, own_items, precision
from .single_row_parts import activated, dependent_launch, processors, wait_for_inputs

# For few and for many tokens. A step of many is grouped once for all weights.
IN_TILE, COLUMNS_AT_ONCE, PROGRAMS, WARPS = (8, MANY.tokens), (128, 64), (8, 6), 4


def tile_tokens(tokens: int) -> int:
    """Return the tokens of a tile, for steps of so many."""
    return IN_TILE[tokens > FEW_TOKENS]


@triton.jit
def _h_of_both(
    inner_ptr, share_stride, token_stride, slot_stride, slot, members,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, SHARES: tl.constexpr, SHARE_TILE: tl.constexpr,
):  # fmt: skip
    """h of gate and of up: [RANK_TILE, tokens] each."""
    gate = h_of_tile(
        inner_ptr, share_stride, token_stride, slot_stride, slot, members, 0, RANK, RANK_TILE, SHARES, SHARE_TILE
    )
    up = h_of_tile(
        inner_ptr, share_stride, token_stride, slot_stride, slot, members, 1, RANK, RANK_TILE, SHARES, SHARE_TILE
    )
    return gate, up


@triton.jit
def _b_of_both(up_ptr, slot, slot_stride, columns, COLUMNS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr):
    """Rows of B of gate and of up: [columns, RANK_TILE] each. With two loads, the compiler would have the second one
    wait for what it does with the first.
    """
    rows = columns[:, None, None] + tl.arange(0, 2)[None, None, :] * COLUMNS
    ranks = tl.arange(0, RANK_TILE)[None, :, None]
    at = up_ptr + slot.to(tl.int64) * slot_stride + rows * RANK + ranks
    return tl.split(tl.load(at, mask=(columns < COLUMNS)[:, None, None] & (ranks < RANK) & (slot > 0), other=0))


@triton.jit
def adapted_activation_kernel(
    gate_up_ptr, out_ptr, tiles_ptr, up_ptr, inner_ptr, share_stride, token_stride, inner_stride, gate_up_stride,
    slot_stride,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    SHARES: tl.constexpr, SHARE_TILE: tl.constexpr, PRECISION: tl.constexpr, GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    item, last = own_items(tl.load(tiles_ptr + 1) * BLOCKS)
    wait_for_inputs(DEPENDENT)
    while item < last:
        slot, members = load_tile(tiles_ptr, item // BLOCKS, True, TOKENS)
        if SHARES > 1:
            h_gate, h_up = _h_of_both(
                inner_ptr, share_stride, token_stride, inner_stride, slot, members, RANK, RANK_TILE, SHARES, SHARE_TILE
            )
        end = tl.minimum(last, (item // BLOCKS + 1) * BLOCKS)
        for each in tl.range(item, end, num_stages=1):
            columns = each % BLOCKS * TILE + tl.arange(0, TILE)
            mask = (members >= 0)[None, :] & (columns < COLUMNS)[:, None]
            at = gate_up_ptr + members.to(tl.int64)[None, :] * gate_up_stride + columns[:, None]
            gate, up = tl.load(at, mask=mask, other=0), tl.load(at + COLUMNS, mask=mask, other=0)
            if SHARES == 1:
                h_gate, h_up = _h_of_both(
                    inner_ptr, share_stride, token_stride, inner_stride, slot, members, RANK, RANK_TILE, 1, 1
                )
            b_gate, b_up = _b_of_both(up_ptr, slot, slot_stride, columns, COLUMNS, RANK, RANK_TILE)
            gate = gate.to(tl.float32) + b_times(b_gate, h_gate, PRECISION)
            up = up.to(tl.float32) + b_times(b_up, h_up, PRECISION)
            target = out_ptr + members.to(tl.int64)[None, :] * COLUMNS + columns[:, None]
            tl.store(target, (activated(gate, GELU) * up).to(out_ptr.dtype.element_ty), mask=mask)
        item = end


def adapted_activation(
    gate_up: torch.Tensor, inner: Inner, tiles: torch.Tensor, up: torch.Tensor, activation: str
) -> torch.Tensor:
    """gate_up [tokens, 2 * I], gate first -> activation(gate) * up [tokens, I], with what adapters add.  Lesson 15.

    inner: h of the tokens; tiles: `token_tiles` of their slots, with `tile_tokens` in each, which are read before the
    last launch has ended; up [all, 2 * I, rank]: B,
    whose slots' entries are contiguous. activation: "gelu_tanh" or "silu". Raises ValueError for another, and unless
    gate_up's rows are contiguous.
    """
    if activation not in ("gelu_tanh", "silu"):
        raise ValueError(f'activation is "gelu_tanh" or "silu", not {activation!r}')
    if gate_up.stride(1) != 1:
        raise ValueError(f"rows of gate_up have a stride of {gate_up.stride(1)}: they must be contiguous")
    (tokens, rows), rank = gate_up.shape, up.shape[2]
    out = torch.empty((tokens, rows // 2), dtype=gate_up.dtype, device=gate_up.device)
    if not tokens:
        return out
    many, size = int(tokens > FEW_TOKENS), tile_tokens(tokens)
    tile = max(16, min(COLUMNS_AT_ONCE[many], triton.next_power_of_2(rows // 2)))
    items = (len(tiles) - 1) * triton.cdiv(rows // 2, tile)
    adapted_activation_kernel[(min(items, PROGRAMS[many] * processors(out.device)),)](
        gate_up, out, tiles, up, inner.values, *inner[2:], gate_up.stride(0), up.stride(0),
        COLUMNS=rows // 2, RANK=rank, RANK_TILE=max(16, triton.next_power_of_2(rank)), TOKENS=size, TILE=tile,
        SHARES=inner.shares, SHARE_TILE=triton.next_power_of_2(inner.shares), PRECISION=precision(up),
        GELU=activation == "gelu_tanh", num_warps=WARPS, **dependent_launch(out.device),
    )  # fmt: skip
    return out
