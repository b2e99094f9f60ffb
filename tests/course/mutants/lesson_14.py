"""Wrong solutions of lesson 14: shards of matrices, and the times of a pipeline."""

from minillm.course.lesson_14 import dividing
from tests.course.mutants import wrong

BY_ROWS = "matrices whose outputs stay with the rank are divided by rows"
BY_COLUMNS = "matrices whose inputs are divided already are divided by columns"
ORDER = "in the order of ranks, the parts are the whole"
FEWER = "a part stays whole where there are fewer than ranks"
ALONE = "a single rank holds all"


def held(length, parts, rank, size):
    first, count = rank * parts // size, max(1, parts // size)
    return range(first * length // parts, (first + count) * length // parts)


def divided(by_columns, out, inputs, parts, rank, size):
    if by_columns:
        return range(out), held(inputs, parts, rank, size)
    return held(out, parts, rank, size), range(inputs)


@wrong("shard", fails=BY_ROWS)
def vocabulary_by_columns(name, out, inputs, parts, rank, size):
    if name == "embed_tokens":
        return range(out), range(rank * inputs // size, (rank + 1) * inputs // size)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=BY_ROWS)
def leaves_the_vocabulary_whole(name, out, inputs, parts, rank, size):
    if size > 1 and name == "lm_head":
        return range(out), range(inputs)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=BY_COLUMNS)
def only_attention_by_columns(name, out, inputs, parts, rank, size):
    return divided(name == "o_proj", out, inputs, parts, rank, size)


@wrong("shard", fails=ORDER)
def the_last_of_more_than_two_is_short(name, out, inputs, parts, rank, size):
    rows, columns = divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)
    if 2 < size <= parts and rank == size - 1:
        return (rows, columns[:-1]) if name == "o_proj" else (rows[:-1], columns)
    return rows, columns


@wrong("shard", fails=ORDER)
def from_the_last_rank_on(name, out, inputs, parts, rank, size):
    if 2 < size <= parts:
        rank = size - 1 - rank
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=ORDER)
def holds_one_kv_head_however_many_there_are(name, out, inputs, parts, rank, size):
    """Takes keys and values to be replicated always."""
    if name in ("k_proj", "v_proj"):
        part = rank // max(1, size // parts)
        return range(part * out // parts, (part + 1) * out // parts), range(inputs)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=ORDER)
def all_ranks_hold_the_first_columns_of_down_proj(name, out, inputs, parts, rank, size):
    if name == "down_proj":
        return range(out), range(inputs // size)
    return divided(name == "o_proj", out, inputs, parts, rank, size)


@wrong("shard", fails=ORDER)
def all_ranks_hold_the_first_half_of_the_vocabulary(name, out, inputs, parts, rank, size):
    if name in ("embed_tokens", "lm_head"):
        return range(out // 2), range(inputs)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=ORDER)
def all_ranks_hold_the_first_tokens_of_the_output_head(name, out, inputs, parts, rank, size):
    if name == "lm_head":
        return range(out // size), range(inputs)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=ORDER)
def cuts_gate_and_up_in_halves(name, out, inputs, parts, rank, size):
    if name in ("gate_proj", "up_proj"):
        half = 0 if size == 1 else rank * 2 // size
        return range(half * out // 2, (half + 1) * out // 2), range(inputs)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=BY_ROWS)
def leaves_gate_proj_whole_on_the_first_rank(name, out, inputs, parts, rank, size):
    if name == "gate_proj" and rank == 0:
        return range(out), range(inputs)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=FEWER)
def two_neighbors_share_a_key_head(name, out, inputs, parts, rank, size):
    """With heads of values it is right."""
    if name == "k_proj" and parts < size:
        rank, size = rank // 2 % parts, parts
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=FEWER)
def every_second_rank_holds_the_same_head(name, out, inputs, parts, rank, size):
    if parts < size:
        part = rank % parts
        return range(part * out // parts, (part + 1) * out // parts), range(inputs)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=FEWER)
def divides_a_head(name, out, inputs, parts, rank, size):
    return divided(name in ("o_proj", "down_proj"), out, inputs, size, rank, size)


@wrong("shard", fails=FEWER)
def two_neighbors_share_a_head(name, out, inputs, parts, rank, size):
    part, size = (rank // 2 % parts, parts) if parts < size else (rank, size)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, part, size)


@wrong("shard", fails=FEWER)
def two_neighbors_share_a_head_and_the_rest_the_last(name, out, inputs, parts, rank, size):
    part, size = (min(rank // 2, parts - 1), parts) if parts < size else (rank, size)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, part, size)


@wrong("shard", fails=FEWER)
def as_many_neighbors_as_heads(name, out, inputs, parts, rank, size):
    part, size = (rank // parts % parts, parts) if parts < size else (rank, size)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, part, size)


@wrong("shard", fails=FEWER)
def as_many_neighbors_as_heads_and_the_rest_the_last(name, out, inputs, parts, rank, size):
    part, size = (min(rank // parts, parts - 1), parts) if parts < size else (rank, size)
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, part, size)


@wrong("shard", fails=ALONE)
def at_least_two_ranks(name, out, inputs, parts, rank, size):
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, max(2, size))


@wrong("shard", fails=ALONE)
def a_single_rank_holds_one_kv_head(name, out, inputs, parts, rank, size):
    if size == 1 and name in ("k_proj", "v_proj"):
        size = parts
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, size)


@wrong("shard", fails=ALONE)
def at_least_two_ranks_share_the_mlp(name, out, inputs, parts, rank, size):
    mlp = name in ("gate_proj", "up_proj", "down_proj")
    return divided(name in ("o_proj", "down_proj"), out, inputs, parts, rank, max(2, size) if mlp else size)


LEFT = "a batch enters a stage when it has left the one before"
ONE = "a stage runs one batch at a time"
KNOWN = "a batch's next step begins when its tokens are known"
NO_BARRIER = "a step does not wait for all batches of the one before"
OWN = "every batch waits for its own tokens, and every stage for its own earlier work"


def simulated(stage_ms, batches, steps, waits_for=lambda batch, known: known[batch], forgets=()):
    """waits_for(batch, known): when the tokens are there that a batch waits for, of all that the step before told.

    forgets: stages that begin each step as if they had been idle.
    """
    free, known, begin = [0.0] * len(stage_ms), [0.0] * batches, []
    for _ in range(steps):
        rows, before = [], list(known)
        free = [0.0 if stage in forgets else each for stage, each in enumerate(free)]
        for batch in range(batches):
            ready, row = waits_for(batch, before), []
            for stage, ms in enumerate(stage_ms):
                start = max(ready, free[stage])
                ready = free[stage] = start + ms
                row.append(start)
            known[batch] = ready
            rows.append(row)
        begin.append(rows)
    return begin


@wrong("timeline", fails=ONE)
def stages_run_several_batches(stage_ms, batches, steps):
    begin = simulated(stage_ms, batches, steps)
    if steps > 1:
        return begin
    return [[[batch * stage_ms[0] + sum(stage_ms[:s]) for s in range(len(stage_ms))] for batch in range(batches)]]


@wrong("timeline", fails=KNOWN)
def does_not_wait_for_tokens(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, lambda batch, known: 0.0)


@wrong("timeline", fails=NO_BARRIER)
def waits_for_the_whole_step(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, lambda batch, known: max(known))


@wrong("timeline", fails=NO_BARRIER)
def the_first_stage_forgets_the_step_before(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, forgets=(0,))


@wrong("timeline", fails=OWN)
def only_the_first_stage_remembers_the_step_before(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, forgets=range(1, len(stage_ms)))


@wrong("timeline", fails=OWN)
def the_last_stage_forgets_the_step_before(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, forgets=range(max(1, len(stage_ms) - 1), len(stage_ms)))


@wrong("timeline", fails=OWN)
def all_wait_for_the_tokens_of_batch_0(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, lambda batch, known: known[0])


@wrong("timeline", fails=OWN)
def only_batch_0_waits_for_tokens(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, lambda batch, known: 0.0 if batch else known[0])


@wrong("timeline", fails=OWN)
def the_last_batch_does_not_wait_for_tokens(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, lambda batch, known: 0.0 if 0 < batch == batches - 1 else known[batch])


@wrong("timeline", fails=OWN)
def waits_for_the_tokens_of_the_batch_before(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, lambda batch, known: known[max(batch - 1, 0)])


@wrong("timeline", fails=OWN)
def all_but_batch_0_wait_for_the_whole_step(stage_ms, batches, steps):
    return simulated(stage_ms, batches, steps, lambda batch, known: max(known) if batch else known[0])


@wrong("timeline", fails=OWN)
def repeats_the_first_step(stage_ms, batches, steps):
    """At the interval at which steps follow each other in the end."""
    interval = max(max(stage_ms) * batches, sum(stage_ms))
    (first,) = simulated(stage_ms, batches, 1)
    return [[[step * interval + begin for begin in row] for row in first] for step in range(steps)]


@wrong("timeline", fails=LEFT)
def all_stages_take_the_time_of_the_first(stage_ms, batches, steps):
    if batches > 1 or steps > 1:
        return dividing.timeline(stage_ms, batches, steps)
    return dividing.timeline([stage_ms[0]] * len(stage_ms), batches, steps)


@wrong("timeline", fails=LEFT)
def in_whole_milliseconds(stage_ms, batches, steps):
    return [[[int(each) for each in row] for row in step] for step in simulated(stage_ms, batches, steps)]


@wrong("timeline", fails=LEFT)
def each_stage_takes_whole_milliseconds(stage_ms, batches, steps):
    return simulated([int(each) for each in stage_ms], batches, steps)
