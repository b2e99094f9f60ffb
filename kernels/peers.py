"""Sums of partial results over GPUs, exchanged by the kernels themselves.

Each GPU has an *inbox* that the others write to through their own pointers to it (peer access over NVLink). A kernel
whose result is a partial sum stores it into every GPU's inbox, and the kernel that needs the sum reads its own inbox
and adds the parts in the order of ranks, so that all ranks get the same bits. There is no barrier: a number travels in
one 8-byte word with the *epoch*, which counts the uses of its location, and a reader reads a word again until the
epoch is the current one. Stores of 8 bytes are never torn, so a reader that sees the epoch has the number. This is the
idea of the protocol LL of NCCL (Hu et al. 2025, "Demystifying NCCL", section III).

Why no word is overwritten before it was read: the one-row step has room for each of its sums, and a rank sends
nothing in a step before it has all parts of the first sum, which a rank sends after it has read the last one of the
step before. The rows of `Reducer` have two locations each, used in turn.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .single_row_parts import dependent_launch, normed, wait_for_inputs

SUMMED = 256  # numbers that a program adds up


class Outbox(NamedTuple):
    """The destination of a rank's part of a sum."""

    peers: torch.Tensor  # [ranks] int64: the addresses of all ranks' inboxes
    epoch: torch.Tensor  # [1] int32: the number of the step
    offset: int  # in words, from the addresses


@triton.jit
def packed(numbers, epoch):
    """Words of a float32 or int32 number and the epoch each."""
    bits = numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (epoch.to(tl.int64) << 32) | bits


@triton.jit
def send(peers_ptr, offset, numbers, mask, epoch, RANKS: tl.constexpr):
    """Store float32 numbers, each with the epoch, at `offset` in every rank's inboxes. peers_ptr: their addresses."""
    send_to_others(peers_ptr, offset, numbers, mask, epoch, -1, RANKS)


@triton.jit
def send_to_others(peers_ptr, offset, numbers, mask, epoch, own, RANKS: tl.constexpr):
    """Like `send`, to every rank but `own`, float32 or int32 numbers."""
    words = packed(numbers, epoch)
    for rank in tl.static_range(RANKS):
        if rank != own:
            inboxes_ptr = tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int64))
            tl.store(inboxes_ptr + offset, words, mask=mask)


@triton.jit
def received(inbox_ptr, columns, mask, epoch, stride, RANKS: tl.constexpr):
    """Return the sum of all ranks' float32 numbers for these columns, once all are there. inbox_ptr: int64 [RANKS,
    stride].
    """
    total = tl.zeros(columns.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        total += arrived(inbox_ptr + rank * stride + columns, mask, epoch).to(tl.float32, bitcast=True)
    return total


@triton.jit
def added(inbox_ptr, columns, mask, epoch, stride, own, bits, KIND: tl.constexpr, RANKS: tl.constexpr):
    """Like `received`, of numbers of KIND, of which `bits` are this rank's own: (sums, sums).

    Of 16 bits, two share a word: the sums are those of the first ones, and of the second ones. Else the latter are 0.
    """
    first, second = tl.zeros(columns.shape, tl.float32), tl.zeros(columns.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        part = bits
        if rank != own:
            part = arrived(inbox_ptr + rank * stride + columns, mask, epoch)
        if KIND.primitive_bitwidth == 16:
            first += part.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
            second += (part >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
        else:
            first += part.to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def arrived(at, mask, epoch):
    """Return the int32 numbers in the words at these addresses, once all words have this epoch."""
    words = tl.load(at, mask=mask, other=0, volatile=True)
    while tl.sum((((words >> 32).to(tl.int32) != epoch) & mask).to(tl.int32)) > 0:
        words = tl.load(at, mask=mask, other=0, volatile=True)
    return words.to(tl.int32)


@triton.jit
def send_embedding_kernel(
    ids_ptr, table_ptr, peers_ptr, epoch_ptr, factor, first, ROWS, offset,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, TILE)
    inside = columns < COLUMNS
    epoch = tl.load(epoch_ptr) + 1
    tl.store(epoch_ptr, epoch)
    row = tl.load(ids_ptr).to(tl.int64) - first
    here = (row >= 0) & (row < ROWS)
    kind: tl.constexpr = table_ptr.dtype.element_ty
    numbers = tl.load(table_ptr + row * COLUMNS + columns, mask=inside & here, other=0.0).to(tl.float32)
    send(peers_ptr, offset + columns, (numbers * factor).to(kind).to(tl.float32), inside, epoch, RANKS)


def send_embedding(ids: torch.Tensor, table: torch.Tensor, factor: float, first: int, outbox: Outbox) -> None:
    """Begin the next epoch, and send factor * table[ids - first] to all ranks, or zeros if the id is not here.

    ids [1] int64; table [rows, hidden]: this rank's part, which begins with the id `first`.
    """
    table = table.contiguous()  # no copy on a GPU, where weights are contiguous
    rows, columns = table.shape
    tile = triton.next_power_of_2(columns)
    send_embedding_kernel[(1,)](
        ids, table, outbox.peers, outbox.epoch, factor, first, rows, outbox.offset,
        COLUMNS=columns, TILE=tile, RANKS=len(outbox.peers), num_warps=min(max(tile // 512, 1), 16),
    )  # fmt: skip


@triton.jit
def sum_kernel(
    inbox_ptr, epoch_ptr, out_ptr, COLUMNS, stride,
    TILE: tl.constexpr, RANKS: tl.constexpr, FIRST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = the sum of the parts in an inbox. FIRST: the previous kernel has begun the epoch."""
    if FIRST:
        wait_for_inputs(DEPENDENT)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < COLUMNS
    total = received(inbox_ptr, columns, inside, tl.load(epoch_ptr), stride, RANKS)
    if not FIRST:
        wait_for_inputs(DEPENDENT)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def summed(
    inbox: torch.Tensor, outbox: Outbox, columns: int, dtype: torch.dtype, *, first: bool = False
) -> torch.Tensor:
    """Return the sum of all ranks' parts, in the order of ranks: [1, columns] of `dtype`.

    inbox [ranks, width] int64: where this rank gets the parts; outbox: where it has sent its own. first: the kernel
    launched just before is `send_embedding`.

    One kernel for each sum, of few programs, reads eight bytes for each number and rank. If each of the hundreds of
    programs of the next product read them, that would take longer than the launch that it saves.
    """
    out = torch.empty((1, columns), dtype=dtype, device=inbox.device)
    sum_kernel[(triton.cdiv(columns, SUMMED),)](
        inbox, outbox.epoch, out, columns, inbox.stride(0), TILE=SUMMED, RANKS=len(inbox), FIRST=first,
        num_warps=SUMMED // 64, **dependent_launch(inbox.device),
    )  # fmt: skip
    return out


@triton.jit
def reduce_kernel(
    x_ptr, residual_ptr, norm_ptr, out_ptr, sum_ptr, peers_ptr, inbox_ptr, epochs_ptr, x_stride, residual_stride, eps,
    rank, MOST, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """A row of the sum of all ranks' x; with a norm, that plus the residual, and its norm. PAIRS: two in a word."""
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < COLUMNS
    epoch = tl.load(epochs_ptr + row) + 1
    x_ptr += row.to(tl.int64) * x_stride
    at = (epoch & 1) * RANKS * MOST + row  # the row of rank 0's part
    to_ranks, from_ranks = (at + rank * MOST).to(tl.int64) * WIDTH, inbox_ptr + at.to(tl.int64) * WIDTH
    if PAIRS:
        pairs = tl.arange(0, TILE // 2)
        whole = pairs < COLUMNS // 2
        bits = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pairs, mask=whole, other=0)
        send_to_others(peers_ptr, to_ranks + pairs, bits, whole, epoch, rank, RANKS)
    else:
        bits = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        send_to_others(peers_ptr, to_ranks + columns, bits, inside, epoch, rank, RANKS)
    if norm_ptr is not None:
        at_residual = row.to(tl.int64) * residual_stride + columns
        residual = tl.load(residual_ptr + at_residual, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if PAIRS:
        own: tl.constexpr = x_ptr.dtype.element_ty
        first, second = added(from_ranks, pairs, whole, epoch, MOST * WIDTH, rank, bits, own, RANKS)
        total = tl.interleave(first, second)
    else:
        total, _ = added(from_ranks, columns, inside, epoch, MOST * WIDTH, rank, bits, tl.float32, RANKS)
    rounded = total.to(kind)
    to = row.to(tl.int64) * COLUMNS + columns
    if norm_ptr is not None:
        rounded = (rounded.to(tl.float32) + residual).to(kind)
        tl.store(sum_ptr + to, rounded, mask=inside)
        total = rounded.to(tl.float32)
        rounded = normed(total, scale, eps, COLUMNS).to(kind)
    tl.store(out_ptr + to, rounded, mask=inside)
    tl.store(epochs_ptr + row, epoch)


class Reducer(NamedTuple):
    """Sums of few rows over all ranks.

    A row has two inboxes, in turn, and counts its own sums: so a rank sends a row again only when all ranks have sent
    it once since, and the inbox that it sends it to has been read.
    """

    rank: int
    inbox: torch.Tensor  # [2, ranks, rows, words] int64: this rank's
    peers: torch.Tensor  # [ranks] int64: the addresses of all ranks' inboxes
    epochs: torch.Tensor  # [rows] int32: how many sums there were of each row

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether the sum of all ranks' x fits here: [rows, columns] numbers of at most four bytes."""
        _, _, rows, words = self.inbox.shape
        return (
            x.dim() == 2
            and x.shape[0] <= rows
            and x.shape[1] <= (2 * words if _in_pairs(x) else words)
            and x.element_size() <= 4
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, columns], of each rank -> their sum, added in float32 in the order of ranks."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, None, None, out, None, 0.0)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`normalization.add_rms_norm` of the sum of all ranks' x, in one launch."""
        out, total = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(residual)
        self._launch(x, residual, norm, out, total, eps)
        return out, total

    def _launch(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor | None, out: torch.Tensor,
        total: torch.Tensor | None, eps: float,
    ) -> None:  # fmt: skip
        _, ranks, most, width = self.inbox.shape
        rows, columns = x.shape
        tile = triton.next_power_of_2(columns)
        if rows:
            reduce_kernel[(rows,)](
                x, residual, norm, out, total, self.peers, self.inbox, self.epochs, x.stride(0),
                0 if residual is None else residual.stride(0), eps, self.rank, most,
                WIDTH=width, COLUMNS=columns, TILE=tile, RANKS=ranks, PAIRS=_in_pairs(x),
                num_warps=min(max(tile // 512, 1), 16),
            )  # fmt: skip


def _in_pairs(x: torch.Tensor) -> bool:
    """Return whether two numbers of x [rows, columns] that follow each other are one aligned number of four bytes."""
    return x.element_size() == 2 and not (x.shape[-1] % 2 or x.stride(0) % 2 or x.data_ptr() % 4)
