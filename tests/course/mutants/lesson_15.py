"""Wrong solutions of lesson 15: factors of a change, and what a batch with adapters reads."""

import torch

from tests.course.mutants import wrong

COUNT = "down has `rank` rows, and up as many columns"
NEAREST = "up @ down is the nearest matrix of its rank"
BACK = "a change that has this rank, or a lower one, comes back"
DTYPE = "float64 loses nothing, and the dtype stays"
KEPT = "the change itself is not changed"


def parts(change):
    return torch.linalg.svd(change, full_matrices=False)


@wrong("low_rank", fails=COUNT)
def keeps_everything(change, rank):
    """Right as a product only where the change has that rank."""
    u, s, v = parts(change)
    kept = torch.where(torch.arange(len(s)) < rank, s, 0.0)
    return kept[:, None] * v, u


@wrong("low_rank", fails=COUNT)
def filled_up_to_eight(change, rank):
    u, s, v = parts(change)
    down, up = change.new_zeros(max(8, rank), change.shape[1]), change.new_zeros(change.shape[0], max(8, rank))
    down[:rank], up[:, :rank] = s[:rank, None] * v[:rank], u[:, :rank]
    return down, up


@wrong("low_rank", fails=NEAREST)
def sorted_the_wrong_way(change, rank):
    """Takes the smallest values of those that are not 0."""
    u, s, v = parts(change)
    above = int((s > 1e-6 * s.amax().clamp(min=1e-30)).sum())
    at = slice(max(0, above - rank), max(0, above - rank) + rank)
    return s[at, None] * v[at], u[:, at]


@wrong("low_rank", fails=NEAREST)
def from_the_first_columns(change, rank):
    """Projects onto the first columns that are independent: right for a change of this rank, not the nearest else."""
    q, _ = torch.linalg.qr(change)
    up = q[:, :rank]
    return up.T @ change, up


@wrong("low_rank", fails=NEAREST)
def by_random_directions(change, rank):
    generator = torch.Generator().manual_seed(0)
    seen = change @ torch.randn(change.shape[1], rank, generator=generator, dtype=torch.float64).to(change.dtype)
    up, _ = torch.linalg.qr(seen)
    return up.T @ change, up


@wrong("low_rank", fails=NEAREST)
def by_oversampled_random_directions(change, rank):
    """Near where the values decrease quickly."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(change, q=min(rank + 6, *change.shape))
    return v.T[:rank], (u * s)[:, :rank]


@wrong("low_rank", fails=BACK)
def leaves_out_values_of_zero(change, rank):
    u, s, v = parts(change)
    rank = int((s[:rank] > 1e-6).sum())
    return s[:rank, None] * v[:rank], u[:, :rank]


@wrong("low_rank", fails=BACK)
def divides_by_the_values(change, rank):
    """down from up, by dividing: NaN where a value is 0."""
    u, s, v = parts(change)
    s = torch.where(s > 1e-12, s, 0.0)
    up = u[:, :rank] * s[:rank]
    return (up.T @ change) / s[:rank, None].square(), up


@wrong("low_rank", fails=DTYPE)
def always_in_float32(change, rank):
    u, s, v = torch.linalg.svd(change.float(), full_matrices=False)
    return (s[:rank, None] * v[:rank]).to(change.dtype), u[:, :rank].to(change.dtype)


@wrong("low_rank", fails=DTYPE)
def returns_float64(change, rank):
    u, s, v = parts(change.double())
    return s[:rank, None] * v[:rank], u[:, :rank]


@wrong("low_rank", fails=KEPT)
def subtracts_in_place(change, rank):
    """Finds one direction after the other, and takes it away from the change."""
    downs, ups = [], []
    for _ in range(rank):
        u, s, v = parts(change)
        downs.append(s[0] * v[0])
        ups.append(u[:, 0])
        change -= s[0] * torch.outer(u[:, 0], v[0])
    return torch.stack(downs), torch.stack(ups, 1)


MERGED = "merged: a matrix of its own for each adapter"
NONE = "merged: tokens without an adapter need the matrix itself"
BY_TOKEN = "by token: both factors for each token that has an adapter"
GROUPED = "grouped: both factors once for each adapter"
NO_FACTORS = "tokens without an adapter read no factors"
ABSENT = "what has no token in the batch is not read"
SAME = "the dictionary is not changed"


def read(out, inputs, rank, tokens):
    present = {name: count for name, count in tokens.items() if count}
    matrix, factors = out * inputs if present else 0, rank * (out + inputs)
    adapters = [count for name, count in present.items() if name is not None]
    return len(present) * matrix, matrix + sum(adapters) * factors, matrix + len(adapters) * factors


@wrong("numbers_read", fails=MERGED)
def merged_for_each_token(out, inputs, rank, tokens):
    _, by_token, grouped = read(out, inputs, rank, tokens)
    alone = 1 if tokens.get(None) else 0
    return out * inputs * (alone + sum(n for name, n in tokens.items() if name)), by_token, grouped


@wrong("numbers_read", fails=MERGED)
def two_merged_at_most(out, inputs, rank, tokens):
    merged, by_token, grouped = read(out, inputs, rank, tokens)
    return merged if None in tokens else min(merged, 2 * out * inputs), by_token, grouped


@wrong("numbers_read", fails=NONE)
def merged_without_the_model_itself(out, inputs, rank, tokens):
    _, by_token, grouped = read(out, inputs, rank, tokens)
    return out * inputs * sum(1 for name, n in tokens.items() if name and n), by_token, grouped


@wrong("numbers_read", fails=NONE)
def the_model_itself_for_each_token(out, inputs, rank, tokens):
    merged, by_token, grouped = read(out, inputs, rank, tokens)
    return merged + out * inputs * max(0, tokens.get(None, 0) - 1), by_token, grouped


@wrong("numbers_read", fails=BY_TOKEN)
def by_token_once_for_each_adapter(out, inputs, rank, tokens):
    merged, _, grouped = read(out, inputs, rank, tokens)
    return merged, grouped, grouped


@wrong("numbers_read", fails=BY_TOKEN)
def by_token_without_the_matrix_of_later_tokens(out, inputs, rank, tokens):
    """Each token is thought to read the matrix again."""
    merged, by_token, grouped = read(out, inputs, rank, tokens)
    again = max(0, sum(n for name, n in tokens.items() if name) - sum(1 for name, n in tokens.items() if name and n))
    return merged, by_token + again * out * inputs, grouped


@wrong("numbers_read", fails=GROUPED)
def grouped_like_by_token(out, inputs, rank, tokens):
    merged, by_token, _ = read(out, inputs, rank, tokens)
    return merged, by_token, by_token


@wrong("numbers_read", fails=GROUPED)
def grouped_once_for_all(out, inputs, rank, tokens):
    """One pair of factors, if tokens share adapters."""
    merged, by_token, grouped = read(out, inputs, rank, tokens)
    shared = max((n for name, n in tokens.items() if name), default=0) > 1
    return merged, by_token, out * inputs + rank * (out + inputs) if shared else grouped


@wrong("numbers_read", fails=NO_FACTORS)
def factors_for_none_too(out, inputs, rank, tokens):
    merged, by_token, grouped = read(out, inputs, rank, tokens)
    count = tokens.get(None, 0)
    factors = rank * (out + inputs)
    return merged, by_token + count * factors, grouped + (1 if count else 0) * factors


@wrong("numbers_read", fails=ABSENT)
def factors_of_all_that_are_loaded(out, inputs, rank, tokens):
    merged, by_token, grouped = read(out, inputs, rank, tokens)
    absent = sum(1 for name, n in tokens.items() if name and not n)
    return merged, by_token, grouped + absent * rank * (out + inputs)


@wrong("numbers_read", fails=ABSENT)
def merged_for_all_that_are_loaded(out, inputs, rank, tokens):
    _, by_token, grouped = read(out, inputs, rank, tokens)
    return len(tokens) * out * inputs, by_token, grouped


@wrong("numbers_read", fails=ABSENT)
def the_matrix_for_no_tokens(out, inputs, rank, tokens):
    merged, by_token, grouped = read(out, inputs, rank, tokens)
    return merged, max(by_token, out * inputs), max(grouped, out * inputs)


@wrong("numbers_read", fails=SAME)
def pops_none(out, inputs, rank, tokens):
    found = read(out, inputs, rank, tokens)
    tokens.pop(None, 0)
    return found
