# %% [markdown]
# # 02 · Attention and the KV cache
#
# Afterwards you can follow a token through a whole decoder, with its real weights, and get the engine's answer by
# hand; write the attention that every current model uses; say what a KV cache saves and what it costs; write the
# attention that reads one, and run it inside the engine; and compute, before you rent it, how many users a GPU can
# hold.
#
# **75 minutes. Needs:** a CPU, and lessons 00 and 01. You should know what a matrix product and a softmax are. The
# model is `tiny-gemma`: 6 layers of the same parts that Gemma 2B has 18 of. On a GPU the last measurements run Gemma
# 2B.

# %%
import time

import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode

from minillm import LLM, SamplingParams, using
from minillm.bench import records, roofline
from minillm.course import NotSolvedYet, adapters, check, compare, tier, yours
from minillm.course import draw_attention as draw
from minillm.model import sizing
from minillm.model.config import PRESETS, ModelConfig
from minillm.model.loader import EMBEDDED
from minillm.ops.reference import gated_activation, linear, lm_head, rms_norm, rotary_embedding

llm = LLM(device="cpu", dtype="float64", enable_prefix_caching=False, num_blocks=512)
model, config, tokenizer = llm.engine.model, llm.model_config, llm.tokenizer
print(f"{config.num_layers} layers, {model.num_parameters:,} parameters")

# %% [markdown]
# Numbers of 64 bits are slow, and right to many digits: when two ways to compute the same thing differ here, one of
# them is wrong. Prefix caching (lesson 09) is off, so that every prompt is computed from its beginning.
#
# ## 1 · From embeddings to logits
#
# The isles of `tiny-gemma`'s little world have towns, and Fenwick lies on one of them:

# %%
prompt = "Fenwick lies on the island of"
greedy = SamplingParams(max_tokens=1, temperature=0)
print(prompt + llm.generate(prompt, greedy)[0].text)

# %% [markdown]
# How does a stack of matrices know that? We take the model apart and do what it does, step by step, from token ids to
# *logits*, the scores of all tokens that a softmax turns into probabilities. This is the way:

# %%
draw.decoder(config, tokens=9)

# %% [markdown]
# The prompt becomes token ids (lesson 01). `<bos>` marks the beginning, and the town's name falls into three pieces.

# %%
ids = torch.tensor(tokenizer.encode(prompt))
pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in ids.tolist()]
for token, piece in zip(ids.tolist(), pieces, strict=True):
    print(f"{token:5}  {piece!r}")

# %% [markdown]
# **Embedding.** Every token of the vocabulary has a row of a matrix: 256 numbers that training found. Gemma
# multiplies them by the square root of their count, here 16. Tokens that are used alike got rows that point the same
# way:


# %%
def neighbours(word: str, count: int = 5) -> list[str]:
    """The tokens whose rows make the smallest angle with `word`'s."""
    directions = F.normalize(model.embedding.weight, dim=-1)
    (token,) = tokenizer.encode(word, add_special_tokens=False)
    near = (directions @ directions[token]).topk(count + 1).indices[1:]
    return [tokenizer.decode([other]) for other in near.tolist()]


for word in (" Bramble", " April", " black"):
    print(f"{word:>8}: {', '.join(each.strip() for each in neighbours(word))}")

x = model.embedding[ids] * config.embedding_scale
print(f"x: {list(x.shape)}")

# %% [markdown]
# Islands stand near islands, months near months. From here on, every token is a vector of 256 numbers, and every part
# of the model *adds* something to it.
#
# **Norm** (yours in lesson 00). Before a part reads the vector, it is scaled to a length that does not depend on what
# was added so far:

# %%
# ENGINE: minillm.ops.reference:rms_norm

# %% [markdown]
# **Queries, keys, values.** One matrix turns each token's vector into what attention needs. Three roles: a *query*
# says what this token looks for, a *key* what it can be found by, a *value* what it hands over when it is found.
# `tiny-gemma` makes 4 queries of 64 numbers, but only one key and one value: 4 query heads share one **KV head**.

# %%
layer, eps = model.layers[0], config.rms_norm_eps
sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

normed = rms_norm(x, layer.attention_norm, eps)
qkv = linear(normed, layer.qkv).unflatten(1, (-1, config.head_dim))
q, k, v = qkv.split(sizes, dim=1)
print(f"q {list(q.shape)}  k {list(k.shape)}  v {list(v.shape)}   [tokens, heads, head_dim]")

# %% [markdown]
# **Rotary embedding.** So far nothing says where a token stands. Each pair of numbers `(x[i], x[i + 32])` of a query
# or key is turned by an angle that grows with the position: fast for the first pair, slowly for the last. A product
# of two turned vectors depends only on the *difference* of their angles, so a score depends on the distance of two
# tokens and not on where they stand.

# %%
# ENGINE: minillm.ops.reference:rotary_embedding


# %%
def score(query_at: int, key_at: int) -> float:
    """The same query and key of head 0, as if they stood at these positions."""
    one, _ = rotary_embedding(q[8:, :1], k[3:4], model.rotary[[query_at]])
    _, other = rotary_embedding(q[8:, :1], k[3:4], model.rotary[[key_at]])
    return (one * other).sum().item()


for at in ((5, 2), (105, 102), (105, 2)):
    print(f"query at {at[0]:3}, key at {at[1]:3}, {at[0] - at[1]:3} apart: {score(*at):8.4f}")

angles = {}
for pair in (0, 3, 6):
    turn = config.rope_theta ** (-2 * pair / config.head_dim)
    angles[f"pair {pair}"] = [turn * position for position in range(5)]
draw.turning(angles, scores=[score(distance, 0) for distance in range(200)])

# %% [markdown]
# The arrows are a pair at positions 0 to 4. The curve is one query and one key of the model, moved apart: these two fit
# best when they are near, and less, with ups and downs, the farther apart they are. Keep in mind for later: a key is
# turned by *its own* position, once and for good.
#
# ## 2 · Attention
#
# Each token collects from the tokens before it. Query $q_i$ is compared with the keys of all tokens up to its own; a
# softmax makes weights of the scores; the values are mixed by these weights:
#
# $$o_i = \sum_{j \le i} w_{ij}\, v_j, \qquad w_{ij} = \frac{e^{s_{ij}}}{\sum_{l \le i} e^{s_{il}}}, \qquad
# s_{ij} = \text{scale} \cdot q_i \cdot k_j, \qquad \text{scale} = \frac{1}{\sqrt{\text{head\_dim}}}$$
#
# (The scale keeps scores of long vectors from growing with head_dim.) Two things are easily got wrong. **The mask**: a
# token must not see what comes after it, or it could copy the answer it was trained to predict. A hidden key has no
# weight at all, however low the other scores are. **The groups**: heads that share a KV head are neighbours.

# %%
draw.masks({"who sees whom: 9 tokens, green is seen": (9, 9, 9)})
draw.shared_heads(8, {"multi-head (MHA)": 8, "grouped-query (GQA)": 2, "multi-query (MQA)": 1})

# %% [markdown]
# With as many KV heads as query heads it is *multi-head attention*, the original. With one KV head it is *multi-query
# attention* (Gemma 2B), between them *grouped-query attention* (most models today). Why anyone would give keys up is
# a question for section 6; the formula is the same for all three.
#
# ### Exercise 1: attention
#
# Write it for a whole sequence. `torch.softmax`, `torch.einsum` and `repeat_interleave` are all allowed, and so is a
# loop over the heads.
#
# For example, a lone token gets its own value. And when the last of four tokens has a query that fits the second
# one's key (a score of 30, the others 0), it gets nearly that token's value.


# %% tags=["exercise"]
def attention(q, k, v, *, scale):
    """Causal attention of a sequence to itself.

    q: [tokens, heads, d]; k, v: [tokens, kv_heads, d]. With 4 heads and 2 KV heads, heads 0 and
    1 read KV head 0, heads 2 and 3 read KV head 1. Returns [tokens, heads, d].
    """
    # SOLUTION: scores of every query with every key, -inf where the key is later, softmax over
    #   the keys, then the mean of the values with these weights
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
    # END


# %%
check(attention)

# %% [markdown]
# `yours(attention, ...)` is your function, or the engine's own while yours is a stub, so that the notebook runs
# either way. With it, the rest of a layer is short: an output matrix mixes the heads and *adds* the result to the
# token's vector; then a gated MLP (a matrix, a gate by which half of the numbers scale the other half, a matrix)
# works on each token for itself and adds again.

# %%
# ENGINE: minillm.ops.reference:gated_activation


# %%
attend = yours(attention, adapters.attention)
scale = config.head_dim**-0.5


def queries_keys_values(x, layer, positions):
    """[tokens, hidden] -> q, k, v of one layer, q and k turned by their positions."""
    normed = rms_norm(x, layer.attention_norm, eps)
    q, k, v = linear(normed, layer.qkv).unflatten(1, (-1, config.head_dim)).split(sizes, dim=1)
    return *rotary_embedding(q, k, model.rotary[positions]), v


def rest_of_layer(x, attended, layer):
    """Add what attention found, [tokens, heads, d], then what the MLP makes of it."""
    x = x + linear(attended.flatten(1), layer.attention_out)
    normed = rms_norm(x, layer.mlp_norm, eps)
    inner = gated_activation(linear(normed, layer.gate_up), config.activation)
    return x + linear(inner, layer.down)


def logits_of(x):
    """A score for every token of the vocabulary: [tokens, hidden] -> [tokens, vocab]."""
    return lm_head(rms_norm(x, model.final_norm, eps), model.head)


def walk(ids, without=None):
    """The vectors [tokens, hidden] as embedded, then after each layer.

    The attention of layer `without` finds nothing.
    """
    x = model.embedding[ids] * config.embedding_scale
    found = [x]
    for number, layer in enumerate(model.layers):
        q, k, v = queries_keys_values(x, layer, torch.arange(len(ids)))
        attended = attend(q, k, v, scale=scale)
        if number == without:
            attended = torch.zeros_like(attended)
        x = rest_of_layer(x, attended, layer)
        found.append(x)
    return found


# %% [markdown]
# The head is the embedding matrix once more (*tied*): a token scores high when the final vector points along its row.
# Nothing forbids to ask the head after *every* layer what it would say now, at the last token:

# %%
(bramble,) = tokenizer.encode(" Bramble", add_special_tokens=False)


def verdict(x):
    """The likeliest next token, and the probability of the right one."""
    chances = logits_of(x[-1:]).softmax(-1)[0]
    return f"{tokenizer.decode([chances.argmax().item()])!r:11}  {chances[bramble]:.4f}"


print("after     likeliest    P(' Bramble')")
for number, x in enumerate(walk(ids)[1:]):
    print(f"layer {number}   {verdict(x)}")

# %% [markdown]
# After two layers the last token still only knows that it is ` of`. In layer 2 the island appears. What happened
# there? A trick makes attention show its weights: hand it rows of the identity matrix as values, and what comes back
# *is* the weights.

# %%
q, k, _ = queries_keys_values(walk(ids)[2], model.layers[2], torch.arange(len(ids)))
one_hot = torch.eye(len(ids), config.head_dim, dtype=torch.float64)[:, None]
weights = attend(q, k, one_hot, scale=scale)[..., : len(ids)]  # [tokens, heads, keys]
draw.attention_weights(
    pieces, {f"layer 2, head {head}": weights[:, head].numpy() for head in (0, 2, 1)}
)

# %% [markdown]
# Read the bottom rows. In heads 0 and 2 the last token looks at `wick` and `en`, pieces of the town's name; in head 1
# at ` island`, the kind of thing that is asked for. But a picture of weights is a hint, no proof. The test is to take
# it away: the same walk, with one layer's attention finding nothing.

# %%
print("without   likeliest    P(' Bramble')")
for number in range(config.num_layers):
    print(f"layer {number}   {verdict(walk(ids, without=number)[-1])}")

# %% [markdown]
# Without layer 2 the island is lost. Some other layers matter too, and layers 3 and 5 can go: their attention has
# nothing to add to *this* answer.
#
# Is it the same as what the engine computes? And as transformers, an entirely different program?

# %%
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
by_hand = logits_of(walk(ids)[-1][-1:])[0]
theirs = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float64)
with torch.inference_mode():
    their_logits = theirs(ids[None]).logits[0, -1]
print("by hand      ", tokenizer.decode([by_hand.argmax().item()]))
print("transformers ", tokenizer.decode([their_logits.argmax().item()]))
close = (by_hand - their_logits).abs().max() < 1e-9
print("all logits equal to nine decimals:", bool(close))

# %% [markdown]
# And the engine, with your attention in it. The engine's attention serves many requests out of a paged cache (lesson
# 09); an adapter lays each prompt's keys out one behind the other and calls yours. `used.calls` counts: six layers,
# once each, for one prompt (0 while yours is a stub).

# %%
with using(**adapters.gathered_prompts(attention)) as used:
    answer = llm.generate(prompt, greedy)[0].text
print(prompt + answer)
print(used.calls)

# %% [markdown]
# ## 3 · One token after the other
#
# The model gives one token. For the next one, append it and start again:


# %%
def forward(ids):
    """Logits [vocab] of the token after `ids` [tokens]: the whole model, over all tokens."""
    return logits_of(walk(ids)[-1][-1:])[0]


def generate_naively(ids, count):
    for _ in range(count):
        ids = torch.cat((ids, forward(ids).argmax()[None]))
    return ids


naive = generate_naively(ids, 12)
print(tokenizer.decode(naive.tolist()))

# %% [markdown]
# It works, and it is wasteful. Each step computes everything about every token again, although the tokens before are
# the same as in the step before, and cannot see the new one. Their keys and values come out equal, every time:


# %%
def all_keys_and_values(ids):
    """Of every layer: a list of [tokens, 1, head_dim]."""
    found = []
    for layer, x in zip(model.layers, walk(ids)[:-1], strict=True):
        found += queries_keys_values(x, layer, torch.arange(len(ids)))[1:]
    return found


pairs = zip(all_keys_and_values(ids[:8]), all_keys_and_values(ids), strict=True)
same = [torch.allclose(before, now[:8], rtol=0, atol=1e-9) for before, now in pairs]
print("the first 8 tokens, computed among 8 and among 9:")
print(f"{sum(same)} of {len(same)} keys and values are equal")

# %% [markdown]
# That is the mask's doing: what a token becomes depends on the tokens up to it alone. And which of its numbers does
# anyone need later? Not its query: that asked once. Not its vector. Only its **key** and its **value**, in each
# layer.
#
# **Predict first.** A product of a vector with a matrix of $n$ numbers is $n$ multiply-adds. `tiny-gemma`'s layers
# and head have 5.57 million numbers. The 100th token, computed naively, runs 100 tokens through the layers. If the
# keys and values of the first 99 were at hand, how many times less work would it be?

# %% tags=["exercise"]
guess_times = 80  # PREDICT: how many times the work at token 100, without a cache

# %% [markdown]
# Hold on to your number until there is a cache to measure.
#
# ## 4 · The cache
#
# For one request and one layer the cache is two pieces of memory with room for `capacity` tokens, and a count of how
# many are in them.


# %%
class Cache:
    """One request's keys and values in one layer: slots 0 to length - 1 are filled."""

    def __init__(self, capacity: int):
        shape = (capacity, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=torch.float64)
        self.v = torch.zeros(shape, dtype=torch.float64)
        self.length = 0


# %% [markdown]
# ### Exercise 2: append
#
# New tokens come in groups: a whole prompt at first, then one by one. Mind what `torch.cat` does: it makes a new
# piece of memory and copies all that was there. Over a request of 1,000 tokens that copies 500,000 tokens' keys.
#
# For example, one token whose key is all 7, put into an empty cache of 4: slot 0 holds the 7, and the length is 1.


# %% tags=["exercise"]
def append(cache, k, v):
    """Put the keys and values of new tokens behind those in the cache, in place.

    cache.k, cache.v: [capacity, kv_heads, d], of which cache.length are filled; k, v: [tokens,
    kv_heads, d]. They may fill it to its last slot. Raises ValueError, and changes nothing, when
    they do not fit.
    """
    # SOLUTION: check that they fit, write both into the free slots, count them
    end = cache.length + len(k)
    if end > len(cache.k):
        raise ValueError(
            f"{len(k)} tokens behind {cache.length} do not fit a cache of {len(cache.k)}"
        )
    cache.k[cache.length : end] = k
    cache.v[cache.length : end] = v
    cache.length = end
    # END


# %%
check(append)

# %% [markdown]
# ### Exercise 3: attention over the cache
#
# Now queries and keys are not the same tokens any more. There are `n` new queries, and `length` keys: all old ones
# and, at the end, the new tokens' own. Query `i` of `n` belongs to the token at position `length - n + i`. A prompt
# has `n = length`; a single new token has `n = 1`; and a prompt that comes in pieces is between the two (lesson 10).

# %%
draw.masks(
    {
        "a prompt of 5": (5, 5, 5),
        "one new token behind 5": (1, 6, 9),
        "3 new tokens behind 4, 2 slots free": (3, 7, 9),
    }
)

# %% [markdown]
# Green is seen, gray is hidden, and hatched slots hold *leftovers*: whatever a former request wrote there, or memory
# that nobody has written yet, perhaps NaN (and 0 times NaN is NaN). The picture in the middle needs no mask at all,
# only the right number of keys. The one on the right is the general case: anchor the triangle at the *last* key, not at
# the first.
#
# For example, a lone query over a cache with one token gets that token's value; and with four queries over four
# tokens, the example of exercise 1 holds here too.


# %% tags=["exercise"]
def cached_attention(q, k, v, length, *, scale):
    """Attention of a request's newest tokens to all its tokens.

    q: [queries, heads, d]; k, v: [capacity, kv_heads, d], of which the first `length` slots are
    filled, the last `queries` of these with the queries' own tokens; what the others hold never
    matters. Heads share KV heads as in `attention`. Returns [queries, heads, d].
    """
    # SOLUTION: as `attention`, over the filled slots, with the queries at positions
    #   length - queries, ..., length - 1
    k, v = k[:length], v[:length]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    position = torch.arange(length - len(q), length, device=q.device)
    later = torch.arange(length, device=q.device) > position[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
    # END


# %%
check(cached_attention)

# %% [markdown]
# With both, generation has two kinds of steps. **Prefill** runs the whole prompt through the layers at once and fills
# the caches. Every **decode** step after it runs *one* token through the layers. The positions go on where the cache
# ends: a new token that was turned as if it stood at position 0 would be the classic mistake.

# %%
put = yours(append, adapters.append)
attend_cached = yours(cached_attention, adapters.cached_attention)


def forward_cached(new_ids, caches):
    """Logits [vocab] of the token after `new_ids`, which come behind the tokens that are in the caches."""
    start = caches[0].length
    x = model.embedding[new_ids] * config.embedding_scale
    for layer, cache in zip(model.layers, caches, strict=True):
        q, k, v = queries_keys_values(x, layer, torch.arange(start, start + len(new_ids)))
        put(cache, k, v)
        attended = attend_cached(q, cache.k, cache.v, cache.length, scale=scale)
        x = rest_of_layer(x, attended, layer)
    return logits_of(x[-1:])[0]


def generate_cached(ids, count):
    caches = [Cache(capacity=len(ids) + count) for _ in model.layers]
    new = ids  # prefill: all of them
    for _ in range(count):
        new = forward_cached(new, caches).argmax()[None]  # decode: the newest
        ids = torch.cat((ids, new))
    return ids


cached = generate_cached(ids, 12)
print(tokenizer.decode(cached.tolist()))
print("the same tokens as without a cache:", cached.tolist() == naive.tolist())

# %% [markdown]
# ### What it saves
#
# First the operations, which can be counted exactly: torch counts every matrix product as it runs. The curves are
# formulas. In layers and head, a token costs as many multiply-adds as there are numbers; in attention, each query costs
# `2 x heads x head_dim` for each key it is compared with, in each layer. (Yours counts less if it skips the hidden keys
# or sums without a matrix product.)


# %%
def multiply_adds(function, *given) -> int:
    """Counted by torch as it runs: every matrix product, 2 operations a multiply-add."""
    counter = FlopCounterMode(display=False)
    with counter:
        function(*given)
    return counter.get_total_flops() // 2


in_head = config.vocab_size * config.hidden_size
in_norms = config.hidden_size * (2 * config.num_layers + 1)
in_layers = model.num_parameters - in_head - in_norms
a_key = 2 * config.num_heads * config.head_dim * config.num_layers


def work(tokens, keys):
    """Multiply-adds: `tokens` tokens through the layers, each compared with `keys` keys."""
    return tokens * (in_layers + keys * a_key) + in_head


def filled(length):
    """Caches in which `length` random tokens' keys stand already."""
    caches = [Cache(length + 1) for _ in model.layers]
    shape = (2, length, config.num_kv_heads, config.head_dim)
    for cache in caches:
        put(cache, *torch.randn(shape, dtype=torch.float64))
    return caches


_ = torch.manual_seed(0)
LENGTHS = (25, 50, 100, 200, 400)
some_ids = torch.randint(10, config.vocab_size, (400,))
counted = {n: multiply_adds(forward, some_ids[:n]) for n in LENGTHS}
counted_cached = {
    n: multiply_adds(forward_cached, some_ids[:1], filled(n - 1)) for n in LENGTHS
}
times_less = {n: counted[n] / counted_cached[n] for n in LENGTHS}
print("length   without a cache      with one   times")
for n in LENGTHS:
    print(f"{n:6}  {counted[n]:16,}  {counted_cached[n]:12,}  {times_less[n]:6.1f}")
formula = [counted[n] == work(n, n) and counted_cached[n] == work(1, n) for n in LENGTHS]
print("every count is the formula's:", all(formula))

# %%
compare("work at token 100", unit="times", prediction=guess_times, measured=times_less[100])

# %%
steps = torch.arange(1, 513)
draw.work(
    steps,
    {"without a cache": work(steps, steps), "with a cache": work(1, steps)},
    {"without a cache": counted, "with a cache": counted_cached},
)

# %% [markdown]
# Without a cache the next token costs more the longer the text is, and all of them together grow with its *square*.
# With one, a token costs almost the same from first to last. (The ratio is below 100 at token 100, because both run
# the head once.)
#
# **Predict first.** Now the time. This machine's limits are measured as in lesson 00: bytes read a second, operations
# a second. How long does token 400 take in each way, in milliseconds? And will the ratio of the *times* be that of
# the operations?

# %% tags=["exercise"]
guess_ms = 60.0  # PREDICT: milliseconds of token 400 without a cache, in 64-bit numbers
guess_cached_ms = 2.0  # PREDICT: the same with a cache

# %% tags=["nbval-ignore-output"] uncompared="times"
limits = roofline.limits("cpu", torch.float64, model.nbytes)
gigabytes, billions = limits.bytes_per_s / 1e9, limits.operations_per_s / 1e9
print(f"this machine: {gigabytes:.1f} GB/s, {billions:.1f} billion operations/s")


def milliseconds(function, *given, repeat=3) -> float:
    """The fastest of several calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function(*given)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def one_more(caches):
    """The same step every time: the new token is taken out again."""
    forward_cached(some_ids[:1], caches)
    for cache in caches:
        cache.length -= 1


times = {n: milliseconds(forward, some_ids[:n]) for n in LENGTHS}
times_cached = {n: milliseconds(one_more, filled(n - 1)) for n in LENGTHS}
keys = 400 * sizing.kv_bytes_per_token(config, "float64")
compute_ms = 2e3 * counted[400] / limits.operations_per_s
reading_ms = 1e3 * (model.nbytes + keys) / limits.bytes_per_s
found = {"floor": compute_ms, "measured": times[400]}
compare("token 400 without a cache", unit="ms", prediction=guess_ms, **found)
found = {"floor": reading_ms, "measured": times_cached[400]}
compare("token 400 with a cache", unit="ms", prediction=guess_cached_ms, **found)
times_faster = times[400] / times_cached[400]
print(f"{times_less[400]:.0f} times less operations, {times_faster:.0f} times less time")
draw.times({"without a cache": times, "with a cache": times_cached}, floor=reading_ms)

# %% [markdown]
# The gain in time is much smaller than the gain in operations, and that is the most important sentence of this
# lesson. The naive step has much to compute for every weight it reads: it is bound by **operations**. The cached step
# reads the same weights and does one multiply-add with each: it is bound by **bytes**, and in so small a model by the
# starting of some hundred little operations. Saving operations made them cheap enough to stop mattering.

# %% [markdown]
# ## 5 · Inside the engine
#
# Your cached attention can serve real requests. The engine keeps many requests' keys in scattered blocks of 16 slots;
# `adapters.gathered` collects each request's blocks into one piece and calls your function, for prompts and for
# single tokens alike. The last block is rarely full: there are your leftovers.
#
# Four prompts at once, against transformers' `generate`. One text that comes out right proves less than it seems: a
# mask that is one position too wide leaves some of these four as they are. Put it into yours and see which.

# %%
PROMPTS = [
    "Fenwick lies on the island of",
    "Once upon a time",
    "Sailors steer by Thamir in",
    "The Tallow Isles are",
]
several = SamplingParams(max_tokens=12, temperature=0)
with using(**adapters.gathered(cached_attention)) as used:
    completions = llm.generate(PROMPTS, several)
for completion in completions:
    given = torch.tensor([completion.prompt_token_ids])
    with torch.inference_mode():
        both = theirs.generate(given, max_new_tokens=12, do_sample=False)[0]
    same = both[given.shape[1] :].tolist() == completion.token_ids
    print(
        "as transformers:" if same else "NOT AS TRANSFORMERS:", tokenizer.decode(both.tolist())
    )
print(used.calls)

# %% [markdown]
# Here is the engine's own, the specification that its faster versions are tested against. Compare it with yours: it
# has rows of requests, block tables in place of contiguous memory, and two options that some models need (a *window*:
# only the last so many keys are seen; a *soft cap* on the scores). The formula is the one you wrote.

# %%
# ENGINE: minillm.ops.reference:decode_attention
# ENGINE: minillm.ops.reference:visible
# ENGINE: minillm.ops.reference:_attend

# %% [markdown]
# ## 6 · What the cache costs
#
# Memory, for every token of every request, for as long as the request lives:
#
# $$\text{bytes a token} = 2 \times \text{layers} \times \text{KV heads} \times \text{head\_dim} \times
# \text{bytes of a number}$$
#
# The 2 is for key and value. **Predict first**, for the engine of this notebook: 6 layers, 1 KV head of 64 numbers, 8
# bytes each.

# %% tags=["exercise"]
guess_bytes = 2 * 6 * 1 * 64 * 8  # PREDICT: bytes that one token keeps in this engine

# %%
caches = llm.engine.executor.runner.caches
slots = llm.stats()["blocks"] * llm.engine.config.block_size
taken = sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
bytes_each = {"prediction": guess_bytes, "measured": taken / slots}
compare("one token's keys and values", unit="bytes", **bytes_each)

# %% [markdown]
# Only the number of *KV* heads counts. That is what multi-query and grouped-query attention are for. Below, the bars
# are models as they are; the outlines, what each would keep if every query head had keys of its own.


# %%
def llama(layers, hidden, inner, heads, kv_heads, vocab, longest) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_model_len=longest,
    )


SHAPES = {
    "Gemma 2B": PRESETS["gemma-2b"],
    "Llama 3.1 8B": llama(32, 4096, 14336, 32, 8, 128256, 131072),
    "Llama 2 7B": llama(32, 4096, 11008, 32, 32, 32000, 4096),
    "Llama 3.1 70B": llama(80, 8192, 28672, 64, 8, 128256, 131072),
}
print("bfloat16       parameters   query/KV heads  bytes a token  4,096 tokens")
for name, shape in SHAPES.items():
    billions = sizing.parameters(shape) / 1e9
    heads = f"{shape.num_heads} / {shape.num_kv_heads}"
    a_token, request = sizing.kv_bytes_per_token(shape), sizing.kv_bytes(shape, 4096)
    print(f"{name:13} {billions:9.2f} B  {heads:>15}  {a_token:13,}  {request / 1e9:9.2f} GB")


# %%
def kept(shape: ModelConfig) -> tuple[float, float]:
    """kB a token, as it is and with a KV head for every query head."""
    a_token = sizing.kv_bytes_per_token(shape) / 1e3
    return a_token, a_token * shape.num_heads / shape.num_kv_heads


draw.kept_per_token({name: kept(shape) for name, shape in SHAPES.items()})

# %% [markdown]
# Llama 2 7B is the smaller model beside Llama 3.1 8B, and keeps four times as much for every token. Sharing keys is
# no free lunch: heads that read the same keys can tell less apart, and multi-query models gave some quality up for it
# (Shazeer 2019; Ainslie et al. 2023, who found groups to be nearly as good as all heads).
#
# ### How many requests fit
#
# Two rules of thumb, as NVIDIA teaches them, give most of the answer: **2 bytes a parameter** for the weights in
# bfloat16, and the formula above for the cache. What is left of the GPU after the weights is divided among the
# requests. An engine does not take the last byte; a usual *utilization* is 0.9.
#
# **Predict first**, without the machine: Llama 3.1 8B on a GPU of 80 GB, requests of 4,096 tokens.

# %% tags=["exercise"]
guess_requests = 100  # PREDICT: requests of 4,096 tokens that fit beside Llama 3.1 8B in 80 GB


# %% [markdown]
# ### Exercise 4: requests that fit
#
# For example, a model of 70.6 billion parameters on a GPU of 80 GB: its weights take 141 GB, so 0 requests fit (and
# not a negative number of them).


# %% tags=["exercise"]
def requests_that_fit(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    """How many requests of `context` tokens a GPU holds beside the weights: 0, 1, 2, ...

    config has num_layers, num_heads, num_kv_heads and head_dim; parameters: how many; gpu_bytes:
    all of its memory, of which the share `utilization` may be used; bytes_each: of a number, in
    the weights and in the cache.
    """
    # SOLUTION: what may be used, less the weights, divided by one request's keys and values
    a_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    left = gpu_bytes * utilization - parameters * bytes_each
    return max(0, int(left // (context * a_token)))
    # END


# %%
check(requests_that_fit)

# %% [markdown]
# The engine's calculator, `minillm.model.sizing`, does the same with two refinements: a request takes whole blocks, and
# a layer with a window keeps no more than its window. You can use it for any model that has a `config.json`.

# %%
eight = SHAPES["Llama 3.1 8B"]


def calculator(config, parameters, gpu_bytes, context):
    return sizing.fit(config, gpu_bytes, context).requests


count = yours(requests_that_fit, calculator)
found = count(eight, sizing.parameters(eight), 80e9, 4096)
compare("requests of 4,096 tokens", unit="requests", prediction=guess_requests, measured=found)
print()
print(sizing.fit(eight, gpu_bytes=80e9, context=4096))

# %%
GPUS = {"80 GB": 80e9, "141 GB": 141e9}
CONTEXTS = [1 << power for power in range(9, 18)]


def requests_by_context(shape: ModelConfig, gpu_bytes: float) -> dict[int, int]:
    lengths = [context for context in CONTEXTS if context <= shape.max_model_len]
    return {context: sizing.fit(shape, gpu_bytes, context).requests for context in lengths}


pairs = [(name, gpu) for name in SHAPES for gpu in GPUS]
draw.gpus(
    {f"{name}, {gpu}": sizing.fit(SHAPES[name], GPUS[gpu], 4096) for name, gpu in pairs},
    {
        f"{name}, {gpu}": requests_by_context(SHAPES[name], GPUS[gpu])
        for name, gpu in pairs[:6]
    },
)

# %%
print(f"memory: {GPUS['141 GB'] / GPUS['80 GB']:.2f} times as much")
for name, shape in list(SHAPES.items())[:3]:
    small, large = (sizing.fit(shape, nbytes, 4096).requests for nbytes in GPUS.values())
    print(f"{name:13} {small:4} and {large:4} requests, {large / small:.2f} times as many")

# %% [markdown]
# The larger GPU holds the weights once, as the smaller one does: the heavier the model, the more its extra memory is
# worth. And twice the context is half the users, because the calculator reserves room for all the tokens that a request
# *may* reach. Most never do. That waste is what lesson 09 does away with.

# %% [markdown]
# ## 7 · Prefill and decode
#
# With the cache, one model has two workloads. Prefill runs hundreds of tokens through each weight it reads; decode
# runs one for each request. Operations a byte, the **arithmetic intensity**, tell what bounds them. Reading weights
# is shared by all requests of a batch; reading keys is not: each request reads its own. Gemma 2B in bfloat16, by
# arithmetic alone:

# %%
gemma = PRESETS["gemma-2b"]
gemma_weights, gemma_token = sizing.weight_bytes(gemma), sizing.kv_bytes_per_token(gemma)
gemma_key = 2 * gemma.num_heads * gemma.head_dim * gemma.num_layers  # multiply-adds a key


def decode_intensity(requests, context):
    """Operations a byte of one decode step."""
    operations = 2 * requests * (sizing.parameters(gemma) + context * gemma_key)
    return operations / (gemma_weights + requests * context * gemma_token)


print("requests at once        1      16     256    4096")
for context in (0, 1024, 8192):
    row = [f"{decode_intensity(many, context):8.1f}" for many in (1, 16, 256, 4096)]
    print(f"context of {context:5}  {''.join(row)}   operations a byte")
alone = 2 * gemma_key / gemma_token
print(f"a key alone: {alone:.0f} operations a byte, however many requests")

# %%
record = records.read("h200/ceiling-h200")
products = {(row["rows"], row["dtype"]): row["step_ms"] for row in record["matrix_products"]}
h200_bytes = record["copy_TB_per_s"] * 1e12
h200_operations = 2 * 2048 * sizing.parameters(gemma) / (products[2048, "bf16"] / 1e3)
ridge = h200_operations / h200_bytes
print(f"an H200: {h200_bytes / 1e12:.2f} TB/s, {h200_operations / 1e12:.0f} T operations/s")
print(f"so its ridge is at {ridge:.0f} operations a byte")

REQUESTS = [1 << power for power in range(13)]
curves = {
    f"decode, {context:,} tokens of context each": [
        decode_intensity(requests, context) for requests in REQUESTS
    ]
    for context in (0, 1024, 8192)
}
draw.intensities(REQUESTS, curves, ridge, alone)

# %% [markdown]
# (The ridge is lower than lesson 00's, since Gemma's own matrices take the place of large square ones.) Short contexts
# climb with the batch until arithmetic is the limit, as lesson 00 found. Long ones bend: soon the step
# reads more keys than weights, and every further request brings its own. No batch gets a decode of 8,192 tokens of
# context near the ridge. What bends the curve *up* is fewer KV heads: here 8 query heads use each key that is read,
# so a key gives 8 operations a byte. With all heads (MHA) it would be 1.
#
# **Predict first**, on this machine and its model: how many tokens a second goes a prompt of 512 tokens through, how
# many come out of a decode of one request, and of 8?

# %% tags=["exercise"]
guess_prefill = 10000  # PREDICT: tokens a second of a prefill of 512 tokens
guess_decode = 500  # PREDICT: tokens a second of one request's decode
guess_decode_8 = 2500  # PREDICT: tokens a second of 8 requests' decode together

# %% tags=["nbval-ignore-output"] uncompared="times, and the model of the machine's tier"
llm.close()
here = tier()
with LLM(here.model, run_ahead=0, enable_prefix_caching=False, **here.options) as engine:
    served = engine.engine.model
    limits = roofline.limits(here.device, served.dtype, served.nbytes)
    points = [
        roofline.prefill(engine, 512),
        roofline.decode(engine, 1),
        roofline.decode(engine, 8),
    ]
    far = roofline.decode(engine, 8, context=1024)
print(here.label)
for point, guess in zip(points, (guess_prefill, guess_decode, guess_decode_8), strict=True):
    best, got = point.tokens / point.floor(limits), point.tokens / point.seconds
    compare(point.name, unit="tokens/s", prediction=guess, floor=best, measured=got)
print("a step of 8 requests")
for behind, point in ((64, points[2]), (1024, far)):
    keys = (point.bytes - served.nbytes) / 1e6
    beside = f"{keys:.0f} MB of keys beside {served.nbytes / 1e6:,.0f} MB of weights"
    print(f"behind {behind:5,} tokens: {point.seconds * 1e3:6.2f} ms, {beside}")

# %% [markdown]
# A token of a prompt is many times cheaper than a token of an answer. And a decode step takes the longer, the more keys
# it reads beside the weights, although its matrices do the same work for its eight tokens. How far all this is from the
# floor on a CPU is lesson 00's finding: so small a model spends most of a decode step on starting operations, not on
# bytes. On a GPU with a real model the bytes are what counts.
#
# ## Recap
#
# * A decoder is an embedding, layers that add to it, and a head. Attention is the only part where tokens meet.
# * Keys and values of a token never change, because no token sees a later one. Keep them, and a step runs one token
#   through the layers instead of all.
# * Query `i` of `n` stands at position `length - n + i`; what lies beyond `length` does not exist.
# * `2 x layers x KV heads x head_dim x bytes` a token, `2` bytes a parameter: `minillm.model.sizing` does the sums.
# * Prefill is bound by operations, decode by bytes. Batching shares the weights, never the keys.
#
# **What got worse:** memory. Generation without a cache needs none between two steps; now every request holds on to
# some, and memory, not speed, decides how many can be served. Room is reserved for the longest answer there might be,
# and most are shorter. Decode, made so cheap, leaves most of a chip's arithmetic idle. And heads that share keys buy
# memory with a little quality.
#
# **Further reading:** Vaswani et al. 2017, *Attention Is All You Need*; Su et al. 2021, *RoFormer* (rotary
# embeddings); Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need* (MQA); Ainslie et al. 2023,
# *GQA*; Pope et al. 2022, *Efficiently Scaling Transformer Inference*; NVIDIA 2023, *Mastering LLM Techniques:
# Inference Optimization* (the rules of thumb). Next: lesson 03 writes the norm, the rotation and the gate as GPU
# kernels, lesson 04 this attention.
