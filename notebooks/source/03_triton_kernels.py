# %% [markdown]
# # 03 · Triton kernels
#
# After this lesson you can count what a line of torch costs a GPU, in bytes and in launches; write Triton kernels that
# do several lines in one launch, and run them inside the engine; address a tile of a matrix, and multiply two matrices
# tile by tile; and find bugs that kernels have and ordinary tests miss.
#
# **90 minutes, plus 3 optional. Needs:** Linux, and lessons 00 and 02. Without a GPU the kernels are *interpreted*:
# correct, but slow. With a GPU the same cells compile them. Times in this lesson come from the project's H200 records.
# Triton's own releases are for Linux. On Windows and macOS, run this lesson in WSL or on Colab, or read it solved and
# with its outputs: in `notebooks/solutions/`, or on the site that `make site` builds.

# %%
import torch

from minillm import LLM
from minillm.course import NotSolvedYet, check, compare, describe, solved, tier, triton_here
from minillm.course.lesson_03.planted import authors_test, product_by
from minillm.course.shared import kernel_pictures as draw
from minillm.course.shared.interpret import strays, surrounded, untouched
from minillm.course.shared.launches import empty, h200_times, h200_us, launches_of
from minillm.course.shared.stubs import raise_if_stub, same_text_with
from minillm.model.config import PRESETS
from minillm.ops import reference

# %%
here = tier()
kernels_are = triton_here()
print("kernels are", kernels_are)

import triton
import triton.language as tl

device = here.device

# %% [markdown]
# Triton decides when a kernel is defined whether to compile or interpret it, and Triton's own functions are defined
# when it is imported. That is why `triton_here()` comes before `import triton`.
#
# ## 1 · What a line of torch costs · 7 min
#
# Every torch operation runs as a **kernel**: a program on the GPU that reads its inputs from memory, computes, and
# writes its result back to memory. The next operation reads that result again. And every kernel has to be *launched*,
# which takes time even if there is almost nothing to compute.
#
# This function runs twice in every layer. The first time it adds the output of attention to the token's vector and
# normalizes the sum for the MLP; the second time it adds the MLP's output and normalizes for what comes next:

# %%
# ENGINE: minillm.ops.reference:add_rms_norm

# %% [markdown]
# Two lines. How many kernels? `launches_of` records every operation that torch runs and the bytes that it reads and
# writes. Tensors on the device `meta` have a shape but no data, so we can count Gemma 2B's sizes on any machine.

# %%
gemma = PRESETS["gemma-2b"]
tokens, hidden = 512, gemma.hidden_size
x, norm_weight = empty(tokens, hidden), empty(hidden, dtype=torch.float32)
unfused = launches_of(reference.add_rms_norm, x, x, norm_weight, 1e-6)
for name, nbytes in unfused:
    print(f"{name:<8} {nbytes / 1e6:6.2f} MB")
unfused_bytes = sum(nbytes for _, nbytes in unfused)
print(f"{len(unfused)} launches, {unfused_bytes / 1e6:.1f} MB")

# %% [markdown]
# `to_copy` converts between bfloat16 and float32. Each line of this list is a round trip to memory.
#
# **Predict first.** A single kernel could do all of it: read the two inputs and the weight, keep everything else in
# registers, and write the two outputs. How many times fewer bytes would it move? How many times faster would it be on
# the H200, for 512 tokens? And for one?

# %% tags=["exercise"]
guess_bytes = 4.0  # PREDICT: how many times fewer bytes one kernel moves
guess_faster = 4.0  # PREDICT: how many times faster it is, for 512 tokens
guess_faster_one = 2.0  # PREDICT: how many times faster it is, for one token

# %%
fused_bytes = 4 * x.nbytes + norm_weight.nbytes
times = h200_times("add_rms_norm")  # tokens: (µs line by line, µs in one kernel)
faster = {rows: before / after for rows, (before, after) in times.items()}
ratio = unfused_bytes / fused_bytes
compare("bytes", unit="times fewer", prediction=guess_bytes, measured=ratio)
compare("512 tokens", unit="times faster", prediction=guess_faster, measured=faster[512])
compare("1 token", unit="times faster", prediction=guess_faster_one, measured=faster[1])
draw.bytes_moved({"torch, line by line": unfused, "one kernel": [("all", fused_bytes)]})
describe(
    "Two bars of bytes moved for 512 tokens. Line by line, torch moves several times as many"
    " bytes, in seven visible segments (two of the nine launches move almost nothing); the single"
    " kernel's bar has one segment."
)

# %% [markdown]
# The single kernel moves fewer bytes and saves launches. Which of the two matters? These times were measured inside a
# CUDA graph (lesson 11), where one call from the CPU launches all the kernels. What is left is the GPU's own cost of
# starting and finishing a kernel.

# %%
for rows, (before, after) in times.items():
    bytes_us = h200_us((unfused_bytes - fused_bytes) * rows / tokens)
    print(
        f"{rows:>5,} tokens: {before:4.1f} -> {after:4.1f} µs, saves {before - after:4.1f} µs;"
        f" moving the saved bytes would take at most {bytes_us:4.1f} µs"
    )

# %% [markdown]
# For one token, the bytes explain nothing; the savings come from running eight fewer kernels. For 512 tokens, the bytes
# explain less than half of the savings. For 3,000, they can explain most. ("At most", because what one kernel writes
# may still be in the GPU's L2 cache when the next one reads it.)
#
# Turning several operations into one kernel is called **fusion**. It pays off for operations that do little arithmetic
# per element: norms, activations, rotations, sums.
#
# ## 2 · A first kernel · 6 min
#
# A Triton kernel is a function that runs many times in parallel. Each run is called a **program**. It gets its index
# from `tl.program_id` and computes one **tile** of the result. All the programs of a launch form the **grid**. Inside a
# program you write code for whole tiles, as in torch; Triton distributes a tile over the GPU's threads.
#
# A kernel gets *pointers*: addresses in memory. A pointer plus a tile of integers is a tile of addresses. A tile's size
# must be a power of two, but the data can have any size, so the last tile may reach past the end. A **mask** says
# which elements of the tile are real:

# %%
draw.tiles(rows=3, columns=13, tile=4)
describe(
    "Three rows of 13 columns, cut into tiles of four. Each colored tile has a program numbered"
    " (row, tile). The last tile of each row reaches three columns past the end; those are hatched."
)

# %% [markdown]
# Every kernel follows this pattern: *where am I, what is mine, load, compute, store.*


# %%
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, SIZE, TILE: tl.constexpr):
    program = tl.program_id(0)
    at = program * TILE + tl.arange(0, TILE)  # [TILE]: this program's elements
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
# * `@triton.jit` turns a function into a kernel. `kernel[grid](...)` launches it on a grid of one, two or three
#   dimensions. `triton.cdiv` divides and rounds *up*: 1,000 elements in tiles of 256 need 4 programs.
# * `tl.constexpr` marks a value that must be known when the kernel is compiled, such as a tile's size. Triton compiles
#   a separate kernel for each value.
# * `other=0.0` is the value that `tl.load` returns for masked elements.
# * `.to(tl.float32)`: load, widen, compute, store. Half-precision arithmetic loses too many digits. `tl.store` rounds
#   the result to the type of the memory, once, at the end. In the interpreter, bfloat16 numbers *must* be widened: it
#   stores them as 16-bit integers and would silently compute with those.
# * There are no bounds checks. Memory outside a tensor may belong to other tensors.
#
# The last point deserves an experiment. We put the result into memory that holds -1 everywhere, and leave out one mask:


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
    print(f"right: {right}, written: {written}, rest untouched: {untouched(memory, by=-1.0)}")

# %% [markdown]
# Both results are right! But the second kernel also overwrote the 24 numbers after them. In a real program those may
# belong to another tensor, and the bug shows up later, somewhere else. The checks in this lesson look at that memory
# too.
#
# **Where this runs.** In the interpreter, a program is Python code on NumPy arrays, and programs run one after
# another. That is good for looking inside and for checking, and useless for timing. So our problems are tiny. On a GPU,
# the same source is compiled at its first launch. Compiled kernels cannot be watched: `print` in them shows no tiles,
# and the checks' lines about what is *read* then test little. For the interpreter, put `%env MINILLM_TIER=cpu` in a new
# first cell and restart.
#
# ## 3 · GeGLU · 12 min
#
# GeGLU, a gated linear unit with GELU, is the activation of Gemma's gated MLP (lesson 02). Its input comes from one
# matrix product: a gate half and an up half, side by side.
#
# $$\text{out} = \text{gelu}(\text{gate}) \cdot \text{up}, \qquad
# \text{gelu}(g) = g \cdot \sigma\!\left(1.5957691\,(g + 0.044715\, g^3)\right), \qquad
# \sigma(z) = \frac{1}{1 + e^{-z}}$$
#
# (This is the tanh approximation of GELU, which Gemma uses: $\frac{1 + \tanh y}{2} = \sigma(2y)$, and 1.5957691 is
# $2\sqrt{2 / \pi}$.) No element depends on another, so any tiling works. Torch runs it in two kernels and writes the
# activated gate to memory in between.
#
# **Exercise 1 (8 minutes).** Write the kernel; its launch, `geglu`, is given. The grid has two dimensions, rows and
# tiles of a row, as in the picture of section 2: the program's indices are `tl.program_id(0)` and `tl.program_id(1)`. A
# row of `gate_up` is `2 * SIZE` long: first its gates, then its ups. `tl.sigmoid` exists. `**` does not, so write
# `g * g * g`.
#
# For example, gates `[10, 0]` and ups `[10, 0]` give `[100, 0]`.
#
# Functions in this lesson write into an `out` tensor that is passed in, so that the checks can inspect the memory
# around it. They launch one kernel, once, which does all the loading, computing and storing. (`raise_if_stub` reports
# an empty kernel as "not solved yet".)


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
    rows, size = out.shape
    geglu_kernel[(rows, triton.cdiv(size, 1024))](gate_up, out, size, TILE=1024)


# %%
check(geglu)

# %% [markdown]
# Now run it inside the engine, in every layer of every step. The engine calls `gated_activation(gate_up, activation)`
# and expects a new tensor, so a short function adapts yours. `same_text` generates with and without your operations
# (with `using`, lesson 00) and compares the two texts.

# %%
# no prefix cache: it would reuse the keys and values that other kernels computed
llm = LLM(enable_prefix_caching=False, **here.words)
same_text = same_text_with(llm, "Fenwick lies on the island of")


def my_gated_activation(gate_up, activation):
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    geglu(gate_up, out)
    return out


same_text(gated_activation=my_gated_activation)

# %% [markdown]
# (With random weights every text is nonsense, so the embedded model runs instead. Your kernels may round differently
# from the engine's. On a GPU, in bfloat16, the texts may then differ from a token on for which two are almost equally
# likely.)
#
# ## 4 · Add and norm · 15 min
#
# In RMSNorm the elements of a row do depend on each other: each is divided by the root mean square of the row.
#
# $$\text{rms\_norm}(s)_j = \frac{s_j}{\sqrt{\frac{1}{d} \sum_k s_k^2 + \varepsilon}} \; w_j$$
#
# If several programs shared a row, they would have to exchange partial sums through memory. But a row of Gemma 2B is
# 2,048 numbers, which fit into one program's registers. So we use **one program per row**, with the whole row in one
# tile, read once. `triton.next_power_of_2(d)` is the smallest tile that holds a row; the rest of the tile is masked:

# %%
draw.tiles(rows=3, columns=13, tile=16)
describe(
    "Three rows of 13 columns, one program per row. Each program's tile has 16 columns; the last"
    " three are past the end of the row and hatched."
)

# %% [markdown]
# `tl.sum(tile)` adds up a tile. The masked elements are 0, so they do not change a sum. Do they change a mean?


# %%
@triton.jit
def row_mean_kernel(x_ptr, out_ptr, DIM, TILE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    x = tl.load(x_ptr + row * DIM + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x) / DIM)


rows = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], device=device)
means = torch.empty(2, device=device)
row_mean_kernel[(2,)](rows, means, 3, TILE=4)
print("means of the two rows:", means.tolist())

# %% [markdown]
# They would, if we divided by the size of the tile. We divide by `DIM`, and a row starts at `row * DIM`.
#
# The engine needs two results: the sum of `x` and the residual, which goes on to the next layer, and the norm of that
# sum, which goes into the next matrix product. As a separate kernel, the norm would have to read the sum that an
# addition just wrote. Fused, the sum is already in registers:
#
# $$s = x + r, \qquad \text{out} = \text{rms\_norm}(s)$$
#
# One detail is easy to get wrong. The sum is *stored* in bfloat16, so it is rounded. Later layers read the rounded sum.
# If this norm used the exact sum, its result would not match what later layers see. So round first, then normalize.
#
# **Exercise 2 (9 minutes).** Write the kernel; its launch is given. `tl.rsqrt` is one over the square root. The type
# that `total_ptr` points to is `total_ptr.dtype.element_ty`.
#
# For example, `x = [1, -1, 1, -1]` and `residual = [2, -2, 2, -2]` give the sum `[3, -3, 3, -3]` and, with weights of
# 1, the norm `[1, -1, 1, -1]`.


# %% tags=["exercise"]
@triton.jit
def add_row_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, DIM, TILE: tl.constexpr
):
    """Program `row` computes one row of out and of total. TILE, a power of two, is at least DIM."""
    # SOLUTION: load both rows; add; round to total's type and store; normalize what was stored
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
    """x, residual, out, total: [rows, d]; weight: [d], float32.

    Writes x + residual to total, and its norm to out.
    """
    raise_if_stub(add_row_norm_kernel)
    rows, dim = x.shape
    tile = triton.next_power_of_2(dim)
    add_row_norm_kernel[(rows,)](x, residual, weight, out, total, eps, dim, TILE=tile)


# %%
check(add_row_norm)


# %%
def my_add_rms_norm(x, residual, weight, eps):
    out, total = torch.empty_like(x), torch.empty_like(x)
    add_row_norm(x, residual, weight, eps, out, total)
    return out, total


same_text(add_rms_norm=my_add_rms_norm, gated_activation=my_gated_activation)

# %% [markdown]
# The engine's own kernel adds two things that a server needs. Rows may be farther apart than they are long
# (`x_stride`), and row numbers are 64-bit integers, because a row number times a row's length can exceed 32 bits. Look
# for those two, and for the line that rounds. The last line stores the row: as `out` here, or, if there is a place for
# a scale, in eight bits (lesson 07). `max_contiguous` keeps the order of the sum the same in both cases. And
# `wait_for_inputs` lets the kernel start, and read its weight, before the kernel that computes `x` has ended (lesson
# 11).

# %%
# ENGINE: minillm.kernels.normalization:add_rms_norm_kernel

# %% [markdown]
# ## 5 · Tiles of rows and columns · 14 min
#
# So far a tile was a piece of one row. Matrix products and attention need tiles with **two axes**. Two one-dimensional
# ranges become a two-dimensional tile of addresses by broadcasting, as in torch: `rows[:, None]` is a column,
# `columns[None, :]` is a row, and their sum is a matrix. A tensor's **strides** say how far apart neighbors are: moving
# down one row adds `x.stride(0)` to the address, and moving right one column adds `x.stride(1)`.
#
# In the interpreter, `print` works inside a kernel. That is the quickest way to see what a program does. Here is one
# program on a matrix of 3 rows and 5 columns:


# %%
@triton.jit
def look_kernel(x_ptr, ROWS, COLUMNS, row_stride, column_stride, TILE: tl.constexpr):
    rows, columns = tl.arange(0, TILE), tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = rows[:, None] * row_stride + columns[None, :] * column_stride  # [TILE, TILE]
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=-1)
    print("at\n", at)
    print("inside\n", inside)
    print("x\n", x)


matrix = torch.arange(10, 25, device=device).view(3, 5)
print(matrix.cpu(), "strides", matrix.stride(), "\n")
if kernels_are == "interpreted":
    look_kernel[(1,)](matrix, 3, 5, *matrix.stride(), TILE=4)
else:
    print("tiles not shown: in a compiled kernel each thread would print its own number.")
    print("To see them, use the interpreter (section 2, MINILLM_TIER=cpu).")

# %% [markdown]
# **Exercise 3 (9 minutes).** Write a kernel and its launch: it copies `x` to `out`, transposed, `out[j, i] = x[i, j]`.
# Program `(i, j)` loads one tile of `x` and stores it with rows and columns exchanged: the element in row `r` and
# column `c` of `x` goes to row `c` and column `r` of `out`. Both tensors may have any strides, and their sizes need not
# be multiples of the tile. A copy must not change the type, so leave out `.to(tl.float32)`. When in doubt, in the
# interpreter, `print` your rows, columns or addresses in the kernel and run `transpose(matrix, matrix.new_empty(5, 3))`
# in a new cell. Remove the `print` before `check`, which runs many programs.
#
# For example, `[[1, 2, 3], [4, 5, 6]]` becomes `[[1, 4], [2, 5], [3, 6]]`.


# %% tags=["exercise"]
@triton.jit
def transpose_kernel(
    x_ptr, out_ptr, ROWS, COLUMNS, x_row, x_column, out_row, out_column, TILE: tl.constexpr
):
    """Program (i, j) transposes a TILE x TILE tile of x, [ROWS, COLUMNS].

    x_row, x_column, out_row, out_column: the strides of x and out.
    """
    # SOLUTION: rows and columns of this program; a mask for both; load a tile; store it with the
    #   axes exchanged
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    x = tl.load(
        x_ptr + rows[:, None] * x_row + columns[None, :] * x_column, mask=inside, other=0.0
    )
    to = columns[None, :] * out_row + rows[:, None] * out_column
    tl.store(out_ptr + to, x, mask=inside)
    # END


def transpose(x: torch.Tensor, out: torch.Tensor) -> None:
    """x: [rows, columns], out: [columns, rows], any strides; writes x transposed to out."""
    raise_if_stub(transpose_kernel)
    # SOLUTION: a grid of tiles of 32 x 32, rounded up on both axes; pass all four strides
    rows, columns = x.shape
    grid = (triton.cdiv(rows, 32), triton.cdiv(columns, 32))
    transpose_kernel[grid](x, out, rows, columns, *x.stride(), *out.stride(), TILE=32)
    # END


# %%
check(transpose)

# %% [markdown]
# ## 6 · A matrix product · 14 min
#
# A layer of the model multiplies by four matrices. torch stores a weight as `[out, in]`, so the product is
#
# $$\text{out}_{ij} = \sum_k x_{ik}\, w_{jk}, \qquad \text{out} = x\, w^{\mathsf T}$$
#
# A program computes one tile of `out`. It needs a band of rows of `x` and a band of rows of `w`. Those do not fit into
# registers, so it walks along `k` in pieces: load a tile of `x` and a tile of `w`, multiply them, and add the product
# to a running total, which stays in registers. Attention kernels (lesson 04) have the same loop, over the keys.

# %%
draw.product_tiles(rows=4, out=6, pieces=3, program=(1, 2))
describe(
    "Three matrices. One tile of out is highlighted. The tiles of x at the same height and the"
    " band of rows of the weight that belongs to its columns are cut into three numbered pieces."
)

# %% [markdown]
# `tl.dot(a, b)` multiplies two tiles, `[M, K]` and `[K, N]`; on an NVIDIA GPU, `K` must be at least 16 (32 for 8-bit
# types). `tl.trans(tile)` exchanges a tile's axes. So each piece adds
# `tl.dot(x, tl.trans(weight), input_precision="ieee")` to the total. Without `"ieee"`, tensor cores round float32
# inputs to 10 bits of mantissa, a format called TF32. (Real kernels leave bfloat16 tiles as they are, because tensor
# cores multiply those faster. We widen them to float32 for the interpreter.)
#
# **Exercise 4 (8 minutes).** Write the body of the loop over the pieces of `k`; the rest of the kernel and its launch
# are given. All tensors are contiguous. Which masks does each load need? Numbers past the end of a row must not add
# anything. To see the pieces in the interpreter, call `print(start, x, weight)` in the loop, and run this in a new
# cell: `one = torch.ones(1, 100, device=device); tiled_linear(one, one, one.new_empty(1, 1))`.
#
# For example, `x = [[1, 2]]` and `weight = [[3, 4], [5, 6]]` give `[[11, 17]]`.


# %% tags=["exercise"]
@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, out_ptr, ROWS, OUT, IN, TILE: tl.constexpr, PIECE: tl.constexpr
):
    """Program (i, j): a TILE x TILE tile of out = x weight^T. x [ROWS, IN], weight [OUT, IN]."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)  # of x
    outs = tl.program_id(1) * TILE + tl.arange(0, TILE)  # rows of weight, columns of out
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, IN, PIECE):
        # SOLUTION: the columns of this piece; load a tile of x and one of weight, each with its mask,
        #   as float32; add their product to the total
        columns = start + tl.arange(0, PIECE)
        inside = (columns < IN)[None, :]
        at = rows[:, None] * IN + columns[None, :]
        x = tl.load(x_ptr + at, mask=(rows < ROWS)[:, None] & inside, other=0.0)
        at = outs[:, None] * IN + columns[None, :]
        weight = tl.load(weight_ptr + at, mask=(outs < OUT)[:, None] & inside, other=0.0)
        weight = tl.trans(weight.to(tl.float32))
        total += tl.dot(x.to(tl.float32), weight, input_precision="ieee")
        # END
    inside = (rows < ROWS)[:, None] & (outs < OUT)[None, :]
    tl.store(out_ptr + rows[:, None] * OUT + outs[None, :], total, mask=inside)


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x: [rows, in], weight: [outs, in]; writes x @ weight.T to out, [rows, outs]."""
    raise_if_stub(linear_kernel)
    (rows, columns), outs = x.shape, len(weight)
    grid = (triton.cdiv(rows, 64), triton.cdiv(outs, 64))
    linear_kernel[grid](x, weight, out, rows, outs, columns, TILE=64, PIECE=64)


# %%
check(tiled_linear)

# %% [markdown]
# Once the check passes, your kernel computes all four matrix products of every layer in the engine. (We generate only
# two tokens because the interpreter is slow.)


# %%
def my_linear(x, weight):
    # the weight as a plain matrix (lesson 05); on a CPU it may be stored transposed
    matrix = weight.dequantize().contiguous()
    out = x.new_empty(len(x), len(matrix))
    tiled_linear(x.contiguous(), matrix, out)
    return out


same_text(tokens=2, linear=my_linear)

# %% [markdown]
# ## 7 · Two planted bugs · 20 min
#
# Some bugs exist only in kernels, and ordinary tests miss them. Here is an operation on quantized weights (lesson 05):
# a matrix of 8-bit integers times a vector, where each row of the matrix has its own scale:
#
# $$y_r = \text{scale}_r \sum_c w_{rc}\, x_c$$
#
# With few rows there are too few programs to fill a GPU, so the *columns* are cut into pieces, and each program adds
# its piece's part to the result with `tl.atomic_add`. Atomic additions to the same address never overwrite each other.
#
# Two people wrote this kernel and tested it with 4 rows of 128 columns, scales of 0.5 and `x` all ones.

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


# %% [markdown]
# `product_by` turns a kernel into a function `product(weight, scale, x, order=None)`. A GPU promises **no order** among
# the programs of a launch: many run at once, and any of them may be first. To test that, we choose the order: `order`
# is a list of piece numbers, such as `[1, 0]` for the 2 pieces of 100 columns. The programs are then launched one at a
# time, in that order. (This is why the kernels count from `first`.) A correct kernel gives the same result in any
# order, up to rounding.
#
# The inputs are surrounded by memory filled with 99, so that reading too far changes the result.

# %%
for kernel in (version_a, version_b):
    passes = authors_test(product_by(kernel, PIECE))
    print(f"{kernel.fn.__name__} passes its author's test: {passes}")

# %% [markdown]
# Both pass, at least in the interpreter. (On a GPU one of them may fail now and then. Its author would probably run the
# test again.)
#
# **Exercise 5 (12 minutes).** Write the test that they should have written. `find_fault` gets a product like those
# above (call it with or without `order`), tries it on inputs of your choice, and compares the results with torch's. It
# returns `None` if everything is right, and otherwise a few words about the input that failed.
#
# Read the two kernels, and for each one find an input for which the result *must* be wrong. Then write one test that
# finds both, and other mistakes too: the scale or the weights of a wrong row, a sign, an error in one row only.
# Some mistakes show only with certain numbers of columns, so try several, from one piece to three, some of them
# multiples of 64. Use a tight tolerance, but allow for rounding, because the pieces may be added in any order:
# `torch.allclose(..., rtol=1e-4, atol=1e-3)`.
#
# For example, a right product gives `None`; one that always returns 0 gives some text.


# %% tags=["exercise"]
def find_fault(product) -> str | None:
    """What input `product` fails on, in a few words; None if it is right.

    product(weight [rows, columns] int8, scale [rows], x [columns], order=None) -> [rows]
    """
    # SOLUTION: for each version, inputs on which it must fail; compare with scale * (weight.float() @ x)
    generator = torch.Generator().manual_seed(0)
    for columns in (PIECE, 2 * PIECE, 2 * PIECE + 36):
        pieces = -(-columns // PIECE)
        weight = torch.randint(-9, 10, (3, columns), generator=generator).to(torch.int8)
        x = torch.randn(columns, generator=generator)
        for scale in (torch.full((3,), 0.5), torch.tensor([0.5, 0.25, 2.0])):
            expected = scale * (weight.float() @ x)
            for order in (None, list(range(pieces)), list(range(pieces))[::-1]):
                found = product(weight, scale, x, order)
                if not torch.allclose(found, expected, rtol=1e-4, atol=1e-3):
                    return f"{columns} columns, scales {scale.tolist()}, order {order}"
    return None
    # END


# %%
check(find_fault)

# %%
if solved(find_fault):
    for kernel in (version_a, version_b):
        found = find_fault(product_by(kernel, PIECE))
        print(f"{kernel.fn.__name__}: {found or 'right'}")
else:
    print("find_fault is not solved yet: nothing has been tested")

# %% [markdown]
# Once `find_fault` passes its check, it rejects both versions.
#
# <details><summary>Where the bugs are</summary>
#
# * **A** lacks two masks: `columns < COLUMNS` is missing in the load of the weight and in the load of `x`. If the last
#   piece is longer than the rest of the row, it also multiplies what follows: the next row, or the memory after the
#   matrix. With 128 columns in pieces of 64, the last piece ends where the row ends.
# * **B** needs its programs to run in order: the *last piece* scales the total, as if all others had been added. In the
#   order 0, 1, 2 they have. If the last piece runs first, only its own part is scaled. Scale each part before adding
#   it, as A does; or count the programs that have finished, and let the last *to finish* scale. (The engine's attention
#   for one row counts its programs in this way.)
# </details>
#
# On a GPU, B is worse than always wrong: it is wrong *sometimes*, depending on which program comes first. That is why a
# test has to choose the order.
#
# ## 8 · Reads that no result shows (optional) · 3 min
#
# Fix both versions: change the kernels in section 7, run their cell again, and then the cell that prints what
# `find_fault` says, until both are `right`.
#
# If you add only one of A's masks, the one for `x`, all results are right: the numbers past the end are multiplied by
# 0. But the kernel still reads outside the matrix, and if that memory belongs to no allocation, a GPU may stop the
# program with an error. No comparison of results can find that. The interpreter can, because it sees every address:

# %%
if kernels_are == "compiled":
    print("not shown: the kernels are compiled")
elif solved(find_fault):
    weight, vector = torch.ones(3, 100, dtype=torch.int8), torch.ones(100)
    given = [each.to(device) for each in (weight, torch.ones(3), vector, torch.zeros(3))]
    for kernel in (version_a, version_b):
        with strays(*given) as outside:
            kernel[(2,)](*given, 0, 3, 100, ROW_TILE=4, PIECE=64)
        print(f"{kernel.fn.__name__}: {outside['loads']} loads outside its tensors")
else:
    print("not shown: find_fault is not solved yet")

# %% [markdown]
# Compiled kernels cannot be traced this way. On a GPU, NVIDIA's `compute-sanitizer` finds reads and writes outside
# allocations. Set `PYTORCH_NO_CUDA_MEMORY_CACHING=1`; otherwise many tensors share one allocation, and reads of a
# neighbor go unnoticed.
#
# ## Recap · 2 min
#
# * Each operation of torch is a launch, and a trip to memory for everything that it reads and writes. Fusion keeps
#   numbers in registers. With many rows it mostly saves bytes; with few, launches.
# * A kernel is: where am I, what is mine, load with a mask, compute in float32, store with a mask. Nothing checks
#   bounds.
# * A tile of rows and columns is two ranges, two strides and two masks. A matrix product is a loop over pieces with
#   `tl.dot` and a running total.
# * The programs of a launch have no order. Test kernels with sizes that are not multiples of a tile, in several orders,
#   with scales that differ, in several dtypes, and watch the memory around them.
#
# **What got worse:** two lines of torch became twenty of Triton, with bugs that the two lines cannot have. Kernels must
# be compiled before they first run. Our matrix product is correct, but the library's overlaps loads with arithmetic and
# has been tuned for years; the engine, too, leaves large products to the library.
#
# **Further reading:** Tillet, Kung and Cox 2019, *Triton: an intermediate language and compiler for tiled neural
# network computations*; the tutorials in Triton's documentation, for a fast matrix product; *Triton-Puzzles* for more
# exercises; Shazeer 2020, *GLU Variants Improve Transformer*. Next: lesson 04, attention as kernels. Lesson 11
# continues with launches: choosing a tile by measuring, CUDA graphs, and a step in five launches per layer.
