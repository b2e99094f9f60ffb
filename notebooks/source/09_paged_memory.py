# %% [markdown]
# # 09 · Paged memory
#
# Afterwards you can say what a contiguous KV cache wastes, and measure it on a trace of traffic; explain paged
# attention with a pencil and two short requests; write the pool of blocks that a whole engine runs on; let requests
# with the same beginning share memory, safely, and keep beginnings for those who come later; and say what windows and
# attention sinks forget, and what that costs.
#
# **75 minutes**, an hour of them for paged attention (sections 1 to 5). **Needs:** a CPU, and lesson 02 (attention, its
# cache, and what that costs). No GPU: this lesson is bookkeeping, and the engine does that on the CPU anyway.

# %%
import json
import math
import random
import tempfile
import time
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import torch

from minillm import LLM, RequestOptions, SamplingParams, using
from minillm.bench import records, waste, workloads
from minillm.bench.batching import LONGEST, SLOTS
from minillm.course import NotSolvedYet, adapters, check, compare, yours
from minillm.course import draw_memory as draw
from minillm.kv_cache import BlockPool, OutOfBlocks
from minillm.kv_cache import block_pool as kv_cache
from minillm.model import sizing
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED
from minillm.trace import Trace

llm = LLM(device="cpu", dtype="float64", block_size=16, num_blocks=256)
greedy = SamplingParams(max_tokens=12, temperature=0)
PROMPTS = [
    "Fenwick lies on the island of",
    "Once upon a time there was a lighthouse keeper who had never seen",
    "The Tallow Isles are",
]
expected = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print(f"{sum(map(len, expected))} tokens to compare with later")

# %% [markdown]
# ## 1 · One piece of memory for each request
#
# Every token of a request leaves a key and a value in each layer (lesson 02), and the request needs them until it ends.
# Call the place for one token's keys and values a **slot**. The simplest cache gives a request one piece of memory, its
# slots side by side. But how long a piece? The request grows by a token a step, nobody knows when it will end, and
# what lies behind it soon belongs to somebody else. So it gets room for the longest text that is allowed.
#
# Two requests will go with us through this lesson. A word is a token here, and 16 tokens are allowed:

# %%
A = ["the", "sea", "is", "cold", "and", "dark"]
B = ["the", "sea", "is", "cold", "but", "calm", "today"]
draw.contiguous({"A": (0, 16, A, 2), "B": (16, 16, B, 2)}, slots=32)

# %% [markdown]
# Each of them will write two more words. The memory is full: a third request has to wait, although only 13 of 32 slots
# hold anything. The waste has three kinds:
#
# * **reserved** slots will be used, but not yet (yellow);
# * **internal fragmentation**: slots inside a piece that will never be used, because the request ends before (red);
# * **external fragmentation**: gaps between pieces, too small for the next one (none here; gray in later pictures).
#
# One might guess better than "the longest allowed". So here is traffic: 400 requests of a chat service, prompts and
# outputs of very different lengths. (Made by a script, with the spread that served traffic has: `data/traces.py`.)

# %%
work = workloads.replay("conversation", vocab_size=4096)
needed = [waste.final(request) for request in work]
print(f"{len(work)} requests; the longest possible is the model's context, {LONGEST:,} tokens")
print(f"they reach {sum(needed) / len(needed):.0f} on average, the longest {max(needed):,}")

# %% [markdown]
# **Predict first.** A memory of 16,384 slots, each request reserves 2,048 of them in one piece, and there is always
# somebody waiting. What share of the slots holds keys and values at a time, on average? (The line above helps.) And if
# an oracle told each request's exact length in advance?

# %% tags=["exercise"]
guess_longest = 12  # PREDICT: % of the slots that hold something, 2,048 reserved for each
guess_oracle = 75  # PREDICT: % of the slots that hold something, exact lengths reserved

# %% [markdown]
# Now it is played through, a step at a time: whoever comes next takes the first gap that is large enough; everybody
# inside computes a token; whoever is done leaves. There are three ways to reserve: the longest; a good guess, less than
# twice too long (the output's length, rounded up to a power of two); and the oracle's.

# %%
results = waste.compare(work, slots=SLOTS, block_size=16, max_model_len=LONGEST)
in_pieces = results[:3]
draw.shares(in_pieces)
longest, _, oracle = in_pieces
for result, guess in ((longest, guess_longest), (oracle, guess_oracle)):
    compare(result["cache"], unit="%", prediction=guess, measured=100 * result["used"])

# %% [markdown]
# More than four fifths of the memory hold nothing. Even the oracle, which does not exist, leaves a third unused: tokens
# to come, and gaps. Kwon et al. (2023, figure 2) found 20 to 38 % in use in such systems, and invented paged attention.
# And what is lost is speed, for a decode step reads all weights however few requests it serves (lesson 02): the more
# run together, the cheaper is each.
#
# ## 2 · Blocks and block tables
#
# Operating systems had the same trouble with programs, and the same cure: **pages**. Cut the memory into small pieces
# of equal size, here called **blocks**, of `block_size` slots each. A request gets one when it needs one, wherever it
# lies. A list says which blocks are a request's, in order: its **block table**.

# %%
draw.paged({"A": ([5, 2], A), "B": ([1, 6], B)}, num_blocks=8)

# %% [markdown]
# Read A's table: tokens 0 to 3 lie in block 5, tokens 4 to 7 in block 2, of which two are there. The next word of A
# goes into the third slot of block 2. When block 2 is full, A is given another block, any free one. And of the 32
# slots that were all taken before, 16 are free for others.
#
# Where is a token? Slots are numbered through the whole memory, block 0 has slots 0 to 3, block 1 has 4 to 7. Divide
# the token's position $p$ in its request by `block_size`: the quotient, rounded down, says which entry of the table
# names its block, and the remainder is its place inside the block, the **offset**:
#
# $$\text{slot} = \text{table}[\lfloor p / \text{block\_size} \rfloor] \times \text{block\_size} + p \bmod
# \text{block\_size}$$
#
# Do it by hand for A's word `dark`: position 5, so entry 1 of the table, which is block 2, and offset 1: slot
# $2 \times 4 + 1 = 9$. Count in the picture (positions and entries begin at 0).
#
# ### Exercise 1: slots
#
# For a span of a request's positions, the slots. The engine needs them twice: to write the keys of new tokens, and to
# read those of all tokens.
#
# For example, with the table `[2, 3]` and blocks of 4, tokens 0 to 3 are in slots 8, 9, 10 and 11.


# %% tags=["exercise"]
def slots_of(table, start, end, block_size):
    """The slots of a request's tokens at positions start, start + 1, ..., end - 1, as a list.

    table: the numbers of the request's blocks, in order; there may be more than are needed.
    """
    # SOLUTION: look up each position's block, and count the offset inside it
    positions = range(start, end)
    return [table[at // block_size] * block_size + at % block_size for at in positions]
    # END


# %%
check(slots_of)

# %% [markdown]
# **Paged attention** is nothing but attention that finds its keys in this way. Nobody asks in which order they lie in
# memory: a key was turned by its own position when it was written (lesson 02), and a sum over keys has no order. So
# take A's keys and values from a contiguous piece, or through the table out of scattered blocks:

# %%
slots = yours(slots_of, adapters.slots_of)
_ = torch.manual_seed(0)
k, v = torch.randn(2, len(A), 1, 8, dtype=torch.float64)  # [tokens, kv_heads, head_dim]
q = torch.randn(1, 2, 8, dtype=torch.float64)  # the newest token's query, two heads
memory_k, memory_v = torch.full((2, 8, 4, 1, 8), 99.0, dtype=torch.float64)  # 8 blocks of 4

at = slots([5, 2], 0, len(A), 4)
memory_k.flatten(0, 1)[at] = k  # write: scatter
memory_v.flatten(0, 1)[at] = v
found_k, found_v = memory_k.flatten(0, 1)[at], memory_v.flatten(0, 1)[at]  # read: gather

# Lesson 02's attention over a cache, the engine's own; scale: 1 / sqrt(head_dim)
in_one_piece = adapters.cached_attention(q, k, v, len(A), scale=0.35)
through_the_table = adapters.cached_attention(q, found_k, found_v, len(A), scale=0.35)
print(f"A's tokens are in slots {at}")
print("the same attention, to the last bit:", torch.equal(in_one_piece, through_the_table))

# %% [markdown]
# (The `99`s are leftovers of former requests. Those in block 2's free slots are never asked for.) Now in the engine,
# with its blocks of 16: at each decode step, in each layer, for each request, your slots say where the keys are.
# `used.calls` counts: 11 decode steps of 6 layers (0 while yours is a stub).


# %%
def through_slots(q, cache, block_table, lengths, *, scale):
    """The engine's decode attention. q: [rows, 1, heads, d]; block_table: [rows, blocks]."""
    out, block_size = torch.zeros_like(q), cache.k.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if length:
            at = slots_of(block_table[row].tolist(), 0, length, block_size)
            k, v = cache.k.flatten(0, 1)[at], cache.v.flatten(0, 1)[at]
            out[row] = adapters.cached_attention(q[row], k, v, length, scale=scale)
    return out


with using(decode_attention=through_slots) as used:
    found = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print("the same tokens:", found == expected)
print(used.calls)

# %% [markdown]
# Gathering makes a copy. The engine's kernels for this (lesson 04) do not: they look a block up in the table, read its
# keys where they lie, and go on to the next.
#
# ## 3 · A pool of blocks
#
# Somebody must know which blocks are free. A list of them is enough, a **free list**: all blocks are alike, so any
# will do, and there are no gaps too small to use. External fragmentation is gone. What is left of the waste inside is
# the empty part of each request's *last* block, fewer than `block_size` slots.
#
# One thing more, which section 4 will need: a block may stand in several tables at once. So the pool counts for each
# block how many hold it, its **reference count**. To release a block is to take 1 off; it is free when the count is 0,
# and not before.
#
# ### Exercise 2: a block pool
#
# The engine asks first whether there is enough (`available`). If it asks for too much all the same, a pool must refuse
# and stay as it was, so that nothing is lost. Three methods are yours. Those at the end are done: what the engine asks
# about shared beginnings, of which this pool knows none, and a check of the books.
#
# For example, from a pool of 4 blocks `allocate(3)` gives three different ones, and 1 is available then.


# %% tags=["exercise"]
class MyBlockPool:
    """Who holds which block. self.references: holders of each block; self.free: a list."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    @property
    def available(self):
        return len(self.free)

    def allocate(self, count):
        """Take `count` blocks, as a list; each has one holder now.

        Raises OutOfBlocks, and takes none, where fewer are available.
        """
        # SOLUTION: refuse too much; take blocks off the free list and set their counts to 1
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} available")
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks
        # END

    def share(self, blocks):
        """Each of these blocks, which somebody holds, has one holder more."""
        # SOLUTION: count
        for block in blocks:
            self.references[block] += 1
        # END

    def release(self, blocks):
        """Each of these blocks has one holder less. Who has none is free."""
        # SOLUTION: count down, and put what nobody holds into the free list
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
        # END

    # About shared beginnings, which this pool does not know (section 5 does).

    cached = 0

    def lookup(self, keys):
        return []

    def register(self, block, key):
        pass

    def forget(self):
        pass

    def unreferenced(self, blocks):
        return 0

    def check(self, holders):
        """Do the books balance? holders: every held block, once for each holder."""
        counts = Counter({block: n for block, n in enumerate(self.references) if n})
        assert counts == Counter(holders)


# %%
check(MyBlockPool)

# %% [markdown]
# **Predict first.** A and B both grow, a token each in turn, until they have 9 tokens; blocks have 4 slots. How many
# blocks do they hold together?

# %% tags=["exercise"]
guess_blocks = 6  # PREDICT: blocks that A and B hold together, 9 tokens each

# %%
pool = yours(MyBlockPool, BlockPool)(8)  # the engine's pool while yours is a stub
tables = {"A": [], "B": []}
for length in range(9):  # a token each
    for table in tables.values():
        if length == len(table) * 4:  # the last block is full
            table += pool.allocate(1)
compare(
    "A and B with 9 tokens each",
    unit="blocks",
    prediction=guess_blocks,
    measured=8 - pool.available,
)
print(tables)

# %% [markdown]
# The tables grow in turns, so the blocks of A and B lie between each other. Nobody minds.
#
# And now the whole engine on your pool, which it uses until the `with` ends. (`calls`: of your pool's methods.)

# %%
with using(block_pool=MyBlockPool) as used:
    found = [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]
print("the same tokens:", found == expected)
print(used.calls)

# %% [markdown]
# Here are real tables at work. The engine can write a **trace**: what it did, event by event, from which the tables of
# every step are rebuilt. Eight requests of different lengths come at once; three may run at a time, in a memory of 24
# blocks of 8 slots. (`run_ahead=0`: a step is planned when the one before it is done. Lesson 10 says why one would not
# wait.)

# %%
LENGTHS = [(30, 20), (12, 30), (44, 16), (20, 40), (9, 24), (26, 12), (33, 9), (14, 20)]


def traced(prompts, **options):
    """The trace of these prompts, with outputs as long as in LENGTHS."""
    trace = Trace()
    small = {"block_size": 8, "num_blocks": 24, "max_num_seqs": 3, "run_ahead": 0}
    exactly = [
        SamplingParams(max_tokens=out, ignore_eos=True, temperature=0) for _, out in LENGTHS
    ]
    with LLM(device="cpu", trace=trace, **small, **options) as engine:
        engine.generate(prompts, exactly)
    return trace


def random_prompt(tokens, seed):
    """Token ids that mean nothing: here only their number matters."""
    return random.Random(seed).choices(range(10, 4096), k=tokens)


prompts = [random_prompt(tokens, seed=tokens) for tokens, _ in LENGTHS]
with using(block_pool=MyBlockPool):
    trace = traced(prompts, enable_prefix_caching=False)
draw.over_time(trace)

# %% [markdown]
# Read a line from left to right: that is one block, and its color says who has it. Requests 1, 2 and 3 begin with
# 4, 2 and 6 blocks for their prompts of 30, 12 and 44 tokens. Every eighth step each gets one more, wherever there is a
# free one. When a request ends, others get its blocks, and after a while nobody's lie together. (Which ones they get is
# your pool's choice, so your picture may be another.)
#
# ### What it is worth
#
# Back to the 400 requests and the memory of 16,384 slots, now in 1,024 blocks of 16. The simulation is the engine's own
# scheduler and pool, without a model behind it.

# %%
draw.shares(results[:4])
draw.batches(results[:4])
paged = results[3]
print("on average, while others wait:             used   run together   steps in all")
for result in results[:4]:
    row = f"{result['used']:6.1%} {result['running']:14.1f} {result['steps']:14,}"
    print(f"{result['cache']:40} {row}")
for result in (longest, oracle):
    print(
        f"blocks: {paged['running'] / result['running']:.1f} times as many as {result['cache']}"
    )

# %% [markdown]
# Nearly the whole memory holds keys and values. (The gray rest is free, and too little for whoever is next.) So more
# requests run together and all are done sooner: with the same memory and the same attention, by bookkeeping alone.
#
# How large should a block be? The smaller, the less is left free in last blocks; the larger, the fewer entries a
# table has, and the longer the pieces that a kernel reads in one go. By arithmetic, over the same requests:

# %%
print("block size   % free in last blocks   entries in a table")
for size in (1, 4, 16, 64, 256):
    entries = [math.ceil(tokens / size) for tokens in needed]
    lost = 1 - sum(needed) / (size * sum(entries))
    print(f"{size:10}   {100 * lost:21.1f}   {sum(entries) / len(entries):18.1f}")

# %% [markdown]
# 16 is a usual choice, and this engine's.
#
# ## 4 · Sharing
#
# Look at the two requests again: both begin with `the sea is cold`. Their first blocks hold the same tokens at the same
# positions, so the same keys and values, twice in memory, and, which is worse, computed twice. With tables it is easy
# to have them once: both tables name the same block.

# %%
draw.paged({"A": ([5, 2], A), "B": ([5, 6], B)}, num_blocks=8)

# %% [markdown]
# Traffic is full of such beginnings: the instructions that a service puts before every question (its *system prompt*),
# examples, a document that many ask about, and every chat, whose next turn begins with all turns before.
#
# When may a block be shared? Lesson 02 has the answer: what a token becomes depends on **all** tokens up to it, and on
# none after it. So it is not enough that the block's own four words are equal. Everything before must be equal too.
#
# How to find a block quickly? Give each full block a **prefix key** (which has nothing to do with attention's keys): a
# number computed from its tokens, a hash. To let it speak for everything before, chain it: a block's key is the hash of
# *the key before it* and its own tokens.
#
# $$\text{key}_0 = h(\text{salt}, t_0 \ldots t_3), \qquad \text{key}_1 = h(\text{key}_0, t_4 \ldots t_7), \qquad
# \text{key}_2 = h(\text{key}_1, t_8 \ldots t_{11}), \;\ldots$$
#
# Equal beginnings give equal keys, and with a good hash equal keys mean equal beginnings (up to an accident less likely
# than a broken computer). To find what is shared, look up the keys one after the other until one is unknown.
#
# The **salt** is a word that stands before the first block. Requests with different salts never share. That matters
# where strangers use one server: a beginning that is found answers sooner, so by timing one's own requests one could
# find out what others have asked.
#
# ### Exercise 3: keys of beginnings
#
# Only full blocks get a key; the last one, if there is room in it, is still written to. Any value that can be a key of
# a dictionary will do. `hash((key, 1, 2, 3, 4))` is Python's own and good enough here; the engine uses
# `hashlib.blake2b`, because somebody could look for two beginnings with the same `hash` on purpose.
#
# For example, 8 tokens in blocks of 4 have 2 keys. They differ, and come out the same when asked for again.


# %% tags=["exercise"]
def prefix_keys(tokens, block_size, salt=""):
    """A key for each full block of `tokens`, a list: it stands for its tokens and all before it."""
    # SOLUTION: a chain of hashes that begins with the salt
    key, keys = hash(salt), []
    for end in range(block_size, len(tokens) + 1, block_size):
        key = hash((key, *tokens[end - block_size : end]))
        keys.append(key)
    return keys
    # END


# %%
check(prefix_keys)

# %% [markdown]
# On A and B, with numbers for words. (Keys are long; shown is only which of them are equal.)

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

# %% [markdown]
# A and B share their first key. C's second block holds the same words as B's, but behind another beginning: another
# key, and rightly so. The engine's own is the same chain, with a hash of 128 bits that nobody can aim at, and it can go
# on from keys that are known already, so that a growing request is not hashed from its beginning again and again.

# %%
# ENGINE: minillm.kv_cache.block_pool:prefix_keys

# %% [markdown]
# ### Who may write?
#
# In the first picture of this section A and B share block 5. What if one of them writes there? It would change the
# other's past. Reference counts tell who must not: **a block with more than one holder is not written to.** In this
# engine that never comes up. Only full blocks have prefix keys, so only they are shared, and nobody writes there again.
#
# An engine that shares *partly filled* blocks must do more. Say A is to be continued in two ways, A1 and A2 (an answer
# drawn twice, or a search that follows several). Both get A's whole table; its half-filled second block is shared too:

# %%
pool = BlockPool(8)  # blocks are numbered as they are given out: 0, 1, ...
memory = [[None] * 4 for _ in range(8)]
words = {"A1": [*A], "A2": [*A]}
first = pool.allocate(2)
tables = {"A1": first, "A2": list(first)}
pool.share(first)
for at, word in enumerate(A):
    memory[first[at // 4]][at % 4] = word
draw.paged({name: (tables[name], words[name]) for name in tables}, num_blocks=8)

# %% [markdown]
# Whoever writes first takes a copy and lets the original go. This is **copy on write**, again from operating systems:


# %%
def write(name, word):
    """Append a word to a request; a block that somebody else holds too is copied first."""
    position, table = len(words[name]), tables[name]
    if position == len(table) * 4:
        table += pool.allocate(1)
    block = table[position // 4]
    if pool.references[block] > 1:
        (copy,) = pool.allocate(1)
        memory[copy] = list(memory[block])
        pool.release([block])
        table[position // 4] = block = copy
        print(f"{name} writes {word!r}: copied to block {copy}")
    else:
        print(f"{name} writes {word!r}: block {block} is its own")
    memory[block][position % 4] = word
    words[name].append(word)


for name, word in (("A1", "at"), ("A2", "today"), ("A1", "night")):
    write(name, word)
draw.paged({name: (tables[name], words[name]) for name in tables}, num_blocks=8)
for name, table in tables.items():
    there = [memory[block][offset] for block in table for offset in range(4)]
    print(f"{name}: {' '.join(filter(None, there))}")

# %% [markdown]
# One copy, for the one who wrote first; the second one is alone by then and writes in place. This engine forgoes it: at
# most `block_size - 1` tokens are computed again, and nothing ever needs to be copied.
#
# ### How much is shared
#
# Two thirds of the 400 requests begin with one of eight common beginnings of 48 to 512 tokens.
#
# **Predict first.** If every full block of 16 that was computed once is found whenever it comes again, what share of
# all prompt tokens is found, and not computed?

# %% tags=["exercise"]
guess_found = 55  # PREDICT: % of all prompt tokens that are found

# %%
tokens_of = [request.prompt for request in work]
known, found_tokens = set(), 0
for tokens in tokens_of:
    keys = keys_of(tokens, 16)
    # The last token is always computed: it is what the first new token comes out of.
    for key in keys[: (len(tokens) - 1) // 16]:
        if key not in known:
            break
        found_tokens += 16
    known.update(keys)
share = 100 * found_tokens / sum(map(len, tokens_of))
compare("prompt tokens found", unit="%", prediction=guess_found, measured=share)

# %% [markdown]
# That was your keys and a set that forgets nothing. In a real memory blocks must be given out again.
#
# ## 5 · A cache of beginnings
#
# A request ends, and its blocks are released. Are they free? Their keys and values are still good: if the same
# beginning comes again in a second, it would be a pity to have thrown them away. So there is a third state between
# used and free: **cached**. Nobody holds the block, but its key is known. It is given out like a free one when there
# is no free one left, and only then is it forgotten: that is **eviction**.

# %%
left_there = {2: ["and", "dark", "at", "night"]}
draw.paged({"A": ([], []), "B": ([5, 6], B)}, num_blocks=8, cached=left_there)

# %% [markdown]
# A has ended. Block 5 is still held by B; block 2, which was full, waits for someone who begins as A did. Which cached
# block should go first? The one that was used longest ago: **least recently used**, LRU. And within one sequence? All
# its blocks are released at the same moment. But they are not worth the same: without the first block nothing behind it
# can be found, since the look-up stops at the first unknown key. So the **last block of a sequence ages first**.
#
# ### Exercise 4: a pool that remembers
#
# The same pool with a third state. `self.idle` holds the cached blocks, least recently used first: an `OrderedDict`,
# that is, a dictionary with `popitem(last=False)`, which takes out the oldest entry and returns it, `(block, None)`.
# `share`, `release` and `evict` are yours; the others are there.
#
# For example, two blocks that have keys are released: both are found by their keys, and both are available.


# %% tags=["exercise"]
class MyPrefixPool:
    """Used, cached and free blocks. Those with a known key are kept until their room is needed."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.idle = OrderedDict()  # cached blocks, least recently used first: {block: None}
        self.block_of = {}  # key -> block
        self.key_of = {}  # block -> key

    @property
    def cached(self):
        return len(self.idle)

    @property
    def available(self):
        return len(self.free) + len(self.idle)

    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} available")
        blocks = [self.free.pop() if self.free else self.evict() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def register(self, block, key):
        """This block, full and in use, can be found by `key` from now on."""
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key], self.key_of[block] = block, key

    def lookup(self, keys):
        """The blocks of the first keys, up to one that is unknown."""
        blocks = []
        for key in keys:
            if key not in self.block_of:
                break
            blocks.append(self.block_of[key])
        return blocks

    def share(self, blocks):
        """Each of these blocks, used or cached, has one holder more."""
        # SOLUTION: count; a cached one is in use again, so it leaves `idle`
        for block in blocks:
            self.references[block] += 1
            self.idle.pop(block, None)
        # END

    def release(self, blocks):
        """Each of these blocks of a sequence has one holder less.

        Who has none is cached if it has a key, and free if not. The last block ages first.
        """
        # SOLUTION: count down from the last block to the first, and put what nobody holds where it
        #   belongs
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)
        # END

    def evict(self):
        """Give up the least recently used of the cached blocks, and forget its key; returns it."""
        # SOLUTION: the first of `idle`; its key leaves both dictionaries
        block, _ = self.idle.popitem(last=False)
        del self.block_of[self.key_of.pop(block)]
        return block
        # END

    def forget(self):
        self.free.extend(self.idle)
        for each in (self.idle, self.block_of, self.key_of):
            each.clear()

    def unreferenced(self, blocks):
        return sum(self.references[block] == 0 for block in blocks)

    def check(self, holders):
        """Do the books balance? holders: every held block, once for each holder."""
        counts = Counter({block: n for block, n in enumerate(self.references) if n})
        assert counts == Counter(holders)
        states = [*counts, *self.idle, *self.free]
        assert sorted(states) == list(range(self.num_blocks))


# %%
check(MyPrefixPool)

# %% [markdown]
# The requests of the trace one after the other, with pools of different sizes; and the same with a pool that releases
# a sequence's blocks in the other order, so that its beginning ages first.

# %%
Remembering = yours(MyPrefixPool, BlockPool)


def share_found(pool, order=1):
    """% of all prompt tokens that are found, one request after the other. order: -1 turns it round."""
    found_tokens = 0
    for at_the_end, tokens in zip(needed, tokens_of, strict=True):
        keys = keys_of(tokens, 16)
        shared = pool.lookup(keys[: (len(tokens) - 1) // 16])
        pool.share(shared)
        blocks = shared + pool.allocate(math.ceil(at_the_end / 16) - len(shared))
        for block, key in zip(blocks, keys, strict=False):
            pool.register(block, key)
        found_tokens += 16 * len(shared)
        pool.release(blocks[::order])
    return 100 * found_tokens / sum(map(len, tokens_of))


SIZES = (96, 128, 192, 256, 512, 1024)
ORDERS = {"the end of a sequence ages first": 1, "its beginning ages first": -1}
found_by_size = {
    name: {size: share_found(Remembering(size), order) for size in SIZES}
    for name, order in ORDERS.items()
}
draw.lines(found_by_size, x="blocks in the pool", y="% of prompt tokens found", log=True)
for name, points in found_by_size.items():
    print(f"{name:33} " + "  ".join(f"{value:4.1f}" for value in points.values()))

# %% [markdown]
# With 1,024 blocks everything is found that a set without limit found. With 96, hardly more than the longest request
# needs, it is still half of that, and there the right order finds a seventh more than the wrong one.
#
# ### In the engine: a chat
#
# A chat is where reuse shines. Every turn sends the whole conversation again (lesson 01), and all but the newest
# question is known.
#
# **Predict first.** Five turns, each a question and a short answer, with your pool in the engine. Of all prompt tokens
# of the five turns together, what share is found?

# %% tags=["exercise"]
guess_chat = 60  # PREDICT: % of the prompt tokens of five turns that are found

# %%
QUESTIONS = [
    "Who are you?",
    "On which island does Fenwick lie?",
    "What does the quirrel eat?",
    "What is 3 plus 4?",
    "Tell me a story about a lighthouse.",
]


def chat(salts):
    """A conversation, turn by turn: [(prompt tokens, those found in the cache)]."""
    messages, turns = [], []
    for question, salt in zip(QUESTIONS, salts, strict=True):
        messages.append({"role": "user", "content": question})
        before = llm.stats()["prefix_hit_tokens"]
        params = SamplingParams(max_tokens=40, temperature=0)
        (completion,) = llm.chat(messages, params, RequestOptions(cache_salt=salt))
        messages.append({"role": "assistant", "content": completion.text})
        found = llm.stats()["prefix_hit_tokens"] - before
        turns.append((len(completion.prompt_token_ids), found))
    return turns, messages


with using(block_pool=MyPrefixPool) as used:
    turns, messages = chat([""] * 5)
    strangers, _ = chat(["ann", "bob", "ann", "bob", "ann"])
for message in messages[2:6]:
    print(f"{message['role']:>9}: {message['content']}")
print("\nturn  prompt tokens  found  found when ann and bob take turns")
for count, ((tokens, found), (_, apart)) in enumerate(zip(turns, strangers, strict=True), 1):
    print(f"{count:4}  {tokens:13}  {found:5}  {apart:5}")
total, hits = map(sum, zip(*turns, strict=True))
compare("a chat of five turns", unit="%", prediction=guess_chat, measured=100 * hits / total)
print(used.calls)

# %% [markdown]
# Turn 2 finds more than turn 1's prompt had: the blocks of an answer are kept like those of a prompt.
#
# The salts work: where odd turns are `ann`'s and even ones `bob`'s, a turn finds only what was left two turns ago.
# Longer runs of the engine, from a committed record: requests of the trace, conversations of several turns, and 64
# requests submitted at once with the same 512 tokens before their own.

# %%
for part in records.read("cpu/batching")["results"]:
    if part["part"] == "prefix":
        print(
            f"{part['traffic']:13}: {part['computed_with']:6,} of {part['prompt_tokens']:6,} "
            f"prompt tokens computed, {part['saved']:.0%} saved"
        )

# %% [markdown]
# Requests that come at once share too: what the first one is about to write can be found by the second one in the same
# step, since every layer writes all keys before it reads any. And here is the engine's pool, which is yours with its
# books under other names:

# %%
# ENGINE: minillm.kv_cache.block_pool:BlockPool

# %% [markdown]
# The small memory from section 3 again, with a beginning of 16 tokens, two blocks, that all eight requests share:

# %%
system_prompt = random_prompt(16, seed=0)
prompts = [system_prompt + random_prompt(tokens, seed=tokens) for tokens, _ in LENGTHS]
with using(block_pool=MyPrefixPool):
    trace = traced(prompts)
draw.over_time(trace)

# %% [markdown]
# Black is the shared beginning, in the tables of all who run. Gray blocks are cached: their requests have ended, and
# nobody has come for them. As long as there are free blocks, new requests take those; then gray ones are evicted.
# Request 3 was the first to end, so its blocks are evicted first, and those of its end before those of its beginning:
# from the lower ones in the picture to the upper ones.
#
# What is shared is there once, so the memory holds more. Back to the 400 requests, on the 1,024 blocks of before:

# %%
draw.batches(results[3:])
shared = results[4]
print(f"running together: {paged['running']:.1f}, with sharing {shared['running']:.1f}")
print(f"steps until all are done: {paged['steps']:,}, with sharing {shared['steps']:,}")
print(f"tokens that they see, as a share of the memory's slots: {shared['seen']:.0%}")

# %% [markdown]
# For those who run, the memory is larger than it is. And what does it cost? A hash for each block of each prompt, found
# or not:

# %% tags=["nbval-ignore-output"] uncompared="times"
tokens = random_prompt(1024, seed=1)
start = time.perf_counter()
kv_cache.prefix_keys(tokens, 16)
hashed = time.perf_counter() - start
llm.generate([tokens], SamplingParams(max_tokens=1), RequestOptions(use_prefix_cache=False))
computed = time.perf_counter() - start - hashed
print(f"1,024 tokens: hashed in {hashed * 1e3:.2f} ms, computed in {computed * 1e3:.0f} ms")

# %% [markdown]
# Hashing is nothing beside what it may save.
#
# ## 6 · What can be forgotten
#
# So far every token is kept until its request ends, so a long text costs memory in proportion to its length. Two ways
# out let go of tokens in the middle of a request. Which tokens are held, as a text grows to 32 tokens:

# %%
tokens = torch.arange(32)
so_far, token = tokens[:, None], tokens[None]
seen = token <= so_far
in_window = token > so_far - 8
draw.kept(
    {
        "everything": (2 * seen).numpy(),
        "a window of 8": (seen * (1 + in_window.int())).numpy(),
        "4 sinks and a window of 8": (seen * (1 + (in_window | (token < 4)).int())).numpy(),
    }
)

# %% [markdown]
# ### Windows
#
# Some models are trained with **local layers**: their queries see only the last so many tokens, the *window*, and only
# a few layers see everything. (Gemma 2 and 3, for example, and Mistral's first models, all of whose layers are local.)
# A key that has fallen out of the window is never asked for again, so its block can be released while the request runs.
# Paging makes that easy: the table's first entries are given back. But local and global layers now hold different
# blocks, so the layers are put into *groups* with a table each. Watch one request, a prompt of 20 tokens and 60 new
# ones, in a model of one local layer with a window of 16 and one global layer (random weights; blocks of 8 slots):

# %%
SHAPE = {
    "architectures": ["Gemma3ForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
folder = Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps(SHAPE))
options = {"block_size": 8, "num_blocks": 24, "run_ahead": 0, "enable_prefix_caching": False}
trace = Trace()
with LLM(folder, load_format="dummy", device="cpu", trace=trace, **options) as small:
    small.generate([list(range(2, 22))], SamplingParams(max_tokens=60, ignore_eos=True))
draw.over_time(trace, groups=["local layer", "global layer"])

# %% [markdown]
# Every eighth step the global layer gets a block more. The local layer gets one too, and has just given its oldest one
# back, so it never holds more than three. What that saves in a model of Gemma 3 4B's shape, 34 layers, 29 of them with
# a window of 1,024 tokens, in bytes of one request:

# %%
shape = replace(
    PRESETS["gemma-2b"],
    num_layers=34,
    num_kv_heads=4,
    max_model_len=131_072,
    windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(34)),
)
print(" tokens   all kept   what windows leave")
for context in (1024, 8192, 32_768, 131_072):
    everything = context * sizing.kv_bytes_per_token(shape) / 1e9
    visible = sizing.kv_bytes(shape, context, block_size=16) / 1e9
    print(
        f"{context:7,}   {everything:5.2f} GB   {visible:5.2f} GB   {visible / everything:4.0%}"
    )

# %% [markdown]
# (At 1,024 tokens there is nothing to save, and a little to pay: groups have equal sizes, 7 of 5 layers here, and one
# of the 35 places stays empty.)
#
# ### Attention sinks
#
# Can one do the same to a model that was *not* trained so? Keep only the newest tokens, let go of the rest, and a text
# could go on for ever in constant memory, past the context length that the model was trained for. Xiao et al. (2023,
# *StreamingLLM*) tried, and large models break down at the very moment when the *first* tokens are let go of. Not
# because these say much: their words do not matter. A softmax must give its weight to something, and a head that finds
# nothing worth looking at puts it on tokens that are always there, the first ones. They called them **attention
# sinks**. Their remedy is the picture on the right: keep the first four tokens, and a window of the newest.
#
# One detail makes it work past the trained length. Positions count inside the cache: with 4 sinks and a window of
# 1,024 no key is ever farther away than 1,028. So keys are cached as they were *before* the rotation, and rotated by
# their place in the cache whenever they are read.
#
# Does our little model have sinks? Ask its attention, as in lesson 02, for the weight that later tokens give to the
# first four of 400:

# %%
text = (EMBEDDED.parent / "text" / "held_out.txt").read_text(encoding="utf-8")
ids = llm.tokenizer.encode(text)[:400]
weight_of_first = []


def watching(q, k, v, length, *, scale):
    """Attention, and a note of the weight that tokens from 64 on give to the first four."""
    one_hot = torch.zeros_like(v)
    one_hot[:4] = 1  # as values: what comes back is the weight of these four
    weights = adapters.cached_attention(q, k, one_hot, length, scale=scale)[..., 0]
    weight_of_first.append(weights[64:].mean(0))  # of each head
    return adapters.cached_attention(q, k, v, length, scale=scale)


prefill = {"prefill_attention": adapters.gathered(watching)["prefill_attention"]}
with using(**prefill):
    llm.generate([ids], SamplingParams(max_tokens=1), RequestOptions(use_prefix_cache=False))
fair = torch.tensor([4 / (at + 1) for at in range(64, 400)]).mean()
print(f"if all tokens were alike, the first four would get {fair:.2%}; they get, in each head")
for layer, heads in enumerate(weight_of_first):
    print(f"layer {layer}: " + "  ".join(f"{weight:6.2%}" for weight in heads.tolist()))

# %% [markdown]
# It has none: its first tokens get less than their share. (It was trained for a few minutes, on texts packed one behind
# the other, so that the first token it sees is seldom the first of a text.) For it the sinks are four tokens like any
# others. A large model is where they matter.
#
# In the engine two options do it. We pretend that the model's context ends at 64 tokens, and ask for 160:

# %%
stream = {"attention_sinks": 4, "attention_window": 40, "max_model_len": 64}
options = {"block_size": 8, "num_blocks": 16, "run_ahead": 0, "enable_prefix_caching": False}
trace = Trace()
with LLM(device="cpu", dtype="float64", trace=trace, **stream, **options) as small:
    endless = SamplingParams(max_tokens=160, ignore_eos=True, temperature=0)
    (completion,) = small.generate("Once upon a time", endless)
print(f"{len(completion.token_ids)} new tokens. How it begins, and how it is at the end:")
print(f"Once upon a time{completion.text[:64]} ...")
print(f"... {' '.join(completion.text[-64:].split())}")
draw.over_time(trace)

# %% [markdown]
# Seven blocks and no more: one for the sinks (4 tokens are rounded up to a block), five for the window, one that is
# being filled. The text goes on far behind the end of the context. What it cannot do is remember: who was in the middle
# of the story is gone.
#
# How good is a text far beyond the context? **Perplexity** says among how many equally likely tokens a model hesitates,
# on average; 1 is certainty. (It is $e$ to the mean of $-\log p$ of the tokens that really come.) From the committed
# record of a CPU: a text of 8,192 tokens, four times the context, scored at 384 tokens behind the context's end.
# *Recomputed* is the right way and the slow one: the newest 1,024 tokens computed afresh for every token.

# %%
record = records.read("cpu/streaming")
WAYS = {
    "recomputed": "the newest 1,024, recomputed",
    "sinks": "4 sinks and the newest 1,024",
    "no-sinks": "the newest 1,024",
    "dense": "everything",
}
beyond = {each["workload"].removeprefix("streaming-"): each for each in record["results"]}
draw.bars({name: beyond[way]["perplexity"] for way, name in WAYS.items()}, x="perplexity")
for way, name in WAYS.items():
    times = beyond[way]["beside_recomputed"]
    print(f"{name:30} {times:.3f} times the perplexity of recomputing")

# %% [markdown]
# A cache that forgets is as good as computing everything anew, since positions count inside it. Keeping everything is
# *worse*: it leads to positions that training never saw. And sinks, as its attention foretold, do this model no good.
# What large models lose without them, Xiao et al. show in their figure 3.
#
# ## Recap
#
# * A contiguous cache reserves for the longest text there might be: on this traffic more than four fifths of it
#   held nothing.
# * Blocks of equal size, a block table for each request: slot = table[p // size] x size + p % size. Attention through
#   the table is the same attention. What is lost is the free part of each last block.
# * A free list and a count of holders are a whole memory manager. Free is what nobody holds.
# * Chained hashes: equal keys, equal beginnings. Full blocks are shared and never written; who shares partly filled
#   ones copies on write.
# * What nobody holds is cached until its room is needed: least recently used first, a sequence's end before its
#   beginning.
# * Windows and sinks let go of tokens in the middle of a request.
#
# **What got worse:** every kernel looks every key's block up, and tables are metadata that must be kept equal on CPU
# and GPU. The last block of each request is half empty on average. Every prompt is hashed, found or not. How soon an
# answer comes depends on what others asked before, so a shared cache tells on its users, and the salts that prevent it
# give up shared memory. Measuring is harder: a benchmark that sends a prompt twice measures the cache. And windows and
# sinks forget for good: no perplexity of the next word shows what was in the middle.
#
# **Further reading:** Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with
# PagedAttention*; Zheng et al. 2024, *SGLang* (RadixAttention: a tree of beginnings in place of hashes); Xiao et al.
# 2023, *Efficient Streaming Language Models with Attention Sinks*; Gu et al. 2025, *Auditing Prompt Caching in Language
# Model APIs* (the timing side channel); vLLM's documentation on automatic prefix caching. Next: lesson 10 decides which
# requests run in each step.
