"""Right but unusual solutions of lesson 14."""

import torch

from tests.course.unusual import right


@right("shard")
def with_slices_of_a_range(name, out, inputs, parts, rank, size):
    columns = name in ("o_proj", "down_proj")
    whole = range(inputs if columns else out)
    unit = len(whole) // parts
    begin = unit * (rank * parts // size)
    mine = whole[begin : begin + unit * max(parts // size, 1)]
    return (range(out), mine) if columns else (mine, range(inputs))


@right("shard")
def as_a_list(name, out, inputs, parts, rank, size):
    shared = max(1, size // parts)  # ranks that hold the same part
    group, groups = rank // shared, size // shared

    def span(length):
        return range(length * group // groups, length * (group + 1) // groups)

    if name.startswith(("o_", "down")):
        return [range(out), span(inputs)]
    return [span(out), range(inputs)]


@right("all_reduce")
def pairs(x, ranks):
    """Each rank exchanges with rank 0, then with rank 1, and so on."""
    parts = [x if other == ranks.rank else ranks.exchange(x, other, other) for other in range(ranks.size)]
    wide = torch.stack(parts).to(torch.promote_types(x.dtype, torch.float32))
    total = wide[0]
    for each in wide[1:]:
        total = total + each
    return total.to(x.dtype)


@right("all_reduce")
def around_a_ring(x, ranks):
    """Every x goes once around, from neighbor to neighbor."""
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    parts, moving = {ranks.rank: x}, x
    for step in range(1, ranks.size):
        moving = ranks.exchange(moving, after, before)
        parts[(ranks.rank - step) % ranks.size] = moving
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
    for rank in range(1, ranks.size):
        total = total + parts[rank]
    return total.to(x.dtype)


@right("all_reduce")
def in_float64(x, ranks):
    """In order, and sums of float32 are rounded once."""
    parts = [x if other == ranks.rank else ranks.exchange(x, other, other) for other in range(ranks.size)]
    wide = parts[0].double()
    for each in parts[1:]:
        wide = wide + each.double()
    return wide.to(x.dtype)


@right("all_reduce")
def by_rank_0(x, ranks):
    """Rank 0 adds, and the others get the sum; what they send it meanwhile is ignored."""
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for rank in range(1, ranks.size):
        if ranks.rank == 0:
            total += ranks.exchange(x, rank, rank)
        elif ranks.rank == rank:
            ranks.exchange(x, 0, 0)
    total = total.to(x.dtype)
    for rank in range(1, ranks.size):
        if ranks.rank == 0:
            ranks.exchange(total, rank, rank)
        elif ranks.rank == rank:
            total = ranks.exchange(x, 0, 0)
    return total


@right("all_reduce")
def in_two_rounds(x, ranks):
    """Each rank adds a part of x, and sends it to all. Some parts are longer by one number, or empty."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = x.flatten().tensor_split(ranks.size)
    total = torch.zeros_like(parts[ranks.rank], dtype=wide)
    mine = {ranks.rank: parts[ranks.rank]}
    for step in range(1, ranks.size):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        mine[source] = ranks.exchange(parts[to], to, source)
    for rank in range(ranks.size):
        total += mine[rank]
    done = {ranks.rank: total.to(x.dtype)}
    for step in range(1, ranks.size):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        done[source] = ranks.exchange(done[ranks.rank], to, source)
    return torch.cat([done[rank] for rank in range(ranks.size)]).view(x.shape)


@right("sharded_argmax")
def two_gathers(logits, ranks):
    largest, token = logits.max(-1)
    values = ranks.all_gather(largest[:, None])
    tokens = ranks.all_gather((token + ranks.rank * logits.shape[1])[:, None])
    highest = values.max(-1).values
    return highest, tokens.masked_fill(values < highest[:, None], 2**40).min(-1).values


@right("sharded_argmax")
def row_by_row(logits, ranks):
    found = []
    for row in logits:
        largest = row.max()
        token = int((row == largest).nonzero()[0]) + ranks.rank * len(row)
        every = ranks.all_gather(torch.stack((largest.double(), torch.tensor(float(token)).double()))).view(-1, 2)
        found.append(min((-value, token) for value, token in every.tolist()))
    return torch.tensor([-value for value, _ in found]), torch.tensor([int(token) for _, token in found])


@right("sharded_argmax")
def both_in_the_dtype_of_the_logits(logits, ranks):
    """float32 holds ids up to 2**24."""
    largest, token = logits.max(-1)
    told = torch.stack((largest, (token + ranks.rank * logits.shape[-1]).to(logits.dtype)), -1)
    every = ranks.all_gather(told).unflatten(-1, (ranks.size, 2))
    best = every[..., 0].argmax(-1)
    row = torch.arange(len(logits))
    return every[row, best, 0], every[row, best, 1].long()


@right("sharded_argmax")
def ids_as_int32(logits, ranks):
    largest, token = logits.max(-1)
    values = ranks.all_gather(largest[:, None])
    tokens = ranks.all_gather((token.int() + ranks.rank * logits.shape[1])[:, None])
    best, running = tokens[:, 0], torch.full((len(logits),), -torch.inf, dtype=logits.dtype)
    for rank in range(ranks.size):
        best = torch.where(values[:, rank] > running, tokens[:, rank], best)
        running = torch.maximum(running, values[:, rank])
    return running, best.long()


@right("timeline")
def by_formula(stage_ms, batches, steps):
    ends = {}

    def end(step, batch, stage):
        return begin(step, batch, stage) + stage_ms[stage]

    def begin(step, batch, stage):
        key = step, batch, stage
        if key not in ends:
            left = end(step, batch, stage - 1) if stage else end(step - 1, batch, len(stage_ms) - 1) if step else 0
            before = (step, batch - 1) if batch else (step - 1, batches - 1)
            ends[key] = max(left, end(*before, stage) if before[0] >= 0 else 0)
        return ends[key]

    return [[[begin(s, b, g) for g in range(len(stage_ms))] for b in range(batches)] for s in range(steps)]


@right("timeline")
def with_events(stage_ms, batches, steps):
    stages = len(stage_ms)
    begin = [[[None] * stages for _ in range(batches)] for _ in range(steps)]
    free, known = [0] * stages, [0] * batches
    for job in range(batches * steps):
        step, batch = divmod(job, batches)
        now = known[batch]
        for stage in range(stages):
            now = max(now, free[stage])
            begin[step][batch][stage] = now
            now += stage_ms[stage]
            free[stage] = now
        known[batch] = now
    return begin
