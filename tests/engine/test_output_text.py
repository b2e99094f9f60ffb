"""Streamed text: each character once, none after a stop string, none that may still be part of one."""

import itertools
import random
from pathlib import Path

import pytest

from minillm.engine.output_text import OutputText, _overlap
from minillm.tokenizer import StreamingDetokenizer, Tokenizer
from tests.chance import SEED

TINY_GEMMA = Path(__file__).parents[2] / "data" / "tiny-gemma"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_pretrained(TINY_GEMMA)


@pytest.fixture(scope="module")
def alphabet(tokenizer):
    """A few tokens, so that stop strings occur often: letters, words, spaces, bytes, a special and an unknown id."""
    letters = tokenizer.encode("a b\nab bab", add_special_tokens=False)
    characters = [tokenizer.id(f"<0x{byte:02X}>") for byte in "é€🌊".encode()]
    return [*letters, *letters, *characters, tokenizer.bos_token_id, 10**6]


def stopped(tokenizer, ids, stop, min_tokens, reason):
    """(text, stop string, tokens), found by searching the whole text after each token."""
    detokenizer, text = StreamingDetokenizer(tokenizer), ""
    for count, token in enumerate(ids, 1):
        last = count == len(ids) and reason is not None
        before = len(text)
        text += "" if last and reason == "stop" else detokenizer.add([token])
        text += detokenizer.flush() if last else ""
        places = [
            (start, string)
            for string in stop
            for start in range(len(text) - len(string) + 1)
            if text.startswith(string, start) and start + len(string) > before
        ]
        if places and count > min_tokens:
            start, string = min(places)
            return text[:start], string, count
    return text + detokenizer.flush(), None, len(ids)


@pytest.mark.explore
def test_text_ends_at_the_first_stop_string_however_it_is_split(tokenizer, alphabet):
    rng, seen = random.Random(SEED), set()
    for case in range(600):
        length = rng.choice([1, 3, 12, 40])
        ids = rng.choices(alphabet, k=length)
        if rng.random() < 0.3:
            ids += tokenizer.encode("a🌊é b", add_special_tokens=False)
        whole = "".join(map(chr, rng.choices(b"ab \n", k=3))) + tokenizer.decode([each for each in ids if each < 10**6])
        starts = [rng.randrange(len(whole)) for _ in range(rng.randrange(4))]
        stop = tuple(whole[start : start + rng.choice([1, 2, 4, 9])] for start in starts)
        min_tokens = rng.choice([0, 0, 1, 2, len(ids), rng.randrange(len(ids) + 3)])
        reason = rng.choice(["stop", "length", None])
        text, string, count = stopped(tokenizer, ids, stop, min_tokens, reason)

        output, given, taken, left = OutputText(tokenizer, stop, min_tokens), "", 0, ids
        while left and output.stop_string is None:
            size = rng.choice([1, 1, 1, 3, 20])
            piece, left = left[:size], left[size:]
            kept = output.add(piece, None if left else reason)
            assert kept == len(piece) or output.stop_string is not None
            taken += kept
            given += output.new()
            assert text.startswith(given), "text was emitted too early"
        output.end()
        given += output.new()
        assert (given, output.text, output.stop_string, taken) == (text, text, string, count), (case, ids, stop)
        early = string is not None and stopped(tokenizer, ids, stop, 0, reason)[2] < count
        seen.add((string is not None, reason, min_tokens > 0, early, "\ufffd" in text))
    assert len(seen) > 20, "the random cases are too uniform"


def test_a_stop_string_completed_only_by_the_end_still_applies(tokenizer):
    wave = [tokenizer.id(f"<0x{byte:02X}>") for byte in "🌊".encode()]
    ids = [*tokenizer.encode("ab", add_special_tokens=False), *wave]
    output = OutputText(tokenizer, ("🌊",))
    assert output.add(ids) == len(ids) and output.stop_string is None, "the run of bytes may continue"
    output.end()
    assert output.text.endswith("🌊"), "a request ended from outside keeps its text"
    for end in (ids, [*ids, tokenizer.eos_token_id]):
        output = OutputText(tokenizer, ("🌊",))
        assert output.add(end, "length" if end is ids else "stop") == len(end)
        assert (output.text, output.stop_string) == (tokenizer.decode(ids).removesuffix("🌊"), "🌊")


def test_text_without_stop_strings_is_emitted_at_once(tokenizer):
    output = OutputText(tokenizer, min_tokens=9)
    for token in tokenizer.encode("The river runs", add_special_tokens=False):
        before = output.text
        assert output.add([token]) == 1
        assert output.new() == output.text[len(before) :] != ""


def test_only_text_that_may_become_a_stop_string_is_held_back():
    words = ["".join(letters) for size in range(6) for letters in itertools.product("ab", repeat=size)]
    for text, string in itertools.product(words, words[1:]):
        ends = [size for size in range(len(string)) if text.endswith(string[:size])]
        assert _overlap(text, string) == ends[-1], (text, string)
