"""Each component of `tokenizer.json` behaves like the library's, whatever its options."""

import json
import os
import unicodedata

import pytest
import regex
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from layouts import CHARACTERS, LLAMA3_PATTERN, known_differently, unicode_text

from minillm.tokenizer import StreamingDetokenizer, Tokenizer, TokenizerError
from minillm.tokenizer.decoders import Decoder
from minillm.tokenizer.gemma import SPLIT_PATTERN
from minillm.tokenizer.normalizers import build_normalizer
from minillm.tokenizer.pre_tokenizers import GPT2_PATTERN, build_pre_tokenizer
from tests.chance import examples


def file_with(**parts) -> dict:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, " ": 3, "é": 4, "<0xC3>": 5}, "merges": []}
    empty = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    return {"version": "1.0", "added_tokens": [], **empty, "model": model, **parts}


def library(**parts) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(file_with(**parts)))


# --- normalizers

NORMALIZERS = [
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Replace", "pattern": {"Regex": r"\s{2,}|(\d)"}, "content": r"\1"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "NFC"},
    {"type": "NFD"},
    {"type": "NFKC"},
    {"type": "NFKD"},
    {"type": "Strip", "strip_left": True, "strip_right": False},
    {"type": "Strip", "strip_left": False, "strip_right": True},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Lowercase"},
    {"type": "StripAccents"},
    {"type": "ByteLevel"},
    {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]},
]


@pytest.mark.parametrize("spec", NORMALIZERS, ids=lambda spec: spec["type"])
@examples(100)
@given(text=unicode_text())
def test_normalizers_equal_the_librarys(spec, text):
    assert build_normalizer(spec)(text) == library(normalizer=spec).normalizer.normalize_str(text)


@pytest.mark.parametrize("spec", NORMALIZERS, ids=lambda spec: spec["type"])
def test_normalizers_equal_the_librarys_on_every_character(spec):
    text = "a".join(c for c in CHARACTERS if c not in known_differently())
    rewritten = build_normalizer(spec)(text), library(normalizer=spec).normalizer.normalize_str(text)
    place = len(os.path.commonprefix(rewritten))
    ours, theirs = (each[place : place + 9] for each in rewritten)
    assert ours == theirs


def test_old_unicode_characters_are_not_excluded():
    """All versions of the tables agree on what the oldest one contains."""
    oldest = unicodedata.ucd_3_2_0
    unchanged = {c for c in CHARACTERS if oldest.category(c) == unicodedata.category(c) != "Co"}
    assert len(unchanged) > 90_000 and not unchanged & known_differently()


# --- pre-tokenizers

BEHAVIORS = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
PATTERNS = [
    {"String": " "},
    {"String": "--"},
    {"String": "."},
    *({"Regex": r} for r in [r"\s+", r"[ae]|\p{N}", r"\w+"]),
]
PRE_TOKENIZERS = [
    *({"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in
      [LLAMA3_PATTERN, GPT2_PATTERN, SPLIT_PATTERN]),
    *({"type": "Digits", "individual_digits": each} for each in (True, False)),
    *({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": cut}
      for prefix in (True, False) for cut in (True, False)),
    *({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
      for scheme in ("always", "first", "never") for split in (True, False)),
    {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "Split", "pattern": {"Regex": r"[\r\n]"}, "behavior": "Isolated", "invert": False},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    ]},
]  # fmt: skip


def check_pieces(spec, text):
    expected = [piece for piece, _ in library(pre_tokenizer=spec).pre_tokenizer.pre_tokenize_str(text)] if text else []
    assert (build_pre_tokenizer(spec)(text, True) if text else []) == expected


@pytest.mark.parametrize("spec", PRE_TOKENIZERS, ids=lambda spec: spec["type"])
@examples(100)
@given(text=unicode_text())
def test_pre_tokenizers_split_like_the_librarys(spec, text):
    check_pieces(spec, text)


@examples(300)
@given(
    text=st.text("ab -.e1\n", max_size=20),
    pattern=st.sampled_from(PATTERNS),
    behavior=st.sampled_from(BEHAVIORS),
    invert=st.booleans(),
)
def test_split_behaviors_equal_the_librarys(text, pattern, behavior, invert):
    check_pieces({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}, text)


@pytest.mark.parametrize("pattern", [r"\p{L}", r"\p{N}", r"\p{M}", r"\p{P}", r"\s", "(?i:s)", "(?i:d)"])
def test_regex_and_oniguruma_match_the_same_characters(pattern):
    spec = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}
    pieces = library(pre_tokenizer=spec).pre_tokenizer.pre_tokenize_str("".join(CHARACTERS))
    assert {piece for piece, _ in pieces} == set(regex.findall(pattern, "".join(CHARACTERS)))


# --- decoders

STRIP_END = {
    "type": "Sequence",
    "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 0, "stop": 2}],
}
DECODERS = [
    None,
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "Replace", "pattern": {"Regex": "a+"}, "content": r"\0"},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    {"type": "Strip", "content": "a", "start": 1, "stop": 0},
    {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 2, "stop": 0}]},
    STRIP_END,
    {"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": "-"}]},
]  # fmt: skip
TOKENS = st.lists(
    st.sampled_from(
        ["▁", "▁a", "a▁", "aa", "aab", "b", "é", "Ġ", "Ã", "©", "<0xC3>", "<0xA9>", "<0xFF>", "<0x0G>", "<0x00>"]
    ),
    max_size=8,
)


@pytest.mark.parametrize("spec", DECODERS, ids=lambda spec: spec["type"] if spec else "none")
@examples(100)
@given(tokens=TOKENS, chunk=st.integers(1, 3))
def test_decoders_equal_the_librarys_at_once_and_streamed(spec, tokens, chunk):
    if spec == STRIP_END:
        assume("".join(tokens).strip("a"))  # the library panics if nothing is left
    expected = library(decoder=spec).decoder.decode(tokens) if spec else " ".join(tokens)
    whole, stream = Decoder(spec), Decoder(spec)
    assert whole.push(tokens) + whole.finish() == expected
    parts = [stream.push(tokens[start : start + chunk]) for start in range(0, len(tokens), chunk)]
    assert "".join(parts) + stream.finish() == expected


def test_llama_2s_strip_after_fuse_can_be_streamed(directories):
    tokenizer = Tokenizer.from_pretrained(directories["llama2"])
    stream = StreamingDetokenizer(tokenizer)
    parts = [stream.add([id]) for id in tokenizer.encode("The river runs past", add_special_tokens=False)]
    assert "".join(parts).startswith("T")
    assert sum(map(bool, parts)) > 2


# --- added tokens

FLAGS = ["single_word", "lstrip", "rstrip", "normalized", "special"]


@examples(500)
@given(
    contents=st.lists(st.text("ab <é", min_size=1, max_size=3), min_size=1, max_size=4, unique=True),
    flags=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=4, max_size=4),
    text=st.text("aab  <éÉc_²\n", max_size=14),
    normalizer=st.sampled_from([None, {"type": "Lowercase"}, {"type": "NFD"}, NORMALIZERS[0], NORMALIZERS[3]]),
)
def test_added_tokens_match_as_in_the_library_for_all_flags(contents, flags, text, normalizer):
    vocab = file_with()["model"]["vocab"] | {"<unk>": 6}
    model = file_with()["model"] | {"vocab": vocab, "unk_token": "<unk>"}
    added = []
    for content, values in zip(contents, flags, strict=False):
        id = vocab.setdefault(content, len(vocab))
        added.append({"id": id, "content": content, **dict(zip(FLAGS, values, strict=True))})
    file = file_with(added_tokens=added, normalizer=normalizer, model=model)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(file))
    assert Tokenizer(file).encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("side, ids", [("lstrip", [0, 6, 3, 3, 3, 1]), ("rstrip", [0, 3, 3, 3, 6, 1])])
def test_an_added_token_with_strip_consumes_all_white_space_on_that_side(side, ids, normalized):
    flags = dict.fromkeys(FLAGS, False) | {side: True, "normalized": normalized}
    file = file_with(added_tokens=[{"id": 6, "content": "<x>", **flags}])
    text = "a   <x>   b"
    assert Tokenizer(file).encode(text) == tokenizers.Tokenizer.from_str(json.dumps(file)).encode(text).ids == ids


@pytest.mark.parametrize("normalized", [True, False])
def test_of_added_tokens_that_begin_at_one_place_the_longest_is_found(normalized):
    flags = dict.fromkeys(FLAGS, False) | {"normalized": normalized}
    added = [{"id": 6 + n, "content": content, **flags} for n, content in enumerate(["<", "<x>", "<x"])]
    file = file_with(added_tokens=added)
    text = "a<x>b<xc<"
    assert Tokenizer(file).encode(text) == tokenizers.Tokenizer.from_str(json.dumps(file)).encode(text).ids
    assert Tokenizer(file).encode(text) == [0, 7, 1, 8, 2, 6]


def test_thousands_of_added_tokens_are_matched_only_where_one_can_start():
    model = file_with()["model"]
    flags = dict.fromkeys(FLAGS, False)
    model["vocab"] |= {f"<unused{n}>": 6 + n for n in range(6000)}
    added = [{"id": 6 + n, "content": f"<unused{n}>", **flags} for n in range(6000)]
    tokenizer = Tokenizer(file_with(added_tokens=added, model=model))
    assert tokenizer.encode("a<unused5999>b<unused") == [0, 6 + 5999, 1]
    assert {first: len(sizes) for first, sizes in tokenizer._added._in_raw.lengths.items()} == {"<": 4}


# --- unsupported components are named


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}]}},
        {"post_processor": {"type": "RobertaProcessing"}},
        {"decoder": {"type": "CTC"}},
        {"model": {"type": "Unigram", "vocab": []}},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_an_unsupported_component_is_rejected_by_name(parts):
    spec = next(iter(parts.values()))
    name = spec.get("pretokenizers", [spec])[0]["type"]
    with pytest.raises(TokenizerError, match=f"'{name}', which is not supported"):
        Tokenizer(file_with(**parts))
