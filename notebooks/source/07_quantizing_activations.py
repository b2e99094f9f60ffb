# %% [markdown]
# # 07 · Quantizing activations
#
# After this lesson you can multiply eight-bit activations by eight-bit weights, and say which scales such a product
# allows; tell static from dynamic scales; find outliers, and remove them with SmoothQuant or with a Hadamard rotation;
# round to FP8 bit by bit; and say when W8A8, FP8 or W4A8 is the right choice. Everything that you write runs inside the
# engine.
#
# **107 minutes. Needs:** a CPU, and lessons 05 (codes, scales, KL divergence) and 06 (folding scales into the operation
# before). The only model that runs here is `tiny-gemma`; GPU speeds and the results of a larger model come from
# committed records.

# %%
import math

import torch

from minillm import LLM, SamplingParams, using
from minillm.advice import sizing
from minillm.bench import records
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_07 import eight_bits
from minillm.course.lesson_07 import pictures as draw
from minillm.course.shared import gains, real_model
from minillm.course.shared.held_out import mean, ratio
from minillm.course.shared.shapes import SHAPES
from minillm.quantization import Activations, Fp8, Int4, Int8

held_out = eight_bits.HeldOut()  # text to measure on
plain = eight_bits.dense()  # tiny-gemma


def whose(part):
    return "yours" if solved(part) else "the engine's, until you solve the exercise"


print(f"{held_out.ids.shape[0]} rows of {held_out.ids.shape[1]} tokens to measure on")

# %% [markdown]
# ## 1 · Why activations? · 4 min
#
# A quantized weight is a **code**, a small integer, times a **scale** that its row or group shares (lesson 05). Lesson
# 06 chose better codes by looking at activations, and folded scales into the operation before. But only the weights
# became smaller. They are converted back before they are multiplied, so the arithmetic is still done in 16 bits. Small
# batches spend most of their time reading weights, so smaller weights make them faster. Prompts and large batches spend
# theirs on arithmetic, and smaller weights do not shorten that.
#
# The tensor cores of recent GPUs multiply eight-bit numbers at up to twice the rate of 16-bit numbers, but *both*
# operands must have eight bits. So the activations have to be quantized too. **W8A8** means weights and activations of
# eight bits, as integers or as **FP8**, eight-bit floating point. (W8A16 is weight-only.)
#
# A committed record lists the time of all matrix products of one step of Gemma 2B on an H200, once with both operands
# in bfloat16 and once with both in FP8.
#
# **Predict first.** How many times faster are the products with FP8, for 16 rows (16 requests that decode) and for
# 1,024 rows (a long prompt)? FP8 halves the bytes and doubles the peak rate of the arithmetic.

# %% tags=["exercise"]
guess_few = 2.0  # PREDICT: times faster with 16 rows
guess_many = 2.0  # PREDICT: times faster with 1,024 rows

# %%
record = records.read("h200/ceiling-h200")
products = {(row["dtype"], row["rows"]): row["step_ms"] for row in record["matrix_products"]}
print("rows    bfloat16      FP8")
for rows in (16, 64, 256, 1024, 3072):
    print(f"{rows:5,}  {products['bf16', rows]:6.2f} ms  {products['fp8', rows]:5.2f} ms")
for rows, guess in ((16, guess_few), (1024, guess_many)):
    gain = products["bf16", rows] / products["fp8", rows]
    compare(f"{rows:,} rows", unit="times faster", prediction=guess, measured=gain)

# %% [markdown]
# With 16 rows, FP8 halves the time to read the weights, but not the rest of a product's time. In both formats, the
# products take about 0.3 ms more than reading alone would take at the rate of a plain copy (section 7: 1.19 and 0.60
# ms).
#
# These are the times of the products alone. Everything between them takes as long as before, and quantizing the
# activations takes extra time. The other cost is quality, the subject of this lesson.
#
# Weights are rounded once, before the model is served. Activations are different for every token, so they are rounded
# in every step, while the request waits.
#
# ## 2 · A product of eight-bit numbers · 26 min
#
# ### Which scales are allowed?
#
# A weight $w_{oi}$ (output $o$, input $i$) is stored as a code $q_{oi}$ and a scale. An activation $x_{ti}$ (token $t$)
# becomes a code $p_{ti}$ and a scale as well. The sum over the inputs should be a sum of products of *integers*. Then
# scales must not depend on $i$, so that they can be taken out of the sum:
#
# $$y_{to} = \sum_i x_{ti}\, w_{oi} \;\approx\; \sum_i (a_t\, p_{ti})(s_o\, q_{oi}) = a_t\, s_o \sum_i p_{ti}\, q_{oi}$$
#
# So a token may have its own scale $a_t$, and an output channel its own $s_o$. **A single input channel cannot have
# one**: it would stay inside the sum. That is why sections 4 and 5 are needed. (A *group* of input channels can: the
# product then has a sum of integers for each group, and each is scaled before they are added, as with lesson 05's
# groups. Section 6 returns to this.)
#
# A **dynamic** scale is computed from the token at hand. The largest magnitude is mapped to 127.5 steps:
#
# $$a_t = \frac{\max_i |x_{ti}|}{127.5}, \qquad p_{ti} = \operatorname{clamp}\left(\operatorname{round}\left(
# \frac{x_{ti}}{a_t}\right), -128, 127\right)$$
#
# (Why 127.5 and not 127? If the largest value is positive, it then lies half a step beyond the last code. In return,
# all steps are a little smaller, as with lesson 05's 7.5.)
#
# By hand, for the token `1.2, -0.5, 2.55` and an output with the weights `1, -2, 0.5`, stored as the codes `10, -20, 5`
# and the scale 0.1:
#
# 1. The largest magnitude is 2.55, so $a = 2.55 / 127.5 = 0.02$.
# 2. The codes of the token are 60, -25, and 127.5, which is clamped to 127.
# 3. The sum: $60 \cdot 10 + (-25)(-20) + 127 \cdot 5 = 1735$.
# 4. The scales: $1735 \cdot 0.02 \cdot 0.1 = 3.47$. Without rounding it would be 3.475.
#
# A **static** scale is one number for all tokens. It is computed ahead of time, from calibration text: the largest
# magnitude in that text, divided by 127.5. Larger values are clamped.
#
# **Exercise 1 (10 minutes).** Write the product. Multiply the codes in `float64`: torch's integer matrix products are
# slow on a CPU, and float64 is exact for such sums. (A tensor core multiplies int8 codes and adds in int32.)
#
# For example, the token and the output above give 3.47. With a static scale of 0.01, the codes are 120, -50 and 127,
# and the result is $2835 \cdot 0.01 \cdot 0.1 = 2.835$.


# %% tags=["exercise"]
def int8_linear(x, codes, scales, input_scale=None):
    """The product of quantized activations with quantized weights.

    x: [tokens, in], floating point. codes: [out, in] int8. scales: [out], one for each output.
    input_scale: None: each token has the scale max |x| / 127.5, or 1 if all its values are 0. Else [1], the
    scale of all tokens. Codes of x are from -128 to 127, halves rounded as by torch.round. Scales and codes are
    computed in the dtype of x, sums in float64. Returns [tokens, out] in the dtype of x.
    """
    # SOLUTION: the scale of each token, its codes, the sum of products of codes, then both scales
    if input_scale is None:
        largest = x.abs().amax(-1, keepdim=True)
        token_scales = torch.where(largest > 0, largest / 127.5, torch.ones_like(largest))
    else:
        token_scales = input_scale
    x_codes = (x / token_scales).round().clamp(-128, 127)
    sums = x_codes.double() @ codes.double().T
    return (sums * token_scales * scales).to(x.dtype)
    # END


# %%
check(int8_linear)

# %% [markdown]
# Now in the engine. Its format `Int8(Activations("int8"))` stores weights in eight bits and says that their inputs are
# quantized too. `using` then replaces the engine's `linear` with yours.

# %%
dynamic, static = Int8(Activations("int8")), Int8(Activations("int8", static=True))
my_linear = eight_bits.linear_by(int8_linear)
llm = LLM(device="cpu", enable_prefix_caching=False, num_blocks=64)
greedy = SamplingParams(max_tokens=12, temperature=0)
prompt = "Fenwick lies on the island of"

with (
    using(linear=my_linear) as used,
    eight_bits.running(llm, eight_bits.quantized(plain, dynamic)),
):
    print(prompt + llm.generate(prompt, greedy)[0].text)
print(f"int8_linear is {whose(int8_linear)}; calls of yours: {used.calls['linear']}")

# %% [markdown]
# Here is the engine's own version. Look for where it computes the maximum, and where it does not. (`wide` converts
# 16-bit inputs to float32. Here they are float32 already.) Its `linear` on a CPU, which has no eight-bit tensor cores,
# multiplies the rounded numbers instead of the codes. The results are the same except for float32 rounding, which may
# change a code in a later layer. So the numbers below change a little once yours runs.

# %%
# ENGINE: minillm.quantization.activations:Activations.quantize
# ENGINE: minillm.ops.reference:linear

# %% [markdown]
# ### Static or dynamic
#
# A dynamic scale needs the whole token before the first code can be written: one pass for the maximum, another for the
# codes. A static scale is known in advance, so the kernel that computes an activation can write its code right away.
# But the scale is the same for all tokens.
#
# **Predict first.** The measure is lesson 05's KL divergence from the unquantized model, which is 0 if both make the
# same predictions. How many times larger is it with dynamic int8 activations than with unquantized activations
# (W8A16)? And how many times larger with a static scale for each product than with dynamic scales? (The number after ±
# is the standard error over the rows of text. Ratios compare the two models row by row. See lesson 06.)

# %% tags=["exercise"]
guess_dynamic = 3  # PREDICT: KL divergence W8A8 dynamic / W8A16
guess_static = 2  # PREDICT: KL divergence W8A8 static / W8A8 dynamic

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
largest = eight_bits.largest_inputs(plain)  # on calibration text: {address: [in]}
divergence = {}  # of each row of text


def measure(name, model):
    """Print and keep the KL divergence of a model, in millinats (1/1000 nat) per token."""
    with using(linear=my_linear):
        divergence[name] = held_out.predictions(model).millinats
    print("{:32} KL {:9.3f} ± {:.3f} millinats".format(name, *mean(divergence[name])))


def times(one, other):
    """The KL divergence of one / other, printed with its standard error."""
    found, error = ratio(divergence[one], divergence[other])
    print(f"{one} / {other}: {found:.3g} ± {error:.1g}")
    return found


measure("W8A16", eight_bits.quantized(plain, Int8()))
measure("W8A8 dynamic", eight_bits.quantized(plain, dynamic))
measure("W8A8 static", eight_bits.quantized(plain, static, largest))
for name, base, guess in (
    ("W8A8 dynamic", "W8A16", guess_dynamic),
    ("W8A8 static", "W8A8 dynamic", guess_static),
):
    compare(f"{name} / {base}", unit="times", prediction=guess, measured=times(name, base))

# %% [markdown]
# Quantizing activations costs far more quality than quantizing weights, and static scales far more than dynamic ones.
# Which products are to blame? Each layer has four: `qkv`, `attention_out`, `gate_up` and `down`. Change only `down`:

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
all_static = eight_bits.quantized(plain, static, largest)
all_dynamic, only_weights = (eight_bits.quantized(plain, each) for each in (dynamic, Int8()))
print("other scales for the inputs of down:")
measure("static, down dynamic", eight_bits.with_part(all_static, all_dynamic, "down"))
measure("dynamic, down in 16 bits", eight_bits.with_part(all_dynamic, only_weights, "down"))

# %% [markdown]
# The six products called `down` cause most of both losses. To see why, look at their inputs. For each token of a text,
# the figure shows the largest input of three products:

# %%
inputs = eight_bits.inputs_of(plain, held_out.ids[:1])
shown = ("layers.0.gate_up", "layers.0.down", "layers.5.down")
most = {name: largest[name].max().item() for name in shown}
print("codes that are 0, of all tokens but <bos>")
for name in shown:
    zeros = [eight_bits.zeros(inputs[name][1:], scale) for scale in (most[name] / 127.5, None)]
    print("{:16}  static scale {:3.0%}, dynamic scales {:3.0%}".format(name, *zeros))
draw.tokens({name: inputs[name].abs().amax(1) for name in shown}, most)
describe("""For 256 tokens, the largest input of three products, and the largest in the calibration text. Inputs of
gate_up in layer 0 are of similar size: each token's largest is between 1.5 and 3. In down of layer 0, the first token,
bos, has an input of 80; all others stay below 10. In down of layer 5, half of the tokens stay below 25, but four reach
180 to 193, bos among them, and the largest in the calibration text is 383.""")

# %% [markdown]
# **Between tokens**, inputs of `down` differ greatly. In layer 0, one token is an outlier: `<bos>`, the first of every
# text. Sun et al. (2024) describe such *massive activations* in the hidden states of many large models, mostly at the
# first token. In layer 5, a few others are as large as `<bos>`, or larger: in the calibration text, the word
# `asked` reaches 383. A static scale must cover the largest token, which leaves almost nothing of the other tokens: in
# these two products, 94% and 86% of their codes are 0. A dynamic scale protects tokens from each other.
#
# **Within a token**, inputs of `down` are uneven, too. They are products of two numbers, a gate and `up`, and in each
# token a few are much larger than the rest. So even with a scale for each token, 19% and 39% of the codes are 0,
# against 1% in `gate_up`. This causes most of the loss that remains with dynamic scales. Section 5 reduces it.
#
# ## 3 · Outlier channels · 6 min
#
# In `down` of `tiny-gemma`, the large numbers are mostly in different channels for different tokens. Large models also
# have outlier **channels**: a few that are up to 20 times larger than the others in most tokens. Dettmers et al. (2022)
# found them in all layers of models with 6.7 billion parameters or more, where eight-bit activations lose their
# accuracy. Their LLM.int8() multiplies channels with values of 6 or more separately, in 16 bits, and the others in
# int8. That keeps the accuracy, but it takes two products, and every step has to separate the channels.
#
# `tiny-gemma` has none that large, so we plant some. The engine's `plant_outliers` picks one channel in 64 of each
# product's inputs, makes it 32 times larger where it is computed, and divides the weights that read it by 32. Both are
# exact, since 32 is a power of 2. This is lesson 06's folding, used to do harm.

# %%
outliers = eight_bits.dense(outliers=True)
largest_outliers = eight_bits.largest_inputs(outliers)
print(f"KL divergence without quantization: {held_out.divergence(outliers):.1f}")
four_tokens = {}
for name, model in (("tiny-gemma", plain), ("with planted outliers", outliers)):
    four_tokens[name] = eight_bits.inputs_of(model, held_out.ids[:1])["layers.3.qkv"][50:54]
draw.channels(four_tokens, first=50)
describe("""The magnitudes of four tokens in 256 channels, in two models. In tiny-gemma all are below 4. With planted
outliers, four channels are far above that in most tokens, the same four; the others look like a flat line.""")

# %% [markdown]
# By hand, for the token `0.5, -0.3, 0.2, 64`: the scale is $64 / 127.5 \approx 0.5$. The codes are 1, -1, 0 and 127.
# Almost nothing is left of the first three channels.
#
# **Predict first.** The two models compute the same function. By what factor do the outliers increase the KL divergence
# of dynamic W8A8? And with static W8A8, does the model still name the right island?

# %% tags=["exercise"]
guess_outliers = 10  # PREDICT: KL divergence of dynamic W8A8, with outliers / without

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
for name, x in four_tokens.items():
    print(f"{name:32} {eight_bits.zeros(x):.0%} of these inputs get code 0")
measure("outliers: W8A16", eight_bits.quantized(outliers, Int8()))
measure("outliers: W8A8 dynamic", eight_bits.quantized(outliers, dynamic))
broken = eight_bits.quantized(outliers, static, largest_outliers)
measure("outliers: W8A8 static", broken)
with using(linear=my_linear), eight_bits.running(llm, broken):
    print(prompt + llm.generate(prompt, greedy)[0].text)
found = times("outliers: W8A8 dynamic", "W8A8 dynamic")
compare("with outliers / without", unit="times", prediction=guess_outliers, measured=found)

# %% [markdown]
# With static scales, the model no longer names the right island, which is Bramble. W8A16 loses more as well, although
# it does not round activations: the weights that read outliers are 32 times smaller than before, so the steps of their
# row are too large for them.
#
# A scale for each input channel would solve this, but section 2 ruled that out. The next two sections move the outliers
# elsewhere. Section 6 tries another number format.
#
# ## 4 · SmoothQuant: move the outliers into the weights · 13 min
#
# Xiao et al. (2022) apply channel scales *before* quantization, so that they never appear in the sum of codes. Divide
# channel $i$ of the activations by $s_i$, and multiply the weights that read it by $s_i$:
#
# $$\sum_i x_{ti}\, w_{oi} = \sum_i \frac{x_{ti}}{s_i} \cdot (s_i\, w_{oi})$$
#
# AWQ does the same in lesson 06, and both are folded in the same way: the division goes into the norm, or into the rows
# of the product before. Only the purpose differs. AWQ makes important *weights* easier to round. SmoothQuant makes
# *activations* easier to round, at the expense of the weights, which have no outliers.
#
# How far should it go? With $s_i = \max_t |x_{ti}|$, all channels of $x$ become equally large, and the weights get all
# of the outliers. With $s_i = 1 / \max_o |w_{oi}|$, the channels of the weights become equally large instead. The
# **strength** $\alpha$ chooses a compromise:
#
# $$s_i = \frac{(\max_t |x_{ti}|)^{\alpha}}{(\max_o |w_{oi}|)^{1 - \alpha}}$$
#
# By hand: channel 0 of the activations reaches 256, and the weights that read it reach 1; channel 1 reaches 4, and its
# weights reach 4. With $\alpha = 0.75$, $s = (256^{0.75} / 1^{0.25}, \; 4^{0.75} / 4^{0.25}) = (64, 2)$. Then the
# activations reach 4 and 2, and the weights 64 and 8. The channels of the activations differed by a factor of 64, and
# now by 2. The channels of the weights differ by a factor of 8 instead of 4.
#
# **Exercise 2 (6 minutes).** Write the scales. Calibration has recorded `largest`, the largest magnitude of each
# channel. A channel that is always 0 (`largest` is 0) or is never read (all its weights are 0) keeps scale 1.
#
# For example, `largest` of 64 and 4, weights `[[1, -0.5], [4, 1]]` and strength 0.5 give the scales 4 and 2.


# %% tags=["exercise"]
def smooth_scales(largest, weight, strength):
    """What each channel of a product's inputs is divided by, [in], in the dtype of the arguments.

    largest: [in], the largest |x| of each channel. weight: [out, in], of the same dtype. strength: from 0 to 1.
    """
    # SOLUTION: the largest weight of each input, both powers, and 1 where either is 0
    weights = weight.abs().amax(0)
    used = (largest > 0) & (weights > 0)
    ones = torch.ones_like(weights)
    return torch.where(used, largest, ones) ** strength / torch.where(used, weights, ones) ** (
        1 - strength
    )
    # END


# %%
check(smooth_scales)

# %% [markdown]
# In the engine: `smoothed` takes your scales for the inputs of all 24 products, and folds them with the engine's own
# `fold`. (As in lesson 06, query heads that share values must share their scales.) The result is an ordinary model. It
# is quantized and runs like any other: **smoothing costs nothing at run time**.
#
# **Predict first:** which strength is the best for the model with outliers, of 0, 0.25, 0.5, 0.75 and 1?

# %% tags=["exercise"]
guess_strength = 75  # PREDICT: the best strength in % (0, 25, 50, 75 or 100)

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
scales_of = yours(smooth_scales, eight_bits.smooth_scales)
print(f"smooth_scales is {whose(smooth_scales)}")
smoothed = {}
for strength in (0, 0.25, 0.5, 0.75, 1):
    smoothed[strength] = eight_bits.smoothed(
        outliers, lambda x, w, strength=strength: scales_of(x, w, strength), largest_outliers
    )
    measure(
        f"smoothed, strength {strength}", eight_bits.quantized(smoothed[strength], dynamic)
    )
points = {
    strength: divergence[f"smoothed, strength {strength}"].mean().item()
    for strength in smoothed
}
best = min(points, key=points.get)
compare("best strength", unit="%", prediction=guess_strength, measured=100 * best)

# %%
draw.strengths(
    {"with outliers, smoothed": points},
    {
        "with outliers, not smoothed": divergence["outliers: W8A8 dynamic"].mean().item(),
        "tiny-gemma, without outliers": divergence["W8A8 dynamic"].mean().item(),
    },
)
describe("""KL divergence by SmoothQuant's strength: a curve that is lowest in the middle, near 0.5, about as low as the
model without outliers, and two to four times higher at 0 and 1. All of it is far below the line without smoothing.""")

# %% [markdown]
# In the middle, the model is as good as if the outliers had not been planted. This case is easy: they were planted with
# the very operation that SmoothQuant uses. Even strength 0, which does not look at the activations, finds them, because
# the weights that read them are 32 times smaller. In real models, the weights of an outlier channel may look like all
# others.
#
# The engine searches for the best strength for each product, on samples of its inputs.
#
# ## 5 · Rotation: spread the outliers over all channels · 24 min
#
# The second approach needs no calibration. Take two channels, one of them an outlier: `8, 0`. Replace them with their
# sum and their difference, both divided by $\sqrt 2$: `5.66, 5.66`. The vector has kept its length, as in a rotation of
# the plane by 45 degrees (here with a reflection), and its largest number is smaller by a factor of $\sqrt 2$.
#
# A rotation $R$ does not change a product if the weights are rotated too, because $R R^T = I$:
#
# $$x\, W^T = (x R)(W R)^T$$
#
# A **Hadamard matrix** does this to $n = 2^k$ channels. Its entries are all 1 or -1, and its rows are orthogonal, so
# that $H_n / \sqrt n$ keeps lengths. Sylvester (1867) builds each from a smaller one:
#
# $$H_1 = (1), \qquad H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}$$
#
# Every output is a sum of *all* inputs, with different signs. An outlier $m$ in one channel becomes $\pm m / \sqrt n$
# in every channel:

# %%
H = torch.ones(1, 1)
for _ in range(2):
    H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
print(H)
for token in ([8.0, 0, 0, 0], [0.5, -0.3, 0.2, 64]):
    print(
        f"{token} -> {[round(value, 2) for value in (torch.tensor(token) @ H / 2).tolist()]}"
    )

# %% [markdown]
# The second token is the one from section 3. Now its largest number is 32.3, so the rounding steps are half as large
# as before. With more channels they shrink more: by up to $\sqrt{256} = 16$ for a single outlier among 256 channels.
#
# A product with $H$ takes $n^2$ operations for each token. The construction gives a faster way, the **fast Hadamard
# transform**: $k$ steps, each with $n$ additions or subtractions. The first step combines neighbors: $(a, b)$ becomes
# $(a + b, a - b)$. The second step combines channels at distance 2, the third at distance 4, and so on. At the end,
# divide by $\sqrt n$.

# %%
draw.butterfly(8)
describe("""Eight channels in four columns, connected by lines. In the first step channels at distance 1 are combined,
in the second at distance 2, in the third at distance 4. The first channel of a pair becomes the sum. The second
channel's own line is dashed: it is subtracted from its partner.""")

# %% [markdown]
# **Exercise 3 (10 minutes).** Write the fast transform. One way: for each distance $h$, `reshape` the channels to
# `[..., n / 2h, 2, h]`; then the two parts to combine are `[..., 0, :]` and `[..., 1, :]`.
#
# For example, `8, 0, 0, 0` becomes `4, 4, 4, 4`, and `0, 8, 0, 0` becomes `4, -4, 4, -4`.


# %% tags=["exercise"]
def hadamard(x):
    """x times Sylvester's Hadamard matrix / sqrt(n), over the last axis: like x, in a new tensor.

    x: [..., n], floating point; n is a power of 2, also 1. In log2(n) steps: no tensor may be much larger than x.
    """
    # SOLUTION: sums and differences at distances 1, 2, 4, ..., then divide by sqrt(n)
    size = x.shape[-1]
    out, distance = x, 1
    while distance < size:
        first, second = out.reshape(*x.shape[:-1], -1, 2, distance).unbind(-2)
        out = torch.stack((first + second, first - second), dim=-2).reshape(x.shape)
        distance *= 2
    return out / math.sqrt(size)
    # END


# %%
check(hadamard)

# %% [markdown]
# ### Where the rotations go
#
# Rotating the inputs of each product while the model runs would take 24 transforms in each step. QuaRot (Ashkboos et
# al. 2024) folds most rotations into the weights.
#
# * **The residual stream** is rotated as a whole. Matrices that write to it (`attention_out`, `down`) are rotated on
#   their output side, and those that read from it (`qkv`, `gate_up`) on their input side. Between them is a norm. It
#   divides a token by its root mean square, which a rotation does not change, so $\text{norm}(xR) = \text{norm}(x) R$,
#   once the norm's weights have moved into the matrix after it.
# * **Values** are rotated within each head. Attention only averages them, and `attention_out` rotates them back.
# * **The inputs of `down`** are a gate times `up`, channel by channel. No rotation can be moved across that product, so
#   they are rotated **online**, while the model runs: an operation in each layer.
#
# One more thing: the final norm's weights would have to move into the head. But Gemma's head is also its embedding, so
# they cannot. Instead, two more rotations are online: the stream is rotated after the embedding, and back before the
# final norm.
#
# The engine's `rotate` does all this, with random signs before $H$, so that no regular pattern of outliers adds up. The
# online part is the operation `hadamard`, which `using` replaces with yours. (`down` has 768 = 64 x 12 inputs, not a
# power of 2, but Hadamard (1893) found a matrix of order 12, too. So `hadamard_by` passes 12 groups of 64 channels to
# your function, and the engine then combines the groups.)
#
# Nothing was planted in the original `tiny-gemma`, but the inputs of its `down` are uneven, as section 2 showed.
#
# **Predict first.** How many times smaller does rotation make the KL divergence of W8A8 on the original `tiny-gemma`,
# with dynamic and with static scales? And with planted outliers and dynamic scales?

# %% tags=["exercise"]
guess_dynamic_rotated = 1.5  # PREDICT: times smaller, tiny-gemma, dynamic scales
guess_static_rotated = 10  # PREDICT: times smaller, tiny-gemma, static scales
guess_all = 12  # PREDICT: times smaller, with planted outliers, dynamic scales

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
folded, rotated = (eight_bits.rotated(plain, down=down) for down in (False, True))
rotated_outliers = eight_bits.rotated(outliers)
my_hadamard = eight_bits.hadamard_by(hadamard)
with using(hadamard=my_hadamard) as used:
    print(f"not quantized: KL {1000 * held_out.divergence(rotated):.3f} millinats")
    calls = used.calls["hadamard"]
    measure("rotated: W8A8 dynamic", eight_bits.quantized(rotated, dynamic))
    measure("without down: W8A8 dynamic", eight_bits.quantized(folded, dynamic))
    largest_rotated = eight_bits.largest_inputs(rotated)
    measure("rotated: W8A8 static", eight_bits.quantized(rotated, static, largest_rotated))
    measure("outliers, rotated: W8A8 dynamic", eight_bits.quantized(rotated_outliers, dynamic))
    largest_rotated = eight_bits.largest_inputs(rotated_outliers)
    both = eight_bits.quantized(rotated_outliers, static, largest_rotated)
    measure("outliers, rotated: W8A8 static", both)
print(f"hadamard is {whose(hadamard)}; operations replaced: {calls}")
for before, after, guess in (
    ("W8A8 dynamic", "rotated: W8A8 dynamic", guess_dynamic_rotated),
    ("W8A8 static", "rotated: W8A8 static", guess_static_rotated),
    ("outliers: W8A8 dynamic", "outliers, rotated: W8A8 dynamic", guess_all),
):
    compare(after, unit="times smaller", prediction=guess, measured=times(before, after))

# %% [markdown]
# On the original `tiny-gemma`, all of the gain with dynamic scales comes from the inputs of `down`: without their
# rotation, the loss is the same as before, within the error. With static scales, the loss comes close to what it was
# with dynamic scales before the rotation.
#
# (Once `hadamard` is solved, the text's two passes call it 8 times each: twice for the stream, once in each layer.)
#
# With outliers, static W8A8 destroyed the model in section 3. With rotation it is usable, without any smoothing. The
# inputs of `down` show why:

# %%
address = "layers.0.down"
spread = {
    "tiny-gemma": largest[address],
    "with outliers": largest_outliers[address],
    "with outliers, rotated": largest_rotated[address],
}
print("the largest input:", ", ".join(f"{name} {x.max():.0f}" for name, x in spread.items()))
for name, model in (("tiny-gemma", plain), ("tiny-gemma, rotated", rotated)):
    x = eight_bits.inputs_of(model, held_out.ids[:1])["layers.5.down"]
    print(
        f"layers.5.down, {name}: {eight_bits.zeros(x):.0%} of the codes of dynamic scales are 0"
    )
draw.spread(spread)
describe("""The largest input of each of 768 channels, sorted, on a logarithmic axis, for the inputs of down in the
first layer. tiny-gemma's line begins near 80 and falls steeply; with outliers it begins several times higher; rotated,
it is almost flat.""")

# %% [markdown]
# Rotation makes the inputs even within each token. Tokens keep their lengths, so `<bos>` is still the largest, but its
# huge numbers are gone: with outliers, the largest input of the first `down` falls from 317 to 14, which helps static
# scales. In the last `down` of the original model, 1% of the codes are 0, not 39%, which helps dynamic scales, too.
#
# ## 6 · FP8, bit by bit · 21 min
#
# Integers have the same step everywhere. That is why an outlier hurts: it makes *all* steps large. Floating-point
# numbers are denser near 0. **e4m3** is such a format of eight bits: a sign, 4 bits of exponent, 3 bits of mantissa
# (Micikevicius et al. 2022).
#
# Read a byte with sign $s$, exponent bits $E$ (0 to 15) and mantissa bits $M$ (0 to 7):
#
# $$\text{value} = (-1)^s \left(1 + \frac M 8\right) 2^{E - 7} \quad \text{if } E > 0, \qquad
# (-1)^s \, \frac M 8 \; 2^{-6} \quad \text{if } E = 0$$
#
# The second case covers the **subnormal** numbers, which fill the gap between 0 and $2^{-6}$. If all bits of $E$ and
# $M$ are 1, the byte means "not a number", so the largest number is $(1 + \frac 6 8)\, 2^8 = 448$. There is no
# infinity.

# %%
draw.fp8_bits([0b0_0101_010, 0b1_1000_100, 0b0_1111_110, 0b0_0000_001, 0b0_1111_111])
describe("""Five bytes with sign, exponent and mantissa in colors: 0 0101 010 is 0.3125; 1 1000 100 is -3; 0 1111 110 is
448; 0 0000 001 is 2 to the power of -9; 0 1111 111 is not a number.""")

# %% [markdown]
# Now the other direction. Which byte is nearest to 0.3? The power of 2 below it is $2^{-2} = 0.25$, so $E = 5$. From
# 0.25 to 0.5 there are 8 steps of $0.25 / 8 = 0.03125$. And $0.3 / 0.03125 = 9.6$, so the nearest number is $10 \cdot
# 0.03125 = 0.3125$. Since 0.25 is 8 of these steps, $M = 10 - 8 = 2$: the first byte above.
#
# In general, for $x \ne 0$:
#
# $$e = \max(\lfloor \log_2 |x| \rfloor, -6), \qquad \text{step} = 2^{e - 3}, \qquad
# \text{rounded} = \operatorname{round}\left(\frac{x}{\text{step}}\right) \text{step}$$
#
# Because of the maximum with -6, subnormal numbers have the steps of the smallest normal ones. Halves are rounded to
# the even neighbor, as `torch.round` does. Numbers beyond 448 become 448.
#
# **Exercise 4 (8 minutes).** Write the rounding with arithmetic only, without torch's own FP8 types. `torch.frexp`,
# `torch.log2` and `torch.exp2` may help.
#
# For example, 0.3 becomes 0.3125, -3.1 becomes -3, and 1000 becomes 448.


# %% tags=["exercise"]
def round_to_e4m3(x):
    """The nearest numbers of e4m3, in the dtype of x. x: finite, float32 or float64, any shape.

    Halves go to the even neighbor; numbers beyond -448 to 448 become -448 or 448; 0 stays 0.
    """
    # SOLUTION: the exponent of each number, its step, and the nearest multiple of the step
    clipped = x.clamp(-448, 448)
    exponent = (
        torch.frexp(clipped).exponent - 1
    )  # clipped = mantissa * 2 ** exponent, 1 <= |mantissa| < 2
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-6) - 3)
    return (clipped / step).round() * step
    # END


# %%
check(round_to_e4m3)

# %% [markdown]
# The engine's weights in FP8 are $w / s$ rounded to e4m3, with a scale for each output that brings the largest weight
# to 448. Does your function round all weights of all layers as the engine does?

# %%
to_e4m3 = yours(round_to_e4m3, eight_bits.round_to_e4m3)
same, count = eight_bits.same_codes(plain, to_e4m3)
print(f"round_to_e4m3 is {whose(round_to_e4m3)}: {same:,} of {count:,} weights are the same")
draw.rounding_errors()
describe("""The largest relative error by the size of a number, compared with the largest one that the scale covers, on
logarithmic axes. For int8 it is 0.4% at the top and doubles with each halving of the number, unevenly below 1/32, where
few codes are left, up to 100% below 1/255. For FP8 it stays at 4 to 6% down to about a 30-thousandth of the largest,
and rises only below.""")

# %% [markdown]
# **Predict first.** KL divergence of FP8 (weights and activations, dynamic scales), divided by that of W8A8 in int8: on
# `tiny-gemma`, and on the model with outliers? Below 1 means that FP8 is better.

# %% tags=["exercise"]
guess_plain = 0.5  # PREDICT: KL divergence FP8 / int8, tiny-gemma
guess_with = 0.1  # PREDICT: KL divergence FP8 / int8, with outliers

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
fp8 = Fp8(activations=eight_bits.RoundedBy(function=to_e4m3))
fp8_static = Fp8(activations=eight_bits.RoundedBy(function=to_e4m3, static=True))
measure("FP8 dynamic", eight_bits.quantized(plain, fp8))
measure("FP8 static", eight_bits.quantized(plain, fp8_static, largest))
measure("outliers: FP8 dynamic", eight_bits.quantized(outliers, fp8))
measure("outliers: FP8 static", eight_bits.quantized(outliers, fp8_static, largest_outliers))
for name, guess in (("", guess_plain), ("outliers: ", guess_with)):
    found = times(f"{name}FP8 dynamic", f"{name}W8A8 dynamic")
    compare(f"{name}FP8 / int8", unit="times", prediction=guess, measured=found)

# %% [markdown]
# Without outliers, FP8 is worse: three bits of mantissa are not much. But FP8 does not even notice the outliers. A
# number that is 32 times larger has an exponent that is larger by 5, and the same mantissa. Static scales do little
# harm: if a scale is too large for a token, its numbers get smaller exponents. So FP8 needs neither smoothing nor
# careful scales here, and it is usually the first thing to try on a GPU that has it.
#
# **Predict first:** what if we do both, and *rotate* the model with outliers before FP8? Its KL divergence becomes how
# many times larger (below 1: smaller)?

# %% tags=["exercise"]
guess_both = 0.7  # PREDICT: KL divergence of FP8 with outliers, rotated / not rotated

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
with using(hadamard=my_hadamard):
    measure("outliers, rotated: FP8 dynamic", eight_bits.quantized(rotated_outliers, fp8))
found = times("outliers, rotated: FP8 dynamic", "outliers: FP8 dynamic")
compare("rotated / not rotated", unit="times", prediction=guess_both, measured=found)

# %% [markdown]
# Rotation made it *worse*. Before the rotation, FP8's large errors were where the large numbers are, in the outlier
# channels, and the weights that read those channels are small in this model. After the rotation, every channel holds a
# share of every outlier, and has an error in proportion to it. The same happens to the weights: the small ones are
# mixed with large ones. An evenly spaced grid needs channels of equal size; a floating-point grid does not. (In other
# models, the weights of outlier channels may not be small. Measure.)
#
# ### Larger and smaller scales
#
# Published FP8 models differ in what shares a scale:
#
# | weights | activations | where |
# |---|---|---|
# | the whole matrix | the whole tensor, static or dynamic | *per-tensor FP8*, the simplest and common |
# | an output channel | a token | this engine's `fp8` |
# | a block of 128 x 128 | 128 channels of a token | DeepSeek-V3 |
# | 32 inputs of an output | 32 channels of a token | MXFP8; scales are powers of two |
#
# One scale for a tensor is cheap because FP8 forgives a scale that is too large, as the static rows show. The last two
# have scales for *groups of input channels*: section 2's partial sums. DeepSeek's kernels scale each partial sum of 128
# inputs before they add it; for MXFP8 the tensor cores do it themselves, as for FP4 in lesson 08. An outlier then
# spoils only its own group.
#
# Which formats are worth storing depends on what a GPU can multiply:
#
# | GPUs | int8 | FP8 | FP4, MXFP8 |
# |---|---|---|---|
# | Ampere (A100, RTX 30) | yes | no | no |
# | Ada, Hopper (L4, RTX 40, H100, H200) | yes | yes | no |
# | Blackwell (B200, RTX 50) | yes; B300 hardly | yes | yes |
#
# ## 7 · W4A8, and what to choose · 11 min
#
# Small batches need few bytes, which int4 weights provide. Large batches need fast arithmetic, which eight-bit operands
# provide. **W4A8** offers both. Weights are stored in int4 groups, and a kernel converts them to FP8 on their way to
# the tensor cores; activations are in FP8. (The engine's method `w4a8` rounds the weights with AWQ, lesson 06. Here
# they are rounded to the nearest. The engine has no such kernel: it rounds the activations to FP8, but multiplies in
# bfloat16. So it has the quality of W4A8, but not its speed.)

# %%
FORMATS = {
    "W8A16": Int8(),
    "W8A8 dynamic": dynamic,
    "FP8 dynamic": fp8,
    "W4A16": Int4(64),
    "W4A8": Int4(64, activations=fp8.activations),
}
models = {
    name: [eight_bits.quantized(model, format) for model in (plain, outliers)]
    for name, format in FORMATS.items()
}
for name, (model, _) in models.items():
    print(f"{name:14} layers of {eight_bits.bytes_of(model) / 1e6:5.2f} MB")

# %% tags=["nbval-ignore-output"] uncompared="values near a tie are rounded differently on other CPUs"
print(f"{'format':14} {'KL, millinats':>16}  {'with outliers':>16}")
for name, pair in models.items():
    both = [name, f"outliers: {name}"]
    for key, model in zip(both, pair, strict=True):
        if name.startswith("W4"):  # the others were measured above
            divergence[key] = held_out.predictions(model).millinats
    cells = ["{:.2f} ± {:.2f}".format(*mean(divergence[key])) for key in both]
    print(f"{name:14} {cells[0]:>16}  {cells[1]:>16}")
for which in ("", "outliers: "):
    times(f"{which}W4A8", f"{which}W4A16")
llm.close()

# %% [markdown]
# Four-bit weights cause most of W4A8's loss. Compared row by row, eight-bit activations add about a sixth to it; with
# outliers, where the weights lose more, they add hardly anything.
#
# ### A model that people use
#
# SmolLM2-135M (the record of lesson 05) has the same weak point: in some layers, a few tokens have inputs of `down`
# that are far larger than those of all others. `w8a8` is int8 with dynamic scales. (The last column was measured on
# more text than above, so its numbers differ a little.)

# %%
names = ["int8", "w8a8", "smoothquant", "w8a8-rotate", "fp8", "w8a8-static"]
real_model.report(
    [*names, "smoothquant-static", "fp8-static", "awq", "w4a8"],
    labels={"awq": "awq-g64", "w4a8": "w4a8-g64"},
)

# %% [markdown]
# Quantizing activations to int8 as well costs nine times as much as quantizing only the weights. Static scales multiply
# that cost by 28, and perplexity doubles. In a smoothed model, perplexity still rises by 14% with them. FP8 loses only
# a quarter more with static scales than with dynamic ones. With dynamic scales, SmoothQuant and rotation undo most of
# the loss, and then int8 loses *less* than FP8: a fifth as much when rotated. W4A8, which uses AWQ's weights, loses
# only slightly more than AWQ.
#
# What could W4A8 gain? The next cell computes floors for Gemma 2B, as in lesson 05: a step takes at least the time to
# read all weights at the H200's copy rate, and that of its arithmetic, at the rate of the record's products of 2,048
# rows.

# %%
gemma = SHAPES["Gemma 2B"]
rate = {dtype: 2048 / products[dtype, 2048] for dtype in ("bf16", "fp8")}  # rows per ms
FLOORS = {  # bits of a weight, and of the arithmetic
    "bfloat16": (16, "bf16"),
    "FP8": (8, "fp8"),
    "W4A16": (4.25, "bf16"),
    "W4A8": (4.25, "fp8"),
}
ROWS = [2 ** (power / 4) for power in range(41)]
floors = {}
for name, (bits, dtype) in FLOORS.items():
    reading = 1e3 * sizing.parameters(gemma) * bits / 8 / (record["copy_TB_per_s"] * 1e12)
    floors[name] = [max(reading, rows / rate[dtype]) for rows in ROWS]
    print(
        f"{name:9} reads for {reading:4.2f} ms; arithmetic takes longer from {reading * rate[dtype]:4.0f} rows on"
    )
measured = {
    name: {rows: ms for (kind, rows), ms in products.items() if kind == dtype and rows <= 1024}
    for name, dtype in (("bfloat16", "bf16"), ("FP8", "fp8"))
}
draw.step_floors(ROWS, floors, measured)
describe("""The least time of a step's products by rows. bfloat16 is highest. W4A16 and W4A8 are lowest for few rows;
then W4A16 joins bfloat16, and W4A8 joins FP8, which is half as high. Measured products are above their
floors for few rows, and close to them for many.""")

# %% [markdown]
# No floor is below W4A8's at any number of rows. But floors count neither the conversion from int4 nor the quantization
# of activations, and they count the output head with as few bits as the layers. Measured on that H200, with this
# engine: tokens per second, divided by bfloat16's in the same run.

# %%
names = ["int4 g128 (awq, gptq)", "w8a8 (smoothquant)", "fp8", "fp8, head fp8"]
gains.report([*names, "w4a8 g128, head int8"])

# %% [markdown]
# With 3,000 requests, eight-bit products are clearly faster than bfloat16, and weight-only int4 hardly is; with one
# request, int4 is fastest. With 64 requests, int4 is even slower than bfloat16: its products also convert the weights,
# and take longer. Int8 and FP8 are faster than bfloat16 in every column: they read half the bytes and multiply up to
# twice as fast. Here, output heads have 16 bits unless the name says otherwise. W4A8, which has no kernel of its own,
# is slower than bfloat16.
#
# ### What to choose
#
# | your case | try first | because |
# |---|---|---|
# | many requests or long prompts, a GPU with FP8 | FP8 | fast arithmetic, and outliers need no special care |
# | the same, a GPU with int8 but not FP8 | int8 with SmoothQuant, or rotated | outliers must be removed first |
# | few requests, or little memory | int4, lesson 06 | fewest bytes |
# | both many and few requests | W4A8 | few bytes and fast arithmetic, if there is a fast kernel |
#
# Where quality matters more than simplicity, compare FP8 with smoothed or rotated int8, as on SmolLM2. The engine has
# all of these formats: `minillm quantize --method smoothquant`, `fp8` or `w4a8`, with `--static` for static scales and
# `--rotate` for rotation.
#
# ## Recap · 2 min
#
# * A product of codes allows a scale for each token and each output channel, not for each input channel; with partial
#   sums, also for groups of input channels.
# * A dynamic scale belongs to one token, and takes a pass over it. A static scale comes from calibration, takes no
#   time, and must cover the largest token.
# * An outlier **token** hurts static scales. Uneven numbers **within a token**, such as outlier channels, hurt dynamic
#   ones too.
# * SmoothQuant scales channels down before they are rounded, and the weights that read them up; both are folded. A
#   Hadamard rotation spreads each channel over all of them; most of it is folded, too.
# * FP8's error is relative to each number. It is larger than int8's if all channels are of similar size, and outliers
#   do not change it.
#
# **What got worse:** quality, and by more than from quantizing the weights alone. Each product needs its inputs
# quantized, one more pass over the activations unless another kernel includes it. A static scale knows only the
# calibration text, and clips what is larger. A smoothed or rotated model no longer has its original weights, so
# adapters that were trained for those do not fit, and online rotations run only in an engine that has them. And
# remedies do not add up: rotation made FP8 worse.
#
# **Further reading:** Dettmers et al. 2022, *LLM.int8()* (outlier channels); Sun et al. 2024, *Massive Activations in
# Large Language Models* (outlier tokens); Yao et al. 2022, *ZeroQuant* (a scale for each token); Xiao et al. 2022,
# *SmoothQuant*; Ashkboos et al. 2024, *QuaRot*; Liu et al. 2024, *SpinQuant* (learned rotations); Micikevicius et al.
# 2022, *FP8 Formats for Deep Learning*; Kuzmin et al. 2022, *FP8 Quantization: The Power of the Exponent*; Lin et al.
# 2024, *QServe* (W4A8 with int8). Next: lesson 08, quantizing the cache and choosing.
