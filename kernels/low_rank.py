"""What adapters add to a product, for a batch whose tokens may each have another one.  Lesson 15.

    h[t] = down[slots[t]] x[t],   one after another for each part of the weight (queries, keys, values)
    out[t, row] += up[slots[t], row] . h[t, part of the row]

Hu et al. 2021, "LoRA", section 4.1; Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving", section 4, gathers the
factors of each token in the same way. Tokens without an adapter have slot 0: their programs exit at once.

Tiling: two launches. In the first, each program computes a few entries of one token's h, from whole rows of its A; in
the second, a tile of one token's outputs. So a token's result does not depend on which others are in the batch, and
nothing is summed in an order that may change. Tokens with the same adapter read its factors again, from the GPU's L2
cache: for long prompts a product of tiles of tokens would be faster.
"""

import torch
import triton
import triton.language as tl

from .single_row_parts import dependent_launch, wait_for_inputs

ENTRIES = 4  # of h, in one program
MOST_PARTS = 3


@triton.jit
def inner_kernel(
    x_ptr, slots_ptr, down_ptr, inner_ptr, x_stride, slot_stride,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, ENTRIES: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot > 0:
        entries = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
        down = down_ptr + slot * slot_stride + entries[:, None].to(tl.int64) * COLUMNS
        total = tl.zeros((ENTRIES, TILE), tl.float32)
        for start in range(0, COLUMNS, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < COLUMNS
            x = tl.load(x_ptr + token * x_stride + columns, mask=inside, other=0).to(tl.float32)
            mask = (entries[:, None] < SIZE) & inside[None, :]
            total += tl.load(down + columns[None, :], mask=mask, other=0).to(tl.float32) * x[None, :]
        tl.store(inner_ptr + token * SIZE + entries, tl.sum(total, axis=1), mask=entries < SIZE)


@triton.jit
def add_kernel(
    out_ptr, slots_ptr, up_ptr, inner_ptr, out_stride, slot_stride, first_end, second_end,
    ROWS: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot > 0:
        rows, ranks = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, RANK_TILE)
        part = (rows >= first_end).to(tl.int32) + (rows >= second_end).to(tl.int32)
        mask = (rows < ROWS)[:, None] & (ranks < RANK)[None, :]
        inner = tl.load(inner_ptr + token * SIZE + part[:, None] * RANK + ranks[None, :], mask=mask, other=0)
        up = up_ptr + slot * slot_stride + rows[:, None].to(tl.int64) * RANK + ranks[None, :]
        added = tl.sum(tl.load(up, mask=mask, other=0).to(tl.float32) * inner, axis=1)
        place = out_ptr + token * out_stride + rows
        before = tl.load(place, mask=rows < ROWS, other=0)
        tl.store(place, (before.to(tl.float32) + added).to(before.dtype), mask=rows < ROWS)


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ends: tuple[int, ...],
) -> torch.Tensor:
    """Add to out [tokens, out] what each token's adapter adds to it, in place; returns it.  Lesson 15.

    x [tokens, in]; slots [tokens] int64, 0 for none; down [all, parts * rank, in], up [all, out, rank], of which a
    slot's entries are contiguous; ends: where the rows of each part end. Sums are in float32; float64 is not supported.
    Raises ValueError for more than MOST_PARTS parts.
    """
    if len(ends) > MOST_PARTS:
        raise ValueError(f"a weight of {len(ends)} parts has more than {MOST_PARTS}: add to it in torch")
    tokens, (_, size, columns), (_, rows, rank) = len(x), down.shape, up.shape
    if not tokens:
        return out
    inner = torch.empty((tokens, size), dtype=torch.float32, device=x.device)
    first, second = (*ends[:-1], rows, rows)[:2]
    dependent = dependent_launch(x.device)
    inner_kernel[(tokens, triton.cdiv(size, ENTRIES))](
        x, slots, down, inner, x.stride(0), down.stride(0),
        COLUMNS=columns, SIZE=size, ENTRIES=ENTRIES, TILE=min(triton.next_power_of_2(columns), 1024), num_warps=4,
        **dependent,
    )  # fmt: skip
    rank_tile = triton.next_power_of_2(rank)
    tile = max(16, 2048 // rank_tile)
    add_kernel[(tokens, triton.cdiv(rows, tile))](
        out, slots, up, inner, out.stride(0), up.stride(0), first, second,
        ROWS=rows, SIZE=size, RANK=rank, RANK_TILE=rank_tile, TILE=tile, num_warps=4, **dependent,
    )  # fmt: skip
    return out
