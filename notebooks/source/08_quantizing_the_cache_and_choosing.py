# %% [markdown]
# # 08 · Quantizing the cache, and choosing
#
# After this lesson you can say when keys and values outweigh the weights; store them in eight bits with a scale for
# each token and head, and multiply by the codes directly; and choose a precision for a model, a GPU and its traffic,
# with reasons. Two optional sections add FP4 weights in blocks, as in NVFP4 and MXFP4, and training a model for its own
# rounding. Everything that you write runs inside the engine or on its records.
#
# **85 minutes**, and 35 for the two optional sections. **Needs:** a CPU, and lessons 02 (attention and the cache), 05
# (codes, scales, groups), 06 (AWQ and GPTQ) and 07 (int8 and FP8). The only model that runs here is `tiny-gemma`; GPU
# speeds and the results of a larger model come from committed records.

# %%
import torch

from minillm import LLM, SamplingParams, using
from minillm.advice import sizing
from minillm.advice.choosing import GPUS, Traffic, recommend
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_05 import pictures as draw_weights
from minillm.course.lesson_07 import eight_bits
from minillm.course.lesson_08 import choices, four_bits, small_caches
from minillm.course.lesson_08 import pictures as draw
from minillm.course.shared import held_out, real_model
from minillm.course.shared.shapes import SHAPES
from minillm.quantization import Int4

plain = small_caches.model_with()  # tiny-gemma in float32
text = held_out.HeldOut(plain, held_out.held_out_text(rows=24))


def whose(part):
    return "yours" if solved(part) else "the engine's, until you solve the exercise"


def show(name, found):
    mean, error = held_out.mean(found.millinats)
    print(
        f"{name:33} KL {mean:8.3f} ± {error:.3f} millinats   perplexity {found.perplexity:.4f}"
    )
    return found.millinats


def times(name, rows, base):
    """The KL divergence of rows / base, printed with its standard error."""
    found, error = held_out.ratio(rows, base)
    print(f"{name}: {found:.2f} ± {error:.2f} times")
    return found


print(f"{text.ids.shape[0]} rows of {text.ids.shape[1]} tokens to measure on")

# %% [markdown]
# As in lesson 07, the measure is the KL divergence from the unquantized model's predictions, in millinats (1/1000 nat)
# per token. Rows of text differ, so each number has its standard error after ±. Ratios compare row by row. A ratio
# within about two standard errors of 1 shows no difference.
#
# ## 1 · When the cache outweighs the weights · 5 min
#
# Lessons 05 to 07 made weights and activations smaller. An engine's memory also holds the keys and values of all
# running requests. They differ from weights in two ways: they grow with every request and every token, and every step
# writes new ones.
#
# **Predict first.** The weights and the cache are in bfloat16, and each request has 2,048 tokens. How many requests
# does it take until the cache is as large as the weights, for Gemma 2B, which has one KV head, and for Llama 2 7B,
# which has 32? (Gemma 2B: 2.5 billion weights, 18 layers, heads of 256; Llama 2 7B: 6.7 billion, 32 layers, heads of
# 128.)

# %% tags=["exercise"]
guess_gemma = 50  # PREDICT: requests whose cache is as large as Gemma 2B's weights
guess_llama = 50  # PREDICT: requests whose cache is as large as Llama 2 7B's weights

# %%
for name, guess in (("Gemma 2B", guess_gemma), ("Llama 2 7B", guess_llama)):
    count = small_caches.requests_of_weights(SHAPES[name], tokens=2048)
    compare(name, unit="requests", prediction=guess, measured=count)
print()
print("requests of 2,048 tokens    as large as weights of      that fit on an H200")
print("                              16 bits    4 bits     with a 16-bit cache")
for name, shape in SHAPES.items():
    equal = small_caches.requests_of_weights(shape, 2048)
    fits = sizing.fit(shape, 141e9, 2048, kv_cache_dtype="bfloat16").requests
    print(f"{name:26} {equal:10.0f} {equal / 4:9.0f} {fits:22,}")

# %% [markdown]
# A decode step reads all weights once, and the whole cache of every request in it. So at the count in the first column,
# half of the bytes that a step reads are keys and values, and **smaller weights can at most halve the bytes that it
# reads**. With lesson 05's four bits, that point comes at a quarter of the requests.
#
# (The 70B model does not fit at all in 16 bits.) A smaller cache helps twice: more requests fit, and a step reads fewer
# bytes for each.
#
# ## 2 · A scale for each token and head · 27 min
#
# ### What keys and values look like
#
# The next figure shows the keys and values that the third layer of `tiny-gemma` caches for a text. (It has one KV head
# of 64 channels.) Look for stripes: vertical ones are channels that are large in many tokens, horizontal ones are large
# tokens.

# %%
kept = small_caches.keys_and_values(plain, text.ids[:1])
k, v = (part[:, 0] for part in kept[2])
draw.keys_and_values(k, v)
describe("""Magnitudes of 256 tokens in 64 channels. The keys have vertical stripes; the brightest are channels 18 and
50. The values have none; some tokens are brighter than others, which shows as horizontal lines, hardly visible.""")

# %%
print("        largest / median channel      largest / median token")
print("layer      keys        values           keys        values")
for layer, pair in enumerate(kept):
    rms = [part[1:, 0].square().mean(axis).sqrt() for axis in (0, 1) for part in pair]
    ratios = [(each.max() / each.median()).item() for each in rms]
    print(f"{layer:5} {ratios[0]:9.2f} {ratios[1]:13.2f} {ratios[2]:14.2f} {ratios[3]:13.2f}")

# %% [markdown]
# (Root mean squares, without `<bos>`.) In keys, channels differ more than tokens in every layer. In values, tokens
# differ more than channels, except in the first two layers. Liu et al. (2024, *KIVI*) found the same pattern in large
# models, with larger ratios: keys have a few channels with outliers, values do not.
#
# The two brightest channels are no accident: 18 and 50 are 32 apart, a pair that the rotary embedding rotates (lesson
# 02). This pair rotates slowly, so the brightness moves from one channel to the other along the text.
#
# ### What may share a scale?
#
# Rounding is best if numbers of similar size share a scale. But a cache grows: a prompt's tokens are written together,
# those of the output one at a time, and what has been written is never changed. A scale found in the prompt would have
# to fit all later tokens.
#
# | one scale for | known when a token is written? |
# |---|---|
# | the whole tensor | only if calibration or the prompt gave it; a larger value is clamped |
# | a channel | the same |
# | a token and KV head | yes: the head's numbers are all there, and the scale follows from the largest |
#
# The last one has another advantage: the scale of a token is stored at the token's place. Blocks that are shared,
# evicted or copied (lesson 09) take their scales with them.
#
# The next cell rounds keys and values to 4 bits, so that the differences are easy to see, and gives each request the
# best scale of its kind, as if the whole text were known in advance.
#
# **Predict first.** KL divergence with one scale for each token and head, divided by that with one scale for each
# channel: of keys, and of values? Below 1 means that tokens are better.

# %% tags=["exercise"]
guess_keys = 1.5  # PREDICT: keys: KL with scales for tokens / with scales for channels
guess_values = 1.0  # PREDICT: values: KL with scales for tokens / with scales for channels

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
rounding = {}
print("4 bits, KL in millinats                   keys        values")
for shared in small_caches.SHARED:
    parts = [
        small_caches.predictions_rounded(text, plain, 4, *which).millinats
        for which in ((shared, None), (None, shared))
    ]
    rounding[shared] = parts
    cells = ["{:.2f} ± {:.2f}".format(*held_out.mean(rows)) for rows in parts]
    print(f"a scale for each {shared:15} {cells[0]:>13} {cells[1]:>13}")
for place, (name, guess) in enumerate((("keys", guess_keys), ("values", guess_values))):
    token, channel = (rounding[shared][place] for shared in ("token and head", "channel"))
    name = f"{name}, token / channel"
    compare(name, unit="times", prediction=guess, measured=times(name, token, channel))

# %% [markdown]
# One scale for the whole tensor is clearly worse than the other two. Between those, the ratios point in the direction
# of the stripes, keys above 1 and values below, but neither is two standard errors from 1: with only keys or only
# values rounded, to 4 bits, this much text cannot tell which is better. (Section 3 rounds both.) At eight bits, the
# loss is tiny either way (section 3), so we use a scale for each token and head, the only one of the three that does
# not depend on other tokens.
#
# ### Eight bits
#
# For each token and head, with $d$ numbers $x_i$, the scale maps the largest magnitude to the largest code, 127 for
# int8 and 448 for FP8 (e4m3, lesson 07):
#
# $$s = \frac{\max_i |x_i|}{\text{largest code}}, \qquad c_i = \operatorname{round}\left(\frac{x_i}{s}\right)$$
#
# By hand, for the key `0.6, -2.54, 1.3, 0`:
#
# * int8: $s = 2.54 / 127 = 0.02$. The codes are 30, -127, 65 and 0.
# * FP8: $s = 2.54 / 448 = 0.00567$. The quotients are 105.8, -448, 229.3 and 0. Numbers from 64 to 128 have steps of 8,
#   those from 128 to 256 steps of 16, so the codes are 104, -448, 224 and 0.
#
# (Lesson 07 had 127.5 steps and clamped. With 127, no code is too large, and steps are only 0.4% larger.)
#
# **Exercise 1 (9 minutes).** Write it for both formats. `.to(torch.float8_e4m3fn)` rounds to the nearest number in
# e4m3, and halves to even; a conversion to int8 truncates instead of rounding. There is no smallest scale: however
# small a head's numbers are, the largest becomes the largest code.


# %% tags=["exercise"]
def quantize_kv(x, dtype):
    """Codes of keys or values, and a scale for each token and head.

    x: [tokens, kv_heads, d], floating point; compute in float32. dtype: torch.int8, with codes up to 127, or
    torch.float8_e4m3fn, with codes up to 448. Returns codes like x in that dtype, and scales [tokens, kv_heads]
    in float32. A head of zeros has codes of 0 and any finite scale.
    """
    # SOLUTION: the scale of each token and head, then the codes: int8 is rounded first
    x = x.float()
    scales = x.abs().amax(-1) / (127 if dtype == torch.int8 else 448)
    codes = x / torch.where(scales > 0, scales, 1.0)[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales
    # END


# %%
check(quantize_kv)

# %% [markdown]
# Now in the engine. `kv_cache_dtype` chooses the cache's format. `using` replaces the operation `write_kv`, which
# stores the keys and values of each step, with one that calls your function. Attention is still the engine's: it
# multiplies codes by scales, and then computes as before.

# %%
my_write = small_caches.write_by(quantize_kv)
prompt = "Fenwick lies on the island of"
greedy = SamplingParams(max_tokens=12, temperature=0)
for kind in ("auto", "int8", "fp8"):
    with (
        LLM(device="cpu", kv_cache_dtype=kind, num_blocks=64) as llm,
        using(write_kv=my_write) as used,
    ):
        print(f"{kind:5} {prompt}{llm.generate(prompt, greedy)[0].text}")
print(f"quantize_kv is {whose(quantize_kv)}; calls of write_kv: {used.calls['write_kv']}")

# %% [markdown]
# **Predict first.** Lesson 07 compared int8 and FP8 for activations. What is the KL divergence of an FP8 cache, divided
# by that of an int8 cache?

# %% tags=["exercise"]
guess_fp8 = 0.5  # PREDICT: KL divergence with an FP8 cache / with an int8 cache

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
cached = {kind: small_caches.model_with(kind) for kind in ("int8", "fp8")}
unquantized = show("float32 cache", text.predictions())
with using(write_kv=my_write):
    loss = {
        kind: show(f"{kind} cache", text.predictions(model)) for kind, model in cached.items()
    }
ratio = times("fp8 / int8", loss["fp8"], loss["int8"])
compare("fp8 / int8", unit="times", prediction=guess_fp8, measured=ratio)

# %% [markdown]
# Both are harmless, and int8 is better. In each layer, the largest of the 64 numbers that share a scale is on average
# only 2.5 to 3.1 times their root mean square. For such numbers, int8 has finer steps where most of them are, while FP8
# spends its precision on small numbers, where it is not needed. With coarser scales, FP8 can be the better choice.
# TensorRT-LLM's documentation recommends FP8 over int8 for the cache on Hopper and Ada, for its accuracy, and vLLM's
# describes FP8 with one scale for a tensor or a head, from calibration or simply 1. Such scales must cover every token
# still to come, and FP8 forgives a scale that is too large. (Since 2026, vLLM also has `int8_per_token_head` and
# `fp8_per_token_head`: a scale for each token and head, as here.)
#
# ### How many requests fit?
#
# **Predict first.** The engine gets 4 MiB for `tiny-gemma`'s cache, and more requests than fit. How many times as many
# run at once with an int8 cache as with bfloat16?

# %% tags=["exercise"]
guess_fit = 2.0  # PREDICT: requests at once, int8 / bfloat16

# %%
at_once = {
    kind: small_caches.kv_at_once(kind, 4 << 20, requests=64) for kind in ("auto", "int8")
}
print(f"requests that ran in one step: bfloat16 {at_once['auto']}, int8 {at_once['int8']}")
ratio = at_once["int8"] / at_once["auto"]
compare("int8 / bfloat16", unit="times", prediction=guess_fit, measured=ratio)
for dim in (64, 128, 256):
    print(
        f"head_dim {dim:3}: {2 * dim / (dim + 4):.2f} times as many tokens in the same memory"
    )

# %% [markdown]
# A token takes $2 \cdot n_{kv} \cdot (d + 4)$ bytes in each layer: $d$ codes of a byte, and a scale of 4 bytes, for
# each key and each value. So small heads, such as `tiny-gemma`'s of 64, pay relatively more for their scales. (A
# request takes whole blocks, so what is measured differs a little from the ratio of bytes.) Gemma 2B has heads of 256.
#
# ## 3 · Attention on codes · 25 min
#
# ### Fold the scales
#
# So far, attention first *dequantizes*: it needs $d$ multiplications for each key and each value, and an unquantized
# copy of everything, before it can start. But one scale belongs to all $d$ numbers of a key $j$, so it can be taken out
# of the dot product. The same holds for the values, which are summed with the softmax's weights $p_j$:
#
# $$q \cdot (s_j\, c_j) = s_j\, (q \cdot c_j), \qquad\qquad \sum_j p_j\, (t_j\, e_j) = \sum_j (p_j\, t_j)\, e_j$$
#
# where $c_j$ and $s_j$ are the codes and the scale of a key, $e_j$ and $t_j$ those of a value. The keys' scales
# multiply the scores, before the softmax. The values' scales multiply the weights, after it. The products see only
# codes. (All scores are also multiplied by one number, `scale` in the figure, as in lesson 02.)

# %%
draw.folded()
describe("""From left to right: a matrix of the keys' codes times the query gives one sum for each key; it is multiplied
by the key's scale, and by `scale`; the softmax gives one weight for each key; it is multiplied by the value's scale;
these products, times the matrix of the values' codes, give the result, one number for each channel.""")

# %% [markdown]
# By hand: a query `1, 2`, two keys with the codes `10, -5` and `30, 20` and the scales 0.1 and 0.01. The sums are 0 and
# 70, so the scores are 0 and 0.7. Two multiplications by scales, instead of four.
#
# A GPU gains more than multiplications. In the engine's kernels, tensor cores multiply 16-bit numbers, and float16 and
# bfloat16 hold every int8 code and every number of e4m3 exactly. So a kernel loads bytes and converts them in
# registers, without rounding, and nothing is written back. (vLLM with FlashAttention 3 goes further: it quantizes
# queries too, and multiplies in FP8.)
#
# **Exercise 2 (11 minutes).** Write attention for the query heads that share one KV head. Each row is a query; a row
# does not see its `hidden` keys, but always sees at least one.
#
# For example, the query and keys above with `scale=1`, and values with the codes `100, 0` and `0, 50` and the scales
# 0.02 and 0.04: the weights are 0.332 and 0.668, times the scales 0.00664 and 0.02673, so the result is `0.664, 1.336`.


# %% tags=["exercise"]
def attend_codes(q, k_codes, k_scales, v_codes, v_scales, hidden, scale):
    """Attention on codes: the result [rows, d], in the dtype of q.

    q: [rows, d], float32 or float64. k_codes, v_codes: [keys, d], int8 or float8_e4m3fn. k_scales, v_scales: [keys],
    in the dtype of q. hidden: [rows, keys], True where a row does not see a key. scale: what scores are multiplied by.
    Codes are converted to the dtype of q, but not multiplied by their scales.
    """
    # SOLUTION: scores of codes, the keys' scales, the softmax, the values' scales, the product with codes
    scores = q @ k_codes.to(q.dtype).T * k_scales * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights * v_scales) @ v_codes.to(q.dtype)
    # END


# %%
check(attend_codes)

# %% [markdown]
# In the engine, both of your functions now replace its own: the one that writes the cache, and the one that reads it.
# Prompts and decode steps both run on codes.

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
mine = small_caches.operations(quantize_kv, attend_codes)
for kind, model in cached.items():
    with using(**mine) as used:
        found = show(f"{kind} cache", text.predictions(model))
    print(f"    dequantized first: {loss[kind].mean():.3f}")
with LLM(device="cpu", kv_cache_dtype="int8", num_blocks=64) as llm, using(**mine) as used:
    print(prompt + llm.generate(prompt, greedy)[0].text)
print(f"attend_codes is {whose(attend_codes)}; calls: {used.calls}")

# %% [markdown]
# The results are the same, up to float32 rounding: folding changes only the order of operations. The engine's decode
# kernels for a GPU work like this (lesson 04 shows their loop; look for `k_scale_ptr`), and codes are made in the
# kernel that rotates and writes keys, so that no additional kernel runs. A long prompt is different: many queries read
# the same keys, so these are first dequantized into a buffer, if it takes no more memory than the queries. On a CPU,
# the engine dequantizes in every step.
#
# Is an H200 faster with an eight-bit cache? The next cell prints tokens per second with an FP8 cache, divided by those
# with a bfloat16 cache, from two committed records (Gemma 2B's shape, FP8 weights):

# %%
small_caches.speeds(*small_caches.committed())

# %% [markdown]
# A smaller cache saves bytes in decode steps, so it helps most with many requests and long outputs. One short request
# has few keys to read, and where outputs are much shorter than prompts, most of the time goes into the prompts.
#
# ### Two bits: KIVI
#
# How far can this go? The next cell uses fewer and fewer bits, with a scale for each token and head, and with the
# scales that the stripes of section 2 suggest.

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
print("KL in millinats   tokens for both   channels for keys, tokens for values      ratio")
for bits in (8, 4, 3, 2):
    both = [
        small_caches.predictions_rounded(text, plain, bits, keys, "token and head").millinats
        for keys in ("token and head", "channel")
    ]
    cells = ["{:.3f} ± {:.3f}".format(*held_out.mean(rows)) for rows in both]
    both_ratio = "{:.2f} ± {:.2f}".format(*held_out.ratio(*both))
    print(f"{bits} bits          {cells[0]:>19} {cells[1]:>30} {both_ratio:>19}")

# %% [markdown]
# Channels for keys lose less in every row. With eight bits, that does not matter; with two bits, they remove a third of
# the loss, far more than its error. Four bits are usable here, two are not. KIVI reaches two bits in large models with
# four changes to what you wrote: scales for *groups* instead of whole tokens or channels, zero points (lesson 05),
# channels for keys, and 16 bits for the newest tokens.

# %%
draw.kivi()
describe("""Two grids of tokens by channels. Keys: each box spans several tokens of one channel. Values: each box spans
several channels of one token. The newest tokens of both are gray, and labeled 16 bits.""")

# %% [markdown]
# A group of keys spans several tokens of one channel (32 in the paper), so it can be quantized only once all of them
# are there. Until then, the newest keys stay in 16 bits. (The newest values do too, although they need not wait: exact
# recent tokens cost few bytes and help with hard tasks.) Channel scales fold as well: a key's into the *query*
# ($q_i s_i$, once for each group of tokens), a value's into the output. With a 16-bit scale and a 16-bit zero point
# for 32 codes, two bits are really three. The engine does not have this: blocks would hold tokens of two formats, and
# a sequence that is cut back, as in speculative decoding (lesson 13), would have to cut through a group. (Another way
# to a smaller cache is to evict tokens: lesson 09, attention sinks.) And rows of 256 tokens say nothing about long
# contexts: test those with questions whose answers are far back in the text.
#
# SmolLM2-135M (the record of lesson 05) has heads of 64, too. Again, `channel` means channels for keys:

# %%
real_model.report(
    ["cache-int8", "cache-fp8", "cache-4", "cache-4-channel", "cache-2", "cache-2-channel"]
)

# %% [markdown]
# Eight bits are harmless here as well, and int8 is better. With four bits, channels for keys remove 70% of the loss, a
# ratio of 3.4; in `tiny-gemma`, the ratio was 1.8, about two standard errors from 1. With two bits, both are unusable,
# and channels are even worse: without KIVI's groups and zero points, neither is good enough.
#
# ## 4 · Choosing · 25 min
#
# TensorRT-LLM's documentation has a table for choosing a precision ("Best practices to choose the right quantization
# methods"). Its ratings summarize measurements on more than ten models:

# %%
choices.print_nvidias()

# %% [markdown]
# Let's redo it with our records: speed from an H200 (Gemma 2B's shape, random weights), for 1 to 3,000 requests at
# once; quality from `tiny-gemma`, which is trained. Call a gain below 1.05 low, below 1.5 medium, and the rest high.
# (These limits are ours; NVIDIA gives none.)
#
# **Predict first.** The table has 14 speed ratings, for 7 methods and 2 batch sizes. How many does our record
# confirm, if its two columns are taken to mean 4 and 3,000 requests?

# %% tags=["exercise"]
guess_same = 10  # PREDICT: of NVIDIA's 14 speed ratings, those that our record confirms

# %%
methods = choices.measured()
choices.print_ours(methods)
ratings = choices.judgments(methods)
compare("confirmed", unit="of 14", prediction=guess_same, measured=choices.confirmed(methods))
for (name, _), (theirs, ours, requests) in ratings.items():
    if theirs != ours:
        print(f"  {name:26} {requests:5,} requests: NVIDIA says {theirs}, our record {ours}")
print("\nconfirmed, if these requests stand for the two columns:")
for few in (1, 4):
    counts = {many: choices.confirmed(methods, few, many) for many in (16, 64, 3000)}
    print("  ", ", ".join(f"{few} and {many:,}: {count}" for many, count in counts.items()))

# %% [markdown]
# As the last lines show, the count depends on which of our columns we compare with NVIDIA's, so it says little about
# the table. Read the gains instead, each row from left to right: weight-only methods gain most with one request, and
# nothing with thousands. There, eight-bit products help, and FP8's help most. All rows have an output head in 16 bits,
# except W4A8's speeds, whose head is int8. W4A8 is slow because this engine has no kernel for it: such a number is
# about *this* engine, not about the method. And a small model on a large GPU has fixed costs in each step, which no
# precision reduces: the fewer bytes a step reads, the larger the share of these costs.
#
# "Points lost" is accuracy lost on multiple-choice questions, in percentage points. Every interval here includes 0: the
# questions cannot show a loss. Nor can they rule out a loss up to the interval's upper end. KL is more sensitive, and
# still ranks the methods. Compare SmoothQuant with FP8: NVIDIA's table expects more loss from SmoothQuant, but
# `tiny-gemma` ranks the two the other way around, and so does SmolLM2 (lesson 07). Quality depends on the model.
#
# "Seconds" includes quantizing *and* measuring, for 5.6 million parameters on a CPU. The extra time of AWQ and GPTQ
# over INT4 weight-only is about that of their calibration. The three methods with eight-bit activations also have to
# round activations before every product while they are measured. For FP8 that is all: it needs no calibration here,
# since each token gets its own scale at run time (lesson 07).
#
# (Pruning, which sets weights to 0, is in neither table. `data/README.md` shows why: on `tiny-gemma` it loses far more
# than quantization to the same size does, and this engine's products do not skip zeros.)
#
# ### The Pareto front
#
# Which methods can be ruled out? One method *beats* another if it is at least as good in every number, and better in at
# least one. The methods that no other beats form the **Pareto front**. None of them is the best: which one to take
# depends on what you need most.
#
# **Exercise 3 (9 minutes).** Find the front. For every number, less is better. Equal points do not beat each other.
#
# For example, of `{"a": (1, 4), "b": (2, 2), "c": (3, 3)}`, b beats c, and the front is `["a", "b"]`.
#
# The points below mix two models, as our table does: loss and bytes are those of `tiny-gemma`, speed is that of Gemma
# 2B's shape.


# %% tags=["exercise"]
def pareto_front(points):
    """The names of the points that no other point beats, in their order.

    points: {name: numbers}, tuples of the same length, of at least one number. Without points, the front is empty.
    """
    # SOLUTION: for each point, look for one that is at least as good everywhere, and not equal
    front = []
    for name, mine in points.items():
        beaten = any(
            other != mine and all(theirs <= own for theirs, own in zip(other, mine))
            for other in points.values()
        )
        if not beaten:
            front.append(name)
    return front
    # END


# %%
check(pareto_front)

# %%
my_front = yours(pareto_front, choices.pareto_front)
panels, fronts = {}, {}
for requests in (1, 3000):
    title = f"{requests:,} request{'s' * (requests > 1)} at once"
    panels[title] = {
        name: (row.kl, row.bytes, row.gains[requests]) for name, row in methods.items()
    }
    panels[title]["bfloat16"] = (0.0, choices.dense_bytes(), 1.0)
    fronts[title] = my_front(
        {name: (kl, size, 1 / gain) for name, (kl, size, gain) in panels[title].items()}
    )
    print(f"{title}: {', '.join(fronts[title])}")
print(f"pareto_front is {whose(pareto_front)}")
draw.pareto(panels, fronts)
describe("""Two panels with the same axes, for one request and for 3,000. Horizontal: KL divergence; vertical: speed as
a multiple of bfloat16's; the size of a dot is the size of the weights. Filled dots are on the Pareto front, which is
printed above. The legend says which is which. Methods with int4 weights have the smallest dots, on the right: W4A16 is
fastest with one request, and about as fast as bfloat16 with 3,000.""")

# %% [markdown]
# The bytes are those of weights and scales. All methods with eight-bit weights take the same, so for one request INT8
# weight-only, which is faster and loses less, beats both FP8 and SmoothQuant. With 3,000 requests it is no faster than
# bfloat16: it stays on the front because it takes fewer bytes than bfloat16 and loses less than the other two, which
# join it. The three W4A16 methods differ only in KL, so GPTQ beats the others, but a front does not ask how large a
# difference is, or whether it could be chance.
#
# ### A recommendation that explains itself
#
# The engine's `recommend` estimates instead of measuring, so it can answer for other models and GPUs. For each method
# it adds up a step's time: the bytes of the weights at the memory's rate, or the arithmetic at the rate of its products
# if that takes longer (the engine's kernels for few rows do one after the other, so there the two are added); the bytes
# of the cache; and fixed costs. Tests check the estimate against the record. Then it picks the fastest method whose
# loss you allow, or one within 3% of it that loses less.
#
# **Predict first,** for yourself: which weights and which cache would *you* choose for Gemma 2B on an H200, for one
# chat user; for 512 requests with long prompts; for Llama 2 7B and 512 requests with long outputs; and for Llama 3.1 8B
# on a GPU of 24 GB?

# %%
CASES = {
    "one chat": ("Gemma 2B", "H200", Traffic(1, 128, 256)),
    "long prompts": ("Gemma 2B", "H200", Traffic(512, 2048, 128)),
    "long outputs": ("Llama 2 7B", "H200", Traffic(512, 128, 2048)),
    "a small GPU": ("Llama 3.1 8B", "L4", Traffic(32, 512, 512)),
}
for case, (name, gpu, traffic) in CASES.items():
    print(f"---- {case}: {name} on {gpu}, {traffic}")
    print(recommend(SHAPES[name], GPUS[gpu], traffic, calibrated=True), end="\n\n")

# %% [markdown]
# Find out what each case spends its time on: reading weights, arithmetic, or reading keys and values. Where prompts are
# long and outputs short, most tokens belong to prompts, and a step reads the weights once for very many of them, so
# arithmetic takes the time. Gemma 2B's single KV head also keeps its cache small. (For the cache, `recommend` compares
# only 16 bits and fp8. int8 takes the same bytes and loses less in both of our models; decode attention is up to 6%
# slower with it on the H200.) `minillm serve --quantization auto` asks the same function about the GPU that it finds,
# and leaves out methods that need calibration.
#
# The quality of a method is a rating from NVIDIA's table and a number from `tiny-gemma`. Both are about weights and
# activations: what an fp8 cache adds is in section 3. NVIDIA's rating ("high") rules out int4: by default, `recommend`
# accepts only a low loss. That GPTQ comes before AWQ rests on the perplexity of this one small model on one text, which
# is weak evidence (on SmolLM2, AWQ is ahead: lesson 06). Neither the rating nor the number is about your model and your
# task, so measure before you decide: `minillm eval --compare` does it for a model of yours, as it did for our table.
#
# ## 5 · FP4: four bits in blocks · optional, 20 min
#
# Sections 5 and 6 are optional; the recap comes after them. Back to weights. Lesson 05's int4 has 16 equally spaced
# levels. **e2m1** has a sign, 2 bits of exponent and 1 of mantissa:
#
# $$0,\; 0.5,\; 1,\; 1.5,\; 2,\; 3,\; 4,\; 6 \quad \text{and their negatives}$$
#
# Eight magnitudes do not cover a wide range, so each small *block* of weights has a scale:
#
# | format | weights in a block | its scale | bits per weight |
# |---|---|---|---|
# | MXFP4 (Open Compute Project 2023) | 32 | a power of two, 8 bits | 4.25 |
# | NVFP4 (NVIDIA 2025) | 16 | a number of e4m3, 8 bits, and one float32 number for the matrix | 4.5 |
# | int4, groups of 128 (lesson 05) | 128 | a 16-bit number | 4.125 |
#
# NVIDIA's GPUs since Blackwell multiply both FP4 formats on tensor cores. An H200 does not, and this engine has no such
# product: **FP4 is simulated here**, to measure its quality. Products use the dequantized weights.
#
# By hand, a block of four weights: `0.9, -0.5, 0.2, 0.05`. Ideally, the largest becomes 6: $s = 0.9 / 6 = 0.15$.
#
# * With $s = 0.15$: the quotients 6, -3.33, 1.33, 0.33 become 6, -3, 1.5, 0.5, which means `0.9, -0.45, 0.225, 0.075`.
# * With a power of two: 0.125 is too small, since $0.9 / 0.125 = 7.2$ is far beyond 6. So $s = 0.25$: the quotients
#   3.6, -2, 0.8, 0.2 become 4, -2, 1, 0, which means `1, -0.5, 0.25, 0`. The levels 6 and -6 are not used.

# %%
levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
grids = {
    f"scale {scale}": torch.cat((-levels, levels)).mul(scale).tolist()
    for scale in (0.15, 0.25)
}
draw_weights.rounding([0.9, -0.5, 0.2, 0.05], grids)
describe("""Two lines of levels, dense near 0 and sparse far from it, and arrows from the four weights to their nearest
levels. With the scale 0.15, the outermost level is at 0.9, the largest weight. With 0.25 it is at 1.5, and no weight is
near it.""")

# %% [markdown]
# Between 0 and 2, levels are 0.5 apart; from 2 to 4, 1 apart; from 4 to 6, 2 apart. So the nearest level is a nearest
# multiple of that step, as in lesson 07, and `round` sends halves to the level with an even mantissa bit.
#
# **Exercise 4 (9 minutes).** Round a matrix in blocks. `round_scales` turns ideal scales into scales that a format can
# store. It takes those of the whole matrix, since NVFP4's one number depends on all of them, and returns positive
# numbers, even for a block of zeros. Magnitudes above 6 after the division become 6.
#
# For example, the block above and `round_scales=lambda s: s` give the values 6, -3, 1.5, 0.5 and the scale 0.15.


# %% tags=["exercise"]
def quantize_fp4(weight, block_size, round_scales):
    """Levels of e2m1 [rows, in], not yet times their scales, and scales [rows, in / block_size], in the weight's dtype.

    weight: [rows, in], float32 or float64. block_size: neighbors in a row that share a scale; it divides `in`.
    round_scales: a function of all ideal scales [rows, in / block_size], which returns those to use.
    """
    # SOLUTION: the ideal scales, the scales to use, then the step of each quotient and its nearest multiple
    blocks = weight.unflatten(-1, (-1, block_size))
    scales = round_scales(blocks.abs().amax(-1) / 6)
    quotients = (blocks / scales[..., None]).clamp(-6, 6)
    size = quotients.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(weight.dtype)
    return ((quotients / step).round() * step).flatten(-2), scales
    # END


# %%
check(quantize_fp4)

# %% [markdown]
# The two scale functions are the engine's. MXFP4 takes the power of two that puts the block's largest weight between
# 3.5 and 7, so that nothing would round to 8. (The specification's own rule puts it between 4 and 8, and clips.) NVFP4
# first multiplies all scales by one number, so that the largest becomes 448, and rounds them to e4m3.
#
# **Predict first.** Int4 in groups of 32 and NVFP4 both take 4.5 bits per weight. What is the KL divergence of NVFP4,
# divided by that of int4? And that of MXFP4, divided by that of int4 in groups of 64, with 4.25 bits?

# %% tags=["exercise"]
guess_nv = 0.7  # PREDICT: KL divergence NVFP4 / int4 in groups of 32
guess_mx = 0.7  # PREDICT: KL divergence MXFP4 / int4 in groups of 64

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
FORMATS = {
    f"int4, groups of {size}": Int4(size, scale_dtype=torch.bfloat16)
    for size in (128, 64, 32, 16)
}
BITS = {"NVFP4": 4.5, "MXFP4": 4.25} | {
    name: 4 + 16 / format.group_size for name, format in FORMATS.items()
}
FORMATS |= four_bits.formats(yours(quantize_fp4, four_bits.quantize_fp4))
losses = {}
for name, format in FORMATS.items():
    found = text.predictions(eight_bits.quantized(plain, format))
    losses[name] = show(f"{name}, {BITS[name]:.4g} bits", found)  # KL of each row
print(f"quantize_fp4 is {whose(quantize_fp4)}")
for name, base, guess in (("NVFP4", 32, guess_nv), ("MXFP4", 64, guess_mx)):
    int4 = f"int4, groups of {base}"
    ratio = times(f"{name} / {int4}", losses[name], losses[int4])
    compare(f"{name} / {int4}", unit="times", prediction=guess, measured=ratio)

# %% [markdown]
# At equal size, neither ratio is two standard errors from 1: on this model, NVFP4, MXFP4 and int4 cannot be told apart.
# Size matters: with groups of 32 instead of 128, int4 loses about a third less. (Groups of 16 show no further gain.)
# And on SmolLM2-135M?

# %%
real_model.report(["int4-g32", "nvfp4", "int4", "mxfp4"], labels={"int4": "int4-g64"})

# %% [markdown]
# (The last column was measured on more text than the cell before, so its numbers differ.) SmolLM2's weights had been
# rounded to four bits before, so compare only the formats with each other: NVFP4 loses clearly less than int4 of its
# size, and MXFP4 more. FP4 pays off on hardware that multiplies it. MXFP4's scales are coarse: where the largest weight
# comes to just above 3.5, the level 6 is not used. The engine's method `nvfp4` needs no calibration; on hardware that
# multiplies FP4, activations would have four bits as well, which this does not measure.
#
# ## 6 · Distillation: train for the rounding · optional, 15 min
#
# All methods until now rounded a finished model. **Quantization-aware training** changes the weights so that their
# *rounded* values work well. Training keeps weights $w$ in full precision, computes each step with their rounded values
# $\hat w$ (**fake quantization**), and moves $w$ along the gradient.
#
# But rounding is a staircase. Its derivative is 0 almost everywhere, so no gradient would reach $w$. The
# **straight-through estimator** (Bengio et al. 2013) treats it as the identity in the backward pass:
#
# $$\text{forward: } \hat w = \operatorname{clamp}\left(\operatorname{round}\left(\frac{w}{s}\right), -2^{b-1},
# 2^{b-1} - 1\right) s, \quad s = \frac{\max |w|}{2^{b-1} - \frac 1 2}; \qquad \text{backward: }
# \frac{\partial L}{\partial w} = \frac{\partial L}{\partial \hat w}$$

# %%
draw.straight_through()
describe("""Left: rounding is a staircase along the diagonal. Right: its derivative is 0; the straight-through estimator
uses 1 instead.""")

# %% [markdown]
# In torch, `x.detach()` has the value of `x` and no gradient. So `w + (rounded - w).detach()` has the value of
# `rounded` and the gradient of `w`.
#
# **Exercise 5 (7 minutes).** Write fake quantization with lesson 05's symmetric groups, as in the formula. Only a group
# of zeros needs another scale, however small the numbers of the others are.
#
# For example, with 4 bits and one group, `0.34, -0.86, 1.5, 0.08` has the scale $1.5 / 7.5 = 0.2$. The quotients 1.7,
# -4.3, 7.5 and 0.4 become the codes 2, -4, 7 (8 is clamped) and 0, so the values are `0.4, -0.8, 1.4, 0`.


# %% tags=["exercise"]
def fake_quantize(weight, bits, group_size):
    """The rounded values of a matrix, like it; the gradient passes to the weight unchanged.

    weight: [rows, in], floating point. bits: of a code, at least 2. group_size: neighbors in a row that share a scale;
    it divides `in`. A group of zeros stays zeros. Halves are rounded as by torch.round.
    """
    # SOLUTION: scales and codes of the groups, without gradients; then the straight-through estimator
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    rounded = ((groups / scales).round().clamp(-top, top - 1) * scales).flatten(-2)
    return weight + (rounded - weight).detach()
    # END


# %%
check(fake_quantize)

# %% [markdown]
# What should the rounded model learn? Not a text: it should predict what the *float* model predicts. That is
# **distillation**: the float model is the teacher, the rounded copy the student, and the loss is the very measure of
# this lesson, $KL(p \,\|\, q)$ with $p$ the teacher's and $q$ the student's probabilities. It needs no labels, and any
# text of the right kind will do.
#
# The engine's reference operations are plain torch, so autograd can follow them. `Student` is a copy of `tiny-gemma`
# whose products see `fake_quantize(weight)`. Three bits, because more is lost there: 10 steps of 512 tokens.
#
# **Predict first.** By what percentage do the 10 steps reduce the KL divergence that rounding to 3 bits causes?

# %% tags=["exercise"]
guess_back = 40  # PREDICT: % of the KL divergence that 10 steps remove

# %% tags=["nbval-ignore-output"] uncompared="sums in another order change every step of training"
rounded_by = yours(fake_quantize, four_bits.fake_quantize)
student = four_bits.Student(plain, lambda weight: rounded_by(weight, 3, 128))
with four_bits.differentiable():
    before = text.predictions(student.model)
four_bits.distill(student, four_bits.training_rows(steps=10), rate=2e-4)
with four_bits.differentiable():
    after = text.predictions(student.model)
show("float32", text.predictions())
show("3 bits", before)
show("3 bits, 10 steps", after)
print(f"fake_quantize is {whose(fake_quantize)}")
left, error = held_out.ratio(after.millinats, before.millinats)
print(f"removed {1 - left:.1%} ± {error:.1%} of the KL divergence")
compare("removed", unit="%", prediction=guess_back, measured=100 * (1 - left))
won = (before.perplexity - after.perplexity) / (
    before.perplexity - text.predictions().perplexity
)
print(f"of the rise in perplexity: {won:.0%}")

# %% [markdown]
# Perplexity improved more than KL, although KL is what was trained. Perplexity sees one probability at each position,
# that of the token that came next, and there errors of opposite signs cancel (lesson 06). So judge by KL, and by the ±
# next to it.
#
# A script in the repository, `data/distill_tiny_gemma.py`, trains for longer on more text, for 4 and for 3 bits. Its
# record, over the whole held-out text and the questions:

# %%
rows = choices.distillation()
for name, row in rows.items():
    won = ""
    if name.endswith(", trained"):
        left = row["kl"] / rows[name.removesuffix(", trained")]["kl"]
        won = f"removed {1 - left:.0%} of KL, {row['won_back']:.0%} of the rise in perplexity"
    print(
        f"{name:14} perplexity {row['perplexity']:.4f}  KL {1000 * row['kl']:6.3f}  "
        f"accuracy {row['accuracy']:.1%}  {won}"
    )

# %% [markdown]
# The result is an ordinary int4 model: training changes neither its format nor its speed. But it needs something that
# no earlier method did: a copy of the model with gradients and an optimizer's state, four float32 numbers for each
# weight. LLM-QAT (Liu et al. 2023) distills in this way, on text that the model wrote itself. NVIDIA's report on
# quantization-aware distillation (2026) uses the same loss to restore models in NVFP4.
#
# ## Recap · 3 min
#
# * With enough requests, keys and values outweigh the weights. In eight bits, nearly twice as many tokens fit.
# * A cache grows, and what has been written is never changed. A scale for each token and head does not depend on later
#   tokens. It folds into the scores and into the softmax's weights: products see only codes.
# * Keys have large channels, values hardly. With four bits, keys lose less with scales for channels than for
#   tokens. With eight bits, both lose next to nothing.
# * With few requests, the time goes into reading weights; with many, into arithmetic; with long contexts, into reading
#   the cache. Choose by what your traffic spends its time on.
# * Optional: FP4 has eight magnitudes and depends on its blocks: 16 weights with a scale in e4m3 (NVFP4), or 32 with a
#   power of two (MXFP4).
# * Optional: distillation trains weights for their rounding. The straight-through estimator lets gradients through.
#   Judge it by KL.
#
# **What got worse:** every key and value is now rounded once, and what is in the cache stays wrong for the rest of its
# request. Each scale takes 4 bytes, which is a lot for small heads. Every kernel that touches the cache now has three
# formats to support. Without hardware that multiplies it, FP4 is one more weight-only format, and distillation needs a
# training run for each model and each format. A recommendation rests on estimates and on one small model's quality.
#
# **Next:** a smaller cache lets more requests run at once, if its memory can be handed out without gaps. Requests grow
# by a token in each step, and no one knows in advance when they will end. Lesson 09 divides the cache into blocks, the
# scales included.
#
# **Further reading:** Liu et al. 2024, *KIVI* (2402.02750; two bits); Hooper et al. 2024, *KVQuant* (keys before their
# rotation); vLLM's documentation, *Quantized KV Cache*; FlashInfer's documentation of its attention kernels; Open
# Compute Project 2023, *OCP Microscaling Formats (MX) Specification*; NVIDIA 2025, *Introducing NVFP4*; Bengio et al.
# 2013, *Estimating or Propagating Gradients Through Stochastic Neurons*; Liu et al. 2023, *LLM-QAT*; NVIDIA 2026,
# *Quantization-Aware Distillation for NVFP4 Inference Accuracy Recovery* (2601.20088); Kurtic et al. 2024, *"Give Me
# BF16 or Give Me Death"?* (which precision when).
