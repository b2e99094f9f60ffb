# %% [markdown]
# # 99 · Serve and benchmark
#
# After this lesson you can
#
# * predict what a model costs to serve, and check the prediction;
# * start an inference server and talk to it with any OpenAI client;
# * measure what users wait for, in one request and over a whole run;
# * find the request rate at which waits start to climb steeply, and say why there;
# * compare two engines fairly, and explain the result;
# * load-test the engine with the parts that you wrote in this course, and say what each of them costs;
# * weigh accuracy, memory, speed, and cost on one report card.
#
# **105 minutes, and 52 more for the optional parts. Needs:** a CPU, and lessons 00 and 02; for the report card also 05
# to 08. The model comes with the project; nothing is downloaded. On a GPU the same cells run Gemma 2B. What you solved
# in lessons 00 to 04, 06, 09, and 10 takes part at the end, and so does exercise 4 of this lesson, which is optional.
# The cells measure the machine that they run on; those that print committed records say so. Loads are short, to save
# your time. For longer ones, which scatter less, start with `FULL=1 make lab`, or write `%env FULL=1` at the top of the
# next cell.

# %%
import math
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import openai
import torch

from minillm import LLM, using
from minillm.bench import offline, records, roofline, serve, workloads
from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.quantize import quantize
from minillm.course import NotSolvedYet, check, compare, describe, full, look_back, tier
from minillm.course.grading import earlier
from minillm.course.lesson_99 import knee, large_model, report_card, serving, under_load
from minillm.course.lesson_99 import pictures as draw
from minillm.server import running

# %% [markdown]
# ## 1 · Choose and predict · 8 min
#
# The lesson ends with a report card. At what precision should you serve Gemma 2B on an H200, to one user or to 3,000?
# Here is the card, still empty:

# %%
report_card.print_empty_card(report_card.PRECISIONS)

# %% [markdown]
# Choose before you measure, and predict seven of its entries. This is enough to compute or estimate them:
#
# * **Memory.** Gemma 2B has 2.5 billion weights, of 2 bytes each in bf16. A fifth of them are the embedding table,
#   which is also the output head. fp8 and int4 store a weight in 8 or 4 bits (lessons 05 to 07). So in the report
#   card's rows fp8 takes 1 byte for each weight. int4 takes half a byte, plus 2 bytes for every 128 weights: a factor
#   that they share. The output head stays at 1 byte per weight.
# * **Time.** For one request, every token needs all weights once. An H200 reads about 4.2 TB/s (measured): the size of
#   the weights, divided by that, is a floor for the time between two tokens (lesson 00). With thousands of requests, a
#   step reads the weights once for all of them, and arithmetic sets the floor: two operations for each weight and
#   token, of which the H200 does at most 784 trillion a second in bf16 (measured), and up to twice as many in fp8.
#   Each of the 3,000 requests has 128 tokens in and 128 out; the lone one has 128 in and 256 out.
# * **Accuracy.** Without quantization, `tiny-gemma` answers 88.8% of its multiple-choice questions correctly.
# * **Cost.** A GPU costs the same per hour however well it is used. So a million tokens cost what the GPU costs while
#   it generates them.

# %% tags=["exercise"]
choice_one = "int4"  # PREDICT: the cheapest precision for one user: "bf16", "fp8", or "int4"
choice_many = "fp8"  # PREDICT: the cheapest precision for 3,000 requests at once
guess_gigabytes = 1.5  # PREDICT: int4: GB of weights
guess_int4_ms = 0.5  # PREDICT: int4, 1 request: milliseconds between two tokens
guess_points = 1.0  # PREDICT: int4: percentage points of accuracy lost
guess_fp8 = 1.6  # PREDICT: 3,000 requests: cost of a token in bf16 / in fp8
guess_alone = 50  # PREDICT: bf16: cost of a token with 1 request / with 3,000

# %% [markdown]
# ## 2 · Start the server · 4 min
#
# In a terminal you would type `minillm serve`. Here the engine runs in the notebook's own process, so that a function
# you change in a cell changes what is served. HTTP runs in a separate process (on a GPU, in several).
#
# The batch has a fixed number of rows: at most that many requests run at the same time, and further requests wait in a
# queue. On a CPU the engine gets one thread, which leaves the other cores to HTTP and to the clients. On a GPU a single
# HTTP process can be the bottleneck, so there are up to four.
#
# `ExitStack` keeps the engine and the server open until we close it. Both will be started again at the end of the
# lesson, so a function does it.

# %%
here = tier()
if here.name == "cpu":
    torch.set_num_threads(1)
# On a CPU this sets Triton's interpreter mode, which must happen before Triton is imported.
earlier.has_triton()
rows = {"cpu": 16, "gpu": 128}[here.name]
blocks = {"cpu": 512, "gpu": None}[here.name]  # of 16 tokens; None: all that fit
workers = {"cpu": 1, "gpu": min(4, max(1, os.cpu_count() - 2))}[here.name]
stack = ExitStack()


def start():
    """An engine, ready to serve, and a server around it. Both end with `stack`."""
    options = here.options | {"max_num_seqs": rows, "num_blocks": blocks}
    llm = stack.enter_context(LLM(here.model, **options, enable_prefix_caching=False))
    llm.warm_up()  # on a GPU: compile kernels and capture graphs now, not during the first requests
    return llm, stack.enter_context(running(llm, workers=workers))


llm, server = start()
config, dtype = llm.model_config, llm.engine.model.dtype
parameters, weights = llm.engine.model.num_parameters, llm.engine.model.nbytes
print(f"{here.label}: {parameters / 1e6:,.1f} million parameters")
print(f"{weights / 1e6:,.1f} MB of weights; {rows} rows in the batch")

# %% [markdown]
# Prefix caching is off because we are going to send the same prompts again and again. With the cache, later runs of
# prompts longer than a block would skip most of their prefill.
#
# Open this address in a browser (on the machine that runs the notebook) and keep it in view: the engine room shows the
# rows of the batch, the blocks of the cache, and the waits, while the cells below put load on the server. (On a CPU the
# cache is small, so that you can see it fill.) `/metrics` has the numbers for a monitoring system.

# %% tags=["nbval-ignore-output"] uncompared="a port that was free"
print(server.url)

# %% [markdown]
# ## 3 · Talk to it · 3 min
#
# The server speaks the OpenAI protocol, so the official client works unchanged; only the address differs. The embedded
# model knows a small invented world. On a GPU with a Gemma checkpoint, Gemma answers; otherwise the embedded model
# does. Retries are off: we want to see what happens to each request, including failures.


# %%
def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="not needed here", max_retries=0)


speaker = server
if not here.trained:
    print(
        "Random weights produce nonsense, so the embedded model answers questions; the load runs on the big one.\n"
    )
    speaker = stack.enter_context(running(stack.enter_context(LLM(**here.words))))


def ask(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client_of(speaker).chat.completions.create(
        model=speaker.model, messages=messages, max_tokens=40, temperature=0
    )
    return answer.choices[0].message.content


for question in ("Who are you?", "On which island does Fenwick lie?", "What is 3 plus 4?"):
    print(f"{question} {ask(question)}")

# %% [markdown]
# Users should not have to wait for the last token before they see the first. With `stream=True` the server sends each
# piece of text as soon as its characters are complete.

# %%
story = {
    "model": speaker.model,
    "prompt": "Once upon a time there was a",
    "max_tokens": 40,
    "temperature": 0,
}
completions = client_of(speaker).completions
whole = completions.create(**story).choices[0].text
pieces = [chunk.choices[0].text for chunk in completions.create(**story, stream=True)]
print(story["prompt"] + whole)
print(f"\nstreamed, the same text: {''.join(pieces) == whole}")

# %% [markdown]
# ## 4 · What a user waits for · 18 min
#
# Four terms describe the speed of a server:
#
# * **TTFT**, time to first token: the wait in the queue plus the prefill, whose last step yields the first token. Until
#   then the screen is empty.
# * **ITL**, inter-token latency: the gap between a token and the one before it. If it is too long, the text crawls.
# * **End-to-end latency**: the time to the last token. A program that needs the whole answer waits this long.
# * **Throughput**: requests or output tokens per second, over all users. No user waits for it, but it determines the
#   cost per token.
#
# **Predict** the TTFT and the ITL of a single request with a prompt of 300 tokens. The request gets one token per step,
# and every step reads all weights, so the memory bandwidth sets a floor for the ITL (lesson 00). Prefill runs the whole
# prompt in one step, and there arithmetic sets the floor: two operations for each weight and token, or somewhat fewer,
# since only the last token needs scores for the whole vocabulary. HTTP, JSON, and the client, which runs in this
# process, come on top. This machine's limits are:

# %% tags=["nbval-ignore-output"] uncompared="speeds"
limits = roofline.limits(here.device, dtype, weights)
print(f"{limits.bytes_per_s / 1e9:,.0f} GB/s, {limits.operations_per_s / 1e9:,.0f} GFLOP/s")

# %% tags=["exercise"]
guess_itl_ms = 3.0  # PREDICT: milliseconds between two tokens
guess_ttft_ms = 25.0  # PREDICT: milliseconds to the first token

# %% [markdown]
# Now send it, and note when each piece of the answer arrives. `return_token_ids` is an extension of this server (vLLM
# has it too): each chunk lists its tokens, even if they do not form complete text yet. `due` is when the request
# should have been sent; here, that is when it was sent (a later section shows why the two differ). Prompts are random
# token ids: speed does not depend on what they say.

# %%
client = client_of(server)


def listen(prompt: list[int], max_tokens: int) -> tuple[float, list[tuple[float, int]]]:
    """Send one request now. (When it was due, [(when tokens arrived, how many)])."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens}
    extra = {"ignore_eos": True, "return_token_ids": True}
    due, arrivals = time.perf_counter(), []
    for chunk in client.completions.create(**body, stream=True, extra_body=extra):
        if chunk.choices and (tokens := len(chunk.choices[0].token_ids)):
            arrivals.append((time.perf_counter(), tokens))
    return due, arrivals


def random_prompt(tokens: int, seed: int) -> list[int]:
    return serving.random_prompt(tokens, config.vocab_size, seed)


_ = listen(random_prompt(300, seed=0), 4)  # the first request pays for one-time setup
due, arrivals = listen(random_prompt(300, seed=1), 16)
print(f"{sum(tokens for _, tokens in arrivals)} tokens arrived")

# %%
draw.request(due, arrivals)
describe(
    "One request on a time axis. An arrow from the start to the first token is the TTFT. Then tokens follow at short "
    "intervals, the longest of which is marked. A longer arrow spans the whole request: the end-to-end latency."
)

# %% [markdown]
# **Exercise 1 (8 minutes).** Compute these waits. A server may send several tokens at once: each of them counts as a
# token, but the user waited only once. With $t_i$ the arrival time of token $i$, counting every token:
#
# $$\text{TTFT} = t_1 - \text{due} \qquad \text{gap}_i = t_i - t_{i-1},\ i \ge 2 \qquad
# \text{end-to-end} = t_n - \text{due}$$
#
# For example, `timings(0.0, [(0.5, 1), (0.75, 1)])` is `(0.5, [0.25], 0.75)`.


# %% tags=["exercise"]
def timings(due: float, arrivals: list[tuple[float, int]]) -> tuple[float, list[float], float]:
    """(TTFT, gaps, end-to-end) of one request, in seconds.

    due: when it should have been sent. arrivals: (time, tokens that arrived then), in order.
    An answer of n tokens has n - 1 gaps. `arrivals` stays unchanged.
    """
    # SOLUTION: list the time of every token, repeated for tokens that arrived together; take differences
    times = [when for when, tokens in arrivals for _ in range(tokens)]
    gaps = [late - early for early, late in pairwise(times)]
    return times[0] - due, gaps, times[-1] - due
    # END


# %%
check(timings)

# %% [markdown]
# The load generator that we use below computes the same numbers. TTFT and all gaps add up to the end-to-end latency.

# %%
measure = serving.checked(timings)  # yours, once it passes its check
ttft, gaps, e2e = measure(due, arrivals)
if measure is timings:
    agreed = serving.agree((ttft, gaps, e2e), serving.timings(due, arrivals))
    print("the load generator agrees:", agreed)
else:
    print("until timings passes its check, these are the load generator's numbers")
print("TTFT + gaps = end-to-end:", math.isclose(ttft + sum(gaps), e2e))

# %% tags=["nbval-ignore-output"] uncompared="times"
floor_itl, floor_ttft = serving.floors_ms(llm, limits, prompt=300)
itl_ms, ttft_ms = 1e3 * sorted(gaps)[len(gaps) // 2], 1e3 * ttft
compare("ITL", unit="ms", prediction=guess_itl_ms, floor=floor_itl, measured=itl_ms)
compare("TTFT", unit="ms", prediction=guess_ttft_ms, floor=floor_ttft, measured=ttft_ms)

# %% [markdown]
# On a CPU the ITL is about ten times its floor. The embedded model is tiny, so much of the time goes to costs that do
# not depend on its size: Python that schedules each step, hundreds of small tensor operations, HTTP, and JSON. A large
# model hides such costs. Here is a decode step of Gemma 2B on an H200, without HTTP, from a committed record:

# %%
print(serving.recorded_decode_step("h200/roofline"))

# %% [markdown]
# The TTFT includes these costs too, and on a fast GPU they can be most of it. The rest of its distance to the floor
# grows with the prompt. The limit comes from multiplying two large matrices; the model multiplies smaller ones, and the
# floor leaves out all other operations, such as attention and norms.
#
# ## 5 · Many users · 12 min
#
# Now eight clients each send one request, all at once, with different lengths. We want a few numbers to summarize all
# their gaps. The mean hides the moments when the text stands still, so latencies are reported as **percentiles**: p50
# is the typical gap, and at most one gap in a hundred is longer than p99. That is less rare than it sounds: if
# exactly one in a hundred is longer, and gaps are independent, 63% of answers with 100 gaps contain such a gap ($1 -
# 0.99^{100}$).

# %%
lengths = [4, 6, 8, 12, 16, 24, 32, 40]
with ThreadPoolExecutor(len(lengths)) as pool:
    heard = list(pool.map(lambda n: listen(random_prompt(16 * n, seed=n), n), lengths))
gaps_of_each = [list(measure(due, arrivals)[1]) for due, arrivals in heard]
print("tokens of each answer:", [len(gaps) + 1 for gaps in gaps_of_each])

# %% [markdown]
# **Exercise 2 (8 minutes).** Compute a percentile over all gaps of all requests, by *nearest rank*: of $n$ sorted
# values, the $p$-th percentile is number $\lceil p\,n / 100 \rceil$, counting from 1. It is always a gap that really
# occurred. Two mistakes are common: averaging each request's own percentile (an answer of 4 tokens then counts as
# much as one of 40), and returning a value between two gaps. (Multiply before you divide: in Python, `55 / 100 * 100`
# is a little more than 55, and rounding up makes 56 of it.)
#
# For example, `pooled_percentile([[10, 20, 30]], 50)` is 20: number $\lceil 1.5 \rceil = 2$ of three.


# %% tags=["exercise"]
def pooled_percentile(gaps_of_each: list[list[float]], p: float) -> float:
    """The p-th percentile (0 < p <= 100) of all gaps of all requests, by nearest rank.

    A request whose answer has one token has no gaps: its list is empty. All lists stay unchanged.
    """
    # SOLUTION: all gaps in one new sorted list; then the value whose rank the formula gives
    ranked = sorted(gap for gaps in gaps_of_each for gap in gaps)
    return ranked[math.ceil(p * len(ranked) / 100) - 1]
    # END


# %%
check(pooled_percentile)

# %%
percentile = serving.checked(pooled_percentile)
everything = [gap for gaps in gaps_of_each for gap in gaps]
marks = {f"p{p}": percentile(gaps_of_each, p) for p in (50, 90, 99)}
draw.gaps(everything, marks | {"mean": sum(everything) / len(everything)})
describe(
    "A histogram of all gaps between tokens of eight clients, on a logarithmic axis, where equal distances are equal "
    "factors. Most gaps are short and close together; a few are much longer. Vertical lines mark the percentiles: p99 "
    "is far to the right of p50, and the mean lies between them."
)

# %% [markdown]
# Look at the right end of the histogram. The eight prompts have 2,272 tokens together, and a step that runs a prompt
# takes far longer than one that only decodes. A request whose answer is already streaming waits for that step too: its
# text stands still. (Lesson 10 cuts prompts into chunks to shorten this gap.) The typical gap does not show it. p99
# shows it if enough requests met such a step: of 134 gaps, it is the second largest.
#
# ## 6 · How many at once? · 7 min
#
# `minillm bench serve` is a load generator: it does what we just did, for hundreds of requests. In a **closed loop** a
# fixed number of clients each wait for their answer before they send the next request. We try one client, a quarter as
# many clients as rows, and as many as rows. On a CPU a request has 16 tokens in and 16 out, on a GPU 128 and 128. A
# load generator is a program too and may be slower than the server: the last column shows for what share of the run it
# was busy.
#
# **Predict.** A step reads the weights once for all its requests. By what factor do the server's tokens per second grow
# from one client to a full batch?

# %% tags=["exercise"]
guess_gain = 6.0  # PREDICT: tokens/s of all clients together, in multiples of one client's

# %% tags=["nbval-ignore-output"] uncompared="times"
clients = (1, rows // 4, rows)
scale = {"cpu": 8, "gpu": 1}[here.name]  # chat has 128 tokens in and 128 out, divided by this
generators = {"cpu": 1, "gpu": 4}[here.name]  # processes of the load generator
CHAT = {"workload": "chat", "scale": scale, "generators": generators, "quiet": True}
closed = [
    serve.run(server.url, concurrency=n, requests=max(8, 4 * n), **CHAT) for n in clients
]
loads = [record["results"][0] for record in closed]
print(serving.loads_table(loads))
gain = loads[-1]["output_tokens_per_s"] / loads[0]["output_tokens_per_s"]
compare("a full batch", unit="times", prediction=guess_gain, most=rows, measured=gain)

alone, crowded = (1e3 * loads[i]["itl_s"]["mean"] for i in (0, -1))
per_row = (crowded - alone) / (rows - 1)
print(f"\nthe mean ITL is about {alone - per_row:.2f} ms + {per_row:.2f} ms for each client")
print(f"reading the weights takes at least {floor_itl:.2f} ms of it")

# %%
draw.batching(loads)
describe(
    "Two plots against the number of clients. Left, throughput grows with the clients, but more slowly than the dotted "
    "line on which each client adds as much as the first. Right, the time between tokens grows too, p99 above p50."
)

# %% [markdown]
# A step's time has two parts: one is the same for any number of rows, the other grows with every row. (The printed
# split is a line through the first and the last mean ITL. Some steps also run other clients' prompts; their time is in
# the part per client.) Batching shares the first part; that is its whole gain. Reading the weights is in it, but so are
# Python, launching every operation, and messages between processes: if this shared part is much longer than the
# printed floor, then on this machine batching mostly shares overhead. For Gemma 2B on an H200 it mostly shares the
# weights: in the record of section 4, the floor is most of the step.
#
# The second part (arithmetic, attention, prompts, sampling, HTTP) limits the gain: however many rows there are, every
# token costs at least that much time. And every client pays with longer gaps.
#
# Two warnings. The closer the last column is to 100%, the more the load generator has measured itself. And an ITL near
# 0 does not mean a fast server: the tokens of several steps were delayed on their way and arrived together. TTFT and
# end-to-end latency show this delay.
#
# ## 7 · Four kinds of traffic · 6 min
#
# So far all requests were chats: short in, short out. Benchmarks use four patterns, because a server feels different in
# each:
#
# * **chat**: short input, short output (128 and 128 tokens at full size);
# * **silo**: short in, long out (128 and 2,048), such as "write a story";
# * **liso**: long in, short out (2,048 and 128), such as a summary, or an answer from documents;
# * **lilo**: long in, long out (2,048 and 512), such as a report about long documents.
#
# **Predict.** Which pattern generates the fewest output tokens per second? On a CPU, lengths are divided by 16.

# %% tags=["exercise"]
guess_fewest = "liso"  # PREDICT: the pattern with the fewest output tokens/s

# %% tags=["nbval-ignore-output"] uncompared="times"
settings = {"cpu": {"scale": 16, "requests": 8}, "gpu": {"scale": 1, "requests": 64}}[
    here.name
]
settings |= {"concurrency": rows // 4, "generators": generators, "quiet": True}
sent = serve.run(server.url, patterns=True, **settings)
print(serving.patterns_table(sent["results"]))
fewest = min(sent["results"], key=lambda row: row["output_tokens_per_s"])
slowest = fewest["workload"].split("_")[0]
print(f"\nfewest output tokens/s: predicted {guess_fewest or 'nothing'}, measured {slowest}")

# %%
draw.patterns(sent["results"])
describe(
    "Left, a bar for each pattern: the wait for the first token, then the rest of the answer. Long inputs make the "
    "first part long, long outputs the second. Right, output tokens per second next to all tokens per second: they "
    "differ most with long inputs and short outputs."
)

# %% [markdown]
# * The **input** decides the TTFT: all of it must be computed before the first token.
# * The **output** decides the end-to-end latency: each token is a step of its own.
# * They meet in the ITL. While a prompt runs, the other clients' answers wait. With long inputs such a step takes
#   longer, and p99 usually shows it. (Not always: in a closed loop, equally long answers end together, so the next
#   prompts start together too, and few answers are left to delay. Section 8 shows this.)
# * Output tokens per second make long inputs look slow: with liso, most of the work is in tokens that are not counted.
#   All tokens per second make long outputs look slow, since a prompt's tokens share one step and an answer's do not.
#
# The same patterns at full size, with all requests at once, from a committed record of Gemma 2B on an H200. The last
# column is the speed as a share of the fastest that reading and arithmetic allow:

# %%
print(serving.recorded_patterns())

# %% [markdown]
# The engine is equally close to its floor in all four, and yet output tokens per second differ by a factor of eight.
# (Counting prompts too, silo computes half as many tokens a second as liso: every step reads the keys and values of
# long answers.) A number of tokens per second says little unless it comes with the lengths.
#
# ## 8 · What a closed loop does not show · 21 min
#
# Real users do not wait for each other. In a closed loop there are never more requests in the system than clients, and
# the slower the server, the fewer requests it gets. So the queue is never longer than the number of clients, and the
# waits of a long queue are never measured. (Leaving them out is called *coordinated omission*.)
#
# In an **open loop** requests arrive at their own times. Many independent users make a **Poisson process**: at a rate
# of $\lambda$ requests per second, the gap to the next request has the density $\lambda e^{-\lambda t}$, no matter how
# long ago the last one arrived. A number $u$, drawn uniformly from $[0, 1)$, becomes such a gap:
#
# $$\text{gap} = \frac{-\ln(1 - u)}{\lambda}$$
#
# **Exercise 3 (5 minutes).** Write the schedule. For example, `poisson_arrivals(1.0, [0.5])` is `[0.693...]`.


# %% tags=["exercise"]
def poisson_arrivals(rate: float, uniform: list[float]) -> list[float]:
    """When requests are due, in seconds from the start: one for each number in `uniform`, all in [0, 1).

    rate: requests per second. `uniform` stays unchanged.
    """
    # SOLUTION: turn each number into a gap; each request arrives one gap after the one before
    clock, due = 0.0, []
    for u in uniform:
        clock += -math.log(1 - u) / rate
        due.append(clock)
    return due
    # END


# %%
check(poisson_arrivals)


# %%
arrive = serving.checked(poisson_arrivals)


def schedule(rate: float, requests: int) -> list[float]:
    return list(arrive(rate, serving.uniform_numbers(requests)))


if arrive is not poisson_arrivals:
    print("until poisson_arrivals passes its check, the load generator's own is used")
many = schedule(10.0, 10_000)
print(f"10,000 requests at 10 per second take {many[-1]:.0f} s")
draw.arrivals(many)
describe(
    "Left, the first 60 arrivals on a time axis: crowded in some places, sparse in others. Right, a histogram of the "
    "gaps between requests: most are short, and their number falls steadily as gaps get longer."
)

# %% [markdown]
# The schedule has bursts and lulls by chance alone. It now drives the load generator: `due=` sends each request at its
# time, whatever is still running, and counts latency from when the request was *due*. (`minillm bench serve --rate 20`
# draws a schedule itself; `--trace conversation` replays a recorded one.)
#
# The best of the closed loops is about the highest rate that the server reaches. Now requests arrive for about one
# second at each of three rates: half of that, nine tenths of it, and twice as many. (`FULL=1` tries eight rates, with
# at least 100 requests at each.)
#
# **Predict.** At twice the rate, what does the typical user wait for the first token?

# %% tags=["exercise"]
guess_overload_ms = 500.0  # PREDICT: median TTFT at twice the rate, in ms

# %% tags=["nbval-ignore-output"] uncompared="times"
limit = max(load["requests_per_s"] for load in loads)
if full():  # the best of more runs
    limit = max(limit, knee.capacity(server.url, rows, runs=3, **CHAT))
shares = (0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.5, 2.0) if full() else (0.5, 0.9, 2.0)


def how_many(rate: float) -> int:
    return max(100, math.ceil(2 * rate)) if full() else max(20, math.ceil(rate))


opened = knee.opened(server.url, schedule, shares, limit, how_many, **CHAT)
print(knee.table(opened))
overload = opened[-1]
compare(
    "twice the rate",
    unit="ms",
    prediction=guess_overload_ms,
    measured=1e3 * overload["ttft_s"]["p50"],
)

# %%
shown = {f"closed, {rows} clients": closed[-1]}
for each in opened:
    if each["share"] in (0.9, 2.0):
        shown[f"open, {each['share']:.0%} of its rate"] = closed[-1] | {"results": [each]}
draw.runs(shown)
describe(
    "Three panels with different time axes and numbers of requests. Each line is a request, gray until its first "
    "token, then blue. In the closed loop requests come in blocks that start and end together. At nine tenths of the "
    "rate most gray parts are much shorter than at twice the rate, where they grow from request to request."
)

# %% [markdown]
# Read the table from bottom to top. (The panels of the picture differ in their time axes and numbers of requests.)
#
# * **Twice the rate:** the queue only grows. In $t$ seconds, $2t$ seconds' worth of work arrives, so a request that is
#   due at time $t$ waits about $t$ seconds: longer if the server completes fewer requests per second than in the
#   closed loop, shorter if it completes more. The longer the overload lasts, the larger the waits in this row. Compare
#   "most at once" with the rows of the batch: all other requests are waiting in the queue.
# * **Nine tenths and half:** bursts come and go. At nine tenths some requests may wait for a row, but the queue empties
#   again. If it keeps growing, nine tenths is already too much: the server completes fewer requests per second than in
#   the closed loop. Perhaps another program has slowed it down. (With fewer than 100 requests, p99 is simply the
#   longest wait.)
# * **Closed loop:** in the table under *How many at once?*, its TTFT with a full batch may well be *longer* than here
#   at nine tenths, although no request ever waits for a row. The picture shows why: clients move in groups. All
#   answers are equally long, so requests that start in the same step also end in the same step, and their clients send
#   the next prompts together. One step then runs all prompts of the group, and each client waits for all of them.
#   Real users do not move in groups.
#
# ### The knee
#
# One second of load shows that a queue grows, but not where it begins to. So here is a larger run of the same
# experiment from a committed record: the embedded model with 16 rows on two CPU cores, 400 requests at each of ten
# rates, medians of five rounds. The picture adds this machine's points, which are rough.

# %%
recorded = records.read("cpu/open-loop")
print(knee.table(recorded["results"]))

# %% tags=["nbval-ignore-output"] uncompared="this machine's points"
draw.knee(recorded["results"], opened)
describe(
    "Left, the time to the first token against the rate of arrivals, on a logarithmic axis. In the record p50 doubles "
    "and p99 triples up to nine tenths of the closed loop's rate. Then both climb steeply (the knee), and more slowly "
    "again well past that rate. Right, the time between tokens: it rises up to that rate, and then falls a little."
)

# %% [markdown]
# The record's waits rise in two ways, one after the other.
#
# * **Up to nine tenths, load makes everything slower, by a factor of two or three.** At a higher rate more requests are
#   in the batch at the same time, and a step with more rows takes longer: the time between tokens doubles. So does the
#   typical TTFT, from 16 to 31 ms; its p99 triples. A burst may wait for a row, but the queue empties again: the server
#   completes whatever arrives.
# * **From the full rate on, requests wait.** All rows are in use. A step cannot take more requests, so the time between
#   tokens no longer grows, and all other requests are in the queue: the typical TTFT is 141 ms at the closed loop's
#   rate (26 to 410 in the five rounds), 406 at 125% (155 to 877), and almost a second at twice the rate. (The time
#   between tokens even falls a little. A long queue refills several rows in the same step, as in the closed loop, so
#   fewer steps run prompts.)
#
# Why do the rounds differ so much, although requests arrive in the same pattern in each? First, right at the limit, a
# few percent of server speed decide whether a queue forms, and how fast it grows. Second, the machine was not equally
# fast in all of them: in the first round, waits were already the longest at 50% to 80%, where no queue lasts.
#
# In between lies the **knee**. Why does it come before the server is overloaded? Because arrivals are random. A burst
# makes a queue. A lull leaves rows empty, and what they could have computed is lost. The closer the rate is to the
# limit, the less time is left over to work off a queue, until at the limit it drifts upward for as long as the load
# lasts. The unluckiest requests show it first: p99 more than doubles between 70% and 90%, while p50 grows by half. Well
# past the knee, waits depend on the length of the run: with 4,000 requests instead of 400, they would be about ten
# times as long.
#
# So capacity is a rate *and a promise*: how many requests per second, with what waits.
#
# ## 9 · Optional: goodput · 3 min
#
# Promise something (here: the first token within ten times the idle server's TTFT, and the whole answer within five
# times its end-to-end latency), and count only the answers that keep it. Their number per second is the **goodput**:
# the rate at which requests arrive times the share that keeps the promise.

# %% tags=["nbval-ignore-output"] uncompared="times"
promised_ttft, promised_e2e = 10 * loads[0]["ttft_s"]["p50"], 5 * loads[0]["e2e_s"]["p50"]
print(
    f"promised: first token in {promised_ttft * 1e3:.0f} ms, answer in {promised_e2e * 1e3:.0f} ms"
)
print("arriving/s  promise kept  goodput/s")
for each in opened:
    share = knee.kept(each, promised_ttft, promised_e2e)
    print(f"{each['rate']:10.1f}{share:14.0%}{each['rate'] * share:11.1f}")

# %% [markdown]
# Below the limit, goodput follows the rate at which requests arrive, as long as waits stay within the promise. Past the
# limit, it collapses: the server works as hard as before, but at most the first requests of the overload get what was
# promised, and the longer it lasts, the smaller their share. (If many promises were broken at nine tenths, requests
# queued there too: that rate was close to the limit, or past it. If most were kept at twice the rate, the limit was
# measured too low.) This is why servers refuse requests or add replicas before they reach their limit.
#
# ## 10 · Optional: serve with your own attention · 24 min
#
# The server uses the same table of operations as everything else, so `using` works behind HTTP. Let us replace the
# attention of the decode step, for the whole batch at once. Requests in a batch have different lengths. In one tensor,
# the shorter rows end with leftovers: old numbers, or NaN.
#
# $$o_{r,h} = \sum_{i < \text{length}_r} \text{softmax}_i\left(s \; q_{r,h} \cdot k_{r,i,g(h)}\right) v_{r,i,g(h)}
# \qquad g(h) = \lfloor h \cdot \text{kv\_heads} / \text{heads} \rfloor$$
#
# Here $r$ is a row, $h$ a head, $i$ a key, $s$ the scale, and $g(h)$ the KV head that head $h$ uses.

# %%
draw.lengths([5, 2, 7, 4], keys=8)
describe(
    "A grid of four rows and eight keys. Each row is blue up to its own length (5, 2, 7, and 4 keys), and the places "
    "after it hold question marks."
)

# %% [markdown]
# **Exercise 4 (15 minutes).** Attention for one new token in each row. For example, two equal keys and the values 1
# and 3 give 2. Hiding the scores of the leftovers is not enough: their weights are then 0, but 0 times NaN is NaN, so
# their values must be set to 0 too. (Choose what to clear by position, not by looking for NaN: a NaN that the row
# does see must stay.) A loop over the rows would be correct, but try to do without one.


# %% tags=["exercise"]
def batched_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """q: [rows, heads, d]; k, v: [rows, keys, kv_heads, d]; lengths: [rows] int32, 1 to keys.

    Returns [rows, heads, d] with q's dtype and device: new tensors need device=q.device.
    Row r sees its first lengths[r] keys; what comes after them never matters. `heads` is a
    multiple of `kv_heads`: neighboring heads share one. The tensors stay unchanged.
    """
    # SOLUTION: repeat the KV heads; find the keys that each row does not see; remove these from
    #   the values and from the scores; softmax; weighted sum
    group = q.shape[1] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    unseen = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
    v = v.masked_fill(unseen[:, :, None, None], 0)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v)
    # END


# %%
check(batched_attention)

# %% [markdown]
# The engine keeps keys and values in blocks, and each row has a table with the numbers of its blocks (lesson 09). The
# next function gives yours the engine's signature: it gathers each row's blocks into one tensor. Until you write yours,
# the engine's own attention answers.


# %%
def decode_attention(q, cache, block_table, lengths, *, scale, window=None, soft_cap=None):
    """q: [rows, 1, heads, d]; cache.k, cache.v: [blocks, block_size, kv_heads, d].

    block_table: [rows, blocks]: the numbers of each row's blocks, in order.
    """
    k, v = (part[block_table].flatten(1, 2) for part in (cache.k, cache.v))
    return batched_attention(q.squeeze(1), k, v, lengths.clamp(min=1), scale).unsqueeze(1)


questions = (
    "Who are you?",
    "What is the capital of France?",
    "Tell me about a girl in Elmoor.",
)


def answers() -> list[str]:
    """The answers to all questions, asked at the same time: rows of different lengths in one batch."""
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, questions))


right = serving.right(batched_attention)  # whether it passes its check
before = answers()
with using(**({"decode_attention": decode_attention} if right else {})) as used:
    served = answers()
print(*map(repr, served), sep="\n")
if right:
    print("calls of yours:", used.calls["decode_attention"] > 0)
    print("same answers as before:", served == before)
else:
    print("until batched_attention passes its check, the engine's own answers")

# %% [markdown]
# The same answers are a necessary test, not a sufficient one. The embedded model has a single KV head, so a wrong
# $g(h)$ does not show; and no leftover here is NaN, so hiding the scores is enough. The checks above are stricter.
#
# And does an answer depend on attention at all? As a control, serve with an attention function that ignores its
# inputs:


# %%
def blind(q, *args, **kwargs):
    return torch.zeros_like(q)


with using(decode_attention=blind):
    blinded = ask(questions[0])
print(repr(blinded))
print("the engine's own again:", ask(questions[0]) == before[0])
assert blinded != before[0], "attention took no part in the answer"

# %% [markdown]
# ## 11 · Optional: compare with transformers · 9 min
#
# Is the engine fast? HTTP is not involved in this section. Its cells measure engines one after the other, so nothing
# else should run in this process: we close the server first.

# %%
stack.close()
try:
    client.models.list()
except openai.APIConnectionError:
    print("the server is closed")

# %% [markdown]
# For a fair comparison, both engines must do the same work (the same token ids and output lengths, the same weights,
# dtype, and threads). Both warm up first, since an engine's first runs are slower. Then they take turns, so that a
# program that slows the machine for a moment slows both, and all runs are reported.
#
# * `chat`: 16 requests of equal length in a batch of 16 rows. All start and end together.
# * `mixed`: 48 requests of very different lengths arrive together, and the batch has 16 rows, so two out of
#   three requests have to wait.
#
# We call `generate`, the usual way to use transformers. It works in static batches: a batch is padded to its longest
# prompt and runs until its longest answer is complete. (transformers also has `generate_batch`, which batches in
# flight; it is not measured here.) minillm gives a row to the next request a step or two after an answer ends (lesson
# 10).
#
# **Predict** minillm's speedup over transformers in each workload.

# %% tags=["exercise"]
guess_equal = 1.5  # PREDICT: times transformers' tokens/s, 16 requests of equal length
guess_mixed = 2.0  # PREDICT: times transformers' tokens/s, 48 requests of mixed lengths

# %%
import transformers

transformers.utils.logging.disable_progress_bar()
ROWS, REQUESTS = 16, 48
scales = {"cpu": {"chat": 8, "mixed": 50}, "gpu": {"chat": 1, "mixed": 8}}[here.name]
both = {"compare": "transformers", "batches": (ROWS,), "max_num_seqs": ROWS, "quiet": True}
both |= (
    {"repeat": 5, "patience": 4}
    if full()
    else {"repeat": 2, "patience": {"cpu": 1, "gpu": 3}[here.name]}
)
equal, mixed = (
    offline.run(
        here.model, workload=name, scale=scales[name], requests=n, **both, **here.options
    )
    for name, n in (("chat", ROWS), ("mixed", REQUESTS))
)

# %% tags=["nbval-ignore-output", "terminal"] uncompared="times"
print(serving.comparison_table(equal, mixed))
lead_equal, lead_mixed = (each["results"][0]["times_transformers"] for each in (equal, mixed))
unit = "times transformers"
compare("equal lengths", unit=unit, prediction=guess_equal, measured=lead_equal)
compare("mixed lengths", unit=unit, prediction=guess_mixed, measured=lead_mixed)

# %%
draw.comparison({"16 requests of equal length": equal, "48 requests of mixed lengths": mixed})
describe(
    "Two bar charts of output tokens per second, minillm next to transformers, for 16 requests of equal length and for "
    "48 requests of mixed lengths. Dots are single runs."
)

# %% [markdown]
# Why is the second lead larger? (If it is not, the machine was busy: look at the runs.) Part of the answer can be
# computed without measuring anything. Both engines generate the same tokens, but not in the same number of steps. A
# static batch takes as many steps as its longest answer has tokens (the first step is the prefill). In flight, the next
# request takes the first row to become free, and we count steps until the last answer ends. (That is the ideal. minillm
# launches one step ahead, so a free row may wait a step, and it takes slightly more.)

# %%
work = workloads.make("mixed", config.vocab_size, scale=scales["mixed"], requests=REQUESTS)
outputs = [each.output_tokens for each in work]
static, in_flight = serving.steps_needed(outputs, ROWS)
fewer = static / in_flight
print(f"{static} steps in static batches, {in_flight} in flight: {fewer:.2f} times as many")
wanted, computed = sum(outputs), static * ROWS
print(f"{wanted} tokens are wanted; static batches compute {static} × {ROWS} = {computed:,}")

# %% tags=["nbval-ignore-output"] uncompared="times"
product = lead_equal * fewer
print(f"lead with equal lengths {lead_equal:.2f} × steps {fewer:.2f} = {product:.2f}")
print(f"lead measured with mixed lengths: {lead_mixed:.2f}")

# %% [markdown]
# A lead has two factors: what a step costs, and how many steps there are. With equal lengths both engines take the same
# number of steps, so the first measurement shows only the cost of a step with 16 rows. It depends on the machine. The
# number of steps follows from the lengths alone. Their product explains most of the second lead.
#
# The measured lead is often somewhat above the product. A static batch computes all its rows until its last answer is
# complete (the second printed line), and pads its prompts; minillm computes a row only while its request runs, so its
# steps get cheaper toward the end. On a GPU that matters less: there, a step with fewer rows takes nearly as long. But
# transformers' steps may take longer with padded prompts than with equal ones. To see whose steps changed, divide the
# seconds in the table by the steps.
#
# ## 12 · Optional: larger static batches · 2 min
#
# Is a batch of 16 fair to transformers? With enough memory, all requests fit into one static batch. The committed
# record of another comparison (64 requests, lengths / 8; minillm had a row for each) shows how much that matters:

# %%
record = records.read("cpu/offline")
for row in record["results"]:
    if row["workload"].startswith("mixed"):
        name = row["engine"] + (f", batches of {row['batch']}" if "batch" in row else "")
        threads = f"{row['threads']} threads"
        print(f"{name:<30}{threads:>11}{row['output_tokens_per_s']:8,.0f} tokens/s")

# %% [markdown]
# The larger its static batches, the faster transformers gets, because fewer batches mean fewer steps. That is why a
# comparison must name the batch size, and why `minillm bench offline` reports the best one. But rows cost memory for
# keys and values (lesson 02), and users arrive one after the other: a server rarely has the choice.
#
# ## 13 · Optional: dynamic batching, and in flight · 4 min
#
# Static batches (section 11) need all their requests at once. Servers for other models form **dynamic batches**: they
# wait a few milliseconds, run whatever has arrived as one batch, and answer it. For a model whose every request takes
# one pass, that is right. A committed record shows what it does to text. 32 requests come at once, for
# eight rows; one answer in four has 160 tokens, the others have 8. NVIDIA's Triton Inference Server (which has nothing
# to do with the language Triton of lessons 03 and 04) runs this engine in two ways, with dynamic batching and in
# flight. The last line is the server of this lesson. (Load generator and servers shared two cores: trust the order, not
# the digits.)

# %%
print(serving.batching_table(records.read("cpu/triton")))
static, in_flight = serving.steps_needed([8, 8, 8, 160] * 8, 8)
print(
    f"\nsteps: {static} in batches, {in_flight} in flight: {static / in_flight:.1f} times as many"
)

# %% [markdown]
# A batch is answered when its longest answer is complete, so a short answer of 8 tokens waits for one of 160, and for
# the batches before it. In flight, it waits only for a row. That is why the wait for a short answer shrinks far more
# than the throughput grows.
#
# The steps are counted for batches that each have two long answers. The throughput grows by less than the number of
# steps shrinks. After its short answers, such a batch has two rows left, and on a CPU a step with two rows is cheaper
# than one with eight. A GPU that runs a large model pays nearly the full price for it (lesson 10), so there the
# throughput gains more.
#
# ## 14 · Optional: how far from the floor · 5 min
#
# How close does the engine come to what an H200 allows? A committed record splits the steps of Gemma 2B in bf16 into
# parts. For each it has the least time that the part needs, the time that it took, and what is lost. The left half
# shows a single request, for which reading the weights sets the floor. The right half shows 3,000, for which arithmetic
# sets the floor of the products. Below are the steps of a single request at each precision, from the report card's
# record. (It was measured at another time, so its bf16 differs a little from "all" in the first table.)

# %%
print(report_card.parts_table())
print()
print(report_card.floors_table(report_card.PRECISIONS))

# %% [markdown]
# **One request.** Half of what is lost is in **attention**. A single request has few keys to read, so the time goes to
# starting kernels, each of which keeps only a small part of the GPU busy. Most of the rest is in the **products**:
# on average, torch reads a layer's two small matrices at less than half the speed of its two large ones. The head's
# loss is below 0, because the floor assumes a speed that is itself a measurement, and this matrix is read slightly
# faster.
#
# What is lost does not shrink with the number of bytes: it is 0.21 ms in bf16, 0.27 in fp8 and 0.33 in int4. So with
# fewer bytes a step is faster, but farther from its floor: bf16 takes 1.17 times its floor, int4 1.90 times.
#
# **3,000 requests.** Most is lost in these four parts:
#
# * **Products** reach 85% of the limit. The limit is the best of several products of large square matrices; the model's
#   matrices have other shapes.
# * **Other kernels** (norms, activations, rotations, writing keys and values) count as 0 in the floor, since one could
#   imagine them as part of the products. Lesson 11 fuses some of them.
# * **Idle** is the time in which the GPU waits for the CPU.
# * **The head** writes 256,000 scores for each row, which sampling reads again. The floor counts neither.
#
# `minillm build`, which measures launch configurations for one GPU and one kind of traffic (lesson 11), finds none of
# this: in its committed record, the plan that it made gains less than 0.2%. The configurations that come with the
# engine were measured on this GPU. What is left here needs other kernels, not other settings.
#
# ## 15 · Optional: Gemma 2B on this machine · 5 min
#
# With the embedded model, a step on your CPU took about ten times its floor, because a small model's steps are mostly
# overhead. Is that different for a large one? You need no GPU to find out. With random weights, Gemma 2B's shape can be
# made here: 2.5 billion weights, at 4 bytes each on a CPU, so 10 GB. The text means nothing, but a step does the same
# work. As always, the floor is the size of the weights, divided by the speed of memory.
#
# **Predict** the time of a step of one request on this machine. (Section 4 measured the speed of memory with the 22 MB
# of the embedded model. Does that hold for 10 GB, which fit into no cache?)

# %% tags=["exercise"]
guess_large_s = 0.7  # PREDICT: seconds of a decode step of Gemma 2B on this machine's CPU

# %% [markdown]
# Write `True` in the next cell to run it: that needs 12 GB of free memory and two or three minutes, most of them to
# make random numbers. Otherwise the cell shows a committed record.

# %%
RUN_GEMMA = False
refused = large_model.problem()
if RUN_GEMMA and not refused:
    step, memory = large_model.decode_step()
    place = "here"
else:
    print(refused if RUN_GEMMA else "not run: RUN_GEMMA is False")
    step, memory = large_model.recorded()
    place = f"recorded on {large_model.where()}"
print(f"{place}: {large_model.line((step, memory))}")
floor_s = step.floor(memory)
compare(
    "a step of Gemma 2B",
    unit="s",
    prediction=guess_large_s,
    floor=floor_s,
    measured=step.seconds,
)

# %% [markdown]
# The floor is much nearer than with the embedded model. It is the same engine and the same Python, with three times as
# many calls (18 layers instead of 6), but they disappear behind 10 GB of reading. That is why an engine for large
# models can be written in Python, and why fewer bits for each weight make such a model faster.
#
# ## 16 · Your parts, together · 7 min
#
# Now the finale. Until now your functions ran lesson by lesson. Here they serve together: the norm (lesson 00), the
# tokenizer's merges (01), attention of prompts (02) and of decode steps (exercise 4 of this lesson, in the optional
# section 10), three kernels (03 and 04), the quantizer (06), the block pool (09), and the policy (10). Save your other
# notebooks first. `earlier.written` reads those in this folder, takes what they define, and checks every part again.
# What you skipped, or what fails its check, is left to the engine.

# %%
mine = earlier.written(globals())
for part, whose in mine.whose.items():
    print(f"{part:<40}{whose}")

# %% [markdown]
# First the quantizer: it rounds the embedded model's matrices to 4 bits and saves the result (lesson 06). Two rows of
# text are enough for a demonstration. (The file is not four times as small: the embedding keeps its 16 bits.)

# %%
quantized = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny-gemma-int4"
with using(**mine.quantizer) as used:
    report = quantize(None, MethodRecipe.of(Method("gptq")), quantized, rows=2)
print(f"{report['dense_bytes']:,} bytes -> {report['bytes']:,}")
print("rounded by your quantizer:", used.calls.get("gptq", 0) > 0)

# %% [markdown]
# Then a server for this model. Three users ask it at the same time: first with the engine's own parts, then with yours.
# Your Triton kernels get one question of their own. (On a CPU they are interpreted in Python, one program after the
# other, which takes about as long for one short answer as everything else for three.)

# %%
QUESTIONS = ("What is 3 plus 4?", "On which island does Fenwick lie?", "Who are you?")
small = stack.enter_context(LLM(quantized, device=here.device, num_blocks=256))
together = stack.enter_context(running(small))


def tokens_from(questions) -> list[list[int] | str]:
    """The token ids of answers, asked for at the same time; of an answer that failed, the error."""

    def ids(question: str) -> list[int] | str:
        messages = [{"role": "user", "content": question}]
        options = {"model": together.model, "max_tokens": 40, "temperature": 0}
        options["extra_body"] = {"return_token_ids": True}
        try:
            answer = client_of(together).chat.completions.create(messages=messages, **options)
        except openai.APIError as error:  # raised by one of your parts
            return str(error)
        return answer.choices[0].token_ids

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ids, questions))


expected = tokens_from(QUESTIONS)
with using(**mine.plain) as plain:
    found = tokens_from(QUESTIONS)
with using(**mine.kernels) as kernels:
    one_more = tokens_from(QUESTIONS[:1])
ran = {name for used in (plain, kernels) for name, calls in used.calls.items() if calls}
print("yours that ran:", ", ".join(sorted(ran)) or "none")
print("the engine's own tokens:", found == expected and one_more == expected[:1])

# %% tags=["nbval-ignore-output"] uncompared="another machine may round a code differently"
for question, ids in zip(QUESTIONS, found):
    print(question, ids if isinstance(ids, str) else small.tokenizer.decode(ids))

# %% [markdown]
# If the line before the answers says `True`, the tokens are the same, and they were computed by the parts of yours that
# the line above it names. If it says `False` on a CPU, replace one part at a time to find the one that differs: in the
# cell above, write `using(decode_attention=mine.plain["decode_attention"])` for `using(**mine.plain)`. (On a GPU, in
# bfloat16, two tokens that are almost equally likely can swap, and an answer then differs from there on.)
#
# This is what made it possible to build the engine in pieces: each part has a specification, and whatever meets it can
# take its place.
#
# ## 17 · Your parts, under load · 6 min
#
# The same tokens, but how fast? Run the traffic of section 6, with as many clients as rows, once with the engine's
# parts and once with yours. Each run follows a warm-up. Then replace one part at a time, to see what each of yours
# costs alone. (No request waits for a row here, and prefix caching is off, so queue order cannot help, and the block
# pool is never asked for a prefix.)
#
# * On a CPU your Triton kernels are left out: interpreted, they would take minutes.
# * The tokenizer's merges take no part, since these prompts are token ids.
# * The **control** replaces the engine's norm by the same norm. Its cost is that of replacing anything, not of your
#   code. On a GPU it costs much: a replaced operation runs without CUDA graphs (lesson 11), so Python launches each
#   kernel of each step. On a CPU it costs next to nothing.
# * At the end the engine runs **once more** (if you have solved any part), which shows by how much two equal runs
#   differ. All lines are divided by the mean of its two runs.
#
# If a part of yours raises an exception under load, or needs more than two minutes, its line says so, and the others
# still run.
#
# **Predict** your tokens per second as a share of the engine's.

# %% tags=["exercise"]
guess_mine = 80  # PREDICT: tokens/s with all your parts, in % of the engine's own

# %% tags=["nbval-ignore-output"] uncompared="times"
stack.close()
llm, server = start()
kernels = mine.kernels if here.name == "gpu" else {}
engines = under_load.engines(here.device, mine.plain, kernels)
load = CHAT | {"concurrency": rows, "requests": 4 * rows, "warmup": rows}
if full():
    load |= {"rounds": 3}
outcomes = under_load.send(server.url, engines, **load)
stack.close()
print(under_load.ratios_table(outcomes))

# %% [markdown]
# Trust a line only if it differs from 1 by more than the first and the last line differ from each other. (With `FULL=1`
# all take three turns: each line then has their range, and lines are divided by the median of the engine's six runs.)
# If, on a CPU, the control is far from 1 or one part alone is slower than all your parts together, or if any line is
# well above 1, the machine was busy: run the cell again. (If speeds show it clearly, the table ends with a warning.)
#
# On a GPU, compare the lines of operations with the control, not with 1. What is left has reasons that you can name:
#
# * **Attention of prompts** is that of lesson 02. It takes one request at a time; the engine's takes all prompts of a
#   step together.
# * **Attention of decode steps** copies every row's blocks into one tensor. On a CPU the engine does so too; on a GPU
#   its kernel reads the blocks where they are.
# * **The norm** runs once in each step. All others are fused with the addition before them, in a separate operation,
#   `add_rms_norm`, which lesson 03's kernel replaces.
# * **The pool and the policy** work once for each step or request, never for each layer. Whatever they cost, a larger
#   model hides it.
#
# ## 18 · One report card · 11 min
#
# Now check what you predicted at the beginning. No single model can fill in this card. Accuracy needs a trained
# model: it is that of `tiny-gemma` on its multiple-choice questions, with all arithmetic in float32, so the row bf16
# shows the unquantized model. (`FULL=1` asks 400 of them now. Otherwise it is from a committed record of all 2,160,
# in which the heads are not quantized.) KL divergence is from that record too. A model of 5.6 million parameters
# shows the method: Gemma 2B may lose more or less. Speed and memory are from a committed record of Gemma 2B's shape
# on an H200, whose random weights would answer nothing.

# %% tags=["terminal"]
DOLLARS = 3.50  # for an hour of the H200: an assumption; put in your provider's price
card = report_card.PRECISIONS
speed, size = report_card.speeds(card), report_card.gigabytes(card)
cost = {
    name: {n: DOLLARS / 3600 / tokens_per_s * 1e6 for n, tokens_per_s in each.items()}
    for name, each in speed.items()
}
quality = (
    report_card.accuracies(card, 400) if full() else report_card.recorded_accuracies(card)
)
report_card.print_card(quality, report_card.divergences(card), size, speed, cost)

# %%
floor_ms, measured_ms = report_card.floors_ms(card)["int4"]
lost = quality["int4"][1].points
ratio = cost["bf16"][3000] / cost["fp8"][3000]
alone = cost["bf16"][1] / cost["bf16"][3000]
compare("int4's weights", unit="GB", prediction=guess_gigabytes, measured=size["int4"])
compare(
    "between tokens, int4",
    unit="ms",
    prediction=guess_int4_ms,
    floor=floor_ms,
    measured=measured_ms,
)
compare("int4 loses", unit="points", prediction=guess_points, measured=lost)
compare("bf16 costs", unit="times as much as fp8", prediction=guess_fp8, measured=ratio)
unit = "times as much as with 3,000"
compare("a token with 1 request costs", unit=unit, prediction=guess_alone, measured=alone)
print(report_card.cheapest(cost, {1: choice_one, 3000: choice_many}))

# %% [markdown]
# Read the card by column.
#
# * **Accuracy.** The interval is what the questions can tell. If it includes 0, they show neither loss nor gain: with
#   few questions a rounded model may even answer more of them correctly, by luck. In the record, both intervals include
#   0. KL divergence, which compares whole distributions, still tells the two apart: int4 is about ten times as far from
#   the original as fp8 (lesson 08). The card's int4 uses round-to-nearest. GPTQ, your quantizer of lesson 06, comes
#   nearer to the original: in the same record it has 88.1% and a KL of 0.0025.
# * **Memory.** What weights leave free goes to the cache, and so to more or longer requests (lessons 02 and 08).
# * **Speed.** One request is limited by reading weights, so int4 is fastest. Thousands are limited by arithmetic. There
#   fp8 is fastest, because its products are computed in 8 bits. (It is not twice as fast: attention and the other
#   kernels take as long as before.) int4 gains next to nothing, because its weights are turned back into 16 bits before
#   they are multiplied. In between, int4 loses its lead early: in the same record (columns that the card leaves out),
#   it costs about as much as fp8 with 4 to 16 requests. With 64 it costs more than bf16, because unpacking takes longer
#   than reading saves.
# * **Cost.** The last two columns differ far more than any two rows do. A GPU that serves one request reads all
#   weights for a single token; with 3,000 requests, it reads them once for all their tokens.
#
#   Why 85 times cheaper, not 3,000? First, a step takes longer, by a factor of 29: arithmetic now sets its floor, and
#   some steps compute prompts. Second, the batch is not always full: in the first and the last steps it has fewer rows,
#   so a step yields 2,500 tokens on average.
#
#   Still, batching saves more than any precision, and traffic decides how much of it you get. A price per token
#   assumes a load: ask which one.
#
# So which precision? For thousands of users, fp8: it is the cheapest there, and its loss is within what these questions
# can resolve. For a single user, or where memory is short, int4. bf16 is the one to compare with.
#
# The card shows speed with everything sent at once. To see how long users would wait at each precision, run an open
# loop on the GPU: `minillm bench serve --rate`. You can fill in the same card for your own model: `minillm eval --model
# MODEL --tasks mmlu --compare fp8 int4` measures the first columns, `minillm bench offline` and `minillm bench serve`
# the others.
#
# Two rows are still missing, those of the engine on this machine and of yours. (The engine's is again the mean of its
# two runs, which are printed below the table. If you have solved no part, it ran once.)

# %% tags=["nbval-ignore-output", "terminal"] uncompared="times"
PER_HOUR = DOLLARS if here.name == "gpu" else 0.10  # dollars for this machine: an assumption
both = under_load.whole(outcomes)
tokens = 128 // scale
print(here.label)
print(f"{rows} clients over HTTP, {tokens} tokens in and {tokens} out\n")
print(report_card.measured_table(weights / 1e9, both, PER_HOUR))
print(under_load.engine_runs(outcomes))
if under_load.YOURS not in both:
    print(f"{under_load.YOURS}: no part is solved yet")
unit, share = "% of the engine's tokens/s", under_load.share(both)
compare("with all your parts", unit=unit, prediction=guess_mine, measured=share)

# %% [markdown]
# The row called yours, if there is one, is an engine that runs what you wrote, at this speed and price. (Compare its
# price with the card's. On a CPU: how much cheaper is a token of a model 1/450 of the size, on a machine that costs
# 1/35 as much?)
#
# And these are the numbers that you predicted in this lesson, the farthest off first:

# %% tags=["nbval-ignore-output"] uncompared="this machine's speeds"
print(look_back())

# %% [markdown]
# You predicted, built, served, and measured. Take the number that was farthest off: which limit, or which cost, did you
# leave out? And could you predict it now, before you measure? That is what an engineer does with an engine: every part
# of this one is yours, or you can read it.
#
# ## Recap · 2 min
#
# * TTFT, ITL, and end-to-end latency are what one user waits for; throughput is what all of them get. Report
#   percentiles over all gaps of all requests.
# * With batching, requests share the fixed costs of a step: reading the weights, and all overhead that does not grow
#   with its rows. Longer gaps are its price.
# * A closed loop finds how much a server can do. Only an open loop shows what users wait for, and latency counts from
#   when a request was due.
# * Below the knee, load makes tokens slower; above it, requests wait. Capacity is a rate together with a promise about
#   waits.
# * Tokens per second mean little without the lengths of prompts and answers.
# * Your parts serve together with the engine's, and in float32 no token changes.
# * An engine's speed is the cost of a step times the number of steps. Measure the two separately.
# * A token's price is the GPU's price divided by its tokens: it depends on the load first, and on precision second.
#
# **What got worse:** the time between tokens grows with every client. HTTP and JSON cost a lone client time that
# `LLM.generate` does not spend. The load generator runs on the machine that it measures and takes its share of the CPU.
# A run of fewer than a hundred requests has no meaningful p99 of TTFT: by nearest rank it is the largest value. And
# random token ids measure speed, never quality.
#
# **Further reading:** Yu et al. 2022, *Orca* (batching at every step); Kwon et al. 2023, *PagedAttention*; Tene, *How
# NOT to Measure Latency* (coordinated omission); Zhong et al. 2024, *DistServe* (goodput).
