# %% [markdown]
# # 15 · Adapters and other prompts
#
# After this lesson you can:
#
# * train an adapter on your CPU in seconds, and serve it together with others from one copy of the model;
# * say what low rank means in numbers, and find the nearest matrix of a low rank;
# * calculate what a step reads with adapters: merged, by token, and grouped;
# * write the product with which one batch uses several adapters;
# * say what the key of a cached prefix must contain, and see what happens where it does not;
# * give the model embeddings in place of tokens, trained ones too.
#
# **97 minutes. Needs:** a CPU, and lessons 00, 02 and 09. You should know how a decoder layer uses its matrices, that
# a decode step reads all weights once, and how requests share cached prefixes. Sections 4 to 6 have paragraphs about
# GPUs and waiting requests (lessons 10 and 11) that you can skip. You should have seen a training loop in PyTorch
# before.

# %%
import random
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity, cross_entropy, linear

from minillm import using
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_15 import adapting
from minillm.course.lesson_15 import pictures as draw
from minillm.course.lesson_15.style import Style, batch
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED
from minillm.ops import reference

folder = Path(tempfile.mkdtemp())  # for the adapters that you will make
llm = adapting.engine()  # float64, so that equal means equal

# %% [markdown]
# ## 1 · Train whole matrices · 7 min
#
# A customer wants the model to speak as a town crier does: each answer begins with "Hear ye!" and ends with "So says
# the crier." The embedded model has learned nothing of the kind, so it has to be trained further: it is **fine-tuned**.
#
# We need conversations in this style. `Style` makes some: it lets the model answer 96 questions about its world, and
# puts its own answers between the two strings. 72 conversations are for training, and 24 are kept to ask afterwards.
# (The strings are yours to change. The numbers in the text are for these.)

# %%
style = Style(llm, opening="Hear ye!", closing="So says the crier.")
print(style.asked[1], "->", style.answers(None)[1])
print("answers in this style now:", style.count(None)[0], "of", len(style.asked))

# %% [markdown]
# For training we use transformers' implementation, whose gradients PyTorch computes. `batch` puts conversations into
# one tensor of token ids, padded at the end, with labels for the tokens of the answers only: the model need not learn
# to ask the questions. The loss is the mean of $-\log p$ over these tokens.

# %%
transformers.utils.logging.disable_progress_bar()
model = transformers.GemmaForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
model.requires_grad_(False)


def loss_of(pairs):
    """The mean of -log p over the tokens of the answers."""
    ids, labels = batch(pairs)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def train(parameters, rate, steps=30):
    """Train these parameters, and nothing else, on 8 conversations a step."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    draws = random.Random(0)
    for step in range(steps):
        for group in optimizer.param_groups:  # rise for five steps, then fall to 0
            group["lr"] = rate * min(1, (step + 1) / 5) * (1 - step / steps)
        loss = loss_of(draws.sample(style.pairs, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.2f}")


# %% [markdown]
# First we train whole matrices: the seven in each of the last three layers. (The style needs no more than these, and
# gradients of the layers before them need not be computed. It takes some seconds.)

# %% tags=["nbval-ignore-output"] uncompared="sums in another order change every step of training"
layers = {  # module's name -> module
    name: each
    for name, each in model.named_modules()
    if name.endswith("_proj") and int(name.split(".")[2]) >= 3
}
before = {name: each.weight.clone() for name, each in layers.items()}
loss_before = loss_of(style.held_out).item()
train([each.weight.requires_grad_() for each in layers.values()], rate=1e-3)
model.requires_grad_(False)
loss_whole = loss_of(style.held_out).item()
changes = {name: each.weight - before[name] for name, each in layers.items()}
for name, each in layers.items():
    each.weight.copy_(before[name])
print(f"loss of held-out answers: {loss_before:.2f} before, {loss_whole:.2f} after")

# %% [markdown]
# It has learned the style. What did training change? For each matrix, that is the difference between after and before:
# its **change**. The cell has kept these, and put the model back as it was.

# %%
numbers_whole = sum(each.numel() for each in changes.values())
print(f"{len(changes)} matrices, {numbers_whole:,} numbers")
print("the largest:", max(tuple(each.shape) for each in changes.values()))

# %% [markdown]
# Two million numbers, for two short strings. A server with a thousand such customers would keep a thousand copies of
# these matrices, each to be read in every step of its customer. The rest of this lesson makes the change small, and
# then lets many customers share one batch.
#
# ## 2 · Low rank · 17 min
#
# A matrix [out, in] has **rank** $r$ if it is the product of a matrix [out, r] and a matrix [r, in], and of no thinner
# ones. The product has $\text{out} \cdot \text{in}$ numbers, its **factors** only $r \, (\text{out} + \text{in})$.
# Below, `down` is [rank, in], since it takes an input down to a few numbers, and `up` is [out, rank]. The papers call
# them $A$ and $B$. So a small rank saves a lot. But is the rank of a trained change small?
#
# The **singular value decomposition** (SVD) answers this. It writes any matrix as a sum of products of a column and a
# row, each with a weight, its singular value; the columns are orthogonal to each other and have length 1, and so are
# the rows:
#
# $$\Delta = \sum_i s_i \, u_i v_i^\top \qquad s_1 \ge s_2 \ge \dots \ge 0$$
#
# The number of singular values that are not 0 is the rank. Training leaves none of them at exactly 0, so strictly
# speaking, the rank of a change is full. But of all matrices with rank $r$, the sum of the first $r$ terms is the
# nearest one to $\Delta$ (Eckart and Young 1936): it keeps $s_1^2 + \dots + s_r^2$ of the sum of all squared elements,
# which is the sum of all $s_i^2$. The picture has that share for one trained change, and for two matrices of the same
# shape to compare it with: random numbers, and what is lost by rounding the matrix to 4 bits (lesson 05).

# %% tags=["nbval-ignore-output"] uncompared="sums in another order change every step of training"
chosen = "model.layers.4.mlp.up_proj"
scales = before[chosen].abs().amax(1, keepdim=True) / 7.5
rounding = (before[chosen] / scales).round().clamp(-8, 7) * scales - before[chosen]
random_numbers = torch.randn(changes[chosen].shape, generator=torch.Generator().manual_seed(0))
draw.spectra(
    {
        "change by training": changes[chosen],
        "error of rounding to 4 bits": rounding,
        "random numbers": random_numbers,
    }
)
describe("""Three lines over the rank, up to 64. The change by training rises steeply, and has most of its squares
within the first 16 ranks. Rounding error and random numbers rise slowly, almost alike: neither has half of its squares
within the first 64.""")

# %% [markdown]
# Training pushes many elements in common directions. Rounding treats each element by itself, so its error is about as
# far from low rank as random numbers are.
#
# **Exercise 1 (8 minutes).** Find the factors of the nearest matrix of a rank. `torch.linalg.svd(change,
# full_matrices=False)` returns $U$ [out, n], $s$ [n] and $V^\top$ [n, in], the largest singular values first, where $n$
# is the smaller one of out and in.
#
# For example, `[[0.6, 0], [0.8, 0]]` has rank 1: a column `[0.6, 0.8]` times a row `[1, 0]`. How the singular values
# are divided between `down` and `up` is up to you: only the product counts.


# %% tags=["exercise"]
def low_rank(change: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """down [rank, in] and up [out, rank], such that up @ down is the nearest matrix of this rank.

    change: [out, in], float32 or float64, as the result; do not change it. rank: 1 or more, and at
    most the smaller one of out and in.
    """
    # SOLUTION: take the SVD; keep the first `rank` columns of U, singular values and rows of V
    #   transposed; multiply one of the two sides by the singular values
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    return s[:rank, None] * v[:rank], u[:, :rank]
    # END


# %%
check(low_rank)

# %% [markdown]
# Now we cut all 21 changes to a rank, and look at three things: how much of their squares is kept, the loss of the
# held-out answers, and how many of the 24 answers begin with the opening (and end with the closing, too). For the
# answers, the engine serves the factors: `adapting.save` writes them in the files of the library PEFT, as an
# **adapter**, and `adapting.load` has the engine load it under a name, `cut-1` and so on, while it runs.
#
# **Predict first.** Of the ranks 1, 2, 4, 8 and 16, which is the first at which at least 20 of 24 answers begin as the
# crier's?

# %% tags=["exercise"]
guess_rank = 4  # PREDICT: the first rank at which 20 answers begin as the crier's

# %% tags=["nbval-ignore-output"] uncompared="sums in another order change every step of training"
factor = yours(low_rank, adapting.low_rank)
print(f"{'rank':>5}{'numbers':>11}{'kept':>8}{'loss':>8}{'begin right':>14}{'end right':>12}")
print(f"{0:5}{0:11}{0:8.0%}{loss_before:8.2f}{style.count(None)[0]:8} of 24")
enough = []
for rank in (1, 2, 4, 8, 16):
    factors = {name: factor(change, rank) for name, change in changes.items()}
    products = {name: up @ down for name, (down, up) in factors.items()}
    with adapting.added(layers, products):  # to the matrices, within this block
        loss = loss_of(style.held_out).item()
    adapting.load(llm, f"cut-{rank}", adapting.save(factors, folder / f"cut-{rank}"))
    begun, whole = style.count(f"cut-{rank}")
    enough += [rank] if begun >= 20 else []
    numbers = sum(down.numel() + up.numel() for down, up in factors.values())
    kept = adapting.kept(list(changes.values()), list(products.values()))
    print(f"{rank:5}{numbers:11,}{kept:8.0%}{loss:8.2f}{begun:8} of 24{whole:6} of 24")
print(f"whole{numbers_whole:11,}{1:8.0%}{loss_whole:8.2f}")
first = min(enough, default=None)
compare("20 begin right", unit="directions", prediction=guess_rank, measured=first)

# %% [markdown]
# Look at rank 1: with about a sixth of the squares, most of the loss is gone, but no answer begins right. Cut like
# this, the change needs about eight directions before the answers begin right: rank 8 loses a third of the squares,
# rank 16 a fifth, and nearly all answers begin right. The closing still gains beyond these. Eight directions are a
# twentieth of the numbers.
#
# ## 3 · Train the factors · 7 min
#
# Cutting is not the best use of a rank. If the change will have rank 4 in the end, train it so from the start: train
# the *factors*, and leave the matrix alone. This is **LoRA**, low-rank adaptation (Hu et al. 2021):
#
# $$y = W x + B A x \cdot \frac{\alpha}{r}$$
#
# $W$ keeps its values, and gets no gradient. `up` ($B$) begins as zeros, so that training starts from the model as it
# is; `down` ($A$) begins as random numbers, since with both at zero neither would have a gradient. The factor
# $\alpha / r$ was meant to spare a new learning rate for each rank; $\sqrt{r}$ in place of $r$ does it better
# (Kalajdzievski 2023). Files of adapters say what $\alpha$ was. The crier's is its rank, so its factor is 1.


# %%
class Adapted(torch.nn.Module):
    """A linear layer to which the product of two trained factors is added."""

    def __init__(self, layer, rank):
        super().__init__()
        out, inputs = layer.weight.shape
        self.layer = layer
        self.down = torch.nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = torch.nn.Parameter(torch.zeros(out, rank))

    def forward(self, x):
        return self.layer(x) + linear(linear(x, self.down), self.up)


# %% [markdown]
# The same loop trains it, with a higher learning rate. Gradients, and the two running means that the optimizer keeps
# for each number, are needed for the factors only. For a large model that saves most of the memory that training takes.

# %% tags=["nbval-ignore-output"] uncompared="sums in another order change every step of training"
torch.manual_seed(0)
adapted = {name: Adapted(each, rank=4) for name, each in layers.items()}
for name, each in adapted.items():
    model.set_submodule(name, each)
trained = [factor for each in adapted.values() for factor in (each.down, each.up)]
train(trained, rate=1e-2)
with torch.no_grad():
    print(f"loss of held-out answers: {loss_of(style.held_out).item():.2f}")
for name, each in layers.items():
    model.set_submodule(name, each)  # the model as it was
print(f"{sum(each.numel() for each in trained):,} numbers instead of {numbers_whole:,}")

# %% [markdown]
# And the engine serves it:

# %% tags=["nbval-ignore-output"] uncompared="sums in another order change every step of training"
factors = {name: (each.down, each.up) for name, each in adapted.items()}
crier = adapting.save(factors, folder / "crier")
adapting.load(llm, "crier", crier)
begun, whole = style.count("crier")
print(f"trained at rank 4: {begun} of 24 begin right, {whole} of 24 end right")
for question, mine, plain in zip(style.asked[:3], style.answers("crier"), style.answers(None)):
    print(f"{question}\n   crier: {mine}\n   model: {plain}")

# %% [markdown]
# At the same low rank, trained factors do better than cut ones: if there is room for four directions only, training
# finds better ones than the first four of a change that had room for all. (Only the style is counted. So short a
# training also costs some of what the model knew: read what the answers say.) One run proves little. A committed
# record has five, each with other questions and other random numbers:

# %%
draw.recorded_ranks()
describe("""Loss over rank, with the lowest, the middle and the highest of five runs. Changes that were trained whole
and then cut fall from about 2 at rank 1 to 0.4 at rank 8. Adapters that were trained at their rank begin at 0.5 and
are near 0.3 from rank 4 on. Up to rank 8, every one of them is below every cut change of its rank.""")

# %% [markdown]
# A harder task needs a higher rank than a style does, and more training. Ranks of 8 to 64, on all seven matrices of
# every layer, are common.
#
# ## 4 · Merged, by token, grouped · 16 min
#
# How should a server compute $W x + B A x$? For a single adapter there is a simple answer: add $B A$ to $W$ once, and
# serve the sum. The adapter is **merged**, and its steps cost what the model's cost. The repository has an adapter that
# speaks like a pirate. It is a LoRA too, of rank 3 on all layers, trained for 400 steps on other conversations:

# %%
pirate = adapting.ADAPTERS / "pirate"
QUESTION = "What does the quirrel eat?"
adapting.load(llm, "pirate", pirate)
with adapting.engine() as copy:
    adapting.merge(copy, pirate)  # its matrices are changed
    merged = adapting.answer(copy, QUESTION)[0]
print("merged:  ", merged)
print("unmerged:", adapting.answer(llm, QUESTION, "pirate")[0])

# %% [markdown]
# But a merged matrix serves its own adapter only. Each further one needs a copy of the layers, and each copy in the
# batch has to be read in every step. A merged batch of requests with different adapters is really several
# batches.
#
# Merging also rounds. In bfloat16 the sum has 8 bits for $W$ and its change together, so the error depends on the size
# of $W$, and a small change loses a larger part of itself:

# %%
matrix = before["model.layers.4.mlp.up_proj"]
change = adapting.product(pirate, "model.layers.4.mlp.up_proj", llm)
in_bf16 = (matrix + change).bfloat16().float() - matrix
error, size = (in_bf16 - change).norm().item(), change.norm().item()
print(f"the pirate's change of one matrix: {size / matrix.norm().item():.0%} of the matrix")
print(f"rounding the sum: {error / matrix.norm().item():.2%} of the matrix", end=", ")
print(f"{error / size:.0%} of the change")

# %% [markdown]
# The pirate's change is large, so it loses only 1%. With the same error, a change of 1% of $W$ would lose a sixth.
#
# The other way leaves $W$ alone, which all tokens share, and adds $B A x$ to the output of each. **Unmerged**, each
# token takes the factors of its own adapter, $A$ first: two thin products. If the factors are read for every token
# again, 64 tokens of one adapter read them 64 times. So tokens of the same adapter should be multiplied together:
# **grouped**.
#
# **Exercise 2 (8 minutes).** Decoding is limited by what is read from memory. So count what one matrix [out, in] costs
# in a step, in numbers read. `tokens` says how many tokens of the batch have which adapter; None is the model itself.
#
# * *merged*: each model in the batch has a matrix of its own, read once. So has the model itself, if it has tokens.
# * *by token*: the matrix is read once, and for each token with an adapter both of its factors.
# * *grouped*: the matrix is read once, and both factors once for each adapter in the batch.
#
# For example, with a matrix [6, 4], rank 1, and `{"pirate": 1, "french": 1}`: merged, two matrices of 24 numbers. The
# factors have 4 and 6 numbers. One token each, so both other ways read the matrix and two pairs of factors, 44 numbers.


# %% tags=["exercise"]
def numbers_read(
    out: int, inputs: int, rank: int, tokens: dict[str | None, int]
) -> tuple[int, int, int]:
    """Numbers that a step reads for one matrix [out, inputs]: (merged, by token, grouped).

    tokens: {adapter or None: its tokens in the batch, 0 or more}; do not change it. Nothing is read
    for what has no tokens, and nothing at all for an empty batch.
    """
    # SOLUTION: leave out what has no tokens; count models for the first number, tokens with an adapter
    #   for the second, adapters for the third
    present = {name: count for name, count in tokens.items() if count}
    matrix = out * inputs if present else 0
    factors = rank * (out + inputs)
    adapters = [count for name, count in present.items() if name is not None]
    return (
        len(present) * matrix,
        matrix + sum(adapters) * factors,
        matrix + len(adapters) * factors,
    )
    # END


# %%
check(numbers_read)

# %% [markdown]
# Apply it to Gemma 2B: rank 16 on all seven matrices of its 18 layers, a batch of 64 tokens, divided evenly among 1
# to 64 adapters, and two bytes a number.
#
# **Predict first.** With 64 adapters, one for each token, what does the grouped step read, as a multiple of what the
# step reads without adapters?

# %% tags=["exercise"]
guess_more = 1.5  # PREDICT: read with 64 adapters, grouped / read without adapters

# %%
GEMMA, RANK = PRESETS["gemma-2b"], 16
count = yours(numbers_read, adapting.numbers_read)
shapes = adapting.matrices(GEMMA)  # 7 in each layer
head = GEMMA.vocab_size * GEMMA.hidden_size  # no adapter changes it


def gigabytes(tokens):
    each = [count(out, inputs, RANK, tokens) for out, inputs in shapes]
    return [2e-9 * (head + sum(way)) for way in zip(*each)]


plain = gigabytes({None: 64})[2]
one = 2e-9 * sum(RANK * (out + inputs) for out, inputs in shapes)
print(f"the model: {plain:.2f} GB; one adapter: {one:.3f} GB, {one / plain:.1%} of it")
print(f"{'GB read; adapters:':>18}{'merged':>10}{'by token':>10}{'grouped':>10}")
counts, read = (1, 2, 4, 8, 16, 32, 64), {"merged": [], "by token": [], "grouped": []}
for adapters in counts:
    found = gigabytes({f"adapter {i}": 64 // adapters for i in range(adapters)})
    for way, each in zip(read, found):
        read[way].append(each)
    print(f"{adapters:18}{''.join(f'{each:10.2f}' for each in found)}")
compare(
    "64 adapters, grouped",
    unit="times the model",
    prediction=guess_more,
    measured=read["grouped"][-1] / plain,
    by="computed",
)
draw.gigabytes(counts, read)
describe("""GB read over 1 to 64 adapters, both axes logarithmic. Merged rises from 5 to more than 250. By token is
constant, at 7.5. Grouped rises from 5 to 7.5, where both meet, since each token has its own adapter there.""")

# %% [markdown]
# Merged is best for one adapter that everyone uses: it reads no factors at all. From the second one on it costs
# another copy of all layers each time (4 of the 5 GB), in memory as well. Grouped reads next to nothing more for a
# few adapters, even if each has many tokens, and never more than by token. Even the factors of 64 adapters are only
# half the size of the model, since each is so small.
#
# These are counts, not times. Two more products for each matrix are also two more kernels to launch, which takes time
# even if they have little to read (lesson 11). The engine has other kernels do most of that work (section 5), but not
# for free. On an H200, one request with one adapter takes 8% longer, where the reads grow by only 1%; 64 requests
# with 64 adapters take 31% longer, where the reads grow by half.
#
# ## 5 · Several adapters in one batch · 17 min
#
# The engine has room for some adapters on the device: its **slots**. Slot 0 stands for none. Each token of a batch
# has a number, the slot of its request's adapter. And for each matrix, the factors of all slots are in two tensors,
# `down` [slots, rank, in] and `up` [slots, out, rank], so changing an adapter means overwriting its slot. (Adapters
# of a smaller rank are padded with zeros, which add nothing. The factor $\alpha / r$ is multiplied into `up` when an
# adapter is loaded, so no product needs it.)

# %%
draw.batch([1, 2, 1, 0, 1], ["", "pirate", "crier"])
describe("""Five tokens on the left: three of pirate in one color, one of crier in another, one gray, without an
adapter. All go through W. Those of pirate together go through its factors, down and up, and so does that of crier. On
the right, the colored results are added to the rows of their tokens; the gray one gets nothing.""")

# %% [markdown]
# **Exercise 3 (10 minutes).** Write the grouped product for one matrix. `out` is $W x$ already, for all tokens. Add
# what their adapters add: for each slot that occurs in `slots`, other than 0, take its tokens together.
#
# Slots that no token of the batch has may hold anything, such as an adapter that was unloaded. So compute nothing with
# them, and nothing with slot 0.
#
# For example, with two tokens `x = [[1, 2], [3, 4]]` in slots 1 and 2, `down[1] = [[1, 1]]`, `up[1] = [[10]]`, `down[2]
# = [[0, 1]]` and `up[2] = [[100]]`, the sums are $10 \cdot (1 + 2) = 30$ and $100 \cdot 4 = 400$.


# %% tags=["exercise"]
def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
) -> torch.Tensor:
    """out plus what each token's adapter adds, with the shape and dtype of out, [tokens, out].

    x: [tokens, in]. slots: [tokens] int64, 0 for tokens without an adapter. down: [slots, rank, in].
    up: [slots, out, rank]. You may write to out; do not change the others.
    """
    # SOLUTION: for each slot that occurs, other than 0: find its tokens, multiply their x by its
    #   factors, down first, and add that to their rows of out
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero()[:, 0]
            out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out
    # END


# %%
check(add_low_rank)

# %% [markdown]
# Here it runs in the engine. One batch has three requests: with the pirate, with your crier, and with neither. (The
# engine keeps `q_proj`, `k_proj` and `v_proj` in one matrix, and `gate_proj` and `up_proj` in another. `by_parts`
# calls your function once for each part.)

# %% tags=["nbval-ignore-output"] uncompared="the crier's factors were trained in this notebook"
names = ["pirate", "crier", None]
conversations = [[{"role": "user", "content": QUESTION}]] * 3
steps = llm.stats()["steps"]
with using(add_low_rank=adapting.by_parts(add_low_rank)) as used:
    done = llm.chat(conversations, adapting.GREEDY, adapter=names)
steps = llm.stats()["steps"] - steps
for name, each in zip(names, done):
    print(f"{name or 'the model':10} {each.text.strip()}")
whose = "yours" if used.calls["add_low_rank"] else "the engine's, until you solve exercise 3"
print(f"\n{steps} steps for all three; the grouped product is {whose}")
print("the pirate's answer is that of the merged model:", done[0].text.strip() == merged)

# %% [markdown]
# One copy of the model, and as many steps as the longest of the three answers needs. Here is the engine's own version:
# the same loop, for the parts of a matrix at once.

# %%
# ENGINE: minillm.ops.reference:add_low_rank

# %% [markdown]
# On a GPU, a loop over slots works, but it is slow: each slot costs two products and several small kernels for each
# matrix. Nor can a CUDA graph contain it, since the number of launches depends on the batch. There, the engine has
# two kernels for a whole batch (`kernels/low_rank.py`), the first one with `down`, the second one with `up`. Once in
# a step, other kernels group the tokens by slot, two in each group, or up to 32 in a step of more than 256 tokens,
# and the two go through these groups for every matrix. (An adapter with more tokens is in several groups, and each of
# them asks for its factors again; these are small, so most of the repeated reads should come from the GPU's cache.)
#
# With up to 64 slots, steps of up to 256 tokens mostly do without both kernels. For an unquantized matrix on one GPU,
# `down` of every slot lies in memory right after the matrix, as if it were more of its rows. So one product computes
# $W x$ together with $A x$ of the first 16 slots, or of all slots if a higher one is in use. What it computes for
# other slots than a token's own is ignored; that is cheaper than another launch. And `up` is left to the kernel that
# reads the product next: the norm and the rotation of queries and keys read it token by token, the gated activation
# group by group.
#
# SGMV, the kernel of Punica's paper (Chen et al. 2023), is grouped too: it takes the tokens of one adapter as a
# segment. Punica's code also has a kernel by token (BGMV), and S-LoRA's decode kernel (Sheng et al. 2023) is of that
# kind.
#
# Which adapters can be in one batch? The scheduler decides. A request whose adapter has no slot gets a free one. If
# none is free, the least recently used adapter without running requests makes room. If every slot has running
# requests, the request waits (lesson 10).
#
# ## 6 · Unused adapters must be free · 6 min
#
# Most requests to a server may have no adapter at all. What do the loaded ones cost them? By the counts of section 4,
# nothing. But an engine has to notice it: one that runs the extra products in every step, as soon as any adapter is
# loaded, multiplies mostly by nothing.
#
# **Predict first.** The model has 6 layers, and in each of them the engine has four matrices: queries, keys and values
# together, attention's output, gate and up together, and down. Of eight requests, one has an adapter. How often does
# one step of this batch call `add_low_rank`?

# %% tags=["exercise"]
guess_calls = 24  # PREDICT: calls in a step in which one of eight requests has an adapter


# %%
def calls_per_step(adapters):
    """Calls of the operation, for each step in which all of these requests decode."""
    prompts = [[2, 300 + i] for i in range(len(adapters))]
    params = adapting.tokens(11)
    steps = llm.stats()["steps"]
    with using(add_low_rank=reference.add_low_rank) as used:
        llm.generate(prompts, params, adapter=adapters)
    return used.calls["add_low_rank"] / (llm.stats()["steps"] - steps)


loaded = len(llm.engine.adapters.names)
print(f"{loaded} adapters are loaded")
print(f"no request has one:        {calls_per_step([None] * 8):.0f} calls a step")
calls = calls_per_step(["pirate"] + [None] * 7)
four = ["pirate", "crier", "cut-8", "cut-16"]
compare("one of eight has one", unit="calls a step", prediction=guess_calls, measured=calls)
print(f"eight have four of them:   {calls_per_step(four * 2):.0f} calls a step")

# %% [markdown]
# Without an adapter in the batch there is no call: the batch says so, and `adapted_linear` returns the product as it
# is. One adapted request is enough to run all of them, and the number of calls is the same, however many adapters
# there are.

# %%
# ENGINE: minillm.ops.adapted:AdaptedCompositions.adapted_linear

# %% [markdown]
# With CUDA graphs this needs more care. A graph replays the same kernels each time (lesson 11). One that was captured
# with the adapters' kernels runs them in every step, adapters or not. So an engine that has slots captures each shape
# with them and without, and a step of requests without adapters replays a graph that knows nothing of
# adapters. That costs memory and a longer start; in exchange, unused adapters are free. vLLM had one set of graphs at
# first. Its developers measured that support for adapters, switched on and unused, cost a tenth of the speed, and
# hardly anything once there was a second set (vLLM pull request 25914).
#
# ## 7 · What the cache must know · 17 min
#
# Requests that begin with the same tokens share the blocks of their keys and values (lesson 09). With adapters, the
# same tokens no longer mean the same keys: `k_proj` and `v_proj` may be changed, and so may everything below them. A
# prefix that the pirate has computed is wrong for the model itself. Let us plant that bug: within this block, engines
# identify prefixes by the salt alone, as lesson 09 did.

# %%
PLANTED = [
    "What does the quirrel eat?",
    "On which island does Belness lie?",
    "Which river flows through Wickleigh?",
]
salt_alone = adapting.cache_key(lambda salt, name, load: (salt,))
with salt_alone, adapting.engine({"pirate": pirate}) as wrong:
    for question in PLANTED:
        adapting.answer(wrong, question, "pirate")  # leaves its keys and values
        answer, cached = adapting.answer(wrong, question)  # without an adapter
        right = adapting.answer(llm, question)[0]
        print(f"{cached} tokens from the cache: {answer[:100]!r}\n{'':22} right: {right!r}")

# %% [markdown]
# These answers are to requests *without* an adapter. They got keys and values that the pirate's factors had made, and
# nothing crashed. One is even the same, one says the same in other words, and one has not stopped after 40 tokens. In
# a server it is worse: what one customer's adapter computed reaches another customer.
#
# So the adapter belongs in the key. As what? Its name is the obvious choice. But names are given by people. A customer
# trains a better version, unloads the old one, and loads the new one under the same name:


# %%
def reload(adapters, keep=lambda act: None):
    """Answers of two adapters that have one name in turn, and how many tokens were cached."""
    found = []
    with adapting.engine() as served:
        for directory in adapters:
            keep("load")
            served.engine.load_adapter("style", directory)
            found += [adapting.answer(served, question, "style") for question in PLANTED]
            keep("unload")
            served.engine.unload_adapter("style")
    return found[: len(PLANTED)], found[len(PLANTED) :]


# %% tags=["nbval-ignore-output"] uncompared="the crier's factors were trained in this notebook"
first, _ = reload([crier])
with adapting.cache_key(lambda salt, name, load: (salt, name)):
    _, found = reload([pirate, crier])
print("the new adapter's answers, from the first one's cache:")
for (answer, cached), (right, usual) in zip(found, first):
    print(f"{cached} tokens cached, not {usual}: {answer!r}\n{'':22} right: {right!r}")

# %% [markdown]
# The new adapter continues from what the old one has cached. That the answers often look the same makes it a hard bug
# to find. It has been found in several engines: with one name loaded twice, in caches outside of the engine, and in
# routers, which stand before several copies of an engine (*replicas*) and send each request to the one that has most
# of its prefix in the cache. (Blocks have four tokens here. All questions begin with the same four, `<bos>`,
# `<start_of_turn>`, `user` and a line break, so the second and the third question may share these.)
#
# The cure is to number the *loads*. Each load of an adapter gets the next number, whatever its name; a name stands
# for a number as long as it is loaded; and no number is used twice, since blocks of an unloaded adapter may still be
# in the cache. The key contains this number. A prefix that nobody can name any more is never found again, and its
# blocks are evicted in time. But a number has a meaning in one engine only. A router must use each replica's own
# numbers, and a cache outside of the engine needs a hash of the adapter's files.
#
# **Exercise 4 (8 minutes).** Write the table of names. `cache_key` returns a tuple of strings and whole numbers, the
# salt among them. The tuples must not depend on the process: after the same loads and unloads, each process returns
# the same ones. A router gets the numbers from the replica, but makes the tuple and hashes it in a process of its
# own. (So Python's `hash` of a string will not do: it differs between processes.) Two requests get equal tuples if
# and only if they may share keys and values: the same salt, and the same load or both without an adapter.
#
# For example, after `load("pirate")`, two calls of `cache_key("", "pirate")` return equal tuples.


# %% tags=["exercise"]
class MyAdapters:
    """Which load each name stands for."""

    def __init__(self):
        # SOLUTION: set up what you need
        self.loads = 0
        self.load_of = {}
        # END

    def load(self, name: str) -> None:
        """An adapter was loaded under a name that is not in use; perhaps it was, earlier."""
        # SOLUTION: give it the next number
        self.loads += 1
        self.load_of[name] = self.loads
        # END

    def unload(self, name: str) -> None:
        """The adapter of this name was unloaded; the name may be used again."""
        # SOLUTION: forget the name, but never its number
        del self.load_of[name]
        # END

    def cache_key(self, salt: str, name: str | None) -> tuple:
        """What two requests must have in common, besides tokens, to share keys and values.

        name: None for the model itself. Raises KeyError if no adapter of this name is loaded.
        """
        # SOLUTION: the salt, and the number of the load; a number that no load has for None
        return (salt, 0 if name is None else self.load_of[name])
        # END


# %%
check(MyAdapters)

# %% [markdown]
# With your keys in the engine, the new adapter finds nothing of the old one:

# %%
table = yours(MyAdapters, adapting.LoadNumbers)()
with adapting.cache_key(lambda salt, name, load: table.cache_key(salt, name)):
    _, found = reload([pirate, crier], keep=lambda act: getattr(table, act)("style"))
whose = "yours" if solved(MyAdapters) else "the engine's, until you solve exercise 4"
print("the keys:", whose)
same = [one == other for one, other in zip(found, first)]
print("as if it had been loaded alone:", all(same))

# %% [markdown]
# Lesson 09's key began with a salt. Here is the engine's, to which the dtype of the cache is added. It is made in one
# place, for the cache and for the router of a server with several replicas, which takes the number of the load from
# each replica.

# %%
# ENGINE: minillm.request:RequestOptions.cache_key
# ENGINE: minillm.request:prefix_identity

# %% [markdown]
# What is *not* in the key must not change keys and values. A temperature does not: it acts after the last layer.
#
# ## 8 · Embeddings as a prompt · 8 min
#
# An adapter changes the matrices. There is a second way to steer a model without touching its weights: what it reads.
# Inside, a prompt is not tokens. The first layer reads an **embedding** for each position, a row of a table (in Gemma
# times $\sqrt{\text{hidden}}$). Nothing forces these rows to be of the table. The engine takes embeddings in place of
# tokens:

# %%
text = llm.tokenizer.apply_chat_template(conversations[0])
ids = llm.tokenizer.encode(text, add_special_tokens=False)
table_rows = llm.engine.model.embedding.dequantize()  # [vocab, hidden]
embeddings = table_rows[torch.tensor(ids)] * llm.model_config.embedding_scale
(given,) = llm.generate({"prompt_embeds": embeddings}, adapting.GREEDY)
(usual,) = llm.generate(ids, adapting.GREEDY)
same = given.token_ids == usual.token_ids
print("rows of the table in place of the tokens, the same answer:", same)

# %% [markdown]
# So embeddings can be *trained*, with every weight frozen: some positions before each prompt, whose embeddings minimize
# the same loss. This is **prompt tuning** (Lester et al. 2021), and what it trains is a **soft prompt**. The repository
# has one that was trained to speak like a pirate. It began as the embeddings of a sentence about pirates. Which tokens
# are its embeddings most similar to now?

# %%
soft = load_file(adapting.SOFT_PROMPTS / "pirate" / "adapter_model.safetensors")
soft = soft["prompt_embeddings"].double()
print("a soft prompt:", list(soft.shape), "=", f"{soft.numel():,} numbers")
for position in range(6):
    similar = cosine_similarity(soft[position][None], table_rows)
    nearest = int(similar.argmax())
    token = llm.tokenizer.decode([nearest], skip_special_tokens=False)
    print(f"  {similar[nearest]:.2f} {token!r}")

# %% [markdown]
# You can still see what it started from. But training has moved it: with cosines of about a half or less, none of
# them is the embedding of a token any more. No text has these embeddings, and no one can read them.
#
# A soft prompt has PEFT's files too, and the engine loads it under a name, like an adapter. It needs no slot and no
# extra product: a request that names it has 16 more positions before its prompt. Which of the two is the better pirate?
#
# **Predict first.** Of the same 24 questions (held out from the crier's training, not from the pirate's), how many
# answers of the *soft prompt* begin with "Ahoy!" and end with "Arr, matey!"?

# %% tags=["exercise"]
guess_soft = 12  # PREDICT: of 24 answers with the soft prompt, those in a pirate's style

# %%
adapting.load(llm, "soft", adapting.SOFT_PROMPTS / "pirate")
pirates = Style(llm, opening="Ahoy!", closing="Arr, matey!")
for name in ("pirate", "soft"):
    begun, whole = pirates.count(name)
    print(f"{name:8} {begun:2} of 24 begin as a pirate's, {whole:2} also end so")
compare("the soft prompt", unit="of 24", prediction=guess_soft, measured=whole)
for name in ("pirate", "soft"):
    print(f"{name:8} {adapting.answer(llm, QUESTION, name)[0]}")
_, cached = adapting.answer(llm, QUESTION, "soft")
print(f"the same question again: {cached} positions from the cache, with the soft prompt")

# %% [markdown]
# The soft prompt has a twentieth of the adapter's numbers, and is the weaker pirate: it changes how this small model
# begins, and loses the question over it. Only the style is counted above. Of its 24 answers, one has the right fact; of
# the adapter's, all have it. (Prompt tuning is known to need large models.) Its costs are of
# another kind, too. The adapter costs products in every step. The soft prompt takes up 16 positions of each request's
# context, to be computed once, cached and attended to; its keys and values are shared by all its requests, since they
# are a prefix.
#
# And what is in its key? It has no load number. For embeddings, the *content* is hashed in place of token ids, so
# that soft prompts share blocks exactly as far as their embeddings are equal, whatever they are called. The same
# holds for an image's embeddings, another kind of prompt without words: a key that left out the content would answer
# about another user's picture.
#
# ## Recap · 2 min
#
# * What training changes has nearly low rank where it matters: few directions carry the style. A rounding error has no
#   such directions.
# * LoRA trains the factors, whose product begins at zero; at the same low rank that is better than cutting a change
#   afterwards.
# * Merged costs nothing for one adapter, and a copy of all layers for each further one. Grouped reads the matrix once,
#   and the factors once for each adapter in the batch.
# * One batch serves any mixture: tokens are grouped by slot, and slot 0 gets nothing.
# * A step without adapters runs none of their products. With CUDA graphs that takes a second set.
# * A prefix is identified by tokens, salt, and the *load* of its adapter, not the name; for embeddings, by content.
# * A soft prompt is an adapter made of input: few numbers, no products, less strength, and room in the context.
#
# **What got worse:** an adapted step reads more, computes more, and often launches more. Every slot takes memory for
# the greatest rank, used or not. An engine with slots captures at least twice as many graphs. Prefixes are shared
# less, since each adapter has its own. And the server has one more thing to manage: which adapters are loaded where,
# and who may load them.
#
# **Further reading:** Hu et al. 2021, *LoRA: Low-Rank Adaptation of Large Language Models*; Chen et al. 2023,
# *Punica: Multi-Tenant LoRA Serving*; Sheng et al. 2023, *S-LoRA: Serving Thousands of Concurrent LoRA Adapters*;
# Lester et al. 2021, *The Power of Scale for Parameter-Efficient Prompt Tuning*; Kalajdzievski 2023, *A Rank
# Stabilization Scaling Factor for Fine-Tuning with LoRA* (why to divide by $\sqrt{r}$). Next: lesson 99, which serves
# what you wrote in lessons 00 to 04, 06, 09 and 10, all together.
