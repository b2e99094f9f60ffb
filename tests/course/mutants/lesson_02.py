"""Wrong solutions of lesson 02: attention, the cache, attention over it, its size."""

import torch

from tests.course.mutants import wrong

# ---- attention


def _weights(q, k, scale):
    """[kv_heads, group, queries, keys] of a whole sequence, causal."""
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)


def _mix(weights, v):
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)


@wrong("attention", fails="scores are multiplied by the scale")
def scale_forgotten(q, k, v, *, scale):
    return _mix(_weights(q, k, 1.0).softmax(-1), v)


@wrong("attention", fails="no query sees a later key")
def mask_off_by_one(q, k, v, *, scale):
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    hidden = torch.ones(scores.shape[-2:]).triu(2).bool()
    return _mix(scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@wrong("attention", fails="no query sees a later key")
def masked_with_minus_100(q, k, v, *, scale):
    weights = _weights(q, k, scale)
    return _mix(weights.masked_fill(weights == -torch.inf, -100.0).softmax(-1), v)


@wrong("attention", fails="no query sees a later key")
def hundred_subtracted(q, k, v, *, scale):
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return _mix((scores - 100 * torch.ones(scores.shape[-2:]).triu(1)).softmax(-1), v)


@wrong("attention", fails="the weights of a query sum to 1")
def softmax_over_queries(q, k, v, *, scale):
    return _mix(_weights(q, k, scale).softmax(-2), v)


@wrong("attention", fails="every KV head is read")
def second_kv_head_ignored(q, k, v, *, scale):
    return _mix(_weights(q, k[:, :1], scale).softmax(-1), v[:, :1])


@wrong("attention", fails="heads that share a KV head are adjacent")
def heads_interleaved(q, k, v, *, scale):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, times, 1), v.repeat(1, times, 1)
    return _mix(_weights(q, k, scale).softmax(-1), v)


@wrong("attention", fails="large scores do not overflow")
def exponentials_as_they_are(q, k, v, *, scale):
    powers = _weights(q, k, scale).exp()
    return _mix(powers / powers.sum(-1, keepdim=True), v)


# ---- append


def _check_room(cache, k):
    if cache.length + len(k) > len(cache.k):
        raise ValueError("full")


@wrong("append", fails="new tokens follow the old ones")
def always_at_the_start(cache, k, v):
    _check_room(cache, k)
    cache.k[: len(k)], cache.v[: len(k)] = k, v
    cache.length += len(k)


@wrong("append", fails="the length counts tokens")
def length_counts_calls(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length += 1


@wrong("append", fails="tokens that come together are all kept")
def first_token_only(cache, k, v):
    _check_room(cache, k)
    cache.k[cache.length], cache.v[cache.length] = k[0], v[0]
    cache.length += len(k)


@wrong("append", fails="tokens that come together are all kept")
def first_value_only(cache, k, v):
    _check_room(cache, k)
    cache.k[cache.length : cache.length + len(k)], cache.v[cache.length] = k, v[0]
    cache.length += len(k)


@wrong("append", fails="values are kept as well as keys")
def values_at_the_start(cache, k, v):
    _check_room(cache, k)
    cache.k[cache.length : cache.length + len(k)], cache.v[: len(v)] = k, v
    cache.length += len(k)


@wrong("append", fails="values are kept as well as keys")
def keys_in_both(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end], cache.v[cache.length : end] = k, k
    cache.length = end


@wrong("append", fails="a cache can be filled to its last slot")
def last_slot_never_filled(cache, k, v):
    end = cache.length + len(k)
    if end >= len(cache.k):
        raise ValueError("full")
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = end


@wrong("append", fails="a cache too small refuses, and keeps what it has")
def surplus_dropped(cache, k, v):
    end = min(cache.length + len(k), len(cache.k))
    fits = end - cache.length
    cache.k[cache.length : end], cache.v[cache.length : end] = k[:fits], v[:fits]
    cache.length = end


@wrong("append", fails="a cache too small refuses, and keeps what it has")
def length_grows_before_the_refusal(cache, k, v):
    start, cache.length = cache.length, cache.length + len(k)
    if cache.length > len(cache.k):
        raise ValueError("full")
    cache.k[start : cache.length], cache.v[start : cache.length] = k, v


@wrong("append", fails="memory is written in place")
def all_copied(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k = torch.cat((cache.k[: cache.length], k, cache.k[end:]))
    cache.v = torch.cat((cache.v[: cache.length], v, cache.v[end:]))
    cache.length = end


# ---- cached_attention


def _cached(q, k, v, visible, scale):
    """visible: [queries, keys]."""
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return _mix(scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def _visible(queries, keys, length):
    return torch.arange(keys) <= (length - queries + torch.arange(queries))[:, None]


@wrong("cached_attention", fails="every query sees its whole past")
def mask_anchored_top_left(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    return _cached(q, k, v, torch.ones(len(q), length).tril().bool(), scale)


@wrong("cached_attention", fails="no query sees the keys after its own")
def only_the_last_query_is_right(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    return _cached(q, k, v, torch.ones(len(q), length).bool(), scale)


@wrong("cached_attention", fails="no query sees the keys after its own")
def mask_one_too_far(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    return _cached(q, k, v, _visible(len(q), length, length + 1), scale)


@wrong("cached_attention", fails="no query sees the keys after its own")
def cached_masked_with_minus_100(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return _mix(scores.masked_fill(~_visible(len(q), length, length), -100.0).softmax(-1), v)


LEFTOVERS = "leftovers beyond the length never matter, not even NaN"


@wrong("cached_attention", fails=LEFTOVERS)
def leftovers_masked_only(q, k, v, length, *, scale):
    return _cached(q, k, v, _visible(len(q), len(k), length), scale)


@wrong("cached_attention", fails=LEFTOVERS)
def uses_capacity_as_length(q, k, v, length, *, scale):
    return _cached(q, k, v, _visible(len(q), len(k), len(k)), scale)


@wrong("cached_attention", fails="scores are multiplied by the scale")
def cached_scale_forgotten(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    return _cached(q, k, v, _visible(len(q), length, length), 1.0)


@wrong("cached_attention", fails="large scores do not overflow")
def cached_exponentials_as_they_are(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    powers = scores.exp() * _visible(len(q), length, length)
    return _mix(powers / powers.sum(-1, keepdim=True), v)


@wrong("cached_attention", fails="groups of heads share a KV head")
def cached_heads_interleaved(q, k, v, length, *, scale):
    times = q.shape[1] // k.shape[1]
    k, v = (part[:length].repeat(1, times, 1) for part in (k, v))
    return _cached(q, k, v, _visible(len(q), length, length), scale)


# ---- requests_that_fit


def _divide(gpu_bytes, utilization, weights, request):
    return max(0, int((gpu_bytes * utilization - weights) // request))


@wrong("requests_that_fit", fails="keys and values both count")
def keys_alone(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


EVERY = "every layer, every number of a head and every token counts"


@wrong("requests_that_fit", fails=EVERY)
def one_layer(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


@wrong("requests_that_fit", fails=EVERY)
def one_number_a_head(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * bytes_each
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


@wrong("requests_that_fit", fails=EVERY)
def one_token(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


@wrong("requests_that_fit", fails="KV heads are cached, not query heads")
def one_kv_head(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


@wrong("requests_that_fit", fails="KV heads are cached, not query heads")
def query_heads_counted(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


@wrong("requests_that_fit", fails="the bytes of a number count")
def two_bytes_for_the_cache(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


@wrong("requests_that_fit", fails="the bytes of a number count")
def two_bytes_for_the_weights(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, parameters * 2, request)


@wrong("requests_that_fit", fails="the weights come first")
def weights_forgotten(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, 0, request)


@wrong("requests_that_fit", fails="only the utilized share is used")
def all_of_the_gpu(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, 1.0, parameters * bytes_each, request)


@wrong("requests_that_fit", fails="only the utilized share is used")
def share_of_what_the_weights_leave(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes - parameters * bytes_each, utilization, 0, request)


@wrong("requests_that_fit", fails="a request fits completely or not at all")
def rounded(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return max(0, round((gpu_bytes * utilization - parameters * bytes_each) / request))
