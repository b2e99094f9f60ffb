"""A text that continues another: the text of both as the `tokenizers` library decodes it, without the first one's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.tokenizer import StreamingDetokenizer, Tokenizer
from tests.chance import examples


def continued(tokenizer, prompt, ids, **options):
    """The text of `ids` after `prompt`, streamed one by one."""
    stream = StreamingDetokenizer(tokenizer, after=prompt, **options)
    return "".join([stream.add([each]) for each in ids]) + stream.flush()


@examples(300)
@given(data=st.data())
def test_a_continuation_is_the_text_of_both_without_the_firsts(pair, data):
    ours, theirs = pair
    last_byte = 0xEE if theirs.token_to_id("<0x00>") is not None else 0xFF  # <0xEF> could spell "\ufffd"
    first = theirs.token_to_id("<0x00>") or 0
    one = st.integers(0, ours.vocab_size - 1) | st.integers(first, first + last_byte)
    one = one.filter(lambda each: theirs.id_to_token(each) != "<0xEF>")
    prompt, ids = data.draw(st.lists(one, max_size=30)), data.draw(st.lists(one, max_size=12))
    before, both = theirs.decode(prompt), theirs.decode(prompt + ids)
    found = continued(ours, prompt, ids)
    if both.startswith(before):
        assert found == both.removeprefix(before)
    else:  # the prompt ends inside a character, or in bytes that the output breaks
        assert both.endswith(found) and len(found) <= 3 + len(theirs.decode(ids))


@pytest.mark.parametrize("text", ["The river runs past", "naïve café 🌊🎉 日本", "  two  spaces ", "a\n\nb\t\tc"])
def test_a_text_cut_anywhere_between_its_tokens_is_whole_again(pair, text):
    ours, theirs = pair
    ids = theirs.encode(text).ids
    whole = theirs.decode(ids)
    for cut in range(len(ids) + 1):
        before, rest = theirs.decode(ids[:cut]), continued(ours, ids[:cut], ids[cut:])
        if before.endswith("\ufffd"):  # the cut goes through a character, which the rest has as a whole
            assert whole.endswith(rest) and before.rstrip("\ufffd") in whole.removesuffix(rest)
        else:
            assert rest == whole.removeprefix(before)


def test_the_first_word_of_an_output_keeps_its_space(pair):
    ours, theirs = pair
    ids = theirs.encode("The river", add_special_tokens=False).ids
    word = next(n for n in range(1, len(ids)) if theirs.decode(ids[:n]) == "The")
    assert continued(ours, ids[:word], ids[word:]) == " river"
    assert continued(ours, [*theirs.encode("").ids, *ids[:word]], ids[word:]) == " river"


def test_after_special_tokens_alone_a_text_begins(pair):
    ours, theirs = pair
    ids = theirs.encode("The river", add_special_tokens=False).ids
    for prompt in ([], theirs.encode("").ids, theirs.encode("").ids * 30):
        assert continued(ours, prompt, ids) == theirs.decode(ids) == "The river"


@pytest.fixture(scope="module")
def llama2(directories):
    return Tokenizer.from_pretrained(directories["llama2"])


def of_bytes(tokenizer, data: bytes):
    return [tokenizer.id(f"<0x{byte:02X}>") for byte in data]


def test_the_output_has_the_character_that_the_prompt_began(llama2):
    wave = of_bytes(llama2, "é🌊".encode())
    for cut in range(3, 6):  # inside the wave
        assert continued(llama2, wave[:cut], wave[cut:]) == "🌊"
        assert continued(llama2, wave[:cut], wave[cut:], keeps_rest=True) == "🌊"
    assert continued(llama2, wave[:4], [llama2.id("▁the")]) == " the"
    assert continued(llama2, wave[:4], [llama2.id("▁the")], keeps_rest=True) == "\ufffd\ufffd the"


def test_bytes_that_break_a_run_leave_the_prompts_characters_alone(llama2):
    """The library would rewrite the whole run, but the prompt is what the client sent."""
    prompt = of_bytes(llama2, "日本語".encode() * 50)
    assert continued(llama2, prompt, of_bytes(llama2, b"\xff\x41")) == "\ufffd\ufffd"


def test_a_run_that_was_broken_in_the_prompt_stays_broken(llama2):
    prompt, ids = of_bytes(llama2, b"\xff" + "é".encode() * 40), of_bytes(llama2, "é".encode())
    assert continued(llama2, prompt, ids) == "\ufffd\ufffd"
    assert continued(llama2, prompt, [llama2.id("▁the"), *ids]) == " theé"


def test_only_the_end_of_a_long_prompt_is_read(llama2):
    class Counting(list):
        read = 0

        def __reversed__(self):
            for each in super().__reversed__():
                Counting.read += 1
                yield each

    prompt = Counting(llama2.encode("the river runs " * 500))
    assert continued(llama2, prompt, [llama2.id("▁the")]) == " the"
    assert 0 < Counting.read <= 8


def test_pending_characters_are_those_that_a_broken_byte_could_still_change(llama2):
    stream = StreamingDetokenizer(llama2)
    seen = []
    for each in of_bytes(llama2, "é🌊".encode()):
        assert stream.add([each]) == ""
        seen.append(stream.pending)
    assert seen == ["", "é", "é", "é", "é", "é🌊"]
    assert stream.add(of_bytes(llama2, b"\xff")) == "" and stream.pending == "\ufffd" * 7
    assert stream.add([llama2.id("▁the")]) == "\ufffd" * 7 + " the" and stream.pending == ""
