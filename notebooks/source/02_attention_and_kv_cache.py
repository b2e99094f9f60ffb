# %% [markdown]
# # 02 · Attention and the KV cache
#
# After this lesson you can follow a token through a whole decoder, with its real weights, and reproduce the engine's
# answer; write the attention that current models use; explain what a KV cache saves and costs; write attention that
# reads a cache, and run it inside the engine; and estimate, before you rent a GPU, how many requests fit on it.
#
# **90 minutes. Needs:** a CPU, and lessons 00 and 01. You should know what a matrix product and a softmax are. The
# model is `tiny-gemma`, with 6 layers of the same kind as Gemma 2B's 18. Sections 9 to 13 are optional. On a GPU,
# section 13 measures Gemma 2B.

# %%
import torch
import transformers

from minillm import LLM, SamplingParams, using
from minillm.advice import sizing
from minillm.bench import records, roofline
from minillm.course import NotSolvedYet, check, compare, describe, solved, tier, yours
from minillm.course.lesson_02 import pictures as draw
from minillm.course.lesson_02 import probes
from minillm.course.shared import adapters
from minillm.course.shared.shapes import SHAPES, print_shapes
from minillm.model.loader import EMBEDDED
from minillm.ops.reference import gated_activation, linear, lm_head, rms_norm, rotary_embedding

llm = LLM(device="cpu", dtype="float64", enable_prefix_caching=False, num_blocks=512)
model, config, tokenizer = llm.engine.model, llm.model_config, llm.tokenizer
print(f"{config.num_layers} layers, {model.num_parameters:,} parameters")

# %% [markdown]
# The engine computes in float64 here (the norms in float32, as in transformers). That is slow, but rounding errors are
# tiny: a difference in the first digits means a mistake. Prefix caching (lesson 09) is off, so every prompt is computed
# from its first token.
#
# ## 1 · From token ids to queries, keys and values · 9 min
#
# `tiny-gemma` was trained on texts about a small invented world of islands and towns. Fenwick is one of the towns:

# %%
prompt = "Fenwick lies on the island of"
greedy = SamplingParams(max_tokens=1, temperature=0)
print(prompt + llm.generate(prompt, greedy)[0].text)

# %% [markdown]
# How can a stack of matrices know that? In this lesson you follow each of its steps, from the token ids to the
# *logits*, one score for every token of the vocabulary, which a softmax turns into probabilities. The whole path:

# %%
draw.decoder(config, tokens=9)
describe("""A decoder. Token ids become an embedding, which starts a horizontal line: the residual stream. In each
    layer two branches leave it and are added back: norm, q k v, rotary, attention and output matrix; then norm and
    gated MLP. At the end, a norm and the output head give the logits.""")

# %% [markdown]
# The blue line is the *residual stream*: one vector of 256 numbers for every token. No layer overwrites this vector:
# each part reads it, computes something, and *adds* the result. The *output head* at the end has nothing to do with the
# attention heads that come later. An *MLP* is a multi-layer perceptron: two matrix products with an activation function
# between them.
#
# First, the prompt becomes token ids (lesson 01). `<bos>` marks the beginning. The town's name is split into three
# tokens.

# %%
ids = torch.tensor(tokenizer.encode(prompt))
pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in ids.tolist()]
print(dict(zip(pieces, ids.tolist(), strict=True)))

# %% [markdown]
# **Embedding.** Each token of the vocabulary has a row of a matrix: 256 numbers, found by training. Gemma models
# multiply each row by the square root of its length, here $\sqrt{256} = 16$. Tokens that are used in similar ways have
# rows that point in similar directions: the rows closest in direction to that of ` Bramble`, an island, are those of
# other islands.

# %%
print(", ".join(probes.neighbors(model, tokenizer, " Bramble")))
x = model.embedding[ids] * config.embedding_scale
print(f"x: {list(x.shape)}")

# %% [markdown]
# **Norm** (you wrote it in lesson 00). Before a part reads the residual stream, each token's vector is scaled to a root
# mean square of 1, no matter how much has been added to it so far, and multiplied by a learned weight.
#
# **Queries, keys and values.** One matrix turns each token's vector into the three things that attention needs. A
# *query* says what this token is looking for. A *key* says what it can be found by. A *value* is what it passes on
# when it is found. `tiny-gemma` computes 4 queries of 64 numbers for each token, one for each of its 4 *heads*, but
# only one key and one value; section 2 explains how heads share them.

# %%
layer, eps = model.layers[0], config.rms_norm_eps
sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

normed = rms_norm(x, layer.attention_norm, eps)
qkv = linear(normed, layer.qkv).unflatten(1, (-1, config.head_dim))
q, k, v = qkv.split(sizes, dim=1)
print(f"q {list(q.shape)}  k {list(k.shape)}  v {list(v.shape)}   [tokens, heads, head_dim]")

# %% [markdown]
# **Rotary embedding.** So far, nothing tells the model where a token is in the text. So every query and every key is
# rotated. Its numbers form 32 pairs, `x[i]` with `x[i + 32]`. Each pair is treated as a point in a plane and rotated by
# an angle proportional to the token's position: fast for pair 0, slowly for pair 31. In the dot product of a
# rotated query and a rotated key, only the *difference* of their angles remains: of the two positions, only their
# distance matters. In the listing, `roll` fetches the other number of each pair.

# %%
# ENGINE: minillm.ops.reference:rotary_embedding

# %%
# One query and one key, at any two positions
score = probes.rotated_score(model, q[8, 0], k[3, 0])
for at in ((5, 2), (105, 102), (105, 2)):
    print(f"query at {at[0]:3}, key at {at[1]:3}, {at[0] - at[1]:3} apart: {score(*at):8.4f}")

draw.rotations(config, (0, 3, 6), scores=[score(distance, 0) for distance in range(200)])
describe("""Three planes with arrows at positions 0 to 4: of these, pair 0 turns fastest, pair 6 slowest. A curve: the
    dot product of one query and one key falls, with ups and downs, as the distance between them grows to 200.""")

# %% [markdown]
# The arrows show three of the pairs at positions 0 to 4. The curve shows the dot product of one query and one key as
# their distance grows: these two match best when they are close. Remember for later that a key is rotated only once, by
# *its own* position.
#
# ## 2 · Attention · 24 min
#
# ### One head, three tokens
#
# In attention, each token gathers information from other tokens. Take three tokens, one head, and vectors of only two
# numbers. The last token, number 2, looks for something, in three steps. (1) Take the dot product of its query with
# every key, and multiply each by a fixed *scale*: these are the **scores**. (2) A softmax turns the scores into
# **weights**, which are positive and sum to 1. (3) The output is the **weighted sum** of the values.

# %%
toy_q = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
toy_k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.5]])
toy_v = torch.tensor([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0]])
toy_scale = 2**-0.5


def text(numbers: torch.Tensor) -> str:
    return "  ".join(f"{number:5.2f}" for number in numbers.tolist())


scores = toy_scale * (toy_k @ toy_q[2])
weights = scores.softmax(0)
print("scores ", text(scores))
print("weights", text(weights), "  their sum:", round(weights.sum().item(), 6))
print("output ", text(weights @ toy_v))

# %% [markdown]
# Check some of these by hand. The query `[0, 3]` matches the key `[0, 1]` best: their dot product is 3, and 3 times the
# scale $1 / \sqrt{2}$ is 2.12. So token 1 gets the largest weight, and the output is closest to its value, `[0, 10]`.
# In general the scale is $1 / \sqrt{\text{head\_dim}}$, because dot products of longer vectors tend to be larger, and
# large scores would give nearly all of the weight to one key.
#
# ### The causal mask
#
# A model is trained to predict the next token at every position of a text at once. If a token could see later ones, it
# would only copy the answer. So token $i$ sees the tokens $j \le i$: all earlier ones and itself. As a formula, with
# $o_i$ for the output of token $i$:
#
# $$s_{ij} = \text{scale} \cdot q_i \cdot k_j, \qquad w_{ij} = \frac{e^{s_{ij}}}{\sum_{l \le i} e^{s_{il}}}, \qquad
# o_i = \sum_{j \le i} w_{ij}\, v_j$$

# %%
for i in range(3):
    visible_k, visible_v = toy_k[: i + 1], toy_v[: i + 1]
    weights = (toy_scale * (visible_k @ toy_q[i])).softmax(0)
    print(f"token {i}:  output {text(weights @ visible_v)}   weights {text(weights)}")

# %%
draw.masks({"9 tokens: which keys each query sees": (9, 9, 9)})
describe("""A square of 9 queries by 9 keys. Each query sees the keys up to its own position, the diagonal included;
    all later keys are hidden.""")

# %% [markdown]
# Token 0 sees only itself, so its output is its own value. Real code does not loop over the tokens. It computes all
# scores at once, and gives each hidden key a weight of *exactly* 0, no matter how low the other scores are.
#
# ### Several heads, own or shared keys and values
#
# One softmax gives one mixture of values. A model wants several: one head may look for a name, another for the kind of
# thing that is asked for. So every **head** has its own queries, keys and values, and does the three steps on its own.
#
# Heads may also share keys and values: then several query heads read the same **KV head**. Here are two query heads and
# two KV heads, for the last of the three tokens. First each query head has its own KV head, then both read KV head 0:

# %%
heads_q = torch.stack((toy_q, toy_q.flip(1)), dim=1)  # [tokens, heads, d]
heads_k = torch.stack((toy_k, toy_k.roll(1, 0)), dim=1)
heads_v = torch.stack((toy_v, -toy_v), dim=1)


def last_token(head: int, kv_head: int) -> str:
    weights = (toy_scale * (heads_k[:, kv_head] @ heads_q[2, head])).softmax(0)
    return f"weights {text(weights)}   output {text(weights @ heads_v[:, kv_head])}"


for head, kv_head in ((0, 0), (1, 1), (0, 0), (1, 0)):
    print(f"head {head} with KV head {kv_head}:  {last_token(head, kv_head)}")

draw.shared_heads(8, {"multi-head (MHA)": 8, "grouped-query (GQA)": 2, "multi-query (MQA)": 1})
describe("""Eight query heads, three times. In multi-head attention each has a KV head of its own; in grouped-query
    attention, here with two KV heads, heads 0 to 3 share the first and heads 4 to 7 the second; in multi-query
    attention all eight share one.""")

# %% [markdown]
# *Multi-head attention* is the original: as many KV heads as query heads. In *multi-query attention* all heads share
# one (`tiny-gemma` and Gemma 2B). *Grouped-query attention* is in between, and many current models use it: with 8
# heads and 2 KV heads, heads 0 to 3 read KV head 0, and heads 4 to 7 read KV head 1. Section 8 shows the reason for
# sharing. The formula is the same for all three.
#
# ### Exercise 1: attention
#
# **Exercise 1 (15 minutes).** Write attention for a whole sequence, with any number of heads and KV heads. Use
# `torch.softmax`, `torch.einsum`, `repeat_interleave` or loops, as you like.
#
# For example, a single token gets its own value. And if the query of the last of four tokens matches the key of token 1
# (a score of 30, the others 0), the last token gets nearly the value of token 1.


# %% tags=["exercise"]
def attention(q, k, v, *, scale):
    """Causal attention within a sequence.

    q: [tokens, heads, d]; k, v: [tokens, kv_heads, d]. With 4 heads and 2 KV heads, heads 0 and
    1 read KV head 0, and heads 2 and 3 read KV head 1. A hidden key's weight is exactly 0. All
    three tensors have the same dtype: float64, float32 or bfloat16. Returns [tokens, heads, d]
    in that dtype, and leaves its arguments unchanged.
    """
    # SOLUTION: scores, weights and weighted sum, for every token and every head
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
# ## 3 · The whole model · 8 min
#
# The rest of a layer is short. An output matrix mixes the heads, and the result is added to the residual stream. Then
# comes the *gated MLP*, which works on each token separately. One matrix computes two parts of the same size. The
# first, the gate, goes through an activation function and scales the second. Another matrix brings the result back to
# 256 numbers, which are also added.
#
# `yours(attention, ...)` is your function, or the engine's own while yours is a stub, so the notebook runs either way.

# %%
attend = yours(attention, adapters.attention)


def whose(function):
    return "yours" if solved(function) else "the engine's, until you solve the exercise"


scale = config.head_dim**-0.5


def queries_keys_values(x, layer, positions):
    """[tokens, hidden] -> q, k, v of one layer, with q and k rotated to their positions."""
    normed = rms_norm(x, layer.attention_norm, eps)
    q, k, v = linear(normed, layer.qkv).unflatten(1, (-1, config.head_dim)).split(sizes, dim=1)
    return *rotary_embedding(q, k, model.rotary[positions]), v


def rest_of_layer(x, attended, layer):
    """Add the output of attention, [tokens, heads, d], then the output of the MLP."""
    x = x + linear(attended.flatten(1), layer.attention_out)
    normed = rms_norm(x, layer.mlp_norm, eps)
    inner = gated_activation(linear(normed, layer.gate_up), config.activation)
    return x + linear(inner, layer.down)


def logits_of(x):
    """A score for every token of the vocabulary: [tokens, hidden] -> [tokens, vocab]."""
    return lm_head(rms_norm(x, model.final_norm, eps), model.head)


def walk(ids):
    """The residual stream [tokens, hidden] after each layer; the first is the embedding."""
    x = model.embedding[ids] * config.embedding_scale
    found = [x]
    for layer in model.layers:
        q, k, v = queries_keys_values(x, layer, torch.arange(len(ids)))
        x = rest_of_layer(x, attend(q, k, v, scale=scale), layer)
        found.append(x)
    return found


# %% [markdown]
# The output head is the embedding matrix again (*tied weights*): a token scores high when the final vector points in
# the direction of its row. You can apply the final norm and the output head after *every* layer, and see what the model
# would say at that point:

# %%
(bramble,) = tokenizer.encode(" Bramble", add_special_tokens=False)


def verdict(x):
    """The most likely next token, and the probability of the right one."""
    probabilities = logits_of(x[-1:]).softmax(-1)[0]
    best = tokenizer.decode([probabilities.argmax().item()])
    return f"{best!r:11}  {probabilities[bramble]:.4f}"


print("after     most likely  P(' Bramble')")
for number, stream in enumerate(walk(ids)[1:]):
    print(f"layer {number}   {verdict(stream)}")

# %% [markdown]
# After layers 0 and 1, the model just repeats the last token, ` of`. After layer 2 the island is there. (Section 9,
# which is optional, looks for where the model reads the town's name.)
#
# Does the engine compute the same thing? Does transformers, an entirely different program?

# %%
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
by_hand = logits_of(walk(ids)[-1][-1:])[0]
theirs = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float64)
with torch.inference_mode():
    their_logits = theirs(ids[None]).logits[0, -1]
for program, logits in (("this notebook", by_hand), ("transformers", their_logits)):
    print(f"{program}:{tokenizer.decode([logits.argmax().item()])}")
off = (by_hand - their_logits).abs().max().item()
print("all logits equal to nine decimals:", off < 1e-9 or f"no, off by {off:.0e}")
print("attention:", whose(attention))

# %% [markdown]
# (An attention that computes in float32 inside is right, too: its logits are off by less than 1e-5.)
#
# Now run your attention inside the engine. The engine's own serves many requests from a paged cache (lesson 09), so an
# adapter gathers each prompt's keys and values into one tensor and calls your function once per layer.

# %%
with using(**adapters.gathered_prompts(attention)) as used:
    answer = llm.generate(prompt, greedy)[0].text
print(prompt + answer)
print(f"attention: {whose(attention)}; calls of yours: {used.calls['prefill_attention']}")

# %% [markdown]
# ## 4 · One token at a time · 4 min
#
# The model predicts one token. For the next one, append it and start again:


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
# This works, but it is wasteful. Each step computes everything about every token again, although the earlier tokens
# are the same as in the step before and cannot see the new one. Even in the last layer, their queries, keys and values
# come out the same every time:


# %%
def last_layer(ids):
    """The queries, keys and values [tokens, heads, head_dim] of the last layer."""
    return queries_keys_values(walk(ids)[-2], model.layers[-1], torch.arange(len(ids)))


for name, before, now in zip("qkv", last_layer(ids[:8]), last_layer(ids), strict=True):
    same = torch.allclose(before, now[:8], rtol=0, atol=1e-9)
    print(f"{name} of the first 8 tokens, in a text of 8 and in one of 9: equal: {same}")

# %% [markdown]
# That is the effect of the causal mask: the vectors of a token depend only on the tokens up to it. And which of them
# will later tokens need? Not its query, which has been used. Not its residual stream. Only its **key** and its
# **value**, in each layer.
#
# **Predict first.** Multiplying a vector by a matrix of $n$ numbers takes $n$ multiply-adds. The layers and the output
# head of `tiny-gemma` have 5.57 million numbers. To predict the next token after 100, the naive loop runs 100 tokens
# through the layers. If the keys and values of the first 99 were kept, by what factor would the work shrink?

# %% tags=["exercise"]
guess_times = 80  # PREDICT: times as much work at token 100 without a cache

# %% [markdown]
# Section 6 measures it, once you have built a cache.
#
# ## 5 · The cache · 23 min
#
# For one request and one layer, the cache is two tensors of `capacity` *slots*, one slot per token, and a count of the
# slots that are filled.


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
# **Exercise 2 (4 minutes).** New tokens come in groups: first a whole prompt, then one at a time. Do not use
# `torch.cat`: it allocates a new tensor and copies everything. Over a request of 1,000 tokens, appended one by one,
# that copies about 500,000 keys, where 1,000 would do.
#
# For example, append one token whose key is all 7s to an empty cache of 4: slot 0 then holds the 7s, and the length is
# 1.


# %% tags=["exercise"]
def append(cache, k, v):
    """Write the keys and values of new tokens into the cache, after those that are there, in place.

    cache.k, cache.v: [capacity, kv_heads, d], of which cache.length slots are filled; the others
    may hold anything. k, v: [tokens, kv_heads, d]. They may fill the cache to its last slot. If
    they do not fit, raises ValueError and changes nothing. Writes no slots but theirs, and leaves
    k and v unchanged.
    """
    # SOLUTION: write both, and count them
    end = cache.length + len(k)
    if end > len(cache.k):
        raise ValueError(
            f"{len(k)} tokens after {cache.length} do not fit a cache of {len(cache.k)}"
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
# Now there are fewer queries than keys: `n` queries of new tokens, and `length` keys, of which the last `n` belong to
# the new tokens. Query `i` of `n` is the token at position `length - n + i`. A prompt has `n = length`. A single new
# token has `n = 1`. A prompt that is computed in chunks (lesson 10) is in between.

# %%
draw.masks(
    {
        "a prompt of 5": (5, 5, 5),
        "one new token after 5": (1, 6, 9),
        "3 new tokens after 4": (3, 7, 9),
    }
)
describe("""Three masks. A prompt of 5 tokens: a triangle. One new token after 5: it sees all 6 keys, and 3 slots are
    free. Three new tokens after 4: the first sees 5 keys, the second 6, the third 7, and 2 slots are free.""")

# %% [markdown]
# The triangle ends at the *last* key, not at the first. Hatched slots are free. In your cache they hold zeros; in the
# engine, they may hold leftovers of an earlier request. Memory that `torch.empty` allocates, which was never written,
# may even contain NaN or inf. Expect anything there. (0 × NaN and 0 × inf are NaN.)
#
# **Exercise 3 (10 minutes).** Write it. For example, a single query over a cache of one token gets that token's value.
# With four queries over four tokens, the example of exercise 1 must hold here, too.


# %% tags=["exercise"]
def cached_attention(q, k, v, length, *, scale):
    """Attention of a request's newest tokens over all its tokens.

    q: [queries, heads, d]; k, v: [capacity, kv_heads, d]. The first `length` slots are filled,
    and the last `queries` of these belong to the queries' own tokens; what the other slots hold
    never matters. Shared heads and dtypes are as in `attention`. Returns [queries, heads, d] in the
    dtype of q, and leaves its arguments unchanged.
    """
    # SOLUTION: start from your `attention`. Which keys does query i see?
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
# With these two functions, generation has two kinds of steps. **Prefill** runs the whole prompt through the layers at
# once and fills the caches. Each **decode** step then runs *one* token through the layers. Its position is the length
# of the cache. Rotating every new token as if it were at position 0 is a classic bug.

# %%
put = yours(append, adapters.append)
attend_cached = yours(cached_attention, adapters.cached_attention)


def forward_cached(new_ids, caches):
    """Logits [vocab] of the token after `new_ids`, which follow the tokens in the caches."""
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
print(f"append: {whose(append)}\ncached_attention: {whose(cached_attention)}")

# %% [markdown]
# ## 6 · What the cache saves · 6 min
#
# First, operations, which can be counted exactly: `multiply_adds` adds up every matrix product as torch runs it.


# %%
def caches_with(length):
    """One cache for each layer, filled with `length` random keys and values."""
    caches = [Cache(length + 1) for _ in model.layers]
    for cache in caches:
        put(cache, *torch.randn(2, length, *cache.k.shape[1:], dtype=torch.float64))
    return caches


_ = torch.manual_seed(0)
some_ids = torch.randint(10, config.vocab_size, (400,))
count, naive_count, cached_count = probes.multiply_adds, {}, {}
print("tokens   without a cache   with a cache   ratio")
for n in (25, 50, 100, 200, 400):
    naive_count[n] = count(forward, some_ids[:n])
    cached_count[n] = count(forward_cached, some_ids[:1], caches_with(n - 1))
    ratio = naive_count[n] / cached_count[n]
    print(f"{n:6}  {naive_count[n]:16,}  {cached_count[n]:13,}  {ratio:6.1f}")

# %%
ratio = naive_count[100] / cached_count[100]
compare("work at token 100", unit="times", prediction=guess_times, measured=ratio)

# %%
draw.work(model, {"without a cache": naive_count, "with a cache": cached_count})
describe("""Two charts of multiply-adds up to 512 tokens. For one more token, on a logarithmic axis: without a cache the
    curve climbs steadily; with a cache it is almost flat, far below. All tokens together: without a cache the curve
    bends upward; with a cache it stays close to zero.""")

# %% [markdown]
# The dots are the counts, the lines a formula: per token, as many multiply-adds as the layers' matrices have numbers;
# in attention, `2 x heads x head_dim` per query, key and layer; and the output head, once. (Functions that skip hidden
# keys do fewer: then the dots are below the lines.)
#
# Without a cache, each token costs more than the one before. In total, the work of the layers grows with the *square*
# of the length, and that of attention with its *cube*, since every step compares all queries with all keys. With a
# cache, only attention's share grows. (At token 100 the ratio is below 100 because the output head runs once either
# way.)
#
# **Predict first.** Now the time. At 400 tokens, how many milliseconds does the next token take on this machine, with
# and without a cache? Will the ratio of the times be the ratio of the operations?

# %% tags=["exercise"]
guess_ms = 60.0  # PREDICT: milliseconds at token 400 without a cache, in float64
guess_cached_ms = 2.0  # PREDICT: milliseconds at token 400 with a cache


# %% tags=["nbval-ignore-output"] uncompared="times"
def one_more(caches):
    """The same decode step every time: the new token is removed again."""
    forward_cached(some_ids[:1], caches)
    for cache in caches:
        cache.length -= 1


naive_ms = probes.milliseconds(forward, some_ids)
cached_ms = probes.milliseconds(one_more, caches_with(399), repeat=20)
floors = probes.floors_ms(model, naive_count[400])
without, cached = (guess_ms, floors[0], naive_ms), (guess_cached_ms, floors[1], cached_ms)
for name, (guess, floor, took) in (("without a cache", without), ("with a cache", cached)):
    compare(name, unit="ms", prediction=guess, floor=floor, measured=took)
fewer = naive_count[400] / cached_count[400]
print(f"with a cache: operations 1/{fewer:.0f}, time 1/{naive_ms / cached_ms:.0f}")

# %% [markdown]
# The floors come from this machine's measured rates, as in lesson 00: the time for the operations, or for the bytes of
# the weights, if that is longer. The time shrinks far less than the operations: with a cache, a step still reads every
# weight, and still starts hundreds of small operations. Section 11 (optional) breaks it down.
#
# ## 7 · Inside the engine · 3 min
#
# Your cached attention can serve real requests. The engine keeps the keys and values of many requests in scattered
# blocks of 16 slots. `adapters.gathered` copies each request's blocks into one tensor and calls your function, both for
# prompts and for single tokens. A request's last block is rarely full, so your function also gets slots beyond
# `length`. In the first run most of them still hold zeros; run the cell again, and most hold leftovers.
#
# Four prompts at once, compared with the output of `generate` in transformers. One correct text proves little. Once
# exercise 3 is solved, try it with a mask that is one position too wide in `cached_attention`, and see which of the
# four change.

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
        want = theirs.generate(given, max_new_tokens=12, do_sample=False)[0].tolist()
    got = completion.prompt_token_ids + completion.token_ids
    if got != want:
        print("NOT EQUAL. transformers:", tokenizer.decode(want))
    print("equal:" if got == want else "the engine:", tokenizer.decode(got))
print(
    f"attention: {whose(cached_attention)}; operations with one call of yours per request: {used.calls}"
)

# %% [markdown]
# ## 8 · What the cache costs · 11 min
#
# The cache takes memory for every token of every request, for as long as the request runs.
#
# **Predict first,** twice. How many bytes does one token take in the cache of this notebook's engine? The model has 6
# layers with 4 query heads and 1 KV head of 64 numbers, and a number has 8 bytes. And, as a guess: how many requests of
# 4,096 tokens does an 80 GB GPU (an A100 or H100) hold along with Llama 3.1 8B, whose weights take 16 GB?

# %% tags=["exercise"]
guess_bytes = 6000  # PREDICT: bytes of cache per token in this engine
guess_requests = 100  # PREDICT: requests of 4,096 tokens, Llama 3.1 8B, 80 GB

# %%
caches = llm.engine.executor.runner.caches
slots = llm.stats()["blocks"] * llm.engine.config.block_size
taken = sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
bytes_each = {"prediction": guess_bytes, "measured": taken / slots}
compare("one token's keys and values", unit="bytes", **bytes_each)

# %% [markdown]
# That is a key and a value, in each layer, for each KV head:
#
# $$\text{bytes per token} = 2 \times \text{layers} \times \text{KV heads} \times \text{head\_dim} \times
# \text{bytes per number}$$
#
# Only *KV* heads count. That is why query heads share them. Here are four models; in the figure, the dashed outlines
# show what each would need if every query head had its own KV head.

# %%
print_shapes(tokens=4096)
draw.kept_per_token(SHAPES)
describe("""Kilobytes of cache per token for four models, and what each would need with a KV head for every query head:
    Gemma 2B 18 instead of 147, Llama 3.1 8B 131 instead of 524, Llama 2 7B 524 either way, Llama 3.1 70B 328 instead
    of 2,621.""")

# %% [markdown]
# Llama 2 7B is smaller than Llama 3.1 8B, and needs four times as much cache per token. Sharing is not free:
# multi-query models lost some quality (Shazeer 2019), and grouped-query models came close to full multi-head attention
# (Ainslie et al. 2023).
#
# ### How many requests fit
#
# Two rules of thumb give most of the answer: **2 bytes per parameter** for the weights in bfloat16, and the formula
# above for the cache. The requests share the memory that the weights leave. An engine does not use every byte of a
# GPU; the fraction that it may use, the *utilization*, is often 0.9.
#
# ### Exercise 4: requests that fit
#
# **Exercise 4 (5 minutes).** Turn the two rules into a function. For example, the weights of a model with 70.6 billion
# parameters take 141 GB. On an 80 GB GPU, 0 requests fit (not a negative number).


# %% tags=["exercise"]
def requests_that_fit(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    """How many requests of `context` tokens a GPU holds along with the weights: 0, 1, 2, ...

    config has num_layers, num_heads, num_kv_heads and head_dim. parameters: their number.
    gpu_bytes: all of the GPU's memory, of which the fraction `utilization` may be used.
    bytes_each: bytes per number, in the weights and in the cache; 0.5 for 4-bit numbers.
    """
    # SOLUTION: whole requests only
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    left = gpu_bytes * utilization - parameters * bytes_each
    return max(0, int(left // (context * per_token)))
    # END


# %%
check(requests_that_fit)

# %% [markdown]
# The engine's calculator, `minillm.advice.sizing`, also counts in whole blocks, and knows models in which a layer keeps
# only the most recent tokens. It works for any supported model that has a `config.json`.

# %%
eight = SHAPES["Llama 3.1 8B"]
count = yours(requests_that_fit, probes.requests_that_fit)
fitting = count(eight, sizing.parameters(eight), 80e9, 4096)
who = "your function" if solved(requests_that_fit) else "the engine's calculator"
compare(f"requests, by {who}", unit="requests", prediction=guess_requests, measured=fitting)
print()
print(sizing.fit(eight, gpu_bytes=80e9, context=4096))

# %% [markdown]
# This estimate reserves room for all the tokens that a request *may* reach, so with twice the context, half as many
# requests fit. Many requests end earlier. In the serving systems that Kwon et al. (2023) measured, only 20 to 38% of
# the cache memory held tokens. Lesson 09 removes most of this waste.
#
# ## 9 · Optional: where the name is read · 5 min
#
# In section 3, the island appeared after layer 2. Where does the last token learn which town is meant? You will hide
# the three tokens of the town's name from the last token, in one layer at a time. All other tokens still see them.
#
# **Predict first:** in how many of the six layers does hiding them change the model's answer?

# %% tags=["exercise"]
guess_layers = 2  # PREDICT: layers in which the last token must see the town's name

# %% [markdown]
# First, what does attention do in layer 2? Here is a trick to see its weights: pass the rows of the identity matrix as
# values, and the output *is* the weights.

# %%
q2, k2, _ = queries_keys_values(walk(ids)[2], model.layers[2], torch.arange(len(ids)))
one_hot = torch.eye(len(ids), config.head_dim, dtype=torch.float64)[:, None]
weights = attend(q2, k2, one_hot, scale=scale)[-1, :, : len(ids)].numpy()  # [heads, keys]
draw.attention_weights(pieces, weights, "layer 2: where the last token, ' of', looks")
describe("""A table of weights, four heads by nine tokens. Head 0 gives nearly all weight to 'wick', heads 2 and 3 most
    of it to 'en', and head 1 nearly all to ' island'.""")

# %% [markdown]
# Three heads look at pieces of the town's name, and head 1 at ` island`, the kind of thing that is asked for. But
# weights show where a head looks, not whether it matters. So now hide the name, in one layer at a time:

# %%
name = [pieces.index(piece) for piece in ("F", "en", "wick")]


def without_name(q, k, v, *, scale):
    """Attention in which the last token does not see the tokens of the name."""
    rest = [at for at in range(len(q)) if at not in name]
    last = attend(q[rest], k[rest], v[rest], scale=scale)[-1:]
    return torch.cat((attend(q, k, v, scale=scale)[:-1], last))


def walk_with_hidden_name(hidden_in):
    """The residual stream after the last layer, with the name hidden in one layer."""
    x = model.embedding[ids] * config.embedding_scale
    for number, layer in enumerate(model.layers):
        q, k, v = queries_keys_values(x, layer, torch.arange(len(ids)))
        function = without_name if number == hidden_in else attend
        x = rest_of_layer(x, function(q, k, v, scale=scale), layer)
    return x


print("hidden in  most likely  P(' Bramble')")
changed = 0
for number in range(config.num_layers):
    stream = walk_with_hidden_name(number)
    changed += logits_of(stream[-1:]).argmax().item() != bramble
    print(f"layer {number}    {verdict(stream)}")
compare("need the name", unit="of 6 layers", prediction=guess_layers, measured=changed)

# %% [markdown]
# Only in layer 2 does the answer depend on it. If the name is hidden there, the model still answers with an island, but
# the wrong one. Hiding it in layer 0 only makes the model less sure; in the other layers, little changes. So layer 2
# is where the last token learns which town is meant.
#
# ## 10 · Optional: the engine's version · 2 min
#
# Below is the engine's reference implementation, the specification for all of its faster versions: your formula, for
# many requests. Look for `query_at`, the positions of exercise 3; for the block table in `rows`, which says where each
# request's keys and values are; and for what `_attend` does about leftovers. A *window* (only the most recent keys are
# seen) and a *soft cap* on scores are options that some models need.

# %%
# ENGINE: minillm.ops.reference:decode_attention
# ENGINE: minillm.ops.reference:_attend

# %% [markdown]
# ## 11 · Optional: what a step waits for · 2 min
#
# Why does the time shrink so much less than the operations? The next cell splits each step's time into the matrix
# products of the layers and the output head, run *alone* with nothing in between, and the rest:

# %% tags=["nbval-ignore-output"] uncompared="times"
probes.where_the_time_goes(
    model,
    tokens=400,
    without_cache=lambda: forward(some_ids),
    with_cache=lambda caches=caches_with(399): one_more(caches),
    with_short_cache=lambda caches=caches_with(1): one_more(caches),
)

# %% [markdown]
# * **Without a cache**, each matrix of the layers multiplies 400 vectors, so every weight that is read is used 400
#   times. The products wait for **arithmetic**. The rest is mostly attention, then the activation function. Most of
#   attention's time goes to masking, softmax and copies rather than to its products.
# * **With a cache**, every weight that is read is used once. The products wait for the **bytes** of the weights. But
#   `tiny-gemma` has so few bytes that two other things show. Hundreds of small operations take microseconds each to
#   *start* from Python, no matter how little they compute. And attention reads the keys and values of all earlier
#   tokens, and may copy them for each head. In a model with gigabytes of weights, the bytes dominate. Lesson 11 shows
#   how an engine avoids the cost of starting operations on a GPU.
#
# ## 12 · Optional: a larger GPU · 2 min
#
# What is a GPU with more memory worth? The same calculator, for two GPUs:

# %%
GPUS = {"80 GB (H100)": 80e9, "141 GB (H200)": 141e9}
every = {f"{name}, {gpu}": (SHAPES[name], GPUS[gpu]) for name in SHAPES for gpu in GPUS}
draw.gpus(every, context=4096)
describe("""Left: bars of the memory of two GPUs, divided into weights, cache and unused, for four models, with the
    number of requests of 4,096 tokens that fit; Llama 3.1 70B fits neither GPU. Right: the number of requests that fit
    is inversely proportional to their length; it is highest for Gemma 2B.""")

for name, shape in list(SHAPES.items())[:3]:
    small, large = (sizing.fit(shape, nbytes, 4096).requests for nbytes in GPUS.values())
    print(f"{name:13} {small:4} and {large:4} requests, {large / small:.2f} times as many")
print(f"and the memory: {141 / 80:.2f} times as much")

# %% [markdown]
# The number of requests grows more than the memory, because the weights take the same space on both GPUs: all of the
# extra memory that the engine may use goes to the cache. The larger the weights' share of the small GPU, the larger the
# gain. (In the chart on the right, a line ends at the longest context of its model. Llama 3.1 70B fits neither GPU.)
#
# ## 13 · Optional: prefill and decode, operations per byte · 7 min
#
# With a cache, one model has two workloads. Prefill runs hundreds of tokens through each weight that it reads; decode
# runs one token per request. Their **arithmetic intensity**, operations per byte read, tells you what limits them. The
# weights are read once for all requests of a batch, but each request reads its own keys and values. For Gemma 2B in
# bfloat16, calculated, not measured:

# %%
llm.close()
gemma = SHAPES["Gemma 2B"]
weight_bytes, token_bytes = sizing.weight_bytes(gemma), sizing.kv_bytes_per_token(gemma)
gemma_per_key = 2 * gemma.num_heads * gemma.head_dim * gemma.num_layers  # multiply-adds


def decode_intensity(requests, context):
    """Operations per byte of one decode step."""
    operations = 2 * requests * (sizing.parameters(gemma) + context * gemma_per_key)
    return operations / (weight_bytes + requests * context * token_bytes)


REQUESTS = [1 << power for power in range(13)]
curves = {}
for context in (64, 1024, 8192):
    fits = sizing.fit(gemma, 141e9, context).requests  # on an H200
    values = [decode_intensity(requests, context) for requests in REQUESTS if requests <= fits]
    curves[f"{context:,} tokens of context each"] = values
    most, each = REQUESTS[len(values) - 1], f"{context:5,} tokens of context"
    print(f"{each}: {most:5,} requests, {values[-1]:6.1f} operations per byte")
alone = 2 * gemma_per_key / token_bytes
print(f"the cache alone: {alone:.0f} operations per byte, no matter how many requests")

# %%
record = records.read("h200/ceiling-h200")
products = {(row["rows"], row["dtype"]): row["step_ms"] for row in record["matrix_products"]}
h200_bytes = record["copy_TB_per_s"] * 1e12
h200_operations = 2 * 2048 * sizing.parameters(gemma) / (products[2048, "bf16"] / 1e3)
ridge = h200_operations / h200_bytes
print(f"an H200: {h200_bytes / 1e12:.2f} TB/s, {h200_operations / 1e12:.0f} T operations/s")
print(f"its ridge is at {ridge:.0f} operations per byte")
draw.intensities(REQUESTS, curves, ridge, alone)
describe("""Operations per byte of a decode step by the number of requests, on logarithmic axes. With 64 tokens of
    context the curve climbs above the ridge of an H200; with 1,024 tokens it bends and crosses the ridge late; with
    8,192 tokens it flattens far below the ridge, and ends where the GPU's memory is full.""")

# %% [markdown]
# (The arithmetic rate was recorded with Gemma's own matrices. Lesson 00 uses large square ones, so its ridge differs.)
# With short contexts, a larger batch raises the intensity until arithmetic is the limit. With long contexts the curve
# bends: soon the step reads more keys and values than weights, and every additional request brings its own. At 8,192
# tokens of context, no batch that fits the GPU comes near the ridge. Fewer KV heads help here, too: 8 query heads use
# each key that is read, so the cache alone has 8 operations per byte. With multi-head attention it would have 1.
#
# **Predict first**, for this machine and its model: how many tokens per second does the engine process in a prefill of
# 512 tokens, and how many does it generate for one request, and for 8 at once?

# %% tags=["exercise"]
guess_prefill = 10000  # PREDICT: tokens per second in a prefill of 512 tokens
guess_decode = 500  # PREDICT: tokens per second in the decode of one request
guess_decode_8 = 2500  # PREDICT: tokens per second in the decode of 8 requests, together

# %% tags=["nbval-ignore-output"] uncompared="times, and the model of the machine's tier"
here = tier()
with LLM(here.model, run_ahead=0, enable_prefix_caching=False, **here.options) as engine:
    weights_nbytes = engine.engine.model.nbytes
    limits = roofline.limits(here.device, engine.engine.model.dtype, weights_nbytes)
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
print("a decode step of 8 requests")
for context, point in ((64, points[2]), (1024, far)):
    cache_mb = (point.bytes - weights_nbytes) / 1e6
    read = f"{cache_mb:.0f} MB of keys and values, {weights_nbytes / 1e6:,.0f} MB of weights"
    print(f"after {context:5,} tokens: {point.seconds * 1e3:6.2f} ms, reads {read}")

# %% [markdown]
# A token of a prompt is cheaper than a token of an answer, and tokens of 8 requests are cheaper together than alone.
# The two steps at the end run the same matrices on 8 tokens each; only the keys and values differ. In `tiny-gemma` they
# soon outweigh the weights. In a model with gigabytes of weights it takes more requests, or longer ones. (On a CPU, the
# additional time is several times what reading them once would take: the engine first copies them out of scattered
# blocks, and torch's attention takes even longer than these copies. In lesson 04, a GPU kernel for decode steps reads
# them in place.)
#
# ## Recap · 2 min
#
# * A decoder is an embedding, layers that add to it, and an output head. Attention is the only part where tokens
#   exchange information: scores, softmax, weighted sum of values. Token `i` sees the tokens up to `i`, itself included.
# * The key and the value of a token never change, because no token sees a later one. Keep them, and a step runs one
#   token through the layers instead of all.
# * Query `i` of `n` is at position `length - n + i`; slots beyond `length` must never matter.
# * `2 x layers x KV heads x head_dim x bytes` per token of cache, 2 bytes per parameter in bfloat16.
# * A cache saves far more operations than time: for its one token, a step still reads every weight, and still starts
#   hundreds of small operations.
#
# **What got worse:** memory. Generation without a cache keeps nothing between steps. Now every request holds
# memory, and memory limits how many can be served at once. Room is reserved for the longest possible answer, and many
# are shorter. And heads that share keys and values trade a little quality for memory.
#
# **Further reading:** Vaswani et al. 2017, *Attention Is All You Need*; Su et al. 2021, *RoFormer* (rotary
# embeddings); Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need* (MQA); Ainslie et al. 2023,
# *GQA*; Pope et al. 2022, *Efficiently Scaling Transformer Inference*; Kwon et al. 2023, *Efficient Memory Management
# for Large Language Model Serving with PagedAttention*; NVIDIA 2023, *Mastering LLM Techniques: Inference
# Optimization* (the rules of thumb). Next: lesson 03 writes GPU kernels for the norms and the gate of a layer, lesson
# 04 for attention.
