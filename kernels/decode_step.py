"""The first and the last kernel of a decode step that stays on the device.  Lessons 10 and 11.

`prepare` runs before the layers: it reads each row's next token, cache slot and random number from state on the device.
`advance` runs after them: it writes the sampled token to that state, and moves the positions on. So a captured step
needs nothing from the host as long as the same rows run.

    position p of row r:  id = tokens[r, p],  slot = table[r, p // block_size] * block_size + p % block_size,
                          uniform = mix(mix(seed[r]) + p + 1) / 2^64
    afterwards:           tokens[r, p + 1] = sampled,  p = p + 1

A row with drafts (lesson 13) is in the batch once for its newest token and once for each draft, at the next positions.
Each layer writes all keys and values before attention reads any, so each sees those before it.

`advance` also writes the token, and log-probabilities where asked for, to the host's memory, where the host finds them
when the step is over. A copy after the
step would take longer than the kernel, and the next step would wait for it: the GPU would idle for some 10 us.

Tiling: one program per entry of the batch; it also copies its row of the block table, tile by tile. Entries that pad
the batch to the captured size refer to the state's last row: they get slot -1 and length 0, and their results are
dropped.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .single_row_parts import dependent_launch, wait_for_inputs


@triton.jit
def _mix(z):
    """SplitMix64 (Steele et al. 2014), on wrapping 64-bit numbers."""
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def prepare_kernel(
    rows_ptr, sampling_ptr, position_ptr, host_tokens_ptr, tokens_ptr, table_ptr, seed_ptr, parameters_ptr,
    ids_ptr, positions_ptr, slots_ptr, lengths_ptr, table_out_ptr, uniform_ptr, temperature_ptr, min_p_ptr, top_k_ptr,
    top_p_ptr, scored_ptr,
    tokens_stride, table_stride, group_stride, PAD_ROW,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i, group, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    real = row != PAD_ROW
    position = tl.where(real, tl.load(position_ptr + i), 0).to(tl.int32)
    table = table_ptr + group * group_stride + row * table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots_ptr + group * count + i, slot)
    blocks = tl.arange(0, TILE)
    for start in range(0, WIDTH, TILE):
        inside = start + blocks < WIDTH
        held = tl.load(table + start + blocks, mask=inside, other=0)
        tl.store(table_out_ptr + (group * count + i).to(tl.int64) * WIDTH + start + blocks, held, mask=inside)
    if group == 0:
        token = tl.load(tokens_ptr + row * tokens_stride + position).to(tl.int64)
        if host_tokens_ptr is not None:
            host_token = tl.load(host_tokens_ptr + i)
            token = tl.where(host_token < 0, token, host_token)
        tl.store(ids_ptr + i, token)
        tl.store(positions_ptr + i, position.to(tl.int64))
        tl.store(lengths_ptr + i, tl.where(real, position + 1, 0))
        parameters = parameters_ptr + tl.load(sampling_ptr + i).to(tl.int64) * 5
        tl.store(temperature_ptr + i, tl.load(parameters))
        tl.store(min_p_ptr + i, tl.load(parameters + 1))
        tl.store(top_k_ptr + i, tl.load(parameters + 2).to(tl.int32))
        tl.store(top_p_ptr + i, tl.load(parameters + 3))
        tl.store(scored_ptr + i, tl.load(parameters + 4).to(tl.int32))
        seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
        draw = _mix(_mix(seed) + (position + 1).to(tl.uint64))
        tl.store(uniform_ptr + i, (draw >> 40).to(tl.float32) * 5.9604644775390625e-08)  # 2^-24


@triton.jit
def advance_kernel(
    rows_ptr, sampled_ptr, position_ptr, tokens_ptr, out_ptr, arrived_ptr, scored_ptr, ids_ptr, scores_ptr,
    arrived_ids_ptr, arrived_scores_ptr, tokens_stride, PAD_ROW,
    RING: tl.constexpr, MOST: tl.constexpr, MOST_TILE: tl.constexpr, SCORES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    token = tl.load(sampled_ptr + i)
    tl.store(out_ptr + i, token)
    if row != PAD_ROW:
        position = tl.load(position_ptr + i).to(tl.int32)
        tl.store(tokens_ptr + row * tokens_stride + position + 1, tl.maximum(token, 0).to(tl.int32))
        tl.store(position_ptr + i, position + 1)
        entry = row * RING + (position + 1) % RING
        tl.store(arrived_ptr + entry, token.to(tl.int32))
        if SCORES:
            each = tl.arange(0, MOST_TILE)
            some = each < tl.load(scored_ptr + i)
            tl.store(arrived_ids_ptr + entry * MOST + each, tl.load(ids_ptr + i * MOST + each, mask=some), mask=some)
            scores = tl.load(scores_ptr + i * MOST + each, mask=some)
            tl.store(arrived_scores_ptr + entry * MOST + each, scores, mask=some)


class ScoreBuffers(NamedTuple):
    """Log-probabilities as `sampling.scored_sample` writes them."""

    scored: torch.Tensor  # [n] int32: how many of each row are written
    ids: torch.Tensor  # [n, most] int32
    values: torch.Tensor  # [n, most] float32


def prepare(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    seed: torch.Tensor,
    parameters: torch.Tensor,
    *,
    block_size: int,
    width: int,
    sampling: torch.Tensor | None = None,
    host_tokens: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Read the inputs of a step from the device's state: of the tokens of `rows` [n] int64 at `positions` [n].
    Lesson 10.

    positions are int32 or int64; padding may have any. The state has one entry per row, the last one for padding:
    tokens [all, longest] int32, table [groups, all, blocks] int32, seed int64, and parameters [all, 5] float32, which
    are temperature, min_p, top_k, top_p and scored (see `sampling.scored_sample`). width: columns of the table to copy.
    sampling: the rows whose parameters are read, if they are not all of `rows`: padding for one that samples nothing.
    host_tokens: [n] int64, tokens that are run in place of the state's; -1: none.

    Returns ids, positions [n] int64, slots [groups, n] int64 (-1 for padding), lengths [n] int32 (0 for padding), table
    [groups, n, width] int32; uniform, temperature, min_p and top_p [n] float32, top_k and scored [n] int32.
    """
    n, groups, device = len(rows), table.shape[0], rows.device
    inputs = {
        "ids": torch.empty(n, dtype=torch.int64, device=device),
        "positions": torch.empty(n, dtype=torch.int64, device=device),
        "slots": torch.empty(groups, n, dtype=torch.int64, device=device),
        "lengths": torch.empty(n, dtype=torch.int32, device=device),
        "table": torch.empty(groups, n, width, dtype=torch.int32, device=device),
        "uniform": torch.empty(n, dtype=torch.float32, device=device),
        "temperature": torch.empty(n, dtype=torch.float32, device=device),
        "min_p": torch.empty(n, dtype=torch.float32, device=device),
        "top_k": torch.empty(n, dtype=torch.int32, device=device),
        "top_p": torch.empty(n, dtype=torch.float32, device=device),
        "scored": torch.empty(n, dtype=torch.int32, device=device),
    }
    prepare_kernel[(n, groups)](
        rows, rows if sampling is None else sampling, positions, host_tokens, tokens, table, seed, parameters,
        *inputs.values(),
        tokens.stride(0), table.stride(1), table.stride(0), len(tokens) - 1,
        BLOCK_SIZE=block_size, WIDTH=width, TILE=min(triton.next_power_of_2(width), 128), num_warps=1,
    )  # fmt: skip
    return inputs


def advance(
    rows: torch.Tensor,
    sampled: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    out: torch.Tensor,
    arrived: torch.Tensor,
    scores: ScoreBuffers | None = None,
    arrived_scores: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the sampled ids [n] int64 to `out` [n] and, except for padding, into the device's state.  Lesson 10.

    rows, positions: as in `prepare`. Each token goes to the position after, to which `positions` moves on.

    In the state's tokens, which the next step looks up, -1 (no token) becomes 0: that row's request is about to end.

    arrived [all, ring] int32, in the host's memory (pinned, if the rest is on a GPU): gets each row's token at its
    position modulo the ring's size. arrived_scores: the same for log-probabilities, (ids, scores) [all, ring, most]
    int32 and float32, if there are `scores`.
    """
    scored, ids, values = (rows, rows, rows) if scores is None else scores
    arrived_ids, arrived_values = (rows, rows) if arrived_scores is None else arrived_scores
    most = ids.shape[-1] if scores is not None else 1
    dependent = dependent_launch(rows.device)
    advance_kernel[(len(rows),)](
        rows, sampled, positions, tokens, out, arrived, scored, ids, values, arrived_ids, arrived_values,
        tokens.stride(0), len(tokens) - 1,
        RING=arrived.shape[1], MOST=most, MOST_TILE=triton.next_power_of_2(most), SCORES=scores is not None,
        num_warps=1, **dependent,
    )  # fmt: skip
