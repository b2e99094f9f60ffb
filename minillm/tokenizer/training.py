"""Learn a byte-pair vocabulary from text.  Lesson 01.

Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016), section 3.2: start
from characters, join the most frequent adjacent pair everywhere, and repeat.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from .gemma import BYTE_TOKENS, SPACE, SPECIAL_TOKENS, SPLIT_PATTERN
from .patterns import TokenizerError, compile_pattern
from .pre_tokenizers import split_text


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    split_pattern: str = SPLIT_PATTERN,
    max_characters: int = 1000,
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return (vocabulary: token -> id, merges in the order they were learned).  Lesson 01.

    texts           any number of strings, read once; spaces become "▁"
    vocab_size      all ids: special tokens, 256 bytes, characters, merges (fewer if the texts have no more pairs)
    special_tokens  have the first ids, in this order
    split_pattern   a regex, applied after " " became "▁"; no token crosses the pieces that it splits a text into
    max_characters  keep this many of the most frequent characters; others are encoded as byte tokens

    The result depends only on the texts' word counts; of pairs with equal counts, the one that sorts first wins.
    Raises TokenizerError if vocab_size is too small for special tokens, bytes and characters.
    """
    pattern = compile_pattern(split_pattern)
    word_counts: Counter[str] = Counter()
    for text in texts:
        word_counts.update(split_text(text.replace(" ", SPACE), pattern))

    character_counts: Counter[str] = Counter()
    for word, count in word_counts.items():
        for character in word:
            character_counts[character] += count
    kept = sorted(character_counts, key=lambda c: (-character_counts[c], c))[:max_characters]
    tokens = [*special_tokens, *BYTE_TOKENS, *kept]
    if len(tokens) > vocab_size:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: {len(special_tokens)} special tokens, 256 bytes and {len(kept)} "
            f"characters need {len(tokens)}; raise vocab_size or lower max_characters"
        )
    vocab = {token: id for id, token in enumerate(tokens)}

    known = set(kept)
    words = [(list(word), count) for word, count in sorted(word_counts.items()) if known.issuperset(word)]
    merges = []
    for left, right in most_frequent_pairs(words):
        if len(vocab) == vocab_size:
            break
        merges.append((left, right))
        # Two pairs can make the same token ("a"+"bc", "ab"+"c"): the second is a merge, but no new id.
        vocab.setdefault(left + right, len(vocab))
    return vocab, merges


def join_pair(symbols: list[str], left: str, right: str) -> list[str]:
    """`symbols` with each adjacent pair (left, right) joined, from the start.  Lesson 01."""
    joined: list[str] = []
    i = 0
    while i < len(symbols):
        if i + 1 < len(symbols) and symbols[i] == left and symbols[i + 1] == right:
            joined.append(left + right)
            i += 2
        else:
            joined.append(symbols[i])
            i += 1
    return joined


def most_frequent_pairs(words: list[tuple[list[str], int]]) -> Iterator[tuple[str, str]]:
    """Yield the most frequent pair, join it in `words`, and repeat until no word has two symbols.  Lesson 01.

    words: (symbols, count) of each distinct word; changed in place.
    """
    counts: Counter[tuple[str, str]] = Counter()
    words_with: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, (symbols, count) in enumerate(words):
        for pair in pairwise(symbols):
            counts[pair] += count
            words_with[pair].add(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    while heap:
        negative_count, best = heapq.heappop(heap)
        if counts[best] != -negative_count:  # out of date: the current count was pushed when it changed
            continue
        if counts[best] == 0:
            return
        yield best
        changed = set()
        # Only words with this pair can change, so a step costs what it changes, not the whole corpus.
        for index in words_with.pop(best):
            symbols, count = words[index]
            joined = join_pair(symbols, *best)
            for pair in pairwise(symbols):
                counts[pair] -= count
                changed.add(pair)
            for pair in pairwise(joined):
                counts[pair] += count
                changed.add(pair)
                words_with[pair].add(index)
            words[index] = (joined, count)
        for pair in changed:
            heapq.heappush(heap, (-counts[pair], pair))
