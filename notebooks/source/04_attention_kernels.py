# %% [markdown]
# # 04 · Attention kernels
#
# Afterwards you can compute a softmax whose scores never exist all at once, say which parts of a prompt's attention
# need no computing, write the Triton kernel that serves decode out of a paged cache, split a long row among many
# programs and put the parts together again, and tell from two numbers whether an attention is bound by memory or by
# arithmetic.
#
# **75 minutes. Needs:** a CPU; lesson 02 for attention and its cache, lesson 03 for programs, tiles and masks. Without
# a GPU the kernels are *interpreted*: the same numbers, none of the speed. On a GPU the same cells compile them.

# %%
from minillm.course.interpret import kernel_device, triton_here

how = triton_here()  # before triton's first import: it settles how kernels run

import functools
import heapq

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl

from minillm import LLM, SamplingParams, using
from minillm.bench import plots, records
from minillm.course import NotSolvedYet, adapters, check, compare, tier, yours
from minillm.course import draw_tiles as draw
from minillm.course.stubs import raise_if_stub
from minillm.kernels import paged_attention
from minillm.kv_cache import LayerCache
from minillm.model import sizing
from minillm.model.config import PRESETS
from minillm.ops import AttentionOptions, reference

plain = {"enable_prefix_caching": False, "run_ahead": 0}
llm = LLM(device="cpu", dtype="float64", num_blocks=512, **plain)
PROMPTS = [
    "Fenwick lies on the island of",
    "Once upon a time there was a lighthouse keeper who had never seen",
    "The Tallow Isles are",
]
greedy = SamplingParams(max_tokens=12, temperature=0)
expected = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print(f"kernels are {how}")

# %% [markdown]
# The first half of this lesson works with the ideas in plain torch, in 64-bit numbers, where a mistake cannot hide
# behind rounding. `expected` are the engine's tokens for three prompts: every attention that you write has to give
# the same.
#
# ## 1 · What is wrong with attention as it stands
#
# Lesson 02's attention is right, and on a GPU it is slow. It makes all scores, writes them to memory, reads them again
# for the softmax, writes the weights, and reads those to mix the values. And memory is the slow part: a GPU has little
# pieces of it beside its arithmetic units, fast and small, and a large one far away.
#
# **Predict first.** Gemma 2B in bfloat16 (2 bytes), a prompt of 2,048 tokens, 8 heads: how many megabytes are the
# scores of *one* layer, every query with every key?

# %% tags=["exercise"]
guess_mb = 8 * 2048 * 2048 * 2 / 1e6  # PREDICT: MB of scores in one layer

# %%
gemma = PRESETS["gemma-2b"]
TOKENS = 2048
heads, kv_heads, dim = gemma.num_heads, gemma.num_kv_heads, gemma.head_dim
score_bytes = heads * TOKENS * TOKENS * 2
needed_bytes = (2 * heads + 2 * kv_heads) * TOKENS * dim * 2
compare("scores of one layer", unit="MB", prediction=guess_mb, measured=score_bytes / 1e6)
print(f"queries, keys, values and output together: {needed_bytes / 1e6:.0f} MB")
times = 4 * score_bytes / needed_bytes
print(f"scores written and read, weights written and read: {4 * score_bytes / 1e6:.0f} MB")
print(f"that is {times:.0f} times as much")

# %% [markdown]
# Most of what lesson 02's attention moves nobody asked for. Here is where it could lie (the sizes are NVIDIA's for an
# H200; it has 132 *processors*, each of which runs one program or a few at a time):

# %%
MEMORIES = {
    "registers of a processor": 256 * 1024,
    "shared memory of a processor": 228 * 1024,
    "cache of the whole chip (L2)": 50 * 1024**2,
    "memory beside the chip (HBM)": 141e9,
}
a_tile = 128 * 64 * 4  # float32 scores of 128 queries with 64 keys
a_tile_of_keys = 2 * 64 * dim * 2
draw.memories(
    MEMORIES,
    {
        "scores of a tile": a_tile,
        "keys and values of a tile": a_tile_of_keys,
        "all scores of a layer": score_bytes,
    },
)

# %% [markdown]
# All scores fit nowhere but in the slowest memory. A *tile* of them, some queries with some keys, fits into the
# fastest. So the plan: **walk over the keys tile by tile; make a tile's scores, use them at once, forget them.** One
# thing stands in the way. A softmax divides by the sum over *all* keys, and subtracts the maximum of *all* scores, and
# at the first tile nobody knows either.
#
# ## 2 · Online softmax
#
# The way out (Milakov and Gimelshein 2018): begin with the maximum *so far*, and correct later. Watch one query of 64
# keys go by in tiles of 8:

# %%
generator = torch.Generator().manual_seed(5)
scores = 2 * torch.randn(64, generator=generator) + torch.linspace(-3, 3, 64)
values = torch.randn(64, generator=generator)
maxima, totals, outs = [], [], []
for seen in range(8, 65, 8):
    weights = (scores[:seen] - scores[:seen].max()).exp()
    maxima.append(scores[:seen].max().item())
    totals.append(weights.sum().item())
    outs.append((weights @ values[:seen] / weights.sum()).item())
draw.running(scores.numpy(), 8, maxima, totals, outs)

# %% [markdown]
# As long as the maximum stays, the sum only grows. When a larger score comes, everything before counts for *less*
# beside it: the sum falls. By how much is known exactly, because every term of it was $e^{s - m}$ with the old maximum
# $m$ and should be $e^{s - m'}$ with the new one:
#
# $$e^{s - m'} = e^{s - m} \cdot e^{m - m'}$$
#
# One factor for all terms. So nothing needs to be looked at twice. Three things are kept for each query: the maximum
# $m$, the sum of weights $t$ and the *undivided* output $o$. A tile with scores $s_j$ and values $v_j$ changes them to
#
# $$m' = \max(m, \max_j s_j), \qquad t' = t\, e^{m - m'} + \sum_j e^{s_j - m'}, \qquad
# o' = o\, e^{m - m'} + \sum_j e^{s_j - m'} v_j$$
#
# At the end the attention's output is $o / t$.
#
# This is what it should compute, with all tiles put together. It is the specification; it is not the way:


# %%
def all_at_once(tiles, rows, dim):
    """Softmax of all scores times all values. tiles: as in `online_attention`."""
    scores, values = (torch.cat(parts, at) for parts, at in zip(zip(*tiles), (1, 0)))
    return scores.softmax(-1).nan_to_num(0.0) @ values


# %% [markdown]
# ### Exercise 1: online softmax
#
# You get the tiles one by one, from a generator: there is no going back, and no looking ahead. Hidden keys have a
# score of $-\infty$, and a whole tile may be hidden from a query. Mind what $-\infty - (-\infty)$ is.
#
# For example, if there is only one tile, the result is the plain softmax of its scores times its values.


# %% tags=["exercise"]
def online_attention(tiles, rows, dim):
    """Attention of `rows` queries to keys that come by in tiles.

    tiles: an iterator over (scores [rows, keys], values [keys, dim]); a score is -inf where a query
    does not see a key. Returns [rows, dim]; zeros for a query that sees no key at all.
    """
    # SOLUTION: keep a maximum and a sum of each row and the undivided output, and correct them
    #   whenever the maximum grows; divide at the end
    maximum = torch.full((rows, 1), -torch.inf)
    total, out = torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        # Where no key was seen yet, 0 in place of -inf: every weight is exp(-inf) = 0 then.
        shift = torch.where(new_maximum == -torch.inf, 0.0, new_maximum)
        weights, rescale = (scores - shift).exp(), (maximum - shift).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        out = out * rescale + weights @ values
        maximum = new_maximum
    return out / torch.where(total == 0, 1.0, total)
    # END


# %%
check(online_attention)

# %% [markdown]
# Inside the engine, for prompts and for single tokens: each head's keys go by in tiles of 16. (`adapters.gathered`
# collects a request's blocks into one piece, as in lesson 02.)


# %%
def by_tiles(q, k, v, length, *, scale):
    """q: [queries, heads, d], a request's newest; k, v: [capacity, kv_heads, d]."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    position = torch.arange(length - len(q), length)[:, None]

    def tiles(head):
        for start in range(0, length, 16):
            span = slice(start, min(start + 16, length))
            scores = q[:, head] @ k[span, head // group].T * scale
            later = torch.arange(span.start, span.stop) > position
            yield scores.masked_fill(later, -torch.inf), v[span, head // group]

    for head in range(q.shape[1]):
        out[:, head] = online_attention(tiles(head), len(q), q.shape[2])
    return out


with using(**adapters.gathered(by_tiles)) as used:
    found = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print("the same tokens:", found == expected)
print(used.calls)

# %% [markdown]
# ## 3 · Flash attention for prefill
#
# A prompt has many queries, and each needs the keys before it. A program takes a *tile of queries* and walks over the
# tiles of keys. Every key that is fetched serves the whole tile of queries, and scores never leave the chip: this is
# **flash attention** (Dao et al. 2022).
#
# And many tiles need no walking at all. A query sees no key after its own; some models have layers with a *window*,
# where it sees only the last so many. For a tile of queries, which key tiles hold *anything* that one of them sees?
#
# ### Exercise 2: which tiles to visit
#
# A query at position $p$ sees keys $0$ to $p$; with a window of $w$, keys $p - w + 1$ to $p$. Tile $n$ of `keys` keys
# begins at key `n * keys`. And the queries of a prompt's later piece (lesson 10) do not begin at position 0.
#
# For example, `tiles_to_visit(0, 5, 8)` is `range(0, 1)`: queries 0 to 5 see keys 0 to 5, all in tile 0.


# %% tags=["exercise"]
def tiles_to_visit(first, last, keys, window=None):
    """The numbers of the key tiles, as a range, that queries at positions first to last need.

    keys: how many a tile has; window: how many keys a query sees, its own included (None: all).
    """
    # SOLUTION: from the tile of the first query's earliest key to the tile of the last query's own
    begin = max(0, first - window + 1) // keys if window else 0
    return range(begin, last // keys + 1)
    # END


# %%
check(tiles_to_visit)


# %% [markdown]
# Now it can be drawn, and counted. In a partly hidden tile some query does not see some key: only there a mask is
# needed.


# %%
def tiles_needed(first, last, keys, window=None):
    """The specification: try every pair of a query and a key."""
    seen = [(q, k) for q in range(first, last + 1) for k in range(q + 1)]
    return sorted({k // keys for q, k in seen if window is None or k > q - window})


visit = yours(tiles_to_visit, tiles_needed)


def grid(queries, length, rows, keys, window=None):
    """[query tiles, key tiles]: 2 where every query sees every key, 1 where some do, 0 skipped."""
    kinds = torch.zeros(-(-queries // rows), -(-length // keys), dtype=torch.int)
    key = torch.arange(length)
    for number in range(len(kinds)):
        first = length - queries + number * rows
        position = torch.arange(first, min(first + rows, length))[:, None]
        sees = (key <= position) & (key > position - (window or length))
        for tile in visit(first, position[-1].item(), keys, window):
            kinds[number, tile] = 1 + sees[:, tile * keys : (tile + 1) * keys].all().int()
    return kinds.numpy()


draw.tiles(
    {
        "a prompt of 128": grid(128, 128, 16, 16),
        "a piece of 64 behind 128": grid(64, 192, 16, 16),
        "a prompt of 192, a window of 48": grid(192, 192, 16, 16, window=48),
    },
    rows=16,
    keys=16,
)
for length in (128, 512, 2048):
    visited = sum(len(visit(first, first + 15, 16)) for first in range(0, length, 16))
    print(f"a prompt of {length:5,}: {visited / (length / 16) ** 2:.1%} of the tiles visited")

# %% [markdown]
# Half of the work falls away. The longer the prompt, the nearer to one half.
#
# Both exercises together are flash attention. Below is the whole of it in torch, with one more trick that section 4
# needs: **packing**. The query heads of a group read the same keys, so they go into one tile: a row is a pair (query,
# head of the group), and a key that is fetched serves them all.


# %%
def flash_prefill(q, k, v, length, *, scale, rows=8, keys=16):
    """q: [queries, heads, d], a request's newest; k, v: [capacity, kv_heads, d]."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]

    def tiles(packed, position, kv_head):
        for number in tiles_to_visit(position[0].item(), position[-1].item(), keys):
            span = slice(number * keys, min((number + 1) * keys, length))
            scores = packed @ k[span, kv_head].T * scale
            later = torch.arange(span.start, span.stop) > position[:, None]
            yield scores.masked_fill(later, -torch.inf), v[span, kv_head]

    for first in range(0, len(q), rows):
        tile = q[first : first + rows]
        position = length - len(q) + first + torch.arange(len(tile))
        position = position.repeat_interleave(group)
        for kv_head in range(k.shape[1]):
            mine = slice(kv_head * group, (kv_head + 1) * group)
            packed = tile[:, mine].flatten(0, 1)  # [(query, head), d]
            done = online_attention(tiles(packed, position, kv_head), *packed.shape)
            out[first : first + rows, mine] = done.unflatten(0, (-1, group))
    return out


with using(**adapters.gathered(flash_prefill)) as used:
    found = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print("the same tokens:", found == expected)
print(used.calls)

# %% [markdown]
# The engine's kernel is the same in Triton. Find your range in it (`first` and `last`), and the packing (`query`,
# `head`). The walk itself is in `_attend`, which section 4 shows: the queries, the maximum, the sum and the output stay
# in registers all the way; tiles of keys and values come through shared memory, the next one already on its way while
# this one is used. One line is about time alone: `tile = tl.num_programs(0) - 1 - tl.program_id(0)`. The last queries
# have the most keys, so they start first; a program that starts last and runs longest keeps the whole chip waiting.

# %%
# ENGINE: minillm.kernels.paged_attention:prefill_kernel

# %% [markdown]
# It runs here, on this machine, on a prompt of 40 tokens with 8 heads and one KV head, against the reference:

# %%
device, block_size = kernel_device(), 16


def random(*shape, seed):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


cache = LayerCache(*(random(8, block_size, 1, 64, seed=seed) for seed in (1, 2)))
q = random(40, 8, 64, seed=3)
table, lengths = ints([5, 2, 7]), ints(40)
given = (q, cache, table, lengths, ints(0, 40), 40, AttentionOptions(scale=0.125))
ours = paged_attention.prefill_attention(*given)
wanted = reference.prefill_attention(*given)
print(f"{how}; equal to five decimals:", torch.allclose(ours, wanted, rtol=0, atol=1e-5))

# %% [markdown]
# How fast is it where it is compiled? The project's records have an H200's limits, measured: how fast it copies
# memory, and how fast it multiplied Gemma 2B's matrices with 2,048 rows. And they have its kernels' times.

# %%
ceiling = records.read("h200/ceiling-h200")
products = {(row["rows"], row["dtype"]): row["step_ms"] for row in ceiling["matrix_products"]}
h200_bytes = ceiling["copy_TB_per_s"] * 1e12
multiplied = 2 * 2048 * sizing.parameters(gemma)
h200_operations = multiplied / (products[2048, "bf16"] / 1e3)
print(f"memory:   {h200_bytes / 1e12:.2f} TB/s")
print(f"products: {h200_operations / 1e12:.0f} T operations/s")
print(f"ridge:    {h200_operations / h200_bytes:.0f} operations a byte")


def measured(kernel, rows):
    """A line of the record of kernels: this kernel with so many rows."""
    lines = records.read("h200/kernels")["results"]
    return next(line for line in lines if (line["kernel"], line["rows"]) == (kernel, rows))


# %% [markdown]
# **Predict first**: the attention of one layer, for four prompts of 2,048 tokens at once. Each query head does `4 x d`
# operations for each pair of a query and a key that it sees: `2 x d` for the score, `2 x d` for mixing the value. Gemma
# 2B has 8 query heads and `d` = 256.

# %% tags=["exercise"]
guess_prefill_ms = 0.15  # PREDICT: milliseconds of one layer's attention, 4 prompts of 2,048

# %%
pairs = 4 * TOKENS * (TOKENS + 1) / 2
operations = 4 * dim * heads * pairs
long, short = measured("prefill_attention", 8192), measured("prefill_attention", 128)
floor_ms = 1e3 * operations / h200_operations
found = {"floor": floor_ms, "measured": long["ms"]}
compare("prefill attention", unit="ms", prediction=guess_prefill_ms, **found)
times = long["ms"] / long["torch_sdpa_ms"]
print(f"that is {times:.2f} times as long as torch's own attention takes")

# %%
NAMES = {"ms": "our kernel", "torch_sdpa_ms": "torch's own", "reference_ms": "the reference"}
lines = {"4 prompts of 2,048": long, "1 prompt of 128": short}
draw.against(
    {label: {NAMES[key]: line[key] for key in NAMES} for label, line in lines.items()},
    unit="milliseconds on an H200, bfloat16, from the record",
)

# %% [markdown]
# Honestly: our kernel is far ahead of the reference, and slower than torch's own, whose kernels for such chips are
# tuned by hand. Torch's wants a prompt's keys in one piece. Ours reads them out of a paged cache, and fits on a page.
#
# ## 4 · Decode out of a paged cache
#
# In decode a request has *one* query. All its keys must be read for it, and nobody else needs them. So how many
# operations does a byte of keys and values get? A key and a value of `d` numbers are `2 x d x 2` bytes in bfloat16, and
# each query head that uses them does `2 x d` multiply-adds, `4 x d` operations:
#
# $$\text{operations a byte} = \frac{\text{group} \times 4 d}{4 d} = \text{group}, \qquad
# \text{group} = \frac{\text{query heads}}{\text{KV heads}}$$
#
# **Predict first.** Gemma 2B has 8 query heads on one KV head, and `d` = 256. The record has a decode step's attention
# in one layer: 512 requests with 200 to 2,000 keys each. The floor is reading those keys and values once. How long does
# it take?

# %% tags=["exercise"]
guess_decode_ms = 0.15  # PREDICT: milliseconds of one layer's decode attention, 512 requests

# %%
decode = measured("decode_attention", 512)
moved = decode["gb_per_s"] * 1e9 * decode["ms"] / 1e3
print(f"{moved / 1e6:.0f} MB of keys and values, at most {h200_bytes / 1e12:.2f} TB/s")
found = {"floor": 1e3 * moved / h200_bytes, "measured": decode["ms"]}
compare("decode attention", unit="ms", prediction=guess_decode_ms, **found)

# %%
group = heads // kv_heads
flash = operations / (4 * needed_bytes)  # operations a byte, when all tiles stay on the chip
in_memory = operations / (4 * (needed_bytes + 4 * score_bytes))
points = {"prefill, 4 x 2,048": (flash, operations / (long["ms"] / 1e3))}
for rows in (512, 64, 1):
    speed = measured("decode_attention", rows)["gb_per_s"] * 1e9
    points[f"decode, {rows} at once"] = group, group * speed
kinds = {
    "decode, MHA": 1,
    "decode, GQA (groups of 4)": 4,
    "decode, MQA (8): Gemma 2B": 8,
    "prefill, scores in memory": in_memory,
    "prefill, flash": flash,
}
draw.roofs(h200_bytes, h200_operations, kinds, points)

# %% [markdown]
# Lesson 00's roofline, of the H200. The dots are measured; dotted lines are where each kind of attention lies by
# arithmetic. Decode lies under the slope and cannot leave it: batching does not help, because every request brings its
# own keys. Only more query heads on a KV head move it to the right. So **the kernel's job is to read memory at full
# speed**. For 512 rows it nearly does; for one row of 384 keys it is nowhere near. Section 5 is about that.
#
# Prefill is the opposite. With its scores in memory it would lie left of the ridge, bound by bytes; without them, far
# right. That is all that flash attention does, and why it is worth a kernel.
#
# ### The paged walk
#
# The keys of a request do not lie one behind the other. They are in *blocks* of 16 slots, handed out one by one as the
# text grows (lesson 09 says why). Each row has a **block table**: entry $n$ names the block with keys $16n$ to
# $16n + 15$. Two requests in a running engine; a third one, there before them, was given up, and its blocks went to
# these two:

# %%
engine = llm.engine


def begin(length, seed):
    ids = torch.randint(10, 4000, (length,), generator=torch.Generator().manual_seed(seed))
    tracked = engine.prepare(
        ids.tolist(), SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    )
    engine.submit(tracked)
    return tracked.request


def steps(count):
    for _ in range(count):
        engine.step()


ended = begin(40, seed=1)
steps(2)
first = begin(40, seed=2)
steps(20)
second = begin(10, seed=3)
engine.abort(ended.request_id)
steps(30)
# A step's own token enters the cache with the next step.
now = {"first": (first, 40 + 50 - 1), "second": (second, 10 + 30 - 1)}
tables = {}
for name, (request, length) in now.items():
    entries = engine.executor.runner.state.block_table[
        0, request.row, : -(-length // 16)
    ].tolist()
    tables[name] = entries
    print(f"{name:>6}: {length} tokens, block table {entries}")
draw.paged_walk(tables, [length for _, length in now.values()], block_size=16)
for request in (first, second):
    engine.abort(request.request_id)
steps(2)

# %% [markdown]
# So key $j$ of a row is in block `table[j // 16]` at offset `j % 16`, and the address of its numbers is
#
# $$\text{block} \times \text{block\_stride} + \text{offset} \times \text{slot\_stride} +
# \text{kv\_head} \times \text{head\_stride} + (0 \ldots d - 1)$$
#
# A tile of 32 keys comes out of two blocks that may be anywhere. In the last block only the slots before the row's
# length hold its keys; the rest are leftovers, or belong to nobody.
#
# ### Exercise 3: a paged decode kernel
#
# One program for each row and KV head, walking over the row's keys. Its queries are the `GROUP` heads that share the
# KV head, packed into a tile of `ROWS` = 16 rows: fewer the matrix units do not take, so the rest of them are padding.
# Around the walk all is there. Yours is what happens to one tile, and it is what you wrote in exercise 1, with
# addresses.
#
# The words for it: `tl.load(pointers, mask=..., other=0.0)`, `tl.dot(a, b, input_precision="ieee")` (without that a GPU
# rounds float32 to 10 bits), `tl.trans`, `tl.where`, `tl.max(x, 1)`, `tl.sum(x, 1)`, `tl.maximum`, `tl.exp`. Turn what
# you load into float32 with `.to(tl.float32)`: the interpreter gets bfloat16 arithmetic wrong. Here no tile is wholly
# hidden, so $-\infty - (-\infty)$ does not come up. And a wrong address is no error: it reads what is there, or ends
# the process, as on a GPU.
#
# For example, a row of 32 keys whose values are all 7 gets 7.


# %% tags=["exercise"]
@triton.jit
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, scale,
    table_stride, block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The query heads of one row and one KV head over the row's keys.

    q, out: [rows, heads, DIM]; k, v: [blocks, BLOCK_SIZE, kv_heads, DIM], a cache; table: [rows,
    entries] and lengths: [rows], int32. Strides count numbers: a row of the table, a block, a slot,
    a KV head.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    table_ptr += row * table_stride
    packed, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    head = (row * tl.num_programs(1) + kv_head) * GROUP + packed
    at_q = head[:, None] * DIM + dims[None, :]
    real = (packed < GROUP)[:, None]  # the other rows are padding
    q = tl.load(q_ptr + at_q, mask=real, other=0.0).to(tl.float32)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, length, KEYS):
        keys = start + tl.arange(0, KEYS)
        # SOLUTION: find the keys' addresses [KEYS, DIM] by the block table, load k and v, and bring
        #   maximum [ROWS], total [ROWS] and out [ROWS, DIM] up to date; keys from `length` on count nothing
        present = keys < length
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        slot = block * block_stride + keys % BLOCK_SIZE * slot_stride
        at = (slot + kv_head * head_stride)[:, None] + dims[None, :]
        k = tl.load(k_ptr + at, mask=present[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=present[:, None], other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
        maximum = new_maximum
        # END
    out = out / tl.where(total > 0, total, 1.0)[:, None]  # a padding row of length 0: zeros
    tl.store(out_ptr + at_q, out.to(out_ptr.dtype.element_ty), mask=real)


def paged_decode(q, cache, block_table, lengths, *, scale, window=None, soft_cap=None):
    """Launch your kernel in the engine's place. q: [rows, 1, heads, d] -> the same."""
    raise_if_stub(paged_decode_kernel)
    q, kv_heads = q.contiguous(), cache.k.shape[2]
    out = torch.empty_like(q)
    paged_decode_kernel[(len(q), kv_heads)](
        q, cache.k, cache.v, block_table, lengths, out, scale,
        block_table.stride(0), *cache.k.stride()[:3],
        GROUP=q.shape[2] // kv_heads, ROWS=16, KEYS=32, DIM=q.shape[3],
        BLOCK_SIZE=cache.k.shape[1], num_stages=1,  # one tile in flight fits any GPU
    )  # fmt: skip
    return out


# %%
check(paged_decode)

# %% [markdown]
# Now in the engine, on this machine's tier: its block tables, its cache, its requests. Prefill stays the engine's own;
# each decode step calls yours once a layer.

# %%
llm.close()
here = tier()
served = LLM(**plain, **here.words)
before = [completion.token_ids for completion in served.generate(PROMPTS, greedy)]
with using(decode_attention=paged_decode) as used:
    after = [completion.token_ids for completion in served.generate(PROMPTS, greedy)]
same = sum(a == b for one, other in zip(before, after) for a, b in zip(one, other))
print(f"{served.engine.name}, kernels {how}")
print(
    f"equal tokens: {same} of {sum(map(len, before))}; layers: {served.model_config.num_layers}"
)
print(used.calls)

# %% [markdown]
# Here is the engine's walk, the heart of both its attention kernels. You have written nearly every line of it.
# Exponents are to base 2, because that is what the hardware has; hidden keys may fill a whole tile here, so $-\infty$
# is minded; and products are of 16-bit numbers where the model has those, with sums in 32 bits. Lesson 09's streams
# keep their keys unturned in the cache: `cos_sin_ptr` has the angles by which they are turned as they are read. For all
# other requests it is `None`, and Triton compiles nothing for those lines.

# %%
# ENGINE: minillm.kernels.paged_attention:_attend

# %% [markdown]
# And the decode kernel around it. It differs from yours in four things. A row may have several queries, so a tile's
# rows are (query, head) pairs again; a window moves where the walk begins; `cos_sin_ptr` is passed on to the walk; and
# a program has a third number, `split`:

# %%
# ENGINE: minillm.kernels.paged_attention:decode_kernel

# %% [markdown]
# ## 5 · Too few programs
#
# One request on a GPU with 132 processors, one KV head: the kernel of exercise 3 is *one* program. One processor reads
# all keys, at a small part of the memory's speed, and 131 wait. And in a ragged batch the longest row runs on alone
# when the others are done. The remedy (Dao et al. 2023, *Flash-Decoding*): **cut a row's keys into shares, one program
# each**, and put the outputs together.
#
# How a chip of 12 processors would do six ragged rows, if time were nothing but keys read (programs go to the first
# processor that is free):


# %%
ROW_KEYS = [300, 500, 700, 900, 2000, 6000]
PROCESSORS = 12


def on_processors(splits, keys=64):
    """(processor, start, length, row) of every program, in the order of the launch."""
    free = [(0, number) for number in range(PROCESSORS)]
    programs = []
    for split in range(splits):
        for row, length in enumerate(ROW_KEYS):
            share = -(-length // (splits * keys)) * keys  # whole tiles
            mine = min(share, length - split * share)
            if mine > 0:
                start, processor = heapq.heappop(free)
                heapq.heappush(free, (start + mine, processor))
                programs.append((processor, start, mine, row))
    return programs


small_chip = paged_attention.Device(shared_memory=99 * 1024, processors=PROCESSORS)
splits = paged_attention.decode_splits(len(ROW_KEYS), max(ROW_KEYS), small_chip)
draw.schedules(
    {
        "one program a row": on_processors(1),
        f"{splits} shares a row, as the engine's rule says": on_processors(splits),
    },
    PROCESSORS,
    names=[f"a row of {length:,} keys" for length in ROW_KEYS],
)

# %% [markdown]
# How many shares? Enough to fill the chip, and to keep the longest from being last; no more, because each writes a
# partial output that must be read again. This is the engine's rule, and what it says for an H200 and Gemma 2B:

# %%
# ENGINE: minillm.kernels.paged_attention:decode_splits

# %%
h200 = paged_attention.Device(shared_memory=227 * 1024, processors=132)
print(
    "shares     "
    + "".join(f"{longest:>8,}" for longest in (256, 1024, 4096, 16384))
    + "  keys"
)
for rows in (1, 8, 64, 512):
    counts = [
        paged_attention.decode_splits(rows, longest, h200)
        for longest in (256, 1024, 4096, 16384)
    ]
    print(f"{rows:4} rows  " + "".join(f"{count:8}" for count in counts))

# %% [markdown]
# ### Exercise 4: put the parts together
#
# Share $p$ has done its softmax over its own keys alone: an output $o_p$, divided by its own sum of weights. It hands
# over $o_p$ and the logarithm of that sum, $l_p = \log \sum_j e^{s_j}$ over the scores of its keys. Over all keys the
# weights sum to $\sum_p e^{l_p}$, and a share's part of that is what its output counts:
#
# $$o = \frac{\sum_p e^{l_p} o_p}{\sum_p e^{l_p}}$$
#
# In kernels it is the logarithm that is handed over, because a sum of $e^{1000}$ does not fit a number; so do not undo
# that. A short row leaves shares empty: no keys, $l_p = -\infty$, an output of zeros. A padding row is empty
# altogether, and should give zeros.
#
# For example, a single share is the whole output.


# %% tags=["exercise"]
def combine(partial, log_total):
    """One output from those of shares of the keys.

    partial: [..., shares, d]; log_total: [..., shares], the logarithm of the sum of each share's
    weights, -inf for a share without keys. Returns [..., d].
    """
    # SOLUTION: weigh each share by exp(log_total), with the largest subtracted first
    largest = log_total.amax(-1, keepdim=True)
    weights = (log_total - torch.where(largest == -torch.inf, 0.0, largest)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    return (weights[..., None] * partial).sum(-2)
    # END


# %%
check(combine)

# %% [markdown]
# In the engine, with every row's keys in three shares (for a short row, one or two of them stay empty):


# %%
def split_decode(q, k, v, length, *, scale, shares=3, keys=16):
    """q: [1, heads, d], a request's newest token; k, v: [capacity, kv_heads, d]."""
    group, partial, log_total = q.shape[1] // k.shape[1], [], []
    share = -(-length // (shares * keys)) * keys
    for begin in range(0, shares * share, share):
        span = slice(min(begin, length), min(begin + share, length))
        each_k, each_v = (part[span].repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("hd,khd->hk", q[0], each_k) * scale
        partial.append(torch.einsum("hk,khd->hd", scores.softmax(-1), each_v))
        log_total.append(scores.logsumexp(-1))
    return combine(torch.stack(partial, -2), torch.stack(log_total, -1))[None]


decode_only = {"decode_attention": adapters.gathered(split_decode)["decode_attention"]}
with using(**decode_only) as used:
    after = [completion.token_ids for completion in served.generate(PROMPTS, greedy)]
same = sum(a == b for one, other in zip(before, after) for a, b in zip(one, other))
print(f"equal tokens: {same} of {sum(map(len, before))}")
print(used.calls)

# %% [markdown]
# The engine's is a second, tiny kernel, one program a query head. (For a single request it goes one step further: the
# last share to finish puts the parts together itself, which saves that launch. That is `kernels/single_row.py`.)

# %%
# ENGINE: minillm.kernels.paged_attention:combine_kernel

# %% [markdown]
# How near does all this come to the speed of memory? From the committed record, with the engine's rule for shares:

# %%
print(f"one layer's decode attention on an H200, which copies {h200_bytes / 1e12:.2f} TB/s")
for rows in (1, 64, 512, 3000):
    row = measured("decode_attention", rows)
    keys = row["shape"].split("over ")[1]
    speed, share = row["gb_per_s"] / 1e3, row["gb_per_s"] * 1e9 / h200_bytes
    print(
        f"{rows:5} rows, {keys:>15}: {row['ms'] * 1e3:6.1f} us, {speed:.2f} TB/s, {share:4.0%}"
    )

# %% [markdown]
# And yours? On a GPU, the next cell measures your kernel beside the engine's and the reference. An interpreted kernel
# has no time worth telling.


# %% tags=["nbval-ignore-output"] uncompared="times, where there is a GPU"
def engines_decode(*tensors, scale):
    return paged_attention.decode_attention(*tensors, AttentionOptions(scale))


def reference_decode(*tensors, scale):
    return reference.decode_attention(*tensors, AttentionOptions(scale))


if device == "cuda":
    for rows, keys in ((1, 4096), (64, 1024), (512, 1024)):
        blocks = rows * keys // 16
        shape = (blocks, 16, kv_heads, dim)
        big = LayerCache(*(torch.randn(shape, device=device).bfloat16() for _ in "kv"))
        order = torch.randperm(blocks, device=device).int().view(rows, -1)
        one_query = torch.randn(rows, 1, heads, dim, device=device).bfloat16()
        given = one_query, big, order, ints(*[keys] * rows)
        floor_ms = 1e3 * (big.k.nbytes + big.v.nbytes) / h200_bytes
        print(
            f"{rows} rows of {keys} keys; reading them at an H200's speed: {floor_ms:.3f} ms"
        )
        mine = yours(paged_decode, engines_decode)
        ways = {"yours": mine, "the engine's": engines_decode}
        ways["the reference"] = reference_decode
        for name, way in ways.items():
            run = functools.partial(way, *given, scale=dim**-0.5)
            took = triton.testing.do_bench(run, return_mode="median")
            print(f"  {name:14} {took:8.3f} ms")
else:
    print("no GPU here: nothing to measure")

# %% [markdown]
# ## 6 · What it is worth
#
# A kernel that is faster in isolation need not make an engine faster. So one part is taken away at a time, and the
# whole engine measured, Gemma 2B on an H200: that is an *ablation*. In place of our decode attention, the best that a
# few lines of torch's own can do: gather every row's blocks into one piece, then call torch's attention.

# %%
# ENGINE: minillm.bench.ablation:torch_attention

# %% [markdown]
# **Predict first.** 256 requests at once, 128 tokens in and 128 out. The weights are 5 GB, and every step reads them.
# With torch's attention in place of ours, what share of the tokens a second is left? And with our kernels, but without
# the CUDA graphs of lesson 03?

# %% tags=["exercise"]
guess_torch = 0.9  # PREDICT: share of the tokens/s with torch's attention, 256 requests
guess_no_graphs = 0.7  # PREDICT: share of the tokens/s without CUDA graphs, 256 requests

# %%
record = records.read("h200/ablation")
speeds = {
    (line["group"], line["name"], line["requests"]): line["output_tokens_per_s"]
    for line in record["results"]
}


def left(group, without, whole, requests):
    """The share of the tokens a second that is left without something."""
    return speeds[group, without, requests] / speeds[group, whole, requests]


attention = "decode attention", "torch", "Triton"
graphs = "CUDA graphs", "off", "on"
for what, names, guess in (
    ("torch's attention", attention, guess_torch),
    ("no CUDA graphs", graphs, guess_no_graphs),
):
    compare(
        f"{what}, 256 requests",
        unit="of the speed",
        prediction=guess,
        measured=left(*names, 256),
    )
    print(f"and with one request {left(*names, 1):.2f} of the speed")
weights, keys = sizing.weight_bytes(gemma), 256 * 256 * sizing.kv_bytes_per_token(gemma)
print(
    f"at the end 256 requests have {keys / 1e9:.1f} GB of keys, the weights are {weights / 1e9:.1f}"
)

# %%
plots.ablation(record, groups=["decode attention", "CUDA graphs"])
plt.show()

# %% [markdown]
# Reading the keys is a small part of such a step, and yet our attention is worth a quarter more tokens with many
# requests, a third with one. Torch's way *writes* what it has gathered, so that it can be read again, and is several
# launches in place of two. That is section 1 once more. (With one request, "Triton" is slower than the engine itself:
# to compare attentions alone, the fused step of lesson 03 is off.)
#
# And for one request nothing matters as much as the graph. A decode step is some two hundred small launches, and each
# kernel is done long before Python has launched the next. The best kernel is worth little where nobody calls it in
# time.

# %%
served.close()

# %% [markdown]
# ## Recap
#
# * A softmax needs no second look at its scores: keep a maximum, a sum and an undivided output, and multiply both by
#   $e^{m - m'}$ when the maximum grows. So attention's scores never need to be in memory.
# * Prefill tiles queries and keys, skips what nobody sees, about half, and is bound by operations.
# * Decode gets as many operations from a byte as there are query heads on a KV head, and is bound by reading. Packing
#   the heads into one tile reads each key once.
# * A block table costs one small look-up for each key of a tile; the keys themselves are where the bytes are.
# * Too few programs, or one that is too long: cut the keys into shares and put the parts together by the logarithms of
#   their sums.
#
# **What got worse:** three lines of torch have become a file of kernels, with tile sizes to choose for each chip, and
# prefill is still behind torch's own. Shares write partial outputs that must be read again. And the order of sums now
# depends on tiles and shares, and the shares on how many rows there are: the same request can differ in its last digits
# from one batch to another, and where two tokens are nearly equal, in a token.
#
# **Further reading:** Milakov and Gimelshein 2018, *Online Normalizer Calculation for Softmax*; Dao et al. 2022,
# *FlashAttention*, and Dao 2023, *FlashAttention-2*; Dao et al. 2023, *Flash-Decoding for Long-Context Inference*; Kwon
# et al. 2023, *Efficient Memory Management for LLM Serving with PagedAttention*; Ainslie et al. 2023, *GQA*. Next:
# lesson 05 makes the weights smaller, which is what a decode step reads most.
