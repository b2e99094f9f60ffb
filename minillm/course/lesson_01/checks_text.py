"""Lesson 01: text from a stream of tokens, chat turns."""

from collections.abc import Iterable

from minillm.tokenizer import chat

from ..shared.checks import Exercise
from .checks import SECONDS, calls_to, same

text_stream = Exercise("TextStream", seconds=SECONDS)
render_chat = Exercise("render_chat", seconds=SECONDS)

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


@text_stream.property(
    "a run comes before the text that ends it", hint="any text ends a run, even if it is only spaces or a newline"
)
def _(fn):
    for text in ("▁", "▁▁", "\n"):
        found = "".join(pieces(fn, "<0x41>", text, "b"))
        assert found.startswith("A"), f"<0x41> {text!r} b spell {found!r}: the A comes first"


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
    same("".join(pieces(fn, "<bos>", "<b>", "Hi_", "\r\n", "<0x", "<end_of_turn>")), "<b>Hi_\r\n<0x")
    same("".join(pieces(fn, "<html>", "<0xZZ>", "<0x123>")), "<html><0xZZ><0x123>")
    same("".join(pieces(fn, "</s>", "<bos>", special=["</s>"])), "<bos>")
    stream = fn({"</s>"})
    fn({"<bos>"})  # another stream changes nothing in the first
    same("".join([*pushed(stream, "</s>", "<bos>"), stream.finish()]), "<bos>")


@text_stream.property("a special token does not end a run", hint="it has no text at all: the run goes on after it")
def _(fn):
    for special in sorted(SPECIAL):
        found = pieces(fn, "<0x41>", special, "<0x42>", "c")
        assert "AB" in "".join(found), f"<0x41> {special} <0x42> spell 'AB'; the pieces are {found!r}"
        found = pieces(fn, "<0xC3>", special, "<0xA9>")
        without = pieces(fn, "<0xC3>", "<0xA9>")  # a wrong text for both is another property's
        same_text = "".join(found).replace(special, "") == "".join(without)
        assert same_text, f"<0xC3> {special} <0xA9> spell 'é'; the pieces are {found!r}"


@text_stream.property(
    "in a broken run, each byte becomes one \ufffd",
    hint="decode the run as a whole: one bad byte breaks all of it",
)
def _(fn):
    same("".join(pieces(fn, "a", "<0xE2>", "<0x82>", "b")), "a\ufffd\ufffdb")
    same("".join(pieces(fn, "<0xE2>", "b", *["<0xE2>", "<0x82>"] * 10, "c")), "\ufffdb" + "\ufffd" * 20 + "c")
    same("".join(pieces(fn, "<0xE2>", "<0xC3>", "<0xA9>", "b")), "\ufffd\ufffd\ufffdb")
    same("".join(pieces(fn, "<0xED>", "<0xA0>", "<0x80>", "b")), "\ufffd\ufffd\ufffdb")  # half a surrogate pair
    for start in ("é", "Ab"):
        found = pieces(fn, *spelled(start), "<0xE2>", "b")
        if not "".join(found[:3]):  # a character that comes too early is another property's
            same("".join(found), "\ufffd\ufffd\ufffdb")
    *early, last = pieces(fn, *spelled("é"), "<0xE2>")
    if last and not "".join(early):  # as is a run that finish() loses
        same(last, "\ufffd\ufffd\ufffd")


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
    for empty in ("", " "):
        found = fn(turns("Hi", empty, "Bye"), False)
        assert found.count("<start_of_turn>") == 3, f"three messages, the second {empty!r}, became {found!r}"
    found = fn(turns("", "Good day!"), False)
    assert "user\n<end_of_turn>" in found, f"a turn with nothing in it has a first line too: {found!r}"
    count = fn(turns(*["Hi", "Good day!"] * 10), False).count("<start_of_turn>")
    assert count == 20, f"20 messages became {count} turns"


@render_chat.property(
    "the words of a message do not change",
    hint="rename roles, not words in a content; from the content, take only the whitespace around it",
)
def _(fn):
    for content in (
        "Hi, assistant",
        "is <b> bold, and 1 < 2 > 0?",
        "Why <bos>, and <start_of_turn>assistant?",
        "Why <start_of_turn>assistant\nhere?",
        "<bos> begins a text, and <end_of_turn> ends a turn",
        '"Hi",\r\n\the said.\n\n"Yes?"',
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
