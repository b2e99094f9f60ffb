"""Wrong solutions of lesson 04: online softmax, tiles of a prefill, a paged decode kernel, split keys."""

import inspect
import linecache

import torch
import triton
import triton.language as tl

from minillm.course.interpret import INTERPRETED, how_kernels_run
from minillm.ops import AttentionOptions, reference
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
    return _walk(tiles, rows, dim, sum_factor=lambda rescale, grown: (~grown).double())


@wrong("online_attention", fails="the sum is rescaled when the maximum grows")
def first_maximum_for_good_and_a_clamp(tiles, rows, dim):
    return _walk(tiles, rows, dim, fixed=True, most=600)


@wrong("online_attention", fails="the output is rescaled when the maximum grows")
def output_forgotten_when_the_maximum_grows(tiles, rows, dim):
    return _walk(tiles, rows, dim, output_factor=lambda rescale, grown: (~grown).double())


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
    kept = [(scores.tolist(), values.tolist()) for scores, values in tiles]
    return _walk(((torch.tensor(s).double(), torch.tensor(v).double()) for s, v in kept), rows, dim)


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


@wrong("online_attention", fails="hidden keys have no weight")
def zero_kept_as_the_maximum(tiles, rows, dim):
    return _walk(tiles, rows, dim, zero_kept=True)


@wrong("online_attention", fails="the sum is rescaled when the maximum grows")
def first_maximum_for_good(tiles, rows, dim):
    return _walk(tiles, rows, dim, fixed=True)


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
def at_most_a_thousand_tiles(first, last, keys, window=None):
    begin = max(0, first - window + 1) // keys if window else 0
    return range(begin, min(last // keys + 1, 1000))


# ---- paged_decode


@triton.jit
def _wrong_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, scale, table_stride, block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MISTAKE: tl.constexpr,
):  # fmt: skip
    """A correct kernel, except for its one mistake."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    packed, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    head = (row * tl.num_programs(1) + kv_head) * GROUP + packed
    at_q = head[:, None] * DIM + dims[None, :]
    real = (packed < GROUP)[:, None]
    q = tl.load(q_ptr + at_q, mask=real, other=0.0).to(tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, length, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < length
        if MISTAKE == "three tiles":
            present = present & (keys < 96)
        number, offset = keys // BLOCK_SIZE, keys % BLOCK_SIZE
        if MISTAKE == "block of the tile":
            number, offset = start // BLOCK_SIZE + keys * 0, start % BLOCK_SIZE + keys - start
        if MISTAKE == "offset in the tile":
            offset = (keys - start) % BLOCK_SIZE
        if MISTAKE == "offset in the row":
            offset = keys
        if MISTAKE == "blocks of 16":
            number, offset = keys // 16, keys % 16
        at_table = table_ptr + row * table_stride + number
        if MISTAKE == "table unmasked":
            block = tl.load(at_table).to(tl.int64)
        else:
            block = tl.load(at_table, mask=present, other=0).to(tl.int64)
        at = block * block_stride + offset * slot_stride
        if MISTAKE == "blocks without gaps":
            at = (block * BLOCK_SIZE + offset) * slot_stride
        if MISTAKE == "heads without gaps":
            at += kv_head * DIM
        elif MISTAKE != "first KV head":
            at += kv_head * head_stride
        at = at[:, None] + dims[None, :]
        if MISTAKE == "k unmasked":
            k = tl.load(k_ptr + at).to(tl.float32)
        else:
            k = tl.load(k_ptr + at, mask=present[:, None], other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MISTAKE != "scale":
            scores *= scale
        if MISTAKE == "a low score":
            scores = tl.where(present[None, :], scores, -1e4)
        elif MISTAKE != "length":
            scores = tl.where(present[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        if MISTAKE == "one maximum":
            new_maximum = tl.maximum(maximum, tl.max(tl.where(real, scores, float("-inf"))))
        if MISTAKE == "first maximum":
            new_maximum = tl.where(maximum == float("-inf"), tl.max(scores, 1), maximum)
        weights = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        if MISTAKE == "powers of two for the rescaling":
            rescale = tl.exp2(maximum - new_maximum)
        if MISTAKE == "forgets":
            rescale = tl.where(maximum == new_maximum, 1.0, 0.0)
        if MISTAKE == "one factor":
            rescale = tl.min(rescale, 0) + total * 0.0
        if MISTAKE == "rescaled up to key 64":
            rescale = tl.where(start <= 64, rescale, 1.0)
        if MISTAKE == "v unmasked":
            v = tl.load(v_ptr + at).to(tl.float32)
        else:
            v = tl.load(v_ptr + at, mask=present[:, None], other=0.0).to(tl.float32)
        total = total * rescale + tl.sum(weights, 1)
        if MISTAKE != "rescale":
            out = out * rescale[:, None]
        if MISTAKE == "output rescaled twice":
            out = out * rescale[:, None]
        out += tl.dot(weights, v, input_precision="ieee")
        if MISTAKE == "16-bit sums":
            out = out.to(k_ptr.dtype.element_ty).to(tl.float32)
        maximum = new_maximum
    tl.store(out_ptr + at_q, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def _with(mistake, kernel=_wrong_kernel):
    def decode(q, cache, block_table, lengths, *, scale):
        q, kv_heads = q.contiguous(), cache.k.shape[2]
        out = torch.empty_like(q)
        kernel[(len(q), kv_heads)](
            q, cache.k, cache.v, block_table, lengths, out, scale, block_table.stride(0), *cache.k.stride()[:3],
            GROUP=q.shape[2] // kv_heads, ROWS=16, KEYS=32, DIM=q.shape[3], BLOCK_SIZE=cache.k.shape[1],
            MISTAKE=mistake,
        )  # fmt: skip
        return out

    return decode


for _mistake, _fails in {
    "offset in the row": "a key's offset is counted inside its block",
    "block of the tile": "a tile of keys may come from several blocks",
    "blocks of 16": "sizes and strides are those of the cache",
    "blocks without gaps": "sizes and strides are those of the cache",
    "offset in the tile": "sizes and strides are those of the cache",
    "a low score": "slots from the length on have no weight",
    "length": "slots from the length on have no weight",
    "v unmasked": "nothing from the length on is loaded",
    "heads without gaps": "every KV head is read",
    "first KV head": "every KV head is read",
    "scale": "scores are multiplied by the scale",
    "rescale": "the sum and the output are rescaled from tile to tile",
    "powers of two for the rescaling": "the sum and the output are rescaled from tile to tile",
    "forgets": "the sum and the output are rescaled from tile to tile",
    "one factor": "the sum and the output are rescaled from tile to tile",
    "rescaled up to key 64": "the sum and the output are rescaled from tile to tile",
    "output rescaled twice": "the sum and the output are rescaled from tile to tile",
    "three tiles": "the sum and the output are rescaled from tile to tile",
    "first maximum": "scores of any size give exact weights",
    "one maximum": "scores of any size give exact weights",
    "16-bit sums": "sums are in 32 bits, also with 16-bit keys and values",
}.items():
    wrong("paged_decode", fails=_fails)(_with(_mistake))


if how_kernels_run() == INTERPRETED:  # compiled, these load too much, and nothing shows it
    for _mistake in ("k unmasked", "table unmasked"):
        wrong("paged_decode", fails="nothing from the length on is loaded")(_with(_mistake))


def _changed(before, after):
    """The kernel above with another text, which Triton finds in the cache of source lines."""
    text = inspect.getsource(_wrong_kernel.fn).replace(before, after)
    file = f"<{before} became {after}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names = dict(globals())
    exec(compile(text, file, "exec"), names)  # noqa: S102
    return names["_wrong_kernel"]


for _before, _after in ((".to(tl.int64)", ""), (', input_precision="ieee"', ""), ('"ieee"', '"tf32"')):
    wrong("paged_decode", fails="addresses have 64 bits, and products all of float32's")(
        _with("none", _changed(_before, _after))
    )


@wrong("paged_decode", fails="addresses have 64 bits, and products all of float32's")
def without_a_kernel(q, cache, block_table, lengths, *, scale):
    return reference.decode_attention(q, cache, block_table, lengths, AttentionOptions(scale))


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


@wrong("combine", fails="the shares are not changed")
def shares_in_place(partial, log_total):
    largest = log_total.amax(-1, keepdim=True)
    log_total -= torch.where(largest == -torch.inf, 0.0, largest)
    share = log_total.exp()
    share /= share.sum(-1, keepdim=True).clamp(min=1e-30)
    return (partial * share[..., None]).sum(-2)
