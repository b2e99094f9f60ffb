# %% [markdown]
# # 00 · Start here
#
# After this lesson you can generate text with an engine whose code you can read, explain why the first token of an
# answer takes longer than the others, compute a lower bound for the time of a step on your machine and measure how
# close the engine comes to it, and run a function of your own inside the engine.
#
# **90 minutes. Needs:** a CPU. The model comes with the project, so nothing is downloaded. On a GPU, the same cells run
# Gemma 2B, or a model of its shape with random weights if you have not downloaded it. You should be comfortable with
# Python and basic PyTorch (or NumPy), and know what matrix multiplication is.
#
# The minutes in the headings assume 130 words of text and ten lines of code a minute, half a minute for each
# prediction, and the time that each exercise states. Work in the copies that `make lab` puts into `lab/`: they have no
# outputs, so nothing gives an answer away before you have made your own guess.

# %%
import math
import time

import torch

from minillm import LLM, SamplingParams, ops, using
from minillm.bench import roofline
from minillm.course import NotSolvedYet, check, compare, describe, doctor, solved, tier, yours
from minillm.course.lesson_00 import pictures as draw
from minillm.course.lesson_00 import step_time

# %% [markdown]
# ## 1 · Is everything there? · 3 min
#
# `ok` means found. For the rest, the table says what is missing and, where possible, how to get it. `minillm doctor`
# prints the same in a terminal.

# %% tags=["nbval-ignore-output"] uncompared="it describes the machine"
print(doctor.report(doctor.examine()))

# %% [markdown]
# `tier()` says which model this machine can run. Many lessons begin with it: a CPU and a GPU run different models. On a
# CPU it is `tiny-gemma`, which has Gemma's architecture in miniature and was trained on texts about a small invented
# world, the Tallow Isles. A model is a stack of *layers*, each with two parts, *attention* and *MLP* (lesson 02). It
# works on *tokens*, which are pieces of text. Between the parts, each token is represented by a vector, whose length is
# the *hidden size*. The *vocabulary* is the list of all tokens that the model knows.

# %%
here = tier()
llm = LLM(here.model, run_ahead=0, enable_prefix_caching=False, **here.options)
config, model = llm.model_config, llm.engine.model
bits = 8 * model.head.weight.element_size()
print(f"{here.label}: {model.num_parameters / 1e6:,.1f} million parameters")
print(f"{model.nbytes / 1e6:,.1f} MB in memory, in {bits}-bit numbers")
print(
    f"{config.num_layers} layers, hidden size {config.hidden_size}, {config.vocab_size:,} tokens"
)

# %% [markdown]
# (The file of `tiny-gemma` stores 16-bit numbers, so it is half the size of the model in a CPU's memory.) The options
# `run_ahead=0` and `enable_prefix_caching=False` switch off two optimizations that would blur the measurements below.
# Lessons 09 and 10 explain them.
#
# ## 2 · First tokens · 18 min
#
# With `temperature=0` the engine always chooses the most likely token, so the same prompt gives the same text,
# unless rounding decides between two nearly equal tokens.
# `stopped by: length` means that the text reached `max_tokens`. (With random weights the text is nonsense, often one
# token over and over. If that token is a line break, the text looks empty.)


# %%
def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


prompt = "Once upon a time there was a"
completion = llm.generate(prompt, greedy(40))[0]
tokens_in, tokens_out = len(completion.prompt_token_ids), len(completion.token_ids)
print(prompt + completion.text)
print(
    f"\n{tokens_in} tokens in, {tokens_out} tokens out, stopped by: {completion.finish_reason}"
)

# %%
chat = [{"role": "user", "content": "Who are you?"}]
print(llm.chat(chat, greedy(40))[0].text)

# %% [markdown]
# You see text, but the model does not. It works with **tokens**: numbers that stand for pieces of text. `<bos>` marks
# the beginning of every text. Lesson 01 is about tokens.


# %%
def piece(token: int) -> str:
    """The text of one token; its number if random weights chose one that the tokenizer does not have."""
    known = token < llm.tokenizer.vocab_size
    return llm.tokenizer.decode([token], skip_special_tokens=False) if known else f"#{token}"


ids = list(completion.prompt_token_ids)
print(ids)
print([piece(token) for token in ids])

# %% [markdown]
# The model does not answer with a word, either. Given a list of tokens, it computes a score for *every* token of its
# vocabulary: how likely is this one to come next? Here are the eight most likely tokens after another beginning.
# `logprobs=8` asks the engine for them; it returns the logarithms of the probabilities.


# %%
def next_token(ids: list[int]) -> dict[int, float]:
    """The most likely next tokens after `ids`, each with the logarithm of its probability."""
    return llm.generate(ids, greedy(1, logprobs=8))[0].logprobs[0]


beginning = "He asked the"
found = next_token(llm.tokenizer.encode(beginning))
likely = sorted(found.items(), key=lambda item: item[1], reverse=True)[:8]
probabilities = {repr(piece(token)): math.exp(logprob) for token, logprob in likely}
draw.probabilities(probabilities, title=f"after {beginning!r}")
describe("A bar for each of the eight most likely next tokens, the most likely first.")

# %% [markdown]
# An engine generates text one token at a time: ask the model, choose a token, append it, ask again. This loop is
# **autoregressive generation**. A model signals with a special *end token* that it is done. The rest of the course is
# about running the loop fast.
#
# Now it is your turn. An exercise is a function whose body is missing: it raises `NotSolvedYet` where your code
# belongs. Replace that line, run the cell, and run the cell below it. `check` then runs your function on small cases
# and prints one line per property that every correct solution has, with a hint for the first that yours lacks. You can
# skip any exercise: the engine then uses its own implementation, and the lesson goes on. If a wrong version breaks a
# later cell, put the `raise NotSolvedYet` line back.
#
# **Exercise 1 (10 minutes).** Write the loop. `model` is any function like `next_token`: token ids in, the most likely
# next tokens out. Always choose the most likely one; this is called *greedy* decoding. `end` is the id of the end
# token.
#
# For example, with a model that counts, `continue_text(counting, [4, 5], 3, end=99)` is `[6, 7, 8]`.


# %% tags=["exercise"]
def continue_text(model, prompt: list[int], max_tokens: int, end: int) -> list[int]:
    """The greedy continuation of `prompt`: at most `max_tokens` new ids, up to but not including `end`.

    model(ids) -> {token id: log-probability}, in no particular order. prompt: must not change; an `end` in it does
    not stop the loop.
    """
    # SOLUTION: build the list of new token ids, one per call of the model, and return it
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
# Next, your solution runs with the real model. `yours(f, g)` is your function `f`, or `g` while `f`
# is still a stub; `solved(f)` says which of the two it is. So some outputs below say "the engine's" until you have
# solved the exercise.


# %%
def engines_loop(model, prompt, max_tokens, end):
    params = greedy(max_tokens, stop_token_ids=[end], ignore_eos=True)
    return llm.generate(prompt, params)[0].token_ids


end = llm.tokenizer.eos_token_id
generated = yours(continue_text, engines_loop)(next_token, list(ids), 24, end)
print(
    "your loop:" if solved(continue_text) else "the engine's loop (yours is not solved yet):"
)
print("".join(piece(token) for token in generated))
if solved(continue_text):
    print("the same tokens as the engine:", generated == completion.token_ids[:24])

# %% [markdown]
# (On a GPU, a right loop may print `False` here: it sends each text as a whole, the engine one token at a time, and in
# 16-bit numbers, rounding can decide between two tokens that are nearly equally likely.)
#
# ## 3 · Prefill and decode · 17 min
#
# The loop of exercise 1 sends the whole text through the model for each new token. The engine does not. It keeps what
# it computed for earlier tokens (in the *KV cache*, lesson 02), so each step computes only what is new. A request then
# has two phases:
#
# * **prefill**: the first step computes all tokens of the prompt at once and yields the first new token;
# * **decode**: every further step computes one token and yields one.
#
# Here is the engine's own loop, written out: submit a request, then call `step` until nothing is left to do.

# %%
long_prompt = llm.tokenizer.encode("The lighthouse keeper told a long story. " * 60)[:400]


def follow(prompt: list[int], max_tokens: int) -> tuple[list[float], list[int]]:
    """For each step of one request: how many milliseconds it took, and how many tokens it computed."""
    engine, milliseconds = llm.engine, []
    request = engine.prepare(prompt, greedy(max_tokens, ignore_eos=True))
    engine.submit(request)
    with step_time.tokens_of_steps(engine) as computed:  # the engine adds a number per step
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            milliseconds.append((time.perf_counter() - start) * 1e3)
    return milliseconds, computed


_ = follow(long_prompt, 30)  # warm up: the first run also sets things up
milliseconds, computed = follow(long_prompt, 30)
print(f"{len(milliseconds)} steps computed {sum(computed)} tokens: {computed[:4]} and so on")

# %% [markdown]
# The prefill computed 400 tokens, a decode step one. How many decode steps take as long as this prefill?
# **Predict first:** replace `None` with your guess and run the cell. `compare` then prints your guess next to the
# measurement. Guesses are not graded. The point is to notice where your picture of the machine was wrong.

# %% tags=["exercise"]
guess_prefill_steps = 20.0  # PREDICT: time of the prefill of 400 tokens / of one decode step

# %% tags=["nbval-ignore-output"] uncompared="times"
decodes = sorted(milliseconds[1:])
ratio = milliseconds[0] / decodes[len(decodes) // 2]  # the median decode step
compare("the prefill", unit="decode steps", prediction=guess_prefill_steps, measured=ratio)
draw.steps(milliseconds, computed)
describe(
    "Left: a bar with the milliseconds of each step, the prefill first, then 29 decode steps. "
    "Right: a point for each of these steps, the tokens that it computed per second, on a logarithmic axis."
)

# %% [markdown]
# The prefill computes 400 times as many tokens as a decode step and takes nowhere near 400 times as long. Per token,
# decode is the expensive phase. (On `tiny-gemma` there are two more reasons, in section 5, which together count for
# even more.) To see the first one, look at what a step must do at a minimum:
#
# * **read the weights**: every number of every matrix that a token goes through, once per step, whether for one token
#   or four hundred;
# * **do the arithmetic**: inside the model a token is a vector. Each number of a matrix is multiplied by one element of
#   that vector, and the product is added to a sum. This happens for every token.
#
# These are the matrices of one layer (lesson 02 explains each), and the *head*, which computes the scores:

# %%
layer = model.layers[0]
for name in ("qkv", "attention_out", "gate_up", "down"):
    print(f"{name:<14}", tuple(getattr(layer, name).weight.shape))
print(f"{'head':<14}", tuple(model.head.weight.shape), "once, after the last layer")

# %% [markdown]
# Not every token goes through every matrix. Only tokens whose next token is needed go through the head. In a prompt,
# that is only the last one. The engine drops the others in the last layer, after attention's output matrix. So one step
# has matrices with different numbers of tokens, and perhaps some with none: a step that computes only the first part of
# a long prompt needs no next token at all.
#
# **Exercise 2 (8 minutes).** Count the work of a step. A matrix of `rows` × `columns` numbers that `tokens` tokens go
# through is given as `(rows, columns, tokens)`. There is no formula here: derive it from the two points above. A
# multiplication is one operation, an addition is another. Each sum starts at 0, so its first product is added, too.
#
# For example `step_work([(2, 3, 1)], bytes_per_number=4)` is `(24, 12)`.


# %% tags=["exercise"]
def step_work(matrices: list[tuple[int, int, int]], bytes_per_number: int) -> tuple[int, int]:
    """(bytes read, operations done) by one step. matrices: (rows, columns, tokens) for each."""
    # SOLUTION: what does each matrix add to the bytes, and what to the operations? What if no token needs it?
    nbytes = operations = 0
    for rows, columns, tokens in matrices:
        if tokens:
            nbytes += bytes_per_number * rows * columns
            operations += 2 * tokens * rows * columns
    return nbytes, operations
    # END


# %%
check(step_work)

# %% [markdown]
# Now count the work of this model's steps. Several requests can share a step: in *decode, 8 at once*, it computes one
# token for each of eight requests. The last column, operations per byte, is called **arithmetic intensity**. (Attention
# also computes with what the KV cache holds. The table leaves that out: in the prefill of `tiny-gemma`, it would add
# about a sixth to the operations.)

# %%
size = model.head.weight.element_size()
count = yours(step_work, step_time.step_work)


def matrices_of(tokens: int, samples: int) -> list[tuple[int, int, int]]:
    """(rows, columns, tokens) of a step that computes `tokens` tokens and samples `samples` new ones."""
    found = []
    for each in model.layers:
        after_attention = samples if each is model.layers[-1] else tokens
        found += [(*each.qkv.weight.shape, tokens), (*each.attention_out.weight.shape, tokens)]
        found += [(*w.weight.shape, after_attention) for w in (each.gate_up, each.down)]
    return [*found, (*model.head.weight.shape, samples)]


STEPS = {
    "decode, 1 at once": (1, 1),
    "decode, 8 at once": (8, 8),
    "decode, 64 at once": (64, 64),
    "prefill of 400": (400, 1),
}
for name, step in STEPS.items():
    nbytes, operations = count(matrices_of(*step), size)
    work = f"{nbytes / 1e6:10,.1f} MB{operations / 1e6:14,.1f} million operations"
    print(f"{name:<20}{work}{operations / nbytes:8.1f} per byte")

# %% [markdown]
# ## 4 · What can this machine do? · 22 min
#
# Two measured numbers describe a machine: how many bytes it reads per second, and how many operations it does per
# second at its best, in a product of two large square matrices. Reading and arithmetic happen at the same time, so a
# step takes at least as long as the longer of the two. This is a **floor**, a lower bound for the step's time:

# %%
# ENGINE: minillm.bench.roofline:floor_seconds

# %% [markdown]
# How fast a machine reads depends on *where* the bytes are. Data that was used a moment ago may still be in the
# processor's **cache**, which is small and fast. So measure twice: read as many bytes as the model has, again
# and again, then do the same with 537 MB, more than most caches hold.

# %% tags=["nbval-ignore-output"] uncompared="measured on this machine"
LARGE = 32 * 2048 * 2048  # numbers in 32 matrices; 537 MB in float32
of_model = roofline.limits(here.device, model.dtype, model.nbytes)
of_memory = roofline.limits(here.device, torch.float32, 4 * LARGE)
for nbytes, limits in ((model.nbytes, of_model), (4 * LARGE, of_memory)):
    print(f"reads {nbytes / 1e6:,.0f} MB repeatedly at {limits.bytes_per_s / 1e9:,.1f} GB/s")
for dtype, limits in {model.dtype: of_model, torch.float32: of_memory}.items():
    rate = limits.operations_per_s / 1e9
    print(f"computes {rate:,.1f} billion operations/s in {str(dtype).removeprefix('torch.')}")

# %% [markdown]
# (The test after exercise 3 is in float32. On a CPU, both measurements of the arithmetic are in float32; the line shows
# the second, and the floors in section 5 use the first, which may differ slightly.) If this machine runs `tiny-gemma`
# and the first of the two read rates is clearly higher, its weights can stay in the cache. That is good for
# `tiny-gemma`, and says little about real models, whose weights are gigabytes: they come from memory in every step, on
# a GPU too. A step that waits for them is **memory-bound**; one that waits for the arithmetic is **compute-bound**.
#
# While a step is memory-bound, more tokens should cost almost nothing: their arithmetic fits into the time
# that the reading takes.
#
# **Exercise 3 (8 minutes).** How many tokens can share one reading of the weights before the arithmetic takes longer?
# Does a larger model leave room for more of them, or for fewer? And what changes with 2 bytes per number instead of 4?
#
# For example `free_batch(numbers=1, bytes_per_number=4, bytes_per_s=8, operations_per_s=64)` is `16`: reading takes
# 0.5 seconds, and so do 16 tokens.


# %% tags=["exercise"]
def free_batch(
    numbers: int, bytes_per_number: int, bytes_per_s: float, operations_per_s: float
) -> int:
    """The largest number of tokens whose arithmetic takes no longer than reading `numbers` weights once."""
    # SOLUTION: write down both times for t tokens, set them equal, and solve for t; or search for it
    return int(bytes_per_number * operations_per_s / (2 * bytes_per_s))
    # END


# %%
check(free_batch)

# %% [markdown]
# Test it. The cell after the next one sends batches of 1, 2, 4 and more tokens through 537 MB of weights, as the
# engine does. 32 tokens need 16 times the arithmetic of two. **Predict:** how many times as long do they take? (The
# comparison begins at two because a single token has a routine of its own.)

# %% tags=["exercise"]
guess_32_tokens = 3.0  # PREDICT: the time of 32 tokens, divided by the time of two tokens

# %% tags=["nbval-ignore-output"] uncompared="times"
matrices = torch.ones(32, 2048, 2048, device=here.device)  # 537 MB, freed below


def seconds(matrices: torch.Tensor, tokens: int) -> float:
    """The fastest of five runs that send this many tokens through each of the 32 matrices."""
    x, times = torch.ones(tokens, 2048, device=here.device), []  # a row is one token's vector
    for _ in range(5):
        start = time.perf_counter()
        for matrix in matrices:
            product = torch.nn.functional.linear(x, matrix)
        product[0, 0].item()  # waits until a GPU is done
        times.append(time.perf_counter() - start)
    return min(times)


seconds(matrices, 1)  # warm up
by_tokens = {tokens: seconds(matrices, tokens) for tokens in (1, 2, 4, 8, 16, 32, 64, 128)}
del matrices
ratio = by_tokens[32] / by_tokens[2]
compare("32 tokens", unit="times two tokens", prediction=guess_32_tokens, measured=ratio)
for tokens in (1, 2, 8, 32, 128):
    print(f"batch of {tokens:3}: {by_tokens[tokens] * 1e3:7.1f} ms")
draw.tokens(by_tokens, LARGE, 4, of_memory)
room = yours(free_batch, step_time.free_batch)
free = room(LARGE, 4, of_memory.bytes_per_s, of_memory.operations_per_s)
whose = (
    "your free_batch"
    if solved(free_batch)
    else "the engine's free_batch (yours is not solved yet)"
)
print(f"{whose}: on this machine {free} tokens")
describe(
    "The time against the number of tokens, with both floors as dashed lines. "
    "A dotted line shows a time proportional to the number of tokens, from two tokens on."
)

# %% [markdown]
# The dotted line is what you would expect if time followed the arithmetic. The measured times stay far below it. Left
# of the point where the dashed lines cross, the weights have to come from memory, however many tokens share them, and
# the arithmetic finishes while the weights are still being read. Right of it, the arithmetic takes longer than the
# reading, so more tokens cost more time. (On a CPU, the routine for several tokens does not reach the full read rate,
# so the curve is above both floors at first and bends at a larger batch than your number. On a GPU, different sizes get
# different routines, so 4 tokens may even take longer than 32. And a floor is only as exact as the rate it was computed
# from, so a point may lie slightly below it.)
#
# Exercise 3 also shows what does *not* matter: the size of the model. Counting only the weights, decode becomes
# compute-bound at a batch size that depends on the machine and the bytes per number alone. Here are an H200's rates,
# from the project's records. Gemma 2B (with random weights) has 2 bytes per number there:

# %%
there, h200_points = step_time.recorded("h200/roofline")
rates = f"{there.bytes_per_s / 1e9:,.0f} GB/s, {there.operations_per_s / 1e12:,.0f} trillion operations/s"
print("an H200:", rates)
free = room(2_500_000_000, 2, there.bytes_per_s, there.operations_per_s)
print("its free batch (exercise 3):", free)

# %% [markdown]
# **Predict:** on that H200, a decode step of 64 requests takes how many times as long as a step of one request?

# %% tags=["exercise"]
guess_64_requests = 2.0  # PREDICT: time of a step of 64 requests / of one request

# %%
recorded = {point.name: point.seconds for point in h200_points}
ratio = recorded["decode, 64 at once"] / recorded["decode, 1 at once"]
compare("64 requests", unit="times one", prediction=guess_64_requests, measured=ratio)
for name, took in recorded.items():
    if name.startswith("decode"):
        print(f"Gemma 2B, {name:<20} {took * 1e3:6.2f} ms")

# %% [markdown]
# There, a step of 64 requests takes 1.5 times as long as a step of one. Its floor is only 1.02 times as high, cached
# keys and values included; the rest is what the engine loses, most of it between 1 and 8 requests, since it has faster
# kernels for one (lesson 11). Beyond the free batch the time grows with the number of requests: a step of 512 takes 1.7
# times as long as one of 256. Sharing steps is called **batching**. It is why a server can decode for 64 users with
# short texts at one and a half times the cost of one, though each prompt still has to be computed. (In this record,
# each request has only 76 tokens in its cache. With 2,000 each, reading the caches would add almost half of the
# weights' bytes to a step.)
#
# ## 5 · Predict, then measure · 12 min
#
# Back to this machine and the engine. These are the floors of its steps, computed with the read rate measured on a
# buffer of the model's size. They count the weights, and leave out the KV cache and attention's own arithmetic:


# %% tags=["nbval-ignore-output"] uncompared="the floors are of this machine"
def floor_ms(name: str) -> float:
    work = count(matrices_of(*STEPS[name]), size)
    return 1e3 * roofline.floor_seconds(*work, of_model.bytes_per_s, of_model.operations_per_s)


for name in STEPS:
    print(f"{name:<20} at least {floor_ms(name):8.3f} ms")

# %% [markdown]
# If the weights stay in the cache, reading them takes less time, so fewer tokens are free than with memory's rate
# above: with 4 bytes per number and 200 billion operations/s, 12 at 33 GB/s and 3 at 130 GB/s. That is why the floor
# for 8 requests may already be higher than the floor for one.
#
# The engine will be slower. By how much? **Predict** before you run the cell that measures; `compare` adds the floor to
# the comparison.

# %% tags=["exercise"]
guess_decode_ms = 2.0  # PREDICT: milliseconds of a decode step of one request
guess_64_ms = 8.0  # PREDICT: milliseconds of a decode step of 64 requests
guess_prefill_ms = 40.0  # PREDICT: milliseconds of a prefill of 400 tokens

# %% tags=["nbval-ignore-output"] uncompared="times"
points = [
    *(roofline.decode(llm, requests, temperature=0) for requests in (1, 8, 64)),
    step_time.without_idle(roofline.prefill(llm, 400), config),
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
# On a CPU, the step for one request is far above its floor. Where does the time go? You can find out by measuring three
# things separately: the step's matrix products alone, in a loop; how many other torch operations the step calls, views
# included; and what one call costs when it works on a single number. (A cell below does this for `tiny-gemma` on the
# CPU, even if your machine has a GPU. It measures everything several times and keeps the fastest, since another program
# can only make a step slower.)
#
# Call everything but the matrix products *overhead*. **Predict:** a step of 64 requests has how many times
# the overhead of a step of one?

# %% tags=["exercise"]
guess_overhead = 8.0  # PREDICT: overhead of a step of 64 requests / of one request

# %% tags=["nbval-ignore-output"] uncompared="times"
one, many = step_time.step_times(1, 64)
small = roofline.limits("cpu", torch.float32, one.nbytes)
print(f"the smallest torch operation takes {one.smallest * 1e6:.1f} µs")
print(f"a decode step of one request: {one.step * 1e3:.2f} ms, of which")
for name, part in one.parts.items():
    print(f"{part * 1e3:6.2f} ms  {name}")
print(f"overhead: {one.overhead * 1e3:.2f} ms; of 64 requests {many.overhead * 1e3:.2f} ms")
if one.overhead:
    ratio = many.overhead / one.overhead
    compare("overhead of 64", unit="times one", prediction=guess_overhead, measured=ratio)
if not (one.steady and many.steady):
    print("Other programs disturbed this measurement: rerun this cell once they finish.")
draw.time_of_a_step(one.parts, one.nbytes / small.bytes_per_s)
describe(
    "A decode step's time as one bar in three parts: the matrix products, the calls of other torch operations, and "
    "the rest. A dashed line marks the floor."
)

# %% [markdown]
# The weights are 22 MB, small enough to fit in the caches of many CPUs, and the products that use them are only a part
# of the step. On their own, they can also take several times the floor: a product with one row may not reach the full
# read rate, and each of the 25 products has to be started. The rest is overhead: hundreds of operations on little
# data or none, where much of the cost is the call itself, and the engine's Python around them. Much of this overhead is
# shared: it grows far less than 64-fold when the requests do. So on `tiny-gemma` batching pays mostly because it shares
# the *overhead*; on a large model, because it shares the *weights*. Overhead, and products with one row that stay far
# above their floor, are also why the prefill of section 3 took as long as so few decode steps: by the floors alone, the
# ratio would be far larger.
#
# Gemma 2B on an H200 is the other case. The record has both numbers:

# %%
single = h200_points[0]
floor = single.floor(there)
print(f"Gemma 2B on an H200, {single.name}:")
print(
    f"{single.seconds * 1e3:.2f} ms, {single.seconds / floor:.2f} times the floor of {floor * 1e3:.2f} ms"
)

# %% [markdown]
# There the engine launches a whole step as one CUDA graph (lesson 11), so its overhead is small, and reading 5 GB takes
# most of the time.
#
# A **roofline** shows all of this in one picture. Each step is a point: its intensity, and the operations per second
# that it reached. The sloped part is the memory limit, the flat part the arithmetic limit, and they meet at the
# **ridge**. The numbers at the points are requests or prompt tokens. (A decode point also counts the bytes of the
# cached keys and values, which the table above left out, so its intensity is lower than in the table, most of all
# for 64 requests.)

# %% tags=["nbval-ignore-output"] uncompared="times"
draw.roofs(
    {f"Here: {here.label}": (of_model, points), "Gemma 2B on an H200": (there, h200_points)}
)
describe(
    "Two rooflines. On the H200, decode points climb the slope as more requests share a step, and the largest steps "
    "come nearest to the flat part. On the left are this machine's steps: where overhead takes most of the time, a "
    "point is far below the line."
)

# %% [markdown]
# On the H200, decode climbs the slope: one request leaves almost all of the chip's arithmetic idle, and each request
# that joins moves the point up and to the right, at little cost, until the ridge. Read as a factor, the vertical
# distance from a point to the line is the most that an engine can still gain. (Part of it is attention's own
# arithmetic, which the points do not count.)
#
# ## 6 · Plug in your own function · 16 min
#
# The model computes through a table of operations. (On a GPU, a decode step of a single request has fused kernels
# instead, lesson 11, but only while nothing in the table is replaced.) Each operation has a plain reference
# implementation, which defines it, and may have a faster one for a device. The second column says which of them runs
# here:

# %%
print(f"{'operation':<20} {'runs':<10} why")
for row in ops.table(here.device):
    print(f"{row['name']:<20} {row['runs']:<10} {row['why']}")

# %% [markdown]
# `with using(rms_norm=f) as used:` puts your function `f` in place of the engine's `rms_norm` until the block ends.
# `used.calls` counts how often it ran, so you can see that it did.
#
# **Exercise 4 (10 minutes).** Write `rms_norm`, the normalization before each of the two parts of a layer, attention
# and MLP (lesson 02). It divides each token's numbers by their *root mean square*, so that they keep the same scale
# however deep the model is, and multiplies each column by a learned weight (Zhang and Sennrich 2019; ε, which
# implementations add, avoids division by zero):
#
# $$y_j = \frac{x_j}{\sqrt{\frac{1}{d} \sum_k x_k^2 + \varepsilon}} \; w_j$$
#
# The inputs may be 16-bit numbers, whose squares can overflow or lose precision: compute everything in float32, weight
# included, and return the dtype of `x`.
#
# For example the row `[3, -3, 3, -3]` with weights of 1 becomes `[1, -1, 1, -1]`.


# %% tags=["exercise"]
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [tokens, d], any float dtype; weight: [d], float32. Returns a new tensor with the shape and dtype of x."""
    # SOLUTION: normalize each row as in the formula, in float32
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps) * weight).to(x.dtype)
    # END


# %%
check(rms_norm)

# %% [markdown]
# Now it runs inside the engine, once in each of 40 steps. All norms but the first are part of another operation,
# `add_rms_norm`, which adds two tensors and normalizes the sum. While `rms_norm` is a stub, the engine uses its own and
# counts no call.

# %%
# On a GPU, use the embedded model in 32-bit numbers. In 16-bit ones, adding the same numbers in another order can
# change which word wins; and with random weights the text is often one word over and over, whatever is replaced.
speaker = llm if here.device == "cpu" else LLM(device=here.device, dtype="float32")
before = speaker.generate(prompt, greedy(40))[0]
with using(rms_norm=rms_norm) as used:
    after = speaker.generate(prompt, greedy(40))[0]
if solved(rms_norm):
    print("calls of your rms_norm:", used.calls)
    print("the same text as before:", after.text == before.text)
else:
    print("rms_norm is not solved yet: the engine ran its own. Calls of yours:", used.calls)

# %% [markdown]
# From the text alone you could not tell that your function ran: nothing changed. Here is a replacement whose effect you
# can see. It makes attention return zeros, so that no token sees another:


# %%
def blind(q, *args, **kwargs):
    return torch.zeros_like(q)


with using(decode_attention=blind, prefill_attention=blind) as used:
    blinded = speaker.generate(prompt, greedy(40))[0]
print(blinded.text)
print("calls:", used.calls)
assert blinded.text != before.text, "attention had no influence on the text"

# %% [markdown]
# Now the next token depends only on the last one, so once a token repeats, greedy decoding loops forever.
#
# Every layer calls attention once per step. In `tiny-gemma` that is 6 layers × 39 decode steps, and 6 layers × 1
# prefill.
#
# And this is the engine's own reference of `rms_norm`. Wherever a lesson shows code *from `minillm/…`*, it is the
# engine's own source, copied from the module when the notebook is built. (The table above says whether a faster version
# of it runs here.)

# %%
# ENGINE: minillm.ops.reference:rms_norm

# %% [markdown]
# ## Recap · 2 min
#
# * A model maps tokens to a score for every token; generation is a loop around it.
# * Prefill computes a whole prompt in one step; decode computes one token per step and reads all weights for it.
# * A step takes at least the larger of bytes / bandwidth and operations / speed. Batching raises the operations per
#   byte. Counting only the weights, it is nearly free up to a batch size that depends on the machine and the bytes per
#   number, not on the model's size.
# * Most of a small model's decode step is overhead: calls of small operations, and Python.
# * You can replace any operation of the engine: `using(name=function)`, and `used.calls` shows that it ran.
#
# **What got worse:** nothing yet, but some costs are already visible. Each request waits longer for its tokens when
# more requests share its steps. This machine's floors above leave out reading the cache of keys and values, which
# grows with the text. And a roofline shows how fast a step *could* be, not why it is slower.
#
# **Further reading:** Williams, Waterman and Patterson 2009, *Roofline*; Pope et al. 2022, *Efficiently Scaling
# Transformer Inference*; Zhang and Sennrich 2019, *Root Mean Square Layer Normalization*. Next: lesson 01, where text
# becomes tokens.
