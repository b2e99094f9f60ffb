# %% [markdown]
# # 14 · Several GPUs
#
# After this lesson you can:
#
# * divide the matrices of a transformer between GPUs so that each layer needs only two sums;
# * write the sum that remains so that all GPUs have the same bits, and the choice of a token without gathering
#   logits;
# * say what happens to heads, KV cache and vocabulary, and when dividing them stops helping;
# * calculate from a step's time how long an exchange may take before a second GPU is of no use;
# * draw a pipeline and its idle time, and size a deployment in GPUs and machines.
#
# **89 minutes. Needs:** a CPU, and lessons 00, 02 and 09. You should know how a decoder layer uses its matrices, what
# the KV cache holds, and that a decode step reads all weights once. A remark here and there refers to lesson 04 (how
# results of attention are merged), 10 or 11 (CUDA graphs); you can skip these. The lesson runs two processes on your
# CPU in place of two GPUs. This makes nothing faster, since they share its cores and memory; but each computes its
# part of the model and sends what a GPU would send.

# %%
from dataclasses import replace

import torch

from minillm import using
from minillm.advice import sizing
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_14 import dividing, measured
from minillm.course.lesson_14 import pictures as draw
from minillm.course.lesson_14.ranks import together
from minillm.model import parallel
from minillm.model.config import PRESETS

with dividing.engine() as llm:  # one process, float64: equal means equal
    alone = dividing.text(llm)
print(alone)

# %% [markdown]
# ## 1 · Two matrices, one sum · 6 min
#
# A model that does not fit on one GPU has to be divided. A model that fits may be divided too: a decode step spends
# its time reading weights, and two GPUs read twice as fast. Giving every GPU some of the *layers* is the simple way
# (section 6). It lets the model fit, but a token still passes through all layers one after the other, so a step takes
# as long as before. For a faster step, GPUs must share each layer. That is **tensor parallelism** (Shoeybi et al.
# 2019). Each of the processes that share a model is called a **rank**.
#
# The engine stores a matrix $W$ as [outputs, inputs], and computes $y = x W^\top$. It can be divided in two ways:
#
# * **By rows**, its outputs. Each rank needs the whole $x$, and computes some elements of $y$, completely.
# * **By columns**, its inputs. Each rank needs only some elements of $x$, and computes a **partial sum** of every
#   element of $y$. The sum over all ranks is $y$.
#
# An MLP has one matrix after the other, with an activation between them. Divide the first by rows and the second by
# columns: then each rank has just those inner values that its columns need. The activation works on single elements,
# so it needs no others. (In a gated MLP, gate and up are both divided by rows, so each rank has both factors of its
# inner values.)
#
# $$y = f(x U^\top) \, D^\top = \sum_{\text{ranks } r} f(x U_r^\top) \, D_r^\top$$
#
# (The picture is drawn with $x$ as a column, so it has the matrices as they are stored.)

# %%
draw.two_matrices()
describe("""From left to right: x, whole; the first matrix, divided by rows between ranks 0 and 1; the inner values, of
which each rank has half; the second matrix, divided by columns; a partial sum of each rank; their sum y, whole.""")

# %%
torch.manual_seed(0)
x = torch.randn(3, 8, dtype=torch.float64)  # three tokens, 8 hidden
up, down = torch.randn(16, 8).double(), torch.randn(8, 16).double()  # 16 inner values

whole = torch.relu(x @ up.T) @ down.T
halves = (slice(0, 8), slice(8, 16))
partial = [torch.relu(x @ up[half].T) @ down[:, half].T for half in halves]
print("the sum of both is y:", torch.allclose(partial[0] + partial[1], whole))
print("rank 0's part alone is y:", torch.allclose(partial[0], whole))

# %% [markdown]
# So an MLP needs one exchange, at its end: a sum over all ranks, which each of them gets. It is called an
# **all-reduce**. The other way round, by columns and then by rows, the inner values would have to be summed before
# the activation, and the results collected after it.
#
# Attention works the same way. A **head** is computed from its own rows of the matrices for queries, keys and values,
# and no other head is involved until `o_proj` mixes their results. So each rank has some heads: by rows in `q_proj`,
# `k_proj` and `v_proj`, then by columns in `o_proj`, and one all-reduce. (These are the names in checkpoints. The
# engine joins the first three to `qkv`, and calls `o_proj` `attention_out`; in the MLP, `gate_proj` and `up_proj` are
# its `gate_up`, and `down_proj` its `down`.) Norms and the residual stream are small, and every rank computes them
# whole.
#
# The embedding and the **output head**, which computes the logits, are divided by rows, that is by tokens (section 4).
# A rank that does not have a token's embedding takes zeros, and one more all-reduce gives it to all.
#
# **Predict first.** The embedded model has 6 layers. How many all-reduces does one step need?

# %% tags=["exercise"]
guess_reduces = 13  # PREDICT: all-reduces in one step of 6 layers

# %% [markdown]
# We count them in the engine, in section 3.
#
# ## 2 · Heads, caches, and a rule for every matrix · 15 min
#
# Each rank attends with its own heads, so it only needs *their* keys and values: the **KV cache** is divided along
# with the heads, and no keys are sent. With grouped queries, several query heads share one **KV head** (lesson 02).
# There may be fewer KV heads than ranks. A KV head cannot be divided without more exchanges, so several ranks hold a
# copy of the same one: it is **replicated**. Then neighbors share it, because the query heads that read it are
# theirs: with 2 KV heads on 4 ranks, ranks 0 and 1 hold KV head 0, and ranks 2 and 3 hold KV head 1.
#
# What does that mean for the cache? `ModelConfig.shard` gives the sizes of one rank's part of a model. `LARGE` has
# the shape of Llama 3.1 70B, which has 8 KV heads; Gemma 2B has one.

# %%
print("bytes of one token in the cache of each GPU")
print(f"{'GPUs':>6}{'70B shape':>12}{'Gemma 2B':>12}")
for count in (1, 2, 4, 8, 16):
    large = sizing.kv_bytes_per_token(dividing.LARGE.shard(count))
    small = sizing.kv_bytes_per_token(PRESETS["gemma-2b"].shard(count)) if count <= 8 else None
    print(f"{count:6}{large:12,}{f'{small:,}' if small else '-':>12}")

# %% [markdown]
# The cache of the large model shrinks up to 8 GPUs, and no further. That of Gemma 2B does not shrink at all: two GPUs
# store the same keys twice, so they hold hardly more tokens than one. All that they gain is the memory of the weights
# that the other one holds. (Engines can then divide the tokens of the cache instead, and merge the results of
# attention as lesson 04 merges pieces of keys. This engine does so with `decode_context_parallel_size=2`.) Gemma 2B
# has only 8 query heads, so 16 ranks cannot share it.
#
# **Exercise 1 (8 minutes).** Write the rule that says which rows and columns of a matrix a rank holds.
#
# `parts`: into how many pieces the divided side may be cut. For the matrices of attention these are heads: query heads
# for `q_proj` and `o_proj`, KV heads for `k_proj` and `v_proj`. Elsewhere each row or column is a piece of its own. If
# there are at least as many parts as ranks, `size` divides `parts`, and each rank holds equally many parts, in order.
# If there are fewer, `parts` divides `size`, and `size // parts` neighbors hold the same part.
#
# For example:
#
# * `gate_proj` with 8 rows and 6 columns, on rank 1 of 2: rows 4 to 7, and all columns.
# * `o_proj` with 6 rows, and 8 columns of 4 heads, on rank 1 of 2: all rows, and columns 4 to 7, which are heads 2
#   and 3.
# * `k_proj` with 8 rows of 2 KV heads, and 6 columns, on rank 1 of 4: rows 0 to 3, which are KV head 0, and all
#   columns.


# %% tags=["exercise"]
def shard(
    name: str, out: int, inputs: int, parts: int, rank: int, size: int
) -> tuple[range, range]:
    """The rows and columns of a matrix [out, inputs] that rank `rank` of `size` holds.

    name: "q_proj", "k_proj", "v_proj" or "o_proj" (attention); "gate_proj", "up_proj" or "down_proj"
    (MLP); "embed_tokens" or "lm_head" (one row for each token). parts: the number of equal pieces
    into which the divided rows or columns may be cut.
    """
    # SOLUTION: choose rows or columns by the name; find the first part and the number of parts of
    #   this rank; return two ranges, of which one is whole
    by_columns = name in ("o_proj", "down_proj")
    count = max(1, parts // size)
    first = rank * parts // size
    length = (inputs if by_columns else out) // parts
    held = range(first * length, (first + count) * length)
    return (range(out), held) if by_columns else (held, range(inputs))
    # END


# %%
check(shard)

# %% [markdown]
# Now the engine loads its model by your rule. `tensor_parallel_size=2` starts two processes, each with a part of the
# model. Your function exists only in this notebook, so `using` sends each process a copy of it. `dividing.by_name`
# passes it the name and the sizes of each matrix.

# %%
with using(shard=dividing.by_name(shard)) as used, dividing.engine(ranks=2) as llm:
    divided = dividing.text(llm)
print("two processes give the text of one:", divided == alone)
print("rule:", "yours" if used.calls["shard"] else "the engine's, until you solve exercise 1")

# %% [markdown]
# The engine refuses a part of another size. A part of the right size from the wrong place usually makes the text
# nonsense, and nothing more. That is why the cell above, and the engine's tests, compare the text with that of one
# device.
#
# ## 3 · The sum · 24 min
#
# An all-reduce is the only thing that most of the model needs from other ranks. It has to be fast, because a step
# waits for it many times. And it has to be *exact* in one respect: all ranks must get **the same bits**.
#
# Why is that a question? Floating-point addition rounds, so a sum of three or more numbers depends on the order:

# %%
a, b, c = torch.tensor([2.0**30, -(2.0**30), 1.0])
print("(a + b) + c =", float((a + b) + c))
print("(b + c) + a =", float((b + c) + a))

# %% [markdown]
# Suppose that each of four ranks begins with its own number, then adds that of the rank before it, then that of the
# rank before that, and so on. Each rank then adds in an order of its own.
#
# **Predict first.** We let four ranks add 1,000 sums of four normally distributed numbers in float32. For how many of
# them do ranks 0 and 1 get different bits?

# %% tags=["exercise"]
guess_different = 400  # PREDICT: of 1,000 sums, those that differ between two ranks


# %%
def own_number_first(x, ranks):
    total = x.clone()
    for step in range(1, ranks.size):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        total += ranks.exchange(x, to, source)
    return total


generator = torch.Generator().manual_seed(0)
numbers = [torch.randn(1000, generator=generator) for _ in range(4)]
sums = together(own_number_first, numbers).results
different = int((sums[0] != sums[1]).sum())
compare("different sums", unit="of 1,000", prediction=guess_different, measured=different)

# %% [markdown]
# Each difference is tiny. But after that, the ranks no longer run the same model: their residual streams differ, and
# so do the keys that they store. Nothing notices. The token is chosen from numbers that all ranks are told (section
# 4), so they still agree on one, but no single model would have computed it. (The engine does compare the ranks'
# tokens in each step; that finds ranks that choose differently, not streams that drift.) So all ranks add in one
# order. In the engine's own sums, it is that of the ranks.
#
# A rank can send and receive: `ranks.exchange(x, to, source)` sends `x` to rank `to`, and returns what rank `source`
# sends to this one. Both are other ranks; a rank has its own `x` already. `exchange` waits until the message arrives.
# So whatever one rank waits for, another has to send, or all of them wait forever. `ranks.rank` and `ranks.size` say
# which rank this is, and of how many. `own_number_first`, above, shows a way to exchange with all others: in round
# `step`, everyone sends to the rank `step` places further.
#
# **Exercise 2 (12 minutes).** Write the all-reduce. Sum in the order of ranks, $((x_0 + x_1) + x_2) + \dots$ In 16
# bits each addition would lose too much to rounding, so add in float32 at least (`torch.promote_types(x.dtype,
# torch.float32)`), and convert the sum back. Add one part after another: `torch.sum` over a stack has an order of its
# own.
#
# For example, two ranks with `[1, 2]` and `[10, 20]` both get `[11, 22]`.


# %% tags=["exercise"]
def all_reduce(x: torch.Tensor, ranks) -> torch.Tensor:
    """The sum of all ranks' x, with x's shape and dtype; the same bits on every rank.

    ranks: has `rank`, `size` and `exchange(x, to, source)`, with `to` and `source` other ranks. All
    ranks call this function at once.
    """
    # SOLUTION: get the x of every other rank by `exchange`; add all of them, from rank 0 on, in
    #   float32 or a wider dtype; convert back
    found = {ranks.rank: x}
    for step in range(1, ranks.size):
        source = (ranks.rank - step) % ranks.size
        found[source] = ranks.exchange(x, (ranks.rank + step) % ranks.size, source)
    total = found[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for rank in range(1, ranks.size):
        total += found[rank]
    return total.to(x.dtype)
    # END


# %%
check(all_reduce)

# %% [markdown]
# (The checker runs the ranks as threads of this process, and notices if all of them wait.)
#
# Now it runs in the engine. `used` counts calls in rank 0. The engine chooses one token for each step by
# `sharded_argmax`, the subject of section 4, so the number of its calls is the number of steps. First, what comes out
# if the ranks leave out these sums (they still agree on each token).
#
# Run this once the check above passes: in the engine, ranks that wait for each other are stopped only after a minute.


# %%
def no_sum(x, ranks):
    return x


add = yours(all_reduce, parallel.all_reduce)
with dividing.engine(ranks=2) as llm:
    with using(all_reduce=no_sum):
        print("without a sum:", dividing.text(llm)[:60])
    with using(all_reduce=add, sharded_argmax=parallel.sharded_argmax) as used:
        print("with a sum:   ", dividing.text(llm)[:60])
print(
    "the sum:", "yours" if solved(all_reduce) else "the engine's, until you solve exercise 2"
)
found = used.calls["all_reduce"] / used.calls["sharded_argmax"]
compare(
    "all-reduces", unit="in a step", prediction=guess_reduces, measured=found, by="counted"
)

# %% [markdown]
# Two in each layer and one for the embeddings: $2 \cdot 6 + 1 = 13$.
#
# Here is the engine's own. On a CPU it gathers all parts, and adds them as you did. On GPUs that can write to each
# other's memory, one kernel sends a rank's numbers to the others, waits for theirs, adds them in the order of ranks,
# and goes on with the norm that follows. Two numbers of 16 bits travel in a word of 8 bytes, next to a counter, the
# *epoch*, that says which sum they belong to: a rank reads a word again until it has the current epoch, so no other
# message has to say that the numbers are there. For larger sums (on two GPUs, of more than 1,024 rows) and where GPUs
# are not connected like that, the engine calls the library NCCL. (In the fused step of a single request, lesson 11,
# the product before the sum sends its results itself, in float32, and one more launch adds them.)

# %%
# ENGINE: minillm.model.parallel:all_reduce

# %% [markdown]
# ### What is sent
#
# There are other ways to add. In a **ring**, $x$ has $n$ parts. Partial sums of each part travel from neighbor to
# neighbor until they are complete, and then the sums do. Every rank sends $2 \frac{n - 1}{n}$ times the size of $x$,
# in $2 (n - 1)$ rounds. When all send to all, as above, it is $n - 1$ times the size, but all messages can be under
# way at once, because none depends on another. (A loop over `exchange` waits for each of them in turn; a kernel sends
# all of its own first.) A decode step's sum is small. For one token of Gemma 2B in bfloat16:

# %%
hidden = 2048
print("ranks   each sends to all   in a ring   rounds that wait: to all, ring")
for count in (2, 4, 8):
    everyone, ring = 2 * hidden * (count - 1), 2 * hidden * 2 * (count - 1) // count
    print(f"{count:5}{everyone:14,} bytes{ring:12,}{1:19}{2 * (count - 1):16}")

# %% [markdown]
# (The engine's kernel sends twice as many bytes, since half of each word is the epoch.)
#
# These few kilobytes are a matter of **latency**: the time of a message hardly depends on its size, so fewer rounds
# win. The sums of a long prompt are thousands of times larger. There it is a matter of bandwidth, and ways that send
# less win: a ring, or two rounds in which each rank adds one part of $x$ and then sends it to all.
#
# A ring also adds each part of $x$ in another order. All ranks still get the same bits, but those of an element depend
# on its place in $x$, that is on the other requests in the batch. The sum above avoids that. Where the engine calls
# NCCL it does not, so a token whose logits nearly tie may still depend on its neighbors (lesson 10).
#
# ## 4 · The vocabulary · 12 min
#
# The output head multiplies the hidden state with one row for each token of the vocabulary. Divided by rows, each
# rank has the logits of its own tokens: with two ranks and 4,096 tokens, rank 0 has tokens 0 to 2,047, and rank 1 has
# the rest.
#
# To choose the likeliest token, the ranks could gather all logits. For Gemma 2B these are 256,000 numbers a row. But
# they need much less: each rank finds the largest of its own logits, and tells the others that number and its token.
# The largest of these is the largest of all.
#
# $$(r, i) = \arg\max_{r, i} \, \ell_{r,i} \qquad \text{token} = r \cdot \frac{V}{n} + i$$
#
# Here $\ell_{r,i}$ is logit $i$ of rank $r$, and each of $n$ ranks has $V/n$ tokens.
#
# **Exercise 3 (8 minutes).** Write it for several rows at once. `ranks.all_gather(x)` takes a tensor [..., n], and
# returns those of all ranks, joined in the order of ranks: [..., size * n]. If several logits are the largest, one
# device takes the first token. The ranks have to agree with it.
#
# For example, with the logits `[1, 5]` on rank 0 and `[2, 3]` on rank 1, both ranks return 5 and token 1.


# %% tags=["exercise"]
def sharded_argmax(logits: torch.Tensor, ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit in the whole vocabulary, and its token: [rows] and [rows] int64.

    logits: [rows, vocab / size], float32 or wider, of the tokens of this rank; rank 0 has the first
    ones. ranks: has `rank`, `size` and `all_gather(x)`. All ranks return the same.
    """
    # SOLUTION: find the largest of this rank's logits, and the token's number in the whole
    #   vocabulary; gather both; take the largest, and of equal ones the first
    largest, column = logits.double().max(-1)
    token = column + ranks.rank * logits.shape[-1]
    values = ranks.all_gather(largest[:, None])
    tokens = ranks.all_gather(token[:, None])
    best = values.argmax(-1, keepdim=True)  # of equal ones, the first: in the order of ranks
    return values.gather(-1, best)[:, 0], tokens.gather(-1, best)[:, 0]
    # END


# %%
check(sharded_argmax)

# %% [markdown]
# Your three functions are most of what tensor parallelism adds to a model. Here they run in the engine together:

# %%
mine = {
    "shard": dividing.by_name(shard),
    "all_reduce": all_reduce,
    "sharded_argmax": sharded_argmax,
}
with using(**mine) as used, dividing.engine(ranks=2) as llm:
    print("the text of one process:", dividing.text(llm) == alone)
for name in mine:
    print(f"  {name}:", "yours" if used.calls[name] else "the engine's")

# %% [markdown]
# With a temperature the ranks tell each other a third number: the sum of their exponentials, relative to their
# largest logit. From these, every rank computes each rank's share of the probability, and so which rank's part the
# random number falls into. That one looks it up and tells the others, one more exchange. (The random number comes
# from seed and position, so all ranks have the same one without exchanging it.) It is the merge of lesson 04 once
# more. Top-k, top-p and penalties need more, so then the engine gathers the logits. On GPUs it gathers them in any
# case: as the engine writes it, choosing from parts takes many operations on numbers of eight bytes, which read and
# write more than gathering does.
#
# ## 5 · When does it pay? · 8 min
#
# A second GPU halves what each has to read, and adds the all-reduces, one after the other. If a step takes $t$ on one
# GPU, then on $n$ it takes at best
#
# $$t_n = \frac{t}{n} + R \cdot a$$
#
# with $R$ all-reduces that take $a$ each; an *exchange* or a *reduce* below is one of these. "At best", because not
# all of $t$ is divided: every rank computes the norms, and reads the keys and values of Gemma's only KV head. Small
# kernels hardly get shorter when they have half as much to do. And $a$ grows with $n$.
#
# A committed record has the time of a decode step of Gemma 2B on one H200. The model has 18 layers, so $R$ is 37.
# These are the sums; the exchange that chooses the token would be the 38th, and is left out.
#
# **Predict first.** For one token, how many microseconds may one exchange take, so that two GPUs are as fast as one?
# The step takes 1.34 ms.

# %% tags=["exercise"]
guess_us = 18.0  # PREDICT: microseconds of one exchange at which two GPUs gain nothing

# %%
step_ms = dividing.step_ms()
count = dividing.reduces(PRESETS["gemma-2b"])
limit = dividing.break_even_us(step_ms[1], count, ranks=2)
compare(
    "one exchange", unit="microseconds", prediction=guess_us, measured=limit, by="computed"
)
draw.gains(step_ms[1], count)
describe("""Three curves that fall as one reduce takes longer, from 1 to 100 microseconds, and a dashed line at 1. At 1
microsecond, 2, 4 and 8 GPUs are 1.9, 3.6 and 6.6 times as fast as one. They cross the line at 18, 27 and 32.""")

# %% [markdown]
# The more GPUs there are, the more of a step is exchanges. Between machines there is a network, and an exchange often
# takes too long for a decode step. Two H200s of one machine are connected by NVLink, and a record has the time of a
# sum over both, in a CUDA graph. Here is what the sums add to a step if the kernel of the norm that follows computes
# each of them, as in the engine (own; only the sum of embeddings has a kernel of its own), and if NCCL does. (The
# fused step of a single request has launches for its sums, which this record does not have.)

# %%
print(measured.costs_table())

# %% [markdown]
# A sum of one row takes 1.7 microseconds, a tenth of what it may, and by NCCL 6.3. More tokens take longer steps, but
# longer sums too. By the formula, two GPUs gain everywhere. (The requests of these steps are short, of about 76
# tokens each.) Now measure the whole engine.
#
# **Predict first.** Two GPUs share Gemma 2B, and 256 requests of mixed lengths arrive at once. By what factor is
# their throughput higher than one GPU's?

# %% tags=["exercise"]
guess_gain = 1.6  # PREDICT: times the tokens per second of one GPU, for 256 requests at once

# %%
ways = measured.ways("Gemma 2B")
*_, many = ways
compare(
    "two GPUs, 256 requests",
    unit="times one GPU",
    prediction=guess_gain,
    measured=many.shared / many.one,
)
print(measured.ways_table(measured.ways()))

# %% [markdown]
# The formula is a bound, and what it leaves out decides here. For one request of Gemma 2B there remains what two GPUs
# do not divide: small kernels, the launches for the sums, and a token that is chosen from gathered logits. For 256,
# each GPU also reads all keys and values of Gemma's KV head: at about 850 tokens a request these are 4 GB a step,
# nearly as much as all weights, and they are not divided. (Gemma's rows are from an earlier version, in which NCCL
# computed every sum of more than 64 rows, so compare 256 requests with its column.) Larger models have more to
# divide: one layer of the 70B shape has far more bytes than one of Gemma 2B, and needs the same two all-reduces. The
# table shows it for Llama 3.1 8B, whose 8 KV heads are divided, too.
#
# Two **replicas**, each a whole engine, do twice the work with no exchange at all, if there are enough requests: in
# the table each has all the requests of its row, so both together have twice as many, and a single request is no
# faster than on one GPU. (If two replicas had the 256 requests together, each would have 128, and be less busy; so
# with equal loads, the distance is smaller than in the table.) So for a model that fits on one GPU, tensor
# parallelism does not pay off if throughput is what matters. It pays off for answers that must come sooner, for a
# model that does not fit, and where the weights leave little room for the cache: each replica stores all of them, and
# GPUs that share one copy may hold far more requests (section 7 has such a case).
#
# ## 6 · Pipelines · 17 min
#
# The other way divides the layers: the first GPU, or **stage**, has the first layers, and sends the hidden states of
# its tokens to the next one. That is one message between neighbors in a step, where tensor parallelism has two sums
# in every layer. (The tokens also return from the last stage to the first, but these are a few bytes.) So a pipeline
# gets by with a slower network, although a long prompt's message is megabytes, for the 70B shape tens of them.
#
# But a stage has nothing to do while the others run the same tokens. So the requests are divided into **batches**
# (papers call them *micro-batches*), and while one batch is in the second stage, another one is in the first. A
# request's next step needs the token of the step before, which is known when its batch has left the *last* stage.
#
# **Exercise 4 (10 minutes).** Write down when each stage begins each batch. A stage runs the batches of a step in
# order, then those of the next step, one at a time. It begins a batch when
#
# * the batch has left the stage before (for stage 0: has left the last stage in the step before), and
# * the stage has finished what it ran before.
#
# Time begins at 0, and sending takes none. For example, with two stages of 1 ms, two batches, and one step: batch 0
# begins at 0 and 1 ms, batch 1 at 1 and 2 ms, so the result is `[[[0, 1], [1, 2]]]`.


# %% tags=["exercise"]
def timeline(stage_ms: list[float], batches: int, steps: int) -> list[list[list[float]]]:
    """When each stage begins each batch, in ms: begin[step][batch][stage], as nested lists.

    stage_ms: how long each stage takes for one batch. Do not change it.
    """
    # SOLUTION: keep for each stage when it is free, and for each batch when its tokens are known;
    #   go through steps, batches and stages in order
    free = [0.0] * len(stage_ms)
    known = [0.0] * batches
    begin = []
    for step in range(steps):
        begin.append([])
        for batch in range(batches):
            now, row = known[batch], []
            for stage, ms in enumerate(stage_ms):
                now = max(now, free[stage])
                row.append(now)
                now += ms
                free[stage] = now
            known[batch] = now
            begin[step].append(row)
    return begin
    # END


# %%
check(timeline)

# %% [markdown]
# **Predict first.** With four equal stages and two batches, what share of the time do the stages have nothing to do,
# after many steps?

# %% tags=["exercise"]
guess_idle = 0.5  # PREDICT: idle share of four stages with two batches, from 0 to 1

# %%
simulate = yours(timeline, dividing.timeline)
STAGES = [1.0, 1.0, 1.0, 1.0]
draw.pipelines(
    [(f"batches: {batches}", simulate(STAGES, batches, 4)) for batches in (1, 2, 4)],
    STAGES,
)
describe("""Three charts with four stages each, over 19 ms; a color is a batch, and a number its step. With one batch,
one stage runs at any time, in turn. With two batches, two run. With four, all four run, but for a triangle at the
beginning and one at the end.""")
idle = {n: dividing.idle(simulate(STAGES, n, 200), STAGES) for n in (1, 2, 4, 8)}
for batches, share in idle.items():
    print(f"batches: {batches}; the stages are idle {share:.0%} of the time")
uneven = [1.0, 1.0, 1.0, 1.4]
print(
    f"batches: 8, the last stage takes 1.4 ms; {dividing.idle(simulate(uneven, 8, 200), uneven):.0%}"
)
compare(
    "idle",
    unit="of the time",
    prediction=guess_idle,
    measured=round(idle[2], 2),
    by="simulated",
)

# %% [markdown]
# The idle time is called the **bubble**. With $p$ equal stages and $m$ batches, $m < p$, it is $1 - m/p$ of the time.
# From $m = p$ on it is only the filling at the beginning and the emptying at the end. A long prompt that passes
# through once, in $m$ pieces, pays for both: then $(p - 1)/(m + p - 1)$ of the time is idle. Stages that take longer
# than others make all of them wait. The last one also has the output head, so it should get fewer layers.
#
# A pipeline makes no decode step faster: a token passes through all layers in any case, and each batch is only a part
# of the requests, so it reads the weights for fewer tokens. (A long prompt in pieces does get through sooner, since
# its pieces are in several stages at once.) What a pipeline does is let a model fit and keep the GPUs busy, if there
# are enough requests.
#
# ## 7 · How many GPUs, how many machines · 5 min
#
# Now size a deployment: the 70B shape in bfloat16, GPUs of 80 GB, requests of 4,096 tokens, machines of 8 GPUs. One
# GPU's share of the model is a model of its own, and `sizing.fit` (lesson 02) divides 90% of the GPU's memory between
# its weights and its KV cache; here nothing is subtracted for the workspace of a step and CUDA graphs. For a
# pipeline, a stage has a part of the layers; we count the embedding and the output head in both stages, although only
# the first needs the embedding, and only the last the head.


# %%
def requests_that_fit(tensor, stages=1):
    share = replace(
        dividing.LARGE.shard(tensor), num_layers=dividing.LARGE.num_layers // stages
    )
    found = sizing.fit(share, gpu_bytes=80e9, context=4096)
    return found.weight_bytes / 1e9, found.requests


print(f"{'GPUs':<34}{'GB of weights each':>20}{'requests':>10}")
for label, tensor, stages, replicas in (
    ("1", 1, 1, 1),
    ("2: tensor parallel", 2, 1, 1),
    ("4: 2 replicas of 2", 2, 1, 2),
    ("4: tensor parallel", 4, 1, 1),
    ("8: 2 replicas of 4", 4, 1, 2),
    ("8: tensor parallel", 8, 1, 1),
    ("16: 2 replicas of 8", 8, 1, 2),
    ("16: tensor parallel, 2 machines", 16, 1, 1),
    ("16: 2 stages of 8, 2 machines", 8, 2, 1),
):
    weights, requests = requests_that_fit(tensor, stages)
    print(f"{label:<34}{weights:20.1f}{replicas * requests:10,}")

# %% [markdown]
# Two GPUs hold the weights, and next to no requests, so two replicas of them hold few as well: 4 GPUs that share one
# copy hold 109. With 4, half of the usable memory is left for the cache, with 8 three quarters. The more is left, the
# less a second copy costs. Between two machines there are three ways to go on. Tensor parallelism over 16 GPUs sends
# two sums a layer over the network, and stores each KV head twice. In two stages of 8 GPUs, each GPU of the first
# stage sends one message a batch over it; they store everything once, and hold the most requests. Two replicas send
# nothing, store the weights twice, and one of them goes on if the other fails. So:
#
# 1. If the model fits on one GPU and leaves room for your requests, run replicas.
# 2. If not, or if single answers are too slow, divide it over the GPUs of one machine by tensor parallelism, over as
#    few as hold your requests and give the latency that you need; then run replicas of that.
# 3. If it does not fit into one machine, make the machines stages of a pipeline. (Not with this engine: all its ranks
#    and stages are on one machine, and its stages run without CUDA graphs.)
#
# ## Recap · 2 min
#
# * By rows and then by columns: each rank computes with its part of two matrices, and one sum remains. Two
#   all-reduces a layer, and one for the embeddings.
# * Heads bring their KV cache along. KV heads are replicated where there are fewer than ranks; then the cache no
#   longer shrinks.
# * All ranks need the same bits, so all add in the same order, in float32 at least. Nothing notices if they do not.
# * Ranks can agree on the likeliest token by two numbers a row: the largest logit and its token.
# * On $n$ GPUs a step takes $t/n + R a$ at best. Small models, slow links and many GPUs spend it on all-reduces. With
#   enough requests for all of them, replicas win throughput, and tensor parallelism the latency of a request.
# * A pipeline needs at least as many batches as stages; otherwise some stage is idle at any moment.
#
# **What got worse:** one process that fails takes the others with it. A step ends with the slowest rank. Each rank
# stores its own copy of norms and code, and graphs are captured on all of them. The exchanges take time that two
# replicas would spend on tokens. And a function that runs in the ranks is a copy: what it changes outside itself is
# lost.
#
# **Further reading:** Shoeybi et al. 2019, *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
# Parallelism* (section 3); Huang et al. 2019, *GPipe: Efficient Training of Giant Neural Networks using Pipeline
# Parallelism*; Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM* (which to use where); Pope et al. 2022, *Efficiently Scaling Transformer Inference* (what is sent, for
# many ways to divide). Next: lesson 15, if you go on, or lesson 99, which serves what you wrote in lessons 00 to 04,
# 06, 09 and 10, all together.
