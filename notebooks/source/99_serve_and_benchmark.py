# %% [markdown]
# # 99 · Serve and benchmark
#
# Afterwards you can start an inference server, talk to it as any OpenAI client does, put your own function into it
# while it serves, load it with many clients at once, and say what it costs and gains beside another engine: measured,
# on your machine, in the same run.
#
# **20 minutes. Needs:** a CPU. The model is `tiny-gemma`, which comes with the project; nothing is downloaded.
# Every time below was measured on the machine that ran this notebook last; run it, and the times are yours.

# %%
from contextlib import ExitStack

import matplotlib.pyplot as plt
import openai
import torch

import minillm
from minillm.bench import load, offline, plots
from minillm.server import running

# %% [markdown]
# ## Start the server
#
# `minillm serve` does this from a terminal. Here the engine runs in the notebook's own process, in a thread: what you
# change in a cell changes what the server does. `ExitStack` keeps it open until we close it.

# %%
stack = ExitStack()
server = stack.enter_context(running())
config = server.engine.model_config
weight_bytes = server.engine.engine.model.nbytes
print(f"{server.model}: {config.num_layers} layers, hidden size {config.hidden_size}, vocabulary {config.vocab_size}")

# %% [markdown]
# ## Talk to it
#
# The server speaks OpenAI's protocol, so their client works as it is. `tiny-gemma` knows one small invented world, the
# Tallow Isles. `temperature=0` always takes the likeliest token: ask again and the answer is the same. First text to
# continue, then turns of a chat.

# %%
client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="not needed here")


def complete(prompt: str, tokens: int = 48) -> str:
    answer = client.completions.create(model=server.model, prompt=prompt, max_tokens=tokens, temperature=0)
    return answer.choices[0].text


STORY = "Once upon a time there was a"
print(STORY + complete(STORY))


# %%
def ask(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=server.model, messages=messages, max_tokens=40, temperature=0)
    return answer.choices[0].message.content


for question in ("Who are you?", "On which island does Fenwick lie?", "What is 3 plus 4?"):
    print(f"{question} {ask(question)}")

# %% [markdown]
# A reader should not wait for the last token to see the first. With `stream=True` every piece of text is sent as soon
# as its characters are complete.

# %%
stream = client.completions.create(model=server.model, prompt=STORY, max_tokens=48, temperature=0, stream=True)
pieces = [chunk.choices[0].text for chunk in stream]
print("|".join(pieces))
print(f"the same text as before: {''.join(pieces) == complete(STORY)}")

# %% [markdown]
# ## Put your own function in
#
# Every operation of the model can be replaced while the server runs. `minillm.using` swaps it in, counts its calls,
# and puts the engine's own back at the end of the block. Two attentions: one that changes nothing but is yours, and one
# that looks at nothing at all, so that the model forgets what it was asked.

# %%
from minillm.ops import reference


def my_attention(q, cache, block_table, lengths, **options):
    return reference.decode_attention(q, cache, block_table, lengths, **options)


def blind_attention(q, cache, block_table, lengths, **options):
    return torch.zeros_like(q)


question = "On which island does Fenwick lie?"
for attention in (my_attention, blind_attention):
    with minillm.using(decode_attention=attention) as used:
        answer = ask(question)
    print(f"{attention.__name__}, which ran: {used.calls['decode_attention'] > 0}\n    {answer!r}")
print(f"the engine's own again\n    {ask(question)!r}")

# %% [markdown]
# ## Load it
#
# One client waits for each of its answers before it asks again. What happens with 2, 8, 32 of them?
#
# **Predict first.** At one client, a step of the engine reads every weight to make one token. At 32 clients it reads
# them once for 32 tokens. Do tokens per second grow 32 times? And what does each client feel, between two tokens?
#
# Each row loads the server with requests of 64 tokens in and 64 out.

# %% tags=["nbval-ignore-output"]
# Not compared: times.
CLIENTS = (1, 2, 4, 8, 16, 32)
loads = [
    load.run(server.url, workload="chat", scale=2, requests=max(8, 3 * n), concurrency=n, quiet=True)["results"][0]
    for n in CLIENTS
]
print("clients  tokens/s  first token (ms)  between tokens (ms)")
for row in loads:
    first, between = row["ttft_s"]["p50"] * 1e3, row["itl_s"]["p50"] * 1e3
    print(f"{row['concurrency']:7}  {row['output_tokens_per_s']:8,.0f}  {first:16.1f}  {between:19.2f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
speeds = [row["output_tokens_per_s"] for row in loads]
left.plot(CLIENTS, speeds, "o-", label="measured")
left.plot(CLIENTS, [speeds[0] * n for n in CLIENTS], ":", color="gray", label="clients × the first")
left.set(xlabel="clients", ylabel="output tokens/s", title="What the server gives", ylim=(0, 1.4 * max(speeds)))
left.legend()
for share, style in (("p50", "o-"), ("p99", "s--")):
    right.plot(CLIENTS, [row["itl_s"][share] * 1e3 for row in loads], style, label=share)
right.set(xlabel="clients", ylabel="milliseconds", title="What a client waits between tokens", ylim=0)
right.legend()
plt.show()

# %% [markdown]
# Sharing the weights is most of the gain, and it ends where arithmetic and Python take over from reading. What the
# server gains, each client pays for in longer waits: pick the point you want on purpose.
#
# ## Stop the server
#
# What follows measures engines one after the other; nothing else should be alive in this process.

# %%
stack.close()
try:
    complete("Is anybody there?")
except openai.APIConnectionError:
    print("nobody answers any more")

# %% [markdown]
# ## Compare
#
# Without HTTP now: the same requests through `minillm` and through transformers' `generate`, in turns in one
# process, so that a busy moment of the machine hits both. Two workloads of random token ids:
#
# * `single`: one request of 128 tokens in and 256 out. Nobody to share with.
# * `mixed`: 64 requests, inputs and outputs of 100 to 1024 tokens, here divided by 8. transformers takes them in static
#   batches: every batch runs until its longest request is done. Of the sizes 8, 16, 32 and 64, the last two serve it
#   best here, so these two are measured; `minillm bench offline` tries all four.
#
# **Predict first.** Where is the lead larger, and why?

# %%
import transformers

transformers.utils.logging.disable_progress_bar()
engine = {"threads": torch.get_num_threads(), "compare": "transformers", "quiet": True}
single = offline.run(workload="single", repeat=3, **engine)
mixed = offline.run(workload="mixed", scale=8, requests=64, repeat=3, batches=(32, 64), **engine)

# %% tags=["nbval-ignore-output", "terminal"]
# Not compared: times.
print(offline.table(single["results"] + mixed["results"]))

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), width_ratios=(1, 2.5), layout="constrained")
for axis, record in zip(axes, (single, mixed), strict=True):
    plots.throughput(record, ax=axis)
    axis.set_title(record["results"][0]["workload"])
plt.show()

# %% [markdown]
# ## How far from the floor?
#
# A lone request cannot share: every token reads every weight. The time to read that many bytes is a floor that no
# engine gets under on this machine with these weights.

# %% tags=["nbval-ignore-output"]
# Not compared: times.
import time

weights = torch.ones(weight_bytes // 4)
reads = []
for _ in range(20):
    start = time.perf_counter()
    weights.sum()
    reads.append(time.perf_counter() - start)
alone = single["results"][0]
floor, measured = min(reads), alone["seconds"] / alone["output_tokens"]
print(f"bytes of weights      {weights.nbytes / 1e6:8.1f} MB")
print(f"floor                 {floor * 1e3:8.2f} ms a token")
print(f"measured              {measured * 1e3:8.2f} ms a token, {measured / floor:.1f} times the floor")

# %% [markdown]
# What lies above the floor is Python and the start of some hundred small operations in each step. The larger the model,
# the smaller their share: on a GPU with a model of billions of weights, the floor is what the engine is tuned against.

# %% [markdown]
# ## Recap
#
# * An engine behind HTTP is an ordinary process; a client of any language talks to it.
# * Batching shares the reading of the weights. That is where throughput comes from, and latency is its price.
# * Requests that join and leave at every step beat static batches most where lengths differ.
#
# **What got worse:** the time between tokens grows with every client. HTTP and JSON cost a lone client time that
# `LLM.generate` does not pay. And random token ids measure speed, never quality.
#
# **Further reading:** Yu et al. 2022, *Orca* (batching at every step); Kwon et al. 2023, *PagedAttention* (the memory
# behind it); lessons 09 and 10 build both.
