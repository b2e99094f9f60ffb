# %% [markdown]
# # 05 · Quantizing weights
#
# After this lesson you can round a model's weights to 8 or 4 bits, with a scale for each row or group and with zero
# points; pack two weights into a byte, and multiply by them without unpacking the whole matrix; run the engine on
# weights that your functions quantized; measure what that costs in quality; and estimate what it saves in bytes and in
# time.
#
# **105 minutes. Needs:** a CPU, and lessons 00 and 02. You should know that a decode step reads every weight once.
# Lesson 01 helps with tokens. The lesson runs `tiny-gemma` on a CPU; sections 7 and 8 also show records of GPUs.

# %%
import torch

from minillm import LLM, SamplingParams, using
from minillm.advice import sizing
from minillm.bench import records
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_05 import pictures as draw
from minillm.course.lesson_05 import weight_formats
from minillm.course.lesson_05.weight_formats import (
    PackedBy,
    RoundedBy,
    groups_by,
    largest_tensor,
    report,
    rows_by,
)
from minillm.course.shared import gains, real_model
from minillm.course.shared.shapes import SHAPES
from minillm.quantization import Dense, Int4, Int8, int4

llm = LLM(device="cpu", dtype="float64", enable_prefix_caching=False, num_blocks=64)
model = llm.engine.model
greedy = SamplingParams(max_tokens=16, temperature=0)
prompt = "Fenwick lies on the island of"


def text():
    return prompt + llm.generate(prompt, greedy)[0].text


def whose(part):
    return "yours" if solved(part) else "the engine's, until you solve the exercise"


print(text())

# %% [markdown]
# The engine computes in float64 here, so that every change that you see comes from quantization and not from rounding
# elsewhere. (Prefix caching, lesson 09, is off: keys and values that one set of weights computed would be wrong for the
# next.)
#
# ## 1 · Why fewer bits? · 3 min
#
# Most models are published with 16 bits per weight. How large are they, and how large would they be with fewer?

# %%
print("weights, GB      parameters   16 bits   8 bits   4 bits")
for name, shape in SHAPES.items():
    count = sizing.parameters(shape)
    sizes = "".join(f"{count * bits / 8e9:9.1f}" for bits in (16, 8, 4))
    print(f"{name:13} {count / 1e9:10.2f} B  {sizes}")

# %% [markdown]
# Fewer bits help twice. **Memory:** with 16 bits, Llama 3.1 70B does not fit on an 80 GB GPU; with 4 bits it does, and
# more than half of the memory is left for keys and values. **Time:** for one request, a decode step of such a model
# spends most of its time reading weights (lesson 02), and a quarter of the bytes can be read in a quarter of the time.
#
# In this lesson, only the *stored* weights get smaller. As a rule, a weight is converted back before it is multiplied,
# and the activations keep their 16 bits. That is called **weight-only** quantization, or W8A16 and W4A16: weights of 8
# or 4 bits, activations of 16. Lesson 07 quantizes activations, too.
#
# ## 2 · A grid for each row · 15 min
#
# $b$ bits can represent $2^b$ distinct values. A format decides *which* values. The top line shows a
# **floating-point** format: within each range from a power of two to the next, the numbers are evenly spaced, and from
# one range to the next the spacing doubles. (This one has 2 *mantissa* bits, which give the place within a range; its
# larger numbers are cut off here. bfloat16 has 7 mantissa bits, and 8 *exponent* bits, which choose the range.) The
# lines below show **integers times a scale**: equal spacing everywhere.

# %%
draw.number_lines({
    "floating point": weight_formats.small_floats(),
    "integers -7 to 7, scale 0.2": [0.2 * code for code in range(-7, 8)],
    "integers -7 to 7, scale 0.1": [0.1 * code for code in range(-7, 8)],
})  # fmt: skip
describe("""The numbers of three formats. Floating-point numbers are dense near 0 and become sparse away from it.
    Integers times 0.2 are evenly spaced from -1.4 to 1.4; times 0.1 they are twice as dense, and reach only from -0.7
    to 0.7.""")

# %% [markdown]
# Floating point covers a huge range: bfloat16 reaches $10^{38}$. The weights of one matrix do not need it. They look
# like a bell: most are small, and the largest are only a few times larger. So take a few evenly spaced levels, and let
# a **scale** fit them to the weights at hand. The smallest scale that covers everything puts the largest weight on the
# last level.
#
# Do it by hand, for one row of a matrix and 4 bits. Use the codes -7 to 7. (A sixteenth code, -8, is left unused, so
# that the range is symmetric.) The row is `0.55, -1.4, 0.13, 0.27, -0.66, 0.06`.
#
# 1. The largest magnitude is 1.4, and it gets code -7. So the scale is 1.4 / 7 = 0.2.
# 2. Divide each weight by the scale and round: 0.55 / 0.2 = 2.75, so its **code** is 3.
# 3. Later, to use the weight, multiply: 3 x 0.2 = 0.6. The error is 0.05.
#
# What are the other five codes? Which weight has the largest error? Then look:

# %%
row = [0.55, -1.4, 0.13, 0.27, -0.66, 0.06]
draw.rounding(row, {"15 levels, 0.2 apart": [0.2 * code for code in range(-7, 8)]})
describe("""Six weights above a line of fifteen levels. An arrow leads from each weight to its nearest level: 0.55 to
    0.6, -1.4 to -1.4, 0.13 and 0.27 both to 0.2, -0.66 to -0.6, and 0.06 to 0.""")

# %% [markdown]
# The codes are 3, -7, 1, 1, -3, 0. Two different weights, 0.13 and 0.27, became the same 0.2, and both have the largest
# error, 0.07. No error can exceed half the scale. As formulas, for a row $w$ and $b$ bits:
#
# $$\text{top} = 2^{b-1} - 1, \qquad s = \frac{\max_i |w_i|}{\text{top}}, \qquad
# q_i = \operatorname{round}\left(\frac{w_i}{s}\right), \qquad w_i \approx q_i\, s$$
#
# This is symmetric **round-to-nearest** quantization (RTN). Each output row of a matrix has a scale of its own, so a
# row of small weights is not rounded on the grid of a row of large ones.
#
# **Exercise 1 (8 minutes).** Write it for a matrix. For example, the row above with 4 bits has the codes `3, -7, 1, 1,
# -3, 0` and the scale 0.2.


# %% tags=["exercise"]
def quantize_rows(weight, bits):
    """Round each row of a matrix to the nearest multiples of the row's own scale.

    weight: [rows, in], float32 or float64. bits: 2 to 8. Returns codes, [rows, in] int8, from -top to top with
    top = 2 ** (bits - 1) - 1, and scales, [rows, 1] in the dtype of weight. A row of zeros has scale 1.
    """
    # SOLUTION: the scales from the largest magnitudes, then the codes
    top = 2 ** (bits - 1) - 1
    scales = weight.abs().amax(dim=1, keepdim=True) / top
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (weight / scales).round().to(torch.int8), scales
    # END


# %%
check(quantize_rows)

# %% [markdown]
# Now run the engine on your weights. `weight_formats.weights` replaces the matrices of all layers until the `with`
# block ends: your function rounds each of them, and the engine stores codes and scales in its int8 format. (The
# embedding table, which is also the output head, stays as it is for now. The engine's own function also takes 16-bit
# weights, and clamps the codes: in bfloat16, the largest weight divided by its scale can round to 128, which int8
# cannot hold.)

# %%
to_rows = yours(quantize_rows, weight_formats.quantize_rows)
before = weight_formats.bytes_of(model)
with weight_formats.weights(llm, {"layers.*": RoundedBy(Int8(), rows_by(to_rows, 8))}):
    print(text())
    after = weight_formats.bytes_of(model)
print(f"quantize_rows is {whose(quantize_rows)}")
print(f"layers: {before / 1e6:.2f} MB before, {after / 1e6:.2f} MB with 8 bits and scales")

# %% [markdown]
# (Numbers of more than 16 bits are counted as 16 bits here: a model that is served in bfloat16 has weights of 16 bits,
# and its scales could be stored in 16 bits, too. The engine keeps the scales of int8 in 32 bits.)
#
# ## 3 · What it costs · 11 min
#
# The model still knows the island. But one sentence says little. There are two standard measures.
#
# **Perplexity** asks how well the model predicts a real text. Let it read the text, and record the probability that it
# assigns to each actual next token. Suppose that these are 1/2, 1/4, 1 and 1/8 for four tokens. Perplexity is the
# inverse of their geometric mean: here $(2 \cdot 4 \cdot 1 \cdot 8)^{1/4} \approx 2.83$. The model was as uncertain as
# if it had to choose among 2.83 equally likely tokens at each position. 1 is perfect.
#
# **KL divergence** (Kullback-Leibler) asks how much the quantized model differs from the original, without a right
# answer. At each position, the original gives probabilities $p$ to all tokens of the vocabulary, and the quantized
# model gives $q$:
#
# $$\mathrm{KL}(p \,\|\, q) = \sum_{\text{tokens}} p \log \frac{p}{q}$$
#
# It is 0 if both agree on everything, and positive otherwise. Take the mean over all positions. With the natural
# logarithm, its unit is the *nat*. A small example of both measures:

# %%
p = torch.tensor([0.5, 0.25, 1.0, 0.125])
print(f"perplexity: {(-p.log().mean()).exp():.2f}")
original, changed = torch.tensor([0.5, 0.5]), torch.tensor([0.6, 0.4])
print(f"KL divergence: {(original * (original / changed).log()).sum():.4f} nats")

# %% [markdown]
# And for the model, on 24 rows of 256 tokens of text that training never saw:

# %%
quality = weight_formats.Quality(llm)
dense = quality.measure()
report({"unquantized": dense})

# %% [markdown]
# (The last column is the share of positions at which the most likely token is the same as in the original.) Other rows
# of text would give another KL divergence: the number after ± is the standard error of the mean over rows. To compare
# two formats, look at the *ratio* of their KL divergences: where it is printed below, its ± comes from the same rows in
# pairs. Treat a difference as real only if it is at least about twice its standard error.
#
# Now use exercise 1 with fewer bits. (The engine stores all of these codes in 8 bits; quality does not depend on that.)
#
# **Predict first.** With 8 bits per weight, by how many percent does perplexity rise? With 4 bits, which leaves 15
# levels? With 2 bits, which leaves three: minus the largest weight, zero, and plus the largest weight?

# %% tags=["exercise"]
guess_8 = 1  # PREDICT: % by which perplexity rises with 8 bits
guess_4 = 20  # PREDICT: % with 4 bits
guess_2 = 200  # PREDICT: % with 2 bits

# %%
by_bits, said = {}, {}
for bits in (8, 7, 6, 5, 4, 3, 2):
    with weight_formats.weights(llm, {"layers.*": RoundedBy(Int8(), rows_by(to_rows, bits))}):
        by_bits[bits], said[bits] = quality.measure(), text()
report({
    "unquantized": dense,
    **{f"{bits} bits, a scale per row": found for bits, found in by_bits.items()},
})  # fmt: skip
for bits, guess in ((8, guess_8), (4, guess_4), (2, guess_2)):
    rise = 100 * (by_bits[bits].perplexity / dense.perplexity - 1)
    compare(f"{bits} bits", unit="%", prediction=guess, measured=rise)
for bits in (4, 3, 2):
    print(f"{bits} bits: {said[bits]}")

# %%
draw.ladder(by_bits, dense.perplexity)
describe("""Left: perplexity by the number of bits; dashed: unquantized. Right: KL divergence; its standard errors are
    smaller than the dots. Dotted: 4 times for each bit less. Down to 5 bits the measured line follows the dotted one,
    then it rises faster.""")

# %% [markdown]
# Three things to see:
#
# * **8 bits are almost free**, and down to 5 bits, perplexity shows next to nothing.
# * **KL divergence sees what perplexity does not.** Each bit you drop about doubles the spacing of the levels, and so
#   all errors. Small changes of the probabilities enter KL divergence as squares, so it grows by about 4 times. That is
#   the dotted line. (With few bits, the spacing grows faster: from 4 to 3 bits by 7/3, and from 3 to 2 bits by 3.) To
#   compare formats on a short text, use KL divergence.
# * **Then it breaks.** At 2 bits nothing is left. The next figure shows why: it has all weights of one matrix, each
#   divided by the largest of its row, over the levels of three grids.

# %%
matrix = model.layers[2].gate_up.dequantize()
relative = matrix / matrix.abs().amax(1, keepdim=True)
draw.histogram(relative.flatten().numpy(), bits=(4, 3, 2))
deviations = (matrix.abs().amax(1) / matrix.std(1)).median()
print(f"in half of the rows, the largest weight is below {deviations:.2f} standard deviations")
describe("""The same bell-shaped histogram of weights three times, over the levels of 4, 3 and 2 bits. The weights that
    round to 0 are few at 4 bits, more at 3, and almost the whole bell at 2. The bars at -1 and 1 are each row's own
    largest weight.""")

# %% [markdown]
# With 2 bits, a weight must be more than half as large as the largest of its row, or it becomes 0. The largest is rare
# by definition, so most of the matrix is gone. The levels are in the wrong place: they are spread to reach the largest
# weight, and the many small ones pay for it.
#
# But the levels need not reach it. With a smaller scale, the largest weights are **clipped** to the last level, and all
# others get denser levels. Here is the squared error of the same matrix, with each scale set to a
# share of the usual one:

# %%
shares = [step / 50 for step in range(10, 51)]
draw.clipping(
    shares,
    {
        bits: [weight_formats.clipping_error(matrix, bits, s) for s in shares]
        for bits in (4, 3, 2)
    },
)
describe("""Squared error against the share of the range that is kept, for 4, 3 and 2 bits; a dot marks the least. The
    fewer the bits, the more is gained, and the smaller the best share.""")

# %% [markdown]
# The fewer the levels, the more clipping pays. Lesson 06 searches for the best range with an error that knows about the
# inputs. Here, we keep the whole range, and share each scale among fewer weights.
#
# ## 4 · Groups and zero points · 25 min
#
# ### Outliers
#
# Here is a row whose largest weight is almost ten times as large as the next one, an **outlier**:

# %%
outlier_row = [0.12, -0.3, 0.2, 0.42, -0.21, 4.0, 0.32, -0.1]
draw.row_in_groups(outlier_row, group_size=4, top=7)
describe("""A row of eight weights, of which one, 4.0, is an outlier beyond the picture. Left, with one scale, the
    levels are far apart, and the other weights round to 0 or to plus or minus 0.57. Right, with a scale for each group
    of four, the levels of the first group are dense, and its errors are hardly visible; the outlier's group is as
    before.""")

# %% [markdown]
# On the left, one scale serves all eight: 4.0 / 7 = 0.57, and every other weight becomes 0 or ±0.57. On the right, each
# **group** of four neighbors has a scale of its own. The outlier still ruins its own group, but not the other one. In
# practice, groups have 32 to 128 weights. They are not free: a scale of 16 bits for every 32 weights adds half a bit
# per weight.
#
# `tiny-gemma` has hardly any outliers: in most rows, the largest weight is about three standard deviations. So plant
# some. The next cell takes 4 of the 256 input columns in two of the four matrices of each layer, and multiplies them by
# 10. The weights of the norm that produces these inputs are divided by 10 in the same places, so the model computes
# exactly what it did before.
#
# **Predict first:** before, 4 bits with a scale per row had a perplexity of 2.15. What is it with the outliers? And
# what is it with groups of 32?

# %% tags=["exercise"]
guess_outliers = 3  # PREDICT: perplexity with outliers, 4 bits, a scale per row
guess_grouped = 2.5  # PREDICT: perplexity with outliers, 4 bits, groups of 32

# %%
planted = {}
with weight_formats.planted_outliers(llm, columns=4, times=10):
    planted["unquantized"] = quality.measure()
    with weight_formats.weights(llm, {"layers.*": RoundedBy(Int8(), rows_by(to_rows, 4))}):
        planted["a scale per row"] = quality.measure()
    with weight_formats.weights(llm, {"layers.*": Int4(group_size=32)}):
        planted["groups of 32"] = quality.measure()
report(planted)
for name, guess in (("a scale per row", guess_outliers), ("groups of 32", guess_grouped)):
    measured = planted[name].perplexity
    compare(f"perplexity, {name}", unit="", prediction=guess, measured=measured)

# %% [markdown]
# The planted model computes the same, and yet rounding its rows to 4 bits doubles its perplexity: a row of the changed
# matrices has four outliers, and its 252 other weights share a few levels. Groups of 32 confine the damage to the
# groups of these columns. (Lessons 06 and 07 rescale columns and inputs in the same way, but
# choose factors that make a model *easier* to quantize.)
#
# ### Zero points
#
# The `Int4` above is symmetric, with the codes -8 to 7. In a group of all-positive weights, it would never use the
# codes below 0: half of its levels would be wasted. A **zero point** moves the levels to where the weights are: it is
# the code that stands for 0, and may differ in each group.
#
# Here are both for one group. (Symmetric levels put the largest weight 7.5 steps from 0. If it is positive, it is
# clamped to code 7, with an error of half a step, and no weight has a larger one.)

# %%
group = [0.3, 1.2, -0.3, 0.76]
symmetric = [1.2 / 7.5 * code for code in range(-8, 8)]
shifted = [0.1 * (code + 5) for code in range(-8, 8)]
draw.rounding(group, {
    "symmetric: 16 levels, 0.16 apart, from -1.28 to 1.12": symmetric,
    "zero point -5: 16 levels, 0.1 apart, from -0.3 to 1.2": shifted,
})  # fmt: skip
describe("""Four weights from -0.3 to 1.2 above two lines of sixteen levels. Symmetric levels reach from -1.28 to 1.12,
    and many of them have no weight nearby. Levels with a zero point span exactly the weights, and are denser.""")

# %% [markdown]
# By hand: the group `0.3, 1.2, -0.3, 0.76` reaches from -0.3 to 1.2. Sixteen codes span fifteen steps, so the scale is
# 1.5 / 15 = 0.1. The lowest weight, -0.3, is three steps below 0 and should get the lowest code, -8. So 0 gets the code
# -8 + 3 = -5: that is the zero point. The codes are 3 - 5 = -2, 12 - 5 = 7, -3 - 5 = -8, and 8 - 5 = 3 (from 7.6). To
# get a weight back, subtract the zero point and multiply: (3 + 5) x 0.1 = 0.8.
#
# $$l = \min(0, \min_i w_i), \quad h = \max(0, \max_i w_i), \quad s = \frac{h - l}{15}, \quad
# z = \operatorname{round}\left(-8 - \frac{l}{s}\right)$$
#
# $$q_i = \operatorname{clamp}\left(\operatorname{round}\left(\frac{w_i}{s}\right) + z,\, -8,\, 7\right), \qquad
# w_i \approx (q_i - z)\, s$$
#
# Two details. The range from $l$ to $h$ includes 0, so that $z$ is a code too, and a weight of exactly 0 stays 0. And
# $z$ is rounded, which can push the largest weight half a step beyond the last code: hence the clamp.
#
# **Exercise 2 (10 minutes).** Write it. For example, the group above, as a matrix of one row with `group_size` 4, has
# the codes `-2, 7, -8, 3`, the scale 0.1 and the zero point -5.


# %% tags=["exercise"]
def quantize_groups(weight, group_size):
    """Round each group of neighbors in a row to 4 bits, with a scale and a zero point of its own.

    weight: [rows, in], floating point; in is a multiple of group_size. Group 0 of a row is its inputs 0 to
    group_size - 1, and so on. Returns codes, [rows, in] int8, from -8 to 7; scales, [rows, groups] in the dtype
    of weight; and zeros, [rows, groups] int8, from -8 to 7. A group of zeros has scale 1.
    """
    # SOLUTION: range, scale and zero point of each group, then the codes
    grouped = weight.reshape(len(weight), -1, group_size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = (-8 - low / scales).round()
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(-8, 7)
    return codes.reshape(weight.shape).to(torch.int8), scales, zeros.to(torch.int8)
    # END


# %%
check(quantize_groups)

# %% [markdown]
# Now run it in the engine, on the original model without planted outliers, in groups of 64:

# %%
to_groups = yours(quantize_groups, weight_formats.quantize_groups)
zero_points = Int4(group_size=64, symmetric=False)
with weight_formats.weights(
    llm, {"layers.*": RoundedBy(zero_points, groups_by(to_groups, 64))}
):
    grouped, grouped_text = quality.measure(), text()
with weight_formats.weights(llm, {"layers.*": Int4(group_size=64)}):
    symmetric_64 = quality.measure()
print(f"quantize_groups is {whose(quantize_groups)}")
report({"groups of 64, symmetric": symmetric_64, "groups of 64, zero points": grouped})
ratio, error = symmetric_64.over(grouped)
print(f"KL, symmetric / zero points: {ratio:.2f} ± {error:.2f}")
print(grouped_text)

# %% [markdown]
# KL divergence falls by a third, and perplexity says the opposite: the wrong measure for a difference of this size.
#
# The engine's own version is the same formula. It rounds the scales to the precision in which they will be stored
# *before* it divides by them, so that codes and scales fit together. Look at the symmetric case, too.

# %%
# ENGINE: minillm.quantization.int4:scales_of
# ENGINE: minillm.quantization.int4:round_to_int4

# %% [markdown]
# ## 5 · Two codes in a byte · 9 min
#
# A code from -8 to 7 needs 4 bits, but torch computes with integers of at least 8 bits, so int8 codes would waste half
# of the memory. Two codes must share a byte. First add 8, which makes the codes 0 to 15, never negative. Then put the
# first of two neighbors into the low half of the byte, and the second into the high half. A half is also called a
# *nibble*.

# %%
draw.nibbles([-2, 7, -8, 3])
describe("""Two bytes. Byte 0 is 246: its low half has code 0, -2, which plus 8 is 6, or 0110 in binary; its high half
    has code 1, 7, which plus 8 is 15, or 1111. Byte 1 is 176: low half 0000 for code -8, high half 1011 for code 3.""")

# %% [markdown]
# The first byte is 6 + 16 x 15 = 246. In general, with $u = q + 8$:
#
# $$\text{byte}_j = u_{2j} + 16\, u_{2j+1}$$
#
# **Exercise 3 (5 minutes).** Pack codes. For example, `-2, 7, -8, 3` becomes the bytes 246 and 176.


# %% tags=["exercise"]
def pack_codes(codes):
    """Pack two neighbors of each row into a byte.

    codes: [rows, in] int8, from -8 to 7; in is even. Returns [rows, in / 2] uint8: byte j of a row has
    column 2 j, plus 8, in its low half, and column 2 j + 1, plus 8, in its high half.
    """
    # SOLUTION: add 8, and combine even and odd columns
    unsigned = (codes + 8).to(torch.uint8)
    return unsigned[:, 0::2] + 16 * unsigned[:, 1::2]
    # END


# %%
check(pack_codes)

# %% [markdown]
# The engine stores your bytes, and unpacks them itself in every step. So if your order of nibbles is not the one that
# it expects, the model is a different one. Compare with the text of the last section:

# %%
packing = PackedBy(zero_points, yours(pack_codes, int4.pack))
with weight_formats.weights(llm, {"layers.*": packing}):
    packed_text = text()
    packed_bytes = weight_formats.bytes_of(model)
print(f"pack_codes is {whose(pack_codes)}; the same text: {packed_text == grouped_text}")
print(packed_text)
bits = 16 * packed_bytes / before
print(f"layers: {packed_bytes / 1e6:.2f} MB, {bits:.3f} bits per weight")

# %% [markdown]
# 4 bits for each code, and for each group of 64 a scale of 16 bits and a zero point of 8 (this engine stores it in a
# byte): 4 + 24 / 64 = 4.375 bits per weight.
#
# Published checkpoints differ in their order, and a file read in the wrong one loads without an error. All of these
# store 4-bit codes as 0 to 15, eight neighbors to a 32-bit integer:
#
# | layout | an integer holds | from the lowest bits | zero points |
# |---|---|---|---|
# | compressed-tensors (vLLM's tools) | eight inputs | 0 1 2 3 4 5 6 7: your bytes, in fours | packed by outputs |
# | GPTQ (AutoGPTQ, GPTQModel) | eight inputs | 0 1 2 3 4 5 6 7, stored as [in / 8, out] | one less, in version 1 |
# | AWQ (AutoAWQ) | eight outputs | 0 2 4 6 1 3 5 7 | packed like the codes |
#
# ## 6 · Multiply without unpacking · 18 min
#
# Until now, each product first turned the whole matrix back into floating-point numbers. That saves memory only where
# the model is stored: the step still writes and reads a large matrix. A kernel for packed weights never builds it. It
# reads a piece, converts it, multiplies, adds to the result, and forgets it.
#
# Write out the sum. Output $o$ of a product is a sum over the inputs $i$. Split it by groups $g$:
#
# $$y_o = \sum_g \sum_{i \in g} x_i\, (q_{oi} - z_{og})\, s_{og} =
# \sum_g s_{og} \Big( \sum_{i \in g} x_i\, q_{oi} \;-\; z_{og} \sum_{i \in g} x_i \Big)$$
#
# The scale moves out of the sum over a group: one multiplication for the group's result instead of one for each weight.
# The zero point moves out, too, next to a sum that is the same for all outputs. So the inner loop is a product with
# plain small integers.
#
# A scale for each single input could not leave the sum (it can move into $x$ instead, which lesson 06 makes use of). A
# scale for a *group* of inputs can, because it is common to a part of the sum. So can the scales of activations in the
# same groups: NVFP4, lesson 08, has both.
#
# A small example, with one output and two groups of two inputs:

# %%
x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])  # [groups, inputs]
q = torch.tensor([[5.0, -2.0], [0.0, 7.0]])
z, s = torch.tensor([1.0, -3.0]), torch.tensor([0.1, 0.5])
first = (x * (q - z[:, None]) * s[:, None]).sum()
second = (s * ((x * q).sum(1) - z * x.sum(1))).sum()
print(f"dequantized first: {first:.2f}; scale and zero point after the sum: {second:.2f}")

# %% [markdown]
# The inverse of `pack_codes` is in the engine: `int4.unpack`. Use it on a piece of the columns:

# %%
# ENGINE: minillm.quantization.int4:unpack

# %% [markdown]
# **Exercise 4 (10 minutes).** Write a product with packed weights. Go through the groups, and unpack one group's
# columns at a time, for all outputs. In a matrix of many groups, the tensors that you have made and not yet freed must
# have, all together, fewer than half as many elements as the whole matrix, so do not keep the pieces. (One output at a
# time is allowed, too.) Apply scales and zero points before or after the sum, as you like.
#
# For example, one token `1, 2, 3, -1`, one output with the codes `5, -2, 0, 7`, two groups with the zero points 1 and
# -3 and the scales 0.1 and 0.5, as above: the result is -0.7.


# %% tags=["exercise"]
def packed_linear(x, packed, scales, zeros):
    """The product of x with the transpose of a packed matrix, a group of inputs at a time.

    x: [tokens, in], floating point. packed: [out, in / 2] uint8, as from pack_codes. scales: [out, groups] in the
    dtype of x. zeros: [out, groups] int8. All groups have in / groups inputs, an even number. Returns [tokens, out]
    in the dtype of x: sums of x[token, i] * (code[o, i] - zeros[o, group of i]) * scales[o, group of i].
    """
    # SOLUTION: for each group: unpack, multiply, subtract the zero points' part, scale, add
    out = x.new_zeros(len(x), len(packed))
    size = x.shape[1] // scales.shape[1]
    for group in range(scales.shape[1]):
        part = x[:, group * size : (group + 1) * size]
        codes = int4.unpack(packed[:, group * size // 2 : (group + 1) * size // 2]).to(x.dtype)
        zero = zeros[:, group].to(x.dtype)
        out += (part @ codes.t() - part.sum(1, keepdim=True) * zero) * scales[:, group]
    return out
    # END


# %%
check(packed_linear)

# %% [markdown]
# Now run it in the engine, as its `linear`: it computes every product of the layers, in every step. `used.calls` counts
# the products. The last lines show the largest tensor that one product makes, for the largest matrix.

# %%
multiply = weight_formats.linear_by(packed_linear)
with weight_formats.weights(llm, {"layers.*": zero_points}), using(linear=multiply) as used:
    same = text() == grouped_text
    weight = model.layers[0].gate_up
if solved(packed_linear):
    print(f"the same text as before: {same}; calls of your product: {used.calls['linear']}")
else:
    print("not solved yet: the engine ran its own product")
one = torch.randn(1, weight.shape[1], dtype=torch.float64)
given = one, weight.packed, weight.scales, weight.zeros
engines = largest_tensor(weight_formats.packed_linear, *given)
print(f"elements of the matrix: {weight.shape.numel():,}")
print(f"of the largest tensor, if all is dequantized: {engines:,}")
if solved(packed_linear):
    print(f"of the largest tensor, in yours: {largest_tensor(packed_linear, *given):,}")

# %% [markdown]
# A GPU kernel that works like your loop loads packed codes into registers, and the whole matrix is never written to
# memory. The engine has such kernels for bfloat16: one for a single request, and one for 2 to 64 rows of `x`. The
# kernel for 2 to 64 rows converts codes to bfloat16 in registers. The kernel for a single request leaves them as they
# are, and converts its few inputs instead: each becomes an integer of two bytes, with one scale for 16 or 32 neighbors.
# Then one instruction, `dp4a`, multiplies four codes by one byte of four inputs and adds up the products. Both kernels
# apply the scales to sums, as in the formula. With more rows, arithmetic takes most of the time (section 8), so the
# engine dequantizes the matrix, once per product.
#
# On a CPU, the engine dequantizes int4 weights in every step. What does that cost?

# %% tags=["nbval-ignore-output"] uncompared="times"
timed = {"unquantized": Dense(), "int8": Int8(), "int4-g64, zero points": zero_points}
for name, format in timed.items():
    with weight_formats.weights(llm, {"layers.*": format}):
        print(f"{name:22} {weight_formats.seconds(text):6.3f} s for the prompt and 16 tokens")

# %% [markdown]
# On a CPU, int4 saves memory and costs time: taking bytes apart is several operations. int8 costs little or nothing.
#
# ## 7 · Quality against bytes · 12 min
#
# Now all formats in one picture, judged at equal size: bits that are spent on scales could be spent on a finer grid for
# whole rows instead. To compare like with like, rows get all $2^b$ levels here, as `Int4` has them, with the largest
# weight half a step beyond the last.
#
# **Predict first**, for the original model, without outliers: a scale of 16 bits for each group of 64 adds a quarter of
# a bit per weight, and for each group of 16 a whole bit. By what factor does KL divergence fall from groups of 64 to
# groups of 16? Both have 4 bits and no zero points. A grid that is finer by the same 3/4 of a bit would be worth, at
# about 4 for each bit (section 3), a factor of $4^{3/4}$, about 2.8.

# %% tags=["exercise"]
guess_groups = 3  # PREDICT: KL divergence in groups of 64 / KL divergence in groups of 16

# %%
SIZES = (128, 64, 32, 16)
ROW = 256  # weights in a row of three matrices in four; the fourth has 768
kinds = {}  # bits, weights that share a scale, whether there are zero points


def bits_per_weight(bits, group_size, zero_points):
    """A scale of 16 bits, and a zero point of 8, for each group."""
    return bits + (16 + 8 * zero_points) / group_size


for bits in (3, 4, 5, 6):
    format = RoundedBy(Int8(), rows_by(weight_formats.rows_with_all_levels, bits))
    with weight_formats.weights(llm, {"layers.*": format}):
        kinds[bits, ROW, False] = quality.measure()
for zeros in (False, True):
    for size in SIZES:
        with weight_formats.weights(llm, {"layers.*": Int4(size, symmetric=not zeros)}):
            kinds[4, size, zeros] = quality.measure()
lines, table = {"rows": {}, "groups": {}, "groups, zero points": {}}, {}
for (bits, size, zeros), found in kinds.items():
    line = "rows" if size == ROW else "groups, zero points" if zeros else "groups"
    in_all = bits_per_weight(bits, size, zeros)
    lines[line][in_all] = found
    table[f"{in_all:.2f} bits: {line.replace('groups', f'groups of {size}')}"] = found
report(table)
draw.frontier(lines)
describe("""KL divergence against bits per weight, on a logarithmic axis; bars are standard errors. The line of whole
    rows falls from 3 to 6 bits. Both lines of groups, from 128 to 16 weights, begin below it and end above it.
    Symmetric groups meet it near 4.5 bits; groups with zero points are the lowest from 4.2 to 4.5 bits.""")

# %% [markdown]
# Which steps are worth their bits? For each, the factor by which KL divergence falls, and the factor that as many bits
# buy in a finer grid:

# %%
steps = {
    "rows -> groups of 64": ((4, ROW, False), (4, 64, False)),
    "groups of 64 -> 32": ((4, 64, False), (4, 32, False)),
    "groups of 32 -> 16": ((4, 32, False), (4, 16, False)),
    "groups of 64 -> 16": ((4, 64, False), (4, 16, False)),
}
steps |= {
    f"zero points, groups of {size}": ((4, size, False), (4, size, True)) for size in SIZES
}
for name, (fewer, more) in steps.items():
    ratio, error = kinds[fewer].over(kinds[more])
    finer = 4 ** (bits_per_weight(*more) - bits_per_weight(*fewer))
    if more[2]:
        packed = f"   with zero points of 4 bits: {4 ** (4 / more[1]):.2f}"
    else:
        packed = ""
    print(f"{name:27} {ratio:.2f} ± {error:.2f}   in a finer grid: {finer:.2f}{packed}")
ratio, _ = kinds[4, 64, False].over(kinds[4, 16, False])
compare("from groups of 64 to 16", unit="times", prediction=guess_groups, measured=ratio)

# %% [markdown]
# On *this* model, groups of 64 and of 32 are worth about what they cost, and groups of 16 much less: without outliers,
# their levels are only a little denser. Zero points of a byte, as this engine stores them, are worth *more* than they
# cost in groups of 64, by almost three standard errors (but that is the best of four comparisons, and the best of four
# is partly luck); in groups of 128 and 32 there is no clear winner, and in groups of 16 a finer grid is better. The
# layouts in section 5 pack zero points into 4 bits. Counted like that, they look worth it everywhere, though in groups
# of 32 and 16 by less than two standard errors. (From 4 to 5 bits, the line of rows falls by almost 5 times instead
# of 4, so the finer grid's column is a little low.)
#
# Why do zero points help, although about as many weights are positive as negative? In a small group, the largest and
# the smallest weight are seldom equally far from 0. Symmetric levels reach equally far on both sides; with a zero
# point, they reach only from the smallest weight to the largest, so they are denser. Symmetric levels also leave
# the largest weight of *every* group half a step away, so the squared error falls by more than the square of the step:

# %%
print("group size   step with / without zero points   squared error without / with")
for size in SIZES:
    step, error = weight_formats.zero_points_gain(model, size)
    print(f"{size:10} {step:25.2f} {error:33.2f}")

# %% [markdown]
# ### A model that people use
#
# SmolLM2-135M-Instruct is a chat model of 135 million parameters, which `minillm download` knows. The copy that it
# downloads was itself stored in 4 bits, with a scale and an offset (a zero point that need not be a code) in groups of
# 32. A record made on an H100 shows what each format costs it, on 48 windows of 512 tokens of these lessons' prose. KL
# is in *millinats*, thousandths of a nat, with the 95% interval of its mean; `g64` stands for groups of 64 weights, and
# `int8+int8` has an int8 head as well. Bits are those of the layers in a file, where a zero point has 4 and
# a scale of int8 has 32. The last column is from a record of `tiny-gemma`, on other text.

# %%
names = ["int8", "int8+int8", "int4", "int4-g32", "int4-g32-zeros"]
real_model.report(names, labels={"int4": "int4-g64"})
times = real_model.quality()["int8"]["kl"] / real_model.tiny_kl()["int8"]
print(f"int8: {times:.0f} times the KL of tiny-gemma")
smol, tiny = real_model.unquantized_perplexities()
print(f"unquantized perplexity: {smol:.1f} here, {tiny:.2f} for tiny-gemma on its own text")

# %% [markdown]
# Eight bits are almost free here, too. But the KL divergence is over two hundred times that of `tiny-gemma`,
# which reads text that is far easier to predict. So a small model shows how a format works, and not what
# yours will lose: measure that. Zero points help this model as well (last row). But the copy's weights are on levels
# with an offset, in the same groups of 32, so another copy may gain less.
#
# The table of tokens, embedding and output head in one, is still unquantized in `tiny-gemma`, and is a fifth of it.
# Large models keep it in 16 bits or quantize it to 8. The engine has options for this, and quantizes while it loads:

# %%
options = {"quantization": "int8", "quantized_head": "int8"}
with LLM(device="cpu", dtype="bfloat16", num_blocks=64, **options) as small:
    print(
        f"{small.engine.model.nbytes / 1e6:.2f} MB instead of {2 * model.num_parameters / 1e6:.2f}"
    )

# %% [markdown]
# `minillm quantize --method int4 --group-size 64 --out DIR` writes a quantized checkpoint, in compressed-tensors'
# layout, and `LLM("DIR")` runs it. With `--recipe`, each layer and projection gets its own format (section 9).
#
# ## 8 · What it saves · 10 min
#
# What do fewer bytes buy in time? Take Gemma 2B on an H200, and one request. The layers get 4 bits in groups of 128,
# and the output head, a table of 256,000 tokens, stays in bfloat16.
#
# **Predict first:** suppose that a step does nothing but read the weights. How many times faster does it become?

# %% tags=["exercise"]
guess_faster = 3.5  # PREDICT: times, int4 layers and a bfloat16 head against all bfloat16

# %%
record = records.read("h200/ceiling-h200")
gemma = SHAPES["Gemma 2B"]
head = gemma.vocab_size * gemma.hidden_size
layers = sizing.parameters(gemma) - head
FORMATS = {  # bits per weight of the layers, and of the head
    "bfloat16": (16, 16),
    "int8, head int8": (8, 8),
    "int4 g128, head bfloat16": (4.125, 16),
    "int4 g128, head int8": (4.125, 8),
}
seconds = {}
for name, (layer_bits, head_bits) in FORMATS.items():
    nbytes = (layers * layer_bits + head * head_bits) / 8
    seconds[name] = nbytes / (record["copy_TB_per_s"] * 1e12)
    print(f"{name:25} {nbytes / 1e9:5.2f} GB, read in {seconds[name] * 1e3:5.2f} ms")
times = seconds["bfloat16"] / seconds["int4 g128, head bfloat16"]
compare(
    "int4 g128, reading alone",
    unit="times faster",
    prediction=guess_faster,
    measured=times,
    by="computed",
)

# %% [markdown]
# A fifth of the parameters, left at 16 bits, become half of the bytes. That is why an engine must be able to quantize
# its head. These are floors, the time of reading alone, at the rate of a copy on that GPU.
#
# And with more requests? Their rows share the weights that are read, but each row needs its own arithmetic, and that is
# not reduced at all: with two or more rows, this engine computes weight-only products in 16 bits. A step takes at least
# as long as the slower of the two takes. (For arithmetic, take the rate that torch's products reach with 2,048 rows.)

# %%
products = {
    row["rows"]: row["step_ms"] for row in record["matrix_products"] if row["dtype"] == "bf16"
}
rate = 2048 / products[2048] * 1e3  # rows per second
ROWS = [2 ** (power / 4) for power in range(41)]
floors = {
    name: [max(seconds[name], rows / rate) for rows in ROWS]
    for name in ("bfloat16", "int8, head int8", "int4 g128, head int8")
}
measured = {rows: ms for rows, ms in products.items() if rows <= 1024}
draw.step_floors(ROWS, floors, measured, "bfloat16: torch's products, one by one")
describe("""The least time of a step's products by the number of rows. With few rows the three formats differ: int4 is
    lowest, then int8, then bfloat16. Each line is flat at first, then rises; from some 200 rows on, all are the same
    line. Dots: torch's products in bfloat16, measured one by one, are above their floor.""")
for name in floors:
    print(f"{name:22} limited by bytes up to {seconds[name] * rate:4.0f} rows")

# %% [markdown]
# The fewer the bytes, the earlier arithmetic becomes the limit, and in large batches the formats need the same time:
# there, weight-only quantization saves memory only. Here are tokens per second that this engine reached on that H200
# with Gemma 2B, divided by those of bfloat16 in the same run.

# %%
gains.report(["int8, head int8", "int4 g128, head int8"])

# %% [markdown]
# One request gains less than the bytes promise, because attention, norms and the start of each kernel take as long as
# before. From 1 to 4 requests, the gain falls at once, although the floors promise no change before 49 rows. Look at
# the time per token, and, from another record, at the matrix products of a step, each measured alone:

# %%
for method in ("bf16", "int8, head int8", "int4 g128, head int8"):
    one, four = (gains.milliseconds(method, requests) for requests in (1, 4))
    print(
        f"{method:22} 1 request {one:.2f} ms, 4 requests {four:.2f} ms: {four - one:.2f} ms more"
    )
print(f"bf16, 1 request, without the fused step: {gains.unfused():.2f} ms more")
for method in ("bf16", "int8, head int8", "int4 g128, head int8"):
    one, four = (gains.products(method, rows) for rows in (1, 4))
    print(f"{method:22} products of 1 row {one:.2f} ms, of 4 rows {four:.2f} ms")

# %% [markdown]
# bfloat16 loses 0.4 ms, and not to its weights: for one request, this engine has a **fused** step, with five
# overlapping kernel launches for each layer. For more, a layer takes some ten, and between them the GPU is idle (lesson
# 11). The fourth line shows what that costs. The quantized formats lose more than 0.6 ms, a larger share of a shorter
# step, for two reasons. The fused step is one; the other is the kernel for 2 to 64 rows, which converts codes (section
# 6) and takes 0.4 ms more for a step's products than the kernel for a single row. (Products measured alone do not
# overlap, so their times do not add up to a step.)
#
# With 64 requests, nothing is left of the gain, sooner than the floors say, since they leave out the cost of converting
# each weight. With 3,000 requests, this engine even writes the matrix in 16 bits and reads it again, and the floor is
# the arithmetic anyway. To speed up large batches, the arithmetic itself must have fewer bits. That takes quantized
# activations: lesson 07.
#
# ## 9 · Which parts need more bits? · optional, 3 min
#
# A recipe can spend more bits where they matter. To find out, quantize one part at a time: here to 4 bits in groups of
# 64, and the head to 8 bits, too.

# %%
names = ("qkv", "attention_out", "gate_up", "down")
layer = {name: getattr(model.layers[0], name).shape.numel() for name in names}
parts = {name: {f"layers.*.{name}": Int4(group_size=64)} for name in layer}
parts |= {"the head": {"head": Int4(group_size=64)}, "the head, 8 bits": {"head": Int8()}}
recipe = {"layers.*.qkv": Int8(), "layers.*": Int4(group_size=64)}
scan = {}
for name, rules in parts.items():
    with weight_formats.weights(llm, rules):
        share = (
            f", {layer[name] / sum(layer.values()):.0%} of a layer" if name in layer else ""
        )
        scan[f"only {name}{share}"] = quality.measure()
for name, rules in {
    "all layers": {"layers.*": Int4(group_size=64)},
    "all, qkv in 8": recipe,
}.items():
    with weight_formats.weights(llm, rules):
        scan[name] = quality.measure()
report(scan)
llm.close()

# %% [markdown]
# The first four add up to almost exactly the KL divergence of all layers. `qkv` loses most for its size. The head in 4
# bits costs as much as all layers together, and in 8 bits almost nothing. The last line is a recipe: `qkv` in 8 bits,
# all other matrices of the layers in 4. Its second pattern fits `qkv`, too: the first one that fits decides. As a file
# for `minillm quantize --recipe`, it is `{"layers.*.qkv": "int8", "layers.*": {"method": "int4", "group_size": 64}}`.
#
# ## Recap · 2 min
#
# * A quantized weight is a small integer, a **code**, times a **scale** that many weights share. The scale is fitted to
#   the largest weights, so that no error exceeds half of it.
# * Each bit less multiplies KL divergence by about 4, until a few bits are left. On this model, 8 bits with a scale per
#   row cost almost nothing; 4 bits cost a little; 2 bits destroy it.
# * **Groups** keep an outlier's damage local, and cost 16 bits each for the scale. **Zero points** move the levels to
#   where the weights are.
# * Two codes share a byte. A product can take scales and zero points out of each group's sum, and need not build the
#   whole matrix.
# * Fewer bytes make small batches faster, apart from the share that stays in 16 bits. With large batches, they only
#   save memory.
#
# **What got worse:** quality, a little, and not evenly: the mean over a text hides single answers that change. Most
# uses of a weight now need a conversion; on a CPU, a step with int4 became slower. Shapes have to fit groups, and files
# have layouts that writer and reader must agree on.
#
# Rounding to the nearest looks at weights only. It treats an input that is always near 0 the same as one that dominates
# every sum. Lesson 06 looks at the inputs, and chooses codes with less damage in the *same* formats.
#
# **Further reading:** Jacob et al. 2018, *Quantization and Training of Neural Networks for Efficient
# Integer-Arithmetic-Only Inference* (scales and zero points); Dettmers et al. 2022, *LLM.int8()* (outliers in
# activations); Dettmers and Zettlemoyer 2023, *The case for 4-bit precision: k-bit Inference Scaling Laws* (quality
# against bytes, groups); Dettmers et al. 2023, *QLoRA* (levels that are not evenly spaced, and quantized scales);
# Frantar et al. 2024, *MARLIN* (a fast kernel for 4-bit weights). Next: lesson 06, AWQ and GPTQ.
