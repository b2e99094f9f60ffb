"""What one forward pass needs to know, in one value.  Lessons 09 and 10."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Rows:
    """Some requests' query tokens, packed one after the other, and the cache blocks they attend to.

    In a captured step there is padding: rows of length 0, whose output is zeros, with slots of -1.
    """

    tokens: int  # query tokens of all rows together
    block_table: Tensor  # [groups, rows, blocks] int32, cut to the longest row; unused entries are 0
    lengths: Tensor  # [rows] int32: keys that each row's last query sees, itself included
    query_start: Tensor  # [rows + 1] int32: row r's queries are q[query_start[r] : query_start[r + 1]]
    max_queries: int  # as many queries as a row may have here; not below the largest number


@dataclass
class Batch:
    """One ragged forward: decode rows first, then prefill chunks, one behind the other.

    Decode rows all carry the same number of queries (one, unless tokens are speculated); prefill rows carry any.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, in the cache: of a stream the blocks that it let go of do not count
    slots: Tensor  # [groups, tokens] int64: block * block_size + offset, where the token's K and V are written
    decode: Rows | None  # the first `decode.tokens` tokens
    prefill: Rows | None  # the rest
    logits_index: Tensor | None  # [samples] int64: tokens whose final hidden state is wanted; None: all of them
    streams: bool = False  # keys are cached before their rotary embedding; attention turns them by their place
