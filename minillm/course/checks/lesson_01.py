"""Lesson 01: merging, learning merges, text from a stream of tokens, chat turns."""

import sys
from collections.abc import Callable, Iterable
from types import CodeType

from minillm.tokenizer import bpe, chat, training

from . import Exercise

SECONDS = 10  # a property takes milliseconds

bpe_merge = Exercise("bpe_merge", seconds=SECONDS)
learn_merges = Exercise("learn_merges", seconds=SECONDS)
text_stream = Exercise("TextStream", seconds=SECONDS)
render_chat = Exercise("render_chat", seconds=SECONDS)


def same(got: object, wanted: object) -> None:
    assert got == wanted, f"expected {wanted!r}, got {got!r}"


def calls_to(code: CodeType, run: Callable[[], object]) -> int:
    """How often a function with this code is called, under any name, during `run()`."""
    count = 0

    def notice(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code is code

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def ranked(*pairs: str) -> dict[tuple[str, str], int]:
    """ "a b", "ab c" -> their ranks in that order."""
    halves = [pair.split() for pair in pairs]
    return {(left, right): rank for rank, (left, right) in enumerate(halves)}


# ---- bpe_merge(symbols, ranks)


@bpe_merge.example
def _(fn):
    same(fn(list("then"), ranked("t h", "e n")), ["th", "en"])


@bpe_merge.property(
    "the pair learned first is joined first",
    hint="of all adjacent pairs with a rank, which one comes first? Neither the leftmost nor the longest",
)
def _(fn):
    same(fn(list("abc"), ranked("b c", "a b")), ["a", "bc"])


@bpe_merge.property(
    "the rank is the number, whatever the order of the dict", hint="compare the values of `ranks`, not its keys' order"
)
def _(fn):
    same(fn(list("abc"), {("b", "c"): 1, ("a", "b"): 0}), ["ab", "c"])


@bpe_merge.property(
    "the list of merges may be long",
    hint="which number is larger than any rank? Gemma has hundreds of thousands of merges",
)
def _(fn):
    many = {("x", str(rank)): rank for rank in range(300_000)}
    many |= {("a", "b"): len(many), ("b", "c"): len(many) + 1}
    same(fn(list("abc"), many), ["ab", "c"])
    same(fn(list("yaby"), many), ["y", "ab", "y"])


@bpe_merge.property(
    "what a join makes can be joined again",
    hint="look at the pairs again after every single join: a new one may have the lowest rank now",
)
def _(fn):
    same(fn(list("low"), ranked("l o", "lo w")), ["low"])
    same(fn(list("abcd"), ranked("ab c", "a b", "c d")), ["abc", "d"])
    same(fn(list("abab"), ranked("ab a", "a b")), ["aba", "b"])


@bpe_merge.property("a pair is joined wherever it occurs", hint="continue until no pair has a rank")
def _(fn):
    same(fn(list("abxab"), ranked("a b")), ["ab", "x", "ab"])
    found = fn(list("ab" * 150), ranked("a b"))  # within the limit of a recursion
    assert found == ["ab"] * 150, f'"ab" 150 times became {found.count("ab")} "ab" and {len(found)} symbols in all'


@bpe_merge.property(
    "where places overlap, the left one is joined",
    hint='"aaa" contains ("a", "a") twice, but only one can be joined',
)
def _(fn):
    same(fn(list("aaa"), ranked("a a")), ["aa", "a"])


@bpe_merge.property(
    "only a pair that has a rank is joined",
    hint='("a", "bc") and ("ab", "c") spell the same text, but they are different pairs',
)
def _(fn):
    same(fn(list("abc"), ranked("b c", "ab c")), ["a", "bc"])
    same(fn(list("babxab"), ranked("b a", "a b")), ["ba", "b", "x", "ab"])


@bpe_merge.property(
    "a symbol may have several characters",
    hint='"<0xC3>" is one symbol, the token of a byte: begin with the symbols as they are',
)
def _(fn):
    same(fn(["th", "en"], ranked("e n")), ["th", "en"])
    same(fn(["<0xC3>", "<0xA9>", "s"], ranked("<0xC3> <0xA9>")), ["<0xC3><0xA9>", "s"])


@bpe_merge.property("a word may have nothing to join", hint="an empty list and a single symbol have no pair")
def _(fn):
    for symbols in ([], ["a"], ["x", "y"], ["\n", " "]):
        same(fn(list(symbols), ranked("a b")), symbols)


@bpe_merge.property("the joins are your own", hint="write the rule in Python: `merge` is the engine's solution")
def _(fn):
    calls = calls_to(bpe.merge.__code__, lambda: fn(list("then"), ranked("t h", "e n")))
    assert not calls, "it calls the engine's merge"


@bpe_merge.property("each call makes a list of its own", hint="start from a copy of the list in every call")
def _(fn):
    first = fn(list("then"), ranked("t h", "e n"))
    wanted = list(first)
    first.append("and")
    again = fn(list("then"), ranked("t h", "e n"))
    assert again == wanted, f"the caller added to a result, and the same call now returns {again!r}, not {wanted!r}"


@bpe_merge.property("the arguments do not change", hint="work on a copy of the list")
def _(fn):
    symbols = list("then")
    fn(symbols, ranked("t h", "e n"))
    assert symbols == list("then"), f"the caller's {list('then')} is now {symbols}"
    ranks = ranked("t h", "e n")
    fn(list("then"), ranks)
    assert ranks == ranked("t h", "e n"), f"the caller's ranks are now {ranks}"


# ---- learn_merges(word_counts, steps)


@learn_merges.example
def _(fn):
    same(fn({"tide": 4, "tin": 1}, 1), [("t", "i")])


@learn_merges.property("a word counts as often as it occurs", hint="a pair in a frequent word is a frequent pair")
def _(fn):
    same(fn({"xy": 10, "abz": 1, "abw": 1}, 1), [("x", "y")])


@learn_merges.property(
    "no pair reaches across words",
    hint="count inside each word, and stop when no word has a pair left",
)
def _(fn):
    same(fn({"ab": 3, "cd": 1}, 10), [("a", "b"), ("c", "d")])
    same(fn({"\n\n": 4, "▁A": 3, "▁a": 2}, 9), [("\n", "\n"), ("▁", "A"), ("▁", "a")])


@learn_merges.property(
    "of equal counts, the pair that sorts first wins",
    hint="compare the pairs as tuples, only where the counts are equal",
)
def _(fn):
    for words in (["zy", "ab"], ["ab", "zy"], ["az", "ab"], ["yb", "az"], ["ab", "Zy"]):
        same(fn(dict.fromkeys(words, 2), 2), [tuple(word) for word in sorted(words)])
    same(fn({"abz": 1, "ab": 1, "ac": 1}, 2), [("a", "b"), ("a", "c")])
    found = fn({"abz": 1, "ab": 1, "cd": 1}, 2)
    assert found[1:] != [("c", "d")], 'after ("a", "b"), ("ab", "z") and ("c", "d") occur once each; it took ("c", "d")'


@learn_merges.property(
    "counts follow each join",
    hint='once ("a", "b") is joined, "abc" no longer contains ("b", "c"), but it contains ("ab", "c")',
)
def _(fn):
    same(fn({"abc": 10, "ab": 2, "xy": 7}, 2), [("a", "b"), ("ab", "c")])


@learn_merges.property(
    "a pair is joined at all its places in a word",
    hint="a word may contain a pair twice",
)
def _(fn):
    same(fn({"abxabyabz": 5, "ab": 4, "pq": 7, "pqr": 1}, 2), [("a", "b"), ("p", "q")])
    found = fn({"abab": 5}, 2)
    assert found[1:] != [("a", "b")], f'"abab" still contains ("a", "b") after that merge; it learned {found!r}'


@learn_merges.property(
    "a pair counts at every place in a word", hint='"ababab" contains ("a", "b") three times, "aaa" ("a", "a") twice'
)
def _(fn):
    same(fn({"ababab": 2, "cd": 5}, 1), [("a", "b")])
    same(fn({"aaa": 2, "cd": 3}, 1), [("a", "a")])


@learn_merges.property(
    "only whole symbols are joined", hint='["ba", "b"] does not contain the pair ("a", "b"): compare symbols, not text'
)
def _(fn):
    words = ["bad", "baf", "bah", "babc", "ba", "abe", "abg", "ab", "bc"]
    same(fn(dict.fromkeys(words, 1), 3), [("b", "a"), ("a", "b"), ("b", "c")])


@learn_merges.property(
    "where places overlap, the left one is joined", hint='join_pair joins from the left: "aaa" becomes "aa" and "a"'
)
def _(fn):
    found = fn({"aaa": 3}, 2)
    assert found[1:] != [("a", "aa")], f'"aaa" has only ("aa", "a") left after the first merge; it learned {found!r}'


@learn_merges.property(
    "there may be many words and long tokens", hint="only `steps` and the pairs that are left limit what is learned"
)
def _(fn):
    words = {chr(0x4E00 + 2 * i) + chr(0x4E01 + 2 * i): 1 for i in range(150)}
    found = fn(words, 150)
    assert len(found) == 150, f"150 words of two different characters give 150 merges, not {len(found)}"
    found = fn({"storytelling": 1}, 20)
    assert len(found) == 11, f"a word of 12 characters is one token after 11 merges; it learned {len(found)}"


@learn_merges.property("the counting is your own", hint="write the steps in Python; only `join_pair` is given")
def _(fn):
    calls = calls_to(training.most_frequent_pairs.__code__, lambda: fn({"tide": 4, "tin": 1}, 1))
    assert not calls, "it calls the engine's function that learns merges"


@learn_merges.property("the caller's counts do not change", hint="work on lists of your own")
def _(fn):
    counts = {"abc": 10, "ab": 2, "xy": 7}
    same(fn(counts, 0), [])
    fn(counts, 2)
    assert counts == {"abc": 10, "ab": 2, "xy": 7}, f"the caller's word_counts is now {counts}"


# ---- TextStream(special): push(token), finish()

SPECIAL = {"<bos>", "<eos>", "<end_of_turn>"}


def text_from(method: str, piece: object) -> str:
    assert isinstance(piece, str), f'{method} returned {piece!r}: where there is no text, return ""'
    return piece


def pushed(stream, *tokens: str) -> list[str]:
    return [text_from("push", stream.push(token)) for token in tokens]


def pieces(fn, *tokens: str, special: Iterable[str] = SPECIAL) -> list[str]:
    stream = fn(set(special))
    return [*pushed(stream, *tokens), text_from("finish", stream.finish())]


def spelled(text: str) -> list[str]:
    """The byte tokens of a text."""
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@text_stream.example
def _(fn):
    same("".join(pieces(fn, "The", "▁sea", ".")), "The sea.")


@text_stream.property("text that is certain is returned at once", hint="only bytes have to wait for what follows")
def _(fn):
    same(pieces(fn, "The", "▁sea", ".")[:2], ["The", " sea"])


@text_stream.property(
    "half a character is never shown", hint='"é" is two bytes: one of them alone is not a character yet'
)
def _(fn):
    found = pushed(fn(set(SPECIAL)), *spelled("é"))  # without finish, which may not be written yet
    assert "\ufffd" not in "".join(found), f"the pieces are {found!r}"


@text_stream.property(
    "a run of bytes waits until it ends",
    hint="a later byte can break the run, and then all of it becomes \ufffd: nothing is certain before the end",
)
def _(fn):
    for text in ("é", "A", "🌊🌊", "🌊" * 300):
        found = pushed(fn(set(SPECIAL)), *spelled(text))  # without finish, which may not be written yet
        assert text[0] not in "".join(found), (
            f"{text[0]} comes before its run has ended, in a run of {len(found)} bytes"
        )


@text_stream.property("finish() returns what was kept", hint="a sequence may end in a byte token")
def _(fn):
    same("".join(pieces(fn, "pass", "<0x09>")), "pass\t")
    same("".join(pieces(fn, "<0x00>", "<0x0A>")), "\x00\n")


@text_stream.property(
    "nothing that a run spells is lost", hint="decode the bytes as plain UTF-8, and change nothing in the result"
)
def _(fn):
    for text in ("\ufeffab", "e\u0301", "\t\r\n"):
        found = "".join(pieces(fn, *spelled(text), "x"))
        if "\ufffd" not in found:  # half characters are another property's
            same(found, f"{text}x")


@text_stream.property("finish() begins an empty run", hint="what was returned once must not come again")
def _(fn):
    stream, other = fn(set(SPECIAL)), fn(set(SPECIAL))
    stream.push("<0x41>")
    found = other.finish()
    assert found == "", f"one stream returns {found!r}, which another one was given: make the run in __init__"
    stream.finish()
    again = stream.finish()
    assert again == "", f"a second finish() returns {again!r}"


@text_stream.property(
    "every ▁ in a token is a space, the first one too",
    hint="Gemma adds no space before a text, so none is removed; a token may contain several ▁",
)
def _(fn):
    same("".join(pieces(fn, "▁The", "▁▁", "sea▁")), " The  sea ")


@text_stream.property("a ▁ that was spelled in bytes stays", hint="only tokens that are not bytes contain spaces")
def _(fn):
    for after in ([], ["a"]):
        found = "".join(pieces(fn, "<0xE2>", "<0x96>", "<0x81>", *after))
        assert " " not in found, (
            f"{' '.join(['<0xE2> <0x96> <0x81>', *after])} spell {''.join(['▁', *after])!r}, not {found!r}"
        )


@text_stream.property(
    "special tokens have no text, all others have",
    hint="`special` says which are special; a page of HTML is full of <b>, and <0x is text as well",
)
def _(fn):
    same("".join(pieces(fn, "<bos>", "<b>", "Hi", "\n\n", "<0x", "<end_of_turn>")), "<b>Hi\n\n<0x")
    same("".join(pieces(fn, "<html>", "<0xZZ>", "<0x123>")), "<html><0xZZ><0x123>")
    same("".join(pieces(fn, "</s>", "<bos>", special=["</s>"])), "<bos>")


@text_stream.property("a special token does not end a run", hint="it has no text at all: the run goes on after it")
def _(fn):
    for special in sorted(SPECIAL):
        found = pieces(fn, "<0x41>", special, "<0x42>", "c")
        assert "AB" in "".join(found), f"<0x41> {special} <0x42> spell 'AB'; the pieces are {found!r}"
        found = pieces(fn, "<0xC3>", special, "<0xA9>")
        assert "".join(found).count("\ufffd") < 2, f"<0xC3> {special} <0xA9> spell 'é'; the pieces are {found!r}"


@text_stream.property(
    "in a broken run, each byte becomes one \ufffd",
    hint="decode the run as a whole: one bad byte breaks all of it",
)
def _(fn):
    same("".join(pieces(fn, "a", "<0xE2>", "<0x82>", "b")), "a\ufffd\ufffdb")
    same("".join(pieces(fn, "<0xE2>", "<0xC3>", "<0xA9>", "b")), "\ufffd\ufffd\ufffdb")
    same("".join(pieces(fn, "<0xED>", "<0xA0>", "<0x80>", "b")), "\ufffd\ufffd\ufffdb")  # half a surrogate pair


# ---- render_chat(messages, add_generation_prompt)


def turns(*contents: str) -> list[dict[str, str]]:
    """A conversation of its own for each call, so that a solution that changes it changes no other."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


@render_chat.example
def _(fn):
    same(fn(turns("Hi"), False), "<bos><start_of_turn>user\nHi<end_of_turn>\n")


@render_chat.property("the assistant is called model", hint='clients say "assistant", Gemma learned "model"')
def _(fn):
    found = fn(turns("Hi", "Good day!", "Hi"), False)
    assert "<start_of_turn>model\nGood day!" in found, "its turn is not headed model"


@render_chat.property(
    "it ends where the model continues",
    hint="the prompt printed above ends with the first line of the model's turn, including its newline",
)
def _(fn):
    same(fn(turns("Hi"))[-32:], "Hi<end_of_turn>\n<start_of_turn>model\n"[-32:])
    after = fn(turns("Hi", "Good day!"), True)
    assert after.endswith("<start_of_turn>model\n"), f"after a turn of the assistant it ends in {after[-32:]!r}"


@render_chat.property("one <bos>, at the start", hint="a text begins once, however many turns it has")
def _(fn):
    text = fn(turns("Hi", "Good day!"), False)
    assert text.startswith("<bos>") and text.count("<bos>") == 1, (
        f"it starts {text[:20]!r}, with <bos> {text.count('<bos>')} times"
    )


@render_chat.property(
    "every turn is closed", hint='each turn ends with "<end_of_turn>\\n", the model\'s turns and the last one too'
)
def _(fn):
    text = fn(turns("Hi", "Good day!"), False)
    assert all(f"{end}<end_of_turn>\n" in text for end in ("Hi", "Good day!")), f"it is {text!r}"


@render_chat.property(
    "whitespace around a message is dropped",
    hint="spaces, tabs, newlines, also the wide space of Chinese: the training texts had none there",
)
def _(fn):
    content = "\n\t Hi  there,\n\n  you \t\n"
    found = fn(turns(content), False)
    assert "user\nHi  there,\n\n  you<end_of_turn>" in found, f"{content!r} became {found!r}"
    wide = fn(turns("\u3000Hi\xa0"), False)
    assert "user\nHi<end_of_turn>" in wide, f"{chr(0x3000) + 'Hi' + chr(0xA0)!r} became {wide!r}"
    padded = fn(turns("Hi", "\n Good day! \n"), False)
    assert padded == fn(turns("Hi", "Good day!"), False), f"the assistant's turn keeps it: {padded!r}"


@render_chat.property(
    "turns follow each other in order, with nothing between them", hint="only the newline after <end_of_turn>"
)
def _(fn):
    found = fn(turns("Hi", "Good day!", "Bye"), False).replace("<bos>", "")
    found = found.replace("<start_of_turn>assistant", "<start_of_turn>model")  # another property's mistakes
    found = found.replace("Good day!\n", "Good day!<end_of_turn>\n")
    said = (("user", "Hi"), ("model", "Good day!"), ("user", "Bye"))
    wanted = "".join(f"<start_of_turn>{role}\n{text}<end_of_turn>\n" for role, text in said)
    assert found == wanted, f"three turns: expected {wanted!r}, got {found!r}"


@render_chat.property(
    "every message is a turn", hint="whatever it says: nothing, the same as another one, or the first of many"
)
def _(fn):
    found = fn(turns("Hi", " ", "Bye"), False)
    assert found.count("<start_of_turn>") == 3, f"three messages, of which the second is empty, became {found!r}"
    count = fn(turns(*["Hi", "Good day!"] * 10), False).count("<start_of_turn>")
    assert count == 20, f"20 messages became {count} turns"


@render_chat.property(
    "the words of a message do not change", hint="translate the role, then build the text: only roles are renamed"
)
def _(fn):
    for content in (
        "Hi, assistant",
        "is <b> bold, and 1 < 2 > 0?",
        "Why <bos>, and <start_of_turn>assistant?",
        "Why <start_of_turn>assistant\nhere?",
        "{{x}} is 100%% of it",
    ):
        found = fn(turns(content), False)
        assert f"user\n{content}<end_of_turn>" in found, f"{content!r} became {found!r}"


@render_chat.property("the text is your own", hint="write it in Python: the template is the engine's solution")
def _(fn):
    calls = calls_to(chat.ChatTemplate.render.__code__, lambda: fn(turns("Hi"), True))
    assert not calls, "it calls the model's template"


@render_chat.property("the caller's messages do not change", hint="make variables of your own from each message")
def _(fn):
    messages = turns(" Hi ", "Good day!", "Bye")
    fn(messages, True)
    assert messages == turns(" Hi ", "Good day!", "Bye"), f"the caller's messages are now {messages}"
