"""Tokens that other files than tokenizer.json add: ids and texts equal those of transformers' AutoTokenizer."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from minillm.tokenizer import Tokenizer, TokenizerError
from tests.chance import examples

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
PLAIN = dict.fromkeys(FLAGS, False)
VOCAB = {
    token: id for id, token in enumerate(["<unk>", "a", "b", "c", " ", "<s>", "</s>", "<x>", "<Y>", "<", ">", "y"])
}
TEXT = " a<x> <x>b <Y>c<y>  <s></s>b<z> <q> a<x>b "


def write(directory, in_file=(), normalizer=None, **files):
    """A directory with a small tokenizer.json and these files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    model = {"type": "BPE", "vocab": VOCAB, "merges": [], "unk_token": "<unk>"}
    empty = dict.fromkeys(["truncation", "padding", "pre_tokenizer", "post_processor"])
    decoder = {"type": "Fuse"}
    content = {"version": "1.0", **empty, "normalizer": normalizer, "decoder": decoder, "model": model}
    content["added_tokens"] = list(in_file)
    for name, values in {"tokenizer": content, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


def config(**more):
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | more


def check_equal(directory, text=TEXT):
    ours, theirs = Tokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    for special in (True, False):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, special) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    return ours


NEXT = len(VOCAB)
LSTRIP_X = PLAIN | {"content": "<x>", "lstrip": True}
OLD_X = {name: value for name, value in LSTRIP_X.items() if name != "special"}
Z = PLAIN | {"content": "<z>", "special": True}
IN_FILE = [{"id": 7, "content": "<x>", **PLAIN}]
CASES = {
    "a new token": ([], {"tokenizer_config": config(added_tokens_decoder={str(NEXT): Z})}),
    "flags of a token of the vocabulary": ([], {"tokenizer_config": config(added_tokens_decoder={"7": LSTRIP_X})}),
    "other flags than in tokenizer.json": (IN_FILE, {"tokenizer_config": config(added_tokens_decoder={"7": LSTRIP_X})}),
    "plain, though special in tokenizer.json": (
        [{"id": 7, **Z, "content": "<x>"}],
        {"tokenizer_config": config(added_tokens_decoder={"7": LSTRIP_X})},
    ),
    "another id than in the vocabulary": ([], {"tokenizer_config": config(added_tokens_decoder={"3": LSTRIP_X})}),
    "extra special tokens": ([], {"tokenizer_config": config(extra_special_tokens=["<x>", "<q>"])}),
    "additional special tokens": (IN_FILE, {"tokenizer_config": config(additional_special_tokens=["<x>", "<q>"])}),
    "both": (
        [],
        {"tokenizer_config": config(additional_special_tokens=["<x>"], extra_special_tokens=["<q>"])},
    ),
    "named in a dictionary": ([], {"tokenizer_config": config(extra_special_tokens={"image_token": "<q>"})}),
    "a model's own names": ([], {"tokenizer_config": config(image_token="<x>", audio_token="<q>")}),
    "an end token that is not in the vocabulary": ([], {"tokenizer_config": config(eos_token="<z>")}),
    "an end token that tokenizer.json does not call special": (IN_FILE, {"tokenizer_config": config(eos_token="<x>")}),
    "an end token with flags": (
        [],
        {"tokenizer_config": config(eos_token=LSTRIP_X | {"__type": "AddedToken", "normalized": True})},
    ),
    "a map that overrides": (
        [],
        {"tokenizer_config": config(eos_token="</s>"), "special_tokens_map": {"eos_token": "<x>", "bos_token": "<s>"}},
    ),
    "a map that is out of date": (
        [],
        {
            "tokenizer_config": config(eos_token="</s>", added_tokens_decoder={"6": PLAIN | {"content": "</s>"}}),
            "special_tokens_map": {"eos_token": "<x>"},
        },
    ),
    "a map with flags": (
        [],
        {"special_tokens_map": {"eos_token": OLD_X}},
    ),
    "an old list of tokens": (
        [],
        {"tokenizer_config": config(eos_token="<q>"), "added_tokens": {"<z>": NEXT, "<q>": NEXT + 1}},
    ),
    "an old list that is out of date": (
        [],
        {"tokenizer_config": config(added_tokens_decoder={}), "added_tokens": {"<z>": NEXT}},
    ),
    "flags for <s> and </s>, which transformers ignores": (
        [],
        {"tokenizer_config": config(bos_token="<s>", eos_token="</s>", add_bos_token=True, add_eos_token=True)},
    ),
    "padding and masks": ([], {"tokenizer_config": config(mask_token="<q>", pad_token="<z>")}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_way_to_add_tokens_is_read_as_transformers_does(tmp_path, case):
    in_file, files = CASES[case]
    check_equal(write(tmp_path / "model", in_file, **files))


CONTENTS = st.sampled_from(["<x>", "<Y>", "<s>", "</s>", "<z>", "<q>", "b"])
TOKENS = st.fixed_dictionaries({"content": CONTENTS, **dict.fromkeys(FLAGS, st.booleans())})
NAMES = ["bos_token", "eos_token", "pad_token", "image_token"]
VALUES = CONTENTS | TOKENS.map(lambda token: token | {"__type": "AddedToken"})
LISTS = st.lists(CONTENTS, max_size=2, unique=True)


@st.composite
def directories(draw):
    """The contents of files, of which any may be missing."""

    def unique(tokens):
        return list({token["content"]: token for token in tokens}.values())

    def numbered(tokens):
        """With the ids that new tokens get."""
        free, found = NEXT, []
        for token in tokens:
            id = VOCAB.get(token["content"], free)
            free = max(free, id + 1)
            found.append((id, token))
        return sorted(found, key=lambda pair: pair[0])

    in_file = [{"id": id, **token} for id, token in numbered(unique(draw(st.lists(TOKENS, max_size=2))))]
    in_vocab = {**VOCAB, **{token["content"]: token["id"] for token in in_file}}
    free, decoder = max(in_vocab.values()) + 1, {}
    for token in unique(draw(st.lists(TOKENS, max_size=3))):
        id = in_vocab.get(token["content"], free)
        free = max(free, id + 1)
        decoder[id] = token
    values = config(**draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)))
    if draw(st.booleans()):
        values["added_tokens_decoder"] = {str(id): token for id, token in decoder.items()}
    for name in ("extra_special_tokens", "additional_special_tokens"):
        if draw(st.integers(0, 2)) == 0:
            values[name] = draw(LISTS)
    files = {"tokenizer_config": values}
    if draw(st.booleans()):
        files["special_tokens_map"] = draw(st.dictionaries(st.sampled_from(NAMES), CONTENTS, max_size=2))
        if draw(st.booleans()):
            files["special_tokens_map"]["additional_special_tokens"] = draw(LISTS)
    if draw(st.booleans()):
        files["added_tokens"] = {token["content"]: id for id, token in decoder.items()}
    normalizer = draw(st.sampled_from([None, {"type": "Lowercase"}]))
    return in_file, normalizer, files


@examples(150)
@given(given_files=directories(), text=st.lists(CONTENTS | st.sampled_from([" ", "a", "<y>", "  "]), max_size=8))
def test_any_files_are_read_as_transformers_does(tmp_path_factory, given_files, text):
    in_file, normalizer, files = given_files
    directory = write(tmp_path_factory.getbasetemp() / "settings", in_file, normalizer, **files)
    check_equal(directory, "".join(text))


@pytest.mark.parametrize(
    "normalizer", [{"type": "Lowercase"}, {"type": "Replace", "pattern": {"String": "<"}, "content": "_"}]
)
def test_a_normalized_token_decodes_as_its_normalized_content(tmp_path, normalizer):
    token = {"id": 8, "content": "<Y>", **PLAIN, "normalized": True}
    check_equal(write(tmp_path / "model", [token], normalizer), "a<Y>b")


def test_a_new_token_with_another_id_than_the_next_is_refused_by_name(tmp_path):
    """transformers gives it the next id, which is not the one that the model was trained with."""
    for files in (
        {"tokenizer_config": config(added_tokens_decoder={str(NEXT + 8): Z})},
        {"added_tokens": {"<z>": NEXT + 8}},
    ):
        with pytest.raises(
            TokenizerError, match=f"'<z>' and the vocabulary disagree on the id {NEXT + 8}, .* be {NEXT}:"
        ):
            Tokenizer.from_pretrained(write(tmp_path / "model", **files))
    token = {"id": NEXT + 8, **Z}
    with pytest.raises(TokenizerError, match=f"'<z>' and the vocabulary disagree on the id {NEXT + 8}"):
        Tokenizer.from_pretrained(write(tmp_path / "model", [token]))


def test_splitting_special_tokens_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="split_special_tokens, which is not supported"):
        Tokenizer.from_pretrained(write(tmp_path / "model", tokenizer_config=config(split_special_tokens=True)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"7": "<x>"}}),
        ("tokenizer_config", {"added_tokens_decoder": {"seven": Z}}),
        ("tokenizer_config", {"added_tokens_decoder": ["<x>"]}),
        ("tokenizer_config", {"extra_special_tokens": [7]}),
        ("tokenizer_config", {"eos_token": {"lstrip": True}}),
        ("tokenizer_config", ["<x>"]),
        ("special_tokens_map", {"additional_special_tokens": [{"token": "<x>"}]}),
        ("added_tokens", ["<x>"]),
    ],
)
def test_files_of_another_form_are_refused_by_name(tmp_path, name, content):
    with pytest.raises(TokenizerError, match=f"{name}.json"):
        Tokenizer.from_pretrained(write(tmp_path / "model", **{name: content}))


def test_a_padding_token_beyond_the_models_vocabulary_is_no_obstacle(tmp_path):
    from minillm.errors import ConfigError
    from minillm.model.loader import check_tokenizer

    class Config:
        vocab_size = NEXT

    padded = write(tmp_path / "padded", tokenizer_config=config(pad_token="<pad>"))
    check_tokenizer(Tokenizer.from_pretrained(padded), Config)
    larger = write(tmp_path / "larger", [{"id": NEXT, **Z}])
    with pytest.raises(ConfigError, match=f"{NEXT + 1} tokens but the model only {NEXT}"):
        check_tokenizer(Tokenizer.from_pretrained(larger), Config)
