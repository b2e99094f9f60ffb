"""Streamed text: each character once, none after a stop string, none that may still be part of one."""

import itertools
import os.path
import random

import pytest

from minillm.engine.output_text import OutputText, _overlap
from minillm.tokenizer import Tokenizer
from tests.chance import SEED
from tests.tokenizer.layouts import LAYOUTS
from tests.tokenizer.reference import Reference

pytestmark = pytest.mark.key


@pytest.fixture(scope="module", params=LAYOUTS)
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts") / request.param
    LAYOUTS[request.param](directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def theirs(directory):
    return Reference(directory)


@pytest.fixture(scope="module")
def alphabet(directory, tokenizer):
    """A few tokens, so that stop strings occur often: letters, spaces, parts of characters, a special and an unknown
    id."""
    letters = tokenizer.encode("a b\nab bab", add_special_tokens=False)
    names = [f"<0x{byte:02X}>" for byte in "é🌊".encode()] if directory.name != "llama3" else "Ã©ðŁĮĬ"
    return [*letters, *letters, *map(tokenizer.id, names), tokenizer.bos_token_id, 10**6]


def stopped(theirs, ids, stop, min_tokens, reason):
    """(text, stop string, tokens), found by searching the whole text after each token."""
    text = ""
    for count in range(1, len(ids) + 1):
        last = count == len(ids) and reason is not None
        known = ids[: count - 1] if last and reason == "stop" else ids[:count]
        before, text = text, theirs.decode(known) if last else theirs.complete(known)
        old = len(os.path.commonprefix((before, text)))
        places = [
            (start, string)
            for string in stop
            for start in range(len(text) - len(string) + 1)
            if text.startswith(string, start) and start + len(string) > old
        ]
        if places and count > min_tokens:
            start, string = min(places)
            return text[:start], string, count
    return theirs.decode(ids[:-1] if reason == "stop" else ids), None, len(ids)


@pytest.mark.explore
def test_text_ends_at_the_first_stop_string_however_it_is_split(tokenizer, theirs, alphabet):
    rng, seen = random.Random(SEED), set()
    for case in range(200):
        length = rng.choice([1, 3, 12, 40])
        ids = rng.choices(alphabet, k=length)
        if rng.random() < 0.3:
            ids += tokenizer.encode("a🌊é b", add_special_tokens=False)
        whole = "".join(map(chr, rng.choices(b"ab \n", k=3))) + theirs.decode(ids)
        starts = [rng.randrange(len(whole)) for _ in range(rng.randrange(4))]
        stop = tuple(whole[start : start + rng.choice([1, 2, 4, 9])] for start in starts)
        min_tokens = rng.choice([0, 0, 1, 2, len(ids), rng.randrange(len(ids) + 3)])
        reason = rng.choice(["stop", "length", None])
        text, string, count = stopped(theirs, ids, stop, min_tokens, reason)

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
        early = string is not None and stopped(theirs, ids, stop, 0, reason)[2] < count
        seen.add((string is not None, reason, min_tokens > 0, early, "\ufffd" in text))
    assert len(seen) > 12, "the random cases are too uniform"


def test_offsets_are_where_the_librarys_text_has_each_token(tokenizer, theirs, alphabet):
    rng = random.Random(SEED)
    for _ in range(60):
        ids = rng.choices(alphabet, k=rng.choice([1, 3, 12, 40]))
        output, left = OutputText(tokenizer, locates=True), ids
        while left:
            size = rng.choice([1, 1, 4])
            piece, left = left[:size], left[size:]
            output.add(piece, None if left else "length")
        assert output.offsets == [len(theirs.complete(ids[:count])) for count in range(len(ids))]
        assert output.text == theirs.decode(ids)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts") / "llama2"
    LAYOUTS["llama2"](directory)
    return Tokenizer.from_pretrained(directory)


def test_a_stop_string_of_bytes_ends_the_text_with_its_last_byte(llama2):
    wave = [llama2.id(f"<0x{byte:02X}>") for byte in "🌊".encode()]
    text = llama2.encode("ab", add_special_tokens=False)
    for stop in ("🌊", "b🌊"):
        output = OutputText(llama2, (stop,))
        assert output.add([*text, *wave, *wave]) == len(text) + len(wave), "no token after it counts"
        assert ("ab🌊".removesuffix(stop), stop) == (output.text, output.stop_string) and output.new() == output.text
    output = OutputText(llama2, ("🌊",), min_tokens=len(text) + 4)
    assert output.add([*text, *wave, *text], "length") == 2 * len(text) + 4, "one within min_tokens is text"
    assert output.text == "ab🌊 ab"


def test_a_stop_string_can_begin_with_the_outputs_first_space(llama2):
    prompt, river = llama2.encode("The"), llama2.encode("The river", add_special_tokens=False)
    rest = river[len(llama2.encode("The", add_special_tokens=False)) :]
    output = OutputText(llama2, (" river",), prompt=prompt)
    output.add([*rest, *rest], "length")
    assert (output.text, output.stop_string) == ("", " river")


def test_text_without_stop_strings_is_emitted_at_once(tokenizer):
    output = OutputText(tokenizer, min_tokens=9, prompt=tokenizer.encode("Once"))
    for token in tokenizer.encode("The river runs", add_special_tokens=False):
        before = output.text
        assert output.add([token]) == 1
        assert output.new() == output.text[len(before) :] != ""


def test_only_text_that_may_become_a_stop_string_is_held_back():
    words = ["".join(letters) for size in range(6) for letters in itertools.product("ab", repeat=size)]
    for text, string in itertools.product(words, words[1:]):
        ends = [size for size in range(len(string)) if text.endswith(string[:size])]
        assert _overlap(text, string) == ends[-1], (text, string)
