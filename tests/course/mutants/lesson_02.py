"""Wrong solutions of lesson 02: attention, the cache, attention over it, its size."""

import torch

from tests.course.mutants import wrong

# ---- attention

WEIGHTS = "the weights are the softmax of scale · q · k over the keys"
HEADS = "every head uses its own query, and its group's keys and values"
OVERFLOW = "large scores do not overflow"
PAST = "every query sees every key up to its own"
DTYPE = "the result has the dtype of q"
UNCHANGED = "its arguments are unchanged"


def _weights(q, k, scale):
    """[kv_heads, group, queries, keys] of a whole sequence, causal."""
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)


def _mix(weights, v):
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)


@wrong("attention", fails=WEIGHTS)
def scale_forgotten(q, k, v, *, scale):
    return _mix(_weights(q, k, 1.0).softmax(-1), v)


@wrong("attention", fails="no query sees a later key")
def mask_off_by_one(q, k, v, *, scale):
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    hidden = torch.ones(scores.shape[-2:]).triu(2).bool()
    return _mix(scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@wrong("attention", fails="no query sees a later key")
def hundred_subtracted(q, k, v, *, scale):
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return _mix((scores - 100 * torch.ones(scores.shape[-2:]).triu(1)).softmax(-1), v)


@wrong("attention", fails=WEIGHTS)
def softmax_over_queries(q, k, v, *, scale):
    return _mix(_weights(q, k, scale).softmax(-2), v)


@wrong("attention", fails=HEADS)
def second_kv_head_ignored(q, k, v, *, scale):
    return _mix(_weights(q, k[:, :1], scale).softmax(-1), v[:, :1])


@wrong("attention", fails=HEADS)
def heads_interleaved(q, k, v, *, scale):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, times, 1), v.repeat(1, times, 1)
    return _mix(_weights(q, k, scale).softmax(-1), v)


@wrong("attention", fails=OVERFLOW)
def exponentials_as_they_are(q, k, v, *, scale):
    powers = _weights(q, k, scale).exp()
    return _mix(powers / powers.sum(-1, keepdim=True), v)


@wrong("attention", fails=WEIGHTS)
def scale_of_its_own(q, k, v, *, scale):
    return _mix(_weights(q, k, q.shape[-1] ** -0.5).softmax(-1), v)


@wrong("attention", fails=HEADS)
def keys_interleaved_values_right(q, k, v, *, scale):
    times = q.shape[1] // k.shape[1]
    weights = _weights(q, k.repeat(1, times, 1), scale).softmax(-1)
    return _mix(weights, v.repeat_interleave(times, 1))


@wrong("attention", fails=HEADS)
def one_query_for_all_heads(q, k, v, *, scale):
    return _mix(_weights(q[:, :1].expand_as(q), k, scale).softmax(-1), v)


@wrong("attention", fails=HEADS)
def heads_and_tokens_mixed_up(q, k, v, *, scale):
    """A reshape in place of a transpose."""
    times = q.shape[1] // k.shape[1]
    weights = _weights(q, k, scale).softmax(-1).flatten(0, 1)
    return (weights @ v.repeat_interleave(times, 1).transpose(0, 1)).reshape(q.shape)


@wrong("attention", fails=OVERFLOW)
def nan_replaced_by_zero(q, k, v, *, scale):
    powers = _weights(q, k, scale).exp()
    return _mix((powers / powers.sum(-1, keepdim=True)).nan_to_num(), v)


@wrong("attention", fails="no query sees a later key")
def one_maximum_for_all_queries(q, k, v, *, scale):
    """It includes later queries: earlier ones, far below it, then underflow."""
    weights = _weights(q, k, scale)
    powers = (weights - weights.max()).exp()
    return _mix(powers / powers.sum(-1, keepdim=True), v)


@wrong("attention", fails=DTYPE)
def collected_in_float32(q, k, v, *, scale):
    out = torch.zeros(q.shape)
    out[:] = _mix(_weights(q, k, scale).softmax(-1), v)
    return out


@wrong("attention", fails=UNCHANGED)
def query_scaled_in_place(q, k, v, *, scale):
    q *= scale
    return _mix(_weights(q, k, 1.0).softmax(-1), v)


@wrong("attention", fails=PAST)
def window_of_64(q, k, v, *, scale):
    weights = _weights(q, k, scale)
    return _mix(weights.masked_fill(torch.ones(weights.shape[-2:]).tril(-64).bool(), -torch.inf).softmax(-1), v)


@wrong("attention", fails="no query sees a later key")
def masked_with_minus_a_billion(q, k, v, *, scale):
    weights = _weights(q, k, scale)
    return _mix(weights.masked_fill(weights == -torch.inf, -1e9).softmax(-1), v)


@wrong("attention", fails=HEADS)
def at_most_four_heads_to_a_kv_head(q, k, v, *, scale):
    group = min(4, q.shape[1] // k.shape[1])
    heads = [min(head // group, k.shape[1] - 1) for head in range(q.shape[1])]
    return _mix(_weights(q, k[:, heads], scale).softmax(-1), v[:, heads])


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


@wrong("append", fails="a full cache raises ValueError and stays as it is")
def surplus_dropped(cache, k, v):
    end = min(cache.length + len(k), len(cache.k))
    fits = end - cache.length
    cache.k[cache.length : end], cache.v[cache.length : end] = k[:fits], v[:fits]
    cache.length = end


@wrong("append", fails="a full cache raises ValueError and stays as it is")
def length_grows_before_the_refusal(cache, k, v):
    start, cache.length = cache.length, cache.length + len(k)
    if cache.length > len(cache.k):
        raise ValueError("full")
    cache.k[start : cache.length], cache.v[start : cache.length] = k, v


@wrong("append", fails="memory is written in place, and earlier tokens are not copied")
def all_copied(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k = torch.cat((cache.k[: cache.length], k, cache.k[end:]))
    cache.v = torch.cat((cache.v[: cache.length], v, cache.v[end:]))
    cache.length = end


@wrong("append", fails="the length counts tokens")
def length_of_the_new_tokens(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = len(k)


@wrong("append", fails="new tokens follow the old ones")
def free_slots_taken_for_zeros(cache, k, v):
    _check_room(cache, k)
    start = min(int((cache.k[:, 0, 0] != 0).sum()), len(cache.k) - len(k))
    cache.k[start : start + len(k)], cache.v[start : start + len(k)] = k, v
    cache.length += len(k)


@wrong("append", fails="all KV heads are kept")
def first_kv_head_only(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end, 0], cache.v[cache.length : end, 0] = k[:, 0], v[:, 0]
    cache.length = end


@wrong("append", fails="a full cache raises ValueError and stays as it is")
def refused_when_half_written(cache, k, v):
    for key, value in zip(k, v, strict=True):
        _check_room(cache, key[None])
        cache.k[cache.length], cache.v[cache.length] = key, value
        cache.length += 1


@wrong("append", fails="numbers are kept in full precision")
def rounded_to_bfloat16(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end], cache.v[cache.length : end] = k.bfloat16(), v.bfloat16()
    cache.length = end


@wrong("append", fails="its arguments k and v are unchanged")
def arguments_cleared(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = end
    k.zero_(), v.zero_()


@wrong("append", fails="the length counts tokens")
def length_becomes_a_tensor(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = torch.tensor(end)


@wrong("append", fails="memory is written in place, and earlier tokens are not copied")
def concatenated_and_copied_back(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[:end] = torch.cat((cache.k[: cache.length], k))
    cache.v[:end] = torch.cat((cache.v[: cache.length], v))
    cache.length = end


# ---- cached_attention


def _cached(q, k, v, visible, scale):
    """visible: [queries, keys]."""
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return _mix(scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def _visible(queries, keys, length):
    return torch.arange(keys) <= (length - queries + torch.arange(queries))[:, None]


@wrong("cached_attention", fails="every new query sees its whole past")
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


LEFTOVERS = "slots beyond the length never matter, not even with NaN in them"


@wrong("cached_attention", fails=LEFTOVERS)
def leftovers_masked_only(q, k, v, length, *, scale):
    return _cached(q, k, v, _visible(len(q), len(k), length), scale)


@wrong("cached_attention", fails=LEFTOVERS)
def uses_capacity_as_length(q, k, v, length, *, scale):
    return _cached(q, k, v, _visible(len(q), len(k), len(k)), scale)


@wrong("cached_attention", fails=WEIGHTS)
def cached_scale_forgotten(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    return _cached(q, k, v, _visible(len(q), length, length), 1.0)


@wrong("cached_attention", fails=OVERFLOW)
def cached_exponentials_as_they_are(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    powers = scores.exp() * _visible(len(q), length, length)
    return _mix(powers / powers.sum(-1, keepdim=True), v)


@wrong("cached_attention", fails=HEADS)
def cached_heads_interleaved(q, k, v, length, *, scale):
    times = q.shape[1] // k.shape[1]
    k, v = (part[:length].repeat(1, times, 1) for part in (k, v))
    return _cached(q, k, v, _visible(len(q), length, length), scale)


@wrong("cached_attention", fails="every new query sees its whole past")
def a_single_query_is_at_its_own_index(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    first = 0 if len(q) == 1 else length - len(q)
    return _cached(q, k, v, torch.arange(length) <= (first + torch.arange(len(q)))[:, None], scale)


@wrong("cached_attention", fails=DTYPE)
def cached_collected_in_float32(q, k, v, length, *, scale):
    out = torch.zeros(q.shape)
    out[:] = _cached(q, k[:length], v[:length], _visible(len(q), length, length), scale)
    return out


@wrong("cached_attention", fails=UNCHANGED)
def leftovers_cleared(q, k, v, length, *, scale):
    k[length:], v[length:] = 0, 0
    return _cached(q, k, v, _visible(len(q), len(k), length), scale)


@wrong("cached_attention", fails="every new query sees its whole past")
def cached_window_of_64(q, k, v, length, *, scale):
    visible = _visible(len(q), length, length)
    return _cached(q, k[:length], v[:length], visible & ~_visible(len(q), length, length - 64), scale)


@wrong("cached_attention", fails=LEFTOVERS)
def nan_values_replaced(q, k, v, length, *, scale):
    return _cached(q, k, v.where(~v.isnan(), 0.0), _visible(len(q), len(k), length), scale)


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


@wrong("requests_that_fit", fails="a request fits entirely or not at all")
def rounded(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return max(0, round((gpu_bytes * utilization - parameters * bytes_each) / request))


@wrong("requests_that_fit", fails="the weights come first")
def missing_memory_made_positive(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return int(abs(gpu_bytes * utilization - parameters * bytes_each) // request)


@wrong("requests_that_fit", fails="the weights come first")
def negative_when_only_unusable_memory_is_left(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    weights = parameters * bytes_each
    return 0 if weights > gpu_bytes else int((gpu_bytes * utilization - weights) // request)


@wrong("requests_that_fit", fails="only the utilized share is used")
def utilization_in_tenths(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, round(utilization, 1), parameters * bytes_each, request)


@wrong("requests_that_fit", fails="the bytes of a number count")
def at_least_one_byte(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * max(1, bytes_each)
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)
