"""Text while it is being generated.  Lesson 01."""

from collections.abc import Iterable

from .tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns ids into text as they arrive: each piece once, never half a character.  Lesson 01.

    What all `add` calls and the final `flush` return, joined, is `tokenizer.decode` of all the ids. A run of byte
    tokens is given out when it ends. Ids that the model has but the tokenizer lacks (a padded vocabulary) have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = tokenizer.new_decoder()

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, possibly none."""
        return self._decoder.push(self._tokenizer.visible_tokens(ids, self._skip_special_tokens))

    def flush(self) -> str:
        """The text still held back: unfinished characters come out as U+FFFD. Ready for another sequence after it."""
        decoder, self._decoder = self._decoder, self._tokenizer.new_decoder()
        return decoder.finish()
