# %% [markdown]
# # 10 · In-flight batching
#
# Afterwards you can explain, with four requests and two rows on a sheet of paper, why servers let requests join and
# leave at every step, and what chunked prefill is for; write the rule by which one loop does prefill, chunks, decode
# and recovery; decide who gets the tokens of a step, and see your decision run in the engine; say what happens when
# memory runs out; and write a policy that helps the short and forgets nobody.
#
# **70 minutes. Needs:** a CPU, and lessons 00 and 02; lesson 09 helps. You should know what *prefill* (a prompt's
# tokens go through the model together) and *decode* (an answer's tokens, one after the other) are. On a GPU the timed
# cells run Gemma 2B.

# %%
import heapq
import random
import time
from dataclasses import dataclass
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

from minillm import LLM, SamplingParams, using
from minillm.bench import plots, records, workloads
from minillm.course import NotSolvedYet, check, compare, tier, yours
from minillm.course import draw_batching as draw
from minillm.request import Request
from minillm.scheduler import Scheduler
from minillm.scheduler.policies import FirstComeFirstServed
from minillm.trace import Trace, replay

VOCAB = 4000

# %% [markdown]
# ## 1 · Four requests, two rows
#
# Decoding one request reads all of the model's weights to make one token (lesson 00). Decoding two at once reads them
# once for both. So a server runs many requests in one **step**, one pass of the model; the requests of a step are its
# **batch**, and the places in it are **rows**. Each row gives one token a step, once its prompt is through.
#
# What makes this hard is that requests differ. Four of them come at once, and there are two rows:

# %%
FOUR = {"A": (3, 9), "B": (2, 2), "C": (12, 3), "D": (5, 4)}
for name, (prompt, output) in FOUR.items():
    print(f"{name}: a prompt of {prompt:2} tokens, an answer of {output}")

# %% [markdown]
# We let the engine run them and keep a **trace**: events that say which request had which row in each step. Tokens are
# drawn at random, because here only lengths matter. `play` is all there is to an engine's loop: submit what is due,
# make a step, collect what is done.


# %%
def play(engine, requests, due=None):
    """Submit each request when it is due, make steps until all are done: {name: completion}.

    requests: {name: (prompt, output tokens)}; a prompt is token ids, or a number of them to draw.
    due: {name: how many steps come before it}; default: all come before the first.
    """
    made, done, to_come = 0, {}, dict(requests)
    while to_come or engine.has_work:
        for name in [name for name in to_come if not due or due[name] <= made]:
            prompt, output = to_come.pop(name)
            if isinstance(prompt, int):
                prompt = random.Random(name).choices(range(10, VOCAB), k=prompt)
            params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
            engine.submit(engine.prepare(prompt, params, request_id=name))
        done |= {completion.request_id: completion for completion in engine.step()}
        made += 1
    return done


SMALL = {
    "device": "cpu",
    "dtype": "float64",  # so that equal means equal
    "num_blocks": 256,
    "run_ahead": 0,  # section 7
    "enable_prefix_caching": False,  # lesson 09
}


def run(requests, due=None, model=None, rehearse=False, **options):
    """Play requests in an engine of their own: its trace, steps, completions and counters.

    rehearse: warm up and play them once before, so that a GPU has compiled and captured all.
    """
    trace = Trace()
    with LLM(model, trace=trace, **SMALL | options) as llm:
        if rehearse:
            llm.warm_up()
            play(llm.engine, requests, due)
        before = len(list(replay(trace)))
        done = play(llm.engine, requests, due)
        stats = llm.stats()
    steps = list(replay(trace))[before:]
    return SimpleNamespace(trace=trace, steps=steps, done=done, stats=stats)


# %% [markdown]
# The old way is **static batching**: take as many requests as there are rows, run them until *all* are done, take the
# next. The engine still has it, as a policy, to be compared with. The other is **in-flight batching** (also called
# continuous batching; Yu et al. 2022 introduced it as *iteration-level scheduling*): after every step, whoever is done
# leaves, and whoever waits takes the free row.

# %%
static = run(FOUR, max_num_seqs=2, policy="static")
in_flight = run(FOUR, max_num_seqs=2)
draw.rows_in_use({"static": static.steps, "in flight": in_flight.steps}, rows=2)

# %% [markdown]
# A column is a step, read from left to right; a line is a row. Orange cells run a prompt, and say how many of its
# tokens; the step that ends a prompt gives the first token of the answer, so an answer of nine tokens takes nine cells.
# Blue cells are decode, one token each; in a grey one nobody has the row. All pictures of rows in this lesson have
# these colours. The number below is what the step computes in all.
#
# Look at B. It is done after two steps, and in the static batch its row stands idle for seven more, while C and D wait
# in the queue. In flight, C takes the row in the very next step, beside A, which decodes on. Nobody waits for A.
#
# ### Exercise 1: count it
#
# How many steps, and how many idle cells? You need only the length of the answers: each request is in a row for as many
# steps as its answer has tokens. (In real life nobody knows these lengths beforehand. That is why a batch cannot simply
# be packed well.)
#
# $$\text{idle} = \text{steps} \times \text{rows} - \sum \text{tokens}$$
#
# For example, two requests of 4 tokens in two rows take 4 steps either way, and no cell is idle: `(4, 0)`.


# %% tags=["exercise"]
def steps_and_idle(outputs, rows, in_flight):
    """(steps, idle cells) of requests whose answers have these many tokens, taken in this order.

    in_flight: True: the next request takes whichever row is free first. False: static batches;
    `rows` requests start together, the next ones when the last of these is done.
    """
    # SOLUTION: static: every batch lasts as long as its longest; in flight: remember when each row
    #   will be free, and always use the one that is free first
    if in_flight:
        free_at = [0] * rows
        for tokens in outputs:
            heapq.heapreplace(free_at, free_at[0] + tokens)
        steps = max(free_at)
    else:
        batches = [outputs[first : first + rows] for first in range(0, len(outputs), rows)]
        steps = sum(max(batch) for batch in batches)
    return steps, steps * rows - sum(outputs)
    # END


# %%
check(steps_and_idle)

# %% [markdown]
# Four requests prove little. The project has a traffic trace, `data/traces/conversation.jsonl`: when 400 requests come
# and how long they are, drawn by a script as conversations are served. We take its first 20 with lengths divided by 8,
# so that a laptop is done in a moment, and four rows.

# %%
traffic = {
    f"{number:02}": (each.prompt, each.output_tokens)
    for number, each in enumerate(
        workloads.replay("conversation", VOCAB, scale=8, requests=20)
    )
}
answers = [output for _, output in traffic.values()]
print("tokens of the answers:", *answers)
print(f"mean {np.mean(answers):.1f}, longest {max(answers)}")

# %% [markdown]
# **Predict first.** What share of the cells is idle with static batches of four of these? And how many times as many
# steps do they take as in-flight batching?

# %% tags=["exercise"]
guess_idle = 0.5  # PREDICT: share of idle cells with static batches, from 0 to 1
guess_times = 1.9  # PREDICT: steps of static batching, in multiples of in-flight batching's


# %%
def counted(outputs, rows, in_flight):
    """The same from the engine itself: play the requests, look at the trace."""
    requests = {str(number): (4, tokens) for number, tokens in enumerate(outputs)}
    policy = "fcfs" if in_flight else "static"
    steps = run(requests, max_num_seqs=rows, policy=policy, dtype="auto").steps
    return len(steps), len(steps) * rows - sum(len(step.row) for step in steps)


count = yours(steps_and_idle, counted)
ROWS = 4
(static_steps, static_idle), (steps, idle) = (
    count(answers, ROWS, way) for way in (False, True)
)
print(f"static     {static_steps:4} steps, {static_idle / (static_steps * ROWS):4.0%} idle")
print(f"in flight  {steps:4} steps, {idle / (steps * ROWS):4.0%} idle")
share = static_idle / (static_steps * ROWS)
compare("idle, static", unit="of the cells", prediction=guess_idle, measured=share)
compare("steps", unit="times", prediction=guess_times, measured=static_steps / steps)

# %% [markdown]
# Does the engine agree with your count, requests and all? And what is it worth in time, on this machine?

# %%
runs = {
    "static": run(traffic, max_num_seqs=ROWS, policy="static"),
    "in flight": run(traffic, max_num_seqs=ROWS),
}
print(
    "steps as counted:", [len(each.steps) for each in runs.values()] == [static_steps, steps]
)
tokens = [{name: one.token_ids for name, one in each.done.items()} for each in runs.values()]
print("every request has the same tokens both ways:", tokens[0] == tokens[1])

# %% tags=["nbval-ignore-output"] uncompared="times"
seconds = {name: each.steps[-1].read - each.steps[0].launched for name, each in runs.items()}
for name, took in seconds.items():
    step_ms = 1e3 * took / len(runs[name].steps)
    print(
        f"{name:10} {took:5.2f} s, {sum(answers) / took:5.0f} tokens/s, {step_ms:5.2f} ms a step"
    )
print(f"{seconds['static'] / seconds['in flight']:.2f} times as fast")

# %% [markdown]
# The time is steps times milliseconds a step, and you counted only the steps. Both ways compute the same prompts and
# the same answers. In flight that is done in fewer steps, so each has more to compute. What that does to its time
# depends on the machine: section 8 has the figures of a CPU and of an H200.
#
# This is the same traffic as the engine saw it: a line is a row, a column a step. The numbers are requests, where there
# is room for one, and a white line is where one begins.

# %%
draw.timelines({title: each.trace for title, each in runs.items()}, ROWS)

# %% [markdown]
# ## 2 · One batch without padding
#
# Step 2 of the in-flight picture ran one token of A beside twelve of C. How can one pass of a model do that? Matrices
# like rectangles, and the old answer is a rectangle: every row as long as the longest, filled up with **padding**,
# tokens that mean nothing and are computed all the same. Here is the step of the traffic that had most tokens:

# %%
fullest = max(runs["in flight"].steps, key=lambda step: sum(step.count))
draw.padded(fullest)

# %% [markdown]
# The answer is in lesson 02: attention is the only part of a model where tokens meet. For a norm, a matrix or an MLP it
# does not matter which request a token belongs to. So the tokens of all rows are laid **one behind the other**,
# `[tokens, hidden]`, without a batch axis at all: *token concatenation*, a *ragged batch*. Only attention has to know
# where a row begins and ends (`query_start`) and which blocks hold its keys (lesson 09; `groups` is 1 but for models
# with sliding windows), and it is told:

# %%
# ENGINE: minillm.model.batch:Rows

# %% [markdown]
# **Predict first**, for the whole run in flight: if every step were padded to a rectangle, what share of all places
# would be padding?

# %% tags=["exercise"]
guess_padding = 0.6  # PREDICT: share of places that are padding, from 0 to 1

# %%
real = sum(sum(step.count) for step in runs["in flight"].steps)
places = sum(len(step.count) * max(step.count) for step in runs["in flight"].steps)
print(f"{real:,} tokens in rectangles of {places:,} places")
compare("padding", unit="of the places", prediction=guess_padding, measured=1 - real / places)

# %% [markdown]
# Static batching pads nothing in a decode step, where every row has one token. But it pads prompts, and with a
# rectangular cache, as in transformers' `generate`, the keys too: every row keeps as many as the longest.
#
# ## 3 · One rule
#
# Prefill, decode, joining in the middle: it looks like many cases. It is one, if the scheduler keeps two numbers for
# each request:
#
# * **known**: tokens that we have, of prompt and answer;
# * **computed**: how many of them have their keys and values in the cache.
#
# The difference is **pending**. A step runs some or all of it, from `computed` on. When the last known token has been
# computed, its logits are there, and the model samples one more: `known` grows by one. That is all. *Computed chases
# known*, and what people call it depends on the numbers:
#
# | known | computed | pending | it is called |
# |---|---|---|---|
# | 12 (a prompt) | 0 | 12 | prefill |
# | 12 | 5 | 7 | a chunk of a prefill, or a prompt whose beginning was in the cache (lesson 09) |
# | 13 | 12 | 1 | decode |
# | 14 | 0 | 14 | resuming, after the cache was taken away (section 5) |
#
# Three lives of C, read from traces (for its first two steps it waits in the queue). In the second, no step may run
# more than six tokens; in the third, blocks run out while C decodes. When C is done, its last token is known and
# not computed: nobody asks for its keys.

# %%
chunked = run(FOUR, max_num_seqs=2, max_num_batched_tokens=6)
preempted = run(FOUR, max_num_seqs=2, block_size=2, num_blocks=10)
draw.chase(
    {
        "C runs its prompt at once": (in_flight.steps, "C", 12),
        "in chunks": (chunked.steps, "C", 12),
        "preempted, and resumed": (preempted.steps, "C", 12),
    }
)

# %% [markdown]
# ### Exercise 2: the rule
#
# Write a step for requests that have rows already. They are served in their order, oldest first: each runs what is
# pending, as far as the step's budget still goes. Bring `computed` and `known` up to date. And mind the end: when a
# request knows as many tokens as it may have (`limit`), it is done, and runs no more.
#
# For example, a request with a prompt of 3 tokens gives `[(0, 3, True)]`; after that it has 4 known tokens and 3
# computed.


# %% tags=["exercise"]
@dataclass
class Running:
    prompt: int  # tokens of the prompt
    known: int  # tokens of prompt and answer so far
    computed: int  # of these, in the cache
    limit: int  # most tokens of prompt and answer


def next_step(requests, budget):
    """Run one step. [(start, count, samples)], one for each request, in their order.

    start: the first token that runs; count: how many do (0: none); samples: whether the step
    yields a token for this request. budget: most tokens of all requests together.
    """
    # SOLUTION: count is what is pending, or what is left of the budget; then move `computed`, and
    #   if it has reached `known`, `known`
    done = []
    for request in requests:
        start, pending = request.computed, request.known - request.computed
        count = min(pending, budget) if request.known < request.limit else 0
        budget -= count
        request.computed += count
        samples = count > 0 and request.computed == request.known
        request.known += samples
        done.append((start, count, samples))
    return done
    # END


# %%
check(next_step)

# %% [markdown]
# With your rule a whole in-flight scheduler is a dozen lines. It should run our four requests as the engine does, step
# by step: the same request, the same tokens.


# %%
def simulate(requests, rows, budget=2048):
    """[{request: (start, count)}] of each step."""
    waiting, running, steps = list(requests.items()), {}, []
    while waiting or running:
        while waiting and len(running) < rows:
            name, (prompt, output) = waiting.pop(0)
            running[name] = Running(prompt, prompt, 0, prompt + output)
        ran = zip(running, next_step(list(running.values()), budget), strict=True)
        steps.append({name: (start, count) for name, (start, count, _) in ran if count})
        running = {name: each for name, each in running.items() if each.known < each.limit}
    return steps


def spans(steps):
    """The same from a trace."""
    return [
        {
            name: (start, count)
            for name, start, count in zip(step.request, step.start, step.count)
        }
        for step in steps
    ]


found = yours(simulate, lambda *given: spans(in_flight.steps))(FOUR, 2)
print("step by step as the engine:", found == spans(in_flight.steps))
for number, step in enumerate(found[:4]):
    print(
        f"step {number}: ",
        *(f"{name} from {start}: {count}" for name, (start, count) in step.items()),
    )

# %% [markdown]
# The engine's own does it for all rows at once, with numpy columns in place of a loop: `known` and `computed` are
# arrays with an entry a row. Find yours in it: `queries` is your `count`, chosen before. The rest is for the blocks,
# the prefix cache and the trace.

# %%
# ENGINE: minillm.scheduler.scheduler:Scheduler._launch

# %% [markdown]
# ## 4 · The token budget
#
# Look at the in-flight picture of section 1 once more, at the number below step 2: 13 tokens, where the steps around it
# have two. A step takes the longer, the more tokens it computes, and A's reader waits for that step like anybody else.
# With twelve tokens nobody would notice. With a prompt of a thousand, the text on every screen stands still.
#
# Two waits, then (lesson 99): **TTFT**, time to first token, is what the newcomer waits; **ITL**, inter-token latency,
# is the gap between two tokens of somebody who reads already. Whoever runs a long prompt at once gives the newcomer the
# best TTFT, and everybody else a gap.
#
# **Chunked prefill** (Agrawal et al. 2024, *Sarathi-Serve*, section 4): no step runs more than a fixed number of
# tokens, the **token budget**. Of a prompt as much runs as fits, the rest in the next steps. Our rule of section 3
# needs nothing new for it. Here with a budget of 6, below what we had:

# %%
draw.rows_in_use({"in flight": in_flight.steps, "in flight, budget 6": chunked.steps}, rows=2)

# %% [markdown]
# C's prompt takes three steps in place of one, so its first token comes two steps later; and no step is larger than 6.
#
# A has its token in every one of them, and that is a decision: C's prompt could have had the whole budget. What
# Sarathi-Serve calls *stall-free* is an order: **first every row that has one token pending, then prompts, oldest
# first.** A decode takes one token of the budget; leaving it out would stop a text that somebody is reading.
#
# ### Exercise 3: share the budget
#
# `pending` has one entry for each running row, oldest request first. Say how many tokens of each run now.
#
# For example `share_budget(np.array([1, 1, 6]), 8)` gives everybody everything: `[1, 1, 6]`.


# %% tags=["exercise"]
def share_budget(pending, budget):
    """How many of each row's pending tokens run in this step; `budget` at most in all.

    pending: [rows] whole numbers above 0, oldest row first; it must stay as it is. Returns
    [rows] whole numbers. Rows with one token come first, then prompts, oldest first, each cut
    where the budget ends.
    """
    # SOLUTION: put rows with one token first, keeping the order otherwise; whoever has less
    #   before it than the budget gets what is left of it; then back into the rows' order
    order = np.argsort(pending > 1, kind="stable")
    before = np.cumsum(pending[order]) - pending[order]
    counts = np.empty_like(pending)
    counts[order] = np.minimum(pending[order], np.maximum(budget - before, 0))
    return counts
    # END


# %%
check(share_budget)

# %% [markdown]
# Now it decides in the engine. A **policy** is a class with the scheduler's decisions: who goes first (`key`, section
# 6), who may join (`admits`), and `share`. Yours replaces the engine's while the block runs; `used.calls` says how
# often it was asked, and a stub leaves the engine's own in place.


# %%
class MyShare(FirstComeFirstServed):
    def share(self, pending, budget):
        return share_budget(pending, budget)


with using(policy=MyShare) as used:
    mine = run(FOUR, max_num_seqs=2, max_num_batched_tokens=6)
print("the same steps as with the engine's:", spans(mine.steps) == spans(chunked.steps))
print("it ran:", used.calls["policy"] > 0, used.not_solved or "")


# %% [markdown]
# And with another order? The first servers with in-flight batching ran new prompts before anything else, and the
# decodes waited. That is quickly written:


# %%
class PromptsFirst(FirstComeFirstServed):
    def share(self, pending, budget):
        order = np.argsort(pending == 1, kind="stable")
        before = np.cumsum(pending[order]) - pending[order]
        counts = np.empty_like(pending)
        counts[order] = np.minimum(pending[order], np.maximum(budget - before, 0))
        return counts


with using(policy=PromptsFirst):
    greedy = run(FOUR, max_num_seqs=2, max_num_batched_tokens=6)
draw.rows_in_use({"prompts first": greedy.steps, "decodes first": chunked.steps}, rows=2)

# %% [markdown]
# In step 3 the prompt of C takes all six tokens, and A, in the middle of an answer, waits (darker grey: the row is A's,
# and no token of it runs). In step 2 C only joins, with what A left. C has its first token no sooner for it. With a
# prompt of a thousand tokens and this budget A would wait for more than 160 steps.
#
# ### How large a budget?
#
# Now with real waits. Seven users decode; after twenty steps somebody comes with a long prompt. We take the budgets
# from large to small and measure two things: the newcomer's TTFT, and the longest gap between two tokens of the seven.
#
# First without a clock. How many steps until the newcomer's first token, and how many tokens does the largest of them
# compute?

# %%
LONG, BUDGETS = 900, [1024, 256, 128, 64, 32]
USERS = {f"user {number}": (20 + number, 40) for number in range(7)}


def newcomer(budget, prompt, **options):
    """Seven users, and a long prompt after 20 steps. More: as `run`."""
    requests = USERS | {"new": (prompt, 4)}
    due = dict.fromkeys(USERS, 0) | {"new": 20}
    return run(requests, due, **{"dtype": "auto", "max_num_batched_tokens": budget} | options)


served = {budget: newcomer(budget, LONG) for budget in BUDGETS}
print("budget   steps to the first token   most tokens in a step")
for budget, each in served.items():
    steps = [step for step in each.steps if "new" in step.request and "prefill" in step.kind]
    print(f"{budget:6} {len(steps):26} {max(sum(step.count) for step in steps):23}")

# %% [markdown]
# **Predict first.** From a budget of 1,024, which holds the whole prompt, to one of 64: to how many times itself does
# the newcomer's TTFT grow, and to what share of itself does the longest gap of the others shrink?

# %% tags=["exercise"]
guess_ttft = 1.7  # PREDICT: TTFT with a budget of 64, as a multiple of that with 1,024
guess_gap = 0.15  # PREDICT: the longest gap with a budget of 64, as a share of that with 1,024


# %% tags=["nbval-ignore-output"] uncompared="times"
def waits(run):
    """(the newcomer's TTFT, the longest gap of the seven), in milliseconds."""
    new = run.done["new"]
    read = [step.read for step in run.steps if any(name in USERS for name in step.request)]
    return 1e3 * (new.first_token_time - new.arrival_time), 1e3 * max(np.diff(read))


here = tier()
if here.name == "gpu":  # the same with Gemma 2B and a longer prompt
    BUDGETS, LONG = [8192, 4096, 2048, 1024, 512, 256], 6000
    options = here.options | {"model": here.model, "num_blocks": None, "max_num_seqs": 8}
    served = {budget: newcomer(budget, LONG, rehearse=True, **options) for budget in BUDGETS}
print(f"{here.label}, a prompt of {LONG:,} tokens beside seven decodes")
print(f"budget    TTFT          longest gap          (times that with {BUDGETS[0]:,})")
traded = {}
for budget in BUDGETS:
    (ttft, gap), (ttft_before, gap_before) = waits(served[budget]), waits(served[BUDGETS[0]])
    traded[budget] = ttft / ttft_before, gap / gap_before
    times = [f"{each:5.2f}" for each in traded[budget]]
    print(f"{budget:6} {ttft:5.0f} ms {times[0]} {gap:12.0f} ms {times[1]}")
print(f"from {BUDGETS[0]:,} to {BUDGETS[-2]}:")
found = traded[BUDGETS[-2]]
compare("TTFT", unit="times", prediction=guess_ttft, measured=found[0])
compare("longest gap", unit="of itself", prediction=guess_gap, measured=found[1])
draw.trade(
    BUDGETS,
    {
        "the newcomer's first token": [waits(served[budget])[0] for budget in BUDGETS],
        "longest gap of the others": [waits(served[budget])[1] for budget in BUDGETS],
    },
)

# %% [markdown]
# Read a line as a trade: with this budget the newcomer waits so many times as long for its first token, and the others'
# longest gap is this share of what it was. A small budget costs the newcomer time: each of its steps has a fixed price,
# the others' decodes ride along in every one of them, and each chunk reads the keys of those before it again. What the
# others save depends on how a step's time grows with its tokens. Where it is in proportion to them, a quarter of the
# budget is a quarter of the gap. Where the fixed price is most of it, as on a GPU below the ridge of the roofline
# (lesson 00), the gap hardly shrinks any more. Go down the column to the line from which on it stays the same: a budget
# below that one costs the newcomer time and saves nobody any. Above it there is no right budget, only a promise to keep
# ("a token every 50 ms"), and the largest budget that keeps it.
#
# Here are eight requests of the traffic in all three ways: static, in flight with whole prompts, and chunked. Prompts
# have their full length this time, so that they weigh something. The axis is time, and a white line is where a step
# begins: a wide column is a step that took long, and whoever is blue in it waited all that time for one token. Where a
# white line is wider, time went by between two steps.

# %%
HEAVY = {
    f"{number}": (each.prompt, each.output_tokens // 6)
    for number, each in enumerate(workloads.replay("conversation", VOCAB, requests=8))
}
three = {
    "static": run(HEAVY, max_num_seqs=4, dtype="auto", policy="static"),
    "in flight, whole prompts": run(HEAVY, max_num_seqs=4, dtype="auto"),
    "in flight, at most 64 tokens a step": run(
        HEAVY, max_num_seqs=4, dtype="auto", max_num_batched_tokens=64
    ),
}
draw.timelines({title: each.trace for title, each in three.items()}, 4, x="time")
for title, each in three.items():
    sizes = [sum(step.count) for step in each.steps]
    print(f"{title:36} {len(sizes):4} steps, the largest of {max(sizes):4} tokens")
    chunks = [
        step.count[step.request.index("5")] for step in each.steps if "5" in step.request
    ]
    print(f"{'':36} request 5's prompt: {' + '.join(str(n) for n in chunks if n > 1)}")

# %% [markdown]
# Take request 5, whose prompt has 298 tokens. Whole, it is one wide column, and in all that time the blue rows beside
# it get one token each. In chunks it is five narrower columns, and the others get a token in every one of them.
#
# Grey rows are nobody's, for three reasons. In the static picture they wait until the batch is done. At the left of the
# chunked one requests 1 to 3 are not let in yet, because older prompts take the whole budget. And at the right of all
# three the queue is empty. In chunks or whole, every prompt is computed once, and more steps cost some time of their
# own. What differs is who waits.
#
# ## 5 · When memory runs out
#
# Every token that is computed leaves keys and values behind, in blocks (lesson 09). A request is let in when there are
# blocks for what it *knows*; nobody can say how many it will fill. So it happens that all rows want their next block
# and there are too few.
#
# An engine could reserve for every request the most it may reach. Then it never happens, and most of the memory stands
# empty, because most answers end early. Or it lets more in, and when it goes wrong, somebody gives way: **preemption**.
# The one that came last goes back to the queue, and its blocks to the pool. Why the last? It has waited least, and the
# oldest always runs, so that something always gets done.
#
# What becomes of its keys? They could be copied to the CPU's memory and back (**swapping**; Kwon et al. 2023, section
# 4.5, describe both). Or be thrown away and **computed again**: what has to be kept is the tokens, a few bytes each,
# and they are kept anyway. By the rule of section 3, `known` stays, `computed` becomes 0. That is all there is to
# preemption: one line.
#
# Our four requests in ten blocks of two tokens:

# %%
draw.rows_in_use({"plenty of blocks": in_flight.steps, "ten blocks": preempted.steps}, rows=2)
print(f"preemptions: {preempted.stats['preemptions']}")

# %% [markdown]
# For step 4 A needs its fourth block, and there is none: it has three, C seven. C came last and goes. It is first in
# the queue again, but needs seven blocks for what it knows, and until A is done there are not as many; D does not
# overtake it. In step 9 C comes back, in whichever row is free: 14 tokens, the 12 of its prompt and the two that it
# had generated, run *as if they were a prompt*. Its third token follows, and it is the same token as ever:

# %%
alone = {name: run({name: FOUR[name]}).done[name].token_ids for name in FOUR}
for name, each in {"plenty of blocks": in_flight, "ten blocks": preempted}.items():
    same = all(each.done[request].token_ids == alone[request] for request in FOUR)
    print(f"{name}: every request has the tokens it has alone: {same}")

# %% [markdown]
# Nothing is lost but work. How much? We give the traffic little memory, 128 tokens for four rows, and count the tokens
# that run.


# %%
def tokens_run(each):
    return sum(sum(step.count) for step in each.steps)


few = run(traffic, max_num_seqs=ROWS, block_size=4, num_blocks=32)
memories = {"plenty": runs["in flight"], "32": few}
print("blocks   preemptions   tokens run   steps")
for blocks, each in memories.items():
    preemptions, ran = each.stats["preemptions"], tokens_run(each)
    same = all(each.done[name].token_ids == tokens[0][name] for name in traffic)
    counts = f"{preemptions:13} {ran:12,} {len(each.steps):7}"
    print(f"{blocks:>6} {counts}   the same tokens: {same}")

# %% [markdown]
# The tokens that are computed twice are the smaller part of the price. The larger: with less memory fewer requests run
# at once, and the same work takes more steps.
#
# Two things soften it. A request is let in only if, beside its own blocks, some are left for those who run: as many as
# they are expected to take in the next step; that keeps preemption rare. And the prefix cache (lesson 09, off here)
# helps: the blocks of one who gave way are not wiped, and if nobody took them in the meantime, they are found again by
# their tokens, and `computed` does not begin at 0.
#
# ## 6 · Who goes first
#
# So far: who came first. That is fair, and a long prompt at the head of the queue holds up ten short ones behind it
# (*head-of-line blocking*). The other order is tempting: **shortest prompt first**. It is one line, `key`: lower goes
# first. The scheduler asks for it once, when the request is queued.


# %%
class ShortestAlways(FirstComeFirstServed):
    fair = False  # it promises nobody a turn: see below

    def key(self, request):
        return len(request.prompt)


MIXED = {f"{number:02}": (96 if number % 6 == 2 else 8, 4) for number in range(60)}
EACH_STEP = {name: number for number, name in enumerate(MIXED)}  # one comes before each step


def first_tokens(policy, requests, due):
    """{request: steps from when it was due to its first token} under a policy."""
    with using(policy=policy) as used:
        steps = run(
            requests, due, max_num_seqs=4, max_num_batched_tokens=24, dtype="auto"
        ).steps
    if used.not_solved:
        print("not solved yet: the engine's own policy ran")
    first = {}
    for step in steps:
        for name, samples in zip(step.request, step.samples):
            if samples:
                first.setdefault(name, step.number)
    return {name: first[name] - due[name] for name in requests}


def tell(name, waited):
    """Mean wait of all and longest of the long prompts."""
    longest = max(wait for request, wait in waited.items() if MIXED[request][0] > 8)
    print(
        f"{name:24} mean {np.mean(list(waited.values())):5.1f} steps, longest of a long prompt {longest}"
    )


by_arrival = first_tokens(FirstComeFirstServed, MIXED, EACH_STEP)
by_length = first_tokens(ShortestAlways, MIXED, EACH_STEP)
tell("first come first served", by_arrival)
tell("shortest always", by_length)

# %% [markdown]
# Sixty requests, one before each step, every sixth with a prompt of 96 tokens in place of 8; together a little more
# than the engine can do. The mean wait is halved, and it was the long prompts that paid. How much can they be made to
# pay? One long prompt among short ones, as long as short ones keep coming:


# %%
def long_one_waits(policy, shorts):
    """Steps to its first token: it comes after five short ones, and `shorts` come in all."""
    due = {str(number): number for number in range(shorts)} | {"long": 5}
    requests = dict.fromkeys(due, (8, 4)) | {"long": (96, 4)}
    return first_tokens(policy, requests, due)["long"]


print("short prompts that come           20    40")
for policy in (FirstComeFirstServed, ShortestAlways):
    found = [long_one_waits(policy, shorts) for shorts in (20, 40)]
    print(f"{policy.__name__:30}", *(f"{steps:5}" for steps in found))

# %% [markdown]
# There is no bound. While short ones come, the long one waits: **starvation**. A policy is *fair* if everybody has a
# turn, however many come later.
#
# The cure is as old as queues: who waits, **ages**. A request could lose a few tokens of its length with every step
# that it waits. But the queue would have to be sorted anew all the time. There is a trick: all age at the same rate, so
# the *differences* never change. In place of making those who wait smaller, make those who come later larger, once,
# when they come. Every later arrival is taken for `patience` tokens longer than it is.
#
# ### Exercise 4: shortest first, with patience
#
# Then a prompt of $n$ tokens is overtaken by at most $n / \text{patience}$ later requests, whatever they are: the ones
# after that start with a larger key.
#
# A request has `prompt` (its token ids), `arrival` (0, 1, 2, ... in the order in which they came), `known` (ids of
# prompt and answer so far), `limit` and `params`. The scheduler asks for the key once and keeps it, also through a
# preemption; write it so that asking again would change nothing.
#
# For example, of two prompts of 10 tokens the one that came first has the smaller key.


# %% tags=["exercise"]
class PatientShortest(FirstComeFirstServed):
    """Shortest prompt first; a prompt of n tokens is overtaken at most n / patience times."""

    def __init__(self, patience=4.0):
        self.patience = patience

    def key(self, request):
        """A number: lower goes first."""
        # SOLUTION: the prompt's length, and `patience` tokens for each request that came before it
        return len(request.prompt) + self.patience * request.arrival
        # END


# %%
check(PatientShortest)

# %%
patient = first_tokens(PatientShortest, MIXED, EACH_STEP)
tell("first come first served", by_arrival)
tell("shortest always", by_length)
tell("yours", patient)
found = [long_one_waits(PatientShortest, shorts) for shorts in (20, 40)]
print("a long prompt among 20 and 40 short ones waits:", *found, "steps")
draw.waits(
    {
        title: [(EACH_STEP[name], wait, MIXED[name][0] > 8) for name, wait in waited.items()]
        for title, waited in (
            ("first come first served", by_arrival),
            ("shortest always", by_length),
            ("shortest, with patience", patient),
        )
    }
)

# %% [markdown]
# The 22nd short one after a long prompt starts with the same key, since (96 - 8) / 4 = 22, and of equal keys the older
# goes first: 21 may pass, however many are still to come. Most of the mean wait is saved all the same.
#
# Here are the engine's own policies; yours is among them (`LLM(policy="shortest")`). `static`, our baseline, is a
# policy too: it decides nothing but who may join. And whoever comes last by `key` gives way when blocks run out.

# %%
# ENGINE: minillm.scheduler.policies:FirstComeFirstServed
# ENGINE: minillm.scheduler.policies:Priority
# ENGINE: minillm.scheduler.policies:ShortestPromptFirst
# ENGINE: minillm.scheduler.policies:StaticBatching

# %% [markdown]
# Now all of it together: your sharing and your order serve the traffic, in one engine.


# %%
class MyScheduler(PatientShortest):
    def share(self, pending, budget):
        return share_budget(pending, budget)


with using(policy=MyScheduler) as used:
    mine = run(traffic, max_num_seqs=ROWS, max_num_batched_tokens=32)
same = all(mine.done[name].token_ids == tokens[0][name] for name in traffic)
print(f"{len(mine.steps)} steps, the same tokens for all {len(traffic)} requests: {same}")
print("it ran:", used.calls["policy"] > 0, used.not_solved or "")

# %% [markdown]
# A policy moves requests about in time. It cannot change what they say: no token depends on who else is in the batch
# (in 64-bit numbers; with fewer digits the order of sums may decide between two tokens that are nearly equal).
#
# ## 7 · Running ahead, and why Python matters
#
# Everything in this lesson is Python, and Python takes time, while the chip waits. How much? The engine's scheduler by
# itself, without any model, all rows decoding:


# %% tags=["nbval-ignore-output"] uncompared="times"
def scheduling_us(rows, steps=200):
    """Microseconds a step to choose it and to take in its tokens."""
    scheduler = Scheduler(
        max_num_seqs=rows,
        max_num_batched_tokens=16384,
        max_model_len=512,
        block_size=16,
        num_blocks=32 * rows,
        prefix_caching=False,
    )
    prompt, params = np.arange(8, dtype=np.int32), SamplingParams()
    for number in range(rows):
        scheduler.submit(Request(str(number), prompt, params, limit=500))
    scheduler.complete(step := scheduler.schedule(), np.zeros(step.samples.sum(), np.int32))
    begin = time.perf_counter()
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.complete(step, np.ones(len(step.rows), np.int32))
    return 1e6 * (time.perf_counter() - begin) / steps


record = records.read("h200/ablation")
speeds = {
    (row["name"], row["requests"]): row["output_tokens_per_s"]
    for row in record["results"]
    if row["group"] == "run-ahead"
}
step_us = 1e6 / speeds["3", 1]
for rows in (1, 64, 1024):
    print(f"{rows:5} rows: {scheduling_us(rows):6.0f} us to schedule a step")
print(f"a decode step of {records.model_of(record)}, on an H200: {step_us:,.0f} us")

# %% [markdown]
# Numpy columns keep it far from a thousand times as long for a thousand rows. Still, on a fast chip it is a part of a
# step, and launching the step and fetching its tokens come on top. A chip that waits for Python after each step is idle
# for that long.
#
# The way out: **do not wait**. What does the scheduler need of step N to choose step N + 1? Not the tokens: they stay
# on the device, where the next step reads them. It needs to know that each row has *one more*, and `known` grows when a
# step is launched (look at `_launch` in section 3), not when it is read. So step N + 1 can go out before N's tokens are
# back: **run-ahead**. Drawn, with 0.6 ms of Python to 1 ms on the chip (here each step has a colour of its own, pale
# while Python prepares it):

# %%
draw.lanes({"no run-ahead": 0, "one step ahead": 1}, python=0.6, device=1.0)

# %% [markdown]
# One thing cannot be known beforehand: that a token *ends* its answer. The model says so itself, and whoever runs ahead
# has launched the next step with that row in it. Its token is **dropped**, and its row and blocks wait until the last
# step that touches them is done. (An end by length is known in advance, and costs no token.)
#
# **Predict first.** Six questions, whose answers end when the model ends them; three steps ahead. How many tokens are
# computed for nothing?

# %% tags=["exercise"]
guess_dropped = 6 * 3  # PREDICT: tokens dropped with three steps of run-ahead, six answers

# %%
QUESTIONS = [
    "Who are you?",
    "On which island does Fenwick lie?",
    "What is 3 plus 4?",
    "What is 12 plus 5?",
    "Tell me a story.",
    "Where do sailors steer by Thamir?",
]
answer = SamplingParams(max_tokens=60, temperature=0)
dropped, said = {}, {}
for ahead in (0, 1, 3):
    trace = Trace()
    with LLM(trace=trace, **SMALL | {"run_ahead": ahead}) as llm:
        completions = llm.chat(
            [[{"role": "user", "content": each}] for each in QUESTIONS], answer
        )
    yielded = sum(sum(step.samples) for step in replay(trace))
    said[ahead] = [each.token_ids for each in completions]
    dropped[ahead] = yielded - sum(map(len, said[ahead]))
    print(f"{ahead} ahead: {yielded} tokens computed, {dropped[ahead]} of them dropped")
print("the same answers:", said[0] == said[1] == said[3])
compare("dropped, 3 ahead", unit="tokens", prediction=guess_dropped, measured=dropped[3])

# %% [markdown]
# Five of the answers ended by themselves, with three tokens each for nothing; the sixth reached its 60 tokens, and that
# was known in advance. A few tokens an answer, however long it is. What is it worth? On a CPU nothing: Python and the
# model take turns on the same cores. On an H200, from the committed record (Gemma 2B's shape with random weights: as
# many to read and to multiply as trained ones):

# %%
plots.ablation(record, groups=["run-ahead"])
plt.show()
took = {
    (row["name"], row["requests"]): row
    for row in record["results"]
    if row["group"] == "run-ahead"
}
for requests in (1, 256):
    for ahead in ("1", "3"):
        before, after = took["0", requests]["seconds"], took[ahead, requests]
        gain, *runs_of = (before / each - 1 for each in (after["seconds"], *after["runs"]))
        spread = f"single runs {min(runs_of):+.1%} to {max(runs_of):+.1%}"
        print(f"{requests:3} request(s), {ahead} ahead: {gain:+.1%} ({spread})")
graphs = {
    (row["name"], row["requests"]): row["output_tokens_per_s"]
    for row in record["results"]
    if row["group"] == "CUDA graphs"
}
for requests in (1, 256):
    left = graphs["off", requests] / graphs["on", requests]
    print(f"{requests} request(s), without CUDA graphs: {left:.0%} of the speed is left")

# %% [markdown]
# With one request, a step is short and Python a larger part of it; with 256 a step takes longer, and there is less to
# hide. Two steps more bring next to nothing: with 256 requests the single runs overlap. These are small numbers because
# a CUDA graph, which starts all kernels of a step with one call (lesson 03), has taken most of Python out of a decode
# step already. The last two lines are from the same record: with run-ahead, but with every kernel launched by itself.
# *There* is what Python costs.
#
# ## 8 · What it is worth
#
# From the committed records of `minillm bench batching`. All requests of the traffic trace at once, through one engine
# with the same rows and blocks: static batches, then in flight. And the trace as it comes, request after request, with
# whole prompts (one waits until a step has room for all of it) and in chunks: TTFT and ITL, as percentiles (p99: 99 of
# 100 waits are no longer). The H200 had random weights in Gemma 2B's shape; answers have the trace's lengths, whatever
# they say.
#
# **Predict first**: in-flight over static batching, in tokens a second.

# %% tags=["exercise"]
guess_cpu = 1.7  # PREDICT: times as many tokens a second as static batching, on a CPU
guess_gpu = 2.2  # PREDICT: the same for Gemma 2B on an H200

# %%
guesses = {"cpu/batching": guess_cpu, "h200/batching": guess_gpu}
there = {name: records.read(name) for name in guesses}
for name, found in there.items():
    print(f"data/results/{name}.json: {records.model_of(found)}")
    print(f"all at once, lengths / {found['scale']}:")
    print(
        f"{'':12} {'steps':>6} {'tokens a step':>14} {'ms a step':>10} {'output tokens/s':>16}"
    )
    facts = []
    for row in found["results"]:
        if row["part"] == "throughput":
            steps, speed = row["steps"], row["output_tokens_per_s"]
            # No answer's last token is computed.
            ran = (row["input_tokens"] + row["output_tokens"] - row["requests"]) / steps
            ms = 1e3 * row["seconds"] / steps
            facts.append((steps, ran, ms, speed))
            print(f"  {row['batching']:10} {steps:6,} {ran:14.0f} {ms:10.2f} {speed:16,.0f}")
    times = [after / before for before, after in zip(*facts)]
    print(f"  {'times':10} {times[0]:6.2f} {times[1]:14.2f} {times[2]:10.2f} {times[3]:16.2f}")
    compare(
        "  in flight, over static", unit="times", prediction=guesses[name], measured=times[3]
    )
    print("as they come, ms (single runs):")
    for kind in ("whole", "chunked"):
        row = next(row for row in found["results"] if row.get("prefill") == kind)
        for wait, key in (("TTFT", "ttft_s"), ("ITL", "itl_s")):
            shown = []
            for p in ("p90", "p99"):
                ms = [1e3 * each[key][p] for each in row["runs"]]
                shown.append(f"{p} {np.median(ms):7,.1f} ({min(ms):,.1f} to {max(ms):,.1f})")
            print(f"  {kind:8} {wait:5}{shown[0]:30}{shown[1]}")
    print()

# %%
for found in there.values():
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
    plots.batching(found, left)
    plots.chunking(found, right)
    plt.show()

# %% [markdown]
# Read the left pictures with section 1 in mind; dots are single runs. Time is steps times milliseconds a step. On the
# CPU the steps fall to 0.35, each takes 2.00 times as long, and the speed is 1.43 times what it was. On the H200 they
# fall to 0.38, each takes 1.42 times as long: 1.85 times the speed. Both ways compute the same tokens (on the H200
# 94,334 of prompts alone); what in-flight batching saves is idle rows. With fewer steps each has more to compute and
# takes longer, so the speed gains less than the steps fall. (In section 1 static batches took 1.81 times as many steps,
# with four rows. Here they take 2.85 and 2.63 times as many: the longest of 64 or 128 answers is further above the
# mean.)
#
# Read the right ones with section 4. Between tokens, whole prompts hurt few gaps much, and chunks many gaps a little:
# compare p99, and then p90. For the first token there are two effects. Whoever brings a long prompt waits longer when
# it is cut; whoever comes behind it need not wait for all of it. Which one wins depends on the load, so it has to be
# measured, on each machine and for each traffic, more than once.
#
# On the CPU chunks of 128 tokens halve the ITL p99, and the TTFT p99 is five times as long: all prompts share what the
# decodes leave of 128 tokens a step, and queue for it. The single runs do not overlap.
#
# On the H200 chunks of 512 tokens lower the ITL p99 from 8.2 to 5.5 ms and raise its p90 from 4.4 to 5.0, in every run.
# First tokens pay for it: the TTFT p90 is 17 ms in place of 14, the p99 25 in place of 20. That holds of the medians.
# One of the seven runs with whole prompts took 20 and 59 ms: of 400 requests four wait longer than the p99, and once
# they met something else on that machine. One run of each would have told the opposite.
#
# So choose the budget as large as a gap between tokens may last, and measure. (`LLM` takes 16,384 tokens on a GPU, for
# work where nobody waits for the next token.)
#
# ## Recap
#
# * Requests end at different times. A static batch waits for its longest; in flight, a free row is taken in the next
#   step. Count the idle cells and you know what there is to gain.
# * No padding: tokens lie one behind the other, and only attention knows where a row begins.
# * *Computed chases known.* Prefill, chunk, decode, cached beginnings and recovery are one rule with two numbers.
# * The token budget bounds a step, and so everybody's gap between tokens. Decodes first, then prompts, oldest first.
# * Blocks may run out. Who came last gives way, keeps its tokens, and is computed again.
# * A policy is an order, and a promise. Shortest first is the fastest on average and starves the long; with patience it
#   does not.
# * Running ahead hides Python: launched steps are counted, tokens are read later.
#
# **What got worse:** a reader's tokens no longer come evenly: a step with a chunk in it takes longer than one without,
# and the newcomer pays for small chunks with its first token. Work that was done is done again after a preemption.
# Tokens are computed and dropped by running ahead, and a row is free a step later than it could be. The scheduler runs
# before every step, not before every batch. Whoever sets the order can be unfair. And a run is harder to
# repeat: which requests share a step depends on when they came (their tokens do not, but for the last digits of sums;
# lesson 04).
#
# **Further reading:** Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*;
# Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention* (preemption);
# Agrawal et al. 2024, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*; Sheng et al. 2024,
# *Fairness in Serving Large Language Models*. Next: lesson 99 puts a server around it and many users in front.
