"""One row through a decoder layer in five launches, each of which starts before the previous one ends.  Lesson 11.

A decode step of one request reads every weight for one token. Its floor is the weights' bytes divided by the memory's
bandwidth; all other time is overhead. With the kernels for any number of rows a layer takes some ten launches, and
between two of them the chip runs empty. Here a layer takes five:

    1  norm, QKV product           4  residual sum, norm, gate and up products, activation
    2  rotary, cache, attention    5  down product
    3  output product

so the inputs and outputs of norms, sums and activations stay in registers. A norm of attention's or the MLP's output
(Gemma 2 and 3) is computed where that is added to the residual, norms of queries and keys (Qwen 3, Gemma 3) in launch
2. Launches overlap by **programmatic dependent launch** (CUDA programming guide, "Programmatic Dependent Launch and
Synchronization"; compute capability 9.0): a kernel starts while the previous one still runs, loads its first weights,
which depend on no kernel, and only then waits for the previous kernel's output. So memory reads never stop.

Tiling of a product y = W x with a single x: no element of W is used twice, so tiling saves no reads; what matters is
that enough bytes are in flight. A program takes a few rows of W at a time, full rows if they fit, and loads its next
rows while it adds up the current ones. Each program reads, adds and normalizes x once and keeps it in registers.

Attention takes the new key and value from the QKV product and writes them to the cache. As many programs as the row's
length needs share a head's keys, and the last of them to finish combines their partial outputs. Each program has one
head. Heads that share keys read them again, from the L2 cache, which is faster than fewer programs with all heads.

A row with an adapter takes five launches, too: `adapted_row` has its products.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launch_configs
from .arguments import AttentionArguments, CacheArguments
from .cache_codes import LARGEST, rounded_head, stored, to_numbers
from .paged_attention import LOG2E, product_type
from .peers import Outbox, send
from .single_row_parts import RowsConfig, activated, capped, dependent_launch, normed, processors, wait_for_inputs

WHOLE = 4096  # a program holds full rows of up to this many columns
PARTS = 16  # most programs that share a head's keys
TILE = 2048  # elements of keys, and of values, that each warp of a program holds in registers


@triton.jit
def whole_rows_kernel(
    x_ptr, post_norm_ptr, residual_ptr, sum_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, eps, ROWS, UP,
    peers_ptr, epoch_ptr, offset,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, SOFT_CAP: tl.constexpr, DEPENDENT: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """out = W f(x), a few full rows of W at a time. f: nothing, a norm, or residual sum and norm. GATED: two W's.

    RANKS: how many ranks the results are sent to, as parts of a sum. 0: they are stored.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    rows = program * TILE + tl.arange(0, TILE)
    at = weight_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    mask = (rows < ROWS)[:, None] & inside[None, :]
    weight = tl.load(at, mask=mask, other=0.0)
    if GATED:
        up = tl.load(at + UP, mask=mask, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0)
        if GATED:
            up_bias = tl.load(bias_ptr + ROWS + rows, mask=rows < ROWS, other=0.0)
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
    for first in tl.range(program * TILE, ROWS, programs * TILE, num_stages=1):
        rows = first + tl.arange(0, TILE)
        after = rows + programs * TILE
        at = weight_ptr + after.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        mask = (after < ROWS)[:, None] & inside[None, :]
        next_weight = tl.load(at, mask=mask, other=0.0)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        weight = next_weight
        if bias_ptr is not None:
            y += bias.to(tl.float32)
            bias = tl.load(bias_ptr + after, mask=after < ROWS, other=0.0)
        if GATED:
            next_up = tl.load(at + UP, mask=mask, other=0.0)
            factor = tl.sum(up.to(tl.float32) * x[None, :], 1)
            up = next_up
            if bias_ptr is not None:
                factor += up_bias.to(tl.float32)
                up_bias = tl.load(bias_ptr + ROWS + after, mask=after < ROWS, other=0.0)
            y = activated(y, GELU) * factor
        if RANKS > 0:
            send(peers_ptr, offset + rows, y, rows < ROWS, tl.load(epoch_ptr), RANKS)
        else:
            tl.store(out_ptr + rows, capped(y, SOFT_CAP).to(kind), mask=rows < ROWS)


@triton.jit
def long_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, ROWS, peers_ptr, epoch_ptr, offset,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """out = W x for rows of W that do not fit into registers: piece by piece. RANKS: see `whole_rows_kernel`."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    real = (rows < ROWS)[:, None]
    at = weight_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    weight = tl.load(at, mask=real & (columns < COLUMNS)[None, :], other=0.0)
    wait_for_inputs(DEPENDENT)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for start in tl.range(0, COLUMNS, WIDTH, num_stages=1):
        after = start + WIDTH
        next_weight = tl.load(at + after, mask=real & (after + columns < COLUMNS)[None, :], other=0.0)
        x = tl.load(x_ptr + start + columns, mask=start + columns < COLUMNS, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        weight = next_weight
    y = tl.sum(total, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
    if RANKS > 0:
        send(peers_ptr, offset + rows, y, rows < ROWS, tl.load(epoch_ptr), RANKS)
    else:
        tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < ROWS)


@triton.jit
def _rotated(x_ptr, norm_ptr, eps, cos, sin, dims, HALF: tl.constexpr):
    """x cos + roll(x) sin, of x or its norm, rounded like the outputs of the norm's kernel and of the rotary one."""
    kind = x_ptr.dtype.element_ty
    other = (dims + HALF) % (2 * HALF)
    x, rolled = tl.load(x_ptr + dims).to(tl.float32), tl.load(x_ptr + other).to(tl.float32)
    if norm_ptr is not None:
        scale, rolled_scale = tl.load(norm_ptr + dims), tl.load(norm_ptr + other)
        factor = tl.rsqrt(tl.sum(x * x) / (2 * HALF) + eps)
        x = (x * factor * scale).to(kind).to(tl.float32)
        rolled = (rolled * factor * rolled_scale).to(kind).to(tl.float32)
    return (x * cos + rolled * sin).to(kind).to(tl.float32)


@triton.jit
def _tile(k_ptr, v_ptr, table_ptr, start, end, block_stride, slot_stride, dims, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """Keys and values start..end-1 [KEYS, DIM], followed by zeros."""
    keys = start + tl.arange(0, KEYS)
    present = keys < end
    block = tl.load(table_ptr + keys // SIZE, mask=present, other=0).to(tl.int64)
    at = (block * block_stride + (keys % SIZE) * slot_stride)[:, None] + dims[None, :]
    mask = present[:, None]
    return tl.load(k_ptr + at, mask=mask, other=0.0), tl.load(v_ptr + at, mask=mask, other=0.0)


@triton.jit
def _scales(k_ptr, v_ptr, table_ptr, start, end, kv_heads, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """Return the scales of these keys and values [KEYS]."""
    keys = start + tl.arange(0, KEYS)
    present = keys < end
    block = tl.load(table_ptr + keys // SIZE, mask=present, other=0).to(tl.int64)
    at = (block * SIZE + keys % SIZE) * kv_heads
    return tl.load(k_ptr + at, mask=present, other=0.0), tl.load(v_ptr + at, mask=present, other=0.0)


@triton.jit
def row_attention_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr,
    part_ptr, log_total_ptr, finished_ptr, out_ptr, scale, eps, block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, WIDE: tl.constexpr, LARGEST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, heads, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    kv_head, kv_heads = head // GROUP, heads // GROUP
    dims = tl.arange(0, DIM)
    length = tl.load(length_ptr)
    newest = length - 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    tiles = tl.cdiv(length - first, KEYS)
    parts = tl.maximum(tl.minimum(tiles, PARTS), 1)
    share = tl.cdiv(tiles, parts) * KEYS
    begin = first + part * share
    end = tl.minimum(begin + share, newest)
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    # Earlier tokens' keys and values, and the angles of this one, do not depend on the previous kernel.
    angles = cos_sin_ptr + tl.maximum(newest, 0) * (2 * DIM) + dims
    cos, sin = tl.load(angles).to(tl.float32), tl.load(angles + DIM).to(tl.float32)
    k, v = _tile(k_ptr, v_ptr, table_ptr, begin, end, block_stride, slot_stride, dims, KEYS, BLOCK_SIZE)
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head
        v_scale_ptr += kv_head
        k_scale, v_scale = _scales(k_scale_ptr, v_scale_ptr, table_ptr, begin, end, kv_heads, KEYS, BLOCK_SIZE)
    wait_for_inputs(DEPENDENT)
    if part >= parts:
        return
    q = _rotated(qkv_ptr + head * DIM, q_norm_ptr, eps, cos, sin, dims, DIM // 2)
    maximum, total = float("-inf"), 0.0
    out = tl.zeros([DIM], tl.float32)
    for start in tl.range(begin, end, KEYS, num_stages=1):
        next_k, next_v = _tile(
            k_ptr, v_ptr, table_ptr, start + KEYS, end, block_stride, slot_stride, dims, KEYS, BLOCK_SIZE
        )
        scores = tl.sum(to_numbers(k, WIDE).to(tl.float32) * q[None, :], 1) * scale
        if k_scale_ptr is not None:
            scores *= k_scale
        scores = capped(scores, SOFT_CAP) * LOG2E
        scores = tl.where(start + tl.arange(0, KEYS) < end, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        rescale, weights = tl.exp2(maximum - new_maximum), tl.exp2(scores - new_maximum)
        total = total * rescale + tl.sum(weights, 0)
        if k_scale_ptr is not None:
            weights *= v_scale
            k_scale, v_scale = _scales(
                k_scale_ptr, v_scale_ptr, table_ptr, start + KEYS, end, kv_heads, KEYS, BLOCK_SIZE
            )
        out = out * rescale + tl.sum(weights[:, None] * to_numbers(v, WIDE).to(tl.float32), 0)
        maximum, k, v = new_maximum, next_k, next_v
    if (begin <= newest) & (newest < begin + share):
        new_k = _rotated(qkv_ptr + (heads + kv_head) * DIM, k_norm_ptr, eps, cos, sin, dims, DIM // 2)
        new_v = tl.load(qkv_ptr + (heads + kv_heads + kv_head) * DIM + dims)
        block = tl.load(table_ptr + newest // BLOCK_SIZE).to(tl.int64)
        slot = block * block_stride + (newest % BLOCK_SIZE) * slot_stride + dims
        if k_scale_ptr is not None:
            kind: tl.constexpr = k_ptr.dtype.element_ty
            codes, new_scale, new_k = rounded_head(new_k, LARGEST, kind, WIDE)
            v_codes, new_v_scale, new_v = rounded_head(new_v.to(tl.float32), LARGEST, kind, WIDE)
            if head % GROUP == 0:
                scale_at = (block * BLOCK_SIZE + newest % BLOCK_SIZE) * kv_heads + tl.arange(0, 1)
                tl.store(k_ptr + slot[None, :], codes)
                tl.store(v_ptr + slot[None, :], v_codes)
                tl.store(k_scale_ptr + scale_at, new_scale)
                tl.store(v_scale_ptr + scale_at, new_v_scale)
        elif head % GROUP == 0:
            tl.store(k_ptr + slot, new_k.to(k_ptr.dtype.element_ty))
            tl.store(v_ptr + slot, new_v)
        score = capped(tl.sum(q * new_k, 0) * scale, SOFT_CAP) * LOG2E
        new_maximum = tl.maximum(maximum, score)
        rescale, weight = tl.exp2(maximum - new_maximum), tl.exp2(score - new_maximum)
        total = total * rescale + weight
        out = out * rescale + weight * new_v.to(tl.float32)
        maximum = new_maximum
    out = out / tl.where(total > 0, total, 1.0)  # an empty part, or padding of length 0: zeros
    if parts == 1:
        tl.store(out_ptr + head * DIM + dims, out.to(out_ptr.dtype.element_ty))
        return
    tl.store(part_ptr + (head * PARTS + part) * DIM + dims, out)
    tl.store(log_total_ptr + head * PARTS + part, tl.where(total > 0, maximum + tl.log2(total), float("-inf")))
    tl.debug_barrier()  # write all of this partial output before counting it as finished
    if tl.atomic_add(finished_ptr + head, 1, sem="acq_rel") == parts - 1:
        tl.store(finished_ptr + head, 0)
        each = tl.arange(0, PARTS)
        log_total = tl.load(log_total_ptr + head * PARTS + each, mask=each < parts, other=float("-inf"))
        weights = tl.exp2(log_total - tl.max(log_total, 0))
        at = (head * PARTS + each)[:, None] * DIM + dims[None, :]
        theirs = tl.load(part_ptr + at, mask=(each < parts)[:, None], other=0.0)
        out = tl.sum(theirs * weights[:, None], 0) / tl.sum(weights, 0)
        tl.store(out_ptr + head * DIM + dims, out.to(out_ptr.dtype.element_ty))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    post_norm: torch.Tensor | None = None,
    activation: str | None = None,
    soft_cap: float | None = None,
    outbox: Outbox | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight f(x) + bias [1, rows], the residual sum or None) for one row x [1, columns].  Lesson 11.

    weight [rows, columns]. f(x) is x; with `norm` [columns] float32, the RMSNorm of x; with `residual` [1, columns]
    too, the norm of x + residual, and that sum is returned as well. post_norm [columns] float32: x is first replaced by
    its RMSNorm with these weights. activation ("gelu_tanh" or "silu"): weight is [2 * rows, columns], gate first, and
    the first result is activation(gate) * up [1, rows]. soft_cap: y becomes soft_cap * tanh(y / soft_cap). Raises
    ValueError for more than WHOLE columns with any of these but a bias.

    outbox: the result is a part of a sum over several GPUs (see `peers`), and is sent to all of them, not returned.
    """
    weight = weight.contiguous()  # no copy on a GPU, where weights are contiguous
    columns = weight.shape[1]
    rows = weight.shape[0] // (2 if activation else 1)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x) if residual is not None else None
    peers, epoch, offset = (None, None, 0) if outbox is None else outbox
    ranks = 0 if peers is None else len(peers)
    dependent = dependent_launch(x.device)
    sizes: dict[str, int | str] = {"rows": rows, "columns": columns, "dtype": launch_configs.dtype_name(x.dtype)}
    fused = any(each is not None for each in (norm, residual, post_norm, activation, soft_cap))
    if columns > WHOLE and fused:
        raise ValueError(f"rows of {columns} columns are longer than {WHOLE}: apply what is fused separately")
    if columns <= WHOLE:
        default = whole_config(rows, columns, bool(activation), processors(x.device))
        config = launch_configs.tuned("whole_rows", default, **sizes, gated=int(bool(activation)))
        whole_rows_kernel[(config.programs,)](
            x, post_norm, residual, total, norm, weight, bias, out, eps, rows, rows * columns,
            peers, epoch, offset,
            COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), TILE=config.tile, NORM=norm is not None,
            ADD=residual is not None, GATED=activation is not None, GELU=activation == "gelu_tanh",
            SOFT_CAP=soft_cap or 0.0, RANKS=ranks, num_warps=config.warps, **dependent,
        )  # fmt: skip
    else:
        piece = launch_configs.tuned("long_rows", long_config(rows, processors(x.device)), **sizes)
        long_rows_kernel[(triton.cdiv(rows, piece.tile),)](
            x, weight, bias, out, rows, peers, epoch, offset, COLUMNS=columns, WIDTH=piece.width, TILE=piece.tile,
            RANKS=ranks, num_warps=piece.warps, **dependent,
        )  # fmt: skip
    return out, total


class RowAttention:
    """Rotary embedding, cache write and attention of one row in one launch. Owns the workspace for partial outputs."""

    def __init__(self, heads: int, kv_heads: int, dim: int, device: torch.device):
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        parts = self.most_parts = PARTS if device.type == "cuda" else 4  # interpreted programs are slow
        self.parts = torch.empty((heads, parts, dim), dtype=torch.float32, device=device)
        self.log_total = torch.empty((heads, parts), dtype=torch.float32, device=device)
        self.finished = torch.zeros(heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        rotary: torch.Tensor,
        cache: CacheArguments,
        block_table: torch.Tensor,
        length: torch.Tensor,
        options: AttentionArguments,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """qkv [1, (heads + 2 kv_heads) d] -> [1, heads d].  Lesson 04.

        rotary [positions, 2, d], contiguous: the layer's table of angles; block_table [1, blocks] int32; length [1]
        int32, including the new token, whose key and value are written to the cache here. Keys in the cache are
        rotated: `options.rotary` is not read. q_norm, k_norm [d] float32: queries and keys get an RMSNorm before they
        are rotated.
        """
        out = torch.empty((1, self.heads * self.dim), dtype=qkv.dtype, device=qkv.device)
        dependent = dependent_launch(qkv.device)
        k, v = stored(cache)
        warps = 4 if self.dim > 128 else 2
        row_attention_kernel[(self.heads, self.most_parts)](
            qkv, q_norm, k_norm, rotary, k, v, cache.k_scale, cache.v_scale, block_table, length, self.parts,
            self.log_total, self.finished, out, options.scale, eps, *k.stride()[:3],
            GROUP=self.heads // self.kv_heads, PARTS=self.most_parts, KEYS=max(warps * TILE // self.dim, 16),
            DIM=self.dim, BLOCK_SIZE=k.shape[1], WINDOW=options.window or 0, SOFT_CAP=options.soft_cap or 0.0,
            WIDE=product_type(qkv.dtype, cache.k_scale is not None),
            LARGEST=LARGEST.get(cache.k.dtype, 1.0), num_warps=warps, **dependent,
        )  # fmt: skip
        return out


class LongRowsConfig(NamedTuple):
    """A launch configuration of `long_rows_kernel`."""

    tile: int  # rows of the matrix per program
    width: int  # columns at a time
    warps: int


launch_configs.register("whole_rows", RowsConfig)
launch_configs.register("long_rows", LongRowsConfig)


def whole_config(rows: int, columns: int, gated: bool, processors: int) -> RowsConfig:
    """Return the fastest of those measured in decode steps of Gemma 2B, Gemma 2 2B and Qwen3 0.6B, on an H100 or H200.

    Many small tiles keep many loads in flight. Rows that do not fill their power of two leave threads idle, so tiles of
    these have two rows. Programs that leave registers free let the next kernel start and load early.
    """
    width = triton.next_power_of_2(columns)
    tile = max(1, min(16, 4096 // width))
    if rows > 256 * processors:  # the head
        return RowsConfig(6 * processors, tile, 8) if width == 2048 else RowsConfig(8 * processors, max(tile, 2), 4)
    if gated:
        return RowsConfig((4 if width > 2048 else 8) * processors, max(tile // 2, 1), 4)
    if width > 2048:
        tiles = triton.cdiv(rows, 2)
        return RowsConfig(min(4 * processors, tiles), 2, 4 if tiles > 4 * processors else 8)
    if width <= 1024:
        tile = max(tile // 2, 1)
        return RowsConfig(min(8 * processors, triton.cdiv(rows, tile)), tile, 4)
    if rows <= 8 * processors:
        return RowsConfig(triton.cdiv(rows, 2 * tile), 2 * tile, 2)
    return RowsConfig(min(8 * processors, triton.cdiv(rows, tile)), tile, 2)


def long_config(rows: int, processors: int) -> LongRowsConfig:
    """Eight rows per program if all programs run at once; else many small ones, so that the last ones end together."""
    if triton.cdiv(rows, 8) <= 2 * processors:
        return LongRowsConfig(tile=8, width=1024, warps=8)
    return LongRowsConfig(tile=1, width=4096, warps=8)
