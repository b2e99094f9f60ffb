"""Decode a stream of tokens.  Lesson 01."""

from collections.abc import Iterable

from .tokenizer import Tokenizer


class StreamingDetokenizer:
    """Decodes ids as they arrive, and returns each piece of text once, never half a character.  Lesson 01.

    The texts of all `add` calls and the final `flush` together equal `tokenizer.decode` of all ids. A run of byte
    tokens is returned when it ends. Ids that only the model has (a padded vocabulary) have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = tokenizer.new_decoder()

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, possibly empty."""
        return self._decoder.push(self._tokenizer.visible_tokens(ids, self._skip_special_tokens))

    def flush(self) -> str:
        """The rest of the text, with incomplete characters as U+FFFD. Afterwards another sequence can start."""
        decoder, self._decoder = self._decoder, self._tokenizer.new_decoder()
        return decoder.finish()
