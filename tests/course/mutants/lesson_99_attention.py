"""Wrong solutions of lesson 99: attention for a whole batch."""

import torch

from tests.course.mutants import wrong


def attend(q, k, v, unseen, scale, softmax=lambda scores: scores.softmax(-1)):
    """Correct attention, given the hidden keys of each row and repeated KV heads."""
    v = v.masked_fill(unseen[..., None, None], 0)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    return torch.einsum("rhk,rkhd->rhd", softmax(scores.masked_fill(unseen[:, None], -torch.inf)), v)


def repeated(q, k, v):
    group = q.shape[1] // k.shape[2]
    return k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)


def beyond(k, lengths):
    return torch.arange(k.shape[1], device=k.device) >= lengths[:, None]


@wrong("batched_attention", fails="each row ends at its own length")
def one_length_for_all(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths.max().expand(len(q))), scale)


@wrong("batched_attention", fails="each row ends at its own length")
def one_key_too_many(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths + 1), scale)


@wrong("batched_attention", fails="each row ends at its own length")
def sixteen_keys_at_most(q, k, v, lengths, scale):
    k, v = repeated(q, k[:, :16], v[:, :16])
    return attend(q, k, v, beyond(k, lengths), scale)


@wrong("batched_attention", fails="scores are scaled")
def forgets_the_scale(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths), 1.0)


@wrong("batched_attention", fails="scores are scaled")
def always_the_root_of_d(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths), q.shape[-1] ** -0.5)


@wrong("batched_attention", fails="neighboring heads share a KV head")
def heads_interleaved(q, k, v, lengths, scale):
    group = q.shape[1] // k.shape[2]
    k, v = k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1)
    return attend(q, k, v, beyond(k, lengths), scale)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def masks_the_scores_alone(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(beyond(k, lengths)[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def masks_with_minus_10_000(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    unseen = beyond(k, lengths)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(unseen[:, None], -1e4).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v.masked_fill(unseen[..., None, None], 0))


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def masks_with_minus_a_billion(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    unseen = beyond(k, lengths)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(unseen[:, None], -1e9).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v.masked_fill(unseen[..., None, None], 0))


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def clears_nan_alone(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(beyond(k, lengths)[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, torch.where(v.isnan(), 0, v))


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def adds_minus_a_billion(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    unseen = beyond(k, lengths)
    scores = torch.einsum("rhd,rkhd->rhk", q, k.nan_to_num()) * scale - (1e9 * unseen[:, None]).to(q.dtype)
    return torch.einsum("rhk,rkhd->rhd", scores.softmax(-1), v.masked_fill(unseen[..., None, None], 0))


@wrong("batched_attention", fails="dtype and device are those of q")
def stays_in_float64(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q.double(), k.double(), v.double(), beyond(k, lengths), scale)


@wrong("batched_attention", fails="dtype and device are those of q")
def counts_keys_on_the_cpu(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, torch.arange(k.shape[1]) >= lengths[:, None], scale)


@wrong("batched_attention", fails="dtype and device are those of q")
def converts_the_dtype_but_not_the_device(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, torch.arange(k.shape[1]).to(lengths.dtype) >= lengths[:, None], scale)


@wrong("batched_attention", fails="large scores do not overflow")
def softmax_by_hand(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)

    def by_hand(scores):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)

    return attend(q, k, v, beyond(k, lengths), scale, by_hand)


@wrong("batched_attention", fails="large scores do not overflow")
def subtracts_the_maximum_of_all_rows(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)

    def by_hand(scores):
        weights = (scores - scores.max()).exp()
        return weights / weights.sum(-1, keepdim=True)

    return attend(q, k, v, beyond(k, lengths), scale, by_hand)


@wrong("batched_attention", fails="neighboring heads share a KV head")
def always_two_heads_for_each_kv_head(q, k, v, lengths, scale):
    if q.shape[1] > k.shape[2]:
        k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        k, v = (part[:, :, [min(head, part.shape[2] - 1) for head in range(q.shape[1])]] for part in (k, v))
    return attend(q, k, v, beyond(k, lengths), scale)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def adds_minus_infinity(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    unseen = beyond(k, lengths)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    hide = torch.zeros_like(scores).masked_fill(unseen[:, None], -torch.inf)
    return torch.einsum("rhk,rkhd->rhd", (scores + hide).softmax(-1), v.masked_fill(unseen[..., None, None], 0))


@wrong("batched_attention", fails="the tensors are unchanged")
def scales_the_queries_in_place(q, k, v, lengths, scale):
    q *= scale
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths), 1.0)


@wrong("batched_attention", fails="the tensors are unchanged")
def clears_the_callers_values(q, k, v, lengths, scale):
    v[beyond(k, lengths)] = 0
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths), scale)


OUT = {}


@wrong("batched_attention", fails="the tensors are unchanged")
def one_output_for_all_calls(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    out = OUT.setdefault((q.shape, q.dtype, q.device), torch.empty_like(q))
    return out.copy_(attend(q, k, v, beyond(k, lengths), scale))


@wrong("batched_attention", fails="large scores do not overflow")
def softmax_by_hand_in_float64(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)

    def by_hand(scores):
        weights = scores.double().exp()
        return (weights / weights.sum(-1, keepdim=True)).to(q.dtype)

    return attend(q, k, v, beyond(k, lengths), scale, by_hand)


MASKS = {}


@wrong("batched_attention", fails="each row ends at its own length")
def one_mask_for_each_shape(q, k, v, lengths, scale):
    unseen = MASKS.setdefault((q.shape, k.shape[1]), beyond(k, lengths))
    k, v = repeated(q, k, v)
    return attend(q, k, v, unseen, scale)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def cuts_where_the_longest_row_ends(q, k, v, lengths, scale):
    k, v = repeated(q, k[:, : lengths.max()], v[:, : lengths.max()])
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(beyond(k, lengths)[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def clears_nan_wherever_it_is(q, k, v, lengths, scale):
    k, v = repeated(q, k, v.nan_to_num())
    return attend(q, k, v, beyond(k, lengths), scale)


@wrong("batched_attention", fails="the tensors are unchanged")
def scales_the_queries_in_place_and_back(q, k, v, lengths, scale):
    q *= scale
    k, v = repeated(q, k, v)
    out = attend(q, k, v, beyond(k, lengths), 1.0)
    q /= scale
    return out


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def clears_nan_in_all_keys(q, k, v, lengths, scale):
    k, v = repeated(q, k.nan_to_num(), v)
    return attend(q, k, v, beyond(k, lengths), scale)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def hides_scores_that_are_nan(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    unseen = beyond(k, lengths)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    scores = scores.masked_fill(unseen[:, None] | scores.isnan(), -torch.inf)
    return torch.einsum("rhk,rkhd->rhd", scores.softmax(-1), v.masked_fill(unseen[..., None, None], 0))


@wrong("batched_attention", fails="a full row is plain attention")
def scores_of_eight_numbers(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q[..., :8], k[..., :8], v, beyond(k, lengths), scale)


@wrong("batched_attention", fails="a row's length holds for all its heads")
def lengths_in_the_order_of_heads(q, k, v, lengths, scale):
    """Rows and heads as one axis, whose places get the lengths of other rows."""
    (rows, heads, d), (keys, kv_heads) = q.shape, k.shape[1:3]
    k, v = (part.transpose(1, 2).reshape(rows * heads, keys, 1, d) for part in repeated(q, k, v))
    ends = lengths.repeat(heads // kv_heads).repeat_interleave(kv_heads)
    return attend(q.reshape(rows * heads, 1, d), k, v, beyond(k, ends), scale).view(rows, heads, d)
