"""Measure vocabularies and merges for lesson 01."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from minillm.model.config import ModelConfig
from minillm.tokenizer import Tokenizer, write_tokenizer
from minillm.tokenizer.bpe import merge
from minillm.tokenizer.gemma import BYTE_TOKENS, SPACE, SPECIAL_TOKENS, SPLIT_PATTERN
from minillm.tokenizer.patterns import compile_pattern
from minillm.tokenizer.pre_tokenizers import split_text
from minillm.tokenizer.training import join_pair, most_frequent_pairs

Pair = tuple[str, str]
HARD = [
    "The quirrel sleeps under the old bridge.",
    "  two  spaces,\ttab\r\n\n\n   and  trailing  ",
    "HOBMOOR hobmoor Hob\u200bmoor naïve cafe\u0301 ﬁne",
    "👩‍👩‍👧‍👦 flags 🇩🇪🇯🇵, 1234567890 ½ ٣ 松鼠睡在旧桥下面。",
    "العربية हिन्दी 한국어 \u0000 \ufffd ▁▁ <0x41> <b>",
    "x<end_of_turn>y<bos><start_of_turn >",
    "".join(chr(code) for code in range(32, 1000, 7)),
    "",
]  # texts that tokenizers get wrong


def cut(text: str, pattern: str = SPLIT_PATTERN) -> list[str]:
    """A text as words, in which "▁" stands for a space."""
    return split_text(text.replace(" ", SPACE), compile_pattern(pattern))


def engines_learn(word_counts: Mapping[str, int], steps: int) -> list[Pair]:
    """The first `steps` merges, learned by the engine."""
    return list(islice(most_frequent_pairs([(list(word), count) for word, count in word_counts.items()]), steps))


def counting_learn(word_counts: Mapping[str, int], steps: int) -> list[Pair]:
    """The same by counting all pairs at every step."""
    words = [(list(word), count) for word, count in word_counts.items()]
    merges: list[Pair] = []
    while len(merges) < steps:
        counts: Counter[Pair] = Counter()
        for symbols, count in words:
            for pair in pairwise(symbols):
                counts[pair] += count
        if not counts:
            break
        best = min((-count, pair) for pair, count in counts.items())[1]
        merges.append(best)
        words = [(join_pair(symbols, *best), count) for symbols, count in words]
    return merges


def scanning_merge(symbols: Iterable[str], ranks: Mapping[Pair, int]) -> list[str]:
    """Merge by looking at every pair of neighbors after every join."""
    symbols = list(symbols)
    while found := [(ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks]:
        place = min(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


def leftmost_merge(symbols: Iterable[str], ranks: Mapping[Pair, int]) -> list[str]:
    """Join the leftmost pair that has a rank, whatever its rank, until no pair has one."""
    symbols = list(symbols)
    place = 0
    while place < len(symbols) - 1:
        if (symbols[place], symbols[place + 1]) in ranks:
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
            place = 0
        else:
            place += 1
    return symbols


def learned_with(pattern: str, text: str, steps: int) -> Callable[[str], list[str]]:
    """A function text -> tokens, with `steps` merges learned from `text` cut by `pattern`."""
    merges = engines_learn(Counter(cut(text, pattern)), steps)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    return lambda text: [token for word in cut(text, pattern) for token in merge(list(word), ranks)]


def after_the_colon(tokens: Iterable[str]) -> Counter[str]:
    """Return how often each token follows "Answer:" or ":"; only tokens that begin with a space."""
    return Counter(
        right for left, right in pairwise(tokens) if left.endswith(("Answer:", ":")) and right.startswith(SPACE)
    )


def as_tokenizers(words: Iterable[str], merges: Sequence[Pair]) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    """A tokenizer.json with these merges, loaded by the engine and by transformers."""
    from transformers import AutoTokenizer

    characters = sorted({character for word in words for character in word})
    tokens = [*SPECIAL_TOKENS, *BYTE_TOKENS, *characters, *(left + right for left, right in merges)]
    vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    with TemporaryDirectory() as folder:
        write_tokenizer(folder, vocab, list(merges))
        theirs = AutoTokenizer.from_pretrained(folder)
        return Tokenizer.from_pretrained(folder), lambda text: theirs(text)["input_ids"]


def in_transformers(folder: Path) -> Callable[[str], list[int]]:
    """Return how transformers encodes a text with the tokenizer in this folder."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    return lambda text: theirs(text)["input_ids"]


def merge_seconds(function: Callable, ranks: Mapping[Pair, int], lengths: Iterable[int]) -> dict[int, float]:
    """Seconds to merge one word of each length, without a space."""
    found = {}
    for length in lengths:
        word = list("thequirrelsleepsunderthebridge" * length)[:length]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            function(list(word), ranks)
            times.append(time.perf_counter() - begin)
        found[length] = min(times)
    return found


def characters_per_token(text: str, sizes: Mapping[int, int], merges: Sequence[Pair]) -> list[float]:
    """Return how many characters a token covers, by vocabulary size. sizes: size -> how many of `merges` it has."""
    words = Counter(cut(text))
    covered = []
    for count in sizes.values():
        ranks = {pair: rank for rank, pair in enumerate(merges[:count])}
        covered.append(len(text) / sum(times * len(merge(list(word), ranks)) for word, times in words.items()))
    return covered


def table_bytes(config: ModelConfig, vocab_size: int) -> int:
    """Bytes of the embedding table in bfloat16."""
    return 2 * vocab_size * config.hidden_size


def body_bytes(config: ModelConfig) -> int:
    """Bytes of all layers' matrices in bfloat16: queries, output, keys, values, and three of the feed-forward part."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return 2 * config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
