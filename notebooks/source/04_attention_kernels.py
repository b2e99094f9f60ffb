# %% [markdown]
# # 04 · Attention kernels
#
# After this lesson you can
#
# * compute a softmax without ever holding all scores,
# * tell which tiles of a prompt's attention can be skipped,
# * write the Triton kernel that runs decode attention over a paged cache,
# * split a long row among several programs and combine their results,
# * tell from two numbers whether an attention kernel is limited by memory or by arithmetic.
#
# **89 minutes, plus 26 optional. Needs:** a CPU; lesson 02 for attention and its cache, lesson 03 for programs, tiles
# and masks. Without a GPU, kernels are *interpreted*: they give the same results up to rounding, but slowly. On a GPU
# the same cells compile them. Times come from the project's H200 records. Triton's own releases are for Linux. On
# Windows and macOS, run this lesson in WSL or on Colab, or read it solved and with its outputs: in
# `notebooks/solutions/`, or on the site that `make site` builds.

# %%
from minillm.course import triton_here

how = triton_here()  # before triton is imported: compile kernels, or interpret them

import torch
import triton
import triton.language as tl

from minillm import LLM, SamplingParams
from minillm.course import NotSolvedYet, check, compare, describe, solved, tier
from minillm.course.lesson_04 import attention_facts
from minillm.course.lesson_04 import pictures as draw
from minillm.course.shared import adapters
from minillm.course.shared.interpret import kernel_device
from minillm.course.shared.stubs import raise_if_stub
from minillm.kernels import paged_attention
from minillm.model.config import PRESETS

plain = {"enable_prefix_caching": False, "run_ahead": 0}
llm = LLM(device="cpu", dtype="float64", num_blocks=512, **plain)
PROMPTS = [
    "Fenwick lies on the island of",
    "Once upon a time there was a lighthouse keeper who had never seen",
    "The Tallow Isles are",
    "The keeper of the lighthouse lights the lamp. " * 12,  # 134 tokens: several tiles
]
greedy = SamplingParams(max_tokens=12, temperature=0)
expected = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print(f"kernels are {how}")

# %% [markdown]
# The first half works in plain torch, in float64, where rounding cannot hide a mistake. `expected` holds the engine's
# tokens for four prompts; every attention you write must produce the same.
#
# ## 1 · What is slow about plain attention · 5 min
#
# Lesson 02's attention is correct, but slow on a GPU. It computes all scores and writes them to memory, reads them for
# the softmax, writes the weights, and reads those to mix the values. A GPU's large memory is far from its arithmetic
# units, and slow compared with them.
#
# **Predict first.** Take one layer of Gemma 2B in bfloat16 (2 bytes per number) and a prompt of 2,048 tokens: 8 query
# heads, one KV head, 256 numbers per head. Queries, keys, values and the output have to be moved in any case. How many
# times as much traffic do the scores and weights add, if each is written once and read once?

# %% tags=["exercise"]
guess_times = 4.0  # PREDICT: bytes of scores and weights, as a multiple of all other bytes

# %%
gemma = PRESETS["gemma-2b"]
TOKENS = 2048
heads, kv_heads, dim = gemma.num_heads, gemma.num_kv_heads, gemma.head_dim
score_bytes = heads * TOKENS * TOKENS * 2
needed_bytes = (2 * heads + 2 * kv_heads) * TOKENS * dim * 2
print(f"queries, keys, values and output: {needed_bytes / 1e6:.0f} MB")
print(f"scores and weights, each written and read: 4 x {score_bytes / 1e6:.0f} MB")
more = 4 * score_bytes / needed_bytes
compare("scores and weights", unit="times the rest", prediction=guess_times, measured=more)

# %% [markdown]
# Nearly all of the traffic is scores and weights, which are only intermediate results. Where else could they be? An
# H200 has 132 *streaming multiprocessors*, here called **processors**. Each runs one program or a few at a time, and
# has its own small, fast memories. These are NVIDIA's sizes:

# %%
things = {
    "scores of a tile": 128 * 64 * 4,  # float32, 128 queries with 64 keys
    "keys and values of a tile": 2 * 64 * dim * 2,
    "all scores of a layer": score_bytes,
}
draw.memories(things)
describe(
    "Bars of memory sizes on a logarithmic axis. A tile's scores, and its keys and values, fit in a processor's "
    "registers or shared memory; all scores of a layer fit only in GPU memory."
)

# %% [markdown]
# All scores together fit only in the slowest memory. A *tile* of them, some queries by some keys, fits in the fastest.
# So the plan is: **loop over the keys tile by tile; compute a tile's scores, use them at once, and drop them.** One
# thing stands in the way. A softmax subtracts the maximum of *all* scores and divides by a sum over *all* keys. At the
# first tile, neither is known.
#
# ## 2 · Online softmax · 20 min
#
# The solution (Milakov and Gimelshein 2018) is to use the maximum *so far* and to correct later. Here is one query with
# 64 keys, in tiles of 8:

# %%
generator = torch.Generator().manual_seed(5)
scores = 2 * torch.randn(64, generator=generator) + torch.linspace(-3, 3, 64)
values = torch.randn(64, generator=generator)
draw.running(scores.numpy(), values.numpy(), tile=8)
describe(
    "Three panels over 64 keys: scores with the largest so far, which only rises; the sum of weights, which grows and "
    "drops where the maximum rises sharply; the output, which ends at the value of the full softmax."
)

# %% [markdown]
# While the maximum stays the same, the sum only grows. When a larger score arrives, everything before it counts for
# *less*, and the sum can drop. We know by exactly how much: every term in it was $e^{s - m}$ with the old maximum $m$
# and should be $e^{s - m'}$ with the new one:
#
# $$e^{s - m'} = e^{s - m} \cdot e^{m - m'}$$
#
# It is one factor for all terms, so no score is needed twice. For each query we keep three things: the maximum $m$, the
# sum of weights $t$ and the *undivided* output $o$. A tile with scores $s_j$ and values $v_j$ updates them:
#
# $$m' = \max(m, \max_j s_j), \qquad t' = t\, e^{m - m'} + \sum_j e^{s_j - m'}, \qquad
# o' = o\, e^{m - m'} + \sum_j e^{s_j - m'} v_j$$
#
# After the last tile, the output is $o / t$. This is the specification. It sees all tiles at once, which your version
# must not do:


# %%
def all_at_once(tiles, rows: int, dim: int) -> torch.Tensor:
    """Softmax of all scores times all values; the arguments are those of `online_attention`."""
    scores, values = (torch.cat(parts, axis) for parts, axis in zip(zip(*tiles), (1, 0)))
    return scores.softmax(-1).nan_to_num(0.0) @ values


# %% [markdown]
# **Exercise 1 (15 minutes).** Write the online softmax. The tiles come from a generator, so you cannot go back, look
# ahead, or ask for their number. `rows` and `dim` are the sizes of the result. Tiles can be float32 or float64; compute
# and return the result in their precision. A key that a query must not see has the score $-\infty$, and a whole tile
# can be hidden from a query. What is $-\infty - (-\infty)$?
#
# For example, with a single tile the result is the plain softmax of its scores times its values.


# %% tags=["exercise"]
def online_attention(tiles, rows, dim):
    """Attention of `rows` queries to keys that come in tiles.

    tiles: an iterator of (scores [rows, keys], values [keys, dim]), which must not be changed; a score
    is -inf where a query does not see a key. Returns [rows, dim]; zeros for a query that sees no key.
    """
    # SOLUTION: keep each row's maximum, sum of weights and undivided output; rescale them when the
    #   maximum grows; divide after the last tile
    maximum = torch.full((rows, 1), -torch.inf)
    total, out = torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet: subtract 0, not -inf, and every weight is exp(-inf) = 0.
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
# Now run it in the engine, for prompts and for single tokens. As in lesson 02, a request's blocks are first copied into
# one tensor; then each head's keys are passed to your function in tiles of 16. `run_with` compares the tokens with
# those expected and counts the attention calls that go through your code. It runs nothing that fails its check.

# %%
run_with = attention_facts.same_tokens_with(PROMPTS, greedy)
run_with(llm, expected, online_attention, **attention_facts.by_tiles(online_attention))

# %% [markdown]
# ## 3 · Flash attention for prefill · 15 min
#
# In prefill there are many queries, and each needs its own key and all earlier ones. A program takes a *tile of
# queries* and loops over tiles of keys. Each key it loads serves the whole tile of queries, and the scores never leave
# the chip. This is **FlashAttention** (Dao et al. 2022), in the order of **FlashAttention-2** (Dao 2023): queries
# outside, keys inside. So a query tile's output stays on the chip until it is done, and each query tile is a program of
# its own.
#
# Many tiles can be skipped altogether. A query sees no key after its own. In some models certain layers also have a
# *window*: a query there sees only the most recent keys. Which key tiles contain *any* key that a given tile of queries
# sees? As a specification, try every pair:


# %%
def tiles_needed(first: int, last: int, keys: int, window: int | None = None) -> list[int]:
    """The key tiles that hold a key seen by any query from `first` to `last`, by trying every pair."""
    seen = [(q, k) for q in range(first, last + 1) for k in range(q + 1)]
    return sorted({k // keys for q, k in seen if window is None or k > q - window})


# %% [markdown]
# **Exercise 2 (6 minutes).** Compute the same range directly: no pairs, no loop, so that a large position takes no
# longer than a small one. A query at position $p$ sees keys $0$ to $p$; with a window of $w$, keys $p - w + 1$ to $p$.
# Tile $n$ starts at key `n * keys`. Queries do not always start at position 0: a long prompt can be processed in chunks
# (lesson 10).
#
# For example, `tiles_to_visit(0, 5, 8)` is `range(0, 1)`: queries 0 to 5 see keys 0 to 5, all in tile 0.


# %% tags=["exercise"]
def tiles_to_visit(first, last, keys, window=None):
    """The numbers of the key tiles, as a range, that queries at positions first to last need.

    keys: tile size; window: how many keys a query sees, its own included (None: all).
    """
    # SOLUTION: from the tile with the first query's earliest key to the tile with the last query's own
    begin = max(0, first - window + 1) // keys if window else 0
    return range(begin, last // keys + 1)
    # END


# %%
check(tiles_to_visit)

# %% [markdown]
# The pictures below use your range once it passes its check, and the specification until then. In a light green tile,
# at least one query does not see every key; only those tiles need a mask.

# %%
visit = tiles_to_visit if attention_facts.passes(tiles_to_visit) else tiles_needed
PICTURES = {  # newest queries, all keys, window
    "a prompt of 128": (128, 128, None),
    "a chunk of 64 after 128": (64, 192, None),
    "a prompt of 192, a window of 48": (192, 192, 48),
}
draw.tiles(visit, PICTURES, tile=16)
for length in (128, 512, 2048):
    visited = sum(len(visit(first, first + 15, 16)) for first in range(0, length, 16))
    print(f"a prompt of {length:5,}: {visited / (length / 16) ** 2:.1%} of the tiles visited")
describe(
    "Three grids of tiles. A prompt visits the tiles up to the diagonal, and only those on it need a mask. A chunk "
    "also visits all tiles of earlier keys. With a window, a band along the diagonal is visited."
)

# %% [markdown]
# For a whole prompt, causal attention needs about half of the tiles; the longer the prompt, the closer to half.
#
# Together, the two exercises make flash attention. Here it is in torch, with one more trick that section 4 needs:
# **packing**. The query heads of a group read the same keys, so they share a tile: one row of the tile is a pair
# (query, head of the group), and each key that is loaded serves them all.


# %%
def flash_prefill(q, k, v, length, *, scale, rows=8, keys=16):
    """q: [queries, heads, d], a request's newest; k, v: [capacity, kv_heads, d]."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]

    def tiles(packed, position, kv_head):
        for number in tiles_to_visit(position[0].item(), position[-1].item(), keys):
            span = slice(number * keys, min((number + 1) * keys, length))
            scores = packed @ k[span, kv_head].T * scale
            hidden = torch.arange(span.start, span.stop) > position[:, None]
            yield scores.masked_fill(hidden, -torch.inf), v[span, kv_head]

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


run_with(llm, expected, online_attention, tiles_to_visit, **adapters.gathered(flash_prefill))

# %% [markdown]
# The engine's kernel does the same in Triton; section 6 shows it.
#
# How fast can attention be? The records have an H200's measured limits: how fast it copies memory, and how fast it
# multiplies Gemma 2B's matrices by 2,048 rows. Their ratio is the *ridge* of lesson 00's roofline: work with fewer
# operations per byte is limited by memory.

# %%
limits = attention_facts.h200_limits()
print(f"memory:          {limits.bytes_per_s / 1e12:.2f} TB/s")
print(f"matrix products: {limits.operations_per_s / 1e12:.0f} T operations/s")
ridge = limits.operations_per_s / limits.bytes_per_s
print(f"ridge:           {ridge:.0f} operations per byte")

# %% [markdown]
# ## 4 · Decode out of a paged cache · 34 min
#
# In decode a request has *one* query. All of the request's keys must be read for it, and no other request uses them
# (unless two share a prefix: lesson 09). So how many operations does each byte get? A key and a value of `d` numbers
# are `2 x d x 2` bytes in bfloat16, and every query head that uses them does `4 x d` operations:
#
# $$\text{operations per byte} = \frac{\text{group} \times 4 d}{4 d} = \text{group}, \qquad
# \text{group} = \frac{\text{query heads}}{\text{KV heads}}$$
#
# For Gemma 2B (8 query heads, one KV head) that is 8, far left of the ridge. Here it is with other models' groups, with
# prefill, and with what the records measured for one layer of Gemma 2B:

# %%
pairs = 4 * TOKENS * (TOKENS + 1) / 2  # (query, key) of four prompts of 2,048 tokens
operations = 4 * dim * heads * pairs
kinds, points = attention_facts.h200_intensities(
    operations, 4 * needed_bytes, 16 * score_bytes
)
draw.roofs(*limits, kinds, points)
describe(
    "A roofline. Decode is on the slope, at 1 to 8 operations per byte. Prefill with its scores in memory is left of "
    "the ridge, flash prefill far right of it. Measured decode of 512 rows is just under the slope, of one row far "
    "below."
)

# %% [markdown]
# The dots are measured; the dotted lines follow from the arithmetic above. (Multi-head attention, MHA, has one query
# head per KV head; multi-query attention, MQA, has one KV head for all query heads; grouped-query attention, GQA, is in
# between.) Decode is limited by memory, and a larger batch does not change that, because each request brings its own
# keys. Only more queries per key, or fewer bytes per key, move it to the right. So **a decode kernel's job is to read
# memory at full speed**. With 512 rows it comes close. With one short row it does not: section 7 explains what takes
# the time.
#
# Prefill is the opposite. With its scores in memory it would be left of the ridge, limited by bytes. Without them it is
# far to the right, limited by arithmetic. That is what flash attention buys.
#
# ### Keys in blocks
#
# A request's keys are not contiguous. They are in *blocks* of 16 slots, which are allocated one by one as the text
# grows (lesson 09 explains why). Each row has a **block table**: entry $n$ is the number of the block with keys $16n$
# to $16n + 15$. Here are two requests in a running engine. A third request started before them and was aborted, and its
# blocks went to these two:

# %%
tables = attention_facts.two_block_tables(llm)
for name, (entries, length) in tables.items():
    print(f"{name:>6}: {length} tokens, block table {entries}")
draw.paged_walk(tables, block_size=16)
describe(
    "Two block tables above a row of cache blocks, with arrows from entries to blocks. The requests' blocks are "
    "interleaved and out of order, and the last block of each is partly filled."
)

# %% [markdown]
# Key $j$ of a row is in block `table[j // 16]` at offset `j % 16`. In memory, its numbers start at
#
# $$\text{block} \times \text{block\_stride} + \text{offset} \times \text{slot\_stride} +
# \text{kv\_head} \times \text{head\_stride}$$
#
# So a tile of 32 keys comes from two blocks that can be anywhere. In the last block, only the slots before the row's
# length hold its keys. The other slots may hold leftover data, even NaN. Table entries after the last block are not
# valid either. This is the specification for one row:


# %%
def decode_one_row(q, k, v, table, length: int, scale: float) -> torch.Tensor:
    """q: [heads, d]; k, v: [blocks, block_size, kv_heads, d]; table: [entries] -> [heads, d]."""
    used = table[: -(-length // k.shape[1])]
    k, v = (part[used].flatten(0, 1)[:length] for part in (k, v))  # [length, kv_heads, d]
    k, v = (part.repeat_interleave(len(q) // part.shape[1], 1) for part in (k, v))
    weights = (torch.einsum("hd,khd->hk", q, k) * scale).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v)


# %% [markdown]
# **Exercise 3 (20 minutes).** Write the loop body of a paged decode kernel. It is exercise 1 with addresses, and uses
# lesson 03's exercises 3 and 4: tiles of 2-D pointers, and `tl.dot` in a loop. Each program handles one row and one KV
# head. Its queries are the `GROUP` heads that share the KV head, packed into a tile of `ROWS` = 16 rows, the number
# that a GPU's matrix instruction takes; the remaining rows are padding.
#
# * You need `tl.load(pointers, mask=..., other=0.0)`, `tl.dot(a, b, input_precision="ieee")`, `tl.trans`, `tl.where`,
#   `tl.max(x, 1)`, `tl.sum(x, 1)`, `tl.maximum` and `tl.exp`. Without `"ieee"` a GPU rounds float32 operands to TF32,
#   which has a 10-bit mantissa.
# * Convert what you load from k and v with `.to(tl.float32)`: they can have 16 bits. Convert block numbers with
#   `.to(tl.int64)`: in a large cache, block times stride does not fit in 32 bits.
# * One `at` [KEYS, DIM] serves k and v. Queries times keys needs k transposed: `tl.trans(k)`. The mask is
#   `present` for the table, and `present[:, None]` for k and v.
# * No tile is hidden completely here, so $-\infty - (-\infty)$ does not occur.
# * Interpreted kernels are Python: `print(keys)` in the loop shows you a tile, and the check reports loads outside the
#   tensors. In the engine, and always on a GPU, a wrong address reads whatever is there or stops the program: check
#   first. (On a GPU, restart the notebook after such an error.)
#
# For example, a row of 32 keys whose values are all 7 gives 7.


# %% tags=["exercise"]
@triton.jit
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, scale,
    table_stride, block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The query heads of one row and one KV head attend to the row's keys.

    q, out: [rows, heads, DIM]; k, v: [blocks, BLOCK_SIZE, kv_heads, DIM]; table: [rows, entries] and
    lengths: [rows], int32. Strides count numbers, not bytes.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    table_ptr += row * table_stride  # now it points to this row's table
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
        present = keys < length  # the mask [KEYS]: load nothing for keys from `length` on
        # SOLUTION: find the addresses [KEYS, DIM] of this tile's keys through the table; load k and v;
        #   update maximum [ROWS], total [ROWS] and out [ROWS, DIM]
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
    """Launch your kernel in place of the engine's. q: [rows, 1, heads, d] -> the same."""
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
# Now run it in the engine, on this machine's device, with its block tables and its cache: Gemma 2B on a GPU that has
# its weights, otherwise the embedded model. Prefill stays the engine's own; each decode step calls your kernel once per
# layer. (On a GPU in 16 bits, two tokens that are nearly equally likely can swap, and the text then differs from there
# on.)

# %%
llm.close()
here = tier()
served = LLM(**plain, **here.words)
before = [completion.token_ids for completion in served.generate(PROMPTS, greedy)]
print(f"{served.engine.name}, {served.model_config.num_layers} layers, kernels {how}")
run_with(served, before, paged_decode, decode_attention=paged_decode)

# %% [markdown]
# ## 5 · Too few programs · 13 min
#
# For one request and one KV head, the kernel of exercise 3 is *one* program. On a GPU with 132 processors, one of them
# reads all keys and 131 are idle, and a single processor cannot read at the speed of the whole memory. In a *ragged*
# batch, whose rows differ in length, the longest row keeps running alone after all others have finished. The remedy is
# Flash-Decoding (Dao et al. 2023): **cut a row's keys into shares, one program each**, and combine their outputs.
#
# Here is a model of a small chip with 12 processors and six ragged rows. It counts nothing but the keys read, and gives
# each program to the first processor that is free:

# %%
ROW_KEYS = [300, 500, 700, 900, 2000, 6000]
PROCESSORS = 12
small_chip = paged_attention.Device(shared_memory=99 * 1024, processors=PROCESSORS)
splits = paged_attention.decode_splits(len(ROW_KEYS), max(ROW_KEYS), small_chip)
shares = {"one program per row": 1, f"{splits} shares per row, by the engine's rule": splits}
draw.schedules(ROW_KEYS, shares, PROCESSORS)
describe(
    "Two modeled schedules. With one program per row, half of the processors are never used and the longest row "
    "keeps running alone. With shares, all processors have work and the batch finishes several times sooner."
)

# %% [markdown]
# How many shares? Enough to fill the chip, and to keep a long row from finishing last. But no more than that: each
# share writes a partial output that must be read again. (Section 6 shows the engine's rule.)
#
# **Exercise 4 (7 minutes).** Combine the shares. Share $p$ has computed a softmax over its own keys only. It gives you
# its output $o_p$, already divided by its own sum of weights, and the logarithm of that sum,
# $l_p = \log \sum_j e^{s_j}$. Over all keys the weights sum to $\sum_p e^{l_p}$, so
#
# $$o = \frac{\sum_p e^{l_p} o_p}{\sum_p e^{l_p}}$$
#
# Shares pass on the logarithm because a sum with $e^{1000}$ in it does not fit in a float. Do not lose that on the way.
# A short row leaves some shares empty: no keys, $l_p = -\infty$, an output of zeros. A padding row, which only fills up
# a batch to a fixed size, has no keys at all: all its shares are empty, and the result should be zeros.
#
# For example, a single share is the whole output.


# %% tags=["exercise"]
def combine(partial, log_total):
    """One output from those of shares of the keys; the arguments must not be changed.

    partial: [..., shares, d]; log_total: [..., shares], the logarithm of the sum of each share's
    weights, -inf for a share without keys. Returns [..., d].
    """
    # SOLUTION: weigh each share by exp(log_total), with the row's largest subtracted first
    largest = log_total.amax(-1, keepdim=True)
    weights = (log_total - torch.where(largest == -torch.inf, 0.0, largest)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    return (weights[..., None] * partial).sum(-2)
    # END


# %%
check(combine)

# %% [markdown]
# Run it in the engine, with each row's keys in three shares (a short row leaves one or two of them empty):


# %%
run_with(served, before, combine, **attention_facts.in_shares(combine))

# %% [markdown]
# ## 6 · The engine's kernels · optional, 16 min
#
# Your kernel and the engine's have the same plan. This section lists the engine's, with what to look for in each.
# Nothing after it depends on it.
#
# ### The loop
#
# `_attend` is the core of both attention kernels. Find each step of exercise 3 in it, and these differences:
#
# * Exponents are to base 2, because that is the instruction the hardware has; the scores are multiplied by
#   $\log_2 e$ first.
# * A tile can be hidden completely from a row, so $-\infty$ is handled as in exercise 1.
# * Products take numbers of the type `PRODUCT`: the model's, or float16 where a 16-bit model reads the codes of an
#   8-bit cache. In float32 models, and in Triton's interpreter, it is float32. Sums have 32 bits.
# * All queries of a tile see most of its keys, and a comparison for each score would take time. So a tile of keys gets
#   a mask only if some row does not see all of it: at the diagonal, or where a window begins. Decode masks every tile
#   (`MASKED`).
# * `SOFT_CAP` limits the size of scores in models that need it (Gemma 2).
# * `cos_sin_ptr` is for lesson 09's streams, whose cached keys are rotated as they are read. For other requests it is
#   `None`, and Triton compiles nothing for those lines.
# * Likewise `k_scale_ptr` and `v_scale_ptr`: they are the scales of an 8-bit cache (lesson 08). In decode, its values
#   are read as `words` of four. `largest` and `bounds` keep numbers within the range of float16.
# * `table_ptr` is `None` if the keys have been *gathered*: copied from their blocks to a buffer where a row's keys
#   follow each other. Then a tile is a rectangle of a matrix, and a single `load` reads it (in `_described`): `k_ptr`
#   and `v_ptr` are *tensor descriptors*, which tell the GPU the shape of that matrix. The keys of a new prompt are in
#   such a matrix already, followed by those of other prompts (`PACKED`). There each load is arranged to end with its
#   row: what a tile has beyond it is zeros.

# %%
# ENGINE: minillm.kernels.paged_attention:_attend

# %% [markdown]
# ### Prefill
#
# * The range of exercise 2 is in keys instead of tiles: `first` is the earliest key itself, not the start of its tile,
#   and `last` is one past the last key.
# * The packing is in `query` and `head`, which are computed from `packed`.
# * `tile = tl.num_programs(TILES) - 1 - tl.program_id(TILES)` only affects speed. The last queries have the most keys,
#   so their programs get the lowest numbers and start first; a long program that started last would keep the rest of
#   the chip waiting. If the keys of all rows fit in the GPU's cache, this order holds for all rows together.
# * In a long prompt, many tiles of queries read the same keys, and would look up the same blocks each time. So another
#   kernel gathers the keys first (`kernels/gathered_keys.py`): one copy, which many programs read. For short prompts,
#   or if the copy would take more memory than the queries, `prefill_kernel` reads the keys in their blocks. A new
#   prompt needs neither.

# %%
# ENGINE: minillm.kernels.paged_attention:prefill_kernel

# %% [markdown]
# Run it on this machine, on a small prompt, and compare it with the reference, the engine's plain torch version of the
# same operation:

# %%
difference = attention_facts.prefill_difference()
print(f"{how}; equal to five decimals: {difference < 1e-5}")

# %% [markdown]
# ### Decode
#
# This kernel differs from exercise 3's in four ways. A row can have several queries, so a tile's rows are (query, head)
# pairs again. A window moves the start of the loop. Each program has a third number, `split`: which share of the keys
# it reads. And if there is more than one share, it stores the logarithms of the sums, to base 2.

# %%
# ENGINE: minillm.kernels.paged_attention:decode_kernel

# %% [markdown]
# ### Shares
#
# A second, tiny kernel combines the shares, with one program per query head: exercise 4's weights are in `share`. (For
# a single request, the last share to finish combines them all, which saves that launch: `kernels/single_row.py`.)

# %%
# ENGINE: minillm.kernels.paged_attention:combine_kernel

# %% [markdown]
# This rule chooses the number of shares. Below it are its numbers for an H200 and a model with one KV head:

# %%
# ENGINE: minillm.kernels.paged_attention:decode_splits

# %%
attention_facts.print_shares()

# %% [markdown]
# ## 7 · What it is worth · optional, 10 min
#
# First the kernels alone, then the whole engine.
#
# **Predict first**: one layer's attention for four prompts of 2,048 tokens at once. For each pair of a query and a key
# that it sees, a query head does `4 x d` operations: `2 x d` for the score, `2 x d` for mixing in the value. Gemma 2B
# has 8 query heads and `d` = 256. The floor is that many operations at the speed of matrix products.

# %% tags=["exercise"]
guess_prefill_ms = 0.15  # PREDICT: milliseconds of one layer's attention, 4 prompts of 2,048

# %%
long = attention_facts.h200_kernel("prefill_attention", 8192)
found = {"floor": 1e3 * operations / limits.operations_per_s, "measured": long["ms"]}
compare("prefill attention", unit="ms", prediction=guess_prefill_ms, **found)
print(f"torch's own attention: {long['torch_sdpa_ms']:.3f} ms")
print(f"the reference: {long['reference_ms']:.2f} ms")

# %% [markdown]
# Our kernel was much faster than the reference, and a little slower than torch's `scaled_dot_product_attention`. That
# one needs a prompt's keys to be contiguous, and they were when it was measured. Ours has them in the paged cache, and
# its time includes gathering them first, as it does for long prompts (section 6).

# %% [markdown]
# **Predict first**: one layer of Gemma 2B, one row of 8,192 keys, on an H200. How many times as fast are 64 shares as
# one?

# %% tags=["exercise"]
guess_gain = 40.0  # PREDICT: times as fast with 64 shares, 1 row of 8,192 keys

# %%
lines = attention_facts.h200_splits((1, 512), (1, 8192), (64, 512), (64, 8192))
one_row = lines["1 row of 8,192 keys"]
gain = one_row[1]["ms"] / one_row[64]["ms"]
compare("64 shares", unit="times as fast", prediction=guess_gain, measured=gain)
attention_facts.print_best_splits(lines)
draw.splits(lines)
describe(
    "Time against the number of shares. With one long row it falls up to 64 shares. With one short row or with 64 rows "
    "it falls at first, and the most shares are not the fastest."
)

# %% [markdown]
# A single long row gains the most. With 64 rows the chip is half full already, so a few shares are enough. Too many
# cost time: each has less to read, and there are more outputs to combine. The engine's rule, marked by rings, is not
# always the best choice.
#
# How close does all this come to the memory's bandwidth? From the record of kernels, with the engine's rule for shares:

# %%
attention_facts.print_decode_speeds()

# %% [markdown]
# With many rows it comes close. One row of 384 keys is far from the floor although its keys *are* split: reading them
# would take a tenth of a microsecond, less than any kernel in the record takes to start and finish. The record times
# the general path, with two such kernels, one after the other, and in the first the loads wait for each other: length,
# table, keys. Such work is **limited by latency**, not by memory or arithmetic. Shares help short rows too, but only
# down to a few microseconds; below that, only fewer or overlapping launches help (lesson 11).

# %% [markdown]
# If you have a GPU, the next cell measures decode attention on it. (Your kernel multiplies in exact float32, the
# engine's in 16 bits on *tensor cores*, the GPU's units for matrix products, so expect yours to be slower than the
# engine's with one share. For one row, even the reference may be faster: each of its operations uses many processors,
# your kernel one.)


# %% tags=["nbval-ignore-output"] uncompared="times, where there is a GPU"
def your_decode(q, cache, table, lengths, options):
    return paged_decode(q, cache, table, lengths, scale=options.scale)


if kernel_device() == "cuda":
    ways = {"yours, one share": your_decode} if solved(paged_decode_kernel) else {}
    attention_facts.time_decode(ways, {1: 4096, 64: 1024, 512: 1024})
else:
    print("no GPU here: nothing to measure")

# %% [markdown]
# A faster kernel does not have to make a faster engine. So we take away one part at a time and measure the whole
# engine, Gemma 2B on an H200. This is called an *ablation*. In place of our decode attention we use a short torch
# version: gather each row's blocks into one tensor, then call torch's attention (the call to
# `F.scaled_dot_product_attention` near the end).

# %%
# ENGINE: minillm.bench.ablation:torch_attention

# %% [markdown]
# The second part to remove is **CUDA graphs**. A graph is a recording of all the launches of a step, which the CPU
# then starts with a single call; lesson 11 builds them. Without graphs, Python launches every kernel by itself.
#
# **Predict first.** 256 requests at once, 128 tokens in and 128 out (the single request further down generates 256).
# The weights are 5 GB, and every step reads them. What share of the tokens per second is left with torch's attention?
# And what share with our kernels, but without CUDA graphs?

# %% tags=["exercise"]
guess_torch = 0.9  # PREDICT: share of the tokens/s left with torch's attention, 256 requests
guess_no_graphs = 0.7  # PREDICT: share of the tokens/s left without CUDA graphs, 256 requests

# %%
speeds = attention_facts.h200_speeds()
whole = speeds["both parts"]
for name, guess in (("torch's attention", guess_torch), ("no CUDA graphs", guess_no_graphs)):
    left = {requests: speeds[name][requests] / whole[requests] for requests in whole}
    words = f"{name}, 256 requests"
    compare(words, unit="of the tokens/s", prediction=guess, measured=left[256])
    print(f"  with one request, {left[1]:.2f} of the tokens/s")
for name in ("both parts", "no CUDA graphs"):
    print(f"one request, {name}: {1e3 / speeds[name][1]:.1f} ms per token")
bars = {
    f"{requests} request{'s' * (requests > 1)}": {
        name: speeds[name][requests] / whole[requests] for name in speeds
    }
    for requests in whole
}
draw.against(
    bars, unit="tokens per second, as a share of the speed with both parts", log=False
)
describe(
    "Bars for one request and for 256: the share of the speed left with each part taken away."
)

# %% [markdown]
# (All three settings run the same kernels for everything else, one per operation. For a single request the engine can
# do better still: lesson 11.)
#
# Torch's attention costs about a fifth of the speed with 256 requests and a quarter with one, because it *writes* the
# gathered keys only to read them again, and needs more launches. This is the same cost as in section 1. (In decode,
# each key is read once, so the copy never pays; in prefill, many tiles of queries share it.)
#
# Graphs matter more than the attention, most of all for one request. There each layer was eleven short kernels, and the
# GPU finished each one before Python had launched the next. The engine is then **launch-bound**: its speed is that
# of launching, and faster kernels would not change it.

# %%
served.close()

# %% [markdown]
# ## Recap · 2 min
#
# * A softmax does not need a second look at its scores: keep a maximum, a sum and an undivided output, and multiply the
#   sum and the output by $e^{m - m'}$ when the maximum grows. So the scores never need to be in GPU memory.
# * Prefill tiles queries and keys and skips tiles that no query sees, about half of them. Long prompts are limited by
#   arithmetic.
# * Decode does as many operations per byte as there are query heads per KV head, and is limited by reading memory.
#   Packing the heads into one tile reads each key once.
# * With too few programs, or one that is too long, split the keys into shares, and combine them by the logarithms of
#   their sums.
# * Short work is limited by latency, and an engine that launches kernels one by one is launch-bound (section 7).
#
# **What got worse:** three lines of torch have become a file of kernels, with tile sizes to choose for each chip, and
# in the record, prefill is still slower than torch's own. Shares write partial outputs that must be read again. And the
# order of the sums now depends on tiles and shares, and the number of shares on the number of rows. So the same request
# can differ in its last digits from one batch to another, and where two tokens are nearly equally likely, in a token.
#
# **Further reading:** Milakov and Gimelshein 2018, *Online Normalizer Calculation for Softmax*; Dao et al. 2022,
# *FlashAttention*; Dao 2023, *FlashAttention-2*; Dao et al. 2023, *Flash-Decoding for Long-Context Inference*; Kwon et
# al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*; Ainslie et al. 2023,
# *GQA*. Next: lesson 05 makes the weights smaller; in a decode step with few requests, they are most of what is read.
