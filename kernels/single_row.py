"""One row through a decoder layer in five launches, each started before the last one ends.  Lesson 03.

A decode step of one request reads every weight for one token: the floor is their bytes over the memory's speed, and
what stands above it is everything that is not reading. Layer by layer that is some eleven launches, each of which
drains the chip and fills it again. Here a layer is five:

    1  norm, QKV product           4  residual sum, norm, gate and up products, activation
    2  rotary, cache, attention    5  down product
    3  output product

and norms, sums and activations cost no trip through memory. Between the launches there is **programmatic dependent
launch** (CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0): a
kernel starts while the one before it still runs, fetches its first weights, which depend on nobody, and only then
waits for the other's output. So the memory never falls idle.

Tiling of a product y = W x with one x: no element of W is used twice, so there is nothing to tile for; what counts is
that enough bytes are in flight. A program takes a few rows of W at a time, whole rows if they fit, and goes on to its
next rows while it still adds up the last. x is read, summed, normed once a program and stays in registers.

Attention is `paged_attention`'s, with the new key and value taken from the QKV product instead of the cache. A row's
keys go to as many programs as its length asks for; the last of them to finish adds the parts up.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .paged_attention import LOG2E, _attend, _product_type

WHOLE = 4096  # columns up to which a program holds whole rows
SHARE = 128  # keys from which another program helps
MOST_SHARES = 64


@triton.jit
def _wait_for_inputs(DEPENDENT: tl.constexpr):
    """Until the kernel before has written everything; then the next one may start to wait in turn."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def whole_rows_kernel(
    x_ptr, residual_ptr, sum_ptr, norm_ptr, weight_ptr, out_ptr, eps, ROWS, UP,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = W f(x), rows of W at a time; f is nothing, a norm, or a residual sum and a norm; GATED: two W's, gated."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    rows = program * TILE + tl.arange(0, TILE)
    at = weight_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    mask = (rows < ROWS)[:, None] & inside[None, :]
    weight = tl.load(at, mask=mask, other=0.0)
    if GATED:
        up = tl.load(at + UP, mask=mask, other=0.0)
    _wait_for_inputs(DEPENDENT)
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)).to(kind)
        if program == 0:
            tl.store(sum_ptr + columns, total, mask=inside)
        x = total.to(tl.float32)
    if NORM:
        scale = tl.load(norm_ptr + columns, mask=inside, other=0.0)
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + eps) * scale).to(kind).to(tl.float32)
    for first in tl.range(program * TILE, ROWS, programs * TILE, num_stages=1):
        rows = first + tl.arange(0, TILE)
        after = rows + programs * TILE
        at = weight_ptr + after.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        mask = (after < ROWS)[:, None] & inside[None, :]
        next_weight = tl.load(at, mask=mask, other=0.0)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        weight = next_weight
        if GATED:
            next_up = tl.load(at + UP, mask=mask, other=0.0)
            factor = tl.sum(up.to(tl.float32) * x[None, :], 1)
            up = next_up
            slope = 1.0
            if GELU:
                slope = 1.5957691216057308 * (1.0 + 0.044715 * y * y)  # 2 * sqrt(2 / pi)
            y = y * tl.sigmoid(y * slope) * factor
        tl.store(out_ptr + rows, y.to(kind), mask=rows < ROWS)


@triton.jit
def long_rows_kernel(
    x_ptr, weight_ptr, out_ptr, ROWS,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = W x where a row of W is too long to hold: piece by piece."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    real = (rows < ROWS)[:, None]
    at = weight_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    weight = tl.load(at, mask=real & (columns < COLUMNS)[None, :], other=0.0)
    _wait_for_inputs(DEPENDENT)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for start in tl.range(0, COLUMNS, WIDTH, num_stages=1):
        after = start + WIDTH
        next_weight = tl.load(at + after, mask=real & (after + columns < COLUMNS)[None, :], other=0.0)
        x = tl.load(x_ptr + start + columns, mask=start + columns < COLUMNS, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        weight = next_weight
    tl.store(out_ptr + rows, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=rows < ROWS)


@triton.jit
def _turned(x_ptr, at, cos_sin_ptr, dims, mask, HALF: tl.constexpr, PRODUCT: tl.constexpr):
    """x cos + roll(x) sin, rounded as the rotary kernel's output is."""
    x = tl.load(x_ptr + at + dims, mask=mask, other=0.0).to(tl.float32)
    rolled = tl.load(x_ptr + at + (dims + HALF) % (2 * HALF), mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + dims).to(tl.float32)
    sin = tl.load(cos_sin_ptr + 2 * HALF + dims).to(tl.float32)
    return (x * cos + rolled * sin).to(x_ptr.dtype.element_ty).to(PRODUCT)


@triton.jit
def row_attention_kernel(
    qkv_ptr, cos_sin_ptr, k_ptr, v_ptr, table_ptr, length_ptr, part_ptr, log_total_ptr, finished_ptr, out_ptr, scale,
    block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, SHARE: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRODUCT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    kv_head, kv_heads, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    length = tl.load(length_ptr)
    parts = tl.minimum(tl.maximum(tl.cdiv(length, SHARE), 1), MOST)
    _wait_for_inputs(DEPENDENT)
    if part >= parts:
        return
    kind = out_ptr.dtype.element_ty
    packed = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    real = packed < GROUP
    head = kv_head * GROUP + packed
    q = _turned(qkv_ptr, head[:, None] * DIM, cos_sin_ptr, dims[None, :], real[:, None], DIM // 2, PRODUCT)

    newest = length - 1
    share = tl.cdiv(length, parts * KEYS) * KEYS
    begin = part * share
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    out, maximum, total = _attend(
        q, newest + tl.zeros([ROWS], tl.int32), begin, tl.minimum(begin + share, newest), k_ptr, v_ptr, table_ptr,
        scale, block_stride, slot_stride, ROWS, KEYS, DIM, BLOCK_SIZE, 0, 0.0,
    )  # fmt: skip
    if (begin <= newest) & (newest < begin + share):
        heads = kv_heads * GROUP
        k = _turned(qkv_ptr, (heads + kv_head) * DIM, cos_sin_ptr, dims, dims < DIM, DIM // 2, PRODUCT)
        v = tl.load(qkv_ptr + (heads + kv_heads + kv_head) * DIM + dims)
        block = tl.load(table_ptr + newest // BLOCK_SIZE).to(tl.int64)
        slot = block * block_stride + (newest % BLOCK_SIZE) * slot_stride
        tl.store(k_ptr + slot + dims, k.to(k_ptr.dtype.element_ty))
        tl.store(v_ptr + slot + dims, v)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale * LOG2E
        new_maximum = tl.maximum(maximum, score)
        rescale, weight = tl.exp2(maximum - new_maximum), tl.exp2(score - new_maximum)
        total = total * rescale + weight
        out = out * rescale[:, None] + weight[:, None] * v.to(tl.float32)[None, :]
        maximum = new_maximum
    total = tl.where(maximum == float("-inf"), 1.0, total)
    out = out / total[:, None]
    at = head[:, None] * DIM + dims[None, :]
    if parts == 1:
        tl.store(out_ptr + at, out.to(kind), mask=real[:, None])
        return
    stride = kv_heads * GROUP
    tl.store(part_ptr + part * stride * DIM + at, out, mask=real[:, None])
    tl.store(log_total_ptr + part * stride + head, maximum + tl.log2(total), mask=real)
    tl.debug_barrier()  # all of this program's parts are written before it says so
    if tl.atomic_add(finished_ptr + kv_head, 1, sem="acq_rel") == parts - 1:
        tl.store(finished_ptr + kv_head, 0)
        out = tl.zeros([ROWS, DIM], tl.float32)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for other in range(parts):
            log_total = tl.load(log_total_ptr + other * stride + head, mask=real, other=0.0)
            new_maximum = tl.maximum(maximum, log_total)
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            rescale, weight = tl.exp2(maximum - shift), tl.exp2(log_total - shift)
            total = total * rescale + weight
            theirs = tl.load(part_ptr + other * stride * DIM + at, mask=real[:, None], other=0.0)
            out = out * rescale[:, None] + weight[:, None] * theirs
            maximum = new_maximum
        tl.store(out_ptr + at, (out / total[:, None]).to(kind), mask=real[:, None])


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight f(x), the residual sum) for one row x [1, columns].  Lesson 03.

    weight [rows, columns]. f: nothing; with `norm` [columns] float32, x normed; with `residual` [1, columns] too, the
    norm of their sum, which is returned as well. activation ("gelu_tanh" or "silu"): weight is [2 * rows, columns],
    gate first, and the result activation(gate) * up [1, rows].
    """
    weight = weight.contiguous()  # on a GPU it is already
    columns = weight.shape[1]
    rows = weight.shape[0] // (2 if activation else 1)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x) if residual is not None else None
    dependent = _dependent(x.device)
    options = {"launch_pdl": True} if dependent else {}
    if columns <= WHOLE:
        launch = whole_launch(rows, columns, bool(activation), _processors(x.device))
        whole_rows_kernel[(launch.programs,)](
            x, residual, total, norm, weight, out, eps, rows, rows * columns,
            COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), TILE=launch.tile, NORM=norm is not None,
            ADD=residual is not None, GATED=activation is not None, GELU=activation == "gelu_tanh",
            DEPENDENT=dependent, num_warps=launch.warps, **options,
        )  # fmt: skip
    else:
        if norm is not None or residual is not None or activation:
            raise ValueError(f"rows of {columns} columns do not fit a program whole: norm and gate them by themselves")
        long_rows_kernel[(triton.cdiv(rows, 8),)](
            x, weight, out, rows, COLUMNS=columns, WIDTH=1024, TILE=8, DEPENDENT=dependent, num_warps=8, **options
        )
    return out, total


class RowAttention:
    """Rotary embedding, cache write and attention of one row, in one launch; keeps the workspace for the parts."""

    def __init__(self, heads: int, kv_heads: int, dim: int, device: torch.device):
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.parts = torch.empty((MOST_SHARES, heads, dim), dtype=torch.float32, device=device)
        self.log_total = torch.empty((MOST_SHARES, heads), dtype=torch.float32, device=device)
        self.finished = torch.zeros(kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        length: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """qkv [1, (heads + 2 kv_heads) d] -> [1, heads d].  Lesson 04.

        cos_sin [1, 2, d] at the row's position; caches [blocks, block_size, kv_heads, d]; block_table [1, blocks],
        length [1] int32, the new token included: its key and value are written to the cache here.
        """
        out = torch.empty((1, self.heads * self.dim), dtype=qkv.dtype, device=qkv.device)
        group = self.heads // self.kv_heads
        dependent = _dependent(qkv.device)
        options = {"launch_pdl": True} if dependent else {}
        longest = block_table.shape[1] * k_cache.shape[1]
        most = min(max(longest // SHARE, 1), MOST_SHARES)
        row_attention_kernel[(self.kv_heads, most)](
            qkv, cos_sin, k_cache, v_cache, block_table, length, self.parts, self.log_total, self.finished, out, scale,
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            GROUP=group, SHARE=SHARE, MOST=most, ROWS=max(16, triton.next_power_of_2(group)),
            KEYS=min(16384 // self.dim, 128), DIM=self.dim, BLOCK_SIZE=k_cache.shape[1],
            PRODUCT=_product_type(qkv.dtype), DEPENDENT=dependent,
            num_warps=4, num_stages=2, **options,
        )  # fmt: skip
        return out


class Launch(NamedTuple):
    programs: int
    tile: int  # rows of the matrix a program works on at once
    warps: int


def whole_launch(rows: int, columns: int, gated: bool, processors: int) -> Launch:
    """Tiles of 32 KiB at most, four programs a processor, more for the head: the fastest of some 90 on an H200."""
    tile = max(1, min(16, 8192 // triton.next_power_of_2(columns)))
    if rows > 256 * processors:
        return Launch(min(6 * processors, triton.cdiv(rows, tile)), max(tile // 2, 1), 8)
    if gated:
        tile = max(tile // 2, 1)
    return Launch(min(4 * processors, triton.cdiv(rows, tile)), tile, 4)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def _dependent(device: torch.device) -> bool:
    """Programmatic dependent launch came with compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
