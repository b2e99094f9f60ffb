# %% [markdown]
# # 09 · Paged memory
#
# Lessons 05 to 08 made weights, keys and values smaller. How many requests fit now depends on how the cache's memory is
# handed out. A request grows by a token in each step, and its final length is not known in advance. A cache that
# reserves room for the longest possible text is mostly empty, however small its numbers are.
#
# After this lesson you can say what a contiguous KV cache wastes, and measure it on a traffic trace; explain paged
# attention on paper with two short requests; write the block pool that a whole engine runs on; and let requests with
# the same beginning share memory safely, and keep that memory for later requests.
#
# **90 minutes.** **Needs:** a CPU, and lesson 02 (attention, the KV cache and what it costs); nothing from 05 to 08. No
# GPU: this lesson is bookkeeping, which the engine does on the CPU anyway.

# %%
import math
from collections import OrderedDict

import torch

from minillm import LLM, SamplingParams, using
from minillm.advice import sizing
from minillm.bench import records, waste, workloads
from minillm.bench.batching import LONGEST, SLOTS
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_09 import paging
from minillm.course.lesson_09 import pictures as draw
from minillm.course.shared import adapters
from minillm.kv_cache import BlockPool, OutOfBlocks
from minillm.kv_cache import block_pool as kv_cache
from minillm.trace import Trace

llm = LLM(device="cpu", dtype="float64", block_size=16, num_blocks=256)
greedy = SamplingParams(max_tokens=12, temperature=0)
PROMPTS = [
    "Fenwick lies on the island of",
    "Once upon a time there was a lighthouse keeper who had never seen",
    "The Tallow Isles are",
]
expected = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]


def whose(part):
    """Whether a result below comes from your code, in words."""
    return "yours" if solved(part) else "the engine's own (yours is not solved yet)"


print(f"{sum(map(len, expected))} tokens to compare with later")

# %% [markdown]
# ## 1 · One piece of memory for each request · 7 min
#
# Every token of a request leaves a key and a value in each layer (lesson 02), and they must stay until the request
# ends. The space for one token's keys and values is called a **slot**. The simplest cache gives each request one piece
# of memory: its slots are next to each other. How long should that piece be? The request grows by one token per step,
# its final length is unknown, and the memory after it soon belongs to another request. So the cache reserves enough for
# the longest text that is allowed.
#
# Two requests will stay with us through this lesson. For simplicity, one word is one token, and 16 tokens are allowed:

# %%
A = ["the", "sea", "is", "cold", "and", "dark"]
B = ["the", "sea", "is", "cold", "but", "calm", "today"]
draw.contiguous({"A": (0, 16, A, 2), "B": (16, 16, B, 2)}, slots=32)
describe("""A row of 32 slots. A reserves slots 0 to 15 and fills 6, B reserves 16 to 31 and fills 7. In each piece 2
more slots are marked as used later, and the rest, 8 and 7 slots, as never used.""")

# %% [markdown]
# Each request will write two more words. The memory is full: a third request has to wait, although only 13 of the 32
# slots hold anything. There are three kinds of waste:
#
# * **reserved** slots will be used, but later (yellow);
# * **internal fragmentation**: slots inside a piece that will never be used, because the request ends first (red);
# * **external fragmentation**: free slots in gaps that are each too small for the next request (none here; light gray
#   in the next chart).
#
# Could the cache reserve less than the longest text? To find out, take traffic: 400 requests to a chat service, with
# prompts and outputs of very different lengths. This traffic trace is synthetic; `data/traces.py` draws its lengths
# from log-normal distributions.

# %%
work = workloads.replay("conversation", vocab_size=4096)
needed = [waste.final(request) for request in work]
print(f"{len(work)} requests; the longest possible is the model's context, {LONGEST:,} tokens")
print(
    f"they reach {sum(needed) / len(needed):.0f} tokens on average; the longest reaches {max(needed):,}"
)

# %% [markdown]
# **Predict first.** The memory has 16,384 slots, each request reserves 2,048 of them in one piece, and there are always
# requests waiting. On average over time, what share of the slots holds keys and values? And what share, if an oracle
# told the cache each request's exact final length in advance?

# %% tags=["exercise"]
guess_longest = 12  # PREDICT: % of the slots in use, 2,048 reserved for each request
guess_oracle = 75  # PREDICT: % of the slots in use, the exact final length reserved

# %% [markdown]
# Now simulate it, step by step. The first waiting request takes the first gap that is large enough, and its whole
# prompt is computed at once. From then on it computes one token per step, until it ends and leaves. The simulation
# compares three reservations: the longest possible text; a good guess (the prompt, and the output's length rounded up
# to a power of two); and the oracle's exact length.

# %%
results = waste.compare(work, slots=SLOTS, block_size=16, max_model_len=LONGEST)
in_pieces = results[:3]
longest, _, oracle = in_pieces
for result, guess in ((longest, guess_longest), (oracle, guess_oracle)):
    compare(result["cache"], unit="%", prediction=guess, measured=100 * result["used"])
draw.shares(in_pieces)
describe("""Three stacked bars, one for each reservation, that divide the memory into keys and values, reserved, never
used, and free. The share of keys and values grows from bar to bar.""")

# %% [markdown]
# With the longest reservation, more than four fifths of the memory holds nothing. Even the oracle, which cannot exist,
# leaves a third unused: tokens still to come, and gaps. Kwon et al. (2023, figure 2) measured that 20 to 38% was in
# use in the systems of that time, and proposed paged attention.
#
# Wasted memory costs speed. A decode step reads all weights, however few requests it serves (lesson 02), so the more
# requests run together, the less each one costs.
#
# ## 2 · Blocks and block tables · 13 min
#
# Operating systems had the same problem with the memory of programs, and solved it with **pages**. Cut the memory into
# small pieces of equal size, here called **blocks**, of `block_size` slots each. A request gets a block when it needs
# one, anywhere in memory. Its **block table** lists its blocks in order.

# %%
draw.paged({"A": ([5, 2], A), "B": ([1, 6], B)}, num_blocks=8)
describe("""Eight blocks of four slots. A's table, 5 and 2, points to block 5 with its first four words and block 2 with
the last two. B's table, 1 and 6, points to block 1 with four words and block 6 with three. Four blocks are free.""")

# %% [markdown]
# Read A's table: tokens 0 to 3 are in block 5, and tokens 4 and 5 in block 2. A's next word goes into the third slot of
# block 2. When block 2 is full, A gets another block, any free one. Before, all 32 slots were taken; now 16 are free
# for other requests.
#
# Where exactly is a token? Slots are numbered through the whole memory: block 0 has slots 0 to 3, block 1 has slots 4
# to 7. Divide the token's position $p$ in its request by `block_size`. The quotient, rounded down, is the entry of the
# table that names its block; the remainder is its place inside the block, the **offset**:
#
# $$\text{slot} = \text{table}[\lfloor p / \text{block\_size} \rfloor] \times \text{block\_size} + p \bmod
# \text{block\_size}$$
#
# Try it for A's word `dark`: position 5, so entry 1 of the table, which is block 2, and offset 1. The slot is
# $2 \times 4 + 1 = 9$. Check it in the picture (positions, entries and slots count from 0).
#
# **Exercise 1 (5 minutes).** Write a function that returns the slots for a range of a request's positions. The engine
# needs them twice: to write the keys and values of new tokens, and to read those of all tokens.
#
# For example, with the table `[2, 3]` and blocks of 4, tokens 0 to 3 are in slots 8, 9, 10 and 11.


# %% tags=["exercise"]
def slots_of(table: list[int], start: int, end: int, block_size: int) -> list[int]:
    """The slots of a request's tokens at positions start, start + 1, ..., end - 1.

    table: the request's blocks in order; it may have more blocks than these tokens need.
    """
    # SOLUTION: look up each position's block, and add the offset inside it
    positions = range(start, end)
    return [table[at // block_size] * block_size + at % block_size for at in positions]
    # END


# %%
check(slots_of)

# %% [markdown]
# **Paged attention** is attention that finds its keys this way. Reading through the table gives back the same keys in
# the same order, so the result is the same to the last bit. (Another order would change only rounding: each key was
# rotated by its own position before it was written, lesson 02.) To see it, compute the attention of A's newest token
# twice: over keys and values in one piece, and over the same ones in scattered blocks. The engine's slots say where
# they are written, and yours where they are read.

# %%
slots = yours(slots_of, adapters.slots_of)
_ = torch.manual_seed(0)
k, v = torch.randn(2, len(A), 1, 8, dtype=torch.float64)  # [tokens, kv_heads, head_dim]
q = torch.randn(1, 2, 8, dtype=torch.float64)  # the newest token's query, two heads
memory_k, memory_v = torch.full((2, 8, 4, 1, 8), 99.0, dtype=torch.float64)  # 8 blocks of 4

written = adapters.slots_of([5, 2], 0, len(A), 4)  # the engine's
memory_k.flatten(0, 1)[written] = k  # write (scatter)
memory_v.flatten(0, 1)[written] = v
at = slots([5, 2], 0, len(A), 4)
found_k, found_v = memory_k.flatten(0, 1)[at], memory_v.flatten(0, 1)[at]  # read (gather)

scale = 1 / math.sqrt(8)  # 1 / sqrt(head_dim)
# The engine's attention over a cache, as in lesson 02
in_one_piece = adapters.cached_attention(q, k, v, len(A), scale=scale)
through_the_table = adapters.cached_attention(q, found_k, found_v, len(A), scale=scale)
print(f"slots of A's tokens: {at}; the function is {whose(slots_of)}")
print("the same attention, to the last bit:", torch.equal(in_one_piece, through_the_table))

# %% [markdown]
# (The `99`s stand for whatever earlier requests left behind. Those in block 2's free slots are never read.)
#
# Now in the engine, with its blocks of 16. At each decode step, in each layer, your slots say where each request's keys
# are. `used.calls` counts how often your version ran: 11 decode steps of 6 layers make 66, and 0 means that the engine
# used its own.


# %%
def through_slots(q, cache, block_table, lengths, *, scale):
    """The engine's decode attention. q: [rows, 1, heads, d]; block_table: [rows, blocks]."""
    out, block_size = torch.zeros_like(q), cache.k.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if length:  # 0: a padding row, without a request
            at = slots_of(block_table[row].tolist(), 0, length, block_size)
            k, v = cache.k.flatten(0, 1)[at], cache.v.flatten(0, 1)[at]
            out[row] = adapters.cached_attention(q[row], k, v, length, scale=scale)
    return out


with using(decode_attention=through_slots) as used:
    found = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print(f"the slots are {whose(slots_of)}; the same tokens as before: {found == expected}")
print(used.calls)

# %% [markdown]
# This version copies the keys and values before it uses them. The engine's Triton kernel for decode steps (lesson 04)
# does not: for each tile of keys it looks up the blocks, reads the keys in place, and goes on to the next tile. (For a
# long prompt, the engine copies them too: many tiles of queries read the same keys, so one copy pays.)
#
# ## 3 · A pool of blocks · 21 min
#
# Something must keep track of the free blocks. A list is enough, a **free list**: all blocks have the same size, so any
# free block will do. No gap is ever too small, so there is no external fragmentation. What remains is in each request's
# *last* block, fewer than `block_size` slots: most will soon be filled (reserved); those that the request never reaches
# are internal fragmentation.
#
# One addition, which section 4 needs: a block may be in several tables at once. So the pool counts how many tables hold
# each block, its **reference count**. Releasing a block subtracts 1. The block becomes free when the count reaches 0,
# and not before.
#
# **Exercise 2 (10 minutes).** Write a block pool. The engine checks first whether enough blocks are `available`; if it
# asks for too many anyway, the pool must refuse and stay unchanged, so that no block is lost. You write three methods.
# The base class answers the engine's questions about shared prefixes: this pool knows none.
#
# For example, `allocate(3)` from a pool of 4 returns three different blocks, and 1 is still available. You can write
# one method at a time: the check says which properties already hold.


# %% tags=["exercise"]
class MyBlockPool(paging.PoolWithoutPrefixes):
    """Allocates blocks. self.references: the number of holders of each block; self.free: a list."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; each now has one holder.

        Raises OutOfBlocks, and takes none, if fewer are available.
        """
        # SOLUTION: refuse too many; take blocks off the free list and set their counts to 1
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} available")
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks
        # END

    def share(self, blocks: list[int]) -> None:
        """Add a holder to each of these blocks, which are in use."""
        # SOLUTION: count up
        for block in blocks:
            self.references[block] += 1
        # END

    def release(self, blocks: list[int]) -> None:
        """Remove a holder from each of these blocks; a block without holders becomes free."""
        # SOLUTION: count down, and put blocks without holders back into the free list
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
        # END


# %%
check(MyBlockPool)

# %% [markdown]
# Now the whole engine runs on your pool, until the `with` block ends. (`calls` counts the engine's calls to your pool.
# This pool knows no prefixes, so `share` gets only empty lists; in section 5 it gets blocks.)

# %%
with using(block_pool=MyBlockPool) as used:
    found = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print(f"the pool is {whose(MyBlockPool)}; the same tokens as before: {found == expected}")
print(used.calls)

# %% [markdown]
# And here are block tables at work. The engine can record what it does, in a trace of its own, from which the tables of
# every step can be rebuilt. Eight requests of different lengths arrive at once; three may run at a time, in a memory of
# 24 blocks of 8 slots.

# %%
with using(block_pool=MyBlockPool):
    trace = paging.eight_requests()
draw.over_time(trace)
describe("""A row for each of 24 blocks, a column for each step, in the color of the request that holds the block. Three
requests begin with solid areas for their prompts. They get single blocks as they grow, and blocks of finished requests
go to later ones, so that a request's blocks are soon scattered over the memory.""")

# %% [markdown]
# Each row of the picture is one block, and its color says which request holds it. Requests 1, 2 and 3 start with 4, 2
# and 6 blocks for their prompts of 30, 12 and 44 tokens. Every eighth step each of them gets one more block, wherever
# one is free. When a request ends, others get its blocks, and soon a request's blocks are scattered over the memory.
# (The pool decides which free block to hand out, so the picture with your pool may look different.)
#
# ### What paging gains
#
# Back to the 400 requests and the memory of 16,384 slots, now divided into 1,024 blocks of 16. The simulation runs the
# engine's own scheduler and pool, without a model.
#
# **Predict first.** How many times as many requests run together, compared with reserving 2,048 slots for each?

# %% tags=["exercise"]
guess_times = 5  # PREDICT: times as many as with 2,048 slots reserved

# %%
paged = results[3]
compare(
    "requests running together",
    unit="times as many",
    prediction=guess_times,
    measured=paged["running"] / longest["running"],
)
print("averages while requests wait:             used   run together   steps in all")
for result in results[:4]:
    row = f"{result['used']:6.1%} {result['running']:14.1f} {result['steps']:14,}"
    print(f"{result['cache']:40} {row}")
draw.shares(results[:4])
describe("""Four stacked bars: the three contiguous reservations from before, and blocks of 16, whose bar has the
largest share of keys and values.""")
draw.batches(results[:4])
describe("""The number of running requests over the steps of the simulation, a line for each of the four caches. With
blocks, the most requests run together, and it takes the fewest steps to finish them all; with the longest reservation,
the fewest run together, and it takes the most steps.""")

# %% [markdown]
# With blocks, nearly the whole memory holds keys and values. The yellow part is the slots of last blocks that will
# still be filled. The narrow light gray end of that bar is not external fragmentation: any request could use these
# blocks, but the next request needs more, and the scheduler keeps a few back for the running ones. Since more requests
# run together, all of them finish in fewer steps: the same memory, the same attention, only better bookkeeping.
#
# How large should a block be? Small blocks leave less unused in last blocks. Large blocks need fewer table entries, and
# let a kernel read longer pieces at a time. For the same requests:

# %%
print("block size   % unused in last blocks   entries in a table")
for size in (1, 4, 16, 64, 256):
    entries = [math.ceil(tokens / size) for tokens in needed]
    unused = 1 - sum(needed) / (size * sum(entries))
    print(f"{size:10}   {100 * unused:23.1f}   {sum(entries) / len(entries):18.1f}")

# %% [markdown]
# 16 is a common choice, and the default of this engine.
#
# ## 4 · Shared prefixes · 18 min
#
# Look at the two requests again: both begin with `the sea is cold`. Their first blocks hold the same tokens at the same
# positions, so the same keys and values: stored twice and, even worse, computed twice. With block tables they can
# share one copy: both tables name the same block.

# %%
draw.paged({"A": ([5, 2], A), "B": ([5, 6], B)}, num_blocks=8)
describe("""The eight blocks again. Both tables now begin with block 5, which is held by 2; A's second block is 2 and
B's is 6, each held by 1. Five blocks are free.""")

# %% [markdown]
# Real traffic is full of common **prefixes** (beginnings): the instructions that a service puts before every question
# (its *system prompt*), few-shot examples, a document that many users ask about, and every chat, whose next turn begins
# with all earlier turns.
#
# When may a block be shared? The keys and values of a token depend on **all** tokens up to it, and on none after it
# (lesson 02). So it is not enough that the block's own four words are equal. Everything before them must be equal too.
#
# How can such a block be found quickly? Give each full block a **prefix key** (unrelated to attention's keys): a hash
# of its tokens. To make it depend on everything before as well, chain the hashes: a block's key is the hash of *the
# previous block's key* and its own tokens.
#
# $$\text{key}_0 = h(\text{salt}, t_0 \ldots t_3), \qquad \text{key}_1 = h(\text{key}_0, t_4 \ldots t_7), \qquad
# \text{key}_2 = h(\text{key}_1, t_8 \ldots t_{11}), \;\ldots$$
#
# Equal prefixes give equal keys, and with a good hash equal keys mean equal prefixes: a collision is so unlikely that
# it can be ignored. To find what a new request can share, look up its keys one by one, and stop at the first unknown
# one.
#
# The **salt** is a string that goes into the first hash. Requests with different salts never share a block. That
# matters when strangers use the same server: a prompt whose prefix is cached is answered sooner, so by timing requests
# an attacker could find out what others have asked.
#
# **Exercise 3 (8 minutes).** Compute the prefix keys of a prompt. Only full blocks get one; the last block, if it has
# room left, will still be written to. A key can be any value that a dictionary accepts as a key. Python's `hash` of a
# tuple, such as `hash((7, 1, 2))`, will do. (The engine uses `hashlib.blake2b`, because two prefixes with the same
# `hash` can be constructed on purpose.)
#
# For example, 8 tokens in blocks of 4 have 2 keys, which differ, and are the same when computed again.


# %% tags=["exercise"]
def prefix_keys(tokens: list[int], block_size: int, salt: str = "") -> list:
    """A key for each full block of `tokens`, which depends on its tokens and all tokens before it."""
    # SOLUTION: a chain of hashes that starts with the salt
    key, keys = hash(salt), []
    for end in range(block_size, len(tokens) + 1, block_size):
        key = hash((key, *tokens[end - block_size : end]))
        keys.append(key)
    return keys
    # END


# %%
check(prefix_keys)

# %% [markdown]
# Three texts, with a number for each word. Keys are long, so the cell prints nicknames, which show which keys are
# equal:

# %%
keys_of = yours(prefix_keys, kv_cache.prefix_keys)
TEXTS = {
    "A": "the sea is cold and dark at night",
    "B": "the sea is cold but calm today again",
    "C": "why is it cold but calm today again",
}
numbers, nicknames = {}, {}
for name, text in TEXTS.items():
    ids = [numbers.setdefault(word, len(numbers)) for word in text.split()]
    shown = [nicknames.setdefault(key, f"key {len(nicknames)}") for key in keys_of(ids, 4)]
    print(f"{name}: {text:37} {', '.join(shown)}")
print(f"prefix_keys is {whose(prefix_keys)}")

# %% [markdown]
# A and B share their first key. C's second block has the same words as B's, but a different prefix, so it has a
# different key.
#
# The engine's own version is the same chain. Its `cache_key` is a tuple of the salt and whatever else must be equal.
# Look for two differences: `digest_size=16`, a cryptographic hash of 128 bits, and `known`, the keys of earlier blocks,
# so that a growing request is not hashed from its start again and again.

# %%
# ENGINE: minillm.kv_cache.block_pool:prefix_keys

# %% [markdown]
# ### Who may write to a shared block?
#
# No request may: it would overwrite what the others still read. **Shared keys and values are never changed.** In this
# engine the rule needs no extra code. Only full blocks have prefix keys, so only full blocks are shared, and new tokens
# never go into a full block.
#
# Engines that also share *partly filled* blocks, for example to sample several answers to one prompt, need **copy on
# write**, another idea from operating systems: a request that is about to write to a block with more than one holder
# first copies it, puts the copy into its table, and releases the original. This engine does not share such blocks; it
# computes their tokens again, fewer than `block_size` per request.
#
# ### How much is shared
#
# Two thirds of the 400 requests begin with one of eight common prefixes of 48 to 512 tokens.
#
# **Predict first.** Suppose every full block of 16 that was computed once is found whenever it is needed again. What
# share of all prompt tokens is found, and so does not have to be computed?

# %% tags=["exercise"]
guess_found = 55  # PREDICT: % of all prompt tokens that are found

# %%
tokens_of = [request.prompt for request in work]
known, found_tokens = set(), 0
for tokens in tokens_of:
    keys = keys_of(tokens, 16)
    # The last token is always computed: its output is the first new token.
    for key in keys[: (len(tokens) - 1) // 16]:
        if key not in known:
            break
        found_tokens += 16
    known.update(keys)
share = 100 * found_tokens / sum(map(len, tokens_of))
compare("prompt tokens found", unit="%", prediction=guess_found, measured=share)

# %% [markdown]
# This set never forgets a key. In a real memory, blocks must be reused.
#
# ## 5 · A prefix cache · 28 min
#
# A request ends, and its blocks are released. Are they free? Their keys and values are still valid: if the same prefix
# comes again a second later, they do not have to be computed again. So there is a third state between used and free:
# **cached**. A cached block has no holder, but its key is known. It is allocated only when no free block is left, and
# its key is then forgotten: the block is **evicted**.

# %%
left_there = {2: ["and", "dark", "at", "night"]}
draw.paged({"A": ([], []), "B": ([5, 6], B)}, num_blocks=8, cached=left_there)
describe("""The eight blocks after A has ended. A's table is empty. B's table names blocks 5 and 6. Block 2, with A's
words and dark at night, is cached; the five others are free.""")

# %% [markdown]
# A has ended. B still holds block 5. Block 2, which was full, is cached: a request that begins as A did can use it.
#
# Which cached block should be evicted first? The one that has not been used for the longest time: **least recently
# used**, LRU. The blocks of one sequence are all released at the same moment, but they are not equally useful: without
# the first block none of the later ones can be found, since the lookup stops at the first unknown key. So the **last
# block of a sequence is evicted first**.
#
# **Exercise 4 (12 minutes).** Extend the pool with the third state. `self.idle` holds the cached blocks, least recently
# used first. It is an `OrderedDict`, a dictionary whose `popitem(last=False)` removes the oldest entry and returns it
# as a pair, `(block, None)`. You write `share`, `release` and `evict`; the base class answers the engine's other
# questions.
#
# For example, after two blocks with keys have been released, both are found by their keys, and both are available.


# %% tags=["exercise"]
class MyPrefixPool(paging.PoolWithPrefixes):
    """Used, cached and free blocks. Blocks with a known key are kept until their memory is needed."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.idle = OrderedDict()  # cached blocks, least recently used first: {block: None}
        self.block_of = {}  # key -> block
        self.key_of = {}  # block -> key

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def allocate(self, count: int) -> list[int]:
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} available")
        blocks = [self.free.pop() if self.free else self.evict() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def register(self, block: int, key) -> None:
        """From now on this block, full and in use, can be found by `key`."""
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key], self.key_of[block] = block, key

    def lookup(self, keys) -> list[int]:
        """The blocks of the first keys, up to the first unknown one."""
        blocks = []
        for key in keys:
            if key not in self.block_of:
                break
            blocks.append(self.block_of[key])
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add a holder to each of these blocks, which are in use or cached."""
        # SOLUTION: count up; a cached block is in use again, so it leaves `idle`
        for block in blocks:
            self.references[block] += 1
            self.idle.pop(block, None)
        # END

    def release(self, blocks: list[int]) -> None:
        """Remove a holder from each of these blocks, a sequence in order.

        A block without holders is cached if it has a key, else free. The last block is evicted first.
        """
        # SOLUTION: count down; put blocks without holders into `idle` or `free`, in the right order
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)
        # END

    def evict(self) -> int:
        """Give up the least recently used cached block, forget its key, and return its number."""
        # SOLUTION: take it out of `idle`, and its key out of both dictionaries
        block, _ = self.idle.popitem(last=False)
        del self.block_of[self.key_of.pop(block)]
        return block
        # END


# %%
check(MyPrefixPool)

# %% [markdown]
# Run the 400 requests through pools of different sizes, one request after the other. And to see whether the order
# matters, do the same with each sequence released in reverse, so that its beginning is evicted first.

# %%
Remembering = yours(MyPrefixPool, BlockPool)


def share_found(pool, order=1):
    """% of all prompt tokens found, one request after the other. order: -1 reverses each sequence."""
    found_tokens = 0
    for final_length, tokens in zip(needed, tokens_of, strict=True):
        keys = keys_of(tokens, 16)
        shared = pool.lookup(keys[: (len(tokens) - 1) // 16])
        pool.share(shared)
        blocks = shared + pool.allocate(math.ceil(final_length / 16) - len(shared))
        for block, key in zip(blocks, keys, strict=False):
            pool.register(block, key)
        found_tokens += 16 * len(shared)
        pool.release(blocks[::order])
    return 100 * found_tokens / sum(map(len, tokens_of))


SIZES = (96, 128, 192, 256, 512, 1024)
ORDERS = {"end evicted first": 1, "beginning evicted first": -1}
found_by_size = {
    name: {size: share_found(Remembering(size), order) for size in SIZES}
    for name, order in ORDERS.items()
}
print(f"% of prompt tokens found; the pool is {whose(MyPrefixPool)}")
print(f"{'blocks in the pool':25}" + "  ".join(f"{size:5,}" for size in SIZES))
for name, points in found_by_size.items():
    print(f"{name:25}" + "  ".join(f"{value:5.1f}" for value in points.values()))
draw.lines(found_by_size, x="blocks in the pool", y="% of prompt tokens found", log=True)
describe("""Two lines that rise with the number of blocks in the pool, from about 30% of the prompt tokens found to
almost 60%. In small pools the line with the end evicted first is higher; from 512 blocks on the two lines are the
same.""")

# %% [markdown]
# With 1,024 blocks the pool finds as much as the set that never forgets. With 96 blocks, only a few more than the
# longest request needs (83), it still finds more than half as much, and evicting the end first finds 15% more than
# evicting the beginning first.
#
# ### In the engine: a chat
#
# Chats benefit a lot. Every turn sends the whole conversation again (lesson 01), and all but the newest question has
# been computed before.
#
# **Predict first.** Five turns, each a short question and an answer of at most 40 tokens, in the engine with blocks of
# 16. The prompt of the first turn has 13 tokens, that of the fifth 121. What share of all prompt tokens of the five
# turns is found?

# %% tags=["exercise"]
guess_chat = 60  # PREDICT: % of the prompt tokens of five turns that are found

# %%
with using(block_pool=MyPrefixPool) as used:
    messages, turns = paging.chat(llm, salts=[""] * 5)
    _, strangers = paging.chat(llm, salts=["ann", "bob", "ann", "bob", "ann"])
for message in messages[2:6]:
    print(f"{message['role']:>9}: {message['content']}")
print("\nturn  prompt tokens  found  found when ann and bob take turns")
for count, ((tokens, found), (_, apart)) in enumerate(zip(turns, strangers, strict=True), 1):
    print(f"{count:4}  {tokens:13}  {found:5}  {apart:5}")
total, hits = map(sum, zip(*turns, strict=True))
compare("a chat of five turns", unit="%", prediction=guess_chat, measured=100 * hits / total)
print(f"the pool is {whose(MyPrefixPool)}: {used.calls}")

# %% [markdown]
# Turn 2 finds more tokens than the prompt of turn 1 had: the blocks of an answer are cached like those of a prompt.
#
# The last column shows the salts at work. Odd turns have the salt `ann` and even turns `bob`, so a turn finds only what
# was left two turns before. (In this run the engine computes the keys with its own `prefix_keys`.)
#
# Longer runs of the engine, from a committed record: requests of the traffic trace; conversations of several turns; and
# 64 requests submitted at once whose prompts begin with the same 512 tokens.

# %%
for part in records.read("cpu/batching")["results"]:
    if part["part"] == "prefix":
        print(
            f"{part['traffic']:13}: {part['computed_with']:6,} of {part['prompt_tokens']:6,} "
            f"prompt tokens computed, {part['saved']:.0%} saved"
        )

# %% [markdown]
# Requests that arrive at the same time share too. The second request can use the blocks that the first one fills in the
# same step, since every layer writes the keys and values of all requests before it reads any. Such a block already has
# two holders when it is written, but only the first one writes to it.
#
# The engine's pool is this pool with private names. Two things to look for: `allocate` evicts in its own loop and
# reports each eviction (`watch_evictions` feeds the trace), and its `check` tests more than your base class does.

# %%
# ENGINE: minillm.kv_cache.block_pool:BlockPool

# %% [markdown]
# Here is the small memory from section 3 again. This time the prompts of all eight requests begin with the same 16
# tokens, two blocks:

# %%
with using(block_pool=MyPrefixPool):
    trace = paging.eight_requests(prefix=paging.random_prompt(16, seed=0))
draw.over_time(trace)
describe("""A row for each of 24 blocks, a column for each step. Two rows are black, held by several requests, until
only the last request is left. Blocks of finished requests turn gray, cached, and are taken by later requests once the
free blocks have run out.""")

# %% [markdown]
# Black is the shared prefix, which is in the tables of all running requests. Gray blocks are cached: their requests
# have ended. The pool hands out free blocks as long as there are any; then it evicts cached ones. Request 3 ends
# first, so its blocks are evicted first, those at the end of its text before those at the beginning.
#
# Since a shared prefix is stored once, more requests fit. Back to the 400 requests and 1,024 blocks:

# %%
shared = results[4]
print(f"running together: {paged['running']:.1f}, with sharing {shared['running']:.1f}")
print(f"steps until all have finished: {paged['steps']:,}, with sharing {shared['steps']:,}")
print(f"tokens in all tables together, as a share of the slots: {shared['seen']:.0%}")
draw.batches(results[3:])
describe("""The number of running requests over the steps, with and without shared prefixes. With sharing clearly more
requests run together at first, and all of them finish in fewer steps.""")

# %% [markdown]
# Together, the running requests see about 1.5 times as many tokens as the memory has slots.
#
# ## 6 · Optional: windows and attention sinks · 8 min
#
# *You can skip to the recap: nothing later depends on this section.*
#
# So far every token is kept until its request ends, so memory grows with the length of the text. There are two ways to
# drop tokens while a request is still running.
#
# ### Windows
#
# Some models are trained with **local layers**, whose queries see only the newest tokens, the *window*; the other
# layers, called global, see everything. (Gemma 2 and 3 mix both; in the first Mistral model all layers are local.) Keys
# that have left the window are never needed again, so their blocks can be released while the request runs. With paging
# that is easy: the first entries of the table are given back. But local and global layers now hold different blocks, so
# layers are put into *groups*, with a table each.
#
# One request, a prompt of 20 tokens and 60 new ones, in a model of one local layer with a window of 16 and one global
# layer (random weights; blocks of 8 slots):

# %%
draw.held(paging.local_and_global(), ["local layer", "global layer"], block_size=8)
describe("""Two panels, with steps from left to right and positions in the text from top to bottom. The local layer
holds a narrow band that moves down as the text grows; the blocks above it are released. The global layer holds all
blocks from the beginning of the text on.""")

# %% [markdown]
# Every eighth step both layers get one more block, and each time the local layer has just given back its oldest one: it
# never holds more than three. In a model with the shape of Gemma 3 4B (34 layers, 29 of them with a window of 1,024
# tokens), the bytes of one request:

# %%
shape = paging.gemma_3_4b()
print(" tokens   all kept   with windows")
for context in (1024, 8192, 32_768, 131_072):
    everything = context * sizing.kv_bytes_per_token(shape) / 1e9
    visible = sizing.kv_bytes(shape, context, block_size=16) / 1e9
    print(
        f"{context:7,}   {everything:5.2f} GB   {visible:5.2f} GB   {visible / everything:4.0%}"
    )

# %% [markdown]
# (At 1,024 tokens the windows save nothing and cost a little: groups must have equal sizes, here 7 groups of 5 layers,
# and one of the 35 places stays empty.)
#
# ### Attention sinks
#
# Can we do the same to a model that was *not* trained with windows? If only the newest tokens were kept, a text could
# go on forever in constant memory, beyond the context length of the training. Xiao et al. (2023, *StreamingLLM*) tried
# this, and large models failed as soon as the *first* tokens were dropped. What these tokens say does not matter. A
# softmax has to put its weight somewhere, and a head that finds nothing relevant puts it on tokens that are always
# visible, the first ones: **attention sinks**. The remedy is to keep the first four tokens in addition to the window.
#
# One detail makes this work beyond the trained length: positions are counted inside the cache. With 4 sinks and a
# window of 1,024, the cache holds about 1,028 tokens (in this engine up to 1,056, since both are rounded up to whole
# blocks and one more block is being filled), and no key is ever farther away than that. So keys are cached *before*
# their rotation, and rotated by their place in the cache when they are read.
#
# The engine has two options for this, `attention_sinks` and `attention_window`. Pretend that the model's context ends
# at 64 tokens, and ask for 160. (The other options keep the picture simple: one step at a time, no blocks kept for
# later requests.)

# %%
stream = {"attention_sinks": 4, "attention_window": 40, "max_model_len": 64}
options = {"block_size": 8, "num_blocks": 16, "run_ahead": 0, "enable_prefix_caching": False}
trace = Trace()
with LLM(device="cpu", dtype="float64", trace=trace, **stream, **options) as small:
    endless = SamplingParams(max_tokens=160, ignore_eos=True, temperature=0)
    (completion,) = small.generate("Once upon a time", endless)
print(f"{len(completion.token_ids)} new tokens. The beginning and the end:")
print(f"Once upon a time{completion.text[:64]} ...")
print(f"... {' '.join(completion.text[-64:].split())}")
draw.held(trace, ["4 sinks and a window of 40"], block_size=8)
describe("""Steps from left to right, positions in the text from top to bottom. The first block is held all the time. Of
the rest a band of six blocks is held that moves down as the text grows, and everything in between is released.""")

# %% [markdown]
# The request never holds more than seven blocks: one for the sinks (4 tokens, rounded up to a block), five for the
# window, and the one that is being filled. The text goes on far beyond the end of the context. But the model cannot
# look back at the released middle of the story.
#
# How good is such a text? **Perplexity** measures how uncertain a model is about the next token: a value of 2 means as
# uncertain as between two equally likely tokens, and 1 is certainty. (It is $e$ to the mean of $-\log p$ of the tokens
# that actually come next.) In the committed CPU record, a text of 8,192 tokens (four times the context) is scored at
# 384 positions beyond the end of the context. *Recomputed* is exact and slow: the newest 1,024 tokens are computed
# again for every token.

# %%
WAYS = {
    "recomputed": "the newest 1,024, recomputed",
    "sinks": "4 sinks and the newest 1,024",
    "no-sinks": "the newest 1,024",
    "dense": "everything",
}
results_of = {each["workload"]: each for each in records.read("cpu/streaming")["results"]}
print("kept                           perplexity   relative to recomputing")
for way, name in WAYS.items():
    result = results_of[f"streaming-{way}"]
    print(f"{name:30} {result['perplexity']:10.2f} {result['beside_recomputed']:10.3f}")

# %% [markdown]
# On this text, keeping only the newest tokens is as good as recomputing them, and keeping everything is *worse*: it
# reaches positions that training never saw. Sinks make no difference here: this small model does not depend on its
# first tokens. For what large models lose without them, see figure 3 of Xiao et al.
#
# ## Recap · 3 min
#
# * A contiguous cache reserves memory for the longest possible text. On this traffic, more than four fifths of the
#   memory held nothing.
# * With blocks of equal size and a block table for each request, slot = table[p // size] x size + p % size. Attention
#   through the table is the same attention. The only waste is the empty part of each request's last block.
# * A free list and reference counts are a whole memory manager: a block without holders is free.
# * Prefix keys are chained hashes: equal keys mean equal prefixes. Only full blocks are shared, and a full block is
#   never written to again.
# * Blocks with known prefix keys stay cached after their last holder releases them, until their memory is needed. They
#   are evicted least recently used first, the end of a sequence before its beginning.
#
# **What got worse:** attention kernels must look up where each block is, and block tables must be kept in sync between
# the CPU and the GPU. Part of each request's last block is unused. Every prompt is hashed, whether anything is found or
# not. How quickly an answer comes depends on what others have asked, so a shared cache leaks information about its
# users, and salts prevent that at the price of less sharing. Benchmarks become harder to trust: one that sends the same
# prompt twice measures the cache.
#
# **Further reading:** Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with
# PagedAttention*; Zheng et al. 2024, *SGLang* (RadixAttention: a tree of prefixes instead of hashes); Gu et al. 2025,
# *Auditing Prompt Caching in Language Model APIs* (the timing side channel); Xiao et al. 2023, *Efficient Streaming
# Language Models with Attention Sinks*; vLLM's documentation on automatic prefix caching. Next: lesson 10 decides which
# requests run in each step.
