"""The signature of each operation.  `reference.py` specifies what it computes.  Lessons 02 to 08."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache
from minillm.quantization import Weight


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a layer's attention. One that a model lacks is None.  Lessons 02 and 04.

    scale      scores are q k^T multiplied by this
    window     a query sees this many of the newest keys, its own included
    soft_cap   scores become soft_cap * tanh(score / soft_cap) (Gemma 2)
    rotary     [positions, 2, head_dim], rows of `decoder.rotary_table`, at least as many as a row's blocks hold tokens.
               Given if keys are cached before their rotation, as in streams: attention then rotates each key by its
               position in the row (Xiao et al. 2023, "StreamingLLM", section 3.2)
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    rotary: Tensor | None = None

    def keywords(self) -> dict[str, float | int | Tensor]:
        """Return the options that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Rows:
    """The queries of several requests, packed one after the other, and the cache blocks whose keys they attend to.

    block_table  [rows, blocks] int32: each row's blocks in order; unused entries are 0
    lengths      [rows] int32: keys that each row's last query sees, its own included
    query_start  [rows + 1] int32: row r's queries are q[query_start[r] : query_start[r + 1]]
    max_queries  upper bound of a row's queries; the number of each row's queries in `decode_attention`
    whole        how many of the last rows have no keys but those of their queries, as the first chunk of a prompt

    A captured step may have padding rows: their length is 0, their slots are -1, and their output is zeros.
    """

    block_table: Tensor
    lengths: Tensor
    query_start: Tensor
    max_queries: int
    whole: int = 0

    @classmethod
    def of_groups(
        cls, tables: Tensor, lengths: Tensor, query_start: Tensor, max_queries: int, whole: int = 0
    ) -> "tuple[Rows, ...]":
        """Return the same rows in each layer group, whose block tables are tables [groups, rows, blocks]."""
        return tuple(cls(table, lengths, query_start, max_queries, whole) for table in tables.unbind())

    @classmethod
    def decoding(cls, block_table: Tensor, lengths: Tensor, queries: int = 1) -> "Rows":
        """Return rows with `queries` queries each."""
        start = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device) * queries
        return cls(block_table, lengths, start, queries)


class Truncation(NamedTuple):
    """The tokens that sampling leaves out of each row, in this order.  Lesson 10.

    min_p  [rows] float32: tokens less likely than this share of the likeliest's probability; 0: none
    top_k  [rows] int32: all but this many of the likeliest; below 1: none
    top_p  [rows] float32: all but the likeliest whose probabilities, a share of what is left by then, sum to this
           (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1); 1: none
    """

    min_p: Tensor
    top_k: Tensor
    top_p: Tensor


class LowRank(NamedTuple):
    """The factors that adapters have for one weight (Hu et al. 2021, "LoRA", section 4.1), one adapter in each slot.

    A weight may consist of several modules (queries, keys, values), its parts, each with factors of its own. Slot 0
    is not read: its tokens have no adapter. Ranks below the largest are filled up with zeros.

    down  [slots, parts * rank, in]: each part's A, one after another
    up    [slots, out, rank]: B, scaled, of the part that the row belongs to
    ends  where each part's rows end; the last one is `out`
    """

    down: Tensor
    up: Tensor
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Adapted:
    """Says which adapter each token of a batch has.

    slots    [tokens] int64: the slot of each token's adapter; 0: none
    factors  the factors of each weight that an adapter may change, by the weight's id()
    beneath  by the weight's id(): the same matrix with A of slots 1, 2, ... beneath it, in one piece of memory, up to
             the last slot that a token has: [out + slots * parts * rank, in]; so one product yields both
    tiles    the tokens, grouped by slot for all weights at once when a kernel first needs it, by the size of a group
    """

    slots: Tensor
    factors: Mapping[int, LowRank]
    beneath: Mapping[int, Weight] = field(default_factory=dict)
    tiles: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def only(self, tokens: Tensor) -> "Adapted":
        """Return the same for some of the tokens, [n] int64."""
        return Adapted(self.slots[tokens], self.factors, self.beneath)


class Unadded(NamedTuple):
    """A product of few tokens to which what adapters change is still to be added, by the kernel that reads it."""

    out: Tensor  # [tokens, out]
    inner: Tensor  # [tokens, slots * parts * rank]: A x, of all slots from 1 on
    adapted: Adapted
    factors: LowRank


class Operations(Protocol):
    """The operations of one type of device. `minillm.ops.reference` specifies each of them.

    In shapes: tokens and rows of a step, d: head_dim. A token's slot in the cache is block * block_size + offset.
    """

    def embedding(self, ids: Tensor, weight: Weight, scale: float) -> Tensor:
        """ids [tokens] int64, weight [vocab, hidden] -> [tokens, hidden]"""
        ...

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]"""
        ...

    def add_low_rank(self, out: Tensor, x: Tensor, slots: Tensor, factors: LowRank) -> Tensor:
        """out [tokens, out], x [tokens, in], slots [tokens] int64 -> out plus what each token's adapter adds to it"""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., dim], weight [dim] -> like x"""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, residual [..., dim], weight [dim] -> the normalized sum and the sum, both like x"""
        ...

    def rotary_embedding(self, q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, d], k [tokens, kv_heads, d], cos_sin [tokens, 2, d] -> like q and k"""
        ...

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [tokens, 2 * inner], activation "silu" or "gelu_tanh" -> [tokens, inner]"""
        ...

    def hadamard(self, x: Tensor, inverse: bool = False) -> Tensor:
        """x [tokens, dim] -> like x; only models that were quantized with --rotate call it"""
        ...

    def write_kv(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """k, v [tokens, kv_heads, d] into slots [tokens] int64 of the cache"""
        ...

    def decode_attention(self, q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
        """q [rows, queries, heads, d] -> like q"""
        ...

    def prefill_attention(self, q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
        """q [tokens, heads, d], row after row -> like q"""
        ...

    def lm_head(self, hidden: Tensor, weight: Weight, soft_cap: float | None = None) -> Tensor:
        """hidden [samples, hidden], weight [vocab, hidden] -> logits [samples, vocab]"""
        ...

    def sample(
        self, logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Truncation | None = None
    ) -> Tensor:
        """logits [rows, vocab], temperature and uniform [rows] -> [rows] int64; -1: the logits are not numbers"""
        ...


OPERATIONS = tuple(name for name in vars(Operations) if not name.startswith("_"))
