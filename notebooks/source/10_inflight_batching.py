# %% [markdown]
# # 10 · In-flight batching
#
# After this lesson you can:
#
# * explain, with four requests and two rows on paper, why servers let requests join and leave at every step, and what
#   chunked prefill is for;
# * write the one rule that covers prefill, chunked prefill, decode and recovery;
# * decide which requests get the tokens of a step, and run your decision inside the engine;
# * say what happens when the cache runs out of memory;
# * write a scheduling policy that prefers short prompts and never starves a long one.
#
# **90 minutes, plus 21 optional (sections 7 to 12). Needs:** a CPU, and lessons 00 and 02; lesson 09 helps with
# sections 2 and 5. You should know what *prefill* (the model runs a prompt's tokens together) and *decode* (it
# generates an answer one token at a time) are. On a GPU, the timed part of section 4 runs Gemma 2B, with random weights
# if the trained ones are not installed.

# %%
from dataclasses import dataclass

import numpy as np

from minillm import using
from minillm.bench import records
from minillm.course import NotSolvedYet, check, compare, describe, solved, tier, yours
from minillm.course.lesson_10 import pictures as draw
from minillm.course.shared import batching
from minillm.course.shared.batching import run
from minillm.scheduler.policies import FirstComeFirstServed, ShortestPromptFirst

# %% [markdown]
# ## 1 · Four requests, two rows · 21 min
#
# Decoding one request reads all of the model's weights to produce one token (lesson 00). Decoding two requests together
# reads the weights once for both. So a server runs many requests in one **step**, which is one forward pass of the
# model. The requests in a step are its **batch**, and each occupies one **row** of it. Once its prompt has run, a row
# yields one token per step.
#
# The difficulty is that requests differ in length. Four of them arrive together, and we have two rows:

# %%
FOUR = {"A": (3, 9), "B": (2, 2), "C": (12, 3), "D": (5, 4)}
for name, (prompt, output) in FOUR.items():
    print(f"{name}: a prompt of {prompt:2} tokens, an answer of {output}")

# %% [markdown]
# We run them in the engine and record a **trace**: events that say which request had which row in each step. Only
# lengths matter here, so the prompts' tokens are drawn at random. `run` opens a small engine on the CPU, in float64 so
# that results can be compared exactly, submits the requests, and calls the engine's `step` until all are done.
#
# **Static batching** is the old way: take as many requests as there are rows, run them until *all* of them are done,
# then take the next ones. The engine still offers it as a policy, for comparison. **In-flight batching** (also called
# continuous batching; introduced by Yu et al. 2022 as *iteration-level scheduling*) decides again after every step: a
# request that is done leaves, and a waiting request takes the free row.

# %%
static = run(FOUR, max_num_seqs=2, policy="static")
in_flight = run(FOUR, max_num_seqs=2)
draw.rows_in_use({"static": static.steps, "in flight": in_flight.steps}, rows=2)
describe("""Two grids of two rows each, a column per step. In the static grid B's row is idle from step 2 until A is
done in step 8, and only then do C and D start. In the in-flight grid C takes B's row in step 2 and D follows.""")

# %% [markdown]
# Each column is a step, and each line is a row. Orange cells run a prompt and show how many of its tokens. The step
# that finishes a prompt also yields the first token of the answer, so an answer of nine tokens takes nine cells. Blue
# cells decode one token. Gray cells are idle. The numbers under the columns say how many tokens the step computes in
# total. All row diagrams in this lesson use these colors.
#
# Look at B. It is done after two steps. In the static batch its row then stays idle for seven steps while C and D wait
# in the queue. In flight, C takes the row in the very next step and runs alongside A, which keeps decoding.
#
# **Exercise 1 (8 minutes).** Count the steps and the idle cells. You only need the lengths of the answers: each request
# occupies a row for as many steps as its answer has tokens. (A real server doesn't know these lengths in advance, which
# is why it cannot simply sort requests into tight batches.)
#
# $$\text{idle} = \text{steps} \times \text{rows} - \sum \text{tokens}$$
#
# For example, two requests of 4 tokens in two rows take 4 steps either way, and no cell is idle: `(4, 0)`.


# %% tags=["exercise"]
def steps_and_idle(outputs: list[int], rows: int, in_flight: bool) -> tuple[int, int]:
    """(steps, idle cells) of requests whose answers have `outputs` tokens, taken in this order.

    in_flight: True: the next request takes the row that becomes free first. False: static batches;
    `rows` requests start together, and the next ones when all of these are done. `outputs` stays as
    it is.
    """
    # SOLUTION: static: sum up how long each batch takes; in flight: keep track of when each row
    #   becomes free
    if in_flight:
        free_at = [0] * rows
        for tokens in outputs:
            first = free_at.index(min(free_at))
            free_at[first] += tokens
        steps = max(free_at)
    else:
        batches = [outputs[first : first + rows] for first in range(0, len(outputs), rows)]
        steps = sum(max(batch) for batch in batches)
    return steps, steps * rows - sum(outputs)
    # END


# %%
check(steps_and_idle)

# %% [markdown]
# Four requests prove little. The project has a traffic trace, `data/traces/conversation.jsonl`: arrival times and
# lengths of 400 requests, drawn by a script (`data/traces.py`) to resemble a chat service. We take the first 20, with
# lengths divided by 8 so that a laptop finishes quickly, and four rows.

# %%
traffic = batching.traffic(requests=20, scale=8)
answers = [output for _, output in traffic.values()]
print("tokens of the answers:", *answers)
print(f"mean {np.mean(answers):.1f}, longest {max(answers)}")

# %% [markdown]
# **Predict first.** With static batches of four of these requests, what fraction of the cells is idle? And by
# what factor do static batches need more steps than in-flight batching?

# %% tags=["exercise"]
guess_idle = 0.5  # PREDICT: fraction of idle cells with static batches, from 0 to 1
guess_times = 1.9  # PREDICT: steps of static batching, as a multiple of in-flight batching's

# %%
ROWS = 4
runs = {
    "static": run(traffic, max_num_seqs=ROWS, policy="static"),
    "in flight": run(traffic, max_num_seqs=ROWS),
}
counts = {}
for name, each in runs.items():
    steps = len(each.steps)
    counts[name] = steps, steps * ROWS - sum(answers)
    print(f"{name:10} {steps:4} steps, {counts[name][1] / (steps * ROWS):4.0%} idle")
steps, idle = counts["static"]
share, times = idle / (steps * ROWS), steps / counts["in flight"][0]
compare("idle, static", unit="of the cells", prediction=guess_idle, measured=share)
compare("steps", unit="times", prediction=guess_times, measured=times)

# %% [markdown]
# The engine ran these. Does your function, which only knows the lengths of the answers, count the same? And how much
# time does in-flight batching save on this machine?

# %%
if solved(steps_and_idle):
    yours_too = [steps_and_idle(answers, ROWS, way == "in flight") for way in runs]
    print(f"your code counts the same: {yours_too == list(counts.values())}")
else:
    print("exercise 1 is not solved yet")
same = runs["static"].answers == runs["in flight"].answers
print(f"every request gets the same tokens both ways: {same}")

# %% tags=["nbval-ignore-output"] uncompared="times"
for name, each in runs.items():
    ms, speed = 1e3 * each.seconds / len(each.steps), sum(answers) / each.seconds
    print(f"{name:10} {each.seconds:5.2f} s, {ms:5.2f} ms a step, {speed:5.0f} tokens/s")
gained = runs["static"].seconds / runs["in flight"].seconds
print(f"in flight is {gained:.2f} times as fast")

# %% [markdown]
# Total time is the number of steps times the time per step, and so far we have only counted steps. Both ways compute
# the same prompts and the same answers. In-flight batching packs them into fewer steps, so each step has more to
# compute and takes longer. How much longer depends on the machine; section 7 has the numbers for a CPU and an H200.
#
# Here is the same traffic from the engine's traces, a line per row and a column per step. The numbers are requests,
# where they fit, and a white line marks where a request begins.

# %%
draw.timelines({title: each.trace for title, each in runs.items()}, ROWS)
describe("""Two timelines of four rows. With static batches gray gaps follow each short answer until the longest of its
batch ends. In flight the rows are filled without gaps until the queue is empty, and the run ends much earlier.""")

# %% [markdown]
# ## 2 · One batch without padding · 4 min
#
# Step 2 of the in-flight picture ran one token of A together with twelve of C. How can one forward pass do that? A
# tensor is a rectangle, so the simple answer is to make every row as long as the longest one by adding **padding**:
# meaningless tokens that are computed all the same. Here is the step of the traffic with the most tokens, with and
# without padding:

# %%
fullest = max(runs["in flight"].steps, key=lambda step: sum(step.count))
draw.padded(fullest)
describe("""One step's tokens drawn twice. Above, padded: each row is filled up to the length of the longest, and much
of the rectangle is padding. Below, packed: the same tokens in one line, one row after the other, without padding.""")

# %% [markdown]
# Lesson 02 shows why padding is unnecessary: attention is the only part of the model where tokens interact. A norm, a
# matrix multiplication or an MLP does not care which request a token belongs to. So the engine concatenates the tokens
# of all rows into one *ragged batch* of shape `[tokens, hidden]`, without a batch dimension. Only attention needs to
# know where each row begins and ends (`query_start`) and which blocks of the cache hold its keys (`block_table`, lesson
# 09): see `Rows` in `minillm/ops/signatures.py`.
#
# **Predict first.** Suppose every step of the whole in-flight run were padded to a rectangle. What fraction of all
# positions would be padding?

# %% tags=["exercise"]
guess_padding = 0.6  # PREDICT: fraction of positions that are padding, from 0 to 1

# %%
real = runs["in flight"].tokens
places = sum(len(step.count) * max(step.count) for step in runs["in flight"].steps)
print(f"{real:,} tokens in rectangles of {places:,} positions")
compare(
    "padding", unit="of the positions", prediction=guess_padding, measured=1 - real / places
)

# %% [markdown]
# A static batch, as in transformers' `generate`, pads in other ways. It pads each prompt to the longest in the batch;
# its rectangular cache keeps as many keys for each row as for the longest one; and a row that is done keeps computing
# padding until the whole batch is done.
#
# ## 3 · One rule · 20 min
#
# Prefill, decode, joining in the middle: these look like separate cases. They are one case if the scheduler keeps two
# numbers for each request:
#
# * **known**: how many tokens it has, in prompt and answer together;
# * **computed**: how many of them have their keys and values in the cache.
#
# The difference is **pending**. A step runs some or all of the pending tokens, starting at `computed`. When the last
# known token has been computed, its logits are available, the model samples the next token, and `known` grows by one.
# *Computed chases known*; what we call it depends on the numbers:
#
# | known | computed | pending | this is called |
# |---|---|---|---|
# | 12 (a prompt) | 0 | 12 | prefill |
# | 12 | 5 | 7 | a later chunk of a prefill, or a prompt whose beginning was in the cache (lesson 09) |
# | 13 | 12 | 1 | decode |
# | 14 | 0 | 14 | resuming after the cache was taken away (section 5) |
#
# Here is request C in three runs. In the first two steps it waits in the queue. In the second run a step may compute at
# most six tokens, and in the third the cache runs out of blocks while C decodes.

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
describe("""Three plots of C's known and computed tokens over the steps. At once, computed jumps from 0 to 12 in one
step and then follows known one by one. In chunks it climbs in several steps. Preempted, it falls back to 0 while
known stays at 14, and later catches up in one step.""")

# %% [markdown]
# When C is done, its last token is known but not computed: no later token needs its keys.
#
# **Exercise 2 (12 minutes).** Write one step for requests that already have rows. They are served in their order,
# oldest first: each runs as many of its pending tokens as the remaining budget of the step allows. Update `computed`
# and `known`. A request that knows `limit` tokens is done and runs no more.
#
# $$\text{pending} = \text{known} - \text{computed}$$
#
# For example, a request with a prompt of 3 tokens gives `[(0, 3, True)]`; after that, 4 of its tokens are known and 3
# computed.


# %% tags=["exercise"]
@dataclass
class Running:
    prompt: int  # tokens of the prompt
    known: int  # tokens of prompt and answer so far
    computed: int  # of these, in the cache
    limit: int  # most tokens of prompt and answer


def next_step(requests: list[Running], budget: int) -> list[tuple[int, int, bool]]:
    """Run one step: (start, count, samples) of each request, in their order.

    start: the first token that runs. count: how many tokens run; 0: none. samples: whether the
    step yields a token for this request. budget: most tokens of all requests together.
    """
    # SOLUTION: for each request decide how many tokens run, then update its `computed` and,
    #   where the step yields a token, its `known`
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
# A complete in-flight scheduler needs only a dozen lines more: `batching.simulate` gives free rows to waiting requests,
# calls your function for each step, and takes out the requests that are done. It should run our four requests exactly
# as the engine does, with and without a budget of six tokens: the same tokens of the same requests in every step.

# %%
if solved(next_step):
    shown = batching.simulate(next_step, Running, FOUR, rows=2)
    print("the same as the engine, step by step:", shown == in_flight.spans)
    cut = batching.simulate(next_step, Running, FOUR, rows=2, budget=6)
    print("the same with a budget of 6:", cut == chunked.spans)
else:
    shown = in_flight.spans
    print("next_step is not solved yet; these are the engine's steps:")
for number, step in enumerate(shown[:4]):
    ran = [f"{name} from {start}: {count}" for name, (start, count) in step.items()]
    print(f"step {number}: ", ", ".join(ran))

# %% [markdown]
# The engine does this for all rows at once: `known` and `computed` are numpy arrays with one entry per row, and
# `queries` is your `count`, chosen before. If you open the listing, look only for the three lines that update
# `self.computed`, decide `samples`, and update `self.known`.

# %%
# ENGINE: minillm.scheduler.scheduler:Scheduler._launch

# %% [markdown]
# ## 4 · The token budget · 22 min
#
# Look at the in-flight picture of section 1 again, at the number under step 2: 13 tokens, where the steps around it
# compute two. A step takes longer the more tokens it computes, and A's user waits for that step too. With twelve tokens
# the delay is too short to notice. With a prompt of thousands of tokens, every other answer pauses.
#
# Users experience two kinds of waiting, and servers are judged by both:
#
# * **TTFT**, time to first token: from when a request arrives until its first token is available;
# * **ITL**, inter-token latency: the gap between two consecutive tokens of an answer.
#
# $$\text{TTFT} = t_1 - t_\text{arrival} \qquad \text{ITL}_i = t_{i+1} - t_i$$
#
# Here $t_i$ is when token $i$ of the answer arrives. Running a long prompt in a single step gives the newcomer the best
# TTFT, and everyone else one very long ITL.
#
# **Chunked prefill** (Agrawal et al. 2024, *Sarathi-Serve*, section 4) sets a limit: no step computes more than a fixed
# number of tokens, the **token budget**. As much of a prompt runs as fits, and the rest in the following steps. The
# rule of section 3 already covers this. Here is a budget of 6:

# %%
draw.rows_in_use({"in flight": in_flight.steps, "in flight, budget 6": chunked.steps}, rows=2)
describe("""Two grids of two rows. Without a tight budget step 2 runs all 12 tokens of C's prompt and one of A, 13
in total. With a budget of 6 C's prompt takes three steps, A decodes in each of them, and no step computes more than 6
tokens.""")

# %% [markdown]
# C's prompt takes three steps instead of one, so its first token comes two steps later. But no step computes more than
# 6 tokens, and A gets a token in each of the three.
#
# That A gets its token is a decision: C's prompt could have used the whole budget. Sarathi-Serve calls the decision
# *stall-free* scheduling: **first every row with one pending token, then prompts, oldest first.** A decode takes only
# one token of the budget, and skipping it would interrupt an answer that someone is reading. Exercise 2 simply went by
# age. That is the same here, because A is older than C. But where requests overtake one another (section 6), the oldest
# row may be the one with a long prompt.
#
# **Exercise 3 (10 minutes).** Share the budget in this order. `pending` has one entry for each running row, the oldest
# request first. Return how many tokens of each row run in this step, $c_i \le p_i$ with $\sum c_i \le \text{budget}$.
#
# The engine calls it once for all running rows, then for each request that is about to join, with what is left of the
# budget.
#
# For example, `share_budget(np.array([1, 1, 6]), 8)` runs everything: `[1, 1, 6]`.


# %% tags=["exercise"]
def share_budget(pending: np.ndarray, budget: int) -> np.ndarray:
    """How many of each row's pending tokens run in this step, `budget` at most in all.

    pending: [rows] whole numbers above 0, oldest row first; do not change it. Returns [rows]
    whole numbers. Rows with one token come first, then prompts, oldest first, each cut where
    the budget ends.
    """
    # SOLUTION: serve rows with one token, then the others; each gets what it can use of what is
    #   left; return the counts in the order of the rows
    order = np.argsort(pending > 1, kind="stable")
    before = np.cumsum(pending[order]) - pending[order]
    counts = np.empty_like(pending)
    counts[order] = np.minimum(pending[order], np.maximum(budget - before, 0))
    return counts
    # END


# %%
check(share_budget)

# %% [markdown]
# Now your function decides inside the engine. A **policy** is a class that makes the scheduler's decisions: the order
# of the queue (`key`, section 6), whether a request may join now (`admits`; the static policy admits requests only to
# fill an empty batch), and `share`. Inside the `with` block yours replaces the engine's.


# %%
class MyShare(FirstComeFirstServed):
    def share(self, pending, budget):
        return share_budget(pending, budget)


with using(policy=MyShare) as used:
    shared = run(FOUR, max_num_seqs=2, max_num_batched_tokens=6)
if used.not_solved:
    print("share_budget is not solved yet: the engine's own ran")
else:
    calls = used.calls["policy"]
    print(f"the engine called your policy's `key`, `admits` and `share` {calls} times in all")
    print("the same steps as with the engine's own:", shared.spans == chunked.spans)

# %% [markdown]
# ### How large a budget?
#
# Now we measure real waits. Seven users decode. After twenty steps a request with a long prompt joins. We try several
# budgets, from large to small, and measure two things: the newcomer's TTFT, and the longest ITL of the seven users.
# First without a clock: how many steps run the newcomer's prompt, and how many tokens does the largest of them compute?

# %%
here = tier()
LONG, BUDGETS, options = 900, [1024, 256, 128, 64, 32], {}
if here.name == "gpu":  # a larger model and a longer prompt
    LONG, BUDGETS = 6000, [8192, 4096, 2048, 1024, 512, 256]
    options = here.options | {"model": here.model, "num_blocks": None, "rehearse": True}
served = {budget: batching.newcomer(budget, LONG, **options) for budget in BUDGETS}
print(f"{here.label}; a prompt of {LONG:,} tokens")
print("budget   steps for the prompt   most tokens in one of them")
for budget, each in served.items():
    prompt_steps, most = batching.newcomer_steps(each)
    print(f"{budget:6} {prompt_steps:22} {most:28}")
large, small = BUDGETS[0], BUDGETS[-2]
print(f"budgets to compare: {large:,} and {small}")

# %% [markdown]
# **Predict first.** Take the two budgets in the last line. How many times as long is the newcomer's TTFT with the small
# one? And what fraction of the users' longest ITL remains?

# %% tags=["exercise"]
guess_ttft = 1.7  # PREDICT: TTFT, small budget, in multiples of the large one's
guess_gap = 0.15  # PREDICT: longest ITL, small budget, as a fraction of the large one's

# %% tags=["nbval-ignore-output"] uncompared="times"
waits = {budget: batching.newcomer_waits(each) for budget, each in served.items()}
times = {budget: np.divide(each, waits[large]) for budget, each in waits.items()}
print(f"budget       TTFT             longest ITL      (and as a multiple of {large:,}'s)")
for budget, (ttft, gap) in waits.items():
    longer, shorter = times[budget]
    print(f"{budget:6} {ttft:7.0f} ms {longer:5.2f} {gap:10.0f} ms {shorter:5.2f}")
compare("TTFT", unit="times", prediction=guess_ttft, measured=times[small][0])
compare("longest ITL", unit="times", prediction=guess_gap, measured=times[small][1])
names = ("the newcomer's TTFT", "longest ITL of the users")
draw.trade(BUDGETS, dict(zip(names, zip(*waits.values()))))
describe("""Two lines over the token budget, both axes logarithmic. Toward smaller budgets the newcomer's time to first
token grows, and the longest gap between two tokens of the other users shrinks, more slowly toward the smallest
budgets.""")

# %% [markdown]
# Each row of the table is a trade-off. (Each budget is measured only once; on a busy machine, a row may not fit the
# pattern.) A small budget costs the newcomer time, for three reasons: every step has a fixed cost; the others' decodes
# run in each of these steps too; and each chunk reads the keys of the chunks before it again.
#
# How much the other users gain depends on how a step's time grows with its tokens. Where it is proportional to them, a
# quarter of the budget means a quarter of the gap. Where the fixed cost of a step dominates (preparing and launching
# it, and reading the weights), the gap hardly shrinks any further. Go down the table until the gap stops shrinking, if
# it does: from there on, a smaller budget costs the newcomer time and gains the others little. Larger budgets are a
# matter of choice: decide which ITL you promise ("a token every 50 ms") and take the largest budget that keeps the
# promise.
#
# ## 5 · When memory runs out · 5 min
#
# Every computed token leaves keys and values in the cache, in blocks (lesson 09). A request is admitted when there are
# enough blocks for what it *knows*. How many it will need in the end is unknown. So the moment may come when every row
# wants another block and there are not enough.
#
# An engine could reserve for each request the most it may ever need. Then this never happens, but much of the memory
# stays empty, because most answers end early. Or it admits more requests and, when blocks run out, takes one request's
# memory away: **preemption**. The most recent request (in order of arrival; section 6 has other orders) goes back to
# the queue, and its blocks become free. Because the most recent one always goes, the oldest request always makes
# progress.
#
# What happens to its keys and values? They can be copied to CPU memory and back (**swapping**), or thrown away and
# **recomputed** (Kwon et al. 2023, section 4.5, describe both). Recomputing only needs the tokens, a few bytes each. In
# the terms of section 3, `known` stays and `computed` becomes 0. The next step that has room does the rest.
#
# Our four requests with ten blocks of two tokens each:

# %%
draw.rows_in_use({"plenty of blocks": in_flight.steps, "ten blocks": preempted.steps}, rows=2)
print(f"preemptions: {preempted.stats['preemptions']}")
describe("""Two grids of two rows. With ten blocks C loses its row after step 3, the row is idle until A is done in step
8, and in step 9 C runs 14 tokens at once: its prompt and the two tokens it had already generated.""")

# %% [markdown]
# In step 4, A needs a fourth block and none is free: A has three, C has seven. C is the more recent request and is
# preempted. It is now first in the queue, but it needs seven blocks again, which are not free until A is done, and D
# must not overtake it. In step 9 C returns, in whichever row is free. It runs 14 tokens, the 12 of its prompt and the
# two it had generated, *as if they were a prompt*, and samples its third token. D waits one more step: it needs the
# three blocks that are left, and the engine keeps one of them free for C. Are the tokens the same as without
# preemption?

# %%
alone = {name: run({name: FOUR[name]}).answers[name] for name in FOUR}
for name, each in {"plenty of blocks": in_flight, "ten blocks": preempted}.items():
    print(f"{name}: every request gets the tokens it gets alone: {each.answers == alone}")

# %% [markdown]
# They are: only work is lost. Two things keep that small. The engine admits a request only if, besides its own blocks,
# enough are free for what the running requests are expected to take in the next step; that keeps preemptions rare. And
# the prefix cache (lesson 09, off here) helps: a preempted request's blocks are not erased, and if no other request has
# taken them, they are found again, and `computed` starts above 0.
#
# ## 6 · Which request goes first · 16 min
#
# So far requests went in order of arrival. That is fair, but a long prompt at the head of the queue delays ten short
# ones behind it (*head-of-line blocking*). The tempting alternative is **shortest prompt first**. It takes one method:
# the scheduler computes `key` once for each request, when the request is queued, and the lowest key goes first.
#
# Here are sixty requests; one arrives before each step. Every sixth has a prompt of 96 tokens, the others of 8. The
# engine has four rows and a budget of 24 tokens, so requests arrive faster than it can serve them.


# %%
class ShortestAlways(FirstComeFirstServed):
    def key(self, request):
        return len(request.prompt)


waited = {
    "first come, first served": batching.mixed_waits(FirstComeFirstServed),
    "shortest always": batching.mixed_waits(ShortestAlways),
}
batching.show_waits(waited)

# %% [markdown]
# The mean wait for the first token is halved, at the expense of the long prompts. How long can a long prompt be made to
# wait? We put a single long prompt among short ones, 20 of them and then 40:

# %%
print("steps until the long one's first token, among 20 and among 40 short ones:")
for policy in (FirstComeFirstServed, ShortestAlways):
    found = [batching.long_one_waits(policy, shorts) for shorts in (20, 40)]
    print(f"{policy.__name__:26} {found[0]:3} {found[1]:3}")

# %% [markdown]
# There is no limit. As long as short prompts keep coming, the long one waits: **starvation**. A policy is *fair* if
# every request gets its turn, however many arrive later.
#
# The classic cure is **aging**. A request could lose a few tokens of its length with every step it waits, but then the
# keys of all waiting requests would have to be updated in every step. There is a simpler way: since all waiting
# requests age at the same rate, the *differences* between them never change. So instead of making waiting requests
# shorter, treat later arrivals as longer than they are. (The clock then counts arrivals instead of steps.)
#
# **Exercise 4 (6 minutes).** Write the key of this policy. Make short prompts go first, but let a prompt of $n$ tokens
# be overtaken by at most $n/\text{patience}$ later requests, whatever they are: those after that must have a larger
# key. Only `key` is yours; the class inherits the rest.
#
# A request has `prompt` (its token ids), `arrival` (0, 1, 2, ... in order of arrival), `known` (the ids of prompt and
# answer so far), `limit` and `params`. Asking for a key again must give the same key.
#
# For example, of two prompts of 10 tokens the one that arrived first has the smaller key.


# %% tags=["exercise"]
class PatientShortest(FirstComeFirstServed):
    """Shortest prompt first; n tokens of prompt are overtaken at most n / patience times."""

    def __init__(self, patience: float = 4.0):
        self.patience = patience

    def key(self, request) -> float:
        """A number: lower goes first."""
        # SOLUTION: the length that the scheduler should see, from the prompt and the arrival
        return len(request.prompt) + self.patience * request.arrival
        # END


# %%
check(PatientShortest)

# %%
patient = yours(PatientShortest, ShortestPromptFirst)  # the engine's until yours is written
whose = "yours" if solved(PatientShortest) else "the engine's"
waited[f"with patience ({whose})"] = batching.mixed_waits(patient)
batching.show_waits(waited)
found = [batching.long_one_waits(patient, shorts) for shorts in (20, 40)]
print("a long prompt among 20 and 40 short ones waits", *found, "steps")
draw.waits({label: batching.wait_points(each) for label, each in waited.items()})
describe("""Three plots of each request's wait over its arrival. First come, first served: all waits grow together.
Shortest always: short prompts hardly wait, and long ones wait longest of all. With patience: short prompts wait a
little, and most long ones less than with shortest always.""")

# %% [markdown]
# With patience, a long prompt has a bound. The 22nd short prompt after it has the same key, since $(96-8)/4=22$, and
# among equal keys the older request goes first: at most 21 pass it, however many are still to come. Its own 96 tokens
# then take a few steps more. Most of the reduction in the mean wait remains.
#
# Finally, everything together: your order and your sharing serve the traffic in one engine. The engine supplies
# whatever you skipped.


# %%
class MyScheduler(patient):
    def share(self, pending, budget):
        return yours(share_budget, super().share)(pending, budget)


with using(policy=MyScheduler) as used:
    served_by_mine = run(traffic, max_num_seqs=ROWS, max_num_batched_tokens=32)
shares = "yours" if solved(share_budget) else "the engine's"
print(f"order: {whose}; sharing: {shares}; {used.calls['policy']} calls")
same = served_by_mine.answers == runs["static"].answers
print(
    f"{len(served_by_mine.steps)} steps; the same tokens for all {len(traffic)} requests: {same}"
)

# %% [markdown]
# A policy decides when requests run. It cannot change their tokens, because no token depends on the other requests in
# the batch. (Up to rounding: the order of additions may decide between two tokens whose logits are nearly equal.
# In float64 they would have to agree to about 15 digits; in lower precision it happens now and then.)
#
# Here is the engine's `FirstComeFirstServed`, with your `share`. (Its `ShortestPromptFirst`, `LLM(policy="shortest")`,
# has your `key`.) `fair` is a promise that no request waits forever; the engine's tests hold policies to it. When
# blocks run out, the running request with the highest `key` is preempted. `minillm/scheduler/policies.py` has more
# policies, `StaticBatching` among them.

# %%
# ENGINE: minillm.scheduler.policies:FirstComeFirstServed

# %% [markdown]
# ## 7 · What it is worth (optional) · 2 min
#
# These are committed records of `minillm bench batching`, on a CPU and on an H200. All 400 requests of the traffic
# trace arrive at once, and one engine serves them with static batches and in flight. The H200 ran Gemma 2B's shape with
# random weights, and every answer has the length that the trace gives. On the CPU, all lengths are divided by 8.
#
# **Predict first**: by what factor does in-flight batching increase the tokens per second?

# %% tags=["exercise"]
guess_cpu = 1.7  # PREDICT: in-flight over static batching, tokens per second, on a CPU
guess_gpu = 2.2  # PREDICT: the same for Gemma 2B on an H200

# %%
there = {name: records.read(f"{name}/batching") for name in ("cpu", "h200")}
for (name, record), guess in zip(there.items(), (guess_cpu, guess_gpu)):
    faster, most = batching.throughput_table(record)
    compare(f"{name}, speed", unit="times", prediction=guess, most=most, measured=faster)

# %% [markdown]
# The row `times` divides in-flight by static. If a step took no longer with more tokens in it, the speed would rise by
# the inverse of the first factor: that is the *at most*. But both ways compute the same tokens, so with fewer steps
# each step has more to compute and takes longer. Here in-flight batching saves more steps than in section 1, because
# the longest of 64 or 128 answers is further above the mean than the longest of four.
#
# ## 8 · What preemption costs (optional) · 2 min
#
# We give the traffic of section 1 little memory, 128 tokens for four rows, and count the tokens that run:

# %%
few = run(traffic, max_num_seqs=ROWS, block_size=4, num_blocks=32)
print("blocks   preemptions   tokens run   steps   the same tokens")
for blocks, each in {"plenty": runs["in flight"], "32": few}.items():
    same = each.answers == runs["in flight"].answers
    numbers = f"{each.stats['preemptions']:13} {each.tokens:12,} {len(each.steps):7}"
    print(f"{blocks:>6} {numbers}   {same}")

# %% [markdown]
# The number of steps grows by a larger factor than the number of tokens. Computing tokens twice is one cost; the other
# is that with less memory, fewer requests run at the same time.
#
# ## 9 · Prompts first (optional) · 3 min
#
# What if the order of section 4 is reversed? Early servers, among them vLLM's first scheduler, ran new prompts before
# anything else and paused the decodes (Agrawal et al. 2024 call this *prefill-prioritizing*). `PromptsFirst` is such a
# policy:

# %%
with using(policy=batching.PromptsFirst):
    greedy = run(FOUR, max_num_seqs=2, max_num_batched_tokens=6)
draw.rows_in_use({"prompts first": greedy.steps, "decodes first": chunked.steps}, rows=2)
describe("""Two grids with a budget of 6. With prompts first, A waits in step 3 while C's prompt takes all 6 tokens.
With decodes first A decodes in every step. C's first token comes in the same step either way, because its prompt is
short.""")

# %% [markdown]
# In step 2 C is only joining, and a newcomer gets what the running rows leave: five tokens. In step 3 C's prompt takes
# all six, and A, in the middle of its answer, waits (darker gray: A has the row, but none of its tokens run). C's
# prompt of twelve tokens is too short to save a step. A prompt of a thousand tokens would take about 167 steps at six
# tokens each instead of 200 at five: C's first token would come 33 steps sooner, and A would wait all that time.
#
# ## 10 · Waits under load (optional) · 4 min
#
# The same records have a second part. Requests arrive at the trace's times, at full length, and are served with whole
# prompts (a prompt waits until a step has room for all of it) and with chunked prefill. On the H200 all 400 arrive
# twelve times as fast as in the trace; on the CPU only the first 96 do, at the trace's own speed.
#
# For waits, a mean hides what users complain about, so servers report **percentiles**: 99% of all waits are at most
# p99.

# %%
for record in there.values():
    batching.latency_table(record)
draw.worth(list(there.values()))
describe("""For each machine two bar charts. Left: in-flight batching yields more output tokens per second than static
batching. Right: with chunks, the p99 of the time between tokens is lower than with whole prompts, and its p90 a little
higher; on the CPU the time to first token is much longer with chunks.""")

# %% [markdown]
# Between tokens, whole prompts delay a few gaps a lot, and chunks delay many gaps a little: compare p99 with p90. For
# the first token there are two effects. A long prompt's first token comes later when the prompt is cut, and the
# requests after it need not wait for all of it. Which effect wins depends on the load.
#
# On the CPU, chunks (128 tokens a step) halve the ITL p99, but the TTFT p99 is about five times as long: all prompts
# together share what decodes leave of 128 tokens a step, and they queue for it. On the H200 (512 tokens a step) the ITL
# p99 falls by a third. The TTFT p90 rises by about 2 ms, if one outlier in the seven runs of each way is left out: 20
# ms with whole prompts, 68 ms with chunks. The TTFT p99 doesn't settle anything there: only four of 400 requests wait
# longer than that, and single runs range from 24 to 114 ms. Had each way been run only once, either could have come out
# ahead. So choose the budget by measuring ITL and TTFT on your machine, with your traffic, more than once.
#
# ## 11 · The three ways, over time (optional) · 3 min
#
# Eight requests of the traffic, with prompts at full length and answers cut to a sixth: in static batches, in flight
# with whole prompts, and chunked. This time the x axis is time, and a white line marks where a step begins. A wide
# column is a step that took long, and every row that is blue in it waited that long for one token.

# %%
eight = batching.traffic(requests=8).items()
HEAVY = {name: (prompt, output // 6) for name, (prompt, output) in eight}
ways = {"static": {"policy": "static"}, "in flight, whole prompts": {}}
ways["in flight, at most 64 tokens a step"] = {"max_num_batched_tokens": 64}
three = {way: run(HEAVY, max_num_seqs=4, dtype="auto", **each) for way, each in ways.items()}
for title, each in three.items():
    largest = max(sum(step.count) for step in each.steps)
    print(f"{title:36} {len(each.steps):3} steps, the largest of {largest:3} tokens")
    chunks = [step["05"][1] for step in each.spans if "05" in step]
    print(f"{'':36} request 5's prompt: {' + '.join(str(n) for n in chunks if n > 1)}")
draw.timelines({title: each.trace for title, each in three.items()}, 4, x="time")
describe("""Three timelines of four rows over seconds. With whole prompts some columns are much wider than the others:
there a prompt ran, and the decoding rows waited. With at most 64 tokens a step the widest columns are narrower, and a
prompt takes several of them.""")

# %% [markdown]
# Request 5 has a prompt of 298 tokens. In flight with whole prompts, it runs in a single wide column, in which each
# decoding row gets one token. In chunks it runs in five narrower columns, and the decoding rows get a token in each.
# Chunks cost some total time, because there are more steps; what they buy is more even gaps. (Each way runs only once:
# on a busy machine, the totals may come out in another order.)
#
# Gray cells have three causes. In static batches, rows wait for the rest of their batch. At the left of the chunked
# timeline, requests 1 to 3 are not admitted yet, because older prompts use the whole budget. And at the right of all
# three the queue is empty.
#
# ## 12 · Running ahead (optional) · 7 min
#
# The scheduler is Python, and while it runs, the GPU may be waiting. How long does it take? Here is the engine's
# scheduler alone, without a model, with all rows decoding:

# %% tags=["nbval-ignore-output"] uncompared="times"
ablation = records.read("h200/ablation")
fastest = max(
    row["output_tokens_per_s"] for row in ablation["results"] if row["requests"] == 1
)
for rows in (1, 64, 1024):
    print(f"{rows:5} rows: {batching.scheduling_us(rows):6.0f} us to schedule a step")
print(f"a decode step of {records.model_of(ablation)}, on an H200: {1e6 / fastest:,.0f} us")

# %% [markdown]
# Because the scheduler works on numpy columns, a thousand rows take far less than a thousand times as long as one.
# Compare the first line with the last, which is for one request: scheduling takes only a small part of that step, and
# with more rows the step takes longer too. But preparing and launching the step and fetching its tokens come on top. A
# GPU that waits for Python after each step is idle for all of that time.
#
# The way out is **not to wait**. What does the scheduler need from step N to choose step N + 1? Not the tokens: they
# stay on the GPU, where the next step reads them. It only needs to know that each row has *one more*, and `known` grows
# when a step is launched (`_launch` in section 3), not when its tokens are read. So step N + 1 can be launched before
# N's tokens are back: **run-ahead**. In this drawing Python takes 0.6 ms for a step and the device 1 ms; each step has
# its own color, pale while Python prepares it:

# %%
draw.lanes({"no run-ahead": 0, "one step ahead": 1}, python=0.6, device=1.0)
describe("""Two timelines with a lane for Python and a lane for the device. Without run-ahead the device is idle while
Python prepares each step. One step ahead, Python prepares the next step while the device runs, and the device's lane
has no gaps.""")

# %% [markdown]
# One thing cannot be known in advance: whether a token *ends* its answer. The model decides that, and by the time the
# engine reads it, the next steps have been launched with that row in them. Their tokens are **dropped**, and the row
# and its blocks stay occupied until the last of these steps is done. (An answer that ends because it reaches its limit
# is known in advance and costs nothing.)
#
# **Predict first.** We ask six questions with a limit of 60 tokens and run three steps ahead. How many tokens are
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
dropped, said = {}, {}
for ahead in (0, 1, 3):
    computed, said[ahead] = batching.answer_ahead(QUESTIONS, ahead)
    dropped[ahead] = computed - sum(map(len, said[ahead]))
    print(f"{ahead} ahead: {computed} tokens computed, {dropped[ahead]} of them dropped")
print("the same answers:", said[0] == said[1] == said[3])
compare("dropped, 3 ahead", unit="tokens", prediction=guess_dropped, measured=dropped[3])

# %% [markdown]
# The model itself ended five of the answers, and each of these cost three tokens. The sixth reached its limit. What
# does run-ahead gain? Nothing on a CPU, where the model runs inside the Python call that launches it. On an H200, from
# the committed record:

# %%
batching.gains(ablation, "run-ahead", before="0", after=("1", "3"))
batching.gains(ablation, "CUDA graphs", before="off", after=("on",))
draw.ablation(ablation, ["run-ahead", "CUDA graphs"])
describe("""Bars of output tokens per second on an H200, as shares of the best, for 1 and for 256 requests. Without
run-ahead the speed is a little lower; one and three steps ahead are nearly equal. Without CUDA graphs it is far
lower.""")

# %% [markdown]
# With one request, a step is short and Python is a larger part of it. With 256 requests, a step takes longer and there
# is less to hide. Going three steps ahead instead of one gains nothing measurable. The gains are small because CUDA
# graphs, which launch all kernels of a step with a single call, have already removed most of the Python from a step.
# The bars at the bottom compare runs with and without CUDA graphs ("decodes alone": only steps without a prompt use
# them). They are the topic of lesson 11.
#
# ## Recap · 2 min
#
# * Requests end at different times. A static batch waits for its longest request; in flight, the next step gives a free
#   row to the next request. Count the idle cells to see what there is to gain.
# * No padding: tokens are concatenated, and only attention knows where a row begins.
# * *Computed chases known.* Prefill, chunks, decode, cached prefixes and recovery are one rule with two numbers.
# * The token budget bounds a step and so everyone's inter-token latency. Decodes first, then prompts, oldest first.
# * Blocks may run out. The most recent request is preempted, keeps its tokens, and is computed again.
# * A policy is an order and a promise. Shortest first gives the best mean wait and starves long prompts; with patience
#   it does not.
#
# **What got worse:** tokens no longer arrive evenly, because a step with a chunk takes longer than one without, and
# small chunks delay a newcomer's first token. Preemption repeats work. The scheduler runs before every step, not once
# for a batch. A policy can be unfair. And a run is harder to reproduce: which requests share a step depends on when
# they arrived (their tokens do not, except for rounding; lesson 04).
#
# **Further reading:** Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*;
# Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention* (preemption);
# Agrawal et al. 2024, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*; Sheng et al. 2024,
# *Fairness in Serving Large Language Models*. Next: lesson 11 makes the steps themselves cheaper.
