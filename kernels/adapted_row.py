"""The products of `single_row` with what the row's adapter adds to them, in the same launches.  Lessons 11 and 15.

    h = A f(x),   one after another for each part of the weight (queries, keys, values)
    y[row] = W[row] . f(x) + B[row] . h[part of the row]

Hu et al. 2021, "LoRA", section 4.1. A and B are thin, so their bytes are few, but with a launch for each a layer of
five launches would have thirteen. Here the first programs of a launch, its *helpers*, multiply a few rows of A instead
of W, and every other program adds its rows of B times h to its sums before bias, activation and rounding. The helpers
tell h in 8-byte words that carry the number of the step, as GPUs tell each other parts of a sum (`peers`): a program
that sees this step's number has h. Programs multiply all their rows of W before they ask for it, and h is known by then
unless these are very few.

Helpers wait for nothing but the previous kernel, and a GPU starts programs in the order of their numbers. So those that
wait for h never keep the helpers from running, however few programs fit on the chip at a time. (NVIDIA's CUB relies on
that order, too: "Blocks are launched in increasing order", agent_scan.cuh.) All sums are in a fixed order. The slot of
the row's adapter is read on the device, so one captured graph serves all adapters; slot 0 is none: then nothing of A
and B is read, and nobody waits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launch_configs
from .low_rank import MOST_PARTS
from .peers import packed, received
from .single_row import WHOLE, long_config, whole_config
from .single_row_parts import activated, dependent_launch, normed, processors, wait_for_inputs

REGISTERS = 65536  # of a processor
LONG_HELPERS = 8  # at least, if h has as many entries: rows of A that do not fit into registers take long


class LowRankTerm(NamedTuple):
    """What adapters add to the product of one weight, and where the programs of its launch exchange h."""

    slots: torch.Tensor  # [1] int64: the slot of the row's adapter; 0: none
    down: torch.Tensor  # [all, parts * rank, in]: each part's A, one after another
    up: torch.Tensor  # [all, out, rank]: B
    ends: tuple[int, ...]  # where the rows of each part end
    inner: torch.Tensor  # [parts * rank] int64, of this weight alone: h in words with the number of the step
    step: torch.Tensor  # [1] int32: that number, which no earlier step had; not 0


@triton.jit
def _factor(b_ptr, rows, some, RANK: tl.constexpr, RANK_TILE: tl.constexpr):
    """Rows of B [rows, RANK_TILE], zero where `some` is not."""
    ranks = tl.arange(0, RANK_TILE)
    at = b_ptr + rows[:, None] * RANK + ranks[None, :]
    return tl.load(at, mask=some[:, None] & (ranks < RANK)[None, :], other=0.0)


@triton.jit
def _added(b, inner_ptr, step, part, some, RANK: tl.constexpr, RANK_TILE: tl.constexpr):
    """Rows of B [rows, RANK_TILE] times the part of h that each multiplies, once the helpers have told it."""
    ranks = tl.arange(0, RANK_TILE)
    mask = some[:, None] & (ranks < RANK)[None, :]
    inner = received(inner_ptr, part[:, None] * RANK + ranks[None, :], mask, step, 0, 1)
    return tl.sum(b.to(tl.float32) * inner, 1)


@triton.jit
def adapted_rows_kernel(
    x_ptr, post_norm_ptr, residual_ptr, sum_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, eps, ROWS, UP,
    slots_ptr, a_ptr, b_ptr, inner_ptr, step_ptr, a_stride, b_stride, first_end, second_end,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HELPERS: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`single_row.whole_rows_kernel`, in which the first HELPERS programs compute h.

    TILES: at least as many as a program multiplies. Their sums stay in registers until h is added to all at once.
    """
    program, programs = tl.program_id(0) - HELPERS, tl.num_programs(0) - HELPERS
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    slot = tl.load(slots_ptr)
    rows, end, matrix_ptr = program * TILE + tl.arange(0, TILE), ROWS, weight_ptr
    if program < 0:
        rows += HELPERS * TILE
        end, matrix_ptr = tl.where(slot > 0, SIZE, 0), a_ptr + slot * a_stride
    at = matrix_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    mask = (rows < end)[:, None] & inside[None, :]
    weight = tl.load(at, mask=mask, other=0.0)
    if GATED:
        up = tl.load(at + UP, mask=mask & (program >= 0), other=0.0)
    each = tl.arange(0, TILES * TILE)
    own = (program + each // TILE * programs) * TILE + each % TILE  # all rows of this program
    real = (own < ROWS) & (program >= 0)
    b_ptr += slot * b_stride
    b = _factor(b_ptr, own, real & (slot > 0), RANK, RANK_TILE)
    if GATED:
        up_b = _factor(b_ptr, ROWS + own, real & (slot > 0), RANK, RANK_TILE)
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
    if program < 0:
        tl.store(inner_ptr + rows, packed(tl.sum(weight.to(tl.float32) * x[None, :], 1), step), mask=rows < end)
        return
    tiles = tl.arange(0, TILES)
    sums = tl.zeros([TILES, TILE], tl.float32)
    if GATED:
        up_sums = tl.zeros([TILES, TILE], tl.float32)
    for tile in tl.range(0, tl.cdiv(ROWS - program * TILE, programs * TILE), num_stages=1):
        after = (program + (tile + 1) * programs) * TILE + tl.arange(0, TILE)
        at = weight_ptr + after.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        mask = (after < ROWS)[:, None] & inside[None, :]
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
    if GATED:
        factor = tl.reshape(up_sums, [TILES * TILE])
        if slot > 0:
            y += _added(b, inner_ptr, step, tl.zeros_like(own), real, RANK, RANK_TILE)
            factor += _added(up_b, inner_ptr, step, tl.zeros_like(own) + 1, real, RANK, RANK_TILE)
    elif slot > 0:
        part = (own >= first_end).to(tl.int32) + (own >= second_end).to(tl.int32)
        y += _added(b, inner_ptr, step, part, real, RANK, RANK_TILE)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + own, mask=real, other=0.0).to(tl.float32)
        if GATED:
            factor += tl.load(bias_ptr + ROWS + own, mask=real, other=0.0).to(tl.float32)
    if GATED:
        y = activated(y, GELU) * factor
    tl.store(out_ptr + own, y.to(kind), mask=real)


@triton.jit
def adapted_long_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, ROWS,
    slots_ptr, a_ptr, b_ptr, inner_ptr, step_ptr, a_stride, b_stride, first_end, second_end,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, HELPERS: tl.constexpr, SHARE: tl.constexpr,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`single_row.long_rows_kernel`, in which the first HELPERS programs compute SHARE entries of h each."""
    program = tl.program_id(0) - HELPERS
    each, columns = tl.arange(0, TILE), tl.arange(0, WIDTH)
    slot = tl.load(slots_ptr)
    rows, end, matrix_ptr = program * TILE + each, ROWS, weight_ptr
    if program < 0:
        first = (program + HELPERS) * SHARE
        rows, end = first + each, tl.where(slot > 0, tl.minimum(first + SHARE, SIZE), 0)
        matrix_ptr = a_ptr + slot * a_stride
    real = (rows < end)[:, None]
    at = matrix_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    weight = tl.load(at, mask=real & (columns < COLUMNS)[None, :], other=0.0)
    some = (rows < ROWS) & (program >= 0) & (slot > 0)
    b = _factor(b_ptr + slot * b_stride, rows, some, RANK, RANK_TILE)
    wait_for_inputs(DEPENDENT)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for start in tl.range(0, COLUMNS, WIDTH, num_stages=1):
        after = start + WIDTH
        next_weight = tl.load(at + after, mask=real & (after + columns < COLUMNS)[None, :], other=0.0)
        x = tl.load(x_ptr + start + columns, mask=start + columns < COLUMNS, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        weight = next_weight
    y = tl.sum(total, 1)
    step = tl.load(step_ptr)
    if program < 0:
        tl.store(inner_ptr + rows, packed(y, step), mask=rows < end)
        return
    if slot > 0:
        part = (rows >= first_end).to(tl.int32) + (rows >= second_end).to(tl.int32)
        y += _added(b, inner_ptr, step, part, rows < ROWS, RANK, RANK_TILE)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < ROWS)


def _registers(dtype: torch.dtype, warps: int, together: int) -> int | None:
    """The most registers of a thread with which so many programs run on one processor at a time; None: any number."""
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
    more than WHOLE columns with what is fused.
    """
    slots, down, up, ends, inner, step = term
    if len(ends) > MOST_PARTS:
        raise ValueError(f"a weight of {len(ends)} parts has more than {MOST_PARTS}: add to it in torch")
    weight = weight.contiguous()  # no copy on a GPU, where weights are contiguous
    columns = weight.shape[1]
    rows = weight.shape[0] // (2 if activation else 1)
    (_, size, _), rank = down.shape, up.shape[2]
    first, second = (*ends[:-1], rows, rows)[:2]
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x) if residual is not None else None
    sizes: dict[str, int | str] = {"rows": rows, "columns": columns, "dtype": launch_configs.dtype_name(x.dtype)}
    factors = (slots, down, up, inner, step, down.stride(0), up.stride(0), first, second)
    constants = {"SIZE": size, "RANK": rank, "RANK_TILE": triton.next_power_of_2(rank), **dependent_launch(x.device)}
    if columns > WHOLE and any(each is not None for each in (norm, residual, post_norm, activation)):
        raise ValueError(f"rows of {columns} columns are longer than {WHOLE}: apply what is fused separately")
    if columns <= WHOLE:
        default = whole_config(rows, columns, bool(activation), processors(x.device))
        config = launch_configs.tuned("whole_rows", default, **sizes, gated=int(bool(activation)))
        helpers, programs = triton.cdiv(size, config.tile), config.programs
        if programs * config.tile < rows:  # as many as fit on the chip: helpers take the place of others
            programs = max(programs - helpers, programs // 2)
        tiles = triton.next_power_of_2(triton.cdiv(rows, config.tile * programs))
        together = triton.cdiv(helpers + programs, processors(x.device))
        adapted_rows_kernel[(helpers + programs,)](
            x, post_norm, residual, total, norm, weight, bias, out, eps, rows, rows * columns, *factors,
            COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), TILE=config.tile, NORM=norm is not None,
            ADD=residual is not None, GATED=activation is not None, GELU=activation == "gelu_tanh", HELPERS=helpers,
            TILES=tiles, num_warps=config.warps, maxnreg=_registers(x.dtype, config.warps, together), **constants,
        )  # fmt: skip
    else:
        piece = launch_configs.tuned("long_rows", long_config(rows, processors(x.device)), **sizes)
        share = min(piece.tile, triton.cdiv(size, LONG_HELPERS))
        helpers = triton.cdiv(size, share)
        programs = helpers + triton.cdiv(rows, piece.tile)
        together = triton.cdiv(programs, processors(x.device))
        adapted_long_rows_kernel[(programs,)](
            x, weight, bias, out, rows, *factors, COLUMNS=columns, WIDTH=piece.width, TILE=piece.tile,
            HELPERS=helpers, SHARE=share, num_warps=piece.warps,
            maxnreg=_registers(x.dtype, piece.warps, together), **constants,
        )  # fmt: skip
    return out, total
