"""The products of `single_row` with what the row's adapter adds to them, in the same launches.  Lessons 11 and 15.

    h = A f(x),   one after another for each part of the weight (queries, keys, values)
    y[row] = W[row] . f(x) + B[row] . h[part of the row]

Hu et al. 2021, "LoRA", section 4.1. A and B are thin, so their bytes are few, but with a launch for each a layer of
five launches would have thirteen. Here the first programs of a launch, its *helpers*, multiply rows of A in place of
rows of W, or pieces of them besides, if rows are long. All others multiply their rows of W, keep the sums in registers,
and add their rows of B times h to them at the end, before bias, activation and rounding. The helpers tell h in
8-byte words that carry the number of the step, as GPUs tell each other parts of a sum (`peers`): who sees this step's
number has h.

Helpers tell before they ask, and a GPU starts programs in the order of their numbers, so none waits for a program that
cannot start. (NVIDIA's CUB relies on that order, too, in agent_scan.cuh. Where rows are long, a helper has rows of W,
too, and stays on the chip until all have told, so there are no more of these than processors.) All sums are in a fixed
order. The slot of the row's adapter is read on the device, so one captured graph serves all adapters; slot 0 is none:
then nothing of A and B is read, and no program waits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launch_configs
from .arguments import is_compiled
from .low_rank import MOST_PARTS
from .peers import packed
from .single_row import WHOLE, long_config, whole_config
from .single_row_parts import activated, dependent_launch, normed, processors, wait_for_inputs

PIECE = 2048  # columns of a row of A that a helper multiplies at once, where rows are long
REGISTERS = 65536  # of a processor
LONG_REGISTERS: int | None = 104  # of a thread: the next kernel's first programs find room beside two of long rows
# Each thread reads its word again until it carries the number of the step.
WAIT = tl.constexpr("""{
    .reg .b32 number, step;
    .reg .pred early;
AGAIN:
    ld.relaxed.gpu.global.b64 $0, [$1];
    mov.b64 {number, step}, $0;
    setp.ne.b32 early, step, $2;
    @early bra AGAIN;
}""")


class LowRankTerm(NamedTuple):
    """The part of adapters in the product of one weight, and where the programs of its launch exchange h."""

    slots: torch.Tensor  # [1] int64: the slot of the row's adapter; 0: none
    down: torch.Tensor  # [all, parts * rank, in]: each part's A, one after another
    up: torch.Tensor  # [all, out, rank]: B
    ends: tuple[int, ...]  # where the rows of each part end
    inner: torch.Tensor  # [words] int64, of this weight alone: h in words with the number of the step
    step: torch.Tensor  # [1] int32: that number, which no earlier step had; not 0


def words(columns: int, size: int) -> int:
    """Return the words in which the helpers tell `size` entries of h, for a weight with so many columns."""
    return size * (1 if columns <= WHOLE else triton.cdiv(columns, PIECE))


@triton.jit
def _told(inner_ptr, index, mask, step, COMPILED: tl.constexpr):
    """Return the numbers in the words at `index`, once all carry the number of the step; zero where `mask` is not."""
    at = inner_ptr + tl.where(mask, index, 0)
    if COMPILED:
        steps = tl.zeros(index.shape, tl.int32) + step
        told = tl.inline_asm_elementwise(
            WAIT, "=&l,l,r", [at.to(tl.int64), steps], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        told = tl.load(at)
    return tl.where(mask, told.to(tl.int32).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _told_of_two(
    inner_ptr, step, RANK: tl.constexpr, RANK_TILE: tl.constexpr, THREADS: tl.constexpr, COMPILED: tl.constexpr
):
    """Return the numbers [RANK_TILE] of the first part and of the second. Each thread waits for one word, not for
    several.
    """
    LANES: tl.constexpr = max(THREADS // (2 * RANK_TILE), 1)
    entries, lanes = tl.arange(0, 2 * RANK_TILE), tl.arange(0, LANES)
    part, rank = entries // RANK_TILE, entries % RANK_TILE
    some = (rank < RANK)[:, None] & (lanes == 0)[None, :]
    told = tl.sum(_told(inner_ptr, (part * RANK + rank)[:, None] + 0 * lanes[None, :], some, step, COMPILED), 1)
    both, parts = tl.reshape(told, [2, RANK_TILE]), tl.arange(0, 2)[:, None]
    return tl.sum(tl.where(parts == 0, both, 0.0), 0), tl.sum(tl.where(parts == 1, both, 0.0), 0)


@triton.jit
def _factor(b_ptr, rows, some, RANK: tl.constexpr, RANK_TILE: tl.constexpr):
    """Return rows of B [rows, RANK_TILE], zero where `some` is not."""
    ranks = tl.arange(0, RANK_TILE)
    at = b_ptr + rows[:, None] * RANK + ranks[None, :]
    return tl.load(at, mask=some[:, None] & (ranks < RANK)[None, :], other=0.0)


@triton.jit
def adapted_rows_kernel(
    x_ptr, post_norm_ptr, residual_ptr, sum_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, eps, ROWS, UP,
    slots_ptr, a_ptr, b_ptr, inner_ptr, step_ptr, a_stride, b_stride, workers, first_end, second_end,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HELPERS: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, THREADS: tl.constexpr, COMPILED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`single_row.whole_rows_kernel` with an adapter. The first HELPERS programs multiply a tile of A.

    workers: the programs that have tiles of W, of which the last have the most. TILES: at least as many as one has.
    """
    started = tl.program_id(0)
    helps, program = started < HELPERS, tl.num_programs(0) - 1 - started
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    slot = tl.load(slots_ptr)
    first_row, count, end = program * TILE, tl.cdiv(ROWS - program * TILE, workers * TILE), ROWS
    if helps:
        weight_ptr, first_row, count = a_ptr + slot * a_stride, started * TILE, 1
        end = tl.where(slot > 0, SIZE, 0)
    rows = first_row + tl.arange(0, TILE)
    at = weight_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    mask = (rows < end)[:, None] & inside[None, :]
    weight = tl.load(at, mask=mask, other=0.0)
    if GATED:
        up = tl.load(at + UP, mask=mask & (started >= HELPERS), other=0.0)
    wait_for_inputs(DEPENDENT)
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if post_norm_ptr is not None:
        scale = tl.load(post_norm_ptr + columns, mask=inside, other=0.0)
        x = normed(x, scale, eps, COLUMNS).to(kind).to(tl.float32)
    if ADD:
        total = (x + tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)).to(kind)
        if program == 0:
            tl.store(sum_ptr + columns, total, mask=inside)
        x = total.to(tl.float32)
    if NORM:
        scale = tl.load(norm_ptr + columns, mask=inside, other=0.0)
        x = normed(x, scale, eps, COLUMNS).to(kind).to(tl.float32)
    step = tl.load(step_ptr)
    tiles = tl.arange(0, TILES)
    sums = tl.zeros([TILES, TILE], tl.float32)
    if GATED:
        up_sums = tl.zeros([TILES, TILE], tl.float32)
    for tile in tl.range(0, count, num_stages=1):
        after = (program + (tile + 1) * workers) * TILE + tl.arange(0, TILE)
        at = weight_ptr + after.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        mask = ((after < ROWS) & (tile + 1 < count))[:, None] & inside[None, :]
        next_weight = tl.load(at, mask=mask, other=0.0)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        sums = tl.where((tiles == tile)[:, None], y[None, :], sums)
        weight = next_weight
        if GATED:
            next_up = tl.load(at + UP, mask=mask, other=0.0)
            y = tl.sum(up.to(tl.float32) * x[None, :], 1)
            up_sums = tl.where((tiles == tile)[:, None], y[None, :], up_sums)
            up = next_up
    y = tl.reshape(sums, [TILES * TILE])
    each, ranks = tl.arange(0, TILES * TILE), tl.arange(0, RANK_TILE)
    if helps:
        told = (each < TILE) & (first_row + each < end)
        tl.store(inner_ptr + first_row + each, packed(y, step), mask=told)
    else:
        asks = slot > 0
        own = (program + each // TILE * workers) * TILE + each % TILE  # all rows of this program
        b_ptr += slot * b_stride
        b = _factor(b_ptr, own, (own < ROWS) & asks, RANK, RANK_TILE)
        if GATED:
            factor = tl.reshape(up_sums, [TILES * TILE])
            up_b = _factor(b_ptr, ROWS + own, (own < ROWS) & asks, RANK, RANK_TILE)
            if asks:
                inner, up_inner = _told_of_two(inner_ptr, step, RANK, RANK_TILE, THREADS, COMPILED)
                y += tl.sum(b.to(tl.float32) * inner[None, :], 1)
                factor += tl.sum(up_b.to(tl.float32) * up_inner[None, :], 1)
        elif asks:
            part = (own >= first_end).to(tl.int32) + (own >= second_end).to(tl.int32)
            some = (own < ROWS)[:, None] & (ranks < RANK)[None, :]
            inner = _told(inner_ptr, part[:, None] * RANK + ranks[None, :], some, step, COMPILED)
            y += tl.sum(b.to(tl.float32) * inner, 1)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + own, mask=own < ROWS, other=0.0).to(tl.float32)
            if GATED:
                factor += tl.load(bias_ptr + ROWS + own, mask=own < ROWS, other=0.0).to(tl.float32)
        if GATED:
            y = activated(y, GELU) * factor
        tl.store(out_ptr + own, y.to(kind), mask=own < ROWS)


@triton.jit
def _piece(a_ptr, each, last, COLUMNS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """PIECE columns of a row of A, by the piece's number; zeros from the `last` one on."""
    columns = each % PIECES * PIECE + tl.arange(0, PIECE)
    return tl.load(a_ptr + each // PIECES * COLUMNS + columns, mask=(columns < COLUMNS) & (each < last), other=0.0)


@triton.jit
def adapted_long_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, ROWS, slots_ptr, a_ptr, b_ptr, inner_ptr, step_ptr, a_stride, b_stride,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, HELPERS: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr, PIECES_TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    COMPILED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`single_row.long_rows_kernel` with an adapter. The first HELPERS programs multiply pieces of A's rows, too."""
    program = tl.program_id(0)
    rows = program * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    real = (rows < ROWS)[:, None]
    at = weight_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    weight = tl.load(at, mask=real & (columns < COLUMNS)[None, :], other=0.0)
    slot = tl.load(slots_ptr)
    a_ptr += slot * a_stride
    last = tl.where((slot > 0) & (program < HELPERS), RANK * PIECES, 0)
    a = _piece(a_ptr, program, last, COLUMNS, PIECE, PIECES)
    wait_for_inputs(DEPENDENT)
    step = tl.load(step_ptr)
    for each in tl.range(program, last, HELPERS, num_stages=1):
        next_a = _piece(a_ptr, each + HELPERS, last, COLUMNS, PIECE, PIECES)
        few = each % PIECES * PIECE + tl.arange(0, PIECE)
        x = tl.load(x_ptr + few, mask=few < COLUMNS, other=0.0).to(tl.float32)
        tl.store(inner_ptr + each, packed(tl.sum(a.to(tl.float32) * x), step))
        a = next_a
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for start in tl.range(0, COLUMNS, WIDTH, num_stages=1):
        after = start + WIDTH
        next_weight = tl.load(at + after, mask=real & (after + columns < COLUMNS)[None, :], other=0.0)
        x = tl.load(x_ptr + start + columns, mask=start + columns < COLUMNS, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        weight = next_weight
    y = tl.sum(total, 1)
    b = _factor(b_ptr + slot * b_stride, rows, (rows < ROWS) & (slot > 0), RANK, RANK_TILE)
    if slot > 0:
        ranks, pieces = tl.arange(0, RANK_TILE)[:, None], tl.arange(0, PIECES_TILE)[None, :]
        some = (ranks < RANK) & (pieces < PIECES)
        inner = tl.sum(_told(inner_ptr, ranks * PIECES + pieces, some, step, COMPILED), 1)
        y += tl.sum(b.to(tl.float32) * inner[None, :], 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < ROWS)


def workers_of(tiles: int, programs: int, helpers: int) -> int:
    """Return how many programs have tiles of W, where `programs` run at once and `helpers` run along with the others.

    If a program has several tiles, all have equally many: they end at about the same time anyway, since they wait for
    h, and fewer programs leave the next kernel room to start early. Helpers end soon, so where they are many, they take
    the place of a quarter of the others at most.
    """
    most = programs if tiles <= programs else programs - min(helpers, programs // 4)
    return triton.cdiv(tiles, triton.cdiv(tiles, most))


def _registers(dtype: torch.dtype, warps: int, together: int) -> int | None:
    """Return the most registers of a thread with which so many programs run on one processor at a time; None: any
    number.
    """
    if dtype.itemsize > 2:  # tiles take so many that they would be in memory instead
        return None
    return min(max(REGISTERS // (32 * warps * together) // 8 * 8, 64), 248)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    term: LowRankTerm,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    post_norm: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`single_row.product`, which explains the other arguments, plus what the row's adapter adds.  Lesson 15.

    With an activation, the term has two parts, gate and up. Raises ValueError for more than MOST_PARTS parts, and for
    more than WHOLE columns with what is fused or several parts.
    """
    slots, down, up, ends, inner, step = term
    if len(ends) > MOST_PARTS:
        raise ValueError(f"a weight of {len(ends)} parts has more than {MOST_PARTS}: add to it in torch")
    weight = weight.contiguous()  # no copy on a GPU, where weights are contiguous
    columns = weight.shape[1]
    rows = weight.shape[0] // (2 if activation else 1)
    (_, size, _), rank = down.shape, up.shape[2]
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x) if residual is not None else None
    sizes: dict[str, int | str] = {"rows": rows, "columns": columns, "dtype": launch_configs.dtype_name(x.dtype)}
    factors = (slots, down, up, inner, step, down.stride(0), up.stride(0))
    constants = {"RANK": rank, "RANK_TILE": triton.next_power_of_2(rank), "COMPILED": is_compiled(x)}
    constants |= dependent_launch(x.device)
    fused = any(each is not None for each in (norm, residual, post_norm, activation))
    if columns > WHOLE and (fused or len(ends) > 1):
        raise ValueError(f"rows of {columns} columns are longer than {WHOLE}: apply what is fused separately")
    if columns <= WHOLE:
        first, second = (*ends[:-1], rows, rows)[:2]
        default = whole_config(rows, columns, bool(activation), processors(x.device))
        config = launch_configs.tuned("whole_rows", default, **sizes, gated=int(bool(activation)))
        helpers, tiles = triton.cdiv(size, config.tile), triton.cdiv(rows, config.tile)
        workers = workers_of(tiles, config.programs, helpers)
        together = triton.cdiv(helpers + workers, processors(x.device))
        adapted_rows_kernel[(helpers + workers,)](
            x, post_norm, residual, total, norm, weight, bias, out, eps, rows, rows * columns, *factors,
            workers, first, second,
            COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), TILE=config.tile, NORM=norm is not None,
            ADD=residual is not None, GATED=activation is not None, GELU=activation == "gelu_tanh", HELPERS=helpers,
            TILES=triton.next_power_of_2(triton.cdiv(tiles, workers)), SIZE=size,
            THREADS=32 * config.warps, num_warps=config.warps,
            maxnreg=_registers(x.dtype, config.warps, together), **constants,
        )  # fmt: skip
    else:
        piece = launch_configs.tuned("long_rows", long_config(rows, processors(x.device)), **sizes)
        programs, pieces = triton.cdiv(rows, piece.tile), triton.cdiv(columns, PIECE)
        # Interpreted, a program asks before the next one tells: the second run finds all.
        for _ in range(1 if is_compiled(x) else 2):
            adapted_long_rows_kernel[(programs,)](
                x, weight, bias, out, rows, *factors, COLUMNS=columns, WIDTH=piece.width, TILE=piece.tile,
                HELPERS=min(programs, processors(x.device)), PIECE=PIECE, PIECES=pieces,
                PIECES_TILE=triton.next_power_of_2(pieces), num_warps=piece.warps,
                maxnreg=LONG_REGISTERS if x.dtype.itemsize == 2 else None, **constants,
            )  # fmt: skip
    return out, total
