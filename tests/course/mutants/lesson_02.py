"""Wrong solutions of lesson 02: attention, and attention over a cache."""

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
    return _mix((scores - 100 * torch.ones_like(scores).triu(1)).softmax(-1), v)


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
    powers = (weights - weights.amax((-2, -1), keepdim=True)).exp()
    return _mix(powers / powers.sum(-1, keepdim=True), v)


@wrong("attention", fails=OVERFLOW)
def one_maximum_for_all_heads(q, k, v, *, scale):
    """A head whose scores are far below another's underflows: 0 / 0."""
    weights = _weights(q, k, scale)
    powers = (weights - weights.amax((0, 1, 3), keepdim=True)).exp()
    return _mix(powers / powers.sum(-1, keepdim=True), v)


@wrong("attention", fails=DTYPE)
def collected_in_float32(q, k, v, *, scale):
    out = torch.zeros(q.shape)
    out[:] = _mix(_weights(q, k, scale).softmax(-1), v)
    return out


@wrong("attention", fails=DTYPE)
def not_converted_back(q, k, v, *, scale):
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    return _mix(_weights(q, k, scale).softmax(-1), v)


@wrong("attention", fails=UNCHANGED)
def query_scaled_in_place(q, k, v, *, scale):
    q *= scale
    return _mix(_weights(q, k, 1.0).softmax(-1), v)


@wrong("attention", fails=UNCHANGED)
def query_scaled_and_scaled_back(q, k, v, *, scale):
    q *= scale
    out = _mix(_weights(q, k, 1.0).softmax(-1), v)
    q /= scale
    return out


@wrong("attention", fails=PAST)
def window_of_64(q, k, v, *, scale):
    weights = _weights(q, k, scale)
    return _mix(weights.masked_fill(torch.ones(weights.shape[-2:]).tril(-64).bool(), -torch.inf).softmax(-1), v)


@wrong("attention", fails=PAST)
def window_of_128(q, k, v, *, scale):
    weights = _weights(q, k, scale)
    return _mix(weights.masked_fill(torch.ones(weights.shape[-2:]).tril(-128).bool(), -torch.inf).softmax(-1), v)


@wrong("attention", fails=PAST)
def scores_of_zero_hidden(q, k, v, *, scale):
    """`tril` puts zeros in place of hidden scores, and a visible key may score 0, too."""
    scores = (torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale).tril()
    return _mix(scores.masked_fill(scores == 0, -torch.inf).softmax(-1), v)


@wrong("attention", fails="no query sees a later key")
def masked_with_minus_a_billion(q, k, v, *, scale):
    weights = _weights(q, k, scale)
    return _mix(weights.masked_fill(weights == -torch.inf, -1e9).softmax(-1), v)


@wrong("attention", fails=HEADS)
def at_most_four_heads_to_a_kv_head(q, k, v, *, scale):
    group = min(4, q.shape[1] // k.shape[1])
    heads = [min(head // group, k.shape[1] - 1) for head in range(q.shape[1])]
    return _mix(_weights(q, k[:, heads], scale).softmax(-1), v[:, heads])


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
def nan_replaced_wherever_it_is(q, k, v, length, *, scale):
    hidden = _visible(len(q), len(k), length).logical_not()
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    return _mix(scores.masked_fill(hidden, -torch.inf).softmax(-1), v.nan_to_num(posinf=0.0, neginf=0.0))


@wrong("cached_attention", fails=LEFTOVERS)
def a_single_query_sees_the_whole_capacity(q, k, v, length, *, scale):
    if len(q) > 1:
        k, v = k[:length], v[:length]
    return _cached(q, k, v, _visible(len(q), len(k), len(k)), scale)


@wrong("cached_attention", fails=LEFTOVERS)
def leftovers_scored_as_zeros(q, k, v, length, *, scale):
    """Copies with zeros in the free slots; but a key of zeros, if it is not hidden, takes its share of the weights."""
    filled = (torch.arange(len(k)) < length)[:, None, None]
    visible = _visible(len(q), len(k), len(k) if len(q) == 1 else length)
    return _cached(q, k.where(filled, 0.0), v.where(filled, 0.0), visible, scale)


@wrong("cached_attention", fails="no query sees the keys after its own")
def mask_for_a_full_cache(q, k, v, length, *, scale):
    capacity = len(k)
    return _cached(q, k[:length], v[:length], _visible(len(q), length, capacity), scale)


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


@wrong("cached_attention", fails=OVERFLOW)
def cached_one_maximum_for_all_heads(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    scores = scores.masked_fill(~_visible(len(q), length, length), -torch.inf)
    powers = (scores - scores.amax((0, 1, 3), keepdim=True)).exp()
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


@wrong("cached_attention", fails=DTYPE)
def cached_not_converted_back(q, k, v, length, *, scale):
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k[:length], v[:length]))
    return _cached(q, k, v, _visible(len(q), length, length), scale)


@wrong("cached_attention", fails=UNCHANGED)
def leftovers_cleared(q, k, v, length, *, scale):
    k[length:], v[length:] = 0, 0
    return _cached(q, k, v, _visible(len(q), len(k), length), scale)


@wrong("cached_attention", fails=UNCHANGED)
def nan_and_inf_cleared_in_place(q, k, v, length, *, scale):
    """Changes nothing as long as all leftovers are finite."""
    v[length:][~v[length:].isfinite()] = 0
    return _cached(q, k, v, _visible(len(q), len(k), length), scale)


@wrong("cached_attention", fails=UNCHANGED)
def cleared_where_float_makes_no_copy(q, k, v, length, *, scale):
    """Right for every dtype but float32, whose `.float()` is the tensor itself."""
    dtype = q.dtype
    if dtype == torch.float64:
        return _cached(q, k[:length], v[:length], _visible(len(q), length, length), scale)
    q, k, v = q.float(), k.float(), v.float()
    v[length:] = 0
    return _cached(q, k, v, _visible(len(q), len(k), length), scale).to(dtype)


@wrong("cached_attention", fails="every new query sees its whole past")
def cached_window_of_64(q, k, v, length, *, scale):
    visible = _visible(len(q), length, length)
    return _cached(q, k[:length], v[:length], visible & ~_visible(len(q), length, length - 64), scale)


@wrong("cached_attention", fails="every new query sees its whole past")
def cached_scores_of_zero_hidden(q, k, v, length, *, scale):
    k, v = k[:length], v[:length]
    scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    scores = scores.tril(length - len(q))
    return _mix(scores.masked_fill(scores == 0, -torch.inf).softmax(-1), v)


@wrong("cached_attention", fails=LEFTOVERS)
def nan_values_replaced(q, k, v, length, *, scale):
    return _cached(q, k, v.where(~v.isnan(), 0.0), _visible(len(q), len(k), length), scale)


@wrong("cached_attention", fails=UNCHANGED)
def cached_query_scaled_and_scaled_back(q, k, v, length, *, scale):
    q *= scale
    out = _cached(q, k[:length], v[:length], _visible(len(q), length, length), 1.0)
    q /= scale
    return out


_MASKS = {}


@wrong("cached_attention", fails="every new query sees its whole past")
def mask_kept_from_an_earlier_call(q, k, v, length, *, scale):
    """One mask for each shape; but the length grows, and the shapes stay the same."""
    mask = _MASKS.setdefault((len(q), len(k)), _visible(len(q), len(k), length))
    return _cached(q, k[:length], v[:length], mask[:, :length], scale)


@wrong("attention", fails="no query sees a later key")
def hidden_after_the_softmax(q, k, v, *, scale):
    weights = (torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k) * scale).softmax(-1).tril()
    return _mix(weights / weights.sum(-1, keepdim=True), v)
