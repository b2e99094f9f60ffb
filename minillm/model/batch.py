"""The input of one forward pass.  Lessons 09 and 10."""

from dataclasses import dataclass

from torch import Tensor

from minillm.ops.signatures import Adapted, Rows


@dataclass
class Batch:
    """The tokens of one ragged forward pass: first decode rows, then prefill chunks, without padding between them.

    Decode rows all have the same number of queries (one, without speculation); prefill rows may have any number.
    `Rows` says where each row's queries and keys are, for each layer group, because groups have their own blocks.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, in the cache: a stream's evicted blocks do not count
    slots: Tensor  # [groups, tokens] int64: block * block_size + offset, where the token's K and V are written
    decode: tuple[Rows, ...]  # in each layer group, the rows of the first tokens; (): none
    prefill: tuple[Rows, ...]  # the rows of the other tokens; (): none
    logits_index: Tensor | None  # [samples] int64: tokens whose final hidden states are returned; None: all
    adapted: Adapted | None = None  # which adapters the tokens have; None: none has one
    embedded: tuple[Tensor, Tensor] | None = None  # [m] int64 tokens that have no id but embeddings, [m, hidden]
    streams: bool = False  # keys are cached before their rotary embedding; attention rotates them by their position
