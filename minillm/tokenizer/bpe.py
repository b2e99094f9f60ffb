"""Byte-pair encoding: join the characters of a piece into tokens, in the order of learned merges.  Lesson 01.

Sennrich, Haddow and Birch (2016), section 3.2, with SentencePiece's byte fallback (Kudo and Richardson 2018): a
character outside the vocabulary becomes the tokens <0x..> of its UTF-8 bytes.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from minillm.overrides import Parts, register

from .gemma import BYTE_TOKENS
from .patterns import TokenizerError

CACHED_PIECES = 1 << 16  # entries; the cache is cleared when full, so that a server's memory is bounded
CACHED_LENGTH = 64  # characters; longer pieces are rarely repeated


class BPE:
    """The `model` of a `tokenizer.json`.  Lesson 01.

    vocab          token -> id
    merges         pairs of tokens in the order learned, as ["a", "b"] or, in older files, "a b"
    unk_token      stands for characters outside the vocabulary; None: they are dropped
    fuse_unk       whether adjacent unknown characters become one token
    byte_fallback  whether they become the tokens of their UTF-8 bytes instead
    ignore_merges  whether a piece that is a token is encoded as that token, whatever the merges
    Raises TokenizerError for a merge with a token outside the vocabulary.
    """

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Sequence[Sequence[str]],
        unk_token: str | None = None,
        fuse_unk: bool = False,
        byte_fallback: bool = False,
        ignore_merges: bool = False,
    ) -> None:
        if unk_token is not None and unk_token not in vocab:
            raise TokenizerError(f"the unknown token {unk_token!r} is not in the vocabulary")
        self.vocab = vocab
        self.unk_token = unk_token
        self.fuse_unk = fuse_unk
        self.ignore_merges = ignore_merges
        self.byte_fallback = byte_fallback and vocab.keys() >= set(BYTE_TOKENS)
        pairs: list[tuple[str, str]] = []
        for entry in merges:
            pair = tuple(entry.split(" ") if isinstance(entry, str) else entry)
            if len(pair) != 2 or not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
                raise TokenizerError(f"the merge {pair!r} must join two tokens of the vocabulary to a third one in it")
            pairs.append(pair)
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        # The only adjacent characters that merges can join: see _cut.
        self._joinable = {(left[-1], right[0]) for left, right in pairs}
        self._cache: dict[str, list[int]] = {}
        self._cache_version = PARTS.version

    def encode(self, piece: str) -> list[int]:
        """Return the ids of one pre-tokenized piece."""
        if self.ignore_merges and piece in self.vocab:
            return [self.vocab[piece]]
        if len(piece) <= CACHED_LENGTH:
            return self._encode_word(piece)
        return [id for word in self._cut(piece) for id in self._encode_word(word)]

    def _cut(self, piece: str) -> Iterator[str]:
        """Split between characters that no merge can join. The tokens stay the same, and the words are short enough for
        the cache even if the file has no pre-tokenizer, like Gemma's. Characters outside the vocabulary stay together,
        since they may become one unknown token."""
        start = 0
        for end, pair in enumerate(pairwise(piece), 1):
            if pair not in self._joinable and pair[0] in self.vocab and pair[1] in self.vocab:
                yield piece[start:end]
                start = end
        yield piece[start:]

    def _encode_word(self, word: str) -> list[int]:
        if self._cache_version != PARTS.version:  # entries of another `bpe_merge`
            self._cache, self._cache_version = {}, PARTS.version
        ids = self._cache.get(word)
        if ids is None:
            ids = [self.vocab[token] for token in PARTS.bpe_merge(self._symbols(word), self.ranks)]
            if len(word) <= CACHED_LENGTH:
                if len(self._cache) >= CACHED_PIECES:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _symbols(self, word: str) -> list[str]:
        """Return the tokens that merging starts from: characters, bytes, or the unknown token."""
        symbols: list[str] = []
        fusible = False
        for character in word:
            if character in self.vocab:
                symbols.append(character)
                fusible = False
            elif self.byte_fallback:
                symbols += [BYTE_TOKENS[byte] for byte in character.encode()]
            elif self.unk_token is not None:
                if not (self.fuse_unk and fusible):
                    symbols.append(self.unk_token)
                fusible = True
        return symbols


def merge(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Join adjacent pairs, lowest rank first and leftmost among equals, until no pair has a rank.  Lesson 01.

    symbols: tokens; ranks: pair of tokens -> its index among the merges. Returns the joined tokens.

    Scanning for the best pair after each merge takes time quadratic in the number of symbols. Here a linked list holds
    the symbols, each rank has a queue of the positions of its pair, and a heap gives the next rank. A merge makes at
    most two new pairs, so n symbols cost at most 3 n positions. Queues fill from left to right: a token is made in the
    same way wherever it occurs, so one pass to the right finds the positions of a pair. (A single heap of all positions
    would not need that argument, but on a long text it accesses memory at random.)
    """
    n = len(symbols)
    symbols = [*symbols, ""]  # "" is in no pair: it marks the end, and symbols that were joined to others
    following = list(range(1, n + 2))
    previous = list(range(-1, n))
    positions: defaultdict[int, deque[int]] = defaultdict(deque)  # rank -> left symbols
    for left in range(n - 1):
        rank = ranks.get((symbols[left], symbols[left + 1]))
        if rank is not None:
            positions[rank].append(left)
    waiting = list(positions)
    heapq.heapify(waiting)
    while waiting:
        rank = waiting[0]
        if not positions[rank]:
            del positions[heapq.heappop(waiting)]
            continue
        left = positions[rank].popleft()
        right = following[left]
        # A position is out of date if one of its symbols has since been joined to another.
        if ranks.get((symbols[left], symbols[right])) != rank:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after = following[left] = following[right]
        previous[after] = left
        for first, second in ((previous[left], left), (left, after)):
            new = ranks.get((symbols[first], symbols[second])) if first >= 0 else None
            if new is not None:
                if new not in positions:
                    heapq.heappush(waiting, new)
                positions[new].append(first)
    return [symbol for symbol in symbols if symbol]


class _Merging(Parts):
    """The functions of this module that `using` can replace."""

    bpe_merge: Callable[[list[str], dict[tuple[str, str], int]], list[str]]


PARTS = _Merging({"bpe_merge": merge})
register(lambda: [PARTS])
