# %% [markdown]
# # 13 · Speculative decoding
#
# After this lesson you can:
#
# * explain how one step of a model can yield several tokens of one answer, and why the answer stays the same;
# * write the rule that accepts drafts, and say what has to happen to the cache when some are rejected;
# * write a drafter that needs no model, and run it inside the engine;
# * decide from measured step times how many drafts are worth their time, and when none are;
# * derive rejection sampling, the rule from the two 2023 papers, and find the mistakes that break it.
#
# **100 minutes. Needs:** a CPU, and lessons 00, 02 and 10. You should know what a *step* of the engine is, that a step
# reads all weights once, and what the KV cache holds.

# %%
import numpy as np
import torch

from minillm import LLM
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_13 import pictures as draw
from minillm.course.lesson_13 import speculating
from minillm.course.lesson_13.speculating import GUESTS, STORY, SUMS, Erring, TargetModel
from minillm.ops import reference

llm = LLM(device="cpu", dtype="float64")  # float64, so that equal means equal
model, tokenizer = llm.engine.model, llm.tokenizer

# %% [markdown]
# ## 1 · Guess, then check · 7 min
#
# Lesson 00 found that the batch is nearly free: a decode step spends most of its time reading the weights, and they are
# read once however many tokens use them. A server with many users fills its batch with their requests. But an answer
# for a single user comes one token per step, and each step does a fraction of the work that it has time for.
#
# A committed record has the times of such steps, of Gemma 2B in bfloat16 on an H200. In each of them every token
# belongs to a request of its own, and the GPU runs it as one CUDA graph (lesson 11).
#
# **Predict first.** A step of eight tokens takes how many times as long as a step of one there?

# %% tags=["exercise"]
guess_eight = 1.1  # PREDICT: time of a step of 8 tokens, as a multiple of a step of 1

# %%
recorded = speculating.recorded_ms()
for tokens, ms in recorded.items():
    print(f"a step of {tokens:2} tokens: {ms:.2f} ms, {ms / tokens:.2f} ms a token")
compare("8 tokens", unit="times", prediction=guess_eight, measured=recorded[8] / recorded[1])

# %% [markdown]
# Most of the difference is between 1 and 4 tokens: for a single token the engine has a faster step of its own (lesson
# 11), which several tokens cannot use. From 4 tokens to 64, the time grows by little more than a quarter, and much of
# that is not the steps': the record divides the time of whole runs by their 256 steps, so each figure contains a share
# of the time that the prompts took, about a tenth for 64 requests. On the CPU of this machine, with the small embedded
# model, most of the time of a step of up to 8 tokens does not depend on their number either:

# %% tags=["nbval-ignore-output"] uncompared="times"
for tokens, ms in speculating.milliseconds(model).items():
    print(f"a step of {tokens:2} tokens: {ms:5.2f} ms of CPU time, {ms / tokens:5.2f} a token")

# %% [markdown]
# Could the eight tokens of a step be eight tokens of *the same* answer? The second one needs the first as its input,
# and that is not known before the step ends. It can be guessed, though. Suppose that something cheap, the **drafter**,
# guesses the next few tokens: the **drafts**. Then one step of the model, now called the **target**, runs the newest
# token and all drafts together, just as it runs the tokens of a prompt. Its logits say what the target itself would
# have chosen after each of them. So a single step shows which drafts are right, and which is the first wrong one.
#
# This is **speculative decoding** (Leviathan et al. 2023; Chen et al. 2023). `TargetModel`, from this lesson's helpers,
# is the model together with the cache of one request. `run` runs tokens after those in the cache and returns the logits
# after each. We take a sentence that the model would continue in a certain way, and put a wrong token among the drafts:

# %%
ids = tokenizer.encode("Once upon a time there was a")
answer = llm.generate(ids, speculating.greedy(9))[0].token_ids
newest, *right = answer
drafts = right[:4] + [right[5]] + right[5:7]  # the fifth one is wrong

target = TargetModel(model, capacity=64)
target.run(ids)
logits = target.run([newest, *drafts])  # one step
sampled = logits.argmax(-1).tolist()  # what the target would choose after each of these tokens
texts = [[tokenizer.decode([each]) for each in some] for some in ([newest], drafts, sampled)]
draw.one_step(texts[0][0], texts[1], texts[2])
describe("""Eight columns. Above: the newest token and seven drafts; below: the target's own next token after each. The
first four drafts equal the token below and to the left of them. The fifth does not; the target's own token is in that
place. What is to the right of it is gray.""")

# %% [markdown]
# Read the picture from the left. After the newest token, the target's own next token is below it, and the first draft,
# one column further, is the same: it is right. The next three are right, too. The fifth draft is wrong, and the picture
# shows what should be there: the target's own token, in blue. This one step gained five tokens: four drafts and one
# that the target chose itself. The gray tokens say nothing. They were computed after a wrong token, for a text that
# does not exist.
#
# ## 2 · Agreement · 17 min
#
# When is a draft *right*? With greedy decoding that is easy: it must be the most likely token. With a temperature, the
# target's next token is drawn at random, and there seems to be no right one.
#
# In this engine there is. To draw a token, the sampler takes one random number between 0 and 1, and picks the first
# token at which the cumulative sum of the probabilities exceeds it. The number is computed from the
# request's **seed** and the token's **position** in the text, and from nothing else:

# %%
# ENGINE: minillm.runner.sampler:uniforms

# %% [markdown]
# So the token that the target chooses at a position is determined as soon as the text before it is. It makes no
# difference which requests are in the batch, or in which step the position is computed. `choose` is that rule for one
# position. The engine does the same for all rows of a step:

# %%
SEED, TEMPERATURE = 1, 0.8


def choose(logits, position, temperature):
    """The target's own token at `position` of a text. logits: [vocab], after the text before it."""
    u = torch.tensor([speculating.number(SEED, position)])
    return int(reference.sample(logits[None], torch.tensor([temperature]), u))


for position in (8, 9, 10):
    print(f"seed {SEED}, position {position}: {speculating.number(SEED, position):.4f}")

# %% [markdown]
# That makes the check simple. A step runs the newest token and $k$ drafts, and returns $k + 1$ rows of logits. From
# each row, choose the target's own token with the number of its position. The first of these tokens, $s_0$, is certain:
# it depends on the known text only. If the first draft equals it, then the second row of logits saw the right text, and
# $s_1$ is certain, too. This goes on to the first draft that differs:
#
# $$\text{gained} = s_0, s_1, \dots, s_a \qquad d_1 = s_0, \; \dots, \; d_a = s_{a-1}, \; d_{a+1} \ne s_a$$
#
# Here $d_1, \dots, d_k$ are the drafts, and the first $a$ of them are right: these are accepted. We call this
# **agreement**. The text gains $a + 1$ tokens: the accepted drafts, and the token that the target chose after them. If
# all drafts are right, that is one token beyond the last draft. If the first one is wrong, the step still gains one
# token, as any decode step does. And every token is the one that decoding without drafts would have chosen, because it
# was chosen from the same logits with the same number. No draft can change a text. It can only make it come sooner, or
# waste time. (Up to rounding: a step of several tokens may add in another order, which can decide between two nearly
# equal tokens. This lesson computes in float64, where such ties are too rare to see. `LLM(exact=True)` always adds in
# the same order; in bfloat16 on an H200, that takes 1.6 to 2.1 times as long.)
#
# **Exercise 1 (6 minutes).** Write the check. For example, with the drafts 5 and 6, if the target's own tokens are 5, 9
# and 3, the step gains `[5, 9]`: the first draft is right; in place of the second the target has 9; and 3, chosen after
# the wrong draft 6, says nothing.


# %% tags=["exercise"]
def accepted(drafts: list[int], sampled: list[int]) -> list[int]:
    """The tokens that the text gains in a step, as a list; at least one.

    drafts: the k tokens that ran after the newest one; there may be none. sampled: the target's own
    token after the newest one and after each draft, k + 1 in all. Do not change them.
    """
    # SOLUTION: count how many drafts from the first on equal the target's own tokens; keep as many
    #   of these, and one more
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    return sampled[: right + 1]
    # END


# %%
check(accepted)

# %% [markdown]
# Now a whole answer. To have something to check before we write a drafter, we let one cheat: `Erring` is told the
# answer in advance, and makes a mistake at every position divisible by 5. The loop below is all of speculative
# decoding. Its last line, which shortens the cache, is the subject of section 3.

# %%
accept = yours(accepted, speculating.accepted)


def speculate(ids, count, drafter, temperature, rollback=True):
    """Continue `ids` by `count` tokens, with up to 7 drafts in a step: (the answer, its steps)."""
    target = TargetModel(model, capacity=len(ids) + 8 * count)
    text, end = list(ids), len(ids) + count
    text.append(choose(target.run(text)[-1], len(text), temperature))  # the prompt's step
    steps = 1
    while len(text) < end and steps < count:  # each step gains a token at least
        drafts = drafter(text, min(7, end - len(text) - 1))
        logits = target.run([text[-1], *drafts])
        sampled = [choose(row, len(text) + i, temperature) for i, row in enumerate(logits)]
        text += accept(drafts, sampled)
        steps += 1
        if rollback:
            target.length = len(text) - 1  # the newest token has not run yet
    return text[len(ids) :], steps


ids, plain = tokenizer.encode(STORY), {}
for temperature in (0, TEMPERATURE):
    plain[temperature] = speculating.run(STORY, temperature=temperature)  # the engine
    cheat = Erring(ids + plain[temperature].answer)
    mine, steps = speculate(ids, 80, cheat, temperature)
    same = mine == plain[temperature].answer
    print(
        f"temperature {temperature}: the engine's tokens: {same}, {steps} steps instead of 80"
    )
print(
    "the check:", "yours" if solved(accepted) else "the engine's, until you solve exercise 1"
)

# %% [markdown]
# The texts are the same at both temperatures, and come in a fifth of the steps: the cheat is wrong at every fifth
# position, so a step gains up to five tokens.
#
# The engine does the same, for all rows of a step. A drafter is called a **proposer** there, and
# `using(proposer=...)` replaces the engine's own, like any other part. Here `speculating.run` does that for us.
# `speculating.drafting` makes a proposer from a function of (tokens so far, most drafts). By your loop, and by the
# engine, the same drafts must take the same steps:

# %%
for temperature in (0, TEMPERATURE):
    cheat = Erring(ids + plain[temperature].answer)
    ran = speculating.run(STORY, speculating.drafting(cheat), temperature=temperature)
    same = ran.answer == plain[temperature].answer
    print(
        f"temperature {temperature}: {ran.steps} steps, {ran.right} of {ran.drafted} drafts right",
        end="",
    )
    print(f", the same tokens: {same}")

# %% [markdown]
# Here is how the engine writes exercise 1, for all rows at once: `drafts` is padded with -1, and `cumprod` turns the
# comparison into ones up to the first difference.

# %%
# ENGINE: minillm.runner.launched:agreed

# %% [markdown]
# ## 3 · Rejected drafts leave keys behind · 6 min
#
# A step writes the keys and values of all its tokens into the cache, those of wrong drafts as well. If they stayed,
# later tokens would attend to words that are not in the text, and would themselves be at wrong positions. In the
# loop, the cache keeps track of how many tokens count, in `target.length`. What happens without the last line?

# %%
cheat = Erring(ids + plain[0].answer)
stale, steps = speculate(ids, 80, cheat, 0, rollback=False)
pairs = enumerate(zip(stale, plain[0].answer))
differs = next((at for at, (one, other) in pairs if one != other), 0)
print(f"the first {differs} tokens are the same. From three tokens before that:")
for name, tokens in {"right": plain[0].answer, "stale": stale}.items():
    print(f"  {name}: {tokenizer.decode(tokens[differs - 3 : differs + 12])!r}")

# %% [markdown]
# Nothing crashes, and the text still reads well. That makes a stale cache hard to notice. (The opposite mistake is slow
# rather than wrong: to empty the cache and compute the whole text again.) The cure is to take the rejected tokens back:
# **rollback**. In a KV cache this is nearly free. Their keys need
# not be erased, because attention reads only the slots that count, and the next tokens are written over them:

# %%
draw.cache(before=12, drafts=4, right=1)
describe("""Three rows of slots, with a black bar after those that count. Before the step 12 slots count. After a step
with four drafts, of which one was right, 14 count, and three more hold stale keys. The next token is written over the
first of the three.""")

# %% [markdown]
# A step that began with 12 computed tokens ran the newest one and four drafts, in slots 12 to 16. One draft was right.
# So 14 slots count, and three are stale; the token that the target chose itself is the newest one now, and will run
# next, in slot 14.
#
# In the terms of lesson 10: the drafts made both numbers of the row larger, `known` and `computed`, and rejecting them
# takes both back. The blocks of the paged cache stay where they are, since the row will need them soon. A block is
# registered for sharing (lesson 09) only when all its tokens are certain.

# %%
# ENGINE: minillm.scheduler.scheduler:Scheduler._reject

# %% [markdown]
# Not every model allows this. A state-space layer, as in Mamba, keeps one state that each token changes, instead of a
# key for each token. There is no going back to an earlier state, unless a copy of it was saved before the drafts ran.
#
# ## 4 · A drafter without a model · 18 min
#
# Where do drafts come from? A common answer is a *draft model*: a smaller model with the same tokenizer, which the
# engine runs as `LLM(speculate=DIRECTORY)`. But much text needs no model to be guessed, because it is already there. An
# answer that edits, quotes or summarizes a text repeats parts of it, and tables, code and JSON repeat themselves.
# **Prompt lookup** (Saxena 2023) takes the last few tokens of the text, finds an earlier place with the same tokens,
# and drafts what followed. It searches the prompt and the answer so far. We take the newest such place.
#
# Such a run of $n$ tokens is an *n-gram*. A long n-gram that occurs again is strong evidence that the text goes on in
# the same way; a short one is found more often, and means less. So try the longest first. The engine tries 8, 4, then
# 2 tokens.
#
# **Exercise 2 (10 minutes).** Write it. For example, `lookup([9, 1, 2, 3, 4, 1, 2], most=4)` is `[3, 4, 1, 2]`: the
# last two tokens, 1 and 2, also appear earlier, and these four follow them there. (No run of 4 tokens appears twice.)
#
# The last n tokens themselves are no *earlier* place. But an earlier place may overlap them: in 9, 7, 7, 7 the last
# two tokens also appear one place earlier, and the draft is `[7]`. If fewer than `most` tokens follow, draft those.


# %% tags=["exercise"]
def lookup(tokens: list[int], most: int, sizes: tuple[int, ...] = (8, 4, 2)) -> list[int]:
    """Up to `most` drafts for what follows `tokens`; [] if no place is found.

    tokens: prompt and answer so far; do not change it. most: 1 or more. sizes: the n to try, in this
    order. The first n whose last n tokens also stand earlier decides; of several places, the newest
    one counts.
    """
    # SOLUTION: for each size, go from the newest earlier place to the oldest, and compare; return what
    #   follows the first place that is found
    for size in sizes:
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                return tokens[begin + size : begin + size + most]
    return []
    # END


# %%
check(lookup)

# %% [markdown]
# Now it drafts inside the engine. A proposer has two methods. `propose` gets the requests that can take drafts, each
# with its name, its tokens and the most that it can take, and returns a list of drafts for each. `forget` is told of
# requests that have ended. Ours keeps nothing, so it has nothing to forget.
#
# We try it on three prompts, greedily and with a temperature: the beginning of a story, a hotel's guest book, and
# questions with sums. For now `speculating.run` makes the engine run all drafts; section 5 is about which ones it
# should. The guest book begins like this, and a line of the model's continuation follows:

# %%
print(GUESTS.splitlines()[0])
print("and continues:", speculating.run(GUESTS).text.splitlines()[1])

# %% [markdown]
# **Predict first.** Without drafts, 80 tokens after the guest book take 80 steps. How many do they take with prompt
# lookup, greedily?

# %% tags=["exercise"]
guess_steps = 40  # PREDICT: steps for 80 tokens of the guest book, greedily


# %%
class MyProposer:
    def propose(self, asked):
        return [lookup(each.tokens.tolist(), each.most) for each in asked]

    def forget(self, request_id):
        pass


PROMPTS = {"story": STORY, "guest book": GUESTS, "sums": SUMS}
without, with_lookup = {}, {}
whose = "your lookup" if solved(lookup) else "the engine's lookup"
print(f"{whose:24} steps   drafts   right   tokens a step   the same tokens")
for name, prompt in PROMPTS.items():
    for temperature in (0, TEMPERATURE):
        case = name, temperature
        without[case] = speculating.run(prompt, temperature=temperature)
        ran = speculating.run(prompt, MyProposer, temperature=temperature)
        with_lookup[case] = ran
        same = ran.answer == without[case].answer
        label = f"{name}, temperature {temperature}"
        counts = f"{ran.steps:5} {ran.drafted:8} {ran.right:7} {ran.tokens_per_step:15.2f}"
        print(f"{label:24} {counts}   {same}")
found = with_lookup["guest book", 0]
fewest = 1 + np.ceil(79 / 8)  # the prompt's step yields a token, and each other one up to 8
compare("steps", unit="steps", prediction=guess_steps, floor=fewest, measured=found.steps)

# %%
draw.steps(
    {
        f"guest book, temperature {each}": (
            with_lookup["guest book", each].sizes,
            with_lookup["guest book", each].gained,
        )
        for each in (0, TEMPERATURE)
    }
)
describe("""Two bar charts, a bar per step. Greedily, about half of the steps run drafts, and in most of those some
drafts are accepted, up to seven. With a temperature there are more steps, and most of the drafts are rejected.""")

# %% [markdown]
# `tokens a step` is the mean of the steps after the prompt's; without drafts it is 1. (Other engines report the
# **acceptance length**, which counts only the steps that had drafts, so it is larger.) Three things can be seen here.
# It depends on the text: hardly anything in the story repeats, so there is hardly anything to look up, and little is
# lost either. It depends on the temperature: sampled tokens are left to chance, so good guesses fail. And in the guest
# book most steps run either no draft or seven, of which some are wrong: those cost time, which is the subject of the
# next section.
#
# Here is the engine's proposer. For each request it keeps one dictionary for each n (`_after`), from the hash of an
# n-gram to the place after its newest occurrence, so that a lookup takes the same time however long the text is; your
# function compares with every earlier place. And where the drafts run into the end of the text, it goes on in a
# circle: after 7, 7, 7 it drafts as many 7s as it may.

# %%
# ENGINE: minillm.speculation.ngram:NgramIndex.continuation

# %% [markdown]
# ## 5 · When drafts pay · 24 min
#
# A step with drafts takes longer than one without. On the H200, eight tokens take 1.33 times as long as one. So seven
# drafts pay if a step gains more than 1.33 tokens on average. This is the **break-even**.
#
# These are times of steps in CUDA graphs (lesson 11), in which steps with drafts run too, each draft as a row, like
# another request's token. One thing is left out: the next drafts depend on the tokens before them. If the **host**
# looks them up, that is the CPU, on which the engine's Python runs, it can launch a step only once it has read the
# tokens of the one before, and meanwhile the GPU waits. So on one GPU, the GPU looks them up itself by default
# (`speculate_ahead`), and need not wait; section 7 compares both. (The host still drafts in some steps: while a
# prompt runs or a request can join; while any running request has penalties, log-probabilities, or a grammar, which
# restricts the tokens that may come next; for models with sliding windows; and with a proposer or a scheduling policy
# of yours.)
#
# How many tokens does a step with $k$ drafts gain? Say that each draft is right with the probability $p$, if those
# before it are. The first draft is tested in any case, so it gains a token with probability $p$; the second counts only
# if the first is right, too, so it gains a token with probability $p^2$; and so on. With the token that every step
# gains:
#
# $$E(k) = 1 + p + p^2 + \dots + p^k \qquad \text{tokens per ms:} \quad \frac{E(k)}{t(k)}$$
#
# Here $t(k)$ is the time of a step with $k$ drafts. The figure shows how many times as fast as without drafts that is,
# for one request, with the H200's times. (For a number of tokens that the record lacks, the helper `step_ms` takes the
# time of the next larger one.)

# %%
longer = {drafts: speculating.step_ms(1 + drafts) / recorded[1] for drafts in (1, 3, 7, 15)}
draw.gains({f"drafts: {drafts}": (drafts, times) for drafts, times in longer.items()})
describe("""Four lines over p, and a dashed line at 1. All begin at about 0.75 for p = 0 and cross 1 between p = 0.2 and
0.3. The line of one draft ends at 1.55, that of three at 3.1, that of 7 at 6.0; that of 15 rises beyond 6.""")

# %% [markdown]
# Where $p$ is small, no drafts are best; where it is near 1, many are. The best number depends on the times, and here
# they jump: the first draft is expensive, since it takes the fast single-token step away, and those after it cost
# little. So look at every number of drafts, and do not stop where the first one does not pay.
#
# **Exercise 3 (9 minutes).** Choose the number of drafts. `step_ms[k]` is the time of a step with $k$ drafts, and
# `step_ms[0]` that of a step without. For example, if drafts are right half of the time and a draft adds a tenth,
# `best_count(0.5, [1.0, 1.1])` is 1: $(1 + 0.5) / 1.1$ tokens per ms are more than $1 / 1.0$.


# %% tags=["exercise"]
def best_count(p: float, step_ms: list[float]) -> int:
    """The number of drafts with the most tokens per ms, from 0 to len(step_ms) - 1; of equals, the fewest.

    p: probability from 0 to 1 that a draft is right, if those before it are. step_ms: do not change it.
    """
    # SOLUTION: add up the tokens that a step with k drafts gains, divide by its time, and compare all k
    best, most, tokens = 0, 0.0, 0.0
    for count, ms in enumerate(step_ms):
        tokens += p**count
        if tokens / ms > most:
            best, most = count, tokens / ms
    return best
    # END


# %%
check(best_count)

# %%
choose_count = yours(best_count, speculating.best_count)
H200_MS = speculating.step_ms(np.arange(1, 9)).tolist()  # with 0 to 7 drafts
for p in (0.1, 0.2, 0.3, 0.5, 0.8, 0.95):
    print(f"p = {p}: {choose_count(p, H200_MS)} drafts")

# %% [markdown]
# ### How often are drafts right?
#
# $p$ is not known. It differs from request to request and changes within one, so it has to be estimated from what
# became of earlier drafts. The obvious estimate is the fraction of drafts that were accepted.
#
# **Predict first.** A drafter is right with $p = 0.7$, and drafts seven tokens in every step. What fraction of its
# drafts is accepted?

# %% tags=["exercise"]
guess_fraction = 0.7  # PREDICT: accepted drafts / all drafts, if each is right with p = 0.7

# %%
expected = sum(0.7**place for place in range(1, 8))  # of 7 drafts
compare(
    "accepted",
    unit="of the drafts",
    prediction=guess_fraction,
    measured=expected / 7,
    by="computed",
)

# %% [markdown]
# The drafts after the first wrong one were never tested. They count as rejected, though they say nothing about the
# drafter. With this fraction as $p$, exercise 3 would choose 3 drafts by the H200's times; with 0.7 it chooses 7. Count
# only drafts that were **tested**: those that were right, and the first wrong one.
#
# $$\hat p = \frac{\text{right}}{\text{right} + \text{first wrong ones}}$$
#
# `Careful` puts everything together: your lookup, your choice of a number, and such an estimate for each request.
# With agreement, its bookkeeping is easy: the drafts of the last call are compared with the tokens that have come
# since. It does not even matter whether they ran. So it keeps testing while it drafts nothing, and begins again when
# the text begins to repeat. Each time drafts are tested, the older counts are multiplied by 0.8, so that they matter
# less. A request starts out as if one of two tested drafts had been right, so its first $\hat p$ is 0.5.


# %%
def right_ones(drafts, came):
    """How many drafts equal the tokens that came, from the first on."""
    return len(accept(drafts[: len(came)], came + [-1])) - 1


class Careful:
    drafter = staticmethod(yours(lookup, speculating.lookup))

    def __init__(self):
        self.last, self.right, self.tested = {}, {}, {}

    def propose(self, asked):
        return [
            self.drafts(each.request_id, each.tokens.tolist(), each.most) for each in asked
        ]

    def drafts(self, name, tokens, most):
        length, before = self.last.get(name, (0, []))
        came = tokens[length : length + len(before)]
        right = right_ones(before, came)
        tested = right + (right < len(came))  # the first wrong one, if there is one
        if tested:
            self.right[name] = 0.8 * self.right.get(name, 1.0) + right
            self.tested[name] = 0.8 * self.tested.get(name, 2.0) + tested
        p = self.right.get(name, 1.0) / self.tested.get(name, 2.0)
        found = self.drafter(tokens, most)
        self.last[name] = len(tokens), found
        return found[: choose_count(p, H200_MS[: len(found) + 1])]

    def forget(self, request_id):
        for each in (self.last, self.right, self.tested):
            each.pop(request_id, None)


# %% [markdown]
# For comparison we also need drafts at their worst: `nonsense` always drafts seven tokens, and all are wrong. The table
# counts what each step ran in the engine, and adds up what such steps would take by the H200's record, in CUDA graphs.
# (They ran on a CPU; the CPU's times come after the table.)


# %%
class Nonsense(Careful):
    drafter = staticmethod(speculating.nonsense)


always, careful = speculating.drafting(speculating.nonsense), Nonsense
runs = {  # label -> without drafts, with all drafts, with care
    f"{name}, temperature {temperature}": (
        before,
        with_lookup[name, temperature],
        speculating.run(PROMPTS[name], Careful, temperature=temperature),
    )
    for (name, temperature), before in without.items()
}
worst = [speculating.run(STORY, each) for each in (always, careful)]
runs["story, temperature 0, nonsense"] = without["story", 0], *worst
print(f"{'by the times of an H200':32}all drafts   careful")
for label, (before, every, chosen) in runs.items():
    assert before.answer == every.answer == chosen.answer
    gained = [before.h200_ms / each.h200_ms for each in (every, chosen)]
    print(f"{label:32} {gained[0]:8.2f}x {gained[1]:8.2f}x")

# %% [markdown]
# Where all drafts are wrong, running them all costs a quarter of the speed, and being careful next to nothing. That
# is the most important property of speculation in a server: traffic that does not suit it must not suffer. Where the
# text repeats, care costs a little or nothing: the estimate follows the text with a delay.
#
# The engine makes the same decision for all rows of a step at once, since they share its time. It measures the times
# itself while it serves. And it pauses a row whose drafts are not worth it, for a while that doubles: where the
# host drafts, a row must wait until its last token is known, and cannot run ahead (lesson 10). When no draft was right,
# an H200 lost 1.5% to 3% of its speed where the host drafted, and at most 1% where the GPU did. On this machine:

# %% tags=["nbval-ignore-output"] uncompared="times"
print(f"{'CPU seconds, this machine':28}no drafts   all   as the engine decides")
for name, prompt in PROMPTS.items():
    decided = speculating.run(prompt, MyProposer, every_draft=False)
    ways = (without[name, 0], with_lookup[name, 0], decided)
    print(f"{name + ', temperature 0':28}", *(f"{each.seconds:8.2f}" for each in ways))

# %% [markdown]
# (Each way ran once: do not read much into small differences.)
#
# ## 6 · Rejection sampling · 21 min
#
# An engine whose random numbers depend on the step or on the batch cannot promise the same text: it draws for all
# positions of a step at once, and the numbers of rejected ones are spent. What it can promise is that tokens have the
# same *distribution* as without drafts. Agreement keeps that promise too, with any random numbers. (llama.cpp, where
# each request has a generator of its own, even keeps the text: it draws the target's tokens in order, and stops at the
# first that is not its draft.) **Rejection sampling**, from both 2023 papers, keeps it as well and accepts
# at least as many of the drafts that a model draws. Transformers uses it and vLLM has it, so it is worth knowing.
#
# The drafter samples its draft $x$ from a distribution $q$. The target has the distribution $p$ at this position.
# Where $q(x) \le p(x)$, the drafter never proposes $x$ too often, so always accept it. Where $q(x) > p(x)$, it proposes
# $x$ too often, by a factor of $q(x)/p(x)$, so accept it only with probability $p(x)/q(x)$. In one formula: accept with
# probability $\min(1, p(x)/q(x))$.
#
# How often does an accepted $x$ come out?
#
# $$q(x) \cdot \min\left(1, \frac{p(x)}{q(x)}\right) = \min(q(x), p(x))$$
#
# That is what the two distributions share. What is missing is $p(x) - \min(p(x), q(x)) = \max(p(x) - q(x), 0)$, and it
# has to come from the rejections. So after a rejection, choose another token in proportion to $\max(p - q, 0)$, the
# **residual**. Its sum over all tokens is just how often a draft is rejected, so that the total is $p(x)$ exactly, for
# any drafter.

# %%
P = np.array([0.40, 0.25, 0.20, 0.10, 0.05])
Q = np.array([0.15, 0.30, 0.10, 0.35, 0.10])
draw.overlap(P, Q)
describe("""Left: bars of p and q for five tokens; the part that both share is hatched, 0.65 in all. Right: what is left
of p for tokens 0 and 2, the only ones that the target likes more than the drafter, divided by its sum.""")

# %% [markdown]
# **Exercise 4 (7 minutes).** Write it for one draft. `u` decides whether the draft is accepted, and `v` chooses the
# other token if it is not. `pick` draws a token in proportion to some weights, with one number.
#
# For example, with `p = [0.5, 0.5]` and `q = [1.0, 0.0]` the draft is 0. With `u = 0.4` it is accepted, because
# $0.4 < 0.5/1.0$. With `u = 0.6` it is not, and the token is 1, whatever `v` is: nothing else is left of $p$.


# %% tags=["exercise"]
def pick(weights, v):
    """The token at which the cumulative weights exceed v times their sum. v: in [0, 1)."""
    total = np.cumsum(weights)
    return int(np.searchsorted(total, v * total[-1], side="right"))


def accept_or_resample(p: np.ndarray, q: np.ndarray, draft: int, u: float, v: float) -> int:
    """The token at a position: the draft, or one from the residual; over all draws, distributed as p.

    p, q: [vocab] probabilities of target and drafter; do not change them. draft: a token, drawn
    from q. u, v: random numbers in [0, 1), independent of each other and of the draft.
    """
    # SOLUTION: accept the draft with probability min(1, p/q); otherwise pick from what is left of p
    if u < p[draft] / q[draft]:
        return int(draft)
    return pick(np.maximum(p - q, 0), v)
    # END


# %%
check(accept_or_resample)

# %% [markdown]
# This rule is easy to get slightly wrong, and nothing crashes when it is: the text still reads well. Only statistics
# can tell. Here are four variants that are easy to write:
#
# * **A** resamples from $p$ after a rejection, instead of from the residual.
# * **B** accepts with probability $p(x)$, as if the drafter's probability did not matter.
# * **C** uses the right rule for prompt lookup. Its drafter always drafts the same token, here token 1, so its $q$ is 1
#   for that token and 0 for all others.
# * **D** uses the right rule, and passes the drafter's probabilities as $q$; but the drafter does not sample: it drafts
#   its likeliest token, here token 3.
#
# **Predict first.** How many of the four give tokens with the distribution $p$?

# %% tags=["exercise"]
guess_right = 2  # PREDICT: how many of A, B, C and D are right


# %%
def resample_from_p(p, q, draft, u, v):
    return draft if u < p[draft] / q[draft] else pick(p, v)


def accept_with_p(p, q, draft, u, v):
    return draft if u < p[draft] else pick(np.maximum(p - q, 0), v)


rule = yours(accept_or_resample, speculating.accept_or_resample)
ONLY_1, ONLY_3 = np.eye(5)[1], np.eye(5)[3]
variants = {  # the rule, the q that it is given, the distribution of the drafts
    "your rule" if solved(accept_or_resample) else "the right rule": (rule, Q, Q),
    "A": (resample_from_p, Q, Q),
    "B": (accept_with_p, Q, Q),
    "C": (rule, ONLY_1, ONLY_1),
    "D": (rule, Q, ONLY_3),
}
DRAWS, rng = 20_000, np.random.default_rng(0)
print(f"{'p':14}", *(f"{each:6.3f}" for each in P))
distances = {}
for name, (variant, q, drawn_from) in variants.items():
    chosen = rng.choice(5, size=DRAWS, p=drawn_from)
    numbers = rng.random((DRAWS, 2))
    tokens = [variant(P, q, int(draft), u, v) for draft, (u, v) in zip(chosen, numbers)]
    counts = np.bincount(tokens, minlength=5)
    distances[name] = (((counts - DRAWS * P) ** 2) / (DRAWS * P)).sum()
    print(f"{name:14}", *(f"{each:6.3f}" for each in counts / DRAWS), end="")
    print(f"   chi-square {distances[name]:9,.1f}")
right = sum(distances[name] < 18.5 for name in "ABCD")
compare("right variants", unit="of 4", prediction=guess_right, measured=right)

# %% [markdown]
# **Chi-square** adds up, over all tokens, the squared difference between a count and its expected value, divided by
# that value. For five tokens, a rule that is right stays below 18.5 in 999 of 1,000 such tests. It needs no judgment of
# the text, so a test can run it; a good test also runs it on a rule that is known to be wrong, to see that it fails.
#
# C is right, and simple: with a $q$ of 1, the draft is accepted with probability $p(x)$, so here rule B is right. A
# gives too much to tokens that the drafter likes. B rejects far too much. D is the subtlest: the rule is right, and $q$
# is not the distribution that the draft came from. It happens when drafts are drawn greedily, with top-k, or with
# another temperature.
#
# ### Which is better?
#
# A draft that was drawn from $q$ is accepted with probability $\sum_x \min(p(x), q(x))$ by rejection sampling, and no
# rule that keeps the distribution and looks at one draft at a time accepts more. With agreement it depends on how the
# drafter draws. Prompt lookup has no distribution: its draft is accepted with probability $p(x)$ by both rules. So is
# the likeliest token of a draft model, which many engines propose. A draft model can also draw with *the same number*
# as the target and so make the same choice more often; how much more often depends on how a number becomes a token:

# %%
shared = np.minimum(P, Q).sum()
ends_p, ends_q = np.cumsum(P), np.cumsum(Q)
both = np.minimum(ends_p, ends_q) - np.maximum(ends_p - P, ends_q - Q)
by_sum = np.maximum(
    both, 0
).sum()  # the same u falls to the same token in both cumulative sums
by_gumbel = sum(1 / np.maximum(P / P[i], Q / Q[i]).sum() for i in range(5))
print(f"rejection sampling:                      {shared:.3f}")
print(f"agreement, numbers of their own:         {(P * Q).sum():.3f}")
print(f"agreement, one number, cumulative sums:  {by_sum:.3f}")
print(f"agreement, one number for each token:    {by_gumbel:.3f}")

# %% [markdown]
# Cumulative sums work badly here, since a difference at the first token moves all later ones. The last line is for
# another way to draw, which has one random number for each token: take the token with the largest
# $\log p(x) + g(x)$, where $g(x)$ is *Gumbel* noise, computed from seed, position and token. A draft that is
# drawn this way is accepted at least $(1 - d)/(1 + d)$ of the time, where $1 - d$ is what rejection sampling accepts
# (Daliri et al. 2024).
#
# This engine uses cumulative sums. Real distributions are kinder than these: with a draft model made from the embedded
# one, at temperature 0.7, 72% of drafts agree, and rejection sampling would accept 75% (record `cpu/draft-draws`). At
# temperature 1.5, 51% agree and it would accept 58%; the draft model's likeliest token, which this engine does not
# propose, would be right in 63%. And agreement gives the same text with and without drafts, which can be compared token
# by token in a test, works with penalties and grammars as they are, and needs no probabilities of the drafter.
#
# ## 7 · When to leave it off · 5 min
#
# So far, one request had the step to itself. With more of them, the batch already fills the time that drafts would use.
# Lesson 00's record of the H200 has steps of 1, 8, 64, 256 and 512 tokens. Without drafts, 1, 8 and 64 requests run as
# many tokens; with seven drafts for each request, they run 8, 64 and 512. With three drafts, 64 requests run 256.
# (This is not the record of section 1, whose times contain the prompts': these are of steps alone, in CUDA graphs.)

# %%
crowded = speculating.crowded_ms()
lines = {}
for requests, drafts in ((1, 7), (8, 7), (64, 7), (64, 3)):
    times = crowded[(1 + drafts) * requests] / crowded[requests]
    pays = speculating.pays_from(drafts, times)
    print(
        f"{requests:2} requests, {drafts} drafts each: {times:.2f} times as long; pay from p = {pays:.2f}"
    )
    lines[f"{requests} requests, {drafts} drafts each"] = (drafts, times)
draw.gains(lines)
describe("""Four lines over p, and a dashed line at 1. With seven drafts each, those of 1 and 8 requests begin at 0.74
and 0.91 for p = 0 and cross 1 at p = 0.26 and 0.09; that of 64 requests begins at 0.42 and crosses 1 at p = 0.58. That
of 64 requests with three drafts each begins at 0.72, crosses 1 at p = 0.29, and is above that of seven drafts up to
about p = 0.9.""")
llm.close()

# %% [markdown]
# Eight requests have even more to gain from drafts than one, because the fast step for a single token is lost already.
# With 64, a step of 512 tokens is limited by arithmetic, and wrong drafts take time from all of them: seven drafts each
# from a drafter that is right half of the time make the server slower. Three each would still gain: the more requests,
# the fewer drafts pay. With 256 requests, a single draft for each makes the step 1.70 times as long, and pays only if
# more than 70% of them are right.
#
# What remains of this in whole runs depends on who drafts. Two records of the same model have runs with seven drafts
# for each request, in which a biased coin makes each draft right with probability 0.7, and in a second run 0.8. By
# the formula of section 5, a step should gain 3.1 and 4.2 tokens:

# %%
print("requests, who drafts   step with / without drafts   speed-up (acceptance length)")
for requests in (1, 8):
    for who in speculating.MEASURED:
        rows = speculating.by_coin(who, requests)
        longer = np.mean([each.longer for each in rows])
        gains = ", ".join(f"{each.speedup:.2f} ({each.length:.1f})" for each in rows)
        print(f"{requests}, {who:4} {longer:41.2f}   {gains}")

# %% [markdown]
# Where the GPU drafts, steps take as long as the chart says. Where the host does, there is a round trip between two
# steps: the GPU waits until the host has read the tokens, has new drafts, and launches the next step. That takes 0.5
# to 0.6 times as long as a step without drafts.
#
# Three rules of thumb follow. Speculation is for latency: few requests, each waiting for its tokens. It suits text that
# repeats (editing, quoting, code, tables) and low temperatures. And it must measure itself: acceptance per request, and
# the step times of the machine it runs on.
#
# ## Recap · 2 min
#
# * A step of several tokens takes little longer than a step of one. Drafts use the difference: guess the next tokens,
#   run them together, keep the right ones.
# * With numbers from seed and position, the target's own token at each position is certain. Accept drafts while they
#   equal it, and take the target's token at the first difference: the same text (up to rounding), for all sampling
#   options.
# * The cache must forget rejected tokens. In a KV cache, a smaller length is enough.
# * Prompt lookup needs no model: what followed the last n tokens before will often follow them again.
# * $k$ drafts gain $p + \dots + p^k$ tokens, and cost $t(k) - t(0)$. Estimate $p$ from tested drafts only, and draft
#   nothing below break-even.
# * Rejection sampling keeps the distribution: accept with $\min(1, p/q)$, resample from $\max(p - q, 0)$, and pass the
#   $q$ that the draft was drawn from.
#
# **What got worse:** wrong drafts waste arithmetic and power. Where the host drafts, a row waits until its last token
# is known, so it cannot run ahead, and a GPU waits between steps with drafts. Tokens come in bursts. A step's cost
# depends on its text. And the engine has one more thing to measure and to get wrong.
#
# **Further reading:** Stern et al. 2018, *Blockwise Parallel Decoding for Deep Autoregressive Models* (guessing and
# checking, for greedy decoding); Leviathan et al. 2023, *Fast Inference from Transformers via Speculative Decoding*;
# Chen et al. 2023, *Accelerating Large Language Model Decoding with Speculative Sampling*; Saxena 2023, *Prompt
# Lookup Decoding*; Li et al. 2024, *EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty* (a drafter
# that reads the target's own hidden states); Daliri et al. 2024, *Coupling without Communication and
# Drafter-Invariant Speculative Decoding*. Next: lesson 99, which serves what you wrote in lessons 00 to 04, 06, 09
# and 10, all together.
