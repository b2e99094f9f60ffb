"""Wrong solutions of lesson 04: online softmax, tiles of a prefill, split keys."""

import itertools

import torch

from tests.course.mutants import wrong

# ---- online_attention


def _walk(
    tiles, rows, dim, *, sum_rescaled=True, output_rescaled=True, guarded=True, falls=False, divides=False,
    shared=False, fixed=False, most=torch.inf, zero_kept=False, in_place=False, kept=None,
    sum_factor=lambda rescale, grown: rescale, output_factor=lambda rescale, grown: rescale,
):  # fmt: skip
    """A correct loop over the tiles, except for the selected mistakes."""
    maximum, total, out = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        largest = scores.amax(-1, keepdim=True)
        if shared:
            largest = scores.max().expand(rows, 1)
        new = largest if falls else torch.maximum(maximum, largest)
        if fixed:
            new = torch.where(maximum == -torch.inf, largest, maximum)
        grown = new > maximum
        shift = torch.where(new == -torch.inf, 0.0, new) if guarded else new
        scores = scores.sub_(shift) if in_place else scores - shift
        weights, rescale = scores.clamp(max=most).exp(), (maximum - shift).exp()
        if kept is not None:
            kept += [weights, values.clone()]
        total = (total * sum_factor(rescale, grown) if sum_rescaled else total) + weights.sum(-1, keepdim=True)
        out = (out * output_factor(rescale, grown) if output_rescaled else out) + weights @ values
        if divides:
            out = out / torch.where(total == 0, 1.0, total)
        maximum = shift if zero_kept else new
    return out if divides else out / torch.where(total == 0, 1.0, total)


@wrong("online_attention", fails="the sum is rescaled when the maximum grows")
def sum_as_it_was(tiles, rows, dim):
    return _walk(tiles, rows, dim, sum_rescaled=False)


@wrong("online_attention", fails="the output is rescaled when the maximum grows")
def output_as_it_was(tiles, rows, dim):
    return _walk(tiles, rows, dim, output_rescaled=False)


@wrong("online_attention", fails="the sum is rescaled when the maximum grows")
def sum_forgotten_when_the_maximum_grows(tiles, rows, dim):
    return _walk(tiles, rows, dim, sum_factor=lambda rescale, grown: (~grown).to(rescale.dtype))


@wrong("online_attention", fails="the sum is rescaled when the maximum grows")
def first_maximum_for_good_and_a_clamp(tiles, rows, dim):
    return _walk(tiles, rows, dim, fixed=True, most=600)


@wrong("online_attention", fails="the output is rescaled when the maximum grows")
def output_forgotten_when_the_maximum_grows(tiles, rows, dim):
    return _walk(tiles, rows, dim, output_factor=lambda rescale, grown: (~grown).to(rescale.dtype))


@wrong("online_attention", fails="the output is rescaled when the maximum grows")
def output_rescaled_twice(tiles, rows, dim):
    return _walk(tiles, rows, dim, output_factor=lambda rescale, grown: rescale * rescale)


@wrong("online_attention", fails="the output is rescaled when the maximum grows")
def one_factor_for_the_outputs_of_all_rows(tiles, rows, dim):
    return _walk(tiles, rows, dim, output_factor=lambda rescale, grown: rescale.max())


@wrong("online_attention", fails="the maximum never decreases")
def maximum_of_the_tile(tiles, rows, dim):
    return _walk(tiles, rows, dim, falls=True)


@wrong("online_attention", fails="hidden keys have no weight")
def infinity_less_infinity(tiles, rows, dim):
    return _walk(tiles, rows, dim, guarded=False)


@wrong("online_attention", fails="the output is divided once, at the end")
def divided_tile_by_tile(tiles, rows, dim):
    return _walk(tiles, rows, dim, divides=True)


@wrong("online_attention", fails="no tile is kept")
def all_tiles_first(tiles, rows, dim):
    kept = list(tiles)
    scores, values = torch.cat([scores for scores, _ in kept], 1), torch.cat([values for _, values in kept])
    return scores.softmax(-1).nan_to_num(0.0) @ values


@wrong("online_attention", fails="no tile is kept")
def copies_of_all_tiles(tiles, rows, dim):
    return _walk(tiles, rows, dim, kept=[])


@wrong("online_attention", fails="no tile is kept")
def lists_of_all_tiles(tiles, rows, dim):
    kept = [(scores.tolist(), values.tolist(), scores.dtype) for scores, values in tiles]
    return _walk((tuple(torch.tensor(each, dtype=dtype) for each in (s, v)) for s, v, dtype in kept), rows, dim)


@wrong("online_attention", fails="no tile is kept")
def an_output_of_every_tile(tiles, rows, dim):
    parts = [(scores.logsumexp(-1), scores.softmax(-1).nan_to_num() @ values) for scores, values in tiles]
    weights = torch.stack([log_total for log_total, _ in parts]).softmax(0).nan_to_num()
    return (weights[..., None] * torch.stack([out for _, out in parts])).sum(0)


@wrong("online_attention", fails="scores of any size give exact weights")
def maximum_from_zero(tiles, rows, dim):
    maximum, total, out = torch.zeros(rows, 1), torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        # Clamped, so that a single low score seems to be right.
        weights = torch.where(scores == -torch.inf, 0.0, (scores - new).clamp(min=-600).exp())
        rescale, maximum = (maximum - new).exp(), new
        total, out = total * rescale + weights.sum(-1, keepdim=True), out * rescale + weights @ values
    return (out / total).nan_to_num()


@wrong("online_attention", fails="scores of any size give exact weights")
def maximum_from_a_low_number(tiles, rows, dim):
    maximum, total, out = torch.full((rows, 1), -1e4), torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights, rescale, maximum = (scores - new).exp(), (maximum - new).exp(), new
        total, out = total * rescale + weights.sum(-1, keepdim=True), out * rescale + weights @ values
    return out / torch.where(total == 0, 1.0, total)


@wrong("online_attention", fails="scores of any size give exact weights")
def the_first_512_keys_of_a_tile(tiles, rows, dim):
    return _walk(((scores[:, :512], values[:512]) for scores, values in tiles), rows, dim)


@wrong("online_attention", fails="the precision is that of the tiles")
def in_single_precision(tiles, rows, dim):
    return _walk(((scores.float(), values.float()) for scores, values in tiles), rows, dim)


@wrong("online_attention", fails="the precision is that of the tiles")
def in_double_precision(tiles, rows, dim):
    return _walk(((scores.double(), values.double()) for scores, values in tiles), rows, dim)


@wrong("online_attention", fails="the output is divided once, at the end")
def the_first_fifty_tiles(tiles, rows, dim):
    return _walk(itertools.islice(tiles, 50), rows, dim)


_RESULTS: dict[tuple, torch.Tensor] = {}


@wrong("online_attention", fails="the tiles are not changed")
def one_result_for_all_calls(tiles, rows, dim):
    out = _walk(tiles, rows, dim)
    return _RESULTS.setdefault((rows, dim, out.dtype), torch.empty_like(out)).copy_(out)


@wrong("online_attention", fails="hidden keys have no weight")
def zero_kept_as_the_maximum(tiles, rows, dim):
    return _walk(tiles, rows, dim, zero_kept=True)


@wrong("online_attention", fails="the sum is rescaled when the maximum grows")
def first_maximum_for_good(tiles, rows, dim):
    return _walk(tiles, rows, dim, fixed=True)


@wrong("online_attention", fails="the maximum never decreases")
def a_hidden_tile_erases_what_came_before(tiles, rows, dim):
    maximum, total, out = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        largest = scores.amax(-1, keepdim=True)
        new = torch.maximum(maximum, largest)
        weights = torch.where(largest == -torch.inf, 0.0, (scores - new).exp())
        rescale, maximum = torch.where(largest == -torch.inf, 0.0, (maximum - new).exp()), new
        total, out = total * rescale + weights.sum(-1, keepdim=True), out * rescale + weights @ values
    return out / torch.where(total == 0, 1.0, total)


@wrong("online_attention", fails="the maximum never decreases")
def zero_subtracted_in_a_hidden_tile(tiles, rows, dim):
    maximum, total, out = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        largest = scores.amax(-1, keepdim=True)
        new = torch.maximum(maximum, largest)
        shift = torch.where(largest == -torch.inf, 0.0, new)
        weights, rescale, maximum = (scores - shift).exp(), (maximum - shift).exp(), new
        total, out = total * rescale + weights.sum(-1, keepdim=True), out * rescale + weights @ values
    return out / torch.where(total == 0, 1.0, total)


@wrong("online_attention", fails="hidden keys have no weight")
def tiles_hidden_from_the_last_row_skipped(tiles, rows, dim):
    return _walk((each for each in tiles if each[0][-1].max() > -torch.inf), rows, dim)


@wrong("online_attention", fails="hidden keys have no weight")
def no_row_divided_if_one_sees_no_key(tiles, rows, dim):
    maximum, total, out = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, dim)
    for scores, values in tiles:
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        shift = torch.where(new == -torch.inf, 0.0, new)
        weights, rescale, maximum = (scores - shift).exp(), (maximum - shift).exp(), new
        total, out = total * rescale + weights.sum(-1, keepdim=True), out * rescale + weights @ values
    return out / total if (total > 0).all() else out


@wrong("online_attention", fails="every row has its own maximum")
def one_maximum_for_all_rows(tiles, rows, dim):
    return _walk(tiles, rows, dim, shared=True)


@wrong("online_attention", fails="the tiles are not changed")
def scores_in_place(tiles, rows, dim):
    return _walk(tiles, rows, dim, in_place=True)


# ---- tiles_to_visit


@wrong("tiles_to_visit", fails="without a window the walk begins at tile 0")
def only_the_diagonal(first, last, keys, window=None):
    begin = max(0, first - window + 1) if window else first
    return range(begin // keys, last // keys + 1)


@wrong("tiles_to_visit", fails="the tile with the last query's own key is visited")
def last_key_excluded(first, last, keys, window=None):
    begin = max(0, first - window + 1) // keys if window else 0
    return range(begin, max(-(-last // keys), 1))


@wrong("tiles_to_visit", fails="no tile after the last query is visited")
def one_tile_too_many(first, last, keys, window=None):
    begin = max(0, first - window + 1) // keys if window else 0
    return range(begin, (last + 1) // keys + 1)


@wrong("tiles_to_visit", fails="every key inside a window is visited")
def window_of_the_last_query(first, last, keys, window=None):
    begin = max(0, last - window + 1) // keys if window else 0
    return range(begin, last // keys + 1)


@wrong("tiles_to_visit", fails="no tile before every window is visited")
def window_one_too_long(first, last, keys, window=None):
    begin = max(0, first - window) // keys if window else 0
    return range(begin, last // keys + 1)


@wrong("tiles_to_visit", fails="no tile before every window is visited")
def position_equal_to_the_window_excluded(first, last, keys, window=None):
    begin = (first - window + 1) // keys if window and first > window else 0
    return range(begin, last // keys + 1)


@wrong("tiles_to_visit", fails="no tile before every window is visited")
def window_forgotten(first, last, keys, window=None):
    return range(last // keys + 1)


@wrong("tiles_to_visit", fails="no tile before tile 0 is visited")
def keys_before_the_first(first, last, keys, window=None):
    begin = (first - window + 1) // keys if window else 0
    return range(begin, last // keys + 1)


@wrong("tiles_to_visit", fails="no tile after the last query is visited")
def tiles_of_eight(first, last, keys, window=None):
    begin = max(0, first - window + 1) // keys if window else 0
    return range(begin, max(last // keys, last // 8) + 1)


@wrong("tiles_to_visit", fails="the range is computed, at any position")
def by_trying_every_pair(first, last, keys, window=None):
    tiles = {k // keys for q in range(first, last + 1) for k in range(q + 1) if window is None or k > q - window}
    return range(min(tiles), max(tiles) + 1)


@wrong("tiles_to_visit", fails="the range is computed, at any position")
def by_trying_every_tile(first, last, keys, window=None):
    tiles = [n for n in range(last // keys + 1) if window is None or n * keys + keys > first - window + 1]
    return range(tiles[0], tiles[-1] + 1)


@wrong("tiles_to_visit", fails="the range is computed, at any position")
def first_tile_of_a_window_by_search(first, last, keys, window=None):
    begin = 0
    while window is not None and begin * keys + keys <= first - window + 1:
        begin += 1
    return range(begin, last // keys + 1)


@wrong("tiles_to_visit", fails="the range is computed, at any position")
def at_most_a_thousand_tiles(first, last, keys, window=None):
    begin = max(0, first - window + 1) // keys if window else 0
    return range(begin, min(last // keys + 1, 1000))


@wrong("tiles_to_visit", fails="without a window the walk begins at tile 0")
def a_window_of_a_million_for_none(first, last, keys, window=None):
    return range(max(0, first - (window or 1_000_000) + 1) // keys, last // keys + 1)


# ---- combine


@wrong("combine", fails="a share counts by the sum of its weights")
def powers_of_two(partial, log_total):
    largest = log_total.amax(-1, keepdim=True)
    share = torch.exp2(log_total - torch.where(largest == -torch.inf, 0.0, largest))
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-30)
    return (partial * share[..., None]).sum(-2)


@wrong("combine", fails="a share counts by the sum of its weights")
def first_row_for_all(partial, log_total):
    rows = log_total.flatten(0, -2)[:1] if log_total.dim() == 3 and log_total.shape[-1] > 1 else log_total
    return (partial * rows.softmax(-1).nan_to_num()[..., None]).sum(-2)


@wrong("combine", fails="a share counts by the sum of its weights")
def eight_shares(partial, log_total):
    return (partial * log_total.softmax(-1).nan_to_num()[..., None])[..., :8, :].sum(-2)


@wrong("combine", fails="a share counts by the sum of its weights")
def sixty_four_shares(partial, log_total):
    return (partial * log_total.softmax(-1).nan_to_num()[..., None])[..., :64, :].sum(-2)


@wrong("combine", fails="the weights add up to 1")
def not_divided(partial, log_total):
    largest = log_total.amax(-1, keepdim=True)
    share = (log_total - torch.where(largest == -torch.inf, 0.0, largest)).exp()
    return (partial * share[..., None]).sum(-2)


@wrong("combine", fails="logarithms of any size give exact weights")
def exponentials_as_they_are(partial, log_total):
    share = torch.where(log_total == -torch.inf, 0.0, log_total.clamp(-600, 600).exp())
    total = share.sum(-1, keepdim=True)
    return (partial * share[..., None]).sum(-2) / torch.where(total == 0, 1.0, total)


@wrong("combine", fails="logarithms of any size give exact weights")
def mean_subtracted(partial, log_total):
    empty = log_total == -torch.inf
    mean = torch.where(empty, 0.0, log_total).sum(-1, keepdim=True) / (~empty).sum(-1, keepdim=True).clamp(min=1)
    share = (log_total - mean).exp()
    return (partial * (share / share.sum(-1, keepdim=True).clamp(min=1e-30))[..., None]).sum(-2)


@wrong("combine", fails="an empty share has no weight")
def infinities_made_numbers(partial, log_total):
    share = torch.nan_to_num(log_total, neginf=0.0).softmax(-1)
    return (partial * share[..., None]).sum(-2)


@wrong("combine", fails="an empty share has no weight")
def infinities_made_a_hundred(partial, log_total):
    share = torch.nan_to_num(log_total, neginf=-100.0).softmax(-1)
    return (partial * share[..., None]).sum(-2)


@wrong("combine", fails="an empty share has no weight")
def infinities_made_ten_thousand(partial, log_total):
    share = torch.nan_to_num(log_total, neginf=-1e4).softmax(-1)
    return (partial * share[..., None]).sum(-2)


@wrong("combine", fails="a row without keys gives zeros")
def softmax_of_nothing(partial, log_total):
    return (partial * log_total.softmax(-1)[..., None]).sum(-2)


@wrong("combine", fails="logarithms of any size give exact weights")
def one_maximum_for_all_shares(partial, log_total):
    share = (log_total - log_total.max().clamp(min=-1e30)).exp()
    return (partial * (share / share.sum(-1, keepdim=True).clamp(min=1e-30))[..., None]).sum(-2)


@wrong("combine", fails="a row without keys gives zeros")
def zeros_only_if_all_rows_are_empty(partial, log_total):
    if (log_total == -torch.inf).all():
        return torch.zeros_like(partial[..., 0, :])
    return (partial * log_total.softmax(-1)[..., None]).sum(-2)


@wrong("combine", fails="a share counts by the sum of its weights")
def weights_in_single_precision(partial, log_total):
    return (partial * log_total.float().softmax(-1).nan_to_num()[..., None]).sum(-2)


@wrong("combine", fails="the shares are not changed")
def infinities_replaced_in_place(partial, log_total):
    log_total[log_total == -torch.inf] = -1e30
    return (partial * log_total.softmax(-1)[..., None]).sum(-2)


@wrong("combine", fails="the shares are not changed")
def one_output_for_all_calls(partial, log_total):
    out = (partial * log_total.softmax(-1).nan_to_num()[..., None]).sum(-2)
    return _RESULTS.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)


@wrong("combine", fails="the shares are not changed")
def shares_in_place(partial, log_total):
    largest = log_total.amax(-1, keepdim=True)
    log_total -= torch.where(largest == -torch.inf, 0.0, largest)
    share = log_total.exp()
    share /= share.sum(-1, keepdim=True).clamp(min=1e-30)
    return (partial * share[..., None]).sum(-2)
