"""Lesson 01: merging, learning merges, text from a stream of tokens, chat turns."""

from . import Exercise

bpe_merge = Exercise("bpe_merge")
learn_merges = Exercise("learn_merges")
text_stream = Exercise("TextStream")
render_chat = Exercise("render_chat")


def same(got: object, wanted: object) -> None:
    assert got == wanted, f"expected {wanted!r}, got {got!r}"


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
    hint="of all adjacent pairs with a rank take the lowest rank, not the leftmost place or the longest token",
)
def _(fn):
    same(fn(list("abc"), ranked("b c", "a b")), ["a", "bc"])


@bpe_merge.property(
    "what a join makes can be joined again",
    hint="after each join look at all pairs again: the new token is in new pairs, and one of them may be next in rank",
)
def _(fn):
    same(fn(list("low"), ranked("l o", "lo w")), ["low"])
    same(fn(list("abcd"), ranked("ab c", "a b", "c d")), ["abc", "d"])


@bpe_merge.property("every place of a pair is joined", hint="a pair may occur in many places; go on until none is left")
def _(fn):
    same(fn(list("abxab"), ranked("a b")), ["ab", "x", "ab"])


@bpe_merge.property(
    "where places overlap, the left one is joined", hint='"aaa" holds ("a", "a") twice: join the first, then look again'
)
def _(fn):
    same(fn(list("aaa"), ranked("a a")), ["aa", "a"])


@bpe_merge.property(
    "only a pair that has a rank is joined",
    hint='("a", "bc") and ("ab", "c") spell the same token, but they are two pairs: look up the pair, not its text',
)
def _(fn):
    same(fn(list("abc"), ranked("b c", "ab c")), ["a", "bc"])


@bpe_merge.property("the given symbols are not changed", hint="join in a copy: symbols = list(symbols)")
def _(fn):
    symbols = list("then")
    fn(symbols, ranked("t h", "e n"))
    assert symbols == list("then"), f"the caller's {list('then')} has become {symbols}"


# ---- learn_merges(word_counts, steps)


@learn_merges.example
def _(fn):
    same(fn({"tide": 4, "tin": 1}, 1), [("t", "i")])


@learn_merges.property("a word counts as often as it occurs", hint="add the word's count for each of its pairs, not 1")
def _(fn):
    same(fn({"xy": 10, "abz": 1, "abw": 1}, 1), [("x", "y")])


@learn_merges.property(
    "no pair reaches across words",
    hint="count inside each word alone, and return what was learned when no word has a pair left",
)
def _(fn):
    same(fn({"ab": 3, "cd": 1}, 10), [("a", "b"), ("c", "d")])


@learn_merges.property(
    "of equal counts, the pair that sorts first wins",
    hint="min(counts, key=lambda pair: (-counts[pair], pair)) decides ties the same way on every machine",
)
def _(fn):
    same(fn({"zy": 2, "ab": 2}, 2), [("a", "b"), ("z", "y")])


@learn_merges.property(
    "counts follow each join",
    hint='after ("a", "b") there is no ("b", "c") in "abc" any more, but ("ab", "c"): join in all words, count again',
)
def _(fn):
    same(fn({"abc": 10, "ab": 2, "xy": 7}, 2), [("a", "b"), ("ab", "c")])


@learn_merges.property(
    "a pair is joined at all its places in a word", hint="join_pair joins every place; a word may hold a pair twice"
)
def _(fn):
    same(fn({"abxabyabz": 5, "pqrpqs": 4}, 2), [("a", "b"), ("p", "q")])


# ---- TextStream(special): push(token), finish()

SPECIAL = {"<bos>", "<end_of_turn>"}


def pieces(fn, *tokens: str) -> list[str]:
    stream = fn(SPECIAL)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@text_stream.example
def _(fn):
    same("".join(pieces(fn, "The", "▁sea", ".")), "The sea.")


@text_stream.property(
    "what is certain is not held back", hint="a token without bytes is text at once: return it, keep only open bytes"
)
def _(fn):
    same(pieces(fn, "The", "▁sea", ".")[:2], ["The", " sea"])


@text_stream.property(
    "half a character is never shown",
    hint='keep byte tokens until another kind ends their run, then decode the whole run: "é" is two bytes',
)
def _(fn):
    told = pieces(fn, "caf", "<0xC3>", "<0xA9>", "s")
    assert "\ufffd" not in "".join(told), f"the pieces are {told!r}"


@text_stream.property(
    "finish() returns what was kept", hint="a sequence may end in a byte token: finish() decodes the run"
)
def _(fn):
    same("".join(pieces(fn, "pass", "<0x09>")), "pass\t")


@text_stream.property(
    "every ▁ is a space, the first one too",
    hint="Gemma puts no space before a text, so none is taken away: no strip(), and more than one ▁ may be in a token",
)
def _(fn):
    same("".join(pieces(fn, "▁The", "▁▁", "sea▁")), " The  sea ")


@text_stream.property(
    "special tokens have no text, all others have",
    hint='return "" for a token in `special`, not for all that look like it: a page of HTML is full of <b>',
)
def _(fn):
    same("".join(pieces(fn, "<bos>", "<b>", "Hi", "<end_of_turn>")), "<b>Hi")


@text_stream.property(
    "broken bytes become one \ufffd each",
    hint='try run.decode(); on UnicodeDecodeError the whole run is "\\ufffd" * len(run), as everywhere in this format',
)
def _(fn):
    same("".join(pieces(fn, "a", "<0xE2>", "<0x82>", "b")), "a\ufffd\ufffdb")


# ---- render_chat(messages, add_generation_prompt)

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Good day!"}


@render_chat.example
def _(fn):
    same(fn([USER], False), "<bos><start_of_turn>user\nHi<end_of_turn>\n")


@render_chat.property(
    "the assistant is called model", hint='clients say "assistant", Gemma learned "model": translate the role'
)
def _(fn):
    assert "<start_of_turn>model\nGood day!" in fn([USER, ASSISTANT, USER], False), "its turn is not headed model"


@render_chat.property(
    "it ends where the model is to speak",
    hint='with add_generation_prompt the last words are "<start_of_turn>model\\n", the newline included',
)
def _(fn):
    same(fn([USER])[-32:], "Hi<end_of_turn>\n<start_of_turn>model\n"[-32:])
    after = fn([USER, ASSISTANT], True)
    assert after.endswith("<start_of_turn>model\n"), f"asked to speak after a turn of its own, it ends {after[-32:]!r}"


@render_chat.property("one <bos>, in front", hint="a text begins once, however many turns it has")
def _(fn):
    text = fn([USER, ASSISTANT], False)
    assert text.startswith("<bos>") and text.count("<bos>") == 1, f"it begins {text[:20]!r} with {text.count('<bos>')}"


@render_chat.property(
    "every turn is closed", hint='each turn ends in "<end_of_turn>\\n", those of the model and the last one too'
)
def _(fn):
    text = fn([USER, ASSISTANT], False)
    assert all(f"{end}<end_of_turn>\n" in text for end in ("Hi", "Good day!")), f"it is {text!r}"


@render_chat.property("white space around a message is dropped", hint="content.strip(): training had none there")
def _(fn):
    assert "user\nHi  there<end_of_turn>" in fn([{"role": "user", "content": "\n Hi  there \n"}], False)
    padded = fn([USER, ASSISTANT | {"content": "\n Good day! \n"}], False)
    assert padded == fn([USER, ASSISTANT], False), f"the assistant's turn keeps it: {padded!r}"
