# %% [markdown]
# # 00 · Start here
#
# Afterwards you can generate text with an engine you can read, say why the first token of an answer takes longer than
# the others, compute how fast a model can run on your machine before you run it, measure how near it comes, and put a
# function of your own into the running engine.
#
# **60 minutes. Needs:** a CPU. The model comes with the project; nothing is downloaded. On a GPU the same cells run
# Gemma 2B. You should read Python and a little torch (or NumPy) easily, and know what a matrix product is.

# %%
import math
import time

import matplotlib.pyplot as plt
import torch

from minillm import LLM, SamplingParams, ops, using
from minillm.bench import records, roofline
from minillm.course import NotSolvedYet, check, compare, doctor, tier, yours

# %% [markdown]
# ## Is everything there?
#
# What is marked `ok` is found; anything else says how to mend it. `minillm doctor` prints the same in a terminal.

# %% tags=["nbval-ignore-output"] uncompared="it describes the machine"
print(doctor.report(doctor.examine()))

# %% [markdown]
# Every lesson asks for its *tier*: which model this machine can run. On a CPU that is `tiny-gemma`, Gemma's
# architecture in miniature, trained on texts about one small invented world, the Tallow Isles.

# %%
here = tier()
llm = LLM(here.model, run_ahead=0, enable_prefix_caching=False, **here.options)
config, model = llm.model_config, llm.engine.model
print(
    f"{here.label}: {model.num_parameters / 1e6:,.1f} million parameters, {model.nbytes / 1e6:,.1f} MB"
)
print(
    f"{config.num_layers} layers, hidden size {config.hidden_size}, a vocabulary of {config.vocab_size:,} tokens"
)

# %% [markdown]
# The two options keep the engine from being clever: it launches no step before it has read the last one's token, and
# keeps nothing from one request for the next. Lessons 09 and 10 put both back.
#
# ## First tokens
#
# `temperature=0` always takes the likeliest token, so the same prompt gives the same text again.


# %%
def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


prompt = "Once upon a time there was a"
completion = llm.generate(prompt, greedy(40))[0]
print(prompt + completion.text)
print(
    f"\n{len(completion.prompt_token_ids)} tokens in, {len(completion.token_ids)} out: {completion.finish_reason}"
)

# %%
chat = [{"role": "user", "content": "Who are you?"}]
print(llm.chat(chat, greedy(40))[0].text)

# %% [markdown]
# Text goes in and comes out, but the model sees neither. It sees **tokens**: numbers that stand for pieces of text.
# Lesson 01 is about them.


# %%
def piece(token: int) -> str:
    """The text of one token; a number where random weights have chosen one that the tokenizer does not have."""
    known = token < llm.tokenizer.vocab_size
    return llm.tokenizer.decode([token], skip_special_tokens=False) if known else f"#{token}"


ids = completion.prompt_token_ids
print(ids)
print([piece(token) for token in ids])

# %% [markdown]
# And it says no word. To a list of tokens it answers with a score for *every* token of its vocabulary: how likely is
# it that this one comes next? Here are the eight likeliest, asked for with `logprobs`, which are logarithms of
# probabilities.


# %%
def next_token(ids: list[int]) -> dict[int, float]:
    """The likeliest next tokens after `ids`, each with the logarithm of its probability."""
    return llm.generate(ids, greedy(1, logprobs=8))[0].logprobs[0]


found = next_token(ids)
tokens = sorted(found, key=found.get, reverse=True)[:8]
plt.figure(figsize=(7, 2.4), layout="constrained")
plt.bar([repr(piece(token)) for token in tokens], [math.exp(found[token]) for token in tokens])
plt.ylabel("probability")
plt.title(f"after {prompt!r}")
plt.show()

# %% [markdown]
# So text is made one token at a time: ask, choose, append, ask again. That loop is *autoregressive generation*, and
# all the rest of this course is about running it fast.
#
# **Exercise 1.** Write the loop. `model` is any function like `next_token`: token ids in, likeliest next tokens out.
# Always choose the likeliest (that is *greedy* decoding).
#
# For example, with a model that counts, `continue_text(counting, [4, 5], 3, end=99)` is `[6, 7, 8]`.


# %% tags=["exercise"]
def continue_text(model, prompt: list[int], max_tokens: int, end: int) -> list[int]:
    """The greedy continuation of `prompt`: at most `max_tokens` new ids, without `end`, at which it stops.

    model(ids) -> {token id: log-probability}, in no particular order. prompt: stays as it is; an `end`
    in it stops nothing.
    """
    # SOLUTION: ask, choose the likeliest, stop at `end` or append; return only what is new
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        likeliest = max(found, key=found.get)
        if likeliest == end:
            break
        new.append(likeliest)
    return new
    # END


# %%
check(continue_text)


# %% [markdown]
# Your loop around the real model makes the same tokens as the engine:


# %%
def engines_loop(model, prompt, max_tokens, end):
    params = greedy(max_tokens, stop_token_ids=[end], ignore_eos=True)
    return llm.generate(prompt, params)[0].token_ids


end = llm.tokenizer.eos_token_id
mine = yours(continue_text, engines_loop)(next_token, ids, 24, end)
print("".join(piece(token) for token in mine))
print("the engine's tokens:", mine == completion.token_ids[:24])

# %% [markdown]
# ## Prefill and decode
#
# Your loop sends the whole text through the model for each new token. The engine does not: it keeps what it computed
# about earlier tokens (the *KV cache*, lesson 02), so that each step computes only what is new. A request then has two
# phases:
#
# * **prefill**: the first step computes all tokens of the prompt at once and yields the first new token;
# * **decode**: every further step computes one token and yields one.
#
# The engine's loop, by hand: submit a request, then step until it is done.

# %%
long_prompt = llm.tokenizer.encode("The lighthouse keeper told a long story. " * 60)[:400]


def follow(prompt: list[int], max_tokens: int) -> tuple[list[float], list[int]]:
    """Milliseconds and tokens computed of each step of one request."""
    engine, milliseconds, computed = llm.engine, [], []
    request = engine.prepare(prompt, greedy(max_tokens, ignore_eos=True))
    engine.submit(request)
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        milliseconds.append((time.perf_counter() - start) * 1e3)
        computed.append(1 if computed else len(prompt))
    return milliseconds, computed


_ = follow(long_prompt, 30)  # the first of its kind pays for what is set up once
milliseconds, computed = follow(long_prompt, 30)
print(f"{len(milliseconds)} steps computed {sum(computed)} tokens: {computed[:4]} and so on")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
colors = ["tab:orange"] + ["tab:blue"] * (len(milliseconds) - 1)
left.bar(range(len(milliseconds)), milliseconds, color=colors)
left.set(xlabel="step", ylabel="milliseconds", title="How long a step takes")
right.bar(
    range(len(milliseconds)),
    [1e3 * n / ms for n, ms in zip(computed, milliseconds)],
    color=colors,
)
right.set(xlabel="step", ylabel="tokens a second", title="What it gets done")
right.legend(
    handles=[plt.Rectangle((0, 0), 1, 1, color=c) for c in colors[:2]],
    labels=["prefill", "decode"],
)
plt.show()

# %% [markdown]
# Prefill computes four hundred tokens in the time of a few dozen decode steps: per token, decode is the expensive way.
# Why? Because a step has to do two things, and the time of the longer one is the least it can take:
#
# * **read the weights**: every matrix of the model, once, whether for one token or for four hundred;
# * **do the arithmetic**: for every token, multiply each number of every matrix and add it up.
#
# These are the matrices of one layer (lesson 02 says what each is for), and the head that scores the vocabulary:

# %%
layer = model.layers[0]
for name in ("qkv", "attention_out", "gate_up", "down"):
    print(f"{name:<14}", tuple(getattr(layer, name).weight.shape))
print(f"{'head':<14}", tuple(model.head.weight.shape), "once, behind the last layer")

# %% [markdown]
# **Exercise 2.** How much work is a step? For matrices of shapes $(r_i, c_i)$, $t$ tokens, and $b$ bytes a number:
#
# $$\text{bytes} = b \sum_i r_i c_i \qquad \text{operations} = 2\,t \sum_i r_i c_i$$
#
# The 2 is because a multiplication and an addition count as two operations. For example
# `step_work([(2, 3)], tokens=1, bytes_per_number=4)` is `(24, 12)`.


# %% tags=["exercise"]
def step_work(
    shapes: list[tuple[int, int]], tokens: int, bytes_per_number: int
) -> tuple[int, int]:
    """(bytes read, operations done) when `tokens` tokens go through matrices of these shapes in one step."""
    # SOLUTION: count the numbers in all matrices, then apply the two formulas
    numbers = sum(rows * columns for rows, columns in shapes)
    return bytes_per_number * numbers, 2 * tokens * numbers
    # END


# %%
check(step_work)

# %% [markdown]
# Now the work of this model's steps. Several requests can share one: *8 at once* computes a token for each of eight.
# All tokens of a prompt go through the layers, but only the last one goes on to the head: nobody asks what follows the
# others. The last column, operations per byte, is called **arithmetic intensity**.

# %%
layers = [
    tuple(weight.weight.shape)
    for each in model.layers
    for weight in (each.qkv, each.attention_out, each.gate_up, each.down)
]
head = [tuple(model.head.weight.shape)]
size = model.head.weight.element_size()
count = yours(step_work, roofline.matrix_work)


def work_of(tokens: int, samples: int) -> tuple[int, int]:
    """Bytes and operations of a step that computes `tokens` tokens and samples `samples`."""
    parts = [count(layers, tokens, size), count(head, samples, size)]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


STEPS = {
    "decode, 1 at once": (1, 1),
    "decode, 8 at once": (8, 8),
    "decode, 64 at once": (64, 64),
    "prefill of 400": (400, 1),
}
for name, (tokens_in, samples) in STEPS.items():
    nbytes, operations = work_of(tokens_in, samples)
    millions = f"{nbytes / 1e6:10,.1f} MB{operations / 1e6:14,.1f} million operations"
    print(f"{name:<20}{millions}{operations / nbytes:8.1f} a byte")

# %% [markdown]
# ## What can this machine do?
#
# Two numbers, measured now: how many bytes a second it reads, and how many operations a second it does at its best, in
# a product of two large square matrices. Their quotient, the **ridge**, is the intensity at which both take equally
# long. Steps below it wait for memory, steps above it for arithmetic.

# %% tags=["nbval-ignore-output"] uncompared="measured on this machine"
limits = roofline.limits(here.device, model.dtype, model.nbytes)
print(f"reads       {limits.bytes_per_s / 1e9:10,.1f} GB/s")
print(f"computes    {limits.operations_per_s / 1e9:10,.1f} billion operations/s")
print(f"ridge       {limits.ridge:10,.1f} operations a byte")

# %% [markdown]
# **Exercise 3.** A floor: no engine is faster on this machine. Memory and arithmetic units work at the same time, so
#
# $$\text{seconds} \ge \max\left(\frac{\text{bytes}}{\text{bytes per second}},\
# \frac{\text{operations}}{\text{operations per second}}\right)$$
#
# For example `floor_seconds(100, 0, 10, 1000)` is 10.


# %% tags=["exercise"]
def floor_seconds(
    nbytes: float, operations: float, bytes_per_s: float, operations_per_s: float
) -> float:
    """The least time in which a machine with these two rates can do this much work, in seconds."""
    # SOLUTION: the longer of reading and computing
    return max(nbytes / bytes_per_s, operations / operations_per_s)
    # END


# %%
check(floor_seconds)


# %%
def floor_ms(name: str) -> float:
    floor = yours(floor_seconds, roofline.floor_seconds)
    return 1e3 * floor(*work_of(*STEPS[name]), limits.bytes_per_s, limits.operations_per_s)


# %% tags=["nbval-ignore-output"] uncompared="the floors are of this machine"
for name in STEPS:
    print(f"{name:<20} at least {floor_ms(name):8.3f} ms")

# %% [markdown]
# ## Predict, then measure
#
# You have the floors. The engine will be slower: Python runs between the products, and small operations have a cost of
# their own. By how much? Write down a guess before you run the next cell. Being wrong is the point: the distance
# between guess and measurement is where there is something to learn.

# %% tags=["exercise"]
guess_decode_ms = 2.0  # PREDICT: milliseconds of a decode step of one request
guess_64_ms = 8.0  # PREDICT: milliseconds of a decode step of 64 requests
guess_prefill_ms = 40.0  # PREDICT: milliseconds of a prefill of 400 tokens

# %% tags=["nbval-ignore-output"] uncompared="times"
points = [
    roofline.decode(llm, 1),
    roofline.decode(llm, 8),
    roofline.decode(llm, 64),
    roofline.prefill(llm, 400),
]
guesses = [guess_decode_ms, None, guess_64_ms, guess_prefill_ms]
for point, guess in zip(points, guesses):
    compare(
        point.name,
        unit="ms",
        prediction=guess,
        floor=floor_ms(point.name),
        measured=point.seconds * 1e3,
    )

# %% [markdown]
# 64 requests in one step take nothing like 64 times as long: the weights are read, and the engine's Python runs, once
# for all of them. That is **batching**, and the reason why a server is cheaper than many laptops.
#
# The picture of it is called a **roofline**. Every step is a point: how intense it is, and how many operations a second
# it reached. The slope is the limit of memory, the flat part the limit of arithmetic. Beside it the same for Gemma 2B
# on an H200, from the project's records. (A decode point counts the earlier tokens' keys and values among its bytes,
# the table above did not: it stands a little left of what the table says.)


# %%
def draw_roof(
    axis, limits: roofline.Limits, points: list[tuple[str, float, float]], title: str
) -> None:
    """points: (name, operations a byte, operations a second)."""
    xs = [0.2, limits.ridge, 12 * max(x for _, x, _ in points)]
    axis.plot(
        xs,
        [min(x * limits.bytes_per_s, limits.operations_per_s) / 1e9 for x in xs],
        color="gray",
    )
    for name, x, y in points:
        axis.plot(x, y / 1e9, "o")
        side = (
            {"xytext": (6, 3), "va": "bottom"}
            if name.startswith("prefill")
            else {"xytext": (6, -3), "va": "top"}
        )
        axis.annotate(name, (x, y / 1e9), textcoords="offset points", fontsize=8, **side)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="operations a byte",
        ylabel="billion operations a second",
        title=title,
    )


h200 = records.read("h200/roofline")
there = roofline.Limits(h200["bytes_per_s"], h200["operations_per_s"])
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
draw_roof(
    left,
    limits,
    [(point.name, point.intensity, point.rate) for point in points],
    f"Here: {here.name} tier",
)
chosen = [
    roofline.Point(**each) for each in h200["results"] if each["tokens"] not in (256, 400)
]
h200_points = [(point.name, point.intensity, point.rate) for point in chosen]
draw_roof(right, there, h200_points, "Gemma 2B on an H200")
plt.show()

# %% [markdown]
# Two things to see. On the H200 decode climbs the slope: one request leaves almost all of the chip's arithmetic idle,
# and each request that joins moves the point up and to the right, nearly for free, until the ridge. (A CPU's ridge is
# so far left that only one request alone is sure to stand below it.) And the distance from a point to the roof is what
# an engine can still win: on a small model it is mostly Python.
#
# ## The socket
#
# Everything the model computes goes through a table of operations. Each has a plain reference, which is its
# definition, and may have a faster version for a device:

# %%
for row in ops.table(here.device):
    print(f"{row['name']:<20} {row['runs']:<10} {row['why']}")

# %% [markdown]
# `using` puts your function in the place of one of them, in the running engine, until the end of the block. It counts
# the calls, so that you can see that it really ran.
#
# **Exercise 4.** Write one: the norm that stands before both parts of every layer, attention and MLP (lesson 02). It
# divides each token's numbers by their *root mean square*, so that they stay of one size however deep the model is, and
# multiplies each column by a learned weight (Zhang and Sennrich 2019):
#
# $$y_j = \frac{x_j}{\sqrt{\frac{1}{d} \sum_k x_k^2 + \varepsilon}} \; w_j$$
#
# The inputs may be half-precision numbers, whose squares overflow: compute in float32, return the dtype that came. For
# example the row `[3, -3, 3, -3]` with weights of 1 becomes `[1, -1, 1, -1]`.


# %% tags=["exercise"]
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [tokens, d], any float dtype; weight: [d], float32. Returns the shape and dtype of x."""
    # SOLUTION: mean of the squares of each row, in float32; divide by its root; weigh; back to x's dtype
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps) * weight).to(x.dtype)
    # END


# %%
check(rms_norm)

# %% [markdown]
# Now yours runs inside the engine, once in each of 40 steps: all norms but the first are done together with the
# addition before them, in `add_rms_norm`. While yours is a stub the engine's own takes its place, and the count stays
# 0.

# %%
# Random weights repeat one word whatever one does to them: then the embedded model speaks.
speaker = llm if here.trained else LLM(**here.words)
before = speaker.generate(prompt, greedy(40))[0]
with using(rms_norm=rms_norm) as used:
    mine = speaker.generate(prompt, greedy(40))[0]
print("calls of yours:", used.calls)
print("the same text as before:", mine.text == before.text)

# %% [markdown]
# Do not believe in a replacement that changes nothing? This one sees to it that attention looks at nothing:


# %%
def blind(q, *args, **kwargs):
    return torch.zeros_like(q)


with using(decode_attention=blind, prefill_attention=blind) as used:
    blinded = speaker.generate(prompt, greedy(40))[0]
print(blinded.text)
print("calls:", used.calls)
assert blinded.text != before.text, "attention took no part in what the model said"

# %% [markdown]
# And this is the engine's own reference. What you see in a lesson as *from `minillm/…`* is the source that runs, put in
# from the module.

# %%
# ENGINE: minillm.ops.reference:rms_norm

# %% [markdown]
# ## Recap
#
# * A model maps tokens to a score for every token; generation is a loop around it.
# * Prefill computes a whole prompt in one step; decode makes one token a step and reads all weights for it.
# * A step takes at least the longer of bytes over bandwidth and operations over speed. Batching raises the operations
#   per byte, and so the use of the machine.
# * Any operation of the engine can be yours: `using(name=function)`, and `used.calls` says whether it ran.
#
# **What got worse:** nothing yet, but keep the bill in mind. A larger batch makes every single request's step longer.
# The floor above leaves out attention's own reading, which grows with the text. And a roofline says how fast a step
# *could* be; it never says why it is not.
#
# **Further reading:** Williams, Waterman and Patterson 2009, *Roofline*; Pope et al. 2022, *Efficiently Scaling
# Transformer Inference*; Zhang and Sennrich 2019, *Root Mean Square Layer Normalization*. Next: lesson 01, where text
# becomes tokens.
