"""Decode a stream of tokens.  Lesson 01."""

import os.path
from collections.abc import Iterable, Sequence

from .decoders import byte_of
from .tokenizer import Tokenizer

# Of the prompt, this many tokens with text are read before the run of byte tokens at its end: a decoder that streams
# holds at most three bytes of a character or a few spaces, and otherwise knows only whether a text has begun.
CONTEXT = 8


class StreamingDetokenizer:
    """Decodes ids as they arrive, and returns each piece of text once, never half a character.  Lesson 01.

    The texts of all `add` calls and the final `flush` together equal `tokenizer.decode` of all ids. A run of byte
    tokens is returned when it ends. Ids that only the model has (a padded vocabulary) have no text.

    after      ids of a text that these ids continue: what is returned is `tokenizer.decode` of both, without the text
               of `after`. A word at the start keeps its space, and a character that `after` began is returned whole
    keeps_rest whether to return the text of an incomplete character in which `after` ends, even if none completes it
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        keeps_rest: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = tokenizer.new_decoder()
        self._old = ""  # text of `after` that is still to come
        if len(after):
            self._decoder.push(self._last_tokens(after))
            self._decoder.settle()
            if not keeps_rest:
                self._old = self._decoder.peek("finish")

    def _last_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens at the end of `ids` that bring a new decoder into the state that all of them would."""
        withheld: list[str] = []
        left = len(ids) if self._decoder.needs_all else CONTEXT
        for token in self._tokenizer.visible_tokens(reversed(ids), self._skip_special_tokens):
            withheld.append(token)
            left -= byte_of(token) is None
            if not left:
                break
        return withheld[::-1]

    def add(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete, possibly empty."""
        return self._new(self._decoder.push(self._tokenizer.visible_tokens(ids, self._skip_special_tokens)))

    def flush(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD. Afterwards another sequence can start."""
        decoder, self._decoder = self._decoder, self._tokenizer.new_decoder()
        text, self._old = self._new(decoder.finish()), ""
        return text

    @property
    def pending(self) -> str:
        """Complete characters that are held back: if no broken byte follows, the next text starts with them."""
        text = self._decoder.peek()
        return text[_common(text, self._old) :]

    def _new(self, text: str) -> str:
        """Cut off the text of `after`, as far as it is still the same."""
        if self._old and text:
            same = _common(text, self._old)
            self._old = self._old[same:] if same == len(text) else ""
            text = text[same:]
        return text


def _common(a: str, b: str) -> int:
    return len(os.path.commonprefix((a, b))) if a and b else 0
