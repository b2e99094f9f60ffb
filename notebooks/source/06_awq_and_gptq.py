# %% [markdown]
# # 06 · AWQ and GPTQ
#
# After this lesson you can say why two roundings of the same matrix, of the same size, give models of different
# quality; use one formula for the error to choose AWQ's scales and to derive GPTQ's compensation; write both, and
# quantize a whole model with them inside the engine; and choose calibration data, and notice when it misleads you.
#
# **110 minutes. Needs:** a CPU, and lesson 05 (scales, groups, rounding to nearest). You should know what the inverse
# of a matrix is.

# %%
import tempfile
import time
from pathlib import Path

import torch

from minillm import LLM, SamplingParams, using
from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.quantize import quantize
from minillm.course import NotSolvedYet, check, compare, describe, solved, yours
from minillm.course.lesson_06 import calibrated
from minillm.course.lesson_06 import pictures as draw
from minillm.course.shared import gains, real_model

_ = torch.set_printoptions(precision=3, sci_mode=False)
original = calibrated.dense()  # tiny-gemma in float64
text = calibrated.calibration_text()  # token ids
held_out = calibrated.HeldOut()  # other text, to measure on
print(f"calibration: {text.shape[0]} rows of {text.shape[1]} tokens")
print(f"held out:    {held_out.ids.shape[0]} rows of {held_out.ids.shape[1]} tokens")


def whose(part):
    """Whether a result below comes from your code, in words."""
    return "yours" if solved(part) else "the engine's (yours was not solved yet)"


# %% [markdown]
# ## 1 · Same size, different model · 4 min
#
# Lesson 05 in three lines. Four bits have 16 levels, the **codes** -8 to 7. A group of neighboring inputs of an output
# row, here 128, shares a **scale**; a weight is stored as its code, and read as code times scale. Rounding to nearest
# takes, for each weight on its own, the level that is closest to it.
#
# This lesson keeps that format. The files stay the same size, and the same kernels read them. Only the *choice* of
# codes and scales changes, once, before the model is saved.
#
# Perplexity is too blunt to compare such choices: it looks only at the probability of the one token that came next, and
# a rounding error may raise or lower it. So we compare whole distributions by KL divergence (lesson 05, section 3):
# $\sum p \log (p / q)$ over the vocabulary, with the original model's $p$ and the quantized model's $q$, in nats. What
# we print is the mean over 10 rows of held-out text, 256 tokens each, with its standard error. When two methods are
# compared, the ± is that of their comparison, row by row: below about twice it, a difference may be chance.

# %%
results, parts_of = {}, {}


def measure(name, methods, statistics=None, base=None, outliers=False, parts=()):
    """Quantize the model; print its KL, its perplexity, and how much of the base's KL is gone.

    parts: whose functions quantize it, in words.
    """
    model, strengths = calibrated.quantized(methods, statistics or {}, outliers)
    results[name], parts_of[name] = held_out.measure(model), parts
    found = results[name]
    line = f"{name:24} KL {found.mean:.4f} ± {found.error:.4f}   perplexity {found.perplexity:.3f}"
    if base is not None:
        line += "   removed {:.0f}% ± {:.0f}".format(*found.removed(results[base]))
    print(line)
    return strengths


print(f"{'original':43} perplexity {held_out.measure().perplexity:.3f}")
_ = measure("nearest", Method("int4"))

# %% [markdown]
# The perplexity hardly moves; `tiny-gemma` survives four bits well. What counts in this lesson is how much of the KL
# you can remove without spending a byte.
#
# ## 2 · The error that counts · 15 min
#
# A weight is never seen alone. It is multiplied by an input, and the products are added up. So the error that counts is
# not that of the weights, but that of the **outputs**. Take an output with two weights, 1.4 and 0.4, and to keep
# numbers simple, a grid of whole numbers. Rounding to nearest gives 1 and 0: both weights are off by -0.4. Now multiply
# them by the inputs of three tokens. (A row of `X` is the two inputs of one token.)

# %%
w = torch.tensor([1.4, 0.4])
X = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 2.0]])
for rounded in ([1.0, 0.0], [1.0, 1.0], [2.0, 0.0]):
    errors = X @ (torch.tensor(rounded) - w)
    print(
        f"{rounded}: errors of the outputs {errors}, sum of squares {errors.square().sum():.2f}"
    )

# %% [markdown]
# Check the first line by hand: token 0 gets $1 \cdot (-0.4) + 1 \cdot (-0.4) = -0.8$. Rounding to nearest is the
# *worst* of the three. The two inputs rise and fall together, so errors of opposite signs cancel. Look at `[2, 0]`: it
# moves weight 0 the "wrong" way, by +0.6, and its error is 19 times smaller than that of rounding to nearest.
#
# To compute this without keeping all tokens, write $d$ for the change of one output's weights:
#
# $$\sum_{\text{tokens}} (x \cdot d)^2 \;=\; \sum_{\text{tokens}} d^T x x^T d \;=\; d^T H d, \qquad
# H = \sum_{\text{tokens}} x x^T$$
#
# $H$ is the **second moment** of the inputs, a matrix [inputs, inputs]. However long the calibration text, this is all
# there is to know about it, as far as squared errors are concerned. Its diagonal says how large each input is: **some
# weights matter more**, because their inputs are large. The rest says which inputs go together: **some errors cancel**.
# AWQ builds on the first, GPTQ on both.

# %%
H = X.T @ X
print(H)
draw.output_errors(
    w, H, {"nearest": (1, 0), "error 0.84": (1, 1), "error 0.24, the best": (2, 0)}
)
describe("""The plane of two weights with a grid of whole numbers, and ellipses of equal output error around the weights
1.4 and 0.4. The ellipses are long and narrow and slope down to the right. The nearest grid point, 1 and 0, is outside
the ellipse on which 1 and 1 lies; 2 and 0 is on the smallest one.""")

# %% [markdown]
# Each ellipse connects points of equal output error. Rounding to nearest picks the point that looks closest; we want
# the one on the smallest ellipse. In many dimensions, this is the **closest vector problem** of lattices, for which no
# fast exact method is known; section 5 has an approximation.
#
# **Exercise 1 (8 minutes).** Write what calibration records about the inputs of one matrix. `add` is called many times,
# with some rows each time. The sums are in float64: they have many terms. `mean_magnitude` is for AWQ.
#
# For example, after `add` of the rows `[1, -2]` and `[3, 2]`, the mean magnitudes are 2 and 2. Changing the first
# weight of an output by 1 costs $1^2 + 3^2 = 10$.


# %% tags=["exercise"]
class MyStatistics:
    """Sums over all rows: self.rows, self.second_moment [inputs, inputs], self.magnitude [inputs]."""

    def __init__(self, inputs: int):
        self.rows = 0
        self.second_moment = torch.zeros(inputs, inputs, dtype=torch.float64)
        self.magnitude = torch.zeros(inputs, dtype=torch.float64)

    def add(self, x: torch.Tensor) -> None:
        """x [rows, inputs], in any dtype: add these rows to the three sums."""
        # SOLUTION: count the rows, add their products x x^T and their sizes |x|, in float64
        x = x.double()
        self.rows += len(x)
        self.second_moment += x.T @ x
        self.magnitude += x.abs().sum(0)
        # END

    def mean_magnitude(self) -> torch.Tensor:
        """The mean of |x| over all rows: [inputs]."""
        # SOLUTION: the sum, divided by the number of rows
        return self.magnitude / self.rows
        # END

    def error(self, difference: torch.Tensor) -> torch.Tensor:
        """difference [out, inputs], float64: changes of weights -> each output's d^T H d, [out]."""
        # SOLUTION: d^T H d for each row d
        return (difference @ self.second_moment * difference).sum(1)
        # END


# %%
check(MyStatistics)

# %% [markdown]
# Now in the engine. `record` replaces its operation `linear` with one that first shows the input to one of your objects
# (there is one for each of the 24 matrices), while the model reads the calibration text. From here on, the lesson
# calibrates with these objects. First a test: round one matrix, and compare the error that the sums predict with that
# of the actual outputs.

# %%
Recorder = yours(MyStatistics, calibrated.Statistics)
where = "layers.5.down"
weight = calibrated.products(original)[where].dequantize()
difference = calibrated.rounded(weight) - weight

predicted = calibrated.record(original, text[:2], Recorder)[where].error(difference).sum()
inputs = calibrated.inputs_of(
    original, text[:2], where
)  # [tokens, in], kept only for this test
actual = (inputs @ difference.T).square().sum()
print(f"the statistics are {whose(MyStatistics)}")
print(f"{where} {list(weight.shape)}: predicted {predicted:.3f}, actual {actual:.3f}")

# %% [markdown]
# ## 3 · Some inputs matter more · 6 min
#
# How unequal are the inputs? Large models have something that `tiny-gemma` lacks: a few channels whose activations are
# up to 20 times larger than the others (Dettmers et al. 2022). So we plant such **outliers**: in both norms of every
# layer, 8 of the 256 channels become 16 times larger, and the weights that read them 16 times smaller. The products
# stay the same. This second model is called *with outliers* below. Its statistics follow from those of the first one:
# no need to record again.

# %%
with_outliers = calibrated.with_outliers()
before, after = (
    calibrated.log_probabilities(it, text[:1]) for it in (original, with_outliers)
)
print("the same log-probabilities:", torch.allclose(before, after, rtol=0, atol=1e-5))

recorded = calibrated.record(original, text, Recorder)
statistics = calibrated.statistics(recorded)  # in the engine's form
statistics_outliers = calibrated.add_outliers(original, statistics)
names = ("layers.3.qkv", "layers.3.down", where)
curves = {name: statistics[name].mean_magnitude for name in names}
curves["layers.3.qkv, with outliers"] = statistics_outliers["layers.3.qkv"].mean_magnitude
draw.magnitudes(curves)
describe("""Mean magnitudes of the inputs of four matrices relative to their median, largest first, on a logarithmic
axis. Without outliers that of qkv stays below twice the median; the two down matrices rise to about 3 and 6 times the
median. With outliers the first 3% of qkv's inputs are at 15 to 23 times the median.""")

# %% [markdown]
# **Predict first.** In `layers.5.down`, round all weights to nearest, but keep those of 48 of the 768 inputs, one in
# 16, exact. What share of the output error disappears, if the 48 inputs are chosen at random, by the size of their
# weights, and by their mean magnitude?

# %% tags=["exercise"]
guess_random = 6  # PREDICT: % of the output error that disappears, 48 inputs at random
guess_weights = 15  # PREDICT: %, the 48 inputs with the largest weights
guess_magnitude = 40  # PREDICT: %, the 48 inputs with the largest mean magnitude

# %%
choices = {
    "at random": (guess_random, torch.rand(768, generator=torch.Generator().manual_seed(0))),
    "by the size of their weights": (guess_weights, weight.square().sum(0)),
    "by mean magnitude": (guess_magnitude, recorded[where].mean_magnitude()),
}
for name, (guess, key) in choices.items():
    kept = difference.clone()
    kept[:, key.topk(48).indices] = 0  # these weights are exact
    share = 1 - recorded[where].error(kept).sum() / recorded[where].error(difference).sum()
    compare(name, unit="%", prediction=guess, measured=100 * share.item())

# %% [markdown]
# The sizes of the inputs say more than those of the weights. In larger models the difference is extreme: in OPT models
# with 3 bits, keeping the 1% of the channels with the largest activations exact removed most of the loss of rounding,
# and the 1% with the largest weights little or none of it (Lin et al. 2023, table 1).
#
# But a matrix with some exact columns is awkward to store, and slow to read, because one product then mixes two
# formats. AWQ aims at the same effect with four bits everywhere.
#
# ## 4 · AWQ: scale up what matters · 29 min
#
# ### Scales by hand
#
# Activation-aware weight quantization multiplies an important weight by $s > 1$ *before* rounding, and divides its
# input by $s$. The product is the same: $(w s) \cdot (x / s) = w x$. What does it do to the error? How far a weight is
# from its nearest level depends on where it happens to be, on average a quarter of a step, *whether it is two steps
# large or six*. (A weight below half a step becomes 0, and all of it is lost.) Dividing by $s$ afterwards divides that
# error too. A group of four weights; the first has a large input. (As in lesson 05, a step is the largest weight
# divided by 7.5.)

# %%
group = torch.tensor([0.27, -3.0, 1.3, 0.7])
print("  s   step   errors of the four weights")
for s in (1, 2, 4, 8, 16, 64):
    scaled = group * torch.tensor([s, 1, 1, 1])
    step = scaled.abs().max() / 7.5
    error = (scaled / step).round().clamp(-8, 7) * step / torch.tensor([s, 1, 1, 1]) - group
    print(f"{s:3}  {step:5.2f}   {error}")

# %% [markdown]
# From line to line, the first error shrinks, and the others stay the same, as long as 0.27 s stays below the group's
# largest weight, 3. Beyond that the step grows: at 16 some errors of the others are larger and some smaller, at 64 all
# are several times larger, and the first has gained nothing more. So large scales for important inputs are good, and
# too large ones are bad. How large? AWQ takes all scales of a matrix from one formula with one number in it, the
# **strength** $\alpha$:
#
# $$s_j = \frac{m_j^{\alpha}}{\sqrt{\max_k m_k^{\alpha} \; \min_k m_k^{\alpha}}}, \qquad m_j = \text{mean } |x_j|$$
#
# With $\alpha = 0$ all scales are 1, which is rounding to nearest; with $\alpha = 1$ all inputs become equally large.
# The denominator puts the smallest scale as far below 1 as the largest is above. Then **search**: try 10 strengths,
# round $W \text{diag}(s)$ to nearest, divide by $s$ again, and keep the strength with the smallest output error.
#
# ### Where the division goes
#
# Dividing the inputs by $s$ at run time would cost an operation. It is **folded** into whatever makes the inputs. For
# the four matrices of a layer (lesson 02), that is the weight of a norm, or some rows of the matrix before. Each `* s`
# has scales of its own, and the `/ s` before it undoes them:
#
# ```
# norm / s -> qkv * s     -> attention: sums of values (rows of v / s) -> attention_out * s
# norm / s -> gate_up * s -> gate times up (rows of up / s)            -> down * s
# ```
#
# There is a catch: query heads that share a value head need the same scales, so not every $s$ can be folded, and norms
# are saved in bfloat16, so their scales are rounded. The engine passes your search a function `allowed`, which returns
# the nearest scales that *can* be folded.
#
# **Exercise 2 (12 minutes).** Write the search. A magnitude may be 0 for an input that never occurs: treat magnitudes
# below 1e-4 as 1e-4.
#
# For example, with weights 2 and 0.25, a grid of whole numbers, and two tokens with the inputs `[1, 0]` and `[0, 16]`,
# rounding to nearest has an error of 16. The search should find strength 0.9, with an error of 2.55.

# %% tags=["exercise"]
STRENGTHS = [step / 10 for step in range(10)]  # 0, 0.1, ..., 0.9


def awq_scales(weight, magnitude, moment, rounded, allowed):
    """The scales [in] whose rounded weight has the smallest output error, and their strength.

    weight: [out, in]. magnitude: mean |x|, [in]. moment: H, [in, in]; all float64, as the scales
    are. rounded: a function that rounds a matrix [out, in] to nearest. allowed: a function from
    scales [in] to the nearest ones that can be folded; those are tried and returned. Leaves its
    arguments unchanged.
    """
    # SOLUTION: for each strength, the error of rounded(weight * scales) / scales
    best = None
    for strength in STRENGTHS:
        powers = magnitude.clamp(min=1e-4) ** strength
        scales = allowed(powers / (powers.max() * powers.min()).sqrt())
        difference = rounded(weight * scales) / scales - weight
        error = (difference @ moment * difference).sum().item()
        if best is None or error < best[0]:
            best = error, scales, strength
    return best[1], best[2]
    # END


# %%
check(awq_scales)

# %% [markdown]
# How does the error depend on the strength? Three examples without your search, with the engine's 20 strengths. A dot
# marks each minimum:

# %%
curves = {
    name: calibrated.errors_by_strength(original, name, statistics)
    for name in (names[0], where)
}
curves["layers.3.qkv, with outliers"] = calibrated.errors_by_strength(
    with_outliers, "layers.3.qkv", statistics_outliers
)
draw.strengths(curves)
describe("""The output error by strength, in percent of that of rounding to nearest, with a dot at each minimum. Without
outliers the error of qkv hardly changes; that of down falls by about a tenth, then rises far above 100%. With outliers
the error of qkv falls to about a quarter, with its minimum near the largest strength.""")

# %% [markdown]
# **Predict first.** The engine now quantizes all 24 matrices with your search. What share of the KL of rounding to
# nearest do the scales remove, in `tiny-gemma` as it is, and in `tiny-gemma` with outliers?

# %% tags=["exercise"]
guess_awq = 10  # PREDICT: % of the KL that AWQ's scales remove, as it is
guess_awq_outliers = 80  # PREDICT: % of the KL that AWQ's scales remove, with outliers

# %%
my_scales = calibrated.awq_part(yours(awq_scales, calibrated.engines_scales(STRENGTHS)))
search_is = whose(awq_scales)
print(f"the search is {search_is}")
with using(awq_scales=my_scales, awq_clipping=calibrated.without_clipping):
    found = measure("AWQ's scales", Method("awq"), statistics, "nearest")
    _ = measure("nearest, outliers", Method("int4"), outliers=True)
    outlier_case = (Method("awq"), statistics_outliers, "nearest, outliers", True)
    found_outliers = measure("AWQ's scales, outliers", *outlier_case, parts=[search_is])
where_from = "layers.3.qkv"
print(
    f"{where_from}: strength {found[where_from]:g}, with outliers {found_outliers[where_from]:g}"
)


def removed(name, base):
    """% of the base's KL that is gone."""
    return results[name].removed(results[base])[0]


compare(
    "as it is", unit="%", prediction=guess_awq, measured=removed("AWQ's scales", "nearest")
)
share = removed("AWQ's scales, outliers", "nearest, outliers")
compare("with outliers", unit="%", prediction=guess_awq_outliers, measured=share)

# %% [markdown]
# Outliers make rounding to nearest several times worse: a weight that is 16 times smaller than its neighbors in the
# group gets few levels or only 0, just where the input is largest. The search undoes the damage, without being told
# which inputs are the outliers: their mean magnitudes show it. In `tiny-gemma` as it is, there is hardly anything to
# undo, and the gain is within the noise.
#
# So what AWQ gains depends on the model. Ours exaggerates: the outliers were planted by exactly what AWQ can undo.
# Section 7 has a model whose outliers nobody planted.
#
# ### Clipping
#
# The engine's AWQ has a second search, modeled on the authors' code. A group's scale is set by its largest weight. If
# that weight matters little, it may be **clipped**, so that all others get finer steps. Each group tries ranges down to
# half its own, and a few that are up to 7.5% wider (a positive largest weight lies half a step beyond level 7: lesson
# 05), and takes the one with the smallest output error. Clipping alone in both models, then both searches together:

# %%
with using(awq_scales=calibrated.without_scales):
    _ = measure("clipping alone", Method("awq"), statistics, "nearest")
    _ = measure("clipping alone, outliers", *outlier_case)
with using(awq_scales=my_scales):
    _ = measure("AWQ: both", Method("awq"), statistics, "nearest")
    _ = measure("AWQ: both, outliers", *outlier_case)

# %% [markdown]
# Clipping helps in both models, but with outliers it is no substitute for the scales.
#
# In the engine's search below, look for what yours does not have: more strengths (`STRENGTHS`: 20, from 0 to 0.95); a
# large matrix is searched with some of its rows; `scales_for` keeps inputs that are always 0 out of the formula; and it
# raises small *powers* to 1e-4, as the authors' code does, where you raised magnitudes. One difference from the
# authors' code is not visible here: for `qkv` and `gate_up`, the authors compare the outputs of the whole attention or
# MLP, not those of each matrix.

# %%
# ENGINE: minillm.quantization.methods.awq:search_scales
# ENGINE: minillm.quantization.methods.awq:scales_for

# %% [markdown]
# ## 5 · GPTQ: let the others make up for it · 40 min
#
# ### One weight is fixed
#
# Back to the two weights 1.4 and 0.4. Round the first: it becomes 1, and is off by -0.4. *Now* the second one is still
# free. Which value should it have? If it changes by $\delta$, the error is
#
# $$d^T H d = (-0.4)^2 \, H_{00} + 2 \, (-0.4) \, \delta \, H_{01} + \delta^2 H_{11}$$
#
# The derivative with respect to $\delta$ is 0 at $\delta = 0.4 \, H_{01} / H_{11} = 0.4 \cdot 7 / 9 = 0.311$. So before
# it is rounded, the second weight moves from 0.4 to 0.711, and then the nearest level is 1, not 0. The error is 0.84
# instead of 4.64. (The best is 0.24, which rounds the first weight the other way. GPTQ never looks back. Except for the
# order of the columns and the ends of the grid, it is Babai's nearest plane algorithm of 1986, an approximation for the
# closest vector problem: Chen et al. 2025.)
#
# With many weights: weight $j$ changes by $e$, and all *others* may adjust. Minimize $d^T H d$ subject to $d_j = e$.
# The gradient with respect to $d$ is $2 H d$. At the minimum it is 0 for every weight that may adjust, so $H d =
# \lambda \, u_j$ with some number $\lambda$ ($u_j$: 1 at $j$, else 0). So $d$ is a multiple of column $j$ of $H^{-1}$,
# and the multiple follows from $d_j = e$:
#
# $$d \;=\; \frac{e}{[H^{-1}]_{jj}} \; [H^{-1}]_{:,j}$$
#
# Check it: here $H^{-1}$ has the first column 1.8 and -1.4, so $d = -0.4 / 1.8 \cdot (1.8, -1.4) = (-0.4, 0.311)$.
#
# **Exercise 3 (7 minutes).** Write this step for all rows of a matrix at once. For example, with the weights and $H$
# above, setting weight 0 to 1 gives 1 and 0.711.


# %% tags=["exercise"]
def compensate(weights, at, value, moment):
    """The weights after column `at` was set to `value`, and all others made up for it.

    weights: [out, n]. value: [out]. moment: H, [n, n], which has an inverse. Returns new weights
    [out, n] with the smallest output error for each row; leaves its arguments unchanged.
    """
    # SOLUTION: move each row along column `at` of the inverse, until the weight has its value
    column = torch.linalg.inv(moment)[:, at]
    change = value - weights[:, at]
    return weights + change[:, None] * column / column[at]
    # END


# %%
check(compensate)

# %% [markdown]
# ### Column by column
#
# Now repeat. Round column 0, let the others make up for it. Column 0 is fixed from here on: leave it out, and treat
# column 1 in the same way, with the $H$ of the inputs from 1 on. (Why may the error so far be left out? The free
# weights are at its minimum, so its gradient with respect to them is 0, and moving them by a further $d$ adds just $d^T
# H d$, with that smaller $H$.) And so on, until none is left. All rows go through the columns in the same order, so
# that what is left of $H$ is the same for all of them.

# %%
draw.columns(done=3, count=10)
describe("""A matrix of ten columns. The first three are rounded and fixed; the fourth is rounded now; arrows lead from
it to the six columns on its right, which are still free and make up for its error.""")

# %% [markdown]
# One more rule: the scale of a group is computed when its first column is reached, from the weights as they *then* are.
# In code, with `grid.scale`, the scale of a group of weights for each row, and `grid.codes`, the nearest codes:


# %%
def gptq_slowly(weight, moment, grid):
    """Codes [out, in], and scales [out, groups]."""
    step = yours(compensate, calibrated.compensate)  # yours as it is when this is called
    work, codes, scales = weight.clone(), [], []
    for at in range(weight.shape[1]):
        if at % grid.group_size == 0:
            scales.append(grid.scale(work[:, at : at + grid.group_size]))
        codes.append(grid.codes(work[:, at], scales[-1]))
        value = codes[-1] * scales[-1]
        work[:, at:] = step(work[:, at:], 0, value, moment[at:, at:])
    return torch.stack(codes, 1), torch.stack(scales, 1)


# %% [markdown]
# Let the engine round the six `attention_out` matrices with it, and leave all others unquantized:

# %%
some = "layers.*.attention_out"
_ = measure("attention_out, nearest", MethodRecipe({some: Method("int4")}))
with using(gptq=calibrated.gptq_part(calibrated.from_moment(gptq_slowly))):
    recipe = MethodRecipe({some: Method("gptq")})
    _ = measure("attention_out, slowly", recipe, statistics, "attention_out, nearest")
print(f"the step is {whose(compensate)}")

# %% [markdown]
# It works, and it is slow: one inverse for each column. `down` in Gemma 2B has 16,384 inputs, so it would need 16,384
# inverses, the first ones of that size. The insight that makes GPTQ practical: all of these inverses are in *one*
# matrix.
#
# ### All inverses at once
#
# A symmetric matrix $H$ is **positive definite** if $d^T H d > 0$ for every $d$ except 0: here, if every change of the
# weights causes an error. Then it has an inverse, which is positive definite too. Every such matrix is $U^T U$ with an
# upper triangular $U$, its **Cholesky factor**. Take that of the inverse: $H^{-1} = U^T U$. Then for the inputs from
# $j$ on, written $\ge j$,
#
# $$\left(H_{\ge j, \ge j}\right)^{-1} = \left(U_{\ge j, \ge j}\right)^T U_{\ge j, \ge j}$$
#
# (Proof: $H = U^{-1} U^{-T}$. The inverse of an upper triangular matrix is upper triangular, and its lower right corner
# is the inverse of the corner. In a product of an upper and a lower triangular matrix, in this order, the lower right
# corner is the product of their corners.) Its first row, which the step needs, is $U_{jj}$ times row $j$ of $U$, and
# its first element is $U_{jj}^2$. So the step's $[H^{-1}]_{:,j} / [H^{-1}]_{jj}$ is $U_{j,:} / U_{jj}$:
#
# $$e_j = \text{rounded}_j - w_j, \qquad w_k \leftarrow w_k + \frac{e_j}{U_{jj}} \, U_{jk} \quad \text{for all } k > j$$
#
# Check it on the toy example, and compare with the inverse of what is left when column 0 is fixed:

# %%
U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
print(U)
print(f"0.4 moves by {-0.4 / U[0, 0] * U[0, 1]:.3f}")
print(f"U[1, 1] squared: {U[1, 1] ** 2:.4f}; the inverse of H[1:, 1:]: {1 / H[1, 1]:.4f}")

# %% [markdown]
# One problem remains. If some inputs are always 0, or if there are fewer tokens than inputs, $H$ has no inverse. So 1%
# of the mean of the diagonal is added to all of its diagonal, the **damping**. It also keeps weights from moving far in
# directions about which the calibration text says almost nothing. `factor` below comes from the damped $H$.
#
# **Exercise 4 (10 minutes).** Write GPTQ with the factor. For example, with the two weights, a grid of whole numbers in
# a group of 2, and `U` from above, the codes are 1 and 1.


# %% tags=["exercise"]
def gptq(weight, factor, grid):
    """Codes [out, in] from -8 to 7, in any dtype, and scales [out, groups].

    weight: [out, in]. factor: U, [in, in]. grid.group_size inputs share a scale.
    grid.scale(weights): [out, group_size] -> [out]. grid.codes(column, scale): [out], [out] -> [out].
    A group's scale is that of its weights when its first column's turn comes. Leaves its arguments
    unchanged.
    """
    # SOLUTION: round each column, and move the columns after it along its row of the factor
    work, codes, scales = weight.clone(), [], []
    for at in range(weight.shape[1]):
        if at % grid.group_size == 0:
            scales.append(grid.scale(work[:, at : at + grid.group_size]))
        codes.append(grid.codes(work[:, at], scales[-1]))
        error = codes[-1] * scales[-1] - work[:, at]
        work[:, at + 1 :] += (error / factor[at, at])[:, None] * factor[at, at + 1 :]
    return torch.stack(codes, 1), torch.stack(scales, 1)
    # END


# %%
check(gptq)

# %% [markdown]
# The same result as the slow one, on a matrix of 256 inputs? And how long do both take?

# %% tags=["nbval-ignore-output"] uncompared="times"
fast = yours(gptq, calibrated.engines_gptq)
matrix = calibrated.products(original)["layers.0.attention_out"].dequantize()
damped = calibrated.damped(statistics["layers.0.attention_out"].second_moment)
grid = calibrated.Grid(128)
start = time.perf_counter()
slow_codes, _ = gptq_slowly(matrix, damped, grid)
middle = time.perf_counter()
fast_codes, _ = fast(matrix, torch.linalg.cholesky(torch.linalg.inv(damped), upper=True), grid)
end = time.perf_counter()
print(f"the slow step is {whose(compensate)}; the fast version is {whose(gptq)}")
print(f"equal codes: {(slow_codes == fast_codes).double().mean():.2%}")
print(f"slow {middle - start:.3f} s, fast {end - middle:.3f} s")

# %% [markdown]
# **Predict first.** What share of the KL of rounding to nearest does GPTQ remove, as it is, and with outliers?

# %% tags=["exercise"]
guess_gptq = 30  # PREDICT: % of the KL that GPTQ removes, as it is
guess_gptq_outliers = 30  # PREDICT: % of the KL that GPTQ removes, with outliers

# %%
my_gptq = calibrated.gptq_part(yours(gptq, calibrated.engines_gptq))
gptq_is = whose(gptq)
print(f"the function is {gptq_is}")
with using(gptq=my_gptq):
    _ = measure("GPTQ", Method("gptq"), statistics, "nearest", parts=[gptq_is])
    _ = measure(
        "GPTQ, outliers", Method("gptq"), statistics_outliers, "nearest, outliers", True
    )
compare("as it is", unit="%", prediction=guess_gptq, measured=removed("GPTQ", "nearest"))
share = removed("GPTQ, outliers", "nearest, outliers")
compare("with outliers", unit="%", prediction=guess_gptq_outliers, measured=share)

# %% [markdown]
# GPTQ helps in both models. Without outliers, where AWQ's scales gain nothing, it gains about as much as clipping. With
# outliers the scales win clearly: GPTQ chooses codes well on the grid that it is given, and scales give it a better
# grid. So combine them: scale first, then round with GPTQ. To do that in the engine, replace its search for clipping
# with GPTQ.

# %%
with using(awq_scales=my_scales, awq_clipping=calibrated.gptq_after_scales(my_gptq)):
    _ = measure("scales, GPTQ, outliers", *outlier_case, parts=[search_is, gptq_is])
for name, base in {
    "GPTQ": "AWQ: both",
    "scales, GPTQ, outliers": "AWQ: both, outliers",
}.items():
    share = "{:.0f}% ± {:.0f}".format(*results[name].removed(results[base]))
    print(f"{name}: removed {share} of the KL of {base!r}")

# %% [markdown]
# As it is, GPTQ alone can hardly be told apart from AWQ with both searches. With outliers, the same is true of the
# combination, and GPTQ alone is far behind.
#
# The engine's own version also handles inputs that are always 0 (`unused`) and zero points (`zeros`, lesson 05), and it
# has two additions. Look for `block`: the columns after a block of 128 are updated once for the whole block, as one
# matrix product (the paper's "lazy batch-updates"), since on a GPU single columns would wait for memory. And for
# `order`: with **act-order**, the inputs with the largest second moments are rounded first, while most others are still
# free to make up for their errors.

# %%
# ENGINE: minillm.quantization.methods.gptq:quantize

# %% [markdown]
# What does act-order gain, and what does it cost? Below the KL line are two rows from lesson 05's H200 record: Gemma
# 2B's tokens per second, relative to bfloat16, with 1 to 3,000 requests at once.

# %%
_ = measure("GPTQ, act-order", Method("gptq", act_order=True), statistics, "GPTQ")
gains.report(["int4 g128, head int8", "int4 g128 groups in act-order, head int8"])

# %% [markdown]
# What it removes of plain GPTQ's KL is within the noise here; section 7 has a model on which it gains more. In this
# engine it costs nothing: groups stay neighbors ("static groups"), so the file and its speed are those of plain GPTQ,
# the first row. Many published checkpoints instead form groups in the order of rounding. These must store the order,
# and rearrange each product's inputs. The second row is such a checkpoint: with one request, this engine has no fused
# step for it, and it is slower than bfloat16, as it is with 64 requests or more.
#
# ## 6 · Calibration data · 7 min
#
# Both methods believe what the calibration text tells them. How much text, and which?
#
# **Predict first.** Calibrate with one row of 256 tokens instead of 16 rows. What share of the KL of rounding to
# nearest does GPTQ remove now, in `tiny-gemma` as it is? And AWQ's scales, with outliers? (The measurements, of other
# texts too, take about a minute.)

# %% tags=["exercise"]
guess_gptq_short = 15  # PREDICT: % of the KL that GPTQ removes, 256 tokens of calibration text
guess_awq_short = 60  # PREDICT: % that AWQ's scales remove, with outliers, 256 tokens

# %%
noise = torch.randint(6, 4096, text.shape, generator=torch.Generator().manual_seed(0))
noise[:, 0] = text[:, 0]  # <bos>


def recorded_on(model, ids):
    return calibrated.statistics(calibrated.record(model, ids, Recorder))


more = calibrated.calibration_text(rows=32)
lengths = {1: "1 row"} | {rows: f"{rows} rows" for rows in (2, 4, 8, 32)}
texts = {name: more[:rows] for rows, name in lengths.items()}
texts |= {"noise": noise, "held-out": held_out.ids}
with using(gptq=my_gptq):
    for name, ids in texts.items():
        _ = measure(f"GPTQ, {name}", Method("gptq"), recorded_on(original, ids), "nearest")
with using(awq_scales=my_scales, awq_clipping=calibrated.without_clipping):
    short = recorded_on(with_outliers, text[:1])
    _ = measure("scales, outliers, 1 row", Method("awq"), short, "nearest, outliers", True)
share = removed("GPTQ, 1 row", "nearest")
compare("GPTQ", unit="%", prediction=guess_gptq_short, measured=share)
share = removed("scales, outliers, 1 row", "nearest, outliers")
compare("AWQ's scales, with outliers", unit="%", prediction=guess_awq_short, measured=share)

# %% [markdown]
# A negative share, about two standard errors below 0: calibrated on one row, GPTQ is probably *worse than rounding to
# nearest*. It moves every weight, to make up for errors in the directions that 256 tokens happened to have. This is
# overfitting, and the remedy is the same as in training: more data. AWQ's scales are powers of mean magnitudes, which
# 256 tokens estimate well enough, and the search chooses a single number for each matrix, the strength. That hardly
# overfits. How much text does GPTQ need?

# %%
names_by_rows = {rows: f"GPTQ, {name}" for rows, name in lengths.items()} | {16: "GPTQ"}
draw.removed_by_rows(
    {
        rows: results[names_by_rows[rows]].removed(results["nearest"])
        for rows in sorted(names_by_rows)
    }
)
describe("""The share of the KL that GPTQ removes against the rows of calibration text, with standard errors: below 0
by two standard errors with 1 row, about 0 with 2 and 4, and above 20% from 8 rows on.""")

# %% [markdown]
# With up to 4 rows, GPTQ is no better than rounding to nearest; from 8 rows on, 2,048 tokens, it is. Each of these
# matrices has at most 768 inputs, and GPTQ must learn how every pair of them goes together. The GPTQ paper, for models
# with thousands of inputs, uses 128 sequences of 2,048 tokens.
#
# `noise` is as long as the calibration text, but its tokens are random, and GPTQ gains nothing from it. So calibrate on
# text like that of your users: their languages, code if they send code, chat turns if they chat.
#
# The line "held-out" looks best, with *fewer* rows than the 16, and is a mistake: GPTQ was calibrated on the text that
# it is measured on. Keep the two apart, or you measure how well the method remembers.
#
# ## 7 · The targets, and the command · 6 min
#
# A quantizer is finished when it reaches a number that was set in advance. These are targets for `tiny-gemma`. One that
# is reached counts if its functions, the search or GPTQ or both, are yours. (The functions that ran when the KL was
# measured are what counts. If you solved an exercise after that, run the measurements in sections 4 and 5 again.)

# %%
TARGETS = {"AWQ's scales, outliers": 0.0060, "GPTQ": 0.0037, "scales, GPTQ, outliers": 0.0039}
for name, target in TARGETS.items():
    verdict = "reached" if results[name].mean <= target else "missed"
    part = next((each for each in parts_of[name] if each != "yours"), "yours")
    print(f"{name:24} KL {results[name].mean:.4f}, target {target:.4f}: {verdict}, {part}")
draw.bars(
    {
        "as it is": {name: results[name].mean for name in ("nearest", "AWQ's scales", "GPTQ")},
        "with outliers": {
            name: results[f"{name}, outliers"].mean
            for name in ("nearest", "AWQ's scales", "GPTQ", "scales, GPTQ")
        },
    }
)
describe("""Bars of the KL divergence, in two panels with the same axis. As it is: GPTQ clearly below rounding to
nearest, AWQ's scales about equal to it. With outliers: rounding to nearest is several times worse, GPTQ halves that,
AWQ's scales remove most of it, alone and with GPTQ.""")

# %% [markdown]
# To save time, this lesson recorded the inputs of all matrices once, in the unquantized model. `minillm quantize` goes
# layer by layer, as GPTQ's authors do: each is calibrated on the outputs of the *quantized* layers before it, the
# inputs that it will get. The result is a directory that `LLM` loads. Here with the GPTQ of section 5, yours or the
# engine's, and 16 rows of text:

# %% tags=["nbval-ignore-output"] uncompared="seconds; and sums in float32 differ between machines, so some codes do"
with (
    tempfile.TemporaryDirectory() as folder,
    calibrated.one_thread(),
    using(gptq=my_gptq) as used,
):
    out = Path(folder) / "tiny-gemma-gptq"
    report = quantize(None, MethodRecipe.of(Method("gptq")), out, rows=16)
    print(f"{report['dense_bytes']:,} bytes -> {report['bytes']:,}, {report['seconds']} s")
    with LLM(out, device="cpu") as llm:
        greedy = SamplingParams(max_tokens=24, temperature=0)
        print(llm.generate("Fenwick lies on the island of", greedy)[0].text)
print(f"{used.calls['gptq']} calls; GPTQ is {gptq_is}")

# %% [markdown]
# (Not a quarter of the bytes: the output head stays in bfloat16, and is almost half of the new file. And GPTQ ran 42
# times for 24 matrices: queries, keys, values, gate, and up are rounded one by one.) In a terminal: `minillm quantize
# --method gptq --out DIR`.
#
# ### A model that people use
#
# Here is lesson 05's record of SmolLM2-135M, measured on the prose of lessons 01 to 11. AWQ and GPTQ were calibrated on
# other text, the project's documentation and lessons 00 and 99. The names give the group size, which was 128 until now;
# KL is in millinats, in the last column too:

# %%
groups_of_64 = {name: f"{name}-g64" for name in ("int4", "awq", "gptq")}
groups_of_64["gptq-actorder"] = "gptq-g64-actorder"
real_model.report([*groups_of_64, "int4-g32", "awq-g32", "gptq-g32"], labels=groups_of_64)

# %% [markdown]
# On `tiny-gemma`, GPTQ is ahead: this record has almost 40 times as much text as section 5, which could not tell the
# two apart, and with groups of 64, GPTQ on each of five sets of calibration texts beats AWQ on any of them. On SmolLM2,
# AWQ is clearly ahead, removing two thirds of the KL of rounding to nearest where GPTQ removes half: this model has
# outliers (lesson 07). Act-order closes most of that gap, with a file of the same size. And both methods are worth much
# more than smaller groups alone.
#
# ## Recap · 3 min
#
# * Rounding each weight to the nearest level minimizes the wrong error. What counts is the error of the outputs, $d^T H
#   d$ for each output row, with the second moment $H$ of the inputs.
# * AWQ multiplies the columns of inputs that are large by scales, and folds the division into the operation before. All
#   scales follow from one strength, which is searched.
# * GPTQ rounds column by column; the columns that are still free make up for each error. The Cholesky factor of
#   $H^{-1}$ has all the steps in it.
# * Scales change the grid, GPTQ chooses codes on a grid. They can be combined.
# * Measure on text that calibration has not seen, with a standard error, and change one part at a time.
#
# **What got worse:** quantizing now needs text, and a model quantized for one kind of text may be worse on another. It
# takes a run of the model and time for each matrix, instead of one pass over the file. Folded scales change the norms,
# so a quantized layer is no longer a rounded copy of the original one, and an **adapter** (a small correction $A B$
# that was trained to be added to an original matrix, as in LoRA) does not fit as it is: its inputs are scaled.
# Checkpoints whose groups are in act-order must store the order, and their products are slower. And errors are now
# correlated, made to cancel on typical text.
#
# **Further reading:** Lin et al. 2023, *AWQ: Activation-aware Weight Quantization for LLM Compression and
# Acceleration*; Frantar et al. 2022, *GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
# Transformers*; Hassibi and Stork 1992, *Second order derivatives for network pruning: Optimal Brain Surgeon* (the step
# of exercise 3); Frantar and Alistarh 2022, *Optimal Brain Compression* (the same step for rounding, GPTQ's immediate
# ancestor); Chen et al. 2025, *The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm*; Dettmers et
# al. 2022, *LLM.int8()* (outliers); Williams and Aletras 2023, *On the Impact of Calibration Data in Post-training
# Quantization and Pruning*. Next: lesson 07 quantizes the activations too.
