# %% [markdown]
# # 11 · Fusion, CUDA graphs and tuning
#
# After this lesson you can see what the launches of a layer cost; choose a kernel's tile from measurements without
# being fooled by noise; say when a step is limited by the CPU and how CUDA graphs help; choose which batch sizes to
# capture; compare two measurements only if they differ in one thing; and name the steps from a model to a TensorRT
# engine, and their counterparts here.
#
# **89 minutes, plus 9 optional. Needs:** lessons 03, 04 and 10. This lesson is about GPUs, but you do not need one, nor
# Triton: the times come from the project's H200 records.

# %%
import statistics
from collections import Counter, namedtuple
from itertools import combinations

import numpy as np

from minillm.bench import plots, records
from minillm.course import NotSolvedYet, check, compare, describe, solved
from minillm.course.lesson_11 import ablation
from minillm.course.lesson_11.graph_sizes import padded_ms
from minillm.course.shared import kernel_pictures as draw
from minillm.course.shared.launches import PRODUCT, five_launches, least_us, one_layer
from minillm.kernels import launch_configs
from minillm.model.config import PRESETS
from minillm.runner.cuda_graph import batch_sizes

gemma = PRESETS["gemma-2b"]

# %% [markdown]
# ## 1 · The launches of a layer · 5 min
#
# Lesson 03 fused an addition with a norm. There are three ways to run a whole layer of Gemma 2B in a decode step, and
# this lesson compares them:
#
# | launches of a layer | 64 requests | 1 request | 1 request, today |
# |---|---|---|---|
# | torch, line by line | 35 | 35 | 35 |
# | a kernel per operation | 11 | 11 | 10 |
# | five launches (section 5) | not possible | 5 | 5 |
#
# "64 requests" and "1 request" count what ran when this lesson's records were measured, as do all figures below. Since
# then, rotation and the cache write have been merged into one kernel, which saves a launch (for 64 requests, too). The
# first two ways have the same four matrix products, the same kernel that writes to the cache, and the same attention,
# which takes two launches: one for parts of the keys, and one that combines them (lesson 04). In the third, attention
# takes one launch: the last program to finish its part combines them all.
#
# A record is a file in the project's folder `data/results`: `h200/kernels` is `data/results/h200/kernels.json`, which
# has the times of eight of the engine's kernels on an H200. The figure draws each launch with the time it takes *at
# best*: its bytes divided by the memory bandwidth that was measured on the H200, or the time of the shortest kernel in
# that record if that is longer. This is an optimistic estimate. It is not a measurement, and not a strict limit either:
# in section 2 you will see a kernel that takes 1.29 µs.

# %%
kernels = {
    (each["kernel"], each["rows"]): each for each in records.read("h200/kernels")["results"]
}
bytes_per_s = records.read("h200/roofline")["bytes_per_s"]
shortest_us = 1e3 * min(each["ms"] for each in kernels.values())
print(f"the shortest kernel in the record: {shortest_us:.2f} µs")


def bound(layer):
    return least_us(layer, bytes_per_s, shortest_us)


ways = {
    "torch,\nline by line": bound(one_layer(gemma, 64, 1024, fused=False)),
    "a kernel per\noperation": bound(one_layer(gemma, 64, 1024, fused=True)),
}
draw.timeline(ways, "One layer of Gemma 2B, 64 rows: estimated time at best")
describe(
    "Two rows of launches in time. Four matrix products and attention take most of both. Line by"
    " line, 29 short kernels run between them; with one kernel per operation only five remain. The"
    " green bar in the first row is the engine's cache write, which both ways use."
)

# %% [markdown]
# Fusion removes most of the short kernels between the matrix products, and their trips to memory. Eleven launches
# remain: four matrix products, two for attention, and five short ones. This lesson asks three questions about them. How
# fast is each one? How fast can the CPU *launch* them? And can there be even fewer?
#
# ## 2 · Which tile? · 20 min
#
# No formula says how many columns a tile should have, or over how many **warps** (groups of 32 threads) to spread it.
# Small tiles mean many programs with little to do. Large tiles need many registers, and if too few programs fit on a
# processor at once, it waits for memory. So kernel authors measure. Here is GeGLU for Gemma 2B on an H200, measured
# with six tile sizes, each spread over 1, 2, 4, 8 or 16 warps (`tools/kernel_tiles.py`):

# %%
table = records.read("h200/tiles")["results"]
runs = {
    rows: {
        (each["tile"], each["warps"]): each["runs"] for each in table if each["rows"] == rows
    }
    for rows in (1, 3000)
}
tile_sizes = sorted({each["tile"] for each in table})
warps = sorted({each["warps"] for each in table})
speeds = {(each["rows"], each["tile"], each["warps"]): each["gb_per_s"] for each in table}
titles = {1: "1 row", 3000: "3,000 rows"}
maps = {
    title: np.array([[speeds[rows, tile, w] for w in warps] for tile in tile_sizes])
    for rows, title in titles.items()
}
draw.tuning(maps, tile_sizes, warps, unit="GB/s on an H200", margin=0.02)
describe(
    "Two tables of GB/s, by columns of a tile and warps. For one row the fastest cells are small"
    " tiles. For 3,000 rows a diagonal band of cells is within two percent of the best."
)

# %% [markdown]
# One row needs small tiles (smaller ones than 256 were not measured): it takes many programs to fill the GPU. For 3,000
# rows there is a plateau: many choices are within 2% of the best. Three regions are slow. Tiles that are too large for
# their warps (lower left) need too many registers per thread. Tiles that are too small for them (upper right) leave
# each thread little or nothing to do. And tiles of 256 columns, the top row, make 192,000 programs of 3,000 rows, each
# with too little work.
#
# How much does a measurement vary from run to run? Each cell of the table is the median of 20 runs:

# %%
for rows, chosen in ((1, (256, 2)), (1, (1024, 4)), (3000, (4096, 16)), (3000, (1024, 4))):
    each = sorted(1e3 * ms for ms in runs[rows][chosen])
    print(
        f"{titles[rows]:>10}, tile {chosen[0]:>4}, {chosen[1]:>2} warps:"
        f" fastest {each[0]:6.2f}, median {statistics.median(each):6.2f}, slowest {each[-1]:6.2f} µs"
    )
ours, other = statistics.median(runs[1][1024, 4]), kernels["gated_activation", 1]["ms"]
print(
    f"1 row, tile 1024, 4 warps in another process: {1e3 * other:.2f} µs, {1 - other / ours:.0%} less"
)

# %% [markdown]
# A single run can take two or three times the median. And medians differ between processes: the last line is from the
# record `h200/kernels`. So compare only what was measured side by side, and even then half a percent may be noise. A
# careful tuner therefore has a **default** and a **margin**: it keeps the default unless something else is *clearly*
# faster.
#
# $$\text{choice} = \begin{cases} b & \text{if } \operatorname{median}(b) < (1 - \text{margin}) \cdot
# \operatorname{median}(\text{default}) \\ \text{default} & \text{otherwise} \end{cases} \qquad
# b = \text{the launch with the smallest median}$$
#
# **Exercise 1 (6 minutes).** For example, runs of `[8.0, 8.1, 8.0]` for `(2048, 4)` and of `[10.0, 10.0, 10.1]` for the
# default `(1024, 4)` give `(2048, 4)`.


# %% tags=["exercise"]
def choose_launch(runs: dict, default, margin: float):
    """The launch with the smallest median time if that is clearly faster; otherwise the default.

    runs: launch -> its measured times, the default's among them. Clearly: by more than `margin`, a
    share of the default's median time.
    """
    # SOLUTION: the median of each launch; the fastest; compare it with the default
    times = {launch: statistics.median(each) for launch, each in runs.items()}
    best = min(times, key=times.get)
    return best if times[best] < (1 - margin) * times[default] else default
    # END


# %%
check(choose_launch)

# %% [markdown]
# The engine's GeGLU uses 1,024 columns and 4 warps here, whatever the number of rows. What would you choose, and how
# much faster would a step be?

# %%
DEFAULT, MARGIN = (1024, 4), 0.02
if solved(choose_launch):
    for rows, each in runs.items():
        tile, count = chosen = choose_launch(each, DEFAULT, MARGIN)
        saved = 1e3 * (statistics.median(each[DEFAULT]) - statistics.median(each[chosen]))
        print(
            f"{titles[rows]:>10}: {tile} columns and {count} warps, saves {saved:.2f} µs per layer,"
            f" {gemma.num_layers * saved:.1f} µs per step"
        )
else:
    print("choose_launch is not solved yet")

# %% [markdown]
# For 3,000 rows the default is on the plateau and stays. For one row another launch is clearly faster. But a step of
# one request takes about 1,400 µs (section 5), so 5 µs are 0.4%: not worth a lookup and one more thing to test. And
# the engine's step for one request does not run this kernel at all. Measure the kernel, then ask what the *step* gains.
#
# Triton can tune by itself: `@triton.autotune(configs=[...], key=[...])` measures all configurations at the first
# launch with each new key and keeps the fastest. The price: the first request of each new size waits until all of them
# are compiled and measured, and noise may change the choice from run to run. (It needs a GPU.)
#
# `minillm build` measures ahead of time instead: on *this* GPU, with *this* model's sizes, for the traffic that you
# expect. It works in three stages.
#
# 1. It runs the model's steps and notes which launch configurations their kernels look up: those of attention and, for
#    a single request, those of products with unquantized weights. (GeGLU looks up nothing and keeps its default.)
# 2. It times several configurations of each. To replace the default, the fastest one must beat it by 2% in two
#    separate timings (`minillm/tuning/trials.py`).
# 3. It times whole decode steps with the winners, and drops those that do not help there. (Prefill attention is exempt,
#    because decode steps do not run it.)
#
# The result is a plan file. An engine that runs with a plan looks up each of these launches in it by its *problem*: the
# kernel's name, the sizes, and the dtype. In the next listing, see what happens if the plan has no entry. (`asked` is
# there for the tuner: it collects what is looked up in the first stage.)

# %%
# ENGINE: minillm.kernels.launch_configs:tuned

# %%
problem = launch_configs.problem("a_kernel", rows=1, dtype="bfloat16")
plan = {problem: {"keys": 32, "warps": 8}}

Choice = namedtuple("Choice", ["keys", "warps"])
default = Choice(keys=64, warps=4)  # what the kernel's author would launch

for rows in (1, 2):
    with launch_configs.using(plan):
        chosen = launch_configs.tuned("a_kernel", default, rows=rows, dtype="bfloat16")
    print(f"rows={rows}: {chosen}")

# %% [markdown]
# How much did a plan for Gemma 2B gain on the H200? The record has runs with and without it, of 1,024 prompt tokens and
# 256 output tokens per request:

# %%
build = records.read("h200/build")
measured = build["plan"]["measured"]
print(f"measured {measured['seconds']:.0f} s: {measured['launches_tried']} launches tried")
for each in build["plan"]["launches"]:
    before, after = each["microseconds"]
    print(
        f"{each['kernel']}: {before:.0f} µs by default, {after:.0f} µs with the launch chosen"
    )
for each in build["results"]:
    print(
        f"requests: {each['requests']:>3}, {each['engine']:<8} {each['output_tokens_per_s']:>9,.1f} tokens/s"
    )

# %% [markdown]
# Next to nothing. The only launch that it changed makes prefill attention 5% faster, which is a small part of these
# runs; nothing else passed those tests. Only three problems were tuned in this record. The matrix products of the
# single-request step were not among them, so this record cannot tell whether they could gain. On another GPU, or for a
# model with other sizes, a plan may gain more.
#
# ## 3 · Who launches the kernels? · 18 min
#
# The times so far are what the GPU needs. But the CPU has to *launch* each kernel: Python runs a line, torch picks the
# kernel, the driver puts it into a queue. The GPU takes kernels from that queue in order. If the CPU is slower than the
# GPU, the queue is empty and the GPU waits: the step is **launch-bound**.
#
# A **CUDA graph** is a recording. To **capture** it, launch the step once while CUDA records every launch with all its
# arguments, without running it. From then on, a single call *replays* all of them.
#
# Lesson 04 measured one request of Gemma 2B on an H200 (128 prompt tokens, 256 output tokens) with and without CUDA
# graphs. With decode steps in graphs, a token took less than a quarter of the time, although the kernels were the same,
# one per operation.
#
# **Predict first.** Without graphs, how long does the CPU take per launch, on average? Count everything that it does
# for a step: Python, torch, the driver, scheduling and sampling.

# %% tags=["exercise"]
guess_launch_us = 5.0  # PREDICT: microseconds of the CPU per launch

# %%
settings = ablation.read("h200/ablation")
tokens_per_s = {
    (row["group"], row["name"], row["requests"]): row["output_tokens_per_s"]
    for row in settings["results"]
}
with_graphs = tokens_per_s["fusion", "a kernel per operation", 1]
without = tokens_per_s["CUDA graphs", "off", 1]
launches = gemma.num_layers * len(one_layer(gemma, 1, 256, fused=True))
launch_us = 1e6 / without / launches
compare("per launch", unit="µs", prediction=guess_launch_us, measured=launch_us)
print(f"without graphs: {1e3 / without:.1f} ms per token, {launches} launches")
print(f"with graphs:    {1e3 / with_graphs:.1f} ms, {with_graphs / without:.1f} times as fast")

# %% [markdown]
# (`launches` counts the layers only. The time per launch is that of the whole step, divided by this number.) CUDA
# itself takes only a few microseconds for a launch. Most of the rest is Python and torch.
#
# You can model what the GPU does. Kernel $i$ starts when it has been launched *and* the kernel before it has ended:
#
# $$\text{start}_i = \max(\text{launched}_i, \text{end}_{i-1}), \qquad \text{end}_i = \text{start}_i + \text{length}_i$$
#
# **Exercise 2 (5 minutes).** For example, kernels launched at 5, 10 and 15 µs, of 2, 8 and 1 µs, run from 5 to 7, 10 to
# 18, and 18 to 19.


# %% tags=["exercise"]
def queued(launched_us: list[float], kernel_us: list[float]) -> list[tuple[float, float]]:
    """(start, end) of each kernel.

    launched_us: when the CPU has put each into the queue; kernel_us: how long each runs. They run in
    the order of these lists.
    """
    # SOLUTION: walk through the kernels, and remember when the last one ended
    end, times = 0.0, []
    for launched, length in zip(launched_us, kernel_us):
        start = max(launched, end)
        end = start + length
        times.append((start, end))
    return times
    # END


# %%
check(queued)

# %% [markdown]
# Now a decode step's 18 layers for one request, with each kernel's time at best from section 1. Launched one by one,
# each kernel costs the CPU the average from above; a graph costs it only once. This is a **model**, not a trace: every
# launch takes the same time. The figure shows the first layer.

# %%
layer_us = [us for *_, us in bound(one_layer(gemma, 1, 256, fused=True))]
lengths = layer_us * gemma.num_layers
launched = {
    "one by one": [launch_us * (place + 1) for place in range(len(lengths))],
    "as a graph": [launch_us] * len(lengths),
}
lanes = {}
for name, when in launched.items():
    first_layer = when[: len(layer_us)]
    lanes[f"{name}: CPU"] = [
        (end - launch_us, 0.96 * launch_us) for end in sorted({*first_layer})
    ]
    lanes[f"{name}: GPU"] = []
    if solved(queued):
        times = queued(when, lengths)
        lanes[f"{name}: GPU"] = [(start, end - start) for start, end in times[: len(layer_us)]]
        busy, total = sum(lengths) / times[-1][1], times[-1][1] / 1e3
        print(
            f"{name}: 18 layers end after {total:.1f} ms; the GPU is busy {busy:.0%} of that"
        )
draw.lanes("The first layer of one request, a model with average launches", lanes)
describe(
    "Lanes in time for the CPU and the GPU, one by one and as a graph. One by one, the CPU is busy"
    " throughout; as a graph, it is busy once. "
    + (
        "One by one, the GPU waits before every kernel; as a graph, they follow without gaps"
        " (two shades, only to tell neighbors apart)."
        if solved(queued)
        else "The GPU's lanes are empty: `queued` is not solved yet."
    )
)

# %% [markdown]
# The model is optimistic about the graph. The measured speed with graphs means 1.9 ms per token: that includes the
# output head, sampling and a share of the prompt, and kernels take longer than their time at best. But you can trust
# what the model says about the cause, because it also follows from the measurements alone: in a graph, the same kernels
# need at most 1.9 ms per token. So of the 8.3 ms without a graph, the GPU waits for more than 6.
#
# A recording has a price. Arguments are *addresses* and *sizes*, so inputs must be at the same addresses every time, no
# shape may change, and nothing in the step may wait for the CPU. The engine therefore keeps the state of its rows in
# GPU memory, captures one graph per batch size, and pads a batch to the next captured size. In the listing below, look
# for three things: graphs are kept by size and by the width of their block tables; a step is *rehearsed*, that is run
# once, before it is captured, so that all its kernels are compiled; and the inner function `step` is what is captured,
# sampling included. (You may skip the second `if`, which decides where a graph's memory comes from.)

# %%
# ENGINE: minillm.runner.decode_graphs:DecodeGraphs.capture

# %% [markdown]
# A step that runs prompts is harder to capture, because prompts have all lengths. It is padded to one of a few numbers
# of tokens, and which token belongs to which row travels in one array that the captured kernels read
# (`minillm/runner/mixed_graphs.py`). Steps with more than 1,024 prompt tokens or 64 prompts are launched kernel by
# kernel: the longer the GPU works on a step, the less the time of its launches matters. Sampling is part of the graph,
# with a temperature, with top-p (draw only from the most likely tokens, whose probabilities add up to p) and its
# relatives, and with log-probabilities. For penalties and grammars, extra kernels run after the graph, and every
# request of the step waits.
#
# A captured graph knows nothing about functions that you plug in later. So while an operation of yours is in use, the
# engine launches kernel by kernel.
#
# <details><summary>How to have your own operation captured, on a GPU</summary>
#
# Replace it with `using(capturable=True, ...)`. With that you promise three things. Your function launches the same
# kernels for the same shapes. It never reads a value back to the CPU. And it can cope with padding, the unused rows of
# a batch: their length is 0, and the slot of their token in the cache is -1, which means that nothing may be written.
# Even then, only decode steps are captured. Try it with your kernels from lesson 03.
#
# </details>
#
# ## 4 · Which sizes to capture? · 13 min
#
# Every graph takes time to capture, and memory. Too few graphs mean a lot of padding. The engine's list of sizes is
# dense where batches are small:

# %%
# ENGINE: minillm.runner.cuda_graph:batch_sizes

# %% [markdown]
# What does padding cost? The plan of section 2 has the time of a decode step for each batch size. Its rows have over
# 1,000 cached tokens each, so one row takes longer here than in section 5:

# %%
step_ms = {rows: ms for rows, _, ms, _ in build["plan"]["measured"]["steps_ms"]}
for rows, ms in step_ms.items():
    print(f"rows {rows:>3}: {ms:.2f} ms")

# %% [markdown]
# A step of 16 rows takes only 0.2 ms longer than a step of 4: reading the weights takes most of both. So padding 3 rows
# to 16 rather than to 4 costs 0.2 ms. Padding 129 rows to 256 rather than to 192 costs 0.7 ms. (One row is faster
# because it has a step of its own, section 5. And 2 rows were measured slower than 4, so a plan drops the size 2:
# padding 2 rows to 4 saves time.)
#
# Which sizes are worth a graph depends on the traffic. Take 256 requests that start together, with outputs of 1 to 256
# tokens: as they finish, the batch shrinks.

# %%
outputs = np.random.default_rng(0).integers(1, 257, 256)
counts = Counter(int((outputs > step).sum()) for step in range(outputs.max()))
print(f"{sum(counts.values())} steps, {len(counts)} different batch sizes")

# %% [markdown]
# With a memory budget for `most` graphs, choose the set of sizes that makes all steps together fastest:
#
# $$\min_{S,\ |S| \le \text{most}} \; \sum_n \text{counts}_n \cdot \text{ms}\big(\min\{s \in S : s \ge n\}\big)$$
#
# **Exercise 3 (8 minutes).** The largest size must always be in the set, so that every batch fits. There are few sizes,
# so you can try all sets (`itertools.combinations`). `padded_ms(sizes, counts, ms)` computes the sum above. If several
# sets are equally fast, return any of them.
#
# For example, 10 steps of one row, 1 of three and 1 of eight, steps of 1.0, 1.1, 1.2 and 2.0 ms for 1, 2, 4 and 8 rows,
# and at most two graphs: capture `[1, 8]`.


# %% tags=["exercise"]
def choose_sizes(counts: dict[int, int], ms: dict[int, float], most: int) -> list[int]:
    """The batch sizes to capture, ascending: at most `most` of the sizes in ms, the largest included.

    counts: rows of a step -> how many such steps; ms: size -> milliseconds of its captured step.
    """
    # SOLUTION: all sets of up to most - 1 smaller sizes, each with the largest; the fastest one
    *smaller, largest = sorted(ms)
    sets = [
        [*chosen, largest]
        for count in range(min(most, len(ms)))
        for chosen in combinations(smaller, count)
    ]
    return min(sets, key=lambda sizes: padded_ms(sizes, counts, ms))
    # END


# %%
check(choose_sizes)

# %%
engines = [size for size in batch_sizes(256) if size in step_ms]
everything = len(engines), padded_ms(engines, counts, step_ms)
print(f"the engine's {len(engines)} sizes: {everything[1]:.0f} ms")
alone = padded_ms([256], counts, step_ms)
print(f"the largest size alone: {alone:.0f} ms")
totals = {}
for most in range(1, len(step_ms) + 1) if solved(choose_sizes) else ():
    sizes = choose_sizes(counts, step_ms, most)
    totals[most] = padded_ms(sizes, counts, step_ms)
    if most <= 4:
        print(f"yours, at most {most}: {totals[most]:.0f} ms with {sizes}")
draw.graph_sizes(totals, everything, alone, "your sets")
describe(
    "Milliseconds of all steps by the number of captured sizes, on an axis that does not begin at 0:"
    " a dashed line for the largest size alone, a square for the engine's own list. "
    + (
        "The curve of your sets falls steeply at first and is almost flat from five sizes on, at the"
        " level of the engine's list."
        if totals
        else "There is no curve for your sets: `choose_sizes` is not solved yet."
    )
)

# %% [markdown]
# The first few sizes account for nearly all of the gain. `minillm build` simplifies the question: it walks from the
# largest size down and keeps a size if its step is more than 2% faster than that of the next larger one kept
# (`minillm/tuning/planning.py`, `worthwhile`). That needs no forecast of batch sizes. All graphs of the engine use the
# same memory for their intermediate results, because only one of them runs at a time. So each further graph is cheap
# here: the engine reserves 1 MiB for it.
#
# ## 5 · Five launches per layer · 10 min
#
# In a graph, launches cost the CPU almost nothing. They still cost the GPU: at the end of each kernel its last programs
# finish while most of the chip is idle, and the next kernel's first loads take time to arrive. For one request every
# kernel is short, so these gaps matter most. The engine has a special path for this case, the **fused step**. The four
# matrix products of a layer read all the weights for a single vector. So the fused step does not call torch's products:
# it has kernels of its own, made for a single vector, which read the weights faster (the times of torch's products
# follow below). And the norms, the residual sum and GeGLU are so little work that they fit *into* these products;
# rotation and cache write fit into attention:
#
# 1. residual sum (except in the first layer), norm, QKV projection;
# 2. rotation, cache write, attention;
# 3. output projection;
# 4. residual sum, norm, gate and up projections, GeGLU;
# 5. down projection.

# %%
ways = {
    "torch,\nline by line": bound(one_layer(gemma, 1, 256, fused=False)),
    "a kernel per\noperation": bound(one_layer(gemma, 1, 256, fused=True)),
    "five\nlaunches": bound(five_launches(gemma, 256)),
}
draw.timeline(ways, "One layer of Gemma 2B, one row: estimated time at best")
describe(
    "Three rows of launches in time, for one request. Torch's many short kernels make its row the"
    " longest; with one kernel per operation it is shorter, and with five launches nearly all of"
    " it is matrix products. The green bar in the first row is the engine's cache write."
)

# %% [markdown]
# 18 layers and the output head make a step, and a step makes a token. So the times at best give an estimate of the most
# tokens per second that each way can reach: its *bound*. How close does the engine come to it? The measured speeds
# below are with decode steps in CUDA graphs; they include the prompt, which runs without one.

# %%
head_us = 1e6 * 2 * gemma.vocab_size * gemma.hidden_size / bytes_per_s
names = ("plain torch", "a kernel per operation", "five launches per layer")
best_us = {name: sum(us for *_, us in lane) for name, lane in zip(names, ways.values())}
most = {name: 1e6 / (gemma.num_layers * us + head_us) for name, us in best_us.items()}
rates = {name: tokens_per_s["fusion", name, 1] for name in names}
fused = names[2]
print(
    f"five launches per layer: bound {most[fused]:.0f} tokens/s, measured {rates[fused]:.0f}"
)
print(f"that is {rates[fused] / most[fused]:.1%} of the bound")

# %% [markdown]
# **Predict first.** What share of *their own* bound do plain torch kernels reach, in a graph? More than the fused
# step's share, or less? And one kernel per operation?

# %% tags=["exercise"]
guess_share = 60.0  # PREDICT: measured speed of plain torch, in percent of its bound

# %%
torchs = 100 * rates["plain torch"] / most["plain torch"]
compare("plain torch", unit="% of its bound", prediction=guess_share, measured=torchs)

print(f"\n{'microseconds per layer':<23} at best  measured  lost  share of own bound")
for name in names:
    took_us = (1e6 / rates[name] - head_us) / gemma.num_layers
    lost, share = took_us - best_us[name], rates[name] / most[name]
    print(f"{name:<23} {best_us[name]:7.1f} {took_us:9.1f} {lost:5.1f} {share:13.1%}")

# %% [markdown]
# The share is that of a whole step, with its output head. The columns in microseconds leave out the head's best time,
# so the share is not the first column divided by the second.
#
# Plain torch reaches about the same share of its own bound as one kernel per operation, although it is by far the
# slowest of the three. (The difference depends on the assumed shortest kernel: make it 0.2 µs shorter, and the order
# flips.) Why? Look at the first column. All three ways move nearly the same bytes. They differ in the number of short
# kernels, and a bound charges each of those the time of the shortest kernel. So of the 78 µs that plain torch takes
# beyond the bound of five launches, 42 are in its own bound already, and count as if they were necessary. A share of a
# way's own bound says how well the way does *what it set out to do*, not whether that was worth doing.
#
# Two questions need two numbers. How good are these kernels? Divide by their own bound. How good is this step? Divide
# by the same bound for all, the highest one:

# %%
for name in names:
    print(f"{name:<23} {rates[name] / most[fused]:.0%} of the bound of five launches")

# %% [markdown]
# Now the ranking matches the measured speeds. And what is in the column "lost"? Other records have the times of single
# kernels, for one row:

# %%
torchs_us = {  # torch's matrix products
    each["matrix"]: 1e3 * each["bf16_ms"]
    for each in records.read("h200/quantized-kernels")["results"]
    if each.get("rows") == 1
}
torchs_head_us = torchs_us.pop("head")
products_us = sum(us for kind, _, us in ways["five\nlaunches"] if kind == PRODUCT)
attention_us = 1e3 * kernels["decode_attention", 1]["ms"]
print(
    f"torch's four products of a layer: {sum(torchs_us.values()):5.1f} µs, at best {products_us:5.1f}"
)
print(f"torch's product of the head:      {torchs_head_us:5.1f} µs, at best {head_us:5.1f}")
print(
    f"attention over 384 keys:          {attention_us:5.1f} µs, at best {2 * shortest_us:5.1f}"
)

# %% [markdown]
# With a kernel per operation, most of the loss is in the matrix products. For one row, torch's do not reach the full
# bandwidth: they account for about 16 of the 28 µs that a layer loses. Attention accounts for about 3, the output head
# for 1.5 (it runs once per token, so its 26 µs are spread over 18 layers), and the five short kernels for less than 1.
# The rest is gaps between kernels, the prompt, and sampling. (These kernels were timed one at a time and at other
# commits, so the shares are approximate.) The fused step has other products, and loses less than half as much. Section
# 8, which is optional, shows how it also hides the gaps between its launches.
#
# ## 6 · Like for like · 12 min
#
# The record's "CUDA graphs" group says 120 tokens/s without graphs and 706 with them. It would be wrong to report
# "graphs make decoding 5.9 times as fast": with graphs, the engine *also* runs the fused step of section 5, which
# exists only inside graphs. The two settings differ in several ways, so the factor belongs to none of them alone.
# Here is what really ran in each setting of `minillm bench ablation`, for one request:

# %%
RAN = {
    "off": {"decode steps": "one by one", "prompts": "one by one", "layer": "11 launches"},
    "plain torch": {
        "decode steps": "graph",
        "prompts": "one by one",
        "layer": "torch, line by line",
    },
    "a kernel per operation": {
        "decode steps": "graph",
        "prompts": "one by one",
        "layer": "11 launches",
    },
    "five launches per layer": {
        "decode steps": "graph",
        "prompts": "one by one",
        "layer": "5 launches",
    },
    "on": {"decode steps": "graph", "prompts": "graph", "layer": "5 launches"},
}

# %% [markdown]
# **Exercise 4 (6 minutes).** Find the pairs of settings that may be compared: those that differ in exactly one fact.
# Give each pair once, the earlier setting first, with the name of that fact.
#
# For example, `{"off": {"graphs": "no", "launches": 10}, "on": {"graphs": "yes", "launches": 10}, "fused": {"graphs":
# "yes", "launches": 5}}` gives `[("off", "on", "graphs"), ("on", "fused", "launches")]`.


# %% tags=["exercise"]
def fair_pairs(settings: dict[str, dict]) -> list[tuple[str, str, str]]:
    """(setting, later setting, fact) of all pairs that differ in exactly one fact."""
    # SOLUTION: for each pair, the facts that differ; keep the pairs with one
    found = []
    for first, second in combinations(settings, 2):
        facts = [
            fact for fact in settings[first] if settings[first][fact] != settings[second][fact]
        ]
        if len(facts) == 1:
            found.append((first, second, facts[0]))
    return found
    # END


# %%
check(fair_pairs)

# %%
speed = {name: rate for (_, name, requests), rate in tokens_per_s.items() if requests == 1}
if solved(fair_pairs):
    for first, second, fact in fair_pairs(RAN):
        gain = speed[second] / speed[first]
        print(f"{fact:<13} {first:>23} -> {second:<23} {gain:.2f} times")
else:
    print("fair_pairs is not solved yet")
print(f"not a fair pair: off -> on, {speed['on'] / speed['off']:.2f} times")

# %% [markdown]
# Follow a path of fair pairs from `off` to `on`: the factors multiply to the unfair one. On the shortest path, graphs
# for decode steps give by far the largest factor, and the five launches the second largest. The last one, of prompts in
# graphs, is no larger than the difference between two runs of one setting.
#
# But does 1.30 tell us what fewer launches gain? No: `layer` is one entry in our table, but going from 11 launches to 5
# changes three things at once. There are fewer launches, other kernels compute the matrix products, and each kernel
# starts early (section 8). Fewer launches alone cannot explain the factor, because torch's four products (67.8 µs) take
# longer than the whole layer does in five launches (65.9 µs, section 5). A comparison is only as fair as its table of
# facts is complete.
#
# For 256 requests the picture changes, because a step has more work per launch:

# %%
plots.ablation(settings, groups=["CUDA graphs", "fusion"])
describe(
    "Horizontal bars of tokens per second for one and for 256 requests, as a share of the best."
    " Without graphs one request reaches about a sixth and 256 requests about half; fusion helps"
    " both."
)

# %% [markdown]
# ("Decodes alone" has decode steps in graphs and launches prompts kernel by kernel; for one request it is the same
# setting as "five launches per layer". Five launches exist for one request only: with more rows, a matrix product uses
# each weight several times, and needs tiles for that.)
#
# ## 7 · From a model to a TensorRT engine · 9 min
#
# TensorRT is NVIDIA's compiler for neural networks. It turns a network into an *engine* for one GPU, in steps that you
# can now name:
#
# 1. **Import** the network, for example from an ONNX file (a common file format for networks), as a graph of layers.
#    *Here:* nothing. The model is Python code that runs as it is (`minillm/model/decoder.py`).
# 2. **Optimize the graph:** fold constants, remove dead layers, fuse consecutive layers (vertically) and layers that
#    read the same input (horizontally). *Here:* by hand. Fused kernels are vertical fusion; Q, K and V in one matrix,
#    and gate and up in one, are horizontal fusion. Gemma's `1 + weight` is folded when the weights are loaded.
# 3. **Take the network's precisions.** Since version 11, a network is always *strongly typed*: it states the type of
#    every tensor, so precision is decided before the build, usually by a tool that edits the ONNX file. (Through
#    version 10, the builder could also choose a lower precision wherever that was faster.) The builder still inserts
#    *reformatting* where a layer needs another memory layout than the one before it. *Here:* a recipe says which
#    weights are quantized (`minillm/quantization/recipe.py`). No reformatting, since all kernels agree on a layout.
# 4. **Time tactics:** measure several kernels for each layer on the target GPU, and keep the fastest. A *timing cache*
#    saves measuring the same layer twice. *Here:* `minillm build` measures launch configurations of its own kernels,
#    each problem once. Large matrix products are left to the library's own choice.
# 5. **Plan memory:** tensors that are not needed at the same time share buffers. *Here:* torch's allocator does it
#    while the step runs, and all CUDA graphs share one pool of memory.
# 6. **Serialize** the result, the *plan*, to a file. By default it works only on this kind of GPU and with this version
#    of TensorRT. *Here:* the plan file holds choices and no code, and is refused on another GPU, another version or
#    another model shape. Triton caches compiled kernels by itself.
# 7. **Run:** a runtime deserializes the engine and creates an *execution context*, which holds the memory of one run.
#    An application may capture its work in a CUDA graph. *Here:* `LLM(plan=...)`, the rows' state in GPU memory
#    (`minillm/runner/state.py`), and the graphs of sections 3 and 4.
#
# Do not expect this in **TensorRT-LLM**, NVIDIA's engine for language models. It used to build such engines, but
# removed that path in 2026: its models are PyTorch code that runs as it is, with hand-written kernels and CUDA graphs,
# and no build step. In that respect it resembles this course's engine.
#
# PyTorch has a compiler of its own, **`torch.compile`**. It records the operations that a Python function calls, fuses
# small ones into Triton kernels that it generates, and can replay the result as a CUDA graph. Where it cannot record,
# Python takes over for that part, so you need not export the model first. vLLM uses it. This engine does not.
#
# The deepest difference is in step 2. Compilers find fusions in a graph, within what they know. Here a person wrote
# each fused kernel, and the graph of operations exists only as the record of one run, the CUDA graph. The first way
# also works for networks that the compiler's authors have never seen. The second can use fusions that no pattern
# covers, such as the five launches of section 5.
#
# You can compute what memory planning (step 5) saves. Most tensors of a step are used only once, by the next operation.
# At any moment, the engine needs three: an operation's input, its output, and the residual.
#
# **Predict first.** How many times as much memory would a step of Gemma 2B need if each of its tensors had its own?

# %% tags=["exercise"]
guess_unplanned = 9.0  # PREDICT: times as much memory if each tensor of a step had its own

# %%
ROWS = 3000
dim, heads, kv_heads = gemma.head_dim, gemma.num_heads, gemma.num_kv_heads
hidden, inner = gemma.hidden_size, gemma.intermediate_size
made = {  # numbers per row that each operation of a layer writes
    "qkv": (heads + 2 * kv_heads) * dim,
    "rotated q, k": (heads + kv_heads) * dim,
    "attended": heads * dim,
    "out": hidden,
    "sum, normed": 2 * hidden,
    "gate and up": 2 * inner,
    "gated": inner,
    "down": hidden,
    "sum, normed again": 2 * hidden,
}
every = 2 * ROWS * gemma.num_layers * sum(made.values())
pairs = zip(made.values(), [*made.values()][1:])
alive = 2 * ROWS * max(before + after + hidden for before, after in pairs)
times = every / alive
compare(
    "without planning", unit="times", prediction=guess_unplanned, measured=times, by="computed"
)
print(f"memory if every tensor of a step of {ROWS:,} rows had its own: {every / 1e9:5.2f} GB")
print(f"for an operation's input, its output and the residual, at most: {alive / 1e9:5.2f} GB")

# %% [markdown]
# ## 8 · A kernel that starts early · optional, 9 min
#
# Five launches still leave five gaps per layer. **Programmatic dependent launch**, on NVIDIA GPUs since Hopper, hides
# them. A kernel may start while the one before it still runs. It loads its first *weights*, which depend on no other
# kernel, and only then waits for the vector that the previous kernel is computing. In our kernels, one call does both:
# it waits, then lets the next kernel start. (So when a kernel starts, are the ones before the previous kernel complete?
# Yes: the previous kernel waited for them before it let this one start.)

# %%
# ENGINE: minillm.kernels.single_row_parts:wait_for_inputs

# %% [markdown]
# Below is the kernel of launches 1, 3 and 4, and of the output head. (Launch 2 is attention. In launch 5, the rows of
# the matrix have 16,384 numbers, too many for one program to hold a whole row, so its kernel takes them piece by
# piece.) You know its tiles, masks, addition, norm and gate from lesson 03. The matrix product is `tl.sum(weight * x)`:
# with one vector, no number of the matrix is used twice, so there is nothing for `tl.dot` to reuse. Three things are
# new:
#
# * **Persistent programs.** There may be fewer programs than tiles. Each takes every `programs`-th tile, beginning
#   with tile `program` (`tl.range(program * TILE, ROWS, programs * TILE)`), so a program loads and norms `x` only once.
# * **Prefetching weights.** The loop loads the *next* tile of weights before it uses the current one, so memory is
#   always busy. `num_stages=1` tells Triton not to pipeline the loop on its own as well.
# * **Loading before waiting.** The first tile of weights is requested above the line that waits.

# %%
# ENGINE: minillm.kernels.single_row:whole_rows_kernel

# %% [markdown]
# ## Recap · 2 min
#
# * A layer's launches cost bytes, fixed time on the GPU, and time on the CPU. Fusion reduces all three; CUDA graphs
#   remove most of the third.
# * Choose launches by measuring: medians, a default, and a margin. Then check whether the whole step gains.
# * A graph has fixed addresses and sizes. Padding to a captured size is cheap where reading the weights dominates.
# * A share of a way's own bound tells you how well its kernels run. To compare ways, divide by one bound for all.
# * Compare only settings that differ in one thing. Graphs for decode steps are one thing; the fused step is another,
#   and bundles fewer launches, faster matrix products and an early start.
#
# **What got worse:** a tuned choice holds for one GPU and one version. Graphs take time and memory to capture, need
# padded batches, and make it hard to look inside a step. The fused step works for exactly one row, and for weights that
# are unquantized or in a format that its kernels read.
#
# **Further reading:** NVIDIA, *CUDA Programming Guide*: "CUDA Graphs" and "Programmatic Dependent Launch and
# Synchronization"; Gray 2019, *Getting Started with CUDA Graphs*; NVIDIA's TensorRT documentation, "How TensorRT Works"
# and "Optimizing Builder Performance"; Ansel et al. 2024, *PyTorch 2* (`torch.compile`); the autotuning example in
# Triton's matrix multiplication tutorial.
#
# **Next:** you have now seen every layer of the engine, and written a part of nearly all of them: tokens, attention and
# its cache, kernels, quantized weights, blocks, scheduling. So far, none of your parts has had a user. The last lesson,
# 99, puts what you wrote behind a server and measures what users wait for under load; you can go there now. Lessons 13
# to 15 (speculative decoding, several GPUs, adapters and other prompts) are for those who want to go on first. The
# other numbers in between are free: `docs/left_out.md` lists what the course leaves out.
