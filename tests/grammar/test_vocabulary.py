"""Tokens of required texts: their bytes are the text's, whatever the tokenizer does to a text."""

import json
import re

import llguidance
import pytest

from minillm.errors import InvalidRequest
from minillm.grammar import Grammars
from minillm.grammar.vocabulary import Vocabulary
from minillm.tokenizer import Tokenizer
from tests.grammar.walks import STOP, allowed, walk
from tests.tokenizer.layouts import CORPUS, LAYOUTS

SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
BYTES = {"type": "ByteFallback"}


def normalized(*steps):
    return lambda file: file.update(normalizer={"type": "Sequence", "normalizers": [*steps, SPACE]})


def metaspaced(scheme):
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}

    def change(file):
        file.update(normalizer=None, pre_tokenizer=space, decoder={"type": "Sequence", "decoders": [BYTES, space]})

    return change


def spaced(file):
    file["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


# A layout of tests/tokenizer, and what is changed in its file.
COMPLETE = {
    **{name: (name, None) for name in ("gemma", "gemma_whole", "llama2", "llama3")},
    "NFC": ("gemma", normalized({"type": "NFC"})),
    "lower case": ("gemma", normalized({"type": "Lowercase"})),
    "replaced": ("gemma", normalized({"type": "Replace", "pattern": {"Regex": "[aeiou]"}, "content": "e"})),
    "stripped": ("gemma", normalized({"type": "Strip", "strip_left": True, "strip_right": True})),
    **{f"Metaspace, {scheme}": ("gemma", metaspaced(scheme)) for scheme in ("first", "always", "never")},
    "byte level with a space": ("llama3", spaced),
}
TEXTS = [
    *("red", " red", "  red ", "redcat", '{"The river": "x", "y": 1}', "a\n\nb", "\n", "\n\n", " ", "\t\t"),
    *("<eos>", "a<bos>b", "<|eot_id|>", "<start_of_turn>user", "<table>", "<0x41>", "a▁b", "▁", "▁▁▁", "Ġa"),
    *("ÉÀ", "e\u0301", "\u0301", "日本語", "👍🏽", "\x00\x7f", "ﬁ", "\ue000", *CORPUS[:5]),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("vocabularies")
    for name, make in LAYOUTS.items():
        make(root / name)
    return {name: json.loads((root / name / "tokenizer.json").read_text(encoding="utf-8")) for name in LAYOUTS}


def changed(files, layout, change):
    file = json.loads(json.dumps(files[layout]))
    if change is not None:
        change(file)
    return file


def end(file) -> int:
    return file["added_tokens"][1]["id"]  # <eos> or <|end_of_text|>


@pytest.fixture(scope="module", params=COMPLETE)
def model(request, files):
    """A tokenizer, its number of tokens, and its end token."""
    file = changed(files, *COMPLETE[request.param])
    tokenizer = Tokenizer(file)
    return tokenizer, tokenizer.vocab_size, [end(file)]


def test_the_bytes_of_a_texts_tokens_are_the_texts(model):
    vocabulary = Vocabulary(*model)
    assert vocabulary.complete
    for text in TEXTS:
        ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[id] for id in ids) == text.encode(), text
        assert not set(ids) & set(vocabulary.special_token_ids)


def test_bytes_that_are_no_text_have_tokens_too(model):
    made = llguidance.LLTokenizer(Vocabulary(*model), eos_token=model[2])
    whole = "é日".encode()
    for data in (whole[1:], whole[:-1], whole[1:-1] + b"cat", b"cat" + whole[1:4], b"\xa9"):
        assert made.decode_bytes(made.tokenize_bytes(data)) == data


def test_a_mask_leads_to_the_required_text_alone(model):
    tokenizer, _, eos = model
    grammars = Grammars(*model)
    for text in TEXTS:
        found = walk(grammars.matcher("regex", re.escape(text)), tokenizer.token_bytes, eos, most=400)
        assert found == (text.encode(), STOP)
    for value in ("<eos>", "a<bos>b", "a▁b", "<|eot_id|>", "\ue000"):
        matcher = grammars.matcher("json_schema", json.dumps({"const": value}))
        data, reason = walk(matcher, tokenizer.token_bytes, eos, most=400)
        assert reason == STOP and json.loads(data) == value


@pytest.mark.parametrize("layout", ["gemma_whole", "llama2", "llama3"])
def test_the_tokens_are_those_of_llguidances_own_tokenizer(files, layout):
    tokenizer, eos = Tokenizer(files[layout]), end(files[layout])
    theirs = llguidance.LLTokenizer(json.dumps(files[layout]), eos_token=eos)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, [eos])
    # "desert": the longest tokens from left to right would be others
    for text in ('{"The river": "x', "red", " red", "past the old mill", "desert", CORPUS[0], *CORPUS[2:5]):
        assert vocabulary(text) == theirs.tokenize_str(text), text


def test_an_end_token_is_no_text_even_if_the_tokenizer_says_so(files):
    eos = end(files["gemma"])
    tokenizer = Tokenizer(changed(files, "gemma", lambda file: file["added_tokens"][1].update(special=False)))
    assert tokenizer.token_bytes(eos) == b"<eos>"
    assert eos not in allowed(Grammars(tokenizer, tokenizer.vocab_size, [eos]).matcher("regex", "<.*"))


def lacking(files, change=None):
    """A vocabulary without byte fallback, whose tokenizer puts a space before each text."""
    tokenizer = Tokenizer(changed(files, "metaspace", change))
    return tokenizer, tokenizer.vocab_size, [end(files["metaspace"])]


def test_a_vocabulary_that_lacks_characters_never_allows_a_wrong_token(files):
    model = tokenizer, _, eos = lacking(files)
    assert not Vocabulary(*model).complete
    grammars = Grammars(*model)
    for text in ("red", " red", "a cat's", "<0x41>"):
        found = walk(grammars.matcher("regex", re.escape(text)), tokenizer.token_bytes, eos)
        assert found == (text.encode(), STOP)
    with pytest.raises(InvalidRequest, match="^regex cannot be used: no token of this model can come next"):
        grammars.matcher("regex", "🎻")
    assert walk(grammars.matcher("regex", "a🎻"), tokenizer.token_bytes, eos) == (
        b"a",
        "no token of this model can come next",
    )


def test_a_schema_with_characters_that_the_vocabulary_lacks_is_refused(files):
    with pytest.raises(InvalidRequest, match="at #: this model's vocabulary has no token for '[!-~]'"):
        Grammars(*lacking(files)).matcher("json_schema", '{"type": "object"}')

    def ascii_too(file):
        vocab = file["model"]["vocab"]
        for code in range(0x21, 0x7F):
            vocab.setdefault(chr(code), len(vocab))

    model = tokenizer, _, eos = lacking(files, ascii_too)
    grammars = Grammars(*model)
    inner = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    schema = {"type": "object", "properties": {"x": inner}, "required": ["x"]}
    data, reason = walk(grammars.matcher("json_schema", json.dumps(schema)), tokenizer.token_bytes, eos)
    assert reason == STOP and json.loads(data) == {"x": {"a": None}}
    inner["properties"]["🎻"] = True
    with pytest.raises(InvalidRequest, match="at #/properties/x: this model's vocabulary has no token for '🎻'"):
        grammars.matcher("json_schema", json.dumps(schema))
