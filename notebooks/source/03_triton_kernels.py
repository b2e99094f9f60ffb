# %% [markdown]
# # 03 · Triton kernels
#
# Afterwards you can count what a GPU does for a line of torch, in bytes and in launches; write kernels that do several
# lines in one launch, and run them inside the engine; find the mistakes that kernels have and that ordinary tests do
# not see; choose a kernel's tile from a measured table; and say what CUDA graphs are for, and which of TensorRT's
# optimisations this engine has.
#
# **75 minutes. Needs:** Linux, and lessons 00 and 02. Without a GPU the kernels are *interpreted*: right, and slow. On
# a GPU the same cells compile them. Times are those of an H200, from the project's records.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm import LLM, SamplingParams, using
from minillm.bench import plots, records
from minillm.course import NotSolvedYet, check, compare, tier, triton_here, yours
from minillm.course import draw_kernels as draw
from minillm.course.interpret import surrounded, untouched
from minillm.course.stubs import raise_if_stub
from minillm.model.config import PRESETS
from minillm.ops import reference

# %%
here = tier()
print("kernels are", triton_here())

import triton
import triton.language as tl

device = here.device

# %% [markdown]
# Triton decides at its first import whether kernels are compiled or interpreted. That is why `triton_here()` stands
# before it.
#
# ## 1 · What a line of torch costs
#
# Every operation of torch is a **kernel**: a program on the GPU that reads its inputs from memory, computes, and
# writes its result back to memory. The next operation reads it again. And every kernel must be *launched*, which
# takes time even when there is nothing to do.
#
# This is what stands between attention and the MLP in every layer: add what attention found to the token's vector, and
# norm the sum.

# %%
# ENGINE: minillm.ops.reference:add_rms_norm

# %% [markdown]
# Two lines. How many kernels? Torch tells, if we listen to what it dispatches. A tensor on the device `meta` has a
# shape and no numbers, so this counts Gemma 2B's sizes on any machine.


# %%
class Traffic(TorchDispatchMode):
    """Notes each operation that torch runs, with the bytes of all it reads and writes."""

    def __init__(self):
        super().__init__()
        self.launches: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:  # a view moves nothing
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            name = function.name().removeprefix("aten::").split(".")[0].strip("_")
            self.launches.append((name, sum(x.nbytes for x in tensors)))
        return result


def launches_of(function, *given) -> list[tuple[str, int]]:
    with Traffic() as traffic:
        function(*given)
    return traffic.launches


def empty(*shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


gemma = PRESETS["gemma-2b"]
tokens, hidden, inner = 512, gemma.hidden_size, gemma.intermediate_size
x, norm_weight = empty(tokens, hidden), empty(hidden, dtype=torch.float32)
unfused = launches_of(reference.add_rms_norm, x, x, norm_weight, 1e-6)
for name, nbytes in unfused:
    print(f"{name:<8} {nbytes / 1e6:6.2f} MB")
print(f"{len(unfused)} launches, {sum(nbytes for _, nbytes in unfused) / 1e6:.1f} MB")

# %% [markdown]
# `to_copy` are the changes between bfloat16 and float32, `mean` and `rsqrt` what you expect; each one is a trip to
# memory and back.
#
# **Predict first.** A single kernel could do all of it: read the two inputs, keep everything else in registers,
# write the two outputs. How many times fewer bytes would it move? And on the H200, for 512 tokens, how many times
# faster would it be?

# %% tags=["exercise"]
guess_bytes = 4.0  # PREDICT: how many times fewer bytes one kernel moves
guess_faster = 4.0  # PREDICT: how many times faster it is, at 512 tokens
guess_faster_one = 2.0  # PREDICT: how many times faster it is, at one token

# %%
fused = [("all", 4 * x.nbytes + norm_weight.nbytes)]


def total(launches) -> int:
    return sum(nbytes for _, nbytes in launches)


h200 = records.read("h200/kernels")["results"]


def kernel_at(name: str, rows: int) -> dict:
    """What the record has of the engine's kernel, and of torch's reference, for this many rows."""
    return next(each for each in h200 if each["kernel"] == name and each["rows"] == rows)


times = {
    rows: kernel_at("add_rms_norm", rows)["reference_ms"]
    / kernel_at("add_rms_norm", rows)["ms"]
    for rows in (1, 512)
}
compare("bytes", unit="times", prediction=guess_bytes, measured=total(unfused) / total(fused))
compare("time, 512 tokens", unit="times", prediction=guess_faster, measured=times[512])
compare("time, 1 token", unit="times", prediction=guess_faster_one, measured=times[1])
draw.bytes_moved({"torch, line by line": unfused, "one kernel": fused})

# %% [markdown]
# At 512 tokens most of the gain is bytes. At one token there are hardly any bytes: there it is the **launches**.
# Even inside a CUDA graph (section 8), where launching is cheapest, the smallest kernel of the record takes a
# microsecond and a half, and nine of them take nine times that:

# %%
smallest_us = min(each["ms"] for each in h200) * 1e3
one = kernel_at("add_rms_norm", 1)
print(f"the smallest kernel           {smallest_us:5.1f} µs")
print(f"{len(unfused)} launches of torch, 1 token   {one['reference_ms'] * 1e3:5.1f} µs")
print(f"one fused launch, 1 token     {one['ms'] * 1e3:5.1f} µs")

# %% [markdown]
# Making one kernel of several operations is called **fusion**. It pays where operations do little with what they
# read: norms, activations, rotations, sums. Here they are under the H200's roofline (lesson 00): so far left of the
# ridge that arithmetic is never the limit. With many rows the fused kernels sit on the slope, where bytes decide.
# With one row they are far below it, where nothing but the launch counts.

# %%
OPERATIONS = {  # for an element of the result, about
    "gated_activation": 10,
    "add_rms_norm": 6,
    "rms_norm": 5,
}
elements = {"gated_activation": inner, "add_rms_norm": hidden, "rms_norm": hidden}
limits = records.read("h200/roofline")
curves = {}
for name, each in OPERATIONS.items():
    curves[name] = []
    for rows in (1, 64, 512, 3000):
        found = kernel_at(name, rows)
        operations = each * elements[name] * rows
        nbytes = found["gb_per_s"] * found["ms"] * 1e6
        curves[name].append((rows, operations / nbytes, operations / found["ms"] * 1e3))
draw.roof(limits["bytes_per_s"], limits["operations_per_s"], curves)

# %% [markdown]
# ## 2 · A first kernel
#
# A Triton kernel is a function that is run many times at once: each run is called a **program**, knows its number
# (`tl.program_id`), and computes one **tile** of the result. The runs together are the **grid**. Inside a program you
# write about whole tiles, as in torch; Triton spreads a tile over the GPU's threads.
#
# A kernel gets *pointers*: places in memory. A pointer plus a tile of numbers is a tile of places. And since a tile's
# size must be a power of two and the data's size is whatever it is, the last tile hangs over the end. A **mask** says
# which lanes are real:

# %%
draw.tiles(rows=3, columns=13, tile=4)

# %% [markdown]
# So this is a kernel: *where am I, what is mine, load, compute, store.*


# %%
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, SIZE, TILE: tl.constexpr):
    program = tl.program_id(0)
    at = program * TILE + tl.arange(0, TILE)  # [TILE] places of this program
    inside = at < SIZE
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x + y, mask=inside)


def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """out = x + y, all contiguous and of one shape."""
    size = out.numel()
    add_kernel[(triton.cdiv(size, 256),)](x, y, out, size, TILE=256)


ones = torch.ones(1000, device=device)
out = torch.empty_like(ones)
add(ones, 2 * ones, out)
print(out[:5].tolist(), "...", bool((out == 3).all()))

# %% [markdown]
# Piece by piece:
#
# * `@triton.jit` makes a kernel of a function. `kernel[grid](...)` launches it, with a grid of one, two or three
#   numbers. `triton.cdiv` divides and rounds *up*: 1000 elements in tiles of 256 are 4 programs.
# * `tl.constexpr` marks what must be known when the kernel is compiled, like the size of a tile. Each other value
#   makes another kernel.
# * `other=0.0` is what lanes outside the mask get from `tl.load`.
# * `.to(tl.float32)`: load, widen, compute, store. Half-precision numbers lose too much on the way; `tl.store` makes
#   them small again, as the memory wants them. (The interpreter gets bfloat16 *arithmetic* silently wrong, so here
#   it is a rule.)
# * There are no bounds checks. What a kernel reads or writes outside its tensors belongs to somebody else.
#
# The last one deserves an experiment. We put the result into memory that holds -1 all around, and forget one mask:


# %%
@triton.jit
def careless_kernel(x_ptr, y_ptr, out_ptr, SIZE, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x + y)


for kernel in (add_kernel, careless_kernel):
    out, memory = surrounded(torch.zeros(1000, device=device), by=-1.0)
    kernel[(4,)](ones, 2 * ones, out, 1000, TILE=256)
    written = int((memory != -1).sum())
    right = bool((out == 3).all())
    print(
        f"right: {right}, numbers written: {written}, all else untouched: {untouched(memory, by=-1.0)}"
    )

# %% [markdown]
# Both results are right! The second kernel overwrote 24 numbers that follow. In a real program they are another
# tensor, and the mistake shows later, somewhere else. The checks of this lesson look there.
#
# **Where this runs.** In the interpreter, a program is Python that works on numpy arrays, one program after the
# other: good for seeing, printing and checking, useless for timing. So we keep problems tiny here. On a GPU, the
# same source is compiled for the chip when it is first launched.
#
# ## 3 · GeGLU
#
# The MLP's activation (lesson 02). Its input is what one matrix product gave: a gate and an up part, side by side.
#
# $$\text{out} = \text{gelu}(\text{gate}) \cdot \text{up}, \qquad
# \text{gelu}(g) = g \cdot \sigma\!\left(1.5957691\,(g + 0.044715\, g^3)\right), \qquad
# \sigma(z) = \frac{1}{1 + e^{-z}}$$
#
# (That is the form with a tanh, which Gemma uses, since $\frac{1 + \tanh y}{2} = \sigma(2y)$; and 1.5957691 is
# $2\sqrt{2 / \pi}$.) No element needs another, so any tile will do. What does one kernel save here?

# %%
gate_up = empty(tokens, 2 * inner)
unfused = launches_of(reference.gated_activation, gate_up, "gelu_tanh")
fused = [("all", gate_up.nbytes + gate_up.nbytes // 2)]
draw.bytes_moved({"torch, line by line": unfused, "one kernel": fused})

# %% [markdown]
# **Exercise 1.** Write it. The grid has two numbers: rows, and tiles of a row, as in the picture above; program
# `(row, tile)` is `tl.program_id(0)` and `tl.program_id(1)`. A row of `gate_up` is `2 * SIZE` long: first its gates,
# then its ups. `tl.sigmoid` exists.
#
# For example, gates `[10, 0]` and ups `[10, 0]` give `[100, 0]`.
#
# There are two places to fill: the kernel, and its launch. (`raise_if_stub` only sees to it that an empty kernel is
# told as one.) The functions of this lesson write into an `out` that they get, so that the checks can look around
# it.


# %% tags=["exercise"]
@triton.jit
def geglu_kernel(gate_up_ptr, out_ptr, SIZE, TILE: tl.constexpr):
    """Program (row, tile) computes one tile of one row of out."""
    # SOLUTION: where am I; the mask; load gate and up, as float32; compute; store
    row = tl.program_id(0)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    at = gate_up_ptr + row * 2 * SIZE + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    gelu = gate * tl.sigmoid(1.5957691 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out_ptr + row * SIZE + columns, gelu * up, mask=inside)
    # END


def geglu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """gate_up: [rows, 2 * size], gates first; writes gelu(gate) * up to out, [rows, size]."""
    raise_if_stub(geglu_kernel)
    # SOLUTION: a grid of rows and of tiles in a row, say of 1024 columns; launch the kernel
    rows, size = out.shape
    geglu_kernel[(rows, triton.cdiv(size, 1024))](gate_up, out, size, TILE=1024)
    # END


# %%
check(geglu)

# %% [markdown]
# Now it runs inside the engine, in every layer of every step. The engine calls `gated_activation(gate_up, activation)`
# and expects a new tensor, so a few lines go between:

# %%
llm = LLM(enable_prefix_caching=False, **here.words)
greedy = SamplingParams(max_tokens=12, temperature=0)
prompt = "Fenwick lies on the island of"
before = llm.generate(prompt, greedy)[0].text


def my_gated_activation(gate_up, activation):
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    geglu(gate_up, out)
    return out


with using(gated_activation=my_gated_activation) as used:
    after = llm.generate(prompt, greedy)[0].text
print(prompt + after)
print("the same text as before:", after == before)
print(used.calls)

# %% [markdown]
# (A model with random weights, which a GPU may run here, finds many tokens almost equally likely. There the last bit
# of a rounding may decide, and the text may differ.)
#
# ## 4 · RMSNorm
#
# Here the elements of a row do need each other: each is divided by the root of the mean square of them all.
#
# $$y_j = \frac{x_j}{\sqrt{\frac{1}{d} \sum_k x_k^2 + \varepsilon}} \; w_j$$
#
# If two programs shared a row, they would have to exchange their sums, through memory. A row of Gemma 2B is 2,048
# numbers, and that fits into one program's registers. So: **one program a row**, the whole row in one tile, read once.
#
# A tile must be a power of two, and a row need not be one. `triton.next_power_of_2(d)` is the tile that holds it; the
# padding behind the row is masked:

# %%
draw.tiles(rows=3, columns=13, tile=16)

# %% [markdown]
# `tl.sum(tile)` adds up a tile: padding must not add anything. And what is the mean over?
#
# **Exercise 2.** For example, the row `[3, -3, 3, -3]` with weights of 1 becomes `[1, -1, 1, -1]`. `tl.rsqrt` is one
# over the square root.


# %% tags=["exercise"]
@triton.jit
def row_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, DIM, TILE: tl.constexpr):
    """Program `row` computes one row of out; TILE, a power of two, is at least DIM."""
    # SOLUTION: load the row and the weights, as float32; the mean of the squares; norm; weigh; store
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    x = tl.load(x_ptr + row * DIM + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x) / DIM
    out = x * tl.rsqrt(mean_square + eps) * weight
    tl.store(out_ptr + row * DIM + columns, out, mask=inside)
    # END


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """x, out: [rows, d], any float dtype; weight: [d], float32. Writes the normed rows to out."""
    raise_if_stub(row_norm_kernel)
    # SOLUTION: one program a row; the tile is the next power of two
    rows, dim = x.shape
    row_norm_kernel[(rows,)](x, weight, out, eps, dim, TILE=triton.next_power_of_2(dim))
    # END


# %%
check(row_norm)

# %% [markdown]
# In the engine this norm stands only at the very beginning: all others come with an addition before them. Both of
# yours at once:


# %%
def my_rms_norm(x, weight, eps):
    out = torch.empty_like(x)
    row_norm(x, weight, eps, out)
    return out


with using(rms_norm=my_rms_norm, gated_activation=my_gated_activation) as used:
    after = llm.generate(prompt, greedy)[0].text
print("the same text as before:", after == before)
print(used.calls)

# %% [markdown]
# ## 5 · Two results from one kernel
#
# Section 1's pair: the sum goes on to the next layer, its norm goes into the next matrix. Alone, the norm would have
# to read the sum that an addition has just written. Fused, the sum is in registers already:
#
# $$s = x + r, \qquad \text{out} = \text{rms\_norm}(s)$$
#
# One thing is easily got wrong. The sum is *stored* in bfloat16, rounded. Later layers see the rounded one; if this
# norm saw the exact one, the two would disagree, and so would the engine with the model it runs. So round first,
# then norm.
#
# **Exercise 3.** For example, `x = [1, -1, 1, -1]` and `residual = [2, -2, 2, -2]` give the sum `[3, -3, 3, -3]` and,
# with weights of 1, the norm `[1, -1, 1, -1]`. The type that a pointer points to is `total_ptr.dtype.element_ty`.


# %% tags=["exercise"]
@triton.jit
def add_row_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, DIM, TILE: tl.constexpr
):
    """Program `row` computes one row of out and of total."""
    # SOLUTION: load both rows; add; round to total's type and store; norm what was stored
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    at = row * DIM + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rounded = (x + residual).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, rounded, mask=inside)
    total = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = total * tl.rsqrt(tl.sum(total * total) / DIM + eps) * weight
    tl.store(out_ptr + at, out, mask=inside)
    # END


def add_row_norm(x, residual, weight, eps: float, out, total) -> None:
    """x, residual, out, total: [rows, d]; writes x + residual to total, and its norm to out."""
    raise_if_stub(add_row_norm_kernel)
    # SOLUTION: as before, with two inputs and two results
    rows, dim = x.shape
    tile = triton.next_power_of_2(dim)
    add_row_norm_kernel[(rows,)](x, residual, weight, out, total, eps, dim, TILE=tile)
    # END


# %%
check(add_row_norm)


# %%
def my_add_rms_norm(x, residual, weight, eps):
    out, total = torch.empty_like(x), torch.empty_like(x)
    add_row_norm(x, residual, weight, eps, out, total)
    return out, total


mine = {
    "rms_norm": my_rms_norm,
    "add_rms_norm": my_add_rms_norm,
    "gated_activation": my_gated_activation,
}
with using(**mine) as used:
    after = llm.generate(prompt, greedy)[0].text
print("the same text as before:", after == before)
print(used.calls)

# %% [markdown]
# Twice in each layer of each step, yours has replaced the two lines of section 1. On a GPU: how does it compare with
# torch, line by line, and with the engine's own, for 3,000 tokens?

# %% tags=["nbval-ignore-output"] uncompared="times, on a GPU only"
if here.name == "gpu":
    from minillm.ops import triton as engines

    rows = torch.randn(3000, hidden, device=device, dtype=torch.bfloat16)
    weights = torch.ones(hidden, device=device)
    ways = {
        "torch, line by line": reference.add_rms_norm,
        "yours": yours(my_add_rms_norm, engines.add_rms_norm),
        "the engine's": engines.add_rms_norm,
    }
    for name, way in ways.items():
        ms = triton.testing.do_bench(lambda way=way: way(rows, rows, weights, 1e-6))
        print(f"{name:<20} {ms * 1e3:8.1f} µs")
else:
    print("No GPU here: section 1 has the H200's figures.")

# %% [markdown]
# ### A whole layer
#
# Now every operation of one layer of Gemma 2B, in a decode step of 64 requests: as torch would run the references,
# and as the engine runs it. What is not fused stays: four matrix products, and attention (lesson 04; counted as one
# kernel both times). A launch is drawn as long as it must take at least: its bytes at the H200's speed, and never
# less than the smallest kernel of the record.


# %%
def matrix_product(name: str, into: int, out: int, rows: int):
    return ("matrix product", name, 2 * (into * out + rows * (into + out)))


def by_torch(function, *given) -> list:
    return [("torch, line by line", "", nbytes) for _, nbytes in launches_of(function, *given)]


def by_one_kernel(numbers: int) -> list:
    """The fewest bytes there can be: each input read once, each output written once."""
    return [("one fused kernel", "", 2 * numbers)]


def one_layer(rows: int, keys: int, fused: bool) -> list[tuple[str, str, int]]:
    """(kind, name, bytes) of each launch of a layer; `keys` tokens are in each row's cache."""
    dim, heads, kv_heads = gemma.head_dim, gemma.num_heads, gemma.num_kv_heads
    x, gate_up = empty(rows, hidden), empty(rows, 2 * inner)
    q, k, turns = empty(rows, heads, dim), empty(rows, kv_heads, dim), empty(rows, 2, dim)
    if fused:
        rotary = by_one_kernel(2 * q.numel() + 2 * k.numel() + turns.numel())
        write = by_one_kernel(4 * k.numel())
        norm = by_one_kernel(4 * x.numel())
        gate = by_one_kernel(gate_up.numel() * 3 // 2)
    else:
        rotary = by_torch(reference.rotary_embedding, q, k, turns)
        write = [
            ("torch, line by line", "", 2 * k.nbytes)
        ] * 2  # keys and values, each by itself
        norm = by_torch(reference.add_rms_norm, x, x, norm_weight, 1e-6)
        gate = by_torch(reference.gated_activation, gate_up, "gelu_tanh")
    return [
        matrix_product("qkv", hidden, (heads + 2 * kv_heads) * dim, rows),
        *rotary,
        *write,
        ("attention", "attention", 2 * rows * (2 * keys * kv_heads + 2 * heads) * dim),
        matrix_product("out", heads * dim, hidden, rows),
        *norm,
        matrix_product("gate and up", hidden, 2 * inner, rows),
        *gate,
        matrix_product("down", inner, hidden, rows),
        *norm,
    ]


def timed(layer) -> list[tuple[str, str, float]]:
    """The least microseconds of each launch in place of its bytes."""
    return [
        (kind, name, max(nbytes / limits["bytes_per_s"] * 1e6, smallest_us))
        for kind, name, nbytes in layer
    ]


ways = {
    "torch,\nline by line": timed(one_layer(64, 1024, fused=False)),
    "a kernel an\noperation": timed(one_layer(64, 1024, fused=True)),
}
for way, lane in ways.items():
    between = sum(
        time for kind, _, time in lane if kind not in ("matrix product", "attention")
    )
    label = way.replace("\n", " ")
    print(
        f"{label:<22} {len(lane):3} launches, {between:5.1f} µs beside products and attention"
    )
draw.timeline(ways, "One layer of Gemma 2B, 64 rows: the least time it can take")

# %% [markdown]
# The products are the same in both. What fusion takes away is the confetti between them, and the trips to memory that
# each piece of it makes.
#
# ## 6 · Three planted bugs
#
# Kernels have mistakes of their own, and they pass ordinary tests. Here is an operation that lesson 05 will need: a
# matrix of 8-bit integers times a vector, where each row of the matrix has its own scale:
#
# $$y_r = \text{scale}_r \sum_c w_{rc}\, x_c$$
#
# A vector is too little work for a GPU with over a hundred processors, so the *columns* are cut into pieces, and each
# program adds its piece's part to the result, with `tl.atomic_add`: it adds to memory so that no two programs get in
# each other's way.
#
# Three people wrote it, and tested it: 4 rows of 128 columns, scales of 0.5.

# %%
PIECE = 64  # columns of a program


@triton.jit
def version_a(weight_ptr, scale_ptr, x_ptr, out_ptr, first, ROWS, COLUMNS,
              ROW_TILE: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    piece = first + tl.program_id(0)
    rows, columns = tl.arange(0, ROW_TILE), piece * PIECE + tl.arange(0, PIECE)
    real = rows < ROWS
    at = rows[:, None] * COLUMNS + columns[None, :]
    weight = tl.load(weight_ptr + at, mask=real[:, None], other=0).to(tl.float32)
    x = tl.load(x_ptr + columns).to(tl.float32)
    part = tl.sum(weight * x[None, :], 1)
    scale = tl.load(scale_ptr + rows, mask=real, other=0.0)
    tl.atomic_add(out_ptr + rows, scale * part, mask=real)


@triton.jit
def version_b(weight_ptr, scale_ptr, x_ptr, out_ptr, first, ROWS, COLUMNS,
              ROW_TILE: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    piece = first + tl.program_id(0)
    rows, columns = tl.arange(0, ROW_TILE), piece * PIECE + tl.arange(0, PIECE)
    real, inside = rows < ROWS, columns < COLUMNS
    at = rows[:, None] * COLUMNS + columns[None, :]
    mask = real[:, None] & inside[None, :]
    weight = tl.load(weight_ptr + at, mask=mask, other=0).to(tl.float32)
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(out_ptr + rows, tl.sum(weight * x[None, :], 1), mask=real)
    if (piece + 1) * PIECE >= COLUMNS:
        scale = tl.load(scale_ptr + rows, mask=real, other=0.0)
        total = tl.load(out_ptr + rows, mask=real, other=0.0)
        tl.store(out_ptr + rows, scale * total, mask=real)


@triton.jit
def version_c(weight_ptr, scale_ptr, x_ptr, out_ptr, first, ROWS, COLUMNS,
              ROW_TILE: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    piece = first + tl.program_id(0)
    rows, columns = tl.arange(0, ROW_TILE), piece * PIECE + tl.arange(0, PIECE)
    real, inside = rows < ROWS, columns < COLUMNS
    at = rows[:, None] * COLUMNS + columns[None, :]
    mask = real[:, None] & inside[None, :]
    weight = tl.load(weight_ptr + at, mask=mask, other=0).to(tl.float32)
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    part = tl.sum(weight * x[None, :], 1)
    scale = tl.load(scale_ptr)
    tl.atomic_add(out_ptr + rows, scale * part, mask=real)


# %% [markdown]
# Their host function is the same. A GPU promises **no order** among a launch's programs: usually many run at once,
# and who is first is chance. To see what that does, we take the chance out: with `order`, programs are launched one
# at a time, in the order you name. (This is also why the kernels count from `first`.) A right kernel gives the same
# result in any order, up to rounding.
#
# The inputs lie in memory that holds 99 all around, so that reading too far shows.


# %%
def host(kernel):
    def product(weight, scale, x, order=None) -> torch.Tensor:
        """weight: [rows, columns] int8; scale: [rows]; x: [columns]. Returns scale * (weight @ x), [rows].

        order: the pieces, numbers 0 to cdiv(columns, PIECE) - 1, in the order in which their programs run;
        None: one launch of all.
        """
        (rows, columns), pieces = weight.shape, triton.cdiv(weight.shape[1], PIECE)
        given = [surrounded(each.to(device), by=99)[0] for each in (weight, scale, x)]
        out = torch.zeros(rows, device=device)
        for first, programs in (
            [(0, pieces)] if order is None else [(each, 1) for each in order]
        ):
            row_tile = triton.next_power_of_2(rows)
            kernel[(programs,)](
                *given, out, first, rows, columns, ROW_TILE=row_tile, PIECE=PIECE
            )
        return out.to(weight.device)

    return product


products = {"A": host(version_a), "B": host(version_b), "C": host(version_c)}


def authors_test(product) -> bool:
    weight, x = (
        torch.arange(512).remainder(7).sub(3).view(4, 128).to(torch.int8),
        torch.ones(128),
    )
    scale = torch.full((4,), 0.5)
    return torch.allclose(product(weight, scale, x), scale * (weight.float() @ x))


for name, product in products.items():
    print(f"version {name} passes its author's test: {authors_test(product)}")

# %% [markdown]
# All three pass, at least in the interpreter. (On a GPU one of them may fail now and then. Its author would run the
# test again.)
#
# **Exercise 4.** Write the test they should have written. `find_fault` gets a product like those above (call it with
# `product(weight, scale, x)` or `product(weight, scale, x, order)`), tries it on inputs of your choice, and compares
# with torch. It returns `None` if all is well, or else a few words about the input that failed.
#
# What to try is up to you: read the three kernels, and for each find an input on which it *must* be wrong. Then the
# test is written for all of them, and for many mistakes that nobody has made yet. Be as strict as rounding allows,
# and no stricter: pieces are added up in any order.
#
# For example, a right product gives `None`; one that always answers 0 gives some text.


# %% tags=["exercise"]
def find_fault(product) -> str | None:
    """What input `product` fails on, in a few words; None for a right one.

    product(weight [rows, columns] int8, scale [rows], x [columns], order=None) -> [rows]
    """
    # SOLUTION: whole and odd numbers of columns; first to last, and last to first; scales that
    #   differ; compare all rows with scale * (weight.float() @ x), with a tolerance
    generator = torch.Generator().manual_seed(0)
    for columns in (PIECE, 2 * PIECE, 2 * PIECE + 36):
        pieces = -(-columns // PIECE)
        weight = torch.randint(-9, 10, (3, columns), generator=generator).to(torch.int8)
        x = torch.randn(columns, generator=generator)
        for scale in (torch.full((3,), 0.5), torch.tensor([0.5, 0.25, 2.0])):
            wanted = scale * (weight.float() @ x)
            for order in (None, range(pieces), reversed(range(pieces))):
                order = None if order is None else list(order)
                found = product(weight, scale, x, order)
                if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-3):
                    return f"{columns} columns, scales {scale.tolist()}, order {order}"
    return None
    # END


# %%
check(find_fault)

# %%
find = yours(find_fault, lambda product: "(exercise 4 is not solved yet)")
for name, product in products.items():
    print(f"version {name}: {find(product) or 'right'}")

# %% [markdown]
# Each fails on another kind of input. Now mend them: change the kernels, run their cells and the last one again, until
# it says `right` three times. (One line each; B needs a little more thought.)
#
# <details><summary>Where they are</summary>
#
# * **A** has a missing mask: `columns < COLUMNS` is asked nowhere. In the last piece it multiplies what lies behind
#   the row, which is the next row. With 128 columns in pieces of 64 there is nothing to mask.
# * **B** needs its programs in order: the *last piece* scales everything, as if all others had been added by then.
#   In the order 0, 1, 2 that is so. If piece 1 is first, its part alone is scaled. Scale before adding, as A does;
#   or count who has finished, and let the last *to finish* do it, as the engine's one-row attention does.
# * **C** loads the scale of row 0 for every row: `scale_ptr` in place of `scale_ptr + rows`, with the mask.
# </details>
#
# On a GPU, B is worse than wrong: it is *sometimes* wrong, with the chance of who comes first. That is why its order
# has to be forced in a test. NVIDIA's `compute-sanitizer` finds reads and writes outside of tensors, and some races.
#
# ## 7 · Which tile?
#
# Nothing in the mathematics says how many columns a tile has, or over how many *warps* (groups of 32 threads) it is
# spread. Small tiles mean many programs with little to do; large ones need registers, and a chip that cannot be filled
# with enough of them waits for memory. Nobody derives the best choice. One measures it.
#
# Below is the gate of Gemma 2B's FFN with every choice, on an H200 (`tests/kernels/measure_tiles.py`).

# %%
table = records.read("h200/tiles")["results"]
SHOWN = {1: "1 row", 3000: "3,000 rows"}
tile_sizes = sorted({each["tile"] for each in table})
warps = sorted({each["warps"] for each in table})
speeds = {(each["rows"], each["tile"], each["warps"]): each["gb_per_s"] for each in table}
maps = {
    f"GeGLU, {title}": np.array(
        [[speeds[rows, tile, w] for w in warps] for tile in tile_sizes]
    )
    for rows, title in SHOWN.items()
}
for title, values in maps.items():
    tile, warp = np.unravel_index(values.argmax(), values.shape)
    print(
        f"{title:<18} best: {tile_sizes[tile]} columns and {warps[warp]} warps,"
        f" {values.max() / values.min():.1f} times as fast as the worst"
    )
draw.tuning(maps, tile_sizes, warps, unit="GB/s on an H200")

# %% [markdown]
# One row wants small tiles: only many programs fill the chip. Thousands of rows fill it anyway; there a tile that is
# large for its warps (lower left) holds so many numbers that registers run out, and one that is small for them (upper
# right) leaves threads with nothing to do.
#
# Triton can do the measuring itself: `@triton.autotune(configs=[...], key=[...])` tries all configurations at the
# first launch with each new key, and keeps the fastest. That is convenient and has a price: the first request of
# each new size waits until all of them are compiled and measured, and the choice varies from run to run. (Without a
# GPU it fails: there is nothing to measure.)
#
# This engine measures beforehand. Its kernels have rules of thumb that such tables taught. For a norm's row it is this
# one, which gives a tile and its warps:

# %%
# ENGINE: minillm.kernels.normalization:_launch

# %% [markdown]
# `minillm build` goes further: it measures the launches of *this* model on *this* GPU, for the traffic you expect, and
# writes what was faster into a plan. At each launch, a kernel that has a choice asks for it:

# %%
# ENGINE: minillm.kernels.launch_configs:tuned

# %% [markdown]
# ## 8 · CUDA graphs
#
# So far a launch cost what the GPU needs to start a kernel. But somebody has to *ask* for it: Python runs a line,
# torch finds the kernel, the driver puts it into a queue. In a decode step of one request there are some two hundred
# launches, each of a few microseconds of work.
#
# **Predict first.** The engine with CUDA graphs decodes one request of Gemma 2B on an H200 at the first speed below.
# How fast is it without them?

# %%
ablation = records.read("h200/ablation")


def speed(group: str, name: str, requests: int = 1) -> float:
    """Output tokens a second of one setting of the record."""
    return next(
        row["output_tokens_per_s"]
        for row in ablation["results"]
        if (row["group"], row["name"], row["requests"]) == (group, name, requests)
    )


print(f"one request, with CUDA graphs: {speed('CUDA graphs', 'on'):.0f} tokens/s")

# %% tags=["exercise"]
guess_without_graphs = 300.0  # PREDICT: tokens a second of one request without CUDA graphs

# %%
without = speed("CUDA graphs", "off")
compare("without graphs", unit="tokens/s", prediction=guess_without_graphs, measured=without)
launches = gemma.num_layers * len(one_layer(1, 256, fused=True))
asking_us = 1e6 / without / launches
print(
    f"that is {1e3 / without:.1f} ms a step, {asking_us:.0f} µs for each of some {launches} launches"
)

# %% [markdown]
# The kernels are the same. The GPU runs a small one in a microsecond and a half (section 1), and then waits until the
# CPU, a slow one on that machine, has asked for the next:

# %%
COUNT = 8
one_by_one = [(each * asking_us, 0.96 * asking_us) for each in range(COUNT)]
run = [((each + 1) * asking_us, smallest_us) for each in range(COUNT)]
replayed = [(asking_us + each * smallest_us, 0.8 * smallest_us) for each in range(COUNT)]
draw.lanes(
    "Eight small kernels, one by one and as a graph",
    {
        "one by one: CPU": one_by_one,
        "one by one: GPU": run,
        "as a graph: CPU": [(0, 0.96 * asking_us)],
        "as a graph: GPU": replayed,
    },
)

# %% [markdown]
# A **CUDA graph** is a recording. Run the step once while CUDA notes every launch with all its arguments; from then on
# *replay* all of it with a single call. Hundreds of launches cost the CPU what one did.
#
# Arguments are *addresses* and *sizes*. So a graph demands that inputs lie at the same place every time, that no
# shape changes, and that nothing on the way waits for the CPU. The engine therefore keeps the state of its rows on
# the device, records a graph for each of some batch sizes, and pads a batch to the next one:

# %%
# ENGINE: minillm.runner.decode_graphs:DecodeGraphs.captured
# ENGINE: minillm.runner.decode_graphs:batch_sizes

# %% [markdown]
# A step that runs prompts is more ragged. It is padded too, to one of a few numbers of tokens and of rows, and which
# token belongs to which row travels in one array that the recorded kernels read (`minillm/runner/mixed_graphs.py`).
# Padding costs nothing while the step takes as long as reading the weights; beyond 1,024 tokens the GPU is busy for
# longer than the CPU takes to launch, and the engine launches one by one.
#
# With more requests in a step, the GPU has more to do for each launch, and waits less. The record takes one part away
# at a time:

# %%
plots.ablation(ablation, groups=["CUDA graphs", "sampling"])
plt.show()

# %% [markdown]
# (Sampling inside the graph brings nothing measurable: behind it, it is a single launch. Not every good idea pays.)
#
# So what a request asks beside a temperature needs no recording of its own. The graph runs for everybody, and its
# logits stay where they are until the next replay. Rows that want penalties, or only the likeliest tokens, are sampled
# once more, in kernels launched behind it; whoever wants log-probabilities reads them there. That is not free, and
# everyone in the step waits for it:

# %%
plots.ablation(ablation, groups=["asked for"])
plt.show()

# %% [markdown]
# (`top_k` is 64 and `top_p` 0.95, as many models recommend; "of one" is one request among all. Random weights make
# `top_p` alone look worse than it is: their distributions are nearly flat, and the tokens that sum to 0.95 have to be
# searched for among 256,000. A trained model's are among the first thousand, which is what `top_k` first leaves.)
#
# A recording knows nothing about functions that you put in later. So while one of yours runs, the engine launches
# everything one by one; unless you promise, with `using(capturable=True, ...)`, that yours may be recorded too. It
# may, if it launches the same kernels for the same shapes and never looks at a value on the CPU. Yours keep that
# promise. On a GPU you see what it is worth:

# %% tags=["nbval-ignore-output"] uncompared="times, on a GPU only"
if here.name == "gpu":
    import time

    def tokens_a_second(count: int = 64) -> float:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        llm.generate(prompt, params)  # compiles, and records
        start = time.perf_counter()
        llm.generate(prompt, params)
        return count / (time.perf_counter() - start)

    print(f"the engine's own           {tokens_a_second():6.0f} tokens/s")
    with using(**mine):
        print(f"yours, one by one          {tokens_a_second():6.0f} tokens/s")
    with using(capturable=True, **mine) as used:
        print(f"yours, in a graph          {tokens_a_second():6.0f} tokens/s")
    print("recorded:", used.calls)
else:
    print("No GPU here: nothing is recorded, and nothing replayed.")

# %% [markdown]
# ## 9 · One request
#
# In a graph, launches cost the CPU nothing. They still cost the GPU: a kernel ends when its last program ends, and
# until the next one's loads arrive the memory has nothing to do. With one request that is what is left between the
# engine and its floor. So for this case the engine goes further. The four products of a layer read all weights for a
# single vector; everything between them is so little that it fits *into* them:
#
# 1. norm, QKV product;
# 2. rotation, cache, attention;
# 3. output product;
# 4. residual sum, norm, gate and up products, GeGLU;
# 5. down product.

# %%
dim, heads, kv_heads = gemma.head_dim, gemma.num_heads, gemma.num_kv_heads
KEYS = 256
five = [
    matrix_product("norm, qkv", hidden, (heads + 2 * kv_heads) * dim, 1),
    ("attention", "", 2 * (2 * KEYS * kv_heads + 2 * heads) * dim),
    matrix_product("out", heads * dim, hidden, 1),
    matrix_product("sum, norm, gate and up, GeGLU", hidden, 2 * inner, 1),
    matrix_product("down", inner, hidden, 1),
]
ways = {
    "torch,\nline by line": timed(one_layer(1, KEYS, fused=False)),
    "a kernel an\noperation": timed(one_layer(1, KEYS, fused=True)),
    "five\nlaunches": timed(five),
}
draw.timeline(ways, "One layer of Gemma 2B, one row: the least time it can take")

# %% [markdown]
# 18 layers and the head make a step, and a step makes a token. So each way has a bound. What section 8 showed was the
# engine with five launches a layer. How fast was it with ten?

# %% tags=["exercise"]
guess_ten_launches = 600.0  # PREDICT: tokens a second with ten launches a layer

# %%
head_us = 2 * gemma.vocab_size * hidden / limits["bytes_per_s"] * 1e6
names = ("plain torch", "a kernel an operation", "five launches a layer")
guesses = (None, guess_ten_launches, None)
for name, guess, lane in zip(names, guesses, ways.values()):
    step_us = gemma.num_layers * sum(time for *_, time in lane) + head_us
    found = {"floor": 1e6 / step_us, "measured": speed("fusion", name)}
    compare(name, unit="tokens/s", prediction=guess, **found)

# %%
plots.ablation(ablation, groups=["fusion"])
plt.show()

# %% [markdown]
# Kernels for several operations pay at both ends: one request saves launches, 256 at once save bytes. Five launches a
# layer are for one request only: with more, a product uses each weight several times, and needs its tiles for that.
#
# And one more thing hides the ends of kernels: **programmatic dependent launch**, of NVIDIA's GPUs from Hopper on. A
# kernel may start while the one before it still runs. It loads its first *weights*, which depend on nobody, and only
# then waits for the vector that the other one is computing. That is all it takes:

# %%
# ENGINE: minillm.kernels.single_row:_wait_for_inputs

# %% [markdown]
# And this is launch 1 and launch 4. You know all of its parts: tiles, masks, an addition, a norm, a gate. The matrix
# product is `tl.sum(weight * x)`, because with one vector no number of the matrix is used twice.

# %%
# ENGINE: minillm.kernels.single_row:whole_rows_kernel

# %% [markdown]
# ## 10 · TensorRT's list
#
# TensorRT is NVIDIA's compiler for networks. Apart from smaller numbers (lesson 05), NVIDIA says it does these six
# things. What are they in an engine that you can read?
#
# * **Layer and tensor fusion:** sections 3 to 5, and 9. Sideways too: Q, K and V are one matrix, gate and up are one.
# * **Kernel auto-tuning:** section 7, and `minillm build`.
# * **Dynamic tensor memory:** below.
# * **Multi-stream execution:** not here, for layers. Each needs the one before, and one decode kernel is enough to use
#   up the memory's speed, which a second stream would have to share. What does overlap is a kernel's start with the
#   end of the one before (section 9), and results that travel to the CPU while the next step runs (lesson 10).
# * **Time fusion** merges the steps in time of recurrent networks. A transformer has none within a prompt: all
#   tokens go through at once. In decode, a step's input is the token that the step before has sampled. Both ends of
#   a step are in the graph (section 8), so one follows the other without the CPU.
# * **Graph to engine:** TensorRT compiles a network into a file for one GPU. Here the model stays Python, and a CUDA
#   graph is recorded when it first runs. What was *measured* goes into a file, the plan, and is refused on another
#   GPU.
#
# The third can be counted. A step makes tensors that nobody needs a moment later. Torch gives their memory to the next
# ones, and all graphs of the engine share one pool. So a step needs what is alive at the same time, and not the sum:

# %%
ROWS = 3000
qkv_size = (heads + 2 * kv_heads) * dim
made = {  # numbers a row, and what else is alive meanwhile: the residual
    "qkv": qkv_size,
    "turned q, k": (heads + kv_heads) * dim,
    "attended": heads * dim,
    "out": hidden,
    "sum, normed": 2 * hidden,
    "gate and up": 2 * inner,
    "gated": inner,
    "down": hidden,
    "sum, normed again": 2 * hidden,
}
everything = 2 * ROWS * gemma.num_layers * sum(made.values())
alive = 2 * ROWS * max(a + b + hidden for a, b in zip(made.values(), [*made.values()][1:]))
print(f"memory for each tensor of a step of {ROWS:,} rows  {everything / 1e9:5.2f} GB")
print(f"for what is alive at the same time             {alive / 1e9:5.2f} GB")

# %% [markdown]
# The largest part of memory, keys and values, gets its place when the engine starts, and is dealt out in blocks
# (lesson 09). Whatever else a step needs is taken from the room that could hold more requests.
#
# At last, the engine's own kernel for exercise 3, to lay beside yours. It differs in what a server needs: rows may
# lie apart from each other (`x_stride`), and row numbers are 64 bits wide, because a row number times a row's length
# can be more than 32 bits hold.

# %%
# ENGINE: minillm.kernels.normalization:add_rms_norm_kernel

# %% [markdown]
# ## Recap
#
# * Each line of torch is at least one launch, and a trip to memory for all that it reads and writes. Fusion keeps
#   numbers in registers: fewer bytes where there are many rows, fewer launches where there are few.
# * A kernel is: where am I, what is mine, load with a mask, compute in float32, store with a mask. Nothing checks
#   bounds.
# * A launch's programs have no order. Test kernels with sizes that fit no tile, in other orders, with scales that
#   differ, and in memory that would show a trace.
# * Tiles and warps are measured, not derived. CUDA graphs take the CPU's part of launches away; programmatic dependent
#   launch hides some of the GPU's.
#
# **What got worse:** two lines of torch have become thirty of Triton, for one step of one family of models, with
# mistakes that two lines cannot have. A kernel must be compiled before it first runs. A tuned choice holds for one
# GPU. Graphs take time to record and memory, pad batches, and make it hard to look inside a step. And fusion across
# the products, as in section 9, works for exactly one row.
#
# **Further reading:** Tillet, Kung and Cox 2019, *Triton: an intermediate language and compiler for tiled neural
# network computations*; the tutorials in Triton's documentation; Shazeer 2020, *GLU Variants Improve Transformer*;
# NVIDIA, *CUDA Programming Guide*: "CUDA Graphs" and "Programmatic Dependent Launch and Synchronization"; Gray
# 2019, *Getting Started with CUDA Graphs*. Next: lesson 04, attention as kernels.
