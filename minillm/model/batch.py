"""The input of one forward pass.  Lessons 09 and 10."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Rows:
    """The query tokens of several requests, packed one after the other, and the cache blocks that they attend to.

    A captured step may have padding rows: their length is 0, their slots are -1, and their output is zeros.
    """

    tokens: int  # query tokens of all rows
    block_table: Tensor  # [groups, rows, blocks] int32, cut to the longest row; unused entries are 0
    lengths: Tensor  # [rows] int32: keys that each row's last query sees, its own included
    query_start: Tensor  # [rows + 1] int32: row r's queries are q[query_start[r] : query_start[r + 1]]
    max_queries: int  # upper bound of a row's queries


@dataclass
class Batch:
    """The tokens of one ragged forward pass: first decode rows, then prefill chunks, without padding between them.

    Decode rows all have the same number of queries (one, without speculation); prefill rows may have any number.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, in the cache: a stream's evicted blocks do not count
    slots: Tensor  # [groups, tokens] int64: block * block_size + offset, where the token's K and V are written
    decode: Rows | None  # the first `decode.tokens` tokens
    prefill: Rows | None  # the rest
    logits_index: Tensor | None  # [samples] int64: tokens whose final hidden states are returned; None: all
    streams: bool = False  # keys are cached before their rotary embedding; attention rotates them by their position
