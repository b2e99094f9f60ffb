# %% [markdown]
# # 99 · Serve and benchmark
#
# Afterwards you can start an inference server and talk to it as any OpenAI client does; say of one request, and of
# thousands, what its users waited for; load a server in the two ways that give two different answers, and know which
# to believe; serve with an attention that you wrote, and say what it costs; and compare two engines fairly.
#
# **70 minutes. Needs:** a CPU, and lessons 00 and 02. The model comes with the project; nothing is downloaded. On a GPU
# the same cells run Gemma 2B. Every time below was measured on the machine that ran this notebook last: run it, and
# the times are yours.

# %%
import math
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import matplotlib.pyplot as plt
import openai
import torch

from minillm import LLM, using
from minillm.bench import offline, plots, roofline, serve
from minillm.course import NotSolvedYet, adapters, check, compare, full, tier, yours
from minillm.server import running

# %% [markdown]
# ## Start the server
#
# In a terminal that is `minillm serve`. Here the engine runs in the notebook's own process, so that what you change in
# a cell changes what is served; HTTP is spoken by processes of its own. `ExitStack` keeps it open until we close it.
# The batch has a fixed number of places: who comes when all are taken waits in a queue. On a CPU one process for HTTP
# is enough; beside a GPU it can be what limits the server, so there are up to four, as far as there are cores.

# %%
here = tier()
places = {"cpu": 16, "gpu": 128}[here.name]
llm = LLM(here.model, max_num_seqs=places, enable_prefix_caching=False, **here.options)
llm.warm_up()  # on a GPU: compile kernels and record graphs now, not under the first clients
stack = ExitStack()
workers = {"cpu": 1, "gpu": min(4, max(1, os.cpu_count() - 2))}[here.name]
server = stack.enter_context(running(llm, workers=workers))
config, model = llm.model_config, llm.engine.model
print(f"{here.label}: {model.num_parameters / 1e6:,.1f} million parameters")
print(f"{model.nbytes / 1e6:,.1f} MB of weights; {places} places in the batch")

# %% [markdown]
# Prefix caching is off because we are going to send the same prompts again and again: with it, all but the first would
# be measured without their prefill.
#
# ## Talk to it
#
# The server speaks OpenAI's protocol, so their client works as it is: only its address is another. It is told not to
# try again when something fails, because what we want to see is what one request gets.


# %%
def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="not needed here", max_retries=0)


client = client_of(server)


def ask(question: str, server=server) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client_of(server).chat.completions.create(
        model=server.model, messages=messages, max_tokens=40, temperature=0
    )
    return answer.choices[0].message.content


for question in ("Who are you?", "On which island does Fenwick lie?", "What is 3 plus 4?"):
    print(f"{question} {ask(question)}")

# %% [markdown]
# A reader should not wait for the last token to see the first. With `stream=True` every piece of text is sent as soon
# as its characters are complete.

# %%
story = {
    "model": server.model,
    "prompt": "Once upon a time there was a",
    "max_tokens": 40,
    "temperature": 0,
}
whole = client.completions.create(**story).choices[0].text
pieces = [chunk.choices[0].text for chunk in client.completions.create(**story, stream=True)]
print(story["prompt"] + whole)
print(f"\nin pieces, the same text: {''.join(pieces) == whole}")

# %% [markdown]
# ## What a user waits for
#
# We note when each piece of one answer comes. `return_token_ids` is an addition of this server (and of vLLM): it says
# how many tokens came, even where they make no text.


# %%
def listen(prompt: list[int], max_tokens: int) -> tuple[float, list[tuple[float, int]]]:
    """Send one request. (When it was sent, [(when something came, tokens that came with it)])."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens}
    extra = {"ignore_eos": True, "return_token_ids": True}
    due, arrivals = time.perf_counter(), []
    for chunk in client.completions.create(**body, stream=True, extra_body=extra):
        if chunk.choices and (tokens := len(chunk.choices[0].token_ids)):
            arrivals.append((time.perf_counter(), tokens))
    return due, arrivals


def draw_prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids: for speed it does not matter what a prompt says."""
    return random.Random(seed).choices(range(10, config.vocab_size), k=tokens)


_ = listen(draw_prompt(300, seed=0), 4)  # the first of its kind pays for what is set up once
due, arrivals = listen(draw_prompt(300, seed=1), 16)
print(f"{sum(tokens for _, tokens in arrivals)} tokens came")

# %% [markdown]
# This is that request. Four words are all there is to the language of serving:
#
# * **TTFT**, time to first token: queueing, prefill and one step. The reader looks at an empty screen.
# * **ITL**, inter-token latency: each gap between a token and the one before it. Too long, and the text crawls.
# * **end-to-end**: to the last token. What a program that needs the whole answer waits for.
# * **throughput**: what the server gets done for everyone, in requests or output tokens a second. It is nobody's wait,
#   and it is what the hardware costs are divided by.


# %%
def draw_request(axis, due: float, arrivals: list[tuple[float, int]]) -> None:
    """One request from when it was due to its last token, with its waits named."""
    at = [(when - due) * 1e3 for when, _ in arrivals]

    def span(start: float, end: float, height: float, text: str) -> None:
        axis.annotate(
            "",
            (start, height),
            (end, height),
            arrowprops={"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0},
        )
        axis.text((start + end) / 2, height + 0.08, text, ha="center")

    axis.plot([0, at[-1]], [0, 0], color="gray", lw=1)
    axis.plot(0, 0, "k>", markersize=9)
    axis.vlines(at, -0.25, 0.25, color="tab:blue", lw=2)
    span(0, at[0], 0.45, "TTFT")
    widest = max(range(1, len(at)), key=lambda i: at[i] - at[i - 1])
    start, end = at[widest - 1], at[widest]
    axis.fill_between([start, end], -0.25, 0.25, color="tab:red", alpha=0.3, lw=0)
    text = f"the longest ITL: {end - start:.1f} ms"
    axis.annotate(
        text,
        ((start + end) / 2, 0.25),
        (0, 24),
        textcoords="offset points",
        ha="center",
        color="tab:red",
        arrowprops={"arrowstyle": "->", "color": "tab:red"},
    )
    rate = sum(tokens for _, tokens in arrivals) / at[-1] * 1e3
    span(0, at[-1], -0.75, f"end-to-end; throughput, with this one user: {rate:.0f} tokens/s")
    axis.set(
        ylim=(-1, 1.1),
        yticks=[],
        xlabel="milliseconds since the request was due; a blue line is a token",
    )
    axis.spines[["top", "left", "right"]].set_visible(False)


figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
draw_request(axis, due, arrivals)
plt.show()

# %% [markdown]
# **Exercise 1.** Compute them. A server may send several tokens at once: they are as many tokens, but the reader
# waited only once. With $t_i$ the time of token $i$, counting every token:
#
# $$\text{TTFT} = t_1 - \text{due} \qquad \text{gap}_i = t_i - t_{i-1},\ i \ge 2 \qquad
# \text{end-to-end} = t_n - \text{due}$$
#
# For example `timings(0.0, [(0.5, 1), (0.75, 1)])` is `(0.5, [0.25], 0.75)`.


# %% tags=["exercise"]
def timings(due: float, arrivals: list[tuple[float, int]]) -> tuple[float, list[float], float]:
    """(TTFT, gaps, end-to-end) of one request, in seconds.

    due: when it should have been sent. arrivals: (time, tokens that came then), in order.
    Of n tokens there are n - 1 gaps.
    """
    # SOLUTION: write every token's time into a list, as often as tokens came then; take differences
    times = [when for when, tokens in arrivals for _ in range(tokens)]
    gaps = [late - early for early, late in pairwise(times)]
    return times[0] - due, gaps, times[-1] - due
    # END


# %%
check(timings)


# %% [markdown]
# Beside it the load generator's own, on the request of the picture. The gaps and TTFT add up to end-to-end: nothing
# is lost.


# %%
def engines_timings(due, arrivals):
    seen = serve.Measured(due=due, arrivals=arrivals, end=arrivals[-1][0])
    return seen.ttft, list(seen.gaps), seen.e2e


measure = yours(timings, engines_timings)
ttft, gaps, e2e = measure(due, arrivals)
print("as the load generator:", (ttft, gaps, e2e) == engines_timings(due, arrivals))
print("TTFT and gaps make end-to-end:", math.isclose(ttft + sum(gaps), e2e))

# %% [markdown]
# ## Predict, then measure
#
# A lone request makes one token a step, and every step reads all weights: with the machine's bandwidth that is a floor
# (lesson 00). Here, HTTP, JSON and a client that shares this process come on top. What do you expect?

# %% tags=["exercise"]
guess_itl_ms = 3.0  # PREDICT: milliseconds between two tokens of a lone request
guess_ttft_ms = 25.0  # PREDICT: milliseconds to the first token, after a prompt of 300 tokens

# %% tags=["nbval-ignore-output"] uncompared="times"
limits = roofline.limits(here.device, model.dtype, model.nbytes)
floor_itl = model.nbytes / limits.bytes_per_s
nbytes, operations = roofline.step_work(llm, 300, 1)
floor_ttft = max(nbytes / limits.bytes_per_s, operations / limits.operations_per_s)
typical = sorted(gaps)[len(gaps) // 2]
compare(
    "between tokens",
    unit="ms",
    prediction=guess_itl_ms,
    floor=floor_itl * 1e3,
    measured=typical * 1e3,
)
compare(
    "to the first token",
    unit="ms",
    prediction=guess_ttft_ms,
    floor=floor_ttft * 1e3,
    measured=ttft * 1e3,
)

# %% [markdown]
# ## Many users
#
# Now eight clients at once, each with a request of its own length. One number has to stand for all their gaps. The mean
# hides the reader whose text stood still; so serving speaks in **percentiles**: p50 is the typical wait, p99 the one
# that a hundredth of all waits exceed. In an answer of some hundred tokens everybody meets p99.

# %%
lengths = [4, 6, 8, 12, 16, 24, 32, 40]
with ThreadPoolExecutor(len(lengths)) as pool:
    heard = list(pool.map(lambda n: listen(draw_prompt(16 * n, seed=n), n), lengths))
gaps_of_each = [measure(due, arrivals)[1] for due, arrivals in heard]
print("tokens of each:", [len(gaps) + 1 for gaps in gaps_of_each])

# %% [markdown]
# **Exercise 2.** The percentile over all gaps of all requests, by *nearest rank*: with $n$ values in order, p-th is
# number $\lceil p\,n / 100 \rceil$, counting from 1. It is always a wait that somebody had. Two mistakes are common:
# averaging each request's own percentile (a request of 4 tokens then counts as much as one of 40), and a value between
# two that were seen.
#
# For example `pooled_percentile([[10, 20, 30]], 50)` is 20: number $\lceil 1.5 \rceil = 2$ of three.


# %% tags=["exercise"]
def pooled_percentile(gaps_of_each: list[list[float]], p: float) -> float:
    """The p-th percentile (0 < p <= 100) of all gaps of all requests, by nearest rank.

    Changes none of the lists.
    """
    # SOLUTION: all gaps into one new list, in order; then the value with the rank of the formula
    ranked = sorted(gap for gaps in gaps_of_each for gap in gaps)
    return ranked[math.ceil(p * len(ranked) / 100) - 1]
    # END


# %%
check(pooled_percentile)


# %%
def engines_percentile(gaps_of_each, p):
    return serve.percentiles([gap for gaps in gaps_of_each for gap in gaps])[f"p{p}"]


percentile = yours(pooled_percentile, engines_percentile)
everything = sorted(1e3 * gap for gaps in gaps_of_each for gap in gaps)
figure, axis = plt.subplots(figsize=(10, 2.4), layout="constrained")
axis.hist(everything, bins=60, color="tab:blue")
for p, color in ((50, "black"), (90, "tab:orange"), (99, "tab:red")):
    axis.axvline(1e3 * percentile(gaps_of_each, p), color=color, label=f"p{p}")
axis.axvline(sum(everything) / len(everything), color="gray", ls=":", label="mean")
axis.set(
    xlabel="milliseconds between two tokens",
    ylabel="gaps",
    title="Eight clients at once: every gap",
)
axis.legend(ncols=4)
plt.show()

# %% [markdown]
# ## How many at once?
#
# `minillm bench serve` is a load generator: it does what we just did, for hundreds of requests. In a **closed loop** a
# fixed number of clients each wait for their answer before they ask again. We try one, a quarter of the batch's places,
# and all of them. A load generator is a program too, and may be slower than what it measures: the last column is the
# share of the run that it was itself at work.
#
# **Predict.** A step reads the weights once for all requests in it. Does a full batch make as many times the tokens a
# second as it has places?

# %% tags=["exercise"]
guess_gain = 6.0  # PREDICT: tokens/s with all places taken, as multiples of one client's

# %% tags=["nbval-ignore-output"] uncompared="times"
clients = (1, places // 4, places)
CHAT = {"workload": "chat", "scale": 8, "quiet": True}  # 16 tokens in, 16 out
loads = [
    serve.run(server.url, concurrency=n, requests=max(4, 2 * n), **CHAT)["results"][0]
    for n in clients
]
print("clients  requests/s  tokens/s   TTFT p50   ITL p50   ITL p99 (ms)  generator busy")
for row in loads:
    waits = [row["ttft_s"]["p50"], row["itl_s"]["p50"], row["itl_s"]["p99"]]
    rates = f"{row['requests_per_s']:10.1f}{row['output_tokens_per_s']:10,.0f} "
    shown = "".join(f"{wait * 1e3:10.2f}" for wait in waits)
    print(f"{row['concurrency']:7}  {rates}{shown}{serve.generator_share(row):20.0%}")
gain = loads[-1]["output_tokens_per_s"] / loads[0]["output_tokens_per_s"]
compare(
    "a full batch beside one client",
    unit="times",
    prediction=guess_gain,
    most=places,
    measured=gain,
)

# %% [markdown]
# The nearer the last column is to 100 %, the less the row says about the server: then the load generator has measured
# itself, and the server may be faster than this. Nor is an ITL near 0 a fast server: no step takes no time. It means
# bunches: tokens of several steps were held up on their way (an HTTP worker has too many clients) and came late and
# together. TTFT and end-to-end show the delay; more workers mend it where there are cores for them.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
speeds = [row["output_tokens_per_s"] for row in loads]
left.plot(clients, speeds, "o-", label="measured")
left.plot(
    clients, [speeds[0] * n for n in clients], ":", color="gray", label="clients × the first"
)
left.set(
    xlabel="clients",
    ylabel="output tokens/s",
    title="What the server gives",
    ylim=(0, 1.4 * max(speeds)),
)
left.legend()
for share, style in (("p50", "o-"), ("p99", "s--")):
    right.plot(clients, [row["itl_s"][share] * 1e3 for row in loads], style, label=share)
right.set(
    xlabel="clients", ylabel="milliseconds", title="What a client waits between tokens", ylim=0
)
right.legend()
plt.show()

# %% [markdown]
# What the server gains, each client pays for in longer waits. The gain ends where arithmetic and Python take over from
# reading the weights.
#
# ## What a closed loop does not show
#
# Real users do not wait for each other. In a closed loop there are never more requests under way than clients: the
# slower the server, the less they ask of it. Whatever one does to the server, the queue cannot grow, and the wait in it
# is never measured. (This is called *coordinated omission*.)
#
# In an **open loop** requests come when they come. Many users who know nothing of each other make a **Poisson
# process**: the gap to the next request has the density $\lambda e^{-\lambda t}$ at a rate of $\lambda$ requests a
# second, however long ago the last one came. A number $u$, drawn evenly from 0 to 1, becomes such a gap:
#
# $$\text{gap} = \frac{-\ln(1 - u)}{\lambda}$$
#
# **Exercise 3.** Write the schedule. For example `poisson_arrivals(1.0, [0.5])` is `[0.693...]`.


# %% tags=["exercise"]
def poisson_arrivals(rate: float, uniform: list[float]) -> list[float]:
    """When requests are due, in seconds from the start: one for each number of `uniform`, each from [0, 1).

    rate: requests a second.
    """
    # SOLUTION: each number becomes a gap; each request comes its gap after the one before
    clock, due = 0.0, []
    for u in uniform:
        clock += -math.log(1 - u) / rate
        due.append(clock)
    return due
    # END


# %%
check(poisson_arrivals)


# %%
def engines_arrivals(rate, uniform):
    clock = [0.0]
    for u in uniform:
        clock.append(clock[-1] - math.log1p(-u) / rate)
    return clock[1:]


def schedule(rate: float, requests: int) -> list[float]:
    rng = random.Random(3)
    return yours(poisson_arrivals, engines_arrivals)(
        rate, [rng.random() for _ in range(requests)]
    )


many = schedule(10.0, 10_000)
print(f"10,000 requests at 10 a second take {many[-1]:.0f} s")
figure, (left, right) = plt.subplots(
    1, 2, figsize=(10, 2.2), width_ratios=(2, 1), layout="constrained"
)
left.eventplot(many[:60], colors="tab:blue")
left.set(yticks=[], xlabel="seconds", title="The first 60: crowds and lulls, by chance alone")
right.hist([late - early for early, late in pairwise(many)], bins=60, color="tab:blue")
right.set(xlabel="seconds to the next", yticks=[], title="Most gaps are short")
plt.show()

# %% [markdown]
# Your schedule now drives the load generator: `due=` sends a request at each of its times, whatever still runs, and
# counts latency from when it was *due*. (`minillm bench serve --rate 20` draws one itself; `--trace conversation`
# replays a recorded one.) The closed loop found how many requests a second the server can do. What if users send half
# as many, or four fifths, or twice as many?

# %% tags=["nbval-ignore-output"] uncompared="times"
capacity = loads[-1]["requests_per_s"]
SHARES = (0.5, 0.8, 2.0)
sent = (places, places, 3 * places)
opened = [
    serve.run(server.url, due=schedule(share * capacity, count), **CHAT)
    for share, count in zip(SHARES, sent)
]
print(f"{'waits in ms':<23}  TTFT p50  TTFT p99  ITL p50  end-to-end p99  generator busy")
names = [f"closed loop, {places}"] + [f"open, {share:.0%} of that rate" for share in SHARES]
for name, row in zip(names, [loads[-1], *(record["results"][0] for record in opened)]):
    ttft, itl, e2e = row["ttft_s"], row["itl_s"], row["e2e_s"]
    waits = [1e3 * each for each in (ttft["p50"], ttft["p99"], itl["p50"], e2e["p99"])]
    shown = "{:<23}{:10.1f}{:10.1f}{:9.2f}{:16.1f}".format(name, *waits)
    print(f"{shown}{serve.generator_share(row):16.0%}")

# %% [markdown]
# Every line below is a request: gray while its user sees nothing, blue while tokens come.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for axis, share, record in zip(axes, (SHARES[0], SHARES[-1]), (opened[0], opened[-1])):
    plots.requests(record, axis)
    axis.set_title(f"{share:.0%} of what the server can do")
plt.show()

# %% [markdown]
# Below the limit, crowds come and pass. Above it the queue only grows: each user starts later than the one before, for
# as long as it lasts, and the figures depend on how long we measured. The closed loop could not have shown this.
#
# So capacity is a rate *and a promise*. Promise something (here: the first token within ten of the idle server's
# TTFTs, and the whole answer within five times the idle server's), and count only the answers that keep it:
# **goodput**.

# %% tags=["nbval-ignore-output"] uncompared="times"
promised_ttft, promised_e2e = 10 * loads[0]["ttft_s"]["p50"], 5 * loads[0]["e2e_s"]["p50"]


def kept(each: dict) -> bool:
    """Whether one request's user got what was promised. `first_token` is None if it was refused."""
    if each["first_token"] is None or each["first_token"] - each["due"] > promised_ttft:
        return False
    return each["end"] - each["due"] <= promised_e2e


print(f"first token in {promised_ttft * 1e3:.0f} ms, all in {promised_e2e * 1e3:.0f} ms")
print("requests/s  promise kept  goodput/s")
for share, record in zip(SHARES, opened):
    row = record["results"][0]
    good = sum(map(kept, row["each"]))
    print(
        f"{share * capacity:10.1f}{good / row['requests']:14.0%}{good / row['seconds']:11.1f}"
    )

# %% [markdown]
# Goodput stays a little under the rate because such short runs count the time until the last answer is complete. What
# matters is the fall: past the limit the server works as hard as before, and few get what was promised.
#
# ## Serve with your own attention
#
# The server runs on the same table of operations as everything else, so `using` works behind HTTP. Let us replace the
# attention of the decode step, for the whole batch at once. Requests of a batch have different lengths; put into one
# tensor, the shorter ones end in leftovers: old numbers, or none at all (NaN).
#
# $$o_{r,h} = \sum_{i < \text{length}_r} \text{softmax}_i\left(s \; q_{r,h} \cdot k_{r,i,g(h)}\right) v_{r,i,g(h)}
# \qquad g(h) = \lfloor h \cdot \text{kv\_heads} / \text{heads} \rfloor$$

# %%
shown = torch.tensor([5, 2, 7, 4])
figure, axis = plt.subplots(figsize=(5, 1.8), layout="constrained")
axis.imshow(torch.arange(8) < shown[:, None], cmap="Blues", vmax=2, aspect="auto")
axis.set(
    xlabel="key", ylabel="row", yticks=range(4), title="Blue: keys that a row's new token sees"
)
for row, length in enumerate(shown.tolist()):
    for key in range(length, 8):
        axis.text(key, row, "?", ha="center", va="center", color="gray")
plt.show()

# %% [markdown]
# **Exercise 4.** Attention of one new token in each row. For example, two equal keys and the values 1 and 3 give 2.


# %% tags=["exercise"]
def batched_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """q: [rows, heads, d]; k, v: [rows, keys, kv_heads, d]; lengths: [rows], 1 to keys.

    Returns [rows, heads, d], of q's dtype and on q's device: new tensors need device=q.device.
    Row r sees its first lengths[r] keys; what stands behind them never matters. `heads` is a
    multiple of `kv_heads`: neighbouring heads share one.
    """
    # SOLUTION: repeat the KV heads; mark which keys each row does not see; take these out of
    #   the values and out of the scores; softmax; weighted sum
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
# The engine keeps keys and values in blocks, and each row has a table of the numbers of its blocks (lesson 09). This
# puts yours behind the engine's signature: gather each row's blocks, one behind the other. While yours is a stub, the
# engine's own runs, and "yours ran" is False.


# %%
def decode_attention(q, cache, block_table, lengths, *, scale, window=None, soft_cap=None):
    """q: [rows, 1, heads, d]; cache.k, cache.v: [blocks, block_size, kv_heads, d].

    block_table: [rows, blocks]: the numbers of each row's blocks, in order.
    """
    k, v = (part[block_table].flatten(1, 2) for part in (cache.k, cache.v))
    return batched_attention(q.squeeze(1), k, v, lengths.clamp(min=1), scale).unsqueeze(1)


# Random weights repeat one word whatever one does to them: then the embedded model answers.
speaker = server
if not here.trained:
    speaker = stack.enter_context(running(stack.enter_context(LLM(**here.words))))
question = "On which island does Fenwick lie?"
before = ask(question, speaker)
with using(decode_attention=decode_attention) as used:
    served = ask(question, speaker)
print(f"{served!r}\nas with the engine's own: {served == before}")
print("yours ran:", used.calls["decode_attention"] > 0)

# %% [markdown]
# And so that nobody believes in a replacement that never ran, one that looks at nothing:


# %%
def blind(q, *args, **kwargs):
    return torch.zeros_like(q)


with using(decode_attention=blind):
    blinded = ask(question, speaker)
print(repr(blinded))
print(f"the engine's own again: {ask(question, speaker) == before}")
assert blinded != before, "attention took no part in the answer"

# %% [markdown]
# What does it cost? Beside the engine's own and yours, a third one: the attention of lesson 02, which knows only one
# request, in a Python loop over the rows: in every step it runs once a row in each layer. **Predict** the gap between
# tokens with eight clients.

# %% tags=["exercise"]
guess_loop_ms = 8.0  # PREDICT: milliseconds between tokens with the loop, 8 clients

# %% tags=["nbval-ignore-output"] uncompared="times"
one_by_one = adapters.gathered(adapters.cached_attention)["decode_attention"]
candidates = {"the engine's own": {}, "yours": {"decode_attention": decode_attention}}
candidates["a loop over the rows"] = {"decode_attention": one_by_one}
print("ITL p50, ms               1 client  8 clients")
for name, replacement in candidates.items():
    with using(**replacement):
        alone, crowd = (
            serve.run(server.url, concurrency=n, requests=max(2, n), **CHAT)["results"][0]
            for n in (1, 8)
        )
    alone_ms, crowd_ms = (row["itl_s"]["p50"] * 1e3 for row in (alone, crowd))
    print(f"{name:<24}{alone_ms:10.2f}{crowd_ms:11.2f}")
compare("the loop", unit="ms", prediction=guess_loop_ms, measured=crowd_ms)

# %% [markdown]
# The loop's price is paid once a row, so it grows with every client; yours is paid once a step. This is why an engine's
# operations take whole batches. Yours still copies all keys and values at every step, to put each row's blocks one
# behind the other; a kernel on a GPU (lesson 04) reads them where they are.
#
# ## Compare with transformers
#
# Now without HTTP. What follows measures engines one after the other; nothing else should be alive in this process.

# %%
stack.close()
llm.close()
try:
    client.models.list()
except openai.APIConnectionError:
    print("nobody answers any more")

# %% [markdown]
# A comparison is fair when both do the same work (here: the same token ids, the same output lengths, the same weights,
# dtype and threads), when both are set up by someone who wants them to win, and when a bad minute of the machine hits
# both: they take turns, and every run is listed.
#
# * `single`: one request. Nobody to share with.
# * `mixed`: requests of different lengths, all at once. transformers' `generate` takes them in static batches: every
#   batch runs until its longest request is done, padded to its longest prompt.
#
# Lengths are divided by the number behind the stroke, so that this cell stays short. The README has full lengths and
# the best of all static batch sizes. **Predict:** where is the lead larger?

# %% tags=["exercise"]
guess_single = 1.5  # PREDICT: tokens/s, times transformers', one request
guess_mixed = 2.0  # PREDICT: tokens/s, times transformers', many requests of mixed lengths

# %%
import transformers

transformers.utils.logging.disable_progress_bar()
sizes = {"cpu": {"single": 8, "mixed": 24}, "gpu": {"single": 1, "mixed": 2}}[here.name]
both = {"compare": "transformers", "repeat": 2, "quiet": True, **here.options}
both["patience"] = (
    4 if full() else 1
)  # runs that differ too much are repeated, up to so many times
single = offline.run(here.model, workload="single", scale=sizes["single"], **both)
mixed = offline.run(
    here.model, workload="mixed", scale=sizes["mixed"], requests=16, batches=(16,), **both
)

# %% tags=["nbval-ignore-output", "terminal"] uncompared="times"
print(offline.table(single["results"] + mixed["results"]))
for record in (single, mixed):
    print(offline.caveat(record), end="")
for name, guess, record in (("single", guess_single, single), ("mixed", guess_mixed, mixed)):
    compare(
        name,
        unit="times transformers",
        prediction=guess,
        measured=record["results"][0]["times_transformers"],
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for axis, record in zip(axes, (single, mixed)):
    plots.throughput(record, ax=axis)
    axis.set_title(record["results"][0]["workload"])
plt.show()

# %% [markdown]
# ## Recap
#
# * TTFT, ITL and end-to-end are what one user waits for; throughput is what all of them get. Tell percentiles, over all
#   gaps of all requests.
# * Batching shares the reading of the weights. That is where throughput comes from, and latency is its price.
# * A closed loop finds how much a server can do; only an open loop shows what users feel, and latency counts from when
#   a request was due.
# * Capacity is the rate at which a promise is kept.
# * What you write runs behind HTTP as it runs in a cell; operations must take whole batches.
#
# **What got worse:** the time between tokens grows with every client. HTTP and JSON cost a lone client time that
# `LLM.generate` does not pay. The load generator runs on the machine it measures and takes its share of the CPU. A run
# of some dozen requests has no p99 worth the name: by nearest rank it is the largest value. And random token ids
# measure speed, never quality.
#
# **Further reading:** Yu et al. 2022, *Orca* (batching at every step); Kwon et al. 2023, *PagedAttention*; Tene, *How
# NOT to Measure Latency* (coordinated omission); Zhong et al. 2024, *DistServe* (goodput). Lessons 09 and 10 build
# what served you here.
