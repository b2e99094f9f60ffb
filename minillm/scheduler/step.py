"""A step, as the scheduler hands it to what runs it.  Lesson 10."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np

from minillm.prompts import Embeddings
from minillm.request import Request, SamplingParams


@dataclass(frozen=True, eq=False)
class NewRow:
    """A request that has just got a row, and what running its steps needs to know of it."""

    row: int
    tokens: np.ndarray  # [n] int32: its prompt, and after a preemption also its output so far
    prompt_length: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    adapter: tuple[int, int] = (0, 0)  # the number of its load, and its slot; 0: none
    embeddings: Embeddings | None = None  # of its prompt

    @classmethod
    def of(cls, request: Request, slot: int) -> Self:
        """Return the new row of a request. slot: of its adapter."""
        prompt, params, ends, adapter = len(request.prompt), request.params, request.stop_ids, (request.load, slot)
        return cls(request.row, request.known, prompt, params, request.seed, ends, adapter, request.embeddings)


@dataclass
class Step:
    """One run of the model: for each row, a span of its tokens. Decoding rows come first.

    It is a message: it holds values only, and all that running it needs is in it and in the steps before it. So steps
    can be sent to another process.
    """

    number: int
    rows: np.ndarray  # [n] int32
    starts: np.ndarray  # [n] int32: tokens of the row that are in the cache already
    queries: np.ndarray  # [n] int32: tokens that run now
    samples: np.ndarray  # [n] bool: the row's last known token is among them, so the step yields one more
    decodes: int  # how many leading rows run `queries_per_decode` tokens each
    queries_per_decode: int = 1  # the newest token, and its drafts
    new_rows: list[NewRow] = field(default_factory=list)  # requests that got their row since the last step
    first: np.ndarray | None = None  # [n] bool: what the row yields is its request's first token
    moved: np.ndarray | None = None  # [n] of streams: blocks that the rows have freed, which no table has any more
    # Drafted tokens that the rows run after their newest: [n, most] int32, -1 for none; None: the step has no drafts.
    drafts: np.ndarray | None = None
    # [n] bool of a step whose drafts the device finds, `drafts` being 0 for each that a row may have: whether the row
    # starts at `starts`. If not, it starts where the device has counted to, there or before, and so do its `ends`.
    lookup: np.ndarray | None = None
    # Rows whose next tokens a grammar restricts: for each token that they yield, one bit a token of the vocabulary, as
    # `grammar.Matcher` has them, [yielded, bytes].
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    # What changed in the block tables: rows [m], columns [m] and their new blocks [groups, m].
    table_changes: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def ends(self) -> np.ndarray:
        """[n] int32: tokens of each row that are in the cache after the step."""
        return self.starts + self.queries

    @property
    def sampling_rows(self) -> np.ndarray:
        """[samples] int32: the rows that the step samples a token for."""
        return self.rows[self.samples]

    @property
    def sampling_ends(self) -> np.ndarray:
        """[samples] int32: `ends` of the sampling rows, which are the positions of their new tokens."""
        return self.ends[self.samples]

    @cached_property
    def drafted(self) -> np.ndarray:
        """[n] int32: how many of each row's queries are drafts, which are its last ones."""
        if self.drafts is None:
            return np.zeros(len(self.rows), np.int32)
        return (self.drafts >= 0).sum(axis=1, dtype=np.int32)

    def for_each_token(self, last: np.ndarray) -> np.ndarray:
        """[tokens]: for each token that the step yields, in the rows' order, a number that counts up to `last` [n].

        A row yields a token after its newest token and one after each of its drafts; `last` is of the last one.
        """
        last = last[self.samples]
        if self.drafts is None:
            return last
        yields = self.drafted[self.samples] + 1
        return np.repeat(last - np.cumsum(yields) + 1, yields) + np.arange(yields.sum())

    @cached_property
    def token_rows(self) -> np.ndarray:
        """[tokens] int32: the row of each token that the step yields."""
        return self.sampling_rows if self.drafts is None else np.repeat(self.rows, self.samples * (self.drafted + 1))

    @property
    def decodes_only(self) -> bool:
        """Return whether every row decodes, and samples a token."""
        return self.decodes == len(self.rows) and bool(self.samples.all())
