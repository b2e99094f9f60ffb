"""Merging joins the right pairs, in time linear in the text."""

import json
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.tokenizer import Tokenizer, TokenizerError, merge
from minillm.tokenizer.bpe import BPE
from minillm.tokenizer.gemma import BYTE_TOKENS
from tests.chance import examples
from tests.proofs import only_in_proofs


def merge_by_scanning(symbols, ranks):
    """The definition: find the best pair in the whole list, merge it, repeat. Quadratic."""
    symbols = list(symbols)
    while True:
        candidates = [
            (ranks[pair], i) for i, pair in enumerate(zip(symbols, symbols[1:], strict=False)) if pair in ranks
        ]
        if not candidates:
            return symbols
        _, i = min(candidates)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


class CountedRanks(dict):
    lookups = 0

    def get(self, pair):
        self.lookups += 1
        return super().get(pair)


@examples(200)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 150), merges=st.integers(0, 30))
def test_merging_with_a_heap_equals_merging_by_scanning(seed, length, merges):
    letters = random.Random(seed)
    text = letters.choices("abc", k=length)
    tokens, pairs = list("abc"), []
    for _ in range(merges):
        pair = (letters.choice(tokens), letters.choice(tokens))
        if pair not in pairs:
            pairs.append(pair)
            tokens.append("".join(pair))
    letters.shuffle(pairs)  # a file may have any order, even one that training cannot produce
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    assert merge(text, ranks) == merge_by_scanning(text, ranks)


@pytest.mark.parametrize(
    "text, ranked, merged",
    [
        ("abcd", ["ab c", "a b", "c d"], ["abc", "d"]),
        ("abxab", ["a b"], ["ab", "x", "ab"]),
        ("aaaaa", ["aa a", "a a"], ["aaa", "aa"]),
    ],
)
def test_a_pair_created_by_a_merge_is_merged_by_its_rank_even_if_lower(text, ranked, merged):
    ranks = {tuple(pair.split()): rank for rank, pair in enumerate(ranked)}
    assert merge(list(text), ranks) == merge_by_scanning(text, ranks) == merged


@pytest.mark.parametrize("text", ["random", "one letter"])
def test_lookups_are_linear_in_a_text_without_spaces(gemma, text):
    letters = random.Random(0)
    lookups = []
    for length in (10_000, 100_000):
        run = "".join(letters.choices("theriva", k=length)) if text == "random" else "a" * length
        ranks = CountedRanks(gemma._model.ranks)
        merge(list(run), ranks)
        lookups.append(ranks.lookups)
    # Each symbol is looked up once; each merge pops one entry and looks up two new pairs.
    assert lookups[1] <= 12 * lookups[0]
    assert lookups[1] <= 100_000 * 6


def calls(function, *arguments) -> int:
    """The number of function calls, including C functions: reproducible, unlike seconds."""
    count = 0

    def counting(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("text", ["words", *only_in_proofs("one run without spaces", "newlines", "bytes")])
def test_encoding_is_linear_in_the_text_up_to_a_megabyte(gemma, text):
    def drawn(size):
        letters = random.Random(0)
        if text == "newlines":
            return "\n" * size
        if text == "bytes":
            return "".join(chr(letters.randint(0x4E00, 0x9FA5)) for _ in range(size // 3))
        return "".join(letters.choices("theriva     .\n" if text == "words" else "theriva", k=size))

    def work(size):
        gemma._model._cache.clear()
        return calls(gemma.encode, drawn(size))

    assert work(200_000) <= 12 * work(20_000)
    megabyte = drawn(1_000_000)
    assert gemma.decode(gemma.encode(megabyte)) == megabyte


def write_vocabulary(directory, size):
    """A tokenizer with `size` tokens: characters, and merges of two random tokens."""
    letters = random.Random(0)
    tokens = [*BYTE_TOKENS, "▁", *map(chr, range(0x4E00, 0x4E00 + 800))]
    vocab = {token: id for id, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *tokens])}
    first = len(BYTE_TOKENS)
    merges = {}
    while len(vocab) < size:
        pair = (tokens[letters.randrange(first, len(tokens))], tokens[letters.randrange(first, first + 801)])
        if pair[0] + pair[1] not in vocab:
            vocab[pair[0] + pair[1]] = len(vocab)
            tokens.append(pair[0] + pair[1])
            merges[pair] = None
    # A token of three or more characters is also the merge of its first character and the rest, if that is a token.
    for token in tokens[first + 801 :]:
        if token[1:] in vocab:
            merges.setdefault((token[0], token[1:]))
    model = {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocab, "merges": list(merges)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))


@pytest.mark.proof
def test_loading_is_linear_in_the_vocabulary_up_to_gemmas_size(tmp_path):
    loading = {}
    for size in (25_600, 256_000):
        write_vocabulary(tmp_path, size)
        loading[size] = calls(Tokenizer.from_pretrained, tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).vocab_size == 256_000
    assert loading[256_000] <= 12 * loading[25_600]


def test_a_character_outside_the_vocabulary_becomes_bytes_or_unk():
    vocab = {token: id for id, token in enumerate(["<unk>", "a", *BYTE_TOKENS])}
    spelled = BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    assert spelled.encode("aé") == [1, vocab["<0xC3>"], vocab["<0xA9>"]]
    assert BPE(vocab, [], unk_token="<unk>").encode("éèaé") == [0, 0, 1, 0]
    assert BPE(vocab, [], unk_token="<unk>", fuse_unk=True).encode("éèaé") == [0, 1, 0]
    assert BPE(vocab, []).encode("éaé") == [1]


def test_a_long_piece_is_split_only_where_no_token_crosses():
    vocab = {token: id for id, token in enumerate(["a", "b", "▁", "▁a", "ab", "b▁"])}
    bpe = BPE(vocab, [("▁", "a"), ("a", "b"), ("b", "▁")])
    assert list(bpe._cut("ba▁▁ab▁aaé")) == ["b", "a", "▁", "▁ab▁a", "aé"]


@examples(200)
@given(seed=st.integers(0, 2**32), unk=st.sampled_from([None, "<unk>"]), fuse=st.booleans(), fallback=st.booleans())
def test_splitting_a_long_piece_changes_no_token(seed, unk, fuse, fallback):
    letters = random.Random(seed)
    tokens = ["<unk>", *BYTE_TOKENS, *"abcde"]
    pairs = {}
    for _ in range(12):
        pair = (letters.choice(tokens[257:] + ["<0xC3>"]), letters.choice(tokens[257:] + ["<0xA9>", "<unk>"]))
        pairs[pair] = None
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
    vocab = {token: id for id, token in enumerate(tokens)}
    bpe = BPE(vocab, list(pairs), unk_token=unk, fuse_unk=fuse, byte_fallback=fallback)
    text = "".join(letters.choices("aabbccddeeéé日", k=120))
    assert bpe.encode(text) == bpe._encode_word(text)


def test_the_cache_of_pieces_is_bounded(gemma, monkeypatch):
    monkeypatch.setattr("minillm.tokenizer.bpe.CACHED_PIECES", 10)
    expected = [gemma.encode(f"word{n} ", add_special_tokens=False) for n in range(30)]
    assert [gemma.encode(f"word{n} ", add_special_tokens=False) for n in range(30)] == expected
    gemma._model._cache.clear()
    for n in range(30):
        gemma.encode("x" * n)
        assert len(gemma._model._cache) <= 10


@pytest.mark.parametrize("pair", ["a b", ["a", "c"], ["a", "b", "c"], "abc"])
def test_a_merge_outside_the_vocabulary_is_rejected(pair):
    with pytest.raises(TokenizerError, match="must join two tokens of the vocabulary"):
        BPE({"a": 0, "b": 1, "abc": 2}, [pair])
