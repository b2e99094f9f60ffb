"""Draft by prompt lookup, and count the drafts that agree, on the device.  Lesson 13.

`look_up` runs before a decode step's first kernel (`decode_step.prepare`), and `accept` after its last one. Between
them they keep each row's length, so the next step can be launched before the host has read how many drafts were right.

    L = the row's tokens so far
    e = where the newest earlier n-gram ends that equals its last n tokens, for the largest n of 8, 4 and 2 that has one
    draft j = tokens[e + 1 + j % (L - e - 1)], for j = 0, 1, ... while these are tokens
    accepted = 1 + how many drafts, from the first, equal the token that the step samples at their position
    afterwards: L = L + accepted

Saxena 2023, "Prompt Lookup Decoding"; `minillm.speculation.ngram` finds the same drafts on the host.

In the batch, a row has an entry for its newest token, and after it one for each draft that it may have. Entries without
a draft become padding. Tiling: one program per entry; that of a row's first entry does the work. It compares the last
eight tokens with those before each position, a tile of positions at a time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE = 1024  # positions that a program compares at once
FOUND = 256  # an entry of `accepted` is this many times the drafts that were found, plus the tokens that were accepted


class RunningTokens(NamedTuple):
    """The entries of the batch as `decode_step.prepare` takes them, each [n] int64."""

    rows: torch.Tensor  # the row of the entry's token; the state's last one for padding
    positions: torch.Tensor
    host_tokens: torch.Tensor  # drafts; -1: the state's token


@triton.jit
def look_up_kernel(
    rows_ptr, counts_ptr, host_lengths_ptr, lengths_ptr, tokens_ptr, run_rows_ptr, positions_ptr, drafts_ptr,
    tokens_stride, PAD_ROW, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    count = tl.load(counts_ptr + i).to(tl.int32)
    if row == PAD_ROW:
        tl.store(run_rows_ptr + i, row)
        tl.store(positions_ptr + i, row * 0)
        tl.store(drafts_ptr + i, row * 0 - 1)
    elif count >= 0:
        host_length = tl.load(host_lengths_ptr + i).to(tl.int32)
        tl.store(host_lengths_ptr + i, row * 0 - 1)  # from now on, the device's own
        length = tl.where(host_length >= 0, host_length, tl.load(lengths_ptr + row))
        last = length - 1
        history = tokens_ptr + row * tokens_stride
        best = last * 0  # (which n-gram) << 26 | where it ends, plus 1; 0: none
        if count > 0:
            for start in range(0, last, TILE):
                ends = start + tl.arange(0, TILE)
                matches = ends < last
                size = ends * 0
                for back in tl.static_range(8):
                    inside = matches & (ends >= back)
                    here = tl.load(history + ends - back, mask=inside, other=0)
                    wanted = tl.load(history + last - back, mask=last >= back, other=0)
                    matches = inside & (here == wanted)
                    size += matches.to(tl.int32)
                level = (size >= 2).to(tl.int32) + (size >= 4).to(tl.int32) + (size >= 8).to(tl.int32)
                best = tl.maximum(best, tl.max(tl.where(level > 0, (level << 26) + ends + 1, 0)))
        first = best & ((1 << 26) - 1)
        each = tl.arange(0, MOST)
        wanted = (best > 0) & (each < count)
        drafts = tl.load(history + first + each % tl.maximum(length - first, 1), mask=wanted, other=-1).to(tl.int64)
        found = tl.min(tl.where(drafts < 0, each, MOST))
        drafts = tl.where(each < found, drafts, -1)
        tl.store(run_rows_ptr + i, row)
        tl.store(positions_ptr + i, last.to(tl.int64))
        tl.store(drafts_ptr + i, row * 0 - 1)
        after = i + 1 + each
        tl.store(run_rows_ptr + after, tl.where(drafts >= 0, row, PAD_ROW), mask=each < count)
        tl.store(positions_ptr + after, (length + each).to(tl.int64), mask=each < count)
        tl.store(drafts_ptr + after, drafts, mask=each < count)


@triton.jit
def accept_kernel(
    rows_ptr, counts_ptr, positions_ptr, drafts_ptr, sampled_ptr, lengths_ptr, accepted_ptr, PAD_ROW,
    MOST: tl.constexpr, RING: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    count = tl.load(counts_ptr + i).to(tl.int32)
    if (row != PAD_ROW) & (count >= 0):
        length = tl.load(positions_ptr + i).to(tl.int32)  # `advance` has moved it on
        each = tl.arange(0, MOST)
        drafts = tl.load(drafts_ptr + i + 1 + each, mask=each < count, other=-1)
        sampled = tl.load(sampled_ptr + i + each, mask=each < count, other=-1)
        found = tl.sum((drafts >= 0).to(tl.int32))
        accepted = 1 + tl.min(tl.where((drafts >= 0) & (drafts == sampled), MOST, each))
        tl.store(lengths_ptr + row, length + accepted)
        tl.store(accepted_ptr + row * RING + length % RING, found * FOUND + accepted)


def look_up(
    rows: torch.Tensor,
    counts: torch.Tensor,
    host_lengths: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    most: int,
    running: RunningTokens,
) -> None:
    """Write the entries of a batch, [n] each, with what is found for its rows, to `running`.  Lesson 13.

    rows [n] int64: each entry's row, tokens' last one for padding. counts [n] int64: at a row's first entry, how many
    of those after it are for drafts, at most `most`; else -1. host_lengths [n] int64: there, the row's length, or -1 if
    `lengths` has it; it becomes -1. lengths [all] int32; tokens [all, longest] int32, of which only a row's own, before
    its length, are read. A draft below 0, an embedding's place, ends the drafts.
    """
    look_up_kernel[(len(rows),)](
        rows, counts, host_lengths, lengths, tokens, *running, tokens.stride(0), len(tokens) - 1,
        MOST=triton.next_power_of_2(most + 1), TILE=TILE, num_warps=8,
    )  # fmt: skip


def accept(
    rows: torch.Tensor,
    counts: torch.Tensor,
    running: RunningTokens,
    sampled: torch.Tensor,
    lengths: torch.Tensor,
    accepted: torch.Tensor,
    most: int,
) -> None:
    """Compare drafts with the sampled tokens [n] int64, and move on the rows' lengths.  Lesson 13.

    rows, counts, lengths and most are as in `look_up`, and `running` is what it wrote, after `decode_step.advance` has
    moved the positions on. accepted [all, ring] int32, in the host's memory: at its old length modulo the ring's size,
    a row gets FOUND times its drafts plus the tokens that it has gained, which are one, and one for each draft before
    the first wrong one.
    """
    accept_kernel[(len(rows),)](
        rows, counts, running.positions, running.host_tokens, sampled, lengths, accepted, len(lengths) - 1,
        MOST=triton.next_power_of_2(most + 1), RING=accepted.shape[1], FOUND=FOUND, num_warps=1,
    )  # fmt: skip
