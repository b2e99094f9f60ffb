"""Show tokens in responses: their strings, their bytes, and where they begin in the text.  Lesson 99."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from minillm.engine.output_text import OutputText
from minillm.tokenizer import Tokenizer, TokenizerError

LOWEST = -9999.0  # JSON has no -inf
_SPACE = re.compile(r"\s*")
Shown = tuple[str, list[int] | None]  # a string, and the UTF-8 bytes that the token adds to the text


class TokenText(NamedTuple):
    """A token as it is shown."""

    piece: str  # as the vocabulary has it: "▁is", "Ġis"
    inside: Shown  # in a text: " is"
    first: Shown  # as a text's first token, whose space some decoders strip: "is"
    in_text: bool  # whether texts have it: False for special tokens


class TokenTexts:
    """The strings and bytes of token ids, as reported with log-probabilities; cached in `seen`.

    A part of a character is shown as OpenAI's completions do, bytes:\\xf0\\x9f. A special token has a string, but no
    bytes, since no text has it: the bytes of a text's tokens, joined, are the text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.seen: dict[int, TokenText] = {}

    def __call__(self, token: int, first: bool = False) -> str:
        return self.shown(token, first)[0]

    def entry(self, token: int, logprob: float, first: bool = False) -> dict:
        """Return an entry of a chat's log-probabilities. first: whether the token begins the text."""
        text, data = self.shown(token, first)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": data}

    def shown(self, token: int, first: bool = False) -> Shown:
        text = self.of(token)
        return text.first if first else text.inside

    def unknown(self, tokens: Iterable[int]) -> list[int]:
        """Return the tokens that are not cached and cannot be looked up, because there is no tokenizer."""
        return [token for token in set(tokens) if token not in self.seen] if self.tokenizer is None else []

    def of(self, token: int) -> TokenText:
        if token not in self.seen:
            self.seen[token] = self._read(token)
        return self.seen[token]

    def have_text(self, tokens: Iterable[int]) -> bool:
        """Return whether a text of these tokens has begun: all but special tokens begin one."""
        return any(self.of(token).in_text for token in tokens)

    def firsts(self, tokens: Iterable[int], begun: bool) -> Iterator[bool]:
        """Return for each token whether it begins the text, which has begun already if `begun`."""
        for token in tokens:
            yield not begun
            begun = begun or self.of(token).in_text

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Return where each of a text's tokens begins in it, in characters."""
        if self.tokenizer is None:
            return [0] * len(tokens)
        output = OutputText(self.tokenizer, locates=True)
        output.add(tokens)
        assert output.offsets is not None
        return output.offsets

    def prompt_offsets(self, tokens: Sequence[int], prompt: str, written: bool) -> list[int]:
        """Return where each token begins in the text of an echoed prompt; never at its end, where the output begins.

        written: whether the client wrote this text. It has the special tokens that the client wrote, but not those that
        the tokenizer added, like <bos>. If the tokenizer rewrites texts (to lower case, say), offsets are approximate.
        """
        offsets = self.offsets(tokens)
        added = len(getattr(self.tokenizer, "prefix", ()))  # of the first tokens: the client may have written them too
        more, seen = 0, 0  # characters of special tokens so far, and how many
        for i, token in enumerate(tokens if written else ()):
            offsets[i] += more
            shown = self.of(token)
            if not shown.in_text and i >= added:
                # It may have taken the spaces before it, or put one before each text after a special token.
                last = _SPACE.match(prompt, offsets[i]).end()  # type: ignore[union-attr]
                start = prompt.find(shown.piece, max(offsets[i] - seen, 0), last + len(shown.piece))
                if start >= 0:
                    more += start + len(shown.piece) - offsets[i]
                    offsets[i] = start
                seen += 1
        return [min(offset, max(len(prompt) - 1, 0)) for offset in offsets]

    def _read(self, token: int) -> TokenText:
        unknown: Shown = (f"token_id:{token}", None)
        if self.tokenizer is None:
            return TokenText(unknown[0], unknown, unknown, False)
        try:
            piece = self.tokenizer.token(token)
        except TokenizerError:  # a padded vocabulary has ids without a token
            return TokenText(unknown[0], unknown, unknown, False)
        if not list(self.tokenizer.visible_tokens([token], True)):
            special: Shown = (self.tokenizer.decode([token], skip_special_tokens=False), None)
            return TokenText(piece, special, special, False)
        return TokenText(piece, self._show(token, ["a"]), self._show(token, []), True)

    def _show(self, token: int, before: list[str]) -> Shown:
        """Return the token's text and bytes after these tokens."""
        assert self.tokenizer is not None
        texts = []
        for tokens in (before, [*before, *self.tokenizer.visible_tokens([token], False)]):
            decoder = self.tokenizer.new_decoder()
            texts.append(decoder.push(tokens) + decoder.finish())
        text = texts[1].removeprefix(texts[0])
        if "\ufffd" not in text:
            return text, list(text.encode())
        data = self.tokenizer.token_bytes(token)
        if data is None or data == text.encode():
            return text, None if data is None else list(data)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


def complete_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of these ids, without an incomplete character at its end, which more ids may complete."""
    decoder = tokenizer.new_decoder()
    return decoder.push(tokenizer.visible_tokens(ids, True)) + decoder.settle()
