"""Pack a step's tokens into one ragged batch.  Lesson 10."""

import numpy as np

from minillm.model.batch import Batch
from minillm.ops import Rows
from minillm.scheduler.step import Step

from .state import RowState


def pack(
    step: Step,
    state: RowState,
    logits_index: np.ndarray | None,
    *,
    streams: bool = False,
    embedded: tuple[np.ndarray, np.ndarray] | None = None,
) -> Batch:
    """Pack the step's tokens, row after row. Token ids and slots are looked up on the device.

    logits_index: indices of the tokens whose final hidden states are needed; None: all of them. embedded: which tokens
    have embeddings, and these, as `EmbeddedRows.take` returns them.
    """
    lengths, query_ends = step.ends, np.cumsum(step.queries)
    decodes_only = step.decodes == len(step.rows)
    if decodes_only and step.queries_per_decode == 1:
        token_rows, positions = step.rows, step.starts
    else:
        token_rows = np.repeat(step.rows, step.queries)
        positions = np.arange(query_ends[-1]) - np.repeat(query_ends - step.ends, step.queries)
    arrays = [token_rows, positions, step.rows, lengths, np.concatenate([[0], query_ends])]
    if logits_index is not None:
        arrays.append(logits_index)
    if step.moved is not None:  # cache positions differ from positions in the token row
        arrays.append(positions)
        arrays[1] = positions - np.repeat(step.moved, step.queries) * state.block_size
        arrays[3] = lengths = lengths - step.moved * state.block_size
    rows_of_tokens, cache_positions, rows, lengths_sent, starts_sent, *more = state.send(*arrays)
    positions_in_row = cache_positions if step.moved is None else more.pop()
    blocks = state.block_table[:, rows_of_tokens, cache_positions // state.block_size].long()

    def part(first: int, after: int) -> tuple[Rows, ...]:
        if after == first:
            return ()
        width = -(-int(lengths[first:after].max()) // state.block_size)
        continued = np.flatnonzero(step.starts[first:after])
        return Rows.of_groups(
            state.block_table[:, rows[first:after], :width],
            lengths_sent[first:after].int(),
            (starts_sent[first : after + 1] - starts_sent[first]).int(),
            int(step.queries[first:after].max()),
            after - first - (int(continued[-1]) + 1 if len(continued) else 0),
        )

    adapters = state.adapters
    return Batch(
        token_ids=state.tokens[rows_of_tokens, positions_in_row].long(),
        positions=cache_positions,
        slots=blocks * state.block_size + cache_positions % state.block_size,
        decode=part(0, step.decodes),
        prefill=part(step.decodes, len(step.rows)),
        logits_index=more[0] if more else None,
        adapted=None if adapters is None else adapters.of_tokens(rows_of_tokens, adapters.reach(step.rows)),
        embedded=None if embedded is None else (state.to_device(embedded[0]), state.to_device(embedded[1])),
        streams=streams,
    )
