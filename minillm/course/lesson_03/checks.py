"""Two fused kernels, and two on tiles of rows and columns.  Lesson 03.

Kernels get tensors in the middle of memory that holds other numbers, and the interpreter reports each load and store
outside them. So a missing mask shows even where it does not change the result, and no wrong address ends the process.
"""

import torch
from torch import Tensor

from ..shared.checks import Exercise
from .kernel_runs import (
    EMPTY,
    Run,
    ignores_masked,
    kernel_does_it,
    launched_once,
    near,
    only_its_own,
    random,
    reads_only_inputs,
    room,
)

# ---- GeGLU

SECONDS = 20.0  # for one property; the slowest right solutions need about one
KERNEL = "the function only launches the kernel, once; loads, arithmetic and stores are the kernel's"

geglu = Exercise("geglu", returns=False, seconds=SECONDS)


def _gated(function, gate, up, dtype=torch.float32, out=torch.float32, junk: bool = False) -> Run:
    """A run on gate and up [rows, size]. A result in float32 shows what was computed."""
    gate, up = torch.as_tensor(gate), torch.as_tensor(up)
    return Run(function, [torch.cat((gate, up), -1).to(dtype)], [room(*gate.shape, dtype=out)], junk=junk)


def _gelu(gate: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate.double(), approximate="tanh")


@geglu.example
def _(function):
    found = _gated(function, [[10.0, 0.0]], [[10.0, 0.0]]).outputs[0]
    near(found, [[100.0, 0.0]], "gates 10 and 0 with ups 10 and 0")


@geglu.property("the gate goes through gelu", "gate * sigmoid(1.5957691 * (gate + 0.044715 * gate * gate * gate)) * up")
def _(function):
    gate = torch.arange(-5, 5.25, 0.25)[None]
    found = _gated(function, gate, gate).outputs[0]
    near(found, _gelu(gate) * gate, "gates from -5 to 5, and the same ups", rtol=3e-6, atol=3e-6)


@geglu.property("the first half is the gate", "gates are in columns 0 to SIZE - 1 of a row, ups in the SIZE after them")
def _(function):
    found = _gated(function, [[10.0, 10.0]], [[1.0, -2.0]]).outputs[0]
    near(found, [[10.0, -20.0]], "gates 10, 10 and ups 1, -2")


@geglu.property(
    "every row has its own address", "a row of gate_up is 2 * SIZE long, a row of out SIZE: multiply the row by that"
)
def _(function):
    for rows, size in ((3, 2), (5, 7), (3, 130), (70, 2)):
        gate, up = (12 + 5 * random(rows, size, seed=seed).abs() for seed in (0, 1))  # gelu(12) is 12
        found = _gated(function, gate, up).outputs[0]
        near(found, gate * up, f"{rows} rows of {size} columns", rtol=0.03, atol=0)


@geglu.property("every column is written", "tile i starts at column i * TILE; the grid covers the last tile too")
def _(function):
    for size in (5000, 2048):
        found = _gated(function, torch.full((1, size), 10.0), torch.full((1, size), 10.0)).outputs[0]
        left = int((found == EMPTY).sum())
        assert left == 0, f"of {size:,} columns {left:,} were not written"
        near(found, torch.full((1, size), 100.0), f"{size:,} columns of gates 10 and ups 10")


@geglu.property(
    "half-precision inputs", "convert each load with .to(tl.float32), compute with that, and round only in the store"
)
def _(function):
    for dtype in (torch.float16, torch.bfloat16):
        found = _gated(function, [[300.0, 20.0]], [[300.0, 30.0]], dtype).outputs[0]
        near(found, [[90_000.0, 600.0]], f"{dtype}: gates and ups 300, 20 and 300, 30")
        gate, up = torch.tensor([[0.7, -0.3]]).to(dtype), torch.tensor([[3.0, 5.0]])
        found, wide = (_gated(function, gate, up, kind).outputs[0] for kind in (dtype, torch.float32))
        near(found, wide, f"the same numbers in {dtype} and in float32, not rounded", rtol=2e-5, atol=0)
    gate, up = random(1, 64).half(), random(1, 64, seed=1).half()
    found, wide = (
        _gated(function, gate, up, torch.float16, out=kind).outputs[0] for kind in (torch.float16, torch.float32)
    )
    message = "out in float16 is off by more than one rounding (round after multiplying by up)"
    near(found, wide, message, rtol=1.01 * 2**-11, atol=1e-6)


@geglu.property("float32 inputs keep their digits", "no type narrower than float32 between the loads and the store")
def _(function):
    gate, up = torch.tensor([[20.3456, 23.001]]), torch.tensor([[21.00012, 27.654321]])
    found = _gated(function, gate, up).outputs[0]
    near(found, gate * up, "gates 20.3456, 23.001 and ups 21.00012, 27.654321", rtol=2e-6, atol=0)


@geglu.property("the kernel does the work", KERNEL)
def _(function):
    for dtype in (torch.float32, torch.float16):
        kernel_does_it(_gated(function, [[10.0, 11.0]], [[10.0, 12.0]], dtype), "gate_up")
    launched_once(_gated(function, [[10.0, 11.0]] * 3, [[10.0, 12.0]] * 3))


@geglu.property(
    "nothing outside the input is read",
    "both loads need the mask: tl.load(..., mask=inside, other=0.0); or the grid has more programs than rows",
)
def _(function):
    reads_only_inputs(_gated(function, [[10.0] * 5], [[10.0] * 5], junk=True), "1 row of 5 gates and 5 ups")


@geglu.property(
    "nothing but the result is written",
    "tl.store(..., mask=inside), where a row ends after SIZE columns; and no more programs than rows",
)
def _(function):
    only_its_own(_gated(function, [[1.5] * 5], [[2.0] * 5]), "5 columns")
    twice = _gated(function, [[1.5] * 5] * 3, [[2.0] * 5] * 3).strays.stored_by_several()
    assert twice == 0, f"3 rows of 5: {twice} results are stored by several programs, and on a GPU any may be last"


# ---- add + RMSNorm

add_row_norm = Exercise("add_row_norm", returns=False, seconds=SECONDS)


def _added(
    function, x, residual, weight=None, eps=1e-6, dtype=torch.float32, sums=None, norms=torch.float32,
    junk: bool = False,
) -> Run:  # fmt: skip
    """Outputs: the normed sum, in `norms`, and the sum, in `sums` (default: dtype)."""
    x, residual = torch.as_tensor(x).to(dtype), torch.as_tensor(residual).to(dtype)
    weight = torch.ones(x.shape[1]) if weight is None else torch.as_tensor(weight)
    outputs = [room(*x.shape, dtype=norms), room(*x.shape, dtype=sums or dtype)]
    return Run(function, [x, residual, weight], outputs, eps, junk=junk)


def _norm(x, weight=1.0, eps=1e-6) -> Tensor:
    x = torch.as_tensor(x).double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _direction(rows: Tensor) -> Tensor:
    """Each row divided by its first element: its length does not matter."""
    rows = rows.double().cpu()
    return rows / rows[:, :1]


@add_row_norm.example
def _(function):
    out, total = _added(function, [[1.0, -1.0, 1.0, -1.0]], [[2.0, -2.0, 2.0, -2.0]]).outputs
    near(total, [[3.0, -3.0, 3.0, -3.0]], "the sum")
    near(out, [[1.0, -1.0, 1.0, -1.0]], "the norm")


@add_row_norm.property("the sum is normalized", "square x + residual, not x")
def _(function):
    out, _ = _added(function, [[1.0, 1.0]], [[2.0, -2.0]]).outputs
    near(out, _norm([[3.0, -1.0]]), "[1, 1] + [2, -2] is [3, -1]; its norm")


@add_row_norm.property(
    "every row has its own address", "row * DIM for x, residual, out and total; TILE is only what a program computes"
)
def _(function):
    for rows, dim in ((4, 5), (3, 33), (70, 3)):
        x = random(rows, dim)
        out, total = _added(function, x, 2 * x).outputs
        near(total, 3 * x, f"{rows} rows of {dim}, the sums")
        message = f"{rows} rows of {dim}: normalized rows and sums, each divided by its first element"
        near(_direction(out), _direction(x), message, rtol=1e-3, atol=1e-3)


@add_row_norm.property(
    "rows of any length", "one tile holds the whole row: TILE=triton.next_power_of_2(d), computed from x's shape"
)
def _(function):
    for dim in (100, 5000):
        x = 1.0 + torch.arange(float(dim)).remainder(7)[None]
        out, total = _added(function, x, 2 * x).outputs
        near(total, 3 * x, f"1 row of {dim:,}, the sum")
        near(_direction(out), _direction(x), f"1 row of {dim:,}, the norm divided by its first element")


@add_row_norm.property(
    "the mean is over d numbers",
    "divide by DIM, not by TILE: padding is not part of the row; add eps to the mean, not to each square",
)
def _(function):
    out, _ = _added(function, [[1.0] * 5], [[1.0] * 5]).outputs
    near(out, torch.ones(1, 5), "the norm of a row of five equal numbers")
    quarter = torch.full((1, 5), 0.25)  # 1/3 even with eps outside the root, which has a property of its own
    out, _ = _added(function, quarter, 0 * quarter, eps=0.5).outputs
    near(out, _norm(quarter, eps=0.5), "0.25 / sqrt(0.0625 + 0.5), in a row of five")


@add_row_norm.property("each column has its weight", "weight_ptr + columns, without the row; multiply by it at the end")
def _(function):
    x, weight = torch.tensor([[1.0, -1.0, 1.0, -1.0]] * 3), torch.tensor([2.0, 0.5, 1.01, -3.03])
    for dtype in (torch.float32, torch.float16):
        out, _ = _added(function, x, x, weight, dtype=dtype).outputs
        message = f"x in {dtype}: weights 2, 0.5, 1.01, -3.03 in float32 must scale every row"
        near(out, _norm(x, weight), message, rtol=1e-5)
    x = torch.tensor([[3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0]])  # its norm, 1.5 and 0.5, is exact in float16
    weight = torch.full((8,), 1 + 0.45 * 2**-10)  # a step of float16 is 2**-10 here
    out, _ = _added(function, x, x, weight, dtype=torch.float16, norms=torch.float16).outputs
    message = "out in float16: the weights must stay float32 until they are multiplied"
    near(out, _norm(x, weight), message, rtol=0, atol=0.51 * 2**-10)


@add_row_norm.property("eps is inside the root", "tl.rsqrt(mean + eps)")
def _(function):
    x = torch.tensor([[0.1, -0.1]])
    out, _ = _added(function, x, 0 * x, eps=1e-2).outputs
    near(out, _norm(x, eps=1e-2), "0.1 / sqrt(0.01 + 0.01)")


@add_row_norm.property(
    "what is normalized is the sum as it is stored",
    "round first, .to(total_ptr.dtype.element_ty), store that, and normalize its .to(tl.float32)",
)
def _(function):
    out, total = _added(function, [[128.0, 64.0]], [[0.05, 0.0]], dtype=torch.float16).outputs
    message = "128 + 0.05 is stored in float16 as 128, but the norm is of 128.05"
    near(out, _norm(total.cpu()), message, rtol=2e-5, atol=0)
    _, total = _added(function, [[128.0, 64.0]], [[0.05, 0.0]]).outputs
    near(total, [[128.05, 64.0]], "128 + 0.05 in float32", rtol=1e-6, atol=0)
    for dtype, sums in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
        x, residual = torch.tensor([[128.05, 64.025]]), torch.tensor([[0.05, 0.025]])
        out, total = _added(function, x, residual, dtype=dtype, sums=sums).outputs
        wanted = (x.to(dtype).float() + residual.to(dtype).float()).to(sums)
        near(total, wanted, f"x in {dtype}, total in {sums}, the sum", rtol=1e-6, atol=0)
        near(out, _norm(wanted), f"x in {dtype}, total in {sums}, the norm", rtol=2e-5, atol=0)


@add_row_norm.property(
    "half-precision inputs", "300 * 300 overflows float16: .to(tl.float32) before you compute; round in the stores"
)
def _(function):
    for dtype in (torch.float16, torch.bfloat16):
        out, total = _added(function, [[200.0, -200.0]], [[100.0, -100.0]], dtype=dtype).outputs
        near(total, [[300.0, -300.0]], f"{dtype}: 200 + 100")
        near(out, [[1.0, -1.0]], f"{dtype}: the norm of [300, -300]")
    x, weight = random(1, 64), (1 + 0.3 * random(64, seed=1)).bfloat16().float()
    out, total = _added(function, x, 0 * x, weight, dtype=torch.float16, norms=torch.float16).outputs
    message = "out in float16 is off by more than one rounding (round after the weight)"
    near(out, _norm(total.cpu(), weight), message, rtol=1.01 * 2**-11, atol=1e-6)


@add_row_norm.property("the kernel does the work", KERNEL)
def _(function):
    for dtype in (torch.float32, torch.float16):
        kernel_does_it(_added(function, [[1.0, -2.0]], [[2.0, -4.0]], dtype=dtype), "x", "residual", "weight")
    launched_once(_added(function, [[1.0, -2.0]] * 3, [[2.0, -4.0]] * 3))


@add_row_norm.property(
    "nothing outside the inputs is read",
    "all three loads need mask=inside, other=0.0; or the grid has more programs than rows",
)
def _(function):
    junk, plain = (_added(function, [[1.0, -2.0, 3.0]], [[2.0, -4.0, 6.0]], junk=junk) for junk in (True, False))
    reads_only_inputs(junk, "1 row of 3")
    ignores_masked(junk, plain, "1 row of 3")


@add_row_norm.property(
    "nothing but the results is written", "both stores need the mask, and the grid one program per row"
)
def _(function):
    only_its_own(_added(function, [[1.0, -1.0, 1.0]], [[1.0, -1.0, 1.0]]), "3 columns")


# ---- a tile of rows and columns

transpose = Exercise("transpose", returns=False, seconds=SECONDS)


def _transposed(function, x: Tensor, out: Tensor | None = None) -> Run:
    return Run(function, [x], [room(*x.T.shape) if out is None else out])


def _written(found: Tensor, wanted: Tensor, what: str) -> None:
    """Names the elements that were left out, if nothing else is wrong: a wrong result can be equal to EMPTY too."""
    wrong = found.cpu()[~torch.isclose(found.cpu(), wanted)]
    assert not len(wrong) or (wrong != EMPTY).any(), f"of {what} {len(wrong):,} were not written"


def _numbered(rows: int, columns: int) -> Tensor:
    return torch.arange(1.0, rows * columns + 1).view(rows, columns)


@transpose.example
def _(function):
    found = _transposed(function, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).outputs[0]
    near(found, [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], "[[1, 2, 3], [4, 5, 6]], row by row")


@transpose.property(
    "a matrix of several tiles",
    "program (i, j) starts at row i * TILE, column j * TILE; the grid rounds up on both axes",
)
def _(function):
    for rows, columns in ((300, 20), (20, 300), (70, 133)):
        x = _numbered(rows, columns)
        found = _transposed(function, x).outputs[0]
        _written(found, x.T, f"{rows} x {columns} numbers")
        near(found, x.T, f"a matrix of {rows} x {columns}, out")


@transpose.property("x may have any strides", "rows * x.stride(0) + columns * x.stride(1); a view's row may be longer")
def _(function):
    wide = _numbered(6, 8)
    for x, what in ((wide[:, :5], "the first 5 of 8 columns"), (wide.T, "a transposed view"), (wide[:, ::2], "a step")):
        found = _transposed(function, x).outputs[0]
        near(found, x.T, f"x = {what} of a matrix, out")


@transpose.property(
    "out may have any strides", "out's row is x's column: columns * out.stride(0) + rows * out.stride(1)"
)
def _(function):
    x = _numbered(6, 4)
    for out, what in ((room(4, 9)[:, :6], "6 of 9 columns"), (room(6, 4).T, "a transposed view")):
        run = _transposed(function, x, out)
        near(run.outputs[0], x.T, f"out = {what} of a matrix")


@transpose.property(
    "numbers are copied as they are", "store what tl.load returned, whatever it is: a copy needs no .to(...)"
)
def _(function):
    for x in (torch.tensor([[0.1, 1e9, -3e-9, 0.0, torch.nan]]), torch.tensor([[2**24 + 1, -(2**60) - 3]])):
        found = _transposed(function, x, room(*x.T.shape, dtype=x.dtype)).outputs[0].cpu()
        same = torch.equal(found.nan_to_num(7.0), x.T.nan_to_num(7.0))
        assert same, f"{x.tolist()} in {x.dtype} becomes {found.T.tolist()}"


@transpose.property("the kernel does the work", KERNEL + "; it gets x and out themselves, with their strides")
def _(function):
    kernel_does_it(_transposed(function, _numbered(3, 2)), "x")
    for x in (_numbered(40, 2), _numbered(3, 4)[:, ::2]):
        launched_once(_transposed(function, x))


@transpose.property("nothing outside x is read", "the load needs both masks: rows < ROWS and columns < COLUMNS, with &")
def _(function):
    reads_only_inputs(_transposed(function, _numbered(3, 5)), "3 x 5")


@transpose.property("nothing but out is written", "the store needs both masks too")
def _(function):
    only_its_own(_transposed(function, _numbered(3, 5)), "5 x 3")


# ---- a matrix product, tile by tile

tiled_linear = Exercise("tiled_linear", returns=False, seconds=SECONDS)


def _multiplied(function, x: Tensor, weight: Tensor, dtype=torch.float32, junk: bool = False) -> Run:
    return Run(function, [x, weight], [room(len(x), len(weight), dtype=dtype)], junk=junk)


def _whole(rows: int, columns: int) -> Tensor:
    """Small whole numbers: their products and sums are exact in any order, and on tensor cores."""
    at = torch.arange(float(rows * columns)).view(rows, columns)
    return (at * 7 + at // columns).remainder(11) - 5


@tiled_linear.example
def _(function):
    found = _multiplied(function, torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])).outputs[0]
    near(found, [[11.0, 17.0]], "[[1, 2]] by [[3, 4], [5, 6]]")


@tiled_linear.property(
    "all columns of x count", "range(0, IN, PIECE) covers the last piece too; add each piece to the total"
)
def _(function):
    for columns in (64, 100, 257, 5000):
        found = _multiplied(function, torch.ones(1, columns), torch.ones(1, columns)).outputs[0]
        near(found, [[columns]], f"{columns} times 1 * 1")


@tiled_linear.property(
    "every tile of out", "program (i, j): rows i * TILE of x, rows j * TILE of weight; the grid rounds up on both axes"
)
def _(function):
    for rows, out in ((300, 20), (20, 300), (70, 133)):
        x, weight = _whole(rows, 8), _whole(out, 8)
        found = _multiplied(function, x, weight).outputs[0]
        _written(found, x @ weight.T, f"{rows} x {out} results")
        near(found, x @ weight.T, f"{rows} rows of x and {out} of weight, out")


@tiled_linear.property(
    "half-precision inputs", "load, .to(tl.float32), then tl.dot; keep each product and the total in float32"
)
def _(function):
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = torch.full((2, 160), 32.0), torch.full((3, 160), 32.0)
        x[:, -1] = weight[:, -1] = 1.0
        found = _multiplied(function, x.to(dtype), weight.to(dtype)).outputs[0]
        near(found, x @ weight.T, f"{dtype}: a sum of 162,817", rtol=1e-6, atol=0.5)
    x = torch.ones(1, 64 * 17)
    weight = torch.where(torch.arange(64 * 17) % 64 == 0, 0.25, 0.0)[None]
    weight[:, 0] = 2048.0
    found = _multiplied(function, x, weight, torch.float16).outputs[0]
    near(found, [[2052.0]], "2,048 and 16 times 0.25, with out in float16", rtol=0)
    weight = torch.tensor([2048.0, 1.0] + [0.0] * 62).repeat(3)[None]
    found = _multiplied(function, torch.ones(1, 192), weight, torch.float16).outputs[0]
    message = "three pieces of 2,049 each are 6,147, in float16 6,148; in float16, 2,049 is 2,048"
    near(found, [[6148.0]], message, rtol=0)


@tiled_linear.property(
    "float32 inputs keep their digits", 'no type narrower than float32; and input_precision="ieee" in tl.dot'
)
def _(function):
    x, weight = random(3, 40), random(5, 40, seed=1)
    run = _multiplied(function, x, weight)
    near(run.outputs[0], x.double() @ weight.double().T, "random float32 inputs", rtol=1e-5, atol=1e-5)
    x = torch.tensor([[1 + 2**-12]])
    found = _multiplied(function, x, torch.ones(1, 1)).outputs[0]
    near(found, x, "(1 + 2^-12) times 1", rtol=1e-6, atol=0)
    assert not run.strays["TF32"], "tl.dot may use TF32 on a GPU, which has 10 bits of mantissa"


@tiled_linear.property("the kernel does the work", KERNEL)
def _(function):
    for dtype in (torch.float32, torch.float16):
        kernel_does_it(_multiplied(function, _whole(2, 3).to(dtype), _whole(4, 3).to(dtype)), "x", "weight")
    launched_once(_multiplied(function, _whole(70, 3), _whole(4, 3)))


@tiled_linear.property(
    "nothing outside the inputs is read",
    "x needs masks for its rows and its columns, with other=0.0; so does weight",
)
def _(function):
    junk, plain = (_multiplied(function, _whole(3, 5), _whole(2, 5), junk=junk) for junk in (True, False))
    reads_only_inputs(junk, "3 x 5 and 2 x 5")
    ignores_masked(junk, plain, "3 x 5 and 2 x 5")


@tiled_linear.property("nothing but out is written", "the store needs both masks")
def _(function):
    only_its_own(_multiplied(function, _whole(3, 8), _whole(5, 8)), "3 x 5")
