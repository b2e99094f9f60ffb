"""Join the characters of a piece into tokens, the earliest-learned pair first.  Lesson 01.

Sennrich, Haddow and Birch (2016), section 3.2, with SentencePiece's byte fallback (Kudo and Richardson 2018): a
character outside the vocabulary becomes the tokens <0x..> of its UTF-8 bytes.
"""

import heapq
from collections.abc import Sequence

import regex

from .gemma import BYTE_TOKENS, SPACE
from .patterns import TokenizerError

CACHED_PIECES = 1 << 16  # pieces remembered; cleared when full, so that a server's memory stays bounded
CACHED_LENGTH = 64  # characters; longer pieces rarely come back


class BPE:
    """The `model` of a `tokenizer.json`.  Lesson 01.

    vocab   token -> id
    merges  pairs of tokens, first learned first, as ["a", "b"] or, in older files, "a b"
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
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]
        for pair in pairs:
            if len(pair) != 2 or not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
                raise TokenizerError(f"the merge {pair!r} must join two tokens of the vocabulary to a third one in it")
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        # Where no token has "▁" after another character, none ever crosses such a place: cutting a text there changes
        # nothing, and makes pieces short enough to be worth remembering.
        crossed = any(SPACE in (left + right).lstrip(SPACE) for left, right in pairs)
        self._words = regex.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+") if SPACE in vocab and not crossed else None
        self._cache: dict[str, list[int]] = {}

    def encode(self, piece: str) -> list[int]:
        """The ids of one pre-tokenized piece."""
        if self.ignore_merges and piece in self.vocab:
            return [self.vocab[piece]]
        if self._words is None:
            return self._encode_word(piece)
        return [id for word in self._words.findall(piece) for id in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = [self.vocab[token] for token in merge(self._symbols(word), self.ranks)]
            if len(word) <= CACHED_LENGTH:
                if len(self._cache) >= CACHED_PIECES:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _symbols(self, word: str) -> list[str]:
        """`word` as the tokens that merging starts from: characters, bytes, or the unknown token."""
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
    """Join neighbours, lowest rank first and leftmost among equals, until no pair has a rank.  Lesson 01.

    Scanning for the best pair again after each merge takes time quadratic in the length: a megabyte without a space
    would take days. Here a heap holds the candidate pairs and a linked list the neighbours. A merge makes at most
    two new pairs, so n symbols cost at most 3 n heap entries: O(n log n).
    """
    n = len(symbols)
    symbols = [*symbols, ""]  # "" is in no pair: it stands for the end and for symbols that were absorbed
    following = list(range(1, n + 2))
    previous = list(range(-1, n))
    heap = []
    for left in range(n - 1):
        rank = ranks.get((symbols[left], symbols[left + 1]))
        if rank is not None:
            heap.append((rank, left))
    heapq.heapify(heap)
    while heap:
        rank, left = heapq.heappop(heap)
        right = following[left]
        # An entry is out of date when one of its symbols has grown or been absorbed since.
        if ranks.get((symbols[left], symbols[right])) != rank:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after = following[left] = following[right]
        previous[after] = left
        for first, second in ((previous[left], left), (left, after)):
            if first >= 0:
                rank = ranks.get((symbols[first], symbols[second]))
                if rank is not None:
                    heapq.heappush(heap, (rank, first))
    return [symbol for symbol in symbols if symbol]
