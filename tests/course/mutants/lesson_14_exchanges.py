"""Wrong solutions of lesson 14: sums over ranks, and the largest logit of a divided vocabulary."""

import torch

from tests.course.mutants import wrong

ANY = "any number of ranks"
BITS = "all ranks have the same bits"
ORDER = "added in the order of ranks, wherever in x an element is"
WIDE = "numbers of 16 bits are added in float32"
DTYPE = "the sum has the dtype of x, and float64 loses nothing"
SHAPE = "any shape"


def collected(x, ranks):
    got = {ranks.rank: x}
    for step in range(1, ranks.size):
        source = (ranks.rank - step) % ranks.size
        got[source] = ranks.exchange(x, (ranks.rank + step) % ranks.size, source)
    return [got[rank] for rank in range(ranks.size)]


def added(parts, dtype=None):
    total = parts[0].to(dtype or torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for each in parts[1:]:
        total += each
    return total


@wrong("all_reduce", fails=ANY)
def only_the_next_rank(x, ranks):
    other = ranks.exchange(x, (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size)
    return added([x, other] if ranks.rank == 0 else [other, x]).to(x.dtype)


@wrong("all_reduce", fails=ANY)
def sends_what_it_has_added(x, ranks):
    parts, total = [x], x
    for step in range(1, ranks.size):
        got = ranks.exchange(total, (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size)
        parts.append(got)
        total = added(parts if ranks.size == 2 and ranks.rank == 0 else parts[::-1]).to(x.dtype)
    return total


@wrong("all_reduce", fails=ANY)
def waits_for_the_rank_that_it_sends_to(x, ranks):
    parts = {ranks.rank: x}
    for step in range(1, ranks.size):
        other = (ranks.rank + step) % ranks.size
        parts[other] = ranks.exchange(x, other, other)
    return added([parts[rank] for rank in range(ranks.size)]).to(x.dtype)


@wrong("all_reduce", fails=BITS)
def its_own_first(x, ranks):
    others = [part for rank, part in enumerate(collected(x, ranks)) if rank != ranks.rank]
    return added([x, *others]).to(x.dtype)


@wrong("all_reduce", fails=BITS)
def as_they_arrive(x, ranks):
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for step in range(1, ranks.size):
        total += ranks.exchange(x, (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size)
    return total.to(x.dtype)


@wrong("all_reduce", fails=BITS)
def its_own_first_in_float64(x, ranks):
    """Nearly always the same bits for float32, and not for float64."""
    others = [part for rank, part in enumerate(collected(x, ranks)) if rank != ranks.rank]
    return added([x, *others], torch.float64).to(x.dtype)


@wrong("all_reduce", fails=ORDER)
def from_the_last_rank_on(x, ranks):
    return added(collected(x, ranks)[::-1]).to(x.dtype)


@wrong("all_reduce", fails=ORDER)
def each_part_in_its_own_order(x, ranks):
    """A ring: the sum of part p begins with rank p + 1."""
    parts = [part.flatten() for part in collected(x, ranks)]
    total = torch.empty_like(parts[0], dtype=torch.promote_types(x.dtype, torch.float32))
    for p in range(ranks.size):
        place = slice(p * total.numel() // ranks.size, (p + 1) * total.numel() // ranks.size)
        order = [(p + 1 + step) % ranks.size for step in range(ranks.size)]
        total[place] = added([parts[rank][place] for rank in order])
    return total.view(x.shape).to(x.dtype)


@wrong("all_reduce", fails=ORDER)
def by_sum_of_a_stack(x, ranks):
    """Its order depends on shape and place: in-order for many elements, not for few or for the end of a row."""
    return torch.stack(collected(x, ranks)).to(torch.promote_types(x.dtype, torch.float32)).sum(0).to(x.dtype)


@wrong("all_reduce", fails=ORDER)
def by_sum_of_a_stack_in_float64(x, ranks):
    """Rounded once, so only float64 shows it."""
    return torch.stack(collected(x, ranks)).double().sum(0).to(x.dtype)


@wrong("all_reduce", fails=WIDE)
def adds_in_the_dtype_of_x(x, ranks):
    return added(collected(x, ranks), x.dtype)


@wrong("all_reduce", fails=WIDE)
def adds_float16_in_float16(x, ranks):
    return added(collected(x, ranks), torch.float32 if x.dtype == torch.bfloat16 else x.dtype).to(x.dtype)


@wrong("all_reduce", fails=WIDE)
def adds_bfloat16_in_bfloat16(x, ranks):
    return added(collected(x, ranks), torch.float32 if x.dtype == torch.float16 else x.dtype).to(x.dtype)


@wrong("all_reduce", fails=DTYPE)
def always_adds_in_float32(x, ranks):
    return added([part.float() for part in collected(x, ranks)]).to(x.dtype)


@wrong("all_reduce", fails=DTYPE)
def sends_float32_and_adds_in_float64(x, ranks):
    return added(collected(x.float(), ranks), torch.float64).to(x.dtype)


@wrong("all_reduce", fails=DTYPE)
def returns_float32(x, ranks):
    return added(collected(x, ranks))


@wrong("all_reduce", fails=SHAPE)
def leaves_three_dimensions_flat(x, ranks):
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    return added(collected(rows, ranks)).to(x.dtype)


@wrong("all_reduce", fails=SHAPE)
def adds_in_the_order_of_memory(x, ranks):
    """Another one than that of a transposed view's elements."""
    numbers = x.as_strided((x.numel(),), (1,))
    return added(collected(numbers, ranks)).to(x.dtype).view(x.shape)


def two_rounds(x, ranks, rest, dtype=None, at=0):
    """Each rank adds its part of x, and sends it to all. rest(flat, found): the sum of the numbers that are left over.

    Where there are fewer numbers than ranks, all of them are sent at once. at: the rank with which a sum begins.
    """
    flat = x.flatten()
    per = flat.numel() // ranks.size
    if per == 0:
        return added(collected(x, ranks)).to(x.dtype)
    pieces = flat[: per * ranks.size].view(ranks.size, per)
    mine, total = {ranks.rank: pieces[ranks.rank]}, torch.empty_like(pieces)
    for step in range(1, ranks.size):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        mine[source] = ranks.exchange(pieces[to], to, source)
    done = added([mine[(at + rank) % ranks.size] for rank in range(ranks.size)], dtype).to(x.dtype)
    for rank, piece in enumerate(collected(done, ranks)):
        total[rank] = piece
    return torch.cat((total.flatten(), rest(flat[per * ranks.size :], ranks))).view(x.shape)


def added_in_order(rest, ranks):
    return added(collected(rest, ranks)).to(rest.dtype)


@wrong("all_reduce", fails=SHAPE)
def in_two_rounds_without_what_is_left_over(x, ranks):
    return two_rounds(x, ranks, lambda rest, ranks: rest)


@wrong("all_reduce", fails=SHAPE)
def in_two_rounds_with_zeros_for_what_is_left_over(x, ranks):
    return two_rounds(x, ranks, lambda rest, ranks: torch.zeros_like(rest))


@wrong("all_reduce", fails=BITS)
def in_two_rounds_and_what_is_left_over_from_its_own_number_on(x, ranks):
    def own_first(rest, ranks):
        parts = collected(rest, ranks)
        return added(parts[ranks.rank :] + parts[: ranks.rank]).to(rest.dtype)

    return two_rounds(x, ranks, own_first)


@wrong("all_reduce", fails=ORDER)
def in_two_rounds_that_begin_with_another_rank(x, ranks):
    return two_rounds(x, ranks, added_in_order, at=1)


@wrong("all_reduce", fails=WIDE)
def in_two_rounds_in_the_dtype_of_x(x, ranks):
    return two_rounds(x, ranks, added_in_order, dtype=x.dtype)


@wrong("all_reduce", fails=DTYPE)
def in_two_rounds_in_float32(x, ranks):
    return two_rounds(x, ranks, added_in_order, dtype=torch.float32)


COUNT = "tokens count from the first rank's first one"
ROWS = "each row has its own answer"
TIES = "of equal logits, the first token's is taken"
NEGATIVE = "logits may all be negative"
EXACT = "token ids stay exact, however large"
WIDER = "logits of float64 are compared in float64"
FEW = "the ranks tell each other a few numbers a row"


def chosen(logits, ranks, offset, last=False):
    largest, token = logits.double().max(-1)
    every = ranks.all_gather(torch.stack((largest, (token + offset).double()), -1)).unflatten(-1, (ranks.size, 2))
    values, tokens = every[..., 0], every[..., 1]
    best = values.size(-1) - 1 - values.flip(-1).argmax(-1) if last else values.argmax(-1)
    return values.amax(-1), tokens.gather(-1, best[:, None])[:, 0].long()


@wrong("sharded_argmax", fails=COUNT)
def its_own_columns(logits, ranks):
    return chosen(logits, ranks, 0)


@wrong("sharded_argmax", fails=COUNT)
def counts_ranks_by_two(logits, ranks):
    return chosen(logits, ranks, ranks.rank * ranks.size)


@wrong("sharded_argmax", fails=ANY)
def compares_two_ranks(logits, ranks):
    largest, token = logits.double().max(-1)
    told = torch.stack((largest, (token + ranks.rank * logits.shape[-1]).double()), -1)
    every = ranks.all_gather(told).unflatten(-1, (ranks.size, 2))
    first, second = every[:, 0], every[:, 1]
    best = torch.where(first[:, :1] >= second[:, :1], first, second)
    return best[:, 0], best[:, 1].long()


@wrong("sharded_argmax", fails=ROWS)
def takes_the_rank_of_the_first_row(logits, ranks):
    largest, token = logits.double().max(-1)
    told = torch.stack((largest, (token + ranks.rank * logits.shape[-1]).double()), -1)
    every = ranks.all_gather(told).unflatten(-1, (ranks.size, 2))
    best = int(every[0, :, 0].argmax())
    return every[:, best, 0], every[:, best, 1].long()


@wrong("sharded_argmax", fails=TIES)
def the_last_of_equal_ranks(logits, ranks):
    return chosen(logits, ranks, ranks.rank * logits.shape[-1], last=True)


def chosen_one_by_one(logits, ranks, begin):
    """With a running maximum."""
    largest, token = logits.max(-1)
    told = torch.stack((largest.double(), (token + ranks.rank * logits.shape[-1]).double()), -1)
    every = ranks.all_gather(told).unflatten(-1, (ranks.size, 2))
    best = torch.tensor([[begin, 0]], dtype=torch.float64).repeat(len(logits), 1)
    for rank in range(ranks.size):
        better = every[:, rank, :1] > best[:, :1]
        best = torch.where(better, every[:, rank], best)
    return best[:, 0], best[:, 1].long()


@wrong("sharded_argmax", fails=NEGATIVE)
def begins_at_zero(logits, ranks):
    return chosen_one_by_one(logits, ranks, 0.0)


@wrong("sharded_argmax", fails=NEGATIVE)
def begins_at_a_low_number(logits, ranks):
    return chosen_one_by_one(logits, ranks, -1e4)


@wrong("sharded_argmax", fails=NEGATIVE)
def begins_at_a_very_low_number(logits, ranks):
    return chosen_one_by_one(logits, ranks, -1e9)


def chosen_with_ids_as(dtype, logits, ranks):
    """The ids are gathered in this dtype."""
    largest, column = logits.max(-1)
    values = ranks.all_gather(largest[:, None])
    tokens = ranks.all_gather((column + ranks.rank * logits.shape[-1])[:, None].to(dtype))
    best = values.argmax(-1, keepdim=True)
    return values.gather(-1, best)[:, 0], tokens.gather(-1, best)[:, 0].long()


@wrong("sharded_argmax", fails=EXACT)
def gathers_ids_as_bfloat16(logits, ranks):
    return chosen_with_ids_as(torch.bfloat16, logits, ranks)


@wrong("sharded_argmax", fails=EXACT)
def gathers_ids_as_float16(logits, ranks):
    return chosen_with_ids_as(torch.float16, logits, ranks)


@wrong("sharded_argmax", fails=EXACT)
def gathers_ids_as_int16(logits, ranks):
    return chosen_with_ids_as(torch.int16, logits, ranks)


@wrong("sharded_argmax", fails=EXACT)
def gathers_ids_in_16_bits(logits, ranks):
    """As uint16, which holds ids up to 65,535."""
    value, token = chosen(logits, ranks, ranks.rank * logits.shape[-1])
    return value, token % 2**16


@wrong("sharded_argmax", fails=WIDER)
def compares_in_float32(logits, ranks):
    return chosen(logits.float(), ranks, ranks.rank * logits.shape[-1])


@wrong("sharded_argmax", fails=WIDER)
def tells_both_numbers_in_float32(logits, ranks):
    largest, token = logits.max(-1)
    told = torch.stack((largest.float(), (token + ranks.rank * logits.shape[-1]).float()), -1)
    every = ranks.all_gather(told).unflatten(-1, (ranks.size, 2))
    best = every[..., 0].argmax(-1, keepdim=True)
    return every[..., 0].gather(-1, best)[:, 0], every[..., 1].gather(-1, best)[:, 0].long()


@wrong("sharded_argmax", fails=FEW)
def gathers_all_logits(logits, ranks):
    return ranks.all_gather(logits.contiguous()).max(-1)
