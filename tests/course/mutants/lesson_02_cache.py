"""Wrong solutions of lesson 02: the cache and its size."""

import torch

from tests.course.mutants import wrong

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


@wrong("append", fails="the length counts tokens")
def slots_counted_that_are_not_zero(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = int((cache.k[:, 0, 0] != 0).sum())


@wrong("append", fails="memory is written in place, and earlier tokens are not copied")
def every_token_written_again(cache, k, v):
    _check_room(cache, k)
    keys, values = [*cache.k[: cache.length], *k], [*cache.v[: cache.length], *v]
    for slot, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.k[slot], cache.v[slot] = key, value
    cache.length = len(keys)


@wrong("append", fails="memory is written in place, and earlier tokens are not copied")
def concatenated_and_copied_back(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    cache.k[:end] = torch.cat((cache.k[: cache.length], k))
    cache.v[:end] = torch.cat((cache.v[: cache.length], v))
    cache.length = end


@wrong("append", fails="a full cache raises ValueError and stays as it is")
def one_token_broadcast_into_no_slot(cache, k, v):
    """torch raises if two tokens meet one slot, but broadcasts a single token into an empty slice."""
    end = cache.length + len(k)
    try:
        cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    except RuntimeError as error:
        raise ValueError("full") from error
    cache.length = end


@wrong("append", fails="memory is written in place, and earlier tokens are not copied")
def prompt_of_all_slots_taken_as_the_cache(cache, k, v):
    _check_room(cache, k)
    end = cache.length + len(k)
    if len(k) == len(cache.k):
        cache.k, cache.v = k, v
    cache.k[cache.length : end], cache.v[cache.length : end] = k, v
    cache.length = end


@wrong("append", fails="tokens that come together are all kept")
def first_eight_tokens_only(cache, k, v):
    _check_room(cache, k)
    for i in range(min(len(k), 8)):
        cache.k[cache.length + i], cache.v[cache.length + i] = k[i], v[i]
    cache.length += len(k)


@wrong("append", fails="new tokens follow the old ones")
def several_tokens_taken_for_a_prompt(cache, k, v):
    """Only the first call brings several tokens, it assumes; but a prompt may come in chunks."""
    _check_room(cache, k)
    start = cache.length if len(k) == 1 else 0
    cache.k[start : start + len(k)], cache.v[start : start + len(k)] = k, v
    cache.length += len(k)


# ---- requests_that_fit


def _divide(gpu_bytes, utilization, weights, request):
    return max(0, int((gpu_bytes * utilization - weights) // request))


@wrong("requests_that_fit", fails="a request fits entirely or not at all")
def a_float_of_whole_requests(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return max(0.0, (gpu_bytes * utilization - parameters * bytes_each) // request)


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


@wrong("requests_that_fit", fails="a request fits entirely or not at all")
def one_if_anything_is_left(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    left = gpu_bytes * utilization - parameters * bytes_each
    return max(1, int(left // request)) if left > 0 else 0


@wrong("requests_that_fit", fails="only the utilized share is used")
def all_of_the_gpu_by_default(config, parameters, gpu_bytes, context, bytes_each=2, utilization=1.0):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return _divide(gpu_bytes, utilization, parameters * bytes_each, request)


@wrong("requests_that_fit", fails="the weights come first")
def large_weights_never_fit(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    weights = parameters * bytes_each
    return 0 if weights > 80e9 else _divide(gpu_bytes, utilization, weights, request)


@wrong("requests_that_fit", fails="a request fits entirely or not at all")
def weights_counted_in_whole_requests(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    return max(0, int(gpu_bytes * utilization // request - parameters * bytes_each // request))


@wrong("requests_that_fit", fails="a request fits entirely or not at all")
def more_room_than_a_request_needed(config, parameters, gpu_bytes, context, bytes_each=2, utilization=0.9):
    """`>` where `>=` is meant: a single request that fits exactly is lost."""
    request = context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    left = gpu_bytes * utilization - parameters * bytes_each
    return int(left // request) if left > request else 0
