"""Add the outputs of adapters to a product, for a batch whose tokens may each have another one.  Lesson 15.

    h[t] = down[slots[t]] x[t],   one after another for each part of the weight (queries, keys, values)
    out[t, row] += up[slots[t], row] . h[t, part of the row]

Hu et al. 2021, "LoRA", section 4.1. Tokens with the same adapter are multiplied together, so that its factors are read
once for all tokens of a tile (Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving", section 4). `token_tiles` groups
them, once in a step for all weights: each tile is a slot and some of its tokens. Tokens without an adapter have slot 0;
their tiles are the last ones, which only `adapted_activation` reads.

Tiling: two launches, whose programs go through all tiles. In the first, a program multiplies a tile's tokens by a few
rows of A, for a share of the columns. In the second, it adds up the shares and multiplies h by rows of B, one block of
rows after another: for few tokens, each thread multiplies what it has loaded of B; for many, tensor cores do, for which
h is rounded if B is bfloat16. Both kernels wait for memory, mostly. So with few tokens a program asks for its first
factors before it waits for the kernel before it, and for the next ones before it computes; with many, there are other
programs on the multiprocessor.

A token's sums are made in the same order wherever it is in a tile, so in these kernels they do not depend on the other
tokens, with one exception: for more than FEW_TOKENS tokens the tiles have other sizes.

A product may have computed h, with A beneath the weight (`Inner.beneath`). Then the first launch is left out, and h has
the product's dtype. Kernels that read a token's product anyway add what B gives themselves (`added_to_token`), without
tiles.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .arguments import is_compiled
from .single_row_parts import dependent_launch, processors, wait_for_inputs

MOST_PARTS = 3
FEW_TOKENS = 256
GROUPED = 64  # tokens that a program groups
TERM_WARPS = 16  # of a program that holds B for one token
MOST_OF_TOKEN = 1 << 17  # numbers of B that it holds at most: 256 a thread


class Tiles(NamedTuple):
    """The sizes of what a program multiplies."""

    tokens: int
    entries: int  # of h, at most
    columns: int  # at once
    groups: int  # that these are in: each warp adds up its own
    pieces: int  # of so many columns, in a share; more if there were more than `shares`
    shares: int
    rows: int  # of B at once, if B is in half precision and of rank 16
    blocks: int  # of rows that a weight has at least
    dot: bool  # whether tensor cores multiply them: `add_many_kernel`
    programs: int  # of the first kernel on a multiprocessor, at most
    adders: int  # of the second, if B is bfloat16; else as many as of the first
    registers: int | None  # of a thread of `add_kernel`, at most; None: any number
    warps: int


# All programs of a launch have equal shares, so one that starts only when another has ended ends last, almost alone. So
# few tokens have as many as run together: a multiprocessor has 65536 registers, a thread of inner_kernel up to 120.
FEW = Tiles(
    tokens=2, entries=16, columns=512, groups=4, pieces=1, shares=8, rows=256, blocks=16, dot=False,
    programs=4, adders=6, registers=80, warps=4,
)  # fmt: skip
MANY = Tiles(
    tokens=32, entries=64, columns=64, groups=1, pieces=8, shares=8, rows=128, blocks=16, dot=True,
    programs=8, adders=4, registers=None, warps=4,
)  # fmt: skip


@triton.jit(do_not_specialize=["TOKENS"])
def rank_kernel(slots_ptr, rank_ptr, TOKENS, GROUPED: tl.constexpr):
    """Write, for each token, how many of those before it have its slot."""
    mine = tl.program_id(0) * GROUPED + tl.arange(0, GROUPED)
    slots = tl.load(slots_ptr + mine, mask=mine < TOKENS, other=0)
    rank = tl.zeros([GROUPED], tl.int32)
    for start in range(0, (tl.program_id(0) + 1) * GROUPED, GROUPED):
        others = start + tl.arange(0, GROUPED)
        theirs = tl.load(slots_ptr + others, mask=others < TOKENS, other=0)
        counted = (theirs[None, :] == slots[:, None]) & (others[None, :] < mine[:, None])
        rank += tl.sum(counted.to(tl.int32), axis=1)
    tl.store(rank_ptr + mine, rank, mask=mine < TOKENS)


@triton.jit(do_not_specialize=["TOKENS"])
def group_kernel(slots_ptr, rank_ptr, tiles_ptr, TOKENS, SIZE: tl.constexpr, GROUPED: tl.constexpr):
    """Write each token into its tile of SIZE tokens. Tiles are ordered by slot, but slot 0 is the last."""
    mine = tl.program_id(0) * GROUPED + tl.arange(0, GROUPED)
    real = mine < TOKENS
    slots = tl.load(slots_ptr + mine, mask=real, other=0)
    rank = tl.load(rank_ptr + mine, mask=real, other=0)
    tile, used, all_tiles = rank // SIZE, 0, 0
    for start in range(0, TOKENS, GROUPED):
        others = start + tl.arange(0, GROUPED)
        theirs = tl.load(slots_ptr + others, mask=others < TOKENS, other=0)
        first = tl.load(rank_ptr + others, mask=others < TOKENS, other=1) % SIZE == 0
        before = (theirs > 0)[None, :] & ((slots == 0)[:, None] | (theirs[None, :] < slots[:, None]))
        tile += tl.sum((first[None, :] & before).to(tl.int32), axis=1)
        used += tl.sum((first & (theirs > 0)).to(tl.int32))
        all_tiles += tl.sum(first.to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(tiles_ptr, used)
        tl.store(tiles_ptr + 1, all_tiles)
    at = tiles_ptr + (1 + tile) * (1 + SIZE)
    tl.store(at + 1 + rank % SIZE, mine, mask=real)
    tl.store(at, slots.to(tl.int32), mask=real & (rank % SIZE == 0))


def token_tiles(slots: torch.Tensor, count: int, size: int | None = None) -> torch.Tensor:
    """Group the tokens of a step by their slot: [1 + tiles, 1 + size] int32.  Lesson 15.

    slots: [tokens] int64, below count, 0 for none. size: the tokens of a tile; None: as many as `add_grouped` wants. A
    tile is its slot, then its tokens, then -1. The first row has the number of tiles with an adapter, and that of all;
    there is room for as many as any slots of so many tokens need.
    """
    tokens, size = len(slots), size or sizes_for(len(slots)).tokens
    distinct = min(tokens, count)
    tiles = slots.new_full((1 + distinct + (tokens - distinct) // size, 1 + size), -1, dtype=torch.int32)
    rank = slots.new_empty(tokens, dtype=torch.int32)
    if distinct:
        grid = (triton.cdiv(tokens, GROUPED),)
        rank_kernel[grid](slots, rank, tokens, GROUPED=GROUPED, num_warps=4)
        group_kernel[grid](slots, rank, tiles, tokens, SIZE=size, GROUPED=GROUPED, num_warps=4)
    return tiles


@triton.jit
def load_tile(tiles_ptr, tile, exists, TOKENS: tl.constexpr):
    """Return a tile's slot and tokens; 0 and -1 if it does not exist."""
    at = tiles_ptr + (1 + tile) * (1 + TOKENS)
    return tl.load(at, mask=exists, other=0), tl.load(at + 1 + tl.arange(0, TOKENS), mask=exists, other=-1)


@triton.jit
def _load_block(ptr, rows, real, columns, stride, COLUMNS: tl.constexpr):
    """Return some columns [groups, columns] of some rows: [groups, rows, columns], 0 where a row is not real."""
    at = ptr + rows.to(tl.int64)[None, :, None] * stride + columns[:, None, :]
    return tl.load(at, mask=real[None, :, None] & (columns < COLUMNS)[:, None, :], other=0)


@triton.jit
def _product(down, x, IN_HALF: tl.constexpr, GROUPS: tl.constexpr, ENTRIES: tl.constexpr, TOKENS: tl.constexpr):
    """down x^T of half precision numbers, or exactly in float32, of each group: [groups, entries, tokens]."""
    if not IN_HALF:
        down, x = down.to(tl.float32), x.to(tl.float32)
    if GROUPS == 1:  # tensor cores of Hopper have no groups
        PIECE: tl.constexpr = down.shape[2]
        down, x = tl.reshape(down, [ENTRIES, PIECE]), tl.reshape(x, [TOKENS, PIECE])
        total = tl.dot(down, tl.trans(x), input_precision="ieee")[None, :, :]
    else:
        total = tl.dot(down, tl.permute(x, [0, 2, 1]), input_precision="ieee")
    return total


@triton.jit
def _block_of_down(
    block, SHARES: tl.constexpr, ENTRIES: tl.constexpr, GROUPS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr
):
    """Return some entries of h, and the first columns of a share: blocks are all shares of the first entries, then
    others.
    """
    columns = tl.arange(0, GROUPS)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    return block // SHARES * ENTRIES + tl.arange(0, ENTRIES), block % SHARES * (PIECES * GROUPS * PIECE) + columns


@triton.jit(do_not_specialize=["tokens"])
def inner_kernel(
    x_ptr, tiles_ptr, down_ptr, inner_ptr, x_stride, slot_stride, tokens,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, ENTRIES: tl.constexpr, GROUPS: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, SHARES: tl.constexpr, IN_HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """inner [SHARES, tokens, SIZE] = each token's h, for one share of the columns after another."""
    BLOCKS: tl.constexpr = (SIZE + ENTRIES - 1) // ENTRIES * SHARES
    item, programs = tl.program_id(0), tl.num_programs(0)
    items = tl.load(tiles_ptr) * BLOCKS
    slot, members = load_tile(tiles_ptr, item // BLOCKS, True, TOKENS)
    entries, columns = _block_of_down(item % BLOCKS, SHARES, ENTRIES, GROUPS, PIECE, PIECES)
    down_at = down_ptr + slot.to(tl.int64) * slot_stride
    down = _load_block(down_at, entries, (entries < SIZE) & (slot > 0), columns, COLUMNS, COLUMNS)
    wait_for_inputs(DEPENDENT)
    for each in tl.range(item, items, programs, num_stages=1):
        x = _load_block(x_ptr, members, members >= 0, columns, x_stride, COLUMNS)
        following = each + programs
        next_slot, next_members = load_tile(tiles_ptr, following // BLOCKS, following < items, TOKENS)
        next_entries, next_columns = _block_of_down(following % BLOCKS, SHARES, ENTRIES, GROUPS, PIECE, PIECES)
        next_at = down_ptr + next_slot.to(tl.int64) * slot_stride
        real = (next_entries < SIZE) & (next_slot > 0)
        next_down = _load_block(next_at, next_entries, real, next_columns, COLUMNS, COLUMNS)
        total = _product(down, x, IN_HALF, GROUPS, ENTRIES, TOKENS)
        if PIECES > 1:
            for piece in tl.range(1, PIECES, num_stages=3):
                more = columns + piece * (GROUPS * PIECE)
                x = _load_block(x_ptr, members, members >= 0, more, x_stride, COLUMNS)
                down = _load_block(down_at, entries, entries < SIZE, more, COLUMNS, COLUMNS)
                total += _product(down, x, IN_HALF, GROUPS, ENTRIES, TOKENS)
        total = tl.sum(total, axis=0)
        target = inner_ptr + (each % SHARES * tokens + members[None, :]) * SIZE + entries[:, None]
        tl.store(target, total, mask=(members >= 0)[None, :] & (entries < SIZE)[:, None])
        members, entries, columns, down_at, down = next_members, next_entries, next_columns, next_at, next_down


@triton.jit
def _rows_of_block(block, TILE: tl.constexpr, first_end, second_end, end):
    """Return which rows of a weight a block has, at most TILE of one part: (part, first, the part's end)."""
    first, second = tl.cdiv(first_end, TILE), tl.cdiv(second_end - first_end, TILE)
    part, begin, after = 0, block * TILE, first_end
    if block >= first + second:
        part, begin, after = 2, second_end + (block - first - second) * TILE, end
    elif block >= first:
        part, begin, after = 1, first_end + (block - first) * TILE, second_end
    return part, begin, after


@triton.jit
def own_items(items):
    """Return this program's share of so many items: (first, end)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    share = items // programs
    more = items - share * programs  # programs that have one more
    first = program * share + tl.minimum(program, more)
    return first, first + share + (program < more).to(tl.int32)


@triton.jit
def _rows_of_b(
    up_ptr, slot, slot_stride, begin, after, RANK: tl.constexpr, RANK_TILE: tl.constexpr, TILE: tl.constexpr
):
    """Return rows of B from `begin` on, and below `after`: [TILE, RANK_TILE], zero for slot 0."""
    rows, ranks = (begin + tl.arange(0, TILE))[:, None], tl.arange(0, RANK_TILE)[None, :]
    at = up_ptr + slot.to(tl.int64) * slot_stride + rows * RANK + ranks
    return tl.load(at, mask=(rows < after) & (ranks < RANK) & (slot > 0), other=0)


@triton.jit
def h_of_tile(
    inner_ptr, share_stride, token_stride, slot_stride, slot, members, part,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, SHARES: tl.constexpr, SHARE_TILE: tl.constexpr,
):  # fmt: skip
    """Return a part's h of the tokens of a tile, transposed: [RANK_TILE, tokens] float32. See `Inner`."""
    ranks, shares = tl.arange(0, RANK_TILE)[None, :, None], tl.arange(0, SHARE_TILE)[:, None, None]
    at = shares * share_stride + members[None, None, :] * token_stride + (slot - 1) * slot_stride + part * RANK + ranks
    wanted = (shares < SHARES) & (ranks < RANK) & (members >= 0)[None, None, :] & (slot > 0)
    return tl.sum(tl.load(inner_ptr + at, mask=wanted, other=0).to(tl.float32), axis=0)


@triton.jit
def b_times(b, h, PRECISION: tl.constexpr):
    """B [rows, rank] times h [rank, tokens]: [rows, tokens], by tensor cores.

    PRECISION: of float32; None: h is rounded as b is.
    """
    if PRECISION is None:
        total = tl.dot(b, h.to(b.dtype))
    else:
        total = tl.dot(b.to(tl.float32), h, input_precision=PRECISION)
    return total


@triton.jit
def b_of_slot(up_ptr, slot_stride, slot, rows, some, RANK: tl.constexpr, RANK_TILE: tl.constexpr):
    """Return B of one slot for some `rows` [m, n]: [m, n, RANK_TILE], zero for slot 0.

    For threads that multiply what they have loaded: their pieces of rows stay where they are. some: [m, n], whether a
    row exists.
    """
    ranks = tl.arange(0, RANK_TILE)[None, None, :]
    at = up_ptr + slot.to(tl.int64) * slot_stride + rows[:, :, None] * RANK + ranks
    return tl.load(at, mask=some[:, :, None] & (ranks < RANK) & (slot > 0), other=0)


@triton.jit
def added_to_token(
    inner_ptr, token_stride, inner_stride, slot, token, part, b, RANK: tl.constexpr, RANK_TILE: tl.constexpr
):
    """Return what an adapter adds to rows of one part of a token's product: [m, n]. b: `b_of_slot` of these.

    For kernels whose programs read the product of one token anyway. They ask for b before the product is there.
    """
    ranks = tl.arange(0, RANK_TILE)
    at = inner_ptr + token * token_stride + (slot - 1) * inner_stride + part * RANK + ranks
    h = tl.load(at, mask=(ranks < RANK) & (slot > 0), other=0)
    return tl.sum(b.to(tl.float32) * h.to(tl.float32)[None, None, :], axis=2)


@triton.jit
def add_kernel(
    out_ptr, tiles_ptr, up_ptr, inner_ptr, share_stride, token_stride, inner_stride, out_stride, slot_stride,
    first_end, second_end, end,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr,
    SHARE_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add to out what B makes of inner. A program has blocks of rows next to each other."""
    blocks = tl.cdiv(first_end, TILE) + tl.cdiv(second_end - first_end, TILE) + tl.cdiv(end - second_end, TILE)
    item, last = own_items(tl.load(tiles_ptr) * blocks)
    slot, members = load_tile(tiles_ptr, item // blocks, item < last, TOKENS)
    part, begin, after = _rows_of_block(item % blocks, TILE, first_end, second_end, end)
    rows = begin + tl.arange(0, TILE)
    b = b_of_slot(up_ptr, slot_stride, slot, rows[:, None], (rows < after)[:, None], RANK, RANK_TILE)
    wait_for_inputs(DEPENDENT)
    target = out_ptr + members[None, :].to(tl.int64) * out_stride + rows[:, None]
    mask = (members >= 0)[None, :] & (rows < after)[:, None]
    before = tl.load(target, mask=mask, other=0)
    h = h_of_tile(
        inner_ptr, share_stride, token_stride, inner_stride, slot, members, part, RANK, RANK_TILE, SHARES, SHARE_TILE
    )
    for each in tl.range(item, last, num_stages=1):
        following = each + 1
        next_part, begin, after = _rows_of_block(following % blocks, TILE, first_end, second_end, end)
        next_slot, next_members = slot, members
        if following % blocks == 0:
            next_slot, next_members = load_tile(tiles_ptr, following // blocks, following < last, TOKENS)
        next_slot = tl.where(following < last, next_slot, 0)
        rows = begin + tl.arange(0, TILE)
        next_b = b_of_slot(up_ptr, slot_stride, next_slot, rows[:, None], (rows < after)[:, None], RANK, RANK_TILE)
        next_target = out_ptr + next_members[None, :].to(tl.int64) * out_stride + rows[:, None]
        next_mask = (next_slot > 0) & (next_members >= 0)[None, :] & (rows < after)[:, None]
        next_before = tl.load(next_target, mask=next_mask, other=0)
        total = tl.sum(b.to(tl.float32) * tl.trans(h)[None, :, :], axis=2)
        tl.store(target, (before.to(tl.float32) + total).to(before.dtype), mask=mask)
        if (following < last) & ((next_part != part) | (following % blocks == 0)):
            h = h_of_tile(
                inner_ptr, share_stride, token_stride, inner_stride, next_slot, next_members, next_part,
                RANK, RANK_TILE, SHARES, SHARE_TILE,
            )  # fmt: skip
        slot, members, part, b = next_slot, next_members, next_part, next_b
        target, mask, before = next_target, next_mask, next_before


@triton.jit
def add_many_kernel(
    out_ptr, tiles_ptr, up_ptr, inner_ptr, share_stride, token_stride, inner_stride, out_stride, slot_stride,
    first_end, second_end, end,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr,
    SHARE_TILE: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`add_kernel` for many tokens: tensor cores multiply."""
    blocks = tl.cdiv(first_end, TILE) + tl.cdiv(second_end - first_end, TILE) + tl.cdiv(end - second_end, TILE)
    item, last = own_items(tl.load(tiles_ptr) * blocks)
    wait_for_inputs(DEPENDENT)
    while item < last:
        part, begin, after = _rows_of_block(item % blocks, TILE, first_end, second_end, end)
        slot, members = load_tile(tiles_ptr, item // blocks, True, TOKENS)
        h = h_of_tile(
            inner_ptr, share_stride, token_stride, inner_stride, slot, members, part,
            RANK, RANK_TILE, SHARES, SHARE_TILE,
        )  # fmt: skip
        following = tl.minimum(last, item + tl.cdiv(after - begin, TILE))  # the first item with another h
        for each in tl.range(item, following, num_stages=1):
            row = begin + (each - item) * TILE
            rows = row + tl.arange(0, TILE)
            target = out_ptr + members.to(tl.int64)[None, :] * out_stride + rows[:, None]
            mask = (members >= 0)[None, :] & (rows < after)[:, None]
            before = tl.load(target, mask=mask, other=0)
            total = b_times(_rows_of_b(up_ptr, slot, slot_stride, row, after, RANK, RANK_TILE, TILE), h, PRECISION)
            tl.store(target, (before.to(tl.float32) + total).to(before.dtype), mask=mask)
        item = following


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
    return add_grouped(out, x, token_tiles(slots, len(down)), down, up, ends, just_grouped=True)


class Term(NamedTuple):
    """The part of adapters in a product of few tokens, for the kernels that read it: see `added_to_token`."""

    inner: torch.Tensor  # [tokens, slots * parts * rank]: h of all slots from 1 on
    slots: torch.Tensor  # [tokens] int64; 0: none
    up: torch.Tensor  # [all, out, rank]: B, a slot's entries being contiguous
    parts: int

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Return the slots, and the first arguments of `added_to_token` and `b_of_slot`."""
        rank = self.up.shape[2]
        return self.slots, self.inner, self.inner.stride(0), self.parts * rank, self.up, self.up.stride(0)

    @property
    def fits(self) -> bool:
        """Return whether a program's threads can hold B of all rows at once."""
        _, rows, rank = self.up.shape
        return triton.next_power_of_2(rows) * triton.next_power_of_2(rank) <= MOST_OF_TOKEN

    @property
    def sizes(self) -> dict[str, int]:
        """Return their last arguments."""
        rank = self.up.shape[2]
        return {"RANK": rank, "RANK_TILE": triton.next_power_of_2(rank)}


class Inner(NamedTuple):
    """h of the tokens of a step: the sum of `shares`, of which a token's may lie at its slot."""

    values: torch.Tensor
    shares: int
    share_stride: int
    token_stride: int
    slot_stride: int  # from the h of slot 1 to that of slot 2; 0: a token has only that of its own slot

    @classmethod
    def beneath(cls, values: torch.Tensor, size: int) -> "Inner":
        """Return h that a product has computed with A of all slots from 1 on: [tokens, slots * size]."""
        return cls(values, 1, 0, values.stride(0), size)


def inner_products(x: torch.Tensor, tiles: torch.Tensor, down: torch.Tensor, just_grouped: bool = False) -> Inner:
    """Return h of tokens x [tokens, in]. tiles, down, just_grouped: as in `add_grouped`."""
    (tokens, columns), size = x.shape, down.shape[1]
    sizes = sizes_for(tokens)
    entries = min(sizes.entries, max(16, triton.next_power_of_2(size)))
    piece = max(16, min(sizes.columns * 2 // x.itemsize, triton.next_power_of_2(columns)) // sizes.groups)
    pieces = triton.cdiv(columns, piece * sizes.groups)
    pieces_of_share = min(pieces, max(sizes.pieces, triton.cdiv(pieces, sizes.shares)))
    shares = triton.cdiv(pieces, pieces_of_share)
    inner = torch.empty((shares, tokens, size), dtype=torch.float32, device=x.device)
    items = (len(tiles) - 1) * triton.cdiv(size, entries) * shares
    inner_kernel[(min(items, sizes.programs * processors(x.device)),)](
        x, tiles, down, inner, x.stride(0), down.stride(0), tokens,
        COLUMNS=columns, SIZE=size, TOKENS=sizes.tokens, ENTRIES=entries, GROUPS=sizes.groups, PIECE=piece,
        PIECES=pieces_of_share, SHARES=shares, IN_HALF=is_compiled(x) and x.dtype == down.dtype != torch.float32,
        num_warps=sizes.warps, **({"DEPENDENT": False} if just_grouped else dependent_launch(x.device)),
    )  # fmt: skip
    return Inner(inner, shares, tokens * size, size, 0)


def add_grouped(
    out: torch.Tensor,
    x: torch.Tensor | Inner,
    tiles: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ends: tuple[int, ...],
    just_grouped: bool = False,
) -> torch.Tensor:
    """As `add_low_rank`, with tiles = token_tiles(slots, len(down)) in place of slots. x: the tokens, or their h.

    just_grouped: tiles were computed by one of the last two launches; else the first kernel may read them while the one
    before it still runs.
    """
    if len(ends) > MOST_PARTS:
        raise ValueError(f"a weight of {len(ends)} parts has more than {MOST_PARTS}: add to it in torch")
    if not len(out):
        return out
    inner = x if isinstance(x, Inner) else inner_products(x, tiles, down, just_grouped)
    (_, rows, rank), sizes = up.shape, sizes_for(len(out))
    rank_tile = max(16, triton.next_power_of_2(rank))
    tile = max(16, min(sizes.rows * 32 // (rank_tile * up.itemsize), triton.next_power_of_2(rows // sizes.blocks)))
    first, second = (*ends[:-1], rows, rows)[:2]
    in_half = is_compiled(out) and up.dtype == torch.bfloat16
    blocks = sum(triton.cdiv(end - begin, tile) for begin, end in pairwise((0, first, second, rows)))
    together = (sizes.adders if in_half else sizes.programs) * processors(out.device)
    kernel: triton.JITFunction
    more: dict[str, str | int | None]
    if sizes.dot:
        kernel, more = add_many_kernel, {"PRECISION": precision(up)}
    else:
        kernel, more = add_kernel, {"maxnreg": sizes.registers if in_half else None}
    dependent = {"DEPENDENT": False} if inner is x and just_grouped else dependent_launch(out.device)
    kernel[(min((len(tiles) - 1) * blocks, together),)](
        out, tiles, up, inner.values, *inner[2:], out.stride(0), up.stride(0), first, second, rows,
        RANK=rank, RANK_TILE=rank_tile, TOKENS=sizes.tokens, TILE=tile, SHARES=inner.shares,
        SHARE_TILE=triton.next_power_of_2(inner.shares), num_warps=sizes.warps, **more, **dependent,
    )  # fmt: skip
    return out


def precision(up: torch.Tensor) -> str | None:
    """Return how tensor cores multiply h by this B: with what precision of float32; None: in bfloat16."""
    if is_compiled(up) and up.dtype == torch.bfloat16:
        return None
    return "ieee" if up.dtype == torch.float32 else "tf32x3"


def sizes_for(tokens: int) -> Tiles:
    """Return the sizes of what programs multiply for so many tokens."""
    return FEW if tokens <= FEW_TOKENS else MANY
