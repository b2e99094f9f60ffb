"""Ids and text equal those of the `tokenizers` library, for any text and every layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import unicode_text

from minillm.tokenizer import StreamingDetokenizer
from tests.chance import examples

pytestmark = pytest.mark.key


@examples(150)
@given(text=unicode_text(), add_special_tokens=st.booleans())
def test_ids_equal_the_librarys(pair, text, add_special_tokens):
    ours, theirs = pair
    ids = theirs.encode(text, add_special_tokens=add_special_tokens).ids
    assert ours.encode(text, add_special_tokens) == ids


@examples(150)
@given(text=unicode_text(), skip=st.booleans())
def test_decoded_text_equals_the_librarys(pair, text, skip):
    ours, theirs = pair
    ids = theirs.encode(text).ids
    assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@examples(150)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_decode_as_in_the_library_at_once_and_streamed(pair, data, skip):
    ours, theirs = pair
    # Half of the ids are from the start of the vocabulary: special and byte tokens, in valid and invalid runs.
    one = st.integers(0, ours.vocab_size - 1) | st.integers(0, 270)
    chunks = data.draw(st.lists(st.lists(one, max_size=6), max_size=12))
    ids = [id for chunk in chunks for id in chunk]
    expected = theirs.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids, skip) == expected
    stream = StreamingDetokenizer(ours, skip_special_tokens=skip)
    assert "".join([stream.add(chunk) for chunk in chunks] + [stream.flush()]) == expected


@examples(150)
@given(text=unicode_text())
def test_decoding_never_yields_half_a_character(pair, text):
    ours, _ = pair
    ids = ours.encode(text, add_special_tokens=False)
    whole = ours.decode(ids)
    stream = StreamingDetokenizer(ours)
    given_out = ""
    for id in ids:
        given_out += stream.add([id])
        assert whole.startswith(given_out), "text was changed, repeated, or split inside a character"
    assert given_out + stream.flush() == whole


@examples(150)
@given(text=unicode_text())
def test_gemmas_byte_fallback_is_lossless(gemma, text):
    assert gemma.decode(gemma.encode(text), skip_special_tokens=False) == "<bos>" + text.replace("▁", " ")


def test_empty_text_encodes_to_the_template_only(pair):
    ours, theirs = pair
    assert ours.encode("") == theirs.encode("").ids == [ours.bos_token_id]
    assert ours.encode("", add_special_tokens=False) == []
    assert ours.decode([]) == ""


def test_token_names_and_ids_equal_the_librarys(pair):
    ours, theirs = pair
    assert ours.vocab_size == theirs.get_vocab_size(with_added_tokens=True)
    for token, id in theirs.get_vocab(with_added_tokens=True).items():
        assert ours.id(token) == id
        assert ours.token(id) == token


def test_whole_words_of_the_vocabulary_take_precedence_over_merges(directories):
    from minillm.tokenizer import Tokenizer

    llama3 = Tokenizer.from_pretrained(directories["llama3"])
    assert llama3.encode(" xylophone", add_special_tokens=False) == [llama3.id("Ġxylophone")]
