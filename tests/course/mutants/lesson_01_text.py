"""Wrong solutions of lesson 01's exercises on streams and chats."""

import re
import string
import unicodedata

from minillm.model.loader import EMBEDDED
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.gemma import BYTE_TOKENS, SPECIAL_TOKENS
from tests.course.mutants import wrong


class Stream:
    """A correct stream, the base of the wrong ones."""

    def __init__(self, special):
        self.special = special
        self.run = bytearray()

    def push(self, token):
        if token in self.special:
            return ""
        if token in BYTE_TOKENS:
            self.run.append(BYTE_TOKENS.index(token))
            return ""
        return self.finish() + self.text(token)

    def text(self, token):
        return token.replace("▁", " ")

    def finish(self):
        run = bytes(self.run)
        self.run.clear()
        return self.decode(run)

    def decode(self, run):
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


@wrong("TextStream", fails="text that is certain is returned at once")
class AllAtTheEnd(Stream):
    def __init__(self, special):
        super().__init__(special)
        self.tokens = []

    def push(self, token):
        self.tokens.append(token)
        return ""

    def finish(self):
        stream = Stream(self.special)
        tokens, self.tokens = self.tokens, []
        return "".join(stream.push(token) for token in tokens) + stream.finish()


@wrong("TextStream", fails="a run of bytes waits until it ends")
class EachCharacterAtOnce(Stream):
    """Emits a character as soon as its bytes are complete, and takes it back into account if the run breaks."""

    shown = ""

    def push(self, token):
        if token not in BYTE_TOKENS:
            return super().push(token)
        self.run.append(BYTE_TOKENS.index(token))
        try:
            text = bytes(self.run).decode()
        except UnicodeDecodeError:
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def finish(self):
        shown, self.shown = len(self.shown), ""
        whole = super().finish()
        return whole if "\ufffd" in whole else whole[shown:]


@wrong("TextStream", fails="finish() begins an empty run")
class RunKept(Stream):
    def push(self, token):
        text = super().push(token)
        if token not in BYTE_TOKENS and token not in self.special:
            self.run.clear()
        return text

    def finish(self):
        return self.decode(bytes(self.run))


@wrong("TextStream", fails="a ▁ that was spelled in bytes stays")
class ReplacesAtTheEnd(Stream):
    def decode(self, run):
        return super().decode(run).replace("▁", " ")


@wrong("TextStream", fails="a ▁ that was spelled in bytes stays")
class ReplacesInTheRunToo(Stream):
    def text(self, token):
        return token

    def push(self, token):
        return super().push(token).replace("▁", " ")


@wrong("TextStream", fails="a run of bytes waits until it ends")
class LongRunsInParts(Stream):
    def push(self, token):
        text = super().push(token)
        return text + self.finish() if len(self.run) == 16 else text


@wrong("TextStream", fails="special tokens have no text, all others have")
class AnglesAroundAByte(Stream):
    def push(self, token):
        if not (token.startswith("<0x") and token.endswith(">")):
            return super().push(token)
        digits = "".join(digit for digit in token[3:-1] if digit in "0123456789ABCDEF")
        self.run += bytes.fromhex(digits[:2].zfill(2))
        return ""


@wrong("TextStream", fails="special tokens have no text, all others have")
class ItsOwnSpecialTokens(Stream):
    def __init__(self, special):
        super().__init__(SPECIAL_TOKENS)


@wrong("TextStream", fails="special tokens have no text, all others have")
class NewlinesLost(Stream):
    def text(self, token):
        return super().text(token).strip("\n")


@wrong("TextStream", fails="a special token does not end a run")
class TheEndEndsTheRun(Stream):
    def push(self, token):
        return self.finish() if token in ("<eos>", "<end_of_turn>") else super().push(token)


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class SurrogatesPass(Stream):
    def decode(self, run):
        try:
            return run.decode(errors="surrogatepass")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


@wrong("TextStream", fails="a run of bytes waits until it ends")
class AsciiAtOnce(Stream):
    def push(self, token):
        if token in BYTE_TOKENS and not self.run and BYTE_TOKENS.index(token) < 128:
            return chr(BYTE_TOKENS.index(token))
        return super().push(token)


@wrong("TextStream", fails="a special token does not end a run")
class SpecialClearsTheRun(Stream):
    def push(self, token):
        if token in self.special:
            self.run.clear()
        return super().push(token)


@wrong("TextStream", fails="a special token does not end a run")
class SpecialEndsTheRun(Stream):
    def push(self, token):
        return self.finish() if token in self.special else super().push(token)


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class BrokenPartsReplaced(Stream):
    """Decodes what can be decoded, as UTF-8 decoders usually do."""

    def decode(self, run):
        return run.decode(errors="replace")


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class BrokenPartsReplacedAtTheEnd(Stream):
    def push(self, token):
        waits = token in self.special or token in BYTE_TOKENS
        return super().push(token) if waits else super().finish() + self.text(token)

    def finish(self):
        run, self.run = self.run, bytearray()
        return run.decode(errors="replace")


@wrong("TextStream", fails="half a character is never shown")
class RedecodesTheRunAtEachByte(Stream):
    shown = 0

    def push(self, token):
        if token not in BYTE_TOKENS:
            return super().push(token)
        self.run.append(BYTE_TOKENS.index(token))
        text = self.decode(bytes(self.run))
        if "\ufffd" not in text:
            return ""
        new, self.shown = text[self.shown :], len(text)
        return new

    def finish(self):
        shown, self.shown = self.shown, 0
        return super().finish()[shown:]


@wrong("TextStream", fails="finish() returns what was kept")
class TailLost(Stream):
    def push(self, token):
        if token in self.special or token in BYTE_TOKENS:
            return super().push(token)
        return super().finish() + self.text(token)

    def finish(self):
        return ""


@wrong("TextStream", fails="every ▁ in a token is a space, the first one too")
class FirstSpaceTaken(Stream):
    first = True

    def text(self, token):
        self.first, first = False, self.first
        return super().text(token).lstrip() if first else super().text(token)


@wrong("TextStream", fails="special tokens have no text, all others have")
class SpecialShown(Stream):
    def push(self, token):
        return token if token in self.special else super().push(token)


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class BrokenBytesSwallowed(Stream):
    def decode(self, run):
        return run.decode(errors="ignore")


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class ValidStartKept(Stream):
    """é and a broken byte become é and one \ufffd."""

    def decode(self, run):
        try:
            return run.decode()
        except UnicodeDecodeError as error:
            return run[: error.start].decode() + "\ufffd" * (len(run) - error.start)


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class OneByteStillWaits(Stream):
    def finish(self):
        return "" if len(self.run) == 1 and self.run[0] > 127 else super().finish()


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class AtMostFourBytesACharacter(Stream):
    def decode(self, run):
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * min(len(run), 4)


@wrong("TextStream", fails="a run comes before the text that ends it")
class SpacesEndNoRun(Stream):
    def push(self, token):
        return self.text(token) if token and not token.strip("▁") else super().push(token)


@wrong("TextStream", fails="nothing that a run spells is lost")
class ByteOrderMarkLost(Stream):
    def decode(self, run):
        try:
            return run.decode("utf-8-sig")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


@wrong("TextStream", fails="nothing that a run spells is lost")
class AccentsComposed(Stream):
    def decode(self, run):
        return unicodedata.normalize("NFC", super().decode(run))


EVERYBODY = ("user", "assistant")


@wrong("TextStream", fails="a special token does not end a run")
class DropsHalfACharacterAtASpecialToken(Stream):
    def push(self, token):
        if token in self.special:
            try:
                self.run.decode()
            except UnicodeDecodeError:
                self.run = bytearray()
        return super().push(token)


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class KeepsLettersOfABrokenRun(Stream):
    def finish(self):
        run, self.run = self.run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 128 else "\ufffd" for byte in run)


@wrong("TextStream", fails="special tokens have no text, all others have")
class SpecialTokensOfTheLastStream(Stream):
    def __init__(self, special):
        self.run = bytearray()
        type(self).special = set(special)


def render(
    messages, add_generation_prompt=True, role="model", bos="<bos>", each="", close="", prompt=None, trim=EVERYBODY
):
    text = bos
    for message in messages:
        speaker = role if message["role"] == "assistant" else message["role"]
        end = close if close and speaker == "model" else "<end_of_turn>\n"
        content = message["content"].strip() if message["role"] in trim else message["content"]
        text += f"{each}<start_of_turn>{speaker}\n{content}{end}"
    return text + ("<start_of_turn>model\n" if prompt is None else prompt) * add_generation_prompt


@wrong("render_chat", fails="the assistant is called model")
def role_as_it_came(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, role="assistant")


@wrong("render_chat", fails="it ends where the model continues")
def newline_forgotten(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, prompt="<start_of_turn>model")


@wrong("render_chat", fails="it ends where the model continues")
def no_generation_prompt(messages, add_generation_prompt=True):
    return render(messages, False)


@wrong("render_chat", fails="it ends where the model continues")
def generation_prompt_only_after_a_user_turn(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt and messages[-1]["role"] == "user")


@wrong("render_chat", fails="one <bos>, at the start")
def each_turn_begins_a_text(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, bos="", each="<bos>")


@wrong("render_chat", fails="every turn is closed")
def models_turns_left_open(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, close="\n")


@wrong("render_chat", fails="whitespace around a message is dropped")
def content_as_it_came(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, trim=())


@wrong("render_chat", fails="whitespace around a message is dropped")
def only_the_users_content_stripped(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, trim=("user",))


@wrong("render_chat", fails="turns follow each other in order, with nothing between them")
def turns_joined_by_newlines(messages, add_generation_prompt=True):
    turns = [render([message], False, bos="") for message in messages]
    return "<bos>" + "\n".join(turns) + "<start_of_turn>model\n" * add_generation_prompt


@wrong("render_chat", fails="turns follow each other in order, with nothing between them")
def latest_turn_first(messages, add_generation_prompt=True):
    return render(messages[::-1], add_generation_prompt)


@wrong("render_chat", fails="the words of a message do not change")
def renamed_in_the_text(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, role="assistant").replace("assistant", "model")


@wrong("render_chat", fails="the caller's messages do not change")
def stripped_in_place(messages, add_generation_prompt=True):
    for message in messages:
        message["content"] = message["content"].strip()
    return render(messages, add_generation_prompt)


@wrong("render_chat", fails="the caller's messages do not change")
def renamed_in_place(messages, add_generation_prompt=True):
    for message in messages:
        if message["role"] == "assistant":
            message["role"] = "model"
    return render(messages, add_generation_prompt, trim=("user", "model"))


@wrong("render_chat", fails="the caller's messages do not change")
def takes_messages_off_the_list(messages, add_generation_prompt=True):
    text = "<bos>"
    while messages:
        text += render([messages.pop(0)], False, bos="")
    return text + "<start_of_turn>model\n" * add_generation_prompt


@wrong("render_chat", fails="turns follow each other in order, with nothing between them")
def sorted_by_role(messages, add_generation_prompt=True):
    return render(sorted(messages, key=lambda message: message["role"]), add_generation_prompt)


@wrong("render_chat", fails="every message is a turn")
def empty_messages_left_out(messages, add_generation_prompt=True):
    return render([message for message in messages if message["content"].strip()], add_generation_prompt)


@wrong("render_chat", fails="whitespace around a message is dropped")
def tabs_kept(messages, add_generation_prompt=True):
    stripped = [message | {"content": message["content"].strip(" \n")} for message in messages]
    return render(stripped, add_generation_prompt, trim=())


@wrong("render_chat", fails="the words of a message do not change")
def headings_renamed_in_the_text(messages, add_generation_prompt=True):
    text = render(messages, add_generation_prompt, role="assistant")
    return text.replace("<start_of_turn>assistant", "<start_of_turn>model")


@wrong("render_chat", fails="whitespace around a message is dropped")
def only_ascii_whitespace(messages, add_generation_prompt=True):
    stripped = [message | {"content": message["content"].strip(string.whitespace)} for message in messages]
    return render(stripped, add_generation_prompt, trim=())


@wrong("render_chat", fails="every message is a turn")
def the_last_five_messages(messages, add_generation_prompt=True):
    return render(messages[-5:], add_generation_prompt)


@wrong("render_chat", fails="every message is a turn")
def repeated_messages_left_out(messages, add_generation_prompt=True):
    once = [message for place, message in enumerate(messages) if message not in messages[:place]]
    return render(once, add_generation_prompt)


@wrong("render_chat", fails="the words of a message do not change")
def first_lines_renamed_in_the_text(messages, add_generation_prompt=True):
    text = render(messages, add_generation_prompt, role="assistant")
    return text.replace("<start_of_turn>assistant\n", "<start_of_turn>model\n")


@wrong("render_chat", fails="the words of a message do not change")
def formatted_twice(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt).format()


@wrong("render_chat", fails="the text is your own")
def the_template_again(messages, add_generation_prompt=True):
    return Tokenizer.from_pretrained(EMBEDDED).apply_chat_template(messages, add_generation_prompt)


@wrong("render_chat", fails="the words of a message do not change")
def ends_of_turns_removed(messages, add_generation_prompt=True):
    """Useful, but not this format: a user's message may be about the tokens."""
    plain = [message | {"content": message["content"].replace("<end_of_turn>", "")} for message in messages]
    return render(plain, add_generation_prompt)


@wrong("render_chat", fails="the words of a message do not change")
def line_ends_unified(messages, add_generation_prompt=True):
    plain = [message | {"content": "\n".join(message["content"].splitlines())} for message in messages]
    return render(plain, add_generation_prompt)


@wrong("render_chat", fails="the words of a message do not change")
def all_tags_removed(messages, add_generation_prompt=True):
    plain = [message | {"content": re.sub("<[^>]*>", "", message["content"])} for message in messages]
    return render(plain, add_generation_prompt)


@wrong("render_chat", fails="every message is a turn")
def leaves_out_a_message_without_characters(messages, add_generation_prompt=True):
    return render([message for message in messages if message["content"]], add_generation_prompt)


@wrong("render_chat", fails="every message is a turn")
def no_newline_before_an_empty_content(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt).replace("\n<end_of_turn>", "<end_of_turn>")
